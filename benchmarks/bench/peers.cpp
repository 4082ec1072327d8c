// Processes of peers, and pipes to them.
#include "halftone/benchmarks/bench/peers.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "halftone/benchmarks/bench/script.h"
#include "halftone/core/parallel.h"

namespace benchmarks {

Peer::Peer(const std::vector<std::string>& command) {
  std::array<int, 2> in{}, out{};
  HT_CHECK(::pipe2(in.data(), O_CLOEXEC) == 0 && ::pipe2(out.data(), O_CLOEXEC) == 0, "no pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  std::vector<char*> arguments;
  for (auto& a : command) arguments.push_back(const_cast<char*>(a.c_str()));
  arguments.push_back(nullptr);
  ::signal(SIGPIPE, SIG_IGN);  // a peer that has died is an error of ours, said in words
  const int failed = ::posix_spawnp(&process_, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(in[0]);
  ::close(out[1]);
  to_ = in[1];
  from_ = out[0];
  if (failed != 0) process_ = -1;
  HT_CHECK(failed == 0, command[0], " is not here");
  const std::string line = read_line();
  HT_CHECK(line.starts_with("hello "), line.starts_with("absent ") ? line.substr(7) : command[0] + " did not start");
  // hello NAME VERSION HOW,HOW
  const size_t last = line.rfind(' ');
  name_ = line.substr(6, last - 6);
  for (size_t at = last + 1; at < line.size(); at = line.find(',', at) == std::string::npos ? line.size() : line.find(',', at) + 1)
    hows_.push_back(line.substr(at, line.find(',', at) - at));
}

Peer::~Peer() {
  if (to_ >= 0) ::close(to_);  // ends it
  if (from_ >= 0) ::close(from_);
  if (process_ > 0) ::waitpid(process_, nullptr, 0);
}

std::string Peer::read_line() {
  for (;;) {
    if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    std::array<char, 4096> chunk;
    const ssize_t n = ::read(from_, chunk.data(), chunk.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return {};
    buffer_.append(chunk.data(), static_cast<size_t>(n));
  }
}

std::string Peer::ask(const std::string& line, const std::string& expected) {
  const std::string whole = line + "\n";
  const bool sent = ::write(to_, whole.data(), whole.size()) == static_cast<ssize_t>(whole.size());
  const std::string answer = sent ? read_line() : "";
  HT_CHECK(!answer.empty(), name_, " ended at '", line, "'");
  HT_CHECK(answer.starts_with(expected), name_, ": ", answer.starts_with("refused ") ? answer.substr(8) : answer);
  return answer.substr(std::min(answer.size(), expected.size() + 1));
}

std::vector<std::shared_ptr<Peer>> find_peers(const std::string& python) {
  const std::string beside = (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "halftone-bench-libtorch").string();
  const std::vector<std::pair<std::string, std::vector<std::string>>> commands = {
      {"PyTorch", {python, "-c", peers_script, "torch"}},
      {"JAX", {python, "-c", peers_script, "jax"}},
      {"libtorch", {std::filesystem::exists(beside) ? beside : "halftone-bench-libtorch"}}};
  ::setenv("OMP_NUM_THREADS", std::to_string(num_threads()).c_str(), 1);  // none gets more threads than another
  std::vector<std::shared_ptr<Peer>> found;
  std::string absent;
  for (auto& [name, command] : commands) try {
      found.push_back(std::make_shared<Peer>(command));
    } catch (const Error& e) {
      absent += text::cat(absent.empty() ? "" : "; ", name, " (", e.what(), ")");
    }
  if (!absent.empty()) std::printf("peers that are not here: %s\n", absent.c_str());
  return found;
}

namespace {

class PeerRunner final : public Runner {
 public:
  PeerRunner(std::shared_ptr<Peer> peer, const Workload& w, Device device, const Mode& mode, int first_steps) : peer_(std::move(peer)) {
    figures_.loss = std::stod(peer_->ask(text::cat("open ", w.model, " ", w.batch, " ", w.vocabulary > 0 ? w.example[0] : 0, " ",
                                                   w.adam ? "adamw" : "sgd", " ", mode.precision, " ", mode.how, " ", device, " ", first_steps),
                                         "ready"));
  }
  ~PeerRunner() override {
    try {
      if (!closed_) peer_->ask("close", "closed");
    } catch (const Error&) {  // it has ended already
    }
  }
  double measure(int steps) override { return std::stod(peer_->ask(text::cat("run ", steps), "took")); }
  // Its memory is told when it closes.
  StepFigures figures() override {
    if (!std::exchange(closed_, true)) figures_.peak_mib = std::stod(peer_->ask("close", "closed"));
    return figures_;
  }

 private:
  std::shared_ptr<Peer> peer_;
  bool closed_ = false;
  StepFigures figures_;
};

}  // namespace

std::unique_ptr<Runner> make_peer_runner(std::shared_ptr<Peer> peer, const Workload& w, Device device, const Mode& mode, int first_steps) {
  return std::make_unique<PeerRunner>(std::move(peer), w, device, mode, first_steps);
}

}  // namespace benchmarks
