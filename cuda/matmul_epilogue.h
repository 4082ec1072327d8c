#pragma once
// What follows a product when cuBLASLt cannot do it: bias, activation, rounding.
#include "halftone/core/dtype.h"

namespace halftone::cuda {

enum class Activation { none, relu, gelu };

// y = activation(z + bias), and `before` = z + bias, each [rows, n], contiguous, of `dtype`, rounded once. z is f64 for
// f64 and f32 otherwise; it may be y. bias [n] of `dtype` and `before` may be null.
void finish(const void* z, const void* bias, void* y, void* before, DType dtype, int64_t rows, int64_t n,
            Activation activation);

}  // namespace halftone::cuda
