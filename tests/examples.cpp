// What the examples promise: Ctrl-C in the middle of an epoch leaves a checkpoint, --resume ends with the bits of a run that never
// stopped; they learn what they say. Runs the programs that lie beside the tests in the build.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <thread>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

using namespace halftone;
namespace fs = std::filesystem;

namespace {

const fs::path build = fs::read_symlink("/proc/self/exe").parent_path().parent_path();
const std::string subset = std::string(HALFTONE_SOURCE_DIR) + "/data/fashion-mnist-subset";

// The number behind these keys, each looked for after the one before.
double number(const std::string& json, const std::vector<std::string>& keys) {
  size_t at = 0;
  for (auto& key : keys) {
    at = json.find("\"" + key + "\":", at);
    INFO(key << " in " << json);
    REQUIRE(at != std::string::npos);
    at += key.size() + 3;
  }
  return std::stod(json.substr(at));
}

// A program that runs, what it writes going to a file.
class Running {
 public:
  Running(const fs::path& program, std::vector<std::string> arguments, const std::string& log) {
    arguments.insert(arguments.begin(), program.string());
    std::vector<char*> argv;
    for (auto& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    REQUIRE(::posix_spawn(&process_, argv[0], &actions, nullptr, argv.data(), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  Running(const Running&) = delete;
  ~Running() {
    if (process_ > 0) ::kill(process_, SIGKILL), ::waitpid(process_, nullptr, 0);
  }
  void interrupt() const { ::kill(process_, SIGINT); }
  bool over() {
    if (process_ > 0 && ::waitpid(process_, &status_, WNOHANG) == process_) process_ = -1;
    return process_ < 0;
  }
  // Its exit status; -1 when a signal ended it.
  int wait() {
    if (process_ > 0) ::waitpid(std::exchange(process_, -1), &status_, 0);
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : -1;
  }

 private:
  pid_t process_ = -1;
  int status_ = 0;
};

struct Example {
  std::string program;
  std::vector<std::string> arguments;
  std::string checkpoints;  // their folder in OUT
};

// A program's run with OUT = folder; its exit status.
int run(const Example& e, const std::string& folder, const std::vector<std::string>& more = {}) {
  std::vector<std::string> arguments = e.arguments;
  arguments.insert(arguments.end(), {"--out", folder});
  arguments.insert(arguments.end(), more.begin(), more.end());
  const std::string log = folder + ".txt";
  const int status = Running(build / "examples" / e.program, arguments, log).wait();
  UNSCOPED_INFO(e.program << ":\n" << bytes_of(log));
  return status;
}

const bool built = fs::exists(build / "examples" / "mlp");

// Runs it with and without a Ctrl-C after its first checkpoint, and compares the last checkpoints of both.
void check_resuming(const Example& e) {
  Temporary temporary;
  const std::string whole = temporary / "whole", parts = temporary / "parts";
  REQUIRE(run(e, whole) == 0);
  for (bool interrupted = false; !interrupted;) {  // until Ctrl-C comes before the end
    std::vector<std::string> arguments = e.arguments;
    arguments.insert(arguments.end(), {"--fresh", "--out", parts});
    Running first(build / "examples" / e.program, arguments, parts + ".txt");
    const io::Checkpoint saved(parts + e.checkpoints);
    while (!first.over() && saved.steps().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!first.over()) first.interrupt();
    const int status = first.wait();
    const std::string said = bytes_of(parts + ".txt");
    INFO(said);
    REQUIRE((status == 130 || status == 0));
    if (!(interrupted = status == 130)) continue;
    CHECK(said.find("--resume goes on from there\n") != std::string::npos);
    CHECK(said.ends_with("\n"));
  }
  const io::Checkpoint all(whole + e.checkpoints), some(parts + e.checkpoints);
  REQUIRE(some.steps().back() < all.steps().back());
  CHECK(run(e, parts) == 1);  // neither --resume nor --fresh: nothing is overwritten
  REQUIRE(run(e, parts, {"--resume"}) == 0);
  REQUIRE(some.steps().back() == all.steps().back());
  const StateDict a = io::load(all.path(all.steps().back())), b = io::load(some.path(some.steps().back()));
  REQUIRE(a.size() == b.size());
  int compared = 0;
  for (auto& [name, value] : a) {
    if (name.ends_with("seconds") || name == "train.figures") continue;  // times
    INFO(name);
    const Tensor other = b.at(name);
    REQUIRE((other.shape() == value.shape() && other.dtype() == value.dtype()));
    CHECK(std::memcmp(value.raw_data(), other.raw_data(), static_cast<size_t>(value.numel()) * size_of(value.dtype())) == 0);
    ++compared;
  }
  CHECK(compared > 4);
}

}  // namespace

TEST_CASE("an interrupted example goes on bit for bit: mlp") {
  if (!built) HT_SKIP("the examples are not built");
  check_resuming({"mlp", {"--data", subset, "--epochs", "6", "--precision", "bf16", "--batch", "64"}, "/checkpoints"});
}
TEST_CASE("an interrupted example goes on bit for bit: cnn") {
  if (!built) HT_SKIP("the examples are not built");
  check_resuming({"cnn", {"--data", subset, "--epochs", "3", "--precision", "fp32", "--width", "2", "--batch", "64"}, ""});
}
TEST_CASE("an interrupted example goes on bit for bit: gpt") {
  if (!built) HT_SKIP("the examples are not built");
  check_resuming({"gpt",
                  {"--text",      std::string(HALFTONE_SOURCE_DIR) + "/README.md",
                   "--steps",     "200",
                   "--every",     "20",
                   "--batch",     "4",
                   "--context",   "16",
                   "--width",     "16",
                   "--heads",     "2",
                   "--layers",    "1",
                   "--sample",    "10",
                   "--precision", "fp16"},
                  "/checkpoints"});
}
TEST_CASE("an interrupted example goes on bit for bit: wgan_gp") {
  if (!built) HT_SKIP("the examples are not built");
  check_resuming({"wgan_gp", {"--data", subset, "--steps", "30", "--every", "4", "--batch", "8", "--width", "4"}, "/checkpoints"});
}
TEST_CASE("an interrupted example goes on bit for bit: several_losses, accumulation, your_own") {
  if (!built) HT_SKIP("the examples are not built");
  check_resuming({"several_losses", {"--data", subset, "--epochs", "6", "--width", "16"}, "/checkpoints"});
  check_resuming({"accumulation", {"--data", subset, "--epochs", "6", "--batch", "64", "--parts", "2"}, "/checkpoints"});
  check_resuming({"your_own", {"--steps", "4000", "--precision", "fp16"}, "/checkpoints"});
}

// Files for TensorBoard in a folder.
std::ptrdiff_t boards(const fs::path& folder) {
  return std::count_if(fs::directory_iterator(folder), fs::directory_iterator(),
                       [](auto& entry) { return entry.path().filename().string().starts_with("events.out.tfevents."); });
}

TEST_CASE("TensorBoard's files of runs before go with --fresh, and stay otherwise") {
  if (!built) HT_SKIP("the examples are not built");
  const Example by_session{"your_own", {"--steps", "20"}, "/checkpoints"};
  const Example by_train{"cnn", {"--data", subset, "--epochs", "1", "--precision", "fp32", "--width", "1", "--batch", "500"}, ""};
  for (const Example& e : {by_session, by_train}) {
    Temporary temporary;
    const std::string out = temporary / "out", elsewhere = temporary / "elsewhere";
    REQUIRE(run(e, out) == 0);
    REQUIRE(boards(out + "/tensorboard") == 1);
    write_bytes(out + "/tensorboard/notes", "mine");
    REQUIRE(run(e, out, {"--resume"}) == 0);
    CHECK(boards(out + "/tensorboard") == 2);
    CHECK(run(e, out) == 1);  // refused, with nothing removed
    CHECK(boards(out + "/tensorboard") == 2);
    REQUIRE(run(e, out, {"--fresh"}) == 0);
    CHECK(boards(out + "/tensorboard") == 1);
    for (int i = 1; i <= 2; ++i) {
      REQUIRE(run(e, out, {"--fresh", "--tensorboard", elsewhere}) == 0);
      CHECK(boards(elsewhere) == i);
    }
    CHECK(boards(out + "/tensorboard") == 0);
    CHECK(bytes_of(out + "/tensorboard/notes") == "mine");
  }
}

TEST_CASE("the GPT beats pairs of characters on a small text") {
  if (!built) HT_SKIP("the examples are not built");
  Temporary temporary;
  std::string text;
  for (const char* file : {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/amp.md"}) text += bytes_of(fs::path(HALFTONE_SOURCE_DIR) / file);
  write_bytes(temporary / "text", text);
  const std::string out = temporary / "gpt";
  REQUIRE(run({"gpt",
               {"--text", temporary / "text", "--steps", "600",      "--every", "600",       "--batch", "16",   "--context", "48",       "--width",
                "48",     "--heads",          "4",       "--layers", "2",       "--dropout", "0",       "--lr", "4e-3",      "--sample", "40"},
               ""},
              out) == 0);
  const std::string found = bytes_of(out + "/metrics.json");
  CHECK(number(found, {"test_loss"}) < number(found, {"bigram_loss"}));
}

TEST_CASE("ResNet with the flags of the fast recipe learns from CIFAR's format") {
  if (!built) HT_SKIP("the examples are not built");
  Temporary temporary;
  const std::string out = temporary / "resnet";
  REQUIRE(run({"resnet",
               {"--data",
                temporary / "cifar",
                "--random",
                "100",
                "--epochs",
                "4",
                "--batch",
                "20",
                "--width",
                "4",
                "--lr",
                "0.1",
                "--smoothing",
                "0.2",
                "--cutout",
                "8",
                "--mirror-test",
                "--seeds",
                "2",
                "--target",
                "20",
                "--workers",
                "0"},
               ""},
              out) == 0);
  const std::string summary = bytes_of(out + "/summary.json");
  CHECK(number(summary, {"seeds"}) == 2);
  CHECK(number(summary, {"test_accuracy", "mean"}) > 25);  // guessing gives 10
  CHECK(number(summary, {"reached"}) == 2);
  CHECK(number(summary, {"seconds_to_target", "mean"}) > 0);
  CHECK(fs::exists(out + "/seed-1/metrics.json"));
  CHECK(fs::exists(out + "/seed-0/tensorboard"));
}

TEST_CASE("halftone-bench says what it measured, and where mixed precision loses") {
  const fs::path program = build / "benchmarks" / "halftone-bench";
  if (!fs::exists(program)) HT_SKIP("halftone-bench is not built");
  Temporary temporary;
  const std::string log = temporary / "bench.txt", out = temporary / "bench";
  // One example a batch: copies of the weights in 16 bits take more memory than activations save.
  Running bench(program, {"--device", "cpu", "--mlp", "256,256,10", "--batch", "1", "--rounds", "2", "--first-steps", "3", "--out", out}, log);
  REQUIRE(bench.wait() == 0);
  const std::string said = bytes_of(log);
  INFO(said);
  CHECK(said.find("Mixed precision loses:\n") != std::string::npos);
  CHECK(said.find("mlp, bf16 eager: it takes") != std::string::npos);
  CHECK(bytes_of(out + "/bench.svg").starts_with("<svg"));
  std::istringstream lines(bytes_of(out + "/bench.jsonl"));
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    for (const char* key : {"peer",
                            "commit",
                            "build",
                            "device",
                            "cpu",
                            "threads",
                            "case",
                            "batch",
                            "precision",
                            "how",
                            "ms",
                            "lo",
                            "hi",
                            "peak_mib",
                            "setup_s",
                            "samples_per_s",
                            "tflops",
                            "share_of_product",
                            "share_of_copy",
                            "first_steps",
                            "loss",
                            "loss_from_fp32",
                            "skipped_steps",
                            "kernel_calls",
                            "casts",
                            "plans"})
      CHECK(line.find("\"" + std::string(key) + "\":") != std::string::npos);
    CHECK(number(line, {"ms"}) > 0);
    CHECK(number(line, {"share_of_product"}) > 0);
    CHECK(number(line, {"lo"}) <= number(line, {"hi"}));
    CHECK((line.find("\"fp32\"") != std::string::npos) == (number(line, {"casts"}) == 0));
    // Products of one example: forward and weights' gradients of both layers, and one gradient between them.
    CHECK(std::abs(number(line, {"tflops"}) * number(line, {"ms"}) * 1e9 - 2.0 * (256 * 256 * 2 + 256 * 10 * 3)) < 1);
  }
  CHECK(count == 2);
}
