// Convolutions against naive loops written from the formula, their transposes, reports from other libraries, error texts.
#include <numeric>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

namespace {

constexpr DType floats[] = {DType::f16, DType::bf16, DType::f32, DType::f64};
using Doubles = std::vector<double>;

struct Random {  // a linear congruential generator (Knuth, MMIX)
  uint64_t state;
  int64_t whole(int64_t low, int64_t high) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return low + static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(high - low));
  }
  // Small whole numbers: products and sums of them are exact in every dtype.
  Tensor tensor(const Shape& shape, DType t) {
    Doubles v(static_cast<size_t>(shape.numel()));
    for (auto& x : v) x = static_cast<double>(whole(-2, 3));
    return halftone::tensor(v).reshape(shape).to(t);
  }
};

// The formula for two spatial dimensions, output by output.
struct Naive {
  int64_t n, c, h, w, o, kh, kw, groups = 1;
  int64_t sh = 1, sw = 1, dh = 1, dw = 1, top = 0, left = 0, bottom = 0, right = 0;
  int64_t oh() const { return (h + top + bottom - dh * (kh - 1) - 1) / sh + 1; }
  int64_t ow() const { return (w + left + right - dw * (kw - 1) - 1) / sw + 1; }

  // Calls f(x index, w index, y index) for every product.
  template <class F> void products(F f) const {
    int64_t cg = c / groups, og = o / groups;
    for (int64_t b = 0; b < n; ++b)
      for (int64_t out = 0; out < o; ++out)
        for (int64_t i = 0; i < oh(); ++i)
          for (int64_t j = 0; j < ow(); ++j)
            for (int64_t in = 0; in < cg; ++in)
              for (int64_t a = 0; a < kh; ++a)
                for (int64_t e = 0; e < kw; ++e) {
                  int64_t y = i * sh + a * dh - top, x = j * sw + e * dw - left;
                  if (y < 0 || y >= h || x < 0 || x >= w) continue;
                  f(((b * c + out / og * cg + in) * h + y) * w + x, ((out * cg + in) * kh + a) * kw + e, ((b * o + out) * oh() + i) * ow() + j);
                }
  }
};
using At = size_t;

void check(const Tensor& got, const Shape& shape, const Doubles& expected) {
  CHECK(got.shape() == shape);
  CHECK(got.to_vector<double>() == expected);
  tests::count("oracle_combinations");
}

ConvAttrs attrs(const Naive& q) {
  ConvAttrs a;
  a.groups = q.groups;
  a.stride[0] = q.sh, a.stride[1] = q.sw, a.dilation[0] = q.dh, a.dilation[1] = q.dw;
  a.before[0] = q.top, a.before[1] = q.left, a.after[0] = q.bottom, a.after[1] = q.right;
  return a;
}

}  // namespace

TEST_CASE("report_B32 conv2d and its transposes are the direct loop, exactly, boundaries included") {
  tests::report("oneDNN#5080, mlx#2038");
  Random random{1};
  for (int round = 0; round < 60; ++round) {
    Naive q{};
    q.groups = random.whole(1, 4);
    q.n = random.whole(0, 4), q.c = q.groups * random.whole(1, 4), q.o = q.groups * random.whole(1, 4);
    q.kh = random.whole(1, 4), q.kw = random.whole(1, 4);
    q.sh = random.whole(1, 4), q.sw = random.whole(1, 4), q.dh = random.whole(1, 3), q.dw = random.whole(1, 3);
    q.top = random.whole(0, 4), q.left = random.whole(0, 4), q.bottom = random.whole(0, 4), q.right = random.whole(0, 4);
    q.h = q.dh * (q.kh - 1) + random.whole(1, 8), q.w = q.dw * (q.kw - 1) + random.whole(1, 8);
    for (DType t : floats) {
      Shape xs{q.n, q.c, q.h, q.w}, ws{q.o, q.c / q.groups, q.kh, q.kw}, ys{q.n, q.o, q.oh(), q.ow()};
      Tensor x = random.tensor(xs, t), w = random.tensor(ws, t), g = random.tensor(ys, t), b = random.tensor({q.o}, t);
      auto xv = x.to_vector<double>(), wv = w.to_vector<double>(), gv = g.to_vector<double>(), bv = b.to_vector<double>();
      Doubles y(gv.size()), dx(xv.size()), dw(wv.size());
      q.products([&](int64_t i, int64_t k, int64_t o) {
        y[At(o)] += xv[At(i)] * wv[At(k)];
        dx[At(i)] += gv[At(o)] * wv[At(k)];
        dw[At(k)] += gv[At(o)] * xv[At(i)];
      });
      INFO(str(xs) << " " << str(ws) << " groups " << q.groups << " " << str(t));
      ConvAttrs a = attrs(q);
      check(call(op::conv, {x, w}, Attrs::of(a)), ys, y);
      for (size_t i = 0; i < y.size(); ++i) y[i] += bv[i / At(q.oh() * q.ow()) % At(q.o)];
      check(call(op::conv, {x, w, b}, Attrs::of(a)), ys, y);
      for (auto& v : y) v = std::max(v, 0.0);
      check(call(op::conv_relu, {x, w, b}, Attrs::of(a)), ys, y);
      a.size[0] = q.h, a.size[1] = q.w;
      check(call(op::conv_input, {g, w}, Attrs::of(a)), xs, dx);
      for (size_t i = 0; i < dx.size(); ++i) dx[i] = tensor(dx[i] + xv[i]).to(t).item();
      check(call(op::conv_input, {g, w, x}, Attrs::of(a)), xs, dx);
      a.size[0] = q.kh, a.size[1] = q.kw;
      a.wide = round % 2 == 0;
      if (t == DType::bf16 && !a.wide) for (auto& v : dw) v = static_cast<double>(static_cast<float>(bfloat16(v)));
      check(call(op::conv_weight, {x, g}, Attrs::of(a)), ws, dw);
    }
  }
}

TEST_CASE("conv1d and conv3d are conv2d over other numbers of dimensions") {
  Random random{2};
  for (DType t : floats) {
    Tensor x = random.tensor({3, 4, 17}, t), w = random.tensor({6, 2, 3}, t), b = random.tensor({6}, t);
    Tensor y = conv1d(x, w, b, {.stride = 2, .padding = 1, .dilation = 2, .groups = 2});
    Tensor flat = conv2d(x.unsqueeze(2), w.unsqueeze(2), b, {.stride = {1, 2}, .padding = {0, 1}, .dilation = {1, 2}, .groups = 2});
    CHECK(y.shape() == Shape{3, 6, 8});
    check(y, {3, 6, 8}, flat.to_vector<double>());
    // A kernel of one plane: each plane is an image of its own.
    Tensor v = random.tensor({2, 3, 4, 5, 6}, t), k = random.tensor({2, 3, 1, 3, 2}, t);
    Tensor deep = conv3d(v, k, {}, {.stride = {1, 2, 1}, .padding = {0, 1, 1}});
    Tensor planes = conv2d(v.permute({0, 2, 1, 3, 4}).reshape({8, 3, 5, 6}), k.select(2, 0), {}, {.stride = {2, 1}, .padding = 1});
    check(deep, {2, 2, 4, 3, 7}, planes.reshape({2, 4, 2, 3, 7}).permute({0, 2, 1, 3, 4}).to_vector<double>());
    // And a kernel of several: the sum of its planes'.
    Tensor two = random.tensor({2, 3, 2, 1, 1}, t);
    Tensor sum = conv3d(v.slice(2, 0, 3), two.slice(2, 0, 1)) + conv3d(v.slice(2, 1, 4), two.slice(2, 1, 2));
    check(conv3d(v, two), {2, 2, 3, 5, 6}, sum.to_vector<double>());
  }
}

TEST_CASE("padding same keeps the size, the odd zero at the end") {
  Tensor x = arange(5, {.dtype = DType::f32}).view({1, 1, 5}), two = ones({1, 1, 2}), three = ones({1, 1, 3});
  check(conv1d(x, two, {}, {.padding = same_padding}), {1, 1, 5}, {1, 3, 5, 7, 4});
  check(conv1d(x, three, {}, {.padding = same_padding}), {1, 1, 5}, {1, 3, 6, 9, 7});
  check(conv1d(x, two, {}, {.padding = same_padding, .dilation = 3}), {1, 1, 5}, {2, 3, 5, 2, 3});
  CHECK(conv2d(ones({2, 3, 7, 8}), ones({4, 3, 5, 2}), {}, {.padding = same_padding}).shape() == Shape{2, 4, 7, 8});
}

TEST_CASE("transposed convolutions scatter each input over its window") {
  Random random{3};
  for (DType t : floats)
    for (int64_t stride : {1, 2, 3})
      for (int64_t padding : {0, 1})
        for (int64_t more : {0, 1}) {
          if (more >= stride) continue;
          int64_t groups = stride == 2 ? 2 : 1, dilation = padding + 1, in = 4, out = 6, l = 5, k = 3;
          Tensor x = random.tensor({2, in, l}, t), w = random.tensor({in, out / groups, k}, t), b = random.tensor({out}, t);
          int64_t size = (l - 1) * stride - 2 * padding + (k - 1) * dilation + 1 + more;
          auto xv = x.to_vector<double>(), wv = w.to_vector<double>(), bv = b.to_vector<double>();
          Doubles y(At(2 * out * size));
          for (int64_t n = 0; n < 2; ++n)
            for (int64_t o = 0; o < out; ++o)
              for (int64_t at = 0; at < size; ++at) {
                double v = bv[At(o)];
                for (int64_t c = 0; c < in; ++c)
                  for (int64_t i = 0; i < l; ++i)
                    for (int64_t e = 0; e < k; ++e)
                      if (c / (in / groups) == o / (out / groups) && i * stride + e * dilation - padding == at)
                        v += xv[At((n * in + c) * l + i)] * wv[At((c * (out / groups) + o % (out / groups)) * k + e)];
                y[At((n * out + o) * size + at)] = v;
              }
          Tensor got = conv_transpose1d(x, w, b, {.stride = stride, .padding = padding, .output_padding = more, .dilation = dilation, .groups = groups});
          check(got, {2, out, size}, y);
          Tensor flat = conv_transpose2d(x.unsqueeze(2), w.unsqueeze(2), b,
                                         {.stride = {1, stride}, .padding = {0, padding}, .output_padding = {0, more}, .dilation = {1, dilation}, .groups = groups});
          check(flat, {2, out, 1, size}, y);
        }
}

TEST_CASE("report_B31 an image's result does not depend on its batch, bit for bit") {
  tests::report("tensorflow#1299, #61510, openvino#38256");
  manual_seed(1);
  for (DType t : floats)
    for (Shape image : {Shape{3, 9, 9}, Shape{17, 4, 4}, Shape{5, 33, 20}}) {
      Tensor x = randn({20, image[0], image[1], image[2]}).to(t), w = randn({8, image[0], 3, 3}).to(t);
      Tensor all = conv2d(x, w, {}, {.padding = 1});
      for (int64_t k : {1, 5, 7}) CHECK(conv2d(x.slice(0, 0, k), w, {}, {.padding = 1}).to_vector<double>() == all.slice(0, 0, k).to_vector<double>());
    }
}

TEST_CASE("report_B29 conv3d with a kernel of 1 is linear over channels, whatever the strides") {
  tests::report("pytorch#84488");
  Random random{4};
  Tensor x = random.tensor({1, 5, 6, 28}, DType::f32).unsqueeze(0).permute({0, 4, 1, 2, 3});  // channels last in memory
  Tensor w = random.tensor({7, 28, 1, 1, 1}, DType::f32);
  Tensor y = linear(x.permute({0, 2, 3, 4, 1}), w.view({7, 28})).permute({0, 4, 1, 2, 3});
  check(conv3d(x, w), {1, 7, 1, 5, 6}, y.to_vector<double>());
}

TEST_CASE("report_B16 sizes that do not fit are refused before anything is computed") {
  tests::report("mlx#3611");
  int64_t huge = std::numeric_limits<int32_t>::max();
  Tensor x = ones({1, 1, 8, 8}), w = ones({1, 1, 3, 3});
  CHECK_THROWS_WITH(conv2d(x, w, {}, {.dilation = huge}),
                    "conv2d: a kernel of size 3 with dilation 2147483647 spans 4294967295, more than the input's 8 with padding 0 and 0");
  CHECK_THROWS_AS(conv2d(x, w, {}, {.padding = huge}), Error);
  CHECK_THROWS_AS(conv2d(x, w, {}, {.dilation = std::numeric_limits<int64_t>::max()}), Error);
  CHECK_THROWS_AS(conv2d(x, w, {}, {.padding = std::numeric_limits<int64_t>::max()}), Error);
}

TEST_CASE("convolutions of nothing") {
  CHECK(conv2d(ones({0, 3, 8, 8}), ones({4, 3, 3, 3})).shape() == Shape{0, 4, 6, 6});
  check(conv2d(ones({1, 0, 2, 2}), ones({2, 0, 1, 1}), tensor({1.f, 2.f})), {1, 2, 2, 2}, {1, 1, 1, 1, 2, 2, 2, 2});
  Tensor x = ones({0, 3, 8, 8}, {.requires_grad = true}), w = ones({4, 3, 3, 3}, {.requires_grad = true});
  auto g = grad({sum(conv2d(x, w))}, {x, w});
  CHECK(g[0].shape() == x.shape());
  CHECK(g[1].to_vector<double>() == Doubles(108));
}

TEST_CASE("convolutions widen 16-bit sums, and gradients of cast weights leave in f32") {
  Tensor x = ones({1, 4096, 1, 1}, {.dtype = DType::f16}), w = ones({1, 4096, 1, 1}, {.dtype = DType::f16});
  check(conv2d(x, w), {1, 1, 1, 1}, {4096});
  check(conv2d(ones({1, 1, 70, 70}, {.dtype = DType::bf16}), ones({1, 1, 70, 70}, {.dtype = DType::bf16})), {1, 1, 1, 1}, {4896});  // 4900 rounded
  Tensor master = ones({1, 1, 1, 1}, {.requires_grad = true});
  Tensor image = full({1, 1, 1, 3000}, 1, {.dtype = DType::f32});
  amp::Autocast region({.dtype = DType::bf16});
  auto g = grad({sum(conv2d(image, master))}, {master});
  CHECK(g[0].dtype() == DType::f32);
  check(g[0], {1, 1, 1, 1}, {3000});  // bf16 has no 3000: 2992 or 3008
}

TEST_CASE("errors of convolutions") {
  auto f = [](const Shape& s) { return ones(s); };
  Tensor undefined;
  TEXT(conv2d(f({1, 3, 8, 8}), f({8, 4, 3, 3})), "conv2d: expected weight [out, in, kh, kw] with in = 3 for x [1, 3, 8, 8], got [8, 4, 3, 3] (f32)");
  TEXT(conv1d(f({1, 4, 8}), f({8, 4, 3}), {}, {.groups = 2}), "conv1d: expected weight [out, in, k] with in = 2 for x [1, 4, 8], got [8, 4, 3] (f32)");
  TEXT(conv3d(f({1, 3, 4, 4, 4}), f({8, 2, 1, 1, 1})), "conv3d: expected weight [out, in, kd, kh, kw] with in = 3 for x [1, 3, 4, 4, 4], got [8, 2, 1, 1, 1] (f32)");
  TEXT(conv2d(f({3, 8, 8}), f({8, 3, 3, 3})), "conv2d: expected tensors of 4 dimensions, got [3, 8, 8] (f32) and [8, 3, 3, 3] (f32)");
  TEXT(conv2d(f({1, 3, 8, 8}), f({8, 3, 3, 3}).to(DType::f64)),
       "conv2d: expected weight in the dtype of the first argument, f32, got [8, 3, 3, 3] (f64); cast one with to() or use amp::Autocast");
  TEXT(conv2d(zeros({1, 1, 2, 2}, {.dtype = DType::i64}), zeros({1, 1, 1, 1}, {.dtype = DType::i64})), "conv2d: expected a floating dtype, got i64");
  TEXT(conv2d(f({1, 3, 8, 8}), f({8, 3, 3, 3}), f({7})), "conv2d: expected bias [8] (f32), got [7] (f32)");
  TEXT(conv2d(f({1, 3, 8, 8}), f({8, 3, 3, 3}), {}, {.groups = 2}), "conv2d: expected channels that groups = 2 divides, got 3 in and 8 out");
  TEXT(conv2d(f({1, 3, 8, 8}), f({8, 3, 3, 3}), {}, {.groups = 0}), "conv2d: expected groups of 1 or more, got 0");
  TEXT(conv2d(f({1, 3, 8, 8}), f({8, 3, 3, 3}), {}, {.stride = {1, 0}}),
       "conv2d: expected stride and dilation of 1 or more and padding of 0 or more, got 0, 1 and 0");
  TEXT(conv2d(f({1, 3, 8, 8}), f({8, 3, 3, 3}), {}, {.padding = {0, -1}}),
       "conv2d: expected stride and dilation of 1 or more and padding of 0 or more, got 1, 1 and -1");
  TEXT(conv2d_relu(f({1, 3, 2, 8}), f({8, 3, 3, 3})), "conv2d_relu: a kernel of size 3 with dilation 1 spans 3, more than the input's 2 with padding 0 and 0");
  TEXT(conv2d(f({1, 3, 8, 8}), f({8, 3, 0, 3})), "conv2d: expected a kernel of size 1 or more, got 0");
  TEXT(conv2d(f({1, 3, 8, 8}), f({8, 3, 3, 3}), {}, {.stride = 2, .padding = same_padding}), "conv2d: expected stride 1 with same_padding, got 2");
  TEXT(conv2d(undefined, f({8, 3, 3, 3})), "conv2d: x or weight is undefined");
  TEXT(conv2d_input(f({1, 8, 5, 6}), f({8, 3, 3, 3}), 8), "conv2d_input: expected size 6 in dimension 2 for an input of size 8, got [1, 8, 5, 6] (f32)");
  TEXT(conv2d_input(f({1, 7, 6, 6}), f({8, 3, 3, 3}), 8), "conv2d_input: expected weight [out, in, kh, kw] with out = 7, got [8, 3, 3, 3] (f32)");
  TEXT(conv2d_weight(f({1, 3, 8, 8}), f({1, 8, 6, 5}), 3), "conv2d_weight: expected size 6 in dimension 3 for a kernel of size 3, got [1, 8, 6, 5] (f32)");
  TEXT(conv2d_weight(f({1, 3, 8, 8}), f({2, 8, 6, 6}), 3), "conv2d_weight: expected a gradient for a batch of 1, got [2, 8, 6, 6] (f32)");
  TEXT(conv_transpose2d(f({1, 3, 4, 4}), f({4, 2, 3, 3})),
       "conv_transpose2d: expected x [n, in, ...] and weight [in, out, kh, kw], got [1, 3, 4, 4] (f32) and [4, 2, 3, 3] (f32)");
  TEXT(conv_transpose1d(f({1, 3, 4}), f({3, 2, 3}), {}, {.output_padding = 1}),
       "conv_transpose1d: expected output_padding of 0 or more and below the stride 1, got 1");
  TEXT(conv_transpose1d(f({1, 3, 1}), f({3, 2, 3}), {}, {.padding = 2}), "conv_transpose1d: the result would have size -1 in dimension 2");
  TEXT(conv_transpose1d(f({1, 3, 4}), f({3, 2, 3}), f({3})), "conv_transpose1d: expected bias [2], got [3] (f32)");
}
