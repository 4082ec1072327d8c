#include "halftone/nn/linear.h"

#include <cmath>

#include "halftone/nn/init.h"
#include "halftone/ops/binary.h"

namespace halftone::nn {
namespace {

double bound_of(int64_t fan) { return fan > 0 ? 1 / std::sqrt(static_cast<double>(fan)) : 0; }

}  // namespace

Linear::Linear(Size in, Size out, LinearOptions o) : weight(empty({out, in})), activation_(o.activation) {
  double bound = bound_of(in);
  init::uniform_(weight, -bound, bound);
  if (o.bias) bias = Parameter(init::uniform_(empty({out}), -bound, bound));
}
Tensor Linear::forward(const Tensor& x) {
  switch (activation_) {
    case Activation::relu: return linear_relu(x, weight, bias);
    case Activation::gelu: return linear_gelu(x, weight, bias);
    case Activation::none: break;
  }
  return linear(x, weight, bias);
}

Bilinear::Bilinear(Size in1, Size in2, Size out, BilinearOptions o) : weight(empty({out, in1, in2})) {
  double bound = bound_of(in1);
  init::uniform_(weight, -bound, bound);
  if (o.bias) bias = Parameter(init::uniform_(empty({out}), -bound, bound));
}
Tensor Bilinear::forward(const Tensor& x, const Tensor& y) {
  HT_CHECK(x.rank() > 0 && y.rank() > 0 && x.size(-1) == weight.size(1) && y.size(-1) == weight.size(2),
           "Bilinear: expected x [..., ", weight.size(1), "] and y [..., ", weight.size(2), "], got ", x.meta(), " and ",
           y.meta());
  Tensor product = einsum("...i,oij,...j->...o", {x, weight, y});
  return bias.defined() ? product + bias : product;
}

}  // namespace halftone::nn
