// How near kernels come to what the device gives: large operators and their gradients beside a copy, and products beside a large product, all
// in one run. Bytes are those that must move at least: each operand read and each result written once. "share" is their rate over the copy's,
// or for products arithmetic over the large product's. Medians of rounds in which the cases take turns; a gradient's time is that of forward and
// backward less forward's.
//   roofline [--device cuda] [--rounds 9] [--json FILE]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "halftone/benchmarks/options.h"
#include "halftone/halftone.h"

namespace ht = halftone;
using namespace ht;

namespace {

using Clock = std::chrono::steady_clock;

struct Case {
  std::string name, dtype;
  double bytes, flops;  // one of them, of a run
  std::function<void()> run;
  bool after_forward = false;  // a run includes that of the case before
  std::vector<double> seconds = {};
  double median() const {
    std::vector<double> sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

double bytes_of(const std::vector<Tensor>& tensors) {
  double sum = 0;
  for (auto& t : tensors) sum += static_cast<double>(t.numel()) * static_cast<double>(size_of(t.dtype()));
  return sum;
}

struct Cases {
  Device device;
  DType dtype;
  std::vector<Case> all = {};

  Tensor random(const Shape& shape) const { return randn(shape, {.device = device}).to(dtype); }
  Tensor leaf(const Shape& shape) const { return random(shape).requires_grad_(); }

  void add(const std::string& name, double bytes, std::function<void()> run) { all.push_back({name, str(dtype), bytes, 0, std::move(run)}); }
  // f(in), and its gradients for those of `in` that require one; backward reads `kept` beside the gradient of f's result.
  void both(const std::string& name, const std::vector<Tensor>& in, const std::vector<Tensor>& kept,
            std::function<Tensor(const std::vector<Tensor>&)> f) {
    const Tensor y = f(in), gradient = y.numel() == 1 ? Tensor() : randn(y.shape(), {.device = device}).to(y.dtype());
    std::vector<Tensor> leaves;
    for (auto& t : in) if (t.requires_grad()) leaves.push_back(t);
    add(name, bytes_of(in) + bytes_of({y}), [=] { NoGrad off; f(in); });
    add(name + ", gradient", bytes_of(kept) + bytes_of(leaves) + (y.numel() == 1 ? 0 : bytes_of({y})), [=] {
      std::vector<Tensor> fresh;  // whose gradients need not be copied into a buffer that is there
      for (auto& t : in) fresh.push_back(t.requires_grad() ? t.detach().requires_grad_() : t);
      f(fresh).backward({.gradient = gradient});
    });
    all.back().after_forward = true;
  }
  void product(const std::string& name, int64_t m, int64_t n, int64_t k) {
    const Tensor a = random({m, k}), b = random({k, n});
    all.push_back({name, str(dtype), 0, 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k), [a, b] { matmul(a, b); }});
  }
};

// The first memory case is the copy, the first product the large one.
std::vector<Case> cases(Device device, DType dtype) {
  Cases c{device, dtype};
  const bool small = device.type == DeviceType::cpu;
  const int64_t rows = small ? 2048 : 65536, width = 1024, words = small ? 4096 : 50304;
  const Shape shape{rows, width};
  const Tensor a = c.leaf(shape), b = c.leaf(shape), out = c.random(shape), w = ones({width}, {.device = device, .requires_grad = true}),
               v = zeros({width}, {.device = device, .requires_grad = true});
  c.add("copy", bytes_of({a, out}), [=] { NoGrad off; Tensor(out).copy_(a); });
  c.both("add", {a, b}, {}, [](auto& in) { return in[0] + in[1]; });
  c.both("relu", {a}, {a}, [](auto& in) { return relu(in[0]); });
  c.both("gelu", {a}, {a}, [](auto& in) { return gelu(in[0]); });
  c.both("dropout", {a}, {}, [](auto& in) { return dropout(in[0], 0.1); });
  const DType other = dtype == DType::f32 ? DType::f16 : DType::f32;
  c.add("cast to " + str(other), bytes_of({a}) * (1 + static_cast<double>(size_of(other)) / static_cast<double>(size_of(dtype))),
        [=] { NoGrad off; a.to(other); });
  c.both("sum of rows", {a}, {}, [](auto& in) { return in[0].sum({-1}); });
  c.both("sum of columns", {a}, {}, [](auto& in) { return in[0].sum({0}); });
  c.both("softmax", {a}, {a}, [](auto& in) { return softmax(in[0], -1); });
  c.both("layer_norm", {a, w, v}, {a}, [=](auto& in) { return layer_norm(in[0], {width}, in[1], in[2]); });
  c.both("rms_norm", {a, w}, {a}, [=](auto& in) { return rms_norm(in[0], {width}, in[1]); });
  const Tensor images = c.leaf({small ? 8 : 256, 64, 56, 56}), scale = ones({64}, {.device = device, .requires_grad = true}),
               shift = zeros({64}, {.device = device, .requires_grad = true});
  c.both("batch_norm", {images, scale, shift}, {images},
         [](auto& in) { return batch_norm(in[0], in[1], in[2], Tensor(), Tensor(), {.training = true}); });
  const Tensor logits = c.leaf({small ? 512 : 8192, words}), target = randint(0, words, {logits.size(0)}, {.device = device});
  c.both("cross_entropy", {logits}, {logits}, [=](auto& in) { return cross_entropy(in[0], target); });
  const Tensor table = c.leaf({words, width}), tokens = randint(0, words, {rows}, {.device = device});
  c.add("embedding", 2 * static_cast<double>(rows * width) * static_cast<double>(size_of(dtype)), [=] { NoGrad off; embedding(table, tokens); });
  const int64_t n = small ? 1024 : 8192;
  c.product("matmul, large", n, n, n);
  c.product("matmul, 1000 wide", n, 1000, 1000);
  c.product("matmul, 100 rows", 100, n, n);
  c.product("matmul, odd sizes", 4095, 4097, 2047);
  return std::move(c.all);
}

// One step over weights of 64 x 2^20 elements (4 on the CPU): gradient, weight and moments are read, the last two written.
std::vector<Case> optimizer_cases(Device device) {
  Cases c{device, DType::f32};
  const Tensor w = c.leaf({device.type == DeviceType::cpu ? 4 : 64, 1 << 20});
  w.sum().backward();
  auto adam = std::make_shared<optim::AdamW>(std::vector{w}, optim::AdamWOptions{.lr = 1e-3});
  auto sgd = std::make_shared<optim::SGD>(std::vector{w}, optim::SGDOptions{.lr = 1e-3, .momentum = 0.9});
  c.add("AdamW", 7 * bytes_of({w}), [adam] { adam->step(); });
  c.add("SGD with momentum", 5 * bytes_of({w}), [sgd] { sgd->step(); });
  return std::move(c.all);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("How near kernels come to what the device gives.");
  std::string device_name = devices(DeviceType::cuda).empty() ? "cpu" : "cuda", json_file;
  int rounds = 9;
  app.add_option("--device", device_name, "cpu or cuda")->capture_default_str();
  app.add_option("--rounds", rounds, "timed rounds")->capture_default_str()->check(benchmarks::positive_number, "POSITIVE");
  app.add_option("--json", json_file, "writes the rows there, a JSON object a line");
  CLI11_PARSE(app, argc, argv);
  try {
    const Device device = device_name == "cuda" ? Device::cuda() : Device::cpu();
    auto wait = [&] { backend(device.type).synchronize(device.index); };
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> json(json_file.empty() ? nullptr : std::fopen(json_file.c_str(), "w"), std::fclose);
    std::printf("%s\n%-26s %-5s %10s %9s %9s %7s\n", build_info().c_str(), "case", "dtype", "us", "GB/s", "TFLOP/s", "share");
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      auto all = cases(device, dtype);
      if (dtype == DType::f32) for (auto& c : optimizer_cases(device)) all.push_back(std::move(c));
      for (int round = -1; round < rounds; ++round)  // the first warms up
        for (auto& c : all) {
          wait();
          const auto start = Clock::now();
          constexpr int runs = 4;
          for (int i = 0; i < runs; ++i) c.run();
          wait();
          if (round >= 0) c.seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count() / runs);
        }
      const auto product = std::find_if(all.begin(), all.end(), [](const Case& c) { return c.flops > 0; });
      const double copy_rate = all.front().bytes / all.front().median(), product_rate = product->flops / product->median();
      for (size_t i = 0; i < all.size(); ++i) {
        const Case& c = all[i];
        const double us = (c.median() - (c.after_forward ? all[i - 1].median() : 0)) * 1e6;
        const double gb_per_s = c.bytes / us * 1e-3, tflops = c.flops / us * 1e-6;
        const double share = c.flops > 0 ? tflops * 1e12 / product_rate : gb_per_s * 1e9 / copy_rate;
        std::printf("%-26s %-5s %10.1f %9.0f %9.1f %6.0f%%\n", c.name.c_str(), c.dtype.c_str(), us, gb_per_s, tflops, 100 * share);
        if (json)
          std::fprintf(json.get(), "{\"case\": \"%s\", \"dtype\": \"%s\", \"us\": %.2f, \"gb_per_s\": %.1f, \"tflops\": %.2f, \"share\": %.3f}\n",
                       c.name.c_str(), c.dtype.c_str(), us, gb_per_s, tflops, share);
      }
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "roofline: %s\n", e.what());
    return 1;
  }
}
