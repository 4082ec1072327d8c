#pragma once
// Images [n, channels, h, w] at another size.
#include "halftone/core/hd.h"
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef resize, resize_input;
}

enum class Interpolation : uint8_t { nearest, bilinear };
struct ResizeOptions {
  Interpolation mode = Interpolation::nearest;  // nearest: element floor(i * in / out)
  bool align_corners = false;  // of bilinear: whether the centres of corner pixels stay, or the image's edges
};
HT_API Tensor resize(const Tensor& x, Size2 size, ResizeOptions o = {});

// [n, channels * r * r, h, w] -> [n, channels, h * r, w * r], and back: views, copied where that cannot be.
HT_API Tensor pixel_shuffle(const Tensor& x, Size r);
HT_API Tensor pixel_unshuffle(const Tensor& x, Size r);

// `size` is the result's: the output's of resize, the input's of its transpose.
struct ResizeAttrs {
  int64_t size[2] = {1, 1};
  ResizeOptions options = {};
};

// What a kernel works on. Along one dimension an output is (1 - part) of element `low` and `part` of `high`.
struct ResizeTap { int64_t low, high; double part; };
struct ResizeGeometry {
  int64_t planes, in[2], out[2];
  ResizeOptions options;

  HT_HD ResizeTap tap(int d, int64_t o) const {
    if (options.mode == Interpolation::nearest) {
      int64_t i = o * in[d] / out[d];
      return {i, i, 0};
    }
    double at = options.align_corners ? (out[d] > 1 ? static_cast<double>(o * (in[d] - 1)) / static_cast<double>(out[d] - 1) : 0)
                                      : (static_cast<double>(o) + .5) * (static_cast<double>(in[d]) / static_cast<double>(out[d])) - .5;
    at = at < 0 ? 0 : at;
    int64_t low = static_cast<int64_t>(at);
    low = low < in[d] - 1 ? low : in[d] - 1;
    return {low, low < in[d] - 1 ? low + 1 : low, low < in[d] - 1 ? at - static_cast<double>(low) : 0};
  }
  // The share of element i in output o.
  HT_HD double share(int d, int64_t o, int64_t i) const {
    ResizeTap t = tap(d, o);
    return (t.low == i ? 1 - t.part : 0) + (t.high == i ? t.part : 0);
  }
  // Outputs that may hold some of element i: from first to below last; taps grow with o, one step of margin for rounding.
  HT_HD int64_t first_output(int d, int64_t i) const {
    double o = i == 0 ? 0 : static_cast<double>(i - 1) * step(d) - 2;
    return o < 0 ? 0 : static_cast<int64_t>(o);
  }
  HT_HD int64_t last_output(int d, int64_t i) const {
    double o = (static_cast<double>(i) + 2) * step(d) + 2;
    return i == in[d] - 1 || o > static_cast<double>(out[d]) ? out[d] : static_cast<int64_t>(o);
  }

 private:
  // Outputs for each element.
  HT_HD double step(int d) const {
    if (options.mode == Interpolation::bilinear && options.align_corners)
      return in[d] > 1 ? static_cast<double>(out[d] - 1) / static_cast<double>(in[d] - 1) : static_cast<double>(out[d]);
    return static_cast<double>(out[d]) / static_cast<double>(in[d]);
  }
};
HT_API ResizeGeometry resize_geometry(const ResizeAttrs& a, const Shape& x, const Shape& y);

}  // namespace halftone
