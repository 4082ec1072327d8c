#pragma once
// Convolutions over one to three spatial dimensions: [n, channels, ...] in and out, whatever the memory's layout. One family
// of operators, each linear in either tensor and each the derivative of the others, so that derivatives of any order exist.
// Products accumulate in f32 (f64 for f64); 16-bit results are rounded once. conv_input may have a third input, of the result's shape,
// which is added: before the rounding where the kernel can, else after it.
#include "halftone/core/hd.h"
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef conv, conv_relu, conv_input, conv_weight, unfold, fold;
}

// One size for all three spatial dimensions, or {d, h, w}.
struct Size3 {
  int64_t d, h, w;
  template <Integer T> constexpr Size3(T n) : d(Size(n)), h(Size(n)), w(Size(n)) {}
  constexpr Size3(Size d_, Size h_, Size w_) : d(d_), h(h_), w(w_) {}
};

// Zeros around the input: so many on either side, or `same_padding`: as many as keep its size at stride 1, the odd one at the end.
struct SamePadding {};
inline constexpr SamePadding same_padding;
template <class S> struct Padding {
  S size;
  bool same = false;
  template <Integer... T> requires std::constructible_from<S, T...> constexpr Padding(T... n) : size(n...) {}
  constexpr Padding(S s) : size(s) {}
  constexpr Padding(SamePadding) : size(0), same(true) {}
};

template <class S> struct ConvOptions {
  S stride = 1;
  Padding<S> padding = 0;
  S dilation = 1;
  Size groups = 1;
  bool bias = true;  // of a module: whether it has one
};
using Conv1dOptions = ConvOptions<Size>;
using Conv2dOptions = ConvOptions<Size2>;
using Conv3dOptions = ConvOptions<Size3>;

// x [n, in, ...], w [out, in / groups, k...], b [out] or undefined -> [n, out, ...].
HT_API Tensor conv1d(const Tensor& x, const Tensor& w, const Tensor& b = {}, Conv1dOptions o = {});
HT_API Tensor conv2d(const Tensor& x, const Tensor& w, const Tensor& b = {}, Conv2dOptions o = {});
HT_API Tensor conv3d(const Tensor& x, const Tensor& w, const Tensor& b = {}, Conv3dOptions o = {});
// relu(conv2d(...)), rounded once.
HT_API Tensor conv2d_relu(const Tensor& x, const Tensor& w, const Tensor& b = {}, Conv2dOptions o = {});

// The transposes of conv2d, which are its gradients: over x, whose spatial sizes are given, from that of the result, g; and
// over w, whose kernel is given.
HT_API Tensor conv2d_input(const Tensor& g, const Tensor& w, Size2 size, Conv2dOptions o = {});
HT_API Tensor conv2d_weight(const Tensor& x, const Tensor& g, Size2 kernel, Conv2dOptions o = {});

template <class S> struct ConvTransposeOptions {
  S stride = 1, padding = 0;
  S output_padding = 0;  // more at the end of each dimension: a stride above 1 leaves several sizes to choose from
  S dilation = 1;
  Size groups = 1;
  bool bias = true;
};
using ConvTranspose1dOptions = ConvTransposeOptions<Size>;
using ConvTranspose2dOptions = ConvTransposeOptions<Size2>;

// x [n, in, ...], w [in, out / groups, k...], b [out] or undefined -> [n, out, ...], each size
// (size - 1) * stride - 2 * padding + (k - 1) * dilation + 1 + output_padding.
HT_API Tensor conv_transpose1d(const Tensor& x, const Tensor& w, const Tensor& b = {}, ConvTranspose1dOptions o = {});
HT_API Tensor conv_transpose2d(const Tensor& x, const Tensor& w, const Tensor& b = {}, ConvTranspose2dOptions o = {});

struct UnfoldOptions { Size2 stride = 1, padding = 0, dilation = 1; };
// The windows of x [n, channels, h, w] as columns: [n, channels * kh * kw, windows], row-major. And its transpose and
// gradient, which adds columns up to an image of a given size.
HT_API Tensor unfold(const Tensor& x, Size2 kernel, UnfoldOptions o = {});
HT_API Tensor fold(const Tensor& columns, Size2 size, Size2 kernel, UnfoldOptions o = {});

// The operators' attributes, outermost spatial dimension first. `size`: what conv_input and conv_weight cannot tell from
// their inputs, the spatial sizes of the result. `wide`: conv_weight gives f32 for 16-bit inputs.
struct ConvAttrs {
  int64_t stride[3] = {1, 1, 1}, dilation[3] = {1, 1, 1}, before[3] = {}, after[3] = {}, size[3] = {};
  int64_t groups = 1;
  int32_t dims = 2;
  bool wide = false;
};

// `size` is that of fold's result.
struct UnfoldAttrs { int64_t kernel[2] = {1, 1}, stride[2] = {1, 1}, dilation[2] = {1, 1}, padding[2] = {}, size[2] = {}; };

// What a kernel works on. Always three spatial dimensions: those that an operator lacks come first and have size 1.
struct ConvGeometry {
  int64_t n, c, o, groups;
  int64_t in[3], out[3], kernel[3], stride[3], dilation[3], before[3], after[3];

  HT_HD int64_t c_group() const { return c / groups; }
  HT_HD int64_t o_group() const { return o / groups; }
  HT_HD int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  HT_HD int64_t pixels() const { return in[0] * in[1] * in[2]; }
  HT_HD int64_t positions() const { return out[0] * out[1] * out[2]; }
};
// From the shapes of x, w and y, whichever of them are the operator's inputs.
HT_API ConvGeometry conv_geometry(const ConvAttrs& a, const Shape& x, const Shape& w, const Shape& y);
// For kernels of conv_input that do not add an addend as they write: sum += addend, rounded once more.
void add_into(const Tensor& sum, const Tensor& addend);
// From the shape of what is unfolded.
HT_API ConvGeometry unfold_geometry(const UnfoldAttrs& a, const Shape& x);

}  // namespace halftone
