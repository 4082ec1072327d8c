// Groups of GPUs. A rank has one communicator and a stream of its own, which runs a collective behind what the caller's
// stream has queued; wait() queues the caller's stream behind it. The host waits for no device, so all of it may be
// captured. What ranks have to agree on (the communicator's id, that they make the same calls) goes through the group's
// CPU end. A thread of the process watches: on an error, a deadline or the failure of another rank it has the communicator
// aborted, whose kernels then end. It makes no call of CUDA, which might wait for what only it can end.
#include <cuda.h>
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "halftone/cuda/device_state.h"
#include "halftone/cuda/nccl_reduce.h"
#include "halftone/cuda/stream.h"
#include "halftone/distributed/transport.h"

namespace halftone {
void register_nccl();
}

namespace halftone::cuda {
namespace {

using namespace distributed;
using Clock = std::chrono::steady_clock;

ncclDataType_t type_of(DType t) {
  static constexpr ncclDataType_t types[num_dtypes] = {ncclFloat16, ncclBfloat16, ncclFloat32, ncclFloat64, ncclInt32, ncclInt64, ncclUint8, ncclUint8};
  return types[static_cast<int>(t)];
}
ncclRedOp_t reduction(Reduce how, DType t) {
  if (t == DType::b8) return how == Reduce::min ? ncclMin : ncclMax;  // 0 and 1
  static constexpr ncclRedOp_t of[] = {ncclSum, ncclAvg, ncclMin, ncclMax};
  return of[static_cast<int>(how)];
}
int64_t bytes(DType t, int64_t n) { return n * static_cast<int64_t>(size_of(t)); }

Clock::time_point after(double seconds) { return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)); }

// A number in pinned memory that a stream raises when it gets there. Reading it is no call of CUDA.
class Counter {
 public:
  Counter() : word_(take()) {}
  void raise(cudaStream_t stream, int64_t to) {
    static const auto write = [] {
      void* driver = dlopen("libcuda.so.1", RTLD_NOW);  // loaded already; the way to ask the run time for it differs between its versions
      void* f = driver ? dlsym(driver, "cuStreamWriteValue64_v2") : nullptr;
      HT_CHECK(f, "cuda: libcuda.so.1 has no cuStreamWriteValue64_v2; install a driver of CUDA 12 or later");
      return reinterpret_cast<CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned)>(f);
    }();
    CUresult status = write(stream, reinterpret_cast<CUdeviceptr>(word_), static_cast<cuuint64_t>(to), CU_STREAM_WRITE_VALUE_DEFAULT);
    HT_CHECK(status == CUDA_SUCCESS, "cuStreamWriteValue64: error ", static_cast<int>(status), " of CUDA's driver");
  }
  int64_t value() const { return std::atomic_ref(*word_).load(std::memory_order_acquire); }

 private:
  // Never given back: a stream may have to write it yet.
  static int64_t* take() {
    constexpr size_t many = 512;
    static std::mutex lock;
    static int64_t* words = nullptr;
    static size_t taken = many;
    std::lock_guard guard(lock);
    if (taken == many) {
      void* data = nullptr;
      cuda::check(cudaHostAlloc(&data, many * sizeof(int64_t), cudaHostAllocPortable), "cudaHostAlloc");
      std::memset(data, 0, many * sizeof(int64_t));
      words = static_cast<int64_t*>(data);
      taken = 0;
    }
    return words + taken++;
  }
  int64_t* word_;
};

// ncclCommAbort and ncclCommDestroy wait: for graphs that hold collectives, for other ranks of the machine to do the same, and, as they free
// memory, for devices. So they run on threads of their own. An abort ends the kernels before it waits for anything.
std::shared_future<void> let_go(ncclComm_t comm, ncclResult_t (*how)(ncclComm_t), std::shared_ptr<std::timed_mutex> calls) {
  std::packaged_task<void()> task([=] {
    { std::unique_lock last_call(*calls, std::chrono::seconds(1)); }  // one that does not return is ended by what follows
    how(comm);
  });
  std::shared_future<void> gone = task.get_future();
  std::thread(std::move(task)).detach();
  return gone;
}

// A communicator and what is under way on it.
class Communicator {
 public:
  // All ranks of the group at once.
  Communicator(std::shared_ptr<Transport> control, Device device, const ncclUniqueId& id);
  ~Communicator();
  Communicator(const Communicator&) = delete;

  // Queues the call on the communication stream, between what the caller's stream has queued and `end`.
  void queue(const Request& r, int64_t sequence, const std::shared_ptr<Event>& end);
  // Throws what stopped it.
  void check();
  void stop(const Failure& failure);
  // Waits until NCCL has given back what a stopped communicator held, but not for ever.
  void await_gone() const { if (gone_.valid()) gone_.wait_for(std::chrono::seconds(5)); }
  // The watchdog's look. `here`: all communicators of this process, of other groups, too.
  void look(const std::vector<Communicator*>& here);

 private:
  struct Running {
    std::string what;
    int64_t sequence;
    Clock::time_point until;
  };
  // A call of NCCL on comm_, unless it has been stopped.
  template <class F> void call(const char* what, F f) {
    std::lock_guard calling(*calls_);
    check();
    nccl(f(), what);
  }
  // Waits for the host's part of a call, which NCCL does on a thread of its own.
  void settle(const std::string& what, Clock::time_point until);
  void reduce(const Request& r, Clock::time_point until);
  void stop_locked(const Failure& failure);
  void drop_ended() { while (!running_.empty() && ended_.value() > running_.front().sequence) running_.pop_front(); }
  void nccl(ncclResult_t status, const char* what) const;
  cudaStream_t handle() const { return static_cast<cudaStream_t>(stream_.handle()); }

  const std::shared_ptr<Transport> control_;
  const Device device_;
  const int rank_, size_;
  const ncclUniqueId id_;
  const double deadline_;
  std::atomic<int64_t> made_ = 0;  // calls
  Counter ended_;                  // calls
  Stream stream_;
  const std::shared_ptr<std::timed_mutex> calls_ = std::make_shared<std::timed_mutex>();  // held during calls on comm_; taken before lock_
  ncclComm_t comm_ = nullptr;
  std::mutex lock_;  // of all below
  std::shared_future<void> gone_;
  std::deque<Running> running_;
  std::optional<Failure> failure_;
};

// Looks at all communicators of the process, twenty times a second.
class Watchdog {
 public:
  static Watchdog& get() {
    static auto* w = new Watchdog;  // never destroyed: it watches to the end
    return *w;
  }
  void watch(Communicator* c) {
    std::lock_guard guard(lock_);
    watched_.push_back(c);
    if (!std::exchange(running_, true)) std::thread([this] { serve(); }).detach();
  }
  void forget(Communicator* c) {
    std::lock_guard guard(lock_);
    std::erase(watched_, c);
  }

 private:
  void serve() {
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(50))) {
      std::lock_guard guard(lock_);
      for (auto* c : watched_) c->look(watched_);
    }
  }
  std::mutex lock_;
  std::vector<Communicator*> watched_;
  bool running_ = false;
};

Communicator::Communicator(std::shared_ptr<Transport> control, Device device, const ncclUniqueId& id)
    : control_(std::move(control)), device_(device), rank_(control_->rank()), size_(control_->size()), id_(id), deadline_(control_->deadline()),
      stream_(device.index) {
  DeviceGuard guard(device.index);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    call("ncclCommInitRankConfig", [&] { return ncclCommInitRankConfig(&comm_, size_, id_, rank_, &config); });
    settle("init", after(deadline_));
  } catch (const Error& e) {
    stop({.text = e.what(), .operation = "init"});
    throw;
  }
  Watchdog::get().watch(this);
}

Communicator::~Communicator() {
  Watchdog::get().forget(this);
  if (!gone_.valid()) {
    DeviceGuard guard(device_.index);
    RelaxedCapture relaxed;
    auto until = after(std::min(deadline_, 5.0));
    while (drop_ended(), !running_.empty() && Clock::now() < until) std::this_thread::yield();
    ncclResult_t state = running_.empty() ? ncclCommFinalize(comm_) : ncclInternalError;
    while (state == ncclInProgress && ncclCommGetAsyncError(comm_, &state) == ncclSuccess && Clock::now() < until)
      std::this_thread::yield();
    gone_ = let_go(comm_, state == ncclSuccess ? ncclCommDestroy : ncclCommAbort, calls_);
  }
  await_gone();
}

void Communicator::nccl(ncclResult_t status, const char* what) const {
  HT_CHECK(status == ncclSuccess || status == ncclInProgress, "nccl: ", what, ": ", ncclGetErrorString(status), ": ", ncclGetLastError(comm_));
}

void Communicator::settle(const std::string& what, Clock::time_point until) {
  for (;;) {
    ncclResult_t state = ncclSuccess;
    call(what.c_str(), [&] {
      nccl(ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
      return state;
    });
    if (state == ncclSuccess) return;
    if (Clock::now() > until) {
      stop({.text = text::cat(what, ": the ranks of this group of ", size_, " did not meet within ", deadline_, " s on ", device_), .operation = what});
      check();
    }
    std::this_thread::yield();
  }
}

void Communicator::check() {
  std::lock_guard guard(lock_);
  if (failure_) failure_->raise();
}

void Communicator::stop(const Failure& failure) {
  std::lock_guard guard(lock_);
  stop_locked(failure);
}
void Communicator::stop_locked(const Failure& failure) {
  if (failure_) return;
  failure_ = failure;
  if (comm_) gone_ = let_go(comm_, ncclCommAbort, calls_);
}

void Communicator::look(const std::vector<Communicator*>& here) {
  try {
    control_->check();
  } catch (const MismatchError& e) {
    return stop({.mismatch = true, .text = e.what()});
  } catch (const CommunicationError& e) {
    return stop({.text = e.what(), .operation = e.operation, .sequence = e.sequence, .ranks = e.ranks});
  }
  std::unique_lock calling(*calls_, std::try_to_lock);  // who is in a call may be held up in it
  std::lock_guard guard(lock_);
  if (failure_) return;
  ncclResult_t state = ncclSuccess;
  if (calling) ncclCommGetAsyncError(comm_, &state);
  std::string broken = state == ncclSuccess || state == ncclInProgress ? "" : text::cat(ncclGetErrorString(state), ": ", ncclGetLastError(comm_));
  drop_ended();
  Failure found;
  if (!running_.empty() && (!broken.empty() || Clock::now() > running_.front().until)) {
    auto& r = running_.front();
    std::vector<int> silent = control_->silent(), late;
    for (auto* c : here) if (std::memcmp(&c->id_, &id_, sizeof id_) == 0 && c->made_ <= r.sequence) late.push_back(c->rank_);
    std::sort(late.begin(), late.end());
    std::string why = !broken.empty() ? text::cat("failed on ", device_, ": ", broken)
                                      : text::cat("did not end within ", deadline_, " s on ", device_);
    if (!late.empty()) why += text::cat(": ", list_ranks(late), late.size() == 1 ? " has" : " have", " not made it");
    if (!silent.empty()) why += text::cat(": ", list_ranks(silent), silent.size() == 1 ? " is" : " are", " not heard of");
    silent.insert(silent.end(), late.begin(), late.end());
    found = {.text = text::cat(r.what, ": call ", r.sequence, " of this group of ", size_, " ", why),
             .operation = r.what.substr(0, r.what.find_first_of("( ")), .sequence = r.sequence, .ranks = silent};
  } else if (!broken.empty()) {
    found = {.text = text::cat("nccl: rank ", rank_, " on ", device_, ": ", broken), .operation = "nccl"};
  } else {
    return;
  }
  control_->fail(found);
  stop_locked(found);
}

void Communicator::queue(const Request& r, int64_t sequence, const std::shared_ptr<Event>& end) {
  auto until = after(deadline_);
  bool capturing = thread_state().capture != nullptr;
  Event begin;
  begin.record(device_.index);
  stream_.wait(begin);
  {
    StreamGuard on(stream_);
    const Description& d = r.what;
    auto n = static_cast<size_t>(d.x.shape.numel());
    // One rank has nothing to send; NCCL's mean over it would still read and write everything.
    const bool done = size_ == 1 && (d.operation == Operation::all_reduce || d.operation == Operation::broadcast);
    if (n > 0 && !done) {
      if (d.operation == Operation::all_reduce || d.operation == Operation::reduce_scatter) reduce(r, until);
      else if (d.operation == Operation::broadcast)
        call("ncclBroadcast", [&] {
          return ncclBroadcast(r.x.raw_data(), r.x.raw_data(), n * size_of(d.x.dtype), ncclUint8, d.root, comm_, handle());
        });
      else
        call("ncclAllGather", [&] {
          return ncclAllGather(r.x.raw_data(), r.out.raw_data(), n * size_of(d.x.dtype), ncclUint8, comm_, handle());
        });
      settle(str(d.operation), until);
    }
    end->record(device_.index);
  }
  made_ = sequence + 1;
  if (capturing) return;  // a replay has no deadline of its own
  ended_.raise(handle(), sequence + 1);
  for (auto& t : {r.x, r.out}) if (t.defined() && t.numel() > 0) record_stream(t, stream_);
  std::lock_guard guard(lock_);
  running_.push_back({str(r.what), sequence, until});
}

// all_reduce and reduce_scatter.
void Communicator::reduce(const Request& r, Clock::time_point until) {
  const Description& d = r.what;
  DType t = d.x.dtype;
  bool scatter = d.operation == Operation::reduce_scatter;
  const std::string name = str(d.operation);
  int64_t n = d.x.shape.numel(), n_out = scatter ? n / size_ : n;
  auto* x = static_cast<char*>(r.x.raw_data());
  auto* out = scatter ? static_cast<char*>(r.out.raw_data()) : x;
  auto queue_one = [&](const void* from, void* to, ncclDataType_t type, ncclRedOp_t op) {
    call(name.c_str(), [&] {
      return (scatter ? ncclReduceScatter : ncclAllReduce)(from, to, static_cast<size_t>(n_out), type, op, comm_, handle());
    });
  };
  if (is_floating(t) && (d.how == Reduce::min || d.how == Reduce::max)) {
    bool wide = t == DType::f64, max = d.how == Reduce::max;
    int64_t width = wide ? 8 : 4;
    Scratch keys(static_cast<size_t>(n * width));
    auto* mine = keys.as<char>() + (scatter ? rank_ * n_out * width : 0);
    to_keys(t, x, keys.as<>(), n, max);
    queue_one(keys.as<>(), mine, wide ? ncclInt64 : ncclInt32, max ? ncclMax : ncclMin);
    settle(name, until);
    return from_keys(t, mine, out, n_out);
  }
  if (!is_16bit_dtype(t) || size_ == 1) return queue_one(x, out, type_of(t), reduction(d.how, t));

  // Slices to their owners, a sum that rounds once, and for all_reduce the sums to all: the traffic of a ring.
  auto cut = [&](int p) { return n * p / size_; };
  auto count = [&](int p) { return cut(p + 1) - cut(p); };
  int64_t mine = count(rank_);
  auto* sums = scatter ? out : x + bytes(t, cut(rank_));
  Scratch parts(static_cast<size_t>(bytes(t, mine * size_)));
  auto send = [&](const char* from, int64_t many, int p) {
    if (many > 0) nccl(ncclSend(from, static_cast<size_t>(many), type_of(t), p, comm_, handle()), "ncclSend");
  };
  auto receive = [&](char* to, int64_t many, int p) {
    if (many > 0) nccl(ncclRecv(to, static_cast<size_t>(many), type_of(t), p, comm_, handle()), "ncclRecv");
  };
  auto exchange = [&](auto with) {
    call("ncclGroupEnd", [&] {
      nccl(ncclGroupStart(), "ncclGroupStart");
      for (int p = 0; p < size_; ++p) with(p);
      return ncclGroupEnd();
    });
  };
  exchange([&](int p) {
    send(x + bytes(t, cut(p)), count(p), p);
    receive(parts.as<char>() + bytes(t, p * mine), mine, p);
  });
  settle(name, until);
  sum_ranks(t, parts.as<>(), sums, mine, size_, d.how == Reduce::mean);
  if (scatter) return;
  exchange([&](int p) {
    if (p == rank_) return;
    send(sums, mine, p);
    receive(x + bytes(t, cut(p)), count(p), p);
  });
}

// ---- one rank's end

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<Communicator> c, const Request& r, int device) : communicator_(std::move(c)), x_(r.x), out_(r.out), device_(device) {}
  void wait() override {
    communicator_->check();
    end->wait(device_);
  }
  bool done() override {
    communicator_->check();
    return end->done();
  }
  const std::shared_ptr<Event> end = std::make_shared<Event>();

 private:
  std::shared_ptr<Communicator> communicator_;
  Tensor x_, out_;
  int device_;
};

class NcclRank final : public Transport {
 public:
  NcclRank(std::shared_ptr<Transport> control, Device device) : control_(std::move(control)), device_(device) {}

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  Device device() const override { return device_; }
  double deadline() const override { return control_->deadline(); }
  Transport& control() override { return *control_; }
  void check() override { communicator_ ? communicator_->check() : control_->check(); }
  std::vector<int> silent() override { return control_->silent(); }

  std::shared_ptr<Work> issue(const Request& r) override {
    meet();
    communicator_->check();
    if (r.what.operation == Operation::barrier) return control_->issue(r);
    compare(r);
    DeviceGuard guard(device_.index);
    auto work = std::make_shared<NcclWork>(communicator_, r, device_.index);
    try {
      communicator_->queue(r, issued, work->end);
    } catch (const CommunicationError&) {
      throw;
    } catch (const std::exception& e) {
      fail({.text = text::cat(r.what.operation, ": call ", issued, " of this group of ", size(), " failed on ", device_, ": ", e.what()),
            .operation = str(r.what.operation), .sequence = issued});
      throw;
    }
    return work;
  }

  std::shared_ptr<Transport> part(const std::vector<int>& ranks, int color) override {
    return std::make_shared<NcclRank>(control_->part(ranks, color), device_);
  }
  void fail(const Failure& failure) override {
    control_->fail(failure);
    if (communicator_) communicator_->stop(failure);
  }
  void revive() override {
    if (communicator_) {
      communicator_->stop({.text = "the group begins anew", .operation = "run"});
      communicator_->await_gone();  // what it frees would wait for the kernels of the next one, and these for each other
    }
    control_->revive();
    communicator_ = nullptr;
    known_.clear();
  }

 private:
  std::vector<char> gathered(const void* mine, int64_t n) {
    Tensor x = Tensor::empty(Meta({n}, DType::u8, Device::cpu())), all = Tensor::empty(Meta({size(), n}, DType::u8, Device::cpu()));
    std::memcpy(x.raw_data(), mine, static_cast<size_t>(n));
    control_->issue({{.operation = Operation::all_gather, .x = x.meta()}, x, all})->wait();
    auto* p = static_cast<char*>(all.raw_data());
    return {p, p + n * size()};
  }

  // Makes the communicator, at the first call.
  void meet() {
    if (communicator_) return;
    HT_CHECK(!thread_state().capture, "capture: make one collective call of this group before the step is captured");
    DeviceGuard guard(device_.index);
    struct Card { cudaUUID_t gpu; ncclUniqueId id; } mine{};
    cudaDeviceProp properties;
    cuda::check(cudaGetDeviceProperties(&properties, device_.index), "cudaGetDeviceProperties");
    mine.gpu = properties.uuid;
    if (rank() == 0) {
      ncclResult_t status = ncclGetUniqueId(&mine.id);
      HT_CHECK(status == ncclSuccess, "nccl: ncclGetUniqueId: ", ncclGetErrorString(status));
    }
    auto cards = gathered(&mine, sizeof mine);
    auto card = [&](int r) { Card c; std::memcpy(&c, cards.data() + static_cast<size_t>(r) * sizeof c, sizeof c); return c; };
    for (int b = 0; b < size(); ++b)
      for (int a = 0; a < b; ++a)
        HT_CHECK(std::memcmp(card(a).gpu.bytes, card(b).gpu.bytes, sizeof mine.gpu.bytes) != 0, "distributed: ranks ", a, " and ", b,
                 " of this group share one GPU, and a GPU serves one rank; start fewer ranks, or give each its own with CUDA_VISIBLE_DEVICES");
    try {
      communicator_ = std::make_shared<Communicator>(control_, device_, card(0).id);
    } catch (const CommunicationError& e) {
      control_->fail({.text = e.what(), .operation = e.operation});
      throw;
    } catch (const Error& e) {
      control_->fail({.text = text::cat("init: rank ", rank(), " on ", device_, ": ", e.what()), .operation = "init", .ranks = {rank()}});
      throw;
    }
  }

  // Do all ranks make this call? Each new kind of call is compared, or each call where the environment says so.
  void compare(const Request& r) {
    static const bool every = [] {
      const char* v = std::getenv("HALFTONE_CHECK_COLLECTIVES");
      return v && *v && std::strcmp(v, "0") != 0;
    }();
    if (size() == 1 || (!known_.insert(str(r.what)).second && !every)) return;
    try {
      control_->issue({r.what, {}, {}, true})->wait();
    } catch (const MismatchError& e) {
      communicator_->stop({.mismatch = true, .text = e.what()});
      throw;
    }
  }

  std::shared_ptr<Transport> control_;
  Device device_;
  std::shared_ptr<Communicator> communicator_;
  std::set<std::string> known_;
};

}  // namespace
}  // namespace halftone::cuda

void halftone::register_nccl() {
  distributed::engines().nccl = [](std::shared_ptr<distributed::Transport> control, Device device) -> std::shared_ptr<distributed::Transport> {
    return std::make_shared<cuda::NcclRank>(std::move(control), device);
  };
}
