// The CPU's kernels for operators that are made of an exponential: the same formulas by vector_exp().
#include "halftone/ops/all.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/elementwise_cpu.h"
#include "halftone/ops/vector_math.h"

namespace halftone {
namespace {

// 1 / (1 + e^-x).
template <class T> [[gnu::always_inline]] inline T sigmoid_of(T x) {
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
// Its slope alone, so that it has the bits of the same slope made of exp.
struct Gelu : unary::Gelu {
  template <class T> static T slope(T x) { return unary::NormalCdf::f(x) + x * (vector_exp(x * x * T(-0.5)) * T(unary::NormalCdf::inverse_sqrt_2pi)); }
};
struct GeluTanh : unary::GeluTanh {
  template <class T> static T f(T x) { return x * sigmoid_of(T(linear) * x * (T(1) + T(cubic) * (x * x))); }
  template <class T> static T slope(T x) {
    T c = x < T(-16) ? T(-16) : x > T(16) ? T(16) : x, square_c = c * c, s = sigmoid_of(c * (square_c * T(linear * cubic) + T(linear)));
    return s + c * (s * (T(1) - s)) * (square_c * T(3 * linear * cubic) + T(linear));
  }
};

// y[i] = f(x[i]...) of dense tensors of one layout: plain loops, which compilers put in vectors. False: the tensors are not.
template <class F, class... In> bool run_dense(const Tensor& y, F f, const In&... in) {
  if (!y.is_contiguous() || !(in.is_contiguous() && ...)) return false;
  visit<floating_types>(y.dtype(), [&]<class T>(Type<T>) {
    auto loop = [n = y.numel(), f](T* __restrict to, const auto* __restrict... from) {
      parallel_for(n, parallel_grain, [=](int64_t begin, int64_t end) __attribute__((flatten)) {
        for (int64_t i = begin; i < end; ++i) to[i] = T(f(compute_t<T>(from[i])...));
      });
    };
    loop(y.data<T>(), in.template data<T>()...);
  });
  return true;
}
template <class Fast> void run_unary(const Call& c, std::span<Tensor> out) {
  if (!run_dense(out[0], [](auto x) { return Fast::f(x); }, c.in[0])) unary::run_cpu<Fast>(c, out);
}
template <class Fast> void run_slope(const Call& c, std::span<Tensor> out) {
  bool tensors = c.as<binary::Given<binary::Slope<Fast>>>().number.at == binary::Number::At::none;
  if (!tensors || !run_dense(out[0], [](auto v, auto g) { return g * Fast::slope(v); }, c.in[0], c.in[1])) binary::run_cpu<binary::Slope<Fast>>(c, out);
}

template <class Op, class Fast> void replace_slope() { set_kernel(binary::def<binary::Slope<Op>>, DeviceType::cpu, run_slope<Fast>); }
template <class Op, class Fast> void replace() {
  set_kernel(unary::def<Op>, DeviceType::cpu, run_unary<Fast>);
  if constexpr (requires(float v) { Op::slope(v); }) replace_slope<Op, Fast>();
}

}  // namespace

void fill_cpu_exponentials() {
  replace<unary::Exp, Exp>();
  replace<unary::Sigmoid, Sigmoid>();
  replace<unary::Silu, Silu>();
  replace<unary::GeluTanh, GeluTanh>();
  replace_slope<unary::Gelu, Gelu>();
}

}  // namespace halftone
