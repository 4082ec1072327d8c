#include "halftone/nn/position.h"

#include <algorithm>
#include <cmath>

#include "halftone/ops/binary.h"
#include "halftone/ops/matmul.h"
#include "halftone/ops/shape.h"

namespace halftone::nn {

PositionTable::PositionTable(const char* name, Size width, double base) : width_(width), base_(base) {
  HT_CHECK(width > 0 && width % 2 == 0, name, ": expected an even width, got ", width);
}

PositionTable::Rows PositionTable::rows(int64_t begin, int64_t n, DType dtype, Device device) {
  NoGrad off;
  Tensor& known = all_.sin;
  if (!known.defined() || known.size(0) < begin + n || known.dtype() != dtype || known.device() != device) {
    int64_t size = 64;  // by doubling: a decoder asks for one more row every time
    while (size < begin + n) size *= 2;
    if (known.defined()) size = std::max(size, known.size(0));
    LayerScope exact(Layer::autocast, false);
    Tensor frequency = exp(arange(width_ / 2).to(DType::f64) * (-2 * std::log(base_) / static_cast<double>(width_)));
    Tensor angle = outer(arange(size).to(DType::f64), frequency);
    all_ = {sin(angle).to(dtype).to(device), cos(angle).to(dtype).to(device)};
  }
  return {narrow(all_.sin, 0, begin, n), narrow(all_.cos, 0, begin, n)};
}

Tensor PositionalEncoding::forward(const Tensor& x) {
  int64_t width = table_.width();
  HT_CHECK(x.rank() == 3 && x.size(2) == width && is_floating(x.dtype()), "PositionalEncoding: expected ",
           batch_first_ ? "[n, t, " : "[t, n, ", width, "] of a floating dtype, got ", x.meta());
  int64_t t = x.size(batch_first_ ? 1 : 0);
  auto [s, c] = table_.rows(0, t, x.dtype(), x.device());
  Tensor code = stack({s, c}, -1).reshape({t, width});
  return x + (batch_first_ ? code : code.unsqueeze(1));
}

Tensor RotaryEmbedding::forward(const Tensor& x, int64_t offset) {
  int64_t width = table_.width(), half = width / 2;
  HT_CHECK(x.rank() >= 2 && x.size(-1) == width && is_floating(x.dtype()), "RotaryEmbedding: expected [..., t, ", width,
           "] of a floating dtype, got ", x.meta());
  HT_CHECK(offset >= 0, "RotaryEmbedding: expected an offset of 0 or more, got ", offset);
  DType wide = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
  auto [s, c] = table_.rows(offset, x.size(-2), wide, x.device());
  Tensor a = (interleaved_ ? slice(x, -1, 0, width, 2) : narrow(x, -1, 0, half)).to(wide);
  Tensor b = (interleaved_ ? slice(x, -1, 1, width, 2) : narrow(x, -1, half, half)).to(wide);
  Tensor left = (a * c - b * s).to(x.dtype()), right = (b * c + a * s).to(x.dtype());  // 16-bit ones are rounded once
  return interleaved_ ? stack({left, right}, -1).reshape(x.shape()) : cat({left, right}, -1);
}

}  // namespace halftone::nn
