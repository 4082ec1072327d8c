#pragma once
// Products of matrices for the host functions of other kernels.
#include "halftone/core/tensor.h"

namespace halftone::cuda {

// y = a b + bias + addend: a is [m, k] and b [k, n], or their transposes where they are `turned`, in 16 bits or f32; bias [n] and addend,
// of y's shape and dtype and not y itself, may be undefined. Sums are f32, rounded once to y's dtype, which is that of a and b or f32;
// y and the addend have no gaps. False where cuBLASLt has no kernel for it, or with an addend no fast one.
bool product(const Tensor& a, bool a_turned, const Tensor& b, bool b_turned, const Tensor& bias, const Tensor& y, const Tensor& addend = {});

}  // namespace halftone::cuda
