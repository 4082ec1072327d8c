#pragma once
// This process among those that a launcher started with MPI. A thread of its own starts MPI, tells the other processes that
// this one lives, hears whether they do, and ends MPI with the program.
#include <mpi.h>

#include <atomic>
#include <list>
#include <thread>

#include "halftone/distributed/cpu_engine.h"

namespace halftone::distributed {

// Throws Error with MPI's text unless the call went well.
void check_mpi(int code, const char* what);

// Made once.
class Processes {
 public:
  static Processes& get(double deadline);

  int rank = 0, size = 1;
  Engines::Place place{0, 1};
  MPI_Comm world = MPI_COMM_NULL;
  bool multiple = false;  // threads may call MPI at once

  // Held around a call of MPI; excludes others only where MPI wants that.
  std::unique_lock<std::mutex> call() { return multiple ? std::unique_lock<std::mutex>() : std::unique_lock(calls_); }

  void enter(uint64_t id, const std::shared_ptr<CpuEngine>& engine);
  void leave(uint64_t id);
  void tell_failure(uint64_t id, const Failure& failure);
  bool ended() const { return ended_; }

  struct Seen { double silence; bool left; int64_t calls; };
  // What is known of a process and of how many calls of a group it has made.
  Seen seen(int process, uint64_t id);

 private:
  static inline Processes* instance = nullptr;
  static constexpr int max_groups = 24;
  struct Message {
    int32_t process, left, failed, groups;
    uint64_t id[max_groups];   // failed: id[0] is the group
    int64_t calls[max_groups];
    char text[512];
  };
  struct Letter {
    Message message;
    int to;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  explicit Processes(double deadline);
  void meet(double deadline);
  static Clock::duration seconds(double s) { return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s)); }
  void start();
  void serve();
  void beat(bool last);
  void receive();
  void take(const Message& m);
  void send(const Message& m, int to);
  bool may_end();
  void end();

  double deadline_;
  Clock::duration interval_;
  bool ours_ = false;  // we started MPI, so we end it
  std::atomic<bool> broken_ = false, ended_ = false, leaving_ = false;
  std::mutex calls_, lock_;
  std::condition_variable changed_;
  bool started_ = false;
  bool said_ = false;  // to the others, that this process is at its end
  std::string refused_;
  std::thread thread_;
  Message incoming_{};
  MPI_Request receiving_ = MPI_REQUEST_NULL;
  std::list<Letter> outgoing_;            // this thread's alone
  std::vector<std::pair<uint64_t, Failure>> failures_;  // to be told; the rest is under lock_, too
  std::vector<Clock::time_point> heard_;
  std::vector<char> left_;
  std::vector<std::map<uint64_t, int64_t>> calls_of_;
  std::map<uint64_t, std::weak_ptr<CpuEngine>> engines_;
  std::map<uint64_t, Failure> early_;     // of groups that this process has not made yet
};

}  // namespace halftone::distributed
