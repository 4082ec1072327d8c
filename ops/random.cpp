// Random draws on the CPU. Each takes its place in the stream by advancing the generator's offset.
#include "halftone/ops/random.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/elementwise_cpu.h"

namespace halftone {
namespace {

// Reserves the blocks that n numbers take; returns {seed, first block}.
std::pair<uint64_t, uint64_t> reserve(const Tensor& state, int64_t n) {
  int64_t* s = state.data<int64_t>();
  return {static_cast<uint64_t>(s[0]), static_cast<uint64_t>(std::atomic_ref(s[1]).fetch_add((n + 3) / 4))};
}

template <bool normal> void run_draw(const Call& c, std::span<Tensor>) {
  const Tensor& x = c.in[0];
  auto range = c.as<DrawRange>();
  int64_t n = x.numel();
  auto [seed, first] = reserve(c.in[1], n);
  Tensor dense = x.is_contiguous() ? x : Tensor::empty(Meta(x.shape(), x.dtype(), x.device()));
  visit<floating_types>(x.dtype(), [&, seed = seed, first = first]<class T>(Type<T>) {
    T* p = dense.data<T>();
    parallel_for(n, 1 << 13, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Philox4 block = philox(seed, first + static_cast<uint64_t>(i / 4));
        double u = normal ? normal_from(block, static_cast<int>(i % 4)) : uniform01(block.v[i % 4]);
        p[i] = draw_value<T, normal>(u, range);
      }
    });
  });
  if (dense.storage() != x.storage()) call_all(op::copy, {x, dense});
}

void run_permutation(const Call& c, std::span<Tensor>) {
  int64_t* p = c.in[0].data<int64_t>();
  int64_t n = c.in[0].numel();
  auto [seed, first] = reserve(c.in[1], 2 * n);
  std::iota(p, p + n, 0);
  for (int64_t i = n - 1; i > 0; --i) {  // Fisher and Yates; 64 random bits leave no visible bias
    Philox4 block = philox(seed, first + static_cast<uint64_t>(i / 2));
    const uint32_t* w = block.v + 2 * (i % 2);
    uint64_t bits = uint64_t{w[0]} << 32 | w[1];
    std::swap(p[i], p[static_cast<int64_t>(bits % static_cast<uint64_t>(i + 1))]);
  }
}

Metas infer_draw(const Call& c) {
  HT_CHECK(is_floating(c.in[0].dtype()), c.op->name, ": expected a floating dtype, got ", c.in[0].dtype());
  return {};
}

std::vector<Sample> draw_samples() {
  std::vector<Sample> all;
  for (auto& shape : elementwise::sample_shapes)
    all.push_back({{{.shape = shape}, {.shape = {2}, .low = 1, .high = 100, .dtype = DType::i64, .differentiable = false}}, Attrs::of(DrawRange{0, 1})});
  return all;
}

}  // namespace

namespace op {

constinit OpDef uniform = {
    .name = "uniform", .doc = "writes draws uniform in [low, high)", .cast = Cast::keep,
    .infer = infer_draw,
    .writes = [](const Call&, size_t) { return true; },
    .dtypes = {floating_types, floating_types},
    .samples = draw_samples,
    .kernel = {run_draw<false>}};

constinit OpDef normal = {
    .name = "normal", .doc = "writes normal draws of a mean and standard deviation", .cast = Cast::keep,
    .infer = infer_draw,
    .writes = [](const Call&, size_t) { return true; },
    .dtypes = {floating_types, floating_types},
    .samples = draw_samples,
    .kernel = {run_draw<true>}};

constinit OpDef permutation = {
    .name = "permutation", .doc = "writes 0 to n - 1 in random order", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      HT_CHECK(c.in[0].dtype() == DType::i64 && c.in[0].is_contiguous(), "permutation: expected a contiguous i64 tensor");
      return {};
    },
    .writes = [](const Call&, size_t) { return true; },
    .dtypes = {only(DType::i64), 0},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (int64_t n : {0, 1, 2, 7, 33, 257, 1000, 5000})
        all.push_back({{{.shape = {n}, .low = 0, .high = 2, .dtype = DType::i64, .differentiable = false},
                        {.shape = {2}, .low = 1, .high = 100, .dtype = DType::i64, .differentiable = false}}, {}});
      return all;
    },
    .kernel = {run_permutation}};

}  // namespace op

std::span<OpDef* const> random_ops() {
  static constexpr OpDef* all[] = {&op::uniform, &op::normal, &op::permutation};
  return all;
}

Tensor uniform_(const Tensor& x, double low, double high) {
  call_all(op::uniform, {x, generator().state(x.device())}, Attrs::of(DrawRange{low, high}));
  return x;
}
Tensor normal_(const Tensor& x, double mean, double std) {
  HT_CHECK(std >= 0, "normal_: expected a standard deviation of 0 or more, got ", std);
  call_all(op::normal, {x, generator().state(x.device())}, Attrs::of(DrawRange{mean, std}));
  return x;
}
namespace {
Tensor drawn(const Shape& shape, const TensorOptions& o, Tensor (*draw)(const Tensor&, double, double)) {
  Tensor x = draw(empty(shape, {.dtype = o.dtype, .device = o.device}), 0, 1);
  if (o.requires_grad) x.requires_grad_();
  return x;
}
}  // namespace
Tensor rand(const Shape& shape, const TensorOptions& o) { return drawn(shape, o, uniform_); }
Tensor randn(const Shape& shape, const TensorOptions& o) { return drawn(shape, o, normal_); }

Tensor randint(int64_t low, int64_t high, const Shape& shape, const TensorOptions& o) {
  HT_CHECK(low < high, "randint: expected low < high, got ", low, " and ", high);
  HT_CHECK(high - low <= 1 << 24, "randint: expected a range of at most 2^24 values, got ", low, " to ", high);
  // Drawn from 0 so that truncation floors.
  Tensor u = uniform_(empty(shape, {.dtype = DType::f64, .device = o.device}), 0, static_cast<double>(high - low));
  return (u.to(DType::i64) + low).to(o.dtype.value_or(DType::i64));
}
Tensor randperm(Size n, const TensorOptions& o) {
  HT_CHECK(n >= 0, "randperm: expected a size of 0 or more, got ", n.value);
  Tensor p = empty({n}, {.dtype = DType::i64});
  call_all(op::permutation, {p, generator().state(Device::cpu())});
  return p.to({.dtype = o.dtype.value_or(DType::i64), .device = o.device});
}

}  // namespace halftone
