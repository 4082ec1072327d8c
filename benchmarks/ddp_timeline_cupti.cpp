// Whether gradients are reduced while backward still runs: the kernels of one captured training step on several GPUs as CUDA's profiling interface
// times them, those of NCCL beside all others. Prints a line for each GPU; can write what the first one did for ui.perfetto.dev, and as a chart.
//   ddp_timeline_cupti --ranks 2 --model resnet50 --trace timeline.json --chart timeline.svg
#include <cupti.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <mutex>

#include "halftone/benchmarks/models.h"
#include "halftone/benchmarks/options.h"
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
  double begin, end;  // milliseconds
  bool named(const char* part) const { return kernel.find(part) != std::string::npos; }
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
    all.push_back({k->name, k->deviceId, k->streamId, static_cast<double>(k->start) / 1e6, static_cast<double>(k->end) / 1e6});
  }
  std::free(buffer);
}

struct Span { double begin, end; };  // in CUPTI's milliseconds

// Steps in fp16. Returns when the last one ran. The bounds of backward are marked by a kernel that no network has.
constexpr const char* mark = "Atan2";
Span train(const Workload& w, const distributed::Group& rank) {
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
  auto step = capture([&](const Tensor& in, const Tensor& t) {
    opt->zero_grad();
    Tensor loss;
    {
      amp::Autocast region({.dtype = DType::f16});
      loss = cross_entropy(ddp(in), t);
    }
    Tensor value = loss.detach();
    atan2(value, value);
    scaler.scale(loss).backward();
    atan2(value, value);
    scaler.step(*opt);
    scaler.update();
    return loss;
  });
  uint64_t begin = 0, end = 0;
  for (int i = 0; i < 8; ++i) {
    backend(DeviceType::cuda).synchronize(rank.device().index);
    rank.barrier();
    check(cuptiGetTimestamp(&begin), "timestamp");
    rank.barrier();
    step(x, target);
  }
  backend(DeviceType::cuda).synchronize(rank.device().index);
  check(cuptiGetTimestamp(&end), "timestamp");
  rank.barrier();
  HT_CHECK(step.replays() > 2, "the step was not captured");
  return {static_cast<double>(begin) / 1e6, static_cast<double>(end) / 1e6};
}

// One GPU's step. A broadcast of buffers before forward is none of its reductions.
struct Step {
  std::vector<Ran> forward, backward, reductions, update;  // in order
  double begin = 0, end = 0, backward_end = 0;
};
Step step_of(uint32_t device, const Span& span) {
  Step s;
  std::vector<Ran> kernels;
  for (auto& r : all) if (r.device == device && r.begin >= span.begin && r.begin < span.end) kernels.push_back(r);
  std::sort(kernels.begin(), kernels.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
  std::vector<double> marks;
  for (auto& r : kernels) if (r.named(mark)) marks.push_back(r.begin);
  HT_CHECK(marks.size() == 2, "cuda:", device, ": expected 2 kernels named ", mark, " in the step, got ", marks.size(), " of ", kernels.size(),
           " kernels, and ", all.size(), " of all steps and GPUs");
  s.begin = kernels.front().begin;
  for (auto& r : kernels) {
    s.end = std::max(s.end, r.end);
    if (r.named("nccl")) {
      if (r.begin > marks[0]) s.reductions.push_back(r);
    } else if (!r.named(mark)) {
      (r.begin < marks[0] ? s.forward : r.begin < marks[1] ? s.backward : s.update).push_back(r);
    }
  }
  HT_CHECK(!s.reductions.empty() && !s.backward.empty(), "cuda:", device, ": ", s.reductions.size(), " reductions, ", s.backward.size(),
           " kernels of backward in a step of ", kernels.size());
  for (auto& r : s.backward) s.backward_end = std::max(s.backward_end, r.end);
  return s;
}

// For how much of the time from `from` to `to` one of them runs.
double busy(const std::vector<Ran>& kernels, double from, double to) {
  double sum = 0;
  for (auto& r : kernels) {
    if (r.begin >= to) break;
    double end = std::min(r.end, to);
    if (end <= from) continue;
    sum += end - std::max(r.begin, from);
    from = end;
  }
  return sum;
}

void print(const std::string& model, size_t ranks, uint32_t device, const Step& s) {
  double reducing = 0, hidden = 0, last = 0;
  for (auto& r : s.reductions) {
    reducing += r.end - r.begin;
    hidden += busy(s.backward, r.begin, r.end);
    last = std::max(last, r.end);
  }
  std::printf("{\"case\": \"%s\", \"ranks\": %zu, \"device\": \"cuda:%u\", \"step_ms\": %.3f, \"backward_from_ms\": %.3f, "
              "\"first_reduction_ms\": %.3f, \"backward_to_ms\": %.3f, \"last_reduction_to_ms\": %.3f, \"reductions\": %zu, \"reducing_ms\": %.3f, "
              "\"hidden_percent\": %.1f}\n",
              model.c_str(), ranks, device, s.end - s.begin, s.backward.front().begin - s.begin, s.reductions.front().begin - s.begin,
              s.backward_end - s.begin, last - s.begin, s.reductions.size(), reducing, 100 * hidden / reducing);
}

void save_trace(const std::string& file, const Step& s) {
  std::string text = "{\"traceEvents\": [";
  for (auto& [kind, kernels] : {std::pair{"forward", &s.forward}, {"backward", &s.backward}, {"reductions", &s.reductions}, {"update", &s.update}})
    for (auto& r : *kernels)
      text += (text.back() == '[' ? "\n" : ",\n") +
              io::to_json(io::Fields{{"name", r.kernel.substr(0, 120)}, {"ph", "X"}, {"pid", text::cat("cuda:", r.device)}, {"tid", kind},
                                     {"ts", (r.begin - s.begin) * 1e3}, {"dur", (r.end - r.begin) * 1e3}});
  io::replace_file(file, text + "\n]}\n");
}

// The share of each two hundredth of the step in which kernels of a kind run.
void save_chart(const std::string& file, const std::string& title, const Step& s) {
  constexpr int parts = 200;
  std::vector<io::Curve> curves;
  for (auto& [name, kernels] : {std::pair{"forward", &s.forward}, {"backward", &s.backward}, {"reductions", &s.reductions}, {"update", &s.update}}) {
    io::Curve c{.name = name, .y = {}, .x = {}};
    double width = (s.end - s.begin) / parts;
    for (int i = 0; i < parts; ++i) {
      double from = s.begin + i * width, share = busy(*kernels, from, from + width) / width;
      c.x.push_back((i + .5) * width);
      c.y.push_back(share > 0 ? share : std::numeric_limits<double>::quiet_NaN());
    }
    curves.push_back(c);
  }
  io::save_chart(file, curves, {.title = title, .x_label = "ms since the step began", .y_label = "share of the time in which such kernels run"});
}

}  // namespace

int main(int argc, char** argv) try {
  int ranks = 2;
  std::string model = "resnet50", trace, chart;
  CLI::App app("Shows which kernels of a training step run while gradients are reduced");
  app.add_option("--ranks", ranks, "GPUs")->check(positive_number, "POSITIVE")->capture_default_str();
  app.add_option("--model", model, "mlp_small mlp_wide lenet resnet18 resnet50 gpt2")->capture_default_str();
  app.add_option("--trace", trace, "a file for ui.perfetto.dev: the first GPU's kernels");
  app.add_option("--chart", chart, "an SVG file: the first GPU's step");
  CLI11_PARSE(app, argc, argv);
  std::vector<Device> gpus = devices(DeviceType::cuda);
  HT_CHECK(static_cast<size_t>(ranks) <= gpus.size(), "--ranks: there are ", gpus.size(), " GPUs");
  gpus.resize(static_cast<size_t>(ranks));
  auto known = workloads();
  auto w = std::find_if(known.begin(), known.end(), [&](auto& each) { return each.name == model; });
  HT_CHECK(w != known.end(), "--model: there is no ", model);
  check(cuptiActivityRegisterCallbacks(hand_out, take_back), "register");
  check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "enable");  // before the graph is made, or its kernels are not told apart
  std::vector<Span> spans(gpus.size());
  distributed::threads(gpus, 120).run([&](distributed::Group& rank) { spans[static_cast<size_t>(rank.rank())] = train(*w, rank); });
  check(cuptiActivityFlushAll(1), "flush");
  for (auto& gpu : gpus) {
    auto device = static_cast<uint32_t>(gpu.index);
    Step s = step_of(device, spans[device]);
    print(model, gpus.size(), device, s);
    if (device > 0) continue;
    if (!trace.empty()) save_trace(trace, s);
    if (!chart.empty()) save_chart(chart, text::cat(model, " on ", ranks, " GPUs: one captured step, fp16"), s);
  }
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "ddp_timeline_cupti: %s\n", e.what());
  return 1;
}
