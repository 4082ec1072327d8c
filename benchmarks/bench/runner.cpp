// Training steps of ours, and what the device gives at best.
#include "halftone/benchmarks/bench/runner.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <map>

#include "halftone/benchmarks/process_memory.h"

namespace benchmarks {
namespace {

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) { return std::chrono::duration<double, std::milli>(Clock::now() - start).count(); }
void wait_for(Device d) { backend(d.type).synchronize(d.index); }

// Counts what a step calls.
class Work final : public amp::Watcher {
 public:
  void after(const Call& c, const Tensors& out) override {
    if (c.op->view) return;
    ++kernel_calls;
    casts += std::string_view(c.op->name) == "cast";
    for (auto& t : c.in) if (t.defined()) bytes += static_cast<double>(t.numel()) * static_cast<double>(size_of(t.dtype()));
    for (auto& t : out) if (t.defined()) bytes += static_cast<double>(t.numel()) * static_cast<double>(size_of(t.dtype()));
    if (!in_backward()) flops += forward_flops(c, out);
  }
  int64_t kernel_calls = 0, casts = 0;
  double bytes = 0, flops = 0;

 private:
  // Of a product in forward and its two in backward; the first one's input needs no gradient. Of attention those of a causal mask.
  double forward_flops(const Call& c, const Tensors& out) {
    const std::string_view name = c.op->name;
    double multiplications = 0;
    if (name.starts_with("linear") || name == "matmul") multiplications = static_cast<double>(out[0].numel()) * static_cast<double>(c.in[0].size(-1));
    else if (name == "conv" || name == "conv_relu")
      multiplications = static_cast<double>(out[0].numel()) * static_cast<double>(c.in[1].numel() / c.in[1].size(0));
    else if (name == "attention") return 2 * 3 * static_cast<double>(c.in[0].numel()) * static_cast<double>(c.in[1].size(-2));
    if (multiplications == 0) {
      before_ |= name == "embedding";
      return 0;
    }
    return 2 * (std::exchange(before_, true) ? 3 : 2) * multiplications;
  }
  bool before_ = false;  // something with weights has run
};

class Profile final : public amp::Watcher {
 public:
  explicit Profile(Device device) : device_(device) {}
  void before(const Call&) override {
    wait_for(device_);
    start_ = Clock::now();
  }
  void after(const Call& c, const Tensors&) override {
    wait_for(device_);
    auto& [calls, ms] = by_operator_[c.op->name];
    ++calls;
    ms += ms_since(start_);
  }
  void print() const {
    std::vector<std::pair<std::string, std::pair<int, double>>> all(by_operator_.begin(), by_operator_.end());
    std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.second.second > b.second.second; });
    for (auto& [name, entry] : all) std::printf("  %-28s %5d calls %10.3f ms\n", name.c_str(), entry.first, entry.second);
  }

 private:
  Device device_;
  Clock::time_point start_;
  std::map<std::string, std::pair<int, double>> by_operator_;
};

class Trainer final : public Runner {
 public:
  Trainer(const Workload& w, Device device, const Mode& mode, int first_steps, const std::string& plans)
      : device_(device), tf32_(mode.precision == "tf32"), mixed_{.dtype = mode.dtype(), .enabled = mode.mixed()},
        scaler_({.enabled = mode.dtype() == DType::f16}) {
    const auto start = Clock::now();
    reset_peak_memory(device);
    before_ = memory_stats(device).allocated;
    manual_seed(0);
    net_ = w.network();
    net_->to(device);
    if (w.adam) opt_ = std::make_unique<optim::AdamW>(net_->parameters(), optim::AdamWOptions{.lr = 1e-3});
    else opt_ = std::make_unique<optim::SGD>(net_->parameters(), optim::SGDOptions{.lr = 1e-3, .momentum = 0.9});
    for (int i = 0; i < 2; ++i) {
      inputs_.push_back((w.vocabulary > 0 ? randint(0, w.vocabulary, w.input()) : randn(w.input())).to(device));
      targets_.push_back(randint(0, w.classes, {w.targets()}).to(device));
    }
    if (!plans.empty()) tune([&] { step(inputs_[0], targets_[0]); }, plans);
    if (mode.how == "captured") {
      auto graph = std::make_shared<Captured<std::function<Tensor(const Tensor&, const Tensor&)>>>(
          [this](const Tensor& x, const Tensor& t) { return step(x, t); }, CaptureOptions{});
      run_ = [graph](const Tensor& x, const Tensor& t) { return (*graph)(x, t); };
    } else run_ = [this](const Tensor& x, const Tensor& t) { return step(x, t); };
    ProcessMemory process;
    measure(std::max(first_steps, 1));
    figures_.loss = loss_.item();
    figures_.peak_mib = device.type == DeviceType::cpu ? process.peak() : static_cast<double>(memory_stats(device).peak - before_) / (1 << 20);
    figures_.setup_s = ms_since(start) / 1e3;
  }

  double measure(int steps) override {
    wait_for(device_);
    const auto start = Clock::now();
    allow_tf32(tf32_);
    for (int i = 0; i < steps; ++i) run_next();
    wait_for(device_);
    return ms_since(start) / steps;
  }
  StepFigures figures() override {
    if (device_.type != DeviceType::cpu) figures_.host_ms = host_ms();
    Work work;
    watched(work);
    figures_.kernel_calls = work.kernel_calls;
    figures_.casts = work.casts;
    figures_.moved_bytes = work.bytes;
    figures_.flops = work.flops;
    figures_.skipped_steps = scaler_.enabled() ? scaler_.skipped_steps() : 0;
    return figures_;
  }
  void profile() override {
    Profile p(device_);
    watched(p);
    p.print();
  }

 private:
  void run_next() {
    loss_ = run_(inputs_[next_ % 2], targets_[next_ % 2]);
    ++next_;
  }
  double host_ms() {
    std::array<double, 9> ms;
    for (double& m : ms) {
      wait_for(device_);
      const auto start = Clock::now();
      run_next();
      m = ms_since(start);
    }
    std::nth_element(ms.begin(), ms.begin() + ms.size() / 2, ms.end());
    return ms[ms.size() / 2];
  }
  void watched(amp::Watcher& watcher) {
    amp::Watching on(watcher);
    loss_ = step(inputs_[0], targets_[0]);
  }
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
  int64_t before_ = 0;
  amp::AutocastOptions mixed_;
  amp::GradScaler scaler_;
  std::unique_ptr<nn::Module> net_;
  std::unique_ptr<optim::Optimizer> opt_;
  std::vector<Tensor> inputs_, targets_;
  std::function<Tensor(const Tensor&, const Tensor&)> run_;
  Tensor loss_;
  size_t next_ = 0;
  StepFigures figures_;
};

// The least of some times of f, in seconds; f is called once before.
double best_seconds(Device d, const std::function<void()>& f) {
  f();
  double best = 1e30;
  for (int i = 0; i < 5; ++i) {
    wait_for(d);
    const auto start = Clock::now();
    f();
    wait_for(d);
    best = std::min(best, ms_since(start) / 1e3);
  }
  return best;
}

}  // namespace

std::unique_ptr<Runner> make_runner(const Workload& w, Device device, const Mode& mode, int first_steps, const std::string& plans) {
  return std::make_unique<Trainer>(w, device, mode, first_steps, plans);
}

double Peaks::of(const std::string& precision) const {
  for (auto& [name, value] : tflops) if (name == precision) return value;
  return 0;
}

Peaks measure_peaks(Device device, const std::vector<std::string>& precisions) {
  NoGrad off;
  const bool cpu = device.type == DeviceType::cpu;
  Peaks peaks;
  const int64_t n = cpu ? 1536 : 8192, bytes = int64_t{1} << (cpu ? 26 : 30);
  for (auto& p : precisions) {
    const Mode mode{{}, p, {}};
    Tensor a = randn({n, n}, {.device = device}).to(mode.dtype().value_or(DType::f32));
    allow_tf32(p == "tf32");
    const double seconds = best_seconds(device, [&] { matmul(a, a); });
    peaks.tflops.emplace_back(p, 2e-12 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n) / seconds);
  }
  allow_tf32(false);
  Tensor from = zeros({bytes / 4}, {.device = device}), to = zeros({bytes / 4}, {.device = device});
  peaks.copy_gb_per_s = 2e-9 * static_cast<double>(bytes) / best_seconds(device, [&] { to.copy_(from); });
  return peaks;
}

}  // namespace benchmarks
