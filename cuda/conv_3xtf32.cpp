#include "halftone/cuda/conv_3xtf32.h"

#include <optional>

#include "halftone/core/backend.h"
#include "halftone/cuda/gemm_3xtf32.h"
#include "halftone/cuda/images.h"
#include "halftone/ops/copy.h"

namespace halftone::cuda {
namespace {

constexpr int64_t together = 4;  // channels

// Nothing where a convolution is not for these kernels, or has nothing to add up.
std::optional<ConvGeometry> geometry(const Call& c, const Tensor& x, const Tensor& w, const Tensor& y) {
  const auto a = c.as<ConvAttrs>();
  if (a.dims != 2 || tf32_allowed() || x.numel() == 0 || w.numel() == 0 || y.numel() == 0) return std::nullopt;
  for (auto& t : {x, w, y}) if (t.dtype() != DType::f32) return std::nullopt;
  const ConvGeometry q = conv_geometry(a, x.shape(), w.shape(), y.shape());
  return conv_3xtf32_takes(q) ? std::optional(q) : std::nullopt;
}
int64_t padded(int64_t channels) { return (channels + together - 1) / together * together; }

}  // namespace

bool conv_3xtf32(const Call& c, const Tensor& y, bool relu) {
  auto q = geometry(c, c.in[0], c.in[1], y);
  if (!q) return false;
  q->c = padded(q->c);
  const Tensor x = operand(c.in[0], true, q->c), w = operand(c.in[1], true, q->c), bias = c.has(2) ? c.in[2].contiguous() : Tensor();
  const Result r(y, DType::f32, true);
  conv_3xtf32(*q, x, w, bias.defined() ? bias.data<float>() : nullptr, relu, r.to);
  r.finish();
  return true;
}

bool conv_input_3xtf32(const Call& c, const Tensor& x) {
  auto q = geometry(c, x, c.in[1], c.in[0]);
  if (!q || q->o % together != 0) return false;
  const Result r(x, DType::f32, true);
  conv_3xtf32_input(*q, operand(c.in[0], true), c.in[1], r.to);
  r.finish();
  // By the kernel itself, as it writes, took longer: ResNet-50's step on one H200 145 ms, not 137.
  if (c.has(2)) add_into(x, c.in[2]);
  return true;
}

bool conv_weight_3xtf32(const Call& c, const Tensor& w) {
  auto q = geometry(c, c.in[0], w, c.in[1]);
  if (!q) return false;
  const int64_t channels = q->c;
  q->c = padded(channels);
  const Tensor y = Tensor::allocate(Meta({q->kernel[1], q->kernel[2], q->c, q->o}, DType::f32, w.device()));
  conv_3xtf32_weight(*q, operand(c.in[0], true, q->c), operand(c.in[1], true), y);
  call_all(op::copy, {w, y.permute({3, 2, 0, 1}).slice(1, 0, channels)});
  return true;
}

}  // namespace halftone::cuda
