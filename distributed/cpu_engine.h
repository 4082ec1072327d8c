#pragma once
// Collectives on CPU tensors. An engine is one process's part of a group; the ranks that the process holds meet in it, call
// by call. The last one to arrive hands the call on: here it is done at once, in memory; over MPI a thread of the engine's does it.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "halftone/distributed/transport.h"

namespace halftone::distributed {

using Clock = std::chrono::steady_clock;

class CpuEngine : public std::enable_shared_from_this<CpuEngine> {
 public:
  // One call of the group's ranks.
  struct Round {
    int64_t sequence;
    std::vector<Request> requests;  // by local rank; those that have not arrived have an undefined x and no `arrived`
    std::vector<char> arrived;
    size_t missing;
    Clock::time_point since;        // the first one's arrival
    bool done = false;
  };

  // process_of[r] is the process that holds rank r; this one is `here`.
  CpuEngine(std::vector<int> process_of, int here, double deadline);
  virtual ~CpuEngine() = default;

  int size() const { return static_cast<int>(process_of_.size()); }
  const std::vector<int>& ranks_here() const { return ranks_here_; }
  double deadline() const { return std::chrono::duration<double>(deadline_).count(); }

  std::shared_ptr<Round> issue(size_t local, const Request& r);
  // Of a call that the rank made at `since`.
  void wait(const Round& round, Clock::time_point since);
  bool done(const Round& round);
  void fail(const Failure& failure);
  // Throws what stopped the group, if anything has.
  void check();
  virtual std::vector<int> silent() { return {}; }
  virtual int64_t calls() const { return 0; }  // that this process's ranks have made, where other processes are told
  virtual void revive();
  std::shared_ptr<CpuEngine> part(size_t local, const std::vector<int>& ranks, int color);

 protected:
  // All local ranks have arrived. Called in order.
  virtual void start(const std::shared_ptr<Round>& round);
  virtual std::shared_ptr<CpuEngine> make_part(const std::vector<int>& ranks, int64_t sequence, int color);
  virtual void failed() {}  // once, under the lock
  void finish(Round& round);
  // "all_reduce: call 3 of this group of 4 did not end within 5 s: <why>"
  Failure overdue(const Round& round, const std::string& why, std::vector<int> ranks) const;

  const std::vector<int> process_of_;
  const int here_;
  const Clock::duration deadline_;
  std::vector<int> ranks_here_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::optional<Failure> failure_;  // under the lock

 private:
  void fail_locked(const Failure& failure);

  struct Part {
    std::shared_ptr<CpuEngine> engine;
    size_t left = 0;  // ranks that have not taken it
  };
  std::deque<std::shared_ptr<Round>> open_;  // calls that some local rank has not made yet, in order
  std::vector<int64_t> next_;                // by local rank, the number of its next call
  std::map<std::pair<int64_t, std::vector<int>>, Part> parts_;
};

// The engine's end for each rank that it holds.
std::vector<std::shared_ptr<Transport>> ends(const std::shared_ptr<CpuEngine>& engine);

// What two equal calls have in common, as a number.
uint64_t fingerprint(const Description& d);
// The failure of ranks that made different calls; texts[r] is rank r's.
Failure disagreement(int64_t sequence, const std::vector<std::string>& texts);
inline int64_t bytes_of(const Tensor& t) { return t.numel() * static_cast<int64_t>(size_of(t.dtype())); }

}  // namespace halftone::distributed
