#pragma once
// Elementwise functions of two tensors, or a tensor and a number, with broadcasting as in NumPy.
// To add one: its struct here, and its line in HT_BINARY_OPS.
//
// Operands of any number meet in one dtype. Kinds are bool < integer < floating:
//   tensors of one kind             the widest; f16 with bf16 is f32
//   tensors of different kinds      the dtype (the widest) of the highest kind: i64 with f16 is f16
//   0-d tensors beside larger ones  count only when their kind is higher: f16 with a 0-d f64 is f16, i32 with a 0-d f64 is f64
//   a number beside a tensor        never raises a dtype within its kind; 1.5 makes bool and integers f32;
//                                   a whole number makes bool i64, but for 0 and 1, which are true and false
// What an operator does not take becomes i64 (bool) or f32. A 0-d CPU tensor may meet tensors of any device.
#include "halftone/ops/unary.h"

// X(function, struct): each becomes `Tensor function(const Operand& a, const Operand& b)`.
#define HT_BINARY_OPS(X)                                                                                             \
  X(add, Add) X(sub, Sub) X(mul, Mul) X(div, Div) X(maximum, Maximum) X(minimum, Minimum) X(relu_grad, ReluGrad)           \
  X(pow, Pow) X(atan2, Atan2) X(fmod, Fmod) X(eq, Eq) X(ne, Ne) X(lt, Lt) X(le, Le) X(gt, Gt) X(ge, Ge)                    \
  X(logical_and, LogicalAnd) X(logical_or, LogicalOr) X(logical_xor, LogicalXor)

namespace halftone {

#define HT_DECLARE(function, Op) HT_API Tensor function(const Operand& a, const Operand& b);
HT_BINARY_OPS(HT_DECLARE)
#undef HT_DECLARE
// condition ? a : b elementwise, broadcast; condition is bool. The branch not taken still has a gradient, 0 times its own
// slope: where that is infinite, NaN comes of it. Mask what goes into the branch as well.
HT_API Tensor where(const Tensor& condition, const Operand& a, const Operand& b);
// x, with `value` where the mask is true; in x's dtype.
HT_API Tensor masked_fill(const Tensor& x, const Tensor& mask, const Operand& value);

namespace binary {

inline constexpr Saves saves_inputs{.in = 3, .out = 0}, saves_all{.in = 3, .out = 1}, saves_none{};

struct Add {
  static constexpr auto name = "add", doc = "a + b";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T a, T b) { return static_cast<T>(a + b); }
  static Tensor da(const Operand&, const Operand&, const Tensor&, const Tensor& g) { return g; }
  static Tensor db(const Operand&, const Operand&, const Tensor&, const Tensor& g) { return g; }
};
struct Sub {
  static constexpr auto name = "sub", doc = "a - b";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T a, T b) { return static_cast<T>(a - b); }
  static Tensor da(const Operand&, const Operand&, const Tensor&, const Tensor& g) { return g; }
  static Tensor db(const Operand&, const Operand&, const Tensor&, const Tensor& g) { return -g; }
};
struct Mul {
  static constexpr auto name = "mul", doc = "a * b";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_inputs;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T a, T b) { return static_cast<T>(a * b); }
  static Tensor da(const Operand&, const Operand& b, const Tensor&, const Tensor& g) { return g * b; }
  static Tensor db(const Operand& a, const Operand&, const Tensor&, const Tensor& g) { return g * a; }
};
struct Div {
  static constexpr auto name = "div", doc = "a / b; of integers, in f32";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_inputs;
  static constexpr double low = 0.5, high = 3;
  template <class T> HT_HD static T f(T a, T b) { return a / b; }
  static Tensor da(const Operand&, const Operand& b, const Tensor&, const Tensor& g) { return g / b; }
  static Tensor db(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) { return -(g * (a / b) / b); }
};
// The larger; NaN if either is. At a tie the gradient goes to a.
struct Maximum {
  static constexpr auto name = "maximum", doc = "the larger of a and b; NaN if either is NaN";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_inputs;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T a, T b) { return a >= b || a != a ? a : b; }
  static Tensor da(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) { return where(ge(a, b), g, 0); }
  static Tensor db(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) { return where(lt(a, b), g, 0); }
};
struct Minimum {
  static constexpr auto name = "minimum", doc = "the smaller of a and b; NaN if either is NaN";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_inputs;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T a, T b) { return a <= b || a != a ? a : b; }
  static Tensor da(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) { return where(le(a, b), g, 0); }
  static Tensor db(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) { return where(gt(a, b), g, 0); }
};
// The gradient of relu from its output; linear in g.
struct ReluGrad {
  static constexpr auto name = "relu_grad", doc = "b where a > 0, else 0: the gradient of relu from its output a";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves{.in = 1, .out = 0};
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T a, T b) { return a <= T(0) ? T(0) : b; }
  static Tensor da(const Operand&, const Operand&, const Tensor&, const Tensor&) { return {}; }
  static Tensor db(const Operand& a, const Operand&, const Tensor&, const Tensor& g) { return relu_grad(a, g); }
};

// At a = 0, where the logarithm is infinite, a power that does not fall has no slope in b.
struct Pow {
  static constexpr auto name = "pow_tensor", doc = "a to the power b; 0 to the 0 is 1";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_all;
  static constexpr double low = 0.5, high = 2;
  template <class T> HT_HD static T f(T a, T b) { return ::pow(a, b); }
  static HT_API Tensor da(const Operand& a, const Operand& b, const Tensor& y, const Tensor& g);
  static HT_API Tensor db(const Operand& a, const Operand& b, const Tensor& y, const Tensor& g);
};
struct Atan2 {
  static constexpr auto name = "atan2", doc = "the angle of the point (b, a) in radians";
  static constexpr Cast cast = Cast::widest;
  static constexpr Saves saves = saves_inputs;
  static constexpr double low = 0.5, high = 3;
  template <class T> HT_HD static T f(T a, T b) { return ::atan2(a, b); }
  static Tensor da(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) { return g * (b / distance2(a.tensor(), b)); }
  static Tensor db(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) { return g * (a / -distance2(b.tensor(), a)); }
  static Tensor distance2(const Tensor& x, const Operand& y) {
    if (y.is_tensor()) return square(x) + square(y.tensor());
    auto v = y.scalar().to<double>();
    return square(x) + v * v;
  }
};
struct Fmod {
  static constexpr auto name = "fmod", doc = "a less the whole number of times that b goes into it; the sign is a's; of integers by 0, 0";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_all;
  static constexpr DTypes types = number_types;
  static constexpr double low = 1, high = 4;
  template <class T> HT_HD static T f(T a, T b) {
    if constexpr (std::floating_point<T>) return ::fmod(a, b);
    else return b == T(0) || (std::signed_integral<T> && b == static_cast<T>(-1)) ? T(0) : static_cast<T>(a % b);
  }
  static Tensor da(const Operand&, const Operand&, const Tensor&, const Tensor& g) { return g; }
  static Tensor db(const Operand& a, const Operand& b, const Tensor& y, const Tensor& g) { return -(g * round((a - y) / b)); }
};

#define HT_COMPARISON(Op, text, expression, allowed)             \
  struct Op {                                                    \
    static constexpr auto name = text, doc = #expression;        \
    static constexpr Cast cast = Cast::keep;                     \
    static constexpr Saves saves = saves_none;                   \
    static constexpr DTypes types = allowed;                     \
    template <class T> HT_HD static bool f(T a, T b) { return expression; } \
  };
HT_COMPARISON(Eq, "eq", a == b, all_types)
HT_COMPARISON(Ne, "ne", a != b, all_types)
HT_COMPARISON(Lt, "lt", a < b, number_types)
HT_COMPARISON(Le, "le", a <= b, number_types)
HT_COMPARISON(Gt, "gt", a > b, number_types)
HT_COMPARISON(Ge, "ge", a >= b, number_types)
HT_COMPARISON(LogicalAnd, "logical_and", a != T(0) && b != T(0), all_types)
HT_COMPARISON(LogicalOr, "logical_or", a != T(0) || b != T(0), all_types)
HT_COMPARISON(LogicalXor, "logical_xor", (a != T(0)) != (b != T(0)), all_types)
#undef HT_COMPARISON

template <class... Op> constexpr auto slopes(elementwise::List<Op...>) {
  return (std::conditional_t<unary::has_slope<Op>, elementwise::List<Slope<Op>>, elementwise::List<>>{} + ... + elementwise::List<>{});
}
#define HT_ENTRY(function, Op) elementwise::List<Op>{} +
using All = decltype(HT_BINARY_OPS(HT_ENTRY) slopes(unary::All{}));
#undef HT_ENTRY

}  // namespace binary
}  // namespace halftone
