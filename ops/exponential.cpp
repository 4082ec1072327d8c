// The CPU's kernels for operators that are made of an exponential: the same formulas by vector_exp().
#include "halftone/ops/all.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/elementwise_cpu.h"
#include "halftone/ops/vector_math.h"

namespace halftone {
namespace {

// 1 / (1 + e^-x).
template <class T> T sigmoid_of(T x) {
  T e = vector_exp(-std::fabs(x));
  return (x >= T(0) ? T(1) : e) / (T(1) + e);
}

struct Exp : unary::Exp {
  template <class T> static T f(T x) { return vector_exp(x); }
};
struct Sigmoid : unary::Sigmoid {
  template <class T> static T f(T x) { return sigmoid_of(x); }
};
struct Silu : unary::Silu {
  template <class T> static T f(T x) { return x * sigmoid_of(x); }
  template <class T> static T slope(T x) {
    T s = sigmoid_of(x);
    return s * (T(1) + x * (T(1) - s));
  }
};
struct GeluTanh : unary::GeluTanh {
  template <class T> static T f(T x) { return x * sigmoid_of(T(linear) * x * (T(1) + T(cubic) * (x * x))); }
  template <class T> static T slope(T x) {
    T c = x < T(-16) ? T(-16) : x > T(16) ? T(16) : x, square_c = c * c, s = sigmoid_of(c * (square_c * T(linear * cubic) + T(linear)));
    return s + c * (s * (T(1) - s)) * (square_c * T(3 * linear * cubic) + T(linear));
  }
};

template <class Op, class Fast> void replace() {
  set_kernel(unary::def<Op>, DeviceType::cpu, unary::run_cpu<Fast>);
  if constexpr (requires(float v) { Op::slope(v); }) set_kernel(binary::def<binary::Slope<Op>>, DeviceType::cpu, binary::run_cpu<binary::Slope<Fast>>);
}

}  // namespace

void fill_cpu_exponentials() {
  replace<unary::Exp, Exp>();
  replace<unary::Sigmoid, Sigmoid>();
  replace<unary::Silu, Silu>();
  replace<unary::GeluTanh, GeluTanh>();
}

}  // namespace halftone
