// f32 products and convolutions on tensor cores (cuda/gemm_3xtf32.cu) against f64's, whose kernels share nothing with them.
#include <cmath>

#include "halftone/autograd/autograd.h"
#include "halftone/core/backend.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"

using namespace halftone;

#define NEEDS_CUDA() \
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device")

namespace {

const Device gpu = Device::cuda(0);
Tensor wide(const Tensor& x) { return x.to(DType::f64); }

// Of each sum of k products, what rounding may make of it: 2^-19 of every product, and every eighth addition, in either direction.
void check_sums(const Tensor& got, const Tensor& want, const Tensor& of_sizes, int64_t k) {
  REQUIRE(got.dtype() == DType::f32);
  REQUIRE(got.shape() == want.shape());
  const double part = 0x1p-19 + static_cast<double>(k) / 8 * 0x1p-24;
  const Tensor over = abs(wide(got) - want) - of_sizes * part;
  CHECK(amax(over).item() <= 0);
}

// x as a part of something larger, so that it begins at no multiple of 16 bytes; NaN around it.
Tensor amid(const Tensor& x) {
  Tensor all = full({x.numel() + 6}, NAN, {.device = x.device()});
  Tensor inside = all.slice(0, 3, 3 + x.numel()).view(x.shape());
  return inside.copy_(x);
}

}  // namespace

TEST_CASE("f32 products of all layouts and sizes") {
  NEEDS_CUDA();
  manual_seed(1);
  struct Case { int64_t m, k, n; };
  for (auto [m, k, n] : {Case{512, 512, 1024}, {700, 701, 702}, {257, 4515, 129}, {64, 32768, 64}, {1000, 470, 333}, {31, 140011, 33}, {16384, 128, 77},
                         {2048, 7840, 10}})
    for (int turned : {0, 1, 2, 3})
      for (bool off : {false, true}) {
        INFO(m << ' ' << k << ' ' << n << ", turned " << turned << ", off " << off);
        Tensor a = randn(turned & 1 ? Shape{k, m} : Shape{m, k}, {.device = gpu}), b = randn(turned & 2 ? Shape{n, k} : Shape{k, n}, {.device = gpu});
        if (off) a = amid(a), b = amid(b);
        if (turned & 1) a = a.t();
        if (turned & 2) b = b.t();
        const Tensor y = matmul(a, b), sizes = matmul(abs(wide(a)), abs(wide(b)));
        check_sums(y, matmul(wide(a), wide(b)), sizes, turned == 3 ? 8 * k : k);  // no kernel of ours
        CHECK(all(eq(matmul(a, b), y)).item());
      }
  const Tensor a = randn({5, 400, 300}, {.device = gpu}), b = randn({5, 300, 250}, {.device = gpu}), shared = randn({1, 300, 250}, {.device = gpu});
  for (auto& right : {b, shared.expand({5, 300, 250})}) check_sums(matmul(a, right), matmul(wide(a), wide(right)), matmul(abs(wide(a)), abs(wide(right))), 300);
  const Tensor x = randn({800, 600}, {.device = gpu}), w = randn({300, 600}, {.device = gpu}), c = randn({300}, {.device = gpu});
  const Tensor sizes = matmul(abs(wide(x)), abs(wide(w)).t()) + abs(wide(c));
  check_sums(linear(x, w, c), linear(wide(x), wide(w), wide(c)), sizes, 600);
  check_sums(linear_relu(x, w, c), linear_relu(wide(x), wide(w), wide(c)), sizes, 600);
}

TEST_CASE("f32 sums are as near as those of plain f32") {
  NEEDS_CUDA();
  manual_seed(2);
  // On average, of the sum of sizes. Sums that tensor cores cut off would be off by some k / 16 units of 2^-24 where all have one sign.
  for (int64_t k : {512, 4096, 16384})
    for (bool one_sign : {true, false}) {
      INFO("k " << k << ", one sign " << one_sign);
      auto draw = [&](const Shape& s) { return one_sign ? uniform_(empty(s, {.device = gpu})) : randn(s, {.device = gpu}); };
      const Tensor a = draw({1024, k}), b = draw({k, 1024});
      const Tensor error = abs(wide(matmul(a, b)) - matmul(wide(a), wide(b))) / matmul(abs(wide(a)), abs(wide(b)));
      CHECK(mean(error).item() < (one_sign ? 0x1p-24 * (2 + std::sqrt(static_cast<double>(k) / 8)) : 0x1p-24));
    }
}

TEST_CASE("f32 products with infinities, NaN, and numbers at both ends") {
  NEEDS_CUDA();
  manual_seed(3);
  const double inf = INFINITY;
  auto same_kind = [](const Tensor& got, const Tensor& want) {  // f64 has no overflow where f32 has
    CHECK(all(eq(isnan(got), isnan(want))).item());
    const Tensor w = want.to(DType::f32);
    CHECK(all(eq(isinf(got), isinf(w))).item());
    CHECK(all(logical_or(isfinite(got), logical_or(isnan(got), eq(got, w)))).item());
  };
  for (auto [m, k] : {std::pair{1024, 256}, {256, 8192}}) {  // of which the latter is summed in parts
    Tensor a = randn({m, k}, {.device = gpu}), b = randn({k, m}, {.device = gpu});
    a.slice(0, 3, 4).slice(1, 7, 8).fill_(inf);
    a.slice(0, 5, 6).slice(1, 9, 10).fill_(NAN);
    a.slice(0, 77, 78).slice(1, 11, 12).fill_(-inf);
    b.slice(0, 11, 12).slice(1, 200, 201).fill_(0);  // times -inf
    b.slice(0, 13, 14).slice(1, 100, 101).fill_(inf);
    b.slice(0, 14, 15).slice(1, 100, 101).fill_(-inf);
    const Tensor y = matmul(a, b);
    same_kind(y, matmul(wide(a), wide(b)));
    CHECK(all(isnan(y.slice(0, 5, 6))).item());
    CHECK(isnan(y.slice(0, 77, 78).slice(1, 200, 201)).item());
    CHECK(isinf(y.slice(0, 3, 4).slice(1, 0, 1)).item());
  }
  const Tensor large = full({512, 512}, 1e30, {.device = gpu}), small = full({512, 512}, 1e-30, {.device = gpu});
  same_kind(matmul(large, large), matmul(wide(large), wide(large)));
  check_sums(matmul(large, small), matmul(wide(large), wide(small)), full({512, 512}, 512, {.dtype = DType::f64, .device = gpu}), 512);
  CHECK(all(eq(matmul(small, small), 0)).item());
  // TF32's least number is 2^-136.
  const Tensor tiny = full({512, 512}, 0x1.fffffep-113, {.device = gpu}), scale = full({512, 512}, 0x1.000002p60, {.device = gpu});
  check_sums(matmul(tiny, scale), matmul(wide(tiny), wide(scale)), matmul(wide(tiny), wide(scale)), 512);
}

TEST_CASE("small linear layers in f32 and their gradients, with infinities and NaN, too") {
  NEEDS_CUDA();
  manual_seed(5);
  struct Case { int64_t rows, in, out; };
  for (auto [rows, in, out] : {Case{128, 784, 256}, {128, 256, 128}, {128, 128, 10}, {33, 57, 10}, {1, 1, 1}, {1000, 5, 3}, {7, 1000, 31}, {64, 36, 44}})
    for (bool with_relu : {false, true})
      for (bool off : {false, true}) {
        INFO(rows << ' ' << in << ' ' << out << ", relu " << with_relu << ", off " << off);
        auto leaf = [&](const Shape& shape) {
          const Tensor t = randn(shape, {.device = gpu});
          return (off ? amid(t) : t).detach().requires_grad_();
        };
        const std::vector<Tensor> leaves{leaf({rows, in}), leaf({out, in}), leaf({out})};
        std::vector<Tensor> exact, sizes;
        for (auto& l : leaves) exact.push_back(wide(l.detach()).requires_grad_());
        auto layer = [&](const std::vector<Tensor>& t) { return with_relu ? linear_relu(t[0], t[1], t[2]) : linear(t[0], t[1], t[2]); };
        const Tensor y = layer(leaves), z = layer(exact);
        check_sums(y.detach(), z.detach(), linear(abs(wide(leaves[0].detach())), abs(wide(leaves[1].detach())), abs(wide(leaves[2].detach()))), in);
        const Tensor g = randn({rows, out}, {.device = gpu}), through = with_relu ? wide(g) * gt(z.detach(), 0).to(DType::f64) : wide(g);
        const auto got = grad({sum(y * g)}, leaves), want = grad({sum(z * wide(g))}, exact);
        const Tensor up = abs(through), x = abs(exact[0].detach()), w = abs(exact[1].detach());
        check_sums(got[0], want[0], matmul(up, w), out);
        check_sums(got[1], want[1], matmul(up.t(), x), rows);
        check_sums(got[2], want[2], up.sum(0), 8 * rows);
      }
  for (double odd : std::initializer_list<double>{INFINITY, -INFINITY, NAN, 3e38}) {
    const Tensor x = randn({40, 100}, {.device = gpu}), w = randn({50, 100}, {.device = gpu});
    x.slice(0, 3, 4).slice(1, 7, 8).fill_(odd);
    w.slice(0, 9, 10).slice(1, 7, 8).fill_(0);
    w.slice(0, 4, 5).slice(1, 11, 12).fill_(odd);
    const Tensor y = linear(x, w), z = linear(wide(x), wide(w));
    CHECK(all(eq(isnan(y), isnan(z))).item());
    CHECK(all(eq(isinf(y), isinf(z.to(DType::f32)))).item());
  }
}

TEST_CASE("f32 convolutions and their gradients") {
  NEEDS_CUDA();
  manual_seed(4);
  struct Case { Shape x, w; Conv2dOptions o; };
  for (auto& [xs, ws, o] : std::vector<Case>{{{4, 1, 28, 28}, {32, 1, 3, 3}, {}},
                                             {{9, 3, 33, 31}, {64, 3, 7, 7}, {.stride = 2, .padding = 3}},
                                             {{3, 64, 28, 28}, {64, 64, 3, 3}, {.padding = 1}},
                                             {{3, 64, 28, 27}, {128, 64, 3, 3}, {.stride = 2, .padding = 1}},
                                             {{3, 128, 14, 14}, {256, 128, 1, 1}, {}},
                                             {{3, 128, 14, 13}, {192, 128, 1, 1}, {.stride = 2}},
                                             {{5, 20, 17, 13}, {36, 20, 3, 3}, {.padding = same_padding, .dilation = 2}},
                                             {{2, 8, 19, 31}, {12, 8, 4, 5}, {.stride = {3, 2}, .padding = {2, 0}, .dilation = {2, 3}}},
                                             {{2, 8, 20, 20}, {8, 8, 3, 3}, {.stride = 2, .padding = 1, .dilation = 2}},
                                             {{2, 8, 9, 9}, {8, 8, 2, 2}, {.stride = 4}},
                                             {{2, 6, 9, 9}, {7, 6, 3, 3}, {.padding = same_padding}},
                                             {{40, 512, 4, 4}, {512, 512, 3, 3}, {.padding = 1}}})
    for (bool turned : {false, true}) {
      INFO(str(xs) << ' ' << str(ws) << ", turned " << turned);
      auto as_laid = [&](const Tensor& t) { return turned ? t.permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2}) : t; };
      const Tensor x = as_laid(randn(xs, {.device = gpu})), w = as_laid(randn(ws, {.device = gpu})), b = randn({ws[0]}, {.device = gpu});
      const Tensor y = conv2d(x, w, b, o), sizes = conv2d(abs(wide(x)), abs(wide(w)), abs(wide(b)), o);
      const int64_t taps = ws[2] * ws[3];
      check_sums(y, conv2d(wide(x), wide(w), wide(b), o), sizes, taps * ws[1]);
      check_sums(conv2d_relu(x, w, b, o), relu(conv2d(wide(x), wide(w), wide(b), o)), sizes, taps * ws[1]);
      const Tensor g = as_laid(randn(y.shape(), {.device = gpu}));
      const Size2 image(xs[2], xs[3]), kernel(ws[2], ws[3]);
      check_sums(conv2d_input(g, w, image, o), conv2d_input(wide(g), wide(w), image, o), conv2d_input(abs(wide(g)), abs(wide(w)), image, o), taps * ws[0]);
      // A gradient that came along a shortcut is added to that sum, in f32.
      const Tensor h = x.detach().requires_grad_() * 1, z = conv2d(h, w, {}, o), along = (h * x).sum();
      CHECK(all(eq(grad({(z * g).sum() + along}, {h})[0], conv2d_input(g, w, image, o) + x)).item());
      check_sums(conv2d_weight(x, g, kernel, o), conv2d_weight(wide(x), wide(g), kernel, o), conv2d_weight(abs(wide(x)), abs(wide(g)), kernel, o),
                 g.numel() / ws[0]);
      CHECK(all(eq(conv2d_weight(x, g, kernel, o), conv2d_weight(x, g, kernel, o))).item());
    }
}
