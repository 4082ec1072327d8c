// Training steps of networks that are measured elsewhere, too: forward, loss, backward, unscale, optimizer, scaler. Modes of small
// networks are interleaved in rounds; medians are printed, one JSON line a mode.
//   step [--device cuda] [--models mlp_small lenet resnet18] [--precisions fp32 tf32 fp16] [--rounds 15] [--tune plans.txt]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>

#include "halftone/benchmarks/models.h"
#include "halftone/halftone.h"

namespace ht = halftone;
using namespace ht;
using namespace benchmarks;

namespace {

using Clock = std::chrono::steady_clock;

// Where the time of a step goes: waits for the device after every operator, so sums are larger than a step.
class Profile final : public amp::Watcher {
 public:
  explicit Profile(Device device) : device_(device) {}
  void before(const Call&) override { start_ = now(); }
  void after(const Call& c, const Tensors&) override {
    auto& [calls, ms] = by_operator_[c.op->name];
    ++calls;
    ms += std::chrono::duration<double, std::milli>(now() - start_).count();
  }
  void print() const {
    std::vector<std::pair<std::string, std::pair<int, double>>> all(by_operator_.begin(), by_operator_.end());
    std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.second.second > b.second.second; });
    for (auto& [name, entry] : all) std::printf("  %-28s %5d calls %10.3f ms\n", name.c_str(), entry.first, entry.second);
  }

 private:
  Clock::time_point now() const {
    backend(device_.type).synchronize(device_.index);
    return Clock::now();
  }
  Device device_;
  Clock::time_point start_;
  std::map<std::string, std::pair<int, double>> by_operator_;
};

struct Mode {
  std::string precision;
  bool captured;
  std::optional<DType> dtype() const { return precision == "fp16" ? std::optional(DType::f16) : precision == "bf16" ? std::optional(DType::bf16) : std::nullopt; }
};

// A network with its optimizer, and one way of running a step of it.
class Trainer {
 public:
  // With a file for tuned plans the first step is tuned.
  Trainer(const Workload& w, Device device, const Mode& mode, const std::string& plans)
      : device_(device), tf32_(mode.precision == "tf32"), mixed_{.dtype = mode.dtype(), .enabled = mode.dtype().has_value()},
        scaler_({.enabled = mode.dtype() == DType::f16}), net_(w.network()) {
    manual_seed(0);
    net_->to(device);
    if (w.adam) opt_ = std::make_unique<optim::AdamW>(net_->parameters(), optim::AdamWOptions{.lr = 1e-3});
    else opt_ = std::make_unique<optim::SGD>(net_->parameters(), optim::SGDOptions{.lr = 1e-3, .momentum = 0.9});
    for (int i = 0; i < 2; ++i) {
      inputs_.push_back(w.vocabulary > 0 ? randint(0, w.vocabulary, w.input).to(device) : randn(w.input, {.device = device}));
      targets_.push_back(randint(0, w.classes, {w.targets}).to(device));
    }
    if (!plans.empty()) tune([&] { step(inputs_[0], targets_[0]); }, plans);
    if (mode.captured) {
      auto graph = std::make_shared<Captured<std::function<Tensor(const Tensor&, const Tensor&)>>>(
          [this](const Tensor& x, const Tensor& t) { return step(x, t); }, CaptureOptions{});
      run_ = [graph](const Tensor& x, const Tensor& t) { return (*graph)(x, t); };
    } else run_ = [this](const Tensor& x, const Tensor& t) { return step(x, t); };
  }

  // Milliseconds a step, over `steps` of them between two waits for the device.
  double measure(int steps) {
    backend(device_.type).synchronize(device_.index);
    auto start = Clock::now();
    allow_tf32(tf32_);
    for (int i = 0; i < steps; ++i) loss_ = run_(inputs_[next_ % 2], targets_[next_ % 2]), ++next_;
    backend(device_.type).synchronize(device_.index);
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count() / steps;
  }
  double loss() const { return loss_.item(); }
  void profile() {
    Profile p(device_);
    {
      amp::Watching on(p);
      loss_ = step(inputs_[0], targets_[0]);
    }
    p.print();
  }

 private:
  Tensor step(const Tensor& x, const Tensor& target) {
    allow_tf32(tf32_);
    opt_->zero_grad();
    Tensor loss;
    {
      amp::Autocast region(mixed_);
      loss = cross_entropy((*net_)(x), target);
    }
    scaler_.scale(loss).backward();
    scaler_.step(*opt_);
    scaler_.update();
    return loss;
  }

  Device device_;
  bool tf32_;
  amp::AutocastOptions mixed_;
  amp::GradScaler scaler_;
  std::unique_ptr<nn::Module> net_;
  std::unique_ptr<optim::Optimizer> opt_;
  std::vector<Tensor> inputs_, targets_;
  std::function<Tensor(const Tensor&, const Tensor&)> run_;
  Tensor loss_;
  int64_t next_ = 0;
};

// One mode at a time is in memory: large models would not fit together.
void bench(const Workload& w, Device device, const std::vector<std::string>& precisions, int rounds, bool profile, const std::string& plans) {
  std::vector<Mode> modes;
  for (auto& p : precisions)
    for (bool captured : {false, true}) {
      if (captured && device.type == DeviceType::cpu) continue;
      modes.push_back({p, captured});
    }
  bool together = w.input.numel() * w.targets < int64_t{1} << 33;  // small: rounds of all modes take turns
  std::vector<std::unique_ptr<Trainer>> trainers(modes.size());
  std::vector<std::vector<double>> times(modes.size());
  std::vector<int> steps(modes.size());
  std::vector<int64_t> peaks(modes.size());
  auto start = [&](size_t i) {
    reset_peak_memory(device);
    int64_t before = memory_stats(device).allocated;
    trainers[i] = std::make_unique<Trainer>(w, device, modes[i], plans);
    trainers[i]->measure(5);
    steps[i] = std::clamp(static_cast<int>(20 / trainers[i]->measure(3)), 1, 500);  // rounds of about 20 ms
    peaks[i] = memory_stats(device).peak - before;
  };
  auto tell = [&](size_t i) {
    std::sort(times[i].begin(), times[i].end());
    std::printf("{\"case\": \"%s\", \"device\": \"%s\", \"precision\": \"%s\", \"how\": \"%s\", \"ms\": %.5f, \"lo\": %.5f, \"hi\": %.5f, \"peak_mib\": %.1f, \"loss\": %.4f}\n",
                w.name, str(device).c_str(), modes[i].precision.c_str(), modes[i].captured ? "captured" : "eager", times[i][times[i].size() / 2], times[i][times[i].size() / 10],
                times[i][times[i].size() * 9 / 10], static_cast<double>(peaks[i]) / 1048576, trainers[i]->loss());
    if (profile) trainers[i]->profile();
    std::fflush(stdout);
  };
  if (together) {
    for (size_t i = 0; i < modes.size(); ++i) start(i);
    for (int r = 0; r < rounds; ++r)
      for (size_t i = 0; i < modes.size(); ++i) times[i].push_back(trainers[i]->measure(steps[i]));
    for (size_t i = 0; i < modes.size(); ++i) tell(i);
    return;
  }
  for (size_t i = 0; i < modes.size(); ++i) {
    start(i);
    for (int r = 0; r < rounds; ++r) times[i].push_back(trainers[i]->measure(steps[i]));
    tell(i);
    trainers[i].reset();
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string device = "cpu";
  std::vector<std::string> wanted = {"mlp_small"}, precisions = {"fp32", "fp16", "bf16"};
  int rounds = 15;
  bool profile = false;
  std::string plans;
  CLI::App app("Times training steps in fp32 and mixed precision, eager and captured; one JSON line a mode");
  app.add_option("--device", device, "cpu or cuda")->capture_default_str();
  app.add_option("--models", wanted, "mlp_small mlp_wide lenet resnet18 resnet50 gpt2")->capture_default_str();
  app.add_option("--precisions", precisions, "fp32 tf32 fp16 bf16")->capture_default_str()->check(CLI::IsMember({"fp32", "tf32", "fp16", "bf16"}));
  app.add_option("--rounds", rounds, "interleaved rounds")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--tune", plans, "choose kernels by timing them first, and keep the choices in this file");
  app.add_flag("--profile", profile, "the time of each operator in an eager step, too");
  CLI11_PARSE(app, argc, argv);
  try {
    std::printf("%s\n", build_info().c_str());
    for (auto& w : workloads())
      if (std::find(wanted.begin(), wanted.end(), w.name) != wanted.end()) bench(w, ht::device(device), precisions, rounds, profile, plans);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "step: %s\n", e.what());
    return 1;
  }
}
