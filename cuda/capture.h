#pragma once
// Captured steps on CUDA: core's CapturePlan by way of CUDA graphs.
#include "halftone/core/capture.h"

namespace halftone::cuda {

std::unique_ptr<CapturePlan> make_plan(const CaptureOptions& options);

}  // namespace halftone::cuda
