#include "halftone/cuda/images.h"

#include "halftone/ops/copy.h"
#include "halftone/ops/shape.h"

namespace halftone::cuda {
namespace {

bool fits(const Tensor& t, bool channels_last) {
  return reinterpret_cast<uintptr_t>(t.raw_data()) % 16 == 0 && (channels_last ? t.meta().channels_last() : t.is_contiguous());
}
Tensor fresh(Shape shape, int64_t channels, DType dtype, Device device, bool channels_last) {
  shape[1] = channels;
  Meta m(shape, dtype, device);
  if (channels_last) m.strides = channels_last_strides(shape);
  return Tensor::allocate(m);
}

}  // namespace

Tensor operand(const Tensor& t, bool channels_last, int64_t channels) {
  if (t.size(1) == channels && fits(t, channels_last)) return t;
  Tensor copy = fresh(t.shape(), channels, t.dtype(), t.device(), channels_last);
  if (t.size(1) == channels) return copy.copy_(t);
  copy.zero_();
  copy.slice(1, 0, t.size(1)).copy_(t);
  return copy;
}

Result::Result(const Tensor& t, DType dtype, bool channels_last)
    : out(t), to(dtype == t.dtype() && fits(t, channels_last) ? t : fresh(t.shape(), t.size(1), dtype, t.device(), channels_last)) {}

void Result::finish() const {
  if (to.body() != out.body()) call_all(op::copy, {out, to});
}

}  // namespace halftone::cuda
