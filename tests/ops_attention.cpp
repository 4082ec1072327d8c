// Attention against loops written from its formula, what masks hide, grouped heads, dropout, autocast, error texts.
#include "halftone/tests/error_text.h"
#include "halftone/tests/operators.h"
#include "halftone/tests/threads.h"

using namespace halftone;

namespace {

using Doubles = std::vector<double>;
Tensor f(const Shape& s) { return ones(s); }
Doubles values(const Tensor& t) { return t.to_vector<double>(); }
const Tensor undefined;
Tensor drawn(const Shape& s, DType t = DType::f64) { return randn(s, {.dtype = DType::f64}).to(t); }
double farthest(const Tensor& a, const Tensor& b) {
  auto x = values(a), y = values(b);
  REQUIRE(x.size() == y.size());
  double d = 0;
  for (size_t i = 0; i < x.size(); ++i) d = std::isnan(x[i]) || std::isnan(y[i]) ? INFINITY : std::max(d, std::abs(x[i] - y[i]));
  return d;
}

// seen(batch, head, i, j) is what is added to a score; -inf hides it.
template <class F> Tensor by_loops(const Tensor& q, const Tensor& k, const Tensor& v, double scale, F seen) {
  int64_t b = q.size(0), h = q.size(1), t = q.size(2), d = q.size(3), g = k.size(1), s = k.size(2), e = v.size(3);
  auto qv = values(q), kv = values(k), vv = values(v);
  Doubles y(static_cast<size_t>(b * h * t * e));
  for (int64_t n = 0; n < b * h * t; ++n) {
    int64_t batch = n / t / h, head = n / t % h, i = n % t, shared = batch * g + head / (h / g);
    Doubles w(static_cast<size_t>(s));
    double total = 0;
    for (int64_t j = 0; j < s; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < d; ++c) dot += qv[static_cast<size_t>(n * d + c)] * kv[static_cast<size_t>((shared * s + j) * d + c)];
      total += w[static_cast<size_t>(j)] = std::exp(scale * dot + seen(batch, head, i, j));
    }
    for (int64_t j = 0; j < s && total > 0; ++j)
      for (int64_t c = 0; c < e; ++c)
        y[static_cast<size_t>(n * e + c)] += w[static_cast<size_t>(j)] / total * vv[static_cast<size_t>((shared * s + j) * e + c)];
  }
  return tensor(y).reshape({b, h, t, e});
}

}  // namespace

TEST_CASE("attention is its formula") {
  manual_seed(1);
  auto all = [](int64_t, int64_t, int64_t, int64_t) { return 0.0; };
  auto causal = [](int64_t, int64_t, int64_t i, int64_t j) { return j <= i ? 0.0 : -INFINITY; };
  struct Sizes { int64_t b, h, g, t, s, d, e; };
  for (auto [b, h, g, t, s, d, e] : {Sizes{1, 1, 1, 1, 1, 1, 1}, {2, 2, 2, 5, 7, 3, 4}, {1, 6, 2, 33, 9, 8, 8}, {1, 4, 1, 65, 130, 5, 2}, {3, 1, 1, 7, 7, 16, 1}})
    for (DType type : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
      Tensor q = drawn({b, h, t, d}, type), k = drawn({b, g, s, d}, type), v = drawn({b, g, s, e}, type);
      double unit = type == DType::f64 ? 1e-13 : type == DType::f32 ? 2e-5 : type == DType::f16 ? 2e-3 : 2e-2, scale = 1 / std::sqrt(static_cast<double>(d));
      INFO(str(q.meta()) << " " << str(k.meta()));
      Tensor y = scaled_dot_product_attention(q, k, v);
      CHECK(y.dtype() == type);
      CHECK(farthest(y, by_loops(q, k, v, scale, all)) <= unit);
      CHECK(farthest(scaled_dot_product_attention(q, k, v, {}, {.causal = true, .scale = .3}), by_loops(q, k, v, .3, causal)) <= unit);
      Tensor bias = drawn({h, t, s}, type);
      auto bv = values(bias);
      auto added = [&](int64_t, int64_t head, int64_t i, int64_t j) { return bv[static_cast<size_t>((head * t + i) * s + j)]; };
      CHECK(farthest(scaled_dot_product_attention(q, k, v, bias), by_loops(q, k, v, scale, added)) <= 2 * unit);
      Tensor mask = gt(drawn({b, 1, 1, s}), -.5);
      auto mv = values(mask);
      auto chosen = [&](int64_t batch, int64_t, int64_t, int64_t j) { return mv[static_cast<size_t>(batch * s + j)] != 0 ? 0.0 : -INFINITY; };
      CHECK(farthest(scaled_dot_product_attention(q, k, v, mask), by_loops(q, k, v, scale, chosen)) <= unit);
      tests::count("oracle_combinations", 4);
    }
}

TEST_CASE("the kernels in public operators, for what other devices refuse, agree with those in blocks") {
  for (const OpDef* op : {find_op("attention"), find_op("attention_grad")}) {
    OpDef composed = *op;
    composed.kernel[0] = op == &op::attention ? attention_composed : attention_grad_composed;
    std::vector<Sample> samples = op->samples();
    for (size_t k = 0; k < samples.size(); ++k)
      for (DType t : {DType::f64, DType::f32, DType::f16}) {
        const Sample& s = samples[k];
        Tensors in = tests::make_inputs(s, t), expected, got;
        {
          LayerScope kernel_only(uint8_t{0});
          Call a{.op = op, .in = in, .attrs = s.attrs, .out = {}, .recording = true};
          Call b{.op = &composed, .in = in, .attrs = s.attrs, .out = {}, .recording = true};
          expected = dispatch(a);
          got = dispatch(b);
        }
        INFO(tests::describe(*op, s, k) << ", " << str(t));
        REQUIRE(got.size() == expected.size());
        for (size_t i = 0; i < got.size(); ++i) {
          auto v = values(expected[i]);
          double largest = 1;
          for (double x : v) largest = std::max(largest, std::abs(x));
          CHECK(farthest(got[i], expected[i]) <= largest * (t == DType::f64 ? 1e-12 : t == DType::f32 ? 1e-5 : 4e-3));
        }
      }
  }
}

TEST_CASE("a query that sees nothing has the result 0 and leaves no NaN in gradients") {
  Tensor mask = tensor({true, false, true, false, false, false}).reshape({2, 3});
  for (bool added : {false, true})
    for (bool create_graph : {false, true}) {
      Tensor m = added ? where(mask, zeros({2, 3}, {.dtype = DType::f64}), -INFINITY) : mask;
      Tensor q = drawn({1, 1, 2, 4}).requires_grad_(), k = drawn({1, 1, 3, 4}).requires_grad_(), v = drawn({1, 1, 3, 2}).requires_grad_();
      Tensor y = scaled_dot_product_attention(q, k, v, m);
      CHECK(values(y[0][0][1]) == Doubles{0, 0});
      auto grads = grad({sum(y * y)}, std::vector<Tensor>{q, k, v}, {.create_graph = create_graph});
      for (auto& g : grads) for (double x : values(g)) CHECK(std::isfinite(x));
      CHECK(values(grads[0][0][0][1]) == Doubles{0, 0, 0, 0});
      CHECK(values(grads[2][0][0][1]) == Doubles{0, 0});  // a key that nobody sees
    }
  CHECK(values(scaled_dot_product_attention(f({1, 1, 2, 3}), f({1, 1, 0, 3}), f({1, 1, 0, 2}))) == Doubles{0, 0, 0, 0});
}

TEST_CASE("report_B45: what a mask hides is as if it were not there") {
  tests::report("torch-mojo-backend#319");
  manual_seed(2);
  Tensor q = drawn({1, 2, 3, 8}), k = drawn({1, 2, 300, 8}), v = drawn({1, 2, 300, 5});
  Tensor mask = ge(arange(300), 200);  // the first blocks of keys hold nothing
  Tensor part = scaled_dot_product_attention(q, k.slice(2, 200, {}), v.slice(2, 200, {}));
  CHECK(farthest(scaled_dot_product_attention(q, k, v, mask), part) <= 1e-14);
  CHECK(farthest(scaled_dot_product_attention(q, k, v, where(mask, zeros({300}), -INFINITY)), part) <= 1e-14);
  // Hidden values do not reach the result, whatever they are... but for 0 * NaN in a product, so they must be finite.
  Tensor wild = where(unsqueeze(mask, 1), v, 1e300);
  CHECK(farthest(scaled_dot_product_attention(q, k, wild, mask), part) <= 1e-14);
}

TEST_CASE("report_B48: attention over equal bf16 scores is exact") {
  tests::report("executorch#20090");
  Tensor q = zeros({1, 1, 1, 4}, {.dtype = DType::bf16}), k = ones({1, 1, 512, 4}, {.dtype = DType::bf16});
  Tensor v = one_hot(arange(512), 512, DType::bf16).reshape({1, 1, 512, 512});
  for (double w : values(scaled_dot_product_attention(q, k, v))) CHECK(w == 0.001953125);
}

TEST_CASE("report_B72: attention and its gradient have the same bits every time") {
  tests::report("flash-attention#2481");
  manual_seed(3);
  Tensor q = drawn({2, 4, 70, 8}, DType::f32), k = drawn({2, 2, 90, 8}, DType::f32), v = drawn({2, 2, 90, 8}, DType::f32);
  std::vector<Doubles> first;
  for (int n : {1, 2, 3}) {
    const tests::Threads threads(n);
    Tensor a = q.clone().requires_grad_(), b = k.clone().requires_grad_(), c = v.clone().requires_grad_();
    Tensor y = scaled_dot_product_attention(a, b, c, {}, {.causal = true});
    sum(y * y).backward();
    std::vector<Doubles> now{values(y), values(a.grad()), values(b.grad()), values(c.grad())};
    if (n == 1) first = now;
    CHECK(now == first);
  }
}

TEST_CASE("dropout of weights has the mean of none, and its gradient the same holes") {
  manual_seed(4);
  Tensor q = zeros({1, 1, 400, 2}), k = zeros({1, 1, 50, 2}), v = ones({1, 1, 50, 1}, {.requires_grad = true});
  Tensor y = scaled_dot_product_attention(q, k, v, {}, {.dropout = .4});
  CHECK(std::abs(y.mean().item() - 1) < .02);
  for (double x : values(y)) CHECK(std::abs(x * 50 * .6 - std::round(x * 50 * .6)) < 1e-3);  // a count of kept weights
  y.sum().backward();
  CHECK(std::abs(sum(v.grad()).item() - sum(y).item()) < .05);
  CHECK(values(scaled_dot_product_attention(q, k, v, {}, {.dropout = 1})) == Doubles(400, 0.0));
}

TEST_CASE("heads that are views of one tensor: results and gradients become rows again without a copy") {
  manual_seed(6);
  const int64_t b = 2, t = 5, h = 4, g = 2, d = 3;
  for (bool batch_first : {true, false}) {
    auto heads = [&](const Tensor& x, int64_t n) {
      Tensor y = x.reshape({x.size(0), x.size(1), n, d});
      return batch_first ? y.transpose(1, 2) : y.permute({1, 2, 0, 3});
    };
    auto attended = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
      return scaled_dot_product_attention(heads(q, h), heads(k, g), heads(v, g), {}, {.causal = true});
    };
    Shape rows = batch_first ? Shape{b, t, (h + 2 * g) * d} : Shape{t, b, (h + 2 * g) * d};
    Tensor x = drawn(rows, DType::f64).requires_grad_();
    auto parts = split(x, {h * d, g * d, g * d}, -1);
    Tensor y = attended(parts[0], parts[1], parts[2]);
    Tensor back = batch_first ? y.transpose(1, 2) : y.permute({2, 0, 1, 3});
    CHECK(back.is_contiguous());
    auto got = grad({sum(y * y)}, std::vector<Tensor>{x});
    CHECK(got[0].body()->is_view);  // of the kernel's own result
    CHECK(got[0].is_contiguous());
    std::vector<Tensor> leaves;
    for (auto& p : parts) leaves.push_back(p.detach().clone().requires_grad_());
    Tensor apart = attended(leaves[0], leaves[1], leaves[2]);
    CHECK(values(apart) == values(y));
    CHECK(values(got[0]) == values(cat(grad({sum(apart * apart)}, leaves), -1)));
  }
}

TEST_CASE("heads that are views of a part of one tensor have gradients of their own") {
  manual_seed(7);
  const int64_t b = 3, t = 7, h = 2, d = 3, width = 3 * h * d;
  for (int cut : {0, 1, 2}) {  // fewer queries, fewer columns, fewer of both than the tensor has
    const Tensor whole = drawn({b, cut == 1 ? t : t + 2, cut == 0 ? width : width + 4}, DType::f64);
    const Tensor x = whole.slice(1, 0, t).slice(2, 0, width).detach().requires_grad_();
    auto attended = [&](const std::vector<Tensor>& parts) {
      auto heads = [&](const Tensor& p) { return p.reshape({b, t, h, d}).transpose(1, 2); };
      return scaled_dot_product_attention(heads(parts[0]), heads(parts[1]), heads(parts[2]));
    };
    const Tensor y = attended(split(x, {h * d, h * d, h * d}, -1));
    std::vector<Tensor> leaves;
    for (auto& p : split(x.detach(), {h * d, h * d, h * d}, -1)) leaves.push_back(p.clone().requires_grad_());
    const Tensor apart = attended(leaves);
    CHECK(values(apart) == values(y));
    CHECK(values(grad({sum(y * y)}, {x})[0]) == values(cat(grad({sum(apart * apart)}, leaves), -1)));
  }
}

TEST_CASE("attention without heads, and a mask that is learned") {
  manual_seed(5);
  Tensor q = drawn({2, 5, 3}), k = drawn({2, 6, 3}), v = drawn({2, 6, 4}), mask = drawn({2, 5, 6});
  Tensor y = scaled_dot_product_attention(q, k, v, mask, {.causal = true});
  CHECK(y.shape() == Shape{2, 5, 4});
  CHECK(farthest(y, squeeze(scaled_dot_product_attention(unsqueeze(q, 1), unsqueeze(k, 1), unsqueeze(v, 1), unsqueeze(mask, 1), {.causal = true}), 1)) == 0);
  auto g = [](const std::vector<Tensor>& in) {
    return std::vector{scaled_dot_product_attention(in[0], in[1], in[2], in[3], {.scale = .7})};
  };
  std::vector<Tensor> leaves;
  for (auto& x : {q, k, v, drawn({5, 6})}) leaves.push_back((x * .5).detach().requires_grad_());  // the mask is shared by the batch
  CHECK(gradcheck_report(g, leaves, {.rtol = 1e-5, .atol = 1e-6}) == "");
  tests::count("gradchecks");
}

TEST_CASE("attention under autocast: a floating mask goes along, a bool one passes through") {
  Tensor q = drawn({1, 2, 3, 4}, DType::f32), mask = where(gt(drawn({3, 3}), 0), zeros({3, 3}), -INFINITY);
  for (DType low : {DType::bf16, DType::f16}) {
    amp::Autocast region({.dtype = low});
    CHECK(scaled_dot_product_attention(q, q, q).dtype() == low);
    Tensor a = scaled_dot_product_attention(q, q, q, mask), b = scaled_dot_product_attention(q, q, q, eq(mask, 0));
    CHECK(a.dtype() == low);
    CHECK(values(a) == values(b));
  }
}

TEST_CASE("errors of attention") {
  Tensor q = f({2, 4, 3, 5}), k = f({2, 2, 7, 5}), v = f({2, 2, 7, 6});
  auto sdpa = scaled_dot_product_attention;
  TEXT(sdpa(q, f({2, 2, 7, 4}), v, {}, {}),
       "attention: expected q [b, h, t, d], k [b, g, s, d] and v [b, g, s, e], got [2, 4, 3, 5] (f32), [2, 2, 7, 4] (f32) and [2, 2, 7, 6] (f32)");
  TEXT(sdpa(q, f({7, 5}), v, {}, {}),
       "attention: expected q [b, h, t, d], k [b, g, s, d] and v [b, g, s, e], got [2, 4, 3, 5] (f32), [7, 5] (f32) and [2, 2, 7, 6] (f32)");
  TEXT(sdpa(q, f({2, 3, 7, 5}), f({2, 3, 7, 6}), {}, {}), "attention: 4 heads of q cannot share 3 of k");
  TEXT(sdpa(q, k.to(DType::f16), v, {}, {}), "attention: expected q, k and v of one floating dtype, got f32, f16 and f32; cast with to() or use amp::Autocast");
  TEXT(sdpa(q, k, v, f({3, 6}), {}), "attention: shapes [3, 6] and [2, 4, 3, 7] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(sdpa(q, k, v, f({5, 2, 4, 3, 7}), {}), "attention: cannot broadcast mask [5, 2, 4, 3, 7] (f32) to [2, 4, 3, 7]");
  TEXT(sdpa(q, k, v, zeros({3, 7}, {.dtype = DType::i64}), {}), "attention: expected a bool or floating mask [2, 4, 3, 7], got [2, 4, 3, 7] (i64)");
  TEXT(sdpa(q, k, v, {}, {.dropout = 2}), "attention: expected dropout in [0, 1], got 2");
  TEXT(sdpa(undefined, k, v, {}, {}), "attention: q, k or v is undefined");
  TEXT(call(op::attention, {q, k, v}, Attrs::of(AttentionAttrs{1, .5, false})), "attention: expected a key [2] (i64) with dropout, and none without");
}
