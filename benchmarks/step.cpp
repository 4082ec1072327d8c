// One training step of the multi-layer perceptrons that benchmarks/peers measures too: forward, loss, backward, unscale, optimizer,
// scaler. Modes are interleaved in rounds; medians are printed, one JSON line a mode.
//   step [--device cuda] [--models mlp_small mlp_wide] [--rounds 15]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>

#include "halftone/halftone.h"

namespace ht = halftone;
using namespace ht;

namespace {

using Clock = std::chrono::steady_clock;

struct Model { const char* name; int64_t batch; std::vector<int64_t> widths; };
const std::vector<Model> models = {{"mlp_small", 128, {784, 256, 128, 10}}, {"mlp_wide", 8192, {4096, 4096, 4096, 4096, 1000}}};

// A network with its optimizer, and one way of running a step of it.
class Trainer {
 public:
  Trainer(const Model& m, Device device, std::optional<DType> dtype, bool captured)
      : device_(device), mixed_{.dtype = dtype, .enabled = dtype.has_value()}, scaler_({.enabled = dtype == DType::f16}) {
    manual_seed(0);
    for (size_t i = 0; i + 1 < m.widths.size(); ++i) {
      net_.add(nn::Linear(m.widths[i], m.widths[i + 1]));
      if (i + 2 < m.widths.size()) net_.add(nn::ReLU());
    }
    net_.to(device);
    opt_ = std::make_unique<optim::SGD>(net_.parameters(), optim::SGDOptions{.lr = 0.01, .momentum = 0.9});
    for (int i = 0; i < 4; ++i) {
      inputs_.push_back(randn({m.batch, m.widths[0]}, {.device = device}));
      targets_.push_back(randint(0, m.widths.back(), {m.batch}).to(device));
    }
    if (captured) {
      auto graph = std::make_shared<Captured<std::function<Tensor(const Tensor&, const Tensor&)>>>(
          [this](const Tensor& x, const Tensor& t) { return step(x, t); }, CaptureOptions{});
      run_ = [graph](const Tensor& x, const Tensor& t) { return (*graph)(x, t); };
    } else run_ = [this](const Tensor& x, const Tensor& t) { return step(x, t); };
  }

  // Milliseconds a step, over `steps` of them between two waits for the device.
  double measure(int steps) {
    backend(device_.type).synchronize(device_.index);
    auto start = Clock::now();
    for (int i = 0; i < steps; ++i) loss_ = run_(inputs_[next_ % 4], targets_[next_ % 4]), ++next_;
    backend(device_.type).synchronize(device_.index);
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count() / steps;
  }
  double loss() const { return loss_.item(); }

 private:
  Tensor step(const Tensor& x, const Tensor& target) {
    opt_->zero_grad();
    Tensor loss;
    {
      amp::Autocast region(mixed_);
      loss = cross_entropy(net_(x), target);
    }
    scaler_.scale(loss).backward();
    scaler_.step(*opt_);
    scaler_.update();
    return loss;
  }

  Device device_;
  amp::AutocastOptions mixed_;
  amp::GradScaler scaler_;
  nn::Sequential net_;
  std::unique_ptr<optim::SGD> opt_;
  std::vector<Tensor> inputs_, targets_;
  std::function<Tensor(const Tensor&, const Tensor&)> run_;
  Tensor loss_;
  int64_t next_ = 0;
};

struct Mode { const char* name; std::optional<DType> dtype; bool captured; };

void bench(const Model& m, Device device, int rounds) {
  std::vector<Mode> modes = {{"fp32", {}, false}, {"fp16", DType::f16, false}, {"bf16", DType::bf16, false}};
  if (device.type == DeviceType::cuda)
    for (auto mode : std::vector(modes)) modes.push_back({mode.name, mode.dtype, true});
  else std::erase_if(modes, [](auto& mode) { return mode.dtype == DType::f16; });
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (auto& mode : modes) trainers.push_back(std::make_unique<Trainer>(m, device, mode.dtype, mode.captured));
  std::vector<std::vector<double>> times(modes.size());
  std::vector<int> steps;
  for (auto& t : trainers) {
    t->measure(5);
    steps.push_back(std::clamp(static_cast<int>(20 / t->measure(3)), 1, 500));  // rounds of about 20 ms
  }
  for (int r = 0; r < rounds; ++r)
    for (size_t i = 0; i < modes.size(); ++i) times[i].push_back(trainers[i]->measure(steps[i]));
  for (size_t i = 0; i < modes.size(); ++i) {
    std::sort(times[i].begin(), times[i].end());
    std::printf("{\"model\": \"%s\", \"device\": \"%s\", \"precision\": \"%s\", \"captured\": %s, \"ms\": %.5f, \"p10\": %.5f, \"p90\": %.5f, \"loss\": %.4f}\n", m.name,
                str(device).c_str(), modes[i].name, modes[i].captured ? "true" : "false", times[i][times[i].size() / 2], times[i][times[i].size() / 10],
                times[i][times[i].size() * 9 / 10], trainers[i]->loss());
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string device = "cpu";
  std::vector<std::string> wanted = {"mlp_small"};
  int rounds = 15;
  CLI::App app("Times training steps of multi-layer perceptrons in fp32 and mixed precision");
  app.add_option("--device", device, "cpu or cuda")->capture_default_str();
  app.add_option("--models", wanted, "mlp_small, mlp_wide")->capture_default_str();
  app.add_option("--rounds", rounds, "interleaved rounds")->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    std::printf("%s\n", build_info().c_str());
    for (auto& m : models)
      if (std::find(wanted.begin(), wanted.end(), m.name) != wanted.end()) bench(m, ht::device(device), rounds);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "step: %s\n", e.what());
    return 1;
  }
}
