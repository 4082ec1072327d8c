// Losses: cross_entropy as one operator with its own gradient operator; others in tensor algebra.
#include "halftone/ops/loss.h"

#include <cmath>

#include "halftone/ops/all.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/index.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/softmax.h"

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
        C high = reduce::Amax::start<C>();
        double total = 0, all = 0;
        for (int64_t k = 0; k < classes; ++k) high = reduce::Amax::add(high, C(row[k]), k);
        for (int64_t k = 0; k < classes; ++k) {
          total += std::exp(C(row[k]) - high);
          all += C(row[k]);
        }
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
        for (int64_t k = 0; k < classes; ++k) {
          C q = off + (t[i] == k ? on : C(0));
          to[i * classes + k] = T(counts ? scale * (std::exp(C(p[i * classes + k]) - lse[i]) - q) : C(0));
        }
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

}  // namespace

namespace op {

constinit OpDef cross_entropy = {
    .name = "cross_entropy", .doc = "-log(softmax(x)) at the target class", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta &x = c.in[0].meta(), &t = c.in[1].meta();
      HT_CHECK(is_floating(x.dtype) && x.shape.rank() == 2, "cross_entropy: expected x [n, classes] of a floating dtype, got ", x);
      HT_CHECK(t.dtype == DType::i64 && t.shape == Shape({x.shape[0]}), "cross_entropy: expected target [", x.shape[0], "] (i64), got ", t);
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
  static constexpr OpDef* all[] = {&op::cross_entropy, &op::cross_entropy_grad};
  return all;
}

Tensor cross_entropy(const Tensor& x, const Tensor& target, CrossEntropyOptions o) {
  HT_CHECK(x.defined() && target.defined(), "cross_entropy: x or target is undefined");
  HT_CHECK(!is_floating(target.dtype()), "cross_entropy: expected integer targets, got ", target.dtype());
  HT_CHECK(x.rank() >= 2, "cross_entropy: expected x [n, classes, ...], got ", x.meta());
  Attrs attrs = Attrs::of(Options{o.ignore_index, o.label_smoothing, o.reduction});
  Tensor t = target.to(DType::i64);
  if (x.rank() == 2) return call(op::cross_entropy, {x, t}, attrs);
  // [n, c, d1, ...]: classes last, everything else a row.
  Shape order{0}, rows = x.shape();
  for (int d = 2; d < x.rank(); ++d) order.push_back(d);
  order.push_back(1);
  rows.erase(1);
  HT_CHECK(t.shape() == rows, "cross_entropy: expected target ", rows, ", got ", target.meta());
  Tensor loss = call(op::cross_entropy, {reshape(permute(x, order), {-1, x.size(1)}), reshape(t, {-1})}, attrs);
  return o.reduction == Reduction::none ? reshape(loss, rows) : loss;
}

Tensor mse_loss(const Tensor& x, const Tensor& y, Reduction reduction) {
  Tensor squares = square(x.to(wide(x.dtype())) - y.to(wide(y.dtype())));
  return reduction == Reduction::none ? squares : reduction == Reduction::sum ? sum(squares) : mean(squares);
}

}  // namespace halftone
