// Groups of GPUs. A rank has one communicator and a stream of its own, which runs a collective behind what the caller's
// stream has queued; wait() queues the caller's stream behind it. The host waits for no device, so all of it may be
// captured. What ranks have to agree on (the communicator's id, that they make the same calls) goes through the group's
// CPU end. A thread of the process watches: on an error, a deadline or the failure of another rank it aborts the
// communicator, whose kernels then end. It only asks, and no call of it waits for a device.
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
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

// A communicator and what is under way on it.
class Communicator {
 public:
  Communicator(Device device, int rank, int size, const ncclUniqueId& id, double deadline);
  ~Communicator();
  Communicator(const Communicator&) = delete;

  // Queues the call on the communication stream, between what the caller's stream has queued and `end`.
  void queue(const Request& r, int64_t sequence, const std::shared_ptr<Event>& end);
  // Waits for the host's part of a call, which NCCL does on a thread of its own.
  void settle(const char* what, Clock::time_point until);
  // Throws what stopped it.
  void check();
  void stop(const Failure& failure);
  // The watchdog's look. `here`: all communicators of this process, of other groups, too.
  void look(Transport& control, const std::vector<std::shared_ptr<Communicator>>& here);

 private:
  struct Running {
    std::shared_ptr<Event> end;
    std::string what;
    int64_t sequence;
    Clock::time_point until;
  };
  void all_reduce(const Request& r);
  void reduce_scatter(const Request& r);
  void nccl(ncclResult_t status, const char* what);
  cudaStream_t handle() const { return static_cast<cudaStream_t>(stream_.handle()); }

  Device device_;
  int rank_, size_;
  ncclUniqueId id_;
  double deadline_;
  std::atomic<int64_t> made_ = 0;  // calls
  Stream stream_;
  std::mutex lock_;  // of calls on comm_; none of them waits
  ncclComm_t comm_ = nullptr;
  bool aborted_ = false;
  std::deque<Running> running_;
  std::optional<Failure> failure_;
};

Clock::time_point after(double seconds) { return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)); }

Communicator::Communicator(Device device, int rank, int size, const ncclUniqueId& id, double deadline)
    : device_(device), rank_(rank), size_(size), id_(id), deadline_(deadline), stream_(device.index) {
  DeviceGuard guard(device.index);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  nccl(ncclCommInitRankConfig(&comm_, size, id, rank, &config), "ncclCommInitRankConfig");
  settle("init", after(deadline));
}

Communicator::~Communicator() {
  if (!comm_ || aborted_) return;
  DeviceGuard guard(device_.index);
  RelaxedCapture relaxed;
  auto until = after(failure_ ? 0 : std::min(deadline_, 5.0));
  auto ended = [&] { return running_.empty() || running_.back().end->done(); };
  ncclResult_t state = ncclInProgress;
  try {
    while (!ended() && Clock::now() < until) std::this_thread::yield();
    if (ended() && !failure_ && ncclCommFinalize(comm_) <= ncclInProgress)
      while (ncclCommGetAsyncError(comm_, &state) == ncclSuccess && state == ncclInProgress && Clock::now() < until) std::this_thread::yield();
  } catch (const Error&) {
    state = ncclUnhandledCudaError;
  }
  if (state == ncclSuccess) ncclCommDestroy(comm_);
  else ncclCommAbort(comm_);
}

void Communicator::nccl(ncclResult_t status, const char* what) {
  HT_CHECK(status == ncclSuccess || status == ncclInProgress, "nccl: ", what, ": ", ncclGetErrorString(status), ": ", ncclGetLastError(comm_));
}

void Communicator::settle(const char* what, Clock::time_point until) {
  for (;;) {
    ncclResult_t state = ncclSuccess;
    {
      std::lock_guard guard(lock_);
      if (failure_) failure_->raise();
      nccl(ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
      nccl(state, what);
    }
    if (state == ncclSuccess) return;
    if (Clock::now() > until) {
      stop({.text = text::cat(what, ": the ranks of this group of ", size_, " did not meet within ", deadline_, " s on ", device_), .operation = what});
      failure_->raise();
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
  if (failure_) return;
  failure_ = failure;
  if (comm_) ncclCommAbort(comm_);
  aborted_ = true;
}

void Communicator::look(Transport& control, const std::vector<std::shared_ptr<Communicator>>& here) {
  std::optional<Failure> found;
  try {
    control.check();
  } catch (const MismatchError& e) {
    found = Failure{.mismatch = true, .text = e.what()};
  } catch (const CommunicationError& e) {
    found = Failure{.text = e.what(), .operation = e.operation, .sequence = e.sequence, .ranks = e.ranks};
  }
  if (!found) {
    std::lock_guard guard(lock_);
    if (failure_ || !comm_) return;
    BoundDevice bound(device_.index);
    ncclResult_t state = ncclSuccess;
    ncclCommGetAsyncError(comm_, &state);
    std::string broken = state == ncclSuccess || state == ncclInProgress ? "" : text::cat(ncclGetErrorString(state), ": ", ncclGetLastError(comm_));
    try {
      while (!running_.empty() && running_.front().end->done()) running_.pop_front();
    } catch (const Error& e) {
      broken = e.what();
    }
    if (!running_.empty() && (!broken.empty() || Clock::now() > running_.front().until)) {
      auto& r = running_.front();
      std::vector<int> silent = control.silent(), late;
      for (auto& c : here) if (std::memcmp(&c->id_, &id_, sizeof id_) == 0 && c->made_ <= r.sequence) late.push_back(c->rank_);
      std::sort(late.begin(), late.end());
      std::string why = !broken.empty() ? text::cat("failed on ", device_, ": ", broken) : text::cat("did not end within ", deadline_, " s on ", device_);
      if (!late.empty()) why += text::cat(": ", list_ranks(late), late.size() == 1 ? " has" : " have", " not made it");
      if (!silent.empty()) why += text::cat(": ", list_ranks(silent), silent.size() == 1 ? " is" : " are", " not heard of");
      silent.insert(silent.end(), late.begin(), late.end());
      found = Failure{.text = text::cat(r.what, ": call ", r.sequence, " of this group of ", size_, " ", why), .operation = r.what.substr(0, r.what.find_first_of("( ")),
                      .sequence = r.sequence, .ranks = silent};
    } else if (!broken.empty()) {
      found = Failure{.text = text::cat("nccl: rank ", rank_, " on ", device_, ": ", broken), .operation = "nccl"};
    }
  }
  if (found) {
    control.fail(*found);
    stop(*found);
  }
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
    if (n > 0 && d.operation == Operation::all_reduce) all_reduce(r);
    else if (n > 0 && d.operation == Operation::reduce_scatter) reduce_scatter(r);
    else if (n > 0) {
      std::lock_guard guard(lock_);
      if (failure_) failure_->raise();
      if (d.operation == Operation::broadcast)
        nccl(ncclBroadcast(r.x.raw_data(), r.x.raw_data(), n * size_of(d.x.dtype), ncclUint8, d.root, comm_, handle()), "ncclBroadcast");
      else nccl(ncclAllGather(r.x.raw_data(), r.out.raw_data(), n * size_of(d.x.dtype), ncclUint8, comm_, handle()), "ncclAllGather");
    }
    if (n > 0) settle(d.operation == Operation::broadcast ? "broadcast" : "collective", until);
    end->record(device_.index);
  }
  made_ = sequence + 1;
  if (capturing) return;  // a replay has no deadline of its own, and its events cannot be asked
  for (auto& t : {r.x, r.out}) if (t.defined() && t.numel() > 0) record_stream(t, stream_);
  std::lock_guard guard(lock_);
  running_.push_back({end, str(r.what), sequence, until});
}

void Communicator::all_reduce(const Request& r) {
  DType t = r.what.x.dtype;
  int64_t n = r.what.x.shape.numel();
  auto* x = static_cast<char*>(r.x.raw_data());
  bool extremum = r.what.how == Reduce::min || r.what.how == Reduce::max;
  auto until = after(deadline_);
  auto call = [&](const void* from, void* to, ncclDataType_t type, ncclRedOp_t op) {
    std::lock_guard guard(lock_);
    if (failure_) failure_->raise();
    nccl(ncclAllReduce(from, to, static_cast<size_t>(n), type, op, comm_, handle()), "ncclAllReduce");
  };
  if (is_floating(t) && extremum) {
    bool wide = t == DType::f64;
    Scratch keys(static_cast<size_t>(n) * (wide ? 8 : 4));
    to_keys(t, x, keys.as<>(), n, r.what.how == Reduce::max);
    call(keys.as<>(), keys.as<>(), wide ? ncclInt64 : ncclInt32, r.what.how == Reduce::max ? ncclMax : ncclMin);
    settle("all_reduce", until);
    return from_keys(t, keys.as<>(), x, n);
  }
  if (!is_16bit_dtype(t) || size_ == 1) return call(x, x, type_of(t), reduction(r.what.how, t));

  // Slices to their owners, a sum that rounds once, and the sums to all: the traffic of a ring.
  auto cut = [&](int p) { return n * p / size_; };
  auto count = [&](int p) { return static_cast<size_t>(cut(p + 1) - cut(p)); };
  int64_t first = cut(rank_), mine = cut(rank_ + 1) - first;
  Scratch parts(static_cast<size_t>(bytes(t, mine * size_)));
  {
    std::lock_guard guard(lock_);
    if (failure_) failure_->raise();
    nccl(ncclGroupStart(), "ncclGroupStart");
    for (int p = 0; p < size_; ++p) {
      if (count(p) > 0) nccl(ncclSend(x + bytes(t, cut(p)), count(p), type_of(t), p, comm_, handle()), "ncclSend");
      if (mine > 0) nccl(ncclRecv(parts.as<char>() + bytes(t, p * mine), static_cast<size_t>(mine), type_of(t), p, comm_, handle()), "ncclRecv");
    }
    nccl(ncclGroupEnd(), "ncclGroupEnd");
  }
  settle("all_reduce", until);
  sum_ranks(t, parts.as<>(), x + bytes(t, first), mine, size_, r.what.how == Reduce::mean);
  std::lock_guard guard(lock_);
  if (failure_) failure_->raise();
  nccl(ncclGroupStart(), "ncclGroupStart");
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) continue;
    if (mine > 0) nccl(ncclSend(x + bytes(t, first), static_cast<size_t>(mine), type_of(t), p, comm_, handle()), "ncclSend");
    if (count(p) > 0) nccl(ncclRecv(x + bytes(t, cut(p)), count(p), type_of(t), p, comm_, handle()), "ncclRecv");
  }
  nccl(ncclGroupEnd(), "ncclGroupEnd");
}

void Communicator::reduce_scatter(const Request& r) {
  DType t = r.what.x.dtype;
  int64_t n = r.what.x.shape.numel() / size_;
  auto* x = static_cast<char*>(r.x.raw_data());
  bool extremum = r.what.how == Reduce::min || r.what.how == Reduce::max;
  auto until = after(deadline_);
  auto call = [&](const void* from, void* to, ncclDataType_t type, ncclRedOp_t op) {
    std::lock_guard guard(lock_);
    if (failure_) failure_->raise();
    nccl(ncclReduceScatter(from, to, static_cast<size_t>(n), type, op, comm_, handle()), "ncclReduceScatter");
  };
  if (is_floating(t) && extremum) {
    size_t wide = t == DType::f64 ? 8 : 4;
    Scratch keys(static_cast<size_t>(n * size_) * wide), least(static_cast<size_t>(n) * wide);
    to_keys(t, x, keys.as<>(), n * size_, r.what.how == Reduce::max);
    call(keys.as<>(), least.as<>(), wide == 8 ? ncclInt64 : ncclInt32, r.what.how == Reduce::max ? ncclMax : ncclMin);
    settle("reduce_scatter", until);
    return from_keys(t, least.as<>(), r.out.raw_data(), n);
  }
  if (!is_16bit_dtype(t) || size_ == 1) return call(x, r.out.raw_data(), type_of(t), reduction(r.what.how, t));
  Scratch parts(static_cast<size_t>(bytes(t, n * size_)));
  {
    std::lock_guard guard(lock_);
    if (failure_) failure_->raise();
    nccl(ncclGroupStart(), "ncclGroupStart");
    for (int p = 0; p < size_; ++p) {
      nccl(ncclSend(x + bytes(t, p * n), static_cast<size_t>(n), type_of(t), p, comm_, handle()), "ncclSend");
      nccl(ncclRecv(parts.as<char>() + bytes(t, p * n), static_cast<size_t>(n), type_of(t), p, comm_, handle()), "ncclRecv");
    }
    nccl(ncclGroupEnd(), "ncclGroupEnd");
  }
  settle("reduce_scatter", until);
  sum_ranks(t, parts.as<>(), r.out.raw_data(), n, size_, r.what.how == Reduce::mean);
}

// ---- the watchdog

class Watchdog {
 public:
  static Watchdog& get() {
    static auto* w = new Watchdog;  // never destroyed: it watches to the end
    return *w;
  }
  void watch(const std::shared_ptr<Communicator>& c, const std::shared_ptr<Transport>& control) {
    std::lock_guard guard(lock_);
    watched_.emplace_back(c, control);
    if (!running_) std::thread([this] { serve(); }).detach();
    running_ = true;
  }

 private:
  void serve() {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      std::vector<std::pair<std::weak_ptr<Communicator>, std::weak_ptr<Transport>>> all;
      {
        std::lock_guard guard(lock_);
        std::erase_if(watched_, [](auto& w) { return w.first.expired() || w.second.expired(); });
        all = watched_;
      }
      std::vector<std::shared_ptr<Communicator>> here;
      std::vector<std::shared_ptr<Transport>> controls;
      for (auto& [weak, weak_control] : all) {
        auto c = weak.lock();
        auto control = weak_control.lock();
        if (!c || !control) continue;
        here.push_back(std::move(c));
        controls.push_back(std::move(control));
      }
      for (size_t i = 0; i < here.size(); ++i) here[i]->look(*controls[i], here);
    }
  }
  std::mutex lock_;
  std::vector<std::pair<std::weak_ptr<Communicator>, std::weak_ptr<Transport>>> watched_;
  bool running_ = false;
};

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
      communicator_ = std::make_shared<Communicator>(device_, rank(), size(), card(0).id, deadline());
    } catch (const CommunicationError& e) {
      control_->fail({.text = e.what(), .operation = e.operation});
      throw;
    } catch (const Error& e) {
      control_->fail({.text = text::cat("init: rank ", rank(), " on ", device_, ": ", e.what()), .operation = "init", .ranks = {rank()}});
      throw;
    }
    Watchdog::get().watch(communicator_, control_);
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
