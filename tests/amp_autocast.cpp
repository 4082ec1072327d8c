// Autocast regions and the 16-bit copies of weights: every forward sees the weights as they are now.
#include <algorithm>
#include <atomic>
#include <sstream>
#include <thread>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;
using amp::Autocast;
using Floats = std::vector<float>;

namespace {

Floats of(const Tensor& t) { return t.to_vector<float>(); }
constexpr DType f16 = DType::f16, bf16 = DType::bf16, f32 = DType::f32;

struct Net {
  Tensor w1 = randn({16, 8}, {.requires_grad = true}), b1 = randn({16}, {.requires_grad = true});
  Tensor w2 = randn({4, 16}, {.requires_grad = true}), b2 = randn({4}, {.requires_grad = true});
  std::vector<Tensor> parameters() const { return {w1, b1, w2, b2}; }
  Tensor operator()(const Tensor& x) const { return linear(linear_relu(x, w1, b1), w2, b2); }
  // Without shadow copies.
  Tensor by_hand(const Tensor& x, DType t) const {
    auto c = [t](const Tensor& p) { return p.detach().to(t); };
    return linear(linear_relu(x.to(t), c(w1), c(b1)), c(w2), c(b2));
  }
  Tensor in(DType t, const Tensor& x) const {
    Autocast region({.dtype = t});
    return (*this)(x);
  }
};
void check_current(const Net& net, const Tensor& x, DType t) {
  NoGrad off;
  CHECK(of(net.in(t, x)) == of(net.by_hand(x, t)));
}

}  // namespace

// ---- regions

TEST_CASE("regions nest, and inherit what they do not give") {
  CHECK_FALSE(amp::is_autocast_enabled());
  {
    Autocast outer;
    CHECK(amp::is_autocast_enabled());
    CHECK(amp::autocast_dtype() == bf16);
    CHECK(amp::autocast_dtype(DeviceType::cuda) == f16);
    {
      Autocast inner({.dtype = f16});
      CHECK(amp::autocast_dtype() == f16);
      {
        Autocast island({.enabled = false});
        CHECK_FALSE(amp::is_autocast_enabled());
        CHECK(matmul(ones({2, 2}), ones({2, 2})).dtype() == f32);
        {
          Autocast again;
          CHECK(amp::is_autocast_enabled());
          CHECK(amp::autocast_dtype() == f16);
        }
        CHECK_FALSE(amp::is_autocast_enabled());
      }
      CHECK(matmul(ones({2, 2}), ones({2, 2})).dtype() == f16);
    }
    CHECK(amp::autocast_dtype() == bf16);
    CHECK(matmul(ones({2, 2}), ones({2, 2})).dtype() == bf16);
  }
  CHECK_FALSE(amp::is_autocast_enabled());
  CHECK(matmul(ones({2, 2}), ones({2, 2})).dtype() == f32);
}

TEST_CASE("an exception ends a region as a scope does") {
  try {
    Autocast region({.dtype = f16});
    matmul(ones({2, 2}), ones({3, 2}));
  } catch (const Error&) {
  }
  CHECK_FALSE(amp::is_autocast_enabled());
  CHECK(recording());
  CHECK_THROWS_WITH(Autocast({.dtype = f32}), "Autocast: expected dtype f16 or bf16, got f32; for an f32 region say {.enabled = false}");
  tests::count("error_texts");
  CHECK_FALSE(amp::is_autocast_enabled());
}

TEST_CASE("a region of one device type leaves the others alone") {
  Autocast region({.dtype = f16, .device = DeviceType::cuda});
  CHECK(amp::is_autocast_enabled(DeviceType::cuda));
  CHECK_FALSE(amp::is_autocast_enabled(DeviceType::cpu));
  CHECK(matmul(ones({2, 2}), ones({2, 2})).dtype() == f32);
}

TEST_CASE("a region belongs to its thread; autocasted travels") {
  Tensor x = ones({2, 2});
  DType inside = f16, travelled = f32;
  Autocast region({.dtype = f16});
  auto f = amp::autocasted([](const Tensor& a) { return matmul(a, a).dtype(); }, {.dtype = bf16});
  std::thread([&] {
    inside = matmul(x, x).dtype();
    travelled = f(x);
  }).join();
  CHECK(inside == f32);
  CHECK(travelled == bf16);
  CHECK(f(x) == bf16);
  CHECK(matmul(x, x).dtype() == f16);
}

TEST_CASE("regions that end out of order leave the right one in force") {
  auto now = [] { return amp::is_autocast_enabled() ? amp::autocast_dtype() : f32; };
  int wrong = 0;
  std::vector<int> order{0, 1, 2, 3};
  do {
    std::vector<std::unique_ptr<Autocast>> regions;
    std::vector<DType> dtypes{f16, bf16, f32, f16};  // f32: an island
    for (DType t : dtypes)
      regions.push_back(t == f32 ? std::make_unique<Autocast>(amp::AutocastOptions{.enabled = false}) : std::make_unique<Autocast>(amp::AutocastOptions{.dtype = t}));
    for (int ended : order) {
      regions[static_cast<size_t>(ended)].reset();
      DType expected = f32;
      for (size_t i = 0; i < regions.size(); ++i) if (regions[i]) expected = dtypes[i];
      wrong += now() != expected;
    }
  } while (std::next_permutation(order.begin(), order.end()));
  CHECK(wrong == 0);
  CHECK(now() == f32);
  auto region = std::make_unique<Autocast>(amp::AutocastOptions{.dtype = f16});
  std::thread([&] {
    Autocast own({.dtype = bf16});
    region.reset();  // another thread's
    CHECK(now() == bf16);
  }).join();
  { Autocast next({.dtype = bf16}); }
  CHECK(now() == f32);
}

TEST_CASE("what an operator writes is not cast, whatever its policy") {
  amp::Policy p = amp::default_policy();
  p.set("batch_norm", Cast::lower);
  Tensor x = randn({8, 3}), mean = zeros({3}), var = ones({3});
  Autocast region({.dtype = bf16, .policy = p});
  Tensor y = batch_norm(x, ones({3}), zeros({3}), mean, var, {.training = true});
  CHECK(y.dtype() == bf16);
  CHECK(abs(mean).sum().item() > 0);
}

TEST_CASE("options of a region are checked") {
  CHECK_THROWS_WITH(Autocast({.device = static_cast<DeviceType>(9)}), "Autocast: expected device cpu or cuda, got 9");
  CHECK_THROWS_WITH(Autocast({.dtype = static_cast<DType>(99)}), "Autocast: expected dtype f16 or bf16, got no dtype; for an f32 region say {.enabled = false}");
  std::function<Tensor(const Tensor&)> nothing;
  CHECK_THROWS_WITH(amp::autocasted(nothing), "autocasted: the function is empty");
  CHECK_FALSE(amp::is_autocast_enabled());
  tests::count("error_texts", 3);
}

TEST_CASE("a policy is a value that a region keeps") {
  Tensor x = ones({2, 2});
  amp::Policy p;
  p.set("matmul", Cast::full).set("exp", Cast::lower);
  CHECK(p.get("matmul") == Cast::full);
  CHECK(p.get("linear") == Cast::lower);
  CHECK(amp::default_policy().get("matmul") == Cast::lower);
  CHECK_THROWS_WITH(p.set("no_such_operator", Cast::full), "Policy::set: there is no operator named 'no_such_operator'");
  CHECK_THROWS_WITH(p.get("no_such_operator"), "Policy::get: there is no operator named 'no_such_operator'");
  for (const char* op : {"cast", "clone", "copy", "transfer", "view", "slice", "adam", "sgd", "unscale", "check_finite", "scaler_update", "normal", "fill"}) {
    CHECK_THROWS_WITH(p.set(op, Cast::lower), Catch::StartsWith(std::string("Policy::set: '") + op + "' is an operator that autocast does not touch"));
    CHECK_NOTHROW(p.set(op, Cast::keep));
  }
  CHECK_THROWS_WITH(p.set("relu", Cast::unset), "Policy::set: expected a policy for 'relu', got Cast::unset");
  CHECK_THROWS_WITH(p.set("relu", static_cast<Cast>(77)), "Policy::set: expected a policy for 'relu', got 77");
  tests::count("error_texts", 17);
  {
    Autocast region({.dtype = bf16, .policy = p});
    p.set("matmul", Cast::keep);  // too late for the region
    CHECK(matmul(x.to(bf16), x.to(bf16)).dtype() == f32);
    CHECK(exp(x).dtype() == bf16);
    CHECK(linear(x, x).dtype() == bf16);
    Autocast inner;
    CHECK(exp(x).dtype() == bf16);
  }
  Autocast region({.dtype = bf16});
  CHECK(exp(x.to(bf16)).dtype() == f32);
}

TEST_CASE("a banned operator names its cure, for f16 only") {
  static OpDef risky = {.name = "tests_risky",
                        .doc = "x",
                        .cast = Cast::banned,
                        .infer = [](const Call& c) -> Metas { return {Meta(c.in[0].shape(), c.in[0].dtype(), c.in[0].device())}; },
                        .ban = "tests_safe",
                        .kernel = {[](const Call& c, std::span<Tensor> out) { out[0].copy_(c.in[0]); }}};
  Tensor x = ones({2});
  CHECK_NOTHROW(call(risky, {x}));
  { Autocast region({.dtype = bf16}); CHECK_NOTHROW(call(risky, {x})); }
  Autocast region({.dtype = f16});
  CHECK_THROWS_WITH(call(risky, {x}), "tests_risky: unsafe under f16 autocast; use tests_safe, or run it in f32 inside amp::Autocast({.enabled = false})");
  tests::count("error_texts");
  Autocast island({.enabled = false});
  CHECK_NOTHROW(call(risky, {x}));
}

TEST_CASE("a strict region reports what climbs back to f32") {
  Tensor low = ones({2, 3}, {.dtype = bf16}), high = ones({2, 3});
  {
    Autocast region({.dtype = bf16});
    CHECK(cat({low, high}).dtype() == f32);
  }
  Autocast region({.dtype = bf16, .strict = true});
  CHECK_THROWS_WITH(cat({low, high}), "cat: runs in f32 inside a strict bf16 region because an input [2, 3] (f32) is f32; cast it, or take the operator out of the region");
  tests::count("error_texts");
  CHECK(cat({low, low}).dtype() == bf16);
}

TEST_CASE("activations stay in 16 bits: bias, numbers and 0-d tensors do not raise them") {
  manual_seed(1);
  Net net;
  Autocast region({.dtype = bf16});
  Tensor h = linear(randn({4, 8}), net.w1, net.b1);
  CHECK(h.dtype() == bf16);
  CHECK((h * 2.0).dtype() == bf16);
  CHECK((h * tensor(2.f)).dtype() == bf16);
  CHECK(relu(h).dtype() == bf16);
  CHECK(softmax(h, 1).dtype() == bf16);
  CHECK(log_softmax(h, 1).dtype() == f32);
  CHECK(cross_entropy(h, zeros({4}, {.dtype = DType::i64})).dtype() == f32);
  CHECK(linear(relu(h), net.w2, net.b2).dtype() == bf16);
}

// ---- gradients

TEST_CASE("backward runs in forward's dtypes, whatever region is around it") {
  manual_seed(2);
  Net net;
  Tensor x = randn({4, 8});
  auto gradients = [&](int where) {
    for (auto& p : net.parameters()) p.set_grad({});
    Tensor loss = net.in(bf16, x).to(f32).pow(2).sum();
    if (where == 0) loss.backward();
    if (where == 1) { Autocast region({.dtype = f16}); loss.backward(); }
    if (where == 2) std::thread([&] { Autocast region({.dtype = f16}); loss.backward(); }).join();
    std::vector<Floats> g;
    for (auto& p : net.parameters()) {
      CHECK(p.grad().dtype() == f32);
      g.push_back(of(p.grad()));
    }
    return g;
  };
  auto g = gradients(0);
  CHECK(gradients(1) == g);
  CHECK(gradients(2) == g);
}

TEST_CASE("a gradient penalty under autocast agrees with differences") {
  manual_seed(3);
  Tensor w = randn({3, 5}), x = randn({4, 5});
  auto penalty = [&](const Tensor& weight, bool low) {
    Tensor v = weight.detach().requires_grad_();
    Tensor y;
    { Autocast region({.dtype = bf16, .enabled = low}); y = linear(x, v).to(f32).pow(2).sum() * .01; }
    auto [g] = grad({y}, {v}, {.create_graph = true});
    Tensor p = g.pow(2).sum();
    p.backward();
    return std::pair{p.item(), of(v.grad())};
  };
  auto [value, exact] = penalty(w, false);
  auto [low_value, low] = penalty(w, true);
  CHECK(low_value == Approx(value).epsilon(.05));
  double largest = 0;
  for (float e : exact) largest = std::max(largest, double(std::abs(e)));
  for (size_t i = 0; i < exact.size(); ++i) CHECK(std::abs(low[i] - exact[i]) < .05 * largest);
}

// ---- shadow copies

TEST_CASE("weights are cast once: no cast of a weight runs in a step after the first") {
  manual_seed(4);
  for (DType t : {bf16, f16})
    for (bool adam : {false, true}) {
      Net net;
      Tensor x = randn({4, 8}).to(t), target = zeros({4}, {.dtype = DType::i64});
      std::unique_ptr<optim::Optimizer> opt;
      if (adam) opt = std::make_unique<optim::Adam>(net.parameters());
      else opt = std::make_unique<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = .1, .momentum = .9});
      amp::GradScaler scaler({.init_scale = 256});
      for (int step = 0; step < 5; ++step) {
        amp::Trace trace = amp::trace([&] {
          opt->zero_grad();
          Tensor loss;
          { Autocast region({.dtype = t}); loss = cross_entropy(net(x), target); }
          scaler.scale(loss).backward();
          scaler.step(*opt);
          scaler.update();
        });
        INFO(trace);
        CHECK(trace.casts() == (step == 0 ? 4 : 0));
        CHECK(trace.count("linear") == 1);
        check_current(net, x, t);
      }
    }
}

TEST_CASE("evaluating in another dtype between steps costs its own casts only") {
  manual_seed(5);
  Net net;
  Tensor x = randn({4, 8}).to(f16), target = zeros({4}, {.dtype = DType::i64});
  optim::SGD opt(net.parameters(), {.lr = .1});
  auto train = [&] {
    return amp::trace([&] {
      opt.zero_grad();
      cross_entropy(net.in(f16, x), target).backward();
      opt.step();
    });
  };
  { NoGrad off; net.in(bf16, x.to(f32)); }  // the first copy is the other dtype's
  train();
  for (int i = 0; i < 3; ++i) {
    CHECK(train().casts() == 0);
    check_current(net, x.to(f32), bf16);
    check_current(net, x, f16);
    CHECK(train().casts() == 0);
  }
}

TEST_CASE("every forward sees the weights of now: copy_, load, swap, set_, skipped steps") {
  manual_seed(6);
  Net net, ema;
  Tensor x = randn({4, 8}), target = zeros({4}, {.dtype = DType::i64});
  optim::SGD opt(net.parameters(), {.lr = .1, .momentum = .9});
  amp::GradScaler scaler({.init_scale = 256});
  auto step = [&](bool overflow) {
    opt.zero_grad();
    scaler.scale(cross_entropy(net.in(f16, x), target)).backward();
    if (overflow) net.w2.grad().fill_(std::numeric_limits<float>::infinity());
    scaler.step(opt);
    scaler.update();
  };
  auto current = [&] {
    check_current(net, x, f16);
    check_current(net, x, bf16);
  };
  step(false);
  current();
  { NoGrad off; net.w1.copy_(randn({16, 8})); }
  current();
  step(true);
  current();
  // Written between forward and a step that is skipped: the copy is stale, and stays so.
  opt.zero_grad();
  scaler.scale(cross_entropy(net.in(f16, x), target)).backward();
  { NoGrad off; net.w1.mul_(3); }
  net.w2.grad().fill_(std::numeric_limits<float>::quiet_NaN());
  scaler.step(opt);
  scaler.update();
  current();
  // The same, and a step that runs.
  opt.zero_grad();
  scaler.scale(cross_entropy(net.in(f16, x), target)).backward();
  { NoGrad off; net.w1.mul_(.5); }
  scaler.step(opt);
  scaler.update();
  current();
  // Averaged weights swapped in, and out again.
  std::vector<Tensor> kept;
  {
    NoGrad off;
    auto now = net.parameters(), average = ema.parameters();
    for (size_t i = 0; i < now.size(); ++i) {
      kept.push_back(now[i].detach().clone());
      now[i].copy_(average[i]);
    }
  }
  current();
  {
    NoGrad off;
    auto now = net.parameters();
    for (size_t i = 0; i < now.size(); ++i) now[i].copy_(kept[i]);
  }
  current();
  net.w1.set_(randn({16, 8}));
  net.w1.requires_grad_();
  current();
  // Through a view, and through the raw pointer with bump_version().
  { NoGrad off; net.w1[0].fill_(2); }
  current();
  net.w2.data<float>()[0] = 7;
  net.w2.bump_version();
  current();
  step(false);
  current();
}

TEST_CASE("a copy made under NoGrad serves training") {
  manual_seed(7);
  Tensor x = randn({4, 8});
  auto gradients = [&](bool evaluate_first) {
    manual_seed(8);
    Net net;
    Autocast region({.dtype = bf16});
    if (evaluate_first) { NoGrad off; net(x); }
    net(x).to(f32).sum().backward();
    return of(net.w1.grad());
  };
  CHECK(gradients(true) == gradients(false));
}

TEST_CASE("a graph that needs the old copy is refused once it is rewritten") {
  manual_seed(9);
  Net net;
  Tensor x = randn({4, 8}, {.requires_grad = true});
  Tensor before = net.in(f16, x).to(f32).sum();
  { NoGrad off; net.w1.fill_(1); }
  net.in(f16, x);  // rewrites the copy
  CHECK_THROWS_WITH(before.backward(), Catch::Contains("was saved for backward and has been written since"));
}

TEST_CASE("memory does not grow with calls") {
  manual_seed(10);
  Net net;
  Tensor x = randn({4, 8});
  Autocast region({.dtype = bf16});
  NoGrad off;
  auto used = [&] {
    net(x);
    matmul(x, net.w1.t());  // a view of a weight is never kept
    return memory_stats(Device::cpu()).allocated;
  };
  used();
  int64_t second = used();  // which may have packed weights for those to come
  for (int i = 0; i < 100; ++i) CHECK(used() == second);
}

TEST_CASE("without the cache nothing is kept, inside regions within too") {
  manual_seed(11);
  Net net;
  Tensor x = randn({4, 8}).to(bf16);
  int64_t before = memory_stats(Device::cpu()).allocated;
  Autocast region({.dtype = bf16, .cache = false});
  amp::Trace t = amp::trace([&] {
    NoGrad off;
    net(x);
    net(x);
    Autocast inner;
    net(x);
  });
  CHECK(t.casts() == 12);
  CHECK(memory_stats(Device::cpu()).allocated == before);
}

TEST_CASE("threads may use a weight for the first time at once") {
  manual_seed(12);
  for (int round = 0; round < 20; ++round) {
    Net net;
    Tensor x = randn({4, 8});
    Floats expected = of(net.by_hand(x, bf16));
    std::atomic<int> wrong = 0;
    std::vector<std::thread> all;
    for (int t = 0; t < 4; ++t) all.emplace_back([&] { wrong += of(net.in(bf16, x)) != expected; });
    for (auto& t : all) t.join();
    CHECK(wrong == 0);
  }
}

// ---- traces

TEST_CASE("a trace shows what ran in which dtype, and what was left alone") {
  Tensor x = ones({2, 3}), w = ones({4, 3}, {.requires_grad = true});
  amp::Trace t = amp::trace([&] {
    Autocast region({.dtype = bf16});
    relu(linear(x, w)).to(f32).sum().backward();
  });
  std::ostringstream os;
  os << t;
  INFO(os.str());
  CHECK(os.str().find("linear  bf16[2, 3], bf16[4, 3] -> bf16[2, 4]\n") != std::string::npos);
  CHECK(os.str().find("relu  bf16[2, 4] -> bf16[2, 4]  (left alone)\n") != std::string::npos);
  CHECK(t.count("linear_grad") == 1);  // the weight's gradient: backward is seen too
  bool found = false;
  for (auto& l : t.lines)
    if (l.op == "linear_grad") found = l.out[1].dtype == f32 && l.in[0].dtype == bf16;
  CHECK(found);
  CHECK(std::count_if(t.lines.begin(), t.lines.end(), [](auto& l) { return l.in_backward; }) >= 3);
  CHECK_FALSE(thread_state().on(Layer::profile));
}

TEST_CASE("a trace shows what islands of f32 cost in memory") {
  Tensor x = ones({4, 8}, {.dtype = bf16, .requires_grad = true});
  amp::Trace t = amp::trace([&] {
    Autocast region({.dtype = bf16});
    Tensor h = relu(x);
    nn::PrecisionIsland stable{nn::Lambda([](const Tensor& v) { return v * 2; }), f32};
    (stable(h).mean() + exp(h).mean()).backward();
  });
  CHECK(t.widened_bytes() == 2 * 4 * 8 * 4);  // the island's cast, and that of exp; backward does not count, nor do numbers
  std::ostringstream os;
  os << t;
  CHECK_THAT(os.str(), Catch::Contains("cast  bf16[4, 8] -> f32[4, 8]  (f32 out of 16 bits, 128 bytes)\n") && Catch::Contains("  (backward)\n") &&
                         Catch::Contains(" casts, 256 bytes of f32 out of 16 bits\n"));
}
