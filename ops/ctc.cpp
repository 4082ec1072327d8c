// ctc_loss on the CPU: the forward and backward recursions over states, in logarithms and f64.
#include <algorithm>
#include <cmath>

#include "halftone/core/parallel.h"
#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/ctc.h"
#include "halftone/ops/reduce.h"

namespace halftone {
namespace {

using detail::CtcItem;

DType wide(DType t) { return is_16bit_dtype(t) ? DType::f32 : t; }

// Checks all that a kernel may index with.
void check_values(const Tensor& x, const Tensor& targets, const Tensor& input_lengths, const Tensor& target_lengths, int64_t blank) {
  const int64_t *t = targets.data<int64_t>(), *in = input_lengths.data<int64_t>(), *out = target_lengths.data<int64_t>();
  int64_t steps = x.size(0), classes = x.size(2), s = targets.size(1);
  for (int64_t n = 0; n < x.size(1); ++n) {
    HT_CHECK(in[n] >= 0 && in[n] <= steps, "ctc_loss: input length ", in[n], " at ", n, " is out of range for ", steps, " steps");
    HT_CHECK(out[n] >= 0 && out[n] <= s, "ctc_loss: target length ", out[n], " at ", n, " is out of range for ", s, " targets");
    for (int64_t i = 0; i < out[n]; ++i) {
      int64_t v = t[n * s + i];
      HT_CHECK(v >= 0 && v < classes, "ctc_loss: target ", v, " at ", i, " of row ", n, " is out of range for ", classes, " classes");
      HT_CHECK(v != blank, "ctc_loss: target ", i, " of row ", n, " is the blank ", blank);
    }
  }
}

struct Arguments {
  Tensor x, targets, input_lengths, target_lengths;
  int64_t blank, classes, batch, width;  // width: states of the longest target
  Arguments(const Call& c, const Tensor& x_)
      : x(x_), targets(c.in[1].contiguous()), input_lengths(c.in[2].contiguous()), target_lengths(c.in[3].contiguous()),
        blank(c.as<int64_t>()), classes(x.size(2)), batch(x.size(1)), width(2 * targets.size(1) + 1) {
    check_values(x, targets, input_lengths, target_lengths, blank);
  }
  template <class T> CtcItem<T> item(int64_t n) const {
    return {x.data<T>() + n * x.strides()[1], x.strides()[0], x.strides()[2], targets.data<int64_t>() + n * targets.size(1),
            input_lengths.data<int64_t>()[n], target_lengths.data<int64_t>()[n], blank, classes};
  }
};

// out: losses; for the tape, the log-probability of every beginning that ends in a state, [n, t, states] (f64).
void run_ctc(const Call& c, std::span<Tensor> out) {
  Arguments a(c, c.in[0]);
  int64_t steps = a.x.size(0);
  visit<floating_types>(a.x.dtype(), [&]<class T>(Type<T>) {
    parallel_for(a.batch, 1, [&](int64_t begin, int64_t end) {
      std::vector<double> own(out.size() > 1 ? 0 : static_cast<size_t>(steps * a.width));
      for (int64_t n = begin; n < end; ++n) {
        auto item = a.item<T>(n);
        double* alpha = out.size() > 1 ? out[1].data<double>() + n * steps * a.width : own.data();
        std::fill_n(alpha, steps * a.width, detail::never);
        for (int64_t t = 0; t < item.steps; ++t)
          for (int64_t s = 0; s < item.states(); ++s) alpha[t * a.width + s] = item.alpha(alpha + std::max<int64_t>(t - 1, 0) * a.width, t, s);
        out[0].data<accumulate_t<T>>()[n] = static_cast<accumulate_t<T>>(item.loss(alpha + std::max<int64_t>(item.steps - 1, 0) * a.width));
      }
    });
  });
}

// in: x, targets, lengths, alpha, gradient of the losses.
void run_ctc_grad(const Call& c, std::span<Tensor> out) {
  Arguments a(c, c.in[0]);
  Tensor alphas = c.in[4].contiguous(), g = c.in[5].contiguous();
  int64_t steps = a.x.size(0);
  visit<floating_types>(a.x.dtype(), [&]<class T>(Type<T>) {
    parallel_for(a.batch, 1, [&](int64_t begin, int64_t end) {
      std::vector<double> beta(static_cast<size_t>(a.width)), next = beta, sums(static_cast<size_t>(a.classes));
      for (int64_t n = begin; n < end; ++n) {
        auto item = a.item<T>(n);
        const double* alpha = alphas.data<double>() + n * steps * a.width;
        double loss = item.loss(alpha + std::max<int64_t>(item.steps - 1, 0) * a.width), scale = g.data<accumulate_t<T>>()[n];
        for (int64_t t = steps; t-- > 0;) {
          std::fill(sums.begin(), sums.end(), 0.0);
          if (t < item.steps && loss < HUGE_VAL) {
            for (int64_t s = 0; s < item.states(); ++s) {
              beta[static_cast<size_t>(s)] = item.beta(next.data(), t, s);
              sums[static_cast<size_t>(item.label(s))] += std::exp(alpha[t * a.width + s] + beta[static_cast<size_t>(s)] + loss);
            }
            std::swap(beta, next);
          }
          T* to = out[0].data<T>() + (t * a.batch + n) * a.classes;
          for (int64_t k = 0; k < a.classes; ++k) {
            double sum = sums[static_cast<size_t>(k)];
            to[k] = convert<T>(sum == 0 ? 0.0 : -scale * sum);
          }
        }
      }
    });
  });
}

Metas infer_ctc(const Call& c) {
  const Meta &x = c.in[0].meta(), &targets = c.in[1].meta();
  HT_CHECK(is_floating(x.dtype) && x.shape.rank() == 3, "ctc_loss: expected x [t, n, classes] of a floating dtype, got ", x);
  Shape batch{x.shape[1]};
  HT_CHECK(targets.dtype == DType::i64 && targets.shape.rank() == 2 && targets.shape[0] == batch[0], "ctc_loss: expected targets [", batch[0],
           ", s] (i64), got ", targets);
  for (size_t i : {size_t{2}, size_t{3}})
    HT_CHECK(c.in[i].dtype() == DType::i64 && c.in[i].shape() == batch, "ctc_loss: expected ", i == 2 ? "input" : "target", "_lengths ", batch, " (i64), got ",
             c.in[i].meta());
  auto blank = c.as<int64_t>();
  HT_CHECK(blank >= 0 && blank < x.shape[2], "ctc_loss: expected a blank in [0, ", x.shape[2], "), got ", blank);
  return {Meta(batch, wide(x.dtype), x.device), Meta({batch[0], x.shape[0], 2 * targets.shape[1] + 1}, DType::f64, x.device)};
}

std::vector<Sample> ctc_samples(bool grad) {
  std::vector<Sample> all;
  // Targets are classes from 1 on; the blank is 0. Lengths leave out some steps and targets.
  auto add = [&](int64_t t, int64_t n, int64_t classes, int64_t s, bool shorter) {
    auto lengths = [&](int64_t most) {
      return SampleInput{.shape = {n}, .low = double(shorter ? most / 2 : most), .high = double(most) + 1, .dtype = DType::i64, .differentiable = false};
    };
    Sample sample{{{.shape = {t, n, classes}, .low = -3, .high = -.1},
                   {.shape = {n, s}, .low = 1, .high = double(classes), .dtype = DType::i64, .differentiable = false}, lengths(t), lengths(s)},
                  Attrs::of(int64_t{0})};
    if (grad) {
      sample.in.push_back({.shape = {n, t, 2 * s + 1}, .low = -9, .high = -1, .dtype = DType::f64, .differentiable = false});
      sample.in.push_back({.shape = {n}, .low = .5, .high = 1, .dtype = {}, .differentiable = false, .present = true, .wide = true});
    }
    all.push_back(sample);
  };
  add(1, 1, 2, 1, false);
  add(3, 1, 3, 1, false);
  add(7, 2, 5, 3, false);
  add(7, 3, 4, 2, true);
  add(45, 2, 7, 10, true);
  add(5, 1, 3, 0, false);
  add(40, 1, 257, 12, false);
  add(140, 3, 3, 33, true);
  add(2, 1, 4, 2, false);
  return all;
}

}  // namespace

namespace op {

constinit OpDef ctc_loss = {
    .name = "ctc_loss", .doc = "minus the log-probability of a target under all its labellings", .cast = Cast::keep,
    .infer = infer_ctc,
    .aux = 1,
    .saves = {.in = 15, .out = 2},
    .backward = [](const Rule& r) -> Tensors {
      return {call(op::ctc_loss_grad, {r.in(0), r.in(1), r.in(2), r.in(3), r.out(1), r.grad()}, r.attrs()), {}, {}, {}};
    },
    .order = 1,
    .dtypes = {floating_types, floating_types},
    .samples = [] { return ctc_samples(false); },
    .kernel = {run_ctc}};

constinit OpDef ctc_loss_grad = {
    .name = "ctc_loss_grad", .doc = "the gradient of ctc_loss, from the log-probabilities of its beginnings", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      Metas forward = infer_ctc(c);
      HT_CHECK(c.in[4].shape() == forward[1].shape && c.in[4].dtype() == DType::f64, "ctc_loss_grad: expected beginnings ", forward[1], ", got ", c.in[4].meta());
      HT_CHECK(c.in[5].shape() == forward[0].shape && c.in[5].dtype() == forward[0].dtype, "ctc_loss_grad: expected a gradient ", forward[0], ", got ", c.in[5].meta());
      const Meta& x = c.in[0].meta();
      return {Meta(x.shape, x.dtype, x.device)};
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return ctc_samples(true); },
    .kernel = {run_ctc_grad}};

}  // namespace op

Tensor ctc_loss(const Tensor& x, const Tensor& targets, const Tensor& input_lengths, const Tensor& target_lengths, CtcOptions o) {
  Tensors in{x, targets, input_lengths, target_lengths};
  for (size_t i = 0; i < in.size(); ++i) {
    HT_CHECK(in[i].defined(), "ctc_loss: a tensor is undefined");
    HT_CHECK(i == 0 || !is_floating(in[i].dtype()), "ctc_loss: expected integer targets and lengths, got ", in[i].meta());
    if (i > 0) in[i] = in[i].to(DType::i64);
  }
  Tensor lengths = in[3], losses = call(op::ctc_loss, in, Attrs::of(o.blank));
  if (o.zero_infinity) losses = where(isinf(losses), 0, losses);
  if (o.reduction == Reduction::none) return losses;
  return o.reduction == Reduction::sum ? sum(losses) : mean(losses / maximum(lengths, 1).to(losses.dtype()));
}

}  // namespace halftone
