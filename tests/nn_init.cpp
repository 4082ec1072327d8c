// Initial weights: their distributions, and that a seed determines them.
#include <cmath>
#include <limits>

#include "halftone/nn/nn.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"

using namespace halftone;
using Catch::Matchers::Contains;
namespace init = nn::init;

#define THROWS(expression, text) CHECK_THROWS_WITH(expression, Contains(text))

namespace {

struct Moments { double mean, std, low, high; };
Moments moments(const Tensor& t) {
  Tensor x = t.detach().to(DType::f64);
  return {x.mean().item(), std::sqrt(var(x).item()), amin(x).item(), amax(x).item()};
}
// Of n draws: the mean within five standard errors, the standard deviation within 2%, everything in [low, high].
void check_draws(const Tensor& t, double mean, double std, double low, double high) {
  Moments m = moments(t);
  CHECK(std::fabs(m.mean - mean) < 5 * std / std::sqrt(static_cast<double>(t.numel())));
  CHECK(m.std == Approx(std).epsilon(0.02));
  CHECK(m.low >= low);
  CHECK(m.high <= high);
}
void check_uniform(const Tensor& t, double bound) {
  float rounded = static_cast<float>(bound);
  check_draws(t, 0, bound / std::sqrt(3.0), -rounded, rounded);
  CHECK(moments(t).high > 0.99 * bound);
  CHECK(moments(t).low < -0.99 * bound);
}
constexpr double infinity = std::numeric_limits<double>::infinity();

}  // namespace

TEST_CASE("constants") {
  nn::Parameter p{randn({3, 2})};
  CHECK(init::constant_(p, 2.5).body() == p.body());
  CHECK(p.to_vector<float>() == std::vector<float>(6, 2.5f));
  init::zeros_(p);
  CHECK(p.sum().item() == 0);
  init::ones_(p);
  CHECK(p.sum().item() == 6);
  CHECK(p.is_leaf());
  CHECK(p.requires_grad());
}

TEST_CASE("uniform and normal") {
  manual_seed(1);
  nn::Parameter p{empty({200, 300})};
  init::uniform_(p, -1, 3);
  check_draws(p, 1, 4 / std::sqrt(12.0), -1, 3);
  init::normal_(p, 2, 0.5);
  check_draws(p, 2, 0.5, -infinity, infinity);
  init::uniform_(p, 1, 1);
  CHECK(moments(p).std == 0);
  THROWS(init::uniform_(p, 1, 0), "uniform_: expected low <= high, got 1 and 0");
  THROWS(init::normal_(arange(3)), "expected a floating dtype");
  for (DType t : {DType::f16, DType::bf16, DType::f64}) {
    Tensor x = init::normal_(empty({100, 300}, {.dtype = t}), 0, 2);
    CHECK(x.dtype() == t);
    check_draws(x, 0, 2, -infinity, infinity);
  }
}

TEST_CASE("truncated normal") {
  manual_seed(2);
  Tensor x = init::truncated_normal_(empty({50000}));
  check_draws(x, 0, 0.8796256610342398, -2, 2);  // of the standard normal on [-2, 2]
  CHECK(moments(x).high > 1.98);
  x = init::truncated_normal_(empty({50000}), {.mean = 1, .std = 2, .low = 1, .high = 100});
  check_draws(x, 1 + 2 * std::sqrt(2 / 3.14159265358979), 2 * std::sqrt(1 - 2 / 3.14159265358979), 1, 100);
  // Far in a tail, both ways: about an exponential of rate 8 from there.
  x = init::truncated_normal_(empty({50000}), {.low = 8, .high = 9});
  CHECK(moments(x).low >= 8);
  CHECK(moments(x).mean == Approx(8.1209).epsilon(1e-3));
  x = init::truncated_normal_(empty({50000}), {.low = -9, .high = -8});
  CHECK(moments(x).mean == Approx(-8.1209).epsilon(1e-3));
  x = init::truncated_normal_(empty({50000}), {.low = -infinity, .high = infinity});
  check_draws(x, 0, 1, -infinity, infinity);
  THROWS(init::truncated_normal_(empty({2}), {.low = 2, .high = 2}), "expected std > 0 and low < high");
  THROWS(init::truncated_normal_(empty({2}), {.low = 50, .high = 60}), "has no probability");
}

TEST_CASE("gains") {
  using init::Nonlinearity;
  CHECK(init::gain(Nonlinearity::linear) == 1);
  CHECK(init::gain(Nonlinearity::sigmoid) == 1);
  CHECK(init::gain(Nonlinearity::tanh) == Approx(5.0 / 3));
  CHECK(init::gain(Nonlinearity::relu) == Approx(std::sqrt(2.0)));
  CHECK(init::gain(Nonlinearity::leaky_relu, 0.2) == Approx(std::sqrt(2 / 1.04)));
}

TEST_CASE("xavier and kaiming scale with their fans") {
  manual_seed(3);
  Tensor w = empty({120, 80, 3, 2});  // fan in 480, fan out 720
  check_uniform(init::xavier_uniform_(w), std::sqrt(6.0 / 1200));
  check_uniform(init::xavier_uniform_(w, 2), 2 * std::sqrt(6.0 / 1200));
  check_draws(init::xavier_normal_(w), 0, std::sqrt(2.0 / 1200), -infinity, infinity);
  check_uniform(init::kaiming_uniform_(w), std::sqrt(6.0 / 480));
  check_uniform(init::kaiming_uniform_(w, {.slope = std::sqrt(5.0)}), 1 / std::sqrt(480.0));
  check_draws(init::kaiming_normal_(w, {.mode = init::Fan::out, .nonlinearity = init::Nonlinearity::relu}), 0,
              std::sqrt(2.0 / 720), -infinity, infinity);
  check_draws(init::kaiming_normal_(w, {.nonlinearity = init::Nonlinearity::linear}), 0, std::sqrt(1.0 / 480),
              -infinity, infinity);
  THROWS(init::xavier_uniform_(empty({3})), "xavier_uniform_: expected a weight [out, in, ...], got [3] (f32)");
  THROWS(init::kaiming_normal_(empty({})), "kaiming_normal_: expected a weight");
  CHECK(init::kaiming_uniform_(empty({2, 0})).numel() == 0);
}

TEST_CASE("orthogonal weights") {
  manual_seed(4);
  for (Shape s : {Shape{7, 5}, Shape{5, 7}, Shape{6, 6}, Shape{4, 3, 3, 2}, Shape{1, 1}}) {
    Tensor w = init::orthogonal_(empty(s, {.dtype = DType::f64}), 2).reshape({s[0], -1});
    bool wide = w.size(0) <= w.size(1);
    Tensor gram = wide ? matmul(w, w.t()) : matmul(w.t(), w);
    for (int64_t i = 0; i < gram.size(0); ++i)
      for (int64_t j = 0; j < gram.size(1); ++j) CHECK(gram[i][j].item() == Approx(i == j ? 4 : 0).margin(1e-12));
  }
  nn::Linear fc(3, 3);
  init::orthogonal_(fc.weight);
  CHECK(fc.weight.dtype() == DType::f32);
  CHECK(fc.weight.requires_grad());
  CHECK(init::orthogonal_(empty({0, 3})).numel() == 0);
  THROWS(init::orthogonal_(empty({3})), "orthogonal_: expected rank 2 or more");
}

TEST_CASE("the same seed gives the same weights") {
  auto draw = [](uint64_t seed) {
    manual_seed(seed);
    std::vector<double> all;
    for (auto& t : {init::uniform_(empty({10})), init::normal_(empty({10})), init::truncated_normal_(empty({10})),
                    init::xavier_normal_(empty({3, 4})), init::kaiming_uniform_(empty({3, 4})),
                    init::orthogonal_(empty({3, 4})), nn::Linear(3, 4).weight.detach()})
      for (double v : t.to_vector<double>()) all.push_back(v);
    return all;
  };
  CHECK(draw(7) == draw(7));
  CHECK(draw(7) != draw(8));
}
