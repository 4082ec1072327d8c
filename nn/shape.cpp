#include "halftone/nn/shape.h"

namespace halftone::nn {

Tensor Unflatten::forward(const Tensor& x) {
  int64_t dim = dim_ < 0 ? dim_ + x.rank() : dim_, known = 1;
  HT_CHECK(dim >= 0 && dim < x.rank(), "Unflatten: dimension ", dim_, " of ", x.meta());
  bool open = false;
  for (int64_t n : sizes_) n == -1 && !open ? void(open = true) : void(known *= n);
  HT_CHECK(open ? known > 0 && x.size(dim) % known == 0 : known == x.size(dim), "Unflatten: a dimension of ", x.size(dim),
           " elements cannot become ", sizes_);
  Shape shape;
  for (int64_t d = 0; d < x.rank(); ++d) {
    if (d != dim) shape.push_back(x.size(d));
    else
      for (int64_t n : sizes_) shape.push_back(n == -1 ? x.size(dim) / known : n);
  }
  return x.reshape(shape);
}

Upsample::Upsample(Size2 factor, ResizeOptions o) : factor_(factor), options_(o) {
  HT_CHECK(factor.h > 0 && factor.w > 0, "Upsample: expected positive factors, got ", factor.h, " and ", factor.w);
}
Tensor Upsample::forward(const Tensor& x) {
  HT_CHECK(x.rank() == 4, "Upsample: expected [n, channels, h, w], got ", x.meta());
  return resize(x, {x.size(2) * factor_.h, x.size(3) * factor_.w}, options_);
}

}  // namespace halftone::nn
