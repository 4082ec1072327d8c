#pragma once
// The convolutions' own kernels, which answer where no library is faster: internal to cuda/.
#include "halftone/core/op.h"

namespace halftone::cuda {

void run_conv(const Call& c, std::span<Tensor> out);
void run_conv_relu(const Call& c, std::span<Tensor> out);
void run_conv_input(const Call& c, std::span<Tensor> out);
void run_conv_weight(const Call& c, std::span<Tensor> out);

}  // namespace halftone::cuda
