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
  return {static_cast<uint64_t>(std::atomic_ref(s[0]).load()), static_cast<uint64_t>(std::atomic_ref(s[1]).fetch_add((n + 3) / 4))};
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

void run_integers(const Call& c, std::span<Tensor>) {
  auto range = c.as<IntegerRange>();
  int64_t* p = c.in[0].data<int64_t>();
  int64_t n = c.in[0].numel();
  auto [seed, first] = reserve(c.in[1], 2 * n);
  parallel_for(n, 1 << 13, [&, seed = seed, first = first](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) p[i] = detail::draw_integer(detail::random_bits(seed, first, static_cast<uint64_t>(i)), range);
  });
}

void run_draw_key(const Call& c, std::span<Tensor> out) {
  auto [seed, first] = reserve(c.in[0], c.as<int64_t>());
  int64_t* key = out[0].data<int64_t>();
  key[0] = static_cast<int64_t>(seed);
  key[1] = static_cast<int64_t>(first);
}

struct Key { uint64_t seed, first; };
Key key_of(const Tensor& t) {
  Tensor key = t.contiguous();
  return {static_cast<uint64_t>(key.data<int64_t>()[0]), static_cast<uint64_t>(key.data<int64_t>()[1])};
}

// y = f(x, u) with one u for `together` neighbours.
template <class F> void draw_by_key(const Call& c, const Tensor& y, int64_t together, F f) {
  const Tensor& x = c.in[0];
  Key key = key_of(c.in[1]);
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    const T* from = x.data<T>();
    T* to = y.data<T>();
    Rows<2>(x.shape(), {y.strides(), x.strides()}).run([&](auto at, auto step, int64_t n) {
      // y is dense: its offset is the element's number.
      int64_t number = at[0] / together, left = together - at[0] % together;
      Philox4 block = philox(key.seed, key.first + static_cast<uint64_t>(number / 4));
      for (int64_t k = 0; k < n; ++k) {
        to[at[0] + k] = T(f(compute_t<T>(from[at[1] + k * step[1]]), uniform01(block.v[number % 4])));
        if (--left > 0) continue;
        left = together;
        if (++number % 4 == 0) block = philox(key.seed, key.first + static_cast<uint64_t>(number / 4));
      }
    });
  });
}
void run_dropout(const Call& c, std::span<Tensor> out) {
  auto a = c.as<DropoutAttrs>();
  draw_by_key(c, out[0], a.together, Dropout(a.p));
}
void run_bernoulli(const Call& c, std::span<Tensor> out) { draw_by_key(c, out[0], 1, Bernoulli{}); }

void run_multinomial(const Call& c, std::span<Tensor> out) {
  auto a = c.as<MultinomialAttrs>();
  Key key = key_of(c.in[1]);
  Tensor weights = c.in[0].to(DType::f64).contiguous();
  int64_t n = weights.size(-1), rows = n == 0 ? 0 : weights.numel() / n;
  int64_t chunks = (n + detail::cumulated - 1) / detail::cumulated;
  const double* p = weights.data<double>();
  int64_t* y = out[0].data<int64_t>();
  for (int64_t r = 0; r < rows; ++r) {
    const double* w = p + r * n;
    std::vector<double> within(static_cast<size_t>(n)), before(static_cast<size_t>(chunks));
    double total = 0;
    int64_t positive = 0;
    for (int64_t k = 0; k < chunks; ++k) {
      double sum = 0;
      for (int64_t i = k * detail::cumulated; i < std::min(n, (k + 1) * detail::cumulated); ++i) {
        HT_CHECK(w[i] >= 0 && w[i] <= largest<double>, "multinomial: expected finite weights of 0 or more, got ", w[i], " at ", i, " of row ", r);
        positive += w[i] > 0;
        within[static_cast<size_t>(i)] = sum += w[i];
      }
      before[static_cast<size_t>(k)] = total;
      total += sum;
    }
    int64_t needed = a.replacement ? std::min<int64_t>(a.count, 1) : a.count;
    HT_CHECK(positive >= needed, "multinomial: row ", r, " has ", positive, " positive weights, expected at least ", needed);
    if (a.replacement) {
      for (int64_t j = 0; j < a.count; ++j)
        y[r * a.count + j] = detail::choose(within.data(), before.data(), n, total, detail::random_bits(key.seed, key.first, static_cast<uint64_t>(r * a.count + j)));
      continue;
    }
    std::vector<std::pair<double, int64_t>> order(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i)
      order[static_cast<size_t>(i)] = {detail::arrival(w[i], detail::random_bits(key.seed, key.first, static_cast<uint64_t>(r * n + i))), i};
    std::partial_sort(order.begin(), order.begin() + a.count, order.end());
    for (int64_t j = 0; j < a.count; ++j) y[r * a.count + j] = order[static_cast<size_t>(j)].second;
  }
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

SampleInput key_sample() { return {.shape = {2}, .low = 1, .high = 100, .dtype = DType::i64, .differentiable = false}; }
void check_key(const Call& c) {
  HT_CHECK(c.in[1].shape() == Shape({2}) && c.in[1].dtype() == DType::i64, c.op->name, ": expected a key [2] (i64), got ", c.in[1].meta());
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

constinit OpDef integers = {
    .name = "integers", .doc = "writes whole numbers uniform in a range", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      HT_CHECK(c.in[0].dtype() == DType::i64 && c.in[0].is_contiguous(), "integers: expected a contiguous i64 tensor");
      return {};
    },
    .writes = [](const Call&, size_t) { return true; },
    .dtypes = {only(DType::i64), only(DType::i64)},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto [n, low, count] : {std::tuple<int64_t, int64_t, uint64_t>{1, 0, 1}, {2, -5, 10}, {7, 0, 1u << 31}, {33, -3, uint64_t{1} << 40}, {257, 0, 2},
                                   {1000, 5, 7}, {0, 0, 3}, {5000, smallest<int64_t>, ~uint64_t{0}}})
        all.push_back({{{.shape = {n}, .low = 0, .high = 2, .dtype = DType::i64, .differentiable = false}, key_sample()}, Attrs::of(IntegerRange{low, count})});
      return all;
    },
    .kernel = {run_integers}};

constinit OpDef draw_key = {
    .name = "draw_key", .doc = "the place of some draws in a stream of random numbers, which goes on after them", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      HT_CHECK(c.in[0].shape() == Shape({2}) && c.in[0].dtype() == DType::i64, "draw_key: expected a generator's state [2] (i64), got ", c.in[0].meta());
      return {Meta({2}, DType::i64, c.in[0].device())};
    },
    .writes = writes_first,
    .dtypes = {only(DType::i64), only(DType::i64)},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (int64_t n : {0, 1, 4, 5, 33, 257, 1000, 1 << 30}) all.push_back({{key_sample()}, Attrs::of(n)});
      return all;
    },
    .kernel = {run_draw_key}};

constinit OpDef dropout = {
    .name = "dropout", .doc = "elements dropped by a key, the others scaled up", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& x = c.in[0].meta();
      auto a = c.as<DropoutAttrs>();
      check_key(c);
      HT_CHECK(is_floating(x.dtype), "dropout: expected a floating dtype, got ", x);
      HT_CHECK(a.p >= 0 && a.p <= 1, "dropout: expected p in [0, 1], got ", a.p);
      return {Meta(x.shape, x.dtype, x.device)};
    },
    .saves = {.in = 2, .out = 0},
    .backward = [](const Rule& r) -> Tensors { return {call(op::dropout, {r.grad(), r.in(1)}, r.attrs()), {}}; },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& [shape, a] : std::vector<std::pair<Shape, DropoutAttrs>>{
               {{1}, {.5, 1}}, {{7}, {.5, 1}}, {{33}, {.1, 1}}, {{257}, {.9, 1}}, {{5}, {0, 1}}, {{5}, {1, 1}}, {{}, {.5, 1}}, {{0, 3}, {.5, 1}},
               {{2, 3, 4}, {.5, 4}}, {{3, 5, 7, 3}, {.3, 21}}, {{40, 70}, {.25, 1}}})
        all.push_back({{{.shape = shape}, key_sample()}, Attrs::of(a)});
      return all;
    },
    .kernel = {run_dropout}};

constinit OpDef bernoulli = {
    .name = "bernoulli", .doc = "1 with the probability of each element, else 0, by a key", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& p = c.in[0].meta();
      check_key(c);
      HT_CHECK(is_floating(p.dtype), "bernoulli: expected probabilities of a floating dtype, got ", p);
      return {Meta(p.shape, p.dtype, p.device)};
    },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& shape : elementwise::sample_shapes) all.push_back({{{.shape = shape, .low = 0, .high = 1}, key_sample()}, {}});
      return all;
    },
    .kernel = {run_bernoulli}};

constinit OpDef multinomial = {
    .name = "multinomial", .doc = "indices drawn by weights, by a key", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& w = c.in[0].meta();
      auto a = c.as<MultinomialAttrs>();
      check_key(c);
      HT_CHECK(is_floating(w.dtype) && (w.shape.rank() == 1 || w.shape.rank() == 2), "multinomial: expected weights [n] or [m, n] of a floating dtype, got ", w);
      int64_t n = w.shape.back();
      HT_CHECK(a.count >= 0 && (n > 0 || a.count == 0), "multinomial: cannot draw ", a.count, " of ", n, " elements");
      HT_CHECK(a.replacement || a.count <= n, "multinomial: cannot draw ", a.count, " of ", n, " elements without replacement");
      Shape y = w.shape;
      y[y.size() - 1] = a.count;
      return {Meta(y, DType::i64, w.device)};
    },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& [shape, a] : std::vector<std::pair<Shape, MultinomialAttrs>>{
               {{1}, {1, false}}, {{7}, {7, false}}, {{7}, {33, true}}, {{3, 5}, {2, false}}, {{3, 5}, {4, true}}, {{257}, {300, true}},
               {{33, 600}, {9, true}}, {{4, 1030}, {5, false}}, {{3}, {0, true}}, {{0, 3}, {2, false}}})
        all.push_back({{{.shape = shape, .low = .1, .high = 2}, key_sample()}, Attrs::of(a)});
      return all;
    },
    .kernel = {run_multinomial}};

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
  static constexpr OpDef* all[] = {&op::uniform,  &op::normal,  &op::integers,  &op::permutation,
                                   &op::draw_key, &op::dropout, &op::bernoulli, &op::multinomial};
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
  Tensor x = empty(shape, {.dtype = DType::i64, .device = o.device});
  call_all(op::integers, {x, generator().state(o.device)}, Attrs::of(IntegerRange{low, static_cast<uint64_t>(high) - static_cast<uint64_t>(low)}));
  return x.to(o.dtype.value_or(DType::i64));
}
Tensor randperm(Size n, const TensorOptions& o) {
  HT_CHECK(n >= 0, "randperm: expected a size of 0 or more, got ", n.value);
  Tensor p = empty({n}, {.dtype = DType::i64});
  call_all(op::permutation, {p, generator().state(Device::cpu())});
  return p.to({.dtype = o.dtype.value_or(DType::i64), .device = o.device});
}


Tensor draw_key(Device device, int64_t numbers) { return call(op::draw_key, {generator().state(device)}, Attrs::of(numbers)); }

namespace {
Tensor dropped(const char* who, const Tensor& x, double p, bool training, int64_t together) {
  HT_CHECK(x.defined(), who, ": x is undefined");
  HT_CHECK(p >= 0 && p <= 1, who, ": expected p in [0, 1], got ", p);
  if (!training || p == 0 || x.numel() == 0) return x;
  return call(op::dropout, {x, draw_key(x.device(), x.numel() / together)}, Attrs::of(DropoutAttrs{p, together}));
}
// The size of a channel, whose dimensions are the last `spatial`.
int64_t channel(const char* who, const Tensor& x, int spatial, const char* expected) {
  HT_CHECK(x.defined(), who, ": x is undefined");
  HT_CHECK(x.rank() == spatial + 1 || x.rank() == spatial + 2, who, ": expected x ", expected, ", got ", x.meta());
  int64_t n = 1;
  for (int d = x.rank() - spatial; d < x.rank(); ++d) n *= x.size(d);
  return std::max<int64_t>(n, 1);
}
}  // namespace
Tensor dropout(const Tensor& x, double p, bool training) { return dropped("dropout", x, p, training, 1); }
Tensor dropout1d(const Tensor& x, double p, bool training) {
  return dropped("dropout1d", x, p, training, channel("dropout1d", x, 1, "[n, c, l] or [c, l]"));
}
Tensor dropout2d(const Tensor& x, double p, bool training) {
  return dropped("dropout2d", x, p, training, channel("dropout2d", x, 2, "[n, c, h, w] or [c, h, w]"));
}
Tensor bernoulli(const Tensor& p) {
  HT_CHECK(p.defined(), "bernoulli: p is undefined");
  NoGrad off;
  return call(op::bernoulli, {p, draw_key(p.device(), p.numel())});
}
Tensor multinomial(const Tensor& weights, Size count, MultinomialOptions o) {
  HT_CHECK(weights.defined(), "multinomial: weights is undefined");
  NoGrad off;
  int64_t n = std::max<int64_t>(1, weights.rank() > 0 ? weights.size(-1) : 1), rows = weights.numel() / n;
  int64_t numbers = o.replacement ? checked_mul(rows, std::max<int64_t>(count, 0)) : weights.numel();
  return call(op::multinomial, {weights, draw_key(weights.device(), checked_mul(2, numbers))}, Attrs::of(MultinomialAttrs{count, o.replacement}));
}

}  // namespace halftone
