#pragma once
// Linear layers too small for a library's kernels: see small_linear.cu. Each returns false when it is not for them.
#include "halftone/core/op.h"

namespace halftone::cuda {

// y = x w^T + bias (which may be undefined), or relu of it.
bool small_linear(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& y, bool relu);
// A call of op::linear_grad.
bool small_linear_grad(const Call& c, std::span<Tensor> out);

}  // namespace halftone::cuda
