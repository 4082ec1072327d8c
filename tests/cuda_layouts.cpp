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
    for (auto& s : {Shape{w, c, 3, 3}, Shape{w, w, 3, 3}, Shape{w}, Shape{w}, Shape{w}, Shape{w}, Shape{w, w, 1, 1}, Shape{w}, Shape{w}}) weights.push_back(randn(s) * 0.3);
  }
  // The images between, and the sum that is differentiated.
  std::vector<Tensor> forward(const Tensors& p, const Tensor& x) const {
    BatchNormOptions training{.training = true};
    Tensor a = conv2d(x, p[0], {}, {.padding = 1});
    Tensor b = batch_norm_relu(a, p[2], p[3], {}, {}, training);
    Tensor c = max_pool2d(b, 3, {.stride = 2, .padding = 1});
    Tensor d = conv2d(c, p[1], {}, {.padding = 1});
    Tensor z = conv2d(c, p[6]), e = batch_norm_add_relu(d, z, p[4], p[5], {}, {}, training);
    Tensor f = batch_norms_relu(d, {p[4], p[5], {}, {}}, z, {p[7], p[8], {}, {}}, training);
    Tensor g = e * 0.5 + silu(c) - f * 0.25;
    Tensor h = avg_pool2d(g, 2);
    return {a, b, c, d, e, f, g, h, (h * h).to(DType::f32).mean()};
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
  for (auto [c, w, size] : {std::array<int64_t, 3>{8, 16, 12}, {3, 24, 13}, {1, 5, 8}, {16, 64, 16}})
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

TEST_CASE("gradients around shortcuts agree with f64, whether kernels add them up or not, tuned or not") {
  NEEDS_CUDA();
  struct Case { int64_t n, c, o, side, kernel, stride, groups; };
  for (Case s : {Case{4, 64, 256, 14, 1, 1, 1}, Case{16, 256, 64, 28, 1, 1, 1}, Case{4, 64, 128, 14, 1, 2, 1}, Case{4, 64, 64, 14, 3, 1, 1},
                 Case{4, 64, 128, 15, 3, 2, 1}, Case{4, 32, 32, 9, 3, 1, 4}, Case{3, 16, 16, 9, 3, 1, 16}, Case{3, 7, 13, 5, 1, 1, 1},
                 Case{3, 5, 9, 6, 3, 2, 1}, Case{2, 12, 4, 8, 1, 1, 1}, Case{8, 512, 512, 7, 3, 1, 1}})
    for (auto [t, tf32, bound] :
         {std::tuple{DType::f16, false, 4e-3}, {DType::bf16, false, 3e-2}, {DType::f32, false, 1e-5}, {DType::f32, true, 5e-3}}) {
      INFO(s.n << " images of " << s.c << " channels, side " << s.side << ", to " << s.o << ", kernel " << s.kernel << ", stride " << s.stride
               << ", groups " << s.groups << ", " << name(t) << (tf32 ? ", TF32" : ""));
      manual_seed(5);
      const double scale = 1 / std::sqrt(static_cast<double>(s.o / s.groups * s.kernel * s.kernel));
      Tensors rounded{randn({s.n, s.c, s.side, s.side}).to(t), (randn({s.o, s.c / s.groups, s.kernel, s.kernel}) * scale).to(t)};
      Conv2dOptions options{.stride = s.stride, .padding = s.kernel / 2, .groups = s.groups};
      Tensor y = conv2d(rounded[0], rounded[1], {}, options), through = randn(y.shape()).to(t), past = randn(rounded[0].shape()).to(t);
      auto gradients = [&](Device device, DType dtype) {
        Tensors p = moved(rounded, device, dtype);
        auto dot = [&](const Tensor& a, const Tensor& b) { return (a * b.to({.dtype = dtype, .device = device})).to(DType::f32).sum(); };
        Tensor h = p[0] * 1, convolved = dot(conv2d(h, p[1], {}, options), through), total = convolved + dot(h, past);
        return grad({total}, {p[0], h, p[1]});
      };
      auto expected = gradients(Device::cpu(), DType::f64);
      allow_tf32(tf32);
      auto check = [&] {
        auto got = gradients(gpu, t), again = got;
        amp::Trace trace = amp::trace([&] { got = gradients(gpu, t); });
        CHECK(std::any_of(trace.lines.begin(), trace.lines.end(), [](auto& l) { return l.op == "conv_input" && l.in.size() == 3; }));
        for (size_t i = 0; i < got.size(); ++i) {
          INFO("gradient " << i);
          CHECK(difference(got[i], expected[i]) < bound);
          CHECK(difference(got[i], again[i]) == 0);
        }
      };
      check();
      if (t == DType::f16) {  // cuDNN compiles candidates that add: seconds for each problem
        tune([&] { gradients(gpu, t); });
        check();
      }
      allow_tf32(false);
    }
}

TEST_CASE("a convolution's gradient is added to what the kernel before it writes, also while that still runs") {
  NEEDS_CUDA();
  auto last = [](Shape s, double scale) { return (randn({s[0], s[2], s[3], s[1]}) * scale).to(DType::f16).to(gpu).permute({0, 3, 1, 2}); };
  struct Case { int64_t n, c, o, side, kernel; };
  for (Case s : {Case{64, 64, 64, 14, 3}, {64, 64, 256, 14, 1}, {32, 512, 512, 7, 3}}) {
    INFO(s.n << " images of " << s.c << " channels, side " << s.side << ", to " << s.o << ", kernel " << s.kernel);
    Tensor g = last({s.n, s.o, s.side, s.side}, 1), w = last({s.o, s.c, s.kernel, s.kernel}, .02);
    // A few blocks, which write row after row.
    constexpr int64_t columns = 4096;
    const int64_t rows = s.n * s.c * s.side * s.side / columns;
    auto late = [&](double step) {
      return cumsum(full({rows, columns}, step).to(DType::f16).to(gpu), 0).view({s.n, s.side, s.side, s.c}).permute({0, 3, 1, 2});
    };
    ConvAttrs attrs;
    for (int d : {0, 1}) {
      attrs.size[d] = s.side;
      attrs.before[d] = attrs.after[d] = s.kernel / 2;
    }
    auto sum = [&](const Tensor& addend) { return call(op::conv_input, {g, w, addend}, Attrs::of(attrs)); };
    tune([&] { sum(late(.01)); });
    for (int i = 1; i <= 10; ++i) {
      Tensor addend = late(.01 * i), soon = sum(addend);
      CHECK(difference(soon, sum(addend)) == 0);
    }
  }
}

TEST_CASE("what waits for a convolution's gradient may lie in any way") {
  NEEDS_CUDA();
  for (DType t : {DType::f16, DType::f32}) {
    Tensor g = randn({2, 32, 8, 8}).to(t).to(gpu), w = randn({32, 16, 1, 1}).to(t).to(gpu), a = randn({2, 16, 8, 8}).to(t).to(gpu);
    Tensor last = a.permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2}), across = a.transpose(2, 3).contiguous().transpose(2, 3);
    REQUIRE(turned(last));
    ConvAttrs attrs;
    attrs.size[0] = attrs.size[1] = 8;
    auto sum = [&](const Tensor& addend) { return call(op::conv_input, {g, w, addend}, Attrs::of(attrs)); };
    Tensor expected = sum(a);
    CHECK(difference(expected, conv2d_input(g.to(DType::f64), w.to(DType::f64), 8) + a.to(DType::f64)) < (t == DType::f16 ? 2e-3 : 1e-5));
    for (auto& addend : {last, across, cat({a, a}, 1).slice(1, 16, 32)}) CHECK(difference(sum(addend), expected) == 0);
    CHECK_THROWS_WITH(sum(a.slice(1, 0, 8)), Contains("conv2d_input: expected an addend [2, 16, 8, 8]"));
  }
}
