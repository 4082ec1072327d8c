#pragma once
// Elementwise functions of three tensors, of which the second and third may be numbers; dtypes and shapes as in binary.h.
// To add one: its struct here, its line in All, and its function.
#include "halftone/ops/binary.h"

namespace halftone {

// From a (weight 0) to b (weight 1) along a line.
HT_API Tensor lerp(const Tensor& a, const Operand& b, const Operand& weight);
// x + value * a * b, and x + value * a / b.
HT_API Tensor addcmul(const Tensor& x, const Operand& a, const Operand& b, double value = 1);
HT_API Tensor addcdiv(const Tensor& x, const Operand& a, const Operand& b, double value = 1);
// x, but at least low, and then at most high; NaN if one is NaN. For one bound alone: maximum, minimum.
HT_API Tensor clamp(const Tensor& x, const Operand& low, const Operand& high);

namespace ternary {

inline constexpr Saves saves_all{.in = 7, .out = 0}, saves_last_two{.in = 6, .out = 0};

struct Lerp {
  static constexpr auto name = "lerp", doc = "a + c * (b - a)";
  static constexpr Cast cast = Cast::widest;
  static constexpr Saves saves = saves_all;
  template <class T> HT_HD static T f(T a, T b, T c) { return c < T(0.5) ? a + c * (b - a) : b - (b - a) * (T(1) - c); }  // exact at both ends
  static Tensor da(const Operand&, const Operand&, const Operand& c, const Tensor&, const Tensor& g) { return g - g * c; }
  static Tensor db(const Operand&, const Operand&, const Operand& c, const Tensor&, const Tensor& g) { return g * c; }
  static Tensor dc(const Operand& a, const Operand& b, const Operand&, const Tensor&, const Tensor& g) { return g * (b - a); }
};
struct Addcmul {
  double value;
  static constexpr auto name = "addcmul", doc = "a + value * b * c";
  static constexpr Cast cast = Cast::widest;
  static constexpr Saves saves = saves_last_two;
  static constexpr Addcmul example() { return {0.6}; }
  template <class T> HT_HD T f(T a, T b, T c) const { return a + T(value) * (b * c); }
  static Tensor da(const Operand&, const Operand&, const Operand&, const Tensor&, const Tensor& g) { return g; }
  Tensor db(const Operand&, const Operand&, const Operand& c, const Tensor&, const Tensor& g) const { return g * c * value; }
  Tensor dc(const Operand&, const Operand& b, const Operand&, const Tensor&, const Tensor& g) const { return g * b * value; }
};
struct Addcdiv {
  double value;
  static constexpr auto name = "addcdiv", doc = "a + value * b / c";
  static constexpr Cast cast = Cast::widest;
  static constexpr Saves saves = saves_last_two;
  static constexpr double low = 0.5, high = 3;
  static constexpr Addcdiv example() { return {0.6}; }
  template <class T> HT_HD T f(T a, T b, T c) const { return a + T(value) * (b / c); }
  static Tensor da(const Operand&, const Operand&, const Operand&, const Tensor&, const Tensor& g) { return g; }
  Tensor db(const Operand&, const Operand&, const Operand& c, const Tensor&, const Tensor& g) const { return g / c * value; }
  Tensor dc(const Operand&, const Operand& b, const Operand& c, const Tensor&, const Tensor& g) const { return g / c * (b / c) * -value; }
};
// The gradient goes to the one that the result is; at a tie, to the first.
struct Clamp {
  static constexpr auto name = "clamp", doc = "a, but at least b, and then at most c; NaN if one is NaN";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_all;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T a, T b, T c) { return binary::Minimum::f(binary::Maximum::f(a, b), c); }
  static Tensor da(const Operand& a, const Operand& b, const Operand& c, const Tensor&, const Tensor& g) {
    return where(logical_and(ge(a, b), le(a, c)), g, 0);
  }
  static Tensor db(const Operand& a, const Operand& b, const Operand& c, const Tensor&, const Tensor& g) {
    return where(logical_and(lt(a, b), le(b, c)), g, 0);
  }
  static Tensor dc(const Operand& a, const Operand& b, const Operand& c, const Tensor&, const Tensor& g) {
    return where(gt(maximum(a, b), c), g, 0);
  }
};

using All = elementwise::List<Lerp, Addcmul, Addcdiv, Clamp>;

}  // namespace ternary
}  // namespace halftone
