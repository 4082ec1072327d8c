#pragma once
// The CUDA side of core's Backend.

namespace halftone::cuda {

// Makes CUDA the backend of DeviceType::cuda; false, with the reason on record, when this machine has no usable GPU.
bool start();

}  // namespace halftone::cuda
