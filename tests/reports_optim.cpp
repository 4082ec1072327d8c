// What users of other frameworks reported about optimizers under mixed precision: 16-bit parameters, captured steps, loading. Each
// test is named by its entry and by what is right.
#include "halftone/tests/reports.h"

using namespace halftone;
using namespace halftone::tests;
using amp::GradScaler;
using Catch::Contains;
using State = amp::StepOutcome::State;

// ---- 16-bit parameters

TEST_CASE("report_21: small numbers of an optimizer are kept in f32: eps, squares, moments") {
  tests::report("optax#1754");
  everywhere([](Device d, DType t) {
    for (int kind = 0; kind < all_kinds; ++kind)
      for (int masters = 0; masters < 2; ++masters)
        for (int64_t n : {1, 33, 257}) {
          INFO("kind " << kind << ", masters " << masters << ", " << n);
          Tensor p = ones({n}, {.dtype = t, .device = d, .requires_grad = true});
          Made opt = kind == 1 ? std::make_unique<optim::SGD>(std::vector{p}, optim::SGDOptions{.lr = 0.125, .momentum = 0.9}) : make(kind, {p});
          if (kind == 3) opt = std::make_unique<optim::AdamW>(std::vector{p}, optim::AdamWOptions{.lr = 0.03125, .weight_decay = 0});
          if (masters) opt->use_master_weights();
          for (int i = 0; i < 3; ++i) {
            p.set_grad(zeros({n}, {.dtype = t, .device = d}));
            opt->step();
          }
          CHECK(all_are(p.detach(), 1));
          for (auto& [name, state] : opt->state_dict()) CHECK(!is_16bit_dtype(state.dtype()));
        }
    // g * g is 0 in f16 from 1.7e-4 down, and eps beside g = 1e-7 counts: the first step of Adam is lr g / (g + eps).
    for (double g : {1e-4, 1e-7}) {
      Tensor p = zeros({5}, {.dtype = t, .device = d, .requires_grad = true});
      optim::Adam opt({p}, {.lr = 0.03125});
      p.set_grad(full({5}, g, {.dtype = t, .device = d}));
      opt.step();
      double r = rounded(g, t);
      for (double v : values(p.detach())) CHECK(v == Approx(-0.03125 * r / (r + 1e-8)).epsilon(t == f16 ? 1e-3 : 5e-3));
    }
  });
}

TEST_CASE("report_22: 16-bit weights move by updates below half their unit, with masters or by stochastic rounding") {
  tests::report("pytorch#120376");
  everywhere([](Device d, DType t) {
    double small = t == bf16 ? 1e-3 : 1e-4;
    Warnings warnings;
    for (int64_t n : {7, 4096})
      for (int how = 0; how < 3; ++how) {
        if (how == 2 && (t == f16 || n < 4096)) continue;  // a mean of many; bf16 only
        INFO("how " << how << ", " << n);
        Tensor p = ones({n}, {.dtype = t, .device = d, .requires_grad = true});
        optim::SGD opt({p}, {.lr = 1});
        if (how == 1) opt.use_master_weights();
        if (how == 2) opt.use_stochastic_rounding(22);
        for (int i = 0; i < 100; ++i) {
          p.set_grad(full({n}, small, {.dtype = t, .device = d}));
          opt.step();
        }
        double mean = p.detach().to(f64).mean().item();
        CHECK(warnings.taken() == (how > 0 ? std::vector<std::string>()
                                           : std::vector{text::cat("SGD: parameter 0 [", n, "] (", t, ") has 16 bits and no master weight: updates below 1/", t == f16 ? 2048 : 256,
                                                                   " of a weight are rounded away. Call use_master_weights()", t == f16 ? "" : " or use_stochastic_rounding()",
                                                                   ", or keep weights in f32 and use amp::Autocast")}));
        if (how == 0) CHECK(mean == 1);
        else CHECK(mean == Approx(1 - 100 * small).margin(small * 4));
      }
  });
}

TEST_CASE("report_28: bf16, f32 and f64 gradients are unscaled; f16 ones need masters, and the error says so") {
  tests::report("pytorch#127176");
  on_devices([](Device d) {
    for (DType t : {bf16, f32, f64})
      for (bool unscale : {false, true})
        for (double bad : {0., double(inf)}) {
          INFO(str(t) << ", unscale_ " << unscale << ", " << bad);
          Tensor p = ones({5}, {.dtype = t, .device = d, .requires_grad = true});
          optim::SGD opt({p}, {.lr = 1});
          GradScaler scaler({.init_scale = 1024});
          scaler.scale((p * 0.25).sum()).backward();
          if (bad != 0) p.grad().slice(0, 4, 5).fill_(bad);
          if (unscale) {
            scaler.unscale_(opt);
            CHECK(p.grad().to_vector<float>()[0] == 0.25);
          }
          auto outcome = scaler.step(opt);
          scaler.update();
          CHECK(outcome.skipped() == (bad != 0));
          CHECK(all_are(p.detach(), bad != 0 ? 1 : 0.75));
        }
    Tensor p = ones({5}, {.dtype = f16, .device = d, .requires_grad = true});
    optim::SGD opt({p}, {.lr = 1}), wide({p}, {.lr = 1});
    wide.use_master_weights();
    GradScaler scaler({.init_scale = 1024});
    scaler.scale((p * 0.25).sum()).backward();
    CHECK_THROWS_WITH(scaler.step(opt), Contains("parameter 0 [5] (f16) is f16, which unscaling would underflow") && Contains("master weights"));
    CHECK(scaler.step(wide).state() == State::unknown);
    scaler.update();
    CHECK(all_are(p.detach(), 0.75));
    // Several dtypes in one optimizer.
    std::vector<Tensor> mixed;
    for (DType t : {bf16, f32, f64}) mixed.push_back(ones({3}, {.dtype = t, .device = d, .requires_grad = true}));
    optim::SGD all({mixed}, {.lr = 1});
    Tensor loss = zeros({}, {.device = d});
    for (auto& q : mixed) loss = loss + (q * 0.5).sum().to(f32);
    scaler.scale(loss).backward();
    scaler.unscale_(all);
    scaler.step(all);
    scaler.update();
    for (auto& q : mixed) CHECK(all_are(q.detach(), 0.5));
  });
}

// ---- captured steps; on the CPU capture calls the function

TEST_CASE("report_47: the scale changes in place, so that a captured step sees it") {
  tests::report("pytorch#55562");
  on_devices([](Device d) {
    Single s(d);
    GradScaler scaler({.init_scale = 64, .growth_interval = 100});
    auto step = capture([&](const Tensor& factor) {
      s.opt.zero_grad();
      scaler.scale((s.p * factor).sum()).backward();
      scaler.step(s.opt);
      scaler.update();
    });
    const void *scale = nullptr, *inverse = nullptr;
    for (int replay = 0; replay < 13; ++replay) {
      step(tensor(replay == 5 ? inf : 0.0625f).to(d));
      if (replay == 2) scale = scaler.scale_tensor().raw_data(), inverse = scaler.inverse_scale().raw_data();
      CHECK(scaler.get_scale() == (replay < 5 ? 64 : 32));
    }
    CHECK(all_are(s.p.detach(), 1 - 12 * 0.0625));
    CHECK(scaler.skipped_steps() == 1);
    scaler.update(128);
    scaler.load_state_dict(scaler.state_dict().clone());
    CHECK((scaler.scale_tensor().raw_data() == scale && scaler.inverse_scale().raw_data() == inverse));
    step(tensor(0.0625f).to(d));
    CHECK(scaler.get_scale() == 128);
    if (d.type == DeviceType::cuda) CHECK(step.replays() >= 11);
  });
}

TEST_CASE("report_48: a captured step follows learning rate and count of steps as an eager one does") {
  tests::report("burn#5779");
  everywhere([](Device d, DType t) {
    for (int kind = 0; kind < all_kinds; ++kind) {
      auto run = [&](bool captured) {
        Net net(d);
        auto opt = make(kind, net.parameters());
        GradScaler scaler({.init_scale = 256, .growth_interval = 3});
        auto body = [&](const Tensor& x, const Tensor& target) {
          opt->zero_grad();
          Tensor loss;
          { amp::Autocast region({.dtype = t}); loss = cross_entropy(net(x), target); }
          scaler.scale(loss).backward();
          scaler.step(*opt);
          scaler.update();
          return loss;
        };
        auto step = capture(body);
        for (uint64_t i = 0; i < 10; ++i) {
          if (i == 6) opt->set_lr(0.5);
          Batch batch(d, i);
          captured ? step(batch.x, batch.target) : body(batch.x, batch.target);
        }
        auto all = everything(*opt);
        all.push_back(scaler.scale_tensor().clone());
        return all;
      };
      CHECK(same_bits(run(true), run(false)));
    }
  });
}

TEST_CASE("report_49: a step captured after evaluation trains on the weights of now") {
  tests::report("pytorch#71631");
  everywhere([](Device d, DType t) {
    auto run = [&](bool captured) {
      Net net(d);
      auto opt = make(1, net.parameters());
      Batch batch(d);
      auto evaluate = [&] {
        NoGrad off;
        amp::Autocast region({.dtype = t});
        CHECK(same_bits(net(batch.x), net.by_hand(batch.x, t)));
      };
      evaluate();  // fills the copies
      auto body = [&](const Tensor& x, const Tensor& target) {
        opt->zero_grad();
        Tensor loss;
        { amp::Autocast region({.dtype = t}); loss = cross_entropy(net(x), target); }
        loss.backward();
        opt->step();
        return loss;
      };
      auto step = capture(body);
      std::vector<double> losses;
      for (int i = 0; i < 8; ++i) {
        losses.push_back((captured ? step(batch.x, batch.target) : body(batch.x, batch.target)).item());
        evaluate();
        if (i == 5) { NoGrad off; net.w1.mul_(0.5); }  // between replays
      }
      for (int i = 1; i < 6; ++i) CHECK(losses[size_t(i)] < losses[size_t(i) - 1]);
      return losses;
    };
    CHECK(run(true) == run(false));
  });
}

// ---- saving and loading

TEST_CASE("report_52: a 16-bit model with masters goes on bit for bit after loading, in whichever order") {
  tests::report("apex#120");
  everywhere([](Device d, DType t) {
    struct Run {
      Run(Device device, DType t, int kind, uint64_t seed) : net(device, seed, t), opt(make(kind, net.parameters())) { opt->use_master_weights(); }
      Net net;
      Made opt;
      GradScaler scaler{amp::GradScalerOptions{.init_scale = 128}};
      void step(uint64_t seed) {
        Batch batch(net.w1.device(), seed);
        opt->zero_grad();
        scaler.scale(cross_entropy(net(batch.x.to(net.w1.dtype())), batch.target)).backward();
        scaler.step(*opt);
        scaler.update();
      }
      std::vector<Tensor> all() const {
        auto v = everything(*opt);
        for (auto& p : net.parameters()) v.push_back(opt->master(p).clone());
        return v;
      }
      void load_weights(const std::vector<Tensor>& from) {
        NoGrad off;
        auto p = net.parameters();
        for (size_t i = 0; i < p.size(); ++i) p[i].copy_(from[i]);
      }
    };
    for (int kind = 0; kind < all_kinds; ++kind) {
      Run a(d, t, kind, 1);
      for (uint64_t i = 0; i < 3; ++i) a.step(i);
      auto model = weights(a.net.parameters());
      StateDict state = a.opt->state_dict().clone(), scaling = a.scaler.state_dict().clone();
      a.step(3);
      for (int order = 0; order < 4; ++order) {
        Run b(d, t, kind, 2);
        if (order >= 2) b.step(9);  // has a history of its own
        if (order % 2 == 0) b.load_weights(model);
        b.opt->load_state_dict(state);
        if (order % 2 == 1) b.load_weights(model);
        b.scaler.load_state_dict(scaling);
        // Loading the rounded weights after the masters makes masters of them: the masters' state comes last.
        if (order % 2 == 1) b.opt->load_state_dict(state);
        b.step(3);
        CHECK(same_bits(b.all(), a.all()));
      }
      // Weights alone: masters follow them.
      Run c(d, t, kind, 3);
      c.step(0);
      c.load_weights(model);
      c.opt->zero_grad();
      for (auto& p : c.net.parameters()) p.set_grad(zeros_like(p.detach()));
      c.opt->set_lr(0);
      c.opt->step();
      for (size_t i = 0; i < model.size(); ++i) CHECK(same_bits(c.net.parameters()[i].detach(), model[i]));
      // Moments stay f32, also from a state that was saved in 16 bits.
      StateDict narrow;
      for (auto& [name, v] : state) narrow.add(name, v.dtype() == f32 ? v.to(t) : v);
      c.opt->load_state_dict(narrow);
      c.step(1);
      for (auto& [name, v] : c.opt->state_dict()) CHECK_FALSE(is_16bit_dtype(v.dtype()));
    }
  });
}
