// What users of other frameworks reported about loss scaling: skipped steps, clipping, the scale itself, several optimizers, resuming.
// Each test is named by its entry and by what is right.
#include <barrier>
#include <thread>

#include "halftone/tests/reports.h"

using namespace halftone;
using namespace halftone::tests;
using amp::GradScaler;
using Catch::Contains;
using State = amp::StepOutcome::State;

// ---- skipped steps

TEST_CASE("report_9: a step divides by the scale once, after unscale_ as without") {
  tests::report("Lightning#15501");
  everywhere([](Device d, DType t) {
    for (int kind = 0; kind < all_kinds; ++kind) {
      auto run = [&](int how) {
        Net net(d);
        auto opt = make(kind, net.parameters());
        GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
        for (uint64_t i = 0; i < 5; ++i) {
          opt->zero_grad();
          forward_backward(scaler, net, Batch(d, i), t);
          if (how == 1 || how == 3) scaler.unscale_(*opt);
          if (how < 2) scaler.step(*opt);
          else scaler.step(*opt, {.clip_norm = 1e6});  // clips nothing
          scaler.update();
        }
        CHECK(scaler.get_scale() == 4096);
        return everything(*opt);
      };
      auto expected = run(0);
      for (int how = 1; how < 4; ++how) CHECK(same_bits(run(how), expected));
    }
  });
}

TEST_CASE("report_11: a skipped step says so, without a wait, and no count or rate moves") {
  tests::report("pytorch#44511");
  everywhere([](Device d, DType t) {
    for (int kind = 0; kind < all_kinds; ++kind)
      for (float bad : {inf, -inf, nan_}) {
        Net net(d);
        auto opt = make(kind, net.parameters());
        GradScaler scaler({.init_scale = 16, .min_scale = 16});  // at its limit the scale tells nothing
        std::vector<Tensor> before;
        std::vector<amp::StepOutcome> outcomes;
        for (int i = 0; i < 4; ++i) {
          if (i == 2) before = everything(*opt);
          ForbidSync forbidden;
          opt->zero_grad();
          forward_backward(scaler, net, Batch(d), t);
          if (i == 2) net.w1.grad().select(0, 3).fill_(bad);
          outcomes.push_back(scaler.step(*opt));
          scaler.update();
          outcomes.back().state();
        }
        for (int i = 0; i < 4; ++i) {
          CHECK(outcomes[size_t(i)].skipped() == (i == 2));
          CHECK(outcomes[size_t(i)].state() == (i == 2 ? State::skipped : State::stepped));
        }
        CHECK(scaler.get_scale() == 16);
        CHECK(scaler.skipped_steps() == 1);
        CHECK(opt->state_dict().at("0.0.steps").item<int64_t>() == 3);
        // The fourth step is the third real one.
        CHECK_FALSE(same_bits(everything(*opt), before));
      }
    // Nothing of the state moved in the skipped one.
    Single s(d);
    GradScaler scaler({.init_scale = 16});
    s.iterate(scaler, 1);
    auto before = everything(s.opt);
    CHECK(s.iterate(scaler, inf).skipped());
    CHECK(same_bits(everything(s.opt), before));
  });
}

TEST_CASE("report_11: schedules, averages and slow weights do not move with a skipped step") {
  everywhere([](Device d, DType t) {
    for (int kind = 0; kind < kinds; ++kind) {
      auto run = [&](bool with_skips) {
        Net net(d);
        auto opt = make(kind, net.parameters());
        optim::CosineAnnealingLR schedule(*opt, {.steps = 6, .min_lr = 1e-3, .warmup = 2});
        optim::EMA average(*opt, {.decay = 0.9, .warmup = true});
        optim::Lookahead lookahead(*opt, {.k = 2});
        GradScaler scaler({.init_scale = 256, .max_scale = 256});
        auto all = [&] {
          auto v = everything(*opt);
          for (auto& list : {average.averages(), lookahead.slow_weights()}) for (auto& w : list) v.push_back(w.clone());
          for (auto& dict : {schedule.state_dict(), average.state_dict(), lookahead.state_dict()})
            for (auto& [name, state] : dict) v.push_back(state.clone());
          return v;
        };
        for (uint64_t i = 0; i < 10; ++i) {
          bool overflow = i % 3 == 1;
          if (overflow && !with_skips) continue;
          auto before = all();
          {
            ForbidSync forbidden;
            opt->zero_grad();
            forward_backward(scaler, net, Batch(d, i), t);
            if (overflow) net.b1.grad().fill_(nan_);
            scaler.step(*opt);
            scaler.update();
          }
          CHECK(same_bits(all(), before) == overflow);
        }
        CHECK(schedule.steps() == 7);
        return all();
      };
      CHECK(same_bits(run(true), run(false)));
    }
  });
}

TEST_CASE("report_12: after a skip the next real step has the number that the skipped one would have had") {
  tests::report("allenai/OLMo-core#309");
  everywhere([](Device d, DType t) {
    for (int kind = 0; kind < all_kinds; ++kind)
      for (int groups = 1; groups <= (kind < kinds ? 2 : 1); ++groups) {
        auto run = [&](std::vector<int> steps) {  // numbers of batches; -1: an overflow
          Net net(d);
          auto opt = make(kind, groups == 1 ? net.parameters() : std::vector{net.w2, net.b2});
          if (groups == 2) {  // a second group, whose first parameter never has a gradient
            std::vector<Tensor> rest{zeros({3}, {.device = d, .requires_grad = true}), net.w1, net.b1};
            if (kind < 2) static_cast<optim::SGD&>(*opt).add_group(rest, {.lr = 0.25});
            if (kind == 2) static_cast<optim::Adam&>(*opt).add_group(rest, optim::AdamOptions{});
            if (kind == 3) static_cast<optim::AdamW&>(*opt).add_group(rest, optim::AdamWOptions{});
          }
          GradScaler scaler({.init_scale = 1024});
          for (int b : steps) {
            opt->zero_grad();
            forward_backward(scaler, net, Batch(d, b < 0 ? 77 : uint64_t(b)), t);
            if (b < 0) net.b2.grad().fill_(inf);
            scaler.step(*opt);
            scaler.update();
          }
          return everything(*opt);
        };
        auto expected = run({1, 2, 3});
        CHECK(same_bits(run({-1, 1, 2, 3}), expected));
        CHECK(same_bits(run({-1, -1, 1, -1, 2, -1, 3, -1}), expected));
      }
  });
}

TEST_CASE("report_13: one inf in a million gradients leaves all weights, moments and masters of all groups as they are") {
  tests::report("pytorch#96755");
  everywhere([](Device d, DType t) {
    enum Way { step, unscaled, clipped, unscaled_and_clipped, ways };
    for (int kind = 0; kind < all_kinds; ++kind)
      for (int way = 0; way < ways; ++way)
        for (bool masters : {false, true}) {
          if (masters && (way == unscaled || way == unscaled_and_clipped)) continue;
          INFO("kind " << kind << ", way " << way << ", masters " << masters);
          manual_seed(13);
          int64_t large = kind == 2 && way == step && t == f16 ? 1000000 : 4097;
          std::vector<Tensor> p;
          for (int64_t n : {int64_t{7}, int64_t{64}, large}) p.push_back(randn({n}, {.device = d}).to(masters ? t : f32).requires_grad_());
          auto opt = make(kind, p);
          if (masters) opt->use_master_weights();
          GradScaler scaler({.init_scale = 8});
          auto iterate = [&](float bad) {
            opt->zero_grad();
            Tensor loss = zeros({}, {.device = d});
            for (auto& x : p) loss = loss + square(x.to(f32)).sum() * 1e-3;
            CHECK(std::isfinite(loss.item()));
            scaler.scale(loss).backward();
            if (bad != 0) p[2].grad().slice(0, large - 1, large).fill_(bad);  // finite losses may have gradients that are not
            if (way == unscaled || way == unscaled_and_clipped) scaler.unscale_(*opt);
            if (way == unscaled_and_clipped) optim::clip_grad_norm_(p, 1);
            auto outcome = way == clipped ? scaler.step(*opt, {.clip_norm = 1}) : scaler.step(*opt);
            scaler.update();
            return outcome;
          };
          for (float bad : {0.f, inf, 0.f, nan_}) {
            auto before = everything(*opt);
            CHECK(iterate(bad).skipped() == (bad != 0));
            CHECK(same_bits(everything(*opt), before) == (bad != 0));
          }
        }
  });
}

// ---- clipping

TEST_CASE("report_15: clipping sees true gradients, or refuses") {
  tests::report("Lightning#9330");
  on_devices([](Device d) {
    for (double scale : {1., 1024., 65536.}) {
      Single s(d);
      GradScaler scaler({.init_scale = scale});
      auto fresh = [&] {
        { NoGrad off; s.p.fill_(1); }
        s.opt.zero_grad();
        backward_with(scaler, s.p, 0.25);  // a norm of 0.35
      };
      fresh();
      CHECK_THROWS_WITH(optim::clip_grad_norm_({s.p}, 1), "clip_grad_norm_: the gradient of parameter 0 is scaled by a GradScaler; call unscale_ first");
      scaler.unscale_(s.opt);
      CHECK(optim::clip_grad_norm_({s.p}, 1).item() == Approx(std::sqrt(0.125)));
      CHECK(all_are(s.p.grad(), 0.25));
      scaler.step(s.opt);
      scaler.update();
      CHECK(all_are(s.p.detach(), 0.75));
      fresh();
      scaler.step(s.opt, {.clip_norm = 1});
      scaler.update();
      CHECK(all_are(s.p.detach(), 0.75));
      fresh();
      scaler.step(s.opt, {.clip_norm = 0.0625});  // down to 0.0625 / sqrt(2) each
      scaler.update();
      for (double v : values(s.p.detach())) CHECK(v == Approx(1 - 0.0625 / std::sqrt(2.)).epsilon(1e-5));
    }
  });
}

// ---- the scale

TEST_CASE("report_17: a scale that grows for ever stops at its maximum, and is finite") {
  tests::report("pytorch#98828");
  on_devices([](Device d) {
    auto grown = [&](amp::GradScalerOptions o, int updates) {
      Single s(d);
      o.growth_interval = 1;
      GradScaler scaler(o);
      for (int i = 0; i < updates; ++i) {
        CHECK(s.iterate(scaler, 0).stepped());
        if (i > updates - 3) CHECK(std::isfinite(1 / scaler.inverse_scale().item()));
      }
      return scaler.get_scale();
    };
    CHECK(grown({}, 113) == 0x1p64);
    CHECK(grown({.max_scale = 0x1p24}, 113) == 0x1p24);
    CHECK(grown({.max_scale = 0x1p126}, 113) == 0x1p126);
    CHECK(grown({.init_scale = 0x1p100, .growth_factor = 16, .max_scale = 0x1p126}, 20) == 0x1p124);  // the step past it is not taken
    CHECK(grown({.init_scale = 3, .growth_factor = 1.5, .max_scale = 100}, 40) == 3 * 1.5 * 1.5 * 1.5 * 1.5 * 1.5 * 1.5 * 1.5 * 1.5);
  });
  // A number that f32, in which the scale is kept, cannot hold is none.
  CHECK_THROWS_WITH(GradScaler({.max_scale = 1e39}), Contains("max_scale") && Contains("1e+39"));
  CHECK_THROWS_WITH(GradScaler({.init_scale = 1e39, .max_scale = 1e39}), Contains("1e+39"));
  Single s(Device::cpu());
  GradScaler scaler;
  s.iterate(scaler, 0);
  for (double bad : {1e39, 1e-46, 1e-39}) CHECK_THROWS_WITH(scaler.update(bad), Contains("update: expected a"));
  CHECK(scaler.get_scale() == 65536);
}

TEST_CASE("report_18: two hundred overflows leave weights and scale usable; who wants to be told is told") {
  tests::report("pytorch#40497");
  on_devices([](Device d) {
    for (double floor : {0x1p-64, 0x1p-20, 1., 64.}) {
      Single s(d);
      GradScaler scaler({.min_scale = floor});
      for (int i = 0; i < 200; ++i) s.iterate(scaler, nan_);
      CHECK(scaler.get_scale() == floor);
      CHECK(scaler.inverse_scale().item() == 1 / floor);
      CHECK(scaler.skipped_steps() == 200);
      CHECK(all_are(s.p.detach(), 1));
      CHECK(s.iterate(scaler, 0.5).stepped());
      CHECK(all_are(s.p.detach(), 0.5));
    }
    Single s(d);
    GradScaler patient({.max_consecutive_skips = 5});
    for (int i = 0; i < 6; ++i) s.iterate(patient, nan_);
    if (d.type != DeviceType::cpu) backend(d.type).synchronize(d.index);  // a step tells what the device has done by then
    CHECK_THROWS_WITH(s.iterate(patient, 1), Contains("step: 6 steps in a row were skipped"));
  });
  CHECK_THROWS_WITH(GradScaler({.min_scale = 1e-60}), Contains("min_scale") && Contains("1e-60"));
  // Which parameter: replay the step.
  on_devices([](Device d) {
    nn::Sequential net{nn::Linear(3, 4), nn::Linear(4, 2)};
    net.to(d);
    Tensor x = ones({1, 3}, {.device = d});
    auto found = amp::find_overflow(net, [&] { (net(x) * inf).sum().backward(); });
    REQUIRE(found);
    CHECK(found->op == "mul");
    CHECK(found->parameters.size() == 4);
  });
}

// ---- 16-bit losses and gradients

TEST_CASE("report_30: a 16-bit loss is scaled in f32, and losses are f32") {
  tests::report("accelerate#134");
  everywhere([](Device d, DType t) {
    GradScaler scaler;
    Tensor one = ones({}, {.dtype = t, .device = d});
    for (bool region : {false, true}) {
      amp::Autocast on({.dtype = t, .enabled = region});
      Tensor scaled = scaler.scale(one);
      CHECK(scaled.dtype() == f32);
      CHECK(scaled.item() == 65536);
      Tensor each = scaler.scale(one.expand({3}));  // not reduced yet
      CHECK((each.dtype() == f32 && all_are(each, 65536)));
      CHECK(scaler.scale({one, one * 3})[1].item() == 3 * 65536.);
      Batch batch(d);
      Tensor y = Net(d, 1, t)(batch.x.to(t));
      CHECK(y.dtype() == t);
      for (auto& loss : {cross_entropy(y, batch.target), cross_entropy(y, batch.target, {.reduction = Reduction::sum}), mse_loss(y, y * 2)}) {
        CHECK(loss.dtype() == f32);
        CHECK(loss.mean().dtype() == f32);
      }
    }
  });
}

TEST_CASE("report_30: a training step whose loss is an f16 mean is not skipped at the initial scale") {
  everywhere([](Device d, DType t) {
    for (int how = 0; how < 4; ++how) {
      Single s(d);
      GradScaler scaler;
      Tensor loss;
      {
        amp::Autocast region({.dtype = t});
        Tensor y = linear(ones({4, 2}, {.device = d}), s.p.reshape({1, 2}));
        CHECK(y.dtype() == t);
        // A mean of everything is f32, in whichever way it is written, or its gradient, the scale, is inf in f16.
        loss = how == 0 ? y.mean() : how == 1 ? y.mean({0, 1}) : how == 2 ? y.sum() / 4 : y.mean(1).mean();
        CHECK(loss.dtype() == f32);
        CHECK(y.mean(0).dtype() == t);
        CHECK((y * y.mean()).dtype() == t);  // one number beside many raises nothing
      }
      scaler.scale(loss).backward();
      auto outcome = scaler.step(s.opt);
      scaler.update();
      CHECK(outcome.stepped());
      CHECK(all_are(s.p.detach(), 0));
      CHECK(scaler.get_scale() == 65536);
    }
  });
}

// There is no fp8 here, whose scales follow a history of largest values; the scaler's own history obeys the same rules.
TEST_CASE("report_63: zeros and overflows leave a usable scale, and its history moves once an iteration, also over a save") {
  tests::report("TE#1047");
  everywhere([](Device d, DType t) {
    for (int64_t interval : {1, 2, 3}) {
      INFO("interval " << interval);
      Tensor p = ones({4}, {.device = d, .requires_grad = true}), q = ones({4}, {.device = d, .requires_grad = true});
      optim::SGD a({p}, {.lr = 1}), b({q}, {.lr = 1});
      GradScaler scaler({.init_scale = 64, .growth_interval = interval});
      double scale = 64;
      int64_t streak = 0;
      for (int i = 0; i < 12; ++i) {
        double g = i == 5 || i == 8 ? double(inf) : 0;  // nothing but zeros otherwise
        for (int micro = 0; micro < 3; ++micro) {  // several backwards and optimizers are one step of the history
          Tensor loss;
          { amp::Autocast region({.dtype = t}); loss = (p * g).sum() + (q * 0).sum(); }
          scaler.scale(loss).backward();
        }
        scaler.step(a);
        scaler.step(b);
        scaler.update();
        a.zero_grad();
        b.zero_grad();
        streak = g == 0 ? std::max<int64_t>(streak, 0) + 1 : std::min<int64_t>(streak, 0) - 1;
        if (g != 0) scale /= 2;
        else if (streak == interval) scale *= 2, streak = 0;
        CHECK(scaler.get_scale() == scale);
        CHECK(scaler.state_dict().at("streak").item() == double(streak));
        CHECK(scaler.inverse_scale().item() == 1 / scale);
        CHECK((all_are(p.detach(), 1) && all_are(q.detach(), 1)));
        if (i % 4 != 3) continue;
        GradScaler next({.init_scale = 7, .growth_interval = interval});
        next.load_state_dict(scaler.state_dict().clone());
        scaler = std::move(next);
      }
      CHECK(scaler.skipped_steps() == 2);
    }
  });
}

TEST_CASE("report_67: gradients that f16 loses without a scale are counted, and survive with one") {
  tests::report("engichang1467/Open-Rig3R#35");
  everywhere([](Device d, DType t) {
    auto trained = [&](double scale) {
      Tensor w = ones({3, 4}, {.device = d, .requires_grad = true});
      GradScaler scaler({.init_scale = scale});
      Tensor y;
      { amp::Autocast region({.dtype = t}); y = linear(ones({1, 4}, {.device = d}), w); }
      scaler.scale(y.to(f32).sum() * 1e-8).backward();
      auto stats = amp::gradient_stats({{"w", w}}, scaler)[0];
      optim::SGD opt({w}, {.lr = 1});
      scaler.unscale_(opt);
      return std::pair{w.grad().to(f64).mean().item(), stats};
    };
    auto [plain, lost] = trained(1);
    auto [kept, seen] = trained(65536);
    CHECK(kept == Approx(1e-8).epsilon(t == f16 ? 5e-4 : 4e-3));
    CHECK(seen.zeros == 0);
    if (t == f16) CHECK((plain == 0 && lost.zeros == 1));
    else CHECK((plain == Approx(1e-8).epsilon(4e-3) && lost.zeros == 0));  // bf16 needs no scaler; ours scales it all the same
    // What f16 would do to gradients kept in f32.
    Tensor w = ones({4}, {.device = d, .requires_grad = true});
    w.set_grad(tensor({0.f, 1e-8f, 1e-5f, 1.f}).to(d));
    auto at_1 = amp::gradient_stats({{"w", w}}, 1, 1)[0], at_scale = amp::gradient_stats({{"w", w}}, 1, 65536)[0];
    CHECK((at_1.zeros == 0.25 && at_1.vanishing == 0.25 && at_1.subnormal == 0.25));
    CHECK((at_scale.vanishing == 0 && at_scale.subnormal == 0));
  });
}

// ---- iterations

TEST_CASE("report_23: an optimizer without gradients is no error, and changes neither scale nor streak") {
  tests::report("nerfstudio-project/nerfstudio#1919");
  on_devices([](Device d) {
    Single with(d), without(d);
    GradScaler scaler({.init_scale = 8, .growth_interval = 2});
    auto iterate = [&](bool unscale) {
      with.opt.zero_grad();
      backward_with(scaler, with.p, 1);
      if (unscale) scaler.unscale_(without.opt);
      CHECK(scaler.step(without.opt).state() == State::no_gradients);
      auto outcome = scaler.step(with.opt);
      scaler.update();
      CHECK(outcome.stepped());
    };
    iterate(false);
    CHECK(all_are(with.p.detach(), 0));
    CHECK(all_are(without.p.detach(), 1));
    // Nobody has gradients: the iteration did not count.
    for (int i = 0; i < 5; ++i) {
      with.opt.zero_grad();
      if (i % 2) scaler.unscale_(with.opt);
      CHECK(scaler.step(with.opt).state() == State::no_gradients);
      scaler.update();
      scaler.update();
      CHECK(scaler.get_scale() == 8);
      CHECK(scaler.state_dict().at("streak").item() == 1);
    }
    iterate(true);
    CHECK(scaler.get_scale() == 16);
    // Frozen on the way, and thawed.
    without.p.requires_grad_(false);
    CHECK(scaler.step(without.opt).state() == State::no_gradients);
    scaler.update();
    without.p.requires_grad_();
    backward_with(scaler, without.p, 1);
    auto outcome = scaler.step(without.opt);
    scaler.update();
    CHECK(outcome.stepped());
  });
}

TEST_CASE("report_25: four micro-batches make the step of one batch; unscaling between them is refused") {
  tests::report("microsoft/Swin-Transformer#311");
  everywhere([](Device d, DType t) {
    auto run = [&](int64_t parts, int overflow) {
      Net net(d);
      auto opt = make(1, net.parameters());
      GradScaler scaler({.init_scale = 1024});
      Batch all(d, 25, 16);
      int64_t rows = 16 / parts;
      for (int64_t i = 0; i < parts; ++i) {
        Batch part = all;
        part.x = all.x.slice(0, i * rows, (i + 1) * rows);
        part.target = all.target.slice(0, i * rows, (i + 1) * rows);
        forward_backward(scaler, net, part, t, 1. / double(parts));
        if (i == overflow) net.b1.grad().fill_(inf);
        if (i + 1 < parts) CHECK(scaler.get_scale() == 1024);
      }
      scaler.step(*opt);
      scaler.update();
      CHECK(scaler.get_scale() == (overflow < 0 ? 1024 : 512));
      return weights(net.parameters());
    };
    auto one = run(1, -1);
    for (int64_t parts : {2, 4, 16}) {
      auto several = run(parts, -1);
      for (size_t i = 0; i < one.size(); ++i) CHECK(amax(abs(several[i] - one[i])).item() < (t == f16 ? 2e-3 : 1e-2));
      for (int overflow : {0, 1}) CHECK(same_bits(run(parts, overflow), weights(Net(d).parameters())));
    }
    Net net(d);
    auto opt = make(0, net.parameters());
    GradScaler scaler({.init_scale = 1024});
    forward_backward(scaler, net, Batch(d), t);
    scaler.unscale_(*opt);
    CHECK_THROWS_WITH(forward_backward(scaler, net, Batch(d), t), Contains("is not scaled, what comes now is scaled"));
  });
}

TEST_CASE("report_26: several optimizers share one scale, which changes once an iteration; several scales know their own gradients") {
  tests::report("accelerate#439");
  on_devices([](Device d) {
    for (bool reversed : {false, true}) {
      Single a(d), b(d);
      GradScaler scaler({.init_scale = 8, .growth_interval = 1});
      scaler.scale((a.p * inf).sum() + (b.p * 0.5).sum()).backward();
      auto first = scaler.step(reversed ? b.opt : a.opt), second = scaler.step(reversed ? a.opt : b.opt);
      scaler.update();
      CHECK((first.skipped() != reversed && second.skipped() == reversed));
      CHECK(all_are(a.p.detach(), 1));
      CHECK(all_are(b.p.detach(), 0.5));
      CHECK(scaler.get_scale() == 4);
      scaler.update();  // a second call settles nothing
      CHECK(scaler.get_scale() == 4);
      a.opt.zero_grad();
      b.opt.zero_grad();
      scaler.scale((a.p * 1).sum() + (b.p * 1).sum()).backward();
      scaler.step(a.opt);
      scaler.step(b.opt);
      scaler.update();
      CHECK(scaler.get_scale() == 8);  // once, not for each
    }
    // Losses of very different size, each with its own scale.
    Single a(d), b(d);
    GradScaler small({.init_scale = 65536}), large({.init_scale = 2});
    small.scale((a.p * 1e-6).sum()).backward();
    large.scale((b.p * inf).sum()).backward();
    CHECK_THROWS_WITH(small.step(b.opt), Contains("was scaled by another GradScaler"));
    auto ra = small.step(a.opt), rb = large.step(b.opt);
    small.update();
    large.update();
    CHECK((ra.stepped() && rb.skipped()));
    CHECK((small.get_scale() == 65536 && large.get_scale() == 1));
  });
}

TEST_CASE("report_42: ranks that each hold a shard skip together, and their scales stay equal") {
  tests::report("fairscale#179");
  on_devices([](Device d) {
    for (bool unscale : {false, true}) {
      constexpr int ranks = 3;
      float flags[ranks] = {};
      std::barrier meet(ranks);
      std::vector<double> scales[ranks], shards[ranks];
      std::vector<std::thread> threads;
      for (int rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&, rank] {
          Single s(d);
          GradScaler scaler({.init_scale = 64, .growth_interval = 2});
          scaler.set_agreement([&](const Tensor& found_inf) {  // a max-reduction
            flags[rank] = found_inf.item<float>();
            meet.arrive_and_wait();
            float most = *std::max_element(flags, flags + ranks);
            meet.arrive_and_wait();
            found_inf.detach().fill_(most);
          });
          for (int i = 0; i < 6; ++i) {
            s.opt.zero_grad();
            backward_with(scaler, s.p, (i == 1 && rank == 1) || (i == 4 && rank == 2) ? inf : 0.125);
            if (unscale) scaler.unscale_(s.opt);
            scaler.step(s.opt);
            scaler.update();
            scales[rank].push_back(scaler.get_scale());
            shards[rank].push_back(s.p.detach().mean().item());
          }
        });
      for (auto& thread : threads) thread.join();
      for (int rank = 0; rank < ranks; ++rank) {
        CHECK(scales[rank] == std::vector<double>{64, 32, 32, 64, 32, 32});
        CHECK(shards[rank] == std::vector<double>{0.875, 0.875, 0.75, 0.625, 0.625, 0.5});
      }
    }
  });
}

TEST_CASE("report_44: gradients of many replicas add up in f32, large ones and tiny ones") {
  tests::report("pytorch#59576");
  everywhere([](Device d, DType t) {
    for (double g : {3e4, 1e-7}) {
      Tensor w = ones({2, 3}, {.device = d, .requires_grad = true});
      Tensor x = ones({1, 3}, {.device = d});
      constexpr int replicas = 8;
      for (int r = 0; r < replicas; ++r) {
        Tensor y;
        { amp::Autocast region({.dtype = t}); y = linear(x, w); }
        (y * g).to(f32).sum().backward();
      }
      double each = rounded(g, t);
      for (double v : values(w.grad() / replicas)) CHECK(v == Approx(each).epsilon(1e-6));
    }
  });
}

TEST_CASE("report_53: a two-pass optimizer by hand: an inf in the first pass skips the step and undoes the perturbation") {
  tests::report("pfnet/pytorch-pfn-extras#636");
  // Ours: step takes no closure; each pass is written out, and the scaler checks what the last one left.
  static_assert(!requires(optim::SGD& o) { o.step([] { return Tensor(); }); });
  everywhere([](Device d, DType t) {
    auto run = [&](int overflow) {  // 0: none, 1 or 2: in that pass
      Net net(d);
      std::vector<Tensor> p = net.parameters();
      auto opt = make(1, p);
      GradScaler scaler({.init_scale = 256});
      Batch batch(d);
      auto before = weights(p);
      opt->zero_grad();
      forward_backward(scaler, net, batch, t);
      if (overflow == 1) net.w1.grad().select(0, 2).fill_(inf);
      {
        NoGrad off;
        Tensor norm = total_norm({net.w1.grad(), net.b1.grad(), net.w2.grad(), net.b2.grad()});
        for (auto& w : p) w.add_(w.grad() * (0.05 / (norm + 1e-12)));
      }
      opt->zero_grad();
      forward_backward(scaler, net, batch, t);
      if (overflow == 2) net.b2.grad().fill_(nan_);
      {
        NoGrad off;
        for (size_t i = 0; i < p.size(); ++i) p[i].copy_(before[i]);
      }
      auto outcome = scaler.step(*opt);
      scaler.update();
      CHECK(outcome.skipped() == (overflow != 0));
      CHECK(same_bits(weights(p), before) == (overflow != 0));
      amp::Autocast region({.dtype = t});
      NoGrad off;
      CHECK(same_bits(net(batch.x), net.by_hand(batch.x, t)));
    };
    for (int overflow = 0; overflow < 3; ++overflow) run(overflow);
  });
}

TEST_CASE("report_51: a scaler that was saved at step 7 of 10 grows at the same step when it is loaded") {
  tests::report("accelerate#4289");
  on_devices([](Device d) {
    amp::GradScalerOptions options{.init_scale = 8, .growth_interval = 10, .hysteresis = 2};
    for (bool used_before : {false, true})
      for (int overflows : {0, 1}) {
        Single s(d);
        GradScaler a(options), b(options);
        if (overflows) s.iterate(a, inf);  // one more would back off
        for (int i = 0; i < 7; ++i) s.iterate(a, 0);
        if (used_before) for (int i = 0; i < 3; ++i) s.iterate(b, i == 0 ? inf : 0);
        b.load_state_dict(a.state_dict().clone());
        CHECK((b.get_scale() == 8 && b.skipped_steps() == overflows));
        for (int i = 0; i < 4; ++i) {
          s.iterate(a, 0);
          s.iterate(b, 0);
          CHECK(a.get_scale() == (i < 2 ? 8 : 16));
          CHECK(b.get_scale() == a.get_scale());
        }
        for (int i = 0; i < 2; ++i) {
          s.iterate(a, inf);
          s.iterate(b, inf);
          CHECK(b.get_scale() == a.get_scale());
        }
        CHECK(b.state_dict().at("streak").item() == a.state_dict().at("streak").item());
      }
    // Before anything was scaled the state is complete; a disabled scaler takes any.
    GradScaler fresh(options), off({.enabled = false});
    CHECK(fresh.state_dict().size() == 4);
    CHECK_NOTHROW(off.load_state_dict(fresh.state_dict()));
    CHECK_NOTHROW(off.load_state_dict({}));
    CHECK_THROWS_WITH(fresh.load_state_dict(off.state_dict()), "GradScaler: the state is empty; it probably comes from a disabled scaler");
  });
}
