// 16-bit parameters: f32 master weights, stochastic rounding, and what a scaler makes of their gradients.
#include <cmath>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;
using Catch::Contains;

namespace {

Tensor low_parameter(uint64_t seed, DType t, const Shape& shape = {33}) {
  manual_seed(seed);
  return randn(shape).to(t).requires_grad_();
}

}  // namespace

TEST_CASE("master weights are those of f32 training, and the parameter is their rounding") {
  for (DType t : {DType::f16, DType::bf16}) {
    Tensor p = low_parameter(1, t), wide = p.detach().to(DType::f32).requires_grad_();
    optim::AdamW a({p}, {.lr = 1e-3}), b({wide}, {.lr = 1e-3});
    a.use_master_weights();
    for (int i = 0; i < 30; ++i) {
      Tensor g = (randn({33}) * 0.1).to(t);
      p.set_grad(g);
      wide.set_grad(g.to(DType::f32));
      a.step();
      b.step();
      CHECK(a.master(p).to_vector<float>() == wide.to_vector<float>());
      CHECK(p.to_vector<float>() == wide.detach().to(t).to_vector<float>());
    }
  }
}

TEST_CASE("updates below half a unit are lost without masters, kept with them, and kept in the mean by stochastic rounding") {
  auto trained = [](int how) {
    Tensor p = full({4096}, 1, {.dtype = DType::bf16}).requires_grad_();
    optim::SGD opt({p}, {.lr = 1});
    if (how == 1) opt.use_master_weights();
    if (how == 2) opt.use_stochastic_rounding(3);
    for (int i = 0; i < 100; ++i) {
      p.set_grad(full({4096}, 1e-3, {.dtype = DType::bf16}));
      opt.step();
    }
    return p.detach().to(DType::f32);
  };
  CHECK(trained(0).mean().item() == 1);
  CHECK(trained(1).mean().item() == Approx(0.9).margin(0.002));
  CHECK(trained(2).mean().item() == Approx(0.9).margin(0.003));
  CHECK(trained(2).to_vector<float>() == trained(2).to_vector<float>());  // the same numbers every time
}

TEST_CASE("a parameter that others wrote is taken over by its master") {
  Tensor p = low_parameter(2, DType::f16);
  optim::SGD opt({p}, {.lr = 1});
  opt.use_master_weights();
  p.set_grad(full({33}, 1e-4, {.dtype = DType::f16}));
  opt.step();
  { NoGrad off; p.fill_(2); }
  opt.step();
  CHECK(opt.master(p).to_vector<float>()[5] == 2 - static_cast<float>(half(1e-4f)));
}

TEST_CASE("the state of an optimizer with masters goes round, and its model follows") {
  auto make = [] { return low_parameter(3, DType::f16); };
  Tensor p = make(), q = make();
  optim::Adam a({p}, {.lr = 1e-2}), b({q}, {.lr = 1e-2});
  a.use_master_weights();
  b.use_master_weights();
  auto step = [](optim::Adam& opt, Tensor& x, uint64_t seed) {
    manual_seed(seed);
    x.set_grad(randn({33}).to(DType::f16));
    opt.step();
  };
  for (uint64_t i = 0; i < 3; ++i) step(a, p, i);
  b.load_state_dict(a.state_dict().clone());
  CHECK(q.to_vector<float>() == p.to_vector<float>());
  for (uint64_t i = 3; i < 6; ++i) {
    step(a, p, i);
    step(b, q, i);
  }
  CHECK(b.master(q).to_vector<float>() == a.master(p).to_vector<float>());
  CHECK_THROWS_WITH(a.use_master_weights(false), "Adam: use_master_weights comes before the first step");
}

TEST_CASE("f16 gradients with masters: scaled on the way, skipped, clipped; refused in place") {
  Tensor p = low_parameter(4, DType::f16), x = randn({33}).to(DType::f16);
  optim::SGD opt({p}, {.lr = 1}), plain({p}, {.lr = 1});
  opt.use_master_weights();
  amp::GradScaler scaler({.init_scale = 1024});
  scaler.scale((p * x * 1e-4).sum()).backward();
  CHECK(p.grad().dtype() == DType::f16);
  CHECK_THROWS_WITH(scaler.step(plain), Contains("parameter 0 [33] (f16) is f16, which unscaling would underflow; keep parameters in f32"));
  CHECK_THROWS_WITH(scaler.unscale_(opt), Contains("the optimizer unscales it on the way to its master weight: clip with step(opt, {.clip_norm = ...})"));
  auto before = p.to_vector<double>();
  auto g = p.grad().to_vector<double>();
  scaler.step(opt);
  scaler.update();
  auto master = opt.master(p).to_vector<double>();
  for (size_t i = 0; i < 33; ++i) CHECK(master[i] == Approx(before[i] - g[i] / 1024).epsilon(1e-6));
  opt.zero_grad();
  scaler.scale((p * std::numeric_limits<double>::infinity()).sum()).backward();
  CHECK(scaler.step(opt).state() == amp::StepOutcome::State::unknown);
  scaler.update();
  CHECK(opt.master(p).to_vector<double>() == master);
  CHECK(scaler.skipped_steps() == 1);
}

TEST_CASE("a parameter has one optimizer between two updates of a scaler") {
  Tensor p = ones({2}, {.requires_grad = true}), q = ones({2}, {.requires_grad = true});
  optim::SGD a({p, q}, {.lr = 1});
  optim::Adam b({q}, {.lr = 1});
  amp::GradScaler scaler({.init_scale = 4});
  auto backward = [&] { scaler.scale((p * q).sum()).backward(); };
  backward();
  scaler.step(a);
  CHECK_THROWS_WITH(scaler.step(b), "step: parameter 0 [2] (f32) of Adam belongs to SGD, too, which has had its turn since the last update(); a parameter has one optimizer");
  scaler.update();
  a.zero_grad();
  backward();
  scaler.step(b);  // in another iteration the choice is free
  scaler.update();
}

TEST_CASE("ranks that share a model skip together") {
  Tensor p = ones({2}, {.requires_grad = true});
  optim::SGD opt({p}, {.lr = 1});
  amp::GradScaler scaler({.init_scale = 4});
  float other = 0;
  int asked = 0;
  scaler.set_agreement([&](const Tensor& found_inf) {
    ++asked;
    CHECK(found_inf.shape() == Shape{});
    if (other > 0) found_inf.detach().fill_(other);
  });
  for (float overflow : {0.f, 1.f, 0.f}) {
    other = overflow;
    opt.zero_grad();
    scaler.scale(p.sum()).backward();
    auto outcome = scaler.step(opt);
    scaler.update();
    CHECK(outcome.skipped() == (overflow > 0));
  }
  CHECK(asked == 3);
  CHECK(scaler.get_scale() == 2);
  CHECK(p.to_vector<float>() == std::vector<float>{-1, -1});
  opt.zero_grad();
  scaler.scale(p.sum()).backward();
  scaler.unscale_(opt);
  scaler.step(opt);
  CHECK(asked == 4);
}
