// Elementwise operators against their formulas in f64 over whole ranges of values, special values, the promotion table,
// writing in place, error texts, and what users of other frameworks reported.
#include <functional>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity(), nan_d = std::numeric_limits<double>::quiet_NaN();
constexpr DType floats[] = {DType::f16, DType::bf16, DType::f32, DType::f64};
using Doubles = std::vector<double>;

double rounded(double v, DType t) { return tensor(v).to(t).item(); }
double ulp(double v, DType t) {
  int digits = t == DType::f16 ? 10 : t == DType::bf16 ? 7 : t == DType::f32 ? 23 : 52;
  int lowest = t == DType::f16 ? -14 : t == DType::f64 ? -1022 : -126;
  return std::ldexp(1.0, (v == 0 || !std::isfinite(v) ? lowest : std::max(lowest, std::ilogb(v))) - digits);
}

// Within `ulps` of the rounded oracle, and of so much as the subnormals of f32 leave open; NaN where it is NaN.
void check(const Tensor& got, const Doubles& expected, double ulps) {
  auto v = got.to_vector<double>();
  REQUIRE(v.size() == expected.size());
  DType t = got.dtype();
  for (size_t i = 0; i < v.size(); ++i) {
    double e = is_floating(t) ? rounded(expected[i], t) : expected[i];
    INFO("element " << i << " of " << str(got.meta()) << ", expected " << e << ", got " << v[i]);
    if (std::isnan(e)) CHECK(std::isnan(v[i]));
    else CHECK((v[i] == e || std::abs(v[i] - e) <= ulps * ulp(e, t) + (t == DType::f32 && ulps > 0 ? 0x1p-142 : 0)));
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

// Small, middling and large numbers of both signs that the dtype holds.
Doubles numbers_of(DType t) {
  Doubles v = {0, 1, 3, 6, 0.5, 1.5, 2.5, 1e-3, 1e-6, 0.1, 0.7, 2, 2.9, 3.1, 4.2, 5.5, 8, 10, 15.9, 16.1, 20.5, 33, 60, 87, 89, 95, 300, 6e4};
  if (t != DType::f16) v.insert(v.end(), {1e-30, 1e10, 1e30});
  for (size_t i = 0, n = v.size(); i < n; ++i) v.push_back(-v[i]);
  for (int i = -400; i <= 400; ++i) v.push_back(i * 0.0231);
  return v;
}

double logistic(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double soft(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

struct Formula {
  const char* name;
  Tensor (*f)(const Tensor&);
  double (*oracle)(double);
  double ulps = 2;  // in f32; 1 in 16 bits
};
const Formula formulas[] = {
    {"expm1", expm1, [](double x) { return std::expm1(x); }},
    {"log2", log2, [](double x) { return std::log2(x); }},
    {"sigmoid", sigmoid, logistic, 4},
    {"silu", silu, [](double x) { return x * logistic(x); }, 4},
    {"mish", mish, [](double x) { return x * std::tanh(soft(x)); }, 4},
    {"hardswish", hardswish, [](double x) { return x <= -3 ? 0 : x >= 3 ? x : x * (x + 3) / 6; }},
    {"hardsigmoid", hardsigmoid, [](double x) { return x <= -3 ? 0 : x >= 3 ? 1 : (x + 3) / 6; }},
    {"softplus", [](const Tensor& x) { return softplus(x); }, [](double x) { return x > 20 ? x : soft(x); }},
    {"softplus of 2", [](const Tensor& x) { return softplus(x, 2, 5); }, [](double x) { return 2 * x > 5 ? x : soft(2 * x) / 2; }},
    {"elu", [](const Tensor& x) { return elu(x); }, [](double x) { return x > 0 ? x : std::expm1(x); }},
    {"elu of 0.3", [](const Tensor& x) { return elu(x, 0.3); }, [](double x) { return x > 0 ? x : 0.3 * std::expm1(x); }},
    {"floor", floor, [](double x) { return std::floor(x); }, 0},
    {"ceil", ceil, [](double x) { return std::ceil(x); }, 0},
    {"round", round, [](double x) { return std::nearbyint(x); }, 0},
};

}  // namespace

TEST_CASE("unary operators are their formulas over the whole range") {
  for (auto& o : formulas)
    for (DType t : floats) {
      Tensor x = tensor(numbers_of(t)).to(t);
      Doubles expected;
      for (double v : x.to_vector<double>()) expected.push_back(o.oracle(v));
      INFO(o.name << " in " << str(t));
      check(o.f(x), expected, t == DType::f32 || t == DType::f64 ? o.ulps : std::min(o.ulps, 1.0));
    }
}

TEST_CASE("gelu by tanh does not cancel") {
  for (DType t : floats) {
    Tensor x = tensor(numbers_of(t)).to(t);
    Doubles expected;
    for (double v : x.to_vector<double>()) {
      long double w = v, u = 0.79788456080286535588L * (w + 0.044715L * w * w * w);
      expected.push_back(static_cast<double>(w / (1 + std::exp(-2 * u))));
    }
    auto v = gelu(x, Approximate::tanh).to_vector<double>();
    for (size_t i = 0; i < v.size(); ++i) {
      // The exponential of a rounded exponent u is off by some |u| roundings.
      double e = rounded(expected[i], t), w = x.to_vector<double>()[i], slack = 2 * std::abs(1.6 * (w + 0.045 * w * w * w)) + 4;
      double allowed = is_16bit_dtype(t) ? ulp(e, t) : slack * std::abs(e) * (t == DType::f32 ? 0x1p-23 : 0x1p-52);
      INFO(str(t) << " " << w);
      CHECK((v[i] == e || std::abs(v[i] - e) <= allowed || std::abs(e) < 1e-37));
    }
    tests::count("oracle_combinations");
    CHECK(gelu(x, Approximate::none).to_vector<double>()[9] == gelu(x).to_vector<double>()[9]);
  }
}

TEST_CASE("every 16-bit number has its result within one ulp") {
  const Formula more[] = {{"exp", exp, [](double x) { return std::exp(x); }},
                          {"log", log, [](double x) { return std::log(x); }},
                          {"log1p", log1p, [](double x) { return std::log1p(x); }},
                          {"sqrt", sqrt, [](double x) { return std::sqrt(x); }},
                          {"rsqrt", rsqrt, [](double x) { return 1 / std::sqrt(x); }},
                          {"reciprocal", reciprocal, [](double x) { return 1 / x; }},
                          {"square", square, [](double x) { return x * x; }},
                          {"sin", sin, [](double x) { return std::sin(x); }},
                          {"cos", cos, [](double x) { return std::cos(x); }},
                          {"tanh", tanh, [](double x) { return std::tanh(x); }},
                          {"erf", erf, [](double x) { return std::erf(x); }},
                          {"relu", relu, [](double x) { return x < 0 ? 0 : x; }},
                          {"gelu", +[](const Tensor& x) { return gelu(x); }, [](double x) { return x * .5 * std::erfc(-x / std::sqrt(2.0)); }},
                          {"gelu_tanh", gelu_tanh, [](double x) { return x * logistic(1.5957691216057308 * (x + .044715 * x * x * x)); }},
                          {"leaky_relu", +[](const Tensor& x) { return leaky_relu(x, .2); }, [](double x) { return x < 0 ? .2 * x : x; }},
                          {"pow", +[](const Tensor& x) { return pow(x, 1.7); }, [](double x) { return std::pow(x, 1.7); }}};
  std::vector<uint16_t> patterns(1 << 16);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  for (DType t : {DType::f16, DType::bf16}) {
    Tensor x = from_bytes(patterns.data(), t, {patterns.size()}, {.dtype = t});
    auto v = x.to_vector<double>();
    auto exact = [&](const Formula& o) {
      Doubles expected;
      for (double e : v) expected.push_back(o.oracle(e));
      auto y = o.f(x).to_vector<double>(), e = tensor(expected).to(t).to_vector<double>();
      size_t wrong = 0, at = 0;
      for (size_t i = 0; i < v.size(); ++i) {
        bool right = std::isnan(e[i]) ? std::isnan(y[i]) : y[i] == e[i] || std::abs(y[i] - e[i]) <= ulp(e[i], t);
        if (!right && wrong++ == 0) at = i;
      }
      INFO(o.name << " in " << str(t) << ": of " << v[at] << " is " << y[at] << ", expected " << e[at]);
      CHECK(wrong == 0);
      tests::count("oracle_combinations");
    };
    for (auto& o : formulas) exact(o);
    for (auto& o : more) exact(o);
  }
}

TEST_CASE("special values of unary operators") {
  Tensor nothing = tensor({nan_d});
  for (auto& o : formulas) {
    INFO(o.name);
    golden(o.f(nothing), {nan_d});
    for (DType t : floats) CHECK(std::isnan(o.f(nothing.to(t)).item()));
  }
  golden(gelu_tanh(nothing), {nan_d});
  golden(round(tensor({.5, 1.5, 2.5, -.5, -1.5, -2.5, 3.7})), {0, 2, 2, 0, -2, -2, 4});
  golden(floor(tensor({-1.5, -.0, 1.9, inf})), {-2, 0, 1, inf});
  golden(ceil(tensor({-1.5, .1, 1.9, -inf})), {-1, 1, 2, -inf});
  golden(round(tensor({3, -4})), {3, -4});
  golden(expm1(tensor({-inf, inf, 1e-20})), {-1, inf, 1e-20});
  golden(log2(tensor({0., -1., 8., inf})), {-inf, nan_d, 3, inf});
  golden(softplus(tensor({1000., -1000., inf, -inf})), {1000, 0, inf, 0});
  golden(elu(tensor({inf, -inf})), {inf, -1});
  golden(mish(tensor({inf, -1000.})), {inf, 0});
  golden(hardswish(tensor({inf, -inf})), {inf, 0});
  golden(hardsigmoid(tensor({inf, -inf, -3., 3.})), {1, 0, 0, 1});
  for (DType t : floats)
    for (auto f : {sigmoid, silu, mish, hardswish, gelu_tanh}) {
      Tensor large = tensor({-6e4, 6e4}).to(t);
      Tensor y = f(large);
      CHECK(sum(isnan(y)).item() == 0);
      CHECK(std::abs(y.to_vector<double>()[0]) == 0);
    }
}

TEST_CASE("gradients of activations stay finite far from 0") {
  int number = 0;
  for (DType t : {DType::f16, DType::f32})
    for (auto f : {sigmoid, silu, mish, hardswish, hardsigmoid, gelu_tanh, +[](const Tensor& x) { return softplus(x); }, +[](const Tensor& x) { return elu(x); }}) {
      INFO("function " << number++ << " in " << str(t));
      Tensor x = tensor({-6e4, -500., -100., 100., 500., 6e4}).to(t).requires_grad_();
      auto [g] = grad({sum(f(x))}, {x}, {.create_graph = true});
      CHECK(sum(isfinite(g)).item() == 6);
      if (!g.requires_grad()) continue;
      auto [h] = grad({sum(g)}, {x}, {.allow_unused = true});
      if (h.defined()) CHECK(sum(isfinite(h)).item() == 6);
    }
}

TEST_CASE("binary operators are their formulas") {
  struct Case {
    const char* name;
    Tensor (*f)(const Operand&, const Operand&);
    double (*oracle)(double, double);
    double ulps;
  };
  const Case cases[] = {{"pow", pow, [](double a, double b) { return std::pow(a, b); }, 2},
                        {"atan2", atan2, [](double a, double b) { return std::atan2(a, b); }, 2},
                        {"fmod", fmod, [](double a, double b) { return std::fmod(a, b); }, 0}};
  const Doubles some = {-3.5, -2, -1, -.25, 0, .25, .5, 1, 1.5, 2, 3, 7.75, inf, -inf, nan_d};
  for (auto& c : cases)
    for (DType t : floats) {
      Doubles a, b, expected;
      for (double x : some) for (double y : some) a.push_back(x), b.push_back(y), expected.push_back(c.oracle(x, y));
      INFO(c.name << " in " << str(t));
      check(c.f(tensor(a).to(t), tensor(b).to(t)), expected, t == DType::f32 ? c.ulps : std::min(1.0, c.ulps));
      Doubles left, right;
      for (double x : some) left.push_back(c.oracle(1.5, x)), right.push_back(c.oracle(x, 1.5));
      check(c.f(1.5, tensor(some).to(t)), left, t == DType::f32 ? c.ulps : std::min(1.0, c.ulps));
      check(c.f(tensor(some).to(t), Operand(1.5)), right, t == DType::f32 ? c.ulps : std::min(1.0, c.ulps));
    }
  golden(fmod(tensor({7, -7, 7, -7, 5}), tensor({3, 3, -3, -3, 0})), {1, -1, 1, -1, 0});
  golden(fmod(tensor({std::numeric_limits<int>::min()}), -1), {0});
  golden(logical_xor(tensor({0., 1., nan_d, 0.}), tensor({2., 3., 0., -0.})), {1, 0, 1, 0});
  golden(pow(tensor({2.}), 3), {8});
  golden(pow(2, tensor({3, -1})), {8, .5});
}

TEST_CASE("gradients of powers, angles and remainders") {
  auto gradients = [](auto f, double a, double b) {
    Tensor x = tensor(a, {.requires_grad = true}), y = tensor(b, {.requires_grad = true});
    auto g = grad({f(x, y)}, std::vector<Tensor>{x, y});
    return tensor({g[0].item(), g[1].item()});
  };
  auto power = [](const Tensor& a, const Tensor& b) { return pow(a, b); };
  golden(gradients(power, 0, 0), {0, 0});
  golden(gradients(power, 0, 2), {0, 0});
  golden(gradients(power, 0, 1), {1, 0});
  golden(gradients(power, 3, 0), {0, std::log(3.0)}, 1e-15);
  golden(gradients(power, -2, 3), {12, nan_d});
  golden(gradients([](auto& a, auto& b) { return fmod(a, b); }, -7.5, 2), {1, 3});
  golden(gradients([](auto& a, auto& b) { return atan2(a, b); }, -1, -1), {-.5, .5}, 1e-15);
  // The second derivative of a^b at b = 0 is 1 / a in a and b.
  Tensor a = tensor(4., {.requires_grad = true}), b = tensor(0., {.requires_grad = true});
  auto [slope] = grad({pow(a, b)}, {a}, {.create_graph = true});
  golden(grad({slope}, {b})[0], {.25});
}

TEST_CASE("ternary operators are their formulas, whatever is a number") {
  const Doubles a = {-2, 0, 1, 3.5, 7}, b = {1, -1.5, 4, .5, 2}, c = {.25, 1, 0, -2, .75};
  auto each = [](auto f, const Doubles& x, const Doubles& y, const Doubles& z) {
    Doubles out;
    for (size_t i = 0; i < x.size(); ++i) out.push_back(f(x[i], y[y.size() == 1 ? 0 : i], z[z.size() == 1 ? 0 : i]));
    return out;
  };
  auto line = [](double x, double y, double w) { return x + w * (y - x); };
  auto product = [](double x, double y, double z) { return x + .5 * y * z; };
  auto quotient = [](double x, double y, double z) { return x + .5 * y / z; };
  auto clamped = [](double x, double y, double z) { return std::min(std::max(x, y), z); };
  for (DType t : floats) {
    Tensor x = tensor(a).to(t), y = tensor(b).to(t), z = tensor(c).to(t);
    INFO(str(t));
    check(lerp(x, y, z), each(line, a, b, c), 1);
    check(lerp(x, y, 0.25), each(line, a, b, {.25}), 1);
    check(lerp(x, 4, z), each(line, a, {4}, c), 1);
    check(lerp(x, 4, 0.75), each(line, a, {4}, {.75}), 1);
    check(addcmul(x, y, z, .5), each(product, a, b, c), 1);
    check(addcmul(x, 3, z, .5), each(product, a, {3}, c), 1);
    check(addcmul(x, y, 3, .5), each(product, a, b, {3}), 1);
    check(addcdiv(x, z, y, .5), each(quotient, a, c, b), 1);
    check(addcdiv(x, z, 8, .5), each(quotient, a, c, {8}), 1);
    check(clamp(x, z, y), each(clamped, a, c, b), 0);
    check(clamp(x, -1, y), each(clamped, a, {-1}, b), 0);
    check(clamp(x, z, 2), each(clamped, a, c, {2}), 0);
    check(clamp(x, -1, 2), each(clamped, a, {-1}, {2}), 0);
    golden(lerp(tensor({1e4, -3.}).to(t), tensor({.1, 7.}).to(t), 1), tensor({.1, 7.}).to(t).to_vector<double>());  // exact at the end
  }
  golden(clamp(tensor({5, -5, 1}), 0, 3), {3, 0, 1});
  golden(clamp(tensor({5, -5, 1}), 0.5, 3), {3, .5, 1});
  golden(clamp(tensor({1., nan_d, 2.}), tensor({nan_d, 0., 0.}), 1), {nan_d, nan_d, 1});
  golden(clamp(tensor({1., 5.}), 3, 2), {2, 2});
  golden(lerp(ones({2, 1}), zeros({3}), tensor({{0., .5, 1.}})), {1, .5, 0, 1, .5, 0});
}

TEST_CASE("masked_fill and where choose") {
  Tensor x = tensor({1.f, 2.f, 3.f}), mask = gt(x, 1.5);
  golden(masked_fill(x, mask, -7), {1, -7, -7});
  golden(masked_fill(x, mask, tensor(2.5)), {1, 2.5, 2.5});
  CHECK(masked_fill(x.to(DType::f16), mask, tensor({1., 2., 3.})).dtype() == DType::f16);
  golden(where(mask, x, 0), {0, 2, 3});
  golden(where(mask, 0.5, x), {1, .5, .5});
  golden(where(mask, tensor(9.), x), {1, 9, 9});
  golden(where(gt(tensor(1.), 0), x, -x), {1, 2, 3});
  CHECK(where(mask, tensor({1, 2, 3}), 0.5).dtype() == DType::f32);
  CHECK(where(mask, tensor({true, false, true}), 2).dtype() == DType::i64);
  CHECK(where(mask, x, tensor(1.)).dtype() == DType::f32);
  Tensor leaf = tensor({1., 2.}, {.requires_grad = true});
  golden(grad({sum(masked_fill(leaf, tensor({true, false}), 3) * tensor({5., 7.}))}, {leaf})[0], {0, 7});
}

TEST_CASE("dtypes meet by the table") {
  auto of = [](DType t, bool scalar = false) { return scalar ? ones({}, {.dtype = t}) : ones({2}, {.dtype = t}); };
  auto meets = [](const Tensor& y, DType t) {
    CHECK(y.dtype() == t);
    tests::count("golden_cases");
  };
  using enum DType;
  for (DType a : {f16, bf16, f32, f64, i32, i64, u8, b8})
    for (DType b : {f16, bf16, f32, f64, i32, i64, u8, b8}) {
      INFO(str(a) << " with " << str(b));
      DType t = promote(a, b);
      meets(of(a) + of(b), t == b8 ? i64 : t);
      auto kind = [](DType d) { return is_floating(d) ? 2 : d == b8 ? 0 : 1; };
      DType weak = kind(b) > kind(a) ? t : a;
      meets(of(a) + of(b, true), weak == b8 ? i64 : weak);
      meets(lerp(of(a), of(b, true), 0.5), is_floating(weak) ? weak : f32);
    }
  meets(of(f16) + of(bf16), f32);
  meets(of(f16) * 1e10, f16);
  meets(of(bf16) + tensor(1e10), bf16);
  meets(of(i32) + 1, i32);
  meets(of(i32) * 0.5, f32);
  meets(of(i32) + tensor(0.5), f64);
  meets(of(u8) + tensor(int64_t{1}), u8);
  meets(of(b8) + 1, i64);
  meets(of(b8) * 0.5, f32);
  meets(of(i64) / 2, f32);
  meets(of(f16, true) + of(f32, true), f32);
  // A bool tensor is 0 or 1, and no other number is.
  Tensor mask = tensor({true, false});
  golden(eq(mask, 2), {0, 0});
  golden(ne(mask, 2), {1, 1});
  golden(eq(mask, 1), {1, 0});
  golden(eq(mask, true), {1, 0});
  golden(lt(mask, 2), {1, 1});
  golden(eq(mask, 0.5), {0, 0});
  golden(eq(mask, tensor(2)), {0, 0});
  golden(maximum(mask, 3), {3, 3});
}

TEST_CASE("operators write in place without a copy") {
  Tensor x = tensor({1.f, 2.f, 3.f}), y = tensor({10.f, 20.f, 30.f});
  auto* data = x.data<float>();
  uint64_t version = x.version();
  amp::Trace t = amp::trace([&] {
    x.add_(y);
    x.add_(y, 0.5);
    x.add_(1);
    x.mul_(y);
    x.mul_(2);
    x.lerp_(y, 0.5);
  });
  CHECK(t.count("copy") == 0);
  CHECK(x.data<float>() == data);
  CHECK(x.version() == version + 6);
  golden(x, {175, 670, 1485});
  Tensor h = tensor({1., 2.}).to(DType::f16);
  h.add_(tensor({.5f, .25f}));  // by way of f32, rounded once
  golden(h, {1.5, 2.25});
  h.mul_(tensor(2.));
  CHECK(h.dtype() == DType::f16);
  Tensor i = tensor({4, 5});
  golden(i.add_(1).mul_(tensor(3)), {15, 18});
  golden(i.mul_(0.5), {7, 9});  // f32, then towards 0
  golden(tensor({{1., 2.}, {3., 4.}}).add_(tensor({10., 20.})), {11, 22, 13, 24});
  Tensor m = tensor({{1., 2.}, {3., 4.}});
  golden(m.add_(m.t()), {2, 5, 5, 8});  // the two overlap
  golden(m.mul_(m), {4, 25, 25, 64});
  Tensor strided = zeros({4, 2}), view = strided.slice(0, 0, {}, 2);
  view.add_(1).mul_(tensor({2.f, 3.f}));
  golden(strided, {2, 3, 0, 0, 2, 3, 0, 0});

  Tensor leaf = ones({2}, {.requires_grad = true});
  CHECK_THROWS_WITH(leaf.add_(1), "copy: writes in place to a tensor that requires a gradient; do it under NoGrad");
  CHECK_THROWS_WITH(zeros({2}).add_(leaf), Catch::Contains("writes values that have a gradient into a tensor that has none"));
  Tensor w = leaf * 2, seen = square(w);
  CHECK_THROWS_WITH(w.mul_(2), Catch::Contains("that has a history"));
  {
    NoGrad off;
    leaf.add_(leaf, 0.5).mul_(2);
  }
  golden(leaf.detach(), {3, 3});
  CHECK(leaf.requires_grad());
  CHECK_THROWS_WITH(ones({1}).expand({3}).add_(1), Catch::Contains("writes to an expanded tensor"));
  CHECK_THROWS_WITH(ones({3}).add_(ones({2, 3})), Catch::Contains("cannot broadcast"));
}

TEST_CASE("a counter in i64 counts on where f32 would not") {
  Tensor n = full({}, int64_t{1} << 24, {.dtype = DType::i64});
  CHECK(n.add_(1).item<int64_t>() == (1 << 24) + 1);
  CHECK(n.mul_(3).item<int64_t>() == 3 * ((1 << 24) + 1));
}

TEST_CASE("0-d CPU tensors meet tensors of any device") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device");
  Tensor x = tensor({1.f, -2.f}).to(Device::cuda()), mask = gt(x, 0);
  golden(x + tensor(1.5), {2.5, -.5});
  golden(lerp(x, tensor(3.f), tensor(.5f)), {2, .5});
  golden(clamp(x, tensor(-1.f), 0.5), {.5, -1});
  golden(where(gt(tensor(1.), 0), x, 0), {1, -2});
  golden(where(gt(tensor(1.), 2), x, tensor(7.f)), {7, 7});
  golden(where(mask, x, tensor(7.f)), {1, 7});
  golden(where(mask, tensor(5.f), tensor(7.f)), {5, 7});
  golden(x.add_(tensor(1.f)), {2, -1});
}

TEST_CASE("errors of the elementwise families") {
  const Tensor f = ones({2}), i = zeros({2}, {.dtype = DType::i64}), undefined;
  TEXT(expm1(i), "expm1: i64 is not supported; cast x to a floating dtype with to()");
  TEXT(mish(i), "mish: i64 is not supported; cast x to a floating dtype with to()");
  TEXT(elu(undefined), "elu: needs at least one tensor");
  TEXT(floor(zeros({2}, {.dtype = DType::b8})), "floor: bool is not supported; cast x to a numeric dtype with to()");
  TEXT(softplus(f, 0), "softplus: expected beta above 0, got 0");
  TEXT(pow(2, Operand(3)), "pow_tensor: expected at least one tensor, got two numbers");
  TEXT(atan2(f, ones({3})), "atan2: shapes [2] and [3] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(fmod(zeros({2}, {.dtype = DType::u8}), 300), "fmod: 300 does not fit u8; cast the tensor with to()");
  TEXT(lerp(undefined, 1, 2), "lerp: a tensor is undefined");
  TEXT(lerp(f, undefined, 2), "lerp: a tensor is undefined");
  TEXT(lerp(f, ones({3}), 0.5), "lerp: shapes [2] and [3] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(addcmul(f, f, ones({3})), "addcmul: shapes [2] and [3] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(clamp(zeros({2}, {.dtype = DType::u8}), 0, 256), "clamp: 256 does not fit u8; cast the tensor with to()");
  TEXT(call(*find_op("clamp"), {f, f, ones({3})}), "clamp: expected equal shapes and dtypes, got [2] (f32) and [3] (f32)");
  TEXT(call(*find_op("lerp"), {i, i, i}), "lerp: i64 is not supported; cast with to()");
  TEXT(masked_fill(f, i, 0), "masked_fill: expected a bool mask, got i64");
  TEXT(masked_fill(f, undefined, 0), "masked_fill: a tensor is undefined");
  TEXT(where(undefined, f, f), "where: the condition is undefined");
  TEXT(where(gt(f, 0), undefined, 1), "where: a tensor is undefined");
}

// ---- what users of other frameworks reported

TEST_CASE("report_B36 an expanded tensor is not written to") {
  tests::report("pytorch#12230");
  for (auto write : std::vector<std::function<void(Tensor&)>>{[](Tensor& t) { t.copy_(arange(3)); }, [](Tensor& t) { t.add_(1); }, [](Tensor& t) { t.mul_(t); },
                                                               [](Tensor& t) { t.lerp_(ones({3}), .5); }, [](Tensor& t) { t.zero_(); }}) {
    Tensor base = full({1}, 0.5), wide = base.expand({3});
    CHECK_THROWS_WITH(write(wide), Catch::Contains("whose elements share memory"));
    golden(base, {.5});
  }
}

TEST_CASE("report_B42 NaN passes through choices") {
  tests::report("tvm#19518");
  for (DType t : floats) {
    Tensor x = tensor({1., nan_d, -2.}).to(t);
    INFO(str(t));
    golden(maximum(x, 0), {1, nan_d, 0});
    golden(minimum(0, x), {0, nan_d, -2});
    golden(clamp(x, 0, 1), {1, nan_d, 0});
    golden(clamp(x, tensor({0., 0., 0.}).to(t), 1), {1, nan_d, 0});
    golden(relu(x), {1, nan_d, 0});
    golden(hardsigmoid(x), {rounded(4. / 6, t), nan_d, rounded(1. / 6, t)});
    golden(amax(x), {nan_d});
    golden(amin(x), {nan_d});
    golden(max(x, 0).values, {nan_d});
    golden(min(x, 0).values, {nan_d});
  }
}

TEST_CASE("report_B56 tanh stays within 1") {
  tests::report("tensorflow#23054");
  std::vector<float> v;
  for (float x = 7.9f; x < 9.1f; x += 1e-5f) v.push_back(x);
  Tensor x = tensor(v);
  CHECK(amax(tanh(x)).item() <= 1);
  CHECK(amin(tanh(-x)).item() >= -1);
  CHECK(amax(sigmoid(x * 3)).item() <= 1);
  CHECK(amax(abs(erf(x))).item() <= 1);
  for (DType t : {DType::f16, DType::bf16}) CHECK(amax(tanh(x.to(t))).item() <= 1);
}

TEST_CASE("report_B57 a 16-bit result does not depend on its place in a vector") {
  tests::report("tensorflow#123551");
  for (int64_t n = 1; n <= 33; ++n) {
    golden(rsqrt(full({n}, 0.53125, {.dtype = DType::bf16})), Doubles(static_cast<size_t>(n), 1.375));
    for (auto f : {exp, expm1, log2, tanh, mish, silu, sigmoid, hardswish}) {
      auto y = f(full({n}, 0.71, {.dtype = DType::f16})).to_vector<double>();
      for (double v : y) CHECK(v == y[0]);
    }
  }
}

TEST_CASE("report_B66 empty tensors are written and read without harm") {
  tests::report("pytorch#113037");
  Tensor none = zeros({0, 3});
  CHECK(none.add_(none).mul_(2).lerp_(none, .5).shape() == Shape{0, 3});
  CHECK(none.add_(ones({3}), 2).numel() == 0);
  CHECK(clamp(none, 0, 1).shape() == Shape{0, 3});
  CHECK_THROWS_WITH(zeros({0}).item(), "item: needs a tensor of one element, got [0] (f32)");
}

TEST_CASE("report_B68 a branch with an infinite slope is masked before it") {
  tests::report("tinygrad#15806");
  Tensor x = tensor({0., 4.}, {.requires_grad = true});
  Tensor positive = gt(x, 0);
  golden(grad({sum(where(positive, sqrt(x), x * 0))}, {x})[0], {nan_d, .25});  // documented: 0 times infinity
  golden(grad({sum(where(positive, sqrt(where(positive, x, 1)), x * 0))}, {x})[0], {0, .25});
  golden(grad({sum(masked_fill(sqrt(masked_fill(x, eq(x, 0), 1)), eq(x, 0), 0))}, {x})[0], {0, .25});
}

TEST_CASE("slopes that a kernel computes in one pass are their functions' derivatives") {
  elementwise::each(unary::All{}, []<class Op>(Type<Op>) {
    if constexpr (unary::has_slope<Op>)
      for (double x : {-20., -3.1, -.7, -.01, .02, .9, 2.5, 15.}) {
        INFO(Op::name << " at " << x);
        const double h = 1e-5, difference = (Op::f(x + h) - Op::f(x - h)) / (2 * h);
        const double v = (elementwise::saves_of<Op>().out & 1u) ? Op::f(x) : x;
        CHECK(Op::slope(v) == Approx(difference).epsilon(1e-6).margin(1e-8));
      }
  });
}
