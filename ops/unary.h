#pragma once
// Elementwise functions of one tensor; gradients follow from df. NaN passes through all of them.
// To add one: its struct here, and its line in HT_UNARY_OPS.
#include "halftone/ops/elementwise.h"

// X(function, struct): each becomes `Tensor function(const Tensor& x)`, any shape.
#define HT_UNARY_OPS(X)                                                                                                      \
  X(neg, Neg) X(abs, Abs) X(sign, Sign) X(square, Square) X(sqrt, Sqrt) X(rsqrt, Rsqrt) X(reciprocal, Reciprocal) X(exp, Exp)   \
  X(log, Log) X(log1p, Log1p) X(sin, Sin) X(cos, Cos) X(tanh, Tanh) X(sigmoid, Sigmoid) X(relu, Relu) X(step, Step) X(gelu, Gelu) \
  X(normal_cdf, NormalCdf) X(erf, Erf) X(silu, Silu) X(isnan, IsNan) X(isinf, IsInf) X(isfinite, IsFinite) X(logical_not, LogicalNot)
// X(struct): operators with parameters; their functions are declared below.
#define HT_UNARY_OPS_WITH_PARAMETERS(X) X(Power) X(LeakyRelu)

namespace halftone {

#define HT_DECLARE(function, Op) HT_API Tensor function(const Tensor& x);
HT_UNARY_OPS(HT_DECLARE)
#undef HT_DECLARE
// x to a constant power, in floating dtypes; 0 to the 0 is 1.
HT_API Tensor pow(const Tensor& x, double exponent);
// x where x > 0, else slope * x.
HT_API Tensor leaky_relu(const Tensor& x, double negative_slope = 0.01);

// Used by derivatives below; declared in binary.h.
HT_API Tensor operator+(const Operand& a, const Operand& b);
HT_API Tensor operator-(const Operand& a, const Operand& b);
HT_API Tensor operator*(const Operand& a, const Operand& b);
HT_API Tensor operator/(const Operand& a, const Operand& b);
inline Tensor operator-(const Tensor& x) { return neg(x); }
HT_API Tensor relu_grad(const Operand& y, const Operand& g);

namespace unary {

inline constexpr Saves saves_x{.in = 1, .out = 0}, saves_y{.in = 0, .out = 1}, saves_both{.in = 1, .out = 1}, saves_none{};

struct Neg {
  static constexpr auto name = "neg", doc = "-x";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T x) { return static_cast<T>(-x); }
  static Tensor df(const Tensor&, const Tensor&, const Tensor& g) { return -g; }
};
struct Abs {
  static constexpr auto name = "abs", doc = "the absolute value; its derivative at 0 is 0";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T x) { return x < T(0) ? static_cast<T>(-x) : x == T(0) ? T(0) : x; }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) { return g * sign(x); }
};
struct Sign {
  static constexpr auto name = "sign", doc = "-1, 0 or 1";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T x) { return x > T(0) ? T(1) : x < T(0) ? static_cast<T>(-1) : x; }
};
struct Square {
  static constexpr auto name = "square", doc = "x * x";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T x) { return static_cast<T>(x * x); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) { return g * (x * 2); }
};
struct Sqrt {
  static constexpr auto name = "sqrt", doc = "the square root";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_y;
  static constexpr double low = 0.5, high = 3;
  template <class T> HT_HD static T f(T x) { return ::sqrt(x); }
  static Tensor df(const Tensor&, const Tensor& y, const Tensor& g) { return g / (y * 2); }
};
struct Rsqrt {
  static constexpr auto name = "rsqrt", doc = "1 / sqrt(x)";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_both;
  static constexpr double low = 0.5, high = 3;
  template <class T> HT_HD static T f(T x) { return T(1) / ::sqrt(x); }
  static Tensor df(const Tensor& x, const Tensor& y, const Tensor& g) { return g * (y / x) * -0.5; }
};
struct Reciprocal {
  static constexpr auto name = "reciprocal", doc = "1 / x";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_y;
  static constexpr double low = 0.5, high = 3;
  template <class T> HT_HD static T f(T x) { return T(1) / x; }
  static Tensor df(const Tensor&, const Tensor& y, const Tensor& g) { return -(g * y * y); }
};
struct Exp {
  static constexpr auto name = "exp", doc = "e to the x";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_y;
  template <class T> HT_HD static T f(T x) { return ::exp(x); }
  static Tensor df(const Tensor&, const Tensor& y, const Tensor& g) { return g * y; }
};
struct Log {
  static constexpr auto name = "log", doc = "the natural logarithm";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_x;
  static constexpr double low = 0.5, high = 3;
  template <class T> HT_HD static T f(T x) { return ::log(x); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) { return g / x; }
};
struct Log1p {
  static constexpr auto name = "log1p", doc = "log(1 + x), accurate near 0";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_x;
  static constexpr double low = -0.5, high = 3;
  template <class T> HT_HD static T f(T x) { return ::log1p(x); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) { return g / (x + 1); }
};
struct Sin {
  static constexpr auto name = "sin", doc = "the sine of x in radians";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  template <class T> HT_HD static T f(T x) { return ::sin(x); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) { return g * cos(x); }
};
struct Cos {
  static constexpr auto name = "cos", doc = "the cosine of x in radians";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  template <class T> HT_HD static T f(T x) { return ::cos(x); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) { return -(g * sin(x)); }
};
struct Tanh {
  static constexpr auto name = "tanh", doc = "the hyperbolic tangent";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_y;
  template <class T> HT_HD static T f(T x) { return ::tanh(x); }
  static Tensor df(const Tensor&, const Tensor& y, const Tensor& g) { return g * (1 - y * y); }
};
struct Sigmoid {
  static constexpr auto name = "sigmoid", doc = "1 / (1 + e to the -x)";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_y;
  template <class T> HT_HD static T f(T x) { return T(1) / (T(1) + ::exp(-x)); }
  static Tensor df(const Tensor&, const Tensor& y, const Tensor& g) { return g * (y * (1 - y)); }
};
struct Relu {
  static constexpr auto name = "relu", doc = "max(x, 0); its derivative at 0 is 0";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_y;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T x) { return x < T(0) ? T(0) : x; }
  static Tensor df(const Tensor&, const Tensor& y, const Tensor& g) { return relu_grad(y, g); }
};
struct Step {
  static constexpr auto name = "step", doc = "1 where x > 0, else 0";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  template <class T> HT_HD static T f(T x) { return x > T(0) ? T(1) : x != x ? x : T(0); }
};
struct NormalCdf {
  static constexpr double inverse_sqrt_2pi = 0.39894228040143267794;
  static constexpr auto name = "normal_cdf", doc = "the standard normal distribution function";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  template <class T> HT_HD static T f(T x) { return T(0.5) * ::erfc(x * T(-0.70710678118654752440)); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) { return g * (exp(square(x) * -0.5) * inverse_sqrt_2pi); }
};
struct Erf {
  static constexpr auto name = "erf", doc = "the error function";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  template <class T> HT_HD static T f(T x) { return ::erf(x); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) { return g * (exp(-square(x)) * 1.12837916709551257390); }
};
struct Gelu {
  static constexpr auto name = "gelu", doc = "x times the normal distribution function of x (Hendrycks and Gimpel, 2016; erf form)";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  template <class T> HT_HD static T f(T x) { return x * NormalCdf::f(x); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) {
    return g * (normal_cdf(x) + x * (exp(square(x) * -0.5) * NormalCdf::inverse_sqrt_2pi));
  }
};
struct Silu {
  static constexpr auto name = "silu", doc = "x * sigmoid(x)";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  template <class T> HT_HD static T f(T x) { return x / (T(1) + ::exp(-x)); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) {
    Tensor s = sigmoid(x);
    return g * (s * (1 + x * (1 - s)));
  }
};
struct IsNan {
  static constexpr auto name = "isnan", doc = "whether x is not a number";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  template <class T> HT_HD static bool f(T x) { return x != x; }
};
struct IsInf {
  static constexpr auto name = "isinf", doc = "whether x is plus or minus infinity";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  template <class T> HT_HD static bool f(T x) { return ::fabs(x) > largest<T>; }
};
struct IsFinite {
  static constexpr auto name = "isfinite", doc = "whether x is neither infinite nor NaN";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  template <class T> HT_HD static bool f(T x) { return ::fabs(x) <= largest<T>; }
};
struct LogicalNot {
  static constexpr auto name = "logical_not", doc = "whether x is 0";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = all_types;
  template <class T> HT_HD static bool f(T x) { return x == T(0); }
};

struct Power {
  double exponent;
  static constexpr auto name = "pow", doc = "x to a constant power";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_x;
  static constexpr double low = 0.5, high = 2;
  static constexpr Power example() { return {2.5}; }
  template <class T> HT_HD T f(T x) const { return exponent == 2 ? x * x : ::pow(x, T(exponent)); }
  Tensor df(const Tensor& x, const Tensor&, const Tensor& g) const {
    return exponent == 0 ? g * 0 : g * (pow(x, exponent - 1) * exponent);
  }
};
struct LeakyRelu {
  double negative_slope;
  static constexpr auto name = "leaky_relu", doc = "x where x > 0, else negative_slope * x";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  static constexpr LeakyRelu example() { return {0.2}; }
  template <class T> HT_HD T f(T x) const { return x < T(0) ? x * T(negative_slope) : x; }
  Tensor df(const Tensor& x, const Tensor&, const Tensor& g) const {
    Tensor s = step(x);
    return g * (s + (1 - s) * negative_slope);
  }
};

#define HT_ENTRY(function, Op) elementwise::List<Op>{} +
#define HT_ENTRY_WITH_PARAMETERS(Op) elementwise::List<Op>{} +
using All = decltype(HT_UNARY_OPS(HT_ENTRY) HT_UNARY_OPS_WITH_PARAMETERS(HT_ENTRY_WITH_PARAMETERS) elementwise::List<>{});
#undef HT_ENTRY
#undef HT_ENTRY_WITH_PARAMETERS

}  // namespace unary
}  // namespace halftone
