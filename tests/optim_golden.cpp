// Twenty steps of every optimizer in f64 are PyTorch's (tests/golden/optimizers.py); what all of them promise besides.
#include <cmath>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/reports.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

namespace {

constexpr int64_t steps = 20, elements = 12;

Tensor gradient(const Tensor& p, int64_t i) { return sin(p * static_cast<double>(i + 1)) + p / 8; }
Tensor start(DType t, const Shape& shape = {elements}) {
  std::vector<double> v;
  for (int64_t k = 0; k < elements; ++k) v.push_back(-1.5 + 3.5 * static_cast<double>(k) / (elements - 1));
  return tensor(v).to(t).view(shape).requires_grad_();
}

using Make = std::function<std::unique_ptr<optim::Optimizer>(const Tensor&)>;
template <class O, class... A> Make with(A... options) {
  return [=](const Tensor& p) { return std::make_unique<O>(std::vector{p}, options...); };
}
struct Case {
  std::string name;
  Make make;
  Shape shape = {elements};
};
const std::vector<Case>& cases() {
  using namespace optim;
  constexpr DType f32 = DType::f32;
  static const std::vector<Case> all = {
      {"sgd", with<SGD>(SGDOptions{.lr = .1})},
      {"sgd_momentum", with<SGD>(SGDOptions{.lr = .05, .momentum = .9, .dampening = .1, .weight_decay = .01})},
      {"sgd_nesterov", with<SGD>(SGDOptions{.lr = .05, .momentum = .8, .nesterov = true})},
      {"adam", with<Adam>(AdamOptions{.lr = .02})},
      {"adam_decay", with<Adam>(AdamOptions{.lr = .02, .beta1 = .8, .beta2 = .95, .eps = 1e-3, .weight_decay = .1})},
      {"adam_amsgrad", with<Adam>(AdamOptions{.lr = .02, .beta1 = .8, .beta2 = .6, .amsgrad = true})},
      {"adamw", with<AdamW>(AdamWOptions{.lr = .02, .weight_decay = .1})},
      {"adamax", with<Adamax>(AdamaxOptions{.lr = .02, .weight_decay = .1})},
      {"nadam", with<NAdam>(NAdamOptions{.lr = .02, .weight_decay = .1, .momentum_decay = .01})},
      {"radam", with<RAdam>(RAdamOptions{.lr = .02, .weight_decay = .1})},
      {"adagrad", with<Adagrad>(AdagradOptions{.lr = .1, .lr_decay = .1, .weight_decay = .1, .eps = 1e-6, .initial_accumulator = .2})},
      {"adadelta", with<Adadelta>(AdadeltaOptions{.lr = 1, .rho = .8, .eps = 1e-4, .weight_decay = .1})},
      {"rmsprop", with<RMSprop>(RMSpropOptions{.lr = .02, .weight_decay = .1})},
      {"rmsprop_centered", with<RMSprop>(RMSpropOptions{.lr = .02, .alpha = .9, .eps = 1e-3, .momentum = .5, .centered = true})},
      {"lion", with<Lion>(LionOptions{.lr = .01, .beta1 = .85, .beta2 = .95, .weight_decay = .1})},
      {"lamb", with<LAMB>(LAMBOptions{.lr = .02}), {3, 4}},
      {"lamb_decay", with<LAMB>(LAMBOptions{.lr = .02, .beta1 = .8, .beta2 = .95, .eps = 1e-3, .weight_decay = .1})},
      {"muon", with<Muon>(MuonOptions{.lr = .02, .products = f32}), {3, 4}},
      {"muon_tall", with<Muon>(MuonOptions{.lr = .05, .momentum = .8, .weight_decay = .1, .nesterov = false, .steps = 4, .products = f32}), {4, 3}},
      {"muon_adamw", with<Muon>(MuonOptions{.lr = .02, .momentum = .9, .weight_decay = .1, .match_adamw = true, .products = f32}), {4, 3}},
  };
  return all;
}

std::vector<std::vector<double>> bits(const Tensor& p, const optim::Optimizer& opt) {
  std::vector<std::vector<double>> all{p.to_vector<double>()};
  for (auto& [name, t] : opt.state_dict()) all.push_back(t.to_vector<double>());
  return all;
}

}  // namespace

TEST_CASE("twenty steps in f64 are PyTorch's") {
  StateDict golden = io::load(std::string(HALFTONE_SOURCE_DIR) + "/tests/golden/optimizers.safetensors");
  REQUIRE(golden.size() == cases().size() + 2);  // and L-BFGS
  for (auto& [name, make, shape] : cases()) {
    INFO(name);
    Tensor p = start(DType::f64, shape);
    auto opt = make(p);
    auto expected = golden.at(name).to_vector<double>();
    for (int64_t i = 0; i < steps; ++i) {
      { NoGrad off; p.set_grad(gradient(p, i)); }
      opt->step();
      auto got = p.to_vector<double>();
      for (int64_t k = 0; k < elements; ++k) REQUIRE(got[static_cast<size_t>(k)] == Approx(expected[static_cast<size_t>(i * elements + k)]).epsilon(1e-11).margin(1e-12));
    }
    tests::count("golden_cases");
  }
}

TEST_CASE("powers by squares are powers") {
  for (double b : {0.0, 0.5, 0.9, 0.95, 0.999, 0.9999, 1.0})
    for (int64_t n : {0, 1, 2, 3, 20, 999, 1000, 123'457, 10'000'000}) {
      const double exact = std::pow(b, static_cast<double>(n));
      CHECK(std::abs(update::power(b, n) - exact) <= static_cast<double>(n) * 0x1p-53 * exact);
    }
}

TEST_CASE("every optimizer: a skipped step changes no bit, state goes round in the middle, f32 follows f64, nothing waits") {
  for (auto& [name, make, shape] : cases()) {
    INFO(name);
    Tensor p = start(DType::f32, shape), q = start(DType::f32, shape), wide = start(DType::f64, shape);
    auto opt = make(p), other = make(q), exact = make(wide);
    Tensor overflow = zeros({});
    auto step = [&](optim::Optimizer& o, Tensor& t, int64_t i) {
      NoGrad off;
      ForbidSync no_waiting;
      t.set_grad(gradient(t, i) * (t.dtype() == DType::f32 ? 4 : 1));
      if (t.dtype() == DType::f32) o.step({.grad_scale = full({}, .25), .found_inf = overflow});
      else o.step();
    };
    for (int64_t i = 0; i < 10; ++i) {
      step(*opt, p, i);
      step(*exact, wide, i);
      overflow.fill_(1);
      auto before = bits(p, *opt);
      step(*opt, p, i + 1);
      CHECK(bits(p, *opt) == before);
      overflow.fill_(0);
    }
    { NoGrad off; q.copy_(p); }
    other->load_state_dict(opt->state_dict().clone());
    for (int64_t i = 10; i < steps; ++i) {
      step(*opt, p, i);
      step(*other, q, i);
      step(*exact, wide, i);
    }
    CHECK(bits(q, *other) == bits(p, *opt));
    auto got = p.to_vector<double>(), expected = wide.to_vector<double>();
    for (size_t k = 0; k < elements; ++k) CHECK(got[k] == Approx(expected[k]).epsilon(2e-3).margin(2e-3));
  }
}

TEST_CASE("a state that does not fit is refused, whichever parameter it is of, and changes nothing") {
  Tensor p = start(DType::f32), q = start(DType::f32);
  optim::Adam opt({p, q}, {.lr = .02});
  { NoGrad off; p.set_grad(gradient(p, 0)); q.set_grad(gradient(q, 1)); }
  opt.step();
  const auto before = bits(p, opt);
  const StateDict good = opt.state_dict().clone();
  for (const char* name : {"0.0.steps", "0.1.steps", "0.lr"}) {
    INFO(name);
    StateDict bad = good.clone();
    REQUIRE(bad.find(name));
    *bad.find(name) = zeros({2});
    CHECK_THROWS_WITH(opt.load_state_dict(bad), Catch::Contains(text::cat("Adam: state '", name, "' is [2] (f32)")));
    CHECK(bits(p, opt) == before);
  }
}

TEST_CASE("every optimizer: maximize is the other way, groups have options of their own, newcomers start afresh") {
  Tensor p = start(DType::f64), q = start(DType::f64);
  optim::NAdam up({p}, {.lr = .02, .maximize = true}), down({q}, {.lr = .02});
  for (int64_t i = 0; i < 5; ++i) {
    NoGrad off;
    Tensor g = gradient(start(DType::f64).detach(), i);
    p.set_grad(-g);
    q.set_grad(g);
    up.step();
    down.step();
  }
  CHECK(p.to_vector<double>() == q.to_vector<double>());
  Tensor a = start(DType::f64), b = start(DType::f64), c = start(DType::f64);
  optim::NAdam both(std::vector<optim::Group<optim::NAdamOptions>>{{{a, b}, {.lr = .02}}, {{c}, {.lr = .01}}}), alone({c.detach().clone().requires_grad_()}, {.lr = .02});
  for (int64_t i = 0; i < 6; ++i) {  // b joins at the fourth step
    NoGrad off;
    a.set_grad(gradient(a, i));
    if (i >= 3) b.set_grad(gradient(b, i - 3));
    c.set_grad(gradient(c, i));
    both.step();
  }
  Tensor only = start(DType::f64);
  optim::NAdam fresh({only}, {.lr = .02});
  for (int64_t i = 0; i < 3; ++i) {
    NoGrad off;
    only.set_grad(gradient(only, i));
    fresh.step();
  }
  CHECK(b.to_vector<double>() == only.to_vector<double>());
  CHECK(both.options(1).lr == .01);
}

TEST_CASE("a first step without any gradient says so, once") {
  tests::Warnings warnings;
  nn::Linear net(3, 2), other(3, 2);
  const Tensor x = ones({4, 3});
  optim::SGD late(net.parameters());
  for (int i = 0; i < 3; ++i) {
    net(x).sum().backward();
    late.zero_grad();  // too late
    late.step();
  }
  const std::vector<std::string> once{
      "SGD: step() changes nothing: none of the 2 parameters has a gradient. Call zero_grad(), loss.backward() and step(), in this order; "
      "the loss must come from these parameters, without NoGrad and detach(), and requires_grad_(false) freezes them"};
  CHECK(warnings.taken() == once);
  optim::AdamW adam(other.parameters());
  auto captured = capture([&](const Tensor& v) {
    adam.step();
    return v + 1;
  });
  for (int i = 0; i < 5; ++i) captured(x);
  CHECK(warnings.taken().size() == 1);

  // Phases: a frozen model has none, and after its first real step an optimizer may have none.
  optim::SGD phases(net.parameters());
  net.requires_grad_(false);
  phases.step();
  net.bias.requires_grad_();
  net(x).sum().backward();
  phases.step();
  phases.zero_grad();
  phases.step();
  net.requires_grad_();
  // What other processes update counts.
  optim::SGD shared(net.parameters());
  shared.set_share([](size_t, size_t) { return false; });
  net(x).sum().backward();
  shared.step();
  net.zero_grad();
  // A scaler tells what came of a step.
  optim::SGD scaled(net.parameters());
  scaled.step({.grad_scale = ones({}), .found_inf = ones({})});
  amp::GradScaler scaler;
  scaler.scale(other(x).sum()).backward();
  CHECK(scaler.step(scaled).state() == amp::StepOutcome::State::no_gradients);
  CHECK(warnings.taken().empty());
  scaled.step();
  CHECK(warnings.taken().size() == 1);

  optim::LBFGS lbfgs(net.parameters());
  for (int i = 0; i < 2; ++i) lbfgs.step([&] { return net(x).sum(); });
  const std::vector<std::string> of_closure{
      "LBFGS: step() changes nothing: the closure left no gradient; it calls zero_grad(), then backward() on a loss of the parameters"};
  CHECK(warnings.taken() == of_closure);
}
