// Apex's levels: what each converts, that each trains, and that a model's state is f32 at all of them.
#include "halftone/tests/reports.h"

using namespace halftone;
using namespace halftone::tests;
using amp::Level;
using Catch::Contains;

namespace {

constexpr Level levels[] = {amp::O0, amp::O1, amp::O2, amp::O3};

nn::Sequential mlp(Device d) {
  manual_seed(11);
  nn::Sequential net{nn::Linear(6, 32), nn::ReLU(), nn::Linear(32, 32), nn::GELU(), nn::Linear(32, 3)};
  net.to(d);
  return net;
}
nn::Sequential cnn(Device d) {
  manual_seed(12);
  nn::Sequential net{nn::Conv2d(2, 8, 3), nn::BatchNorm2d(8), nn::ReLU(), nn::MaxPool2d(2), nn::Conv2d(8, 8, 2), nn::ReLU(), nn::Flatten(), nn::Linear(8, 3)};
  net.to(d);
  return net;
}
// Classes that differ in one direction, in noise.
struct Sets {
  Tensor x, target;
  Sets(Device d, bool images) {
    manual_seed(13);
    target = randint(0, 3, {96}, {.device = d});
    Tensor shape = randn(images ? Shape{3, 2, 6, 6} : Shape{3, 6}, {.device = d});
    x = index_select(shape, 0, target) + randn(images ? Shape{96, 2, 6, 6} : Shape{96, 6}, {.device = d}) * 0.7;
  }
};
struct Training {
  nn::Sequential net;
  optim::AdamW opt;
  amp::Leveled<nn::Sequential> mixed;
  Training(nn::Sequential n, const amp::InitializeOptions& o)
      : net(std::move(n)), opt(net.parameters(), {.lr = 1e-2}), mixed(amp::initialize(net, opt, o)) {}
  Training(const Training&) = delete;
  Tensor step(const Sets& data) {
    opt.zero_grad();
    Tensor loss = cross_entropy(mixed(data.x), data.target);
    mixed.scaler.scale(loss).backward();
    mixed.scaler.step(opt);
    mixed.scaler.update();
    return loss.detach();
  }
  std::vector<Tensor> all() const {
    auto v = everything(opt);
    for (auto& b : net.buffers()) v.push_back(b.clone());
    return v;
  }
};
bool norm_of(const std::string& name) { return name.starts_with("1."); }  // of cnn()

}  // namespace

TEST_CASE("each level converts what it says, and gives f32 results") {
  everywhere([](Device d, DType t) {
    Warnings ignored;
    for (Level level : levels) {
      INFO("O" << static_cast<int>(level));
      Training a(cnn(d), {.level = level, .dtype = t});
      Sets data(d, true);
      bool low = level >= amp::O2;
      for (auto& [name, p] : a.net.named_parameters()) {
        INFO(name);
        CHECK(p.dtype() == (low && (level == amp::O3 || !norm_of(name)) ? t : f32));
        CHECK(a.opt.keeps_master(p) == (level == amp::O2 && !norm_of(name)));
      }
      for (auto& [name, b] : a.net.named_buffers()) CHECK(b.dtype() == (name == "1.num_batches_tracked" ? DType::i64 : f32));
      CHECK(a.mixed.level() == level);
      CHECK(a.mixed.dtype() == (level == amp::O0 ? f32 : t));
      CHECK(a.mixed.scaler.enabled() == (level == amp::O1 || level == amp::O2));
      CHECK(a.mixed(data.x).dtype() == f32);
      amp::Trace trace = amp::trace([&] { a.mixed(data.x); });
      bool conv = false;
      for (auto& l : trace.lines)
        if (l.op.starts_with("conv")) conv = l.in[0].dtype == (level == amp::O0 ? f32 : t);
      CHECK(conv);
    }
  });
  nn::Linear layer(2, 2);
  optim::SGD opt(layer.parameters());
  CHECK(amp::initialize(layer, opt, {.level = amp::O2}).dtype() == bf16);  // on the CPU
}

TEST_CASE("at each level an MLP and a network with batch norm train to about the loss of f32") {
  everywhere([](Device d, DType t) {
    Warnings ignored;
    for (bool images : {false, true}) {
      Sets data(d, images);
      auto trained = [&](Level level) {
        Training a(images ? cnn(d) : mlp(d), {.level = level, .dtype = t});
        double first = a.step(data).item(), last = 0;
        for (int i = 0; i < 40; ++i) last = a.step(data).item();
        CHECK(last < first / 2);
        CHECK(a.mixed.scaler.skipped_steps() == 0);
        return last;
      };
      double wide = trained(amp::O0);
      for (Level level : {amp::O1, amp::O2}) {
        INFO("O" << static_cast<int>(level) << (images ? ", images" : ""));
        CHECK(trained(level) == Approx(wide).epsilon(0.1).margin(0.01));
      }
      trained(amp::O3);  // its loss only falls: updates are rounded away
    }
  });
}

TEST_CASE("levels are what one would write by hand, bit for bit") {
  everywhere([](Device d, DType t) {
    Sets data(d, true);
    for (Level level : {amp::O0, amp::O1, amp::O2}) {
      INFO("O" << static_cast<int>(level));
      Training a(cnn(d), {.level = level, .dtype = t});
      nn::Sequential net = cnn(d);
      optim::AdamW opt(net.parameters(), {.lr = 1e-2});
      amp::GradScaler scaler({.enabled = level != amp::O0});
      if (level == amp::O2) {
        std::vector<Tensor> before = weights(net.parameters());
        net.to(t);
        opt.use_master_weights();
        for (size_t i = 0; i < before.size(); ++i)
          if (Tensor p = net.parameters()[i]; opt.keeps_master(p)) opt.set_master(p, before[i]);
      }
      for (int i = 0; i < 5; ++i) {
        opt.zero_grad();
        Tensor y;
        {
          amp::Autocast region({.dtype = t, .enabled = level == amp::O1});
          y = net(level == amp::O2 ? data.x.to(t) : data.x).to(f32);
        }
        Tensor loss = cross_entropy(y, data.target);
        scaler.scale(loss).backward();
        scaler.step(opt);
        scaler.update();
        CHECK(same_bits(a.step(data), loss.detach()));
      }
      auto by_hand = everything(opt);
      for (auto& b : net.buffers()) by_hand.push_back(b.clone());
      CHECK(same_bits(a.all(), by_hand));
    }
  });
}

TEST_CASE("masters begin as the f32 weights, not as their rounding") {
  everywhere([](Device d, DType t) {
    nn::Sequential net = mlp(d);
    auto before = weights(net.parameters());
    optim::SGD opt(net.parameters(), {.lr = 1});
    auto mixed = amp::initialize(net, opt, {.level = amp::O2, .dtype = t});
    auto p = net.parameters();
    for (size_t i = 0; i < p.size(); ++i) {
      CHECK(same_bits(opt.master(p[i]), before[i]));
      CHECK(same_bits(p[i].detach(), before[i].to(t)));
    }
    CHECK_THROWS_WITH(opt.set_master(p[0], before[1]), Contains("set_master: expected a value [32, 6], got [32] (f32)"));
    CHECK_THROWS_WITH(opt.set_master(before[0], before[0]), Contains("set_master: [32, 6] (f32) has no master weight"));
    CHECK_THROWS_WITH(opt.set_master(before[0].to(t), before[0]), Contains("is no parameter of this optimizer"));
  });
}

TEST_CASE("the state of any level is f32, loads into any, and goes on bit for bit at its own") {
  everywhere([](Device d, DType t) {
    Warnings ignored;
    Sets data(d, true);
    for (Level level : levels) {
      INFO("O" << static_cast<int>(level));
      Training a(cnn(d), {.level = level, .dtype = t});
      for (int i = 0; i < 3; ++i) a.step(data);
      StateDict model = a.mixed.state_dict().clone(), optimizer = a.opt.state_dict().clone(), scaler = a.mixed.scaler.state_dict().clone();
      for (auto& [name, v] : model) CHECK(v.dtype() == (name == "1.num_batches_tracked" ? DType::i64 : f32));

      // Into a plain f32 model: what it computes is what the masters are.
      nn::Sequential wide = cnn(d);
      wide.load_state_dict(model);
      for (auto& [name, v] : wide.state_dict()) CHECK(same_bits(v, model.at(name)));
      {
        NoGrad off;
        wide.eval();
        a.net.eval();
        CHECK(amax(abs(wide(data.x) - a.mixed(data.x))).item() < (t == f16 ? 0.02 : 0.2));
      }

      // Into every level, whose state it is then: exactly where weights or masters are f32.
      for (Level other : levels) {
        Training b(cnn(d), {.level = other, .dtype = t});
        b.mixed.load_state_dict(model);
        for (auto& [name, v] : b.mixed.state_dict()) {
          Tensor expected = model.at(name);
          CHECK(same_bits(v, other == amp::O3 && is_floating(expected.dtype()) && !name.starts_with("1.running") ? expected.to(t).to(f32) : expected));
        }
        if (other != level) continue;
        b.opt.load_state_dict(optimizer);
        if (scaler.size() > 0) b.mixed.scaler.load_state_dict(scaler);
        for (int i = 0; i < 2; ++i) b.step(data);
        Training c(cnn(d), {.level = level, .dtype = t});
        for (int i = 0; i < 5; ++i) c.step(data);
        CHECK(same_bits(b.all(), c.all()));
      }
    }
  });
}

TEST_CASE("tied weights share a master, and a load by either name reaches it") {
  struct Tied : nn::Module {
    nn::Linear in{4, 4}, out{4, 4};
    HT_FIELDS(in, out)
    Tied() { out.weight.tie(in.weight); }
    Tensor forward(const Tensor& x) override { return out(relu(in(x))); }
  };
  Tied net;
  optim::SGD opt(net.parameters(), {.lr = 1});
  auto mixed = amp::initialize(net, opt, {.level = amp::O2, .dtype = f16});
  StateDict state = mixed.state_dict().clone();
  CHECK(same_bits(state.at("in.weight"), state.at("out.weight")));
  StateDict one;
  for (auto& [name, t] : state)
    if (name != "in.weight") one.add(name, t + 1.0 / 3);
  mixed.load_state_dict(one);
  CHECK(same_bits(opt.master(net.in.weight), one.at("out.weight")));
  CHECK(same_bits(net.in.weight.detach(), one.at("out.weight").to(f16)));
}

TEST_CASE("a static scale stays, and skips an overflow all the same; a dynamic one may be had at any level that has f32 gradients") {
  everywhere([](Device d, DType t) {
    Sets data(d, false);
    for (Level level : {amp::O0, amp::O1, amp::O2}) {
      INFO("O" << static_cast<int>(level));
      Training a(mlp(d), {.level = level, .dtype = t, .scaler = amp::static_scale(128)});
      for (int i = 0; i < 3; ++i) a.step(data);
      auto before = weights(a.opt.parameters());
      Sets bad(d, false);
      bad.x[0].fill_(inf);
      a.step(bad);
      CHECK(a.mixed.scaler.skipped_steps() == 1);
      CHECK(same_bits(weights(a.opt.parameters()), before));
      CHECK(a.mixed.scaler.get_scale() == 128);
      Training b(mlp(d), {.level = level, .dtype = t, .scaler = amp::GradScalerOptions{.init_scale = 128, .growth_interval = 2}});
      for (int i = 0; i < 4; ++i) b.step(data);
      CHECK(b.mixed.scaler.get_scale() == 512);
    }
  });
  CHECK(amp::static_scale(0x1p70).max_scale == 0x1p70);
}

TEST_CASE("several optimizers and islands at a level") {
  everywhere([](Device d, DType t) {
    struct Net : nn::Module {
      nn::Linear body{6, 8}, head{8, 3};
      nn::PrecisionIsland stable{nn::BatchNorm1d(8), DType::f32};
      HT_FIELDS(body, stable, head)
      Tensor forward(const Tensor& x) override {
        Tensor h = body(x);
        return head(relu(stable(h)).to(h.dtype()));
      }
    };
    Warnings ignored;
    for (Level level : levels) {
      Net net;
      net.to(d);
      optim::SGD a(net.body.parameters(), {.lr = 0.1});
      std::vector<Tensor> rest = net.head.parameters();
      for (auto& p : net.stable.parameters()) rest.push_back(p);
      optim::AdamW b(rest, {.lr = 1e-2});
      auto mixed = amp::initialize(net, {&a, &b}, {.level = level, .dtype = t});
      for (auto& p : net.stable.parameters()) CHECK(p.dtype() == f32);
      CHECK(a.master(net.body.weight).defined() == (level == amp::O2));
      CHECK(b.master(net.head.weight).defined() == (level == amp::O2));
      Sets data(d, false);
      double first = 0, last = 0;
      for (int i = 0; i < 20; ++i) {
        a.zero_grad();
        b.zero_grad();
        Tensor loss = cross_entropy(mixed(data.x), data.target);
        mixed.scaler.scale(loss).backward();
        mixed.scaler.step(a);
        mixed.scaler.step(b);
        mixed.scaler.update();
        (i == 0 ? first : last) = loss.item();
      }
      CHECK(last < first);
    }
  });
}

TEST_CASE("what a level cannot be is refused") {
  nn::Linear net(2, 2);
  optim::SGD opt(net.parameters());
  CHECK_THROWS_WITH(amp::initialize(net, opt, {.level = amp::O2, .dtype = f32}), "initialize: expected dtype f16 or bf16, got f32; for f32 say {.level = amp::O0}");
  CHECK_THROWS_WITH(amp::initialize(net, opt, {.level = amp::O3, .dtype = f16, .scaler = amp::static_scale(128)}),
                    "initialize: gradients of O3 in f16 are f16, which unscaling would underflow; use O2, whose masters take them in f32, or bf16");
  net.weight.set_grad(ones({2, 2}));
  opt.step();
  net.zero_grad();
  CHECK_THROWS_WITH(amp::initialize(net, opt, {.level = amp::O2}), "SGD: use_master_weights comes before the first step");
  CHECK(net.weight.dtype() == f32);  // nothing was converted
  CHECK_THROWS_WITH(amp::initialize(net, opt, {.level = static_cast<amp::Level>(7)}), "initialize: expected level O0, O1, O2 or O3, got 7");
  for (auto level : {amp::O2, amp::O3}) {
    nn::Linear busy(2, 2);
    optim::SGD fresh(busy.parameters());
    busy(ones({1, 2})).sum().backward();
    CHECK_THROWS_WITH(amp::initialize(busy, fresh, {.level = level}), "initialize: parameter 'weight' has a gradient, which a 16-bit level does not take over; zero_grad() first");
    busy.zero_grad();
    CHECK_NOTHROW(amp::initialize(busy, fresh, {.level = level, .dtype = bf16}));
  }
  for (auto level : levels) {
    nn::Linear wide(2, 2);
    wide.to(DType::f64);
    optim::SGD fresh(wide.parameters());
    CHECK_THROWS_WITH(amp::initialize(wide, fresh, {.level = level}), "initialize: expected a model in f32, which the level converts; parameter 'weight' is [2, 2] (f64)");
  }
  net.to(bf16);
  CHECK_THROWS_WITH(amp::initialize(net, opt, {.level = amp::O2}), "initialize: expected a model in f32, which the level converts; parameter 'weight' is [2, 2] (bf16)");
}
