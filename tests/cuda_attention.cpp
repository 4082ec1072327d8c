// Attention on CUDA, by cuDNN and by our own kernels, against the composition in f64: realistic shapes, heads that are views
// of one packed tensor, masks, shared heads, dropout, what is hidden, determinism, memory, captured steps.
#include <cmath>
#include <cstring>

#include "halftone/autograd/autograd.h"
#include "halftone/core/backend.h"
#include "halftone/core/capture.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"

using namespace halftone;

#define NEEDS_CUDA() \
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device")

namespace {

const Device gpu = Device::cuda();
constexpr double inf = std::numeric_limits<double>::infinity();

Tensor drawn(const Shape& s, DType t) { return randn(s, {.dtype = DType::f64}).to(t).to(gpu); }
bool same_bits(const Tensor& a, const Tensor& b) {
  Tensor x = to_host(a, "test"), y = to_host(b, "test");
  return x.meta().shape == y.meta().shape && std::memcmp(x.raw_data(), y.raw_data(), static_cast<size_t>(x.numel()) * size_of(x.dtype())) == 0;
}
// The largest difference, as a fraction of the largest element, but of 0.3 where all are smaller: a gradient that is 0,
// as a single key's, is what rounding leaves of sums of a hundred terms around 1. Infinite where one is NaN and the other is not.
double distance(const Tensor& got, const Tensor& expected) {
  auto a = got.to_vector<double>(), b = expected.to_vector<double>();
  REQUIRE(got.shape() == expected.shape());
  double largest = 0.3, difference = 0;
  for (double x : b) if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    difference = std::max(difference, std::isnan(a[i]) || std::isnan(b[i]) ? inf : std::abs(a[i] - b[i]));
  }
  return difference / largest;
}
double unit(DType t) { return t == DType::f32 ? 2e-5 : t == DType::f16 ? 4e-3 : 3e-2; }

struct Attended { Tensor y; std::vector<Tensor> grads; };

// Attention, and the gradients of a weighted sum of it.
Attended attend(const std::vector<Tensor>& qkv, const Tensor& weights, const Tensor& mask = {}, AttentionOptions o = {}, bool mask_grad = false) {
  std::vector<Tensor> leaves;
  for (auto& x : qkv) leaves.push_back(x.detach().requires_grad_());
  Tensor m = mask;
  if (mask_grad) leaves.push_back(m = mask.detach().requires_grad_());
  Tensor y = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], m, o);
  return {y.detach(), grad({(y * weights).sum()}, leaves)};
}
std::vector<Tensor> widened(const std::vector<Tensor>& x) {
  std::vector<Tensor> r;
  for (auto& t : x) r.push_back(t.to(DType::f64));
  return r;
}
void check_against_f64(const std::vector<Tensor>& qkv, const Tensor& mask = {}, AttentionOptions o = {}, bool mask_grad = false) {
  const DType t = qkv[0].dtype();
  Shape result = qkv[0].shape();
  result[3] = qkv[2].size(3);
  Tensor w = drawn(result, t);
  Attended got = attend(qkv, w, mask, o, mask_grad);
  Attended expected = attend(widened(qkv), w.to(DType::f64), mask.defined() && is_floating(mask.dtype()) ? mask.to(DType::f64) : mask, o, mask_grad);
  CHECK(got.y.dtype() == t);
  CHECK(distance(got.y, expected.y) <= unit(t));
  for (size_t i = 0; i < got.grads.size(); ++i) {
    INFO("gradient " << i);
    CHECK(distance(got.grads[i], expected.grads[i]) <= 2 * unit(t));
  }
}

// q, k and v as a model makes them of the result of one linear layer.
std::vector<Tensor> heads_of(const Tensor& packed, int64_t heads) {
  std::vector<Tensor> parts = chunk(packed, 3, -1);
  for (auto& x : parts) x = x.reshape({x.size(0), x.size(1), heads, x.size(2) / heads}).transpose(1, 2);
  return parts;
}
Tensor joined(const Tensor& y) { return y.transpose(1, 2).reshape({y.size(0), y.size(2), y.size(1) * y.size(3)}); }

constexpr DType dtypes[] = {DType::f16, DType::bf16, DType::f32};

}  // namespace

TEST_CASE("attention on CUDA is the composition's in f64, from views of a packed tensor and to one") {
  NEEDS_CUDA();
  manual_seed(1);
  const int64_t b = 2, h = 3;
  for (DType type : dtypes)
    for (int64_t t : {1, 7, 64, 129, 333})
      for (int64_t d : {8, 32, 64, 128})
        for (bool causal : {false, true}) {
          INFO(name(type) << ", t " << t << ", d " << d << (causal ? ", causal" : ""));
          Tensor packed = drawn({b, t, 3 * h * d}, type), w = drawn({b, t, h * d}, type);
          auto run = [&](const Tensor& x, const Tensor& weights) {
            Tensor leaf = x.detach().requires_grad_();
            auto qkv = heads_of(leaf, h);
            Tensor y = scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, {.causal = causal});
            CHECK(y.transpose(1, 2).is_contiguous());
            return std::pair{y.detach(), grad({(joined(y) * weights).sum()}, std::vector<Tensor>{leaf})[0]};
          };
          auto [y, g] = run(packed, w);
          auto [y64, g64] = run(packed.to(DType::f64), w.to(DType::f64));
          CHECK(distance(y, y64) <= unit(type));
          CHECK(distance(g, g64) <= 2 * unit(type));
          NoGrad off;  // no log-sum-exps
          auto qkv = heads_of(packed, h);
          CHECK(distance(scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, {.causal = causal}), y64) <= unit(type));
        }
}

TEST_CASE("attention on CUDA: heads of any width that share keys, with any number of keys and any mask") {
  NEEDS_CUDA();
  manual_seed(2);
  struct Sizes { int64_t b, h, g, t, s, d, e; };
  for (DType type : dtypes)
    for (auto [b, h, g, t, s, d, e] : {Sizes{2, 4, 2, 65, 130, 64, 64}, {1, 6, 1, 200, 77, 16, 40}, {2, 2, 2, 33, 257, 5, 3}, {1, 2, 1, 100, 190, 256, 256},
                                       {1, 2, 2, 70, 70, 200, 24}, {1, 1, 1, 128, 1, 64, 64}, {1, 2, 2, 1, 300, 64, 64}, {1, 1, 1, 40, 50, 300, 8}})
      for (bool causal : {false, true}) {
        INFO(name(type) << ", " << b << " " << h << " " << g << " " << t << " " << s << " " << d << " " << e << (causal ? ", causal" : ""));
        std::vector<Tensor> qkv{drawn({b, h, t, d}, type), drawn({b, g, s, d}, type), drawn({b, g, s, e}, type)};
        AttentionOptions o{.causal = causal, .scale = .1};
        check_against_f64(qkv, {}, o);
        check_against_f64(qkv, gt(drawn({b, 1, 1, s}, DType::f32), -1), o);
        check_against_f64(qkv, gt(drawn({t, s}, DType::f32), 0), o);
        check_against_f64(qkv, drawn({h, t, s}, type), o);
        check_against_f64(qkv, drawn({b, h, t, s}, DType::f32), o, true);
        check_against_f64(qkv, drawn({t, s}, type), o, true);
        std::vector<Tensor> odd;  // rows that no 16-byte access takes
        for (auto& x : qkv) {
          Tensor padded = zeros({x.size(0), x.size(1), x.size(2), x.size(3) + 1}, {.dtype = type, .device = gpu});
          odd.push_back(padded.slice(3, 1, {}));
          Tensor(odd.back()).copy_(x);
        }
        CHECK(distance(attend(odd, ones({b, h, t, e}, {.dtype = type, .device = gpu}), {}, o).y,
                       attend(qkv, ones({b, h, t, e}, {.dtype = type, .device = gpu}), {}, o).y) <= unit(type));
      }
}

TEST_CASE("attention on CUDA drops the weights that the CPU drops") {
  NEEDS_CUDA();
  for (DType type : dtypes)
    for (bool causal : {false, true}) {
      INFO(name(type) << (causal ? ", causal" : ""));
      manual_seed(3);
      std::vector<Tensor> qkv{drawn({2, 2, 75, 16}, type), drawn({2, 1, 91, 16}, type), drawn({2, 1, 91, 8}, type)}, host;
      for (auto& x : qkv) host.push_back(x.cpu());
      Tensor w = drawn({2, 2, 75, 8}, type);
      manual_seed(4);
      Attended got = attend(qkv, w, {}, {.causal = causal, .dropout = .3});
      manual_seed(4);
      Attended expected = attend(host, w.cpu(), {}, {.causal = causal, .dropout = .3});
      CHECK(distance(got.y, expected.y) <= unit(type));
      for (size_t i = 0; i < 3; ++i) CHECK(distance(got.grads[i], expected.grads[i]) <= 2 * unit(type));
      CHECK(distance(scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, {.dropout = 1}), zeros({2, 2, 75, 8}, {.dtype = type})) == 0);
    }
}

TEST_CASE("attention on CUDA: queries that see nothing, and what is not a number, are as on the CPU") {
  NEEDS_CUDA();
  manual_seed(5);
  for (DType type : dtypes)
    for (int64_t d : {8, 20}) {
      INFO(name(type) << ", d " << d);
      std::vector<Tensor> qkv{drawn({1, 2, 70, d}, type), drawn({1, 2, 66, d}, type), drawn({1, 2, 66, d}, type)}, host;
      Tensor w = drawn({1, 2, 70, d}, type);
      auto compare = [&](const Tensor& mask) {
        host.clear();
        for (auto& x : qkv) host.push_back(x.cpu());
        Attended got = attend(qkv, w, mask), expected = attend(host, w.cpu(), mask.defined() ? mask.cpu() : mask);
        CHECK(distance(got.y, expected.y) <= unit(type));
        for (size_t i = 0; i < 3; ++i) CHECK(distance(got.grads[i], expected.grads[i]) <= 2 * unit(type));
        return got;
      };
      Tensor seen = ones({70, 66}, {.dtype = DType::b8, .device = gpu});
      seen.slice(0, 3, 40).fill_(0);
      seen.slice(1, 5, 9).fill_(0);
      for (const Tensor& mask : {seen, where(seen, zeros({70, 66}, {.dtype = type, .device = gpu}), -inf)}) {
        Attended got = compare(mask);
        for (double x : got.y.slice(2, 3, 40).to_vector<double>()) CHECK(x == 0);
        for (double x : got.grads[0].slice(2, 3, 40).to_vector<double>()) CHECK(x == 0);
        for (double x : got.grads[2].slice(2, 5, 9).to_vector<double>()) CHECK(x == 0);
        for (auto& g : got.grads) for (double x : g.to_vector<double>()) CHECK(std::isfinite(x));
      }
      // One query or key that is not a number: with a mask in our own kernels, without in whichever runs.
      for (double bad : {std::nan(""), inf})
        for (const Tensor& mask : {Tensor(), seen}) {
          INFO(bad);
          Tensor q = qkv[0].clone();
          qkv[0].select(2, 50).fill_(bad);
          host.clear();
          for (auto& x : qkv) host.push_back(x.cpu());
          Tensor y = scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], mask);
          CHECK(distance(y, scaled_dot_product_attention(host[0], host[1], host[2], mask.defined() ? mask.cpu() : mask)) <= unit(type));
          qkv[0] = q;
        }
    }
}

TEST_CASE("attention on CUDA without keys or queries") {
  NEEDS_CUDA();
  for (DType type : dtypes) {
    auto of = [&](const Shape& s) { return ones(s, {.dtype = type, .device = gpu}); };
    Attended no_keys = attend({of({1, 2, 3, 8}), of({1, 2, 0, 8}), of({1, 2, 0, 8})}, of({1, 2, 3, 8}));
    for (double x : no_keys.y.to_vector<double>()) CHECK(x == 0);
    for (double x : no_keys.grads[0].to_vector<double>()) CHECK(x == 0);
    Attended no_queries = attend({of({1, 2, 0, 8}), of({1, 2, 5, 8}), of({1, 2, 5, 8})}, of({1, 2, 0, 8}));
    for (size_t i : {1, 2}) for (double x : no_queries.grads[i].to_vector<double>()) CHECK(x == 0);
  }
}

TEST_CASE("attention on CUDA and its gradient have the same bits every time") {
  NEEDS_CUDA();
  manual_seed(6);
  for (DType type : dtypes)
    for (int64_t t : {333, 1024})
      for (bool masked : {false, true}) {
        INFO(name(type) << ", t " << t << (masked ? ", masked" : ""));
        std::vector<Tensor> qkv{drawn({8, 12, t, 64}, type), drawn({8, 6, t, 64}, type), drawn({8, 6, t, 64}, type)};
        Tensor w = drawn({8, 12, t, 64}, type), mask = masked ? gt(drawn({8, 1, 1, t}, DType::f32), -1) : Tensor();
        Attended first = attend(qkv, w, mask, {.causal = true});
        for (int run = 0; run < 10; ++run) {
          Attended again = attend(qkv, w, mask, {.causal = true});
          REQUIRE(same_bits(again.y, first.y));
          for (size_t i = 0; i < 3; ++i) REQUIRE(same_bits(again.grads[i], first.grads[i]));
        }
      }
}

TEST_CASE("attention on CUDA over long sequences: both kinds of kernels agree, and no weights are in memory") {
  NEEDS_CUDA();
  manual_seed(7);
  const int64_t b = 2, h = 16, t = 8192, d = 64;  // weights would take 4 GiB in 16 bits
  std::vector<Tensor> qkv;
  for (int i = 0; i < 3; ++i) qkv.push_back(randn({b, h, t, d}, {.device = gpu}).to(DType::bf16));
  Tensor w = randn({b, h, t, d}, {.device = gpu}).to(DType::bf16), all = ones({1, 1, 1, t}, {.dtype = DType::b8, .device = gpu});
  Attended library = attend(qkv, w, {}, {.causal = true});
  backend(DeviceType::cuda).synchronize(0);
  for (DType type : dtypes) {
    std::vector<Tensor> x;
    for (auto& e : qkv) x.push_back(e.to(type));
    Tensor weights = w.to(type);
    reset_peak_memory(gpu);
    int64_t before = memory_stats(gpu).peak;
    Attended own = attend(x, weights, all, {.causal = true});
    CHECK(memory_stats(gpu).peak - before < int64_t{1} << 30);
    CHECK(distance(library.y, own.y) <= unit(DType::bf16));
    for (size_t i = 0; i < 3; ++i) CHECK(distance(library.grads[i], own.grads[i]) <= 2 * unit(DType::bf16));
  }
}

TEST_CASE("second derivatives of attention on CUDA") {
  NEEDS_CUDA();
  manual_seed(8);
  for (DType type : {DType::f32, DType::f16}) {
    std::vector<Tensor> qkv{drawn({1, 2, 9, 8}, type), drawn({1, 2, 9, 8}, type), drawn({1, 2, 9, 8}, type)};
    auto second = [](const std::vector<Tensor>& in) {
      std::vector<Tensor> leaves;
      for (auto& x : in) leaves.push_back(x.detach().requires_grad_());
      Tensor y = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], {}, {.causal = true}), sum;
      for (auto& g : grad({(y * y).sum()}, leaves, {.create_graph = true})) sum = sum.defined() ? sum + (g * g).sum() : (g * g).sum();
      return grad({sum}, leaves);
    };
    auto got = second(qkv), expected = second(widened(qkv));
    for (size_t i = 0; i < 3; ++i) CHECK(distance(got[i], expected[i]) <= 10 * unit(type));
  }
}

TEST_CASE("a captured step with attention replays as the eager one, bit for bit") {
  NEEDS_CUDA();
  manual_seed(9);
  for (DType type : dtypes)
    for (int64_t t : {64, 77})  // with 16 bits, without and with a mask of padding
      for (double dropout : {0.0, 0.2}) {
        INFO(name(type) << ", t " << t << ", dropout " << dropout);
        auto step = [&](const Tensor& x) {
          Tensor leaf = x.detach().requires_grad_();
          auto qkv = heads_of(leaf, 2);
          Tensor y = scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, {.causal = true, .dropout = dropout});
          return std::pair{y.detach(), grad({(y * y).sum()}, std::vector<Tensor>{leaf})[0]};
        };
        std::vector<Tensor> inputs;
        for (int i = 0; i < 5; ++i) inputs.push_back(drawn({3, t, 3 * 2 * 32}, type));
        auto run = [&](auto&& f) {
          manual_seed(10);
          std::vector<Tensor> results;
          for (auto& x : inputs) {
            auto [y, g] = f(x);
            results.push_back(y.clone());
            results.push_back(g.clone());
          }
          return results;
        };
        auto replayed = capture(step);
        auto expected = run(step), got = run(replayed);
        CHECK(replayed.replays() == 3);
        for (size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
      }
}
