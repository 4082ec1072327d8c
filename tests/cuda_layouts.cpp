// Images on a GPU lie with their channels last where tensor cores compute. No result may depend on it: networks of
// convolutions, norms and pools against f64 on the CPU, and that no step of them goes back to the other layout; tuned plans.
#include <fstream>
#include <sstream>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

using namespace halftone;
using Catch::Matchers::Contains;

#define NEEDS_CUDA() \
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device")

namespace {

const Device gpu = Device::cuda();

// Whether t lies with its channels last and not row-major.
bool turned(const Tensor& t) { return t.meta().channels_last() && !t.is_contiguous(); }

double difference(const Tensor& a, const Tensor& b) {
  Tensor x = a.to(Device::cpu()).to(DType::f64), y = b.to(Device::cpu()).to(DType::f64);
  return (x - y).abs().max().item() / std::max(y.abs().max().item(), 1e-3);
}

// Everything that a residual network does to images, and the gradients of it.
struct Network {
  int64_t in, width;
  Tensors weights;
  Network(int64_t c, int64_t w) : in(c), width(w) {
    manual_seed(3);
    for (auto& s : {Shape{w, c, 3, 3}, Shape{w, w, 3, 3}, Shape{w}, Shape{w}, Shape{w}, Shape{w}, Shape{w, w, 1, 1}}) weights.push_back(randn(s) * 0.3);
  }
  // The images between, and the sum that is differentiated.
  std::vector<Tensor> forward(const Tensors& p, const Tensor& x) const {
    BatchNormOptions training{.training = true};
    Tensor a = conv2d(x, p[0], {}, {.padding = 1});
    Tensor b = batch_norm_relu(a, p[2], p[3], {}, {}, training);
    Tensor c = max_pool2d(b, 3, {.stride = 2, .padding = 1});
    Tensor d = conv2d(c, p[1], {}, {.padding = 1});
    Tensor e = batch_norm_add_relu(d, conv2d(c, p[6]), p[4], p[5], {}, {}, training);
    Tensor f = e * 0.5 + silu(c);
    Tensor g = avg_pool2d(f, 2);
    return {a, b, c, d, e, f, g, (g * g).to(DType::f32).mean()};
  }
  std::vector<Tensor> gradients(const Tensors& p, const Tensor& x) const {
    std::vector<Tensor> inputs(p.begin(), p.end());
    inputs.push_back(x);
    return grad({forward(p, x).back()}, inputs);
  }
};

Tensors moved(const Tensors& from, Device device, DType dtype) {
  Tensors to;
  for (auto& t : from) to.push_back(t.to({.dtype = dtype, .device = device}).requires_grad_());
  return to;
}

}  // namespace

TEST_CASE("a residual network in 16 bits keeps its channels last and its results") {
  NEEDS_CUDA();
  for (auto [c, w, size] : {std::array<int64_t, 3>{8, 16, 12}, {3, 24, 9}, {1, 5, 8}, {16, 64, 16}})
    for (DType t : {DType::f16, DType::bf16}) {
      INFO(c << " to " << w << " channels, " << size << ", " << name(t));
      Network net(c, w);
      Tensor x = randn({4, c, size, size});
      // The same rounded numbers on both sides.
      Tensors rounded;
      for (auto& p : net.weights) rounded.push_back(p.to(t));
      Tensors there = moved(rounded, gpu, t), here = moved(rounded, Device::cpu(), DType::f64);
      Tensor x_there = x.to(t).to(gpu).requires_grad_(), x_here = x.to(t).to(DType::f64).requires_grad_();
      auto got = net.forward(there, x_there), want = net.forward(here, x_here);
      for (size_t i = 0; i + 1 < got.size(); ++i) {
        INFO("image " << i);
        CHECK(turned(got[i]));
        CHECK(difference(got[i], want[i]) < (t == DType::f16 ? 0.01 : 0.08));
      }
      auto g = net.gradients(there, x_there), h = net.gradients(here, x_here);
      for (size_t i = 0; i < g.size(); ++i) {
        INFO("gradient " << i);
        CHECK(difference(g[i], h[i]) < (t == DType::f16 ? 0.03 : 0.25));
        CHECK(difference(g[i], net.gradients(there, x_there)[i]) == 0);  // the same bits again
      }
    }
}

TEST_CASE("f32 images turn, too, with and without TF32") {
  NEEDS_CUDA();
  Network net(8, 16);
  Tensors p = moved(net.weights, gpu, DType::f32), here = moved(net.weights, Device::cpu(), DType::f64);
  Tensor x = randn({2, 8, 10, 10}), x_gpu = x.to(gpu);
  for (bool tf32 : {false, true}) {
    allow_tf32(tf32);
    auto got = net.forward(p, x_gpu), want = net.forward(here, x.to(DType::f64));
    allow_tf32(false);
    for (size_t i = 0; i + 1 < got.size(); ++i) {
      CHECK(turned(got[i]));
      CHECK(difference(got[i], want[i]) < (tf32 ? 5e-3 : 1e-5));
    }
  }
}

TEST_CASE("a user sees nothing of the layout") {
  NEEDS_CUDA();
  Tensor x = randn({2, 8, 6, 6}, {.dtype = DType::f16, .device = gpu}), w = randn({16, 8, 3, 3}, {.dtype = DType::f16, .device = gpu});
  Tensor y = conv2d(x, w, {}, {.padding = 1});
  REQUIRE(turned(y));
  Tensor host = y.cpu();
  CHECK(host.is_contiguous());
  for (auto& [a, b] : {std::pair{y.view({2, -1}), host.view({2, -1})}, {y.flatten(1), host.flatten(1)}, {y.reshape({32, 36}), host.reshape({32, 36})},
                       {y.permute({0, 2, 3, 1}), host.permute({0, 2, 3, 1})}, {y.slice(1, 3, 9).sum(1), host.slice(1, 3, 9).sum(1)},
                       {y.contiguous(), host}, {y.clone(), host}, {cat({y, y}, 1), cat({host, host}, 1)}})
    CHECK(difference(a, b) < 2e-3);
  CHECK(y.to_vector<float>() == host.to_vector<float>());
  Tensor z = zeros({2, 16, 6, 6}, {.dtype = DType::f16, .device = gpu});
  z.copy_(y);
  CHECK(difference(z, host) == 0);
  y.add_(1);
  CHECK(difference(y, host + 1) == 0);
}

TEST_CASE("tuned plans compute the same, are kept in a file and not timed again") {
  NEEDS_CUDA();
  Temporary folder;
  std::string file = folder / "plans.txt";
  Tensor x = randn({8, 32, 14, 14}, {.dtype = DType::f16, .device = gpu}), w = randn({64, 32, 3, 3}, {.dtype = DType::f16, .device = gpu});
  Tensor a = randn({96, 2048}, {.dtype = DType::f16, .device = gpu}), b = randn({224, 2048}, {.dtype = DType::f16, .device = gpu});
  auto work = [&] { return std::pair{conv2d(x, w, {}, {.padding = 1}), linear(a, b)}; };
  auto before = work();
  tune([&] {
    auto inside = work();
    CHECK(difference(inside.first, before.first) < 2e-3);
    CHECK(difference(inside.second, before.second) < 2e-3);
  }, file);
  std::ostringstream content;
  content << std::ifstream(file).rdbuf();
  CHECK_THAT(content.str(), Contains("cublaslt "));
  auto after = work();
  CHECK(difference(after.first, before.first) < 2e-3);
  CHECK(difference(after.second, before.second) < 2e-3);
  tune([&] {
    auto again = work();
    CHECK(difference(again.first, after.first) == 0);
    CHECK(difference(again.second, after.second) == 0);
  }, file);
  std::ostringstream unchanged;
  unchanged << std::ifstream(file).rdbuf();
  CHECK(unchanged.str() == content.str());
}

TEST_CASE("kernels of one place agree with the CPU, whatever tuning makes of them") {
  NEEDS_CUDA();
  struct Case { int64_t n, c, o, side; bool bias; };
  for (Case s : {Case{16, 64, 256, 28, false}, Case{16, 256, 64, 28, true}, Case{3, 24, 40, 7, true}, Case{2, 7, 13, 5, true}, Case{1, 512, 128, 1, false}}) {
    INFO(s.n << " images, " << s.c << " to " << s.o << " channels, side " << s.side);
    Tensors host{randn({s.n, s.c, s.side, s.side}), randn({s.o, s.c, 1, 1}) * 0.2, randn({s.o})};
    Tensors on_gpu = moved(host, gpu, DType::f16);
    for (auto& t : on_gpu) host[static_cast<size_t>(&t - on_gpu.begin())] = t.detach().to({.dtype = DType::f32, .device = Device::cpu()}).requires_grad_();
    auto all = [&](const Tensors& t) {
      Tensor y = conv2d(t[0], t[1], s.bias ? t[2] : Tensor());
      std::vector<Tensor> inputs(t.begin(), t.begin() + (s.bias ? 3 : 2)), results = grad({(y * y).to(DType::f32).sum() * 1e-3}, inputs);
      results.push_back(y);
      return results;
    };
    auto expected = all(host);
    auto check = [&](const std::vector<Tensor>& got) {
      for (size_t i = 0; i < got.size(); ++i) {
        INFO("result " << i);
        CHECK(difference(got[i], expected[i]) < 4e-3);
      }
    };
    check(all(on_gpu));
    tune([&] { check(all(on_gpu)); });
    check(all(on_gpu));
  }
}
