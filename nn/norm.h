#pragma once
// Normalisation layers. Weights start as ones and biases as zeros.
#include "halftone/nn/module.h"
#include "halftone/ops/norm.h"
#include "halftone/ops/unary.h"

namespace halftone::nn {

class Sequential;

struct BatchNormLayerOptions {
  double eps = 1e-5, momentum = 0.1;  // running = (1 - momentum) * running + momentum * batch's
  bool affine = true;                 // whether there are a weight and a bias
  bool track_running_stats = true;    // without: every batch counts by itself, in evaluation as well
};
// What may take batch_norm's place in training, with its arguments: statistics of several ranks (distributed/sync_batch_norm.h).
using BatchNormFunction = std::function<Tensor(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& running_mean,
                                               const Tensor& running_var, const BatchNormOptions& o)>;
// Each channel of x normalised: in training by the batch's statistics, which move the running ones, else by these. In a
// 16-bit model it keeps f32; its results have x's dtype.
class HT_API BatchNorm : public Module {
 public:
  Parameter weight, bias;                                // [channels]
  Buffer running_mean, running_var, num_batches_tracked;  // [channels], [channels], [] (i64)
  HT_FIELDS(weight, bias, running_mean, running_var, num_batches_tracked)
  Tensor forward(const Tensor& x) override {
    return run(x, batch_norm, [](const Tensor& y) { return y; });
  }
  // relu(forward(x) + z) in one operator, as residual blocks end; z is like x.
  Tensor add_relu(const Tensor& x, const Tensor& z) {
    return run(x, [&z](const Tensor& v, const auto&... rest) { return batch_norm_add_relu(v, z, rest...); },
               [&z](const Tensor& y) { return relu(y + z); });
  }
  // relu(forward(x) + other(z)) in one operator, unless options differ; z is like x.
  Tensor add_relu(const Tensor& x, BatchNorm& other, const Tensor& z);
  // relu(forward(x) + shortcut(z)), as residual blocks with a projection end: with a batch norm that is the shortcut's last layer as
  // above. An empty shortcut gives z.
  Tensor add_relu(const Tensor& x, Sequential& shortcut, const Tensor& z);
  bool keeps_f32() const override { return true; }
  // From now on `f` computes in training; an empty one gives that back to batch_norm. Clones have it, too.
  void train_with(BatchNormFunction f) { function_ = std::move(f); }

 protected:
  // x has from `least` to `most` dimensions.
  BatchNorm(const char* name, Size channels, int least, int most, BatchNormLayerOptions o);

 private:
  friend class Sequential;
  template <class F, class G> Tensor run(const Tensor& x, F f, G after);
  Tensor forward_relu(const Tensor& x) {
    return run(x, batch_norm_relu, [](const Tensor& y) { return relu(y); });
  }
  void prepare(const Tensor& x);
  const char* name_;
  int least_, most_;
  BatchNormLayerOptions options_;
  BatchNormFunction function_;
};
template <class F, class G> Tensor BatchNorm::run(const Tensor& x, F f, G after) {
  prepare(x);
  BatchNormOptions o{.training = training() || !running_mean.defined(), .momentum = options_.momentum, .eps = options_.eps};
  if (function_ && training()) return after(function_(x, weight, bias, running_mean, running_var, o));
  return f(x, weight, bias, running_mean, running_var, o);
}

class HT_API BatchNorm1d : public BatchNorm {  // [n, channels] or [n, channels, length]
 public:
  explicit BatchNorm1d(Size channels, BatchNormLayerOptions o = {}) : BatchNorm("BatchNorm1d", channels, 2, 3, o) {}
  HT_FIELDS_AFTER(BatchNorm)
};
class HT_API BatchNorm2d : public BatchNorm {  // [n, channels, h, w]
 public:
  explicit BatchNorm2d(Size channels, BatchNormLayerOptions o = {}) : BatchNorm("BatchNorm2d", channels, 4, 4, o) {}
  HT_FIELDS_AFTER(BatchNorm)
};
class HT_API BatchNorm3d : public BatchNorm {  // [n, channels, d, h, w]
 public:
  explicit BatchNorm3d(Size channels, BatchNormLayerOptions o = {}) : BatchNorm("BatchNorm3d", channels, 5, 5, o) {}
  HT_FIELDS_AFTER(BatchNorm)
};

struct LayerNormOptions {
  double eps = 1e-5;
  bool affine = true;  // PyTorch's elementwise_affine
  bool bias = true;
};
// Over the last dimensions of x, which have this shape: LayerNorm(64), LayerNorm({4, 5}).
class HT_API LayerNorm : public Module {
 public:
  explicit LayerNorm(const Shape& shape, LayerNormOptions o = {});
  template <Integer T> explicit LayerNorm(T size, LayerNormOptions o = {}) : LayerNorm(Shape{size}, o) {}
  Parameter weight, bias;  // of this shape
  HT_FIELDS(weight, bias)
  Tensor forward(const Tensor& x) override { return layer_norm(x, shape_, weight, bias, eps_); }
  // sum = x + z and y = forward(sum) in one operator, where a residual connection ends and the next branch begins; y has x's dtype.
  AddedNorm add(const Tensor& x, const Tensor& z) { return add_layer_norm(x, z, shape_, weight, bias, eps_); }

 private:
  Shape shape_;
  double eps_;
};

struct RMSNormOptions {
  double eps = 1e-6;
  bool affine = true;
};
// x / sqrt(mean(x^2) + eps) * weight, over the same (Zhang and Sennrich, "Root mean square layer normalization", 2019).
class HT_API RMSNorm : public Module {
 public:
  explicit RMSNorm(const Shape& shape, RMSNormOptions o = {});
  template <Integer T> explicit RMSNorm(T size, RMSNormOptions o = {}) : RMSNorm(Shape{size}, o) {}
  Parameter weight;
  HT_FIELDS(weight)
  Tensor forward(const Tensor& x) override { return rms_norm(x, shape_, weight, eps_); }

 private:
  Shape shape_;
  double eps_;
};

struct GroupNormOptions {
  double eps = 1e-5;
  bool affine = true;
};
// Over groups of channels of each image of x [n, channels, ...].
class HT_API GroupNorm : public Module {
 public:
  GroupNorm(Size groups, Size channels, GroupNormOptions o = {});
  Parameter weight, bias;  // [channels]
  HT_FIELDS(weight, bias)
  Tensor forward(const Tensor& x) override;

 private:
  Size groups_, channels_;
  double eps_;
};

struct InstanceNormOptions {
  double eps = 1e-5;
  bool affine = false;
};
// Over each channel of each image; it has no running statistics.
class HT_API InstanceNorm : public Module {
 public:
  Parameter weight, bias;  // [channels]
  HT_FIELDS(weight, bias)
  Tensor forward(const Tensor& x) override;

 protected:
  InstanceNorm(const char* name, Size channels, int rank, InstanceNormOptions o);

 private:
  const char* name_;
  Size channels_;
  int rank_;
  double eps_;
};
class HT_API InstanceNorm1d : public InstanceNorm {  // [n, channels, length]
 public:
  explicit InstanceNorm1d(Size channels, InstanceNormOptions o = {}) : InstanceNorm("InstanceNorm1d", channels, 3, o) {}
  HT_FIELDS_AFTER(InstanceNorm)
};
class HT_API InstanceNorm2d : public InstanceNorm {  // [n, channels, h, w]
 public:
  explicit InstanceNorm2d(Size channels, InstanceNormOptions o = {}) : InstanceNorm("InstanceNorm2d", channels, 4, o) {}
  HT_FIELDS_AFTER(InstanceNorm)
};

}  // namespace halftone::nn
