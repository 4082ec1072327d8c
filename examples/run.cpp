// The examples' options, folders, checkpoints and tables.
#include "halftone/examples/run.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>

namespace halftone::examples {

// ---- options

namespace {

// CLI11's own errors name ranges of 300 digits.
CLI::Validator number_from(bool zero, const char* name) {
  return {[zero](const std::string& given) -> std::string {
            char* end = nullptr;
            const double v = std::strtod(given.c_str(), &end);
            const bool good = end != given.c_str() && *end == '\0' && std::isfinite(v) && (v > 0 || (zero && v == 0));
            return good ? "" : text::cat("expected a number ", zero ? "of 0 or more" : "above 0", ", got ", given);
          },
          name};
}

}  // namespace

struct Arguments::State {
  std::string name;
  CLI::App app;

  CLI::Option* restrict(CLI::Option* option, Values allowed) {
    if (allowed == positive) option->check(number_from(false, "POSITIVE"));
    if (allowed == not_negative) option->check(number_from(true, "NONNEGATIVE"));
    if (allowed == share) option->check(CLI::Range(0.0, 1.0));
    return option->capture_default_str();
  }
  CLI::Option* restrict(CLI::Option* option, const std::vector<std::string>& choices) {
    if (!choices.empty()) option->check(CLI::IsMember(choices));
    return option->capture_default_str();
  }
};

Arguments::Arguments(std::string name, const std::string& about, const std::vector<std::string>& calls) : state_(std::make_unique<State>()) {
  state_->name = std::move(name);
  state_->app.description(about);
  std::string footer = calls.empty() ? "" : "Examples:\n";
  for (auto& call : calls) footer += "  " + call + "\n";
  state_->app.footer(footer);
  state_->app.get_formatter()->column_width(26);
}
Arguments::~Arguments() = default;
void Arguments::add(const std::string& option, int64_t& value, const std::string& what, Values allowed) {
  state_->restrict(state_->app.add_option(option, value, what), allowed);
}
void Arguments::add(const std::string& option, uint64_t& value, const std::string& what) {
  state_->app.add_option(option, value, what)->capture_default_str();
}
void Arguments::add(const std::string& option, double& value, const std::string& what, Values allowed) {
  state_->restrict(state_->app.add_option(option, value, what), allowed);
}
void Arguments::add(const std::string& option, std::string& value, const std::string& what, const std::vector<std::string>& choices) {
  state_->restrict(state_->app.add_option(option, value, what), choices);
}
void Arguments::add(const std::string& option, std::vector<std::string>& values, const std::string& what, const std::vector<std::string>& choices) {
  state_->restrict(state_->app.add_option(option, values, what), choices);
}
void Arguments::add_flag(const std::string& option, bool& value, const std::string& what) { state_->app.add_flag(option, value, what); }
void Arguments::add_file(const std::string& option, std::string& value, const std::string& what, bool required) {
  state_->app.add_option(option, value, what)->required(required)->check(CLI::ExistingFile);
}
int Arguments::run(int argc, char** argv, const std::function<int()>& program) {
  try {
    state_->app.parse(argc, argv);
    return program();
  } catch (const CLI::ParseError& e) {
    return state_->app.exit(e);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", state_->name.c_str(), e.what());
    return 1;
  }
}

// ---- a run and its folder

void Run::add_to(Arguments& arguments, bool several) {
  const std::vector<std::string> known = {"fp32", "fp16", "bf16"};
  if (several) arguments.add("--precision", precisions, "fp32, fp16 or bf16, or several to compare; fp16 scales the loss", known);
  else arguments.add("--precision", precision, "fp32, fp16 or bf16; fp16 scales the loss", known);
  arguments.add("--device", device, "cpu, cuda or cuda:N");
  arguments.add_flag("--capture", capture, "replay steps as CUDA graphs");
  arguments.add("--seed", seed, "of weights and order; the same seed gives the same bits");
  if (several) {
    arguments.add("--seeds", seeds, "train from so many seeds, SEED and those after it, and give mean and spread", Arguments::positive);
    arguments.add("--target", target, "a test accuracy in percent: how long did it take to get there?", Arguments::not_negative);
  }
  arguments.add("--out", out, "folder for what is written: checkpoints, metrics.json, figures");
  arguments.add("--tensorboard", tensorboard, "folder for TensorBoard's files in the place of OUT/tensorboard; --fresh removes none there");
  arguments.add_flag("--resume", resume, "go on from the newest checkpoint in OUT, such as Ctrl-C leaves");
  arguments.add_flag("--fresh", fresh, "begin anew, and remove the checkpoints in OUT and TensorBoard's files in OUT/tensorboard");
}

Device Run::place() const {
  Device d = halftone::device(device);
  backend(d.type);
  return d;
}

std::optional<DType> Run::dtype() const {
  if (precision == "fp32") return {};
  return precision == "fp16" ? DType::f16 : DType::bf16;
}

std::string Run::file(const std::string& name) const {
  io::make_folders(out);
  return out + "/" + name;
}

bool Run::resuming() const {
  if (resume) return true;
  for (const std::string& folder : {out, out + "/checkpoints"}) {
    const io::Checkpoint old(folder);
    const auto steps = old.steps();
    HT_CHECK(steps.empty() || fresh, "--out: ", out, " has checkpoints of a run; --resume goes on from them, --fresh removes them");
    for (int64_t step : steps) std::filesystem::remove(old.path(step));
  }
  if (const std::string own = out + "/tensorboard"; fresh && std::filesystem::exists(own))  // another may be others', too
    for (auto& entry : std::filesystem::directory_iterator(own))
      if (entry.path().filename().string().starts_with("events.out.tfevents.")) std::filesystem::remove(entry);
  return false;
}

std::vector<Run> Run::each() const {
  std::vector<Run> all;
  for (auto& p : precisions)
    for (uint64_t i = 0; i < static_cast<uint64_t>(seeds); ++i) {
      Run& one = all.emplace_back(*this);
      one.precision = p;
      one.seed = seed + i;
      const std::string folder = (precisions.size() > 1 ? "/" + p : "") + (seeds > 1 ? text::cat("/seed-", one.seed) : "");
      one.out += folder;
      if (!tensorboard.empty()) one.tensorboard += folder;
    }
  return all;
}

void Run::write_metrics(io::Fields found) const {
  for (auto& field :
       io::Fields{{"precision", precision}, {"device", device}, {"capture", capture}, {"seed", static_cast<int64_t>(seed)}, {"build", build_info()}})
    found.push_back(field);
  io::write_json(file("metrics.json"), found);
}

std::string Run::board_folder() const { return tensorboard.empty() ? out + "/tensorboard" : tensorboard; }

// ---- a loop of steps

Session::Session(const Run& run, std::string label, int64_t steps, int64_t every)
    : checkpoint(run.out + "/checkpoints", {.keep = 2}), run_(run), bar_(std::move(label), steps), steps_(steps), every_(every) {}

int64_t Session::begin() {
  saved_ = run_.resuming() ? checkpoint.resume().value_or(0) : 0;
  if (saved_ > 0) std::printf("going on after step %lld\n", static_cast<long long>(saved_));
  csv_.emplace(run_.file("log.csv"), io::LogOptions{.append = saved_ > 0});
  board_.emplace(run_.board_folder());
  bar_.start();
  return saved_;
}

bool Session::more(int64_t done) {
  for (; shown_ < done; ++shown_) bar_.advance();
  stopped_ = interrupt_.asked();
  const bool over = done >= steps_ || stopped_;
  if (over) bar_.finish();
  if (done > saved_ && (over || done - saved_ >= every_)) {
    checkpoint.save(done);
    saved_ = done;
  }
  if (stopped_) std::printf("stopped after step %lld; the same command with --resume goes on from there\n", static_cast<long long>(done));
  return !over;
}

void Session::log(int64_t done, const std::vector<std::pair<std::string, double>>& values) {
  io::Fields row{{"step", done}};
  for (auto& [name, value] : values) {
    row.emplace_back(name, value);
    bar_.show(name, value);
    board_->scalar(name, value, done);
  }
  csv_->write(row);
}

StateDict Epochs::state_dict() const {
  StateDict s;
  s.add("total", total);
  s.add("losses", tensor(losses));
  s.add("accuracies", tensor(accuracies));
  s.add("seconds", tensor(seconds));
  s.add("elapsed_seconds", tensor(elapsed()));
  return s;
}

void Epochs::load_state_dict(const StateDict& s) {
  total.copy_(s.at("total"));
  losses = s.at("losses").to_vector<double>();
  accuracies = s.at("accuracies").to_vector<double>();
  seconds = s.at("seconds").to_vector<double>();
  before_ = s.at("elapsed_seconds").item();
  clock_ = {};
}

// ---- what several came to

int64_t Result::epochs_to(double target) const {
  for (size_t i = 0; i < accuracies.size(); ++i)
    if (accuracies[i] >= target) return static_cast<int64_t>(i) + 1;
  return 0;
}

io::Fields Result::fields() const {
  return {{"test_accuracy", test_accuracy()}, {"samples_per_s", samples_per_s}, {"peak_mib", peak_mib}, {"final_scale", final_scale},
          {"skipped_steps", skipped_steps},   {"losses", losses},               {"accuracies", accuracies}, {"seconds", seconds}};
}

std::optional<Result> result_of(const TrainResult& trained, const Run& run, int64_t examples) {
  if (trained.interrupted) {
    std::printf("stopped in epoch %zu; the same command with --resume goes on from there\n", trained.epochs.size() + 1);
    return {};
  }
  Result r{.precision = run.precision, .seed = run.seed, .peak_mib = static_cast<double>(memory_stats(run.place()).peak) / (1 << 20),
           .final_scale = trained.final_scale, .skipped_steps = trained.skipped_steps};
  double seconds = 0;
  for (auto& e : trained.epochs) {
    r.losses.push_back(e.loss);
    r.accuracies.push_back(100 * e.accuracy);
    r.seconds.push_back(seconds += e.seconds);
  }
  if (seconds > 0) r.samples_per_s = static_cast<double>(examples) * static_cast<double>(trained.epochs.size()) / seconds;
  run.write_metrics(r.fields());
  return r;
}

std::function<bool(const TrainEpoch&)> logged(const Run& run) {
  return [board = std::make_shared<io::TensorBoard>(run.board_folder())](const TrainEpoch& e) {
    board->scalar("loss", e.loss, e.epoch);
    board->scalar("test loss", e.validation_loss, e.epoch);
    board->scalar("test accuracy", 100 * e.accuracy, e.epoch);
    return true;
  };
}

namespace {

struct Spread {
  double mean = 0, deviation = 0, least = 0, most = 0;  // the deviation is that of a sample
  explicit Spread(const std::vector<double>& values) {
    if (values.empty()) return;
    const auto n = static_cast<double>(values.size());
    for (double v : values) mean += v / n;
    for (double v : values) deviation += (v - mean) * (v - mean);
    deviation = values.size() > 1 ? std::sqrt(deviation / (n - 1)) : 0;
    least = *std::min_element(values.begin(), values.end());
    most = *std::max_element(values.begin(), values.end());
  }
  io::Fields fields() const { return {{"mean", mean}, {"deviation", deviation}, {"least", least}, {"most", most}}; }
};

void compare(const Run& run, const std::vector<Result>& results) {
  const bool several = run.seeds > 1;
  std::vector<io::Curve> curves;
  std::vector<io::Fields> rows, runs;
  std::string table =
      text::cat("\nprecision  device    test accuracy", several ? "   +-" : "", "      samples/s     peak MiB  final scale  skipped steps   seconds",
                run.target > 0 ? text::cat("   epochs to ", run.target, "%   seconds") : "", "\n");
  for (auto& p : run.precisions) {
    std::vector<double> accuracies, rates, peaks, scales, skipped, seconds, epochs_to, seconds_to, losses;
    for (auto& r : results) {
      if (r.precision != p) continue;
      accuracies.push_back(r.test_accuracy());
      rates.push_back(r.samples_per_s);
      peaks.push_back(r.peak_mib);
      scales.push_back(r.final_scale);
      skipped.push_back(static_cast<double>(r.skipped_steps));
      seconds.push_back(r.seconds.empty() ? 0 : r.seconds.back());
      if (int64_t n = r.epochs_to(run.target); run.target > 0 && n > 0) {
        epochs_to.push_back(static_cast<double>(n));
        seconds_to.push_back(r.seconds[static_cast<size_t>(n) - 1]);
      }
      losses.resize(r.losses.size());
      for (size_t i = 0; i < losses.size(); ++i) losses[i] += r.losses[i] / static_cast<double>(run.seeds);
      io::Fields one = r.fields();
      one.insert(one.begin(), {{"precision", p}, {"seed", static_cast<int64_t>(r.seed)}});
      runs.push_back(one);
    }
    curves.push_back({p, losses});
    const Spread accuracy(accuracies), time(seconds);
    io::Fields row{{"precision", p}, {"seeds", run.seeds}, {"test_accuracy", accuracy.fields()}, {"seconds", time.fields()}};
    std::array<char, 200> line;
    auto say = [&](const char* format, auto... values) {
      std::snprintf(line.data(), line.size(), format, values...);
      table += line.data();
    };
    say("%-10s %-8s %13.2f%%", p.c_str(), run.device.c_str(), accuracy.mean);
    if (several) say(" %5.2f", accuracy.deviation);
    say(" %14.0f %12.1f %12.0f %14.0f %9.2f", Spread(rates).mean, Spread(peaks).mean, Spread(scales).mean, Spread(skipped).mean, time.mean);
    if (run.target > 0) {
      row.insert(row.end(), {{"target", run.target},
                             {"reached", static_cast<int64_t>(seconds_to.size())},
                             {"epochs_to_target", Spread(epochs_to).fields()},
                             {"seconds_to_target", Spread(seconds_to).fields()}});
      if (seconds_to.empty()) say("   not reached");
      else
        say("   %.1f (%zu of %lld)   %.2f +- %.2f", Spread(epochs_to).mean, seconds_to.size(), static_cast<long long>(run.seeds),
            Spread(seconds_to).mean, Spread(seconds_to).deviation);
    }
    table += "\n";
    rows.push_back(row);
  }
  io::save_chart(run.file("loss.svg"), curves,
                 {.title = several ? text::cat("Training loss, mean of ", run.seeds, " seeds") : "Training loss",
                  .x_label = "epoch",
                  .y_label = "cross entropy"});
  io::write_json(run.file("summary.json"),
                 {{"device", run.device}, {"capture", run.capture}, {"build", build_info()}, {"precisions", rows}, {"runs", runs}});
  if (several) std::printf("\n%s\n", io::to_json(io::Fields{{"precisions", rows}}).c_str());
  std::printf("%s", table.c_str());
}

}  // namespace

int train_each(const Run& run, const std::function<std::optional<Result>(const Run&)>& train_once) {
  const std::vector<Run> all = run.each();
  for (auto& one : all) one.resuming();  // before the first begins: does each have its folder?
  std::vector<Result> results;
  for (auto& one : all) {
    std::optional<Result> result = train_once(one);
    if (!result) return 130;  // as a shell reports Ctrl-C
    results.push_back(*result);
  }
  compare(run, results);
  return 0;
}

}  // namespace halftone::examples
