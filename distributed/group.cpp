// What is the same for every engine: arguments, hooks, threads of ranks, how a program's group comes about.
#include "halftone/distributed/group.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "halftone/core/backend.h"
#include "halftone/core/capture.h"
#include "halftone/core/random.h"
#include "halftone/core/thread_state.h"
#include "halftone/distributed/cpu_engine.h"

namespace halftone::distributed {
namespace {

// Without gaps and without elements that share memory: any order of dimensions of a contiguous tensor.
bool gapless(const Meta& m) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t i = 0; i < m.shape.size(); ++i) if (m.shape[i] != 1) dims.emplace_back(m.strides[i], m.shape[i]);
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (auto [stride, size] : dims) {
    if (stride != expected) return m.shape.numel() == 0;
    expected *= size;
  }
  return true;
}

void check_tensor(Operation who, const char* name, const Tensor& t, Device device) {
  HT_CHECK(t.defined(), who, ": ", name, " is undefined");
  HT_CHECK(t.device() == device, who, ": expected ", name, " on ", device, ", this rank's device, got one on ", t.device());
  HT_CHECK(t.is_leaf(), who, ": ", name, " has history, and collectives are not recorded; pass ", name, ".detach()");
  HT_CHECK(gapless(t.meta()), who, ": expected ", name, " without gaps, got ", t.meta(), " with strides ", t.strides(), "; pass ", name,
           ".contiguous()");
  t.raw_data();  // refuses what a replay has overwritten
}
void check_pair(Operation who, const Tensor& part, const char* part_name, const Tensor& whole, const char* whole_name, int size) {
  Shape expected = part.shape();
  expected.insert(0, size);
  HT_CHECK(whole.shape() == expected && whole.dtype() == part.dtype(), who, ": expected ", whole_name, " [size, ...", part_name,
           "] = ", expected, " (", part.dtype(), "), got ", whole.meta());
  for (auto& [t, name] : {std::pair{&part, part_name}, {&whole, whole_name}})
    HT_CHECK(t->is_contiguous(), who, ": expected ", name, " to be contiguous, got ", t->meta(), " with strides ", t->strides(),
             "; pass a contiguous one");
  HT_CHECK(part.numel() == 0 || part.storage() != whole.storage(), who, ": ", part_name, " and ", whole_name, " share memory");
}
void check_reduce(Operation who, Reduce how, DType dtype) {
  HT_CHECK(how != Reduce::mean || is_floating(dtype), who, ": no mean of ", dtype, "; take the sum, or a floating dtype");
}

// A captured step has to know what a collective writes.
void log_capture(const Request& r) {
  auto* log = thread_state().capture;
  if (!log) return;
  static OpDef op{.name = "collective", .writes = [](const Call& c, size_t i) { return i + 1 == c.in.size(); }};
  Call call{.op = &op, .in = r.out.defined() ? Tensors{r.x, r.out} : Tensors{r.x}, .attrs = {}, .out = {}};
  log->launched(call, {});
}

Pending issue(Transport& t, const Request& r) {
  const Tensor& written = r.out.defined() ? r.out : r.x;
  for (auto& [id, f] : t.on_issue) f({r.what.operation, t.issued, r.x.defined() ? bytes_of(r.x) : 0});
  auto work = t.issue(r);
  ++t.issued;
  if (written.defined()) written.bump_version();
  log_capture(r);
  return Pending(std::move(work));
}

// Several ranks of this process under one handle.
class Held final : public Transport {
 public:
  explicit Held(std::vector<std::shared_ptr<Transport>> ranks) : ranks_(std::move(ranks)) {}
  int rank() const override { return ranks_[0]->rank(); }
  int size() const override { return ranks_[0]->size(); }
  Device device() const override { return ranks_[0]->device(); }
  double deadline() const override { return ranks_[0]->deadline(); }
  std::shared_ptr<Work> issue(const Request& r) override { refuse(str(r.what.operation)); }
  std::shared_ptr<Transport> part(const std::vector<int>&, int) override { refuse("split"); }
  std::vector<std::shared_ptr<Transport>> local() override { return ranks_; }
  void fail(const Failure& failure) override { ranks_[0]->fail(failure); }
  void check() override { ranks_[0]->check(); }

 private:
  [[noreturn]] void refuse(const std::string& who) const {
    throw Error(text::cat(who, ": this group stands for ", ranks_.size(),
                          " ranks of this process; call run(), and make collective calls with the rank it gives"));
  }
  std::vector<std::shared_ptr<Transport>> ranks_;
};

// One rank on a GPU in a build without NCCL: queued copies.
class Lone final : public Transport {
 public:
  Lone(Device device, double deadline) : device_(device), deadline_(deadline) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  Device device() const override { return device_; }
  double deadline() const override { return deadline_; }
  std::shared_ptr<Work> issue(const Request& r) override {
    if (r.out.defined()) backend(device_.type).copy(r.out.raw_data(), device_, r.x.raw_data(), device_, bytes_of(r.x));
    return nullptr;
  }
  std::shared_ptr<Transport> part(const std::vector<int>&, int) override { return std::make_shared<Lone>(device_, deadline_); }
  void fail(const Failure&) override {}
  void check() override {}
  Transport& control() override { return *control_; }

 private:
  Device device_;
  double deadline_;
  std::shared_ptr<Transport> control_ = cpu_threads(1, deadline_)[0];
};

// Gives each end of a CPU group its device.
std::vector<std::shared_ptr<Transport>> on_devices(std::vector<std::shared_ptr<Transport>> ends, const std::vector<Device>& devices) {
  for (size_t i = 0; i < ends.size(); ++i) {
    if (devices[i].type == DeviceType::cpu) continue;
    if (engines().nccl) ends[i] = engines().nccl(ends[i], devices[i]);
    else if (ends[i]->size() == 1) ends[i] = std::make_shared<Lone>(devices[i], ends[i]->deadline());
    else throw Error("distributed: several GPUs need NCCL, which is not in this build; configure with -DHALFTONE_NCCL=ON");
  }
  return ends;
}

void check_devices(const std::vector<Device>& devices) {
  HT_CHECK(!devices.empty(), "threads: expected at least one device");
  for (size_t i = 0; i < devices.size(); ++i) {
    Device d = devices[i];
    HT_CHECK(d.type == devices[0].type, "threads: the ranks of a group are all on GPUs or all on the CPU, got ", devices[0], " and ", d);
    auto has = static_cast<int>(halftone::devices(d.type).size());
    if (has == 0) backend(d.type);  // says why
    HT_CHECK(d.index >= 0 && d.index < has, "threads: no ", d, "; this process can use ", has, " of its kind");
    if (d.type == DeviceType::cpu) continue;
    for (size_t j = 0; j < i; ++j)
      HT_CHECK(devices[j] != d, "threads: ranks ", j, " and ", i, " would share ", d, "; a GPU serves one rank of a group");
  }
}

std::vector<Device> cpus(int n) {
  HT_CHECK(n > 0 && n <= 4096, "threads: expected a number of ranks from 1 to 4096, got ", n);
  return std::vector<Device>(static_cast<size_t>(n));
}

double check_deadline(double seconds) {
  if (const char* v = std::getenv("HALFTONE_DEADLINE")) {
    char* end = nullptr;
    seconds = std::strtod(v, &end);
    HT_CHECK(end != v && !*end && seconds > 0, "HALFTONE_DEADLINE: expected seconds above 0, got '", std::string(v), "'");
  }
  HT_CHECK(seconds > 0, "deadline: expected seconds above 0, got ", seconds);
  return std::min(seconds, 1e8);
}

// How many processes the launcher says it started; 0: there is none. Of a launcher that does not say: 1.
int launched() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"})
    if (const char* v = std::getenv(name)) return std::atoi(v);
  if (std::getenv("PMIX_RANK") || std::getenv("PMI_RANK")) return 1;
  const char* tasks = std::getenv("SLURM_STEP_NUM_TASKS");  // of srun, not of the batch script around it
  return tasks && std::getenv("SLURM_PROCID") ? std::atoi(tasks) : 0;
}

// A rank draws what a process of its own would: from where the caller's generator stands.
std::shared_ptr<Generator> generator_for(Device device) {
  std::vector<Tensor> states{generator().state(Device::cpu())};
  if (device.type != DeviceType::cpu) states.push_back(generator().state(device));
  return std::make_shared<Generator>(states);
}
// The caller's goes on where the rank's has got to.
void go_on_from(Generator& rank, Device device) {
  LayerScope kernels_only(0);
  generator().state(Device::cpu()).copy_(rank.state(Device::cpu()));
  if (device.type != DeviceType::cpu) generator().state(device).copy_(rank.state(device));
}

void place(ThreadState& s, Device device) {
  if (device.type == DeviceType::cpu) return;
  if (s.cuda_device != device.index) s.stream = nullptr;
  s.cuda_device = device.index;
}

}  // namespace

std::string str(Reduce how) {
  static constexpr const char* names[] = {"sum", "mean", "min", "max"};
  return names[static_cast<int>(how)];
}
std::string str(Operation operation) {
  static constexpr const char* names[] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", "split"};
  return names[static_cast<int>(operation)];
}
std::string str(const Description& d) {
  std::string s = str(d.operation);
  if (d.operation == Operation::barrier || d.operation == Operation::split) return s;
  if (d.operation == Operation::broadcast) s += text::cat("(root ", d.root, ")");
  if (d.operation == Operation::all_reduce || d.operation == Operation::reduce_scatter) s += text::cat("(", d.how, ")");
  s += text::cat(" of ", d.x);
  return d.x.contiguous() ? s : s + text::cat(" with strides ", d.x.strides);
}

CommunicationError::CommunicationError(const std::string& what, std::string op, int64_t seq, std::vector<int> who)
    : Error(what), operation(std::move(op)), sequence(seq), ranks(std::move(who)) {}

void Failure::raise() const {
  if (mismatch) throw MismatchError(text);
  throw CommunicationError(text, operation, sequence, ranks);
}

Engines& engines() {
  static Engines e;
  return e;
}

void Pending::wait() const { if (work_) work_->wait(); }
bool Pending::done() const { return !work_ || work_->done(); }

int Group::rank() const { return transport_->rank(); }
int Group::size() const { return transport_->size(); }
Device Group::device() const { return transport_->device(); }
int Group::local_size() const { return static_cast<int>(transport_->local().size()); }
double Group::deadline() const { return transport_->deadline(); }

Pending Group::all_reduce(const Tensor& x, Reduce how) const {
  check_tensor(Operation::all_reduce, "x", x, device());
  check_reduce(Operation::all_reduce, how, x.dtype());
  return issue(*transport_, {{.operation = Operation::all_reduce, .how = how, .x = x.meta()}, x, {}});
}

Pending Group::broadcast(const Tensor& x, int root) const {
  check_tensor(Operation::broadcast, "x", x, device());
  HT_CHECK(root >= 0 && root < size(), "broadcast: expected a root from 0 to ", size() - 1, ", got ", root);
  return issue(*transport_, {{.operation = Operation::broadcast, .root = root, .x = x.meta()}, x, {}});
}

Pending Group::all_gather(const Tensor& x, const Tensor& out) const {
  check_tensor(Operation::all_gather, "x", x, device());
  check_tensor(Operation::all_gather, "out", out, device());
  check_pair(Operation::all_gather, x, "x", out, "out", size());
  return issue(*transport_, {{.operation = Operation::all_gather, .x = x.meta()}, x, out});
}

Pending Group::reduce_scatter(const Tensor& x, const Tensor& out, Reduce how) const {
  check_tensor(Operation::reduce_scatter, "x", x, device());
  check_tensor(Operation::reduce_scatter, "out", out, device());
  check_pair(Operation::reduce_scatter, out, "out", x, "x", size());
  check_reduce(Operation::reduce_scatter, how, x.dtype());
  return issue(*transport_, {{.operation = Operation::reduce_scatter, .how = how, .x = x.meta()}, x, out});
}

void Group::barrier() const { issue(*transport_, {{.operation = Operation::barrier, .x = {}}, {}, {}}).wait(); }

Group Group::split(int color, int key) const {
  Transport& control = transport_->control();
  auto shape = [](int64_t n) { return Meta({n, 2}, DType::i64, Device::cpu()); };
  Tensor mine = Tensor::empty(Meta({2}, DType::i64, Device::cpu())), all = Tensor::empty(shape(size()));
  mine.data<int64_t>()[0] = color;
  mine.data<int64_t>()[1] = key;
  for (auto& [id, f] : transport_->on_issue) f({Operation::split, transport_->issued, bytes_of(mine)});
  if (auto work = control.issue({{.operation = Operation::split, .x = mine.meta()}, mine, all})) work->wait();
  ++transport_->issued;
  std::vector<std::pair<int64_t, int>> order;  // key, rank
  for (int r = 0; r < size(); ++r) {
    const int64_t* theirs = all.data<int64_t>() + 2 * r;
    if (color < 0 ? r == rank() : theirs[0] == color) order.emplace_back(theirs[1], r);
  }
  std::sort(order.begin(), order.end());
  std::vector<int> ranks;
  for (auto& [k, r] : order) ranks.push_back(r);
  return Group(transport_->part(ranks, color));
}

void Group::run(const std::function<void(Group&)>& f) const {
  auto ranks = transport_->local();
  auto failure = [](Transport& rank, const char* what) {
    return Failure{.text = text::cat("run: rank ", rank.rank(), " ended with an error: ", what), .operation = "run", .sequence = rank.issued,
                   .ranks = {rank.rank()}};
  };
  bool all_here = static_cast<int>(ranks.size()) == size();
  std::mutex lock;
  std::exception_ptr first;
  auto work = [&](const std::shared_ptr<Transport>& rank) {
    auto keep = [&] {
      std::lock_guard guard(lock);
      if (!first) first = std::current_exception();
    };
    try {
      Group group(rank);
      f(group);
    } catch (const std::exception& e) {
      keep();
      rank->fail(failure(*rank, e.what()));
    } catch (...) {
      keep();
      rank->fail(failure(*rank, "something that is no std::exception"));
    }
  };

  if (ranks.size() == 1) {
    ThreadState state = thread_state();
    place(state, ranks[0]->device());
    InstallThreadState installed(state);
    work(ranks[0]);
  } else {
    std::vector<ThreadState> states(ranks.size(), capture_thread_state());
    for (size_t i = 0; i < ranks.size(); ++i) {
      place(states[i], ranks[i]->device());
      states[i].generator = generator_for(ranks[i]->device());
    }
    std::vector<std::thread> threads;
    try {
      for (size_t i = 0; i < ranks.size(); ++i)
        threads.emplace_back([&, i] {
          InstallThreadState installed(states[i]);
          work(ranks[i]);
        });
    } catch (const std::exception& e) {  // no more threads
      first = std::current_exception();
      ranks[0]->fail(failure(*ranks[threads.size()], e.what()));
    }
    for (auto& t : threads) t.join();
    go_on_from(*states[0].generator, ranks[0]->device());
  }
  if (!first) return;
  if (all_here)
    for (auto& rank : ranks) {
      rank->revive();
      rank->issued = 0;
    }
  std::rethrow_exception(first);
}

HookHandle Group::on_issue(std::function<void(const Issued&)> f) const {
  auto& hooks = transport_->on_issue;
  int id = hooks.empty() ? 0 : hooks.rbegin()->first + 1;
  hooks[id] = std::move(f);
  return HookHandle([weak = std::weak_ptr(transport_), id] {
    if (auto t = weak.lock()) t->on_issue.erase(id);
  });
}

std::shared_ptr<Transport> Group::alone() { return cpu_threads(1, InitOptions{}.deadline)[0]; }

std::shared_ptr<Transport> held_together(std::vector<std::shared_ptr<Transport>> ranks) {
  return ranks.size() == 1 ? ranks[0] : std::make_shared<Held>(std::move(ranks));
}

Group threads(std::vector<Device> devices, double deadline) {
  ensure_backends();
  check_devices(devices);
  auto ends = cpu_threads(static_cast<int>(devices.size()), check_deadline(deadline));
  return Group(held_together(on_devices(std::move(ends), devices)));
}
Group threads(int n, double deadline) { return threads(cpus(n), deadline); }

Group init(const InitOptions& options) {
  ensure_backends();
  int each = options.devices_per_process, processes = launched();
  double deadline = check_deadline(options.deadline);
  HT_CHECK(each > 0 && each <= 4096, "init: expected devices_per_process from 1 to 4096, got ", each);
  HT_CHECK(processes <= 1 || engines().mpi, "init: this process is one of ", processes,
           " that a launcher started, and this build has no MPI; configure with -DHALFTONE_MPI=ON");
  DeviceType type = options.device.value_or(devices(DeviceType::cuda).empty() ? DeviceType::cpu : DeviceType::cuda);

  bool mpi = processes > 0 && engines().mpi;
  auto ends = mpi ? engines().mpi(each, deadline) : cpu_threads(each, deadline);
  HT_CHECK(processes <= 1 || ends[0]->size() == processes * each, "init: the launcher started ", processes, " processes, and MPI sees ",
           ends[0]->size() / each, "; start them with the mpirun of the MPI that this build uses, or with srun --mpi=pmix");
  std::vector<Device> mine(static_cast<size_t>(each));
  if (type != DeviceType::cpu) {
    backend(type);  // says why there is none
    auto here = mpi ? engines().mpi_place() : Engines::Place{0, 1};
    int has = static_cast<int>(devices(type).size());
    // Each process sees all GPUs of its machine, or just its own.
    int first = has == each ? 0 : here.index * each;
    HT_CHECK(first + each <= has, "init: ", here.count, " processes of ", each, " ranks on this machine need as many GPUs, and this process sees ",
             has, "; a GPU serves one rank of a group. Start fewer processes, or take .device = DeviceType::cpu");
    for (int i = 0; i < each; ++i) mine[static_cast<size_t>(i)] = {type, first + i};
  }
  Group group(held_together(on_devices(std::move(ends), mine)));
  if (each == 1 && type != DeviceType::cpu) group.barrier();  // the engine of GPUs meets now
  return group;
}

}  // namespace halftone::distributed
