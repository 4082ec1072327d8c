#pragma once
// What the examples have in common: options, and a run's folder with its checkpoints, figures and charts.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>

#include "halftone/halftone.h"

namespace halftone::examples {

// How a program runs, as its user said.
struct Run {
  std::string data = "data/fashion-mnist-subset", device = "cpu", precision = "fp32", out;
  std::vector<std::string> precisions = {"fp32"};  // of a program that compares several
  bool capture = false, fresh = false;
  uint64_t seed = 0;

  explicit Run(std::string folder) : out(std::move(folder)) {}
  void add_data(CLI::App& app) { app.add_option("--data", data, "folder with the four files of Fashion-MNIST or MNIST, plain or .gz")->capture_default_str(); }
  void add_to(CLI::App& app, bool several = false) {
    auto* option = several ? app.add_option("--precision", precisions, "fp32, fp16 or bf16, or several to compare; fp16 scales the loss")
                           : app.add_option("--precision", precision, "fp32, fp16 or bf16; fp16 scales the loss");
    option->check(CLI::IsMember({"fp32", "fp16", "bf16"}))->capture_default_str();
    app.add_option("--device", device, "cpu, cuda or cuda:N")->capture_default_str();
    app.add_flag("--capture", capture, "replay steps as CUDA graphs");
    app.add_option("--seed", seed, "of weights and order; the same seed gives the same bits")->capture_default_str();
    app.add_option("--out", out, "folder for what is written; a run goes on from the checkpoint there")->capture_default_str();
    app.add_flag("--fresh", fresh, "begin anew, whatever is there");
  }

  // Throws where there is no such device.
  Device place() const {
    Device d = halftone::device(device);
    backend(d.type);
    return d;
  }
  std::optional<DType> dtype() const {
    if (precision == "fp32") return {};
    return precision == "fp16" ? DType::f16 : DType::bf16;
  }
  amp::AutocastOptions mixed() const { return {.dtype = dtype(), .enabled = dtype().has_value()}; }
  amp::GradScaler scaler() const { return amp::GradScaler({.enabled = precision == "fp16"}); }
  // f, or with --capture f replayed.
  template <class F> auto replayed(F f) const {
    return [f, on = capture, graph = std::make_shared<Captured<F>>(halftone::capture(f))](const auto&... x) mutable { return on ? (*graph)(x...) : f(x...); };
  }
  std::string file(const std::string& name) const {
    io::make_folders(out);
    return out + "/" + name;
  }
  // One for each of `precisions`, with a folder of its own where there are several.
  std::vector<Run> each() const {
    std::vector<Run> all;
    for (auto& p : precisions) {
      all.push_back(*this);
      all.back().precision = p;
      if (precisions.size() > 1) all.back().out += "/" + p;
    }
    return all;
  }
  // metrics.json: what was found, and where.
  void write_metrics(io::Fields found) const {
    for (auto& field : io::Fields{{"precision", precision}, {"device", device}, {"capture", capture}, {"seed", static_cast<int64_t>(seed)}, {"build", build_info()}})
      found.push_back(field);
    io::write_json(file("metrics.json"), found);
  }
};

// A loop of steps that is saved now and then and at its end, by Ctrl-C too, and goes on where it was:
//   for (int64_t step = session.begin(); session.more(step); ++step) ...
class Session {
 public:
  Session(const Run& run, int64_t steps, int64_t every) : checkpoint(run.out + "/checkpoints", {.keep = 2}), fresh_(run.fresh), steps_(steps), every_(every) {}
  io::Checkpoint checkpoint;  // add all that has a state

  int64_t begin() {
    int64_t step = fresh_ ? 0 : checkpoint.resume().value_or(0);
    if (step > 0) std::printf("going on after step %lld; --fresh begins anew\n", static_cast<long long>(step));
    return saved_ = step;
  }
  // Whether to go on when `done` steps are done.
  bool more(int64_t done) {
    const bool asked = interrupt_.asked(), over = done >= steps_ || asked;
    if (done > saved_ && (over || done - saved_ >= every_)) {
      checkpoint.save(done);
      saved_ = done;
    }
    stopped_ = asked;
    if (asked) std::printf("stopped after step %lld; the same command goes on from there\n", static_cast<long long>(done));
    return !over;
  }
  bool interrupted() const { return stopped_; }

 private:
  Interrupt interrupt_;
  bool fresh_, stopped_ = false;
  int64_t steps_, every_, saved_ = 0;
};

// A bar over `steps`, of which some are done.
inline ProgressBar bar_at(const std::string& label, int64_t steps, int64_t done) {
  ProgressBar bar(label, steps);
  bar.start();
  for (int64_t i = 0; i < done; ++i) bar.advance();
  return bar;
}

// Batches without end: epoch after epoch of a loader, whose position stays that of the last batch: leaving its own loop would end
// the epoch.
template <class Loader> class Endless {
 public:
  explicit Endless(Loader& loader) : loader_(loader) {}
  auto& next() {
    if (at_) ++*at_;
    while (!at_ || *at_ == loader_.end()) at_.emplace(loader_.begin());  // of an epoch that was saved at its end, none is left
    return **at_;
  }

 private:
  Loader& loader_;
  std::optional<decltype(std::declval<Loader&>().begin())> at_;
};

// The share of examples whose largest output of f is at the target, in percent.
template <class F, class Loader> double accuracy(F& f, Loader& loader, const amp::AutocastOptions& mixed) {
  NoGrad off;
  amp::Autocast region(mixed);
  Tensor right;
  int64_t count = 0;
  for (auto& [x, target] : loader) {
    Tensor hits = eq(f(x).argmax(1), target).sum();
    right = right.defined() ? right + hits : hits;
    count += target.numel();
  }
  return 100 * right.item() / static_cast<double>(count);
}

// The losses of a run, summed on the device, and the mean of each epoch.
struct Losses {
  Tensor total;  // f32 []
  std::vector<double> means = {};
  explicit Losses(Device device) : total(zeros({}, {.device = device})) {}
  void add(const Tensor& loss) { total.add_(loss.detach()); }
  void end_epoch(int64_t steps) {
    means.push_back(total.item() / static_cast<double>(steps));
    total.zero_();
  }
  StateDict state_dict() const {
    StateDict s;
    s.add("total", total);
    s.add("means", tensor(means));
    return s;
  }
  void load_state_dict(const StateDict& s) {
    total.copy_(s.at("total"));
    means = s.at("means").to_vector<double>();
  }
};

class Clock {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// What a training came to in one precision, for the table and the chart of several.
struct Result {
  std::string precision;
  double test_accuracy = 0, samples_per_s = 0, peak_mib = 0, final_scale = 1, seconds = 0;
  int64_t skipped_steps = 0;
  std::vector<double> losses = {};  // the mean of each epoch

  io::Fields fields() const {
    return {{"test_accuracy", test_accuracy}, {"samples_per_s", samples_per_s}, {"peak_mib", peak_mib},
            {"final_scale", final_scale},     {"skipped_steps", skipped_steps}, {"seconds", seconds},
            {"losses", losses}};
  }
};
// What train() came to, saved as metrics.json; nothing where it was interrupted. `examples` is their number in an epoch.
inline std::optional<Result> result_of(const TrainResult& trained, const Run& run, int64_t examples) {
  if (trained.interrupted) {
    std::printf("stopped in epoch %zu; the same command goes on from there\n", trained.epochs.size() + 1);
    return {};
  }
  Result r{.precision = run.precision, .peak_mib = static_cast<double>(memory_stats(run.place()).peak) / (1 << 20), .final_scale = trained.final_scale,
           .skipped_steps = trained.skipped_steps};
  for (auto& e : trained.epochs) {
    r.losses.push_back(e.loss);
    r.seconds += e.seconds;
  }
  if (!trained.epochs.empty()) {
    r.test_accuracy = 100 * trained.epochs.back().accuracy;
    r.samples_per_s = static_cast<double>(examples) * static_cast<double>(trained.epochs.size()) / r.seconds;
  }
  run.write_metrics(r.fields());
  return r;
}
inline void compare(const Run& run, const std::vector<Result>& results) {
  std::vector<io::Curve> curves;
  for (auto& r : results) curves.push_back({r.precision, r.losses});
  io::save_chart(run.file("loss.svg"), curves, {.title = "Training loss", .x_label = "epoch", .y_label = "cross entropy"});
  std::printf("\n%-10s %-8s %14s %14s %12s %12s %14s %9s\n", "precision", "device", "test accuracy", "samples/s", "peak MiB", "final scale", "skipped steps",
              "seconds");
  for (auto& r : results)
    std::printf("%-10s %-8s %13.2f%% %14.0f %12.1f %12.0f %14lld %9.2f\n", r.precision.c_str(), run.device.c_str(), r.test_accuracy, r.samples_per_s, r.peak_mib,
                r.final_scale, static_cast<long long>(r.skipped_steps), r.seconds);
}

// Trains in each precision by train_once(run), which gives a result unless it was interrupted, and compares: what main returns.
template <class F> int train_each(const Run& run, F train_once) {
  std::vector<Result> results;
  for (auto& one : run.each()) {
    std::optional<Result> result = train_once(one);
    if (!result) return 130;
    results.push_back(*result);
  }
  compare(run, results);
  return 0;
}

}  // namespace halftone::examples
