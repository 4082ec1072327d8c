// Transforms of batches: what each may do to an image, on every device; and datasets that pass through them.
#include "halftone/data/transform.h"

#include <cmath>
#include <set>

#include "halftone/data/loader.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

using namespace halftone;
using namespace halftone::data;

namespace {

std::vector<Device> everywhere() {
  std::vector<Device> all{Device::cpu()};
  if (!devices(DeviceType::cuda).empty()) all.push_back(Device::cuda());
  return all;
}
// Pixels that are all different, [n, channels, h, w].
Tensor numbered(const Shape& shape, DType dtype = DType::f32, Device d = {}) { return arange(shape.numel()).view(shape).to(dtype).to(d); }
bool same(const Tensor& a, const Tensor& b) { return a.shape() == b.shape() && a.to_vector<double>() == b.to_vector<double>(); }
bool near(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  if (a.shape() != b.shape()) return false;
  for (size_t i = 0; i < x.size(); ++i)
    if (std::abs(x[i] - y[i]) > 1e-5) return false;
  return true;
}
// Which of `candidates` the image is; -1: none.
int which(const Tensor& image, const std::vector<Tensor>& candidates) {
  for (size_t i = 0; i < candidates.size(); ++i)
    if (same(image, candidates[i])) return static_cast<int>(i);
  return -1;
}

}  // namespace

TEST_CASE("normalised pixels") {
  for (const Device d : everywhere()) {
    const Tensor x = numbered({2, 3, 2, 2}, DType::u8, d);
    const Tensor y = Normalize({.1, .2, .3}, {1, 2, 4})(x);
    CHECK(y.dtype() == DType::f32);
    CHECK(y.device() == d);
    for (int64_t c = 0; c < 3; ++c) {
      const double mean[] = {.1, .2, .3}, std[] = {1, 2, 4};
      CHECK(near(y.select(1, c), (x.select(1, c).to(DType::f32) / 255 - mean[c]) / std[c]));
    }
    CHECK(near(Normalize({.5}, {.5})(x.to(DType::f64)), (x.to(DType::f64) - .5) / .5));
  }
}

TEST_CASE("crops: every example from a place of its own, and every place is reached") {
  for (const Device d : everywhere())
    for (const DType dtype : {DType::u8, DType::f32}) {
      manual_seed(1);
      const Tensor image = numbered({1, 2, 3, 4}, dtype, d), x = image.expand({300, 2, 3, 4});
      const Tensor padded = pad(image, {1, 1, 1, 1}, {.value = 7})[0];
      std::vector<Tensor> candidates;
      for (int64_t top = 0; top <= 2; ++top)
        for (int64_t left = 0; left <= 4; ++left) candidates.push_back(padded.slice(1, top, top + 3).slice(2, left, left + 2));
      const Tensor y = RandomCrop({3, 2}, {.padding = 1, .fill = 7})(x);
      REQUIRE(y.shape() == Shape{300, 2, 3, 2});
      CHECK(y.dtype() == dtype);
      std::set<int> seen;
      for (int64_t i = 0; i < 300; ++i) seen.insert(which(y[i], candidates));
      CHECK(seen.size() == candidates.size());
      CHECK_FALSE(seen.contains(-1));
      CHECK(same(RandomCrop({3, 4})(x), x));
    }
}

TEST_CASE("flips: half of the examples, whole ones") {
  for (const Device d : everywhere()) {
    manual_seed(2);
    const Tensor x = numbered({1, 2, 3, 4}, DType::u8, d).expand({400, 2, 3, 4});
    for (const bool vertical : {false, true}) {
      const Tensor y = RandomFlip(.5, {.vertical = vertical})(x), mirrored = flip(x[0], {vertical ? 1 : 2});
      int count[2] = {};
      for (int64_t i = 0; i < 400; ++i) {
        const int w = which(y[i], {x[0], mirrored});
        REQUIRE(w >= 0);
        ++count[w];
      }
      CHECK(std::abs(count[0] - 200) < 50);
    }
    CHECK(same(RandomFlip(0)(x), x));
    CHECK(same(RandomFlip(1)(x), flip(x, {3})));
  }
}

TEST_CASE("a square is cut out around a random place") {
  for (const Device d : everywhere()) {
    manual_seed(3);
    const Tensor x = ones({200, 1, 5, 6}, {.device = d});
    std::vector<Tensor> candidates;
    for (int64_t row = 0; row < 5; ++row)
      for (int64_t column = 0; column < 6; ++column) {
        Tensor image = ones({1, 5, 6}, {.device = d});
        image.slice(1, std::max<int64_t>(row - 1, 0), row + 2).slice(2, std::max<int64_t>(column - 1, 0), column + 2).fill_(.5);
        candidates.push_back(image);
      }
    const Tensor y = Cutout(3, .5)(x);
    std::set<int> seen;
    for (int64_t i = 0; i < 200; ++i) seen.insert(which(y[i], candidates));
    CHECK_FALSE(seen.contains(-1));
    CHECK(seen.size() > 20);
  }
}

TEST_CASE("colours: one factor for an image, within its range") {
  for (const Device d : everywhere()) {
    manual_seed(4);
    const Tensor image = (rand({1, 3, 4, 4}) * .4 + .2).to(d), x = image.expand({50, 3, 4, 4});
    const Tensor gray = image.slice(1, 0, 1) * .299 + image.slice(1, 1, 2) * .587 + image.slice(1, 2, 3) * .114;
    const auto check = [&](const ColorJitterOptions& o, const Tensor& about) {
      const Tensor y = ColorJitter(o)(x), factors = ((y - about) / (image - about)).flatten(1);
      std::set<float> seen;
      for (int64_t i = 0; i < 50; ++i) {
        const double f = factors[i][0].item();
        CHECK((f > .699 && f < 1.301));
        CHECK(near(y[i], (about + (image - about) * f)[0]));
        seen.insert(static_cast<float>(f));
      }
      CHECK(seen.size() > 40);
    };
    check({.brightness = .3}, zeros({}, {.device = d}));
    check({.contrast = .3}, gray.mean({2, 3}, {.keepdim = true}));
    check({.saturation = .3}, gray);
    const Tensor all = ColorJitter({.brightness = 9, .contrast = 9, .saturation = 9})(x);
    for (const double v : all.to_vector<double>()) REQUIRE((v >= 0 && v <= 1));
    CHECK(same(ColorJitter({})(x), x));
  }
}

TEST_CASE("one-hot targets, and mixtures of two examples and of their targets") {
  for (const Device d : everywhere()) {
    manual_seed(5);
    const Batch batch{numbered({6, 1, 1, 2}, DType::f32, d), arange(6).to(d)};
    const Batch hot = OneHot(6)(batch);
    CHECK(same(hot.target, eq(arange(6).view({6, 1}), arange(6)).to(DType::f32)));
    std::set<float> shares;
    for (int round = 0; round < 20; ++round) {
      const Batch mixed = Mixup(.4, 6)(batch);
      CHECK(near(mixed.target.sum(1), ones({6})));
      // What the targets say was mixed is what was mixed.
      CHECK(near(mixed.x.flatten(1), matmul(mixed.target, batch.x.flatten(1))));
      for (const float v : mixed.target.to_vector<float>()) shares.insert(v);
    }
    CHECK(shares.size() > 20);
  }
}

TEST_CASE("the share of a mixture is Beta distributed") {
  // Mean 1/2 and variance 1 / (4 (2 alpha + 1)).
  for (const double alpha : {.2, 1., 3.}) {
    manual_seed(6);
    const Mixup mix(alpha, 1);
    double sum = 0, squares = 0;
    constexpr int n = 4000;
    int unmixed = 0;
    for (int i = 0; i < n; ++i) {
      // Two examples: their mixture, unless each is mixed with itself.
      const Tensor x = mix({tensor({0.f, 1.f}).view({2, 1}), zeros({2}, {.dtype = DType::i64})}).x;
      const double a = x[0].item(), share = 1 - a;
      if (a == 0 && x[1].item() == 1) ++unmixed;
      else sum += share - .5, squares += (share - .5) * (share - .5);
    }
    const double mixed = n - unmixed, variance = 1 / (4 * (2 * alpha + 1));
    CHECK(std::abs(unmixed - n / 2) < 5 * std::sqrt(n / 4.) + n * .02);  // where alpha is small, some mixtures round to one example
    CHECK(std::abs(sum / mixed) < 5 * std::sqrt(variance / mixed) + .02);
    CHECK(squares / mixed == Approx(variance).epsilon(.15));
  }
}

TEST_CASE("a dataset passes through transforms in the loader's workers, the same for any number of them") {
  const TensorDataset set(numbered({20, 3, 6, 6}, DType::u8), arange(20) .to(DType::i64));
  const auto mapped = transform(set, RandomCrop(4, {.padding = 1}), RandomFlip(), Normalize({.5}, {.5}), OneHot(20));
  std::vector<double> first;
  for (const int workers : {0, 1, 3}) {
    DataLoader loader(mapped, {.batch_size = 8, .shuffle = true, .workers = workers, .seed = 3});
    std::vector<double> all;
    for (auto& [x, target] : loader) {
      CHECK(x.dtype() == DType::f32);
      CHECK((x.size(2) == 4 && target.size(1) == 20));
      for (const double v : x.to_vector<double>()) all.push_back(v);
    }
    if (first.empty()) first = all;
    CHECK(all == first);
  }
}

TEST_CASE("data in a GPU's memory: batches are gathered there") {
  const Tensor x = randn({9, 2, 3}), target = arange(9);
  for (const Device d : everywhere()) {
    const TensorDataset there = TensorDataset(x, target).to(d);
    const std::vector<int64_t> rows{8, 0, 0, 3};
    const Batch batch = there.get(rows);
    CHECK(batch.x.device() == d);
    CHECK(same(batch.x, TensorDataset(x, target).get(rows).x));
    CHECK(batch.target.to_vector<int64_t>() == rows);
    const ConcatDataset both(std::vector{there, TensorDataset(x + 1, target + 9).to(d)});
    CHECK(both.get(std::vector<int64_t>{17, 0, 9}).target.to_vector<int64_t>() == std::vector<int64_t>{17, 0, 9});
    DataLoader loader(there, {.batch_size = 4, .shuffle = true, .device = d});
    int64_t sum = 0;
    for (auto& [bx, bt] : loader) sum += bt.sum().item<int64_t>();
    CHECK(sum == 36);
  }
}

TEST_CASE("transforms refuse what makes no sense") {
  const Tensor flat = ones({2, 3}), images = ones({2, 2, 4, 4});
  CHECK(error_of([&] { RandomFlip()(flat); }) == "RandomFlip: expected images [n, channels, h, w], got [2, 3] (f32)");
  CHECK(error_of([&] { RandomFlip(2); }) == "RandomFlip: expected a probability in [0, 1], got 2");
  CHECK(error_of([&] { RandomCrop(9, {.padding = 2})(images); }) ==
        "RandomCrop: expected images of at least 9 x 9 with their padding of 2, got [2, 2, 4, 4] (f32)");
  CHECK(error_of([&] { RandomCrop(0); }) == "RandomCrop: expected a size above 0 and a padding of 0 or more, got 0 x 0 and 0");
  CHECK(error_of([&] { Cutout(0); }) == "Cutout: expected a side above 0, got 0");
  CHECK(error_of([&] { Normalize({1, 2}, {1}); }) == "Normalize: expected as many means as deviations, got 2 and 1");
  CHECK(error_of([&] { Normalize({1}, {0}); }) == "Normalize: expected deviations above 0, got 0");
  CHECK(error_of([&] { Normalize({1, 1, 1}, {1, 1, 1})(images); }) == "Normalize: expected images of 3 channels, got [2, 2, 4, 4] (f32)");
  CHECK(error_of([&] { ColorJitter({.saturation = 1})(images); }) == "ColorJitter: saturation expects 3 channels, got [2, 2, 4, 4] (f32)");
  CHECK(error_of([&] { ColorJitter({.contrast = -1}); }) == "ColorJitter: expected strengths of 0 or more, got 0, -1 and 0");
  CHECK(error_of([&] { OneHot(0); }) == "OneHot: expected classes above 0, got 0");
  CHECK(error_of([&] { Mixup(0, 2); }) == "Mixup: expected alpha and classes above 0, got 0 and 2");
}
