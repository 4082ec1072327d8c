// Pooling against naive loops, NaN and ties, reports from other libraries, error texts.
#include <cmath>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

namespace {

constexpr DType floats[] = {DType::f16, DType::bf16, DType::f32, DType::f64};
constexpr float nan_f = std::numeric_limits<float>::quiet_NaN();
using Doubles = std::vector<double>;

struct Random {  // a linear congruential generator (Knuth, MMIX)
  uint64_t state;
  int64_t whole(int64_t low, int64_t high) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return low + static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(high - low));
  }
  Tensor tensor(const Shape& shape, DType t, int64_t high = 9) {
    Doubles v(static_cast<size_t>(shape.numel()));
    for (auto& x : v) x = static_cast<double>(whole(-high, high));
    return halftone::tensor(v).reshape(shape).to(t);
  }
};

void check(const Tensor& got, const Shape& shape, const Doubles& expected, double relative = 0) {
  CHECK(got.shape() == shape);
  auto v = got.to_vector<double>();
  REQUIRE(v.size() == expected.size());
  for (size_t i = 0; i < v.size(); ++i) {
    INFO("element " << i);
    if (std::isnan(expected[i])) CHECK(std::isnan(v[i]));
    else CHECK((v[i] == expected[i] || std::abs(v[i] - expected[i]) <= relative * std::abs(expected[i])));
  }
  tests::count("oracle_combinations");
}

double unit(DType t) { return t == DType::f16 ? 0x1p-11 : t == DType::bf16 ? 0x1p-8 : t == DType::f32 ? 0x1p-23 : 0x1p-52; }

// Planes of h by w, window by window: f(elements of the window inside the plane, how many it has with padding).
struct Naive {
  int64_t h, w, kh, kw, sh, sw, ph, pw, dh = 1, dw = 1;
  bool ceil_mode = false;
  int64_t size(int64_t in, int64_t k, int64_t s, int64_t p, int64_t d) const {
    int64_t room = in + 2 * p - d * (k - 1) - 1, n = room / s + 1;
    if (ceil_mode && room % s != 0 && n * s < in + p) ++n;
    return n;
  }
  int64_t oh() const { return size(h, kh, sh, ph, dh); }
  int64_t ow() const { return size(w, kw, sw, pw, dw); }
  template <class F> Doubles pool(const Doubles& x, F f) const {
    Doubles y;
    for (size_t plane = 0; plane < x.size() / static_cast<size_t>(h * w); ++plane)
      for (int64_t i = 0; i < oh(); ++i)
        for (int64_t j = 0; j < ow(); ++j) {
          Doubles inside;
          int64_t padded = 0;
          for (int64_t a = 0; a < kh; ++a)
            for (int64_t b = 0; b < kw; ++b) {
              int64_t r = i * sh + a * dh - ph, c = j * sw + b * dw - pw;
              if (r < h + ph && c < w + pw) ++padded;
              if (r >= 0 && r < h && c >= 0 && c < w) inside.push_back(x[plane * static_cast<size_t>(h * w) + static_cast<size_t>(r * w + c)]);
            }
          y.push_back(f(inside, padded));
        }
    return y;
  }
};
double largest_of(const Doubles& v) { return *std::max_element(v.begin(), v.end()); }
double total(const Doubles& v) {
  double s = 0;
  for (double x : v) s += x;
  return s;
}

}  // namespace

TEST_CASE("pools are the direct loop") {
  Random random{1};
  for (int round = 0; round < 60; ++round) {
    Naive q{};
    q.kh = random.whole(1, 4), q.kw = random.whole(1, 5), q.sh = random.whole(1, 4), q.sw = random.whole(1, 4);
    q.ph = random.whole(0, q.kh / 2 + 1), q.pw = random.whole(0, q.kw / 2 + 1), q.ceil_mode = round % 2 == 0;
    q.h = q.kh + random.whole(0, 7), q.w = q.kw + random.whole(0, 7);
    for (DType t : floats) {
      Shape shape{2, 3, q.h, q.w}, result{2, 3, q.oh(), q.ow()};
      Tensor x = random.tensor(shape, t);
      auto v = x.to_vector<double>();
      INFO(str(shape) << " kernel " << q.kh << " " << q.kw << " stride " << q.sh << " " << q.sw << " padding " << q.ph << " " << q.pw << " ceil " << q.ceil_mode);
      Size2 kernel{q.kh, q.kw}, stride{q.sh, q.sw}, padding{q.ph, q.pw};
      check(max_pool2d(x, kernel, {.stride = stride, .padding = padding, .ceil_mode = q.ceil_mode}), result,
            q.pool(v, [](const Doubles& in, int64_t) { return largest_of(in); }));
      check(avg_pool2d(x, kernel, {.stride = stride, .padding = padding, .ceil_mode = q.ceil_mode}), result,
            q.pool(v, [](const Doubles& in, int64_t n) { return total(in) / static_cast<double>(n); }), unit(t));
      check(avg_pool2d(x, kernel, {.stride = stride, .padding = padding, .ceil_mode = q.ceil_mode, .count_include_pad = false}), result,
            q.pool(v, [](const Doubles& in, int64_t) { return total(in) / static_cast<double>(in.size()); }), unit(t));
      Naive wide = q;
      wide.dh = 2, wide.dw = 3, wide.ceil_mode = false;
      if (wide.dh * (q.kh - 1) >= q.h + 2 * q.ph || wide.dw * (q.kw - 1) >= q.w + 2 * q.pw) continue;
      check(max_pool2d(x, kernel, {.stride = stride, .padding = padding, .dilation = {2, 3}}), {2, 3, wide.oh(), wide.ow()},
            wide.pool(v, [](const Doubles& in, int64_t) { return in.empty() ? -std::numeric_limits<double>::infinity() : largest_of(in); }));
    }
  }
}

TEST_CASE("pools of one dimension are those of two with a height of one") {
  Random random{2};
  Tensor x = random.tensor({2, 3, 13}, DType::f32);
  auto flat = [](const Tensor& y) { return y.squeeze(2).to_vector<double>(); };
  check(max_pool1d(x, 3, {.stride = 2, .padding = 1, .dilation = 2}), {2, 3, 6}, flat(max_pool2d(x.unsqueeze(2), {1, 3}, {.stride = Size2{1, 2}, .padding = {0, 1}, .dilation = {1, 2}})));
  check(avg_pool1d(x, 4, {.padding = 2, .ceil_mode = true}), {2, 3, 4}, flat(avg_pool2d(x.unsqueeze(2), {1, 4}, {.padding = {0, 2}, .ceil_mode = true})));
  check(adaptive_max_pool1d(x, 5), {2, 3, 5}, flat(adaptive_max_pool2d(x.unsqueeze(2), {1, 5})));
  check(adaptive_avg_pool1d(x, 5), {2, 3, 5}, flat(adaptive_avg_pool2d(x.unsqueeze(2), {1, 5})));
}

TEST_CASE("adaptive pools cut the input into windows of their own") {
  Random random{3};
  for (DType t : floats)
    for (auto [h, w, oh, ow] : {std::array<int64_t, 4>{7, 5, 3, 2}, {4, 6, 1, 1}, {3, 2, 5, 4}, {6, 6, 6, 3}}) {
      Tensor x = random.tensor({2, 3, h, w}, t);
      auto v = x.to_vector<double>();
      Doubles means, maxima;
      for (int64_t plane = 0; plane < 6; ++plane)
        for (int64_t i = 0; i < oh; ++i)
          for (int64_t j = 0; j < ow; ++j) {
            Doubles in;
            for (int64_t r = 0; r < h; ++r)
              for (int64_t c = 0; c < w; ++c)
                if (r * oh >= i * h - oh + 1 && r * oh < (i + 1) * h && c * ow >= j * w - ow + 1 && c * ow < (j + 1) * w) in.push_back(v[static_cast<size_t>((plane * h + r) * w + c)]);
            means.push_back(total(in) / static_cast<double>(in.size()));
            maxima.push_back(largest_of(in));
          }
      check(adaptive_avg_pool2d(x, {oh, ow}), {2, 3, oh, ow}, means, 2 * unit(t));
      check(adaptive_max_pool2d(x, {oh, ow}), {2, 3, oh, ow}, maxima);
    }
}

TEST_CASE("report_B43 a NaN is the largest of its windows") {
  tests::report("pytorch#39846");
  for (DType t : floats) {
    check(max_pool2d(full({1, 1, 4, 4}, std::nan(""), {.dtype = t}), 2), {1, 1, 2, 2}, Doubles(4, std::nan("")));
    check(max_pool1d(tensor({1.f, nan_f, 3.f, 4.f, 5.f, nan_f}).to(t).view({1, 1, 6}), 2), {1, 1, 3}, {NAN, 4, NAN});
    check(adaptive_max_pool1d(tensor({1.f, nan_f, 3.f}).to(t).view({1, 1, 3}), 1), {1, 1, 1}, {NAN});
    check(call(op::max_pool, {full({1, 1, 2, 2, 2}, nan_f).to(t)}, Attrs::of(PoolAttrs{.kernel = {2, 2, 2}, .stride = {2, 2, 2}, .dims = 3})), {1, 1, 1, 1, 1}, {NAN});
  }
}

TEST_CASE("of equal elements the first gets the gradient, alone") {
  Tensor x = ones({1, 1, 4, 4}, {.requires_grad = true});
  for (bool create_graph : {false, true}) {
    auto [g] = grad({sum(max_pool2d(x, 2))}, {x}, {.create_graph = create_graph});
    check(g.detach(), {1, 1, 4, 4}, {1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0});
  }
  // Windows that overlap add up.
  Tensor peak = tensor({0.f, 5.f, 0.f, 1.f}).view({1, 1, 4}).requires_grad_();
  check(grad({sum(max_pool1d(peak, 3, {.stride = 1}))}, {peak})[0], {1, 1, 4}, {0, 2, 0, 0});
}

TEST_CASE("averages of many 16-bit elements are exact") {
  for (DType t : {DType::f16, DType::bf16}) {
    check(avg_pool2d(full({1, 1, 128, 128}, 3, {.dtype = t}), 128), {1, 1, 1, 1}, {3});
    check(adaptive_avg_pool2d(full({1, 1, 300, 300}, 3, {.dtype = t}), 1), {1, 1, 1, 1}, {3});
    Tensor x = ones({1, 1, 1, 3000}, {.dtype = t, .requires_grad = true});  // a sum of shares, beyond what 16 bits can count
    check(grad({sum(avg_pool1d(x.select(2, 0), 1500, {.stride = 1}).to(DType::f32)) * 1500}, {x})[0].slice(3, 1499, 1500).to(DType::f32), {1, 1, 1, 1}, {1500}, 2 * unit(t));
  }
}

TEST_CASE("pools of an empty batch keep the shape") {
  CHECK(max_pool2d(ones({0, 3, 8, 8}), 2).shape() == Shape{0, 3, 4, 4});
  CHECK(avg_pool2d(ones({0, 3, 8, 8}), 2).shape() == Shape{0, 3, 4, 4});
  CHECK(adaptive_avg_pool2d(ones({0, 3, 8, 8}), 1).shape() == Shape{0, 3, 1, 1});
}

TEST_CASE("errors of pools") {
  auto f = [](const Shape& s) { return ones(s); };
  Tensor none;
  TEXT(max_pool2d(none, 2), "max_pool2d: x is undefined");
  TEXT(max_pool2d(f({3, 8, 8}), 2), "max_pool2d: expected x of 4 dimensions, got [3, 8, 8] (f32)");
  TEXT(max_pool1d(f({1, 3, 8, 8}), 2), "max_pool1d: expected x of 3 dimensions, got [1, 3, 8, 8] (f32)");
  TEXT(max_pool2d(zeros({1, 1, 4, 4}, {.dtype = DType::i64}), 2), "max_pool2d: expected a floating dtype, got i64; cast x with to()");
  TEXT(max_pool2d(f({1, 3, 8, 8}), 3, {.padding = 2}), "max_pool2d: expected padding from 0 to half the kernel's 3, got 2");
  TEXT(max_pool2d(f({1, 3, 8, 8}), 3, {.stride = 0}), "max_pool2d: expected kernel, stride and dilation of 1 or more, got 3, 0 and 1");
  TEXT(max_pool2d(f({1, 3, 8, 2}), 3), "max_pool2d: a window of 3 with dilation 1 spans 3, more than the input's 2 with padding 0");
  TEXT(max_pool2d(f({1, 3, 0, 2}), 1), "max_pool2d: dimension 2 of x is empty: [1, 3, 0, 2] (f32)");
  TEXT(max_pool2d(f({1, 3, 8, 8}), 3, {.dilation = int64_t{1} << 62}), "size 2 * 4611686018427387904 does not fit 64 bits");
  TEXT(avg_pool2d(none, 2), "avg_pool2d: x is undefined");
  TEXT(avg_pool2d(f({1, 3, 8, 8}), 0), "avg_pool2d: expected kernel, stride and dilation of 1 or more, got 0, 0 and 1");
  TEXT(avg_pool1d(f({1, 3, 8}), 9), "avg_pool1d: a window of 9 with dilation 1 spans 9, more than the input's 8 with padding 0");
  TEXT(adaptive_avg_pool2d(none, 1), "adaptive_avg_pool2d: x is undefined");
  TEXT(adaptive_avg_pool2d(f({3, 8, 8}), 1), "adaptive_avg_pool2d: expected x of 4 dimensions, got [3, 8, 8] (f32)");
  TEXT(adaptive_avg_pool2d(f({1, 3, 8, 8}), 0), "adaptive_avg_pool2d: expected a size of 1 or more, got 0");
  TEXT(adaptive_max_pool1d(f({1, 3, 0}), 1), "adaptive_max_pool1d: dimension 2 of x is empty: [1, 3, 0] (f32)");
}
