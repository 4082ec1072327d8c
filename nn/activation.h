#pragma once
// Activations: of any shape, elementwise unless a dimension is named.
#include "halftone/nn/module.h"
#include "halftone/ops/softmax.h"
#include "halftone/ops/unary.h"

namespace halftone::nn {

class HT_API Identity : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return x; }
};
class HT_API ReLU : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return relu(x); }
};
class HT_API LeakyReLU : public Module {
 public:
  explicit LeakyReLU(double negative_slope = 0.01) : negative_slope_(negative_slope) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return leaky_relu(x, negative_slope_); }

 private:
  double negative_slope_;
};
class HT_API GELU : public Module {  // the erf form
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return gelu(x); }
};
class HT_API SiLU : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return silu(x); }
};
class HT_API Tanh : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return tanh(x); }
};
class HT_API Sigmoid : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return sigmoid(x); }
};
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

}  // namespace halftone::nn
