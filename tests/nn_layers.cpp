// Layers: what they compute, what Sequential fuses, and what a call costs.
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

// Every allocation of one object in the process, the library's included.
static std::atomic<int64_t> allocations = 0;
void* operator new(size_t n, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(n ? n : 1);
}
void* operator new(size_t n) {
  if (void* p = operator new(n, std::nothrow)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }

namespace {

void check_close(const Tensor& a, const Tensor& b, double tolerance = 1e-6) {
  REQUIRE(a.shape() == b.shape());
  CHECK(a.dtype() == b.dtype());
  auto x = a.detach().to_vector<double>(), y = b.detach().to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) CHECK(x[i] == Approx(y[i]).margin(tolerance));
}
bool same_bits(const Tensor& a, const Tensor& b) { return a.to_vector<double>() == b.to_vector<double>(); }

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
  is(nn::SiLU(), silu(x));
  is(nn::Tanh(), tanh(x));
  is(nn::Sigmoid(), sigmoid(x));
  is(nn::Softmax(), softmax(x, -1));
  is(nn::Softmax(0), softmax(x, 0));
  is(nn::LogSoftmax(), log_softmax(x, -1));
  is(nn::Lambda([](const Tensor& t) { return t * 2; }), x * 2);
}

TEST_CASE("flatten") {
  Tensor x = randn({2, 3, 4, 5});
  CHECK(nn::Flatten()(x).shape() == Shape{2, 60});
  CHECK(nn::Flatten(0, 1)(x).shape() == Shape{6, 4, 5});
}

TEST_CASE("losses") {
  Tensor x = randn({4, 3}), y = randn({4, 3}), target = tensor({0, 2, -100, 1});
  CHECK(same_bits(nn::CrossEntropyLoss()(x, target), cross_entropy(x, target)));
  nn::CrossEntropyLoss smooth({.label_smoothing = 0.1});
  CHECK(same_bits(smooth(x, target), cross_entropy(x, target, {.label_smoothing = 0.1})));
  CHECK(same_bits(nn::MSELoss()(x, y), mse_loss(x, y)));
  CHECK(nn::MSELoss(Reduction::none)(x, y).shape() == x.shape());
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
  CHECK_THROWS_WITH(nn::PrecisionIsland(nn::Linear(5, 4), DType::i64), "nn::PrecisionIsland: expected a floating dtype, got i64");
}
