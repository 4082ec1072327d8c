// Losses: known answers, naive f64 loops written from their formulas, gradients against differences, autocast, error texts.
#include <functional>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

namespace {

using Doubles = std::vector<double>;

Tensor f(const Shape& s) { return ones(s); }
Tensor i64(const Shape& s) { return zeros(s, {.dtype = DType::i64}); }
Doubles values(const Tensor& t) { return t.to_vector<double>(); }
const Tensor undefined;
constexpr double inf = std::numeric_limits<double>::infinity();

struct Random {  // a linear congruential generator (Knuth, MMIX)
  uint64_t state;
  double operator()(double low, double high) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return low + static_cast<double>(state >> 11) * 0x1p-53 * (high - low);
  }
  Tensor tensor(const Shape& s, double low, double high) {
    Doubles v(static_cast<size_t>(s.numel()));
    for (auto& x : v) x = (*this)(low, high);
    return halftone::tensor(v).reshape(s);
  }
  Tensor classes(const Shape& s, int64_t n) {
    std::vector<int64_t> v(static_cast<size_t>(s.numel()));
    for (auto& x : v) x = static_cast<int64_t>((*this)(0, static_cast<double>(n)));
    return halftone::tensor(v).reshape(s);
  }
};

void golden(const Tensor& t, const Doubles& expected, double relative = 1e-15) {
  auto v = values(t);
  REQUIRE(v.size() == expected.size());
  for (size_t i = 0; i < v.size(); ++i) {
    INFO("element " << i << " of " << str(t));
    if (std::isnan(expected[i])) CHECK(std::isnan(v[i]));
    else if (std::isinf(expected[i])) CHECK(v[i] == expected[i]);
    else CHECK(std::abs(v[i] - expected[i]) <= relative * std::max(1e-3, std::abs(expected[i])));
  }
  tests::count("golden_cases");
}

// An elementwise loss against its formula, under every reduction, and its derivatives against differences.
using Formula = std::function<double(double, double)>;
using Loss = std::function<Tensor(const Tensor&, const Tensor&, Reduction)>;
void check_loss(const char* name, const Loss& loss, const Formula& formula, const Tensor& x, const Tensor& y, bool target_too = true) {
  INFO(name);
  for (DType t : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    Tensor a = x.to(t), b = y.to(t);
    auto av = values(a), bv = values(b);
    Doubles expected(av.size());
    double total = 0, scale = 0;
    for (size_t i = 0; i < av.size(); ++i) {
      expected[i] = formula(av[i], bv[i]);
      total += expected[i];
      scale += std::abs(expected[i]) + 1;
    }
    double unit = t == DType::f64 ? 0x1p-50 : 0x1p-20;
    auto near = [&](const Tensor& got, double want, double size) {
      CHECK(got.dtype() == (t == DType::f64 ? DType::f64 : DType::f32));
      CHECK(std::abs(got.item() - want) <= unit * size);
    };
    Tensor each = loss(a, b, Reduction::none);
    auto v = values(each);
    for (size_t i = 0; i < v.size(); ++i) CHECK(std::abs(v[i] - expected[i]) <= unit * (1 + std::abs(expected[i])));
    near(loss(a, b, Reduction::sum), total, scale);
    near(loss(a, b, Reduction::mean), total / static_cast<double>(av.size()), scale / static_cast<double>(av.size()));
    tests::count("oracle_combinations");
  }
  auto f1 = [&](const std::vector<Tensor>& in) { return std::vector{loss(in[0], in.size() > 1 ? in[1] : y, Reduction::none)}; };
  std::vector<Tensor> leaves{x.clone().requires_grad_()};
  if (target_too) leaves.push_back(y.clone().requires_grad_());
  CHECK(gradcheck_report(f1, leaves, {.rtol = 1e-5, .atol = 1e-6}) == "");
  CHECK(gradgradcheck_report(f1, leaves, {.rtol = 1e-5, .atol = 1e-5}) == "");
  tests::count("gradchecks");
  tests::count("gradgradchecks");
}

}  // namespace

TEST_CASE("cross_entropy's known answers with class weights and probabilities") {
  Tensor x = tensor<double>({{1, 2, 3}, {.5, -1, 4}, {2, 2, 2}}), target = tensor<int64_t>({2, -100, 0});
  Tensor weight = tensor<double>({1, 2, 3});
  golden(cross_entropy(x, target), {.7531091265562451});
  golden(cross_entropy(x, target, {.label_smoothing = .2}), {.8531091265562452});
  golden(cross_entropy(x, target, {.weight = weight}), {.5803575455003127});
  golden(cross_entropy(x, target, {.label_smoothing = .1, .weight = weight}), {.6309660369392392});
  Tensor row = x.slice(0, 0, 1), q = tensor<double>({{.2, .3, .5}});
  golden(cross_entropy(row, q, {.label_smoothing = .1}), {1.1376059644443806});
  // Weights of one change nothing; a distribution that is one class is that class.
  for (double smoothing : {0.0, 0.3})
    for (Reduction r : {Reduction::none, Reduction::mean, Reduction::sum}) {
      Tensor plain = cross_entropy(x, target, {.label_smoothing = smoothing, .reduction = r});
      golden(cross_entropy(x, target, {.label_smoothing = smoothing, .reduction = r, .weight = f({3})}), values(plain));
      Tensor classes = tensor<int64_t>({2, 1, 0});
      golden(cross_entropy(x, one_hot(classes, 3, DType::f64), {.label_smoothing = smoothing, .reduction = r}),
             values(cross_entropy(x, classes, {.label_smoothing = smoothing, .reduction = r})));
    }
}

TEST_CASE("weighted cross_entropy is a weighted mean of rows, in any shape") {
  Random random{5};
  for (auto [s, classes] : {std::pair{Shape{1, 1}, 1}, {Shape{7, 5}, 5}, {Shape{2, 3, 4}, 3}, {Shape{3, 4, 2, 5}, 4}}) {
    Tensor x = random.tensor(s, -3, 3), weight = random.tensor({classes}, .2, 2);
    Shape rows = s;
    rows.erase(1);
    Tensor target = random.classes(rows, classes), last = movedim(x, 1, -1).contiguous();
    auto xv = values(last), w = values(weight);
    auto t = target.to_vector<int64_t>();
    for (double smoothing : {0.0, 0.15}) {
      double total = 0, weights = 0;
      Doubles each;
      for (size_t i = 0; i < t.size(); ++i) {
        size_t c = static_cast<size_t>(classes);
        double sum = 0, smooth = 0;
        for (size_t k = 0; k < c; ++k) sum += std::exp(xv[i * c + k]);
        for (size_t k = 0; k < c; ++k) smooth += w[k] * (std::log(sum) - xv[i * c + k]) / static_cast<double>(c);
        size_t k = static_cast<size_t>(t[i]);
        each.push_back((1 - smoothing) * w[k] * (std::log(sum) - xv[i * c + k]) + smoothing * smooth);
        total += each.back();
        weights += w[k];
      }
      golden(cross_entropy(x, target, {.label_smoothing = smoothing, .reduction = Reduction::none, .weight = weight}), each, 1e-13);
      golden(cross_entropy(x, target, {.label_smoothing = smoothing, .reduction = Reduction::sum, .weight = weight}), {total}, 1e-13);
      golden(cross_entropy(x, target, {.label_smoothing = smoothing, .weight = weight}), {total / weights}, 1e-13);
      auto g = [&](const std::vector<Tensor>& in) { return std::vector{cross_entropy(in[0], target, {.label_smoothing = smoothing, .weight = weight})}; };
      CHECK(gradcheck_report(g, {x.clone().requires_grad_()}, {.rtol = 1e-5, .atol = 1e-6}) == "");
      CHECK(gradgradcheck_report(g, {x.clone().requires_grad_()}, {.rtol = 1e-5, .atol = 1e-6}) == "");
      tests::count("gradchecks");
      tests::count("gradgradchecks");
    }
    Tensor q = softmax(random.tensor(s, -1, 1), 1);
    auto soft = [&](const std::vector<Tensor>& in) { return std::vector{cross_entropy(in[0], in[1], {.label_smoothing = .1, .weight = weight})}; };
    CHECK(gradcheck_report(soft, {x.clone().requires_grad_(), q.clone().requires_grad_()}, {.rtol = 1e-5, .atol = 1e-6}) == "");
    tests::count("gradchecks");
  }
}

TEST_CASE("nll_loss") {
  Random random{6};
  Tensor x = random.tensor({4, 3, 2}, -3, 0), target = random.classes({4, 2}, 3);
  auto xv = values(x);
  auto t = target.to_vector<int64_t>();
  Doubles each;
  for (size_t i = 0; i < 4; ++i) for (size_t j = 0; j < 2; ++j) each.push_back(-xv[(i * 3 + static_cast<size_t>(t[i * 2 + j])) * 2 + j]);
  golden(nll_loss(x, target, {.reduction = Reduction::none}), each);
  Tensor logits = random.tensor({9, 5}, -2, 2), classes = random.classes({9}, 5), weight = random.tensor({5}, .5, 2);
  golden(nll_loss(log_softmax(logits, 1), classes, {.weight = weight}), values(cross_entropy(logits, classes, {.weight = weight})));
  CHECK(nll_loss(x.to(DType::f16), target).dtype() == DType::f32);
}

TEST_CASE("elementwise losses are their formulas") {
  Random random{7};
  Tensor x = random.tensor({5, 7}, -2, 2), y = random.tensor({5, 7}, -2, 2);
  check_loss("mse", [](auto& a, auto& b, Reduction r) { return mse_loss(a, b, r); }, [](double a, double b) { return (a - b) * (a - b); }, x, y);
  check_loss("l1", [](auto& a, auto& b, Reduction r) { return l1_loss(a, b, r); }, [](double a, double b) { return std::abs(a - b); }, x, y);
  for (double d : {0.5, 1.0, 3.0}) {
    auto huber = [d](double a, double b) { return std::abs(a - b) <= d ? (a - b) * (a - b) / 2 : d * (std::abs(a - b) - d / 2); };
    check_loss("huber", [d](auto& a, auto& b, Reduction r) { return huber_loss(a, b, d, r); }, huber, x, y);
    check_loss("smooth_l1", [d](auto& a, auto& b, Reduction r) { return smooth_l1_loss(a, b, d, r); }, [&](double a, double b) { return huber(a, b) / d; }, x, y);
  }
  check_loss("smooth_l1 with beta 0", [](auto& a, auto& b, Reduction r) { return smooth_l1_loss(a, b, 0, r); },
             [](double a, double b) { return std::abs(a - b); }, x, y);
  Tensor p = random.tensor({5, 7}, .05, .95), q = random.tensor({5, 7}, .05, .95);
  check_loss("bce", [](auto& a, auto& b, Reduction r) { return binary_cross_entropy(a, b, {.reduction = r}); },
             [](double a, double b) { return -(b * std::log(a) + (1 - b) * std::log(1 - a)); }, p, q);
  auto from_logits = [](double w) {
    return [w](double a, double b) { return -(w * b * std::log(1 / (1 + std::exp(-a))) + (1 - b) * std::log(1 - 1 / (1 + std::exp(-a)))); };
  };
  check_loss("bce_with_logits", [](auto& a, auto& b, Reduction r) { return binary_cross_entropy_with_logits(a, b, {.reduction = r}); }, from_logits(1), x, q);
  check_loss("bce_with_logits, pos_weight", [](auto& a, auto& b, Reduction r) {
    return binary_cross_entropy_with_logits(a, b, {.reduction = r, .pos_weight = tensor(2.5)});
  }, from_logits(2.5), x, q);
  check_loss("kl_div", [](auto& a, auto& b, Reduction r) { return kl_div(a, b, {.reduction = r}); },
             [](double a, double b) { return b * (std::log(b) - a); }, x, q);
  check_loss("kl_div of logarithms", [](auto& a, auto& b, Reduction r) { return kl_div(a, b, {.reduction = r, .log_target = true}); },
             [](double a, double b) { return std::exp(b) * (b - a); }, x, y);
  check_loss("poisson_nll", [](auto& a, auto& b, Reduction r) { return poisson_nll_loss(a, b, {.reduction = r}); },
             [](double a, double b) { return std::exp(a) - b * a; }, x, q);
  check_loss("poisson_nll of rates", [](auto& a, auto& b, Reduction r) { return poisson_nll_loss(a, b, {.reduction = r, .log_input = false}); },
             [](double a, double b) { return a - b * std::log(a + 1e-8); }, p, q);
  Tensor counts = random.tensor({5, 7}, .5, 5);
  check_loss("poisson_nll, full", [](auto& a, auto& b, Reduction r) { return poisson_nll_loss(a, b, {.reduction = r, .full = true}); },
             [](double a, double b) { return std::exp(a) - b * a + (b > 1 ? b * std::log(b) - b + .5 * std::log(2 * 3.14159265358979323846 * b) : 0); }, x, counts);
  check_loss("gaussian_nll", [](auto& a, auto& b, Reduction r) { return gaussian_nll_loss(a, b, full({5, 7}, .75, {.dtype = a.dtype()}), {.reduction = r, .full = true}); },
             [](double a, double b) {
               double v = .75;
               return .5 * (std::log(v) + (a - b) * (a - b) / v + std::log(2 * 3.14159265358979323846));
             }, x.to(DType::f32).to(DType::f64), y, true);
  Tensor sign = where(gt(y, 0), 1.0, where(gt(y, 9), y, -1.0));
  check_loss("hinge", [](auto& a, auto& b, Reduction r) { return hinge_loss(a, b, {.reduction = r, .margin = 1}); },
             [](double a, double b) { return std::max(0.0, 1 - a * b); }, x, sign, false);
  check_loss("hinge_embedding", [](auto& a, auto& b, Reduction r) { return hinge_embedding_loss(a, b, {.reduction = r, .margin = .5}); },
             [](double a, double b) { return b > 0 ? a : std::max(0.0, .5 - a); }, x, sign, false);
  check_loss("margin_ranking", [](auto& a, auto& b, Reduction r) { return margin_ranking_loss(a, a * 0.25, b, {.reduction = r, .margin = .5}); },
             [](double a, double b) { return std::max(0.0, .5 - b * .75 * a); }, x, sign, false);
}

TEST_CASE("losses of rows are their formulas") {
  Random random{8};
  Tensor a = random.tensor({6, 5}, -1, 1), p = random.tensor({6, 5}, -1, 1), n = random.tensor({6, 5}, -1, 1);
  Tensor y = tensor<int64_t>({1, -1, 1, -1, -1, 1});
  auto av = values(a), pv = values(p), nv = values(n), yv = values(y);
  Doubles cosine;
  for (size_t i = 0; i < 6; ++i) {
    double dot = 0, s = 0, t = 0;
    for (size_t k = i * 5; k < i * 5 + 5; ++k) dot += av[k] * pv[k], s += av[k] * av[k], t += pv[k] * pv[k];
    double c = dot / std::sqrt(s * t);
    cosine.push_back(yv[i] > 0 ? 1 - c : std::max(0.0, c - .1));
  }
  golden(cosine_embedding_loss(a, p, y, {.reduction = Reduction::none, .margin = .1}), cosine, 1e-10);
  for (double power : {1.0, 2.0, 3.0})
    for (bool swap : {false, true}) {
      Doubles expected;
      auto distance = [&](const Doubles& u, const Doubles& v, size_t i) {
        double sum = 0;
        for (size_t k = i * 5; k < i * 5 + 5; ++k) sum += std::pow(std::abs(u[k] - v[k] + 1e-6), power);
        return std::pow(sum, 1 / power);
      };
      for (size_t i = 0; i < 6; ++i) {
        double far = distance(av, nv, i);
        if (swap) far = std::min(far, distance(pv, nv, i));
        expected.push_back(std::max(0.0, distance(av, pv, i) - far + .4));
      }
      golden(triplet_margin_loss(a, p, n, {.reduction = Reduction::none, .margin = .4, .p = power, .swap = swap}), expected, 1e-10);
      auto g = [&](const std::vector<Tensor>& in) { return std::vector{triplet_margin_loss(in[0], in[1], in[2], {.margin = .4, .p = power, .swap = swap})}; };
      CHECK(gradcheck_report(g, {a.clone().requires_grad_(), p.clone().requires_grad_(), n.clone().requires_grad_()}, {.rtol = 1e-5, .atol = 1e-6}) == "");
      tests::count("gradchecks");
    }
  auto g = [&](const std::vector<Tensor>& in) { return std::vector{cosine_embedding_loss(in[0], in[1], y)}; };
  CHECK(gradcheck_report(g, {a.clone().requires_grad_(), p.clone().requires_grad_()}, {.rtol = 1e-5, .atol = 1e-6}) == "");
  tests::count("gradchecks");
}

TEST_CASE("the ends of binary cross entropy and divergences") {
  golden(binary_cross_entropy_with_logits(tensor<double>({1000, -1000}), tensor<double>({0, 1}), {.reduction = Reduction::none}), {1000, 1000});
  golden(binary_cross_entropy_with_logits(tensor<double>({1000, -1000}), tensor<double>({1, 0}), {.reduction = Reduction::none}), {0, 0});
  golden(binary_cross_entropy_with_logits(tensor<double>({1000, -1000}), tensor<double>({0, 1}), {.reduction = Reduction::none, .pos_weight = tensor(3.0)}), {1000, 3000});
  golden(binary_cross_entropy(tensor<double>({0, 1, 0, 1}), tensor<double>({0, 1, 1, 0}), {.reduction = Reduction::none}), {0, 0, 100, 100});
  Tensor p = tensor<double>({0, 1}).requires_grad_();
  auto g = values(grad({binary_cross_entropy(p, tensor<double>({0, 1}))}, std::vector<Tensor>{p})[0]);
  for (double v : g) CHECK(std::isfinite(v));
  golden(kl_div(tensor<double>({-1, -2}), tensor<double>({0, 1}), {.reduction = Reduction::none}), {0, 2});
  Tensor t = tensor<double>({0, 1}).requires_grad_();
  for (double v : values(grad({kl_div(tensor<double>({-1, -2}), t)}, std::vector<Tensor>{t})[0])) CHECK(std::isfinite(v));
  golden(kl_div(zeros({2, 5}, {.dtype = DType::f64}) - 1, full({2, 5}, .2, {.dtype = DType::f64}), {.by_batch = true}), {1 + std::log(.2)}, 1e-14);
  Tensor bits = tensor({true, false});
  golden(binary_cross_entropy_with_logits(tensor<double>({0, 0}), bits), {std::log(2.0)});
  golden(binary_cross_entropy_with_logits(tensor<double>({0, 0}), bits, {.weight = tensor<double>({1, 3})}), {2 * std::log(2.0)});
  golden(gaussian_nll_loss(tensor(1.0), tensor(0.0), tensor(0.0), {.eps = .5}), {.5 * (std::log(.5) + 2)});
}

TEST_CASE("report_B19: cross_entropy of equal logits is the logarithm of the classes in each row") {
  tests::report("pytorch#85786");
  Tensor x = zeros({64, 50257}, {.requires_grad = true});
  Tensor loss = cross_entropy(x, i64({64}), {.reduction = Reduction::none});
  for (double v : values(loss)) CHECK(std::abs(v - 10.82490511) <= 2e-6);
  cross_entropy(x, i64({64})).backward();
  CHECK(std::abs(x.grad().slice(0, 63, 64).select(1, 0).item() + (1 - 1 / 50257.0) / 64) <= 1e-9);
}

TEST_CASE("report_B22: the gradient of nll_loss reaches the first and the last row") {
  tests::report("pytorch#190139");
  Tensor x = zeros({1025, 33, 1, 1}, {.dtype = DType::f16, .requires_grad = true});
  nll_loss(x, i64({1025, 1, 1}), {.reduction = Reduction::sum}).backward();
  Tensor g = x.grad().reshape({1025, 33});
  CHECK(g.dtype() == DType::f16);
  CHECK((g[0][0].item() == -1 && g[1024][0].item() == -1 && sum(g.to(DType::f32)).item() == -1025));
}

TEST_CASE("report_B60: all targets ignored, and an ignore_index outside the classes") {
  tests::report("pytorch#116349");
  for (int64_t ignored : {-100, -1, 2, 77}) {
    Tensor target = full({3}, ignored, {.dtype = DType::i64});
    for (bool weighted : {false, true}) {
      Tensor weight = weighted ? f({4}) : Tensor();
      for (bool nll : {false, true}) {
        Tensor x = ones({3, 4}, {.requires_grad = true});
        auto loss = [&](Reduction r) {
          return nll ? nll_loss(x, target, {.ignore_index = ignored, .reduction = r, .weight = weight})
                     : cross_entropy(x, target, {.ignore_index = ignored, .reduction = r, .weight = weight});
        };
        CHECK(std::isnan(loss(Reduction::mean).item()));
        CHECK(loss(Reduction::sum).item() == 0);
        CHECK(values(loss(Reduction::none)) == Doubles{0, 0, 0});
        loss(Reduction::mean).backward();
        CHECK(values(x.grad()) == Doubles(12, 0.0));
      }
    }
  }
}

TEST_CASE("report_B61: no classes") {
  tests::report("pytorch#73165");
  CHECK_THROWS_WITH(cross_entropy(zeros({5, 0}), i64({5})), "cross_entropy: expected at least one class, got x [5, 0] (f32)");
  CHECK_THROWS_WITH(nll_loss(zeros({5, 0}), i64({5})), "nll_loss: expected at least one class");
  CHECK(std::isnan(cross_entropy(zeros({5, 0}), zeros({5, 0})).item()));
  CHECK(std::isnan(cross_entropy(zeros({0, 3}), i64({0})).item()));
  CHECK(std::isnan(cross_entropy(zeros({0, 3}), zeros({0, 3})).item()));
  CHECK(std::isnan(nll_loss(zeros({0, 3}), i64({0})).item()));
}

TEST_CASE("report_B62: a target outside the classes throws in nll_loss and in its gradient") {
  tests::report("pytorch#194802");
  for (int64_t t : {int64_t{3}, int64_t{-1}, int64_t{1} << 40}) {
    Tensor target = tensor<int64_t>({0, t});
    std::string text = "nll_loss: target " + std::to_string(t) + " at row 1 is out of range for 3 classes";
    CHECK_THROWS_WITH(nll_loss(zeros({2, 3}), target), text);
    CHECK_THROWS_WITH(call(op::nll_loss_grad, {ones({}), target}, Attrs::of(NllAttrs{-100, Reduction::sum, 3, DType::f32})), text);
    CHECK_THROWS_WITH(cross_entropy(zeros({2, 3}), target, {.weight = f({3})}), text);
    CHECK_THROWS_WITH(nll_loss(zeros({2, 3}), tensor<int64_t>({t, 0})), Catch::Contains("at row 0 is out of range"));
  }
}

TEST_CASE("losses under autocast are computed in f32 and have f32 results") {
  Tensor a = randn({4, 5}), b = rand({4, 5}), y = where(gt(a, 0), 1.0, -ones({4, 5}));
  for (DType low : {DType::f16, DType::bf16}) {
    Tensor x = a.to(low), t = b.to(low);
    auto all = [&] {
      return std::vector{mse_loss(x, t), l1_loss(x, t), huber_loss(x, t), smooth_l1_loss(x, t), binary_cross_entropy_with_logits(x, t), kl_div(x, t),
                         gaussian_nll_loss(x, t, t + 1), poisson_nll_loss(x, t), hinge_loss(x, y), hinge_embedding_loss(x, y),
                         margin_ranking_loss(x, t, y), cosine_embedding_loss(x, t, y.select(1, 0)), triplet_margin_loss(x, t, x * 2),
                         nll_loss(x, i64({4})), cross_entropy(x, i64({4}), {.weight = f({5})}), cross_entropy(x, t)};
    };
    auto outside = all();
    amp::Autocast region({.dtype = low});
    auto inside = all();
    for (size_t i = 0; i < inside.size(); ++i) {
      INFO("loss " << i);
      CHECK(inside[i].dtype() == DType::f32);
      CHECK(values(inside[i]) == values(outside[i]));
    }
  }
}

TEST_CASE("binary_cross_entropy is banned under f16 autocast and allowed under bf16") {
  Tensor p = full({3}, .5), t = ones({3});
  {
    amp::Autocast region({.dtype = DType::f16});
    TEXT(binary_cross_entropy(p, t), "binary_cross_entropy: unsafe under f16 autocast; use binary_cross_entropy_with_logits, or run it in f32 inside "
                                     "amp::Autocast({.enabled = false})");
    CHECK_NOTHROW(binary_cross_entropy_with_logits(p, t));
    amp::Autocast off({.enabled = false});
    CHECK_NOTHROW(binary_cross_entropy(p, t));
  }
  amp::Autocast region({.dtype = DType::bf16});
  CHECK(binary_cross_entropy(p.to(DType::bf16), t).dtype() == DType::f32);
}

TEST_CASE("errors of losses") {
  TEXT(cross_entropy(f({3, 4}), f({3, 5})), "cross_entropy: expected integer targets or class probabilities [3, 4], got [3, 5] (f32)");
  TEXT(cross_entropy(f({3, 4}), i64({3}), {.weight = f({3})}), "cross_entropy: expected weight [4] of a floating dtype, got [3] (f32)");
  TEXT(cross_entropy(f({3, 4}), f({3, 4}), {.label_smoothing = -1}), "cross_entropy: expected label_smoothing in [0, 1], got -1");
  TEXT(nll_loss(f({3, 4}), f({3})), "nll_loss: expected integer targets, got f32");
  TEXT(nll_loss(f({3}), i64({3})), "nll_loss: expected x [n, classes, ...], got [3] (f32)");
  TEXT(nll_loss(f({3, 4}), i64({2})), "nll_loss: expected target [3] (i64), got [2] (i64)");
  TEXT(nll_loss(f({3, 4, 2}), i64({3})), "nll_loss: expected target [3, 2], got [3] (i64)");
  TEXT(nll_loss(f({3, 4}), i64({3}), {.weight = i64({4})}), "nll_loss: expected weight [4] of a floating dtype, got [4] (i64)");
  TEXT(nll_loss(undefined, i64({3})), "nll_loss: x or target is undefined");
  TEXT(l1_loss(i64({2}), f({2})), "l1_loss: expected a floating dtype, got [2] (i64)");
  TEXT(l1_loss(f({2}), undefined), "l1_loss: a tensor is undefined");
  TEXT(l1_loss(f({2}), f({3})), "l1_loss: shapes [2] and [3] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(mse_loss(undefined, f({2})), "mse_loss: a tensor is undefined");
  TEXT(mse_loss(f({4, 1}), f({4})), "mse_loss: x [4, 1] and its target [4] would be compared as [4, 4]; give both one shape, as in target.view(x.shape())");
  CHECK(mse_loss(f({4, 2}), f({2})).rank() == 0);
  TEXT(huber_loss(f({2}), f({2}), 0), "huber_loss: expected delta above 0, got 0");
  TEXT(smooth_l1_loss(f({2}), f({2}), -1), "smooth_l1_loss: expected beta of 0 or more, got -1");
  TEXT(binary_cross_entropy(f({2}), f({3})), "binary_cross_entropy: shapes [2] and [3] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(binary_cross_entropy_with_logits(i64({2}), f({2})), "binary_cross_entropy_with_logits: expected a floating dtype, got [2] (i64)");
  TEXT(kl_div(f({}), f({}), {.by_batch = true}), "kl_div: a 0-d tensor is no batch");
  TEXT(gaussian_nll_loss(f({2}), f({2}), f({2}), {.eps = 0}), "gaussian_nll_loss: expected eps above 0, got 0");
  TEXT(cosine_embedding_loss(f({}), f({2}), f({})), "cosine_embedding_loss: expected rows [..., d], got [] (f32) and [2] (f32)");
  TEXT(triplet_margin_loss(f({2}), f({2}), f({2}), {.p = 0}), "triplet_margin_loss: expected p above 0, got 0");
  TEXT(triplet_margin_loss(f({}), f({}), f({})), "triplet_margin_loss: expected rows [..., d], got [] (f32)");
  TEXT(hinge_loss(undefined, f({2})), "hinge_loss: a tensor is undefined");
  TEXT(poisson_nll_loss(i64({2}), f({2})), "poisson_nll_loss: expected a floating dtype, got [2] (i64)");
}

TEST_CASE("ctc_loss sums over all labellings") {
  Random random{9};
  struct Sizes { int64_t steps, classes; std::vector<int64_t> target; int64_t blank; };
  for (auto& [steps, classes, target, blank] : std::vector<Sizes>{{1, 2, {1}, 0}, {3, 3, {1, 2}, 0}, {4, 3, {1, 1}, 0}, {5, 3, {0, 1, 0}, 2}, {4, 3, {}, 1},
                                                                  {5, 2, {1, 1}, 0}, {2, 3, {1, 1}, 0}}) {
    Tensor x = log_softmax(random.tensor({steps, 1, classes}, -2, 2), 2).requires_grad_();
    auto v = values(x);
    // Every path of classes, one by one: merge repeats, drop blanks, compare.
    double p = 0;
    Doubles visits(v.size());
    int64_t paths = 1;
    for (int64_t t = 0; t < steps; ++t) paths *= classes;
    for (int64_t i = 0; i < paths; ++i) {
      std::vector<int64_t> path, merged;
      for (int64_t t = 0, rest = i; t < steps; ++t, rest /= classes) path.push_back(rest % classes);
      double q = 1;
      for (int64_t t = 0; t < steps; ++t) {
        int64_t k = path[static_cast<size_t>(t)];
        q *= std::exp(v[static_cast<size_t>(t * classes + k)]);
        if (k != blank && (t == 0 || path[static_cast<size_t>(t) - 1] != k)) merged.push_back(k);
      }
      if (merged != target) continue;
      p += q;
      for (int64_t t = 0; t < steps; ++t) visits[static_cast<size_t>(t * classes + path[static_cast<size_t>(t)])] -= q;
    }
    for (auto& w : visits) w = p == 0 ? 0 : w / p;
    auto length = static_cast<int64_t>(target.size());
    Tensor padded = cat({tensor(target).reshape({1, length}), full({1, 2}, blank == 0 ? 1 : 0, {.dtype = DType::i64})}, 1);
    Tensor loss = ctc_loss(x, padded, tensor<int64_t>({steps}), tensor<int64_t>({length}), {.blank = blank, .reduction = Reduction::sum});
    golden(loss, {p == 0 ? inf : -std::log(p)}, 1e-12);
    loss.backward();
    golden(x.grad(), visits, 1e-11);
  }
}

TEST_CASE("ctc_loss of a batch: lengths, reductions, infinite losses, long inputs") {
  Random random{10};
  Tensor x = log_softmax(random.tensor({6, 3, 4}, -2, 2), 2).requires_grad_();
  Tensor targets = tensor<int64_t>({{1, 2, 3}, {2, 2, 1}, {3, 1, 1}}), in = tensor<int64_t>({6, 4, 2}), out = tensor<int64_t>({3, 2, 3});
  Tensor each = ctc_loss(x, targets, in, out, {.reduction = Reduction::none});
  auto v = values(each);
  CHECK((std::isfinite(v[0]) && std::isfinite(v[1]) && v[2] == inf));
  for (int64_t n = 0; n < 2; ++n) {  // an item alone, cut to its lengths
    Tensor alone = ctc_loss(x.slice(1, n, n + 1).slice(0, 0, in.to_vector<int64_t>()[static_cast<size_t>(n)]), targets.slice(0, n, n + 1).slice(1, 0, out.to_vector<int64_t>()[static_cast<size_t>(n)]),
                            in.slice(0, n, n + 1), out.slice(0, n, n + 1), {.reduction = Reduction::none});
    golden(alone, {v[static_cast<size_t>(n)]});
  }
  golden(ctc_loss(x, targets, in, out, {.zero_infinity = true}), {(v[0] / 3 + v[1] / 2) / 3});
  ctc_loss(x, targets, in, out, {.zero_infinity = true}).backward();
  for (double g : values(x.grad())) CHECK(std::isfinite(g));
  for (double g : values(x.grad().slice(1, 2, 3))) CHECK(g == 0);
  for (double g : values(x.grad().slice(1, 1, 2).slice(0, 4, 6))) CHECK(g == 0);
  // What an item does not reach is impossible: a tape holds the same bits every time.
  Call recorded{.op = &op::ctc_loss, .in = {x.detach(), targets, in, out}, .attrs = Attrs::of(int64_t{0}), .out = {}, .recording = true};
  Tensor beginnings = dispatch(recorded)[1];
  REQUIRE(beginnings.shape() == Shape{3, 6, 7});
  for (int64_t n = 0; n < 3; ++n) {
    const int64_t steps = in.to_vector<int64_t>()[static_cast<size_t>(n)], states = 2 * out.to_vector<int64_t>()[static_cast<size_t>(n)] + 1;
    for (double b : values(beginnings.select(0, n).slice(0, steps, 6))) CHECK(b == -inf);
    for (double b : values(beginnings.select(0, n).slice(1, states, 7))) CHECK(b == -inf);
  }
  // Products of a thousand probabilities leave every float's range; their logarithms do not.
  Tensor flat = full({1000, 1, 50}, -std::log(50.0)), one = ones({1, 20}, {.dtype = DType::i64}) + arange(20);
  CHECK(std::isfinite(ctc_loss(flat, one, tensor<int64_t>({1000}), tensor<int64_t>({20})).item()));
  CHECK(ctc_loss(flat.to(DType::f16), one, tensor<int64_t>({1000}), tensor<int64_t>({20})).dtype() == DType::f32);
  golden(ctc_loss(zeros({0, 2, 3}), zeros({2, 1}, {.dtype = DType::i64}) + 1, zeros({2}, {.dtype = DType::i64}), tensor<int64_t>({0, 1}), {.reduction = Reduction::none}), {0, inf});
}

TEST_CASE("errors of ctc_loss") {
  Tensor x = f({4, 2, 3}), t = i64({2, 2}) + 1, in = full({2}, 4, {.dtype = DType::i64}), out = full({2}, 2, {.dtype = DType::i64});
  TEXT(ctc_loss(f({4, 3}), t, in, out), "ctc_loss: expected x [t, n, classes] of a floating dtype, got [4, 3] (f32)");
  TEXT(ctc_loss(x, i64({3, 2}), in, out), "ctc_loss: expected targets [2, s] (i64), got [3, 2] (i64)");
  TEXT(ctc_loss(x, f({2, 2}), in, out), "ctc_loss: expected integer targets and lengths, got [2, 2] (f32)");
  TEXT(ctc_loss(x, t, i64({3}), out), "ctc_loss: expected input_lengths [2] (i64), got [3] (i64)");
  TEXT(ctc_loss(x, t, in, i64({1})), "ctc_loss: expected target_lengths [2] (i64), got [1] (i64)");
  TEXT(ctc_loss(x, t, in + 1, out), "ctc_loss: input length 5 at 0 is out of range for 4 steps");
  TEXT(ctc_loss(x, t, in, out + 1), "ctc_loss: target length 3 at 0 is out of range for 2 targets");
  TEXT(ctc_loss(x, t + 2, in, out), "ctc_loss: target 3 at 0 of row 0 is out of range for 3 classes");
  TEXT(ctc_loss(x, t - 1, in, out), "ctc_loss: target 0 of row 0 is the blank 0");
  TEXT(ctc_loss(x, t, in, out, {.blank = 3}), "ctc_loss: expected a blank in [0, 3), got 3");
  TEXT(ctc_loss(undefined, t, in, out), "ctc_loss: a tensor is undefined");
}
