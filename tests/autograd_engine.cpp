// The engine: leaves, hooks, graphs that are retained, freed, deep, shared by threads or run from inside a node.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;
using Floats = std::vector<float>;

namespace {

Tensor leaf(std::vector<float> v) { return tensor(v, {.requires_grad = true}); }
Floats of(const Tensor& t) { return t.to_vector<float>(); }

// Runs f on a thread with this much stack.
template <class F> void on_small_stack(size_t bytes, F f) {
  pthread_attr_t attributes;
  REQUIRE(pthread_attr_init(&attributes) == 0);
  REQUIRE(pthread_attr_setstacksize(&attributes, bytes) == 0);
  pthread_t thread;
  REQUIRE(pthread_create(&thread, &attributes, [](void* p) -> void* { (*static_cast<F*>(p))(); return nullptr; }, &f) == 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

// A graph that lives until the program's end: it must die without harm after everything else.
Tensor static_loss;

}  // namespace

// ---- leaves

TEST_CASE("the first gradient of a leaf overwrites, later ones add, the buffer stays") {
  Tensor x = leaf({1, 2});
  CHECK_FALSE(x.grad().defined());
  (x * 3).sum().backward();
  const void* address = x.grad().raw_data();
  CHECK(of(x.grad()) == Floats{3, 3});
  (x * x).sum().backward();
  CHECK(of(x.grad()) == Floats{5, 7});
  CHECK(x.grad().raw_data() == address);
  x.zero_grad();
  CHECK_FALSE(x.grad().defined());
  (x * 4).sum().backward();
  CHECK(of(x.grad()) == Floats{4, 4});
  CHECK(x.grad().raw_data() == address);
}

TEST_CASE("weight gradients of linear go into the buffer that is there") {
  Tensor w = ones({2, 3}, {.requires_grad = true}), b = zeros({2}, {.requires_grad = true}), x = ones({4, 3});
  linear(x, w, b).sum().backward();
  const void* address = w.grad().raw_data();
  for (int i = 0; i < 3; ++i) {
    w.zero_grad();
    b.zero_grad();
    (linear(x, w, b) * (i + 1)).sum().backward();
    CHECK(of(w.grad()) == Floats(6, 4.f * float(i + 1)));
    CHECK(of(b.grad()) == Floats(2, 4.f * float(i + 1)));
    CHECK(w.grad().raw_data() == address);
  }
  linear(x, w, b).sum().backward();
  CHECK(of(w.grad()) == Floats(6, 16));
}

TEST_CASE("a gradient given by the program is checked, and emptied by an undefined one") {
  Tensor x = leaf({1, 2});
  x.set_grad(tensor({5.f, 6.f}));
  CHECK(of(x.grad()) == Floats{5, 6});
  CHECK_THROWS_WITH(x.set_grad(tensor({1.f})), "set_grad: expected [2] (f32) on cpu, got [1] (f32) on cpu");
  CHECK_THROWS_WITH(x.set_grad(tensor({1., 2.})), "set_grad: expected [2] (f32) on cpu, got [2] (f64) on cpu");
  x.set_grad({});
  CHECK_FALSE(x.grad().defined());
  CHECK_THROWS_WITH((x * 2).set_grad(x), "set_grad: expected a leaf that requires a gradient");
}

TEST_CASE("the gradient's dtype is the tensor's, whatever came") {
  Tensor x = leaf({1, 2});
  (x.to(DType::f16) * 2).sum().backward();
  CHECK(x.grad().dtype() == DType::f32);
  Tensor y = tensor({1., 2.}, {.requires_grad = true});
  (y.to(DType::f32) * y).sum().backward();
  CHECK(y.grad().dtype() == DType::f64);
  CHECK(y.grad().to_vector<double>() == std::vector<double>{2, 4});
}

TEST_CASE("a weight used twice under f16 autocast gathers its gradients in f32") {
  for (bool bias : {false, true}) {
    Tensor w = ones({1, 1}, {.requires_grad = true}), b = bias ? zeros({1}, {.requires_grad = true}) : Tensor();
    Tensor x = full({1, 1}, 200.f);
    Tensor y0, y1;
    {
      amp::Autocast region({.dtype = DType::f16});
      y0 = linear(x, w, b);
      y1 = linear(x, w, b);
    }
    REQUIRE(y0.dtype() == DType::f16);
    // Each use gives 200 * 200 = 40000; their sum leaves f16's range.
    (y0.to(DType::f32).sum() * 200 + y1.to(DType::f32).sum() * 200).backward();
    CHECK(w.grad().dtype() == DType::f32);
    CHECK(w.grad().item() == 80000);
  }
  // The same through matmul, whose rule does not absorb the cast.
  Tensor w = ones({1, 1}, {.requires_grad = true}), x = full({1, 1}, 200.f);
  Tensor total;
  {
    amp::Autocast region({.dtype = DType::f16});
    total = matmul(x, w).to(DType::f32).sum() * 200 + matmul(x, w).to(DType::f32).sum() * 200;
  }
  total.backward();
  CHECK(w.grad().item() == 80000);
}

TEST_CASE("answering for a weight's cast changes only where a gradient is rounded") {
  manual_seed(1);
  Tensor x = randn({8, 5}).to(DType::bf16), w = randn({3, 5}, {.requires_grad = true}), b = randn({3}, {.requires_grad = true});
  auto gradients = [&](bool absorb) {
    w.set_grad({});
    b.set_grad({});
    amp::Autocast region({.dtype = DType::bf16});
    Tensor y;
    HookHandle hw, hb;
    if (absorb) y = linear(x, w, b);
    else {
      Tensor lw = w.to(DType::bf16), lb = b.to(DType::bf16);
      hw = register_hook(lw, [](const Tensor&) { return Tensor(); });  // somebody looks at the cast's output
      hb = register_hook(lb, [](const Tensor&) { return Tensor(); });
      y = linear(x, lw, lb);
    }
    y.to(DType::f32).pow(2).sum().backward();
    return std::pair{w.grad().clone(), b.grad().clone()};
  };
  auto [w0, b0] = gradients(false);
  auto [w1, b1] = gradients(true);
  // Rounded to bf16 at the end, the f32 gradients are those that left the product in bf16.
  CHECK(of(w1.to(DType::bf16)) == of(w0));
  CHECK(of(b1.to(DType::bf16)) == of(b0));
  CHECK(of(w1) != of(w0));
}

// ---- graphs

TEST_CASE("a graph is freed by backward unless it is retained") {
  Tensor x = leaf({2});
  Tensor y = (x * x).sum();
  y.backward({.retain_graph = true});
  y.backward();
  CHECK(x.grad().item() == 8);
  CHECK_THROWS_WITH(y.backward(), "sum: its graph was freed by an earlier backward; pass {.retain_graph = true} to that one");
  CHECK(x.grad().item() == 8);
  Tensor z = (x * x).sum();
  grad({z}, {x});
  CHECK_THROWS_WITH(grad({z}, {x}), Catch::Contains("freed by an earlier backward"));
}

TEST_CASE("create_graph makes gradients that can be differentiated, to any order") {
  Tensor x = tensor(std::vector{2.0}, {.requires_grad = true});
  Tensor y = x.pow(4).sum();
  std::vector<double> expected = {32, 48, 48, 24, 0};
  for (double e : expected) {
    y = grad({y}, {x}, {.create_graph = true})[0];
    CHECK(y.item() == Approx(e));
    if (!y.requires_grad()) break;
    y = y.sum();
  }
  Tensor z = leaf({3});
  z.pow(3).sum().backward({.create_graph = true});
  CHECK(z.grad().requires_grad());
  CHECK(z.grad().item() == 27);
  auto [second] = grad({z.grad().sum()}, {z});
  CHECK(second.item() == 18);
  z.zero_grad();
  (z * 2).sum().backward();
  CHECK(z.grad().item() == 2);
  CHECK_FALSE(z.grad().requires_grad());
}

TEST_CASE("grad returns gradients and leaves .grad alone") {
  Tensor x = leaf({1, 2}), y = leaf({3, 4}), unused = leaf({0});
  Tensor h = x * y;
  auto [gx, gh] = grad({(h * h).sum()}, {x, h});
  CHECK(of(gh) == Floats{6, 16});
  CHECK(of(gx) == Floats{18, 64});
  CHECK_FALSE(x.grad().defined());
  CHECK_FALSE(y.grad().defined());
  CHECK_THROWS_WITH(grad({(x * 2).sum()}, {unused}), "grad: the outputs do not depend on input 0; pass {.allow_unused = true} for an undefined gradient");
  auto [g0, g1] = grad({(x * 2).sum()}, {unused, x}, {.allow_unused = true});
  CHECK_FALSE(g0.defined());
  CHECK(of(g1) == Floats{2, 2});
  CHECK_THROWS_WITH(grad({x.detach().sum()}, {x}), "grad: output 0 does not depend on anything that requires a gradient");
  CHECK_THROWS_WITH(grad({x.sum()}, {x.detach()}), "grad: input 0 does not require a gradient");
  CHECK_THROWS_WITH(grad({}, std::vector<Tensor>{x}), "grad: expected at least one output and one input");
  // An output that is an input, several outputs, one of them used by the other.
  Tensor a = x * 2, b = (a * a).sum();
  auto [ga, gx2] = grad({b, a}, {a, x});
  CHECK(of(ga) == Floats{1 + 2 * 2, 1 + 2 * 4});
  CHECK(of(gx2) == Floats{10, 18});
  auto [self] = grad({x}, {x});
  CHECK(of(self) == Floats{1, 1});
}

TEST_CASE("backward takes the gradient it starts from") {
  Tensor x = leaf({1, 2});
  Tensor y = x * 3;
  CHECK_THROWS_WITH(y.backward(), "backward: [2] (f32) has more than one element; reduce it, or pass {.gradient = ...}");
  CHECK_THROWS_WITH(y.backward({.gradient = ones({3})}), "backward: the gradient must have the tensor's shape [2], got [3]");
  y.backward({.gradient = tensor({1.f, 10.f})});
  CHECK(of(x.grad()) == Floats{3, 30});
  CHECK_THROWS_WITH(x.detach().backward(), "backward: the tensor does not depend on anything that requires a gradient, or was computed under NoGrad");
  x.zero_grad();
  x.backward({.gradient = tensor({7.f, 8.f})});
  CHECK(of(x.grad()) == Floats{7, 8});
}

TEST_CASE("NoGrad, EnableGrad, detach") {
  Tensor x = leaf({1, 2});
  {
    NoGrad off;
    CHECK_FALSE(recording());
    CHECK_FALSE((x * 2).requires_grad());
    {
      EnableGrad on;
      CHECK((x * 2).requires_grad());
    }
    CHECK_FALSE(recording());
  }
  CHECK(recording());
  Tensor d = (x * 2).detach();
  CHECK_FALSE(d.requires_grad());
  CHECK(d.is_leaf());
  CHECK_FALSE((x * 2).is_leaf());
  CHECK(x.detach().storage() == x.storage());
  CHECK_THROWS_WITH((x * 2).requires_grad_(), "requires_grad_: the tensor was computed; use detach() for one without history");
  CHECK_FALSE(argmax(x).requires_grad());
  CHECK_FALSE(gt(x, 0).requires_grad());
}

TEST_CASE("writing in place: refused where it would lose a gradient, noticed where it was saved") {
  Tensor x = leaf({1, 2});
  CHECK_THROWS_WITH(x.fill_(0), "fill: writes in place to a tensor that requires a gradient; do it under NoGrad");
  Tensor h = x * 2;
  CHECK_THROWS_WITH(h.copy_(zeros({2})), "copy: writes in place to a tensor that has a history; use the operator that returns a new tensor, or detach()");
  CHECK_THROWS_WITH(h[0].fill_(1), Catch::Contains("has a history"));
  Tensor y = (x * x).sum();
  { NoGrad off; x.fill_(5); }
  CHECK_THROWS_WITH(y.backward(), "mul: input 0 [2] (f32) was saved for backward and has been written since (version 0, now 1); write to a clone() of it, or before the forward");
  Tensor e = x.exp();
  e.detach().fill_(0);
  CHECK_THROWS_WITH(e.sum().backward(), "exp: output 0 [2] (f32) was saved for backward and has been written since (version 0, now 1); write to a clone() of it, or before the forward");
  Tensor buffer = zeros({2});
  CHECK_THROWS_WITH(buffer.copy_(x * 2), "copy: writes values that have a gradient into a tensor that has none, which would lose it; write their detach(), use an operator that "
                                         "returns a new tensor, or do it under NoGrad");
  CHECK_THROWS_WITH(buffer.add_(x), Catch::Contains("would lose it"));
  buffer.copy_(x.detach());
  { NoGrad off; buffer.lerp_(x, .5); }
  // What nobody saved may change.
  Tensor s = x + 1;
  s.detach().fill_(0);
  s.sum().backward();
  CHECK(of(x.grad()) == Floats{1, 1});
  // A write through a view is a write to the whole.
  Tensor w = leaf({1, 2, 3});
  Tensor loss = w.pow(2).sum();
  { NoGrad off; w.slice(0, 0, 1).fill_(9); }
  CHECK_THROWS_WITH(loss.backward(), Catch::Contains("has been written since"));
}

TEST_CASE("a saved tensor that took over another's memory is noticed") {
  Tensor w = leaf({1, 2}), x = leaf({3, 4});
  Tensor y = (w * x).sum();
  x.set_(leaf({5, 6}).detach());
  CHECK_THROWS_WITH(y.backward(), Catch::Contains("was saved for backward and has been written since"));
}

TEST_CASE("a tensor used in many places gathers all its gradients") {
  Tensor x = leaf({1, 2, 3, 4});
  Tensor v = x.view({2, 2});
  (v * v.t() + v.slice(1, 0, 1) * x[3]).sum().backward();
  double h = 1e-3;
  auto value = [&](Floats p) { return p[0] * p[0] + 2 * p[1] * p[2] + p[3] * p[3] + 2 * (p[0] + p[2]) * p[3]; };
  for (size_t i = 0; i < 4; ++i) {
    Floats up = {1, 2, 3, 4}, down = up;
    up[i] += float(h);
    down[i] -= float(h);
    CHECK(of(x.grad())[i] == Approx((value(up) - value(down)) / (2 * h)).epsilon(1e-3));
  }
}

TEST_CASE("a graph of depth 200000 is built, run and destroyed on a stack of 256 KiB") {
  constexpr int depth = 200000;
  on_small_stack(256 << 10, [] {
    Tensor x = tensor({1.f}, {.requires_grad = true});
    Tensor y = x;
    for (int i = 0; i < depth; ++i) y = y + x * 0;
    y.backward();
    if (x.grad().item() != 1) throw Error("wrong gradient");
    Tensor unused = x;  // destroyed without ever running
    for (int i = 0; i < depth / 4; ++i) unused = unused * 1;
    Tensor kept = x;
    for (int i = 0; i < depth / 4; ++i) kept = kept.exp() * 0;
    kept.sum().backward({.retain_graph = true});
  });
  SUCCEED();
}

TEST_CASE("a graph may outlive the program's main") {
  Tensor x = leaf({1});
  static_loss = x;
  for (int i = 0; i < 1000; ++i) static_loss = static_loss * 1.5;
  SUCCEED();
}

// ---- hooks

TEST_CASE("a hook sees a tensor's whole gradient and may replace it") {
  Tensor x = leaf({1, 2});
  Tensor h = x * 2;
  Floats seen;
  int calls = 0;
  HookHandle handle = register_hook(h, [&](const Tensor& g) {
    seen = of(g);
    ++calls;
    return g * 10;
  });
  (h.sum() + (h * 2).sum()).backward({.retain_graph = true});
  CHECK(calls == 1);
  CHECK(seen == Floats{3, 3});
  CHECK(of(x.grad()) == Floats{60, 60});
  handle.remove();
  x.zero_grad();
  h.sum().backward();
  CHECK(of(x.grad()) == Floats{2, 2});
}

TEST_CASE("a hook on a leaf sees the whole gradient, once") {
  Tensor x = leaf({1, 2});
  std::vector<Floats> seen;
  HookHandle handle = register_hook(x, [&](const Tensor& g) {
    seen.push_back(of(g));
    return g * 2;
  });
  (x * 3 + x * 4).sum().backward();
  CHECK(seen == std::vector<Floats>{{7, 7}});
  CHECK(of(x.grad()) == Floats{14, 14});
  auto [g] = grad({(x * x).sum()}, {x});
  CHECK(of(g) == Floats{4, 8});
  x.zero_grad();
  (x * 1).sum().backward();
  CHECK(seen.back() == Floats{1, 1});
}

TEST_CASE("hooks run in the order of their registration, and may only keep shape and dtype") {
  Tensor x = leaf({1, 2});
  HookHandle first = register_hook(x, [](const Tensor& g) { return g + 1; }), second = register_hook(x, [](const Tensor& g) { return g * 10; });
  HookHandle third = register_hook(x, [](const Tensor&) { return Tensor(); });
  (x * 2).sum().backward();
  CHECK(of(x.grad()) == Floats{30, 30});
  HookHandle bad = register_hook(x, [](const Tensor& g) { return g.to(DType::f64); });
  CHECK_THROWS_WITH((x * 2).sum().backward(), "hook: returned [2] (f64) for a gradient [2] (f32)");
  CHECK_THROWS_WITH(register_hook(x.detach(), [](const Tensor& g) { return g; }).remove(), "register_hook: the tensor does not require a gradient");
}

TEST_CASE("a handle's end takes a hook off, detach leaves it") {
  Tensor x = leaf({1});
  { HookHandle h = register_hook(x, [](const Tensor& g) { return g * 10; }); }
  x.sum().backward();
  CHECK(x.grad().item() == 1);
  { HookHandle h = register_hook(x, [](const Tensor& g) { return g * 10; }); h.detach(); }
  x.zero_grad();
  x.sum().backward();
  CHECK(x.grad().item() == 10);
  HookHandle late;
  { Tensor gone = leaf({1}); late = register_hook(gone, [](const Tensor& g) { return g; }); }
  late.remove();  // its tensor is gone already
}

TEST_CASE("in a three-layer network the last layer's gradient is ready before the first layer's node runs") {
  manual_seed(2);
  std::vector<Tensor> w;
  for (int i = 0; i < 3; ++i) w.push_back(randn({4, 4}, {.requires_grad = true}));
  Tensor h0 = linear(randn({2, 4}), w[0]), h1 = linear(relu(h0), w[1]), y = linear(relu(h1), w[2]);
  std::vector<std::string> events;
  std::vector<HookHandle> handles;
  for (size_t i = 0; i < 3; ++i)
    handles.push_back(register_post_accumulate_hook(w[i], [&events, &w, i](const Tensor& l) {
      REQUIRE(l.body() == w[i].body());
      REQUIRE(l.grad().defined());
      events.push_back("leaf " + std::to_string(i));
    }));
  handles.push_back(register_hook(h0, [&](const Tensor&) { events.push_back("node 0"); return Tensor(); }));  // just before the first layer's node
  handles.push_back(register_hook(y, [&](const Tensor&) {
    at_end_of_backward([&] { events.push_back("end"); });
    return Tensor();
  }));
  y.sum().backward();
  CHECK(events == std::vector<std::string>{"leaf 2", "leaf 1", "node 0", "leaf 0", "end"});
}

TEST_CASE("a post-accumulate hook fires once, after a leaf's last contribution") {
  Tensor x = leaf({1});
  std::vector<double> at;
  HookHandle h = register_post_accumulate_hook(x, [&](const Tensor& l) { at.push_back(l.grad().item()); });
  Tensor y = x * 2;
  (y * y + x * 5 + x).sum().backward();
  CHECK(at == std::vector<double>{8 + 5 + 1});
  grad({(x * x).sum()}, {x});
  CHECK(at.size() == 1);
  CHECK_THROWS_WITH(register_post_accumulate_hook(y, [](const Tensor&) {}).remove(), "register_post_accumulate_hook: expected a leaf that requires a gradient");
}

TEST_CASE("a hook may start a run of its own on a leaf that the outer run is writing") {
  Tensor w = ones({2, 3}, {.requires_grad = true}), b = zeros({2}, {.requires_grad = true}), x = ones({4, 3});
  int nested = 0;
  HookHandle handle = register_post_accumulate_hook(b, [&](const Tensor&) {
    ++nested;
    EnableGrad on;
    (w * 10).sum().backward();
  });
  for (int round = 0; round < 2; ++round) {  // the second writes weight gradients into the buffers of the first
    w.zero_grad();
    b.zero_grad();
    linear(x, w, b).sum().backward();
    CHECK(of(w.grad()) == Floats(6, 14));
    CHECK(of(b.grad()) == Floats(2, 4));
  }
  CHECK(nested == 2);
}

TEST_CASE("end-of-backward callbacks belong to a run, and to one that succeeds") {
  CHECK_THROWS_WITH(at_end_of_backward([] {}), "at_end_of_backward: no backward is running on this thread");
  Tensor x = leaf({1});
  bool called = false;
  Tensor y = x * 2;
  HookHandle h = register_hook(y, [&](const Tensor&) -> Tensor {
    at_end_of_backward([&] { called = true; });
    return {};
  });
  HookHandle bad = register_hook(x, [](const Tensor&) -> Tensor { throw Error("no"); });
  CHECK_THROWS_WITH(y.sum().backward({.retain_graph = true}), "no");
  CHECK_FALSE(called);
  bad.remove();
  y.sum().backward();
  CHECK(called);
}

TEST_CASE("the leaves that a run will reach") {
  Tensor a = leaf({1}), b = leaf({2}), c = leaf({3});
  auto reached = [](std::vector<Tensor> outputs) {
    std::set<const void*> s;
    for (auto& t : reachable_leaves(outputs)) REQUIRE(s.insert(t.body().get()).second);
    return s;
  };
  Tensor y = a * b + a;
  CHECK(reached({y}) == std::set<const void*>{a.body().get(), b.body().get()});
  CHECK(reached({y, c}) == std::set<const void*>{a.body().get(), b.body().get(), c.body().get()});
  CHECK(reached({y.detach()}).empty());
}

TEST_CASE("an exception in a hook leaves the engine usable") {
  Tensor x = leaf({1, 2});
  Tensor y = (x * x).sum();
  HookHandle h = register_hook(x, [](const Tensor&) -> Tensor { throw std::runtime_error("from a hook"); });
  CHECK_THROWS_WITH(y.backward({.retain_graph = true}), "from a hook");
  CHECK(recording());
  h.remove();
  y.backward();
  CHECK(of(x.grad()) == Floats{2, 4});
  // The same while a kernel holds the buffer of a weight.
  Tensor w = ones({2, 2}, {.requires_grad = true}), in = ones({2, 2}, {.requires_grad = true});
  linear(in, w).sum().backward();
  w.zero_grad();
  HookHandle again = register_hook(in, [](const Tensor&) -> Tensor { throw std::runtime_error("again"); });
  CHECK_THROWS_WITH(linear(in, w).sum().backward(), "again");
  again.remove();
  w.zero_grad();
  linear(in, w).sum().backward();
  CHECK(of(w.grad()) == Floats(4, 2));
}

// ---- threads

TEST_CASE("threads may run backward at once and share leaves") {
  Tensor w = ones({8, 8}, {.requires_grad = true}), b = zeros({8}, {.requires_grad = true});
  Tensor x = ones({4, 8});
  linear(x, w, b).sum().backward();
  w.zero_grad();
  b.zero_grad();
  constexpr int threads = 4, rounds = 200;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t)
    all.emplace_back([&] {
      try {
        for (int r = 0; r < rounds; ++r) linear(x, w, b).sum().backward();
      } catch (const std::exception&) {
        ++wrong;
      }
    });
  for (auto& t : all) t.join();
  CHECK(wrong == 0);
  CHECK(of(w.grad()) == Floats(64, 4.f * threads * rounds));
  CHECK(of(b.grad()) == Floats(8, 4.f * threads * rounds));
}

// ---- functions of the program

namespace {

struct Scaled : Function<Scaled> {
  static Tensor forward(Context& ctx, const Tensor& x, double by) {
    CHECK_FALSE(recording());
    ctx.save(x, by);
    return x * by;
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) {
    auto& [x, by] = ctx.saved<Tensor, double>();
    static_cast<void>(x);
    return {g * by};
  }
};
struct Split : Function<Split> {
  static std::array<Tensor, 2> forward(Context&, const Tensor& x) { return {x * 2, x * 3}; }
  static std::vector<Tensor> backward(Context&, const Tensor& g0, const Tensor& g1) { return {g0 * 2 + g1 * 3}; }
};
struct Unstack : Function<Unstack> {
  static std::vector<Tensor> forward(Context&, const Tensor& x) {
    std::vector<Tensor> rows;
    for (int64_t i = 0; i < x.size(0); ++i) rows.push_back(x[i].clone());
    rows.emplace_back();  // an optional output left out
    return rows;
  }
  static std::vector<Tensor> backward(Context&, std::span<const Tensor> g) { return {stack({g.begin(), g.end() - 1})}; }
};
struct WrongCount : Function<WrongCount> {
  static Tensor forward(Context&, const Tensor& x, const Tensor& y) { return x + y; }
  static std::vector<Tensor> backward(Context&, const Tensor& g) { return {g}; }
};
struct WrongShape : Function<WrongShape> {
  static Tensor forward(Context&, const Tensor& x) { return x * 1; }
  static std::vector<Tensor> backward(Context&, const Tensor& g) { return {g.sum()}; }
};
struct SavedOther : Function<SavedOther> {
  static Tensor forward(Context& ctx, const Tensor& x) {
    ctx.save(1.5);
    return x * 1;
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) { return {g * std::get<0>(ctx.saved<int>())}; }
};
struct Identity : Function<Identity> {
  static Tensor forward(Context&, const Tensor& x) { return x; }
  static std::vector<Tensor> backward(Context&, const Tensor& g) { return {g * 5}; }
};
DType seen_forward, seen_backward;
bool autocast_forward, autocast_backward;
struct InF32 : Function<InF32> {
  static constexpr FunctionCast cast = FunctionCast::f32;
  static Tensor forward(Context&, const Tensor& x) {
    seen_forward = x.dtype();
    autocast_forward = amp::is_autocast_enabled();
    return x * 2;
  }
  static std::vector<Tensor> backward(Context&, const Tensor& g) {
    seen_backward = g.dtype();
    autocast_backward = amp::is_autocast_enabled();
    return {g * 2};
  }
};
struct InRegion : Function<InRegion> {
  static Tensor forward(Context& ctx, const Tensor& x, const Tensor& w) {
    ctx.save(x, w);
    return matmul(x, w);
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) {
    auto& [x, w] = ctx.saved<Tensor, Tensor>();
    autocast_backward = amp::is_autocast_enabled();
    Tensor gx = matmul(g, w.t());
    seen_backward = gx.dtype();
    return {gx, matmul(x.t(), g)};
  }
};
// Saves what it returns, and differentiates through it.
struct Exponential : Function<Exponential> {
  static Tensor forward(Context& ctx, const Tensor& x) {
    Tensor y = x.exp();
    ctx.save(y);
    return y;
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) { return {g * std::get<0>(ctx.saved<Tensor>())}; }
};
struct Reversed : Function<Reversed> {
  static Tensor forward(Context& ctx, const Tensor& x) {
    ctx.save(x);
    return x;
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) { return {g * square(std::get<0>(ctx.saved<Tensor>()))}; }
};
// Runs a whole backward of its own inside its backward.
struct Recomputed : Function<Recomputed> {
  static Tensor inner(const Tensor& x) { return (x * x).exp(); }
  static Tensor forward(Context& ctx, const Tensor& x) {
    ctx.save(x);
    return inner(x);
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) {
    EnableGrad on;
    Tensor x = std::get<0>(ctx.saved<Tensor>()).detach().requires_grad_();
    inner(x).backward({.gradient = g});
    return {x.grad()};
  }
};

}  // namespace

TEST_CASE("a custom function: arguments, saved values, several outputs") {
  Tensor x = leaf({1, 2});
  Scaled::apply(x, 3.0).sum().backward();
  CHECK(of(x.grad()) == Floats{3, 3});
  x.zero_grad();
  auto [a, b] = Split::apply(x);
  (a + b * 10).sum().backward();
  CHECK(of(x.grad()) == Floats{32, 32});
  x.zero_grad();
  auto only = Split::apply(x);
  only[1].sum().backward();  // the other gradient is zero
  CHECK(of(x.grad()) == Floats{3, 3});
  Tensor m = tensor({{1.f, 2.f}, {3.f, 4.f}}, {.requires_grad = true});
  auto rows = Unstack::apply(m);
  REQUIRE(rows.size() == 3);
  CHECK_FALSE(rows[2].defined());
  (rows[0] + rows[1] * 2).sum().backward();
  CHECK(of(m.grad()) == Floats{1, 1, 2, 2});
  x.zero_grad();
  Tensor same = Identity::apply(x);
  CHECK(same.body() != x.body());
  same.sum().backward();
  CHECK(of(x.grad()) == Floats{5, 5});
  { NoGrad off; CHECK_FALSE(Scaled::apply(x, 2.0).requires_grad()); }
  CHECK_FALSE(Scaled::apply(x.detach(), 2.0).requires_grad());
}

TEST_CASE("mistakes in a custom function are named") {
  Tensor x = leaf({1, 2});
  CHECK_THROWS_WITH(WrongCount::apply(x, x).sum().backward(), Catch::Contains("WrongCount::backward: expected one gradient for each of 2 tensor arguments, got 1"));
  CHECK_THROWS_WITH(WrongShape::apply(x).sum().backward(), Catch::Contains("WrongShape: its backward gave a gradient of shape [] for an input of shape [2]"));
  CHECK_THROWS_WITH(SavedOther::apply(x).sum().backward(), "Context::saved: the types asked for are not those given to save");
  Tensor y = Scaled::apply(x, 2.0).sum();
  y.backward();
  CHECK_THROWS_WITH(y.backward(), Catch::Contains("freed by an earlier backward"));
  Tensor z = Scaled::apply(x, 2.0).sum();
  { NoGrad off; x.fill_(1); }
  CHECK_THROWS_WITH(z.backward(), "Context::saved: a tensor [2] (f32) has been written since forward (version 0, now 1)");
}

TEST_CASE("a custom function is differentiated twice through its backward") {
  Tensor x = tensor({1.5, .5}, {.requires_grad = true});
  CHECK(gradcheck_report([](auto& in) { return std::vector{Scaled::apply(in[0].exp(), 3.0)}; }, {x}) == "");
  CHECK(gradgradcheck_report([](auto& in) { return std::vector{Scaled::apply(in[0].exp(), 3.0)}; }, {x}) == "");
}

TEST_CASE("a custom function that saved its output, or an argument that it returns, is differentiated twice") {
  Tensor x = tensor({1.5, .5}, {.requires_grad = true});
  CHECK(gradgradcheck_report([](auto& in) { return std::vector{Exponential::apply(in[0] * 2)}; }, {x}) == "");
  Tensor y = Exponential::apply(x), g = grad({y.sum()}, {x}, {.create_graph = true})[0];
  std::weak_ptr<Body> saved = y.body();
  g = grad({g.sum()}, {x}, {.create_graph = true})[0];
  CHECK(g.to_vector<double>() == x.exp().to_vector<double>());
  y = g = {};
  CHECK(saved.expired());  // the node does not own itself
  // Its own rule says x squared, whatever it returned.
  Tensor first = grad({Reversed::apply(x).sum()}, {x}, {.create_graph = true})[0];
  CHECK(grad({first.sum()}, {x})[0].to_vector<double>() == (x * 2).to_vector<double>());
}

TEST_CASE("a custom function in f32, and one in its region's dtype") {
  Tensor x = leaf({1, 2}), w = ones({2, 2}, {.requires_grad = true});
  Tensor y, z;
  {
    amp::Autocast region({.dtype = DType::bf16});
    y = InF32::apply(x.to(DType::bf16));
    CHECK((seen_forward == DType::f32 && !autocast_forward));
    z = InRegion::apply(x.reshape({1, 2}), w);
    CHECK(z.dtype() == DType::bf16);
  }
  y.sum().backward();
  CHECK((seen_backward == DType::f32 && !autocast_backward));
  z.sum().backward();
  CHECK((seen_backward == DType::bf16 && autocast_backward));
  CHECK_FALSE(amp::is_autocast_enabled());
  CHECK(w.grad().dtype() == DType::f32);
  InF32::apply(x.to(DType::f64)).sum().backward();  // outside a region nothing is cast
  CHECK(seen_forward == DType::f64);
  // On another thread, the same.
  Tensor again;
  { amp::Autocast region({.dtype = DType::bf16}); again = InRegion::apply(x.reshape({1, 2}), w); }
  seen_backward = DType::f64;
  std::thread([&] { again.sum().backward(); }).join();
  CHECK(seen_backward == DType::bf16);
}

TEST_CASE("a backward inside a node") {
  Tensor x = leaf({.5f, 1});
  Recomputed::apply(x * 2).sum().backward();
  Tensor y = leaf({.5f, 1});
  Recomputed::inner(y * 2).sum().backward();
  CHECK(of(x.grad()) == of(y.grad()));
}

TEST_CASE("an operator that can be differentiated once says so") {
  static OpDef once = {
      .name = "tests_once", .doc = "2 x, differentiable once", .cast = Cast::keep,
      .infer = [](const Call& c) -> Metas { return {Meta(c.in[0].shape(), c.in[0].dtype(), c.in[0].device())}; },
      .backward = [](const Rule& r) -> Tensors { return {r.grad() * 2}; },
      .order = 1,
      .kernel = {[](const Call& c, std::span<Tensor> out) { out[0].copy_(c.in[0] * 2); }}};
  Tensor x = leaf({1});
  call(once, {x}).sum().backward();
  CHECK(x.grad().item() == 2);
  CHECK_THROWS_WITH(grad({call(once, {x}).sum()}, {x}, {.create_graph = true}), "tests_once: can be differentiated once, and create_graph asks for more");
}

TEST_CASE("a rule that reads what its operator does not save is refused") {
  static OpDef greedy = {
      .name = "tests_greedy", .doc = "reads too much", .cast = Cast::keep,
      .infer = [](const Call& c) -> Metas { return {Meta(c.in[0].shape(), c.in[0].dtype(), c.in[0].device())}; },
      .backward = [](const Rule& r) -> Tensors { return {r.grad() * r.in(0)}; },
      .kernel = {[](const Call& c, std::span<Tensor> out) { out[0].copy_(c.in[0] * 2); }}};
  Tensor x = leaf({1});
  CHECK_THROWS_WITH(call(greedy, {x}).sum().backward(), "tests_greedy: its backward rule reads input 0, which it does not save");
}

TEST_CASE("one leaf as both inputs of an operator gets the sum, also into a buffer that is there") {
  manual_seed(31);
  Tensor w = randn({3, 3}, {.requires_grad = true}), c = randn({3, 3});
  std::vector<float> rounds[2];
  for (auto& r : rounds) {
    w.zero_grad();
    (linear(w, w) * c).sum().backward();
    r = w.grad().to_vector<float>();
  }
  REQUIRE(rounds[0] == rounds[1]);
}

// ---- gradients that an operator adds up itself

namespace {

// A block with a shortcut, whose gradient comes first: h goes through a convolution and past it.
struct Block {
  Tensor x, w, h, inner, y;
  explicit Block(DType t, bool with_relu = false) {
    manual_seed(17);
    x = randn({2, 3, 5, 4}).to(t).requires_grad_();
    w = randn({3, 3, 3, 3}).to(t);
    h = x * 2;
    inner = (with_relu ? conv2d_relu : conv2d)(h, w, {}, {.padding = 1});
    y = inner + h;
  }
  Tensor seed() const { return cos(arange(y.numel(), {.dtype = DType::f32})).view(y.shape()).to(y.dtype()); }
};
// How many of the operators that f runs are additions, and how many gradients of convolutions that take one up.
struct Additions { int64_t apart, taken_up; };
Additions additions(const std::function<void()>& f) {
  amp::Trace trace = amp::trace(f);
  auto takes_up = [](const amp::TraceLine& l) { return l.op == "conv_input" && l.in.size() == 3; };
  return {trace.count("add"), std::count_if(trace.lines.begin(), trace.lines.end(), takes_up)};
}

}  // namespace

TEST_CASE("a convolution's gradient takes up what came along a shortcut, rounded once") {
  for (DType t : {DType::f64, DType::f32, DType::f16, DType::bf16})
    for (bool with_relu : {false, true}) {
      INFO(name(t) << (with_relu ? ", relu" : ""));
      Block b(t, with_relu);
      Tensor seed = b.seed(), gradient = with_relu ? seed * gt(b.inner.detach(), 0).to(t) : seed;
      auto exact = [](const Tensor& v) { return v.to(DType::f64); };
      Tensor expected = (conv2d_input(exact(gradient), exact(b.w), {5, 4}, {.padding = 1}) + exact(seed)) * 2;
      // How far off the sums may be, and a rounded number, of itself.
      const double sums = t == DType::f64 ? 1e-13 : 1e-4;
      const double rounding = t == DType::f16 ? 0x1p-11 : t == DType::bf16 ? 0x1p-8 : t == DType::f32 ? 0x1p-24 : 0x1p-53;
      Floats before = of(seed), first;
      for (int round = 0; round < 3; ++round) {  // of a graph that is retained: the same each time
        b.x.zero_grad();
        Additions n = additions([&] { b.y.backward({.gradient = seed, .retain_graph = round < 2}); });
        CHECK(n.apart == 0);
        CHECK(n.taken_up == 1);
        Tensor error = abs(exact(b.x.grad()) - expected) - abs(expected) * rounding;
        CHECK(error.max().item() < sums);
        if (round == 0) first = of(b.x.grad());
        CHECK(of(b.x.grad()) == first);
        CHECK(of(seed) == before);  // what waited was the program's own tensor
      }
    }
}

TEST_CASE("hooks and targets see the sum that a convolution's gradient took up, and what they hold stays") {
  Block b(DType::f32);
  Tensor seed = b.seed(), sum = conv2d_input(seed, b.w, {5, 4}, {.padding = 1}) + seed;
  Tensor at_h, at_y;
  int calls = 0;
  HookHandle on_h = register_hook(b.h, [&](const Tensor& g) { ++calls; at_h = g; return g * 3; });
  HookHandle on_y = register_hook(b.y, [&](const Tensor& g) { at_y = g; return Tensor(); });
  Additions n = additions([&] { b.y.backward({.gradient = seed, .retain_graph = true}); });
  CHECK(n.apart == 0);
  CHECK(n.taken_up == 1);
  CHECK(calls == 1);
  CHECK(of(at_h) == of(sum));
  CHECK(of(b.x.grad()) == of(sum * 3 * 2));
  CHECK(of(at_y) == of(b.seed()));  // the shortcut's gradient
  on_h.remove();
  on_y.remove();
  auto [target, below] = grad({(b.y * seed).sum()}, {b.h, b.x}, {.retain_graph = true});
  CHECK(of(target) == of(sum));
  CHECK(of(below) == of(sum * 2));
}

TEST_CASE("what waits for a convolution is added once, however many follow") {
  manual_seed(18);
  Tensor x = randn({1, 2, 4, 4}, {.requires_grad = true}), w = randn({2, 2, 1, 1}), v = randn({2, 2, 3, 3});
  auto run = [&](bool create_graph) {
    Tensor h = x * 2, one = conv2d(h, w), other = conv2d(h, v, {}, {.padding = 1}), past = h.pow(3), y = (one + other * 3 + past).sum();
    return additions([&] { y.backward({.create_graph = create_graph}); });
  };
  Additions n = run(false);
  CHECK(n.apart == 0);
  CHECK(n.taken_up == 2);
  Tensor once = x.grad().clone();
  x.set_grad({});
  n = run(true);  // the sums are part of the graph that this makes
  CHECK(n.apart == 2);
  CHECK(n.taken_up == 0);
  CHECK(of(x.grad()) == of(once));
  // A leaf's gradient has its buffer to be added to.
  x.set_grad({});
  Tensor y = (conv2d(x, w) + x).sum();
  n = additions([&] { y.backward(); });
  CHECK(n.apart == 1);
  CHECK(n.taken_up == 0);
}

TEST_CASE("a scaled gradient does not take up one that is not") {
  Block b(DType::f32);
  amp::GradScaler scaler;
  Tensor through = conv2d(b.h, b.w).sum(), past = b.h.sum();
  CHECK_THROWS_WITH((scaler.scale(through) + past).backward(),
                    Catch::StartsWith("backward: gradients of a scaled and of an unscaled loss meet in mul"));
}

TEST_CASE("an addend is given to who asks first") {
  static int asked;
  static bool again;
  static OpDef adding = {
      .name = "tests_adding", .doc = "three times its input", .cast = Cast::keep,
      .infer = [](const Call& c) -> Metas { return {Meta(c.in[0].shape(), c.in[0].dtype(), c.in[0].device())}; },
      .backward = [](const Rule& r) -> Tensors { return {r.grad() * 3}; },
      .fused_backward = [](const Rule& r) -> Tensors {
        ++asked;
        Tensor addend = r.addend(0);
        again = r.addend(0).defined();
        return {addend.defined() ? r.grad() * 3 + addend : r.grad() * 3};
      },
      .kernel = {[](const Call& c, std::span<Tensor> out) { out[0].copy_(c.in[0] * 3); }}};
  Tensor x = leaf({1, 2}), h = x * 1;
  (call(adding, {h}) + h * 10 + call(adding, {h})).sum().backward();
  CHECK(of(x.grad()) == Floats{16, 16});
  CHECK(asked == 2);
  CHECK_FALSE(again);
}

TEST_CASE("create_graph leaves a gradient of its own in each leaf") {
  Tensor a = ones({2}, {.requires_grad = true}), b = ones({2}, {.requires_grad = true});
  (a + b).sum().backward({.create_graph = true});
  (a + b).sum().backward();
  REQUIRE(a.grad().to_vector<float>() == std::vector<float>{2, 2});
  REQUIRE(b.grad().to_vector<float>() == std::vector<float>{2, 2});
}

TEST_CASE("a write in place that would lose its source's gradient is refused") {
  Tensor w = ones({2}, {.requires_grad = true}), out = zeros({2});
  REQUIRE_THROWS_WITH(out.copy_(w * 2), Catch::Contains("detach()"));
  out.copy_((w * 2).detach());
  REQUIRE(out.to_vector<float>() == std::vector<float>{2, 2});
}
