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
  CHECK(init::gain(Nonlinearity::selu) == 0.75);
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

TEST_CASE("dirac hands channels through") {
  Tensor x = randn({2, 3, 5, 4}), w = init::dirac_(empty({4, 3, 3, 3}));
  Tensor y = conv2d(x, w, {}, {.padding = 1});
  CHECK(y.slice(1, 0, 3).to_vector<float>() == x.to_vector<float>());
  CHECK(y.select(1, 3).abs().max().item() == 0);
  w = init::dirac_(empty({4, 2, 3}), 2);
  CHECK(w.sum().item() == 4);
  for (int64_t o = 0; o < 4; ++o) CHECK(w[o][o % 2][1].item() == 1);
  THROWS(init::dirac_(empty({3, 3})), "dirac_: expected the weight of a convolution, [out, in, k...], got [3, 3] (f32)");
  THROWS(init::dirac_(empty({3, 3, 3}), 2), "dirac_: 3 outputs do not divide into 2 groups");
}

// ---- how layers start, as in PyTorch

TEST_CASE("convolutions start uniform by their fan") {
  manual_seed(5);
  nn::Conv2d c(64, 96, {3, 2}, {.groups = 2});  // fan 32 * 6
  check_uniform(c.weight, 1 / std::sqrt(192.0));
  CHECK(moments(c.bias).high <= 1 / std::sqrt(192.0));
  CHECK(moments(nn::Conv1d(2, 5000, 3).bias).high > 0.98 / std::sqrt(6.0));
  check_uniform(nn::Conv3d(8, 200, {2, 3, 2}).weight, 1 / std::sqrt(96.0));
  check_uniform(nn::ConvTranspose2d(100, 50, 2).weight, 1 / std::sqrt(200.0));  // of weight.size(1)
  nn::ConvTranspose1d t(100, 60, 3, {.groups = 2});
  check_uniform(t.weight, 1 / std::sqrt(90.0));
  CHECK(t.weight.shape() == Shape{100, 30, 3});
}

TEST_CASE("recurrent layers start uniform by their width, attention by Xavier, tables normal") {
  manual_seed(6);
  nn::LSTM lstm(90, 64, {.layers = 2, .bidirectional = true});
  for (auto& [name, p] : lstm.named_parameters()) {
    INFO(name);
    if (p.rank() == 2) check_uniform(p, 1 / 8.0);
    CHECK(moments(p).high <= 1 / 8.0);
  }
  check_uniform(nn::GRUCell(50, 100).weight_ih, 0.1);
  check_uniform(nn::Bilinear(64, 20, 30).weight, 1 / 8.0);
  nn::MultiheadAttention m(64, 4);
  check_uniform(m.in_proj_weight, std::sqrt(6.0 / 256));
  check_uniform(m.out_proj.weight, 1 / 8.0);
  CHECK(moments(m.in_proj_bias).high == 0);
  CHECK(m.out_proj.bias.sum().item() == 0);
  nn::MultiheadAttention wide(64, 4, {.kdim = 200});
  check_uniform(wide.k_proj_weight, std::sqrt(6.0 / 264));
  CHECK_FALSE(wide.in_proj_weight.defined());
  nn::Embedding e(500, 100, {.padding_idx = -1});
  check_draws(e.weight.detach().slice(0, 0, 499), 0, 1, -infinity, infinity);
  CHECK(e.weight.detach()[499].abs().max().item() == 0);
}

TEST_CASE("norms start as ones and zeros") {
  nn::BatchNorm2d b(3);
  std::string names;
  for (auto& [name, t] : b.state_dict()) names += name + " ";
  CHECK(names == "weight bias running_mean running_var num_batches_tracked ");
  for (auto& t : {b.weight.detach(), b.running_var.detach()}) CHECK(t.to_vector<float>() == std::vector<float>(3, 1));
  for (auto& t : {b.bias.detach(), b.running_mean.detach()}) CHECK(t.to_vector<float>() == std::vector<float>(3, 0));
  CHECK(b.num_batches_tracked.dtype() == DType::i64);
  CHECK(nn::LayerNorm({2, 3}).weight.sum().item() == 6);
  CHECK_FALSE(nn::LayerNorm(4, {.bias = false}).bias.defined());
  CHECK(nn::RMSNorm(4).parameters().size() == 1);
  CHECK(nn::InstanceNorm2d(4).parameters().empty());
  CHECK(nn::GroupNorm(2, 4, {.affine = false}).parameters().empty());
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
