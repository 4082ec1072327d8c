#pragma once
// Products of matrices for the host functions of other kernels.
#include "halftone/core/tensor.h"

namespace halftone::cuda {

// y = a b + bias: a is [m, k] and b [k, n], or their transposes where they are `turned`, in 16 bits or f32; bias [n] may be undefined.
// Sums are f32, rounded once to y's dtype, which is that of a and b or f32; y has no gaps. False where cuBLASLt has no kernel for it.
bool product(const Tensor& a, bool a_turned, const Tensor& b, bool b_turned, const Tensor& bias, const Tensor& y);

}  // namespace halftone::cuda
