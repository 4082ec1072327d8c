// Statistics of several ranks, and the gradient of what is normalised by them.
#include "halftone/distributed/sync_batch_norm.h"

#include "halftone/autograd/function.h"
#include "halftone/ops/ops.h"

namespace halftone::nn {
namespace {

DType wide(DType t) { return t == DType::f64 ? t : DType::f32; }

// x in f32 as [n, c, inner], and a vector of channels that broadcasts against it.
Tensor planes(const Tensor& x) {
  return x.to(wide(x.dtype())).reshape({x.size(0), x.size(1), x.numel() / std::max<int64_t>(x.size(0) * x.size(1), 1)});
}
Tensor channels(const Tensor& v) { return v.reshape({1, v.numel(), 1}); }

struct Statistics { Tensor mean, var, count; };  // [c], [c], []

// Each rank gives count, mean and sum of squares about its mean; they are joined in f64, alike on all ranks.
Statistics statistics_of(const Tensor& x, const distributed::Group& group) {  // [n, c, inner]
  int64_t c = x.size(1), n = x.size(0) * x.size(2);
  Tensor mine = zeros({2 * c + 1}, x.options()), all = zeros({group.size(), 2 * c + 1}, x.options());
  mine.slice(0, 0, 1).fill_(n);
  if (n > 0) {
    mine.slice(0, 1, c + 1).copy_(mean(x, {0, 2}));
    mine.slice(0, c + 1, 2 * c + 1).copy_(var(x, {0, 2}, {.correction = 0}));
  }
  group.all_gather(mine, all).wait();
  Tensor exact = all.to(DType::f64), counts = exact.slice(1, 0, 1), means = exact.slice(1, 1, c + 1), vars = exact.slice(1, c + 1, 2 * c + 1);
  Tensor count = maximum(sum(counts), 1);
  Tensor mean = sum(means * counts, {0}) / count;
  Tensor var = sum((vars + square(means - mean)) * counts, {0}) / count;
  return {mean, var, count};
}

// A channel whose batch is not finite leaves its statistics alone.
void move_running(Tensor running, const Tensor& value, const Tensor& finite, double momentum) {
  Tensor moved = running.to(DType::f64) * (1 - momentum) + value * momentum;
  running.copy_(where(finite, moved.to(running.dtype()), running));
}

struct SyncNorm : Function<SyncNorm> {
  static Tensor forward(Context& ctx, const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& running_mean, const Tensor& running_var,
                        const BatchNormOptions& o, const distributed::Group& group) {
    LayerScope plain(Layer::autocast, false);
    Tensor v = planes(x);
    auto [mean, var, count] = statistics_of(v, group);
    if (running_mean.defined()) {
      Tensor finite = logical_and(isfinite(mean), isfinite(var));
      move_running(running_mean, mean, finite, o.momentum);
      move_running(running_var, var * (count / maximum(count - 1, 1)), finite, o.momentum);
    }
    Tensor centre = channels(mean.to(v.dtype())), rstd = channels(rsqrt(var + o.eps).to(v.dtype()));
    Tensor y = (v - centre) * rstd;
    if (w.defined()) y = y * channels(w.to(v.dtype())) + channels(b.to(v.dtype()));
    ctx.save(x, w, centre, rstd, count.to(v.dtype()), group);
    return y.reshape(x.shape()).to(x.dtype());
  }

  static std::vector<Tensor> backward(Context& ctx, const Tensor& gradient) {
    HT_CHECK(!recording(), "SyncBatchNorm: can be differentiated once, and create_graph asks for more");
    LayerScope plain(Layer::autocast, false);
    auto& [x, w, centre, rstd, count, group] = ctx.saved<Tensor, Tensor, Tensor, Tensor, Tensor, distributed::Group>();
    Tensor g = planes(gradient), normal = (planes(x) - centre) * rstd;
    Tensor sums = stack({sum(g, {0, 2}), sum(g * normal, {0, 2})});  // [2, c]: the gradients of b and w, of this rank
    Tensor all = sums.clone();
    group.all_reduce(all).wait();
    Tensor d = (g - (channels(all[0]) + normal * channels(all[1])) / count) * rstd;
    if (w.defined()) d = d * channels(w.to(d.dtype()));
    Tensor dx = d.reshape(x.shape()).to(x.dtype());
    if (!w.defined()) return {dx, {}, {}, {}, {}};
    return {dx, sums[1].to(w.dtype()), sums[0].to(w.dtype()), {}, {}};
  }
};

}  // namespace

Tensor sync_batch_norm(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& running_mean, const Tensor& running_var,
                       const BatchNormOptions& o, const distributed::Group& group) {
  HT_CHECK(x.rank() >= 2 && is_floating(x.dtype()), "SyncBatchNorm: expected x [n, channels, ...] of a floating dtype, got ", x.meta());
  HT_CHECK(x.device() == group.device(), "SyncBatchNorm: x is on ", x.device(), ", the group on ", group.device());
  HT_CHECK(w.defined() == b.defined(), "SyncBatchNorm: expected a weight and a bias, or neither");
  for (auto* t : {&w, &b, &running_mean, &running_var})
    HT_CHECK(!t->defined() || t->shape() == Shape{x.size(1)}, "SyncBatchNorm: expected x with ", t->numel(), " channels, got ", x.meta());
  return SyncNorm::apply(x, w, b, running_mean, running_var, o, group);
}

namespace {
BatchNormFunction over(const distributed::Group& group) {
  return [group](const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& mean, const Tensor& var, const BatchNormOptions& o) {
    return sync_batch_norm(x, w, b, mean, var, o, group);
  };
}
}  // namespace

SyncBatchNorm::SyncBatchNorm(Size channels, const distributed::Group& group, BatchNormLayerOptions o)
    : BatchNorm("SyncBatchNorm", channels, 2, 5, o) {
  train_with(over(group));
}

int convert_sync_batch_norm(Module& net, const distributed::Group& group) {
  int count = 0;
  for (auto* m : net.modules())
    if (auto* norm = dynamic_cast<BatchNorm*>(m)) {
      norm->train_with(over(group));
      ++count;
    }
  return count;
}

}  // namespace halftone::nn
