#include "halftone/cuda/images.h"

#include "halftone/ops/copy.h"
#include "halftone/ops/shape.h"

namespace halftone::cuda {
namespace {

bool fits(const Tensor& t, bool channels_last) {
  return reinterpret_cast<uintptr_t>(t.raw_data()) % 16 == 0 && (channels_last ? t.meta().channels_last() : t.is_contiguous());
}

}  // namespace

Tensor empty_images(const Shape& shape, DType dtype, Device device, bool channels_last) {
  Meta m(shape, dtype, device);
  if (channels_last) m.strides = channels_last_strides(shape);
  return Tensor::allocate(m);
}

Tensor operand(const Tensor& t, bool channels_last, int64_t channels) {
  if (t.size(1) == channels && fits(t, channels_last)) return t;
  Shape shape = t.shape();
  shape[1] = channels;
  Tensor copy = empty_images(shape, t.dtype(), t.device(), channels_last);
  if (t.size(1) == channels) return copy.copy_(t);
  copy.zero_();
  copy.slice(1, 0, t.size(1)).copy_(t);
  return copy;
}

Result::Result(const Tensor& t, DType dtype, bool channels_last)
    : out(t), to(dtype == t.dtype() && fits(t, channels_last) ? t : empty_images(t.shape(), dtype, t.device(), channels_last)) {}

void Result::finish() const {
  if (to.body() != out.body()) call_all(op::copy, {out, to});
}

}  // namespace halftone::cuda
