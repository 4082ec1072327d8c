#pragma once
// Matrix products on the CPU, by Eigen. Internal to ops/*.cpp.
#include <cstdint>

namespace halftone {

// A matrix in memory, any strides (in elements).
template <class T> struct MatrixView { const T* data; int64_t row_stride, column_stride; };

// y [m, n], row-major and dense, = a [m, k] times b [k, n]. Work is cut by size only.
// 16-bit elements are widened to float first, and products accumulate in float; T is half, bfloat16, float or double.
template <class T, class Y> void gemm(MatrixView<T> a, MatrixView<T> b, Y* y, int64_t m, int64_t n, int64_t k);

}  // namespace halftone
