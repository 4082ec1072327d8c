// Operators against naive f64 oracles written from their formulas, and the corner cases whose right answers are known:
// NaN, ties, infinities, empty tensors, accumulators, casts, cross entropy, optimizers.
#include <functional>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity(), nan_f = std::numeric_limits<float>::quiet_NaN();
using Doubles = std::vector<double>;
using Matrix = std::vector<Doubles>;

// ---- the oracles' own numbers; nothing of the library is used in them

struct Random {  // a linear congruential generator (Knuth, MMIX)
  uint64_t state;
  double operator()() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state >> 11) * 0x1p-52 - 1;
  }
  Matrix matrix(size_t rows, size_t columns) {
    Matrix m(rows, Doubles(columns));
    for (auto& r : m) for (auto& v : r) v = (*this)();
    return m;
  }
};

Tensor as_tensor(const Matrix& m, DType t = DType::f64) {
  Doubles all;
  for (auto& r : m) all.insert(all.end(), r.begin(), r.end());
  return tensor(all).reshape({m.size(), m.empty() ? 0 : m[0].size()}).to(t);
}
// Rounded as the library would see it, so that the oracle starts from the same numbers.
Matrix values(const Tensor& t) {
  auto v = t.to_vector<double>();
  auto rows = static_cast<size_t>(t.size(0)), columns = static_cast<size_t>(t.size(1));
  Matrix m(rows, Doubles(columns));
  for (size_t i = 0; i < rows; ++i) for (size_t j = 0; j < columns; ++j) m[i][j] = v[i * columns + j];
  return m;
}

Matrix product(const Matrix& a, const Matrix& b) {  // a [m, k], b [k, n]
  Matrix y(a.size(), Doubles(b.empty() ? 0 : b[0].size()));
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t j = 0; j < y[i].size(); ++j)
      for (size_t k = 0; k < b.size(); ++k) y[i][j] += a[i][k] * b[k][j];
  return y;
}
Matrix affine(const Matrix& x, const Matrix& w, const Doubles& b) {  // w [out, in]
  Matrix y(x.size(), Doubles(w.size()));
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t o = 0; o < w.size(); ++o) {
      y[i][o] = b.empty() ? 0 : b[o];
      for (size_t k = 0; k < x[i].size(); ++k) y[i][o] += x[i][k] * w[o][k];
    }
  return y;
}
Matrix map(Matrix m, double (*f)(double)) {
  for (auto& r : m) for (auto& v : r) v = f(v);
  return m;
}
Matrix softmax_rows(const Matrix& x, bool logarithm) {
  Matrix y = x;
  for (auto& r : y) {
    double high = *std::max_element(r.begin(), r.end()), total = 0;
    for (double v : r) total += std::exp(v - high);
    for (auto& v : r) v = logarithm ? v - high - std::log(total) : std::exp(v - high) / total;
  }
  return y;
}

double unit(DType t) { return t == DType::f16 ? 0x1p-11 : t == DType::bf16 ? 0x1p-8 : t == DType::f32 ? 0x1p-24 : 0x1p-53; }

// Every element within `factor` roundings of accumulation and one of the result.
void check(const Tensor& got, const Doubles& expected, double factor, double scale = 1) {
  REQUIRE(got.numel() == static_cast<int64_t>(expected.size()));
  auto v = got.to_vector<double>();
  double accumulated = got.dtype() == DType::f64 ? 0x1p-53 : 0x1p-24;
  for (size_t i = 0; i < v.size(); ++i) {
    INFO("element " << i << " of " << str(got.meta()));
    CHECK(std::abs(v[i] - expected[i]) <= factor * accumulated * scale + 2 * unit(got.dtype()) * std::abs(expected[i]));
  }
  tests::count("oracle_combinations");
}
void check(const Tensor& got, const Matrix& expected, double factor, double scale = 1) {
  Doubles all;
  for (auto& r : expected) all.insert(all.end(), r.begin(), r.end());
  check(got, all, factor, scale);
}

constexpr DType floats[] = {DType::f16, DType::bf16, DType::f32, DType::f64};

// A known answer, to every digit given.
template <class T> void golden(const Tensor& t, std::initializer_list<T> expected, double relative = 0) {
  auto v = t.to_vector<double>();
  REQUIRE(v.size() == expected.size());
  size_t i = 0;
  for (auto e : expected) {
    auto want = static_cast<double>(e);
    INFO("element " << i << " of " << str(t));
    if (std::isnan(want)) CHECK(std::isnan(v[i]));
    else if (std::isinf(want)) CHECK(v[i] == want);
    else CHECK(std::abs(v[i] - want) <= relative * std::abs(want));
    ++i;
  }
  tests::count("golden_cases");
}
void golden(const Tensor& t, double expected, double relative = 0) { golden(t, {expected}, relative); }
void golden(bool holds) {
  CHECK(holds);
  tests::count("golden_cases");
}

}  // namespace

// ---- naive oracles

TEST_CASE("matmul is a sum of products") {
  Random random{1};
  for (auto [m, k, n] : {std::array<size_t, 3>{1, 1, 1}, {2, 3, 4}, {7, 33, 5}, {1, 40, 9}, {9, 40, 1}, {33, 17, 64}, {65, 70, 67}, {130, 300, 3}})
    for (DType t : floats) {
      Tensor a = as_tensor(random.matrix(m, k), t), b = as_tensor(random.matrix(k, n), t);
      check(matmul(a, b), product(values(a), values(b)), 8 + static_cast<double>(k), std::sqrt(static_cast<double>(k)));
    }
}

TEST_CASE("batched matmul multiplies each pair") {
  Random random{2};
  Matrix a = random.matrix(6, 4), b = random.matrix(8, 5);
  Tensor y = matmul(as_tensor(a).reshape({2, 3, 4}), as_tensor(b).reshape({2, 4, 5}));
  REQUIRE(y.shape() == Shape{2, 3, 5});
  Doubles expected;
  for (size_t i = 0; i < 2; ++i)
    for (auto& r : product({a.begin() + static_cast<long>(3 * i), a.begin() + static_cast<long>(3 * i + 3)}, {b.begin() + static_cast<long>(4 * i), b.begin() + static_cast<long>(4 * i + 4)}))
      expected.insert(expected.end(), r.begin(), r.end());
  check(y, expected, 12);
}

TEST_CASE("the linear family is x w^T + b, then the activation") {
  Random random{3};
  auto relu_of = [](double v) { return v > 0 ? v : 0.0; };
  auto gelu_of = [](double v) { return .5 * v * std::erfc(-v / std::sqrt(2.0)); };
  for (auto [m, k, n] : {std::array<size_t, 3>{1, 1, 1}, {4, 7, 3}, {33, 65, 17}, {130, 8, 3}})
    for (DType t : floats)
      for (bool bias : {true, false}) {
        Tensor x = as_tensor(random.matrix(m, k), t), w = as_tensor(random.matrix(n, k), t);
        Tensor b = bias ? as_tensor(random.matrix(1, n), t).reshape({n}) : Tensor();
        Matrix y = affine(values(x), values(w), bias ? b.to_vector<double>() : Doubles());
        double factor = 12 + static_cast<double>(k), scale = std::sqrt(static_cast<double>(k));
        check(linear(x, w, b), y, factor, scale);
        check(linear_relu(x, w, b), map(y, relu_of), factor, scale);
        check(linear_gelu(x, w, b), map(y, gelu_of), factor, 2 * scale);
      }
}

TEST_CASE("softmax and log_softmax are their formulas") {
  Random random{4};
  for (auto [rows, n] : {std::array<size_t, 2>{1, 1}, {2, 3}, {5, 33}, {3, 257}, {2, 1100}})
    for (DType t : floats) {
      Matrix m = random.matrix(rows, n);
      for (auto& r : m) for (auto& v : r) v *= 8;
      Tensor x = as_tensor(m, t);
      check(softmax(x, 1), softmax_rows(values(x), false), 16, 1);
      check(log_softmax(x, 1), softmax_rows(values(x), true), 16, 8);
      check(softmax(x.t(), 0).t().contiguous(), softmax_rows(values(x), false), 16, 1);
    }
}

TEST_CASE("cross entropy is its formula, with every option") {
  Random random{5};
  size_t rows = 13, classes = 7;
  for (DType t : floats)
    for (double smoothing : {0.0, 0.1, 1.0})
      for (int64_t ignore : {-100, 3}) {
        Tensor x = as_tensor(random.matrix(rows, classes), t);
        Matrix logp = softmax_rows(values(x), true);
        std::vector<int64_t> target(rows);
        for (size_t i = 0; i < rows; ++i) target[i] = static_cast<int64_t>(i * 5 % classes);
        Doubles losses;
        double sum = 0, n = 0;
        for (size_t i = 0; i < rows; ++i) {
          double all = 0;
          for (double v : logp[i]) all += v;
          double loss = target[i] == ignore ? 0 : -(1 - smoothing) * logp[i][static_cast<size_t>(target[i])] - smoothing * all / static_cast<double>(classes);
          losses.push_back(loss);
          sum += loss;
          n += target[i] != ignore;
        }
        CrossEntropyOptions o{.ignore_index = ignore, .label_smoothing = smoothing};
        check(cross_entropy(x, tensor(target), o), Doubles{sum / n}, 16, 4);
        o.reduction = Reduction::sum;
        check(cross_entropy(x, tensor(target), o), Doubles{sum}, 64, 4);
        o.reduction = Reduction::none;
        check(cross_entropy(x, tensor(target), o), losses, 16, 4);
      }
}

TEST_CASE("reductions are their formulas") {
  Random random{6};
  for (auto [rows, n] : {std::array<size_t, 2>{1, 1}, {3, 2}, {4, 33}, {3, 1025}, {70, 70}})
    for (DType t : floats) {
      Tensor x = as_tensor(random.matrix(rows, n), t);
      Doubles sums, means, variances, highs, lows;
      std::vector<int64_t> arg;
      for (auto& r : values(x)) {
        double s = 0, q = 0;
        for (double v : r) s += v;
        for (double v : r) q += (v - s / static_cast<double>(n)) * (v - s / static_cast<double>(n));
        sums.push_back(s);
        means.push_back(s / static_cast<double>(n));
        variances.push_back(q / static_cast<double>(n));
        highs.push_back(*std::max_element(r.begin(), r.end()));
        lows.push_back(*std::min_element(r.begin(), r.end()));
        arg.push_back(std::max_element(r.begin(), r.end()) - r.begin());
      }
      double factor = 4 + std::log2(static_cast<double>(n)), scale = static_cast<double>(n);
      check(sum(x, {1}), sums, factor, scale);
      check(mean(x, {1}), means, factor);
      check(var(x, {1}, {.correction = 0}), variances, factor);
      check(amax(x, {1}), highs, 0);
      check(amin(x, {1}), lows, 0);
      check(sum(x.t().contiguous(), {0}), sums, factor, scale);
      CHECK(argmax(x, 1).to_vector<int64_t>() == arg);
      CHECK(argmax(x.t().contiguous(), 0).to_vector<int64_t>() == arg);
    }
}

TEST_CASE("optimizers follow their papers") {
  Random random{7};
  size_t n = 37;
  Doubles p0(n);
  for (auto& v : p0) v = random();
  double lr = .05, momentum = .9, decay = .02, beta1 = .8, beta2 = .95, eps = 1e-4;
  Doubles sgd_p = p0, buffer(n), adam_p = p0, m(n), v(n), adamw_p = p0, mw(n), vw(n);
  auto parameter = [&] { return tensor(p0, {.requires_grad = true}); };
  Tensor a = parameter(), b = parameter(), c = parameter();
  optim::SGD sgd({a}, {.lr = lr, .momentum = momentum, .dampening = .3, .weight_decay = decay});
  optim::Adam adam({b}, {.lr = lr, .beta1 = beta1, .beta2 = beta2, .eps = eps, .weight_decay = decay});
  optim::AdamW adamw({c}, {.lr = lr, .beta1 = beta1, .beta2 = beta2, .eps = eps, .weight_decay = decay});
  for (int t = 1; t <= 6; ++t) {
    Doubles g(n);
    for (auto& x : g) x = random();
    for (auto* p : {&a, &b, &c}) p->set_grad(tensor(g));
    sgd.step();
    adam.step();
    adamw.step();
    auto adam_rule = [&](double& p, double grad, double& m1, double& m2) {
      m1 = beta1 * m1 + (1 - beta1) * grad;
      m2 = beta2 * m2 + (1 - beta2) * grad * grad;
      p -= lr * (m1 / (1 - std::pow(beta1, t))) / (std::sqrt(m2 / (1 - std::pow(beta2, t))) + eps);
    };
    for (size_t i = 0; i < n; ++i) {
      double d = g[i] + decay * sgd_p[i];
      buffer[i] = t == 1 ? d : momentum * buffer[i] + .7 * d;
      sgd_p[i] -= lr * buffer[i];
      adam_rule(adam_p[i], g[i] + decay * adam_p[i], m[i], v[i]);
      adamw_p[i] -= lr * decay * adamw_p[i];
      adam_rule(adamw_p[i], g[i], mw[i], vw[i]);
    }
    check(a.detach(), sgd_p, 32);
    check(b.detach(), adam_p, 32);
    check(c.detach(), adamw_p, 32);
  }
}

// ---- known answers

TEST_CASE("NaN passes through maxima, relu and clamping") {
  golden(amax(tensor({1.f, nan_f, 2.f})), NAN);
  golden(amin(tensor({1.f, nan_f, 2.f})), NAN);
  golden(argmax(tensor({1.f, nan_f, 2.f})), 1);
  golden(argmin(tensor({1.f, nan_f, nan_f})), 1);
  golden(relu(tensor({nan_f})), NAN);
  golden(maximum(tensor({1.f, nan_f}), tensor({nan_f, 1.f})), {NAN, NAN});
  golden(minimum(tensor({1.f, nan_f}), tensor({nan_f, 1.f})), {NAN, NAN});
  golden(minimum(maximum(tensor({nan_f}), 0), 1), NAN);
  for (DType t : {DType::f16, DType::bf16, DType::f64}) golden(amax(tensor({nan_f, 3.f}).to(t)), NAN);
  golden(isnan(tensor({nan_f, inf, 1.f})), {1, 0, 0});
  golden(isinf(tensor({nan_f, -inf, 1.f})), {0, 1, 0});
  golden(isfinite(tensor({nan_f, inf, 1.f})), {0, 0, 1});
  for (auto f : {neg, abs, sign, square, sqrt, rsqrt, reciprocal, exp, log, log1p, sin, cos, tanh, sigmoid, relu, step, +[](const Tensor& x) { return gelu(x); }, normal_cdf, silu})
    golden(f(tensor({nan_f})), NAN);
}

TEST_CASE("of equal elements the first wins") {
  golden(argmax(tensor({1.f, 3.f, 3.f})), 1);
  golden(argmin(tensor({3.f, 1.f, 1.f})), 1);
  golden(argmax(full({40000}, 2)), 0);
  golden(argmax(full({70, 3}, 2), 0), {0, 0, 0});
  golden(argmax(full({3, 70}, 2), 1), {0, 0, 0});
}

TEST_CASE("infinities in softmax") {
  golden(softmax(tensor({0.f, -inf, 1.f}), 0), {.26894142, 0., .73105860}, 1e-6);
  golden(softmax(tensor({-inf, -inf}), 0), {NAN, NAN});
  golden(softmax(tensor({inf, 0.f}), 0), {NAN, NAN});
  golden(log_softmax(tensor({1e4f, 1e4f}), 0), {-.69314718, -.69314718}, 1e-7);
  golden(log_softmax(full({11}, -1e10), 0).slice(0, 0, 2), {-2.3978953, -2.3978953}, 1e-7);
  golden(sigmoid(tensor({1000.f, -1000.f})), {1., 0.});
  golden(silu(tensor({1000.f, -1000.f})), {1000., 0.});
  golden(gelu(tensor({1000.f, -1000.f})), {1000., 0.});
}

namespace {
Tensor logits() { return tensor({{1., 2., 3.}, {.5, -1., 4.}, {2., 2., 2.}}, {.requires_grad = true}); }
Tensor classes() { return tensor({int64_t{2}, int64_t{-100}, int64_t{0}}); }
}  // namespace

TEST_CASE("cross entropy of the reference logits") {
  golden(cross_entropy(logits(), classes()), .7531091265562451, 1e-15);
  golden(cross_entropy(logits(), classes(), {.reduction = Reduction::sum}), 1.5062182531124901, 1e-15);
  golden(cross_entropy(logits(), classes(), {.label_smoothing = .1}), .8031091265562451, 1e-15);
  golden(cross_entropy(logits(), classes(), {.label_smoothing = .2}), .8531091265562452, 1e-15);
  golden(cross_entropy(logits().detach().to(DType::f16), classes()), .7531091265562451, 1e-6);
}

TEST_CASE("the gradient of cross entropy of the reference logits") {
  std::initializer_list<double> expected = {.02834861991852355, .10569756886073216, -.13404618877925578, 0, 0, 0, -.3, .15, .15};
  for (bool create_graph : {false, true}) {
    Tensor x = logits();
    auto [g] = grad({cross_entropy(x, classes(), {.label_smoothing = .1})}, {x}, {.create_graph = create_graph});
    golden(g.detach(), expected, 1e-13);
  }
}

TEST_CASE("cross entropy where no target counts") {
  Tensor none = tensor({int64_t{-100}, int64_t{-100}, int64_t{-100}});
  for (bool create_graph : {false, true}) {
    Tensor x = logits();
    golden(cross_entropy(x, none), NAN);
    golden(cross_entropy(x, none, {.reduction = Reduction::sum}), 0);
    for (Reduction r : {Reduction::mean, Reduction::sum}) {
      auto [g] = grad({cross_entropy(x, none, {.reduction = r})}, {x}, {.create_graph = create_graph});
      golden(g.detach(), {0, 0, 0, 0, 0, 0, 0, 0, 0});
    }
  }
  golden(cross_entropy(zeros({0, 3}), zeros({0}, {.dtype = DType::i64})), NAN);
}

TEST_CASE("empty tensors") {
  golden(matmul(ones({2, 0}), ones({0, 3})), {0, 0, 0, 0, 0, 0});
  golden(linear(ones({2, 0}), ones({3, 0}), tensor({1.f, 2.f, 3.f})), {1, 2, 3, 1, 2, 3});
  golden(sum(zeros({0})), 0);
  golden(mean(zeros({0})), NAN);
  golden(sum(zeros({0, 3}), {0}), {0, 0, 0});
  CHECK_THROWS_WITH(amax(zeros({0})), "amax: [0] has no elements to choose from");
  CHECK_THROWS_WITH(amax(zeros({2, 0}), {1}), "amax: [2, 0] has no elements to choose from");
  CHECK_THROWS_WITH(argmax(zeros({2, 0}), 1), "argmax: [2, 0] has no elements to choose from");
  golden(amax(zeros({0, 3}), {1}).shape() == Shape{0});
  golden(softmax(zeros({2, 0}), 1).shape() == Shape{2, 0});
  golden((zeros({3, 1}) + zeros({0})).shape() == Shape{3, 0});
  golden((zeros({0, 1}) + zeros({1, 5})).shape() == Shape{0, 5});
  CHECK_THROWS_WITH(zeros({3}) + zeros({0}), "add: shapes [3] and [0] do not broadcast; counted from the back, sizes must be equal or 1");
}

TEST_CASE("accumulators are wider than what they add") {
  auto ones_of = [](int64_t n, DType t) { return ones({n}, {.dtype = t}); };
  golden(sum(ones_of(20000, DType::f16)), 20000);
  golden(sum(ones_of(70000, DType::f16)), INFINITY);  // beyond the largest f16
  golden(sum(ones_of(65504, DType::f16)), 65504);
  golden(sum(ones_of(70000, DType::bf16)), 70144);
  golden(mean(ones_of(70000, DType::bf16)), 1);
  golden(mean(ones_of(65536, DType::f16)), 1);
  golden(sum(ones_of(1 << 25, DType::f32)), 33554432);
  golden(sum(full({10000000}, 0.1f)), 1000000.0149, 1e-7);
  golden(sum(ones_of(300, DType::b8)), 300);
  golden(sum(full({300}, 200, {.dtype = DType::u8})), 60000);
  golden(sum(full({3}, 2000000000, {.dtype = DType::i32})), 6000000000.0);
  // A product of many terms, and its rows one by one.
  golden(matmul(ones({1, 70000}, {.dtype = DType::bf16}), ones({70000, 1}, {.dtype = DType::bf16})), 70144);
  golden(softmax(zeros({4096}, {.dtype = DType::f16}), 0).slice(0, 0, 1), 0x1p-12);
}

TEST_CASE("a variance keeps its digits beside a large mean") {
  Doubles row(16);
  for (double base : {100.0, 1000.0, 1449.0, 10000.0}) {
    for (size_t i = 0; i < 16; ++i) row[i] = base + static_cast<double>(i) * 1e-3;
    Tensor x = tensor(row).to(DType::f32);
    auto v = x.to_vector<double>();
    double m = 0, q = 0;
    for (double e : v) m += e / 16;
    for (double e : v) q += (e - m) * (e - m) / 16;
    golden(var(x, {.correction = 0}), q, 1e-6);
  }
  golden(var(tensor({5.f})), NAN);
  golden(var(tensor({5.f}), {.correction = 0}), 0);
  golden(var(full({1234}, 256.f), {.correction = 0}), 0);
}

TEST_CASE("gradients at corners") {
  auto slope = [](const std::function<Tensor(const Tensor&)>& f, double at) {
    Tensor x = tensor(at, {.requires_grad = true});
    return grad({f(x)}, {x})[0];
  };
  golden(slope([](auto& x) { return sqrt(x); }, 0), INFINITY);
  golden(slope([](auto& x) { return pow(x, 0); }, 0), 0);
  golden(slope([](auto& x) { return abs(x); }, 0), 0);
  golden(slope([](auto& x) { return relu(x); }, 0), 0);
  golden(slope([](auto& x) { return where(gt(x, 0), sqrt(x), 0 * x); }, 0), NAN);  // the branch not taken counts: 0 * inf
  Tensor ties = tensor({3., 1., 3.}, {.requires_grad = true});
  golden(grad({amax(ties)}, {ties})[0], {.5, 0., .5});
}

TEST_CASE("casts round once and saturate") {
  golden(tensor({65519.f, 65520.f, 6e-8f, 2.9e-8f}).to(DType::f16), {65504., double(INFINITY), 0x1p-24, 0.});
  golden(tensor({std::numeric_limits<float>::max()}).to(DType::bf16), INFINITY);
  auto bits = [](uint32_t u) { return bfloat16(std::bit_cast<float>(u)).bits; };
  golden(bits(0x7F800001) == 0x7FC0);
  golden(bits(0x7FFFFFFF) == 0x7FFF);
  golden(tensor({double(NAN), double(INFINITY), -double(INFINITY), 3e9}).to(DType::i32), {0., 2147483647., -2147483648., 2147483647.});
  golden(tensor({1 + 0x1p-11 + 0x1p-40}).to(DType::f16), 1 + 0x1p-10);  // through f32 it would become 1
  golden(tensor({-1.5, 300.0, 255.9}).to(DType::u8), {0, 255, 255});
}

TEST_CASE("optimizers from the reference gradients") {
  auto run = [](auto make) {
    Tensor p = tensor(std::vector{1.0}, {.requires_grad = true});
    auto opt = make(p);
    Doubles path;
    for (double g : {.5, -.25, .1}) {
      p.set_grad(tensor(std::vector{g}));
      opt.step();
      path.push_back(p.item());
    }
    return tensor(path);
  };
  golden(run([](Tensor p) { return optim::SGD({p}, {.lr = .1, .momentum = .9, .weight_decay = .1}); }), {.94, .9016, .848024}, 1e-15);
  golden(run([](Tensor p) { return optim::SGD({p}, {.lr = .1, .momentum = .9, .nesterov = true}); }), {.905, .912, .8768}, 1e-15);
  golden(run([](Tensor p) { return optim::Adam({p}, {.lr = .1, .eps = 1e-3}); }), {.9001996007984032, .8736331154035685, .8422046503810174}, 1e-15);
  golden(run([](Tensor p) { return optim::Adam({p}, {.lr = .1, .eps = 1e-3, .weight_decay = .1}); }), {.9001663893510815, .8547089939937309, .8028063581500123}, 1e-15);
  golden(run([](Tensor p) { return optim::AdamW({p}, {.lr = .1, .eps = 1e-3, .weight_decay = .1}); }), {.8901996007984032, .8547311193955844, .8147553431790776}, 1e-15);
}

TEST_CASE("clipping from the reference gradients") {
  Tensor p = zeros({2}, {.requires_grad = true});
  p.set_grad(tensor({3.f, 4.f}));
  golden(optim::clip_grad_norm_({p}, 1), 5);
  golden(p.grad(), {.59999990, .79999983}, 1e-7);
  p.set_grad(tensor({inf, 4.f}));
  golden(optim::clip_grad_norm_({p}, 1), INFINITY);
  golden(p.grad(), {double(NAN), 0.});
}

TEST_CASE("optimizers keep tiny numbers in f32") {
  // eps = 1e-8 is 0 in f16: a zero gradient must not become 0 / 0.
  Tensor p = ones({3}, {.dtype = DType::f16, .requires_grad = true});
  optim::Adam adam({p});
  for (int i = 0; i < 3; ++i) {
    p.set_grad(zeros({3}, {.dtype = DType::f16}));
    adam.step();
  }
  golden(p, {1, 1, 1});
}
