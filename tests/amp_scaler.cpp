// The gradient scaler: its stages, overflow, several optimizers, clipping, state, and that scaling changes no bit.
#include <algorithm>

#include "halftone/halftone.h"
#include "halftone/tests/error_text.h"

using namespace halftone;
using amp::GradScaler;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();

struct Net {
  Tensor w1 = randn({8, 6}, {.requires_grad = true}), b1 = zeros({8}, {.requires_grad = true});
  Tensor w2 = randn({3, 8}, {.requires_grad = true}), b2 = zeros({3}, {.requires_grad = true});
  std::vector<Tensor> parameters() const { return {w1, b1, w2, b2}; }
  Tensor operator()(const Tensor& x) const { return linear(linear_relu(x, w1, b1), w2, b2); }
};
struct Batch {
  Tensor x, target;
  explicit Batch(uint64_t seed) {
    manual_seed(seed);
    x = randn({16, 6});
    target = randint(0, 3, {16});
  }
};
Net net_of(uint64_t seed) {
  manual_seed(seed);
  return {};
}

// Every bit of parameters and optimizer state.
std::vector<std::vector<double>> bits(const std::vector<Tensor>& parameters, const optim::Optimizer& opt) {
  std::vector<std::vector<double>> all;
  for (auto& p : parameters) all.push_back(p.to_vector<double>());
  for (auto& [name, t] : opt.state_dict()) all.push_back(t.to_vector<double>());
  return all;
}

// A backward that leaves `g` times the scale in p's gradient.
void backward_with(GradScaler& scaler, const Tensor& p, float g) { scaler.scale((p * g).sum()).backward(); }

// What the framework notes of a captured step, and does at each replay of it, without a device that would do the rest.
struct Noted final : CaptureLog {
  template <class F> explicit Noted(F step) {
    thread_state().capture = this;
    step();
    thread_state().capture = nullptr;
  }
  void launched(const Call&, std::span<const Tensor>) override {}
  void uses(const Tensor&) override {}
  bool holds() const { return std::all_of(guards.begin(), guards.end(), [](auto& g) { return g(); }); }
  void replay() const { for (auto& e : effects) e(); }
};

// Keeps the gradient it gets.
struct Kept : Function<Kept> {
  static inline Tensor seen;
  static Tensor forward(Context&, const Tensor& x) { return x * 1; }
  static std::vector<Tensor> backward(Context&, const Tensor& g) { return {seen = g}; }
};

struct Single {
  Tensor p = ones({2}, {.requires_grad = true});
  optim::SGD opt{{p}, {.lr = 1}};
};

}  // namespace

TEST_CASE("the stages of a scaler's iteration, and what is refused") {
  Single s, other;
  GradScaler scaler({.init_scale = 4});
  TEXT(scaler.unscale_(s.opt), "unscale_: nothing has been scaled yet; call scale(loss) and backward() first");
  TEXT(scaler.step(s.opt), "step: nothing has been scaled yet; call scale(loss) and backward() first");
  TEXT(scaler.update(), "update: nothing has been scaled yet; call scale(loss) and backward() first");
  backward_with(scaler, s.p, 1);
  scaler.unscale_(s.opt);
  TEXT(scaler.unscale_(s.opt), "unscale_: already called for SGD since the last update(); call update() once, after all steps");
  scaler.step(s.opt);
  TEXT(scaler.step(s.opt), "step: already called for SGD since the last update(); call update() once, after all steps");
  TEXT(scaler.unscale_(s.opt), "unscale_: called for SGD after step(); call update() first");
  scaler.update();
  s.opt.zero_grad();
  backward_with(scaler, s.p, 1);
  CHECK_NOTHROW(scaler.unscale_(s.opt));
  CHECK_NOTHROW(scaler.step(s.opt));
  TEXT(scaler.step(s.opt, {.clip_norm = -1}), "step: expected clip_norm of 0 or more, got -1");
  TEXT(scaler.update(0), "update: expected a finite scale above 0, got 0");
  TEXT(scaler.update(inf), "update: expected a finite scale above 0, got inf");
  TEXT(scaler.scale(zeros({}, {.dtype = DType::i64})), "GradScaler::scale: expected a floating loss");
}

TEST_CASE("backward of a scaled loss starts with the scale itself, which nobody gets to see") {
  GradScaler scaler({.init_scale = 8});
  Tensor p = ones({2}, {.requires_grad = true});
  auto single_numbers = [&](const Tensor& scaled) {
    amp::Trace t = amp::trace([&] { scaled.backward(); });
    return std::count_if(t.lines.begin(), t.lines.end(), [](auto& line) { return line.out[0].shape.rank() == 0; });
  };
  CHECK(single_numbers(scaler.scale((p * 3).sum())) == 0);
  CHECK(p.grad().to_vector<float>() == std::vector<float>{24, 24});
  CHECK(single_numbers(scaler.scale((p * 3).sum() * 2)) == 1);  // the gradient through `* 2`
  CHECK(p.grad().to_vector<float>() == std::vector<float>{72, 72});
  // Hooks, results of grad(), leaves and functions of users may keep what they get: it is theirs.
  Tensor loss = (p * 3).sum(), kept, leaf = ones({}, {.requires_grad = true});
  auto hook = register_hook(loss, [&](const Tensor& g) { return kept = g; });
  scaler.scale(loss).backward();
  Tensor found = grad({scaler.scale(leaf)}, {leaf})[0];
  scaler.scale(leaf).backward();
  scaler.scale(Kept::apply((p * 3).sum())).backward();
  scaler.update(2);
  for (auto& t : {kept, found, leaf.grad(), Kept::seen}) CHECK(t.item() == 8);
  Kept::seen = {};
  // A loss [1], a gradient of the program's own, and a graph that is kept.
  p.zero_grad();
  scaler.scale((p * 3).sum().view({1})).backward();
  CHECK(p.grad().to_vector<float>() == std::vector<float>{6, 6});
  Tensor again = scaler.scale((p * 3).sum());
  again.backward({.gradient = full({}, 0.5), .retain_graph = true});
  again.backward();
  CHECK(p.grad().to_vector<float>() == std::vector<float>{15, 15});
}

TEST_CASE("options of a scaler are checked") {
  TEXT(GradScaler({.init_scale = 0}), "GradScaler: expected a finite init_scale above 0, got 0");
  TEXT(GradScaler({.growth_factor = .5}), "GradScaler: expected a finite growth_factor of 1 or more, got 0.5");
  TEXT(GradScaler({.growth_factor = inf}), "GradScaler: expected a finite growth_factor of 1 or more, got inf");
  TEXT(GradScaler({.growth_factor = std::nan("")}), "GradScaler: expected a finite growth_factor of 1 or more, got nan");
  TEXT(GradScaler({.backoff_factor = 2}), "GradScaler: expected backoff_factor in (0, 1], got 2");
  TEXT(GradScaler({.growth_interval = 0}), "GradScaler: expected growth_interval above 0, got 0");
  TEXT(GradScaler({.init_scale = 1, .min_scale = 2}), "GradScaler: expected 0 < min_scale <= init_scale <= max_scale, got 2, 1 and 1.84467e+19");
  TEXT(GradScaler({.max_consecutive_skips = -1}), "GradScaler: expected max_consecutive_skips of 0 or more, got -1");
}

TEST_CASE("whose scale a gradient carries is known") {
  Single s;
  GradScaler scaler({.init_scale = 4}), stranger({.init_scale = 8});
  backward_with(scaler, s.p, 1);
  TEXT((s.p * 1).sum().backward(), "backward: the gradient of a leaf [2] (f32) is scaled by a GradScaler, what comes now is not; unscale_ it, or zero_grad() first");
  TEXT(optim::clip_grad_norm_({s.p}, 1), "clip_grad_norm_: the gradient of parameter 0 is scaled by a GradScaler; call unscale_ first");
  backward_with(scaler, s.p, 1);  // accumulation
  CHECK(s.p.grad().to_vector<float>() == std::vector<float>{8, 8});
  stranger.scale(s.p.detach().sum());
  stranger.scale_tensor();
  TEXT(stranger.step(s.opt), "step: the gradient of parameter 0 [2] (f32) of SGD was scaled by another GradScaler; let that one take this step, or zero_grad() and scale the loss by this one");
  TEXT(backward_with(stranger, s.p, 1), "backward: the gradient of a leaf [2] (f32) is scaled by a GradScaler, what comes now is by another; let one scale both losses, or zero_grad() first");
  scaler.unscale_(s.opt);
  CHECK(!grad_stamp(s.p).scaler);
  CHECK(s.p.grad().to_vector<float>() == std::vector<float>{2, 2});
  TEXT(backward_with(scaler, s.p, 1), "backward: the gradient of a leaf [2] (f32) is not scaled, what comes now is scaled; unscale_ it, or zero_grad() first");
  Tensor loss = (s.p * 1).sum();
  TEXT((scaler.scale(loss) + stranger.scale(loss)).backward(), "backward: one run cannot mix the losses of two GradScalers");
  Tensor half_weight = ones({2}, {.dtype = DType::f16, .requires_grad = true});
  optim::SGD in_half({half_weight}, {.lr = 1});
  scaler.scale((half_weight * 1).sum()).backward();
  TEXT(scaler.unscale_(in_half), "unscale_: the gradient of parameter 0 [2] (f16) is f16, which unscaling would underflow; keep parameters in f32 and use amp::Autocast, or give the optimizer master weights");
}

TEST_CASE("a gradient whose scale has changed since is refused, whatever changed it") {
  const std::string replaced = " carries a scale that update() or load_state_dict() has replaced since; zero_grad() before the next backward, and call update() once for each step, after it";
  for (int how = 0; how < 3; ++how)
    for (bool again : {false, true}) {
      Single s;
      GradScaler scaler({.init_scale = 4}), other({.init_scale = 16});
      backward_with(scaler, s.p, 1);
      if (how == 0) scaler.step(s.opt), scaler.update();
      if (how == 1) scaler.update(16);
      if (how == 2) scaler.load_state_dict(other.state_dict());
      if (again) backward_with(scaler, s.p, 1);
      TEXT(scaler.step(s.opt), "step: the gradient of parameter 0 [2] (f32) of SGD" + replaced);
      TEXT(scaler.unscale_(s.opt), "unscale_: the gradient of parameter 0 [2] (f32) of SGD" + replaced);
      s.opt.zero_grad();
      backward_with(scaler, s.p, 1);
      CHECK_NOTHROW(scaler.step(s.opt));
      CHECK(s.p.to_vector<float>() == std::vector<float>(2, how == 0 ? -1 : 0));
    }
}

TEST_CASE("an update that cannot change the scale leaves gradients good, and so does the scale that is there already") {
  Single s, other;
  GradScaler scaler({.init_scale = 4}), fixed(amp::static_scale(8));
  backward_with(scaler, s.p, 1);
  scaler.update();  // nothing was stepped
  scaler.load_state_dict(scaler.state_dict().clone());
  backward_with(scaler, s.p, 1);
  scaler.step(s.opt);
  CHECK(s.p.to_vector<float>() == std::vector<float>{-1, -1});
  // Another optimizer's update makes stale what lies in a gradient, which is no error until it is used.
  backward_with(scaler, other.p, 1);
  scaler.update();
  backward_with(scaler, other.p, 1);
  other.opt.zero_grad();
  backward_with(scaler, other.p, 1);
  scaler.step(other.opt);
  CHECK(other.p.to_vector<float>() == std::vector<float>{0, 0});
  Single kept;
  for (int i = 0; i < 2; ++i) {
    backward_with(fixed, kept.p, 1);
    fixed.step(kept.opt);
    fixed.update();
  }
  CHECK(kept.p.to_vector<float>() == std::vector<float>{-2, -2});
}

TEST_CASE("a scaled loss that was kept over a change of the scale is refused") {
  Single s;
  GradScaler scaler({.init_scale = 4});
  Tensor kept = scaler.scale((s.p * 1).sum());
  scaler.update(8);
  TEXT(kept.backward(), "backward: the scale has changed since scaler.scale(loss), by update() or load_state_dict(); scale the loss again, and run backward before update()");
}

TEST_CASE("replays of captured steps leave gradients with the scale of their replay") {
  Single s;
  GradScaler scaler({.init_scale = 4});
  auto backward = [&] { backward_with(scaler, s.p, 1); };
  auto finish = [&] {
    scaler.step(s.opt);
    scaler.update();
  };
  auto stale = Catch::Contains("carries a scale that update() or load_state_dict() has replaced since");
  s.opt.zero_grad();
  backward();
  finish();
  // Captured as a whole: what it leaves is used up.
  Noted whole([&] {
    s.opt.zero_grad();
    backward();
    finish();
  });
  for (int i = 0; i < 3; ++i) {
    REQUIRE(whole.holds());
    whole.replay();
    CHECK_THROWS_WITH(scaler.step(s.opt), stale);
  }
  // Captured in parts, the second of which adds to the first's gradient.
  Noted first([&] {
    s.opt.zero_grad();
    backward();
  });
  Noted second(backward);
  finish();
  for (int i = 0; i < 3; ++i) {
    REQUIRE(first.holds());
    first.replay();
    REQUIRE(second.holds());
    second.replay();
    CHECK_NOTHROW(finish());
    CHECK_FALSE(second.holds());  // onto a stale gradient is another step
    CHECK_THROWS_WITH(scaler.step(s.opt), stale);
  }
  // One that only looks.
  s.opt.zero_grad();
  backward();
  Noted looks([&] { s.p.grad(); });
  for (int i = 0; i < 2; ++i) {
    CHECK_NOTHROW(finish());
    s.opt.zero_grad();
    backward();
    REQUIRE(looks.holds());
    looks.replay();
  }
  // One that leaves a gradient for the next step, whichever of scale and gradient it looked at first.
  Noted ahead([&] {
    s.opt.zero_grad();
    backward();
    finish();
    s.opt.zero_grad();
    backward();
  });
  CHECK_NOTHROW(finish());
  for (int i = 0; i < 3; ++i) {
    REQUIRE(ahead.holds());
    ahead.replay();
    CHECK_NOTHROW(finish());
  }
}

TEST_CASE("gradients that are not scaled are refused where the scaler would divide them") {
  const std::string unscaled = " is not scaled: backward ran on the loss itself, or unscale_ came before the last update(); call scaler.scale(loss).backward(), and zero_grad() for each step";
  Single s, idle;
  GradScaler scaler({.init_scale = 4}), off({.enabled = false});
  scaler.scale(ones({}));
  (s.p * 1).sum().backward();
  TEXT(scaler.step(s.opt), "step: the gradient of parameter 0 [2] (f32) of SGD" + unscaled);
  TEXT(scaler.unscale_(s.opt), "unscale_: the gradient of parameter 0 [2] (f32) of SGD" + unscaled);
  CHECK_NOTHROW(off.step(s.opt));
  CHECK(scaler.step(idle.opt).state() == amp::StepOutcome::State::no_gradients);
  s.opt.zero_grad();
  backward_with(scaler, s.p, 1);
  scaler.unscale_(s.opt);
  (s.p * 1).sum().backward();  // a penalty that needs no scale
  scaler.step(s.opt);
  scaler.update();
  CHECK(s.p.to_vector<float>() == std::vector<float>{-2, -2});
  TEXT(scaler.step(s.opt), "step: the gradient of parameter 0 [2] (f32) of SGD" + unscaled);
  // What the program puts there counts as scaled, unless it does so after unscale_.
  s.opt.zero_grad();
  auto [g] = grad({scaler.scale((s.p * 1).sum())}, {s.p});
  s.p.set_grad(g);
  scaler.step(s.opt);
  scaler.update();
  CHECK(s.p.to_vector<float>() == std::vector<float>{-3, -3});
  s.opt.zero_grad();
  backward_with(scaler, s.p, 1);
  scaler.unscale_(s.opt);
  s.p.set_grad(full({2}, 2));
  scaler.step(s.opt);
  scaler.update();
  CHECK(s.p.to_vector<float>() == std::vector<float>{-5, -5});
}

TEST_CASE("a loss is scaled once, and as a whole") {
  Single s, other;
  GradScaler scaler({.init_scale = 4});
  Tensor loss = (s.p * 1).sum(), apart = (other.p * 1).sum();
  BackwardOptions again{.gradient = {}, .retain_graph = true};
  auto whole = Catch::StartsWith("backward: gradients of a scaled and of an unscaled loss meet in ");
  TEXT((scaler.scale(loss) + loss).backward(again), "backward: gradients of a scaled and of an unscaled loss meet in sum; scale the whole loss, as in scaler.scale(a + b).backward()");
  CHECK_THROWS_WITH((loss + scaler.scale(loss)).backward(again), whole);
  CHECK_THROWS_WITH(((s.p * 2).sum() + scaler.scale((s.p * 3).sum())).backward(again), whole);
  CHECK_THROWS_WITH(grad({scaler.scale(loss), loss}, {s.p}, {.retain_graph = true}), whole);
  s.opt.zero_grad();
  TEXT(scaler.scale(scaler.scale(loss)).backward(again), "backward: the loss was scaled twice; call scaler.scale(loss) once");
  TEXT(scaler.scale(scaler.scale(loss) * 2 + loss).backward(again), "backward: the loss was scaled twice; call scaler.scale(loss) once");
  s.opt.zero_grad();
  // Where they do not meet, each parameter knows its own.
  (scaler.scale(loss) + apart).backward(again);
  CHECK_NOTHROW(scaler.step(s.opt));
  CHECK_THROWS_WITH(scaler.step(other.opt), Catch::Contains("is not scaled"));
  CHECK(other.p.grad().to_vector<float>() == std::vector<float>{1, 1});
  scaler.update();
  // Losses that are scaled one by one may be summed afterwards.
  s.opt.zero_grad();
  (scaler.scale((s.p * 1).sum()) * .5 + scaler.scale((s.p * 2).sum())).backward();
  CHECK(s.p.grad().to_vector<float>() == std::vector<float>{10, 10});
}

TEST_CASE("a scaler that was moved from says so") {
  Single s;
  GradScaler from({.init_scale = 4});
  backward_with(from, s.p, 1);
  StateDict state = from.state_dict().clone();
  GradScaler to = std::move(from);
  const char* text = "GradScaler: this scaler was moved from; use the one that it was moved to";
  TEXT(from.scale(ones({})), text);
  TEXT(from.scale_tensor(), text);
  TEXT(from.inverse_scale(), text);
  TEXT(from.unscale_(s.opt), text);
  TEXT(from.step(s.opt), text);
  TEXT(from.update(), text);
  TEXT(from.update(4), text);
  TEXT(from.get_scale(), text);
  TEXT(from.skipped_steps(), text);
  TEXT(from.state_dict(), text);
  TEXT(from.load_state_dict(state), text);
  TEXT(from.enabled(), text);
  CHECK_NOTHROW(to.step(s.opt));  // gradients know it
  to.update();
  CHECK(s.p.to_vector<float>() == std::vector<float>{0, 0});
}

TEST_CASE("a parameter that was frozen after backward is stepped as it is without a scaler") {
  Single s;
  GradScaler scaler({.init_scale = 4});
  for (bool unscale : {false, true}) {
    s.opt.zero_grad();
    backward_with(scaler, s.p, 1);
    s.p.requires_grad_(false);
    if (unscale) scaler.unscale_(s.opt);
    scaler.step(s.opt);
    scaler.update();
    s.p.requires_grad_();
  }
  CHECK(s.p.to_vector<float>() == std::vector<float>{-1, -1});
}

TEST_CASE("an inf: the step is skipped bit for bit, the scale halves, an interval later it doubles") {
  for (float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()})
    for (int kind = 0; kind < 3; ++kind)
      for (bool unscale : {false, true}) {
        Net net = net_of(1);
        std::unique_ptr<optim::Optimizer> opt;
        if (kind == 0) opt = std::make_unique<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = .1, .momentum = .9});
        if (kind == 1) opt = std::make_unique<optim::Adam>(net.parameters(), optim::AdamOptions{.lr = .01});
        if (kind == 2) opt = std::make_unique<optim::AdamW>(net.parameters(), optim::AdamWOptions{.lr = .01});
        GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
        Batch batch(2);
        auto iterate = [&](bool poisoned) {
          opt->zero_grad();
          Tensor loss;
          { amp::Autocast region({.dtype = DType::f16}); loss = cross_entropy(net(batch.x), batch.target); }
          scaler.scale(loss).backward();
          if (poisoned) net.b2.grad().slice(0, 2, 3).fill_(bad);  // the last element of the last parameter
          if (unscale) scaler.unscale_(*opt);
          auto outcome = scaler.step(*opt);
          CHECK(outcome.state() == amp::StepOutcome::State::unknown);
          CHECK_THROWS_WITH(outcome.stepped(), "StepOutcome: the outcome is known after scaler.update()");
          scaler.update();
          return outcome;
        };
        CHECK(iterate(false).stepped());
        CHECK(iterate(false).stepped());
        auto before = bits(net.parameters(), *opt);
        auto outcome = iterate(true);
        CHECK((outcome.skipped() && !outcome.stepped()));
        CHECK(bits(net.parameters(), *opt) == before);
        CHECK(scaler.get_scale() == 512);
        CHECK(scaler.skipped_steps() == 1);
        for (int i = 0; i < 3; ++i) {
          CHECK(scaler.get_scale() == 512);
          CHECK(iterate(false).stepped());
        }
        CHECK(scaler.get_scale() == 1024);
        CHECK(bits(net.parameters(), *opt) != before);
        CHECK(scaler.inverse_scale().item() == 1 / 1024.0);
      }
}

TEST_CASE("a skip on the first step leaves an optimizer as it was made") {
  auto run = [](bool skip_first) {
    Net net = net_of(3);
    optim::Adam opt(net.parameters());
    GradScaler scaler({.init_scale = 1024});
    Batch batch(4);
    for (int i = skip_first ? 0 : 1; i < 3; ++i) {
      opt.zero_grad();
      scaler.scale(cross_entropy(net(batch.x), batch.target)).backward();
      if (i == 0) net.w1.grad().fill_(inf);
      scaler.step(opt);
      scaler.update();
    }
    return bits(net.parameters(), opt);
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("scale by scale: growth 2, backoff 1/4, interval 2") {
  Single s;
  GradScaler scaler({.init_scale = 4, .growth_factor = 2, .backoff_factor = .25, .growth_interval = 2});
  std::vector<double> scales, streaks;
  for (float g : {1.f, 1.f, inf, 1.f, 1.f, 1.f}) {
    s.opt.zero_grad();
    backward_with(scaler, s.p, g);
    scaler.step(s.opt);
    scaler.update();
    scales.push_back(scaler.get_scale());
    streaks.push_back(scaler.state_dict().at("streak").item());
  }
  CHECK(scales == std::vector<double>{4, 8, 2, 2, 4, 4});
  CHECK(streaks == std::vector<double>{1, 0, -1, 1, 0, 1});
}

TEST_CASE("a scale neither grows to inf nor shrinks to 0") {
  Single s;
  GradScaler up({.init_scale = 0x1p60, .growth_factor = 16, .growth_interval = 1}), down({.init_scale = 4, .min_scale = 1});
  for (int i = 0; i < 40; ++i) {
    s.opt.zero_grad();
    backward_with(up, s.p, 0);
    up.step(s.opt);
    up.update();
  }
  CHECK(up.get_scale() == 0x1p64);
  GradScaler far({.init_scale = 1e38, .growth_factor = 16, .growth_interval = 1, .max_scale = 3e38});
  s.opt.zero_grad();
  backward_with(far, s.p, 0);
  far.step(s.opt);
  far.update();
  CHECK(std::isfinite(far.get_scale()));
  for (int i = 0; i < 200; ++i) {
    s.opt.zero_grad();
    backward_with(down, s.p, inf);
    down.step(s.opt);
    down.update();
  }
  CHECK(down.get_scale() == 1);
  CHECK(down.skipped_steps() == 200);
  s.opt.zero_grad();
  backward_with(down, s.p, 1);
  CHECK(down.step(s.opt).state() == amp::StepOutcome::State::unknown);
  down.update();
  CHECK(s.p.to_vector<float>() == std::vector<float>{0, 0});
}

TEST_CASE("too many skips in a row are an error") {
  Single s;
  GradScaler scaler({.init_scale = 4, .max_consecutive_skips = 2});
  auto iterate = [&](float g) {
    s.opt.zero_grad();
    backward_with(scaler, s.p, g);
    scaler.step(s.opt);
    scaler.update();
  };
  for (float g : {inf, inf, 1.f, inf, inf, inf}) iterate(g);
  TEXT(iterate(1), "step: 3 steps in a row were skipped because a gradient was not finite, more than max_consecutive_skips = 2; look for inf or NaN in the model, or lower the learning rate");
}

TEST_CASE("an iteration that skips two optimizers is one skip") {
  Single a, b;
  GradScaler scaler({.init_scale = 4, .max_consecutive_skips = 2});
  auto iterate = [&] {
    for (auto* s : {&a, &b}) {
      s->opt.zero_grad();
      backward_with(scaler, s->p, inf);
    }
    scaler.step(a.opt);
    scaler.step(b.opt);
    scaler.update();
  };
  for (int i = 0; i < 3; ++i) iterate();
  CHECK_THROWS_WITH(iterate(), Catch::Contains("3 steps in a row"));
}

TEST_CASE("outcomes are kept for 256 steps") {
  Single s;
  GradScaler scaler({.init_scale = 4});
  std::vector<amp::StepOutcome> outcomes;
  for (int i = 0; i < 300; ++i) {
    s.opt.zero_grad();
    backward_with(scaler, s.p, i % 3 == 0 ? inf : 0);
    outcomes.push_back(scaler.step(s.opt));
    CHECK(outcomes.back().state() == amp::StepOutcome::State::unknown);
    scaler.update();
  }
  for (size_t i = 300 - 256; i < 300; ++i) CHECK(outcomes[i].skipped() == (i % 3 == 0));
  CHECK(outcomes[43].state() == amp::StepOutcome::State::unknown);
  TEXT(outcomes[43].stepped(), "StepOutcome: the step lies more than 256 steps back; ask sooner");
}

TEST_CASE("a state whose scale is no scale is refused, and changes nothing") {
  Single s;
  GradScaler scaler({.init_scale = 4});
  backward_with(scaler, s.p, 1);
  for (double bad : {0., -1., double(inf), std::nan("")}) {
    StateDict state = scaler.state_dict().clone();
    state.find("scale")->fill_(bad);
    CHECK_THROWS_WITH(scaler.load_state_dict(state), Catch::StartsWith("load_state_dict: expected a scale from min_scale to max_scale, ["));
    CHECK(scaler.get_scale() == 4);
  }
}

TEST_CASE("a scale from elsewhere lies within the scaler's limits") {
  Single s;
  GradScaler scaler({.init_scale = 4, .min_scale = 2, .max_scale = 8});
  backward_with(scaler, s.p, 1);
  for (double bad : {1., 16.}) {
    TEXT(scaler.update(bad), text::cat("update: expected a scale from min_scale to max_scale, [2, 8], got ", bad));
    GradScaler other({.init_scale = bad});
    TEXT(scaler.load_state_dict(other.state_dict()), text::cat("load_state_dict: expected a scale from min_scale to max_scale, [2, 8], got ", bad));
    CHECK(scaler.get_scale() == 4);
  }
  CHECK_NOTHROW(scaler.step(s.opt));
  CHECK_NOTHROW(scaler.update(8));
  CHECK(scaler.get_scale() == 8);
}

TEST_CASE("several optimizers: only the one with an inf is skipped") {
  Single a, b, idle;
  GradScaler scaler({.init_scale = 8});
  scaler.scale((a.p * 1).sum() + (b.p * inf).sum()).backward();
  scaler.unscale_(a.opt);
  auto ra = scaler.step(a.opt), rb = scaler.step(b.opt), ri = scaler.step(idle.opt);
  CHECK(ri.state() == amp::StepOutcome::State::no_gradients);
  scaler.update();
  CHECK(ra.stepped());
  CHECK(rb.skipped());
  CHECK(a.p.to_vector<float>() == std::vector<float>{0, 0});
  CHECK(b.p.to_vector<float>() == std::vector<float>{1, 1});
  CHECK(scaler.get_scale() == 4);
  CHECK(scaler.skipped_steps() == 1);
  // An optimizer that was moved is the same.
  a.opt.zero_grad();
  backward_with(scaler, a.p, 1);
  scaler.unscale_(a.opt);
  optim::SGD moved = std::move(a.opt);
  TEXT(scaler.unscale_(moved), "unscale_: already called for SGD since the last update(); call update() once, after all steps");
}

TEST_CASE("a scale of the program's own settles the iteration") {
  Single s;
  GradScaler scaler({.init_scale = 8, .growth_interval = 3});
  backward_with(scaler, s.p, inf);
  auto outcome = scaler.step(s.opt);
  scaler.update(32);
  CHECK(outcome.skipped());
  CHECK(scaler.get_scale() == 32);
  CHECK(scaler.inverse_scale().item() == 1 / 32.0);
  s.opt.zero_grad();
  backward_with(scaler, s.p, 1);
  outcome = scaler.step(s.opt);
  scaler.update();
  CHECK(outcome.stepped());
  CHECK(s.p.to_vector<float>() == std::vector<float>{0, 0});
}

TEST_CASE("clipping on the way equals unscale_, clip, step") {
  auto run = [](int how) {
    Net net = net_of(5);
    optim::SGD opt(net.parameters(), {.lr = .1, .momentum = .9});
    GradScaler scaler({.init_scale = 1024});
    Batch batch(6);
    for (int i = 0; i < 4; ++i) {
      opt.zero_grad();
      scaler.scale(cross_entropy(net(batch.x), batch.target)).backward();
      if (how == 1) {
        scaler.unscale_(opt);
        optim::clip_grad_norm_(net.parameters(), .5);
        scaler.step(opt);
      } else if (how == 2) {
        scaler.unscale_(opt);
        scaler.step(opt, {.clip_norm = .5});
      } else scaler.step(opt, {.clip_norm = .5});
      scaler.update();
    }
    return net.w1.to_vector<double>();
  };
  auto a = run(0), b = run(1), c = run(2);
  for (size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i] == Approx(b[i]).epsilon(1e-5).margin(1e-6));
    CHECK(c[i] == Approx(b[i]).epsilon(1e-5).margin(1e-6));
  }
  // A norm below the limit changes nothing.
  Single s;
  GradScaler scaler;
  backward_with(scaler, s.p, .25f);
  scaler.step(s.opt, {.clip_norm = 1});
  scaler.update();
  CHECK(s.p.to_vector<float>() == std::vector<float>{.75f, .75f});
}

TEST_CASE("scaling by powers of two changes no bit, nor does unscale_, nor a disabled scaler") {
  enum How { plain, disabled, scaled, unscaled };
  for (int kind = 0; kind < 3; ++kind) {
    std::vector<std::vector<std::vector<double>>> results;
    for (How how : {plain, disabled, scaled, unscaled}) {
      Net net = net_of(7);
      std::unique_ptr<optim::Optimizer> opt;
      if (kind == 0) opt = std::make_unique<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = .1, .momentum = .9, .weight_decay = .01, .nesterov = true});
      if (kind == 1) opt = std::make_unique<optim::Adam>(net.parameters(), optim::AdamOptions{.lr = .01});
      if (kind == 2) opt = std::make_unique<optim::AdamW>(net.parameters(), optim::AdamWOptions{.lr = .01});
      GradScaler scaler({.init_scale = 1024, .growth_interval = 4, .enabled = how != disabled});
      Batch batch(8);
      for (int i = 0; i < 10; ++i) {
        opt->zero_grad();
        for (int micro = 0; micro < 2; ++micro) {
          Tensor loss = cross_entropy(net(batch.x), batch.target) * .5;
          (how == plain ? loss : scaler.scale(loss)).backward();
        }
        if (how == unscaled) scaler.unscale_(*opt);
        if (how == plain) opt->step();
        else {
          scaler.step(*opt);
          scaler.update();
        }
      }
      results.push_back(bits(net.parameters(), *opt));
    }
    for (auto& r : results) CHECK((r == results[0]));
  }
}

TEST_CASE("a disabled scaler does nothing of its own") {
  Single s;
  GradScaler off({.enabled = false});
  Tensor loss = (s.p * 1).sum();
  CHECK(off.scale(loss).body() == loss.body());
  CHECK(off.get_scale() == 1);
  CHECK(off.state_dict().size() == 0);
  loss.backward();
  off.unscale_(s.opt);
  auto outcome = off.step(s.opt);
  CHECK(outcome.stepped());
  off.update();
  CHECK(s.p.to_vector<float>() == std::vector<float>{0, 0});
  GradScaler on;
  TEXT(on.load_state_dict(off.state_dict()), "GradScaler: the state is empty; it probably comes from a disabled scaler");
}

TEST_CASE("a scaler's state goes round, also in the middle of an interval and before the first scale") {
  Single s;
  GradScaler a({.init_scale = 8, .growth_interval = 3});
  CHECK(a.state_dict().at("scale").item() == 8);
  auto iterate = [&](GradScaler& g, float v) {
    s.opt.zero_grad();
    backward_with(g, s.p, v);
    g.step(s.opt);
    g.update();
  };
  iterate(a, inf);
  iterate(a, 1);
  iterate(a, 1);
  StateDict saved = a.state_dict().clone();
  GradScaler b({.init_scale = 8, .growth_interval = 3});
  b.load_state_dict(saved);
  CHECK((b.get_scale() == 4 && b.skipped_steps() == 1));
  iterate(b, 1);
  CHECK(b.get_scale() == 8);
  iterate(a, 1);
  CHECK(a.get_scale() == 8);
  a.load_state_dict(saved);
  CHECK((a.get_scale() == 4 && a.inverse_scale().item() == .25));
}

TEST_CASE("bf16 losses are scaled in f32, f64 ones in f64") {
  GradScaler scaler;
  CHECK(scaler.scale(ones({}, {.dtype = DType::bf16})).dtype() == DType::f32);
  CHECK(scaler.scale(ones({}, {.dtype = DType::f16})).item() == 65536);
  CHECK(scaler.scale(ones({}, {.dtype = DType::f64})).dtype() == DType::f64);
  CHECK(scaler.scale({ones({}), ones({}) * 2})[1].item() == 131072);
  amp::Autocast region({.dtype = DType::f16});
  CHECK(scaler.scale(ones({}, {.dtype = DType::f16})).item() == 65536);
}

TEST_CASE("a step waits for nothing") {
  Net net = net_of(9);
  Batch batch(10);
  optim::AdamW opt(net.parameters());
  GradScaler scaler({.max_consecutive_skips = 5});
  amp::StepOutcome outcome;
  for (int i = 0; i < 4; ++i) {
    ForbidSync forbidden;
    opt.zero_grad();
    Tensor loss;
    { amp::Autocast region; loss = cross_entropy(net(batch.x), batch.target); }
    scaler.scale(loss).backward();
    scaler.unscale_(opt);
    optim::clip_grad_norm_(net.parameters(), 1);
    outcome = scaler.step(opt);
    opt.set_lr(1e-3);
    scaler.update();
    if (i == 2) scaler.update(2048);
  }
  CHECK(outcome.stepped());
}

TEST_CASE("gradients that come after unscale_ are refused by step") {
  Tensor p1 = ones({2}, {.requires_grad = true}), p2 = ones({2}, {.requires_grad = true});
  optim::SGD opt({p1, p2}, {.lr = 0.1});
  amp::GradScaler scaler;
  scaler.scale((p1 * 2).sum()).backward();
  scaler.unscale_(opt);
  scaler.scale((p2 * 2).sum()).backward();
  REQUIRE_THROWS_WITH(scaler.step(opt), Catch::Contains("parameter 1") && Catch::Contains("before unscale_"));
}

TEST_CASE("loading an optimizer's first state forgets its moments") {
  Tensor p = ones({2}, {.requires_grad = true});
  optim::Adam opt({p}, {.lr = 0.1});
  StateDict fresh = opt.state_dict().clone();
  auto step = [&] {
    opt.zero_grad();
    (p * p).sum().backward();
    opt.step();
    return p.to_vector<float>();
  };
  Tensor start = p.detach().clone();
  auto first = step();
  step();
  { NoGrad off; p.copy_(start); }
  opt.load_state_dict(fresh);
  REQUIRE(step() == first);
}

TEST_CASE("a disabled scaler's scale is 1 for those who multiply by it themselves") {
  amp::GradScaler off({.enabled = false});
  CHECK(off.scale_tensor().item<float>() == 1);
  CHECK(off.inverse_scale().item<float>() == 1);
  CHECK(off.get_scale() == 1);
}

TEST_CASE("an optimizer by itself takes no step on scaled gradients") {
  Tensor p = ones({2}, {.requires_grad = true});
  optim::SGD opt({p}, {.lr = 1});
  amp::GradScaler scaler({.init_scale = 64}), off({.enabled = false});
  scaler.scale((p * 0.25).sum()).backward();
  const char* text = "SGD: the gradient of parameter 0 [2] (f32) is scaled by a GradScaler; let scaler.step(opt) take the step, or call scaler.unscale_(opt) first";
  CHECK_THROWS_WITH(opt.step(), text);
  CHECK_THROWS_WITH(off.step(opt), text);
  CHECK(p.detach().to_vector<float>() == std::vector<float>{1, 1});
  scaler.unscale_(opt);
  opt.step();
  CHECK(p.detach().to_vector<float>() == std::vector<float>{.75f, .75f});
}
