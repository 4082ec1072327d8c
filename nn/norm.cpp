#include "halftone/nn/norm.h"

#include "halftone/ops/binary.h"

namespace halftone::nn {

BatchNorm::BatchNorm(const char* name, Size channels, int least, int most, BatchNormLayerOptions o)
    : name_(name), least_(least), most_(most), options_(o) {
  if (o.affine) {
    weight = Parameter(ones({channels}));
    bias = Parameter(zeros({channels}));
  }
  if (o.track_running_stats) {
    running_mean = Buffer(zeros({channels}));
    running_var = Buffer(ones({channels}));
    num_batches_tracked = Buffer(zeros({}, {.dtype = DType::i64}));
  }
}
void BatchNorm::prepare(const Tensor& x) {
  HT_CHECK(x.rank() >= least_ && x.rank() <= most_, name_, ": expected ",
           most_ == 3 ? "[n, channels] or [n, channels, length]" : most_ == 4 ? "[n, channels, h, w]" : "[n, channels, d, h, w]",
           ", got ", x.meta());
  if (!training() || !num_batches_tracked.defined()) return;
  NoGrad off;
  num_batches_tracked.add_(1);  // on its device
}

Tensor BatchNorm::add_relu(const Tensor& x, BatchNorm& other, const Tensor& z) {
  const bool alike = training() == other.training() && options_.eps == other.options_.eps && options_.momentum == other.options_.momentum &&
                     running_mean.defined() == other.running_mean.defined();
  if (!alike || function_ || other.function_ || other.observed()) return add_relu(x, other(z));
  other.prepare(z);
  return run(x, [&](const Tensor& v, const Tensor& w, const Tensor& b, const Tensor& mean, const Tensor& var, const BatchNormOptions& o) {
    return batch_norms_relu(v, {w, b, mean, var}, z, {other.weight, other.bias, other.running_mean, other.running_var}, o);
  }, [](const Tensor& y) { return y; });
}

LayerNorm::LayerNorm(const Shape& shape, LayerNormOptions o) : shape_(shape), eps_(o.eps) {
  if (!o.affine) return;
  weight = Parameter(ones(shape));
  if (o.bias) bias = Parameter(zeros(shape));
}

RMSNorm::RMSNorm(const Shape& shape, RMSNormOptions o) : shape_(shape), eps_(o.eps) {
  if (o.affine) weight = Parameter(ones(shape));
}

GroupNorm::GroupNorm(Size groups, Size channels, GroupNormOptions o) : groups_(groups), channels_(channels), eps_(o.eps) {
  HT_CHECK(groups > 0 && channels % groups == 0, "GroupNorm: ", channels, " channels do not divide into ", groups, " groups");
  if (!o.affine) return;
  weight = Parameter(ones({channels}));
  bias = Parameter(zeros({channels}));
}
Tensor GroupNorm::forward(const Tensor& x) {
  HT_CHECK(x.rank() >= 2 && x.size(1) == channels_, "GroupNorm: expected [n, ", channels_, ", ...], got ", x.meta());
  return group_norm(x, groups_, weight, bias, eps_);
}

InstanceNorm::InstanceNorm(const char* name, Size channels, int rank, InstanceNormOptions o)
    : name_(name), channels_(channels), rank_(rank), eps_(o.eps) {
  if (!o.affine) return;
  weight = Parameter(ones({channels}));
  bias = Parameter(zeros({channels}));
}
Tensor InstanceNorm::forward(const Tensor& x) {
  HT_CHECK(x.rank() == rank_ && x.size(1) == channels_, name_, ": expected [n, ", channels_,
           rank_ == 3 ? ", length], got " : ", h, w], got ", x.meta());
  return instance_norm(x, weight, bias, eps_);
}

}  // namespace halftone::nn
