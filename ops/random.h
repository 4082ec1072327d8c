#pragma once
// Random tensors: the same values on every device for the same seed (core/random.h).
#include "halftone/core/op.h"
#include "halftone/core/random.h"

namespace halftone {

namespace op {
extern HT_API OpDef uniform, normal, integers, permutation, draw_key, dropout, bernoulli, multinomial;
}
struct DrawRange { double a, b; };  // uniform: low, high; normal: mean, standard deviation
struct IntegerRange { int64_t low; uint64_t count; };

// Uniform in [0, 1); standard normal.
HT_API Tensor rand(const Shape& shape, const TensorOptions& o = {});
HT_API Tensor randn(const Shape& shape, const TensorOptions& o = {});
// Writes draws into x: uniform in [low, high), or normal.
HT_API Tensor uniform_(const Tensor& x, double low = 0, double high = 1);
HT_API Tensor normal_(const Tensor& x, double mean = 0, double std = 1);
// Integers uniform in [low, high), i64 unless given; each from 64 random bits.
HT_API Tensor randint(int64_t low, int64_t high, const Shape& shape, const TensorOptions& o = {});
// 0 to n - 1 in random order, i64.
HT_API Tensor randperm(Size n, const TensorOptions& o = {});

// x with elements set to 0 with probability p and the others divided by 1 - p; x itself when p is 0 or this is not training.
// What is dropped follows from a key of two numbers, which is all that the gradient needs to know.
HT_API Tensor dropout(const Tensor& x, double p = 0.5, bool training = true);
// Whole channels: of x [n, c, l] or [c, l]; of x [n, c, h, w] or [c, h, w].
HT_API Tensor dropout1d(const Tensor& x, double p = 0.5, bool training = true);
HT_API Tensor dropout2d(const Tensor& x, double p = 0.5, bool training = true);
// 1 with the probability of each element of p, else 0, in p's dtype.
HT_API Tensor bernoulli(const Tensor& p);
struct MultinomialOptions { bool replacement = false; };
// `count` indices (i64) drawn with probabilities proportional to the elements of weights [n], or of each row of [m, n]. They
// must be finite and 0 or more with a positive sum; without replacement, at least `count` must be positive.
HT_API Tensor multinomial(const Tensor& weights, Size count, MultinomialOptions o = {});

// The place of `numbers` draws in the stream of a device: {seed, first block} as an i64 tensor, after which the stream goes on.
// Operators that take a key are functions of it, which a gradient may call again.
HT_API Tensor draw_key(Device device, int64_t numbers);

struct DropoutAttrs {
  double p;
  int64_t together;  // so many neighbours are kept or dropped as one
};
struct MultinomialAttrs { int64_t count; bool replacement; };

// Element i of a draw by key, for element x: from the uniform number u.
struct Dropout {
  double p, scale;
  explicit Dropout(double q) : p(q), scale(q < 1 ? 1 / (1 - q) : 0) {}
  template <class C> HT_HD C operator()(C x, float u) const { return u >= p ? x * static_cast<C>(scale) : C(0); }
};
struct Bernoulli {
  template <class C> HT_HD C operator()(C x, float u) const { return C(u < x); }
};

namespace detail {

// Number i of those that take 64 bits: two words of block first + i / 2.
HT_HD inline uint64_t random_bits(uint64_t seed, uint64_t first, uint64_t i) {
  const Philox4 block = philox(seed, first + i / 2);
  const uint32_t* w = block.v + 2 * (i % 2);
  return uint64_t{w[0]} << 32 | w[1];
}
// The upper half of a product.
HT_HD inline uint64_t high_product(uint64_t a, uint64_t b) {
  const uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
  const uint64_t middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + (middle & 0xffffffffu);
  return a1 * b1 + (middle >> 32) + (other >> 32);
}
HT_HD inline int64_t draw_integer(uint64_t bits, const IntegerRange& r) {
  return static_cast<int64_t>(static_cast<uint64_t>(r.low) + high_product(bits, r.count));
}

// Cumulated weights are summed in chunks of this many, then chunk by chunk: in one order on every device.
inline constexpr int64_t cumulated = 256;
// Of a row of n weights: sums within each chunk up to and with an element, and what lies before each chunk.
HT_HD inline int64_t choose(const double* within, const double* before, int64_t n, double total, uint64_t bits) {
  double at = static_cast<double>(bits >> 11) * 0x1p-53 * total;
  if (!(at < total)) at = total * (1 - 0x1p-52);
  int64_t low = 0, high = (n + cumulated - 1) / cumulated - 1;
  while (low < high) {  // the first chunk that ends above
    const int64_t c = (low + high) / 2;
    if (before[c] + within[c * cumulated + cumulated - 1] > at) high = c;
    else low = c + 1;
  }
  int64_t i = low * cumulated;
  while (i + 1 < n && !(before[low] + within[i] > at)) ++i;
  return i;
}
// When an element of this weight comes up: the first `count` of all are a draw without replacement (Efraimidis and
// Spirakis, "Weighted random sampling with a reservoir", 2006). Weights of 0 never do.
HT_HD inline double arrival(double weight, uint64_t bits) {
  return weight > 0 ? -::log((static_cast<double>(bits >> 11) + 0.5) * 0x1p-53) / weight : HUGE_VAL;
}

}  // namespace detail

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
