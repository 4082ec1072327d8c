// halftone-bench: what mixed precision brings on this machine, in one table. Training steps in fp32 and in 16 bits, eager and captured, ours
// and peers', whose rounds take turns; beside them what the device gives at best, and, at the end, where mixed precision loses.
#include <dlfcn.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "halftone/benchmarks/bench/commit.h"
#include "halftone/benchmarks/bench/peers.h"
#include "halftone/benchmarks/options.h"
#include "halftone/core/parallel.h"

using namespace benchmarks;

namespace {

struct Options {
  std::string device, out = "runs/bench", plans, python = "python3";
  std::vector<std::string> models = {"mlp_small", "mlp_wide", "lenet", "resnet18", "resnet50", "gpt2"}, precisions;
  std::vector<int64_t> mlp;
  int64_t batch = 0, context = 0;
  int rounds = 15, first_steps = 20;
  double step_limit = 0.5;
  bool peers = false, profile = false, eager_only = false, captured_only = false, memory = false, sizes = false;
};

// What was found of one mode.
struct Row {
  Mode mode;
  std::vector<double> ms;  // of the rounds, sorted in the end
  StepFigures figures;
  double quantile(double q) const { return ms[static_cast<size_t>(q * static_cast<double>(ms.size() - 1) + 0.5)]; }
  double median() const { return quantile(0.5); }
};

// ---- the machine

std::string first_line(const std::string& command) {
  std::string line;
  if (FILE* f = ::popen((command + " 2>/dev/null").c_str(), "r")) {
    for (int c = std::fgetc(f); c != EOF && c != '\n'; c = std::fgetc(f)) line += static_cast<char>(c);
    ::pclose(f);
  }
  return line;
}
// As one word of a shell.
std::string quoted(const std::string& text) {
  std::string q = "'";
  for (char c : text) q += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return q + "'";
}
// By how much a process that does nothing else grows in the first steps of a workload on the CPU, in MiB. This one has room that was
// left by what ran before.
double memory_alone(const Workload& w, const std::string& precision) {
  const std::string what = w.model.starts_with("mlp:") ? "--mlp " + w.model.substr(4) : "--models " + w.name;
  const std::string context = w.vocabulary > 0 ? text::cat(" --context ", w.example[0]) : "";
  const std::string line = first_line(text::cat(quoted(std::filesystem::read_symlink("/proc/self/exe").string()), " --memory --device cpu --batch ", w.batch,
                                                context, " --precisions ", precision, " ", what));
  return line.empty() ? NAN : std::strtod(line.c_str(), nullptr);
}
// A version that a library which is loaded tells, "" where it is not: major and minor by the divisors of its number.
std::string loaded_version(const char* function, size_t major, size_t minor) {
  auto f = reinterpret_cast<size_t (*)()>(::dlsym(RTLD_DEFAULT, function));
  return f ? text::cat(f() / major, ".", f() % major / minor) : "";
}
io::Fields describe_machine(Device device) {
  io::Fields fields{{"peer", text::cat("halftone ", version())}, {"commit", commit}, {"build", build_info()}, {"device", str(device)}};
  if (device.type == DeviceType::cpu) {
    std::string line, name = "unknown";
    for (std::ifstream info("/proc/cpuinfo"); std::getline(info, line);)
      if (line.starts_with("model name")) name = line.substr(std::min(line.size(), line.find(':') + 2));
    fields.insert(fields.end(), {{"cpu", name}, {"threads", static_cast<int64_t>(num_threads())}});
    return fields;
  }
  const std::string found = first_line(text::cat("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader -i ", device.index));
  const size_t comma = std::min(found.size(), found.rfind(", "));
  fields.insert(fields.end(), {{"gpu", found.empty() ? "unknown" : found.substr(0, comma)},
                               {"driver", comma < found.size() ? found.substr(comma + 2) : "unknown"}});
  auto cuda_version = reinterpret_cast<int (*)(int*)>(::dlsym(RTLD_DEFAULT, "cudaRuntimeGetVersion"));
  int cuda = 0;
  if (cuda_version) cuda_version(&cuda);
  fields.insert(fields.end(), {{"cuda", text::cat(cuda / 1000, ".", cuda % 1000 / 10)}, {"cudnn", loaded_version("cudnnGetVersion", 10000, 100)},
                               {"cublaslt", loaded_version("cublasLtGetVersion", 10000, 100)}});
  return fields;
}
std::string text_of(const io::Fields& fields, const std::string& name) {
  for (auto& [key, value] : fields)
    if (auto* s = std::get_if<std::string>(&value.variant()); key == name && s) return *s;
  return "";
}

// ---- sizes that fit

// Shrinks w until a step in fp32 fits into memory and, on the CPU, takes no longer than the limit.
void fit(Workload& w, Device device, double limit_s) {
  const Mode plain{{}, "fp32", "eager"};
  const std::string whole = w.size();
  if (device.type == DeviceType::cpu) {
    Workload probe = w;
    for (int i = 0; i < 5 && probe.batch > 1; ++i) probe.shrink();
    if (probe.vocabulary > 0) while (probe.example[0] > 64) probe.example[0] /= 2;
    auto tokens = [](const Workload& x) { return static_cast<double>(x.targets()); };
    const double s = make_runner(probe, device, plain, 1, {})->measure(1) / 1e3;
    while (s * tokens(w) / tokens(probe) > limit_s && w.shrink()) {}
  } else {
    for (;;) try {
        make_runner(w, device, plain, 1, {});
        break;
      } catch (const Error& e) {
        if (std::string(e.what()).find("memory") == std::string::npos || !w.shrink()) throw;
      }
  }
  if (w.size() != whole)
    std::printf("%s: %s in a batch, not %s, so that a step %s\n", w.name.c_str(), w.size().c_str(), whole.c_str(),
                device.type == DeviceType::cpu ? text::cat("takes about ", limit_s, " s on this processor").c_str() : "fits into memory");
}

// ---- measuring

class Bench {
 public:
  Bench(const Options& o, Device device) : o_(o), device_(device), machine_(describe_machine(device)) {
    if (device.type == DeviceType::cpu) ::setenv("CUDA_VISIBLE_DEVICES", "", 1);  // peers that find a GPU prepare to use it
    if (o.peers) peers_ = find_peers(o.python);
    io::make_folders(o.out);
    log_.emplace(o.out + "/bench.jsonl");
    peaks_ = measure_peaks(device, o.precisions);
    std::printf("%s, %s; at best", chip().c_str(), build_info().c_str());
    for (auto& [precision, tflops] : peaks_.tflops) std::printf(" %s %.*f TFLOP/s,", precision.c_str(), tflops < 10 ? 2 : 0, tflops);
    std::printf(" copies %.0f GB/s\n", peaks_.copy_gb_per_s);
  }

  std::vector<Row> run(const Workload& w) {
    std::vector<Row> rows;
    for (auto& p : o_.precisions) {
      for (const char* how : {"eager", "captured"}) {
        const bool captured = std::string_view(how) == "captured";
        if (captured ? device_.type == DeviceType::cpu || o_.eager_only : o_.captured_only) continue;
        rows.push_back({{text_of(machine_, "peer"), p, how}, {}, {}});
      }
      for (auto& peer : peers_)
        for (auto& how : peer->hows()) rows.push_back({{peer->name(), p, how}, {}, {}});
    }
    measure(w, rows);
    std::erase_if(rows, [](const Row& r) { return r.ms.empty(); });
    tell(w, rows);
    std::fflush(stdout);  // a long run may be read, or end, at any time
    return rows;
  }

  // How a perceptron's step grows with its batch and with its width, so that a cliff is seen.
  void run_sizes() {
    auto chart = [&](const char* growing, const char* fixed, int64_t least, auto workload) {
      constexpr int64_t most = 4096;
      std::vector<io::Curve> curves;
      for (int64_t n = least; n <= most; n *= 2)
        for (auto& r : run(workload(n))) {
          const std::string name = text::cat(r.mode.peer, ", ", r.mode.name());
          auto curve = std::find_if(curves.begin(), curves.end(), [&](auto& c) { return c.name == name; });
          if (curve == curves.end()) curve = curves.insert(curves.end(), io::Curve{name, {}});
          curve->x.push_back(std::log2(n));
          curve->y.push_back(r.median());
        }
      io::save_chart(text::cat(o_.out, "/sizes_", growing, ".svg"), curves,
                     {.title = text::cat("A step of a perceptron of three layers, ", fixed, ", on ", chip()),
                      .x_label = text::cat(growing, ", as a power of 2"),
                      .y_label = "ms",
                      .log_y = true,
                      .width = 900});
    };
    chart("batch", "width 256", 1, [](int64_t n) { return perceptron_workload("mlp_batch", {256, 256, 256, 10}, n); });
    chart("width", "batch 64", 16, [](int64_t n) { return perceptron_workload(text::cat("mlp_width_", n), {n, n, n, 10}, 64); });
    std::printf("\n%s/bench.jsonl has these figures; sizes_batch.svg and sizes_width.svg beside it show them\n", o_.out.c_str());
  }

  // The chart, and where mixed precision loses.
  void finish() const {
    if (!groups_.empty())
      io::save_chart(o_.out + "/bench.svg", groups_,
                     {.title = "Training steps on " + chip(),
                      .x_label = o_.captured_only ? "times as fast as fp32, captured" : "times as fast as fp32, eager",
                      .mark = 1,
                      .width = 900});
    std::printf("\n");
    if (compared_ == 0) std::printf("Nothing to compare: mixed precision is fp16 and bf16 beside fp32.\n");
    else if (losses_.empty()) std::printf("Mixed precision is faster than fp32 in every line above, and takes no more memory.\n");
    else std::printf("Mixed precision loses:\n");
    for (auto& l : losses_) std::printf("  %s\n", l.c_str());
    std::printf("\n%s/bench.jsonl has these figures, %s/bench.svg the chart\n", o_.out.c_str(), o_.out.c_str());
  }

 private:
  std::string chip() const { return text_of(machine_, device_.type == DeviceType::cpu ? "cpu" : "gpu"); }
  bool is_ours(const Row& r) const { return r.mode.peer == text_of(machine_, "peer"); }
  std::unique_ptr<Runner> start(const Workload& w, const Row& row) {
    for (auto& peer : peers_)
      if (peer->name() == row.mode.peer) return make_peer_runner(peer, w, device_, row.mode, o_.first_steps);
    return make_runner(w, device_, row.mode, o_.first_steps, o_.plans);
  }
  // Rounds of some milliseconds; all modes take turns where they fit into memory together.
  void measure(const Workload& w, std::vector<Row>& rows) {
    const double round_ms = device_.type == DeviceType::cpu ? 50 : 20;
    std::vector<std::unique_ptr<Runner>> runners(rows.size());
    std::vector<int> steps(rows.size());
    std::vector<double> alone(rows.size(), NAN);
    if (device_.type == DeviceType::cpu)
      for (size_t i = 0; i < rows.size(); ++i) if (is_ours(rows[i])) alone[i] = memory_alone(w, rows[i].mode.precision);
    auto begin = [&](size_t i) {
      try {
        runners[i] = start(w, rows[i]);
        steps[i] = std::clamp(static_cast<int>(round_ms / runners[i]->measure(2)), 1, 500);
      } catch (const Error& e) {
        runners[i].reset();
        if (is_ours(rows[i])) throw;
        std::printf("%s, %s\n", w.name.c_str(), e.what());
      }
    };
    auto time_round = [&](size_t i) { if (runners[i]) rows[i].ms.push_back(runners[i]->measure(steps[i])); };
    auto end = [&](size_t i) {
      if (!runners[i]) return;
      rows[i].figures = runners[i]->figures();
      if (device_.type == DeviceType::cpu && is_ours(rows[i])) rows[i].figures.peak_mib = alone[i];
      std::sort(rows[i].ms.begin(), rows[i].ms.end());
      if (o_.profile) {
        std::printf("%s, %s:\n", w.name.c_str(), rows[i].mode.name().c_str());
        runners[i]->profile();
      }
      runners[i].reset();
    };
    begin(0);
    const bool together = peers_.empty() && memory_stats(device_).peak * static_cast<int64_t>(rows.size()) < int64_t{8} << 30;
    if (together) {
      for (size_t i = 1; i < rows.size(); ++i) begin(i);
      for (int r = 0; r < o_.rounds; ++r)
        for (size_t i = 0; i < rows.size(); ++i) time_round(i);
      for (size_t i = 0; i < rows.size(); ++i) end(i);
      return;
    }
    // A few passes over all modes, each set up anew, so that drifting clocks meet all of them.
    const int passes = peers_.empty() ? 1 : std::min(3, o_.rounds);
    for (int pass = 0; pass < passes; ++pass)
      for (size_t i = 0; i < rows.size(); ++i) {
        if (pass + i > 0) begin(i);
        for (int r = pass; r < o_.rounds; r += passes) time_round(i);
        end(i);
      }
  }

  void tell(const Workload& w, const std::vector<Row>& rows) {
    std::printf("\n%s, batch %s, %s\n", w.name.c_str(), w.size().c_str(), w.adam ? "AdamW" : "SGD with momentum");
    std::printf("  %-16s %-6s %-8s %9s %19s %8s %11s %8s %6s %6s %9s %8s %7s %7s %6s %6s\n", "", "", "", "step, ms", "10 % to 90 %", "host, ms", "samples/s",
                "TFLOP/s", "of mm", "of cp", "peak MiB", text::cat("loss ", o_.first_steps).c_str(), "-fp32", "skipped", "calls", "casts");
    io::BarGroup group{text::cat(w.name, ", batch ", w.size()), {}};
    double flops = 0;
    for (auto& r : rows) flops = std::max(flops, r.figures.flops);
    const Row* plain = nullptr;  // the mode that the chart compares with
    for (auto& r : rows) if (!plain && r.mode.precision == "fp32") plain = &r;
    for (auto& r : rows) {
      const Row* fp32 = find(rows, r.mode.peer, r.mode.how);
      const double ms = r.median(), tflops = flops / ms / 1e9, share = tflops / std::max(peaks_.of(r.mode.precision), 1e-9);
      const double moved = r.figures.moved_bytes / ms / 1e6 / peaks_.copy_gb_per_s, apart = fp32 ? r.figures.loss / fp32->figures.loss - 1 : NAN;
      const auto rate = static_cast<double>(w.batch) / ms * 1e3;
      const bool ours = is_ours(r);
      // What a peer does not tell is a dash.
      auto known = [&](auto v) { return ours ? std::to_string(v) : "-"; };
      auto told = [](double v) { return std::isfinite(v) ? short_number(v) : "-"; };
      std::printf("  %-16s %-6s %-8s %9.3f %19s %8s %11.0f %8.3g %5.0f%% %6s %9s %8.4f %7s %7s %6s %6s\n",
                  ours ? "halftone" : r.mode.peer.substr(0, 16).c_str(), r.mode.precision.c_str(), r.mode.how.c_str(), ms, short_range(r).c_str(),
                  told(r.figures.host_ms).c_str(), rate, tflops, 100 * share, ours ? text::cat(std::lround(100 * moved), "%").c_str() : "-",
                  told(r.figures.peak_mib).c_str(), r.figures.loss, signed_percent(apart).c_str(),
                  known(r.figures.skipped_steps).c_str(), known(r.figures.kernel_calls).c_str(), known(r.figures.casts).c_str());
      io::Fields record{{"case", w.name},
                        {"batch", w.batch},
                        {"size", w.size()},
                        {"precision", r.mode.precision},
                        {"how", r.mode.how},
                        {"ms", ms},
                        {"lo", r.quantile(0.1)},
                        {"hi", r.quantile(0.9)},
                        {"peak_mib", r.figures.peak_mib},
                        {"setup_s", r.figures.setup_s},
                        {"host_ms", r.figures.host_ms},
                        {"samples_per_s", rate},
                        {"tflops", tflops},
                        {"share_of_product", share},
                        {"share_of_copy", ours ? moved : NAN},
                        {"first_steps", o_.first_steps},
                        {"loss", r.figures.loss},
                        {"loss_from_fp32", apart},
                        {"plans", ours && !o_.plans.empty() ? "tuned" : "default"}};
      if (ours)
        record.insert(record.end(),
                      {{"skipped_steps", r.figures.skipped_steps}, {"kernel_calls", r.figures.kernel_calls}, {"casts", r.figures.casts}});
      record.insert(record.begin(), machine_.begin(), machine_.end());
      record.front().second = r.mode.peer;
      log_->write(record);
      if (plain)
        group.bars.push_back({(ours ? "" : r.mode.peer + " ") + r.mode.name(), plain->median() / ms,
                              text::cat(short_number(plain->median() / ms), " x, ", short_number(ms), " ms"),
                              r.mode.precision == "fp32"   ? size_t{0}
                              : r.mode.precision == "fp16" ? size_t{1}
                              : r.mode.precision == "bf16" ? size_t{2}
                                                           : size_t{5}});
      if (ours && r.mode.mixed() && fp32) note_losses(w, r, *fp32, apart);
    }
    groups_.push_back(group);
    std::fflush(stdout);
  }
  static const Row* find(const std::vector<Row>& rows, const std::string& peer, const std::string& how) {
    for (auto& r : rows) if (r.mode.peer == peer && r.mode.how == how && r.mode.precision == "fp32") return &r;
    return nullptr;
  }
  void note_losses(const Workload& w, const Row& r, const Row& fp32, double apart) {
    const std::string who = w.name + ", " + r.mode.name();
    ++compared_;
    if (r.median() > fp32.median())
      losses_.push_back(text::cat(who, ": a step takes ", short_number(r.median()), " ms, in fp32 ", short_number(fp32.median()),
                                  r.quantile(0.1) <= fp32.quantile(0.9) ? " (within their spread)" : ""));
    if (r.figures.peak_mib > 1.01 * fp32.figures.peak_mib)  // processes differ by some pages
      losses_.push_back(
          text::cat(who, ": it takes ", short_number(r.figures.peak_mib), " MiB of memory, fp32 ", short_number(fp32.figures.peak_mib)));
    if (!(std::abs(apart) < 0.02))
      losses_.push_back(text::cat(who, ": after ", o_.first_steps, " steps the loss is ", short_number(100 * apart), " % from that in fp32"));
  }
  static std::string short_number(double v) {
    std::array<char, 32> text;
    std::snprintf(text.data(), text.size(), v >= 1000 ? "%.0f" : "%.3g", v);
    return text.data();
  }
  static std::string signed_percent(double share) {
    if (std::isnan(share)) return "-";
    std::array<char, 32> text;
    std::snprintf(text.data(), text.size(), "%+.2f%%", 100 * share);
    return text.data();
  }
  static std::string short_range(const Row& r) {
    std::array<char, 48> text;
    std::snprintf(text.data(), text.size(), "%.3f to %.3f", r.quantile(0.1), r.quantile(0.9));
    return text.data();
  }

  const Options& o_;
  Device device_;
  io::Fields machine_;
  std::vector<std::shared_ptr<Peer>> peers_;
  Peaks peaks_;
  std::optional<io::JsonLog> log_;
  std::vector<io::BarGroup> groups_;
  std::vector<std::string> losses_;
  int compared_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Options o;
  std::vector<std::string> names;
  for (auto& w : workloads()) names.push_back(w.name);
  CLI::App app(
      "Trains small and large networks in fp32 and in mixed precision on this machine, and compares. Columns: a step's time, its median and "
      "spread; the host's part of it, with a GPU; the rate of its products, and of mm, the share of what a large product reaches here in that "
      "precision; of cp, the share of a "
      "copy's speed at which its operators read and write; the peak of memory; the loss after some steps from one seed, and how far that is "
      "from fp32's; steps that the scaler skipped, operators that a step calls, and the casts among them. OUT gets bench.jsonl and bench.svg.");
  app.add_option("--device", o.device, "cpu, cuda or cuda:N; the GPU where there is one");
  auto* models = app.add_option("--models", o.models, "the networks to train")->check(CLI::IsMember(names))->capture_default_str();
  auto* mlp = app.add_option("--mlp", o.mlp, "a perceptron of your own instead: --mlp 784,256,10")
                  ->delimiter(',')
                  ->check(positive_number, "POSITIVE")
                  ->excludes(models);
  app.add_option("--batch", o.batch, "examples a step; by default what is usual for a model, and less where a step would take too long")
      ->check(positive_number, "POSITIVE");
  app.add_option("--context", o.context, "tokens in a row of a batch of text")->check(positive_number, "POSITIVE")->excludes(mlp);
  app.add_option("--precisions", o.precisions, "fp32 tf32 fp16 bf16; by default fp32, and fp16 and bf16 on a GPU, bf16 on the CPU")
      ->check(CLI::IsMember({"fp32", "tf32", "fp16", "bf16"}));
  app.add_option("--rounds", o.rounds, "timed rounds of each mode; modes take turns")->check(positive_number, "POSITIVE")->capture_default_str();
  app.add_option("--first-steps", o.first_steps, "steps before the first round, after which losses are compared")
      ->check(positive_number, "POSITIVE")
      ->capture_default_str();
  app.add_option("--step-limit", o.step_limit, "seconds that a step may take on the CPU; batches, and then rows of text, are halved until it does")
      ->check(positive_number, "POSITIVE")
      ->capture_default_str();
  app.add_option("--tune", o.plans, "choose kernels by timing them first, and keep the choices in this file");
  app.add_flag("--peers", o.peers, "PyTorch, JAX and libtorch, too, where they are installed");
  app.add_option("--python", o.python, "that has PyTorch and JAX")->capture_default_str();
  auto* eager = app.add_flag("--eager-only", o.eager_only, "leave captured steps out");
  app.add_flag("--captured-only", o.captured_only, "leave eager steps out, of ours")->excludes(eager);
  app.add_flag("--profile", o.profile, "the time of each operator in an eager step, too");
  app.add_flag("--sizes", o.sizes, "a perceptron of growing batch and width instead of models: OUT gets sizes_batch.svg and sizes_width.svg");
  app.add_flag("--memory", o.memory, "nothing but by how many MiB the first steps of one model in one precision let the process grow");
  app.add_option("--out", o.out, "folder for figures and chart")->capture_default_str();
  app.footer(
      "Examples:\n  halftone-bench\n  halftone-bench --mlp 784,256,10 --batch 128\n  halftone-bench --device cuda --tune plans.txt --peers --models "
      "resnet18 gpt2");
  CLI11_PARSE(app, argc, argv);
  try {
    if (o.device.empty()) o.device = devices(DeviceType::cuda).empty() ? "cpu" : "cuda";
    const Device device = halftone::device(o.device);
    backend(device.type);
    HT_CHECK(!o.captured_only || device.type != DeviceType::cpu, "--captured-only: steps are captured on a GPU; leave it out on ", device);
    for (auto& p : o.precisions) HT_CHECK(p != "tf32" || device.type != DeviceType::cpu, "--precisions: tf32 is a GPU's; on ", device, " it is fp32");
    if (!o.plans.empty()) {
      const std::string folder = std::filesystem::absolute(o.plans).parent_path().string();
      HT_CHECK(::access(folder.c_str(), W_OK) == 0, "--tune: cannot write to the folder ", folder);
    }
    if (o.precisions.empty())
      o.precisions = device.type == DeviceType::cpu ? std::vector<std::string>{"fp32", "bf16"} : std::vector<std::string>{"fp32", "fp16", "bf16"};
    HT_CHECK(o.mlp.empty() || o.mlp.size() > 1, "--mlp: expected the widths of two layers or more, such as 784,256,10");
    std::vector<Workload> wanted;
    if (!o.mlp.empty()) wanted.push_back(perceptron_workload("mlp", o.mlp, 128));
    else
      for (auto& w : workloads())
        if (std::find(o.models.begin(), o.models.end(), w.name) != o.models.end()) wanted.push_back(w);
    for (auto& w : wanted) {
      if (o.batch > 0) w.batch = o.batch;
      if (o.context > 0 && w.vocabulary > 0) w.example[0] = o.context;
    }
    if (o.memory) {
      HT_CHECK(wanted.size() == 1 && o.precisions.size() == 1, "--memory: expected one of --models and one of --precisions, for what is run first leaves room");
      for (auto& w : wanted)
        for (auto& p : o.precisions) std::printf("%.3f\n", make_runner(w, device, {{}, p, "eager"}, 3, {})->figures().peak_mib);
      return 0;
    }
    Bench bench(o, device);
    if (o.sizes) return bench.run_sizes(), 0;
    for (auto& w : wanted) {
      fit(w, device, o.step_limit);
      bench.run(w);
    }
    bench.finish();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "halftone-bench: %s\n", e.what());
    return 1;
  }
}
