#pragma once
// What the examples have in common: options, and a run's folder with its checkpoints, figures and charts. What takes long to compile is in
// run.cpp, which is part of each.
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>

#include "halftone/halftone.h"

namespace halftone::examples {

// A program's options: each writes where it is told, and --help shows what stood there before.
class Arguments {
 public:
  enum Values { any, positive, not_negative, share };  // share: 0 to 1
  // `calls` are shown by --help as examples.
  Arguments(std::string name, const std::string& about, const std::vector<std::string>& calls = {});
  ~Arguments();
  void add(const std::string& option, int64_t& value, const std::string& what, Values allowed = any);
  void add(const std::string& option, uint64_t& value, const std::string& what);
  void add(const std::string& option, double& value, const std::string& what, Values allowed = any);
  // `choices`, where there are some, are all that is allowed.
  void add(const std::string& option, std::string& value, const std::string& what, const std::vector<std::string>& choices = {});
  void add(const std::string& option, std::vector<std::string>& values, const std::string& what, const std::vector<std::string>& choices = {});
  void add_flag(const std::string& option, bool& value, const std::string& what);
  void add_file(const std::string& option, std::string& value, const std::string& what, bool required = false);  // that exists
  // What main returns: what the program does, or 1 after an error in one line.
  int run(int argc, char** argv, const std::function<int()>& program);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// How a program runs, as its user said.
struct Run {
  std::string data = "data/fashion-mnist-subset", device = "cpu", precision = "fp32", out, tensorboard;
  std::vector<std::string> precisions = {"fp32"};  // of a program that compares several
  bool capture = false, resume = false, fresh = false;
  uint64_t seed = 0;
  int64_t seeds = 1;   // of a program that compares
  double target = 0;   // test accuracy, in percent, whose time it says; 0: none

  explicit Run(std::string folder) : out(std::move(folder)) {}
  void add_data(Arguments& arguments) { arguments.add("--data", data, "folder with the four files of Fashion-MNIST or MNIST, plain or .gz"); }
  // `several`: it trains in several precisions, from several seeds, and compares.
  void add_to(Arguments& arguments, bool several = false);

  // Throws where there is no such device.
  Device place() const;
  std::optional<DType> dtype() const;
  amp::AutocastOptions mixed() const { return {.dtype = dtype(), .enabled = dtype().has_value()}; }
  amp::GradScaler scaler() const { return amp::GradScaler({.enabled = precision == "fp16"}); }
  // f, or with --capture f replayed.
  template <class F> auto replayed(F f) const {
    return [f, on = capture, graph = std::make_shared<Captured<F>>(halftone::capture(f))](const auto&... x) mutable { return on ? (*graph)(x...) : f(x...); };
  }
  std::string file(const std::string& name) const;
  // Whether to go on from the checkpoints of OUT. Throws where there are some and the user did not say whether to; --fresh removes them,
  // and TensorBoard's files in OUT/tensorboard: ask before those of this run are opened.
  bool resuming() const;
  // One for each of `precisions` and seeds, with a folder of its own where there are several.
  std::vector<Run> each() const;
  // metrics.json: what was found, and where.
  void write_metrics(io::Fields found) const;
  std::string board_folder() const;  // for TensorBoard
};

// A loop of steps with a bar, that is saved now and then and at its end, by Ctrl-C too, and goes on where it was:
//   for (int64_t step = session.begin(); session.more(step); ++step) ...
class Session {
 public:
  Session(const Run& run, std::string label, int64_t steps, int64_t every);
  io::Checkpoint checkpoint;  // add all that has a state

  int64_t begin();          // the steps that are done
  bool more(int64_t done);  // whether to go on when so many are
  bool interrupted() const { return stopped_; }
  // Behind the bar.
  template <class V> void show(const std::string& name, const V& value) { bar_.show(name, value); }
  // A row of OUT/log.csv, shown behind the bar and in TensorBoard, too.
  void log(int64_t done, const std::vector<std::pair<std::string, double>>& values);
  io::TensorBoard& board() { return *board_; }

 private:
  const Run& run_;
  Interrupt interrupt_;
  ProgressBar bar_;
  std::optional<io::CsvLog> csv_;
  std::optional<io::TensorBoard> board_;
  bool stopped_ = false;
  int64_t steps_, every_, saved_ = 0, shown_ = 0;
};

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
template <class F, class Loader> double accuracy(F&& f, Loader& loader, const amp::AutocastOptions& mixed) {
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

class Clock {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// What the epochs of a run came to; the losses of one are summed on the device.
struct Epochs {
  Tensor total;                                             // f32 []
  std::vector<double> losses = {}, accuracies = {}, seconds = {};  // the mean loss; of the test set, in percent; since the run's start
  explicit Epochs(Device device) : total(zeros({}, {.device = device})) {}
  void add(const Tensor& loss) { total.add_(loss.detach()); }
  void end_epoch(int64_t steps) {
    losses.push_back(total.item() / static_cast<double>(steps));
    seconds.push_back(elapsed());
    total.zero_();
  }
  double elapsed() const { return before_ + clock_.seconds(); }
  StateDict state_dict() const;
  void load_state_dict(const StateDict& s);

 private:
  double before_ = 0;  // in runs that this one goes on from
  Clock clock_;
};

// What a training came to in one precision from one seed, for the table and the chart of several.
struct Result {
  std::string precision;
  uint64_t seed = 0;
  double samples_per_s = 0, peak_mib = 0, final_scale = 1;
  int64_t skipped_steps = 0;
  std::vector<double> losses = {}, accuracies = {}, seconds = {};  // as in Epochs

  double test_accuracy() const { return accuracies.empty() ? 0 : accuracies.back(); }
  int64_t epochs_to(double target) const;  // 0: it did not get there
  io::Fields fields() const;
};
// What train() came to, saved as metrics.json; nothing where it was interrupted. `examples` is their number in an epoch.
std::optional<Result> result_of(const TrainResult& trained, const Run& run, int64_t examples);
// For train()'s .after_epoch: writes each epoch for TensorBoard.
std::function<bool(const TrainEpoch&)> logged(const Run& run);

// Trains in each precision from each seed by train_once(run), which gives a result unless it was interrupted, and compares: a table, loss.svg,
// and, with what the table is made of, summary.json. What main returns.
int train_each(const Run& run, const std::function<std::optional<Result>(const Run&)>& train_once);

}  // namespace halftone::examples
