// What DistributedDataParallel costs over the plain step of one rank, and how steps scale with ranks: weak (each rank has a whole
// batch) and strong (they share one). Rounds of the plain and the distributed step take turns; medians of the slowest rank, one
// JSON line a mode.
//   ddp --device cuda [--ranks 1 2 4 8] [--models resnet50 gpt2 mlp_small] [--precisions fp16] [--compress] [--sharded]
//   mpirun -n 8 ddp --device cuda            the ranks of the launcher
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "halftone/benchmarks/models.h"
#include "halftone/benchmarks/options.h"
#include "halftone/halftone.h"

namespace ht = halftone;
using namespace ht;
using namespace benchmarks;

namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string device = "cpu", plans;
  std::vector<std::string> models = {"mlp_small"}, precisions = {"fp32"};
  std::vector<int> ranks;
  int rounds = 15;
  bool compress = false, sharded = false;
};
struct Mode {
  std::string precision;
  bool captured, strong;
};

// A network with its optimizer on one rank, alone or with the others.
class Trainer {
 public:
  Trainer(const Workload& w, const distributed::Group& rank, const Mode& mode, bool together, const Options& o)
      : device_(rank.device()), mixed_{.dtype = dtype(mode.precision), .enabled = dtype(mode.precision).has_value()},
        scaler_({.enabled = mode.precision == "fp16"}),
        net_(w.network()) {
    manual_seed(0);
    net_->to(device_);
    if (together) ddp_.emplace(*net_, rank, nn::DistributedDataParallelOptions{.compress = o.compress ? mixed_.dtype : std::nullopt});
    if (w.adam) opt_ = std::make_unique<optim::AdamW>(net_->parameters(), optim::AdamWOptions{.lr = 1e-3});
    else opt_ = std::make_unique<optim::SGD>(net_->parameters(), optim::SGDOptions{.lr = 1e-3, .momentum = 0.9});
    if (together && o.sharded) shards_.emplace(*opt_, rank);
    int64_t parts = mode.strong ? rank.size() : 1;
    Shape input = w.input();
    input[0] /= parts;
    for (int i = 0; i < 2; ++i) {
      inputs_.push_back(w.vocabulary > 0 ? randint(0, w.vocabulary, input).to(device_) : randn(input, {.device = device_}));
      targets_.push_back(randint(0, w.classes, {w.targets() / parts}).to(device_));
    }
    if (!o.plans.empty() && !together) tune([&] { step(inputs_[0], targets_[0]); }, o.plans);
    run_ = [this](const Tensor& x, const Tensor& t) { return step(x, t); };
    if (!mode.captured) return;
    auto graph = std::make_shared<Captured<decltype(run_)>>(run_, CaptureOptions{});
    run_ = [graph](const Tensor& x, const Tensor& t) { return (*graph)(x, t); };
  }

  // Milliseconds a step, over `steps` of them between two waits for the device.
  double measure(const distributed::Group& rank, int steps) {
    backend(device_.type).synchronize(device_.index);
    rank.barrier();
    auto start = Clock::now();
    for (int i = 0; i < steps; ++i, ++next_) loss_ = run_(inputs_[next_ % 2], targets_[next_ % 2]);
    backend(device_.type).synchronize(device_.index);
    Tensor ms = full({}, std::chrono::duration<double, std::milli>(Clock::now() - start).count() / steps, {.dtype = DType::f64, .device = device_});
    rank.all_reduce(ms, distributed::Reduce::max).wait();
    return ms.item();
  }
  double loss() const { return loss_.item(); }

 private:
  static std::optional<DType> dtype(const std::string& precision) {
    return precision == "fp16" ? std::optional(DType::f16) : precision == "bf16" ? std::optional(DType::bf16) : std::nullopt;
  }
  Tensor step(const Tensor& x, const Tensor& target) {
    opt_->zero_grad();
    Tensor loss;
    {
      amp::Autocast region(mixed_);
      loss = cross_entropy(ddp_ ? (*ddp_)(x) : (*net_)(x), target);
    }
    scaler_.scale(loss).backward();
    scaler_.step(*opt_);
    scaler_.update();
    return loss;
  }

  Device device_;
  amp::AutocastOptions mixed_;
  amp::GradScaler scaler_;
  std::unique_ptr<nn::Module> net_;
  std::optional<nn::DistributedDataParallel<nn::Module>> ddp_;
  std::unique_ptr<optim::Optimizer> opt_;
  std::optional<distributed::ShardedState> shards_;
  std::vector<Tensor> inputs_, targets_;
  std::function<Tensor(const Tensor&, const Tensor&)> run_;
  Tensor loss_;
  size_t next_ = 0;
};

void bench(const Workload& w, const distributed::Group& rank, const Mode& mode, const Options& o) {
  HT_CHECK(!mode.strong || w.batch % rank.size() == 0, "--models: ", rank.size(), " ranks cannot share ", w.name, "'s batch of ", w.batch);
  Trainer plain(w, rank, mode, false, o), together(w, rank, mode, true, o);
  std::vector<double> times[2];
  int steps = 1;
  for (auto* t : {&plain, &together}) {
    t->measure(rank, 5);
    steps = std::clamp(static_cast<int>(20 / t->measure(rank, 3)), 1, 500);  // rounds of about 20 ms; alike on all ranks, as the slowest decides
  }
  for (int r = 0; r < o.rounds; ++r) {
    times[0].push_back(plain.measure(rank, steps));
    times[1].push_back(together.measure(rank, steps));
  }
  for (auto& t : times) std::sort(t.begin(), t.end());
  double alone = times[0][times[0].size() / 2], ms = times[1][times[1].size() / 2];
  int64_t examples = w.batch * (mode.strong ? 1 : rank.size());
  if (rank.rank() > 0) return;
  std::printf("{\"case\": \"%s\", \"device\": \"%s\", \"precision\": \"%s\", \"how\": \"%s\", \"ranks\": %d, \"scaling\": \"%s\", \"plain_ms\": %.5f, \"ms\": %.5f, \"lo\": %.5f, "
              "\"hi\": %.5f, \"overhead_percent\": %.2f, \"examples_per_s\": %.1f, \"compress\": %s, \"sharded\": %s, \"loss\": %.4f}\n",
              w.name.c_str(), str(rank.device()).c_str(), mode.precision.c_str(), mode.captured ? "captured" : "eager", rank.size(),
              mode.strong ? "strong" : "weak", alone, ms, times[1][times[1].size() / 10], times[1][times[1].size() * 9 / 10], 100 * (ms / alone - 1),
              static_cast<double>(examples) / ms * 1000, o.compress ? "true" : "false",
              o.sharded ? "true" : "false", together.loss());
  std::fflush(stdout);
}

void bench_all(const distributed::Group& rank, const Options& o) {
  for (auto& w : workloads()) {
    if (std::find(o.models.begin(), o.models.end(), w.name) == o.models.end()) continue;
    for (auto& precision : o.precisions)
      for (bool captured : {false, true})
        for (bool strong : {false, true})
          if (!(captured && rank.device().type == DeviceType::cpu) && !(strong && rank.size() == 1)) bench(w, rank, {precision, captured, strong}, o);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  Options o;
  CLI::App app("Times the steps of DistributedDataParallel beside plain ones, eager and captured; one JSON line a mode");
  app.add_option("--device", o.device, "cpu or cuda")->capture_default_str();
  app.add_option("--ranks", o.ranks, "groups of so many threads, one after the other; none: the processes that mpirun or srun started");
  app.add_option("--models", o.models, "mlp_small mlp_wide lenet resnet18 resnet50 gpt2 gpt_small")->capture_default_str();
  app.add_option("--precisions", o.precisions, "fp32 fp16 bf16")->capture_default_str()->check(CLI::IsMember({"fp32", "fp16", "bf16"}));
  app.add_option("--rounds", o.rounds, "interleaved rounds")->check(positive_number, "POSITIVE")->capture_default_str();
  app.add_option("--tune", o.plans, "choose kernels by timing them first, and keep the choices in this file");
  app.add_flag("--compress", o.compress, "gradients travel in the 16 bits of the precision");
  app.add_flag("--sharded", o.sharded, "each rank keeps a share of the optimizer's states");
  CLI11_PARSE(app, argc, argv);
  DeviceType type = device(o.device).type;
  if (o.ranks.empty()) {
    distributed::init({.device = type}).run([&](distributed::Group& rank) { bench_all(rank, o); });
    return 0;
  }
  std::printf("%s\n", build_info().c_str());
  for (int n : o.ranks) {
    std::vector<Device> used(static_cast<size_t>(n));
    if (type == DeviceType::cuda) {
      auto all = devices(type);
      HT_CHECK(n <= static_cast<int>(all.size()), "--ranks: ", n, " ranks, and ", all.size(), " GPUs");
      used.assign(all.begin(), all.begin() + n);
    }
    distributed::threads(used).run([&](distributed::Group& rank) { bench_all(rank, o); });
  }
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "ddp: %s\n", e.what());
  return 1;
}
