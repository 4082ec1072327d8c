// What users of other frameworks reported about backward and threads under autocast. Each test is named by its entry and by what is right.
#include <atomic>
#include <thread>

#include "halftone/tests/reports.h"

using namespace halftone;
using namespace halftone::tests;
using amp::Autocast;

namespace {

// Where autocast stands for a type of device.
struct Standing {
  bool enabled = false;
  DType dtype = f64;
  bool operator==(const Standing&) const = default;
  static Standing now(DeviceType type) { return {amp::is_autocast_enabled(type), amp::autocast_dtype(type)}; }
};

// y = a b, with a product in its backward that would be cast if a region were on.
Standing standing_in_backward;
DType dtype_in_backward = f64;
OpDef product = {.name = "tests_product",
                 .doc = "the product of two matrices",
                 .cast = Cast::lower,
                 .infer = [](const Call& c) -> Metas { return {Meta({c.in[0].size(0), c.in[1].size(1)}, c.in[0].dtype(), c.in[0].device())}; },
                 .saves = {.in = 3, .out = 0},
                 .backward = [](const Rule& r) -> Tensors {
                   standing_in_backward = Standing::now(r.in().device().type);
                   Tensor a = matmul(r.grad(), r.in(1).t()), b = matmul(r.in(0).t(), r.grad());
                   dtype_in_backward = a.dtype();
                   return {a, b};
                 },
                 .kernel = {[](const Call& c, std::span<Tensor> out) { out[0].copy_(matmul(c.in[0], c.in[1])); },
                            [](const Call& c, std::span<Tensor> out) { out[0].copy_(matmul(c.in[0], c.in[1])); }}};
}  // namespace

TEST_CASE("report_6: backward has the same bits on any thread, inside and outside of any region") {
  tests::report("pytorch#125186");
  everywhere([](Device d, DType t) {
    auto run = [&](int where, bool thread) {
      manual_seed(6);
      Tensor a = randn({5, 7}, {.device = d, .requires_grad = true}), b = randn({7, 3}, {.device = d, .requires_grad = true}), loss;
      Net net(d);
      Tensor x = randn({4, 6}, {.device = d});
      {
        Autocast region({.dtype = t});
        loss = call(product, {a, b}).to(f32).pow(2).sum() + softmax(net(x), 1).to(f32).pow(2).sum();
        if (where == 1 && !thread) loss.backward();
      }
      auto backward = [&] {
        std::optional<Autocast> region;
        if (where == 1) region.emplace(amp::AutocastOptions{.dtype = t});
        if (where == 2) region.emplace(amp::AutocastOptions{.dtype = other_than(t)});
        if (where == 3) region.emplace(amp::AutocastOptions{.enabled = false});
        loss.backward();
      };
      if (thread) std::thread(backward).join();
      else if (where != 1) backward();
      CHECK_FALSE(standing_in_backward.enabled);
      CHECK(dtype_in_backward == t);
      return gradients({a, b, net.w1, net.b1, net.w2, net.b2});
    };
    auto expected = run(0, false);
    for (auto& g : expected) CHECK(g.dtype() == f32);
    for (int where = 0; where < 4; ++where)
      for (bool thread : {false, true}) CHECK(same_bits(run(where, thread), expected));
  });
}

namespace {
Standing standing_forward, standing_backward;
DType product_backward = f64, seen_argument = f64;
int64_t casts_backward = 0;
struct Product : Function<Product> {
  static Tensor forward(Context& ctx, const Tensor& x, const Tensor& w) {
    standing_forward = Standing::now(x.device().type);
    ctx.save(x, w);
    return matmul(x, w);
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) {
    auto& [x, w] = ctx.saved<Tensor, Tensor>();
    standing_backward = Standing::now(x.device().type);
    Tensor gx, gw;
    casts_backward = amp::trace([&, x = x, w = w] {
      gx = matmul(g, w.t());
      gw = matmul(x.t(), g);
      matmul(x, w);
      matmul(x, w);
    }).casts();
    product_backward = gx.dtype();
    return {gx.to(x.dtype()), gw.to(w.dtype())};
  }
};
struct InF32 : Function<InF32> {
  static constexpr FunctionCast cast = FunctionCast::f32;
  static Tensor forward(Context& ctx, const Tensor& x, const Tensor& w) {
    standing_forward = Standing::now(x.device().type);
    seen_argument = x.dtype();
    ctx.save(x, w);
    return matmul(x, w);
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) { return Product::backward(ctx, g); }
};
}  // namespace

TEST_CASE("report_7: a custom function's backward has its forward's autocast, dtype, cache and policy included") {
  tests::report("pytorch#87979");
  everywhere([](Device d, DType t) {
    Tensor x = randn({4, 3}, {.device = d, .requires_grad = true}), w = randn({3, 5}, {.device = d, .requires_grad = true});
    const Standing on{true, t};
    auto backward_in = [&](const Tensor& y, int where) {
      std::optional<Autocast> region;
      if (where == 1) region.emplace(amp::AutocastOptions{.dtype = other_than(t)});
      if (where == 2) region.emplace(amp::AutocastOptions{.enabled = false});
      if (where == 3) std::thread([&] { y.to(f32).sum().backward(); }).join();
      else y.to(f32).sum().backward();
    };
    for (int where = 0; where < 4; ++where)
      for (bool cache : {true, false}) {
        INFO("backward at " << where << ", cache " << cache);
        Tensor y;
        { Autocast region({.dtype = t, .cache = cache}); y = Product::apply(x, w); }
        CHECK(y.dtype() == t);
        backward_in(y, where);
        CHECK((standing_forward == on && standing_backward == on));
        CHECK(product_backward == t);
        CHECK(casts_backward == (cache ? 2 : 6));  // with copies, only those of the views that are used once
        CHECK((x.grad().dtype() == f32 && w.grad().dtype() == f32));
        // Outside of a region nothing is cast, wherever backward runs.
        y = Product::apply(x, w);
        CHECK(y.dtype() == f32);
        backward_in(y, where);
        CHECK_FALSE((standing_forward.enabled || standing_backward.enabled));
        CHECK(product_backward == f32);
        // One in f32: its arguments are cast where autocast is on, and only there.
        { Autocast region({.dtype = t}); y = InF32::apply(x.to(t), w); }
        CHECK((seen_argument == f32 && y.dtype() == f32 && !standing_forward.enabled));
        backward_in(y, where);
        CHECK((product_backward == f32 && !standing_backward.enabled));
        y = InF32::apply(x.to(t), w.to(t));
        CHECK((seen_argument == t && y.dtype() == t));
        backward_in(y, where);
        CHECK(product_backward == t);
      }
    amp::Policy policy;
    policy.set("matmul", Cast::full);
    Tensor y;
    { Autocast region({.dtype = t, .policy = policy}); y = Product::apply(x, w); }
    CHECK(y.dtype() == f32);
    backward_in(y, 1);
    CHECK(product_backward == f32);
  });
}

TEST_CASE("report_8: a checkpoint is computed again as it was at first: autocast, cache and random numbers") {
  tests::report("pytorch#71169");
  everywhere([](Device d, DType t) {
    // `copies`: 0 none before the segment, 1 made before, 2 made in the other dtype between forward and backward, 3 no cache.
    for (int copies = 0; copies < 4; ++copies)
      for (int where = 0; where < 4; ++where) {
        INFO("copies " << copies << ", backward at " << where);
        auto run = [&](bool checkpointed) {
          Net net(d);
          manual_seed(8);
          Tensor x = randn({9, 6}, {.device = d, .requires_grad = true}), noise = rand({9, 3}, {.device = d}), loss;
          auto segment = [&](const Tensor& in) { return softmax(net(in) * rand({9, 3}, {.device = d}), 1); };
          amp::AutocastOptions options{.dtype = t, .cache = copies != 3};
          amp::GradScaler scaler({.init_scale = 64});
          auto backward = [&] { scaler.scale((loss * noise).sum()).backward(); };
          {
            Autocast region(options);
            if (copies == 1) { NoGrad off; net(x); }
            loss = (checkpointed ? checkpoint(segment, x) : segment(x)).to(f32);
            if (where == 1) backward();
          }
          if (copies == 2) { NoGrad off; Autocast other({.dtype = other_than(t)}); net(x); }
          if (where == 0) backward();
          if (where == 2) { Autocast other({.dtype = other_than(t)}); backward(); }
          if (where == 3) std::thread(backward).join();
          auto all = gradients(net.parameters());
          all.insert(all.end(), {x.grad(), loss.detach(), rand({3}, {.device = d})});
          return all;
        };
        CHECK(same_bits(run(true), run(false)));
      }
  });
}

TEST_CASE("report_46: gradients of what was used at many places are exact sums, the same every time") {
  tests::report("pytorch#51206");
  everywhere([](Device d, DType t) {
    constexpr int64_t n = 5000;
    auto of = [&](const Shape& shape) { return ones(shape, {.dtype = t, .device = d}); };
    auto run = [&](int how) {
      Tensor x = of({1, 7}).requires_grad_();
      Tensor y = how == 0 ? x.expand({n, 7}) : how == 1 ? of({n, 7}) * x : how == 2 ? where(gt(of({n, 7}), 0), x, 0.0) : of({n, 1}) + x;
      y.backward({.gradient = of({n, 7})});
      return x.grad();
    };
    for (int how = 0; how < 4; ++how) {
      INFO(how);
      CHECK(all_are(run(how), rounded(double(n), t)));
    }
    // Not of ones: rounded once, and without an order of arrival.
    manual_seed(46);
    Tensor weights = randn({n, 7}, {.device = d}).to(t);
    auto grad_of = [&] {
      Tensor x = of({7}).requires_grad_();
      (x * weights).backward({.gradient = of({n, 7})});
      return x.grad();
    };
    Tensor g = grad_of(), exact = weights.to(f64).sum(0);
    CHECK(amax(abs(g.to(f64) - exact)).item() <= amax(abs(exact)).item() * (t == f16 ? 0x1p-11 : 0x1p-8) + 1e-3);
    for (int i = 0; i < 5; ++i) CHECK(same_bits(grad_of(), g));
  });
}

// ---- threads and the end

TEST_CASE("report_54: a worker computes as the thread that hands it work") {
  tests::report("pytorch#60540");
  everywhere([](Device d, DType t) {
    Tensor x = ones({2, 2}, {.device = d}), w = ones({2, 2}, {.device = d, .requires_grad = true});
    amp::Policy policy;
    policy.set("exp", Cast::lower);
    for (bool cache : {true, false}) {
      struct Seen { DType product = f64, exponential = f64; int64_t casts = 0; bool recorded = true; } seen[2];
      ThreadState handed;
      {
        Autocast region({.dtype = t, .cache = cache, .policy = policy});
        NoGrad off;
        handed = capture_thread_state();
      }
      std::vector<std::thread> workers;
      for (auto& s : seen)
        workers.emplace_back([&] {
          {
            InstallThreadState here(handed);
            s.product = matmul(x, w).dtype();
            s.exponential = exp(x).dtype();
            s.recorded = matmul(x, w).requires_grad();
            Tensor low = x.to(t);
            s.casts = amp::trace([&] { matmul(low, w); }).casts();
          }
          if (amp::is_autocast_enabled(d.type)) s.product = f64;  // gone with the guard
        });
      for (auto& thread : workers) thread.join();
      for (auto& s : seen) {
        CHECK(s.product == t);
        CHECK(s.exponential == t);
        CHECK_FALSE(s.recorded);
        CHECK(s.casts == (cache ? 0 : 1));
      }
    }
    // A function carries its region itself.
    auto forward = amp::autocasted([&](const Tensor& in) { return matmul(in, w).dtype(); }, {.dtype = t});
    DType there = f64;
    std::thread([&] { there = forward(x); }).join();
    CHECK(there == t);
  });
}

TEST_CASE("report_55: threads with models of their own, and with one that they share, do not disturb each other") {
  tests::report("pytorch#181619");
  const int rounds = std::getenv("HALFTONE_FULL") ? 5000 : 200;
  everywhere([&](Device d, DType t) {
    Net shared(d);
    Tensor x = Batch(d).x;
    Tensor expected_shared = shared.by_hand(x, t);
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    for (uint64_t seed = 2; seed < 4; ++seed)
      threads.emplace_back([&, seed] {
        thread_state().generator = std::make_shared<Generator>(seed);
        Net own(d, seed);
        Tensor expected = own.by_hand(x, t);
        for (int i = 0; i < rounds; ++i) {
          Autocast region({.dtype = i % 8 == 7 ? other_than(t) : t});
          NoGrad off;
          Tensor y = own(x), z = shared(x);
          if (i % 8 != 7) wrong += !same_bits(y, expected) || !same_bits(z, expected_shared);
        }
      });
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
  });
}

TEST_CASE("report_56: a program may end with copies of weights alive") {
  tests::report("pytorch#126677");
  // Destroyed after main, by this thread and by one that has ended; the process's exit code is the rest of the test.
  static std::vector<Net> until_exit;
  everywhere([](Device d, DType t) {
    auto use = [&] {
      thread_local std::vector<Net> until_thread_exit;
      for (auto* list : {&until_exit, &until_thread_exit}) {
        list->emplace_back(d);
        Autocast region({.dtype = t});
        list->back()(Batch(d).x).to(f32).sum().backward();
      }
    };
    use();
    std::thread(use).join();
  });
  CHECK(until_exit.size() % 4 == 0);
}
