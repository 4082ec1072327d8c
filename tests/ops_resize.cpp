// Resizing, windows as columns and pixel shuffles against naive loops, and their error texts.
#include <cmath>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

namespace {

constexpr DType floats[] = {DType::f16, DType::bf16, DType::f32, DType::f64};
using Doubles = std::vector<double>;
using At = size_t;

Tensor whole_numbers(const Shape& shape, DType t) {
  Doubles v(At(shape.numel()));
  uint64_t state = 7;
  for (auto& x : v) {  // a linear congruential generator (Knuth, MMIX)
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<double>(state >> 33 & 15u) - 8;
  }
  return tensor(v).reshape(shape).to(t);
}
double unit(DType t) { return t == DType::f16 ? 0x1p-11 : t == DType::bf16 ? 0x1p-8 : t == DType::f32 ? 0x1p-24 : 0x1p-53; }

void check(const Tensor& got, const Shape& shape, const Doubles& expected, double absolute = 0) {
  CHECK(got.shape() == shape);
  auto v = got.to_vector<double>();
  REQUIRE(v.size() == expected.size());
  for (size_t i = 0; i < v.size(); ++i) {
    INFO("element " << i);
    CHECK(std::abs(v[i] - expected[i]) <= absolute);
  }
  tests::count("oracle_combinations");
}

// Where output i lies among the inputs, and the weight of input k there: a hat around it.
double place(int64_t i, int64_t in, int64_t out, bool corners) {
  double at = corners ? (out > 1 ? double(i) * double(in - 1) / double(out - 1) : 0) : (double(i) + .5) * double(in) / double(out) - .5;
  return std::clamp(at, 0.0, double(in - 1));
}
double hat(double at, int64_t k) { return std::max(0.0, 1 - std::abs(at - double(k))); }

}  // namespace

TEST_CASE("resizing is its formula") {
  for (auto [h, w, oh, ow] : {std::array<int64_t, 4>{3, 4, 6, 8}, {7, 5, 3, 9}, {1, 1, 4, 3}, {8, 6, 1, 1}, {5, 33, 5, 11}})
    for (DType t : floats) {
      Tensor x = whole_numbers({2, 3, h, w}, t);
      auto v = x.to_vector<double>();
      Doubles nearest, bilinear[2];
      for (int64_t p = 0; p < 6; ++p)
        for (int64_t i = 0; i < oh; ++i)
          for (int64_t j = 0; j < ow; ++j) {
            nearest.push_back(v[At((p * h + i * h / oh) * w + j * w / ow)]);
            for (bool corners : {false, true}) {
              double y = 0, row = place(i, h, oh, corners), column = place(j, w, ow, corners);
              for (int64_t a = 0; a < h; ++a)
                for (int64_t b = 0; b < w; ++b) y += hat(row, a) * hat(column, b) * v[At((p * h + a) * w + b)];
              bilinear[corners].push_back(y);
            }
          }
      Shape shape{2, 3, oh, ow};
      check(resize(x, {oh, ow}), shape, nearest);
      for (bool corners : {false, true})
        check(resize(x, {oh, ow}, {.mode = Interpolation::bilinear, .align_corners = corners}), shape, bilinear[corners], 16 * std::max(unit(t), 0x1p-50));
    }
}

TEST_CASE("the gradient of resizing is its transpose") {
  for (auto mode : {ResizeOptions{}, {Interpolation::bilinear, false}, {Interpolation::bilinear, true}})
    for (auto [h, w, oh, ow] : {std::array<int64_t, 4>{3, 4, 6, 9}, {7, 5, 3, 2}, {1, 2, 5, 1}}) {
      Tensor x = whole_numbers({1, 1, h, w}, DType::f64).requires_grad_(), g = whole_numbers({1, 1, oh, ow}, DType::f64);
      auto dx = grad({sum(resize(x, {oh, ow}, mode) * g)}, {x})[0].to_vector<double>();
      Doubles expected;
      for (int64_t i = 0; i < h * w; ++i) {  // column by column
        Doubles one(At(h * w));
        one[At(i)] = 1;
        expected.push_back(sum(resize(tensor(one).view({1, 1, h, w}), {oh, ow}, mode) * g).item());
      }
      for (size_t i = 0; i < dx.size(); ++i) CHECK(std::abs(dx[i] - expected[i]) < 1e-12);
    }
}

TEST_CASE("windows as columns, and back") {
  for (DType t : floats) {
    Tensor x = whole_numbers({2, 3, 6, 7}, t), w = whole_numbers({4, 3, 3, 2}, t);
    UnfoldOptions o{.stride = {2, 1}, .padding = {1, 0}, .dilation = {1, 2}};
    auto v = x.to_vector<double>();
    int64_t oh = 3, ow = 5;
    Doubles columns;
    for (int64_t n = 0; n < 2; ++n)
      for (int64_t c = 0; c < 3; ++c)
        for (int64_t a = 0; a < 3; ++a)
          for (int64_t b = 0; b < 2; ++b)
            for (int64_t i = 0; i < oh; ++i)
              for (int64_t j = 0; j < ow; ++j) {
                int64_t r = i * 2 + a - 1, s = j + b * 2;
                columns.push_back(r < 0 || r >= 6 || s >= 7 ? 0 : v[At(((n * 3 + c) * 6 + r) * 7 + s)]);
              }
    Tensor u = unfold(x, {3, 2}, o);
    check(u, {2, 18, 15}, columns);
    // A convolution is a product with them.
    Tensor y = conv2d(x, w, {}, {.stride = {2, 1}, .padding = {1, 0}, .dilation = {1, 2}});
    check(matmul(w.view({4, 18}), u).view({2, 4, 3, 5}), {2, 4, 3, 5}, y.to_vector<double>());
    // Folding counts each element as often as it is in a window.
    Tensor times = fold(unfold(ones_like(x), {3, 2}, o), {6, 7}, {3, 2}, o), folded = fold(u, {6, 7}, {3, 2}, o);
    check(folded, {2, 3, 6, 7}, (x * times).to_vector<double>());
  }
}

TEST_CASE("pixels shuffle and unshuffle") {
  Tensor x = whole_numbers({2, 12, 3, 5}, DType::f32);
  auto v = x.to_vector<double>();
  Doubles y;
  for (int64_t n = 0; n < 2; ++n)
    for (int64_t c = 0; c < 3; ++c)
      for (int64_t i = 0; i < 6; ++i)
        for (int64_t j = 0; j < 10; ++j) y.push_back(v[At(((n * 12 + c * 4 + i % 2 * 2 + j % 2) * 3 + i / 2) * 5 + j / 2)]);
  check(pixel_shuffle(x, 2), {2, 3, 6, 10}, y);
  check(pixel_unshuffle(pixel_shuffle(x, 2), 2), {2, 12, 3, 5}, v);
  CHECK(pixel_shuffle(ones({0, 4, 2, 2}), 2).shape() == Shape{0, 1, 4, 4});
}

TEST_CASE("errors of resizing and windows") {
  auto f = [](const Shape& s) { return ones(s); };
  Tensor none;
  TEXT(resize(none, 2), "resize: x is undefined");
  TEXT(resize(f({3, 4, 4}), 2), "resize: expected x [n, channels, h, w] of a floating dtype, got [3, 4, 4] (f32)");
  TEXT(resize(zeros({1, 1, 2, 2}, {.dtype = DType::u8}), 2), "resize: expected x [n, channels, h, w] of a floating dtype, got [1, 1, 2, 2] (u8)");
  TEXT(resize(f({1, 3, 4, 4}), {2, 0}), "resize: expected sizes of 1 or more, got 4 by 4 to 2 by 0");
  TEXT(pixel_shuffle(f({1, 6, 2, 2}), 2), "pixel_shuffle: expected x [n, channels * 2^2, h, w], got [1, 6, 2, 2] (f32)");
  TEXT(pixel_unshuffle(f({1, 6, 3, 2}), 2), "pixel_unshuffle: expected x [n, channels, h * 2, w * 2], got [1, 6, 3, 2] (f32)");
  TEXT(unfold(none, 2), "unfold: x is undefined");
  TEXT(unfold(f({1, 4, 4}), 2), "unfold: expected x [n, channels, h, w], got [1, 4, 4] (f32)");
  TEXT(unfold(f({1, 1, 4, 4}), 5), "unfold: a kernel of size 5 with dilation 1 spans 5, more than the input's 4 with padding 0 and 0");
  TEXT(unfold(f({1, 1, 4, 4}), 2, {.stride = 0}), "unfold: expected stride and dilation of 1 or more and padding of 0 or more, got 0, 1 and 0");
  TEXT(unfold(zeros({1, 1, 4, 4}, {.dtype = DType::i64}), 2), "unfold: expected a floating dtype, got i64");
  TEXT(fold(none, 4, 2), "fold: columns is undefined");
  TEXT(fold(f({1, 6, 9}), 4, 2), "fold: expected columns [n, channels * 4, windows], got [1, 6, 9] (f32)");
  TEXT(fold(f({1, 8, 8}), 4, 2), "fold: expected columns [1, 8, 9] for an image of 4 by 4, got [1, 8, 8] (f32)");
}
