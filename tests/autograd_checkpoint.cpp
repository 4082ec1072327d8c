// Segments that are computed again in backward: the same values and gradients, less memory, and what is refused.
#include <thread>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;
using Catch::Contains;

namespace {

struct Block {
  Tensor w1 = randn({32, 16}, {.requires_grad = true}), b1 = randn({32}, {.requires_grad = true});
  Tensor w2 = randn({16, 32}, {.requires_grad = true});
  mutable int calls = 0;
  std::vector<Tensor> parameters() const { return {w1, b1, w2}; }
  Tensor operator()(const Tensor& x) const {
    ++calls;
    return tanh(linear(gelu(linear(x, w1, b1)), w2)) * exp(x * 0.1);
  }
};
Block block_of(uint64_t seed) {
  manual_seed(seed);
  return {};
}
using List = std::vector<Tensor>;
std::vector<std::vector<double>> values(const List& t) {
  std::vector<std::vector<double>> v;
  for (auto& x : t) v.push_back(x.to_vector<double>());
  return v;
}

// Uses a custom function inside.
struct Cubed : Function<Cubed> {
  static Tensor forward(Context& ctx, const Tensor& x) {
    ctx.save(x);
    return x * x * x;
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) {
    auto& [x] = ctx.saved<Tensor>();
    return {g * x * x * 3};
  }
};

}  // namespace

TEST_CASE("a checkpoint gives the same bits, once or several in a row, under every autocast state") {
  for (bool autocast : {false, true})
    for (bool outside : {false, true}) {  // backward outside or inside the region
      auto run = [&](bool checkpointed) {
        Block net = block_of(3);
        Tensor x = randn({8, 16}, {.requires_grad = true}), y;
        std::optional<amp::Autocast> region;
        if (autocast) region.emplace(amp::AutocastOptions{.dtype = DType::bf16});
        y = x;
        for (int i = 0; i < 3; ++i) y = checkpointed ? checkpoint(std::cref(net), y) : net(y);
        if (outside) region.reset();
        y.sum().backward();
        CHECK(net.calls == (checkpointed ? 6 : 3));
        std::vector<Tensor> all = net.parameters();
        for (auto& p : all) p = p.grad();
        all.insert(all.end(), {x.grad(), y.detach()});
        return values(all);
      };
      CHECK(run(true) == run(false));
    }
}

TEST_CASE("a checkpoint keeps less for backward") {
  Block net = block_of(4);
  auto held = [&](bool checkpointed) {
    Tensor x = randn({4096, 16}, {.requires_grad = true}), y = x;
    int64_t before = memory_stats(Device::cpu()).allocated;
    for (int i = 0; i < 4; ++i) y = checkpointed ? checkpoint(std::cref(net), y) : net(y);
    int64_t kept = memory_stats(Device::cpu()).allocated - before;
    y.sum().backward();
    return kept;
  };
  int64_t one = int64_t{4096} * 16 * 4;
  CHECK(held(true) < 5 * one);
  CHECK(held(false) > 20 * one);
}

TEST_CASE("a checkpoint serves grad, retained graphs and second derivatives") {
  Block net = block_of(5);
  Tensor x = randn({3, 16}, {.requires_grad = true});
  auto second = [&](bool checkpointed) {
    Tensor y = (checkpointed ? checkpoint(std::cref(net), x) : net(x)).sum();
    List first = grad({y}, List{x, net.w1}, {.create_graph = true});
    List g = grad({square(first[0]).sum() + square(first[1]).sum()}, List{x, net.w1, net.w2});
    g.insert(g.end(), {first[0], first[1]});
    return values(g);
  };
  // The order in which gradients of gradients are added may differ: sums of terms as large as the largest element.
  auto with = second(true), without = second(false);
  for (size_t i = 0; i < with.size(); ++i) {
    double largest = 0;
    for (double v : without[i]) largest = std::max(largest, std::abs(v));
    for (size_t k = 0; k < with[i].size(); ++k) CHECK(with[i][k] == Approx(without[i][k]).epsilon(1e-5).margin(1e-6 * largest));
  }
  Tensor y = checkpoint(std::cref(net), x).sum();
  List wanted{x, net.w1};
  auto once = values(grad({y}, wanted, {.retain_graph = true}));
  CHECK(once == values(grad({y}, wanted, {.create_graph = true})));
  CHECK(once == values(grad({net(x).sum()}, wanted)));
  Tensor d = randn({3, 2}, {.dtype = DType::f64, .requires_grad = true});
  auto f = [](auto& in) { return std::vector{checkpoint([](const Tensor& t) { return Cubed::apply(t.exp()) * t; }, in[0])}; };
  CHECK(gradcheck_report(f, {d}) == "");
  CHECK(gradgradcheck_report(f, {d}) == "");
}

TEST_CASE("a checkpoint draws the same random numbers again, and the generator goes on where it was") {
  auto run = [](bool checkpointed) {
    manual_seed(11);
    Tensor x = randn({64}, {.requires_grad = true});
    auto noisy = [](const Tensor& t) { return t * rand({64}) * rand({64}); };
    Tensor y = checkpointed ? checkpoint(noisy, x) : noisy(x);
    Tensor between = rand({5});
    y.sum().backward();
    return values({x.grad(), y.detach(), between, rand({5})});
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("checkpoints nest, take several arguments and values, and run on another thread") {
  Block net = block_of(6);
  Tensor x = randn({4, 16}, {.requires_grad = true}), s = randn({16}, {.requires_grad = true});
  List wanted{x, s, net.w1};
  auto inner = [&](const Tensor& t, double by) { return net(t) * by; };
  auto outer = [&](const Tensor& t, const Tensor& scale) { return std::pair{checkpoint(inner, t * scale, 2.0), t + 1}; };
  auto [a, b] = checkpoint(outer, x, s);
  Tensor loss = a.sum() + b.sum();
  auto expected = values(grad({inner(x * s, 2.0).sum() + (x + 1).sum()}, wanted));
  std::thread([&] { CHECK(values(grad({loss}, wanted)) == expected); }).join();
  { NoGrad off; CHECK_FALSE(checkpoint(std::cref(net), x).requires_grad()); }
}

TEST_CASE("what a checkpoint refuses") {
  Block net = block_of(7);
  Tensor x = randn({4, 16}, {.requires_grad = true});
  Tensor y = checkpoint(std::cref(net), x).sum();
  { NoGrad off; net.w1.mul_(2); }
  CHECK_THROWS_WITH(y.backward(), Contains("checkpoint: a tensor [32, 16] (f32) that the segment reads has been written since its forward"));
  int round = 0;
  auto moody = [&](const Tensor& t) { return round++ == 0 ? t.exp() * 2 : t.exp(); };
  CHECK_THROWS_WITH(checkpoint(moody, x).sum().backward(), "checkpoint: the segment recorded 2 operators at first and 1 when it was computed again; it must do the same each time");
  round = 0;
  auto other = [&](const Tensor& t) { return round++ == 0 ? t.exp() : tanh(t); };
  CHECK_THROWS_WITH(checkpoint(other, x).sum().backward(), "checkpoint: operator 0 of the segment was exp at first and tanh when it was computed again; it must do the same each time");
}
