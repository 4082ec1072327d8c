#pragma once
// What stands behind a Group: one rank's end of an engine. Engines get calls whose arguments are checked already.
#include <map>

#include "halftone/distributed/group.h"

namespace halftone::distributed {

// A collective as the ranks compare it: equal texts, equal calls.
struct Description {
  Operation operation = Operation::barrier;
  Reduce how = Reduce::sum;  // all_reduce, reduce_scatter
  int root = 0;              // broadcast
  Meta x;                    // all but barrier
};
HT_API std::string str(const Description& d);  // "all_reduce(sum) of [2, 3] (f32)"

struct Request {
  Description what;
  Tensor x, out;          // out: all_gather, reduce_scatter
  bool compare_only = false;  // the data go another way
};

// Why a group can go no further. Each rank throws an error of its own, made from it.
struct Failure {
  bool mismatch = false;
  std::string text;
  std::string operation = {};
  int64_t sequence = 0;
  std::vector<int> ranks = {};
  [[noreturn]] HT_API void raise() const;
};

class HT_API Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;
  virtual bool done() = 0;
};

class HT_API Transport : public std::enable_shared_from_this<Transport> {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual Device device() const = 0;
  virtual double deadline() const = 0;
  virtual std::shared_ptr<Work> issue(const Request& r) = 0;
  // The group of `ranks`, this one among them, in that order. Called by each of them after the same collective; `color` tells
  // groups apart that are made at once. Blocks.
  virtual std::shared_ptr<Transport> part(const std::vector<int>& ranks, int color) = 0;
  // The end of a group on CPU tensors of the same ranks: through which they agree.
  virtual Transport& control() { return *this; }
  // The ranks that this process holds.
  virtual std::vector<std::shared_ptr<Transport>> local() { return {shared_from_this()}; }
  // Ranks that wait, and all later calls, throw it.
  virtual void fail(const Failure& failure) = 0;
  // Throws what stopped the group, if anything has.
  virtual void check() = 0;
  // Ranks of other processes that have not been heard of for too long.
  virtual std::vector<int> silent() { return {}; }
  // All ranks of a failed group are in this process and none is at work: it may begin anew.
  virtual void revive() {}

  std::map<int, std::function<void(const Issued&)>> on_issue;  // of this rank, on its own thread
  int64_t issued = 0;
};

// "rank 3", "ranks 0 to 4, 7"
HT_API std::string list_ranks(const std::vector<int>& ranks);

// A group of CPU ranks that are threads of this process, one end for each.
std::vector<std::shared_ptr<Transport>> cpu_threads(int n, double deadline);
// One handle for several ranks of this process.
std::shared_ptr<Transport> held_together(std::vector<std::shared_ptr<Transport>> ranks);

// Parts of the library that this build may lack; null then.
struct Engines {
  // The ends that this process holds of a group over all processes of the launcher, `each` ranks in every process.
  std::vector<std::shared_ptr<Transport>> (*mpi)(int each, double deadline) = nullptr;
  // How many processes of the launcher share this one's machine, and which of them this one is.
  struct Place { int index, count; };
  Place (*mpi_place)() = nullptr;
  // The end on a GPU of a group whose ranks agree through `control`. Each rank calls it on a thread of its own.
  std::shared_ptr<Transport> (*nccl)(std::shared_ptr<Transport> control, Device device) = nullptr;
};
HT_API Engines& engines();

}  // namespace halftone::distributed
