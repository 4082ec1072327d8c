// Layers that are more than a line.
#include "halftone/nn/layers.h"

#include <cmath>

#include "halftone/nn/init.h"

namespace halftone::nn {

Linear::Linear(Size in, Size out, LinearOptions o) : weight(empty({out, in})), activation_(o.activation) {
  double bound = in > 0 ? 1 / std::sqrt(static_cast<double>(in)) : 0;
  init::uniform_(weight, -bound, bound);
  if (o.bias) bias = Parameter(init::uniform_(empty({out}), -bound, bound));
}

Tensor Linear::forward_with(const Tensor& x, Activation a) const {
  switch (a) {
    case Activation::relu: return linear_relu(x, weight, bias);
    case Activation::gelu: return linear_gelu(x, weight, bias);
    case Activation::none: break;
  }
  return linear(x, weight, bias);
}

const Any& ModuleList::at(size_t i) const {
  HT_CHECK(i < size(), "ModuleList: layer ", i, " of ", size());
  return layers_[i];
}

namespace {

// The activation that a fused operator has room for. Exact types: a class derived from ReLU may do anything.
Activation activation_of(const Module& m) {
  const std::type_info& type = typeid(m);
  return type == typeid(ReLU) ? Activation::relu : type == typeid(GELU) ? Activation::gelu : Activation::none;
}
const Linear* plain_linear(const Module& m) {
  if (typeid(m) != typeid(Linear)) return nullptr;
  auto& linear = static_cast<const Linear&>(m);
  return linear.activation() == Activation::none ? &linear : nullptr;
}

}  // namespace

Tensor Sequential::forward(const Tensor& x) {
  bool fuse = fuse_ && !watched();
  Tensor y = x;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Linear* linear = fuse && i + 1 < layers_.size() ? plain_linear(layers_[i].get()) : nullptr;
    Activation next = linear ? activation_of(layers_[i + 1].get()) : Activation::none;
    if (next == Activation::none) y = layers_[i](y);
    else {
      y = linear->forward_with(y, next);
      ++i;
    }
  }
  return y;
}

PrecisionIsland::PrecisionIsland(Any module, DType dtype) : held_(std::move(module)), dtype_(dtype) {
  HT_CHECK(is_floating(dtype), "nn::PrecisionIsland: expected a floating dtype, got ", dtype);
  held_.get().to(dtype);
}
Tensor PrecisionIsland::forward(const Tensor& x) {
  Tensor in = x.to(dtype_);
  LayerScope off(Layer::autocast, false);
  return held_(in);
}

}  // namespace halftone::nn
