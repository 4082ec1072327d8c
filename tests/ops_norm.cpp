// Normalisation against naive f64 loops, known answers, running statistics, reports from other libraries, error texts.
#include <cmath>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

namespace {

constexpr DType floats[] = {DType::f16, DType::bf16, DType::f32, DType::f64};
using Doubles = std::vector<double>;

struct Random {  // a linear congruential generator (Knuth, MMIX)
  uint64_t state;
  double operator()() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state >> 11) * 0x1p-52 - 1;
  }
  Tensor tensor(const Shape& shape, DType t, double centre = 0) {
    Doubles v(static_cast<size_t>(shape.numel()));
    for (auto& x : v) x = centre + (*this)();
    return halftone::tensor(v).reshape(shape).to(t);
  }
};

DType wide(DType t) { return t == DType::f64 ? t : DType::f32; }
double unit(DType t) { return t == DType::f16 ? 0x1p-11 : t == DType::bf16 ? 0x1p-8 : t == DType::f32 ? 0x1p-24 : 0x1p-53; }

void check(const Tensor& got, const Doubles& expected, double scale = 4) {
  REQUIRE(got.numel() == static_cast<int64_t>(expected.size()));
  auto v = got.to_vector<double>();
  double arithmetic = 16 * (got.dtype() == DType::f64 ? 0x1p-53 : 0x1p-24) * scale;
  for (size_t i = 0; i < v.size(); ++i) {
    INFO("element " << i << " of " << str(got.meta()));
    CHECK(std::abs(v[i] - expected[i]) <= arithmetic + 2 * unit(got.dtype()) * std::abs(expected[i]));
  }
  tests::count("oracle_combinations");
}

// Values that belong together, by a key for each element: normalised, then times weight plus bias, both by another key.
template <class Key, class Feature>
Doubles normalised(const Doubles& x, Key key, Feature feature, const Doubles& w, const Doubles& b, double eps, bool centred = true) {
  auto of_key = [&](size_t k, auto f) {
    double s = 0, n = 0;
    for (size_t i = 0; i < x.size(); ++i) if (key(i) == k) s += f(x[i]), ++n;
    return s / n;
  };
  size_t keys = 0;
  for (size_t i = 0; i < x.size(); ++i) keys = std::max(keys, key(i) + 1);
  Doubles means(keys), vars(keys), y(x.size());
  for (size_t k = 0; k < keys; ++k) {
    means[k] = centred ? of_key(k, [](double v) { return v; }) : 0;
    vars[k] = of_key(k, [&](double v) { return (v - means[k]) * (v - means[k]); });
  }
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = (x[i] - means[key(i)]) / std::sqrt(vars[key(i)] + eps);
    if (!w.empty()) y[i] *= w[feature(i)];
    if (!b.empty()) y[i] += b[feature(i)];
  }
  return y;
}
const BatchNormOptions training{.training = true};

}  // namespace

TEST_CASE("normalisations are their formulas") {
  Random random{1};
  for (DType t : floats)
    for (bool affine : {true, false})
      for (DType of_weight : {t, wide(t)}) {
        auto vector = [&](int64_t n) { return affine ? random.tensor({n}, of_weight) : Tensor(); };
        auto doubles = [](const Tensor& v) { return v.defined() ? v.to_vector<double>() : Doubles(); };
        INFO(str(t) << ", weights " << str(of_weight));
        Tensor x = random.tensor({3, 6, 4, 5}, t), w = vector(6), b = vector(6);
        auto xv = doubles(x), wv = doubles(w), bv = doubles(b);
        auto channel = [](size_t i) { return i / 20 % 6; };
        check(batch_norm(x, w, b, {}, {}), normalised(xv, channel, channel, wv, bv, 1e-5));
        Doubles y = normalised(xv, channel, channel, wv, bv, .5);
        for (auto& v : y) v = std::max(v, 0.0);
        check(batch_norm_relu(x, w, b, {}, {}, {.eps = .5}), y);
        check(group_norm(x, 3, w, b), normalised(xv, [](size_t i) { return i / 40; }, channel, wv, bv, 1e-5));
        check(instance_norm(x, w, b, .1), normalised(xv, [](size_t i) { return i / 20; }, channel, wv, bv, .1));
        Tensor u = vector(20), c = vector(20);
        auto row = [](size_t i) { return i / 20; };
        auto column = [](size_t i) { return i % 20; };
        auto square = [&](const Tensor& v) { return v.defined() ? v.view({4, 5}) : v; };
        check(layer_norm(x, {4, 5}, square(u), square(c)), normalised(xv, row, column, doubles(u), doubles(c), 1e-5));
        check(layer_norm(x.reshape({18, 20}), {20}, u, c, .2), normalised(xv, row, column, doubles(u), doubles(c), .2));
        check(rms_norm(x, {4, 5}, square(u), 1e-3), normalised(xv, row, column, doubles(u), {}, 1e-3, false));
      }
}

TEST_CASE("batch norm adds before the relu, and rounds once") {
  Random random{2};
  for (DType t : floats) {
    Tensor x = random.tensor({4, 3, 5}, t), z = random.tensor({4, 3, 5}, t);
    auto channel = [](size_t i) { return i / 5 % 3; };
    Doubles y = normalised(x.to_vector<double>(), channel, channel, {}, {}, 1e-5), added = z.to_vector<double>();
    for (size_t i = 0; i < y.size(); ++i) y[i] = std::max(0.0, y[i] + added[i]);
    check(batch_norm_add_relu(x, z, {}, {}, {}, {}), y);
  }
}

TEST_CASE("two batch norms and their sum's relu are those of the operators by themselves") {
  Random random{4};
  for (DType t : floats)
    for (bool training : {true, false})
      for (bool affine : {true, false})
        for (Shape shape : {Shape{6, 3}, Shape{4, 3, 5}, Shape{2, 3, 4, 5}}) {
          INFO(str(t) << ' ' << str(shape) << (training ? ", training" : "") << (affine ? ", affine" : ""));
          Tensors leaves{random.tensor(shape, t), random.tensor(shape, t)};
          for (int i = 0; i < 4; ++i) leaves.push_back(affine ? random.tensor({3}, wide(t)) : Tensor());
          Tensor g = random.tensor(shape, t);
          auto results = [&](DType of_x, auto f) {
            Tensors in, present, means, variances;
            for (auto& leaf : leaves) in.push_back(leaf.defined() ? leaf.detach().to(leaf.rank() > 1 ? of_x : leaf.dtype()).requires_grad_() : leaf);
            for (auto& leaf : in) if (leaf.defined()) present.push_back(leaf);
            for (int i = 0; i < 2; ++i) {
              means.push_back(full({3}, .5 * i, {.dtype = wide(t)}));
              variances.push_back(full({3}, 1. + i, {.dtype = wide(t)}));
            }
            Tensor y = f(in[0], BatchNormTensors{in[2], in[3], means[0], variances[0]}, in[1], BatchNormTensors{in[4], in[5], means[1], variances[1]},
                         BatchNormOptions{.training = training, .momentum = .3, .eps = .01});
            auto all = grad({sum(y.to(wide(t)) * g)}, {present.begin(), present.end()});
            for (auto& r : {y.detach(), means[0], means[1], variances[0], variances[1]}) all.push_back(r);
            return all;
          };
          auto together = results(t, [](const auto&... in) { return batch_norms_relu(in...); });
          auto apart = results(wide(t), [](auto& x, auto of_x, auto& z, auto of_z, auto o) {
            return batch_norm_add_relu(x, batch_norm(z, of_z.w, of_z.b, of_z.running_mean, of_z.running_var, o), of_x.w, of_x.b, of_x.running_mean, of_x.running_var, o);
          });
          REQUIRE(together.size() == apart.size());
          for (size_t i = 0; i < apart.size(); ++i) {
            INFO("result " << i);
            check(together[i], apart[i].to_vector<double>(), 28);
          }
        }
}

TEST_CASE("a sum and its layer norm are those of the operators by themselves") {
  Random random{3};
  for (DType t : floats)
    for (DType of_z : {t, wide(t)}) {
      INFO(str(t) << " to " << str(of_z));
      Tensor w = random.tensor({33}, wide(t)), b = random.tensor({33}, wide(t)), g = random.tensor({7, 4, 33}, wide(t));
      for (Shape shape : {Shape{7, 4, 33}, Shape{4, 33}, Shape{33}}) {
        Tensor u = random.tensor({7, 4, 33}, t), v = random.tensor(shape, of_z);
        for (int used : {1, 2, 3}) {  // bit 0: y, bit 1: the sum
          INFO("z " << str(shape) << ", used " << used);
          auto gradients = [&](auto f) {
            Tensors leaves{u.detach().requires_grad_(), v.detach().requires_grad_(), w.detach().requires_grad_(), b.detach().requires_grad_()};
            AddedNorm all = f(leaves[0], leaves[1], leaves[2], leaves[3]);
            Tensor loss;
            if (used & 1) loss = sum(all.y.to(wide(t)) * g);
            if (used & 2) loss = loss.defined() ? loss + sum(all.sum.to(wide(t)) * g * .5) : sum(all.sum.to(wide(t)) * g * .5);
            auto of = grad({loss}, {leaves.begin(), leaves.end()}, {.allow_unused = true});
            of.push_back(all.y.detach());
            of.push_back(all.sum.detach());
            return of;
          };
          auto together = gradients([](auto& x, auto& z, auto& weight, auto& bias) { return add_layer_norm(x, z, {33}, weight, bias, .1); });
          auto apart = gradients([t](auto& x, auto& z, auto& weight, auto& bias) {
            Tensor h = x + z;
            return AddedNorm{layer_norm(h, {33}, weight, bias, .1).to(t), h};
          });
          for (size_t i = 0; i < apart.size(); ++i) {
            INFO("result " << i);
            REQUIRE(together[i].defined() == apart[i].defined());
            if (!apart[i].defined()) continue;
            CHECK(together[i].dtype() == apart[i].dtype());
            check(together[i], apart[i].to_vector<double>(), 28);
          }
        }
      }
    }
}

TEST_CASE("a sum and its layer norm of two dtypes meet as they do in a sum") {
  Random random{4};
  for (auto [t, u] : {std::pair{DType::f32, DType::f16}, {DType::f32, DType::bf16}, {DType::f64, DType::f32}, {DType::f16, DType::bf16}, {DType::f64, DType::f16}}) {
    INFO(str(t) << " and " << str(u));
    const Tensor x = random.tensor({5, 33}, t), z = random.tensor({5, 33}, u), w = random.tensor({33}, DType::f32), b = random.tensor({33}, DType::f32);
    const DType together = (x + z).dtype();
    const auto [y, sum] = add_layer_norm(x, z, {33}, together == DType::f64 ? w.to(together) : w, together == DType::f64 ? b.to(together) : b, .1);
    CHECK(sum.dtype() == together);
    const Tensor exact = x.to(DType::f64) + z.to(DType::f64);
    check(sum, exact.to_vector<double>(), 4);
    check(y, layer_norm(exact, {33}, w.to(DType::f64), b.to(DType::f64), .1).to_vector<double>(), 28);
  }
}

TEST_CASE("a sum and its layer norm under autocast") {
  Tensor x = ones({2, 8}), z = ones({8});
  Tensor bits = arange(16, {.dtype = DType::f32}).view({2, 8});
  amp::Autocast region({.dtype = DType::bf16});
  nn::LayerNorm norm(8);
  nn::Linear branch(8, 8), next(8, 8);
  auto [y, h] = norm.add(branch(bits), z);
  CHECK(y.dtype() == DType::bf16);
  CHECK(h.dtype() == DType::f32);
  CHECK(next(y).dtype() == DType::bf16);
  auto [plain, total] = norm.add(x, z);
  CHECK((plain.dtype() == DType::f32 && total.dtype() == DType::f32));
  amp::Autocast strict({.strict = true});
  CHECK_THROWS_WITH(norm.add(branch(bits), z),
                    Catch::Contains("add_layer_norm: runs in f32 inside a strict bf16 region because an input [8] (f32) is f32"));
}

TEST_CASE("batch norm of the reference numbers") {
  for (DType t : floats) {
    Tensor mean = zeros({1}, {.dtype = wide(t)}), var = ones({1}, {.dtype = wide(t)});
    Tensor y = batch_norm(tensor({{1.}, {3.}}).to(t), {}, {}, mean, var, training);
    check(y, {-0.99999500003749969, 0.99999500003749969});
    check(mean, {.2});
    check(var, {1.1});  // takes the unbiased 2
    tests::count("golden_cases");
  }
}

TEST_CASE("running statistics follow the batches, and evaluation uses them") {
  Random random{3};
  for (DType t : floats) {
    Tensor mean = zeros({3}, {.dtype = wide(t)}), var = ones({3}, {.dtype = wide(t)}), w = random.tensor({3}, wide(t)), b = random.tensor({3}, wide(t));
    Doubles m(3), v(3, 1.0);
    for (int step = 0; step < 5; ++step) {
      Tensor x = random.tensor({4, 3, 7}, t, step);
      batch_norm(x, w, b, mean, var, {.training = true, .momentum = .3});
      auto xv = x.to_vector<double>();
      for (size_t c = 0; c < 3; ++c) {
        double s = 0, q = 0;
        for (size_t i = 0; i < xv.size(); ++i) if (i / 7 % 3 == c) s += xv[i] / 28;
        for (size_t i = 0; i < xv.size(); ++i) if (i / 7 % 3 == c) q += (xv[i] - s) * (xv[i] - s) / 27;
        m[c] = .7 * m[c] + .3 * s;
        v[c] = .7 * v[c] + .3 * q;
      }
    }
    check(mean, m);
    check(var, v);
    uint64_t version = mean.version();
    Tensor x = random.tensor({2, 3, 7}, t);
    auto xv = x.to_vector<double>(), mv = mean.to_vector<double>(), vv = var.to_vector<double>(), wv = w.to_vector<double>(), bv = b.to_vector<double>();
    for (size_t i = 0; i < xv.size(); ++i) {
      size_t c = i / 7 % 3;
      xv[i] = (xv[i] - mv[c]) / std::sqrt(vv[c] + 1e-5) * wv[c] + bv[c];
    }
    check(batch_norm(x, w, b, mean, var), xv, 16);
    CHECK(mean.version() == version);
  }
}

TEST_CASE("a batch that is not finite leaves the running statistics alone, channel by channel") {
  for (float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Tensor mean = full({2}, .5), var = full({2}, 2.);
    Tensor y = batch_norm(tensor({{1.f, bad}, {3.f, 1.f}}), {}, {}, mean, var, training);
    check(mean, {.65, .5});
    check(var, {2., 2.});
    CHECK(std::isnan(y.select(1, 1).select(0, 0).item()));
  }
}

TEST_CASE("a forward between another's forward and backward does not disturb it") {
  Tensor x = tensor({{1.f, 2.f}, {3.f, 5.f}, {4.f, 0.f}}, {.requires_grad = true}), mean = zeros({2}), var = ones({2});
  auto loss = [&] { return sum(square(batch_norm(x, {}, {}, mean, var, training)) * tensor({{1.f, 2.f}, {3.f, 4.f}, {5.f, 6.f}})); };
  Tensor first = grad({loss()}, {x})[0], waiting = loss();
  loss();
  CHECK(grad({waiting}, {x})[0].to_vector<float>() == first.to_vector<float>());
}

TEST_CASE("report_B51 layer norm keeps its digits beside a large mean") {
  tests::report("burn#5607, pytorch#51102, mlx#2238");
  for (double mean : {100., 1000., 1449., 10000.}) {
    Doubles row(16);
    for (size_t i = 0; i < 16; ++i) row[i] = mean + static_cast<double>(i) * 1e-3;
    Tensor x = tensor(row).to(DType::f32);
    Doubles expected = normalised(x.to_vector<double>(), [](size_t) { return size_t{0}; }, [](size_t i) { return i; }, {}, {}, 1e-5);
    for (auto& y : {layer_norm(x, {16}), group_norm(x.view({1, 1, 16}), 1), batch_norm(x.view({16, 1}), {}, {}, {}, {})}) {
      auto v = y.to_vector<double>();
      for (size_t i = 0; i < 16; ++i) CHECK(std::abs(v[i] - expected[i]) <= 1e-6 * std::abs(expected[i]));
    }
    tests::count("golden_cases");
  }
  CHECK(std::abs(layer_norm(arange(16, {.dtype = DType::f32}) * 1e-3 + 100, {16}).slice(0, 0, 1).item() + 1.34153) < 2e-5);
  // The gradient, too.
  Random random{4};
  Tensor x = random.tensor({3, 16}, DType::f32, 10000), g = random.tensor({3, 16}, DType::f32);
  auto gradient = [&](DType t) {
    Tensor at = x.to(t).requires_grad_();
    return grad({sum(layer_norm(at, {16}) * g.to(t))}, {at})[0];
  };
  check(gradient(DType::f32), gradient(DType::f64).to_vector<double>());
}

TEST_CASE("report_B53 squares of large numbers do not overflow") {
  tests::report("onnxruntime#29034, pytorch#178123, #162489");
  check(rms_norm(tensor({8000.f, -8000.f, 8000.f, 8000.f}).to(DType::f16), {4}), {1, -1, 1, 1});
  check(layer_norm(tensor({1e30f, 2e30f, 3e30f}), {3}), {-1.2247448713915890, 0, 1.2247448713915890});
}

TEST_CASE("a batch of the largest 16-bit numbers is normalised as in f64") {
  for (DType t : {DType::f16, DType::bf16}) {
    const double most = t == DType::f16 ? 65504 : 0x1.fep127;
    Tensor x = full({4, 1, 2}, -most).to(t);
    x[3].fill_(most);
    Tensor narrow = x.clone().requires_grad_(), exact = x.to(DType::f64).requires_grad_(), g = arange(8, {.dtype = DType::f32}).view({4, 1, 2});
    Tensor y = batch_norm(narrow, {}, {}, {}, {}, {.training = true}), z = batch_norm(exact, {}, {}, {}, {}, {.training = true});
    y.backward({.gradient = g.to(t)});
    z.backward({.gradient = g.to(DType::f64)});
    check(y, z.to_vector<double>());
    check(narrow.grad(), exact.grad().to_vector<double>());
  }
}

TEST_CASE("report_B54 eps keeps its value beside 16-bit inputs") {
  tests::report("DeepSpeed#581, tt-metal#45968");
  for (DType t : {DType::f16, DType::bf16}) {
    Tensor x = full({2, 4}, 3, {.dtype = t});
    check(layer_norm(x, {4}, {}, {}, 1e-12), Doubles(8));
    check(rms_norm(zeros({4}, {.dtype = t}), {4}, {}, 1e-12), Doubles(4));
    check(batch_norm(x, {}, {}, {}, {}, {.eps = 1e-12}), Doubles(8));
  }
}

TEST_CASE("report_B55 one value for each channel is refused in training") {
  tests::report("pytorch#1381, torch/nn#1271, Paddle#11445");
  CHECK_THROWS_WITH(batch_norm(ones({1, 3}), {}, {}, zeros({3}), ones({3}), training),
                    "batch_norm: expected more than one value for each channel in training, got [1, 3] (f32)");
  CHECK_THROWS_AS(batch_norm(ones({1, 3, 1, 1}), {}, {}, zeros({3}), ones({3}), training), Error);
  CHECK_THROWS_AS(batch_norm(ones({0, 3, 2}), {}, {}, zeros({3}), ones({3}), training), Error);
  check(batch_norm(ones({1, 3}), {}, {}, zeros({3}), ones({3})), Doubles(3, 1 / std::sqrt(1 + 1e-5)));
}

TEST_CASE("report_B65 normalisations of nothing keep the shape") {
  tests::report("pytorch#29578");
  CHECK(batch_norm(ones({0, 64, 12, 12}), {}, {}, zeros({64}), ones({64})).shape() == Shape{0, 64, 12, 12});
  CHECK(layer_norm(ones({0, 5}), {5}, ones({5}), zeros({5})).shape() == Shape{0, 5});
  CHECK(layer_norm(ones({3, 0}), {0}).shape() == Shape{3, 0});
  CHECK(group_norm(ones({0, 4, 3}), 2).shape() == Shape{0, 4, 3});
  CHECK(rms_norm(ones({0, 4}), {4}).shape() == Shape{0, 4});
}

TEST_CASE("report_B38 the gradient of layer norm over a tensor that is not contiguous") {
  tests::report("mlx#4253, FlagGems#5392");
  Random random{5};
  Tensor x = random.tensor({4, 3, 6}, DType::f32).permute({2, 0, 1}), w = random.tensor({4, 3}, DType::f32), g = random.tensor({3, 4, 6}, DType::f32).permute({2, 1, 0});
  auto gradients = [&](const Tensor& at, const Tensor& weights) {
    Tensor leaf = at.detach().requires_grad_(), scale = w.detach().requires_grad_();
    return grad({sum(layer_norm(leaf, {4, 3}, scale) * weights)}, {leaf, scale});
  };
  auto strided = gradients(x, g), dense = gradients(x.contiguous(), g.contiguous());
  for (size_t i = 0; i < 2; ++i) CHECK(strided[i].to_vector<float>() == dense[i].to_vector<float>());
}

TEST_CASE("constant rows become zeros") {
  check(layer_norm(full({256}, 1234), {256}), Doubles(256));
  check(layer_norm(full({8192}, 300.1).to(DType::f16), {8192}), Doubles(8192));
}

TEST_CASE("normalisations under autocast keep dtypes, and weights get f32 gradients") {
  Random random{6};
  amp::Autocast region({.dtype = DType::bf16});
  Tensor x = random.tensor({2, 4, 3}, DType::bf16).requires_grad_(), w = ones({4}, {.requires_grad = true}), b = zeros({4}, {.requires_grad = true});
  Tensor y = batch_norm(x, w, b, zeros({4}), ones({4}), training);
  CHECK(y.dtype() == DType::bf16);
  auto g = grad({sum(square(y))}, {x, w, b});
  CHECK((g[0].dtype() == DType::bf16 && g[1].dtype() == DType::f32 && g[2].dtype() == DType::f32));
  CHECK(layer_norm(x, {3}, ones({3})).dtype() == DType::bf16);
}

TEST_CASE("errors of normalisations") {
  auto f = [](const Shape& s) { return ones(s); };
  auto i64 = [](const Shape& s) { return zeros(s, {.dtype = DType::i64}); };
  Tensor none;
  TEXT(batch_norm(none, none, none, none, none), "batch_norm: x is undefined");
  TEXT(batch_norm(f({3}), none, none, none, none), "batch_norm: expected x [n, channels, ...] of a floating dtype, got [3] (f32)");
  TEXT(batch_norm(i64({2, 3}), none, none, none, none), "batch_norm: expected x [n, channels, ...] of a floating dtype, got [2, 3] (i64)");
  TEXT(batch_norm(f({2, 3}), f({2}), none, none, none), "batch_norm: expected weight [3] (f32), got [2] (f32)");
  TEXT(batch_norm(f({2, 3}), f({3}), f({4}), none, none), "batch_norm: expected bias [3] (f32), got [4] (f32)");
  TEXT(batch_norm(f({2, 3}), f({3}).to(DType::f16), none, none, none), "batch_norm: expected weight [3] (f32), got [3] (f16)");
  TEXT(batch_norm(f({2, 3}), none, f({3}), none, none), "batch_norm: expected a bias only beside a weight of its dtype");
  TEXT(batch_norm(f({2, 3}), none, none, f({3}), none), "batch_norm: expected running_mean and running_var together");
  TEXT(batch_norm(f({2, 3}).to(DType::f16), none, none, f({3}).to(DType::f16), f({3})), "batch_norm: expected running_mean [3] (f32), got [3] (f16)");
  TEXT(batch_norm(f({2, 3}), none, none, f({3}), f({2})), "batch_norm: expected running_var [3] (f32), got [2] (f32)");
  TEXT(batch_norm_relu(none, none, none, none, none), "batch_norm_relu: x is undefined");
  TEXT(batch_norm_add_relu(f({2, 3}), none, none, none, none, none), "batch_norm_add_relu: x or z is undefined");
  TEXT(batch_norm_add_relu(f({2, 3}), f({2, 4}), none, none, none, none), "batch_norm_relu: expected z like x, [2, 3] (f32), got [2, 4] (f32)");
  TEXT(batch_norms_relu(f({2, 3}), {}, none, {}), "batch_norms_relu: x or z is undefined");
  TEXT(batch_norms_relu(f({2, 3}), {}, f({2, 4}), {}), "batch_norms_relu: expected z like x, [2, 3] (f32), got [2, 4] (f32)");
  TEXT(batch_norms_relu(f({2, 3}), {}, f({2, 3}), {f({2}), {}, {}, {}}), "batch_norms_relu: expected weight [3] (f32), got [2] (f32)");
  TEXT(batch_norms_relu(f({2, 3}), {}, f({2, 3}), {{}, {}, f({3}), f({3})}), "batch_norms_relu: expected running statistics of both x and z, or of none");
  TEXT(add_layer_norm(f({2, 3}), none, {3}), "add_layer_norm: x or z is undefined");
  TEXT(add_layer_norm(f({2, 3}), i64({2, 3}), {3}), "add_layer_norm: expected floating dtypes, got x f32 and z i64; cast with to()");
  TEXT(add_layer_norm(f({2, 3}), f({2, 3}), {2}), "add_layer_norm: expected x of last dimensions [2], got [2, 3] (f32)");
  TEXT(add_layer_norm(f({2, 3}), f({2, 3}), {3}, f({2})), "add_layer_norm: expected weight [3] (f32), got [2] (f32)");
  TEXT(layer_norm(none, {3}), "layer_norm: x is undefined");
  TEXT(layer_norm(f({2, 3}), {2}), "layer_norm: expected x of last dimensions [2], got [2, 3] (f32)");
  TEXT(layer_norm(f({3}), {2, 3}), "layer_norm: expected x of last dimensions [2, 3], got [3] (f32)");
  TEXT(layer_norm(f({2, 3}), {}), "layer_norm: expected x of last dimensions [], got [2, 3] (f32)");
  TEXT(layer_norm(i64({2, 3}), {3}), "layer_norm: expected a floating dtype, got i64; cast x with to()");
  TEXT(layer_norm(f({2, 3}), {3}, f({2, 3})), "layer_norm: expected weight [3] (f32), got [2, 3] (f32)");
  TEXT(rms_norm(f({2, 3}), {3}, f({2})), "rms_norm: expected weight [3] (f32), got [2] (f32)");
  TEXT(group_norm(none, 2), "group_norm: x is undefined");
  TEXT(group_norm(f({2, 3}), 2), "group_norm: expected x [n, channels, ...] with channels that groups = 2 divides, got [2, 3] (f32)");
  TEXT(group_norm(f({2, 4}), 0), "group_norm: expected x [n, channels, ...] with channels that groups = 0 divides, got [2, 4] (f32)");
  TEXT(group_norm(f({2, 4}), 2, f({4}), f({2})), "group_norm: expected bias [4] (f32), got [2] (f32)");
  TEXT(instance_norm(f({2})), "instance_norm: expected x [n, channels, ...], got [2] (f32)");
}
