// The softmax family on the CPU.
#include "halftone/ops/softmax.h"

#include <algorithm>
#include <cmath>

#include "halftone/ops/all.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/vector_math.h"

namespace halftone {
namespace {

template <class T> using line_t = std::conditional_t<std::same_as<T, double>, double, float>;

// A line of n elements x(i), given to y(i, value).
template <bool logarithm, class C, class X, class Y> void line(int64_t n, X x, Y y) {
  C high = row_max(n, x, reduce::Amax::start<C>());  // a NaN shows in the sum
  double total = row_sum(n, [x, high](int64_t i) { return vector_exp(x(i) - high); });
  C scale = static_cast<C>(logarithm ? std::log(total) : 1 / total);
  for (int64_t i = 0; i < n; ++i) {
    C v = x(i) - high;
    y(i, logarithm ? v - scale : vector_exp(v) * scale);
  }
}

template <bool logarithm> void run(const Call& c, std::span<Tensor> out) {
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    using C = line_t<T>;
    visit<floating_types>(out[0].dtype(), [&]<class Y>(Type<Y>) {
      lines<2>({&out[0], &c.in[0]}, c.as<int>(), [&](auto at, auto step, int64_t n) {
        const T* x = c.in[0].data<T>() + at[1];
        Y* y = out[0].data<Y>() + at[0];
        if (step[0] == 1 && step[1] == 1) line<logarithm, C>(n, [x](int64_t i) { return C(x[i]); }, [y](int64_t i, C v) { y[i] = Y(v); });
        else line<logarithm, C>(n, [x, dx = step[1]](int64_t i) { return C(x[i * dx]); }, [y, dy = step[0]](int64_t i, C v) { y[i * dy] = Y(v); });
      });
    });
  });
}

// in: y, g. softmax: y * (g - sum(g * y)); log_softmax: g - exp(y) * sum(g).
template <bool logarithm> void run_grad(const Call& c, std::span<Tensor> out) {
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    using C = line_t<T>;
    visit<floating_types>(out[0].dtype(), [&]<class X>(Type<X>) {
      const T *y = c.in[0].data<T>(), *g = c.in[1].data<T>();
      X* to = out[0].data<X>();
      lines<3>({&out[0], &c.in[0], &c.in[1]}, c.as<int>(), [&](auto at, auto step, int64_t n) {
        double total = 0;
        auto yi = [&](int64_t i) { return C(y[at[1] + i * step[1]]); };
        auto gi = [&](int64_t i) { return C(g[at[2] + i * step[2]]); };
        for (int64_t i = 0; i < n; ++i) total += logarithm ? double(gi(i)) : double(gi(i)) * double(yi(i));
        C s = static_cast<C>(total);
        for (int64_t i = 0; i < n; ++i) to[at[0] + i * step[0]] = X(logarithm ? gi(i) - std::exp(yi(i)) * s : yi(i) * (gi(i) - s));
      });
    });
  });
}

DType wide(DType t) { return is_16bit_dtype(t) ? DType::f32 : t; }

Metas infer(const Call& c) {
  const Meta& x = c.in[0].meta();
  HT_CHECK(is_floating(x.dtype), c.op->name, ": expected a floating dtype, got ", x.dtype, "; cast x with to()");
  return {Meta(x.shape, c.op == &op::log_softmax ? wide(x.dtype) : x.dtype, x.device)};
}

Metas infer_grad(const Call& c) {
  const Meta &y = c.in[0].meta(), &g = c.in[1].meta();
  HT_CHECK(y.shape == g.shape && y.dtype == g.dtype, c.op->name, ": expected a gradient like y, ", y, ", got ", g);
  return {Meta(y.shape, c.as<SoftmaxGradAttrs>().dtype, y.device)};
}

std::vector<Sample> samples_with(int inputs, bool grad) {
  std::vector<Sample> all;
  for (auto [shape, dim] : {std::pair{Shape{7}, 0}, {Shape{1}, 0}, {Shape{2, 3}, 1}, {Shape{2, 3}, 0}, {Shape{3, 257}, 1}, {Shape{33, 5}, 0},
                            {Shape{2, 3, 4}, 1}, {Shape{0, 3}, 1}, {Shape{}, 0}, {Shape{2, 1100}, 1}}) {
    Sample s;
    for (int i = 0; i < inputs; ++i) s.in.push_back({.shape = shape});
    s.attrs = grad ? Attrs::of(SoftmaxGradAttrs{dim, DType::f32}) : Attrs::of(dim);
    all.push_back(s);
  }
  return all;
}

Tensor sum_along(const Tensor& x, int dim) { return reduce::apply<reduce::Sum>(x, {x.rank() ? 1u << dim : 0u, true}); }

}  // namespace

namespace op {

constinit OpDef softmax = {
    .name = "softmax", .doc = "exp(x) / sum(exp(x)) along a dimension", .cast = Cast::keep,
    .infer = infer,
    .saves = {.in = 0, .out = 1},
    .backward = [](const Rule& r) -> Tensors {
      const Tensor &y = r.out(), &g = r.grad();
      return {y * (g - sum_along(g * y, r.as<int>()))};
    },
    .fused_backward = [](const Rule& r) -> Tensors {
      return {call(op::softmax_grad, {r.out(), r.grad()}, Attrs::of(SoftmaxGradAttrs{r.as<int>(), r.in_meta().dtype}))};
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return samples_with(1, false); },
    .kernel = {run<false>}};

constinit OpDef softmax_grad = {
    .name = "softmax_grad", .doc = "the gradient of softmax from its output y: y * (g - sum(g * y))", .cast = Cast::keep,
    .infer = infer_grad,
    .dtypes = {floating_types, floating_types},
    .samples = [] { return samples_with(2, true); },
    .kernel = {run_grad<false>}};

constinit OpDef log_softmax = {
    .name = "log_softmax", .doc = "x - log(sum(exp(x))) along a dimension; f32 for 16-bit x", .cast = Cast::keep,
    .infer = infer,
    .saves = {.in = 0, .out = 1},
    .backward = [](const Rule& r) -> Tensors {
      const Tensor &y = r.out(), &g = r.grad();
      return {g - exp(y) * sum_along(g, r.as<int>())};
    },
    .fused_backward = [](const Rule& r) -> Tensors {
      return {call(op::log_softmax_grad, {r.out(), r.grad()}, Attrs::of(SoftmaxGradAttrs{r.as<int>(), r.in_meta().dtype}))};
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return samples_with(1, false); },
    .kernel = {run<true>}};

constinit OpDef log_softmax_grad = {
    .name = "log_softmax_grad", .doc = "the gradient of log_softmax from its output y: g - exp(y) * sum(g)", .cast = Cast::keep,
    .infer = infer_grad,
    .dtypes = {floating_types, floating_types},
    .samples = [] { return samples_with(2, true); },
    .kernel = {run_grad<true>}};

}  // namespace op

std::span<OpDef* const> softmax_ops() {
  static constexpr OpDef* all[] = {&op::softmax, &op::softmax_grad, &op::log_softmax, &op::log_softmax_grad};
  return all;
}

Tensor softmax(const Tensor& x, int64_t dim) {
  HT_CHECK(x.defined(), "softmax: x is undefined");
  return call(op::softmax, {x}, Attrs::of(normalize_dim("softmax", dim, x.rank())));
}
Tensor log_softmax(const Tensor& x, int64_t dim) {
  HT_CHECK(x.defined(), "log_softmax: x is undefined");
  return call(op::log_softmax, {x}, Attrs::of(normalize_dim("log_softmax", dim, x.rank())));
}

}  // namespace halftone
