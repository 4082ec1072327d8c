// Steps of recurrent networks against their formulas, dtypes of the state, error texts.
#include "halftone/halftone.h"
#include "halftone/tests/error_text.h"

using namespace halftone;

namespace {

using Doubles = std::vector<double>;
Doubles values(const Tensor& t) { return t.to_vector<double>(); }
Tensor drawn(const Shape& s, DType t) { return randn(s, {.dtype = DType::f64}).to(t); }
double logistic(double x) { return 1 / (1 + std::exp(-x)); }
double farthest(const Tensor& got, const Doubles& expected) {
  auto v = values(got);
  REQUIRE(v.size() == expected.size());
  double d = 0;
  for (size_t i = 0; i < v.size(); ++i) d = std::max(d, std::abs(v[i] - expected[i]));
  return d;
}
double unit(DType t) { return t == DType::f64 ? 1e-15 : t == DType::f32 ? 1e-6 : t == DType::f16 ? 2e-3 : 2e-2; }
constexpr DType dtypes[] = {DType::f64, DType::f32, DType::f16, DType::bf16};

}  // namespace

TEST_CASE("lstm_step is its formula, and c keeps its dtype") {
  manual_seed(1);
  const size_t n = 3, m = 5;
  for (DType t : dtypes)
    for (DType state : dtypes) {
      INFO(name(t) << ", c " << name(state));
      Tensor x = drawn({n, 4 * m}, t), y = drawn({n, 4 * m}, t), c = drawn({n, m}, state);
      auto xv = values(x), yv = values(y), cv = values(c);
      Doubles h2, c2;
      for (size_t row = 0; row < n; ++row)
        for (size_t j = 0; j < m; ++j) {
          auto sum = [&](size_t gate) { return xv[row * 4 * m + gate * m + j] + yv[row * 4 * m + gate * m + j]; };
          c2.push_back(logistic(sum(1)) * cv[row * m + j] + logistic(sum(0)) * std::tanh(sum(2)));
          h2.push_back(logistic(sum(3)) * std::tanh(c2.back()));
        }
      LSTMStep next = lstm_step(x, y, c);
      CHECK(next.h.dtype() == t);
      CHECK(next.c.dtype() == state);
      CHECK(farthest(next.h, h2) <= unit(t));
      CHECK(farthest(next.c, c2) <= 4 * std::max(unit(promote(t, state)), unit(state)));
    }
}

TEST_CASE("gru_step is its formula, in the dtype of the products") {
  manual_seed(2);
  const size_t n = 2, m = 7;
  for (DType t : dtypes)
    for (DType state : {t, DType::f32}) {
      INFO(name(t) << ", h " << name(state));
      Tensor x = drawn({1, n, 3 * m}, t), y = drawn({1, n, 3 * m}, t), h = drawn({1, n, m}, state);
      auto xv = values(x), yv = values(y), hv = values(h.to(t));
      Doubles expected;
      for (size_t row = 0; row < n; ++row)
        for (size_t j = 0; j < m; ++j) {
          auto at = [&](const Doubles& v, size_t gate) { return v[row * 3 * m + gate * m + j]; };
          double r = logistic(at(xv, 0) + at(yv, 0)), z = logistic(at(xv, 1) + at(yv, 1)), next = std::tanh(at(xv, 2) + r * at(yv, 2));
          expected.push_back((1 - z) * next + z * hv[row * m + j]);
        }
      Tensor got = gru_step(x, y, h);
      CHECK(got.dtype() == t);
      CHECK(got.shape() == h.shape());
      CHECK(farthest(got, expected) <= unit(t));
    }
}

TEST_CASE("gradients of a step where only one of its results is used") {
  manual_seed(3);
  Tensor x = drawn({2, 8}, DType::f64).requires_grad_(), y = drawn({2, 8}, DType::f64), c = drawn({2, 2}, DType::f64).requires_grad_();
  for (bool of_h : {true, false})
    for (bool create_graph : {false, true}) {
      LSTMStep next = lstm_step(x, y, c);
      auto sum = chunk(x + y, 4, -1);
      Tensor state = sigmoid(sum[1]) * c + sigmoid(sum[0]) * tanh(sum[2]), h = sigmoid(sum[3]) * tanh(state);
      auto got = grad({(of_h ? next.h : next.c).sum()}, std::vector<Tensor>{x, c}, {.create_graph = create_graph});
      auto expected = grad({(of_h ? h : state).sum()}, std::vector<Tensor>{x, c});
      for (size_t i = 0; i < 2; ++i) CHECK(farthest(got[i], values(expected[i])) <= 1e-14);
    }
}

TEST_CASE("errors of recurrent steps") {
  auto f = [](const Shape& s, DType t = DType::f32) { return ones(s, {.dtype = t}); };
  TEXT(lstm_step(f({2, 8}), f({2, 12}), f({2, 2})), "lstm_step: expected two products of one shape and floating dtype, got [2, 8] (f32) and [2, 12] (f32)");
  TEXT(lstm_step(f({2, 6}), f({2, 6}), f({2, 2})), "lstm_step: expected products [..., 4 m], got [2, 6] (f32)");
  TEXT(lstm_step(f({2, 8}), f({2, 8}), f({2, 3})), "lstm_step: expected c [2, 2] with products [2, 8], got [2, 3] (f32)");
  TEXT(lstm_step(f({2, 8}), Tensor(), f({2, 2})), "lstm_step: a tensor is undefined");
  TEXT(gru_step(f({2, 6}), f({2, 6}, DType::f16), f({2, 2})), "gru_step: expected two products of one shape and floating dtype, got [2, 6] (f32) and [2, 6] (f16)");
  TEXT(gru_step(f({6}), f({6}), f({3})), "gru_step: expected h [2] with products [6], got [3] (f32)");
  TEXT(call(op::gru_step, {f({6}), f({6}), f({2}, DType::f16)}), "gru_step: expected h in f32, got f16");
  TEXT(call_all(op::lstm_step, {f({8}), f({8}), f({2}, DType::f16)}), "lstm_step: expected c in f32, got f16");
}
