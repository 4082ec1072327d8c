#pragma once
// What the kernels of norms share: statistics of a channel or a row, and the gradients of weights and biases.
#include "halftone/cuda/channel_sums.cuh"
#include "halftone/cuda/numeric.cuh"
#include "halftone/ops/copy.h"

namespace halftone::cuda {

// Moments are taken about the first element, in f64 for f32 and in f32 for 16-bit elements, so that one pass is enough and a large mean
// costs no digits.
template <class T> using moment_t = std::conditional_t<is_16bit<T>, float, double>;

// Column k of an operator's statistics [3, count]: mean, rest of it, 1 / sqrt(var + eps).
template <class W> struct Statistics {
  W mean, rest, rstd;
  Statistics() = default;
  __device__ Statistics(const W* from, int64_t count, int64_t k) : mean(from[k]), rest(from[count + k]), rstd(from[2 * count + k]) {}
  __device__ W normal(W x) const { return ((x - mean) - rest) * rstd; }
};

// Weights and the like in the dtype that kernels compute in; null when there are none.
struct Vector {
  Tensor tensor;
  Vector(const Call& c, size_t i, DType t) : tensor(c.has(i) ? cast(c.in[i], t).contiguous() : Tensor()) {}
  template <class W> const W* data() const { return tensor.defined() ? tensor.data<W>() : nullptr; }
};

// A weight's or bias's gradient, in its dtype: T or the wide one.
template <class T> struct Gradient {
  void* data = nullptr;  // null: not wanted
  bool narrow = false;
  __device__ void put(int64_t c, wide_t<T> v) const {
    if (!data) return;
    if (narrow) static_cast<T*>(data)[c] = to<T>(v);
    else static_cast<wide_t<T>*>(data)[c] = v;
  }
};
template <class T> Gradient<T> gradient(const Tensor& t, bool wanted) { return {wanted ? t.raw_data() : nullptr, t.dtype() == dtype_of<T>}; }

// Sums of g * normal(x) and of g: the gradients of weight and bias.
template <class T> struct Products {
  using W = wide_t<T>;
  using Sum = Pair<W>;
  static constexpr bool reads_both = true;
  Gradient<T> dw, db;
  __device__ void finish(Sum s, int64_t c) const {
    dw.put(c, s.a);
    db.put(c, s.b);
  }
};

}  // namespace halftone::cuda
