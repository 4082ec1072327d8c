// Reductions, scans and orders against naive loops in f64, special values, derivatives at corners, error texts, and what users
// of other frameworks reported.
#include <algorithm>
#include <functional>
#include <numeric>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity(), nan_d = std::numeric_limits<double>::quiet_NaN();
constexpr DType floats[] = {DType::f16, DType::bf16, DType::f32, DType::f64};
using Doubles = std::vector<double>;

struct Random {  // a linear congruential generator (Knuth, MMIX)
  uint64_t state;
  double operator()(double low = -1, double high = 1) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return low + static_cast<double>(state >> 11) * 0x1p-53 * (high - low);
  }
  Doubles many(size_t n, double low = -1, double high = 1) {
    Doubles v(n);
    for (auto& x : v) x = (*this)(low, high);
    return v;
  }
};

double unit(DType t) { return t == DType::f16 ? 0x1p-11 : t == DType::bf16 ? 0x1p-8 : t == DType::f32 ? 0x1p-24 : 0x1p-53; }

// Within a rounding of the result, and `factor` roundings of a sum of size `scale` in f32 (in f64, when that is the dtype).
void check(const Tensor& got, const Doubles& expected, double factor = 0, double scale = 1) {
  auto v = got.to_vector<double>();
  REQUIRE(v.size() == expected.size());
  for (size_t i = 0; i < v.size(); ++i) {
    INFO("element " << i << " of " << str(got.meta()) << ", expected " << expected[i] << ", got " << v[i]);
    if (std::isnan(expected[i])) CHECK(std::isnan(v[i]));
    else if (std::isinf(v[i])) CHECK(v[i] == tensor(expected[i]).to(got.dtype()).item());
    else CHECK((v[i] == expected[i] || std::abs(v[i] - expected[i]) <=
                                           factor * scale * (got.dtype() == DType::f64 ? 0x1p-53 : 0x1p-24) + 2 * unit(got.dtype()) * std::abs(expected[i])));
  }
  tests::count("oracle_combinations");
}
void golden(const Tensor& t, const Doubles& expected, double relative = 0) {
  auto v = t.to_vector<double>();
  REQUIRE(v.size() == expected.size());
  for (size_t i = 0; i < v.size(); ++i) {
    INFO("element " << i << " of " << str(t));
    if (std::isnan(expected[i])) CHECK(std::isnan(v[i]));
    else CHECK((v[i] == expected[i] || std::abs(v[i] - expected[i]) <= relative * std::abs(expected[i])));
  }
  tests::count("golden_cases");
}
void golden(const Tensor& t, double expected, double relative = 0) { golden(t, Doubles{expected}, relative); }

// The lines along dim 1 of a tensor [a, n, b], which an oracle maps to lines of its own length.
Doubles by_line(const Tensor& x, const std::function<Doubles(const Doubles&)>& f) {
  auto v = x.to_vector<double>();
  auto a = static_cast<size_t>(x.size(0)), n = static_cast<size_t>(x.size(1)), b = static_cast<size_t>(x.size(2));
  std::vector<Doubles> lines;
  for (size_t i = 0; i < a; ++i)
    for (size_t j = 0; j < b; ++j) {
      Doubles line;
      for (size_t k = 0; k < n; ++k) line.push_back(v[(i * n + k) * b + j]);
      lines.push_back(f(line));
    }
  Doubles out;
  for (size_t i = 0; i < a; ++i)
    for (size_t k = 0; k < lines[0].size(); ++k)
      for (size_t j = 0; j < b; ++j) out.push_back(lines[i * b + j][k]);
  return out;
}

Tensor gradient(const std::function<Tensor(const Tensor&)>& f, const Tensor& at) {
  Tensor x = at.clone().requires_grad_();
  return grad({f(x)}, {x})[0];
}

struct Extents { size_t a, n, b; };
constexpr Extents sizes[] = {{1, 1, 1}, {2, 7, 3}, {3, 33, 1}, {1, 257, 4}, {2, 1025, 1}, {70, 3, 5}};

}  // namespace

TEST_CASE("prod, logsumexp, std and norms are their formulas") {
  Random random{11};
  for (auto& size : sizes)
    for (DType t : floats) {
      const size_t a = size.a, n = size.n, b = size.b;
      INFO(a << " " << n << " " << b << " " << str(t));
      Tensor x = tensor(random.many(a * n * b, .9, 1.1)).reshape({a, n, b}).to(t), y = tensor(random.many(a * n * b, -3, 3)).reshape({a, n, b}).to(t);
      auto count = static_cast<double>(n);
      auto one = [](double v) { return Doubles{v}; };
      check(prod(x, {1}), by_line(x, [&](auto& l) { return one(std::accumulate(l.begin(), l.end(), 1.0, std::multiplies<>())); }), count, 100);
      check(logsumexp(y, {1}), by_line(y, [&](auto& l) {
              double s = 0;
              for (double v : l) s += std::exp(v);
              return one(std::log(s));
            }), 16, 8);
      for (int64_t correction : {0, 1})
        check(stddev(y, {1}, {.correction = correction}), by_line(y, [&](auto& l) {
                double m = 0, q = 0;
                for (double v : l) m += v / count;
                for (double v : l) q += (v - m) * (v - m);
                return one(std::sqrt(q / (count - static_cast<double>(correction))));
              }), 16, 4);
      for (double p : {1.0, 2.0, 3.0, 0.5, -1.0, inf, -inf, 0.0})
        check(norm(y, {1}, {.p = p}), by_line(y, [&](auto& l) {
                double s = p == -inf ? inf : 0;
                for (double v : l) {
                  double m = std::abs(v);
                  s = p == inf ? std::max(s, m) : p == -inf ? std::min(s, m) : p == 0 ? s + (m != 0) : s + std::pow(m, p);
                }
                return one(std::isinf(p) || p == 0 ? s : std::pow(s, 1 / p));
              }), 16, 4);
      check(norm(y.transpose(0, 2), {1}).t().contiguous(), norm(y, {1}).to_vector<double>(), 4, 4);
    }
  golden(prod(tensor({3, -4, 5})), -60);
  CHECK(prod(tensor({3, -4, 5})).dtype() == DType::i64);
  golden(prod(full({40}, 2, {.dtype = DType::i32}), {0}), 1099511627776.0);
}

TEST_CASE("all, any and count_nonzero ask for what is not 0") {
  Tensor x = tensor({{0., 1., nan_d}, {0., 0., -0.}, {2., -3., 1e-300}});
  golden(all(x, {1}), {0, 0, 1});
  golden(any(x, {1}), {1, 0, 1});
  golden(count_nonzero(x, {1}), {2, 0, 3});
  golden(all(x), 0);
  golden(any(x), 1);
  golden(count_nonzero(x), 5);
  golden(all(zeros({0})), 1);
  golden(any(zeros({0})), 0);
  golden(count_nonzero(zeros({0})), 0);
  CHECK(all(x).dtype() == DType::b8);
  CHECK(any(x, {0}, {.keepdim = true}).shape() == Shape{1, 3});
  CHECK(count_nonzero(x).dtype() == DType::i64);
  for (DType t : {DType::f16, DType::i32, DType::u8, DType::b8}) golden(any(tensor({0., 2.}).to(t)), 1);
  golden(any(tensor({0., 0x1p-24}).to(DType::f16)), 1);  // subnormal
}

TEST_CASE("max and min of a dimension, with their places") {
  Random random{12};
  for (auto& size : sizes)
    for (DType t : floats) {
      const size_t a = size.a, n = size.n, b = size.b;
      INFO(a << " " << n << " " << b << " " << str(t));
      Tensor x = tensor(random.many(a * n * b)).reshape({a, n, b}).to(t);
      auto [high, at_high] = max(x, 1);
      auto [low, at_low] = min(x, -2, {.keepdim = true});
      check(high, by_line(x, [](auto& l) { return Doubles{*std::max_element(l.begin(), l.end())}; }));
      check(at_high, by_line(x, [](auto& l) { return Doubles{static_cast<double>(std::max_element(l.begin(), l.end()) - l.begin())}; }));
      check(low, by_line(x, [](auto& l) { return Doubles{*std::min_element(l.begin(), l.end())}; }));
      CHECK(low.shape() == Shape{a, 1, b});
      CHECK((high.dtype() == t && at_high.dtype() == DType::i64 && at_low.shape() == low.shape()));
    }
  golden(max(tensor({1., nan_d, 3., nan_d}), 0).indices, 1);
  golden(min(tensor({1., nan_d, 3., nan_d}), 0).values, nan_d);
  golden(max(tensor({3, 7, 7}), 0).indices, 1);
  golden(gradient([](auto& x) { return max(x, 0).values; }, tensor({3., 1., 3.})), {1, 0, 0});  // of equal ones the first
  golden(gradient([](auto& x) { return sum(square(min(x, 1).values)); }, tensor({{3., 1.}, {-2., 5.}})), {0, 2, -4, 0});
}

TEST_CASE("running sums, products and recurrences go along a line") {
  Random random{13};
  for (auto& size : {Extents{1, 1, 1}, Extents{2, 7, 3}, Extents{3, 33, 1}, Extents{1, 257, 4}, Extents{2, 2100, 1}, Extents{70, 3, 5}})
    for (DType t : floats)
      for (bool reverse : {false, true}) {
        const size_t a = size.a, n = size.n, b = size.b;
        INFO(a << " " << n << " " << b << " " << str(t) << (reverse ? ", reverse" : ""));
        Tensor x = tensor(random.many(a * n * b, .95, 1.05)).reshape({a, n, b}).to(t), y = tensor(random.many(a * n * b)).reshape({a, n, b}).to(t);
        auto turned = [&](Doubles l) {
          if (reverse) std::reverse(l.begin(), l.end());
          return l;
        };
        auto count = static_cast<double>(n);
        check(cumsum(y, 1, {.reverse = reverse}), by_line(y, [&](auto& l) {
                Doubles v = turned(l);
                for (size_t i = 1; i < v.size(); ++i) v[i] += v[i - 1];
                return turned(v);
              }), count, 2);
        check(cumprod(x, 1, {.reverse = reverse}), by_line(x, [&](auto& l) {
                Doubles v = turned(l);
                for (size_t i = 1; i < v.size(); ++i) v[i] *= v[i - 1];
                return turned(v);
              }), count, 100);
        Tensor factor = x * 0.9;
        auto f = factor.to_vector<double>();
        size_t line = 0;
        check(recurrence(factor, y, 1, {.reverse = reverse}), by_line(y, [&](auto& l) {
                Doubles v = turned(l), c;
                for (size_t k = 0; k < n; ++k) c.push_back(f[(line / b * n + k) * b + line % b]);
                c = turned(c);
                ++line;
                for (size_t i = 1; i < v.size(); ++i) v[i] += c[i] * v[i - 1];
                return turned(v);
              }), 8 * count, 20);
      }
  golden(cumsum(tensor({1, 2, 3}), 0), {1, 3, 6});
  CHECK(cumsum(tensor({true, true}), 0).dtype() == DType::i64);
  golden(cumsum(tensor({true, true, false, true}), 0), {1, 2, 2, 3});
  golden(cumprod(tensor({2, 3, 0, 5}), 0, {.reverse = true}), {0, 0, 0, 5});
  golden(cumsum(tensor({1., nan_d, 1.}), 0), {1, nan_d, nan_d});
  golden(cumsum(tensor({1., inf, -inf, 1.}), 0), {1, inf, nan_d, nan_d});
  golden(cumsum(full({5000}, 1, {.dtype = DType::f16}), 0).slice(0, 4095, 4096), 4096);
  golden(cumsum(tensor(3.), 0), 3);
  CHECK(cumsum(zeros({0, 3}), 0).shape() == Shape{0, 3});
  golden(shifted(tensor({1., 2., 3.}), 0, false, 9), {9, 1, 2});
  golden(shifted(tensor({1., 2., 3.}), 0, true, 9), {2, 3, 9});
}

TEST_CASE("sort and topk keep the order of equals and put NaN with the largest") {
  Random random{14};
  for (auto& size : sizes)
    for (DType t : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32, DType::i64, DType::u8})
      for (bool falling : {false, true}) {
        const size_t a = size.a, n = size.n, b = size.b;
        INFO(a << " " << n << " " << b << " " << str(t) << (falling ? ", descending" : ""));
        Doubles numbers = random.many(a * n * b, is_floating(t) ? -4 : 0, 9);
        for (auto& v : numbers) v = std::floor(v);  // many equals
        Tensor x = tensor(numbers).reshape({a, n, b}).to(t);
        auto order = [&](const Doubles& l) {
          std::vector<size_t> i(l.size());
          std::iota(i.begin(), i.end(), size_t{0});
          std::stable_sort(i.begin(), i.end(), [&](size_t p, size_t q) { return falling ? l[p] > l[q] : l[p] < l[q]; });
          return i;
        };
        auto values = [&](size_t k) {
          return [=](const Doubles& l) {
            Doubles v;
            for (size_t i : order(l)) v.push_back(l[i]);
            v.resize(k);
            return v;
          };
        };
        auto places = [&](size_t k) {
          return [=](const Doubles& l) {
            Doubles v;
            for (size_t i : order(l)) v.push_back(static_cast<double>(i));
            v.resize(k);
            return v;
          };
        };
        auto [sorted, at] = sort(x, 1, {.descending = falling});
        check(sorted, by_line(x, values(n)));
        check(at, by_line(x, places(n)));
        size_t k = (n + 1) / 2;
        auto [best, at_best] = topk(x, k, 1, {.largest = falling});
        check(best, by_line(x, values(k)));
        check(at_best, by_line(x, places(k)));
        CHECK((best.shape() == Shape{a, k, b} && at_best.dtype() == DType::i64 && best.dtype() == t));
      }
  Tensor x = tensor({nan_d, 1., inf, -inf, nan_d, -0., 0.});
  for (DType t : floats) {
    golden(sort(x.to(t)).values, {-inf, -0., 0., 1, inf, nan_d, nan_d});
    golden(sort(x.to(t)).indices, {3, 5, 6, 1, 2, 0, 4});
    golden(sort(x.to(t), 0, {.descending = true}).indices, {0, 4, 2, 1, 5, 6, 3});
    golden(topk(x.to(t), 3).indices, {0, 4, 2});
    golden(topk(x.to(t), 2, -1, {.largest = false}).values, {-inf, 0});
  }
  golden(sort(tensor({true, false, true})).indices, {1, 0, 2});
  golden(sort(tensor(4.)).values, 4);
  golden(topk(tensor(4.), 1).indices, 0);
  CHECK(topk(zeros({2, 3}), 0).values.shape() == Shape{2, 0});
  golden(gradient([](auto& v) { return sum(sort(v).values * tensor({1., 2., 3.})); }, tensor({5., -1., 2.})), {3, 1, 2});
  golden(gradient([](auto& v) { return sum(topk(v, 2).values * tensor({1., 2.})); }, tensor({5., -1., 7.})), {2, 0, 1});
}

TEST_CASE("special values of reductions") {
  golden(prod(zeros({0})), 1);
  golden(prod(zeros({0, 2}), {0}), {1, 1});
  golden(prod(tensor({1., nan_d, 0.})), nan_d);
  golden(prod(tensor({inf, 0.})), nan_d);
  golden(prod(tensor({1e30f, 1e30f, 1e-30f, 1e-30f})), 1, 1e-6);  // partial products leave f32
  golden(cumprod(tensor({1e30f, 1e30f, 1e-30f, 1e-30f}), 0), {1e30f, inf, 1e30f, 1}, 1e-6);
  golden(recurrence(tensor({inf, inf, 2., inf}), tensor({0., 0., 1., 0.}), 0), {0, 0, 1, inf});
  golden(logsumexp(tensor({1e4, 1e4})), 10000.693147180559945, 1e-15);
  golden(logsumexp(tensor({inf, 0.})), inf);
  golden(logsumexp(tensor({-inf, 0.})), 0);
  golden(logsumexp(tensor({-inf, -inf})), -inf);
  golden(logsumexp(tensor({inf, -inf, inf})), inf);
  golden(logsumexp(tensor({nan_d, inf, 1.})), nan_d);
  golden(logsumexp(tensor({1., -inf, nan_d})), nan_d);
  golden(logsumexp(zeros({2, 0}), {1}), {-inf, -inf});
  golden(logsumexp(tensor({6e4, 6e4}).to(DType::f16)), 60000);
  golden(stddev(tensor({5.})), nan_d);
  golden(stddev(tensor({5.}), {.correction = 0}), 0);
  golden(norm(zeros({0})), 0);
  golden(norm(tensor({3., nan_d})), nan_d);
  golden(norm(tensor({3., -inf})), inf);
  golden(norm(tensor({1e30f, 1e30f})), {1.4142135e30}, 1e-6);  // the squares pass f32
  golden(norm(tensor({6e4, 6e4}).to(DType::f16), {.p = 1}), inf);
  golden(norm(tensor({3., -4.}), {.p = inf}), 4);
  golden(norm(tensor({3., 0., -4.}), {.p = 0}), 2);
  golden(norm(tensor({3., -4.}), {.p = -1}), 1 / (1. / 3 + 1. / 4), 1e-15);
  CHECK(norm(ones({2, 3}), {1}, {.p = 1, .keepdim = true}).shape() == Shape{2, 1});
}

TEST_CASE("derivatives at zeros and equals") {
  auto product = [](const Tensor& x) { return prod(x); };
  golden(gradient(product, tensor({2., 3., 4.})), {12, 8, 6});
  golden(gradient(product, tensor({2., 0., 4.})), {0, 8, 0});
  golden(gradient(product, tensor({2., 3., 0., 0.})), {0, 0, 0, 0});
  golden(gradient([](auto& x) { return sum(prod(x, {0, 2}) * tensor({1., 10.})); }, tensor({1., 2., 0., 3., 4., 5., 6., 7.}).reshape({2, 2, 2})),
         {2 * 20., 20, 3 * 420., 0, 10., 8, 0, 0});
  golden(gradient([](auto& x) { return sum(cumprod(x, 0)); }, tensor({2., 0., 3.})), {1, 2 + 2 * 3, 0});
  golden(gradient([](auto& x) { return logsumexp(x); }, tensor({-inf, -inf})), {0, 0});
  golden(gradient([](auto& x) { return logsumexp(x); }, tensor({0., -inf})), {1, 0});
  golden(gradient([](auto& x) { return norm(x, {.p = 1}); }, tensor({3., 0., -4.})), {1, 0, -1});
  golden(gradient([](auto& x) { return norm(x, {.p = inf}); }, tensor({3., 0., -4.})), {0, 0, -1});
  golden(gradient([](auto& x) { return norm(x, {.p = .5}); }, tensor({1., 0., 4.})), {3, 0, 1.5}, 1e-15);
}

TEST_CASE("errors of reductions, scans and orders") {
  const Tensor f = ones({2, 3}), i = zeros({2}, {.dtype = DType::i64}), undefined;
  TEXT(prod(f, {2}), "prod: dim 2 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(prod(zeros({2}, {.dtype = DType::b8})), "prod: bool is not supported; cast x to a floating dtype with to()");
  TEXT(logsumexp(i), "logsumexp: i64 is not supported; cast x to a floating dtype with to()");
  TEXT(logsumexp(f, {0, 0}), "logsumexp: dim 0 is given twice");
  TEXT(all(f, {5}), "all: dim 5 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(stddev(i), "std: expected a floating dtype, got i64; cast x with to()");
  TEXT(norm(i), "norm: expected a floating dtype, got i64; cast x with to()");
  TEXT(norm(f, {.p = nan_d}), "norm: p is NaN");
  TEXT(call(*find_op("norm"), {f}, Attrs::of(reduce::Norm{1, false, 0})), "norm: expected a finite p, and not 0, got 0");
  TEXT(max(f, 2), "argmax: dim 2 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(max(zeros({2, 0}), 1), "argmax: [2, 0] has no elements to choose from");
  TEXT(min(undefined, 0), "a tensor is undefined; it has no shape, dtype or data");
  TEXT(cumsum(f, 2), "cumsum: dim 2 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(cumprod(undefined, 0), "cumprod: x is undefined");
  TEXT(recurrence(f, ones({3, 2}), 0), "recurrence: expected equal shapes and dtypes, got [2, 3] (f32) and [3, 2] (f32)");
  TEXT(recurrence(i, i, 0), "recurrence: expected a floating dtype, got i64; cast with to()");
  TEXT(recurrence(f, undefined, 0), "recurrence: b is undefined");
  TEXT(sort(f, -3), "sort: dim -3 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(sort(undefined), "sort: x is undefined");
  TEXT(topk(f, 4), "topk: expected k from 0 to 3, the size of dimension 1 of [2, 3], got 4");
  TEXT(topk(f, -1, 0), "topk: expected k from 0 to 2, the size of dimension 0 of [2, 3], got -1");
  TEXT(topk(f, 1, 2), "topk: dim 2 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(call(*find_op("take_along"), {f, f}), "take_along: expected i64 indices, got f32");
  TEXT(call(*find_op("put_along"), {f, i}), "put_along: expected an index for each element, got [2] (i64) for [2, 3] (f32)");
}

// ---- what users of other frameworks reported

TEST_CASE("report_B39 reductions read any strides") {
  tests::report("mlx#4528");
  Tensor x = arange(6).reshape({2, 3}).t();
  golden(sum(x, {1}), {3, 5, 7});
  golden(prod(x, {1}), {0, 4, 10});
  golden(cumsum(x, 1), {0, 3, 1, 5, 2, 7});
  golden(max(x, 1).values, {3, 4, 5});
  golden(sort(x, 0, {.descending = true}).values, {2, 5, 1, 4, 0, 3});
  golden(norm(x.to(DType::f64), {0}, {.p = 1}), {3, 12});
}

TEST_CASE("report_B45 lines that begin with -inf") {
  tests::report("torch-mojo-backend#319");
  for (DType t : floats)
    for (int64_t masked : {1, 32, 256, 4096, 20000}) {
      INFO(str(t) << " " << masked);
      Tensor x = cat({full({masked}, -inf), tensor({1., 2.}).to(DType::f32)}).to(t).requires_grad_();
      Tensor y = logsumexp(x);
      CHECK(std::abs(y.item() - 2.3132616875182228) <= 4 * unit(t));
      auto g = grad({y}, {x})[0].to(DType::f32);
      golden(sum(g.slice(0, 0, masked)), 0);
      CHECK(std::abs(sum(g).item() - 1) <= 8 * unit(t));
      golden(softmax(x.detach(), 0).slice(0, 0, 1), 0);
    }
  golden(gradient([](auto& v) { return sum(logsumexp(v, {1})); }, tensor({{-inf, -inf}, {0., -inf}})), {0, 0, 1, 0});
}

TEST_CASE("report_B46 sums do not stop growing") {
  tests::report("candle#3718");
  for (DType t : {DType::f16, DType::bf16}) {
    golden(sum(ones({4096}, {.dtype = t})), 4096);
    golden(cumsum(ones({4096}, {.dtype = t}), 0).slice(0, 4095, 4096), 4096);
    golden(norm(ones({4096}, {.dtype = t})), 64);
    golden(norm(ones({4096}, {.dtype = t}), {.p = 1}), 4096);
    golden(count_nonzero(ones({70000}, {.dtype = t})), 70000);
    golden(sum(ones({2, 4096}, {.dtype = t}), {1}), {4096, 4096});
    golden(sum(ones({4096, 2}, {.dtype = t}), {0}), {4096, 4096});
  }
}

TEST_CASE("report_B49 the number of elements is not held in 16 bits") {
  tests::report("tensorflow#115732");
  for (DType t : {DType::f16, DType::bf16})
    for (int64_t n : {65504, 65536, 70000, 200000}) {
      golden(mean(ones({n}, {.dtype = t})), 1);
      golden(mean(ones({n, 2}, {.dtype = t}), {0}), {1, 1});
      golden(stddev(ones({n}, {.dtype = t})), 0);
      golden(var(ones({n}, {.dtype = t})), 0);
    }
}

TEST_CASE("report_B50 a sum has the same bits every time") {
  tests::report("tensorflow#27544");
  Tensor x = tensor({1e8f, 1.f, -1e8f});
  golden(sum(x), 1);  // f64 inside
  golden(x[0] + x[1] + x[2], 0);
  Random random{15};
  Tensor many = tensor(random.many(300000, -1e4, 1e4)).to(DType::f32);
  for (auto f : std::vector<std::function<Tensor(const Tensor&)>>{[](auto& v) { return sum(v); }, [](auto& v) { return logsumexp(v); }, [](auto& v) { return norm(v); },
                                                                   [](auto& v) { return cumsum(v, 0); }}) {
    auto first = f(many).to_vector<float>();
    for (int i = 0; i < 5; ++i) CHECK(f(many).to_vector<float>() == first);
  }
}

TEST_CASE("report_B64 of equal elements the lowest index comes first") {
  for (DType t : floats) {
    Tensor x = tensor({1., 3., 3., 2., 3.}).to(t);
    golden(argmax(x), 1);
    golden(max(x, 0).indices, 1);
    golden(topk(x, 3).indices, {1, 2, 4});
    golden(sort(x, 0, {.descending = true}).indices, {1, 2, 4, 3, 0});
    golden(topk(full({1000}, 5, {.dtype = t}), 4).indices, {0, 1, 2, 3});
    golden(topk(full({1000}, 5, {.dtype = t}), 4, 0, {.largest = false}).indices, {0, 1, 2, 3});
    golden(topk(full({1000}, nan_d, {.dtype = t}), 4).indices, {0, 1, 2, 3});
  }
}

TEST_CASE("report_B66 empty tensors are sorted and reduced") {
  tests::report("pytorch#113037");
  for (bool falling : {false, true}) {
    auto [v, i] = sort(zeros({0}), 0, {.descending = falling});
    CHECK((v.shape() == Shape{0} && i.shape() == Shape{0}));
  }
  CHECK(sort(zeros({2, 0}), 1).values.shape() == Shape{2, 0});
  CHECK(sort(zeros({0, 4}), 1).indices.shape() == Shape{0, 4});
  CHECK(topk(zeros({0, 4}), 2).values.shape() == Shape{0, 2});
  CHECK(cumprod(zeros({2, 0}), 1).shape() == Shape{2, 0});
  CHECK(max(zeros({0, 4}), 1).values.shape() == Shape{0});
}

TEST_CASE("report_B67 gradients of norms and deviations at 0") {
  tests::report("pytorch#2421");
  for (DType t : floats) {
    INFO(str(t));
    for (double p : {2.0, 1.0, 3.0, 0.5, inf}) golden(gradient([p](auto& x) { return norm(x, {.p = p}); }, zeros({3}, {.dtype = t})), {0, 0, 0});
    golden(gradient([](auto& x) { return sum(norm(x, {1})); }, tensor({{0., 0.}, {3., 4.}}).to(t)), Doubles{0, 0, tensor(.6).to(t).item(), tensor(.8).to(t).item()}, 2 * unit(t));
    golden(gradient([](auto& x) { return stddev(x); }, full({4}, 7, {.dtype = t})), {0, 0, 0, 0});
    golden(gradient([](auto& x) { return sum(stddev(x, {1}, {.correction = 0})); }, full({2, 3}, 7, {.dtype = t})), {0, 0, 0, 0, 0, 0});
  }
  // Twice, too.
  for (auto f : std::vector<std::function<Tensor(const Tensor&)>>{[](auto& x) { return norm(x); }, [](auto& x) { return stddev(x); }, [](auto& x) { return norm(x, {.p = .5}); }}) {
    Tensor x = zeros({3}, {.requires_grad = true});
    auto [g] = grad({f(x)}, {x}, {.create_graph = true});
    golden(grad({sum(g * tensor({1.f, 2.f, 3.f}))}, {x})[0], {0, 0, 0});
  }
}

TEST_CASE("report_B69 prod of zeros has a second derivative") {
  for (bool line : {false, true}) {
    Tensor x = tensor({2., 3., 0., 0.}, {.requires_grad = true});
    auto [g] = grad({line ? cumprod(x, 0).slice(0, 3, 4).sum() : prod(x)}, {x}, {.create_graph = true});
    golden(g.detach(), {0, 0, 0, 0});
    golden(grad({g.slice(0, 2, 3).sum()}, {x})[0], {0, 0, 0, 6});
  }
}
