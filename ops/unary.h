#pragma once
// Elementwise functions of one tensor; gradients follow from df. NaN passes through all of them.
// To add one: its struct here, and its line in HT_UNARY_OPS.
#include "halftone/ops/elementwise.h"

// X(function, struct): each becomes `Tensor function(const Tensor& x)`, any shape. Two lists, so that a backend may compile them
// side by side.
#define HT_PLAIN_UNARY_OPS(X)                                                                                                 \
  X(neg, Neg) X(abs, Abs) X(sign, Sign) X(square, Square) X(sqrt, Sqrt) X(rsqrt, Rsqrt) X(reciprocal, Reciprocal) X(exp, Exp)   \
  X(expm1, Expm1) X(log, Log) X(log1p, Log1p) X(log2, Log2) X(sin, Sin) X(cos, Cos) X(erf, Erf) X(floor, Floor) X(ceil, Ceil)   \
  X(round, Round) X(isnan, IsNan) X(isinf, IsInf) X(isfinite, IsFinite) X(logical_not, LogicalNot)
#define HT_ACTIVATIONS(X)                                                                                                     \
  X(tanh, Tanh) X(sigmoid, Sigmoid) X(relu, Relu) X(step, Step) X(gelu, Gelu) X(gelu_tanh, GeluTanh) X(normal_cdf, NormalCdf)   \
  X(silu, Silu) X(mish, Mish) X(hardswish, Hardswish) X(hardsigmoid, Hardsigmoid)
#define HT_UNARY_OPS(X) HT_PLAIN_UNARY_OPS(X) HT_ACTIVATIONS(X)
// X(struct): operators with parameters; their functions are declared below.
#define HT_UNARY_OPS_WITH_PARAMETERS(X) X(Power) X(LeakyRelu) X(Elu) X(Softplus)

namespace halftone {

#define HT_DECLARE(function, Op) HT_API Tensor function(const Tensor& x);
HT_UNARY_OPS(HT_DECLARE)
#undef HT_DECLARE
// x to a constant power, in floating dtypes; 0 to the 0 is 1.
HT_API Tensor pow(const Tensor& x, double exponent);
// x where x > 0, else slope * x.
HT_API Tensor leaky_relu(const Tensor& x, double negative_slope = 0.01);
// x where x > 0, else alpha * (e to the x - 1) (Clevert et al., 2015).
HT_API Tensor elu(const Tensor& x, double alpha = 1);
// log(1 + e to the (beta * x)) / beta; x itself where beta * x is above the threshold.
HT_API Tensor softplus(const Tensor& x, double beta = 1, double threshold = 20);
// gelu by its formula (erf), or with the tanh that approximates it.
enum class Approximate : uint8_t { none, tanh };
HT_API Tensor gelu(const Tensor& x, Approximate form);

// Used by derivatives below; declared in binary.h.
HT_API Tensor operator+(const Operand& a, const Operand& b);
HT_API Tensor operator-(const Operand& a, const Operand& b);
HT_API Tensor operator*(const Operand& a, const Operand& b);
HT_API Tensor operator/(const Operand& a, const Operand& b);
inline Tensor operator-(const Tensor& x) { return neg(x); }
HT_API Tensor relu_grad(const Operand& y, const Operand& g);
HT_API Tensor minimum(const Operand& a, const Operand& b);
HT_API Tensor lt(const Operand& a, const Operand& b);
HT_API Tensor gt(const Operand& a, const Operand& b);
HT_API Tensor logical_and(const Operand& a, const Operand& b);
HT_API Tensor where(const Tensor& condition, const Operand& a, const Operand& b);
HT_API Tensor clamp(const Tensor& x, const Operand& low, const Operand& high);

namespace unary {

inline constexpr Saves saves_x{.in = 1, .out = 0}, saves_y{.in = 0, .out = 1}, saves_both{.in = 1, .out = 1}, saves_none{};

// 1 / (1 + e to the -x), by an exponential that cannot overflow: small results keep their digits.
template <class T> HT_HD T logistic(T x) {
  T e = ::exp(-::fabs(x));
  return (x >= T(0) ? T(1) : e) / (T(1) + e);
}

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
struct Expm1 {
  static constexpr auto name = "expm1", doc = "e to the x, less 1; accurate near 0";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_y;
  template <class T> HT_HD static T f(T x) { return ::expm1(x); }
  static Tensor df(const Tensor&, const Tensor& y, const Tensor& g) { return g * (y + 1); }
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
struct Log2 {
  static constexpr auto name = "log2", doc = "the logarithm to base 2";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_x;
  static constexpr double low = 0.5, high = 3;
  template <class T> HT_HD static T f(T x) { return ::log2(x); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) { return g / (x * 0.69314718055994530942); }
};
struct Floor {
  static constexpr auto name = "floor", doc = "the largest whole number not above x";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T x) {
    if constexpr (std::floating_point<T>) return ::floor(x);
    else return x;
  }
};
struct Ceil {
  static constexpr auto name = "ceil", doc = "the smallest whole number not below x";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T x) {
    if constexpr (std::floating_point<T>) return ::ceil(x);
    else return x;
  }
};
struct Round {
  static constexpr auto name = "round", doc = "the nearest whole number; of two, the even one";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = number_types;
  template <class T> HT_HD static T f(T x) {
    if constexpr (std::floating_point<T>) return ::rint(x);
    else return x;
  }
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
  template <class T> HT_HD static T slope(T y) { return 1 - y * y; }
};
struct Sigmoid {
  static constexpr auto name = "sigmoid", doc = "1 / (1 + e to the -x)";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_y;
  template <class T> HT_HD static T f(T x) { return logistic(x); }
  static Tensor df(const Tensor&, const Tensor& y, const Tensor& g) { return g * (y * (1 - y)); }
  template <class T> HT_HD static T slope(T y) { return y * (1 - y); }
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
  template <class T> HT_HD static T slope(T x) { return NormalCdf::f(x) + x * (::exp(x * x * T(-0.5)) * T(NormalCdf::inverse_sqrt_2pi)); }
};
struct GeluTanh {
  static constexpr double linear = 1.59576912160573071176, cubic = 0.044715;  // linear: 2 sqrt(2 / pi)
  static constexpr auto name = "gelu_tanh", doc = "gelu with the normal distribution function by a tanh";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  // (1 + tanh(u)) / 2 is logistic(2 u), which does not cancel.
  template <class T> HT_HD static T f(T x) { return x * logistic(T(linear) * x * (T(1) + T(cubic) * (x * x))); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) {
    Tensor c = clamp(x, -16, 16), square_c = square(c);  // beyond, the slope is 0 or 1, and a square might overflow f16
    Tensor s = sigmoid(c * (square_c * (linear * cubic) + linear));
    return g * (s + c * (s * (1 - s)) * (square_c * (3 * linear * cubic) + linear));
  }
  template <class T> HT_HD static T slope(T x) {
    T c = x < T(-16) ? T(-16) : x > T(16) ? T(16) : x, square_c = c * c, s = logistic(c * (square_c * T(linear * cubic) + T(linear)));
    return s + c * (s * (1 - s)) * (square_c * T(3 * linear * cubic) + T(linear));
  }
};
struct Silu {
  static constexpr auto name = "silu", doc = "x * sigmoid(x)";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  template <class T> HT_HD static T f(T x) { return x * logistic(x); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) {
    Tensor s = sigmoid(x);
    return g * (s * (1 + x * (1 - s)));
  }
  template <class T> HT_HD static T slope(T x) {
    T s = logistic(x);
    return s * (1 + x * (1 - s));
  }
};
struct Mish {
  static constexpr auto name = "mish", doc = "x * tanh(softplus(x)) (Misra, 2019)";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  // tanh(log(1 + e)) as a quotient of polynomials in e, the smaller of e to the x and e to the -x.
  template <class T> HT_HD static T f(T x) {
    T e = ::exp(-::fabs(x)), n = x > T(0) ? T(1) + T(2) * e : e * (e + T(2));
    return x * (n / (n + T(2) * (x > T(0) ? e * e : T(1))));
  }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) {
    Tensor t = tanh(softplus(x));
    return g * (t + minimum(x, 64) * (sigmoid(x) * (1 - square(t))));  // beyond, the product is 0, but might overflow f16 on its way
  }
  template <class T> HT_HD static T slope(T x) {
    T e = ::exp(-::fabs(x)), n = x > T(0) ? T(1) + T(2) * e : e * (e + T(2)), t = n / (n + T(2) * (x > T(0) ? e * e : T(1)));
    return t + (x > T(64) ? T(64) : x) * (logistic(x) * (1 - t * t));
  }
};
struct Hardswish {
  static constexpr auto name = "hardswish", doc = "x * hardsigmoid(x) (Howard et al., 2019); its derivative at -3 and 3 is that of the line between";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  static constexpr double low = -5, high = 5;
  template <class T> HT_HD static T f(T x) { return x <= T(-3) ? T(0) : x >= T(3) ? x : x * ((x + T(3)) / T(6)); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) {
    return g * where(lt(x, -3), 0, where(gt(x, 3), 1, x / 3 + 0.5));
  }
};
struct Hardsigmoid {
  static constexpr auto name = "hardsigmoid", doc = "0 below -3, 1 above 3, a line between; its derivative at -3 and 3 is 0";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  static constexpr double low = -5, high = 5;
  template <class T> HT_HD static T f(T x) { return x <= T(-3) ? T(0) : x >= T(3) ? T(1) : (x + T(3)) / T(6); }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) { return where(logical_and(gt(x, -3), lt(x, 3)), g / 6, 0); }
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

struct Elu {
  double alpha;
  static constexpr auto name = "elu", doc = "x where x > 0, else alpha * (e to the x - 1)";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_x;
  static constexpr Elu example() { return {0.7}; }
  template <class T> HT_HD T f(T x) const { return x > T(0) ? x : T(alpha) * ::expm1(x); }
  Tensor df(const Tensor& x, const Tensor&, const Tensor& g) const {
    return g * where(gt(x, 0), 1, exp(minimum(x, 0)) * alpha);  // the branch not taken stays finite, for derivatives of this
  }
};
struct Softplus {
  double beta, threshold;
  static constexpr auto name = "softplus", doc = "log(1 + e to the (beta * x)) / beta; x where beta * x is above the threshold";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_x;
  static constexpr Softplus example() { return {2, 3}; }
  template <class T> HT_HD T f(T x) const {
    T z = x * T(beta);
    return z > T(threshold) ? x : ((z > T(0) ? z : T(0)) + ::log1p(::exp(-::fabs(z)))) / T(beta);
  }
  Tensor df(const Tensor& x, const Tensor&, const Tensor& g) const {
    Tensor z = x * beta;
    return g * where(gt(z, threshold), 1, sigmoid(z));
  }
};

#define HT_ENTRY(function, Op) elementwise::List<Op>{} +
#define HT_ENTRY_WITH_PARAMETERS(Op) elementwise::List<Op>{} +
using Plain = decltype(HT_PLAIN_UNARY_OPS(HT_ENTRY) elementwise::List<>{});
using Activations = decltype(HT_ACTIVATIONS(HT_ENTRY) HT_UNARY_OPS_WITH_PARAMETERS(HT_ENTRY_WITH_PARAMETERS) elementwise::List<>{});
using All = decltype(Plain{} + Activations{});
#undef HT_ENTRY
#undef HT_ENTRY_WITH_PARAMETERS

}  // namespace unary
}  // namespace halftone
