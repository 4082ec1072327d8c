// matmul and the linear family: shapes, derivatives, CPU kernels over gemm(). einsum is in einsum.cpp.
#include "halftone/ops/matmul.h"

#include <algorithm>

#include "halftone/core/packed.h"
#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/gemm.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/shape.h"

namespace halftone {
namespace {

template <class T> using gemm_result_t = std::conditional_t<std::same_as<T, double>, double, float>;

template <class T> MatrixView<T> matrix(const Tensor& t, int64_t offset = 0) {
  size_t r = t.shape().size();
  return {t.data<T>() + offset, t.strides()[r - 2], t.strides()[r - 1]};
}

// to[...] = f(value, column) for the elements of a block of a product whose rows are n long.
template <class C, class Y, class F> void finish(const C* from, const Block& at, Y* to, int64_t n, F f) {
  for (int64_t i = 0; i < at.rows; ++i)
    for (int64_t j = 0; j < at.columns; ++j) to[(at.row + i) * n + at.column + j] = convert<Y>(f(from[i * at.pitch + j], at.column + j));
}

void run_matmul(const Call& c, std::span<Tensor> out) {
  const Tensor &a = c.in[0], &b = c.in[1], &y = out[0];
  size_t r = a.shape().size();
  int64_t m = a.shape()[r - 2], k = a.shape()[r - 1], n = b.shape()[r - 1], batches = m * n == 0 ? 0 : y.numel() / (m * n);
  visit<floating_types>(a.dtype(), [&]<class T>(Type<T>) {
    using C = gemm_result_t<T>;
    // Batches share the threads where there are many; a block inside one stays on its batch's thread.
    parallel_for(batches, batches >= 8 ? 1 : batches, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        int64_t rest = i, a_at = 0, b_at = 0;
        for (size_t d = r - 2; d-- > 0;) {
          int64_t index = rest % y.shape()[d];
          rest /= y.shape()[d];
          a_at += index * a.strides()[d];
          b_at += index * b.strides()[d];
        }
        MatrixView<T> left = matrix<T>(a, a_at), right = matrix<T>(b, b_at);
        if (y.dtype() == dtype_of<C>) {
          gemm<T, C>(left, right, y.data<C>() + i * m * n, m, n, k);
          continue;
        }
        auto rounded = [to = y.data<T>() + i * m * n, n](C* from, const Block& at) { finish(from, at, to, n, [](C v, int64_t) { return v; }); };
        gemm<T, C>(left, right, nullptr, m, n, k, Finish<C>(rounded));
      }
    });
  });
}

enum class Activation { none, relu, gelu };

template <Activation activation> void run_linear(const Call& c, std::span<Tensor> out) {
  const Tensor &x = c.in[0], &w = c.in[1];
  int64_t m = x.size(0), k = x.size(1), n = w.size(0);
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    using C = gemm_result_t<T>;
    Tensor bias = c.has(2) ? c.in[2].contiguous() : Tensor();
    const T* b = bias.defined() ? bias.data<T>() : nullptr;
    T *to = out[0].data<T>(), *before = out.size() > 1 ? out[1].data<T>() : nullptr;  // linear_gelu's pre-activation, for the tape
    auto with = [&](C* from, const Block& at, auto biased) {
      if (before) finish(from, at, before, n, biased);
      if constexpr (activation == Activation::relu) finish(from, at, to, n, [&](C v, int64_t j) { return unary::Relu::f(biased(v, j)); });
      else if constexpr (activation == Activation::gelu) finish(from, at, to, n, [&](C v, int64_t j) { return unary::Gelu::f(biased(v, j)); });
      else if (b || !std::same_as<C, T>) finish(from, at, to, n, biased);
    };
    auto finished = [&](C* from, const Block& at) {
      if (b) with(from, at, [b](C v, int64_t j) { return v + C(compute_t<T>(b[j])); });
      else with(from, at, [](C v, int64_t) { return v; });
    };
    MatrixView<T> wt{w.data<T>(), w.strides()[1], w.strides()[0]};
    // To turn weights for so few rows takes about as long as their product does; for more, training has the memory.
    constexpr int64_t few = 128;
    if (!c.recording || m <= few) wt.lasting = w.storage().get();
    else Packed::drop(*w.storage());
    C* direct = nullptr;
    if constexpr (std::same_as<C, T>) direct = to;
    gemm<T, C>(matrix<T>(x), wt, direct, m, n, k, Finish<C>(finished));
  });
}

Metas infer_linear(const Call& c) {
  const Meta &x = c.in[0].meta(), &w = c.in[1].meta();
  HT_CHECK(w.shape.rank() == 2 && x.shape.rank() == 2 && x.shape[1] == w.shape[1], c.op->name, ": expected weight [out, in] with in = ",
           x.shape.rank() == 2 ? x.shape[1] : 0, ", got ", w);
  HT_CHECK(x.dtype == w.dtype, c.op->name, ": expected weight in x's dtype ", x.dtype, ", got ", w, "; cast one with to()",
           is_floating(x.dtype) && x.dtype != DType::f64 ? " or use amp::Autocast" : "");
  HT_CHECK(is_floating(x.dtype), c.op->name, ": expected a floating dtype, got ", x.dtype);
  if (c.has(2)) {
    const Meta& b = c.in[2].meta();
    HT_CHECK(b.shape == Shape({w.shape[0]}) && b.dtype == x.dtype, c.op->name, ": expected bias [", w.shape[0], "] (", x.dtype, "), got ", b);
  }
  return {Meta({x.shape[0], w.shape[0]}, x.dtype, x.device)};
}

// The number of rows of all dimensions but the last together.
int64_t rows_of(const Tensor& x) { return Shape(std::span(x.shape().begin(), x.shape().size() - 1)).numel(); }

// The gradients of y = x w^T + b from that of y.
Tensors linear_gradients(const Rule& r, const Tensor& g) {
  Tensors grads{r.needs(0) ? matmul(g, r.in(1)) : Tensor(), r.needs(1) ? matmul(g.t(), r.in(0)) : Tensor()};
  if (r.size() > 2) grads.push_back(r.needs(2) ? sum(g, {0}) : Tensor());
  return grads;
}

// The same outside a graph: gradients of weights that autocast cast down leave the product in f32, and go straight
// into their leaf's buffer. With a result of relu, `relued`, from the gradient of that.
Tensors fused_gradients(const Rule& r, Tensor g, Tensor relued = {}) {
  LinearGradAttrs a{.wanted = 0};
  Tensors into(3);
  for (size_t i = 0; i < r.size(); ++i) {
    if (!r.needs(i)) continue;
    a.wanted |= 1u << i;
    if (i == 0) continue;
    into[i] = r.destination(i);
    if (r.absorbed(i)) a.wide |= 1u << i;
  }
  Tensors grads(r.size());
  if (a.wanted == 0) return grads;
  constexpr int64_t large = 1 << 20;  // elements
  if (relued.defined() && g.numel() >= large) {  // apart, so that what came is gone before products take memory
    const bool bias = (a.wanted & 4u) != 0;
    if (bias) {
      Tensors both = call_all_into(op::relu_grad_sums, {relued, g}, Attrs::of(ReluGradSumsAttrs{(a.wide & 4u) != 0}), {{}, into[2]});
      g = both[0];
      grads[2] = both[1];
      into[2] = {};
      a.wanted &= ~4u;
    } else g = relu_grad(relued, g);
    if (a.wanted == 0) return grads;
    relued = {};
  }
  Tensors in{std::move(g), r.in(0), r.in(1)};
  if (relued.defined()) in.push_back(std::move(relued));
  Tensors all = call_all_into(op::linear_grad, std::move(in), Attrs::of(a), std::move(into));
  for (size_t i = 0; i < r.size(); ++i) if (a.wanted >> i & 1u) grads[i] = all[i];
  return grads;
}

// A weight's or bias's cast from f32.
bool absorb_cast(const Rule&, size_t i, const Producer& p) { return i > 0 && p.op == &op::cast && p.input.dtype == DType::f32; }

// With grad(0) and grad(1) of {y, pre-activation}.
Tensor gelu_gradient(const Rule& r, bool fused) {
  Tensor g;
  if (r.grad(0).defined()) g = fused ? binary::times_slope<unary::Gelu>(r.out(1), r.grad(0)) : unary::Gelu::df(r.out(1), {}, r.grad(0));
  if (!r.grad(1).defined()) return g;
  return g.defined() ? g + r.grad(1) : r.grad(1);
}

Metas infer_linear_grad(const Call& c) {
  const Meta &g = c.in[0].meta(), &x = c.in[1].meta(), &w = c.in[2].meta();
  auto a = c.as<LinearGradAttrs>();
  bool matrices = g.shape.rank() == 2 && x.shape.rank() == 2 && w.shape.rank() == 2;
  HT_CHECK(matrices && g.shape[0] == x.shape[0] && w.shape[0] == g.shape[1] && w.shape[1] == x.shape[1],
           "linear_grad: expected g [rows, out], x [rows, in] and weight [out, in], got ", g, ", ", x, " and ", w);
  HT_CHECK(is_floating(g.dtype) && x.dtype == g.dtype && w.dtype == g.dtype, "linear_grad: expected one floating dtype, got ", g, ", ", x, " and ", w);
  HT_CHECK(!c.has(3) || (c.in[3].shape() == g.shape && c.in[3].dtype() == g.dtype), "linear_grad: expected a result like g, ", g, ", got ", c.in[3].meta());
  Shape shapes[] = {x.shape, w.shape, {g.shape[1]}};
  Metas grads;
  for (uint32_t i = 0; i < 3; ++i) {
    bool wide = a.wide >> i & 1u && is_16bit_dtype(g.dtype);
    if (!(a.wanted >> i & 1u)) shapes[i] = {0};
    grads.push_back(Meta(shapes[i], wide ? DType::f32 : g.dtype, g.device));
  }
  return grads;
}

std::vector<Sample> linear_grad_samples() {
  std::vector<Sample> all;
  auto add = [&](int64_t m, int64_t k, int64_t n, bool relued, LinearGradAttrs a) {
    all.push_back({{{.shape = {m, n}}, {.shape = {m, k}}, {.shape = {n, k}}, {.shape = {m, n}, .low = -1, .high = 1, .dtype = {}, .differentiable = false, .present = relued}},
                   Attrs::of(a)});
  };
  add(1, 1, 1, false, {});
  add(2, 3, 4, true, {});
  add(7, 33, 5, false, {.wanted = 7, .wide = 6});
  add(33, 7, 16, true, {.wanted = 6, .wide = 2});
  add(4, 72, 67, true, {.wanted = 3, .wide = 4});
  add(130, 8, 24, true, {.wanted = 7, .wide = 6});
  add(65, 136, 40, false, {.wanted = 5, .wide = 0});
  add(3, 2, 257, false, {.wanted = 1, .wide = 0});
  add(0, 3, 2, true, {});
  add(3, 0, 2, false, {});
  return all;
}

Metas infer_relu_grad_sums(const Call& c) {
  const Meta &y = c.in[0].meta(), &g = c.in[1].meta();
  HT_CHECK(is_floating(y.dtype) && y.shape.rank() >= 2, "relu_grad_sums: expected a floating y [n, c, ...], got ", y);
  HT_CHECK(g.shape == y.shape && g.dtype == y.dtype, "relu_grad_sums: expected a gradient like y, ", y, ", got ", g);
  const bool wide = c.as<ReluGradSumsAttrs>().wide && is_16bit_dtype(y.dtype);
  return {laid_out_like(y, y.dtype), Meta({y.shape[1]}, wide ? DType::f32 : y.dtype, y.device)};
}

std::vector<Sample> relu_grad_sums_samples() {
  auto sample = [](Shape s, bool wide) {
    return Sample{{{.shape = s, .low = -1, .high = 1, .dtype = {}, .differentiable = false}, {.shape = s, .differentiable = false}},
                  Attrs::of(ReluGradSumsAttrs{wide})};
  };
  return {sample({1, 1}, false), sample({2, 3}, true), sample({33, 7}, false), sample({130, 72}, true), sample({300, 264}, false), sample({0, 4}, true),
          sample({3, 0}, false), sample({2, 3, 5}, true), sample({3, 16, 5, 7}, true), sample({2, 5, 4, 4}, false), sample({4, 8, 3, 3, 3}, true)};
}

std::vector<Sample> linear_samples() {
  auto sample = [](int64_t m, int64_t k, int64_t n, bool bias) {
    return Sample{{{.shape = {m, k}}, {.shape = {n, k}}, {.shape = {n}, .low = -2, .high = 2, .dtype = {}, .differentiable = true, .present = bias}}, {}};
  };
  return {sample(1, 1, 1, true), sample(2, 3, 4, true), sample(2, 3, 4, false), sample(7, 33, 5, true), sample(0, 3, 2, true),
          sample(3, 0, 2, true), sample(33, 7, 1, false), sample(4, 70, 67, true), sample(130, 8, 3, true)};
}

}  // namespace

namespace op {

constinit OpDef matmul = {
    .name = "matmul", .doc = "matrix product [..., m, k] times [..., k, n], accumulated in f32 or f64", .cast = Cast::lower,
    .infer = [](const Call& c) -> Metas {
      const Meta &a = c.in[0].meta(), &b = c.in[1].meta();
      HT_CHECK(is_floating(a.dtype), "matmul: expected a floating dtype, got ", a.dtype);
      HT_CHECK(a.dtype == b.dtype, "matmul: expected one dtype, got ", a.dtype, " and ", b.dtype, "; cast one with to() or use amp::Autocast");
      size_t r = a.shape.size();
      HT_CHECK(r >= 2 && b.shape.size() == r && a.shape[r - 1] == b.shape[r - 2], "matmul: expected [..., m, k] and [..., k, n], got ", a, " and ", b);
      Shape y = a.shape;
      for (size_t d = 0; d + 2 < r; ++d) HT_CHECK(a.shape[d] == b.shape[d], "matmul: batches differ: ", a, " and ", b);
      y[r - 1] = b.shape[r - 1];
      return {Meta(y, c.as<MatmulAttrs>().wide && is_16bit_dtype(a.dtype) ? DType::f32 : a.dtype, a.device)};
    },
    .saves = {.in = 3, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      DType t = r.in_meta().dtype;
      Tensor g = halftone::cast(r.grad(), t);
      return {r.needs(0) ? halftone::matmul(g, r.in(1).t()) : Tensor(), r.needs(1) ? halftone::matmul(r.in(0).t(), g) : Tensor()};
    },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      auto sample = [](Shape a, Shape b) { return Sample{{{.shape = a}, {.shape = b}}, Attrs::of(MatmulAttrs{})}; };
      return {sample({1, 1}, {1, 1}), sample({2, 3}, {3, 4}), sample({7, 33}, {33, 5}), sample({33, 7}, {7, 33}), sample({0, 3}, {3, 2}),
              sample({2, 0}, {0, 3}), sample({2, 3, 4}, {2, 4, 5}), sample({2, 3, 1, 2}, {2, 3, 2, 4}), sample({67, 70}, {70, 3})};
    },
    .kernel = {run_matmul}};

constinit OpDef linear = {
    .name = "linear", .doc = "x times weight transposed, plus bias", .cast = Cast::lower,
    .infer = infer_linear,
    .saves = {.in = 3, .out = 0},
    .backward = [](const Rule& r) { return linear_gradients(r, r.grad()); },
    .fused_backward = [](const Rule& r) { return fused_gradients(r, r.grad()); },
    .absorb = absorb_cast,
    .dtypes = {floating_types, floating_types},
    .samples = linear_samples,
    .kernel = {run_linear<Activation::none>}};

constinit OpDef linear_relu = {
    .name = "linear_relu", .doc = "relu of linear, rounded once", .cast = Cast::lower,
    .infer = infer_linear,
    .saves = {.in = 3, .out = 1},
    .backward = [](const Rule& r) { return linear_gradients(r, relu_grad(r.out(), r.grad())); },
    .fused_backward = [](const Rule& r) { return fused_gradients(r, r.take_grad(), r.out()); },
    .absorb = absorb_cast,
    .dtypes = {floating_types, floating_types},
    .samples = linear_samples,
    .kernel = {run_linear<Activation::relu>}};

constinit OpDef linear_gelu = {
    .name = "linear_gelu", .doc = "gelu of linear, rounded once", .cast = Cast::lower,
    .infer = [](const Call& c) {
      Metas m = infer_linear(c);
      m.push_back(m[0]);
      return m;
    },
    .aux = 1,
    .saves = {.in = 3, .out = 2},
    .backward = [](const Rule& r) { return linear_gradients(r, gelu_gradient(r, false)); },
    .fused_backward = [](const Rule& r) { return fused_gradients(r, gelu_gradient(r, true)); },
    .absorb = absorb_cast,
    .dtypes = {floating_types, floating_types},
    .samples = linear_samples,
    .kernel = {run_linear<Activation::gelu>}};

constinit OpDef linear_grad = {
    .name = "linear_grad", .doc = "the gradients of linear, or of linear_relu from its result, over x, weight and bias", .cast = Cast::keep,
    .infer = infer_linear_grad,
    .dtypes = {floating_types, floating_types},
    .samples = linear_grad_samples,
    .kernel = {linear_grad_by_parts}};

constinit OpDef relu_grad_sums = {
    .name = "relu_grad_sums", .doc = "relu_grad, and its sums over all dimensions but the second: a bias's gradient", .cast = Cast::keep,
    .infer = infer_relu_grad_sums,
    .dtypes = {floating_types, floating_types},
    .samples = relu_grad_sums_samples,
    .kernel = {relu_grad_sums_by_parts}};

}  // namespace op

void linear_grad_by_parts(const Call& c, std::span<Tensor> out) {
  auto a = c.as<LinearGradAttrs>();
  const bool bias = (a.wanted & 4u) != 0, wide_bias = (a.wide & 4u) != 0;
  Tensor g = c.in[0];
  if (c.has(3) && bias) g = call_all_into(op::relu_grad_sums, {c.in[3], g}, Attrs::of(ReluGradSumsAttrs{wide_bias}), {{}, out[2]})[0];
  else if (c.has(3)) g = relu_grad(c.in[3], g);
  if (a.wanted & 1u) call_into(op::matmul, {g, c.in[2]}, Attrs::of(MatmulAttrs{}), out[0]);
  if (a.wanted & 2u) call_into(op::matmul, {g.t(), c.in[1]}, Attrs::of(MatmulAttrs{(a.wide & 2u) != 0}), out[1]);
  if (bias && !c.has(3)) call_into(reduce::def<reduce::Sum>, {g}, Attrs::of(reduce::Dims{1, false, wide_bias}), out[2]);
}

void relu_grad_sums_by_parts(const Call& c, std::span<Tensor> out) {
  call_into(binary::def<binary::ReluGrad>, {c.in[0], c.in[1]}, {}, out[0]);
  const uint32_t but_second = ((1u << c.in[0].shape().rank()) - 1u) & ~2u;
  call_into(reduce::def<reduce::Sum>, {out[0]}, Attrs::of(reduce::Dims{but_second, false, c.as<ReluGradSumsAttrs>().wide}), out[1]);
}

std::span<OpDef* const> matmul_ops() {
  static constexpr OpDef* all[] = {&op::matmul, &op::linear, &op::linear_relu, &op::linear_gelu, &op::linear_grad, &op::relu_grad_sums};
  return all;
}

Tensor matmul(const Tensor& a, const Tensor& b) {
  HT_CHECK(a.defined() && b.defined(), "matmul: a tensor is undefined");
  HT_CHECK(a.rank() > 0 && b.rank() > 0, "matmul: expected at least one dimension, got ", a.meta(), " and ", b.meta());
  if (a.rank() == 1) return squeeze(matmul(unsqueeze(a, 0), b), b.rank() == 1 ? 0 : -2);
  if (b.rank() == 1) return squeeze(matmul(a, unsqueeze(b, 1)), -1);
  if (a.rank() == 2 && b.rank() == 2) return call(op::matmul, {a, b});
  int64_t k = a.shape().back();
  HT_CHECK(k == b.size(-2), "matmul: expected [..., m, k] and [..., k, n], got ", a.meta(), " and ", b.meta());
  if (b.rank() == 2) {  // one right factor for all batches: fold them into the rows
    Shape y = a.shape();
    y[y.size() - 1] = b.size(1);
    return reshape(call(op::matmul, {reshape(a, {rows_of(a), k}), b}), y);
  }
  auto batch = [](const Tensor& t) { return Shape(std::span(t.shape().begin(), t.shape().size() - 2)); };
  Shape lead = broadcast("matmul", batch(a), batch(b));
  auto with = [&](const Tensor& t) {
    Shape s = lead;
    s.push_back(t.size(-2));
    s.push_back(t.size(-1));
    return expand(t, s);
  };
  return call(op::matmul, {with(a), with(b)});
}

namespace {
void check_rank(const char* who, const Tensor& a, const Tensor& b, int rank, const char* expected) {
  HT_CHECK(a.defined() && b.defined(), who, ": a tensor is undefined");
  HT_CHECK(a.rank() == rank && b.rank() == rank, who, ": expected ", expected, ", got ", a.meta(), " and ", b.meta());
}
Tensor add_product(const char* who, const Tensor& c, const Tensor& product, AddmmOptions o) {
  Tensor p = o.alpha == 1 ? product : product * o.alpha;
  if (o.beta == 0) return p;
  HT_CHECK(c.defined(), who, ": c is undefined; it may be with beta 0");
  HT_CHECK(broadcast(who, c.shape(), p.shape()) == p.shape(), who, ": cannot broadcast c ", c.meta(), " to ", p.shape());
  // In the product's dtype, which autocast may have lowered: a sum must not climb back.
  Tensor base = cast(c, p.dtype());
  return (o.beta == 1 ? base : base * o.beta) + p;
}
}  // namespace

Tensor bmm(const Tensor& a, const Tensor& b) {
  check_rank("bmm", a, b, 3, "[b, m, k] and [b, k, n]");
  HT_CHECK(a.size(0) == b.size(0), "bmm: batches differ: ", a.meta(), " and ", b.meta());
  return matmul(a, b);
}
Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, AddmmOptions o) {
  check_rank("addmm", a, b, 2, "[m, k] and [k, n]");
  return add_product("addmm", c, matmul(a, b), o);
}
Tensor baddbmm(const Tensor& c, const Tensor& a, const Tensor& b, AddmmOptions o) {
  check_rank("baddbmm", a, b, 3, "[b, m, k] and [b, k, n]");
  return add_product("baddbmm", c, bmm(a, b), o);
}
Tensor dot(const Tensor& a, const Tensor& b) {
  check_rank("dot", a, b, 1, "two vectors");
  HT_CHECK(a.size(0) == b.size(0), "dot: expected vectors of one length, got ", a.meta(), " and ", b.meta());
  return matmul(a, b);
}
Tensor outer(const Tensor& a, const Tensor& b) {
  check_rank("outer", a, b, 1, "two vectors");
  return unsqueeze(a, 1) * unsqueeze(b, 0);
}

namespace {
Tensor any_rank_linear(const OpDef& op, const Tensor& x, const Tensor& w, const Tensor& b) {
  HT_CHECK(x.defined() && w.defined(), op.name, ": x or weight is undefined");
  HT_CHECK(w.rank() == 2 && x.rank() > 0, op.name, ": expected x [..., in] and weight [out, in], got ", x.meta(), " and ", w.meta());
  HT_CHECK(x.shape().back() == w.size(1), op.name, ": expected x [..., ", w.size(1), "] for weight ", w.meta(), ", got ", x.meta());
  Tensors in{x.rank() == 2 ? x : reshape(x, {rows_of(x), w.size(1)}), w};
  if (b.defined()) in.push_back(b);
  Tensor y = call(op, std::move(in));
  if (x.rank() == 2) return y;
  Shape s = x.shape();
  s[s.size() - 1] = w.size(0);
  return reshape(y, s);
}
}  // namespace

Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b) { return any_rank_linear(op::linear, x, w, b); }
Tensor linear_relu(const Tensor& x, const Tensor& w, const Tensor& b) { return any_rank_linear(op::linear_relu, x, w, b); }
Tensor linear_gelu(const Tensor& x, const Tensor& w, const Tensor& b) { return any_rank_linear(op::linear_gelu, x, w, b); }

}  // namespace halftone
