// Whether gradients are reduced while backward still runs: the kernels of one training step on several GPUs as CUDA's profiling interface
// times them, those of NCCL beside all others. Prints how much of the reduction is hidden, and writes a file for ui.perfetto.dev.
//   ddp_timeline_cupti --ranks 2 --model resnet50 --out timeline.json
#include <cupti.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "halftone/benchmarks/models.h"
#include "halftone/halftone.h"

namespace ht = halftone;
using namespace ht;
using namespace benchmarks;

namespace {

void check(CUptiResult status, const char* what) {
  const char* text = "";
  if (status != CUPTI_SUCCESS) cuptiGetResultString(status, &text);
  HT_CHECK(status == CUPTI_SUCCESS, "cupti: ", what, ": ", text);
}

struct Ran {
  std::string kernel;
  uint32_t device, stream;
  double begin, end;  // microseconds
  bool reduces() const { return kernel.find("nccl") != std::string::npos; }
};
std::mutex lock;
std::vector<Ran> all;

// Kernels come in buffers that CUPTI fills.
constexpr size_t buffer_bytes = size_t{8} << 20;
void CUPTIAPI hand_out(uint8_t** buffer, size_t* size, size_t* records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(64, buffer_bytes));
  *size = buffer_bytes;
  *records = 0;
}
void CUPTIAPI take_back(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t used) {
  std::lock_guard guard(lock);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, used, &record) == CUPTI_SUCCESS) {
    if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
    auto* k = reinterpret_cast<CUpti_ActivityKernel9*>(record);
    all.push_back({k->name, k->deviceId, k->streamId, static_cast<double>(k->start) / 1e3, static_cast<double>(k->end) / 1e3});
  }
  std::free(buffer);
}

// One step in fp16, after some that are not recorded.
void train(const Workload& w, const distributed::Group& rank) {
  manual_seed(0);
  auto net = w.network();
  net->to(rank.device());
  nn::DistributedDataParallel ddp(*net, rank);
  std::unique_ptr<optim::Optimizer> opt;
  if (w.adam) opt = std::make_unique<optim::AdamW>(net->parameters());
  else opt = std::make_unique<optim::SGD>(net->parameters(), optim::SGDOptions{.lr = 1e-3, .momentum = 0.9});
  amp::GradScaler scaler;
  Tensor x = w.vocabulary > 0 ? randint(0, w.vocabulary, w.input()).to(rank.device()) : randn(w.input(), {.device = rank.device()});
  Tensor target = randint(0, w.classes, {w.targets()}).to(rank.device());
  auto step = [&] {
    opt->zero_grad();
    Tensor loss;
    {
      amp::Autocast region({.dtype = DType::f16});
      loss = cross_entropy(ddp(x), target);
    }
    scaler.scale(loss).backward();
    scaler.step(*opt);
    scaler.update();
  };
  auto together = [&] {
    backend(DeviceType::cuda).synchronize(rank.device().index);
    rank.barrier();
  };
  for (int i = 0; i < 5; ++i) step();
  together();
  if (rank.rank() == 0) check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "enable");
  rank.barrier();
  step();
  together();
}

// Of the time in which a device reduces, how much it computes in, too.
void print_overlap() {
  std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
  for (uint32_t device = 0; device < 64; ++device) {
    double reducing = 0, hidden = 0, first = 0, last = 0, first_reduction = 0;
    for (auto& r : all) {
      if (r.device != device) continue;
      if (first == 0) first = r.begin;
      last = std::max(last, r.end);
      if (!r.reduces()) continue;
      if (first_reduction == 0) first_reduction = r.begin;
      reducing += r.end - r.begin;
      double covered = r.begin;  // computing kernels follow each other, so that their parts may be added
      for (auto& c : all)
        if (c.device == device && !c.reduces() && c.end > covered && c.begin < r.end) {
          hidden += std::min(c.end, r.end) - std::max(c.begin, covered);
          covered = std::min(c.end, r.end);
        }
    }
    if (reducing > 0)
      std::printf("cuda:%u  a step of %.2f ms, the first reduction at %.2f ms; %.2f ms of reduction, %.1f%% of them while other kernels run\n", device,
                  (last - first) / 1e3, (first_reduction - first) / 1e3, reducing / 1e3, 100 * hidden / reducing);
  }
}

void write_trace(const std::string& file) {
  double start = all.empty() ? 0 : all.front().begin;
  std::string text = "{\"traceEvents\": [\n";
  for (size_t i = 0; i < all.size(); ++i) {
    auto& r = all[i];
    char line[512];
    std::snprintf(line, sizeof line,
                  "{\"name\": \"%.100s\", \"ph\": \"X\", \"pid\": \"cuda:%u\", \"tid\": \"%s, stream %u\", \"ts\": %.2f, \"dur\": %.2f}%s\n",
                  r.kernel.c_str(), r.device, r.reduces() ? "reduces" : "computes", r.stream, r.begin - start, r.end - r.begin, i + 1 < all.size() ? "," : "");
    text += line;
  }
  io::replace_file(file, text + "]}\n");
}

}  // namespace

int main(int argc, char** argv) try {
  int ranks = 2;
  std::string model = "resnet50", file;
  CLI::App app("Shows which kernels of a training step run while gradients are reduced");
  app.add_option("--ranks", ranks, "GPUs")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--model", model, "mlp_small mlp_wide lenet resnet18 resnet50 gpt2")->capture_default_str();
  app.add_option("--out", file, "where the trace is written");
  CLI11_PARSE(app, argc, argv);
  std::vector<Device> gpus = devices(DeviceType::cuda);
  HT_CHECK(static_cast<size_t>(ranks) <= gpus.size(), "--ranks: there are ", gpus.size(), " GPUs");
  gpus.resize(static_cast<size_t>(ranks));
  auto known = workloads();
  auto w = std::find_if(known.begin(), known.end(), [&](auto& each) { return each.name == model; });
  HT_CHECK(w != known.end(), "--model: there is no ", model);
  check(cuptiActivityRegisterCallbacks(hand_out, take_back), "register");
  distributed::threads(gpus).run([&](distributed::Group& rank) { train(*w, rank); });
  check(cuptiActivityFlushAll(1), "flush");
  print_overlap();
  if (!file.empty()) write_trace(file);
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "ddp_timeline_cupti: %s\n", e.what());
  return 1;
}
