#pragma once
// Activations: of any shape, elementwise unless a dimension is named.
#include "halftone/nn/module.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/softmax.h"
#include "halftone/ops/ternary.h"

namespace halftone::nn {

class HT_API Identity : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return x; }
};

// ---- pieces of straight lines

class HT_API ReLU : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return relu(x); }
};
class HT_API ReLU6 : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return clamp(x, 0, 6); }
};
class HT_API LeakyReLU : public Module {
 public:
  explicit LeakyReLU(double negative_slope = 0.01) : negative_slope_(negative_slope) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return leaky_relu(x, negative_slope_); }

 private:
  double negative_slope_;
};
// x where x > 0, else weight * x, with a weight for each of `count` channels, or one for all (He et al., "Delving deep into
// rectifiers", 2015).
class HT_API PReLU : public Module {
 public:
  explicit PReLU(Size count = 1, double start = 0.25) : weight(full({count}, start)) {}
  Parameter weight;  // [count]
  HT_FIELDS(weight)
  Tensor forward(const Tensor& x) override;  // [n, count, ...] when count is not 1
};
class HT_API Hardtanh : public Module {
 public:
  explicit Hardtanh(double low = -1, double high = 1) : low_(low), high_(high) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return clamp(x, low_, high_); }

 private:
  double low_, high_;
};
class HT_API Hardsigmoid : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return hardsigmoid(x); }
};
class HT_API Hardswish : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return hardswish(x); }
};
class HT_API Hardshrink : public Module {  // x outside [-limit, limit], 0 inside
 public:
  explicit Hardshrink(double limit = 0.5) : limit_(limit) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return where(le(abs(x), limit_), 0, x); }

 private:
  double limit_;
};
class HT_API Softshrink : public Module {  // nearer to 0 by limit
 public:
  explicit Softshrink(double limit = 0.5) : limit_(limit) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return x - clamp(x, -limit_, limit_); }

 private:
  double limit_;
};
class HT_API Threshold : public Module {  // x above the threshold, else a value
 public:
  explicit Threshold(double threshold = 0, double value = 0) : threshold_(threshold), value_(value) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return where(le(x, threshold_), value_, x); }

 private:
  double threshold_, value_;
};

// ---- smooth ones

class HT_API ELU : public Module {
 public:
  explicit ELU(double alpha = 1) : alpha_(alpha) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return elu(x, alpha_); }

 private:
  double alpha_;
};
class HT_API SELU : public Module {  // Klambauer et al., "Self-normalizing neural networks", 2017
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return elu(x, 1.6732632423543772) * 1.0507009873554805; }
};
class HT_API CELU : public Module {
 public:
  explicit CELU(double alpha = 1) : alpha_(alpha) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return elu(x / alpha_) * alpha_; }

 private:
  double alpha_;
};
class HT_API GELU : public Module {  // the erf form unless told otherwise
 public:
  explicit GELU(Approximate form = Approximate::none) : form_(form) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return gelu(x, form_); }
  Approximate form() const { return form_; }

 private:
  Approximate form_;
};
class HT_API SiLU : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return silu(x); }
};
class HT_API Mish : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return mish(x); }
};
class HT_API Softplus : public Module {
 public:
  explicit Softplus(double beta = 1, double threshold = 20) : beta_(beta), threshold_(threshold) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return softplus(x, beta_, threshold_); }

 private:
  double beta_, threshold_;
};
class HT_API Softsign : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return x / (1 + abs(x)); }
};
class HT_API Tanh : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return tanh(x); }
};
class HT_API Tanhshrink : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return x - tanh(x); }
};
class HT_API Sigmoid : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return sigmoid(x); }
};
class HT_API LogSigmoid : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return -softplus(-x); }
};

// ---- along a dimension

class HT_API Softmax : public Module {
 public:
  explicit Softmax(int64_t dim = -1) : dim_(dim) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return softmax(x, dim_); }

 private:
  int64_t dim_;
};
class HT_API LogSoftmax : public Module {
 public:
  explicit LogSoftmax(int64_t dim = -1) : dim_(dim) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return log_softmax(x, dim_); }

 private:
  int64_t dim_;
};
// Half a times sigmoid(half b) (Dauphin et al., "Language modeling with gated convolutional networks", 2017).
class HT_API GLU : public Module {
 public:
  explicit GLU(int64_t dim = -1) : dim_(dim) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override;

 private:
  int64_t dim_;
};

}  // namespace halftone::nn
