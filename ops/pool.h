#pragma once
// Pooling over windows of the last one to three dimensions of x [n, channels, ...]. Sums accumulate in f32 (f64) and are
// rounded once; of equal elements the first is the largest, and a NaN is larger than any number.
#include "halftone/core/hd.h"
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef max_pool, max_pool_gather, max_pool_scatter, avg_pool, avg_pool_input;
}

template <class S> struct MaxPoolOptions {
  std::optional<S> stride = {};  // the kernel's size unless given
  S padding = 0, dilation = 1;   // at most half the kernel; never the largest
  bool ceil_mode = false;        // a last window that reaches past the end counts, too
};
using MaxPool1dOptions = MaxPoolOptions<Size>;
using MaxPool2dOptions = MaxPoolOptions<Size2>;
HT_API Tensor max_pool1d(const Tensor& x, Size kernel, MaxPool1dOptions o = {});
HT_API Tensor max_pool2d(const Tensor& x, Size2 kernel, MaxPool2dOptions o = {});

template <class S> struct AvgPoolOptions {
  std::optional<S> stride = {};
  S padding = 0;
  bool ceil_mode = false;
  bool count_include_pad = true;  // zeros of the padding are averaged as well
};
using AvgPool1dOptions = AvgPoolOptions<Size>;
using AvgPool2dOptions = AvgPoolOptions<Size2>;
HT_API Tensor avg_pool1d(const Tensor& x, Size kernel, AvgPool1dOptions o = {});
HT_API Tensor avg_pool2d(const Tensor& x, Size2 kernel, AvgPool2dOptions o = {});

// To a given size: output i covers elements floor(i * in / out) to below ceil((i + 1) * in / out).
HT_API Tensor adaptive_max_pool1d(const Tensor& x, Size size);
HT_API Tensor adaptive_max_pool2d(const Tensor& x, Size2 size);
HT_API Tensor adaptive_avg_pool1d(const Tensor& x, Size size);
HT_API Tensor adaptive_avg_pool2d(const Tensor& x, Size2 size);

// The operators' attributes, outermost spatial dimension first. `size` is what an operator cannot tell from its input: the
// output's of an adaptive pool, the input's of a transpose. A window's elements are numbered row-major within `kernel`,
// which for adaptive pools is the largest window.
struct PoolAttrs {
  int64_t kernel[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, padding[3] = {}, dilation[3] = {1, 1, 1}, size[3] = {};
  int32_t dims = 2;
  bool ceil_mode = false, include_pad = true, adaptive = false;
};
// Of the elements' numbers: u8 where every number and 255, which is none's, are different, else i32, where -1 is none's.
HT_API DType number_type(const PoolAttrs& a);
// Calls run(pointer to t's numbers).
template <class F> void visit_numbers(const Tensor& t, F run) {
  if (t.dtype() == DType::u8) run(t.data<uint8_t>());
  else run(t.data<int32_t>());
}

// Along one dimension: the elements begin, begin + step, ... below end lie inside the input, the first is element `tap` of
// the window, and `count` is what an average divides by.
struct PoolWindow { int32_t begin, end, step, tap, count; };

// What a kernel works on: always three spatial dimensions, of which missing ones come first and have size 1. GPUs divide 32
// bits several times as fast as 64.
struct PoolGeometry {
  int64_t planes;
  int32_t in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
  bool include_pad, adaptive;

  HT_HD int64_t pixels() const { return int64_t{in[0]} * in[1] * in[2]; }
  HT_HD int64_t positions() const { return int64_t{out[0]} * out[1] * out[2]; }
  HT_HD PoolWindow window(int d, int32_t o) const {
    if (adaptive) {
      auto begin = static_cast<int32_t>(int64_t{o} * in[d] / out[d]), end = static_cast<int32_t>((int64_t{o + 1} * in[d] + out[d] - 1) / out[d]);
      return {begin, end, 1, 0, end - begin};
    }
    int32_t first = o * stride[d] - padding[d], last = first + (kernel[d] - 1) * dilation[d] + 1;
    int32_t tap = first < 0 ? (-first + dilation[d] - 1) / dilation[d] : 0, begin = first + tap * dilation[d];
    int32_t end = last < in[d] ? last : in[d], padded = last < in[d] + padding[d] ? last : in[d] + padding[d];
    return {begin, end, dilation[d], tap, include_pad ? padded - first : end - begin};
  }
  // The outputs whose windows may hold element i: from first to below last.
  HT_HD int32_t first_output(int d, int32_t i) const {
    if (adaptive) return static_cast<int32_t>(int64_t{i} * out[d] / in[d]);
    int32_t room = i + padding[d] - (kernel[d] - 1) * dilation[d];
    return room <= 0 ? 0 : (room + stride[d] - 1) / stride[d];
  }
  HT_HD int32_t last_output(int d, int32_t i) const {
    int32_t last = adaptive ? static_cast<int32_t>((int64_t{i + 1} * out[d] + in[d] - 1) / in[d]) : (i + padding[d]) / stride[d] + 1;
    return last < out[d] ? last : out[d];
  }
};
HT_API PoolGeometry pool_geometry(const PoolAttrs& a, const Shape& x, const Shape& y);

}  // namespace halftone
