#pragma once
// Layers that move elements or change sizes, and any function as a layer.
#include "halftone/nn/module.h"
#include "halftone/ops/rearrange.h"
#include "halftone/ops/resize.h"

namespace halftone::nn {

// Dimensions `from` to `to`, both included, become one: [n, c, h, w] -> [n, c * h * w].
class HT_API Flatten : public Module {
 public:
  explicit Flatten(int64_t from = 1, int64_t to = -1) : from_(from), to_(to) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return x.flatten(from_, to_); }

 private:
  int64_t from_, to_;
};
// One dimension becomes several, of which one size may be -1.
class HT_API Unflatten : public Module {
 public:
  Unflatten(int64_t dim, const Shape& sizes) : dim_(dim), sizes_(sizes) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override;

 private:
  int64_t dim_;
  Shape sizes_;
};

// Elements added around x: {before, after} of the last dimension, then of the one before it, and so on.
class HT_API Pad : public Module {
 public:
  explicit Pad(std::vector<int64_t> pads, PadOptions o = {}) : pads_(std::move(pads)), options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return pad(x, pads_, options_); }

 private:
  std::vector<int64_t> pads_;
  PadOptions options_;
};

// Images [n, channels, h, w] so many times as high and wide.
class HT_API Upsample : public Module {
 public:
  explicit Upsample(Size2 factor, ResizeOptions o = {});
  HT_FIELDS()
  Tensor forward(const Tensor& x) override;

 private:
  Size2 factor_;
  ResizeOptions options_;
};
// Images at a given size.
class HT_API Resize : public Module {
 public:
  explicit Resize(Size2 size, ResizeOptions o = {}) : size_(size), options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return resize(x, size_, options_); }

 private:
  Size2 size_;
  ResizeOptions options_;
};

// [n, channels * r * r, h, w] -> [n, channels, h * r, w * r], and back.
class HT_API PixelShuffle : public Module {
 public:
  explicit PixelShuffle(Size r) : r_(r) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return pixel_shuffle(x, r_); }

 private:
  Size r_;
};
class HT_API PixelUnshuffle : public Module {
 public:
  explicit PixelUnshuffle(Size r) : r_(r) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return pixel_unshuffle(x, r_); }

 private:
  Size r_;
};

// Any function of one tensor. What it captures is shared with clones and has no name in the state.
class HT_API Lambda : public Module {
 public:
  explicit Lambda(std::function<Tensor(const Tensor&)> f) : f_(std::move(f)) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return f_(x); }

 private:
  std::function<Tensor(const Tensor&)> f_;
};

}  // namespace halftone::nn
