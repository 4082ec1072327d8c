// Index operators against loops written here, indices that repeat or leave their range, and their error texts.
#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

namespace {

using Doubles = std::vector<double>;
using Indices = std::vector<int64_t>;

Tensor f(const Shape& s) { return ones(s); }
Tensor i64(const Shape& s) { return zeros(s, {.dtype = DType::i64}); }
Doubles values(const Tensor& t) { return t.to_vector<double>(); }
const Tensor undefined;

struct Random {  // a linear congruential generator (Knuth, MMIX)
  uint64_t state;
  uint64_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 33;
  }
  Tensor numbers(const Shape& s, DType t) {
    Doubles v(static_cast<size_t>(s.numel()));
    for (auto& x : v) x = static_cast<double>(next() % 2001) / 500 - 2;
    return tensor(v).reshape(s).to(t);
  }
  Tensor indices(const Shape& s, int64_t limit) {
    Indices v(static_cast<size_t>(s.numel()));
    for (auto& x : v) x = static_cast<int64_t>(next() % static_cast<uint64_t>(limit));
    return tensor(v).reshape(s);
  }
};

// Row-major places of the elements of a 3-d shape.
struct Place { int64_t c[3]; };
template <class F> void each(const Shape& s, F f) {
  for (int64_t i = 0; i < s[0]; ++i)
    for (int64_t j = 0; j < s[1]; ++j)
      for (int64_t k = 0; k < s[2]; ++k) f(Place{{i, j, k}});
}
size_t at(const Shape& s, const Place& p) { return static_cast<size_t>((p.c[0] * s[1] + p.c[1]) * s[2] + p.c[2]); }

void same(const Tensor& got, const Doubles& expected, double tolerance = 0) {
  auto v = values(got);
  REQUIRE(v.size() == expected.size());
  double worst = 0;
  for (size_t i = 0; i < v.size(); ++i) worst = std::max(worst, std::abs(v[i] - expected[i]) - tolerance * (1 + std::abs(expected[i])));
  CHECK(worst <= 0);
  tests::count("oracle_combinations");
}

}  // namespace

TEST_CASE("gather, scatter and scatter_add are loops over the index") {
  Random random{1};
  for (int dim : {0, 1, 2})
    for (DType t : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32})
      for (auto [s, m] : {std::pair{Shape{3, 4, 5}, 9}, {Shape{2, 1, 33}, 1}, {Shape{5, 7, 1}, 40}, {Shape{1, 1, 3}, 200}}) {
        Shape is = s;
        is[static_cast<size_t>(dim)] = m;
        Tensor x = random.numbers(s, t), index = random.indices(is, s[static_cast<size_t>(dim)]), source = random.numbers(is, t);
        auto xv = values(x), sv = values(source);
        auto iv = index.to_vector<int64_t>();
        Doubles gathered(iv.size()), scattered = xv, added = xv;
        each(is, [&](Place p) {
          size_t e = at(is, p);
          p.c[dim] = iv[e];
          gathered[e] = xv[at(s, p)];
          scattered[at(s, p)] = sv[e];
          added[at(s, p)] += sv[e];
        });
        INFO("dim " << dim << ", " << str(t) << ", " << str(s));
        same(gather(x, dim, index), gathered);
        same(gather(x, dim - 3, index.to(DType::i32)), gathered);
        same(scatter(x, dim, index, source), scattered);
        double unit = t == DType::bf16 ? 0x1p-8 : t == DType::f16 ? 0x1p-11 : t == DType::f32 ? 0x1p-20 : 0x1p-50;
        same(scatter_add(x, dim, index, source), added, t == DType::i32 ? 0 : unit);
      }
}

TEST_CASE("a source may be larger than its index") {
  Tensor x = zeros({3, 2}), index = tensor<int64_t>({2, 0}).reshape({2, 1}), source = tensor<double>({1, 2, 3, 4, 5, 6}).reshape({3, 2}).to(DType::f32);
  same(scatter(x, 0, index, source), {3, 0, 0, 0, 1, 0});
  same(scatter_add(x, 0, index, source), {3, 0, 0, 0, 1, 0});
  same(scatter(x, 0, index, 7), {7, 0, 0, 0, 7, 0});
  Tensor s = ones({3, 2}, {.requires_grad = true});
  scatter_add(x, 0, index, s).sum().backward();
  same(s.grad(), {1, 0, 1, 0, 0, 0});
}

TEST_CASE("where an index repeats, scatter keeps the last element and its gradient") {
  Tensor x = ones({3}, {.requires_grad = true}), source = tensor<double>({1, 2, 3, 4}).to(DType::f32).requires_grad_();
  Tensor y = scatter(x, 0, tensor<int64_t>({1, 1, 2, 1}), source);
  same(y, {1, 4, 3});
  (y * tensor<float>({10, 20, 30})).sum().backward();
  same(x.grad(), {10, 0, 0});
  same(source.grad(), {0, 0, 30, 20});
}

TEST_CASE("slices by index") {
  Random random{2};
  for (int dim : {0, 1, 2})
    for (DType t : {DType::f16, DType::f32, DType::f64, DType::i64})
      for (auto [s, m] : {std::pair{Shape{3, 4, 5}, 7}, {Shape{2, 3, 16}, 40}, {Shape{33, 2, 1}, 1}, {Shape{4, 4, 4}, 0}}) {
        Shape is = s;
        is[static_cast<size_t>(dim)] = m;
        Tensor x = random.numbers(s, t), index = random.indices({m}, s[static_cast<size_t>(dim)]), source = random.numbers(is, t);
        auto xv = values(x), sv = values(source);
        auto iv = index.to_vector<int64_t>();
        Doubles selected(sv.size()), added = xv;
        each(is, [&](Place p) {
          size_t e = at(is, p);
          p.c[dim] = iv[static_cast<size_t>(p.c[dim])];
          selected[e] = xv[at(s, p)];
          added[at(s, p)] += 2 * sv[e];
        });
        INFO("dim " << dim << ", " << str(t) << ", " << str(s));
        same(index_select(x, dim, index), selected);
        double unit = t == DType::f16 ? 0x1p-9 : t == DType::f32 ? 0x1p-20 : 0x1p-50;
        same(index_add(x, dim, index, source, 2), added, t == DType::i64 ? 0 : unit);
      }
  Tensor x = arange(6).reshape({2, 3});
  same(take(x, tensor<int64_t>({5, 0, 5}).reshape({3, 1})), {5, 0, 5});
  CHECK(take(x, i64({2, 0})).shape() == Shape{2, 0});
}

TEST_CASE("sums of 16-bit elements by index do not saturate") {
  for (DType t : {DType::f16, DType::bf16}) {
    Tensor many = ones({4096}, {.dtype = t}), where = i64({4096});
    CHECK(scatter_add(zeros({1}, {.dtype = t}), 0, where, many).item() == 4096);
    CHECK(index_add(zeros({1}, {.dtype = t}), 0, where, many).item() == 4096);
    Tensor w = zeros({2, 1}, {.dtype = t, .requires_grad = true});
    embedding(w, where).sum().backward();
    CHECK(values(w.grad())[0] == 4096);
  }
}

TEST_CASE("embedding reads rows; a padding row is read and gets no gradient") {
  Tensor w = tensor<double>({0, 1, 2, 3, 4, 5}).reshape({3, 2}).requires_grad_();
  Tensor index = tensor<int32_t>({2, 0, 2, 1}).reshape({2, 2});
  Tensor y = embedding(w, index, {.padding_idx = -1});
  CHECK(y.shape() == Shape{2, 2, 2});
  same(y, {4, 5, 0, 1, 4, 5, 2, 3});
  y.sum().backward();
  same(w.grad(), {1, 1, 1, 1, 0, 0});
  w.zero_grad();
  embedding(w, index).sum().backward();
  same(w.grad(), {1, 1, 1, 1, 2, 2});
  CHECK(embedding(w, i64({0, 3})).shape() == Shape{0, 3, 2});
}

TEST_CASE("under autocast embedding gives 16-bit rows and an f32 gradient that was never rounded to 16 bits") {
  Tensor w = ones({1, 1}, {.requires_grad = true});
  Tensor y;
  {
    amp::Autocast region({.dtype = DType::bf16});
    y = embedding(w, i64({1000}));
  }
  CHECK(y.dtype() == DType::bf16);
  y.sum().backward();
  CHECK(w.grad().dtype() == DType::f32);
  CHECK(w.grad().item() == 1000);  // bf16 would say 1000 as well
  Tensor v = ones({1, 1}, {.requires_grad = true});
  {
    amp::Autocast region({.dtype = DType::bf16});
    y = embedding(v, i64({1001}));
  }
  y.sum().backward();
  CHECK(v.grad().item() == 1001);  // bf16 has 1000 and 1004
}

TEST_CASE("nonzero and masked_select") {
  Tensor x = tensor<double>({0, 1, 0, -2, std::nan(""), 0}).reshape({2, 3});
  Tensor at = nonzero(x);
  CHECK(at.shape() == Shape{3, 2});
  same(at, {0, 1, 1, 0, 1, 1});
  CHECK(nonzero(zeros({3})).shape() == Shape{0, 1});
  CHECK(nonzero(tensor(1.0)).shape() == Shape{1, 0});
  CHECK(nonzero(tensor(0.0)).shape() == Shape{0, 0});
  CHECK(nonzero(zeros({0, 4})).shape() == Shape{0, 2});
  Tensor w = tensor<double>({1, 2, 3, 4, 5, 6}).reshape({2, 3}).requires_grad_();
  Tensor picked = masked_select(w, gt(w, 2.5));
  same(picked, {3, 4, 5, 6});
  auto g = grad({sum(picked * picked)}, {w}, {.create_graph = true})[0];
  same(g, {0, 0, 6, 8, 10, 12});
  same(grad({sum(g * g)}, std::vector<Tensor>{w})[0], {0, 0, 24, 32, 40, 48});
  same(masked_select(w, tensor({true, false, true})), {1, 3, 4, 6});
  CHECK(masked_select(w, gt(w, 100)).shape() == Shape{0});
  same(masked_select(tensor<double>({1, 2, 3}), tensor({true, false}).reshape({2, 1})), {1, 2, 3});
}

TEST_CASE("operators whose results' sizes are values refuse where the host may not wait") {
  Tensor x = ones({3}), mask = gt(x, 0);
  ForbidSync none;
  CHECK_THROWS_WITH(nonzero(x), Catch::Contains("nonzero"));
  CHECK_THROWS_WITH(masked_select(x, mask), Catch::Contains("masked_select"));
}

TEST_CASE("report_B23: a row far away reads and writes as the first does") {
  tests::report("pytorch#192007");
  Tensor w = randn({70000, 4});
  w.slice(0, 69999, {}).copy_(w.slice(0, 0, 1));
  Tensor last = tensor<int64_t>({69999}), first = tensor<int64_t>({0});
  CHECK(values(index_select(w, 0, last)) == values(index_select(w, 0, first)));
  CHECK(values(embedding(w, last)) == values(embedding(w, first)));
  CHECK(values(gather(w, 0, full({1, 4}, 69999, {.dtype = DType::i64}))) == values(w.slice(0, 0, 1)));
}

TEST_CASE("report_B38: gather with a new middle dimension equals gather of a copy") {
  tests::report("mlx#4253");
  Random random{3};
  Tensor x = unsqueeze(random.numbers({4, 6}, DType::f32), 1), index = random.indices({4, 1, 9}, 6);
  CHECK(values(gather(x, 2, index)) == values(gather(x.clone(), 2, index)));
  Tensor wide = expand(x, {4, 3, 6}), many = expand(index, {4, 3, 9});
  CHECK(values(gather(wide, 2, many)) == values(gather(wide.clone(), 2, many.clone())));
  CHECK(values(scatter_add(wide, 2, many, ones({4, 3, 9}))) == values(scatter_add(wide.clone(), 2, many.clone(), ones({4, 3, 9}))));
}

TEST_CASE("errors of indices") {
  Tensor three = tensor<int64_t>({0, 3}), below = tensor<int64_t>({0, -1});
  TEXT(gather(f({3}), 0, three), "gather: index 3 at 1 is out of range for 3");
  TEXT(gather(f({3}), 0, below), "gather: index -1 at 1 is out of range for 3");
  TEXT(scatter(f({3}), 0, three, 1), "scatter: index 3 at 1 is out of range for 3");
  TEXT(scatter(f({3}), 0, below, f({2})), "scatter: index -1 at 1 is out of range for 3");
  TEXT(scatter_add(f({3}), 0, three, f({2})), "scatter_add: index 3 at 1 is out of range for 3");
  TEXT(index_select(f({3, 2}), 0, three), "index_select: index 3 at 1 is out of range for 3");
  TEXT(index_select(f({3, 2}), 0, below), "index_select: index -1 at 1 is out of range for 3");
  TEXT(index_add(f({3}), 0, three, f({2})), "index_add: index 3 at 1 is out of range for 3");
  TEXT(take(f({3}), three), "index_select: index 3 at 1 is out of range for 3");
  TEXT(embedding(f({3, 2}), three), "embedding: index 3 at 1 is out of range for 3");
  TEXT(embedding(f({0, 2}), i64({1})), "embedding: index 0 at 0 is out of range for 0");
  TEXT(call(op::embedding_grad, {f({2, 4}), three}, Attrs::of(EmbeddingAttrs{3, -1})), "embedding: index 3 at 1 is out of range for 3");
  TEXT(gather(f({3}), 0, f({2})), "gather: expected an index of i64 or i32, got [2] (f32)");
  TEXT(gather(f({3}), 1, i64({2})), "gather: dim 1 is out of range for a tensor of 1 dimensions; expected -1 to 0");
  TEXT(gather(f({}), 0, i64({2})), "gather: a 0-d tensor has no dimension to index");
  TEXT(gather(f({3, 2}), 0, i64({4})),
       "gather: expected an index of as many dimensions as x [3, 2] (f32) and no larger but in dimension 0, got [4] (i64)");
  TEXT(gather(f({3, 2}), 0, i64({1, 3})),
       "gather: expected an index of as many dimensions as x [3, 2] (f32) and no larger but in dimension 0, got [1, 3] (i64)");
  TEXT(gather(undefined, 0, i64({1})), "gather: x is undefined");
  TEXT(gather(f({1}), 0, undefined), "gather: the index is undefined");
  TEXT(scatter(f({3}), 0, i64({2}), f({1})), "scatter: expected a source no smaller than the index [2], got [1] (f32)");
  TEXT(scatter(f({3}), 0, i64({2}), undefined), "scatter: the source is undefined");
  TEXT(scatter_add(f({3}), 0, i64({2}), f({2}).to(DType::f64)), "scatter_add: expected source [2] (f32), got [2] (f64)");
  TEXT(index_select(f({3}), 0, i64({2, 1})), "index_select: expected an index [n] (i64), got [2, 1] (i64)");
  TEXT(index_select(f({}), 0, i64({1})), "index_select: a 0-d tensor has no dimension to index");
  TEXT(index_add(f({3, 2}), 0, i64({2}), f({3, 2})), "index_add: expected source [2, 2] (f32), got [3, 2] (f32)");
  TEXT(index_add(f({3, 2}), 0, i64({2}), undefined), "index_add: the source is undefined");
  TEXT(take(f({3}), f({1})), "take: expected an index of i64 or i32, got [1] (f32)");
  TEXT(take(undefined, i64({1})), "take: x is undefined");
  TEXT(embedding(f({3}), i64({1})), "embedding: expected weight [rows, width], got [3] (f32)");
  TEXT(embedding(i64({3, 2}), i64({1})), "embedding: expected weight [rows, width] of a floating dtype, got [3, 2] (i64)");
  TEXT(embedding(f({3, 2}), f({1})), "embedding: expected an index of i64 or i32, got [1] (f32)");
  TEXT(embedding(f({3, 2}), i64({1}), {.padding_idx = 3}), "embedding: padding_idx 3 is out of range for 3 rows");
  TEXT(embedding(undefined, i64({1})), "embedding: weight is undefined");
  TEXT(nonzero(undefined), "nonzero: x is undefined");
  TEXT(masked_select(f({3}), f({3})), "masked_select: expected a bool mask, got f32");
  TEXT(masked_select(f({3}), gt(f({2}), 0)), "masked_select: shapes [3] and [2] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(masked_select(undefined, gt(f({2}), 0)), "masked_select: x or mask is undefined");
}

TEST_CASE("on a GPU an index out of range gives NaN, touches nothing else, and throws at the next wait") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device");
  const Device gpu = Device::cuda();
  Tensor bad = tensor<int64_t>({1, 7, 0}).to(gpu), x = ones({3}).to(gpu);
  auto throws = [](const Tensor& y, const char* text) { CHECK_THROWS_WITH(y.to_vector<double>(), Catch::Contains(text)); };
  Tensor y = gather(x, 0, bad);
  throws(y, "gather: index 7 at 1 is out of range for 3");
  auto v = values(y);
  CHECK((v[0] == 1 && std::isnan(v[1]) && v[2] == 1));
  throws(index_select(x, 0, bad), "index_select: index 7 at 1 is out of range for 3");
  throws(embedding(ones({3, 8}).to(gpu), bad), "embedding: index 7 at 1 is out of range for 3");
  CHECK_THROWS_AS(scatter_add(x, 0, bad, x).to_vector<double>(), Error);  // one wait for each: it tells of the first only
  CHECK_THROWS_AS(index_add(x, 0, bad, x).to_vector<double>(), Error);
  Tensor sums = scatter_add(x, 0, bad, x);
  throws(sums, "scatter_add: index 7 at 1 is out of range for 3");
  CHECK(values(sums) == Doubles{2, 2, 1});
  throws(scatter(x, 0, bad, 5), "scatter: index 7 at 1 is out of range for 3");
}

TEST_CASE("on a GPU sums by index have the CPU's values for runs of any length, and the same bits every time") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device");
  const Device gpu = Device::cuda();
  Random random{11};
  for (auto [n, rows, width] : {std::array<int64_t, 3>{1, 1, 1}, {63, 2, 3}, {64, 1, 1}, {65, 1, 5}, {1000, 3, 17}, {5000, 4000, 8}, {100000, 2, 1}})
    for (DType t : {DType::f32, DType::f64, DType::i64}) {
      Tensor index = random.indices({n}, rows), source = random.numbers({n, width}, t), x = random.numbers({rows, width}, t);
      Tensor once = index_add(x.to(gpu), 0, index.to(gpu), source.to(gpu)), again = index_add(x.to(gpu), 0, index.to(gpu), source.to(gpu));
      INFO(n << " into " << rows << ", " << str(t));
      CHECK(values(once) == values(again));
      same(once, values(index_add(x, 0, index, source)), t == DType::i64 ? 0 : t == DType::f32 ? 1e-3 : 1e-11);
      Tensor wide = expand(unsqueeze(index, 1), {n, width});
      CHECK(values(scatter(x.to(gpu), 0, wide.to(gpu), source.to(gpu))) == values(scatter(x, 0, wide, source)));
    }
}
