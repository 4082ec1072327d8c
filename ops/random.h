#pragma once
// Random tensors: the same values on every device for the same seed (core/random.h).
#include "halftone/core/op.h"
#include "halftone/core/random.h"

namespace halftone {

namespace op {
extern HT_API OpDef uniform, normal, permutation;
}
struct DrawRange { double a, b; };  // uniform: low, high; normal: mean, standard deviation

// Uniform in [0, 1); standard normal.
HT_API Tensor rand(const Shape& shape, const TensorOptions& o = {});
HT_API Tensor randn(const Shape& shape, const TensorOptions& o = {});
// Writes draws into x: uniform in [low, high), or normal.
HT_API Tensor uniform_(const Tensor& x, double low = 0, double high = 1);
HT_API Tensor normal_(const Tensor& x, double mean = 0, double std = 1);
// Integers uniform in [low, high), i64 unless given.
HT_API Tensor randint(int64_t low, int64_t high, const Shape& shape, const TensorOptions& o = {});
// 0 to n - 1 in random order, i64.
HT_API Tensor randperm(Size n, const TensorOptions& o = {});

// Box and Muller (1958) on two uniforms, in f64 and then rounded to a float, so that every device has the same value. Element i of a draw takes
// word i % 4 of the Philox block at offset + i / 4; words pair up as (0, 1) and (2, 3).
HT_HD inline double normal_from(const Philox4& block, int word) {
  double u = (block.v[word & 2] + 0.5) * 0x1p-32, v = (block.v[(word & 2) + 1] + 0.5) * 0x1p-32;
  double radius = ::sqrt(-2 * ::log(u)), angle = 6.283185307179586476925 * v;
  return static_cast<float>(radius * ((word & 1) ? ::sin(angle) : ::cos(angle)));
}

// A draw in its range, as T. A rounded uniform that would reach the open end takes the closed one's side of it.
template <class T, bool normal> HT_HD T draw_value(double u, const DrawRange& range) {
  // fma by name: left to themselves, compilers for some devices would make one here and others would not.
  if constexpr (normal) return T(::fma(u, range.b, range.a));
  else {
    T v = T(::fma(u, range.b - range.a, range.a));
    return static_cast<double>(v) < range.b ? v : T(range.a);
  }
}

}  // namespace halftone
