// capture(step, {.steps = n}): several steps in one call, on the CPU and on a GPU where there is one.
#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/operators.h"

using namespace halftone;
using namespace halftone::tests;

namespace {

std::vector<Device> places() {
  std::vector<Device> all{Device::cpu()};
  if (!devices(DeviceType::cuda).empty()) all.push_back(Device::cuda());
  return all;
}

// Mixed precision with the scaler, dropout and momentum: what a step leaves must be there for the next.
struct Training {
  nn::Sequential net{nn::Linear(12, 16), nn::ReLU(), nn::Dropout(0.2), nn::Linear(16, 3)};
  std::optional<optim::SGD> opt;
  amp::GradScaler scaler{amp::GradScalerOptions{.init_scale = 1024, .growth_interval = 3}};
  explicit Training(Device device) {
    net.to(device);
    opt.emplace(net.parameters(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  }
  std::pair<Tensor, Tensor> operator()(const Tensor& x, const Tensor& target) {
    opt->zero_grad();
    Tensor y, loss;
    {
      amp::Autocast on({.dtype = DType::f16});
      y = net(x);
      loss = cross_entropy(y, target);
    }
    scaler.scale(loss).backward();
    scaler.step(*opt);
    scaler.update();
    return {loss, y};
  }
};

}  // namespace

TEST_CASE("several captured steps in one call are those steps, bit for bit") {
  constexpr int64_t calls = 6, steps = 4;
  for (Device device : places()) {
    INFO(str(device));
    manual_seed(3);
    Tensor x = randn({calls, steps, 8, 12}, {.device = device}), target = randint(0, 3, {calls, steps, 8}, {.device = device});
    x.select(0, 2).select(0, 1).fill_(INFINITY);  // one step is skipped
    manual_seed(4);
    Training alone(device);
    manual_seed(5);
    std::vector<Tensor> losses, results;
    for (int64_t c = 0; c < calls; ++c)
      for (int64_t s = 0; s < steps; ++s) {
        auto [loss, y] = alone(x.select(0, c).select(0, s), target.select(0, c).select(0, s));
        losses.push_back(loss.detach());
        results.push_back(y.detach());
      }
    manual_seed(4);
    Training together(device);
    manual_seed(5);
    auto step = capture([&](const Tensor& in, const Tensor& t) { return together(in, t); }, {.steps = steps});
    for (int64_t c = 0; c < calls; ++c) {
      auto [loss, y] = step(x.select(0, c), target.select(0, c));
      REQUIRE(loss.shape() == Shape{steps});
      REQUIRE(y.shape() == Shape{steps, 8, 3});
      for (int64_t s = 0; s < steps; ++s) {
        auto at = static_cast<size_t>(c * steps + s);
        CHECK(same_bits(loss.select(0, s), losses[at]));
        CHECK(same_bits(y.select(0, s), results[at]));
      }
    }
    auto expected = alone.net.parameters(), got = together.net.parameters();
    for (size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
    CHECK(together.scaler.get_scale() == alone.scaler.get_scale());
    CHECK(together.scaler.skipped_steps() == 1);
    if (device.type == DeviceType::cuda) CHECK(step.replays() == calls - 2);
  }
}

TEST_CASE("inputs of several steps have a batch for each") {
  auto step = capture([](const Tensor& x) { return x * 2; }, {.steps = 3});
  CHECK(step(ones({3, 2})).shape() == Shape{3, 2});
  TEXT(step(ones({2, 3})), "capture: input 0 is [2, 3] (f32); with .steps = 3 its first dimension must have that size, a batch for each step");
  TEXT(step(ones({})), "capture: input 0 is [] (f32); with .steps = 3 its first dimension must have that size, a batch for each step");
  auto none = capture([](const Tensor& x) { return x; }, {.steps = 0});
  TEXT(none(ones({1})), "capture: expected 1 step or more in a call, got 0");
  int ran = 0;
  auto nothing = capture([&](const Tensor&) { ++ran; }, {.steps = 3});
  nothing(ones({3}));
  CHECK(ran == 3);
}
