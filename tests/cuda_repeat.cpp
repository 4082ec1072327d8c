// The same bits on every run: training steps from one seed, again and again.
#include "halftone/tests/catch.h"
#include "halftone/tests/operators.h"
#include "halftone/tests/trainings.h"

using namespace halftone;
using namespace halftone::tests;

namespace {

struct Trained { std::vector<Tensor> losses, weights; };

Trained train(Training (*make)(Device), bool captured) {
  manual_seed(11);
  Training training = make(Device::cuda());
  auto step = [&](const Tensor& x) { return training(x).detach(); };
  auto graph = capture(step);
  Trained t;
  for (int i = 0; i < 5; ++i) t.losses.push_back((captured ? graph(training.x) : step(training.x)).clone());
  CHECK(graph.replays() == (captured ? 3 : 0));
  for (auto& w : training.net.parameters()) t.weights.push_back(w.detach());
  return t;
}

}  // namespace

TEST_CASE("a hundred runs give the same bits, eager and captured") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("needs a CUDA device");
  for (auto& [name, make] : trainings) {
    INFO(name);
    Trained first = train(make, false);
    for (int run = 0; run < 100; ++run) {
      Trained again = train(make, run % 2 == 1);
      REQUIRE(same_bits(again.losses, first.losses));
      REQUIRE(same_bits(again.weights, first.weights));
    }
  }
}
