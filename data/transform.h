#pragma once
// Transforms of batches of images x [n, channels, h, w]: made of operators, so they run where the batch is. Each example of a batch
// draws for itself, from the thread's generator; a loader gives every batch one of its own. Pixels are u8 from 0 to 255 or floats from
// 0 to 1; what computes makes u8 pixels f32 ones.
//
//   data::DataLoader loader(data::transform(set, data::RandomCrop(32, {.padding = 4}), data::RandomFlip(), data::Normalize(mean, std)),
//                           {.batch_size = 128, .shuffle = true, .workers = 2});
//
// transform() runs in the loader's workers; on a GPU, call them on the batch instead: x = flip(crop(x)).
#include <concepts>
#include <tuple>
#include <utility>
#include <vector>

#include "halftone/data/dataset.h"

namespace halftone::data {

// u8 pixels as f32 in [0, 1]; others as they are.
HT_API Tensor to_float(const Tensor& x);

// (x - mean) / std by channel, of pixels in [0, 1].
class HT_API Normalize {
 public:
  Normalize(std::vector<double> mean, std::vector<double> std);  // one for each channel, or one for all
  Tensor operator()(const Tensor& x) const;

 private:
  std::vector<double> mean_, std_;
};

// A part of this size from a random place of the image, around which `padding` pixels of `fill` were added.
struct RandomCropOptions { int64_t padding = 0; double fill = 0; };
class HT_API RandomCrop {
 public:
  explicit RandomCrop(Size2 size, RandomCropOptions o = {});
  Tensor operator()(const Tensor& x) const;

 private:
  Size2 size_;
  RandomCropOptions options_;
};

// The mirror image, with probability p: left and right exchanged, or upside down.
struct RandomFlipOptions { bool vertical = false; };
class HT_API RandomFlip {
 public:
  explicit RandomFlip(double p = 0.5, RandomFlipOptions o = {});
  Tensor operator()(const Tensor& x) const;

 private:
  double p_;
  RandomFlipOptions options_;
};

// A square of this side becomes `fill`; its centre is anywhere in the image, so that a part may lie outside (DeVries and Taylor,
// "Improved regularization of convolutional neural networks with cutout", 2017).
class HT_API Cutout {
 public:
  explicit Cutout(Size side, double fill = 0);
  Tensor operator()(const Tensor& x) const;

 private:
  int64_t side_;
  double fill_;
};

// Brightness, contrast (about the image's mean luma) and saturation (about each pixel's luma), in this order, each times a factor
// uniform in [max(0, 1 - b), 1 + b]. Results stay in [0, 1]. Saturation takes 3 channels.
struct ColorJitterOptions { double brightness = 0, contrast = 0, saturation = 0; };
class HT_API ColorJitter {
 public:
  explicit ColorJitter(ColorJitterOptions o);
  Tensor operator()(const Tensor& x) const;

 private:
  ColorJitterOptions options_;
};

// Targets [n] of integers -> [n, classes] (f32).
class HT_API OneHot {
 public:
  explicit OneHot(Size classes);
  Batch operator()(Batch batch) const;

 private:
  int64_t classes_;
};

// Each example becomes lambda of itself and 1 - lambda of another of the batch, and so do the targets, which become [n, classes] (f32)
// for cross_entropy; one lambda a batch, from Beta(alpha, alpha) (Zhang et al., "mixup", 2018).
class HT_API Mixup {
 public:
  Mixup(double alpha, Size classes);
  Batch operator()(Batch batch) const;

 private:
  double alpha_;
  int64_t classes_;
};

namespace detail {

template <class B, class F>
auto apply_transform(B batch, const F& f) {
  if constexpr (std::invocable<const F&, B>)
    return f(std::move(batch));
  else {
    batch.x = f(batch.x);
    return batch;
  }
}
template <class B, class F, class... More>
auto apply_transforms(B batch, const F& f, const More&... more) {
  auto next = apply_transform(std::move(batch), f);
  if constexpr (sizeof...(More) == 0)
    return next;
  else
    return apply_transforms(std::move(next), more...);
}

}  // namespace detail

// A dataset whose batches pass through functions, one after the other: of the whole batch where they take one, else of its x.
template <Dataset D, class... F>
class Transformed {
 public:
  Transformed(D data, F... f) : data_(std::move(data)), f_(std::move(f)...) {}
  int64_t size() const { return data_.size(); }
  auto get(std::span<const int64_t> indices) const {
    return std::apply([&](const F&... f) { return detail::apply_transforms(data_.get(indices), f...); }, f_);
  }

 private:
  D data_;
  std::tuple<F...> f_;
};
template <Dataset D, class... F> requires(sizeof...(F) > 0)
Transformed<D, F...> transform(D data, F... f) { return {std::move(data), std::move(f)...}; }

}  // namespace halftone::data
