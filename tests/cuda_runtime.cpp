// The CUDA runtime on a real device: memory, copies, streams, products, captured steps. Without one, what a user is
// told.
#include <cmath>
#include <thread>

#include "halftone/core/backend.h"
#include "halftone/cuda/allocator.h"
#include "halftone/cuda/stream.h"
#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;
using Catch::Contains;

namespace {

#define NEEDS_GPUS(n) \
  if (devices(DeviceType::cuda).size() < (n)) HT_SKIP("needs " #n " CUDA devices")

const Device gpu = Device::cuda();
Backend& cuda_backend() { return backend(DeviceType::cuda); }

std::vector<double> values(const Tensor& t) { return t.to_vector<double>(); }

double epsilon(DType t) {
  switch (t) {
    case DType::f16: return 0x1p-11;
    case DType::bf16: return 0x1p-8;
    case DType::f64: return 0x1p-52;
    default: return 0x1p-23;
  }
}

// y is `exact` rounded, give or take `slack` of accumulated error per element.
void check_rounded(const Tensor& y, const Tensor& exact, const Tensor& slack) {
  auto got = values(y), want = values(exact), room = values(slack);
  REQUIRE(got.size() == want.size());
  double eps = epsilon(y.dtype()), smallest = y.dtype() == DType::f16 ? 0x1p-25 : 0;  // f16's subnormals
  for (size_t i = 0; i < got.size(); ++i) {
    double allowed = eps * std::abs(want[i]) * 1.01 + room[i] + smallest;
    if (!(std::abs(got[i] - want[i]) <= allowed))
      FAIL("element " << i << " is " << got[i] << ", expected " << want[i] << " +- " << allowed);
  }
}

// Ways to lay out a [rows, cols] matrix, from the tensor made for it.
struct Layout {
  const char* name;
  Shape (*made)(int64_t rows, int64_t cols);
  Tensor (*seen)(const Tensor& made, int64_t rows, int64_t cols);
};
const Layout layouts[] = {
    {"rows", [](int64_t r, int64_t c) { return Shape{r, c}; }, [](const Tensor& t, int64_t, int64_t) { return t; }},
    {"columns", [](int64_t r, int64_t c) { return Shape{c, r}; },
     [](const Tensor& t, int64_t, int64_t) { return t.t(); }},
    {"part of longer rows", [](int64_t r, int64_t c) { return Shape{r, c + 3}; },
     [](const Tensor& t, int64_t, int64_t c) { return t.slice(1, 1, c + 1); }},
    {"part of longer columns", [](int64_t r, int64_t c) { return Shape{c, r + 8}; },
     [](const Tensor& t, int64_t r, int64_t) { return t.slice(1, 8, r + 8).t(); }},
    {"every second row", [](int64_t r, int64_t c) { return Shape{2 * r, c}; },
     [](const Tensor& t, int64_t, int64_t) { return t.slice(0, 0, std::nullopt, 2); }},
    {"every second element", [](int64_t r, int64_t c) { return Shape{r, 2 * c}; },
     [](const Tensor& t, int64_t, int64_t) { return t.slice(1, 0, std::nullopt, 2); }},
    {"one row for all", [](int64_t, int64_t c) { return Shape{1, c}; },
     [](const Tensor& t, int64_t r, int64_t c) { return t.expand({r, c}); }},
};

// A matrix on the device, and its values on the CPU in f64.
struct Pair { Tensor device, exact; };
Pair matrix(const Layout& l, int64_t rows, int64_t cols, DType t) {
  Tensor made = rand(l.made(rows, cols)) * 2 - 1;
  Tensor low = made.to(t);
  return {l.seen(low.to(gpu), rows, cols), l.seen(low, rows, cols).to(DType::f64)};
}

Tensor slack_of(const Tensor& a, const Tensor& b, DType t) {
  double each = t == DType::f64 ? 0x1p-52 : 0x1p-23;
  return matmul(abs(a), abs(b)) * (each * static_cast<double>(a.shape().back() + 2));
}

constexpr DType floating[] = {DType::f16, DType::bf16, DType::f32, DType::f64};

// Straight to the kernel, with the outputs that only the tape sees.
Tensors run_op(const char* op, Tensors in, const Attrs& attrs = {}) {
  LayerScope kernels_only(0);
  Call c{.op = find_op(op), .in = std::move(in), .attrs = attrs, .out = {}, .recording = true};
  return dispatch(c);
}

// A network of two layers, the same for the same seed.
struct Net {
  Tensor w1, b1, w2, b2;
  explicit Net(uint64_t seed) {
    manual_seed(seed);
    auto on_gpu = [](const Tensor& t) { return t.to(gpu).requires_grad_(); };
    w1 = on_gpu(randn({32, 8}));
    b1 = on_gpu(zeros({32}));
    w2 = on_gpu(randn({4, 32}));
    b2 = on_gpu(zeros({4}));
  }
  std::vector<Tensor> parameters() const { return {w1, b1, w2, b2}; }
  Tensor operator()(const Tensor& x) const { return linear(linear_relu(x, w1, b1), w2, b2); }
};

void check_same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) CHECK(values(a[i]) == values(b[i]));
}

}  // namespace

TEST_CASE("without a GPU the library works and says why") {
  if (!devices(DeviceType::cuda).empty()) HT_SKIP("there is one");
  CHECK_THROWS_WITH(ones({2}).to(gpu), Contains("cuda: no usable GPU: ") && Contains("; use the device cpu"));
  CHECK(values(ones({2}) + 1) == std::vector<double>{2, 2});
}

TEST_CASE("copies to the device and back") {
  NEEDS_GPUS(1);
  for (int64_t n : {0, 1, 1000, 70000, 3 << 20, (17 << 20) + 3}) {
    std::vector<uint8_t> bytes(static_cast<size_t>(n));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 2654435761u >> 13);
    Tensor host = tensor(bytes);
    Tensor device = host.to(gpu);
    host.fill_(0);  // a pageable source may be reused at once
    CHECK(device.to_vector<uint8_t>() == bytes);
    CHECK(device.clone().to_vector<uint8_t>() == bytes);
  }
}

TEST_CASE("many small copies in flight") {
  NEEDS_GPUS(1);
  std::vector<Tensor> all;
  for (int i = 0; i < 5000; ++i) all.push_back(tensor({i, i + 1}).to(gpu));
  for (int i = 0; i < 5000; i += 617) CHECK(all[static_cast<size_t>(i)].to_vector<int>() == std::vector<int>{i, i + 1});
}

TEST_CASE("mapped memory is read without a copy") {
  NEEDS_GPUS(1);
  auto mapped = cuda_backend().allocate_mapped({3}, DType::i64, 0);
  auto* host = static_cast<const volatile int64_t*>(mapped.host_side);
  CHECK(host[2] == 0);
  mapped.device_side.fill_(42);
  cuda_backend().synchronize(0);
  CHECK(host[0] == 42);
  CHECK(host[2] == 42);
}

TEST_CASE("running out of memory leaves everything usable") {
  NEEDS_GPUS(1);
  CHECK_THROWS_WITH(empty({int64_t{1} << 42}, {.device = gpu}),
                    Contains("out of memory: cuda:0 cannot allocate 17592186044416 bytes"));
  CHECK(values(full({3}, 2, {.device = gpu})) == std::vector<double>{2, 2, 2});
}

TEST_CASE("the allocator reuses what was freed") {
  NEEDS_GPUS(1);
  auto& allocator = cuda::allocator(0);
  Tensor warm = empty({1 << 20}, {.device = gpu});
  warm = {};
  auto before = allocator.stats();
  for (int i = 0; i < 100; ++i) empty({1 << 20}, {.device = gpu});
  CHECK(allocator.stats().driver_allocations == before.driver_allocations);
  CHECK(allocator.stats().allocated == before.allocated);
}

TEST_CASE("streams and events order work") {
  NEEDS_GPUS(1);
  Tensor x = full({1 << 20}, 3, {.device = gpu}), y;
  cuda::Event ready, done;
  ready.record();
  {
    cuda::Stream side;
    cuda::StreamGuard on(side);
    ready.wait();
    cuda::record_stream(x, side);
    y = matmul(x.view({1024, 1024}), x.view({1024, 1024}));
    done.record();
    done.wait();
    x = {};
    CHECK(y.select(0, 5).select(0, 7).item() == 9 * 1024);
  }
  CHECK(done.done());
  CHECK((y * 2).select(0, 0).select(0, 0).item() == 2 * 9 * 1024);  // the side stream has gone, its memory has not
}

TEST_CASE("matmul agrees with the exact product in every layout and dtype") {
  NEEDS_GPUS(1);
  manual_seed(11);
  struct Size { int64_t m, n, k; };
  for (auto [m, n, k] : {Size{1, 1, 1}, {7, 5, 33}, {33, 64, 7}, {64, 64, 64}, {130, 1, 70}, {1, 67, 130}, {0, 3, 2},
                         {3, 2, 0}, {257, 129, 515}})
    for (DType t : floating)
      for (auto& la : layouts)
        for (auto& lb : layouts) {
          if (k == 515 && (&la != &layouts[0] || &lb > &layouts[1])) continue;
          INFO("[" << m << ", " << k << "] " << la.name << " times [" << k << ", " << n << "] " << lb.name << ", "
                   << name(t));
          Pair a = matrix(la, m, k, t), b = matrix(lb, k, n, t);
          check_rounded(matmul(a.device, b.device), matmul(a.exact, b.exact), slack_of(a.exact, b.exact, t));
        }
}

TEST_CASE("16-bit products may stay f32") {
  NEEDS_GPUS(1);
  manual_seed(12);
  for (DType t : {DType::f16, DType::bf16})
    for (int64_t k : {0, 3, 64, 1000}) {
      Pair a = matrix(layouts[1], 33, k, t), b = matrix(layouts[0], k, 40, t);
      Tensor y = run_op("matmul", {a.device, b.device}, Attrs::of(MatmulAttrs{.wide = true}))[0];
      REQUIRE(y.dtype() == DType::f32);
      check_rounded(y, matmul(a.exact, b.exact), slack_of(a.exact, b.exact, t));
    }
}

TEST_CASE("batches with any strides") {
  NEEDS_GPUS(1);
  manual_seed(13);
  for (DType t : floating) {
    auto both = [&](const Shape& s) {
      Tensor low = (rand(s) * 2 - 1).to(t);
      return Pair{low.to(gpu), low.to(DType::f64)};
    };
    auto check = [&](Pair a, Pair b) {
      check_rounded(matmul(a.device, b.device), matmul(a.exact, b.exact), slack_of(a.exact, b.exact, t));
    };
    auto map = [](const Pair& p, auto f) { return Pair{f(p.device), f(p.exact)}; };
    check(both({5, 3, 4}), both({5, 4, 6}));
    check(both({2, 3, 9, 4}), both({2, 3, 4, 8}));
    check(both({3, 9, 4}), both({2, 3, 4, 8}));  // broadcast: stride 0
    check(both({2, 1, 9, 4}), both({1, 3, 4, 8}));
    auto heads = [](const Tensor& x) { return x.view({2, 7, 3, 8}).permute({0, 2, 1, 3}); };  // as attention does
    Pair q = map(both({2, 7, 24}), heads), k = map(both({2, 7, 24}), heads);
    check(q, map(k, [](const Tensor& x) { return x.t(); }));
    check(both({70000, 1, 2}), both({70000, 2, 1}));  // more than a grid's y or z takes
  }
}

TEST_CASE("the linear family agrees with the exact result") {
  NEEDS_GPUS(1);
  manual_seed(14);
  struct Size { int64_t m, k, n; };
  for (DType t : floating)
    for (auto [m, k, n] : {Size{1, 1, 1}, {7, 33, 5}, {4, 70, 67}, {128, 64, 96}, {3, 0, 2}, {0, 3, 2}, {33, 7, 1}})
      for (auto& layout : layouts)
        for (bool with_bias : {true, false}) {
          INFO("[" << m << ", " << k << "] " << layout.name << " to " << n << (with_bias ? " with" : " without")
                   << " bias, " << name(t));
          Pair x = matrix(layout, m, k, t), w = matrix(layout, n, k, t);
          Tensor bias = (rand({n}) * 2 - 1).to(t);
          Tensor exact = matmul(x.exact, w.exact.t()), slack = slack_of(x.exact, w.exact.t(), t);
          if (with_bias) exact = exact + bias.to(DType::f64);
          Tensors in{x.device, w.device, with_bias ? bias.to(gpu) : Tensor()};
          check_rounded(run_op("linear", in)[0], exact, slack);
          check_rounded(run_op("linear_relu", in)[0], relu(exact), slack);
          Tensors both = run_op("linear_gelu", in);
          Tensor room = slack * 2 + abs(exact) * (t == DType::f64 ? 1e-14 : 4e-7) + (t == DType::f64 ? 1e-15 : 1e-7);
          check_rounded(both[0], gelu(exact), room);
          check_rounded(both[1], exact, slack);
        }
}

TEST_CASE("NaN and infinity pass through the fused linear family") {
  NEEDS_GPUS(1);
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (DType t : floating) {
    Tensor x = tensor({nan, 1., inf, -1.}).view({4, 1}).to(t).to(gpu), w = ones({3, 1}, {.dtype = t, .device = gpu});
    Tensor b = zeros({3}, {.dtype = t, .device = gpu});
    for (const Tensor& bias : {b, Tensor()})
      for (const char* op : {"linear", "linear_relu", "linear_gelu"}) {
        INFO(op << " " << name(t));
        auto y = values(run_op(op, {x, w, bias})[0]);
        CHECK(std::isnan(y[0]));
        CHECK(std::isnan(y[2]));
        CHECK(std::isfinite(y[3]));
        CHECK(y[6] == inf);
      }
  }
}

TEST_CASE("products give the same bits every time") {
  NEEDS_GPUS(1);
  manual_seed(15);
  Tensor a = randn({64, 20000}).to(DType::f16).to(gpu), b = randn({20000, 48}).to(DType::f16).to(gpu);
  auto first = values(matmul(a, b));
  for (int i = 0; i < 20; ++i) CHECK(values(matmul(a, b)) == first);
}

TEST_CASE("TF32 is off unless asked for") {
  NEEDS_GPUS(1);
  CHECK_FALSE(tf32_allowed());
  Tensor a = full({64, 64}, 1 + 0x1p-13, {.device = gpu}), b = ones({64, 64}, {.device = gpu});
  CHECK(matmul(a, b).select(0, 0).select(0, 0).item() == 64 * (1 + 0x1p-13));
  allow_tf32(true);  // an offer: small products may decline it
  CHECK(matmul(a, b).select(0, 0).select(0, 0).item() == Approx(64).epsilon(1e-3));
  allow_tf32(false);
  CHECK(matmul(a, b).select(0, 0).select(0, 0).item() == 64 * (1 + 0x1p-13));
}

TEST_CASE("several threads multiply at once") {
  NEEDS_GPUS(1);
  Tensor a = full({128, 128}, 2, {.device = gpu});
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      for (int round = 0; round < 50; ++round) {
        Tensor y = matmul(a, full({128, 32}, i, {.device = gpu}));
        if (y.select(0, 3).select(0, 3).item() == 256 * i) ++right;
      }
    });
  for (auto& t : threads) t.join();
  CHECK(right == 200);
}

TEST_CASE("tensors work on a device that is not the current one") {
  NEEDS_GPUS(2);
  Tensor x = rand({300, 300});
  Tensor first = x.to(gpu), second = first.to(Device::cuda(1));
  CHECK(values(second) == values(x));
  CHECK(values(matmul(second, second)) == values(matmul(first, first)));
  Tensor back = (second * 2).to(gpu) + first;
  CHECK(values(back) == values(x * 2 + x));
  CHECK_THROWS_WITH(matmul(first, second), Contains("cuda:0") && Contains("cuda:1"));
  CHECK_THROWS_WITH(first.to(Device::cuda(99)), Contains("cuda:99"));
}

// ---- captured steps

TEST_CASE("a captured step trains as the eager one, bit for bit") {
  NEEDS_GPUS(1);
  auto train = [](bool captured, int steps) {
    Net net(21);
    optim::AdamW opt(net.parameters(), {.lr = 1e-2});
    amp::GradScaler scaler({.init_scale = 1024, .growth_interval = 5});
    auto step = [&](const Tensor& x, const Tensor& target) {
      opt.zero_grad();
      Tensor loss;
      { amp::Autocast region;
        loss = mse_loss(net(x), target); }
      scaler.scale(loss).backward();
      scaler.step(opt);
      scaler.update();
      return loss;
    };
    auto replayed = capture(step);
    std::vector<Tensor> results;
    for (int i = 0; i < steps; ++i) {
      Tensor x = randn({16, 8}).to(gpu), target = randn({16, 4}).to(gpu);
      results.push_back((captured ? replayed(x, target) : step(x, target)).detach().clone());
    }
    if (captured) CHECK(replayed.replays() == steps - 2);
    for (auto& p : net.parameters()) results.push_back(p.detach());
    results.push_back(scaler.scale_tensor());
    return results;
  };
  check_same(train(true, 12), train(false, 12));
}

TEST_CASE("a replay takes new inputs, of each shape and from any device") {
  NEEDS_GPUS(1);
  auto f = capture([](const Tensor& x, const Tensor& y) { return matmul(x.to(gpu), y) + 1; });
  for (int i = 0; i < 5; ++i)
    for (int64_t n : {4, 6}) {
      Tensor x = full({3, n}, i), y = full({n, n}, 2, {.device = gpu}).t();
      CHECK(values(f(x, y)) == values(full({3, n}, 2 * i * n + 1)));
    }
  CHECK(f.calls() == 10);
  CHECK(f.replays() == 6);
}

TEST_CASE("inputs may lie anywhere in each replay") {
  NEEDS_GPUS(1);
  auto step = capture([](const Tensor& bytes, const Tensor& x, const Tensor& large, const Tensor& none) {
    return std::tuple{bytes + 1, x * 2, large - 1, none.to(DType::f32)};
  });
  manual_seed(5);
  for (int64_t round = 0; round < 8; ++round) {
    INFO("round " << round);
    Tensor store = randint(0, 200, {4000}, {.dtype = DType::u8, .device = gpu}), large = randn({2, 1 << 20}, {.device = gpu});
    Tensor x = randn({40, 30}, {.device = round == 6 ? Device::cpu() : gpu});
    Tensor bytes = store.slice(0, round * 5, round * 5 + 3001), turned = round == 4 ? x : x.t().contiguous().t();
    auto [a, b, c, d] = step(bytes, turned, large, zeros({0, 3}, {.device = gpu}));
    CHECK(values(a) == values(bytes + 1));
    CHECK(values(b) == values(x.to(gpu) * 2));
    CHECK(values(c) == values(large - 1));
    CHECK(d.shape() == Shape{0, 3});
  }
  CHECK(step.replays() >= 5);
}

TEST_CASE("inputs may be results of the replay before, in any place") {
  NEEDS_GPUS(1);
  auto turn = capture([](const Tensor& a, const Tensor& b) { return std::pair{b, a}; });
  auto differ = capture([](const Tensor& before, const Tensor& now) { return std::pair{now, now.to(gpu) - before}; });
  auto transpose = capture([](const Tensor& a) { return a * 1; });
  Tensor a = full({700, 3}, 1, {.device = gpu}), b = full({700, 3}, 2, {.device = gpu}), before = zeros({4000}, {.device = gpu}), square = randn({40, 40}, {.device = gpu});
  const Tensor first = square.clone();
  for (int i = 1; i < 9; ++i) {
    INFO(i);
    std::tie(a, b) = turn(a, b);
    CHECK(values(a) == values(full({700, 3}, 1 + i % 2)));
    CHECK(values(b) == values(full({700, 3}, 2 - i % 2)));
    Tensor now = full({4000}, i * i, {.device = gpu}), difference;
    std::tie(before, difference) = differ(before, now);
    CHECK(values(difference) == values(full({4000}, 2 * i - 1)));
    square = transpose(square.t());
    CHECK(values(square) == values(i % 2 == 1 ? first.t() : first));
  }
  CHECK(turn.replays() == 6);
}

TEST_CASE("a captured step takes more inputs than its first kernel does") {
  NEEDS_GPUS(1);
  auto sum = capture([](const auto&... x) { return (x + ...); });
  for (int round = 0; round < 5; ++round) {
    std::array<Tensor, 150> all;
    for (auto& t : all) t = full({3}, round + 1, {.device = gpu});
    CHECK(values(std::apply(sum, all)) == values(full({3}, 150 * (round + 1))));
  }
  CHECK(sum.replays() == 3);
}

TEST_CASE("an input that is refused leaves the next replay right") {
  NEEDS_GPUS(1);
  auto add = capture([](const Tensor& x, const Tensor& y) { return x + y; });
  Tensor y = full({5}, 1, {.device = gpu}), old = add(y, y);
  for (int i = 0; i < 3; ++i) old = add(full({5}, i, {.device = gpu}), y);
  Tensor gone = old, x = full({5}, 10, {.device = gpu});
  old = add(y, y);
  CHECK_THROWS_WITH(add(x, gone), Contains("overwritten by a later replay"));
  CHECK(values(add(x, y)) == values(full({5}, 11)));
}

TEST_CASE("results are good until the next replay") {
  NEEDS_GPUS(1);
  auto f = capture([](const Tensor& x) { return std::pair{x * 2, x + 1}; }, {.warmup = 0});
  auto [a, b] = f(full({3}, 5, {.device = gpu}));
  CHECK(values(a) == std::vector<double>{10, 10, 10});
  Tensor kept = a.clone(), view = b.slice(0, 0, 1);
  auto [c, d] = f(a);  // a result may be the next input
  CHECK(values(c) == std::vector<double>{20, 20, 20});
  CHECK_THROWS_WITH(values(a), Contains("overwritten by a later replay; clone() it before the next call"));
  CHECK_THROWS_WITH(view.item(), Contains("overwritten by a later replay"));
  CHECK_THROWS_WITH(a + 1, Contains("overwritten by a later replay"));
  CHECK(values(kept) == std::vector<double>{10, 10, 10});
  CHECK(values(d) == std::vector<double>{11, 11, 11});
}

TEST_CASE("results outlive the captured step") {
  NEEDS_GPUS(1);
  Tensor y;
  {
    auto f = capture([](const Tensor& x) { return x * 2; }, {.warmup = 0});
    y = f(full({3}, 5, {.device = gpu}));
  }
  full({3}, 7, {.device = gpu});
  CHECK(values(y) == std::vector<double>{10, 10, 10});
}

TEST_CASE("a replay leaves versions as the step would") {
  NEEDS_GPUS(1);
  Tensor state = zeros({3}, {.device = gpu});
  auto f = capture([&](const Tensor& x) { state.add_(x); }, {.warmup = 1});
  Tensor x = ones({3}, {.device = gpu});
  f(x);
  for (int i = 0; i < 3; ++i) {
    uint64_t before = state.version();
    f(x);
    CHECK(state.version() > before);
  }
  CHECK(values(state) == std::vector<double>{4, 4, 4});
}

TEST_CASE("gradient slots are part of what a graph is for") {
  NEEDS_GPUS(1);
  auto run = [](bool captured) {
    Net net(22);
    auto step = [&](const Tensor& x) {
      Tensor loss = net(x).mean();
      loss.backward();
      return loss;
    };
    auto replayed = capture(step);
    std::vector<Tensor> seen;
    for (int i = 0; i < 12; ++i) {
      if (i % 3 == 0)
        for (auto& p : net.parameters()) p.zero_grad();
      Tensor x = randn({16, 8}).to(gpu);
      captured ? replayed(x) : step(x);
      for (auto& p : net.parameters()) seen.push_back(p.grad().clone());
    }
    if (captured) CHECK(replayed.replays() > 4);
    return seen;
  };
  check_same(run(true), run(false));
}

TEST_CASE("large gradients of a captured step are those of the eager one, in each of its graphs, wherever their memory is") {
  NEEDS_GPUS(1);
  constexpr int64_t width = 1024;  // weights are large enough that zero_grad gives back the memory of their gradients
  auto train = [](bool captured) {
    manual_seed(31);
    nn::Sequential net(nn::Linear(width, width), nn::ReLU(), nn::Linear(width, width));
    net.to(gpu);
    optim::SGD opt(net.parameters(), {.lr = 0.1, .momentum = 0.9});
    auto step = [&](const Tensor& x) {
      opt.zero_grad();
      Tensor loss = square(net(x)).mean();
      loss.backward();
      opt.step();
      return loss;
    };
    auto replayed = capture(step);
    std::vector<Tensor> seen;
    for (int i = 0; i < 16; ++i) {
      Tensor x = randn({i % 2 ? 16 : 24, width}).to(gpu);  // shapes take turns, and with them graphs
      seen.push_back((captured ? replayed(x) : step(x)).detach().clone());
      for (auto& p : net.parameters()) seen.push_back(p.grad().clone());
      if (i == 7) opt.zero_grad();
      if (i == 9) net.parameters()[0].set_grad(ones({width, width}).to(gpu));  // not where the graphs write
    }
    if (captured) CHECK(replayed.replays() == 10);
    for (auto& p : net.parameters()) seen.push_back(p.detach());
    return seen;
  };
  check_same(train(true), train(false));
}

TEST_CASE("forward of a captured step has the memory of large gradients, too") {
  NEEDS_GPUS(1);
  constexpr int64_t width = 1024, rows = 2048;
  nn::Sequential net(nn::Linear(width, width), nn::Tanh(), nn::Linear(width, width), nn::Tanh(), nn::Linear(width, width));
  net.to(gpu);
  optim::SGD opt(net.parameters(), {.lr = 0.1});
  auto step = capture([&](const Tensor& x) {
    opt.zero_grad();
    Tensor loss = square(net(x)).mean();
    loss.backward();
    opt.step();
    return loss;
  });
  Tensor x = randn({rows, width}).to(gpu);
  auto peak = [&] {
    reset_peak_memory(gpu);
    step(x);
    return memory_stats(gpu).peak;
  };
  step(x);
  const int64_t eager = peak(), captured = peak(), copy_of_x = rows * width * 4, slack = 1 << 20;
  CHECK(step.replays() == 1);
  CHECK(captured <= eager + copy_of_x + slack);
}

TEST_CASE("large gradients that a step had zeroed stay zeroed when it cannot be captured, and everything goes on") {
  NEEDS_GPUS(1);
  nn::Linear net(1024, 1024);
  net.to(gpu);
  optim::SGD opt(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  bool ask = false;
  auto step = capture([&](const Tensor& x) {
    opt.zero_grad();
    Tensor loss = square(net(x)).mean();
    loss.backward();
    if (ask) loss.item();
    opt.step();
    return loss;
  });
  Tensor x = randn({16, 1024}).to(gpu);
  for (int i = 0; i < 2; ++i) step(x);
  const Tensor weight = net.parameters()[0], before = weight.detach().clone();
  ask = true;
  CHECK_THROWS_WITH(step(x), Contains("item: waits for the device"));
  ask = false;
  CHECK(!weight.grad().defined());
  check_same({weight.detach()}, {before});
  for (int i = 0; i < 3; ++i) step(x);
  CHECK(step.replays() == 3);
  CHECK(weight.grad().defined());
}

TEST_CASE("weights that change between replays are seen through their 16-bit copies") {
  NEEDS_GPUS(1);
  Net net(23);
  auto f = capture([&](const Tensor& x) {
    NoGrad off;
    amp::Autocast region;
    return net(x).to(DType::f32);
  });
  Tensor x = randn({16, 8}).to(gpu);
  auto eager = [&] {
    NoGrad off;
    amp::Autocast region({.cache = false});
    return values(net(x));
  };
  for (int i = 0; i < 6; ++i) {
    CHECK(values(f(x)) == eager());
    NoGrad off;
    net.w1.mul_(0.5);
    if (i == 4) net.w2.set_(net.w2.detach().clone() * 3);
  }
}

TEST_CASE("a step that cannot be captured says what it did, and everything goes on") {
  NEEDS_GPUS(1);
  bool ask = true;
  auto f = capture([&](const Tensor& x) {
    Tensor y = x * 2;
    if (ask) y.sum().item();
    return y;
  });
  Tensor x = ones({3}, {.device = gpu});
  f(x);
  f(x);
  int64_t reserved = cuda::allocator(0).stats().reserved;
  CHECK_THROWS_WITH(f(x), Contains("item: waits for the device, which a captured step cannot") && Contains("sum"));
  CHECK(cuda::allocator(0).stats().reserved == reserved);
  CHECK(values(x + 1) == std::vector<double>{2, 2, 2});
  ask = false;
  CHECK(values(f(x)) == std::vector<double>{2, 2, 2});
  CHECK(values(f(x)) == std::vector<double>{2, 2, 2});
  CHECK(f.replays() > 0);
}

TEST_CASE("a step that could not be captured leaves gradients, scaler and optimizer as they were") {
  NEEDS_GPUS(1);
  Net net(24);
  optim::AdamW opt(net.parameters(), {.lr = 1e-2});
  amp::GradScaler scaler({.init_scale = 1024});
  bool ask = false;
  auto step = capture([&](const Tensor& x) {
    opt.zero_grad();
    Tensor loss;
    { amp::Autocast region;
      loss = square(net(x)).mean(); }
    scaler.scale(loss).backward();
    scaler.step(opt);
    if (ask) loss.item();
    scaler.update();
    return loss;
  });
  Tensor x = randn({16, 8}).to(gpu);
  step(x);
  step(x);
  std::vector<Tensor> before;
  for (auto& p : net.parameters()) before.insert(before.end(), {p.detach().clone(), p.grad().clone()});
  ask = true;
  CHECK_THROWS_WITH(step(x), Contains("item: waits for the device"));
  ask = false;
  std::vector<Tensor> after;
  for (auto& p : net.parameters()) after.insert(after.end(), {p.detach(), p.grad()});
  check_same(before, after);
  for (int i = 0; i < 3; ++i) step(x);
  CHECK(step.replays() == 3);
}

TEST_CASE("a scaler may be updated outside the captured step") {
  NEEDS_GPUS(1);
  auto train = [](bool captured, bool outside) {
    Net net(25);
    optim::SGD opt(net.parameters(), {.lr = 1e-2});
    amp::GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
    Tensor factor = ones({}, {.device = gpu});
    auto step = [&](const Tensor& x) {
      opt.zero_grad();
      Tensor loss;
      { amp::Autocast region;
        loss = square(net(x)).mean(); }
      scaler.scale(loss * factor).backward();
      scaler.step(opt);
      if (!outside) scaler.update();
    };
    auto replayed = capture(step);
    std::vector<Tensor> results;
    for (int i = 0; i < 20; ++i) {
      factor.fill_(i % 7 == 5 ? std::numeric_limits<float>::infinity() : 1.f);
      Tensor x = randn({16, 8}).to(gpu);
      captured ? replayed(x) : step(x);
      if (outside) scaler.update();
      results.push_back(scaler.scale_tensor().clone());
    }
    if (captured) CHECK(replayed.replays() == 18);
    CHECK(scaler.skipped_steps() == 3);
    for (auto& p : net.parameters()) results.push_back(p.detach());
    return results;
  };
  auto expected = train(false, false);
  check_same(train(true, true), expected);
  check_same(train(true, false), expected);
}

TEST_CASE("replays that skip too often in a row are an error") {
  NEEDS_GPUS(1);
  Net net(26);
  optim::SGD opt(net.parameters(), {.lr = 1e-2});
  amp::GradScaler scaler({.init_scale = 1024, .max_consecutive_skips = 4});
  auto step = capture([&](const Tensor& x) {
    opt.zero_grad();
    scaler.scale(net(x).mean()).backward();
    scaler.step(opt);
    scaler.update();
  });
  Tensor bad = full({16, 8}, std::numeric_limits<float>::infinity(), {.device = gpu});
  for (int i = 0; i < 5; ++i) step(bad);
  CHECK(step.replays() == 3);
  cuda_backend().synchronize(0);
  CHECK_THROWS_WITH(step(bad), Contains("5 steps in a row were skipped"));
}

TEST_CASE("a captured function follows the region and the switches around it") {
  NEEDS_GPUS(1);
  Net net(27);
  auto f = capture([&](const Tensor& x) {
    NoGrad off;
    return net(x).to(DType::f64);
  });
  Tensor x = randn({16, 8}).to(gpu);
  amp::Policy wide;
  wide.set("linear", Cast::full);
  for (int round = 0; round < 4; ++round)
    for (auto o : {amp::AutocastOptions{.dtype = DType::f16}, {.dtype = DType::bf16}, {.policy = wide}, {.enabled = false}}) {
      amp::Autocast region(o);
      NoGrad off;
      CHECK(values(f(x)) == values(net(x).to(DType::f64)));
    }
  CHECK(f.replays() == 8);
}

TEST_CASE("16-bit copies and captured steps keep their order across streams") {
  NEEDS_GPUS(1);
  cuda::Stream side(0);
  auto busy = [] {  // keeps a stream at work for some milliseconds
    Tensor m = ones({4096, 4096}, {.device = gpu});
    for (int i = 0; i < 8; ++i) m = matmul(m, m) * 0.f;
    return m;
  };
  Tensor x = ones({64, 512}, {.device = gpu});
  for (int round = 0; round < 3; ++round) {
    Tensor w = full({256, 512}, 1 + round, {.device = gpu, .requires_grad = true});
    cuda_backend().synchronize(0);
    NoGrad off;
    amp::Autocast region;
    {
      cuda::StreamGuard on(side);
      busy();
      linear(x, w);  // makes the copy, some time from now
    }
    CHECK(values(linear(x, w))[0] == 512 * (1 + round));
  }
  Tensor total = zeros({512, 512}, {.device = gpu});
  auto step = capture([&](const Tensor& t) { total.add_(matmul(t, t)); }, {.warmup = 1});
  Tensor t = full({512, 512}, 0.5, {.device = gpu});
  step(t);
  step(t);
  cuda_backend().synchronize(0);
  for (int i = 0; i < 10; ++i) {
    std::optional<cuda::StreamGuard> on;
    if (i % 2 == 0) on.emplace(side);
    step(t);
  }
  cuda_backend().synchronize(0);
  CHECK(values(total)[0] == 12 * 128.0);
}

TEST_CASE("backward runs on streams that are gone, and in order where devices alternate") {
  NEEDS_GPUS(1);
  Tensor w = ones({64, 64}, {.device = gpu, .requires_grad = true}), loss;
  {
    cuda::Stream side(0);
    cuda::StreamGuard on(side);
    loss = (w * 3).sum();
  }
  loss.backward();
  CHECK(values(w.grad())[0] == 3);
}

TEST_CASE("what a captured step may not do is refused by name") {
  NEEDS_GPUS(1);
  Tensor x = ones({3}, {.device = gpu});
  auto from_host = capture([](const Tensor& t) { return t + tensor({1.f, 2.f, 3.f}).to(gpu); }, {.warmup = 0});
  CHECK_THROWS_WITH(from_host(x), Contains("a captured step cannot copy from the CPU"));
  auto in_place = capture([](const Tensor& t) { Tensor(t).add_(1); }, {.warmup = 0});
  CHECK_THROWS_WITH(in_place(x), Contains("changes its input 0 in place"));
  auto any = capture([](const Tensor& t) { return t * 2; }, {.warmup = 0});
  CHECK_THROWS_WITH(any(x.clone().requires_grad_()), Contains("input 0 requires a gradient"));
}

TEST_CASE("arange counts on the device, in a captured step too") {
  NEEDS_GPUS(1);
  for (DType t : {DType::i64, DType::f32, DType::f16}) {
    Tensor a = arange(300, {.dtype = t, .device = Device::cuda()});
    CHECK((a.dtype() == t && a.to_vector<double>() == arange(300, {.dtype = t}).to_vector<double>()));
  }
  CHECK(arange(0, {.device = Device::cuda()}).numel() == 0);
  auto step = capture([](const Tensor& x) { return x + arange(4, {.dtype = DType::f32, .device = x.device()}); });
  Tensor x = full({4}, 2, {.device = Device::cuda()});
  for (int i = 0; i < 4; ++i) CHECK(step(x).to_vector<float>() == std::vector<float>{2, 3, 4, 5});
}
