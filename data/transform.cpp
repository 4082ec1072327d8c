// Random places, mirrors and factors for each example as small tensors beside the batch, [n, 1, 1, 1], and operators that broadcast them.
#include "halftone/data/transform.h"

#include <cmath>

#include "halftone/core/random.h"
#include "halftone/core/thread_state.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/index.h"
#include "halftone/ops/random.h"
#include "halftone/ops/rearrange.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/shape.h"
#include "halftone/ops/ternary.h"

namespace halftone::data {
namespace {

void check_images(const char* who, const Tensor& x) {
  HT_CHECK(x.defined() && x.rank() == 4, who, ": expected images [n, channels, h, w], got ", x.defined() ? str(x.meta()) : "an undefined tensor");
}

// A value for each image, uniform in [low, high).
Tensor uniform(const Tensor& x, double low, double high) {
  return uniform_(empty({x.size(0), 1, 1, 1}, {.device = x.device()}), low, high);
}
Tensor random_integers(const Tensor& x, int64_t count) { return randint(0, count, {x.size(0), 1, 1, 1}, {.device = x.device()}); }
// 0, 1, ... along dimension `dim` of four.
Tensor places(const Tensor& x, int64_t n, size_t dim) {
  Shape shape{1, 1, 1, 1};
  shape[dim] = n;
  return arange(n, {.device = x.device()}).view(shape);
}

// Numbers for the channels, [1, channels or 1, 1, 1].
Tensor by_channel(const Tensor& x, const std::vector<double>& values, DType dtype) {
  HT_CHECK(values.size() == 1 || static_cast<int64_t>(values.size()) == x.size(1), "Normalize: expected images of ", values.size(),
           " channels, got ", x.meta());
  return tensor(values).to(dtype).view({1, values.size(), 1, 1}).to(x.device());
}

// Luma (ITU-R BT.601), [n, 1, h, w]; of gray images, themselves.
Tensor luma(const Tensor& x) {
  if (x.size(1) != 3) return x.mean(1, {.keepdim = true});
  return x.slice(1, 0, 1) * .299 + x.slice(1, 1, 2) * .587 + x.slice(1, 2, 3) * .114;
}

// The next random number of this thread in [0, 1), on the host.
double draw() { return host_value(rand({})).to<double>(); }
// Gamma(shape), shape >= 1 (Marsaglia and Tsang, "A simple method for generating gamma variables", 2000).
double draw_gamma(double shape) {
  const double d = shape - 1. / 3, c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double x = host_value(randn({})).to<double>(), v = std::pow(1 + c * x, 3);
    if (v > 0 && std::log(1 - draw()) < x * x / 2 + d - d * v + d * std::log(v)) return d * v;
  }
}
// Beta(a, a). A gamma variable of a small shape is one of shape + 1 times u^(1 / shape), here by its logarithm.
double draw_beta(double a) {
  const auto log_gamma = [a] { return std::log(draw_gamma(a + 1)) + std::log(1 - draw()) / a; };
  return 1 / (1 + std::exp(-(log_gamma() - log_gamma())));
}

}  // namespace

Tensor to_float(const Tensor& x) { return x.dtype() == DType::u8 ? x.to(DType::f32) / 255 : x; }

Normalize::Normalize(std::vector<double> mean, std::vector<double> std) : mean_(std::move(mean)), std_(std::move(std)) {
  HT_CHECK(!mean_.empty() && mean_.size() == std_.size(), "Normalize: expected as many means as deviations, got ", mean_.size(), " and ",
           std_.size());
  for (const double s : std_) HT_CHECK(s > 0, "Normalize: expected deviations above 0, got ", s);
}
Tensor Normalize::operator()(const Tensor& x) const {
  check_images("Normalize", x);
  const Tensor pixels = to_float(x);
  return (pixels - by_channel(x, mean_, pixels.dtype())) / by_channel(x, std_, pixels.dtype());
}

RandomCrop::RandomCrop(Size2 size, RandomCropOptions o) : size_(size), options_(o) {
  HT_CHECK(size.h > 0 && size.w > 0 && o.padding >= 0, "RandomCrop: expected a size above 0 and a padding of 0 or more, got ", size.h, " x ",
           size.w, " and ", o.padding);
}
Tensor RandomCrop::operator()(const Tensor& x) const {
  check_images("RandomCrop", x);
  const int64_t p = options_.padding, tall = x.size(2) + 2 * p - size_.h, wide = x.size(3) + 2 * p - size_.w;
  HT_CHECK(tall >= 0 && wide >= 0, "RandomCrop: expected images of at least ", size_.h, " x ", size_.w, " with their padding of ", p, ", got ",
           x.meta());
  const Tensor padded = p == 0 ? x : pad(x, {p, p, p, p}, {.value = options_.fill});
  const Tensor rows = places(x, size_.h, 2) + random_integers(x, tall + 1), columns = places(x, size_.w, 3) + random_integers(x, wide + 1);
  const int64_t n = x.size(0), channels = x.size(1);
  const Tensor band = gather(padded, 2, rows.expand({n, channels, size_.h, padded.size(3)}));
  return gather(band, 3, columns.expand({n, channels, size_.h, size_.w}));
}

RandomFlip::RandomFlip(double p, RandomFlipOptions o) : p_(p), options_(o) {
  HT_CHECK(p >= 0 && p <= 1, "RandomFlip: expected a probability in [0, 1], got ", p);
}
Tensor RandomFlip::operator()(const Tensor& x) const {
  check_images("RandomFlip", x);
  return where(lt(uniform(x, 0, 1), p_), flip(x, {options_.vertical ? 2 : 3}), x);
}

Cutout::Cutout(Size side, double fill) : side_(side), fill_(fill) {
  HT_CHECK(side > 0, "Cutout: expected a side above 0, got ", side.value);
}
Tensor Cutout::operator()(const Tensor& x) const {
  check_images("Cutout", x);
  const auto inside = [&](size_t dim) {
    const int64_t n = x.size(static_cast<int64_t>(dim));
    const Tensor from_begin = places(x, n, dim) - (random_integers(x, n) - side_ / 2);
    return logical_and(ge(from_begin, 0), lt(from_begin, side_));
  };
  const Tensor rows = inside(2), columns = inside(3);
  return masked_fill(x, logical_and(rows, columns), fill_);
}

ColorJitter::ColorJitter(ColorJitterOptions o) : options_(o) {
  HT_CHECK(o.brightness >= 0 && o.contrast >= 0 && o.saturation >= 0, "ColorJitter: expected strengths of 0 or more, got ", o.brightness, ", ",
           o.contrast, " and ", o.saturation);
}
Tensor ColorJitter::operator()(const Tensor& x) const {
  check_images("ColorJitter", x);
  HT_CHECK(options_.saturation == 0 || x.size(1) == 3, "ColorJitter: saturation expects 3 channels, got ", x.meta());
  Tensor y = to_float(x);
  const auto jitter = [&](double strength, const Tensor& about) {
    if (strength > 0) y = clamp(about + (y - about) * uniform(x, std::max(0., 1 - strength), 1 + strength), 0, 1);
  };
  jitter(options_.brightness, zeros({}, {.dtype = y.dtype()}));
  if (options_.contrast > 0) jitter(options_.contrast, luma(y).mean({2, 3}, {.keepdim = true}));
  if (options_.saturation > 0) jitter(options_.saturation, luma(y));
  return y;
}

OneHot::OneHot(Size classes) : classes_(classes) { HT_CHECK(classes > 0, "OneHot: expected classes above 0, got ", classes.value); }
Batch OneHot::operator()(Batch batch) const {
  batch.target = one_hot(batch.target, classes_, DType::f32);
  return batch;
}

Mixup::Mixup(double alpha, Size classes) : alpha_(alpha), classes_(classes) {
  HT_CHECK(alpha > 0 && classes > 0, "Mixup: expected alpha and classes above 0, got ", alpha, " and ", classes.value);
}
Batch Mixup::operator()(Batch batch) const {
  const double share = draw_beta(alpha_);
  const Tensor others = randperm(batch.size()).to(batch.x.device());
  const auto mixed = [&](const Tensor& t) { return t * share + index_select(t, 0, others) * (1 - share); };
  return {mixed(to_float(batch.x)), mixed(one_hot(batch.target, classes_, DType::f32))};
}

}  // namespace halftone::data
