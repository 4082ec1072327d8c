// Layers: what they compute, what Sequential fuses, and what a call costs.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <new>

#include "halftone/amp/amp.h"
#include "halftone/autograd/autograd.h"
#include "halftone/nn/nn.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"

using namespace halftone;
using Catch::Matchers::Contains;

#define THROWS(expression, text) CHECK_THROWS_WITH(expression, Contains(text))

// Every allocation of one object in the process, the library's included. Not inlined: g++ would miss the pairs.
static std::atomic<int64_t> allocations = 0;
[[gnu::noinline]] void* operator new(size_t n, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(n ? n : 1);
}
[[gnu::noinline]] void* operator new(size_t n) {
  if (void* p = operator new(n, std::nothrow)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }

namespace {

void check_close(const Tensor& a, const Tensor& b, double tolerance = 1e-6) {
  REQUIRE(a.shape() == b.shape());
  CHECK(a.dtype() == b.dtype());
  auto x = a.detach().to_vector<double>(), y = b.detach().to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) CHECK(x[i] == Approx(y[i]).margin(tolerance));
}
// One NaN is as good as another, and so is one zero.
bool same_bits(const Tensor& a, const Tensor& b) {
  return std::ranges::equal(a.to_vector<double>(), b.to_vector<double>(), [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

}  // namespace

TEST_CASE("linear") {
  nn::Linear fc(3, 2);
  CHECK(fc.weight.shape() == Shape{2, 3});
  CHECK(fc.bias.shape() == Shape{2});
  Tensor x = randn({5, 3});
  check_close(fc(x), matmul(x, fc.weight.t()) + fc.bias);
  CHECK(fc(randn({4, 5, 3})).shape() == Shape{4, 5, 2});
  nn::Linear bare(3, 2, {.bias = false});
  CHECK_FALSE(bare.bias.defined());
  CHECK(bare.parameters().size() == 1);
  check_close(bare(x), matmul(x, bare.weight.t()));
  std::vector<int> sizes{1, 2};
  CHECK(nn::Linear{sizes.size(), 10}.weight.shape() == Shape{10, 2});
  CHECK(nn::Linear(0, 2)(ones({1, 0})).shape() == Shape{1, 2});
  THROWS(fc(randn({5, 4})), "linear: expected");
}

TEST_CASE("linear with an activation is linear, then the activation") {
  Tensor x = randn({9, 5});
  nn::Linear plain(5, 7), r(5, 7, {.activation = nn::Activation::relu}), g(5, 7, {.activation = nn::Activation::gelu});
  r.load_state_dict(plain.state_dict());
  g.load_state_dict(plain.state_dict());
  check_close(r(x), relu(plain(x)));
  check_close(g(x), gelu(plain(x)));
}

TEST_CASE("a linear layer learns") {
  nn::Linear fc(3, 2);
  Tensor x = randn({4, 3});
  fc(x).sum().backward();
  check_close(fc.bias.grad(), full({2}, 4));
  check_close(fc.weight.grad(), x.sum({0}).expand({2, 3}));
}

TEST_CASE("linear starts uniform in its bounds, weight before bias") {
  manual_seed(3);
  nn::Linear fc(400, 300);
  double bound = 1 / std::sqrt(400.0);
  for (auto& t : {fc.weight.detach(), fc.bias.detach()}) {
    CHECK(amax(t.abs()).item() <= bound);
    CHECK(amax(t.abs()).item() > 0.98 * bound);
  }
  CHECK(var(fc.weight.detach()).item() == Approx(bound * bound / 3).epsilon(0.02));
  manual_seed(3);
  CHECK(same_bits(nn::Linear(400, 300).bias.detach(), fc.bias.detach()));
  manual_seed(4);
  CHECK_FALSE(same_bits(nn::Linear(400, 300).weight.detach(), fc.weight.detach()));
}

TEST_CASE("activations are the functions they are named after") {
  Tensor x = randn({3, 4});
  auto is = [&](nn::Module&& m, const Tensor& y) {
    CHECK(same_bits(m(x), y));
    CHECK(m.parameters().empty());
  };
  is(nn::Identity(), x);
  is(nn::ReLU(), relu(x));
  is(nn::LeakyReLU(), leaky_relu(x, 0.01));
  is(nn::LeakyReLU(0.2), leaky_relu(x, 0.2));
  is(nn::GELU(), gelu(x));
  is(nn::GELU(Approximate::tanh), gelu(x, Approximate::tanh));
  is(nn::SiLU(), silu(x));
  is(nn::Tanh(), tanh(x));
  is(nn::Sigmoid(), sigmoid(x));
  is(nn::Softmax(), softmax(x, -1));
  is(nn::Softmax(0), softmax(x, 0));
  is(nn::LogSoftmax(), log_softmax(x, -1));
  is(nn::Lambda([](const Tensor& t) { return t * 2; }), x * 2);
}

TEST_CASE("NaN passes through activations") {
  Tensor x = full({3}, NAN);
  nn::ModuleList all{nn::ReLU(), nn::ReLU6(), nn::LeakyReLU(), nn::PReLU(), nn::Hardtanh(), nn::Hardsigmoid(), nn::Hardswish(),
                     nn::Hardshrink(), nn::Softshrink(), nn::Threshold(), nn::ELU(), nn::SELU(), nn::CELU(), nn::GELU(),
                     nn::SiLU(), nn::Mish(), nn::Softplus(), nn::Softsign(), nn::Tanh(), nn::Tanhshrink(), nn::Sigmoid(),
                     nn::LogSigmoid(), nn::Softmax(), nn::LogSoftmax()};
  for (size_t i = 0; i < all.size(); ++i) {
    INFO(i);
    CHECK(isnan(all[i](x)).sum().item() == 3);
  }
}

TEST_CASE("flatten") {
  Tensor x = randn({2, 3, 4, 5});
  CHECK(nn::Flatten()(x).shape() == Shape{2, 60});
  CHECK(nn::Flatten(0, 1)(x).shape() == Shape{6, 4, 5});
}

TEST_CASE("pooling, padding and resizing are the functions they are named after") {
  Tensor x = randn({2, 4, 7, 6}), line = randn({2, 4, 9});
  CHECK(same_bits(nn::MaxPool2d(2)(x), max_pool2d(x, 2)));
  CHECK(same_bits(nn::MaxPool2d({3, 2}, {.stride = 1, .padding = 1, .ceil_mode = true})(x),
                  max_pool2d(x, {3, 2}, {.stride = 1, .padding = 1, .ceil_mode = true})));
  CHECK(same_bits(nn::MaxPool1d(3, {.dilation = 2})(line), max_pool1d(line, 3, {.dilation = 2})));
  CHECK(same_bits(nn::AvgPool2d(3, {.padding = 1, .count_include_pad = false})(x),
                  avg_pool2d(x, 3, {.padding = 1, .count_include_pad = false})));
  CHECK(same_bits(nn::AvgPool1d(3)(line), avg_pool1d(line, 3)));
  CHECK(same_bits(nn::AdaptiveAvgPool2d(1)(x), adaptive_avg_pool2d(x, 1)));
  CHECK(same_bits(nn::AdaptiveAvgPool1d(4)(line), adaptive_avg_pool1d(line, 4)));
  CHECK(same_bits(nn::AdaptiveMaxPool2d({2, 3})(x), adaptive_max_pool2d(x, {2, 3})));
  CHECK(same_bits(nn::AdaptiveMaxPool1d(2)(line), adaptive_max_pool1d(line, 2)));
  CHECK(same_bits(nn::Pad({1, 2}, {.value = 3})(x), pad(x, {1, 2}, {.value = 3})));
  CHECK(same_bits(nn::Upsample({2, 3})(x), resize(x, {14, 18})));
  CHECK(same_bits(nn::Resize(5, {.mode = Interpolation::bilinear})(x), resize(x, 5, {.mode = Interpolation::bilinear})));
  CHECK(same_bits(nn::PixelUnshuffle(2)(nn::PixelShuffle(2)(x)), x));
  THROWS(nn::Upsample(0), "Upsample: expected positive factors, got 0 and 0");
  THROWS(nn::Upsample(2)(line), "Upsample: expected [n, channels, h, w], got [2, 4, 9] (f32)");
}

TEST_CASE("unflatten") {
  Tensor x = randn({2, 12, 3});
  CHECK(nn::Unflatten(1, {3, 4})(x).shape() == Shape{2, 3, 4, 3});
  CHECK(nn::Unflatten(-2, {2, -1, 3})(x).shape() == Shape{2, 2, 2, 3, 3});
  CHECK(same_bits(nn::Flatten(1, 2)(nn::Unflatten(1, {3, 4})(x)), x));
  THROWS(nn::Unflatten(1, {5, -1})(x), "Unflatten: a dimension of 12 elements cannot become [5, -1]");
  THROWS(nn::Unflatten(1, {3, 3})(x), "cannot become [3, 3]");
  THROWS(nn::Unflatten(3, {3, 3})(x), "Unflatten: dimension 3 of [2, 12, 3] (f32)");
}

TEST_CASE("dropout drops in training alone") {
  manual_seed(1);
  Tensor x = ones({400, 50, 4, 5});
  nn::Dropout d(.25);
  Tensor y = d(x);
  CHECK(y.mean().item() == Approx(1).epsilon(.02));
  CHECK(eq(y, 0).to(DType::f32).mean().item() == Approx(.25).epsilon(.02));
  CHECK(amax(y).item() == Approx(4. / 3));
  CHECK(same_bits(d.eval()(x), x));
  nn::Dropout2d channels;
  Tensor kept = channels(x).mean({2, 3});
  CHECK((ne(kept, 0) .to(DType::f32) * ne(kept, 2).to(DType::f32)).sum().item() == 0);
  CHECK(kept.mean().item() == Approx(1).epsilon(.05));
  nn::Dropout1d lines;
  CHECK(lines(ones({100, 50, 7})).mean({2}).mean().item() == Approx(1).epsilon(.1));
  CHECK(nn::Dropout(1)(x).sum().item() == 0);
  THROWS(nn::Dropout(1.5), "Dropout: expected a probability in [0, 1], got 1.5");
}

TEST_CASE("batch norm learns its statistics in training and uses them in evaluation") {
  nn::BatchNorm1d m(3, {.momentum = .5});
  Tensor x = randn({40, 3}) * 2 + 1;
  m(x);
  CHECK(m.num_batches_tracked.item<int64_t>() == 1);
  check_close(m.running_mean, x.mean({0}) * .5);
  check_close(m.running_var, var(x, {0}) * .5 + .5);
  m.eval();
  auto before = m.running_mean.to_vector<float>();
  check_close(m(x), (x - m.running_mean) / (m.running_var + 1e-5).sqrt(), 1e-5);
  CHECK(m.running_mean.to_vector<float>() == before);
  CHECK(m.num_batches_tracked.item<int64_t>() == 1);
  m.train();
  for (int i = 0; i < 3; ++i) m(x);
  CHECK(m.num_batches_tracked.item<int64_t>() == 4);
  CHECK(m.clone().num_batches_tracked.item<int64_t>() == 4);

  nn::Sequential net{nn::Conv2d(2, 3, 3), nn::BatchNorm2d(3), nn::Linear(4, 4)};
  net.to(DType::bf16);
  CHECK(net[0].parameters()[0].dtype() == DType::bf16);
  CHECK(net[1].keeps_f32());
  for (auto& t : net[1].parameters()) CHECK(t.dtype() == DType::f32);
  CHECK(net.as<nn::BatchNorm2d>(1).running_var.dtype() == DType::f32);
  CHECK(net(randn({2, 2, 6, 6}).to(DType::bf16)).dtype() == DType::bf16);
  net.to(DType::f64);
  CHECK(net.as<nn::BatchNorm2d>(1).running_var.dtype() == DType::f64);
}

TEST_CASE("layers say what they expected") {
  THROWS(nn::Conv2d(3, 4, 3, {.groups = 2}), "Conv2d: expected channels that divide into 2 groups, got 3 in and 4 out");
  THROWS(nn::ConvTranspose1d(3, 4, 0), "ConvTranspose1d: expected a kernel of positive size, got 0");
  THROWS(nn::BatchNorm2d(3)(randn({2, 3})), "BatchNorm2d: expected [n, channels, h, w], got [2, 3] (f32)");
  THROWS(nn::BatchNorm1d(3)(randn({2, 3, 4, 5})), "BatchNorm1d: expected [n, channels] or [n, channels, length], got");
  THROWS(nn::GroupNorm(2, 3), "GroupNorm: 3 channels do not divide into 2 groups");
  THROWS(nn::GroupNorm(1, 3)(randn({2, 4})), "GroupNorm: expected [n, 3, ...], got [2, 4] (f32)");
  THROWS(nn::InstanceNorm1d(3)(randn({2, 3})), "InstanceNorm1d: expected [n, 3, length], got [2, 3] (f32)");
  THROWS(nn::Bilinear(2, 3, 1)(randn({4, 2}), randn({4, 2})), "Bilinear: expected x [..., 2] and y [..., 3], got [4, 2] (f32) and [4, 2]");
  THROWS(nn::Embedding(3, 2, {.padding_idx = 3}), "Embedding: padding_idx 3 of 3 rows");
  THROWS(nn::PReLU(3)(randn({2, 4})), "PReLU: expected [n, 3, ...], got [2, 4] (f32)");
  THROWS(nn::GLU()(randn({2, 3})), "GLU: expected an even size of dimension -1, got [2, 3] (f32)");
}

TEST_CASE("losses are the functions they are named after") {
  Tensor x = randn({4, 3}), y = randn({4, 3}), target = tensor({0, 2, -100, 1}), p = sigmoid(x), q = sigmoid(y);
  CHECK(same_bits(nn::CrossEntropyLoss()(x, target), cross_entropy(x, target)));
  nn::CrossEntropyLoss smooth({.label_smoothing = 0.1});
  CHECK(same_bits(smooth(x, target), cross_entropy(x, target, {.label_smoothing = 0.1})));
  CHECK(same_bits(nn::NLLLoss()(x, target), nll_loss(x, target)));
  CHECK(same_bits(nn::MSELoss()(x, y), mse_loss(x, y)));
  CHECK(nn::MSELoss(Reduction::none)(x, y).shape() == x.shape());
  CHECK(same_bits(nn::L1Loss(Reduction::sum)(x, y), l1_loss(x, y, Reduction::sum)));
  CHECK(same_bits(nn::HuberLoss(.5)(x, y), huber_loss(x, y, .5)));
  CHECK(same_bits(nn::SmoothL1Loss(.5)(x, y), smooth_l1_loss(x, y, .5)));
  CHECK(same_bits(nn::BCELoss()(p, q), binary_cross_entropy(p, q)));
  CHECK(same_bits(nn::BCEWithLogitsLoss()(x, q), binary_cross_entropy_with_logits(x, q)));
  CHECK(same_bits(nn::KLDivLoss({.by_batch = true})(log_softmax(x, 1), q), kl_div(log_softmax(x, 1), q, {.by_batch = true})));
  CHECK(same_bits(nn::PoissonNLLLoss()(x, q), poisson_nll_loss(x, q)));
  CHECK(same_bits(nn::GaussianNLLLoss({.full = true})(x, y, q), gaussian_nll_loss(x, y, q, {.full = true})));
  Tensor sign_of = tensor({1.f, -1.f, 1.f, -1.f});
  CHECK(same_bits(nn::HingeLoss()(x, sign(y)), hinge_loss(x, sign(y))));
  CHECK(same_bits(nn::HingeEmbeddingLoss({.margin = 2})(x, sign(y)), hinge_embedding_loss(x, sign(y), {.margin = 2})));
  CHECK(same_bits(nn::MarginRankingLoss({.margin = .1})(x, y, sign(y)), margin_ranking_loss(x, y, sign(y), {.margin = .1})));
  CHECK(same_bits(nn::CosineEmbeddingLoss()(x, y, sign_of), cosine_embedding_loss(x, y, sign_of)));
  CHECK(same_bits(nn::TripletMarginLoss({.swap = true})(x, y, p), triplet_margin_loss(x, y, p, {.swap = true})));
  Tensor steps = log_softmax(randn({5, 2, 4}), 2), labels = tensor({1, 2, 3, 1}).reshape({2, 2}), n = tensor({5, 4}), m = tensor({2, 1});
  CHECK(same_bits(nn::CTCLoss()(steps, labels, n, m), ctc_loss(steps, labels, n, m)));
}

TEST_CASE("the weights of classes are buffers that move with the loss") {
  Tensor w = tensor({.5f, 1.f, 2.f}), x = randn({4, 3}), target = tensor({0, 2, 1, 1});
  nn::CrossEntropyLoss loss({.weight = w});
  CHECK(loss.named_buffers()[0].first == "weight");
  CHECK(same_bits(loss(x, target), cross_entropy(x, target, {.weight = w})));
  CHECK(same_bits(loss.clone()(x, target), loss(x, target)));
  loss.to(DType::f64);
  CHECK(loss.weight.dtype() == DType::f64);
  CHECK(loss(x.to(DType::f64), target).dtype() == DType::f64);
  nn::BCEWithLogitsLoss logits({.pos_weight = w});
  CHECK(logits.named_buffers().size() == 1);
  nn::Loss& any = logits;  // whichever a program chose
  Tensor t = sigmoid(randn({4, 3}));
  CHECK(same_bits(any(x, t), binary_cross_entropy_with_logits(x, t, {.pos_weight = w})));
}

// ---- lists

TEST_CASE("sequential calls its layers in order") {
  nn::Sequential s{nn::Linear(4, 3), nn::Tanh(), nn::Linear(3, 2)};
  Tensor x = randn({5, 4});
  check_close(s(x), s[2](tanh(s[0](x))));
  CHECK(s.size() == 3);
  CHECK(s.as<nn::Linear>(0).weight.shape() == Shape{3, 4});
  THROWS(s.as<nn::ReLU>(0), "nn::Any: holds a halftone::nn::Linear, not a halftone::nn::ReLU");
  THROWS(s[3], "ModuleList: layer 3 of 3");
  CHECK(same_bits(nn::Sequential()(x), x));
}

TEST_CASE("sequential in braces draws weights from left to right") {
  manual_seed(0);
  nn::Sequential s{nn::Linear(2, 2), nn::Linear(2, 2)};
  manual_seed(0);
  nn::Linear first(2, 2), second(2, 2);
  CHECK(same_bits(s.as<nn::Linear>(0).weight.detach(), first.weight.detach()));
  CHECK(same_bits(s.as<nn::Linear>(1).weight.detach(), second.weight.detach()));
}

TEST_CASE("sequentials nest, grow, move and clone") {
  auto make = [](int n) {
    nn::Sequential s;
    for (int i = 0; i < n; ++i) s.add(nn::Linear(2, 2)).add(nn::ReLU());
    return s;
  };
  nn::Sequential inner = make(2), moved = std::move(inner);
  nn::Sequential outer{nn::Linear(2, 2), nn::Sequential{nn::Linear(2, 2), nn::ReLU()}, std::move(moved)};
  std::string all;
  for (auto& [name, t] : outer.named_parameters()) all += name + ' ';
  CHECK(all == "0.weight 0.bias 1.0.weight 1.0.bias 2.0.weight 2.0.bias 2.2.weight 2.2.bias ");
  auto copy = outer.clone();
  static_assert(std::same_as<decltype(copy), nn::Sequential>);
  Tensor x = randn({3, 2});
  CHECK(same_bits(copy(x), outer(x)));
  CHECK(copy.parameters()[0].body() != outer.parameters()[0].body());
  CHECK(nn::Sequential().add(nn::Linear(2, 2)).fuse(false).size() == 1);

  struct Mlp : nn::Sequential {
    Mlp() { add(nn::Linear(2, 3)).add(nn::GELU()); }
    HT_FIELDS_AFTER(nn::Sequential)
  } mlp;
  CHECK(mlp.clone()(x).shape() == Shape{3, 3});
  CHECK(mlp.parameters().size() == 2);
}

TEST_CASE("a module list holds what a model calls as it likes") {
  struct Experts : nn::Module {
    nn::ModuleList all{nn::Linear(2, 2), nn::Linear(2, 2)};
    HT_FIELDS(all)
    Tensor forward(const Tensor& x) override {
      Tensor y = zeros(x.shape());
      for (auto& expert : all) y = y + expert(x);
      return y;
    }
  } m;
  CHECK(m.named_parameters()[2].first == "all.1.weight");
  Tensor x = randn({1, 2});
  check_close(m(x), m.all[0](x) + m.all[1](x));
  CHECK(m.clone().all.size() == 2);
  CHECK(nn::ModuleList().empty());
  THROWS(m.all(x), "halftone::nn::ModuleList has no forward(const Tensor&)");
}

TEST_CASE("a module dict keeps names in order") {
  nn::ModuleDict d;
  d.add("second", nn::Linear(2, 3)).add("first", nn::ReLU());
  CHECK(d.size() == 2);
  CHECK(d.contains("first"));
  CHECK(d.named_parameters()[0].first == "second.weight");
  CHECK(d.as<nn::Linear>("second").weight.shape() == Shape{3, 2});
  std::string all;
  for (auto& [name, m] : d) all += name + " ";
  CHECK(all == "second first ");
  Tensor x = randn({1, 2});
  CHECK(same_bits(d.clone()["second"](x), d["second"](x)));
  THROWS(d["third"], "ModuleDict: no module \"third\"; there are: second, first");
  THROWS(d.add("first", nn::ReLU()), "ModuleDict: there is a module \"first\" already");
  THROWS(d.add("a.b", nn::ReLU()), "ModuleDict: expected a name without dots");
  THROWS(d.as<nn::ReLU>("second"), "nn::Any: holds a halftone::nn::Linear, not a halftone::nn::ReLU");
}

TEST_CASE("a residual adds what its module makes of x") {
  nn::Residual r{nn::Sequential{nn::Linear(3, 3), nn::Tanh()}};
  Tensor x = randn({2, 3});
  check_close(r(x), x + r.module()(x));
  CHECK(r.named_parameters()[0].first == "0.weight");
  nn::Sequential deep{nn::Residual(nn::Linear(3, 3)), nn::Residual(nn::Linear(3, 3))};
  CHECK(deep.named_parameters()[2].first == "1.weight");
  CHECK(same_bits(deep.clone()(x), deep(x)));
}

// ---- fusion

struct Loud : nn::ReLU {  // derives from ReLU and does something else
  HT_FIELDS_AFTER(nn::ReLU)
  Tensor forward(const Tensor& x) override { return x + 100; }
};

TEST_CASE("fused neighbours give the results, gradients and names of unfused ones") {
  nn::Sequential s{nn::Linear(5, 7), nn::ReLU(), nn::Linear(7, 6), nn::GELU(), nn::Linear(6, 2), nn::Tanh()};
  nn::Sequential t = s.clone().fuse(false);
  Tensor x = randn({9, 5});
  check_close(s(x), t(x));
  square(s(x)).sum().backward();
  square(t(x)).sum().backward();
  auto a = s.named_parameters(), b = t.named_parameters();
  for (size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i].first == b[i].first);
    check_close(a[i].second.grad(), b[i].second.grad(), 1e-5);
  }
}

TEST_CASE("only a plain Linear before exactly a ReLU or GELU is fused") {
  Tensor x = randn({2, 3});
  nn::Sequential loud{nn::Linear(3, 3), Loud()};
  check_close(loud(x), loud[0](x) + 100);
  nn::Sequential twice{nn::Linear(3, 3, {.activation = nn::Activation::gelu}), nn::ReLU(), nn::ReLU()};
  check_close(twice(x), relu(twice[0](x)));
  nn::Sequential last{nn::ReLU(), nn::Linear(3, 3)};
  check_close(last(x), last[1](relu(x)));
}

TEST_CASE("convolution and batch norm are fused with a relu, and count and learn as alone") {
  nn::Sequential s{nn::Conv2d(2, 4, 3, {.padding = 1}), nn::ReLU(), nn::BatchNorm2d(4), nn::ReLU(), nn::Flatten(2),
                   nn::BatchNorm1d(4), nn::ReLU()};
  nn::Sequential t = s.clone().fuse(false);
  std::string fused, apart;
  Tensor x = randn({3, 2, 5, 5});
  for (bool training : {true, false, true}) {
    s.train(training);
    t.train(training);
    Tensor y, z;
    for (auto& l : amp::trace([&] { y = s(x); }).lines) fused += l.op + " ";
    for (auto& l : amp::trace([&] { z = t(x); }).lines) apart += l.op + " ";
    check_close(y, z, 1e-5);
    square(y).sum().backward();
    square(z).sum().backward();
  }
  CHECK(fused.find("conv_relu") != fused.npos);
  CHECK(fused.find("batch_norm_relu") != fused.npos);
  CHECK(apart.find("_relu") == apart.npos);
  auto a = s.state_dict(), b = t.state_dict();
  for (auto& [name, v] : a) check_close(v, b.at(name), 1e-5);
  auto p = s.parameters(), q = t.parameters();
  for (size_t i = 0; i < p.size(); ++i) check_close(p[i].grad(), q[i].grad(), 1e-3);
  CHECK(s.as<nn::BatchNorm2d>(2).num_batches_tracked.item<int64_t>() == 2);
}

TEST_CASE("a batch norm takes another's result up in one operator, or by itself where they differ") {
  const nn::BatchNormLayerOptions other_eps{.eps = .1}, without{.track_running_stats = false};
  for (auto& [options, one_operator] : {std::pair{nn::BatchNormLayerOptions{}, true}, {other_eps, false}, {without, false}})
    for (bool hooked : {false, true}) {
      nn::BatchNorm2d a(4), b(4, options), c = a.clone(), d = b.clone();
      std::string names;
      int seen = 0;
      HookHandle after;
      if (hooked) after = b.register_forward_hook([&](nn::Module&, const Tensor&, const Tensor&) { ++seen; return Tensor(); });
      for (bool training : {true, true, false}) {
        for (nn::Module* m : std::initializer_list<nn::Module*>{&a, &b, &c, &d}) m->train(training);
        Tensor x = randn({3, 4, 5, 5}), z = randn({3, 4, 5, 5}), together, apart;
        for (auto& l : amp::trace([&] { together = a.add_relu(x, b, z); }).lines) names += l.op + " ";
        apart = relu(c(x) + d(z));
        check_close(together, apart, 1e-5);
        square(together).sum().backward();
        square(apart).sum().backward();
      }
      CHECK((names.find("batch_norms_relu") != names.npos) == (one_operator && !hooked));
      CHECK(seen == (hooked ? 3 : 0));
      for (auto [m, n] : {std::pair{&a, &c}, {&b, &d}}) {
        auto s = m->state_dict(), t = n->state_dict();
        for (auto& [name, v] : s) check_close(v, t.at(name), 1e-5);
        auto p = m->parameters(), q = n->parameters();
        for (size_t i = 0; i < p.size(); ++i) check_close(p[i].grad(), q[i].grad(), 1e-3);
      }
    }
  nn::BatchNorm2d a(4), b(4);
  THROWS(a.add_relu(randn({3, 4, 5, 5}), b, randn({3, 4, 5})), "BatchNorm2d: expected [n, channels, h, w], got [3, 4, 5] (f32)");
}

TEST_CASE("a batch norm takes up the norm that a shortcut ends with, and any other shortcut's result") {
  auto projection = [] { return nn::Sequential{nn::Conv2d(3, 4, 1), nn::ReLU(), nn::BatchNorm2d(4)}; };
  auto ops_of = [](nn::BatchNorm2d& norm, nn::Sequential& shortcut, const Tensor& z) {
    std::string names;
    nn::BatchNorm2d own = norm.clone();
    nn::Sequential own_shortcut = shortcut.clone();
    Tensor x = randn({2, 4, 6, 6}), together;
    for (auto& l : amp::trace([&] { together = norm.add_relu(x, shortcut, z); }).lines) names += l.op + " ";
    check_close(together, relu(own(x) + own_shortcut(z)), 1e-5);
    auto s = shortcut.state_dict(), t = own_shortcut.state_dict();
    for (auto& [name, v] : s) check_close(v, t.at(name), 1e-5);
    return names;
  };
  nn::BatchNorm2d norm(4);
  Tensor z = randn({2, 3, 6, 6});
  nn::Sequential plain = projection(), apart = projection(), hooked = projection(), other{nn::Conv2d(3, 4, 1)}, empty;
  apart.fuse(false);
  int seen = 0;
  HookHandle after = hooked.register_forward_hook([&](nn::Module&, const Tensor&, const Tensor&) { ++seen; return Tensor(); });
  const std::string fused = ops_of(norm, plain, z);
  for (const char* op : {"conv_relu", "batch_norms_relu"}) CHECK(fused.find(op) != std::string::npos);
  for (nn::Sequential* s : {&apart, &hooked, &other}) CHECK(ops_of(norm, *s, z).find("batch_norms_relu") == std::string::npos);
  CHECK(ops_of(norm, empty, randn({2, 4, 6, 6})).find("batch_norms_relu") == std::string::npos);
  CHECK(seen == 1);
}

TEST_CASE("a relu runs behind the max pool that follows it, with the same results and gradients") {
  auto run = [](nn::Sequential& net, const Tensor& x, const Tensor& g) {
    Tensor in = x.detach().requires_grad_(), y;
    std::string names;
    for (auto& l : amp::trace([&] { y = net(in); }).lines) names += l.op + " ";
    y.backward({.gradient = g});
    return std::tuple{y.detach(), in.grad(), names};
  };
  auto check_on = [&](Device device, nn::Sequential net, const Shape& shape, bool behind) {
    net.to(device);
    nn::Sequential apart = net.clone().fuse(false);
    for (DType t : {DType::f32, DType::f16, DType::bf16}) {
      Tensor x = randint(-3, 4, shape).to(t);  // many are equal
      x.view({-1}).slice(0, 3, 4).fill_(NAN);
      x.view({-1}).slice(0, 9, 10).fill_(INFINITY);
      x = x.to(device);
      Tensor g = randn(net(x).shape()).to(t).to(device);
      auto [y, dx, names] = run(net, x, g);
      auto [z, dz, own] = run(apart, x, g);
      CHECK(same_bits(y, z));
      CHECK(same_bits(dx, dz));
      CHECK((names.find("relu") > names.find("max_pool")) == behind);
      CHECK(own.find("relu") < own.find("max_pool"));
    }
  };
  auto check = [&](const nn::Sequential& net, const Shape& shape, bool behind) {
    check_on(Device::cpu(), net.clone(), shape, behind);
    if (!devices(DeviceType::cuda).empty()) check_on(Device::cuda(), net.clone(), shape, behind);
  };
  check(nn::Sequential{nn::ReLU(), nn::MaxPool2d(2)}, {2, 3, 6, 8}, true);
  check(nn::Sequential{nn::ReLU(), nn::MaxPool2d(3, {.stride = 2, .padding = 1})}, {2, 3, 7, 5}, true);
  check(nn::Sequential{nn::ReLU(), nn::MaxPool1d(3, {.stride = 1})}, {2, 3, 9}, true);
  check(nn::Sequential{nn::ReLU(), nn::AdaptiveMaxPool2d({3, 2})}, {2, 3, 7, 5}, true);
  check(nn::Sequential{nn::BatchNorm2d(3), nn::ReLU(), nn::MaxPool2d(2)}, {4, 3, 4, 6}, false);
  // The largest of a window that lies in the padding is -inf.
  check(nn::Sequential{nn::ReLU(), nn::MaxPool1d(2, {.stride = 3, .padding = 1, .dilation = 4})}, {2, 3, 3}, false);
  check(nn::Sequential{nn::ReLU(), nn::MaxPool2d({3, 2}, {.stride = Size2(1, 3), .padding = Size2(0, 1), .dilation = 2, .ceil_mode = true})}, {1, 2, 6, 1}, false);
  check(nn::Sequential{nn::Tanh(), nn::Sequential{nn::ReLU()}, nn::MaxPool2d(2)}, {2, 3, 6, 8}, false);

  nn::Sequential cnn{nn::Conv2d(1, 4, 3), nn::ReLU(), nn::MaxPool2d(2)}, hooked = cnn.clone();
  Tensor before, after;
  HookHandle hook = hooked[1].register_forward_hook([&](nn::Module&, const Tensor& in, const Tensor& out) { before = in, after = out; return Tensor(); });
  Tensor x = randn({2, 1, 8, 8}), g = randn({2, 4, 3, 3});
  auto [y, dx, names] = run(cnn, x, g);
  auto [z, dz, own] = run(hooked, x, g);
  CHECK(names.starts_with("conv max_pool relu "));
  CHECK(own.starts_with("conv relu max_pool "));
  CHECK(same_bits(after, relu(before)));
  CHECK(same_bits(y, z));
  CHECK(same_bits(dx, dz));
}

TEST_CASE("a layer with a hook runs as itself") {
  nn::Sequential s{nn::Linear(3, 4), nn::ReLU(), nn::Linear(4, 4), nn::GELU()};
  Tensor x = randn({2, 3}), seen;
  HookHandle before = s[0].register_forward_hook([&](nn::Module&, const Tensor&, const Tensor& y) { seen = y; return Tensor(); });
  HookHandle after = s[3].register_forward_pre_hook([](nn::Module&, const Tensor& in) { return in * 0; });
  CHECK(s(x).abs().max().item() == 0);
  check_close(seen, s.as<nn::Linear>(0).forward(x));
  after.remove();
  before.remove();
  CHECK(s(x).abs().max().item() > 0);
}

TEST_CASE("a hook may be on what a Sequential holds a layer in") {
  auto shapes = [](nn::Sequential net, size_t layer, const Tensor& x) {
    std::vector<Shape> seen;
    HookHandle hook = (net.begin() + static_cast<std::ptrdiff_t>(layer))->register_forward_hook([&](nn::Module&, const Tensor& in, const Tensor& out) {
      seen = {in.shape(), out.shape()};
      return Tensor();
    });
    net(x);
    return seen;
  };
  CHECK(shapes(nn::Sequential{nn::ReLU(), nn::MaxPool1d(2)}, 0, randn({1, 1, 6})) == std::vector<Shape>{{1, 1, 6}, {1, 1, 6}});
  CHECK(shapes(nn::Sequential{nn::ReLU(), nn::MaxPool1d(2)}, 1, randn({1, 1, 6})) == std::vector<Shape>{{1, 1, 6}, {1, 1, 3}});
  CHECK(shapes(nn::Sequential{nn::Linear(3, 4), nn::ReLU()}, 0, randn({2, 3})) == std::vector<Shape>{{2, 3}, {2, 4}});
  CHECK(shapes(nn::Sequential{nn::Linear(3, 4), nn::ReLU()}, 1, randn({2, 3})) == std::vector<Shape>{{2, 4}, {2, 4}});
}

TEST_CASE("fusing makes a 16-bit result more accurate, rounding it once") {
  manual_seed(5);
  nn::Sequential s{nn::Linear(33, 64), nn::GELU()};
  s.to(DType::bf16);
  nn::Sequential apart = s.clone().fuse(false), exact = apart.clone();
  exact.to(DType::f64);
  Tensor x = randn({64, 33}).to(DType::bf16);
  Tensor y = exact(x.to(DType::f64)).detach();
  auto error = [&](nn::Sequential& m) {
    CHECK(m(x).dtype() == DType::bf16);
    return (m(x).detach().to(DType::f64) - y).abs().mean().item();
  };
  CHECK(error(s) < 0.9 * error(apart));
}

TEST_CASE("a summary shows both layers of a fused pair") {
  nn::Sequential s{nn::Linear(3, 4), nn::ReLU()};
  CHECK_THAT(s.summary({2, 3}), Contains("1        ReLU        [2, 4]"));
}

// ---- cost

TEST_CASE("a layer's call allocates no more than its operator") {
  NoGrad off;
  nn::Linear fc(4, 4);
  nn::Sequential s{nn::Linear(4, 4), nn::ReLU()};
  Tensor x = ones({1, 4});
  const Tensor &w = fc.weight, &b = fc.bias;
  auto count = [](auto f) {
    f();
    int64_t before = allocations;
    f();
    return allocations - before;
  };
  int64_t alone = count([&] { linear(x, w, b); });
  CHECK(alone > 0);
  CHECK(count([&] { fc(x); }) == alone);
  CHECK(count([&] { s(x); }) == count([&] { linear_relu(x, w, b); }));
  CHECK(fc.weight.body()->owners == 1);
}

TEST_CASE("an island runs in its own dtype inside any region, both ways") {
  manual_seed(3);
  nn::Sequential net{nn::Linear(6, 5), nn::ReLU(), nn::PrecisionIsland(nn::Linear(5, 4), DType::f32), nn::Linear(4, 3)};
  std::vector<std::string> names;
  for (auto& [name, p] : net.named_parameters()) names.push_back(name);
  CHECK(names == std::vector<std::string>{"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"});
  Tensor x = randn({2, 6}), y;
  auto ran = amp::trace([&] {
    amp::Autocast region({.dtype = DType::bf16});
    y = net(x);
  });
  std::vector<DType> products;
  for (auto& l : ran.lines) if (l.op.starts_with("linear")) products.push_back(l.in[0].dtype);
  CHECK(products == std::vector<DType>{DType::bf16, DType::f32, DType::bf16});
  y.sum().backward();
  for (auto& p : net.parameters()) CHECK(p.grad().dtype() == DType::f32);
  nn::PrecisionIsland wide(nn::Linear(5, 4), DType::f64);
  CHECK(wide(randn({2, 5})).dtype() == DType::f64);
  CHECK(wide.parameters()[0].dtype() == DType::f64);
  nn::PrecisionIsland low(nn::Linear(5, 4), DType::bf16);
  CHECK(low(randn({2, 5})).dtype() == DType::bf16);
  auto copy = wide.clone();
  CHECK(copy.dtype() == DType::f64);
  net.to(DType::f16);
  CHECK(net[0].parameters()[0].dtype() == DType::f16);
  CHECK(net[2].parameters()[0].dtype() == DType::f32);
  CHECK(net[2](randn({2, 5}).to(DType::f16)).dtype() == DType::f32);
  CHECK_THROWS_WITH(nn::PrecisionIsland(nn::Linear(5, 4), DType::i64), "nn::PrecisionIsland: expected a floating dtype, got i64");
}
