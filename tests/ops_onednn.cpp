// Products and convolutions that are large enough for a library's blocks, images and channels: against f64, which is Eigen's, within the
// bound of docs/operators.md; the same bits for any number of threads and in a forked child. They hold in a build without oneDNN, too.
#include <sys/wait.h>
#include <unistd.h>

#include "halftone/core/parallel.h"
#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/threads.h"

using namespace halftone;
using halftone::tests::Threads;

namespace {

Tensor wide(const Tensor& t) { return t.to(DType::f64); }

// |y - exact| <= (k + 8) 2^-24 sum |terms|, and a rounding of y's own dtype.
void check_within(const Tensor& y, const Tensor& exact, const Tensor& magnitude, int64_t k) {
  double rounding = y.dtype() == DType::bf16 ? 0x1p-8 : y.dtype() == DType::f16 ? 0x1p-11 : 0;
  Tensor bound = magnitude * (static_cast<double>(k + 8) * 0x1p-24) + abs(exact) * rounding + (y.dtype() == DType::f16 ? 0x1p-25 : 0.0);
  CHECK(y.shape() == exact.shape());
  CHECK(amax(abs(wide(y) - exact) - bound).item<double>() <= 0);
}

bool same_bits(const Tensor& a, const Tensor& b) { return a.shape() == b.shape() && all(eq(a, b)).item<bool>(); }

struct Product { int64_t m, n, k; };
// Both sides cut, one side, neither; odd ends; vectors; long sums.
const std::vector<Product> products = {{1, 300, 70}, {300, 1, 70}, {65, 129, 33}, {128, 256, 784}, {257, 63, 500}, {1000, 17, 90}, {16, 1100, 64},
                                       {300, 310, 1}, {2, 2, 5000}, {513, 530, 130}, {20, 20, 4}};

struct Convolution { Shape x, w; Conv2dOptions o; };
const std::vector<Convolution> convolutions = {
    {{5, 3, 17, 15}, {64, 3, 3, 3}, {.padding = 1}},                          // few channels in
    {{33, 1, 12, 12}, {32, 1, 5, 5}, {}},                                     // one; runs of images with a shorter last
    {{2, 130, 9, 7}, {200, 130, 3, 3}, {.stride = 2, .padding = 1}},          // pieces of channels with a shorter last
    {{1, 256, 8, 8}, {256, 256, 1, 1}, {}},                                   // one image
    {{3, 64, 10, 11}, {48, 32, 3, 2}, {.padding = Size2{1, 0}, .dilation = 2, .groups = 2}},
    {{17, 70, 6, 6}, {40, 70, 3, 3}, {.padding = 1}},
    {{4, 16, 9, 9}, {16, 1, 3, 3}, {.padding = 1, .groups = 16}},             // one channel a group
};

}  // namespace

TEST_CASE("large products are within the bound of their length, however their factors lie") {
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (auto [m, n, k] : products) {
      INFO(str(t) << " " << m << " x " << n << " x " << k);
      manual_seed(1);
      Tensor a = randn({m, k}).to(t), b = randn({k, n}).to(t), exact = matmul(wide(a), wide(b)), magnitude = matmul(abs(wide(a)), abs(wide(b)));
      check_within(matmul(a, b), exact, magnitude, k);
      check_within(matmul(a.t().contiguous().t(), b.t().contiguous().t()), exact, magnitude, k);
      check_within(matmul(cat({a, a}, 1).slice(1, k, 2 * k), cat({b, b}, 0).slice(0, 0, k)), exact, magnitude, k);
      Tensor w = b.t().contiguous(), bias = randn({n}).to(t);
      check_within(linear(a, w, bias), exact + wide(bias), magnitude + abs(wide(bias)), k + 1);
      check_within(linear_relu(a, w, bias), relu(exact + wide(bias)), magnitude + abs(wide(bias)), k + 1);
    }
}

TEST_CASE("large convolutions and their transposes are within the bound of their length") {
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (auto& [x_shape, w_shape, o] : convolutions)
      for (bool channels_last : {false, true}) {
        INFO(str(t) << " x " << str(x_shape) << " w " << str(w_shape) << (channels_last ? ", channels last" : ""));
        manual_seed(2);
        Tensor x = randn(x_shape).to(t), w = randn(w_shape).to(t), b = randn({w_shape[0]}).to(t);
        Tensor y = conv2d(wide(x), wide(w), wide(b), o), y_size = conv2d(abs(wide(x)), abs(wide(w)), abs(wide(b)), o), g = randn(y.shape()).to(t);
        auto lie = [&](const Tensor& v) { return channels_last ? v.permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2}) : v; };
        Size2 size{x_shape[2], x_shape[3]}, kernel{w_shape[2], w_shape[3]};
        int64_t taps = w_shape[2] * w_shape[3];
        check_within(conv2d(lie(x), w, b, o), y, y_size, w_shape[1] * taps + 1);
        check_within(conv2d_relu(lie(x), lie(w), b, o), relu(y), y_size, w_shape[1] * taps + 1);
        check_within(conv2d_input(lie(g), w, size, o), conv2d_input(wide(g), wide(w), size, o), conv2d_input(abs(wide(g)), abs(wide(w)), size, o),
                     w_shape[0] * taps);
        check_within(conv2d_weight(lie(x), lie(g), kernel, o), conv2d_weight(wide(x), wide(g), kernel, o),
                     conv2d_weight(abs(wide(x)), abs(wide(g)), kernel, o), x_shape[0] * y.size(2) * y.size(3));
      }
}

namespace {

// What every kernel of the two families gives.
Tensors everything(DType t) {
  manual_seed(3);
  Tensors all;
  for (auto [m, n, k] : products) {
    Tensor a = randn({m, k}).to(t), b = randn({k, n}).to(t);
    all.push_back(matmul(a, b));
  }
  for (auto& [x_shape, w_shape, o] : convolutions) {
    Tensor x = randn(x_shape).to(t), w = randn(w_shape).to(t), y = conv2d(x, w, {}, o);
    all.push_back(y);
    all.push_back(conv2d_input(y, w, {x_shape[2], x_shape[3]}, o));
    all.push_back(conv2d_weight(x, y, {w_shape[2], w_shape[3]}, o));
  }
  return all;
}
bool same_bits(const Tensors& a, const Tensors& b) {
  for (size_t i = 0; i < a.size(); ++i) if (!same_bits(a[i], b[i])) return false;
  return a.size() == b.size();
}

}  // namespace

TEST_CASE("bits of products and convolutions do not depend on the number of threads, nor on the run") {
  for (DType t : {DType::f32, DType::bf16}) {
    Threads one(1);
    Tensors expected = everything(t);
    for (int n : {1, 2, 5}) {
      INFO(str(t) << ", " << n << " threads");
      set_num_threads(n);
      CHECK(same_bits(everything(t), expected));
    }
  }
}

TEST_CASE("a forked child multiplies and convolves as its parent does") {
  Threads three(3);
  Tensors expected = everything(DType::f32);
  pid_t child = fork();
  if (child == 0) _exit(same_bits(everything(DType::f32), expected) ? 0 : 1);
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(same_bits(everything(DType::f32), expected));
}

TEST_CASE("a weight that changes in place changes the next result; shapes come and go") {
  manual_seed(4);
  Tensor x = randn({2, 8, 6, 6}), w = randn({16, 8, 3, 3}), first = conv2d(x, w);
  w.mul_(2);
  CHECK(same_bits(conv2d(x, w), first * 2));
  for (int64_t n = 1; n < 600; ++n) {  // more than a cache of primitives holds
    Tensor y = conv2d(ones({1, 2, 1, n + 1}), ones({4, 2, 1, 2}));
    if (!same_bits(y, full({1, 4, 1, n}, 4))) FAIL("width " << n);
  }
  CHECK(same_bits(conv2d(x, w), first * 2));
}

TEST_CASE("weights that stay are laid out once, and those that are written or gone anew") {
  for (DType t : {DType::f32, DType::bf16})
    for (auto& e : convolutions) {
      INFO(str(e.w));
      Tensor x = randn(e.x).to(t), bias;
      for (int round = 0; round < 3; ++round) {  // the next round's weights may lie where these did
        Tensor w = randn(e.w).to(t);
        for (int change = 0; change < 3; ++change) {
          const Tensor expected = conv2d(x, w.clone(), bias, e.o);  // of weights that nobody has used
          for (int use = 0; use < 4; ++use) CHECK(same_bits(conv2d(x, w, bias, e.o), expected));
          Tensor part = x.slice(0, 0, 1);
          CHECK(same_bits(conv2d(part, w, bias, e.o), conv2d(part, w.clone(), bias, e.o)));
          w.view({-1}).slice(0, change, change + 1).fill_(change + 2);
        }
      }
    }
}

TEST_CASE("a NaN or an infinity in a factor shows in every result that it reaches, and in no other") {
  manual_seed(5);
  Tensor a = randn({130, 64}), b = randn({64, 70});
  a.select(0, 100).select(0, 3).fill_(std::numeric_limits<double>::quiet_NaN());
  Tensor y = isnan(matmul(a, b)).to(DType::f32);
  CHECK(y.sum().item() == 70);
  CHECK(y.select(0, 100).sum().item() == 70);
  Tensor x = randn({3, 32, 6, 6}), w = randn({64, 32, 3, 3});
  x.select(0, 1).select(0, 31).select(0, 0).select(0, 0).fill_(std::numeric_limits<double>::infinity());
  Tensor z = isfinite(conv2d_relu(x, w)).to(DType::f32);
  CHECK(z.select(0, 0).sum().item() == 64 * 16);
  CHECK(z.select(0, 2).sum().item() == 64 * 16);
  CHECK(z.select(0, 1).sum().item() < 64 * 16);
}
