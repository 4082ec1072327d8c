#pragma once
// Matrix products on the CPU: cut into blocks of the result, each the work of one thread, by oneDNN where it is in the build,
// else by Eigen. Internal to the library.
#include <cstdint>

#include "halftone/core/dtype.h"

namespace halftone {

class Storage;

// A matrix in memory, any strides (in elements).
template <class T> struct MatrixView {
  const T* data;
  int64_t row_stride, column_stride;
  Storage* lasting = nullptr;  // where it lies, if products to come may read it as well: a copy that they need is kept (core/packed.h)
};

// A block of the result, its rows `pitch` apart.
struct Block { int64_t row, column, rows, columns, pitch; };
// What is done to a block as soon as it is computed, while it is in the cache: f(its first element, block).
template <class Y> struct Finish {
  void (*run)(const void* f, Y* y, const Block& block) = nullptr;
  const void* f = nullptr;
  Finish() = default;
  template <class F> explicit Finish(const F& with)
      : run([](const void* p, Y* y, const Block& block) { (*static_cast<const F*>(p))(y, block); }), f(&with) {}
};

// y [m, n], row-major and dense, = a [m, k] times b [k, n]. Work is cut by size only. With y null, blocks lie in memory of
// their own, for `finish` to take them from.
// Products accumulate in float (double for double); 16-bit elements are widened first where no unit multiplies them.
template <class T, class Y> void gemm(MatrixView<T> a, MatrixView<T> b, Y* y, int64_t m, int64_t n, int64_t k, Finish<Y> finish = {});

// y [m, n], rows `pitch` apart, = a b on the calling thread alone, where the operands' column strides are 1 and k > 0. A library fills these
// with what beats Eigen; null: Eigen's.
template <class T> using BlockProduct = void (*)(MatrixView<T> a, MatrixView<T> b, float* y, int64_t pitch, int64_t m, int64_t n, int64_t k);
struct BlockProducts {
  BlockProduct<float> f32 = nullptr;
  BlockProduct<bfloat16> bf16 = nullptr;
  BlockProduct<half> f16 = nullptr;
};
BlockProducts& block_products();
// Whether the CPU multiplies a 16-bit dtype as it is.
inline bool multiplies_natively(DType t) { return (t == DType::bf16 && block_products().bf16) || (t == DType::f16 && block_products().f16); }

}  // namespace halftone
