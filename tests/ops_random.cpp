// Draws: their distributions, what a key determines, streams that never overlap, and error texts.
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

// How many of n draws with probability p fall within five standard deviations.
bool likely(double count, double n, double p) { return std::abs(count - n * p) <= 5 * std::sqrt(n * p * (1 - p)) + 1e-9; }

}  // namespace

TEST_CASE("dropout keeps a share of elements and scales them; the gradient has the same holes") {
  manual_seed(1);
  for (double p : {0.1, 0.5, 0.75})
    for (DType t : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
      Tensor x = full({10000}, 2, {.dtype = t, .requires_grad = true}), y = dropout(x, p);
      y.sum().backward();
      auto v = values(y), g = values(x.grad());
      double kept = 0, scale = full({}, 2, {.dtype = t}).item() / (1 - p);
      for (size_t i = 0; i < v.size(); ++i) {
        kept += v[i] != 0;
        if (v[i] != 0) CHECK(std::abs(v[i] - scale) <= 0x1p-7 * scale);
        if ((v[i] == 0) != (g[i] == 0)) FAIL("element " << i);
      }
      CHECK(likely(kept, 10000, 1 - p));
    }
}

TEST_CASE("dropout of nothing, of everything, and outside training") {
  Tensor x = tensor<double>({1, std::nan(""), INFINITY}).requires_grad_();
  CHECK(dropout(x, 0).body() == x.body());
  CHECK(dropout(x, .5, false).body() == x.body());
  Tensor y = dropout(x, 1);
  CHECK(values(y) == Doubles{0, 0, 0});  // dropped, not multiplied
  y.sum().backward();
  CHECK(values(x.grad()) == Doubles{0, 0, 0});
  CHECK(dropout(zeros({0, 3}), .5).shape() == Shape{0, 3});
}

TEST_CASE("dropout of channels drops them whole") {
  manual_seed(2);
  Tensor y = dropout2d(f({40, 25, 3, 5}), .3).reshape({1000, 15});
  auto sums = values(sum(y, {1}));
  double kept = 0;
  for (double s : sums) {
    CHECK((s == 0 || std::abs(s - 15 / .7) < 1e-4));
    kept += s != 0;
  }
  CHECK(likely(kept, 1000, .7));
  for (double s : values(sum(dropout1d(f({7, 9}), .5), {1}))) CHECK((s == 0 || s == 18));
  CHECK(dropout1d(f({2, 3, 4})).shape() == Shape{2, 3, 4});
  CHECK(dropout2d(f({3, 4, 0})).shape() == Shape{3, 4, 0});
  // The same draws for a view as for its copy.
  Tensor x = randn({6, 5, 4}).permute({2, 0, 1});
  manual_seed(3);
  Tensor of_view = dropout1d(x, .5);
  manual_seed(3);
  CHECK(values(of_view) == values(dropout1d(x.clone(), .5)));
}

TEST_CASE("report_B77: no two draws share a number, and a stream advances by what it used") {
  tests::report("pytorch#50110");
  manual_seed(4);
  Tensor state = generator().state(Device::cpu());
  auto offset = [&] { return state.to_vector<int64_t>()[1]; };
  auto mask = [](int64_t n) {
    std::vector<bool> kept;
    for (double v : values(dropout(ones({n}), .5))) kept.push_back(v != 0);
    return kept;
  };
  auto first = mask(4096), second = mask(4096);
  CHECK(first != second);
  CHECK(offset() == 2048);
  mask(5);
  CHECK(offset() == 2050);
  bernoulli(full({9}, .5));
  CHECK(offset() == 2053);
  randint(0, 10, {7});  // two words each
  CHECK(offset() == 2057);
  multinomial(ones({3, 5}), 2);
  CHECK(offset() == 2057 + 8);
  dropout2d(ones({2, 3, 4, 4}), .5);
  CHECK(offset() == 2057 + 8 + 2);
  // Neither do parts of one mask repeat at any distance of blocks.
  for (size_t distance : {size_t{4}, size_t{8}, size_t{128}, size_t{256}, size_t{1024}}) {
    int equal = 0;
    for (size_t i = 0; i + distance < first.size(); ++i) equal += first[i] == first[i + distance];
    CHECK(likely(equal, static_cast<double>(first.size() - distance), .5));
  }
  // After more than 2^32 draws the counter has no period.
  Tensor early = tensor<int64_t>({4, 0}), late = tensor<int64_t>({4, int64_t{1} << 32});
  Attrs half = Attrs::of(DropoutAttrs{.5, 1});
  CHECK(values(call(op::dropout, {ones({256}), early}, half)) != values(call(op::dropout, {ones({256}), late}, half)));
  auto big = draw_key(Device::cpu(), int64_t{1} << 34).to_vector<int64_t>();
  CHECK(offset() == big[1] + (int64_t{1} << 32));
}

TEST_CASE("bernoulli") {
  manual_seed(5);
  Tensor p = expand(tensor<double>({0, .2, .5, 1}), {5000, 4});
  auto counts = values(sum(bernoulli(p), {0}));
  CHECK(counts[0] == 0);
  CHECK(likely(counts[1], 5000, .2));
  CHECK(likely(counts[2], 5000, .5));
  CHECK(counts[3] == 5000);
  CHECK(bernoulli(full({3}, 1, {.dtype = DType::bf16})).dtype() == DType::bf16);
  CHECK(!bernoulli(full({3}, .5, {.requires_grad = true})).requires_grad());
}

TEST_CASE("randint reaches every value of ranges of any size, equally often") {
  manual_seed(6);
  std::vector<double> seen(6);
  for (auto v : randint(-2, 4, {60000}).to_vector<int64_t>()) ++seen.at(static_cast<size_t>(v + 2));
  for (double n : seen) CHECK(likely(n, 60000, 1 / 6.0));
  // Above 2^24 values a float's bits would leave gaps: the low bits must vary, too.
  auto wide = randint(0, int64_t{1} << 40, {20000}).to_vector<int64_t>();
  for (int bit = 0; bit < 40; ++bit) {
    double on = 0;
    for (auto v : wide) on += v >> bit & 1;
    INFO("bit " << bit);
    CHECK(likely(on, 20000, .5));
  }
  auto all = randint(smallest<int64_t>, largest<int64_t>, {1000}).to_vector<int64_t>();
  CHECK(std::count_if(all.begin(), all.end(), [](int64_t v) { return v < 0; }) > 400);
  for (auto v : randint(largest<int64_t> - 1, largest<int64_t>, {10}).to_vector<int64_t>()) CHECK(v == largest<int64_t> - 1);
  auto odd = randint(0, 3'000'000'001, {30000}).to_vector<int64_t>();
  double low = 0;
  for (auto v : odd) {
    CHECK((v >= 0 && v < 3'000'000'001));
    low += v < 1'000'000'000;
  }
  CHECK(likely(low, 30000, 1 / 3.0));
  CHECK(randint(0, 9, {2, 3}, {.dtype = DType::f32}).dtype() == DType::f32);
}

TEST_CASE("multinomial draws in proportion") {
  manual_seed(7);
  Tensor w = tensor<double>({1, 0, 3, 6});
  for (bool replacement : {true, false}) {
    std::vector<double> seen(4);
    Tensor many = expand(w, {8000, 4});
    for (auto v : multinomial(many, 1, {.replacement = replacement}).to_vector<int64_t>()) ++seen.at(static_cast<size_t>(v));
    CHECK(likely(seen[0], 8000, .1));
    CHECK(seen[1] == 0);
    CHECK(likely(seen[2], 8000, .3));
    CHECK(likely(seen[3], 8000, .6));
  }
  // Without replacement: distinct, and the second follows the first.
  double second = 0, first = 0;
  Tensor pairs = multinomial(expand(w, {8000, 4}), 2);
  auto v = pairs.to_vector<int64_t>();
  for (size_t i = 0; i < v.size(); i += 2) {
    CHECK(v[i] != v[i + 1]);
    first += v[i] == 3;
    second += v[i] == 3 && v[i + 1] == 2;
  }
  CHECK(likely(second, first, .75));
  auto all = multinomial(w, 3).to_vector<int64_t>();
  std::sort(all.begin(), all.end());
  CHECK(all == std::vector<int64_t>{0, 2, 3});
  // A table longer than a chunk, with weight at its far end.
  Tensor far = zeros({1000}, {.dtype = DType::f32});
  far.slice(0, 300, 301).fill_(1);
  far.slice(0, 999, 1000).fill_(3);
  double end = 0;
  for (auto i : multinomial(far, 4000, {.replacement = true}).to_vector<int64_t>()) {
    CHECK((i == 300 || i == 999));
    end += i == 999;
  }
  CHECK(likely(end, 4000, .75));
  CHECK(multinomial(f({2, 3}), 0).shape() == Shape{2, 0});
  CHECK(multinomial(f({0, 3}), 2).shape() == Shape{0, 2});
}

TEST_CASE("errors of draws") {
  TEXT(dropout(f({2}), 1.5), "dropout: expected p in [0, 1], got 1.5");
  TEXT(dropout(f({2}), std::nan("")), "dropout: expected p in [0, 1], got nan");
  TEXT(dropout(i64({2})), "dropout: expected a floating dtype, got [2] (i64)");
  TEXT(dropout(undefined), "dropout: x is undefined");
  TEXT(dropout1d(f({2})), "dropout1d: expected x [n, c, l] or [c, l], got [2] (f32)");
  TEXT(dropout2d(f({2, 2})), "dropout2d: expected x [n, c, h, w] or [c, h, w], got [2, 2] (f32)");
  TEXT(dropout2d(undefined), "dropout2d: x is undefined");
  TEXT(call(op::dropout, {f({2}), i64({3})}, Attrs::of(DropoutAttrs{.5, 1})), "dropout: expected a key [2] (i64), got [3] (i64)");
  TEXT(bernoulli(i64({2})), "bernoulli: expected probabilities of a floating dtype, got [2] (i64)");
  TEXT(bernoulli(undefined), "bernoulli: p is undefined");
  TEXT(randint(4, 3, {2}), "randint: expected low < high, got 4 and 3");
  TEXT(multinomial(f({}), 1), "multinomial: expected weights [n] or [m, n] of a floating dtype, got [] (f32)");
  TEXT(multinomial(i64({3}), 1), "multinomial: expected weights [n] or [m, n] of a floating dtype, got [3] (i64)");
  TEXT(multinomial(f({3}), 4), "multinomial: cannot draw 4 of 3 elements without replacement");
  TEXT(multinomial(f({3}), -1), "multinomial: cannot draw -1 of 3 elements");
  TEXT(multinomial(f({0}), 1, {.replacement = true}), "multinomial: cannot draw 1 of 0 elements");
  TEXT(multinomial(tensor<double>({1, -1}), 1), "multinomial: expected finite weights of 0 or more, got -1 at 1 of row 0");
  TEXT(multinomial(tensor<double>({1, INFINITY}), 1), "multinomial: expected finite weights of 0 or more, got inf at 1 of row 0");
  TEXT(multinomial(tensor<double>({{1, 1}, {0, 0}}), 1), "multinomial: row 1 has 0 positive weights, expected at least 1");
  TEXT(multinomial(tensor<double>({1, 0, 1}), 3), "multinomial: row 0 has 2 positive weights, expected at least 3");
  TEXT(multinomial(undefined, 1), "multinomial: weights is undefined");
}

TEST_CASE("each row of multinomial draws for itself") {
  manual_seed(4);
  for (bool replacement : {true, false}) {
    Tensor drawn = multinomial(ones({20, 500}), 4, {.replacement = replacement});
    auto row = [&](int64_t r) { return drawn.slice(0, r, r + 1).to_vector<int64_t>(); };
    for (int64_t a = 0; a < 20; ++a)
      for (int64_t b = 0; b < a; ++b) CHECK(row(a) != row(b));
  }
}
