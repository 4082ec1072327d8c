#pragma once
// One step of recurrent networks after the products with weights: gates and the new state in one pass over memory.
#include "halftone/core/op.h"
#include "halftone/ops/unary.h"

namespace halftone {

namespace op {
extern HT_API OpDef lstm_step, lstm_step_grad, gru_step, gru_step_grad;
}

// What one step of an LSTM gives.
struct LSTMStep { Tensor h, c; };
// x and y [..., 4 m]: the products of the input and of h with their weights; c [..., m]. With i, f, g, o = sigmoid, sigmoid, tanh,
// sigmoid of the quarters of x + y: c' = f c + i g, h' = o tanh(c') (Hochreiter and Schmidhuber, "Long short-term memory", 1997).
// h' has the dtype of x, and c' that of c, which may be wider.
HT_API LSTMStep lstm_step(const Tensor& x, const Tensor& y, const Tensor& c);
// x and y [..., 3 m], h [..., m]. With r, z = sigmoid of the first two thirds of x + y, n = tanh(x_3 + r y_3):
// h' = (1 - z) n + z h (Cho et al., "Learning phrase representations", 2014), of the dtype of x.
HT_API Tensor gru_step(const Tensor& x, const Tensor& y, const Tensor& h);

// Elements, for every device; C is float or double.
namespace recurrent {

struct LSTM {
  static constexpr int gates = 4;
  template <class C> struct Gates {
    C i, f, g, o;
    HT_HD explicit Gates(const C (&sum)[4])
        : i(unary::Sigmoid::f(sum[0])), f(unary::Sigmoid::f(sum[1])), g(::tanh(sum[2])), o(unary::Sigmoid::f(sum[3])) {}
  };
  template <class C> HT_HD static void forward(const C (&sum)[4], C c, C& h_new, C& c_new) {
    const Gates<C> s(sum);
    c_new = s.f * c + s.i * s.g;
    h_new = s.o * ::tanh(c_new);
  }
  // From the gradients of h' and c', those of the sum and of c.
  template <class C> HT_HD static void backward(const C (&sum)[4], C c, C gh, C gc, C (&d)[4], C& dc) {
    const Gates<C> s(sum);
    const C t = ::tanh(s.f * c + s.i * s.g), all = gc + gh * s.o * (1 - t * t);
    d[0] = all * s.g * s.i * (1 - s.i);
    d[1] = all * c * s.f * (1 - s.f);
    d[2] = all * s.i * (1 - s.g * s.g);
    d[3] = gh * t * s.o * (1 - s.o);
    dc = all * s.f;
  }
};

struct GRU {
  static constexpr int gates = 3;
  template <class C> struct Gates {
    C r, z, n;
    HT_HD Gates(const C (&x)[3], const C (&y)[3])
        : r(unary::Sigmoid::f(x[0] + y[0])), z(unary::Sigmoid::f(x[1] + y[1])), n(::tanh(x[2] + r * y[2])) {}
  };
  template <class C> HT_HD static C forward(const C (&x)[3], const C (&y)[3], C h) {
    const Gates<C> s(x, y);
    return s.n + s.z * (h - s.n);
  }
  template <class C> HT_HD static void backward(const C (&x)[3], const C (&y)[3], C h, C g, C (&dx)[3], C (&dy)[3], C& dh) {
    const Gates<C> s(x, y);
    const C dn = g * (1 - s.z) * (1 - s.n * s.n);
    dx[0] = dy[0] = dn * y[2] * s.r * (1 - s.r);
    dx[1] = dy[1] = g * (h - s.n) * s.z * (1 - s.z);
    dx[2] = dn;
    dy[2] = dn * s.r;
    dh = g * s.z;
  }
};

// The dtypes of x and of c that a step is compiled for: one, or 16 bits with f32.
template <class X, class S> inline constexpr bool pairs = std::same_as<X, S> || (is_16bit<X> && std::same_as<S, float>);
// f(Type<X>, Type<S>) with those of a call's first and third input.
template <class F> void visit_pair(const Call& c, F f) {
  visit<floating_types>(c.in[0].dtype(), [&]<class X>(Type<X> x) {
    visit<floating_types>(c.in[2].dtype(), [&]<class S>(Type<S> s) {
      if constexpr (pairs<X, S>) f(x, s);
    });
  });
}

}  // namespace recurrent
}  // namespace halftone
