// Steps of recurrent networks: derivatives in public operators, and the CPU's loops, row by row.
#include "halftone/ops/recurrent.h"

#include "halftone/core/parallel.h"
#include "halftone/ops/all.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/shape.h"

namespace halftone {
namespace {

using recurrent::GRU;
using recurrent::LSTM;

// ---- loops: f(offset of the row's gates, offset of its state, m, j) for every element of the state

template <int gates, class F> void each_element(const Tensor& state, F f) {
  int64_t m = state.shape().back(), rows = m == 0 ? 0 : state.numel() / m;
  parallel_for(rows, std::max<int64_t>(1, parallel_grain / std::max<int64_t>(1, 16 * m)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t j = 0; j < m; ++j) f(row * gates * m + j, row * m + j, m);
  });
}
template <class C, int n, class X> void gather(C (&to)[n], const X* from, int64_t at, int64_t step) {
  for (int64_t k = 0; k < n; ++k) to[k] = C(compute_t<X>(from[at + k * step]));
}
template <class C, int n, class X> void scatter(const C (&from)[n], X* to, int64_t at, int64_t step) {
  for (int64_t k = 0; k < n; ++k) to[at + k * step] = X(from[k]);
}
Tensors dense(const Call& c) {
  Tensors in;
  for (const Tensor& t : c.in) in.push_back(t.defined() ? t.contiguous() : t);
  return in;
}

void run_lstm(const Call& call, std::span<Tensor> out) {
  Tensors in = dense(call);
  recurrent::visit_pair(call, [&]<class X, class S>(Type<X>, Type<S>) {
    using C = compute_t<S>;
    const X *x = in[0].data<X>(), *y = in[1].data<X>();
    const S* c = in[2].data<S>();
    X* h_new = out[0].data<X>();
    S* c_new = out[1].data<S>();
    each_element<4>(in[2], [&](int64_t gate, int64_t at, int64_t m) {
      C a[4], b[4], h, state;
      gather(a, x, gate, m);
      gather(b, y, gate, m);
      for (int k = 0; k < 4; ++k) a[k] += b[k];
      LSTM::forward(a, C(c[at]), h, state);
      h_new[at] = X(h);
      c_new[at] = S(state);
    });
  });
}

void run_lstm_grad(const Call& call, std::span<Tensor> out) {
  Tensors in = dense(call);
  recurrent::visit_pair(call, [&]<class X, class S>(Type<X>, Type<S>) {
    using C = compute_t<S>;
    const X *x = in[0].data<X>(), *y = in[1].data<X>(), *gh = in[3].defined() ? in[3].data<X>() : nullptr;
    const S *c = in[2].data<S>(), *gc = in[4].defined() ? in[4].data<S>() : nullptr;
    X* d = out[0].data<X>();
    S* dc = out[1].data<S>();
    each_element<4>(in[2], [&](int64_t gate, int64_t at, int64_t m) {
      C a[4], b[4], state;
      gather(a, x, gate, m);
      gather(b, y, gate, m);
      for (int k = 0; k < 4; ++k) a[k] += b[k];
      LSTM::backward(a, C(c[at]), gh ? C(compute_t<X>(gh[at])) : C(0), gc ? C(gc[at]) : C(0), b, state);
      scatter(b, d, gate, m);
      dc[at] = S(state);
    });
  });
}

void run_gru(const Call& call, std::span<Tensor> out) {
  Tensors in = dense(call);
  visit<floating_types>(in[0].dtype(), [&]<class X>(Type<X>) {
    using C = compute_t<X>;
    const X *x = in[0].data<X>(), *y = in[1].data<X>(), *h = in[2].data<X>();
    X* h_new = out[0].data<X>();
    each_element<3>(in[2], [&](int64_t gate, int64_t at, int64_t m) {
      C a[3], b[3];
      gather(a, x, gate, m);
      gather(b, y, gate, m);
      h_new[at] = X(GRU::forward(a, b, C(h[at])));
    });
  });
}

void run_gru_grad(const Call& call, std::span<Tensor> out) {
  Tensors in = dense(call);
  visit<floating_types>(in[0].dtype(), [&]<class X>(Type<X>) {
    using C = compute_t<X>;
    const X *x = in[0].data<X>(), *y = in[1].data<X>(), *h = in[2].data<X>(), *g = in[3].data<X>();
    X *dx = out[0].data<X>(), *dy = out[1].data<X>(), *dh = out[2].data<X>();
    each_element<3>(in[2], [&](int64_t gate, int64_t at, int64_t m) {
      C a[3], b[3], da[3], db[3], state;
      gather(a, x, gate, m);
      gather(b, y, gate, m);
      GRU::backward(a, b, C(h[at]), C(g[at]), da, db, state);
      scatter(da, dx, gate, m);
      scatter(db, dy, gate, m);
      dh[at] = X(state);
    });
  });
}

// ---- shapes

void check_step(const Call& c, int gates, const char* state) {
  const Meta &x = c.in[0].meta(), &y = c.in[1].meta(), &s = c.in[2].meta();
  HT_CHECK(is_floating(x.dtype) && y.dtype == x.dtype && y.shape == x.shape, c.op->name, ": expected two products of one shape and floating dtype, got ", x,
           " and ", y);
  Shape expected = x.shape;
  HT_CHECK(x.shape.rank() > 0 && x.shape.back() % gates == 0, c.op->name, ": expected products [..., ", gates, " m], got ", x);
  expected[expected.size() - 1] /= gates;
  HT_CHECK(s.shape == expected, c.op->name, ": expected ", state, " ", expected, " with products ", x.shape, ", got ", s);
}
void check_gradient(const Call& c, size_t i, const Meta& of) {
  if (!c.has(i)) return;
  HT_CHECK(c.in[i].shape() == of.shape && c.in[i].dtype() == of.dtype, c.op->name, ": expected a gradient ", of, ", got ", c.in[i].meta());
}
void check_lstm(const Call& c) {
  check_step(c, 4, "c");
  DType x = c.in[0].dtype(), s = c.in[2].dtype();
  HT_CHECK(s == x || (is_16bit_dtype(x) && s == DType::f32), c.op->name, ": expected c in ", x, is_16bit_dtype(x) ? " or f32" : "", ", got ", s);
}
void check_gru(const Call& c) {
  check_step(c, 3, "h");
  HT_CHECK(c.in[2].dtype() == c.in[0].dtype(), c.op->name, ": expected h in ", c.in[0].dtype(), ", got ", c.in[2].dtype());
}
Meta like(const Meta& shape, DType t) { return Meta(shape.shape, t, shape.device); }

std::vector<Sample> step_samples(int gates, int gradients) {
  std::vector<Sample> all;
  auto add = [&](Shape state, bool wide = false, int left_out = -1) {
    Shape x = state;
    x[x.size() - 1] *= gates;
    Sample s{{{.shape = x}, {.shape = x}, {.shape = state, .wide = wide}}};
    for (int i = 0; i < gradients; ++i) s.in.push_back({.shape = state, .present = i != left_out, .wide = wide && i == 1});
    all.push_back(s);
  };
  add({1});
  add({3, 2}, gates == 4, gradients == 2 ? 0 : -1);
  add({2, 3, 5}, false, gradients == 2 ? 1 : -1);
  add({0, 4});
  add({33, 7}, gates == 4);
  add({257, 1});
  add({4, 0});
  add({5, 65}, gates == 4);
  return all;
}

// ---- derivatives

// s (1 - s), that of a sigmoid; 1 - s^2, that of tanh.
Tensor slope(const Tensor& s) { return s * (1 - s); }
Tensor tanh_slope(const Tensor& s) { return 1 - s * s; }
std::vector<Tensor> gates_of(const Tensor& x, size_t n) {
  return split(x, std::vector<int64_t>(n, x.shape().back() / static_cast<int64_t>(n)), -1);
}

Tensors lstm_backward(const Rule& r) {
  const Tensor &x = r.in(0), &c = r.in(2), &gh = r.grad(0), &gc = r.grad(1);
  auto sum = gates_of(x + r.in(1), 4);
  Tensor i = sigmoid(sum[0]), f = sigmoid(sum[1]), g = tanh(sum[2]), o = sigmoid(sum[3]), t = tanh(f * c + i * g);
  Tensor all = gc.defined() ? gc : zeros_like(t), last = zeros_like(t);
  if (gh.defined()) {
    all = all + gh * o * tanh_slope(t);
    last = gh * t * slope(o);
  }
  Tensor d = cat({all * g * slope(i), all * c * slope(f), all * i * tanh_slope(g), last}, -1).to(x.dtype());
  return {d, d, all * f};
}

Tensors gru_backward(const Rule& r) {
  const Tensor &h = r.in(2), &grad = r.grad();
  auto x = gates_of(r.in(0), 3), y = gates_of(r.in(1), 3);
  Tensor s = sigmoid(x[0] + y[0]), z = sigmoid(x[1] + y[1]), n = tanh(x[2] + s * y[2]);
  Tensor dn = grad * (1 - z) * tanh_slope(n), ds = dn * y[2] * slope(s), dz = grad * (h - n) * slope(z);
  return {cat({ds, dz, dn}, -1), cat({ds, dz, dn * s}, -1), grad * z};
}

}  // namespace

namespace op {

constinit OpDef lstm_step = {
    .name = "lstm_step", .doc = "h and c of an LSTM, from the products of input and state with their weights, and c before", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      check_lstm(c);
      return {like(c.in[2].meta(), c.in[0].dtype()), like(c.in[2].meta(), c.in[2].dtype())};
    },
    .saves = {.in = 7, .out = 0},
    .backward = lstm_backward,
    .fused_backward = [](const Rule& r) -> Tensors {
      Tensors g = call_all(op::lstm_step_grad, {r.in(0), r.in(1), r.in(2), r.grad(0), r.grad(1)});
      return {g[0], g[0], g[1]};
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return step_samples(4, 0); },
    .kernel = {run_lstm}};

constinit OpDef lstm_step_grad = {
    .name = "lstm_step_grad", .doc = "the gradients of lstm_step over the sum of products and over c", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      check_lstm(c);
      const Meta h = like(c.in[2].meta(), c.in[0].dtype()), state = like(c.in[2].meta(), c.in[2].dtype());
      check_gradient(c, 3, h);
      check_gradient(c, 4, state);
      return {like(c.in[0].meta(), c.in[0].dtype()), state};
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return step_samples(4, 2); },
    .kernel = {run_lstm_grad}};

constinit OpDef gru_step = {
    .name = "gru_step", .doc = "h of a GRU, from the products of input and state with their weights, and h before", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      check_gru(c);
      return {like(c.in[2].meta(), c.in[0].dtype())};
    },
    .saves = {.in = 7, .out = 0},
    .backward = gru_backward,
    .fused_backward = [](const Rule& r) -> Tensors { return call_all(op::gru_step_grad, {r.in(0), r.in(1), r.in(2), r.grad()}); },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return step_samples(3, 0); },
    .kernel = {run_gru}};

constinit OpDef gru_step_grad = {
    .name = "gru_step_grad", .doc = "the gradients of gru_step over both products and over h", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      check_gru(c);
      check_gradient(c, 3, like(c.in[2].meta(), c.in[0].dtype()));
      return {like(c.in[0].meta(), c.in[0].dtype()), like(c.in[0].meta(), c.in[0].dtype()), like(c.in[2].meta(), c.in[0].dtype())};
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return step_samples(3, 1); },
    .kernel = {run_gru_grad}};

}  // namespace op

std::span<OpDef* const> recurrent_ops() {
  static constexpr OpDef* all[] = {&op::lstm_step, &op::lstm_step_grad, &op::gru_step, &op::gru_step_grad};
  return all;
}

LSTMStep lstm_step(const Tensor& x, const Tensor& y, const Tensor& c) {
  HT_CHECK(x.defined() && y.defined() && c.defined(), "lstm_step: a tensor is undefined");
  DType wide = promote(x.dtype(), c.dtype());
  bool fits = wide == x.dtype() || (wide == DType::f32 && is_16bit_dtype(x.dtype()));
  Tensors r = fits ? call_all(op::lstm_step, {x, y, c.to(wide)}) : call_all(op::lstm_step, {x.to(wide), y.to(wide), c});
  return {r[0].to(x.dtype()), r[1].to(c.dtype())};
}
Tensor gru_step(const Tensor& x, const Tensor& y, const Tensor& h) {
  HT_CHECK(x.defined() && y.defined() && h.defined(), "gru_step: a tensor is undefined");
  return call(op::gru_step, {x, y, h.to(x.dtype())});
}

}  // namespace halftone
