#pragma once
// Other frameworks, each in a process of its own that trains what it is told to, step by step, so that rounds of all take turns.
//
// What is said, line by line, from here and back:
//   (start)                                         hello NAME VERSION | absent REASON
//   open MODEL BATCH CONTEXT OPTIMIZER PRECISION HOW DEVICE FIRST_STEPS     ready LOSS | refused REASON
//   run N                                           took MILLISECONDS (a step)
//   close                                           closed PEAK_MIB (on the CPU by how much the process grew since before the first step)
// On the CPU PyTorch and libtorch open each training in a child of theirs, whose memory is of nothing else.
#include "halftone/benchmarks/bench/runner.h"

namespace benchmarks {

class Peer {
 public:
  // Starts a program. Throws Error, saying why, where it is not there or says that it is absent.
  explicit Peer(const std::vector<std::string>& command);
  ~Peer();
  Peer(const Peer&) = delete;
  const std::string& name() const { return name_; }  // "torch 2.11.0"
  const std::vector<std::string>& hows() const { return hows_; }
  // The rest of the answer, which begins with `expected`; Error otherwise.
  std::string ask(const std::string& line, const std::string& expected);

 private:
  std::string read_line();
  int process_ = -1, to_ = -1, from_ = -1;
  std::string name_, buffer_;
  std::vector<std::string> hows_;
};

// Those of PyTorch, JAX and libtorch that are here; of the others one line on standard output. `python` runs the first two;
// halftone-bench-libtorch is looked for beside this program and on the PATH.
std::vector<std::shared_ptr<Peer>> find_peers(const std::string& python);
// Throws Error with the peer's reason when it does not train this.
std::unique_ptr<Runner> make_peer_runner(std::shared_ptr<Peer> peer, const Workload& w, Device device, const Mode& mode, int first_steps);

}  // namespace benchmarks
