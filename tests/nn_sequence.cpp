// Layers of sequences: recurrence, attention and positions. That they are PyTorch's is for nn_golden.cpp.
#include <cmath>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;
using Catch::Matchers::Contains;

#define THROWS(expression, text) CHECK_THROWS_WITH(expression, Contains(text))

namespace {

void check_close(const Tensor& a, const Tensor& b, double tolerance = 1e-5) {
  REQUIRE(a.shape() == b.shape());
  auto x = a.detach().to_vector<double>(), y = b.detach().to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) REQUIRE(x[i] == Approx(y[i]).margin(tolerance));
}

}  // namespace

// ---- recurrence

TEST_CASE("a recurrent network is its cell, step by step") {
  nn::LSTM lstm(3, 4);
  nn::LSTMCell cell(3, 4);
  { NoGrad off;
    cell.weight_ih.copy_(lstm.parameter("weight_ih_l0"));
    cell.weight_hh.copy_(lstm.parameter("weight_hh_l0"));
    cell.bias_ih.copy_(lstm.parameter("bias_ih_l0"));
    cell.bias_hh.copy_(lstm.parameter("bias_hh_l0")); }
  Tensor x = randn({7, 2, 3});
  nn::LSTMState s{zeros({2, 4}), zeros({2, 4})};
  std::vector<Tensor> all;
  for (int64_t t = 0; t < 7; ++t) {
    s = cell(x[t], s);
    all.push_back(s.h);
  }
  auto [y, h, c] = lstm(x, {});
  check_close(y, stack(all));
  check_close(h[0], s.h);
  check_close(c[0], s.c);
  check_close(cell(x[0]), y[0]);
  // Two halves, the state handed on.
  auto first = lstm(x.slice(0, 0, 3), {});
  auto second = lstm(x.slice(0, 3, 7), {first.h, first.c});
  check_close(cat({first.output, second.output}), y);
}

TEST_CASE("recurrent networks: layout, directions, dropout, layers in a row") {
  nn::GRU gru(3, 4, {.layers = 2, .batch_first = true, .bidirectional = true});
  Tensor x = randn({2, 5, 3});
  auto [y, h] = gru(x, Tensor());
  CHECK(y.shape() == Shape{2, 5, 8});
  CHECK(h.shape() == Shape{4, 2, 4});
  check_close(y.select(1, 4).slice(1, 0, 4), h[2]);  // forward ends at the end
  check_close(y.select(1, 0).slice(1, 4, 8), h[3]);  // backward at the beginning
  std::string names;
  for (auto& [name, p] : gru.named_parameters()) names += name + " ";
  CHECK(names ==
        "weight_ih_l0 weight_hh_l0 bias_ih_l0 bias_hh_l0 "
        "weight_ih_l0_reverse weight_hh_l0_reverse bias_ih_l0_reverse bias_hh_l0_reverse "
        "weight_ih_l1 weight_hh_l1 bias_ih_l1 bias_hh_l1 "
        "weight_ih_l1_reverse weight_hh_l1_reverse bias_ih_l1_reverse bias_hh_l1_reverse ");
  CHECK(gru.parameter("weight_ih_l1").shape() == Shape{12, 8});

  nn::RNN dropping(3, 4, {.layers = 2, .dropout = .5});
  Tensor z = randn({5, 2, 3});
  CHECK(dropping(z).to_vector<float>() != dropping(z).to_vector<float>());
  dropping.eval();
  CHECK(dropping(z).to_vector<float>() == dropping(z).to_vector<float>());

  nn::Sequential net{nn::LSTM(3, 4), nn::Linear(4, 2)};
  CHECK(net(z).shape() == Shape{5, 2, 2});
  CHECK(net.named_parameters()[0].first == "0.weight_ih_l0");
}

TEST_CASE("the gradient of a long sequence reaches its first step") {
  nn::LSTM lstm(2, 3);
  Tensor x = randn({65, 1, 2}).requires_grad_();
  lstm(x).sum().backward();
  for (double v : x.grad().abs().sum({1, 2}).to_vector<double>()) CHECK(v > 0);
  auto [y, h, c] = nn::LSTM(2, 3)(randn({1, 1, 2}), {});
  check_close(y[0], h[0]);
}

TEST_CASE("under autocast h is 16-bit and c stays wide") {
  nn::LSTM lstm(3, 4);
  amp::Autocast region({.dtype = DType::bf16});
  auto [y, h, c] = lstm(randn({5, 2, 3}), {});
  CHECK(y.dtype() == DType::bf16);
  CHECK(c.dtype() == DType::f32);
  CHECK(nn::GRU(3, 4)(randn({5, 2, 3})).dtype() == DType::bf16);
  CHECK(nn::RNN(3, 4)(randn({5, 2, 3})).dtype() == DType::bf16);
}

TEST_CASE("recurrent networks say what they expected") {
  nn::LSTM m(3, 4);
  THROWS(m(randn({5, 2, 2})), "LSTM: expected [t, n, 3], got [5, 2, 2] (f32)");
  THROWS(nn::GRU(3, 4, {.batch_first = true})(randn({5, 2})), "GRU: expected [n, t, 3], got [5, 2] (f32)");
  THROWS(m(randn({5, 2, 3}), {zeros({1, 3, 4}), {}}), "LSTM: expected h [1, 2, 4], got [1, 3, 4] (f32)");
  THROWS(m(randn({0, 2, 3})), "LSTM: expected at least one step");
  THROWS(nn::RNN(3, 0), "RNN: expected at least one layer of at least one element, got 1 of 0");
  THROWS(nn::RNN(3, 1, {.dropout = 2}), "RNN: expected dropout in [0, 1], got 2");
  THROWS(m.parameter("weight_ih_l1"), "LSTM: no parameter weight_ih_l1");
}

// ---- attention

TEST_CASE("what a mask hides does not matter") {
  nn::MultiheadAttention m(8, 2, {.batch_first = true});
  Tensor x = randn({2, 5, 8}), changed = x.clone();
  { NoGrad off; changed.select(1, 4).fill_(7); }
  Tensor keys = tensor({true, true, true, true, false}).expand({2, 5});
  Tensor a = m(x, x, x, {.keys = keys}), b = m(x, changed, changed, {.keys = keys});
  check_close(a, b);
  Tensor added = full({5, 5}, -std::numeric_limits<double>::infinity()).fill_(0);
  { NoGrad off; added.select(1, 4).fill_(-std::numeric_limits<double>::infinity()); }
  check_close(m(x, x, x, {.mask = added}), a);
  check_close(m(x, x, x, {.mask = zeros({5, 5}), .keys = keys}), a);
  Tensor causal = m(x, x, x, {.causal = true}), c = m(changed, changed, changed, {.causal = true});
  check_close(causal.slice(1, 0, 4), c.slice(1, 0, 4));
  check_close(m(x, x, x, {.mask = tril(ones({2, 5, 5})).to(DType::b8)}), causal);
  // Separate projections of the same tensor are the joint one.
  Tensor same = x.clone();
  check_close(m(x, same, x), m(x));
}

TEST_CASE("attention says what it expected") {
  THROWS(nn::MultiheadAttention(6, 4), "MultiheadAttention: a width of 6 does not divide into 4 heads");
  nn::MultiheadAttention m(4, 2);
  THROWS(m(randn({3, 2, 5})), "MultiheadAttention: expected q [t, n, 4], got [3, 2, 5] (f32)");
  Tensor x = randn({3, 2, 4});
  THROWS(m(x, x, x, {.keys = ones({2, 3})}), "MultiheadAttention: expected keys [n, s] (b8), got [2, 3] (f32)");
}

TEST_CASE("transformer layers drop out in training, and fuse their activation") {
  nn::TransformerEncoderLayer layer(8, 2, {.feedforward = 16, .batch_first = true});
  Tensor x = randn({2, 3, 8});
  CHECK(layer(x).to_vector<float>() != layer(x).to_vector<float>());
  layer.eval();
  CHECK(layer(x).to_vector<float>() == layer(x).to_vector<float>());
  bool fused = false;
  for (auto& l : amp::trace([&] { layer(x); }).lines) fused = fused || l.op == "linear_relu";
  CHECK(fused);
  nn::Sequential stack{nn::TransformerEncoderLayer(8, 2, {.feedforward = 16}), nn::TransformerEncoderLayer(8, 2, {.feedforward = 16})};
  CHECK(stack(x).shape() == x.shape());
  CHECK(stack.named_parameters()[0].first == "0.self_attn.in_proj_weight");
}

// ---- positions

TEST_CASE("positional encodings are sines and cosines") {
  nn::PositionalEncoding code(6, {.batch_first = true});
  Tensor y = code(zeros({1, 200, 6}, {.dtype = DType::f64}));
  for (int64_t t : {0, 1, 63, 64, 199})
    for (int64_t i = 0; i < 3; ++i) {
      double angle = static_cast<double>(t) / std::pow(10000., static_cast<double>(2 * i) / 6);
      CHECK(y[0][t][2 * i].item() == Approx(std::sin(angle)).margin(1e-12));
      CHECK(y[0][t][2 * i + 1].item() == Approx(std::cos(angle)).margin(1e-12));
    }
  nn::PositionalEncoding steps(6);
  Tensor x = randn({4, 2, 6});
  check_close(steps(x), x + y.slice(1, 0, 4).transpose(0, 1).to(DType::f32));
  CHECK(steps(x.to(DType::bf16)).dtype() == DType::bf16);
  CHECK(steps.state_dict().size() == 0);
  THROWS(nn::PositionalEncoding(5), "PositionalEncoding: expected an even width, got 5");
  THROWS(steps(randn({4, 6})), "PositionalEncoding: expected [t, n, 6] of a floating dtype, got [4, 6] (f32)");
}

TEST_CASE("rotary embeddings turn pairs, so that products depend on distances") {
  for (bool interleaved : {false, true}) {
    nn::RotaryEmbedding rotary(4, {.base = 100, .interleaved = interleaved});
    Tensor x = randn({2, 3, 4}, {.dtype = DType::f64}), y = rotary(x, 5);
    for (int64_t t = 0; t < 3; ++t)
      for (int64_t i = 0; i < 2; ++i) {
        double angle = static_cast<double>(t + 5) / std::pow(100., static_cast<double>(2 * i) / 4);
        int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + 2;
        double a = x[1][t][first].item(), b = x[1][t][second].item();
        CHECK(y[1][t][first].item() == Approx(a * std::cos(angle) - b * std::sin(angle)).margin(1e-12));
        CHECK(y[1][t][second].item() == Approx(b * std::cos(angle) + a * std::sin(angle)).margin(1e-12));
      }
    Tensor q = randn({1, 4}, {.dtype = DType::f64}), k = randn({1, 4}, {.dtype = DType::f64});
    auto product = [&](int64_t at, int64_t other) { return (rotary(q, at) * rotary(k, other)).sum().item(); };
    CHECK(product(3, 7) == Approx(product(90, 94)));
    CHECK(rotary(x.to(DType::f16)).dtype() == DType::f16);
    Tensor leaf = x.clone().requires_grad_();
    square(rotary(leaf)).sum().backward();
    check_close(leaf.grad(), x * 2, 1e-12);  // turning keeps lengths
  }
  THROWS(nn::RotaryEmbedding(4)(randn({3, 6})), "RotaryEmbedding: expected [..., t, 4] of a floating dtype, got [3, 6] (f32)");
  THROWS(nn::RotaryEmbedding(4)(randn({3, 4}), -1), "RotaryEmbedding: expected an offset of 0 or more, got -1");
}
