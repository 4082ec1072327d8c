#include "halftone/nn/activation.h"

#include "halftone/ops/shape.h"

namespace halftone::nn {

Tensor PReLU::forward(const Tensor& x) {
  int64_t count = weight.size(0);
  HT_CHECK(count == 1 || (x.rank() >= 2 && x.size(1) == count), "PReLU: expected [n, ", count, ", ...], got ", x.meta());
  Tensor w = weight.to(x.dtype());
  if (count > 1) {
    Shape shape = Shape::filled(x.rank(), 1);
    shape[1] = count;
    w = w.reshape(shape);
  }
  return where(gt(x, 0), x, w * x);
}

Tensor GLU::forward(const Tensor& x) {
  int64_t dim = dim_ < 0 ? dim_ + x.rank() : dim_;
  HT_CHECK(dim >= 0 && dim < x.rank() && x.size(dim) % 2 == 0, "GLU: expected an even size of dimension ", dim_, ", got ",
           x.meta());
  auto half = chunk(x, 2, dim);
  return half[0] * sigmoid(half[1]);
}

}  // namespace halftone::nn
