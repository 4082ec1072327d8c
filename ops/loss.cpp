// Losses: cross_entropy and nll_loss as operators with gradient operators of their own, the elementwise ones that are
// common as one function each, others in tensor algebra. All of them compute 16-bit inputs in f32.
#include "halftone/ops/loss.h"

#include <cmath>

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/elementwise_cpu.h"
#include "halftone/ops/index.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/softmax.h"
#include "halftone/ops/vector_math.h"

namespace halftone {
namespace {

using Options = CrossEntropyAttrs;
DType wide(DType t) { return is_16bit_dtype(t) ? DType::f32 : t; }

// out: loss; for the tape, log-sum-exp of each row and the number of targets that count.
void run_cross_entropy(const Call& c, std::span<Tensor> out) {
  auto o = c.as<Options>();
  Tensor x = c.in[0].contiguous(), target = c.in[1].contiguous();
  int64_t rows = x.size(0), classes = x.size(1);
  const int64_t* t = target.data<int64_t>();
  for (int64_t i = 0; i < rows; ++i)
    HT_CHECK(t[i] == o.ignore_index || (t[i] >= 0 && t[i] < classes), "cross_entropy: target ", t[i], " at row ", i, " is out of range for ", classes,
             " classes");
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    using C = accumulate_t<T>;
    const T* p = x.data<T>();
    std::vector<C> losses(static_cast<size_t>(rows)), lse(losses.size());
    parallel_for(rows, std::max<int64_t>(1, (1 << 12) / std::max<int64_t>(classes, 1)), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* row = p + i * classes;
        C high = row_max(classes, [row](int64_t k) { return C(row[k]); }, reduce::Amax::start<C>());  // a NaN shows in the sum
        double total = row_sum(classes, [row, high](int64_t k) { return vector_exp(C(row[k]) - high); });
        double all = o.label_smoothing == 0 ? 0 : row_sum(classes, [row](int64_t k) { return C(row[k]); });
        auto at = static_cast<size_t>(i);
        lse[at] = high + static_cast<C>(std::log(total));
        if (t[i] == o.ignore_index) continue;
        double nll = (high - C(row[t[i]])) + std::log(total);  // shifted first: large logits lose no digits
        double uniform = o.label_smoothing == 0 ? 0 : (high - all / static_cast<double>(classes)) + std::log(total);
        losses[at] = static_cast<C>((1 - o.label_smoothing) * nll + o.label_smoothing * uniform);
      }
    });
    double sum = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < rows; ++i) {
      sum += losses[static_cast<size_t>(i)];
      count += t[i] != o.ignore_index;
    }
    C* y = out[0].data<C>();
    if (o.reduction == Reduction::none) std::copy(losses.begin(), losses.end(), y);
    else *y = static_cast<C>(o.reduction == Reduction::sum ? sum : sum / static_cast<double>(count));
    if (out.size() == 1) return;
    std::copy(lse.begin(), lse.end(), out[1].data<C>());
    *out[2].data<C>() = static_cast<C>(count);
  });
}

// in: x, target, log-sum-exp, count, gradient of the loss.
void run_cross_entropy_grad(const Call& c, std::span<Tensor> out) {
  auto o = c.as<Options>();
  Tensor x = c.in[0].contiguous(), target = c.in[1].contiguous(), sums = c.in[2].contiguous(), gradient = c.in[4].contiguous();
  int64_t rows = x.size(0), classes = x.size(1);
  const int64_t* t = target.data<int64_t>();
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    using C = accumulate_t<T>;
    const T* p = x.data<T>();
    T* to = out[0].data<T>();
    const C *lse = sums.data<C>(), *g = gradient.data<C>();
    C per_row = o.reduction == Reduction::mean ? C(1) / *c.in[3].data<C>() : C(1);
    C off = static_cast<C>(o.label_smoothing / static_cast<double>(classes)), on = static_cast<C>(1 - o.label_smoothing);
    parallel_for(rows, std::max<int64_t>(1, (1 << 12) / std::max<int64_t>(classes, 1)), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        bool counts = t[i] != o.ignore_index;
        C scale = (o.reduction == Reduction::none ? g[i] : g[0]) * per_row;
        const T* row = p + i * classes;
        T* gradient_row = to + i * classes;
        if (!counts) {
          std::fill_n(gradient_row, classes, T(0));
          continue;
        }
        auto slope = [&, sum = lse[i]](int64_t k, C q) { return T(scale * (vector_exp(C(row[k]) - sum) - q)); };
        for (int64_t k = 0; k < classes; ++k) gradient_row[k] = slope(k, off);
        gradient_row[t[i]] = slope(t[i], off + on);
      }
    });
  });
}

// In public operators, so that it can be differentiated again: g * valid * (softmax(x) - q).
Tensors cross_entropy_backward(const Rule& r) {
  auto o = r.as<Options>();
  const Tensor &x = r.in(0), &target = r.in(1);
  int64_t classes = x.size(1);
  Tensor logp = log_softmax(x, 1);
  DType t = logp.dtype();
  Tensor q = one_hot(target, classes, t) * (1 - o.label_smoothing) + o.label_smoothing / static_cast<double>(classes);
  Tensor row = ne(target, o.ignore_index).to(t) * r.grad();
  if (o.reduction == Reduction::mean) row = row / maximum(r.out(2).detach(), 1);  // none counts: the gradient is 0
  return {((exp(logp) - q) * unsqueeze(row, 1)).to(x.dtype()), {}};
}

std::vector<Sample> samples(bool grad) {
  std::vector<Sample> all;
  auto add = [&](int64_t n, int64_t classes, Options o) {
    Sample s{{{.shape = {n, classes}}, {.shape = {n}, .low = 0, .high = double(classes), .dtype = DType::i64, .differentiable = false}}, Attrs::of(o)};
    if (grad) {
      s.in.push_back({.shape = {n}, .low = 2, .high = 4, .wide = true});
      s.in.push_back({.shape = {}, .low = 1, .high = 9, .wide = true});
      s.in.push_back({.shape = o.reduction == Reduction::none ? Shape{n} : Shape{}, .low = 1, .high = 2, .wide = true});
    }
    all.push_back(s);
  };
  add(1, 1, {-100, 0, Reduction::mean});
  add(1, 7, {-100, 0, Reduction::mean});
  add(7, 5, {-100, 0, Reduction::sum});
  add(33, 10, {-100, 0, Reduction::mean});
  add(5, 4, {-100, 0, Reduction::none});
  add(5, 4, {2, 0, Reduction::mean});
  add(5, 4, {1, 0.1, Reduction::sum});
  add(6, 3, {-100, 0.2, Reduction::mean});
  add(3, 257, {-100, 0.1, Reduction::none});
  add(130, 1030, {-100, 0, Reduction::mean});
  return all;
}

// ---- nll_loss, which is linear in x, and its adjoint

Tensors with(const Tensor& x, const Tensor& target, const Tensor& weight) { return weight.defined() ? Tensors{x, target, weight} : Tensors{x, target}; }
// The gradients of an operator of which only the first input has one.
Tensors first_of(const Rule& r, const Tensor& g) {
  Tensors grads(r.size());
  grads[0] = g;
  return grads;
}

Tensor nll_weight(const Call& c) { return c.has(2) ? c.in[2].contiguous() : Tensor(); }
Tensor checked_targets(const Call& c, const NllAttrs& a, int64_t classes) {
  Tensor target = c.in[1].contiguous();
  const int64_t* t = target.data<int64_t>();
  for (int64_t i = 0; i < target.numel(); ++i)
    HT_CHECK(t[i] == a.ignore_index || (t[i] >= 0 && t[i] < classes), "nll_loss: target ", t[i], " at row ", i, " is out of range for ", classes, " classes");
  return target;
}

// in: x, target, weight.
void run_nll_loss(const Call& c, std::span<Tensor> out) {
  auto a = c.as<NllAttrs>();
  const Tensor& x = c.in[0];
  Tensor target = checked_targets(c, a, x.size(1)), weight = nll_weight(c);
  const int64_t* t = target.data<int64_t>();
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    using C = accumulate_t<T>;
    const T* p = x.data<T>();
    const C* w = weight.defined() ? weight.data<C>() : nullptr;
    C* y = out[0].data<C>();
    double total = 0, weights = 0;
    for (int64_t i = 0; i < x.size(0); ++i) {
      bool counts = t[i] != a.ignore_index;
      C scale = counts ? w ? w[t[i]] : C(1) : C(0);
      C loss = counts ? -scale * C(p[i * x.strides()[0] + t[i] * x.strides()[1]]) : C(0);
      if (a.reduction == Reduction::none) y[i] = loss;
      total += loss;
      weights += scale;
    }
    if (a.reduction != Reduction::none) *y = static_cast<C>(a.reduction == Reduction::mean ? total / weights : total);
  });
}

// in: gradient of the loss, target, weight.
void run_nll_loss_grad(const Call& c, std::span<Tensor> out) {
  auto a = c.as<NllAttrs>();
  Tensor g = c.in[0].contiguous(), target = checked_targets(c, a, a.classes), weight = nll_weight(c);
  const int64_t* t = target.data<int64_t>();
  call_all(op::fill, {out[0]}, Attrs::of(Scalar(0)));
  visit<floating_types>(a.dtype, [&]<class T>(Type<T>) {
    using C = accumulate_t<T>;
    const C *from = g.data<C>(), *w = weight.defined() ? weight.data<C>() : nullptr;
    T* to = out[0].data<T>();
    double weights = 0;
    auto scale = [&](int64_t i) { return w ? w[t[i]] : C(1); };
    for (int64_t i = 0; i < target.numel(); ++i) weights += t[i] == a.ignore_index ? C(0) : scale(i);
    C per_row = a.reduction == Reduction::mean ? static_cast<C>(1 / weights) : C(1);
    for (int64_t i = 0; i < target.numel(); ++i)
      if (t[i] != a.ignore_index) to[i * a.classes + t[i]] = T(-(a.reduction == Reduction::none ? from[i] : *from) * per_row * scale(i));
  });
}

void check_nll(const Call& c, const Shape& rows, int64_t classes, DType w) {
  const Meta& t = c.in[1].meta();
  HT_CHECK(t.dtype == DType::i64 && t.shape == rows, "nll_loss: expected target ", rows, " (i64), got ", t);
  HT_CHECK(classes > 0, "nll_loss: expected at least one class");
  if (c.has(2))
    HT_CHECK(c.in[2].rank() == 1 && c.in[2].numel() == classes && c.in[2].dtype() == w, "nll_loss: expected weight [", classes, "] (", w, "), got ", c.in[2].meta());
}

std::vector<Sample> nll_samples(bool grad) {
  std::vector<Sample> all;
  auto add = [&](int64_t n, int64_t classes, bool weighted, int64_t ignored, Reduction reduction) {
    Shape first = grad ? (reduction == Reduction::none ? Shape{n} : Shape{}) : Shape{n, classes};
    Sample s{{{.shape = first, .low = -2, .high = 2, .wide = grad},
              {.shape = {n}, .low = 0, .high = double(classes), .dtype = DType::i64, .differentiable = false},
              {.shape = {classes}, .low = .5, .high = 2, .dtype = {}, .differentiable = false, .present = weighted, .wide = true}},
             Attrs::of(NllAttrs{ignored, reduction, grad ? classes : 0, grad ? DType::f64 : DType{}})};
    if (grad) s.in[0].dtype = s.in[2].dtype = DType::f64;  // its result's dtype is an attribute
    all.push_back(s);
  };
  add(1, 1, false, -100, Reduction::mean);
  add(7, 5, true, -100, Reduction::mean);
  add(33, 10, false, 3, Reduction::mean);
  add(33, 4, true, 2, Reduction::sum);
  add(5, 257, true, -100, Reduction::none);
  add(6, 3, false, 1, Reduction::none);
  add(257, 2, true, 0, Reduction::mean);
  add(1500, 7, false, -100, Reduction::sum);
  add(9, 3, true, -5, Reduction::sum);
  return all;
}

template <class Op> constexpr OpDef elementwise_loss() {
  OpDef d = binary::describe<Op>();
  d.samples = [] {
    auto all = binary::samples(elementwise::low_of<Op>(), elementwise::high_of<Op>(), true, binary::attrs_with<Op>);
    all.resize(elementwise::sample_shapes.size());  // not those with a number, which is outside [0, 1]
    return all;
  };
  d.kernel[0] = binary::run_cpu<Op>;
  return d;
}
template <class Op> Tensor apply(const OpDef& op, const Operand& a, const Operand& b) {
  return binary::apply(op, floating_types, a, b, binary::attrs_with<Op>);
}

}  // namespace

namespace binary {

Tensor BinaryCrossEntropy::da(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) {
  return g * ((a - b) / maximum(a * (1 - a), 1e-12));
}
Tensor BinaryCrossEntropy::db(const Operand& a, const Operand&, const Tensor&, const Tensor& g) {
  return g * (maximum(log1p(-a.tensor()), -100) - maximum(log(a.tensor()), -100));
}
Tensor BceWithLogits::da(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) { return g * (sigmoid(a.tensor()) - b); }
Tensor BceWithLogits::db(const Operand& a, const Operand&, const Tensor&, const Tensor& g) { return -(g * a); }

}  // namespace binary

namespace op {

constinit OpDef squared_error = elementwise_loss<binary::SquaredError>();
constinit OpDef binary_cross_entropy = [] {
  OpDef d = elementwise_loss<binary::BinaryCrossEntropy>();
  d.ban = "binary_cross_entropy_with_logits";
  return d;
}();
constinit OpDef binary_cross_entropy_with_logits = elementwise_loss<binary::BceWithLogits>();

constinit OpDef nll_loss = {
    .name = "nll_loss", .doc = "minus the log-probability of the target class, weighted", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& x = c.in[0].meta();
      HT_CHECK(is_floating(x.dtype) && x.shape.rank() == 2, "nll_loss: expected x [n, classes] of a floating dtype, got ", x);
      Shape rows{x.shape[0]};
      check_nll(c, rows, x.shape[1], wide(x.dtype));
      return {Meta(c.as<NllAttrs>().reduction == Reduction::none ? rows : Shape{}, wide(x.dtype), x.device)};
    },
    .saves = {.in = 6, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      auto a = r.as<NllAttrs>();
      a.classes = r.in_meta().shape[1];
      a.dtype = r.in_meta().dtype;
      return first_of(r, call(op::nll_loss_grad, with(r.grad(), r.in(1), r.size() > 2 ? r.in(2) : Tensor()), Attrs::of(a)));
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return nll_samples(false); },
    .kernel = {run_nll_loss}};

constinit OpDef nll_loss_grad = {
    .name = "nll_loss_grad", .doc = "the gradient of nll_loss over x", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      auto a = c.as<NllAttrs>();
      const Meta& g = c.in[0].meta();
      Shape rows = c.in[1].shape();
      check_nll(c, rows, a.classes, wide(a.dtype));
      Shape expected = a.reduction == Reduction::none ? rows : Shape{};
      HT_CHECK(g.shape == expected && g.dtype == wide(a.dtype), "nll_loss_grad: expected a gradient ", expected, " (", wide(a.dtype), "), got ", g);
      return {Meta({rows[0], a.classes}, a.dtype, g.device)};
    },
    .saves = {.in = 6, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      return first_of(r, call(op::nll_loss, with(r.grad(), r.in(1), r.size() > 2 ? r.in(2) : Tensor()), r.attrs()));
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return nll_samples(true); },
    .kernel = {run_nll_loss_grad}};

constinit OpDef cross_entropy = {
    .name = "cross_entropy", .doc = "-log(softmax(x)) at the target class", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta &x = c.in[0].meta(), &t = c.in[1].meta();
      HT_CHECK(is_floating(x.dtype) && x.shape.rank() == 2, "cross_entropy: expected x [n, classes] of a floating dtype, got ", x);
      HT_CHECK(t.dtype == DType::i64 && t.shape == Shape({x.shape[0]}), "cross_entropy: expected target [", x.shape[0], "] (i64), got ", t);
      HT_CHECK(x.shape[1] > 0, "cross_entropy: expected at least one class, got x ", x);
      auto o = c.as<Options>();
      HT_CHECK(o.label_smoothing >= 0 && o.label_smoothing <= 1, "cross_entropy: expected label_smoothing in [0, 1], got ", o.label_smoothing);
      DType w = wide(x.dtype);
      return {Meta(o.reduction == Reduction::none ? t.shape : Shape{}, w, x.device), Meta(t.shape, w, x.device), Meta({}, w, x.device)};
    },
    .aux = 2,
    .saves = {.in = 3, .out = 6},
    .backward = cross_entropy_backward,
    .fused_backward = [](const Rule& r) -> Tensors {
      return {call(op::cross_entropy_grad, {r.in(0), r.in(1), r.out(1), r.out(2), r.grad()}, r.attrs()), {}};
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return samples(false); },
    .kernel = {run_cross_entropy}};

constinit OpDef cross_entropy_grad = {
    .name = "cross_entropy_grad", .doc = "the gradient of cross_entropy over x, from the log-sum-exp of its rows", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta &x = c.in[0].meta(), &t = c.in[1].meta();
      HT_CHECK(is_floating(x.dtype) && x.shape.rank() == 2, "cross_entropy_grad: expected x [n, classes] of a floating dtype, got ", x);
      Shape rows{x.shape[0]}, gradient = c.as<Options>().reduction == Reduction::none ? rows : Shape{};
      HT_CHECK(t.dtype == DType::i64 && t.shape == rows, "cross_entropy_grad: expected target [", x.shape[0], "] (i64), got ", t);
      Shape expected[] = {rows, {}, gradient};
      for (size_t i = 0; i < 3; ++i) {
        const Meta& m = c.in[i + 2].meta();
        HT_CHECK(m.shape == expected[i] && m.dtype == wide(x.dtype), "cross_entropy_grad: expected input ", i + 2, " ", expected[i], " (", wide(x.dtype),
                 "), got ", m);
      }
      return {Meta(x.shape, x.dtype, x.device)};
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return samples(true); },
    .kernel = {run_cross_entropy_grad}};

}  // namespace op

std::span<OpDef* const> loss_ops() {
  static constexpr OpDef* all[] = {&op::cross_entropy,        &op::cross_entropy_grad,               &op::nll_loss,     &op::nll_loss_grad,
                                   &op::binary_cross_entropy, &op::binary_cross_entropy_with_logits, &op::squared_error, &op::ctc_loss,
                                   &op::ctc_loss_grad};
  return all;
}

namespace {

Tensor widened(const char* who, const Tensor& x) {
  HT_CHECK(x.defined(), who, ": a tensor is undefined");
  HT_CHECK(is_floating(x.dtype()), who, ": expected a floating dtype, got ", x.meta());
  return x.to(wide(x.dtype()));
}
// A target, which may be of integers or bool, and may be smaller than x but not make it larger: [n, 1] and [n] are n losses, not n * n.
Tensor target_like(const char* who, const Tensor& target, const Tensor& x) {
  HT_CHECK(target.defined(), who, ": a tensor is undefined");
  if (target.shape() != x.shape()) {
    const Shape both = broadcast(who, x.shape(), target.shape());
    HT_CHECK(both == x.shape(), who, ": x ", x.shape(), " and its target ", target.shape(), " would be compared as ", both,
             "; give both one shape, as in target.view(x.shape())");
  }
  return is_floating(target.dtype()) ? target.to(wide(target.dtype())) : target.to(x.dtype());
}
Tensor reduced(const Tensor& losses, Reduction reduction) {
  return reduction == Reduction::none ? losses : reduction == Reduction::sum ? sum(losses) : mean(losses);
}

// [n, c, d1, ...] with a target [n, d1, ...] as rows [n d1 ..., c] and their targets.
struct ClassRows { Tensor x, target; Shape shape; };
ClassRows class_rows(const char* who, const Tensor& x, const Tensor& target) {
  Tensor t = target.to(DType::i64);
  if (x.rank() == 2) return {x, t, t.shape()};
  Shape order{0}, rows = x.shape();
  for (int d = 2; d < x.rank(); ++d) order.push_back(d);
  order.push_back(1);
  rows.erase(1);
  HT_CHECK(t.shape() == rows, who, ": expected target ", rows, ", got ", target.meta());
  return {reshape(permute(x, order), {rows.numel(), x.size(1)}), reshape(t, {rows.numel()}), rows};
}
Tensor class_weight(const char* who, const Tensor& weight, const Tensor& x) {
  if (!weight.defined()) return {};
  HT_CHECK(weight.shape() == Shape({x.size(1)}) && is_floating(weight.dtype()), who, ": expected weight [", x.size(1), "] of a floating dtype, got ",
           weight.meta());
  return weight.to(wide(x.dtype())).detach();
}

// Targets that are distributions.
Tensor soft_cross_entropy(const Tensor& x, const Tensor& target, const Tensor& weight, const CrossEntropyOptions& o) {
  HT_CHECK(target.shape() == x.shape(), "cross_entropy: expected integer targets or class probabilities ", x.shape(), ", got ", target.meta());
  Tensor logp = log_softmax(x, 1), q = target.to(logp.dtype());
  int64_t classes = x.size(1);
  if (o.label_smoothing != 0) q = q * (1 - o.label_smoothing) + o.label_smoothing / static_cast<double>(classes);
  Shape per_class = Shape::filled(x.rank() - 1, 1);
  per_class[0] = classes;
  Tensor losses = -sum(weight.defined() ? logp * (q * reshape(weight, per_class)) : logp * q, {1});
  return o.reduction == Reduction::none ? losses : o.reduction == Reduction::sum ? sum(losses) : sum(losses) / (classes == 0 ? 0 : losses.numel());
}
// Integer targets and weights of classes.
Tensor weighted_cross_entropy(const ClassRows& rows, const Tensor& weight, const CrossEntropyOptions& o) {
  Tensor logp = log_softmax(rows.x, 1);
  Attrs attrs = Attrs::of(NllAttrs{o.ignore_index, o.reduction});
  Tensor nll = call(op::nll_loss, with(logp, rows.target, weight), attrs);
  if (o.label_smoothing == 0) return nll;
  Tensor smooth = where(ne(rows.target, o.ignore_index), -sum(logp * weight, {1}), 0);
  if (o.reduction != Reduction::none) smooth = sum(smooth);
  if (o.reduction == Reduction::mean) {
    Tensor minus_one = expand(full({}, -1, logp.options()), logp.shape());  // whose loss is the sum of weights
    smooth = smooth / call(op::nll_loss, with(minus_one, rows.target, weight), Attrs::of(NllAttrs{o.ignore_index, Reduction::sum}));
  }
  return nll * (1 - o.label_smoothing) + smooth * (o.label_smoothing / static_cast<double>(rows.x.size(1)));
}

}  // namespace

Tensor cross_entropy(const Tensor& x, const Tensor& target, CrossEntropyOptions o) {
  HT_CHECK(x.defined() && target.defined(), "cross_entropy: x or target is undefined");
  HT_CHECK(x.rank() >= 2, "cross_entropy: expected x [n, classes, ...], got ", x.meta());
  HT_CHECK(o.label_smoothing >= 0 && o.label_smoothing <= 1, "cross_entropy: expected label_smoothing in [0, 1], got ", o.label_smoothing);
  Tensor weight = class_weight("cross_entropy", o.weight, x);
  if (is_floating(target.dtype())) return soft_cross_entropy(x, target, weight, o);
  ClassRows rows = class_rows("cross_entropy", x, target);
  Tensor loss = weight.defined() ? weighted_cross_entropy(rows, weight, o)
                                 : call(op::cross_entropy, {rows.x, rows.target}, Attrs::of(Options{o.ignore_index, o.label_smoothing, o.reduction}));
  return o.reduction == Reduction::none ? reshape(loss, rows.shape) : loss;
}

Tensor nll_loss(const Tensor& x, const Tensor& target, NllOptions o) {
  HT_CHECK(x.defined() && target.defined(), "nll_loss: x or target is undefined");
  HT_CHECK(!is_floating(target.dtype()), "nll_loss: expected integer targets, got ", target.dtype());
  HT_CHECK(x.rank() >= 2, "nll_loss: expected x [n, classes, ...], got ", x.meta());
  ClassRows rows = class_rows("nll_loss", x, target);
  Tensor loss = call(op::nll_loss, with(rows.x, rows.target, class_weight("nll_loss", o.weight, x)), Attrs::of(NllAttrs{o.ignore_index, o.reduction}));
  return o.reduction == Reduction::none ? reshape(loss, rows.shape) : loss;
}

Tensor mse_loss(const Tensor& x, const Tensor& y, Reduction reduction) {
  Tensor a = widened("mse_loss", x), b = target_like("mse_loss", y, a);
  return reduced(apply<binary::SquaredError>(op::squared_error, a, b), reduction);
}
Tensor l1_loss(const Tensor& x, const Tensor& y, Reduction reduction) {
  Tensor a = widened("l1_loss", x);
  return reduced(abs(a - target_like("l1_loss", y, a)), reduction);
}
Tensor huber_loss(const Tensor& x, const Tensor& y, double delta, Reduction reduction) {
  HT_CHECK(delta > 0, "huber_loss: expected delta above 0, got ", delta);
  Tensor a = widened("huber_loss", x), d = a - target_like("huber_loss", y, a), size = abs(d);
  return reduced(where(le(size, delta), square(d) * 0.5, (size - 0.5 * delta) * delta), reduction);
}
Tensor smooth_l1_loss(const Tensor& x, const Tensor& y, double beta, Reduction reduction) {
  HT_CHECK(beta >= 0, "smooth_l1_loss: expected beta of 0 or more, got ", beta);
  return beta == 0 ? l1_loss(x, y, reduction) : huber_loss(x, y, beta, reduction) / beta;
}

Tensor binary_cross_entropy(const Tensor& p, const Tensor& target, BceOptions o) {
  Tensor a = widened("binary_cross_entropy", p);
  Tensor losses = apply<binary::BinaryCrossEntropy>(op::binary_cross_entropy, a, target_like("binary_cross_entropy", target, a));
  return reduced(o.weight.defined() ? losses * o.weight : losses, o.reduction);
}
Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& target, BceWithLogitsOptions o) {
  constexpr auto who = "binary_cross_entropy_with_logits";
  Tensor a = widened(who, x), t = target_like(who, target, a), losses;
  if (!o.pos_weight.defined()) losses = apply<binary::BceWithLogits>(op::binary_cross_entropy_with_logits, a, t);
  else  // (1 - t) a + (1 + (pos_weight - 1) t) log(1 + exp(-a)), whose logarithm is the loss of a at target 1
    losses = (1 - t) * a + (1 + (o.pos_weight - 1) * t) * apply<binary::BceWithLogits>(op::binary_cross_entropy_with_logits, a, 1);
  return reduced(o.weight.defined() ? losses * o.weight : losses, o.reduction);
}

Tensor kl_div(const Tensor& x, const Tensor& target, KlDivOptions o) {
  HT_CHECK(!o.by_batch || x.rank() > 0, "kl_div: a 0-d tensor is no batch");
  Tensor a = widened("kl_div", x), t = target_like("kl_div", target, a);
  Tensor losses;
  if (o.log_target) losses = exp(t) * (t - a);
  else {
    Tensor some = where(gt(t, 0), t, 1);  // 0 log 0 is 0, and has the gradient 0
    losses = some * log(some) - t * a;
  }
  return o.by_batch ? sum(losses) / x.size(0) : reduced(losses, o.reduction);
}
Tensor gaussian_nll_loss(const Tensor& x, const Tensor& target, const Tensor& var, GaussianNllOptions o) {
  constexpr auto who = "gaussian_nll_loss";
  HT_CHECK(o.eps > 0, who, ": expected eps above 0, got ", o.eps);
  Tensor a = widened(who, x), v = maximum(widened(who, var), o.eps);
  Tensor losses = (log(v) + square(a - target_like(who, target, a)) / v) * 0.5;
  return reduced(o.full ? losses + 0.91893853320467274178 : losses, o.reduction);
}
Tensor poisson_nll_loss(const Tensor& x, const Tensor& target, PoissonNllOptions o) {
  constexpr auto who = "poisson_nll_loss";
  Tensor a = widened(who, x), t = target_like(who, target, a);
  Tensor losses = o.log_input ? exp(a) - t * a : a - t * log(a + o.eps);
  if (o.full) {
    Tensor many = where(gt(t, 1), t, 1);
    losses = losses + where(gt(t, 1), many * log(many) - many + log(many * 6.28318530717958647693) * 0.5, 0);
  }
  return reduced(losses, o.reduction);
}

Tensor hinge_loss(const Tensor& x, const Tensor& y, MarginOptions o) {
  Tensor a = widened("hinge_loss", x);
  return reduced(relu(o.margin - target_like("hinge_loss", y, a) * a), o.reduction);
}
Tensor hinge_embedding_loss(const Tensor& x, const Tensor& y, MarginOptions o) {
  Tensor a = widened("hinge_embedding_loss", x);
  return reduced(where(gt(target_like("hinge_embedding_loss", y, a), 0), a, relu(o.margin - a)), o.reduction);
}
Tensor margin_ranking_loss(const Tensor& a, const Tensor& b, const Tensor& y, MarginOptions o) {
  Tensor difference = widened("margin_ranking_loss", a) - widened("margin_ranking_loss", b);
  return reduced(relu(o.margin - target_like("margin_ranking_loss", y, difference) * difference), o.reduction);
}
Tensor cosine_embedding_loss(const Tensor& a, const Tensor& b, const Tensor& y, MarginOptions o) {
  constexpr auto who = "cosine_embedding_loss";
  HT_CHECK(a.rank() > 0 && b.rank() > 0, who, ": expected rows [..., d], got ", a.meta(), " and ", b.meta());
  constexpr double eps = 1e-12;
  Tensor p = widened(who, a), q = widened(who, b);
  Tensor cosine = sum(p * q, {-1}) / sqrt((sum(square(p), {-1}) + eps) * (sum(square(q), {-1}) + eps));
  return reduced(where(gt(target_like(who, y, cosine), 0), 1 - cosine, relu(cosine - o.margin)), o.reduction);
}
Tensor triplet_margin_loss(const Tensor& anchor, const Tensor& positive, const Tensor& negative, TripletOptions o) {
  constexpr auto who = "triplet_margin_loss";
  HT_CHECK(o.p > 0, who, ": expected p above 0, got ", o.p);
  Tensor a = widened(who, anchor), p = widened(who, positive), n = widened(who, negative);
  HT_CHECK(a.rank() > 0, who, ": expected rows [..., d], got ", anchor.meta());
  auto distance = [&](const Tensor& u, const Tensor& v) {
    Tensor d = abs(u - v + o.eps);
    if (o.p == 1) return sum(d, {-1});
    return o.p == 2 ? sqrt(sum(square(d), {-1})) : pow(sum(pow(d, o.p), {-1}), 1 / o.p);
  };
  Tensor far = distance(a, n);
  if (o.swap) far = minimum(far, distance(p, n));
  return reduced(relu(distance(a, p) - far + o.margin), o.reduction);
}

}  // namespace halftone
