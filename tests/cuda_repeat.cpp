// The same bits on every run: training steps from one seed, again and again, eager and captured.
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

using Make = std::function<std::unique_ptr<optim::Optimizer>(const std::vector<Tensor>&)>;
template <class O> Make with(auto options) {
  return [options](const std::vector<Tensor>& parameters) { return std::make_unique<O>(parameters, options); };
}
const std::vector<std::pair<const char*, Make>>& optimizers() {
  using namespace optim;
  static const std::vector<std::pair<const char*, Make>> all = {
      {"SGD", with<SGD>(SGDOptions{.lr = .05, .momentum = .9, .weight_decay = .01, .nesterov = true})},
      {"Adam", with<Adam>(AdamOptions{.lr = .01, .amsgrad = true})},
      {"AdamW", with<AdamW>(AdamWOptions{.lr = .01})},
      {"Adamax", with<Adamax>(AdamaxOptions{.lr = .01})},
      {"NAdam", with<NAdam>(NAdamOptions{.lr = .01})},
      {"RAdam", with<RAdam>(RAdamOptions{.lr = .01})},
      {"Adagrad", with<Adagrad>(AdagradOptions{.lr = .05, .lr_decay = .1})},
      {"Adadelta", with<Adadelta>(AdadeltaOptions{.lr = 1})},
      {"RMSprop", with<RMSprop>(RMSpropOptions{.lr = .01, .momentum = .5, .centered = true})},
      {"Lion", with<Lion>(LionOptions{.lr = .001})},
      {"LAMB", with<LAMB>(LAMBOptions{.lr = .01})},
      {"Muon", with<Muon>(MuonOptions{.lr = .01})},
  };
  return all;
}

// Losses, weights, the optimizer's and the scaler's state after a hundred steps with dropout, of which two overflow. The rate follows a
// schedule that the step runs, or is set between steps.
std::vector<Tensor> hundred_steps(const Make& make, bool captured, bool scheduled) {
  manual_seed(21);
  const nn::LinearOptions plain{.bias = false};
  nn::Sequential net{nn::Linear(24, 48, plain), nn::ReLU(), nn::Dropout(0.2), nn::Linear(48, 8, plain)};
  net.to(Device::cuda());
  auto opt = make(net.parameters());
  std::optional<optim::CosineAnnealingLR> schedule;
  if (scheduled) schedule.emplace(*opt, optim::CosineAnnealingLROptions{.steps = 100});
  amp::GradScaler scaler({.init_scale = 64, .growth_interval = 15});
  auto step = [&](const Tensor& x, const Tensor& target) {
    opt->zero_grad();
    Tensor loss;
    {
      amp::Autocast on({.dtype = DType::f16});
      loss = cross_entropy(net(x), target);
    }
    scaler.scale(loss).backward();
    scaler.step(*opt);
    scaler.update();
    return loss;
  };
  auto graph = capture(step);
  std::vector<Tensor> all;
  for (int i = 0; i < 100; ++i) {
    if (!scheduled && i % 30 == 29) opt->set_lr(opt->lr() / 2);
    Tensor x = randn({16, 24}, {.device = Device::cuda()}), target = randint(0, 8, {16}, {.device = Device::cuda()});
    if (i == 10 || i == 57) x.fill_(INFINITY);
    all.push_back((captured ? graph(x, target) : step(x, target)).detach().clone());
  }
  CHECK(graph.replays() == (captured ? 98 : 0));
  CHECK(scaler.skipped_steps() == 2);
  for (auto& w : net.parameters()) all.push_back(w.detach());
  for (auto& [name, t] : opt->state_dict()) all.push_back(t);
  for (auto& [name, t] : scaler.state_dict()) all.push_back(t);
  return all;
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

TEST_CASE("a hundred captured steps of every optimizer are its eager ones, bit for bit: skips, changes of the rate, dropout") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("needs a CUDA device");
  for (auto& [name, make] : optimizers())
    for (bool scheduled : {false, true}) {
      INFO(name << (scheduled ? ", with a schedule" : ""));
      CHECK(same_bits(hundred_steps(make, true, scheduled), hundred_steps(make, false, scheduled)));
    }
}
