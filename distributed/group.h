#pragma once
// A Group: the ranks that compute together, and what they do together. A rank is one device's worth of work: a thread or a
// process. Engines: threads of one process (in memory), MPI processes on CPUs, NCCL on GPUs, and processes of several
// thread ranks each; all behind this one handle.
// Every rank of a group makes the same calls in the same order, with tensors of one shape and dtype; who does not gets
// MismatchError on every rank. A group that failed once throws that error from then on.
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "halftone/core/hook.h"
#include "halftone/core/tensor.h"

namespace halftone::distributed {

// How the values of the ranks become one. 16-bit values are reduced in f32 and rounded once. On CPUs sums are taken in rank
// order, ((r0 + r1) + r2) + ..., so they have the bits of one process that adds the shards in order. mean is the sum divided by
// the number of ranks, of floating dtypes only. Integer sums wrap; a sum of bool is "any". min and max keep a NaN.
enum class Reduce : uint8_t { sum, mean, min, max };
HT_API std::string str(Reduce how);

enum class Operation : uint8_t { all_reduce, broadcast, all_gather, reduce_scatter, barrier, split };
HT_API std::string str(Operation operation);

// The others did not come: a rank died, threw, left, or did not arrive before the deadline.
struct HT_API CommunicationError : Error {
  CommunicationError(const std::string& what, std::string operation, int64_t sequence, std::vector<int> ranks);
  std::string operation;   // the collective that was waiting: "all_reduce"; "init" before there was any
  int64_t sequence;        // its number within the group, from 0
  std::vector<int> ranks;  // those that fell silent
};
// The ranks called different collectives, or one collective with different shapes, dtypes, reductions or roots. The text
// has every description with the ranks that gave it.
struct HT_API MismatchError : Error {
  using Error::Error;
};
// What a program of ours that ends with a CommunicationError should exit with, as the examples do: 75, EX_TEMPFAIL of sysexits.h.
inline constexpr int communication_exit_code = 75;

class Work;       // distributed/transport.h
class Transport;  // distributed/transport.h

// A collective that was issued. The tensors stay alive until it is through. Dropping it waits for nothing.
class HT_API Pending {
 public:
  Pending() = default;  // as one that is done
  explicit Pending(std::shared_ptr<Work> work) : work_(std::move(work)) {}
  // CPU: returns when the result is there, or throws what went wrong. GPU: this thread's current stream goes on behind the
  // result; the host does not wait, and an error is thrown by a later call.
  void wait() const;
  // Is the result there? Throws what went wrong. Never waits; not to be asked while a step is captured.
  bool done() const;

 private:
  std::shared_ptr<Work> work_;
};

// A collective as a hook sees it, on the thread that issues it.
struct Issued {
  Operation operation;
  int64_t sequence;  // its number within the group, from 0
  int64_t bytes;     // of this rank's tensor
};

// A handle, like Tensor: copies mean the same rank of the same group. Collectives return at once; x and out must not be
// read or written until wait(). They lie on device(), without gaps (all_gather and reduce_scatter: contiguous), of any dtype,
// and without history: what a collective does is not recorded for backward.
class HT_API Group {
 public:
  Group() : Group(alone()) {}  // one rank, on the CPU
  explicit Group(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}

  int rank() const;
  int size() const;
  Device device() const;
  // Ranks that this process holds: what run() runs.
  int local_size() const;
  // Seconds that a collective may take, from its call to its end on this rank.
  double deadline() const;

  // x becomes the reduction of all ranks' x.
  Pending all_reduce(const Tensor& x, Reduce how = Reduce::sum) const;
  // x becomes root's x.
  Pending broadcast(const Tensor& x, int root = 0) const;
  // out [size, ...x]: out[r] becomes rank r's x.
  Pending all_gather(const Tensor& x, const Tensor& out) const;
  // x [size, ...out]: out becomes the reduction of all ranks' x[rank].
  Pending reduce_scatter(const Tensor& x, const Tensor& out, Reduce how = Reduce::sum) const;
  // Returns when every rank has called it; blocks the host, on a GPU too, but not for work that is queued there.
  void barrier() const;

  // The ranks that give the same color become a group, in order of key, then of rank. All ranks call it; blocks. A negative
  // color gives a group of this rank alone.
  Group split(int color, int key = 0) const;

  // f(rank) for each rank that this process holds, each on a thread of its own (a single one: on the caller's) under the
  // caller's autocast and other thread state, with its device current and a random generator that begins as the caller's.
  // Returns when all have. An exception of a rank reaches the caller and releases the others, whose collectives throw.
  void run(const std::function<void(Group& rank)>& f) const;

  // f is called for every collective that this rank issues from now on.
  HookHandle on_issue(std::function<void(const Issued&)> f) const;

  const std::shared_ptr<Transport>& transport() const { return transport_; }

 private:
  static std::shared_ptr<Transport> alone();
  std::shared_ptr<Transport> transport_;
};

struct InitOptions {
  int devices_per_process = 1;              // ranks of each process; above 1 they are threads, see run()
  std::optional<DeviceType> device = {};    // default: GPUs where this machine has any, else the CPU
  double deadline = 300;                    // seconds that any collective may take, the first meeting included
};
// The group of all processes that mpirun or srun started; outside of them one rank. All processes call it, with equal options.
// Rank r * devices_per_process + i is the i-th device of process r.
// Environment: HALFTONE_DEADLINE, seconds, stands over options.deadline; HALFTONE_CHECK_COLLECTIVES=1 has GPU ranks compare
// every call, not only each new kind of call (CPU ranks always do).
HT_API Group init(const InitOptions& options = {});

// Ranks that are threads of this process; run() starts them. Each GPU may stand in the list once, the CPU as often as one likes.
HT_API Group threads(std::vector<Device> devices, double deadline = 300);
HT_API Group threads(int n, double deadline = 300);  // on the CPU

}  // namespace halftone::distributed
