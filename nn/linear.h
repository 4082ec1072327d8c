#pragma once
// Layers that are products with a weight over the last dimension.
#include "halftone/nn/module.h"
#include "halftone/ops/matmul.h"

namespace halftone::nn {

enum class Activation : uint8_t { none, relu, gelu };
struct LinearOptions {
  bool bias = true;
  Activation activation = Activation::none;  // fused: one kernel, and one rounding in 16-bit dtypes
};
// x [..., in] -> [..., out], f(x weight^T + bias). Weights and bias start uniform in [-1/sqrt(in), 1/sqrt(in)).
class HT_API Linear : public Module {
 public:
  Linear(Size in, Size out, LinearOptions o = {});
  Parameter weight, bias;  // [out, in], [out]; bias is undefined without one
  HT_FIELDS(weight, bias)
  Tensor forward(const Tensor& x) override;
  Activation activation() const { return activation_; }

 private:
  Activation activation_;
};

struct BilinearOptions { bool bias = true; };
// x [..., in1], y [..., in2] -> [..., out]: x^T weight[i] y + bias[i]. Both start uniform in [-1/sqrt(in1), 1/sqrt(in1)).
class HT_API Bilinear : public Module {
 public:
  Bilinear(Size in1, Size in2, Size out, BilinearOptions o = {});
  Parameter weight, bias;  // [out, in1, in2], [out]
  HT_FIELDS(weight, bias)
  Tensor forward(const Tensor& x, const Tensor& y);
  Tensor operator()(const Tensor& x, const Tensor& y) { return forward(x, y); }
};

}  // namespace halftone::nn
