#pragma once
// The reductions that NCCL does not have: sums of 16-bit values that round once, extrema that keep a NaN.
#include "halftone/core/tensor.h"

namespace halftone::cuda {

// y[i] = x[0][i] + x[1][i] + ... in f32, in this order, divided by the number of ranks for a mean. f16 or bf16.
void sum_ranks(DType dtype, const void* x, void* y, int64_t n, int ranks, bool mean);
// Integers in the order of the values: i32 of 16- and 32-bit values, i64 of f64. A NaN lies above all for a maximum, below all
// for a minimum.
void to_keys(DType dtype, const void* x, void* keys, int64_t n, bool maximum);
void from_keys(DType dtype, const void* keys, void* x, int64_t n);

}  // namespace halftone::cuda
