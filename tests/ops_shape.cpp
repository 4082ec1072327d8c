// Views and rearrangements against index arithmetic written here, their gradients, and their error texts.
#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

namespace {

Tensor f(const Shape& s) { return ones(s); }
Tensor numbered(const Shape& s) { return arange(s.numel()).to(DType::f64).reshape(s); }
std::vector<double> values(const Tensor& t) { return t.to_vector<double>(); }
using Doubles = std::vector<double>;

}  // namespace

TEST_CASE("tensors without elements are joined along any dimension") {
  for (int64_t dim : {0, 1, 2}) {
    Tensor x = zeros({3, 0, 2}, {.requires_grad = true}), y = cat({x, x, x}, dim);
    Shape expected{3, 0, 2};
    expected[static_cast<size_t>(dim)] *= 3;
    CHECK(y.shape() == expected);
    CHECK(grad({sum(y)}, {x})[0].shape() == x.shape());
    CHECK(stack({x, x}, dim).size(dim) == 2);
  }
}

TEST_CASE("cat and the scatters write into outputs that have an offset") {
  Tensor whole = full({20}, -1.0), part = whole.as_strided({4, 2}, {2, 1}, 6);
  call_into(op::cat, {numbered({1, 2}).to(DType::f32), numbered({3, 2}).to(DType::f32)}, Attrs::of(int32_t{0}), part);
  CHECK(values(whole) == Doubles{-1, -1, -1, -1, -1, -1, 0, 1, 0, 1, 2, 3, 4, 5, -1, -1, -1, -1, -1, -1});

  // The attributes come from a recorded call, which has them: the gradient of slice and of diagonal, written elsewhere.
  const OpDef& scatter = *find_op("slice_scatter");
  for (auto& s : scatter.samples()) {
    Tensor x = numbered(s.in[0].shape), plain = call(scatter, {x}, s.attrs);
    Tensor room = full({plain.numel() + 9}, 7, {.dtype = DType::f64});
    Tensor into = room.as_strided(plain.shape(), plain.strides(), 5);
    call_into(scatter, {x}, s.attrs, into);
    CHECK(values(into) == values(plain));
    CHECK(sum(room.slice(0, 0, 5)).item() == 35);
    CHECK(sum(room.slice(0, 5 + plain.numel(), {})).item() == 28);
  }
  for (auto& s : op::diagonal_scatter.samples()) {
    Tensor x = numbered(s.in[0].shape), plain = call(op::diagonal_scatter, {x}, s.attrs);
    Tensor room = full({plain.numel() + 9}, 7, {.dtype = DType::f64});
    Tensor into = room.as_strided(plain.shape(), plain.strides(), 5);
    call_into(op::diagonal_scatter, {x}, s.attrs, into);
    CHECK(values(into) == values(plain));
    CHECK(sum(room.slice(0, 0, 5)).item() == 35);
  }
}

TEST_CASE("split, chunk and narrow are views") {
  Tensor x = numbered({7, 2});
  auto parts = split(x, 3);
  REQUIRE(parts.size() == 3);
  CHECK(parts[0].shape() == Shape{3, 2});
  CHECK(parts[2].shape() == Shape{1, 2});
  CHECK(values(parts[1]) == Doubles{6, 7, 8, 9, 10, 11});
  for (auto& p : parts) CHECK(p.storage() == x.storage());
  auto sized = split(x, {2, 0, 5}, 0);
  CHECK(sized[1].shape() == Shape{0, 2});
  CHECK(values(sized[2]) == values(x.slice(0, 2, 7)));
  CHECK(split(zeros({0, 2}), 3).size() == 1);
  CHECK(chunk(x, 3).size() == 3);  // 3, 3 and 1
  CHECK(chunk(x, 5).size() == 4);  // of 2 each
  CHECK(chunk(x, 100).size() == 7);
  CHECK(chunk(x, 2, -1)[1].shape() == Shape{7, 1});
  CHECK(values(narrow(x, 0, 5, 2)) == Doubles{10, 11, 12, 13});
  CHECK(narrow(x, 0, 7, 0).shape() == Shape{0, 2});
  CHECK(values(cat(parts)) == values(x));
}

TEST_CASE("the gradient of split joins those of its parts, with zeros for parts that nobody used") {
  Tensor x = numbered({2, 6}).requires_grad_();
  auto p = split(x, {1, 2, 0, 3}, 1);
  CHECK(values(grad({sum(p[3] * p[3])}, {x}, {.retain_graph = true})[0]) == Doubles{0, 0, 0, 6, 8, 10, 0, 0, 0, 18, 20, 22});
  CHECK(values(grad({sum(p[0]) + sum(p[1] * 2)}, {x}, {.retain_graph = true})[0]) == Doubles{1, 2, 2, 0, 0, 0, 1, 2, 2, 0, 0, 0});
  Tensor first = grad({sum(p[1] * p[1] * p[1])}, {x}, {.create_graph = true})[0];
  CHECK(values(grad({sum(first)}, {x})[0]) == Doubles{0, 6, 12, 0, 0, 0, 0, 42, 48, 0, 0, 0});
  // Gradients that are parts of one tensor, in order, are that tensor; in another order they are not.
  Tensor g = numbered({2, 6}) + 1;
  auto weights = split(g, {2, 2, 2}, 1);
  auto same = split(x, {2, 2, 2}, 1);
  Tensor y = sum(same[0] * weights[0]) + sum(same[1] * weights[1]) + sum(same[2] * weights[2]);
  CHECK(values(grad({y}, {x}, {.retain_graph = true})[0]) == values(g));
  CHECK(values(grad({sum(same[0] * weights[1]) + sum(same[1] * weights[0]) + sum(same[2] * weights[2])}, {x})[0]) ==
        Doubles{3, 4, 1, 2, 5, 6, 9, 10, 7, 8, 11, 12});
}

TEST_CASE("pad puts elements where index arithmetic says") {
  for (PadMode mode : {PadMode::constant, PadMode::reflect, PadMode::replicate})
    for (auto [n, m] : {std::pair<int64_t, int64_t>{2, 5}, {4, 3}, {9, 17}})
      for (int64_t a : {0, 1})
        for (int64_t b : {0, 1, 2}) {
          if (mode == PadMode::reflect && (b >= m || a >= n)) continue;
          Tensor x = numbered({n, m}), y = pad(x, {b, a, a, b >= n ? 0 : b}, {.mode = mode, .value = -5});
          int64_t bottom = b >= n ? 0 : b;
          REQUIRE(y.shape() == Shape{n + a + bottom, m + b + a});
          auto v = values(y);
          auto from = [mode](int64_t i, int64_t size) {
            if (mode == PadMode::replicate) return i < 0 ? 0 : i >= size ? size - 1 : i;
            if (mode == PadMode::reflect) while (i < 0 || i >= size) i = i < 0 ? -i : 2 * size - 2 - i;
            return i;
          };
          bool right = true;
          for (int64_t i = 0; i < y.size(0); ++i)
            for (int64_t j = 0; j < y.size(1); ++j) {
              int64_t p = from(i - a, n), q = from(j - b, m);
              double expected = p < 0 || p >= n || q < 0 || q >= m ? -5 : static_cast<double>(p * m + q);
              right &= v[static_cast<size_t>(i * y.size(1) + j)] == expected;
            }
          CHECK(right);
          halftone::tests::count("oracle_combinations");
        }
  Tensor x = numbered({2, 4});
  CHECK(values(pad(x, {-1, -2})) == Doubles{1, 5});
  CHECK(values(pad(x, {-3, 1}, {.value = 9})) == Doubles{3, 9, 7, 9});
  CHECK(pad(x, {}).storage() == x.storage());
  CHECK(pad(x, {-2, -2}).shape() == Shape{2, 0});
  CHECK(pad(zeros({0, 3}), {1, 1, 2, 0}, {.value = 4}).shape() == Shape{2, 5});
  CHECK(values(pad(tensor({true, false}), {1, 0}, {.value = 1})) == Doubles{1, 1, 0});
  Tensor w = ones({3}, {.dtype = DType::f64, .requires_grad = true});
  CHECK(values(grad({sum(pad(w, {2, 2}, {.mode = PadMode::reflect}) * tensor<double>({1, 2, 4, 8, 16, 32, 64}))}, {w})[0]) == Doubles{4 + 64, 8 + 2 + 32, 16 + 1});
}

TEST_CASE("flip, roll and repeat") {
  Tensor x = numbered({2, 3});
  CHECK(values(flip(x, {0})) == Doubles{3, 4, 5, 0, 1, 2});
  CHECK(values(flip(x, {-1, 0})) == Doubles{5, 4, 3, 2, 1, 0});
  CHECK(values(flip(x.t(), {0})) == Doubles{2, 5, 1, 4, 0, 3});
  CHECK(flip(tensor(3.0), {}).item() == 3);
  CHECK(values(roll(x, {1}, {1})) == Doubles{2, 0, 1, 5, 3, 4});
  CHECK(values(roll(x, {-1, 1}, {1, 0})) == Doubles{4, 5, 3, 1, 2, 0});
  CHECK(values(roll(x, {3000000000001}, {1})) == values(roll(x, {3000000000001 % 3}, {1})));
  CHECK(roll(zeros({0, 2}), {5}, {0}).shape() == Shape{0, 2});
  // mlx: roll and tile shape overflow
  CHECK(values(roll(x, {smallest<int64_t>}, {1})) == values(roll(x, {smallest<int64_t> % 3}, {1})));
  TEXT(repeat(f({3}), {int64_t{1} << 62}), "size 3 * 4611686018427387904 does not fit 64 bits");
  CHECK(values(repeat(tensor<double>({1, 2}), {2, 2})) == Doubles{1, 2, 1, 2, 1, 2, 1, 2});
  CHECK(values(repeat(x, {2, 1})) == Doubles{0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5});
  CHECK(repeat(x, {0, 2}).shape() == Shape{0, 6});
  CHECK(repeat(f({1, 1, 1, 1, 1, 1, 1, 2}), {1, 1, 1, 1, 1, 1, 3, 2}).shape() == Shape{1, 1, 1, 1, 1, 1, 3, 4});
  Tensor w = ones({2}, {.dtype = DType::f64, .requires_grad = true});
  CHECK(values(grad({sum(repeat(w, {2, 2}) * numbered({2, 4}))}, {w})[0]) == Doubles{0 + 2 + 4 + 6, 1 + 3 + 5 + 7});
}

TEST_CASE("triangles and diagonals") {
  Tensor x = numbered({3, 4}) + 1;
  for (int64_t k = -4; k <= 5; ++k) {
    auto lower = values(tril(x, k)), upper = values(triu(x, k)), line = values(diagonal(x, k));
    Doubles expected;
    bool right = true;
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t j = 0; j < 4; ++j) {
        auto at = static_cast<size_t>(i * 4 + j);
        double v = static_cast<double>(at) + 1;
        right &= lower[at] == (j <= i + k ? v : 0) && upper[at] == (j >= i + k ? v : 0);
        if (j == i + k) expected.push_back(v);
      }
    INFO("diagonal " << k);
    CHECK(right);
    CHECK(line == expected);
    CHECK(diagonal(x, k).storage() == x.storage());
  }
  CHECK(values(tril(full({2, 2}, std::nan("")))) != Doubles{});
  CHECK(tril(full({2, 2}, std::nan(""))).slice(1, 1, 2).to_vector<double>()[0] == 0);  // no 0 * NaN
  CHECK(tril(x, smallest<int64_t>).sum().item() == 0);
  CHECK(triu(x, largest<int64_t>).sum().item() == 0);
  CHECK(diagonal(x, smallest<int64_t>).numel() == 0);
  CHECK(values(movedim(numbered({2, 3, 1}), 0, -1)) == Doubles{0, 3, 1, 4, 2, 5});
  CHECK(movedim(f({2, 3, 4, 5}), 3, 1).shape() == Shape{2, 5, 3, 4});
}

TEST_CASE("errors of splitting, padding and rearranging") {
  Tensor undefined;
  TEXT(narrow(f({3}), 0, 2, 2), "narrow: 2 elements from 2 leave dimension 0 of [3]");
  TEXT(narrow(f({3}), 0, -1, 2), "narrow: 2 elements from -1 leave dimension 0 of [3]");
  TEXT(narrow(f({}), 0, 0, 0), "narrow: a 0-d tensor has nothing to narrow");
  TEXT(split(f({3}), 0), "split: expected a size above 0, got 0");
  TEXT(split(f({}), 1), "split: a 0-d tensor has nothing to split");
  TEXT(split(f({5}), {2, 2}), "split: sizes add up to 4, dimension 0 of [5] has 5");
  TEXT(split(f({5}), {6, -1}), "split: expected sizes of 0 or more, got -1");
  TEXT(chunk(f({5}), 0), "chunk: expected a number of chunks above 0, got 0");
  TEXT(chunk(f({}), 1), "chunk: a 0-d tensor has nothing to split");
  TEXT(pad(f({3}), {1}), "pad: expected {before, after} for at most 1 dimensions, got 1 numbers");
  TEXT(pad(f({3}), {1, 1, 1, 1}), "pad: expected {before, after} for at most 1 dimensions, got 4 numbers");
  TEXT(pad(f({3}), {-2, -2}), "pad: -2 and -2 take more elements than dimension 0 of [3] has");
  TEXT(pad(f({3}), {smallest<int64_t>, 0}), "pad: -9223372036854775808 and 0 take more elements than dimension 0 of [3] has");
  TEXT(pad(f({2, 3}), {3, 0}, {.mode = PadMode::reflect}), "pad: reflect adds fewer elements than there are, got 3 and 0 for dimension 1 of [2, 3]");
  TEXT(pad(f({0}), {1, 0}, {.mode = PadMode::replicate}), "pad: replicate needs an element, dimension 0 of [0] has none");
  TEXT(pad(f({3}), {largest<int64_t>, 1}), "size 9223372036854775807 + 1 does not fit 64 bits");
  TEXT(pad(undefined, {1, 1}), "pad: x is undefined");
  TEXT(flip(f({2, 3}), {0, -2}), "flip: dim -2 is given twice");
  TEXT(flip(f({2}), {1}), "flip: dim 1 is out of range for a tensor of 1 dimensions; expected -1 to 0");
  TEXT(flip(undefined, {}), "flip: x is undefined");
  TEXT(roll(f({2}), {1, 1}, {0}), "roll: expected one shift for each dimension, got shifts [1, 1] and dims [0]");
  TEXT(roll(undefined, {}, {}), "roll: x is undefined");
  TEXT(repeat(f({2, 3}), {2}), "repeat: expected at least 2 repeats for [2, 3], got [2]");
  TEXT(repeat(f({2}), {-1}), "repeat: expected repeats of 0 or more, got [-1]");
  TEXT(tril(f({3})), "tril: expected at least two dimensions, got [3] (f32)");
  TEXT(triu(f({})), "triu: expected at least two dimensions, got [] (f32)");
  TEXT(tril(undefined), "tril: x is undefined");
  TEXT(diagonal(f({3})), "diagonal: expected at least two dimensions, got [3]");
  TEXT(diagonal(f({3, 3}), 0, 1, -1), "diagonal: expected two dimensions, got 1 and -1");
  TEXT(diagonal_scatter(f({2}), {3, 3}), "diagonal_scatter: expected x [3] for diagonal 0 of [3, 3], got [2] (f32)");
  TEXT(movedim(f({2, 3}), 2, 0), "movedim: dim 2 is out of range for a tensor of 2 dimensions; expected -2 to 1");
}
