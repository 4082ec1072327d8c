// Learning rates, averages and clipping: on the device, with the count of real steps.
#include <cmath>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;
using Doubles = std::vector<double>;

namespace {

struct One {
  Tensor p = zeros({2}, {.dtype = DType::f64, .requires_grad = true});
  optim::SGD opt{{p}, {.lr = 1}};
  void step(bool skipped = false) {
    p.set_grad(ones({2}, {.dtype = DType::f64}));
    ForbidSync no_waiting;
    opt.step({.grad_scale = {}, .found_inf = full({}, skipped ? 1 : 0)});
  }
};

// The rates of n steps, of which each third is tried and skipped first.
template <class S, class O> Doubles rates(const O& options, int n) {
  One one;
  S schedule(one.opt, options);
  Doubles r;
  for (int i = 0; i < n; ++i) {
    r.push_back(one.opt.lr());
    CHECK(r.back() == Approx(schedule.at(i)).margin(1e-15));
    if (i % 3 == 0) one.step(true);
    CHECK(one.opt.lr() == r.back());
    one.step();
  }
  CHECK(schedule.steps() == n);
  return r;
}
void check(const Doubles& got, const Doubles& expected) {
  REQUIRE(got.size() == expected.size());
  for (size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(expected[i]).epsilon(1e-12).margin(1e-12));
}
Doubles formula(int n, const std::function<double(double)>& f) {
  Doubles v;
  for (int i = 0; i < n; ++i) v.push_back(f(i));
  return v;
}
const double pi = std::acos(-1.);

}  // namespace

TEST_CASE("schedules follow their formulas, and skipped steps do not move them") {
  using namespace optim;
  check(rates<StepLR>(StepLROptions{.every = 3, .gamma = .5}, 8), {1, 1, 1, .5, .5, .5, .25, .25});
  check(rates<MultiStepLR>(MultiStepLROptions{{2, 5}, .1}, 7), {1, 1, .1, .1, .1, .01, .01});
  check(rates<ExponentialLR>(ExponentialLROptions{.9}, 5), {1, .9, .81, .729, .6561});
  check(rates<CosineAnnealingLR>(CosineAnnealingLROptions{.steps = 10, .min_lr = .2}, 13),
        formula(13, [](double t) { return t >= 10 ? .2 : .2 + .8 * (1 + std::cos(pi * t / 10)) / 2; }));
  check(rates<CosineAnnealingLR>(CosineAnnealingLROptions{.steps = 10, .min_lr = 0, .warmup = 4}, 6),
        {.2, .4, .6, .8, 1, (1 + std::cos(pi / 6)) / 2});
  check(rates<CosineAnnealingWarmRestarts>(CosineAnnealingWarmRestartsOptions{.first_steps = 4}, 9),
        formula(9, [](double t) { return (1 + std::cos(pi * std::fmod(t, 4) / 4)) / 2; }));
  auto longer = rates<CosineAnnealingWarmRestarts>(CosineAnnealingWarmRestartsOptions{.first_steps = 2, .longer = 2, .min_lr = .1}, 15);
  for (int t : {0, 2, 6, 14}) CHECK(longer[static_cast<size_t>(t)] == Approx(1));
  CHECK(longer[4] == Approx(.55));
  check(rates<LinearLR>(LinearLROptions{.steps = 4, .start = .2}, 6), {.2, .4, .6, .8, 1, 1});
  check(rates<PolynomialLR>(PolynomialLROptions{.steps = 4, .power = 2, .min_lr = .1}, 6),
        formula(6, [](double t) { return t >= 4 ? .1 : .1 + .9 * std::pow(1 - t / 4, 2); }));
  check(rates<NoamLR>(NoamLROptions{.width = 16, .warmup = 4}, 9), formula(9, [](double t) { return std::min(std::pow(t + 1, -.5), (t + 1) * std::pow(4, -1.5)) / 4; }));
  auto cycle = rates<OneCycleLR>(OneCycleLROptions{.max_lr = 2, .steps = 20, .share = .3, .divide = 10, .divide_last = 100}, 20);
  CHECK(cycle[0] == Approx(.2));
  CHECK(cycle[5] == Approx(2));
  CHECK(cycle[19] == Approx(.002));
  check(rates<LambdaLR>(LambdaLROptions{[](int64_t t) { return 1. / static_cast<double>(1 + t); }, 4}, 6), {1, 1. / 2, 1. / 3, 1. / 4, 1. / 4, 1. / 4});
}

TEST_CASE("curves are joined, a state goes round, groups keep their own rates, and an ended schedule lets go") {
  Tensor a = zeros({}, {.requires_grad = true}), b = zeros({}, {.requires_grad = true});
  optim::SGD opt(std::vector<optim::Group<optim::SGDOptions>>{{{a}, {.lr = 1}}, {{b}, {.lr = 10}}});
  auto curve = [](double base) {
    return optim::Curve::linear(0, base, 3).then(3, optim::Curve::listed({base * .5, base * .25})).then(5, optim::Curve::listed({base * .1}));
  };
  auto step = [&](optim::Optimizer& o) {
    a.set_grad(ones({}));
    b.set_grad(ones({}));
    o.step();
  };
  {
    optim::Schedule schedule(opt, curve);
    Doubles first, second;
    for (int i = 0; i < 7; ++i) {
      first.push_back(opt.lr(0));
      second.push_back(opt.lr(1));
      step(opt);
    }
    check(first, {0, 1. / 3, 2. / 3, .5, .25, .1, .1});
    check(second, {0, 10. / 3, 20. / 3, 5, 2.5, 1, 1});
    optim::SGD other({a}, {.lr = 1});
    optim::Schedule resumed(other, curve);
    StateDict half = schedule.state_dict().clone();
    half.find("0.steps")->fill_(2);
    resumed.load_state_dict(half);
    step(other);
    CHECK(other.lr() == Approx(.5));
  }
  opt.set_lr(7, 0);
  step(opt);
  CHECK(opt.lr(0) == 7);
  CHECK_THROWS_WITH(optim::MultiStepLR(opt, {{4, 3}, .1}), "MultiStepLR: expected milestones above 0 in rising order, got 3 after 4");
  CHECK_THROWS_WITH(optim::CosineAnnealingLR(opt, {.steps = 0}), Catch::Contains("expected a warm-up of fewer than 0 steps"));
  CHECK_THROWS_WITH(optim::StepLR(opt, {.every = 0}), "Curve::staircase: expected a number of steps above 0, got 0");
}

TEST_CASE("the rate is lowered on a plateau") {
  One one;
  optim::ReduceLROnPlateau plateau(one.opt, {.factor = .5, .patience = 1, .cooldown = 1, .min_lr = .2});
  Doubles r;
  for (double metric : {3., 2., 2., 2., 2., 2., 2., 2., 2.}) {
    plateau.step(metric);
    r.push_back(one.opt.lr());
  }
  check(r, {1, 1, 1, .5, .5, .5, .25, .25, .25});
  optim::ReduceLROnPlateau other(one.opt, {.factor = .5, .patience = 1});
  other.load_state_dict(plateau.state_dict().clone());
  CHECK(other.state_dict().at("best").item() == 2);
  optim::ReduceLROnPlateau up(one.opt, {.factor = .5, .patience = 0, .maximize = true});
  CHECK_FALSE(up.step(1));
  CHECK_FALSE(up.step(2));
  CHECK(up.step(2));
}

TEST_CASE("an average of weights, swapped in and out; skips and warm-up") {
  One one;
  optim::EMA ema(one.opt, {.decay = .75});
  double average = 0;
  for (int i = 0; i < 6; ++i) {
    one.step(i == 3);
    if (i != 3) average = .75 * average + .25 * one.p.to_vector<double>()[0];
    CHECK(ema.averages()[0].to_vector<double>()[0] == Approx(average));
  }
  double weight = one.p.to_vector<double>()[0];
  {
    optim::EMA::Swapped in(ema);
    CHECK(one.p.to_vector<double>()[0] == Approx(average));
  }
  CHECK(one.p.to_vector<double>()[0] == weight);
  One two;
  optim::EMA loaded(two.opt, {.decay = .75}), warm(two.opt, {.decay = .999, .warmup = true});
  loaded.load_state_dict(ema.state_dict().clone());
  CHECK(loaded.averages()[0].to_vector<double>()[0] == Approx(average));
  two.step();
  CHECK(warm.averages()[0].to_vector<double>()[0] == Approx(-(1 - 2. / 11)));
  CHECK_THROWS_WITH(optim::EMA(two.opt, {.decay = 1}), "EMA: expected decay in [0, 1), got 1");
}

TEST_CASE("lookahead: every k real steps the slow weights follow, and the fast ones return to them") {
  One one;
  optim::Lookahead look(one.opt, {.k = 3, .alpha = .5});
  Doubles fast;
  for (int i = 0; i < 7; ++i) {
    if (i == 2) one.step(true);
    one.step();
    fast.push_back(one.p.to_vector<double>()[0]);
  }
  check(fast, {-1, -2, -1.5, -2.5, -3.5, -3, -4});
  CHECK(look.slow_weights()[0].to_vector<double>()[0] == -3);
}

TEST_CASE("gradients are clipped by value, and scaled ones are not") {
  Tensor p = zeros({4}, {.requires_grad = true});
  p.set_grad(tensor({-3.f, .5f, 2.f, std::nanf("")}));
  optim::clip_grad_value_({p, zeros({2}, {.requires_grad = true})}, 1);
  auto g = p.grad().to_vector<float>();
  CHECK(Doubles{g[0], g[1], g[2]} == Doubles{-1, .5, 1});
  CHECK(std::isnan(g[3]));
  CHECK_THROWS_WITH(optim::clip_grad_value_({p}, -1), "clip_grad_value_: expected a limit of 0 or more, got -1");
  amp::GradScaler scaler;
  p.zero_grad();
  scaler.scale(p.sum()).backward();
  CHECK_THROWS_WITH(optim::clip_grad_value_({p}, 1), "clip_grad_value_: the gradient of parameter 0 is scaled by a GradScaler; call unscale_ first");
}
