// Groups of MPI processes on the CPU, each of one rank or several. A reduction is an all-to-all of slices, sums in rank
// order by the process that owns the slice, and an all-gather of the results: the traffic of a ring, and the bits of one
// process. Every MPI call is non-blocking and polled, so that a deadline holds whatever the other processes do.
// Each group has a thread that does its calls in order.
#include <algorithm>
#include <array>
#include <cstring>

#include "halftone/distributed/processes_mpi.h"
#include "halftone/distributed/reduce.h"

namespace halftone {
void register_mpi();
}

namespace halftone::distributed {
namespace {

// What an interrupted call may still write to: kept for the rest of the process.
void abandon(std::shared_ptr<void> p) {
  static std::mutex lock;
  static auto* all = new std::vector<std::shared_ptr<void>>;
  std::lock_guard guard(lock);
  all->push_back(std::move(p));
}

// Grows, and does not keep what was in it.
struct Buffer {
  std::unique_ptr<char[]> data;
  size_t size = 0;
  char* of(int64_t bytes) {
    if (auto n = static_cast<size_t>(bytes); n > size) {
      data.reset(new char[n]);
      size = n;
    }
    return data.get();
  }
};

class MpiEngine final : public CpuEngine {
 public:
  // members[p]: the launcher's number of the group's process p.
  MpiEngine(std::vector<int> process_of, int here, double deadline, MPI_Comm comm, uint64_t id, std::vector<int> members)
      : CpuEngine(std::move(process_of), here, deadline), processes_(Processes::get(deadline)), comm_(comm), id_(id), members_(std::move(members)) {
    ranks_of_.resize(members_.size());
    for (int r = 0; r < size(); ++r) {
      auto& ranks = ranks_of_[static_cast<size_t>(process_of_[static_cast<size_t>(r)])];
      place_.push_back(static_cast<int64_t>(ranks.size()));
      ranks.push_back(r);
    }
  }
  ~MpiEngine() override {
    {
      std::lock_guard guard(tasks_->lock);
      tasks_->stop = true;
    }
    tasks_->changed.notify_all();
    if (thread_.get_id() == std::this_thread::get_id()) thread_.detach();
    else if (thread_.joinable()) thread_.join();
    processes_.leave(id_);
    if (failure_ || processes_.ended()) return;
    auto held = processes_.call();
    MPI_Comm_free(&comm_);
  }
  void launch() {
    processes_.enter(id_, shared_from_this());
    thread_ = std::thread([tasks = tasks_] { serve(*tasks); });
  }
  void revive() override {}  // other processes do not know
  std::vector<int> silent() override;
  int64_t calls() const override { return calls_; }

 protected:
  void start(const std::shared_ptr<Round>& round) override {
    ++calls_;
    {
      std::lock_guard guard(tasks_->lock);
      tasks_->rounds.emplace_back(std::static_pointer_cast<MpiEngine>(shared_from_this()), round);
    }
    tasks_->changed.notify_one();
  }
  void failed() override {
    if (!failure_->mismatch) processes_.tell_failure(id_, *failure_);
  }
  std::shared_ptr<CpuEngine> make_part(const std::vector<int>& ranks, int64_t sequence, int color) override;

 private:
  // A call that has been handed on keeps its engine alive; the thread itself does not.
  struct Tasks {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::pair<std::shared_ptr<MpiEngine>, std::shared_ptr<Round>>> rounds;
    bool stop = false;
  };
  static void serve(Tasks& tasks);
  void perform(const std::shared_ptr<Round>& round);
  void agree(const Round& round);
  void all_reduce(const Round& round);
  void reduce_scatter(const Round& round);
  void all_gather(const Round& round);
  void broadcast(const Round& round);
  void exchange(const Round& round, const char* send, const std::vector<int>& send_bytes, char* receive, const std::vector<int>& receive_bytes);
  void gather(const Round& round, const void* send, int bytes, char* receive, const std::vector<int>& receive_bytes);
  void await(MPI_Request request, const Round& round);
  Failure late(const Round& round);
  std::vector<int> each(int64_t bytes_of_one) const;  // bytes of a process's ranks, by process
  // Where rank r's `bytes_of_one` bytes lie in what was received from all processes.
  int64_t offset(int r, int64_t bytes_of_one) const;
  template <class F> void in_pieces(int64_t n, int64_t bytes, F f) {
    constexpr int64_t most = int64_t{32} << 20;
    int64_t piece = std::max<int64_t>(1, most / bytes);
    for (int64_t begin = 0; begin < n; begin += piece) f(begin, std::min(piece, n - begin));
  }
  size_t processes() const { return members_.size(); }
  int64_t here_count() const { return static_cast<int64_t>(ranks_here_.size()); }
  static char* data(const Tensor& t) { return static_cast<char*>(t.raw_data()); }

  Processes& processes_;
  MPI_Comm comm_;
  const uint64_t id_;
  const std::vector<int> members_;
  std::vector<std::vector<int>> ranks_of_;  // by process
  std::vector<int64_t> place_;              // of a rank among its process's
  std::atomic<int64_t> calls_ = 0;
  std::shared_ptr<Tasks> tasks_ = std::make_shared<Tasks>();
  Buffer send_, receive_;
  std::thread thread_;
};

void MpiEngine::serve(Tasks& tasks) {
  for (;;) {
    std::pair<std::shared_ptr<MpiEngine>, std::shared_ptr<Round>> next;
    {
      std::unique_lock guard(tasks.lock);
      tasks.changed.wait(guard, [&] { return tasks.stop || !tasks.rounds.empty(); });
      if (tasks.rounds.empty()) return;
      next = std::move(tasks.rounds.front());
      tasks.rounds.pop_front();
    }
    next.first->perform(next.second);
  }
}

void MpiEngine::perform(const std::shared_ptr<Round>& round) {
  const Description d = round->requests[0].what;
  try {
    check();
    agree(*round);
    if (!round->requests[0].compare_only && d.operation != Operation::barrier && d.x.shape.numel() > 0) {
      if (d.operation == Operation::all_reduce) all_reduce(*round);
      else if (d.operation == Operation::reduce_scatter) reduce_scatter(*round);
      else if (d.operation == Operation::broadcast) broadcast(*round);
      else all_gather(*round);
    }
    return finish(*round);
  } catch (const Failure& failure) {
    fail(failure);
  } catch (const std::exception& e) {
    fail({.text = text::cat(d.operation, ": ", e.what()), .operation = str(d.operation), .sequence = round->sequence});
  }
  auto keep = std::make_shared<std::pair<Buffer, Buffer>>(std::move(send_), std::move(receive_));
  abandon(keep);
  abandon(round);
}

// Returns when all processes have come to this call and it is one call. So it is a barrier, too.
void MpiEngine::agree(const Round& round) {
  uint64_t mine = fingerprint(round.requests[0].what);
  for (auto& r : round.requests) if (fingerprint(r.what) != mine) mine = 0;
  auto* prints = reinterpret_cast<uint64_t*>(receive_.of(static_cast<int64_t>(processes() * sizeof mine)));
  auto* own = reinterpret_cast<uint64_t*>(send_.of(sizeof mine));
  *own = mine;
  gather(round, own, sizeof mine, receive_.data.get(), std::vector<int>(processes(), sizeof mine));
  if (std::all_of(prints, prints + processes(), [&](uint64_t p) { return p == mine && p != 0; })) return;

  constexpr int length = 160;
  char* texts = send_.of(here_count() * length);
  std::memset(texts, 0, static_cast<size_t>(here_count() * length));
  for (size_t i = 0; i < round.requests.size(); ++i) std::strncpy(texts + i * length, str(round.requests[i].what).c_str(), length - 1);
  char* all = receive_.of(int64_t{size()} * length);
  gather(round, texts, static_cast<int>(here_count()) * length, all, each(length));
  std::vector<std::string> by_rank;
  for (int r = 0; r < size(); ++r) by_rank.emplace_back(all + offset(r, length));
  throw disagreement(round.sequence, by_rank);
}

void MpiEngine::all_reduce(const Round& round) {
  const Description& d = round.requests[0].what;
  auto bytes = static_cast<int64_t>(size_of(d.x.dtype)), many = static_cast<int64_t>(processes());
  in_pieces(d.x.shape.numel(), bytes, [&](int64_t begin, int64_t n) {
    auto cut = [&](int64_t p) { return n * p / many; };
    int64_t first = cut(here_), mine = cut(here_ + 1) - first;
    std::vector<int> sizes, slices;
    for (int64_t p = 0; p < many; ++p) {
      slices.push_back(static_cast<int>((cut(p + 1) - cut(p)) * bytes));
      sizes.push_back(slices.back() * static_cast<int>(here_count()));
    }
    char* x = data(round.requests[0].x) + begin * bytes;
    const char* send = x;
    if (here_count() > 1) {
      char* to = send_.of(n * bytes * here_count());
      send = to;
      for (int64_t p = 0; p < many; ++p)
        for (auto& r : round.requests) {
          auto size = static_cast<size_t>(slices[static_cast<size_t>(p)]);
          std::memcpy(to, data(r.x) + (begin + cut(p)) * bytes, size);
          to += size;
        }
    }
    char* received = receive_.of(size() * mine * bytes);
    exchange(round, send, sizes, received, each(mine * bytes));
    std::vector<const void*> parts;
    for (int r = 0; r < size(); ++r) parts.push_back(received + offset(r, mine * bytes));
    reduce_in_order(d.how, d.x.dtype, parts, x + first * bytes, mine);
    gather(round, MPI_IN_PLACE, 0, x, slices);
    for (size_t i = 1; i < round.requests.size(); ++i)
      std::memcpy(data(round.requests[i].x) + begin * bytes, x, static_cast<size_t>(n * bytes));
  });
}

void MpiEngine::reduce_scatter(const Round& round) {
  const Description& d = round.requests[0].what;
  auto bytes = static_cast<int64_t>(size_of(d.x.dtype));
  int64_t numel = d.x.shape.numel() / size();
  in_pieces(numel, bytes * size() * here_count(), [&](int64_t begin, int64_t n) {
    int64_t one = n * bytes;
    char* to = send_.of(size() * here_count() * one);
    const char* send = to;
    for (auto& ranks : ranks_of_)
      for (auto& request : round.requests)
        for (int r : ranks) {
          std::memcpy(to, data(request.x) + (r * numel + begin) * bytes, static_cast<size_t>(one));
          to += one;
        }
    std::vector<int> sizes = each(one * here_count());
    char* received = receive_.of(size() * here_count() * one);
    exchange(round, send, sizes, received, sizes);
    std::vector<const void*> parts(static_cast<size_t>(size()));
    for (int64_t i = 0; i < here_count(); ++i) {
      for (int r = 0; r < size(); ++r) parts[static_cast<size_t>(r)] = received + offset(r, one * here_count()) + i * one;
      reduce_in_order(d.how, d.x.dtype, parts, data(round.requests[static_cast<size_t>(i)].out) + begin * bytes, n);
    }
  });
}

void MpiEngine::all_gather(const Round& round) {
  const Description& d = round.requests[0].what;
  auto bytes = static_cast<int64_t>(size_of(d.x.dtype));
  int64_t numel = d.x.shape.numel();
  in_pieces(numel, bytes * size(), [&](int64_t begin, int64_t n) {
    int64_t one = n * bytes;
    char* send = send_.of(here_count() * one);
    for (size_t i = 0; i < round.requests.size(); ++i)
      std::memcpy(send + static_cast<int64_t>(i) * one, data(round.requests[i].x) + begin * bytes, static_cast<size_t>(one));
    char* received = receive_.of(size() * one);
    gather(round, send, static_cast<int>(here_count() * one), received, each(one));
    for (auto& request : round.requests)
      for (int r = 0; r < size(); ++r)
        std::memcpy(data(request.out) + (r * numel + begin) * bytes, received + offset(r, one), static_cast<size_t>(one));
  });
}

void MpiEngine::broadcast(const Round& round) {
  const Description& d = round.requests[0].what;
  auto root = static_cast<size_t>(d.root);
  size_t source = process_of_[root] == here_ ? static_cast<size_t>(place_[root]) : 0;
  char* x = data(round.requests[source].x);
  in_pieces(bytes_of(round.requests[0].x), 1, [&](int64_t begin, int64_t n) {
    MPI_Request request = MPI_REQUEST_NULL;
    {
      auto held = processes_.call();
      check_mpi(MPI_Ibcast(x + begin, static_cast<int>(n), MPI_BYTE, process_of_[root], comm_, &request), "MPI_Ibcast");
    }
    await(request, round);
  });
  for (auto& r : round.requests) if (data(r.x) != x) std::memcpy(data(r.x), x, static_cast<size_t>(bytes_of(r.x)));
}

std::vector<int> starts(const std::vector<int>& sizes) {
  std::vector<int> at(sizes.size());
  for (size_t i = 1; i < sizes.size(); ++i) at[i] = at[i - 1] + sizes[i - 1];
  return at;
}

void MpiEngine::exchange(const Round& round, const char* send, const std::vector<int>& send_bytes, char* receive,
                         const std::vector<int>& receive_bytes) {
  std::vector<int> from = starts(send_bytes), to = starts(receive_bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  {
    auto held = processes_.call();
    check_mpi(MPI_Ialltoallv(send, send_bytes.data(), from.data(), MPI_BYTE, receive, receive_bytes.data(), to.data(), MPI_BYTE, comm_, &request),
              "MPI_Ialltoallv");
  }
  await(request, round);
}

void MpiEngine::gather(const Round& round, const void* send, int bytes, char* receive, const std::vector<int>& receive_bytes) {
  std::vector<int> to = starts(receive_bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  {
    auto held = processes_.call();
    check_mpi(MPI_Iallgatherv(send, bytes, MPI_BYTE, receive, receive_bytes.data(), to.data(), MPI_BYTE, comm_, &request), "MPI_Iallgatherv");
  }
  await(request, round);
}

// Until the request is through, the deadline is over, another process has failed, or one that is needed has left for good.
void MpiEngine::await(MPI_Request request, const Round& round) {
  constexpr auto grace = std::chrono::seconds(1);  // its part may be under way still
  Clock::time_point left_since{};
  for (int polls = 0;; ++polls) {
    int through = 0;
    {
      auto held = processes_.call();
      check_mpi(MPI_Test(&request, &through, MPI_STATUS_IGNORE), "MPI_Test");
    }
    if (through) return;
    if (polls < 100) {
      std::this_thread::yield();
      continue;
    }
    check();
    auto now = Clock::now();
    if (now > round.since + deadline_) throw late(round);
    if (polls % 64 == 0) {
      std::vector<int> left;
      for (size_t p = 0; p < processes(); ++p)
        if (static_cast<int>(p) != here_ && processes_.seen(members_[p], id_).left) left.insert(left.end(), ranks_of_[p].begin(), ranks_of_[p].end());
      if (left.empty()) left_since = {};
      else if (left_since == Clock::time_point{}) left_since = now;
      else if (now > left_since + grace) {
        std::string who = str(round.requests[0].what.operation);
        throw Failure{.text = text::cat(who, ": call ", round.sequence, " of this group of ", size(), " cannot end: ", list_ranks(left),
                                        left.size() == 1 ? " has" : " have", " ended the program"),
                      .operation = who, .sequence = round.sequence, .ranks = left};
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(polls < 1000 ? 20 : 200));
  }
}

// Ranks whose process has not been heard of for so long that it is not for want of a processor.
std::vector<int> MpiEngine::silent() {
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    int process = process_of_[static_cast<size_t>(r)];
    if (process == here_) continue;
    if (processes_.seen(members_[static_cast<size_t>(process)], id_).silence > std::max(0.3 * deadline(), 0.2)) ranks.push_back(r);
  }
  return ranks;
}

Failure MpiEngine::late(const Round& round) {
  std::vector<int> gone = silent(), behind;
  double longest = 0;
  for (int r = 0; r < size(); ++r) {
    int process = process_of_[static_cast<size_t>(r)];
    if (process == here_) continue;
    auto seen = processes_.seen(members_[static_cast<size_t>(process)], id_);
    if (std::find(gone.begin(), gone.end(), r) != gone.end()) longest = std::max(longest, seen.silence);
    else if (seen.calls <= round.sequence) behind.push_back(r);
  }
  std::string why;
  if (!gone.empty())
    why = text::cat(list_ranks(gone), gone.size() == 1 ? " has" : " have", " not been heard of for ", static_cast<int>(longest * 10) / 10.0, " s");
  if (!behind.empty())
    why += text::cat(why.empty() ? "" : "; ", list_ranks(behind), behind.size() == 1 ? " is alive and has" : " are alive and have", " not made it");
  if (why.empty()) why = "all ranks are alive and have made it";
  return overdue(round, why, gone.empty() ? behind : gone);
}

std::vector<int> MpiEngine::each(int64_t bytes_of_one) const {
  std::vector<int> sizes;
  for (auto& ranks : ranks_of_) sizes.push_back(static_cast<int>(static_cast<int64_t>(ranks.size()) * bytes_of_one));
  return sizes;
}
int64_t MpiEngine::offset(int r, int64_t bytes_of_one) const {
  int64_t before = place_[static_cast<size_t>(r)];
  for (int p = 0; p < process_of_[static_cast<size_t>(r)]; ++p) before += static_cast<int64_t>(ranks_of_[static_cast<size_t>(p)].size());
  return before * bytes_of_one;
}

// Calls a blocking function of MPI on a thread of its own where MPI allows it, so that the deadline holds.
MPI_Comm in_time(Processes& processes, double deadline, const char* what, std::function<int(MPI_Comm*)> make) {
  struct Result {
    std::mutex lock;
    std::condition_variable changed;
    bool done = false;
    int code = MPI_SUCCESS;
    MPI_Comm comm = MPI_COMM_NULL;
  };
  auto result = std::make_shared<Result>();
  auto work = [result, make = std::move(make), &processes] {
    auto held = processes.call();
    MPI_Comm comm = MPI_COMM_NULL;
    int code = make(&comm);
    std::lock_guard guard(result->lock);
    result->comm = comm;
    result->code = code;
    result->done = true;
    result->changed.notify_all();
  };
  std::thread(work).detach();
  std::unique_lock guard(result->lock);
  if (!result->changed.wait_for(guard, std::chrono::duration<double>(deadline), [&] { return result->done; }))
    throw CommunicationError(text::cat(what, ": not all processes came within ", deadline, " s"), what, 0, {});
  check_mpi(result->code, what);
  return result->comm;
}

std::shared_ptr<CpuEngine> MpiEngine::make_part(const std::vector<int>& ranks, int64_t sequence, int color) {
  std::vector<int> owners, members, process_of;
  for (int r : ranks) owners.push_back(process_of_[static_cast<size_t>(r)]);
  std::sort(owners.begin(), owners.end());
  owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
  if (owners.size() == 1) return CpuEngine::make_part(ranks, sequence, color);
  for (int p : owners) members.push_back(members_[static_cast<size_t>(p)]);
  auto place_of = [&](int p) { return static_cast<int>(std::lower_bound(owners.begin(), owners.end(), p) - owners.begin()); };
  for (int r : ranks) process_of.push_back(place_of(process_of_[static_cast<size_t>(r)]));

  uint64_t id = (id_ * 1000003u + static_cast<uint64_t>(sequence)) * 1000003u + static_cast<uint64_t>(color) + 1;
  MPI_Comm made = in_time(processes_, deadline(), "split", [comm = comm_, owners, id](MPI_Comm* part) {
    MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
    MPI_Comm_group(comm, &all);
    MPI_Group_incl(all, static_cast<int>(owners.size()), owners.data(), &some);
    int code = MPI_Comm_create_group(comm, some, static_cast<int>(id % 32000), part);
    MPI_Group_free(&some);
    MPI_Group_free(&all);
    return code;
  });
  auto engine = std::make_shared<MpiEngine>(process_of, place_of(here_), deadline(), made, id, members);
  engine->launch();
  return engine;
}

std::vector<std::shared_ptr<Transport>> open(int each, double deadline) {
  static std::atomic<uint64_t> opened = 0;
  Processes& processes = Processes::get(deadline);
  HT_CHECK(!processes.ended(), "init: MPI has ended in this process");
  std::vector<int> members, process_of;
  for (int p = 0; p < processes.size; ++p) {
    members.push_back(p);
    process_of.insert(process_of.end(), static_cast<size_t>(each), p);
  }
  uint64_t id = ++opened;
  auto most = std::make_shared<std::array<int, 2>>(std::array{each, -each});
  MPI_Comm comm = in_time(processes, deadline, "init", [&processes, most](MPI_Comm* made) {
    int code = MPI_Comm_dup(processes.world, made);
    return code != MPI_SUCCESS ? code : MPI_Allreduce(MPI_IN_PLACE, most->data(), 2, MPI_INT, MPI_MAX, *made);
  });
  HT_CHECK((*most)[0] == -(*most)[1], "init: processes gave devices_per_process from ", -(*most)[1], " to ", (*most)[0], "; all give one number");
  auto engine = std::make_shared<MpiEngine>(process_of, processes.rank, deadline, comm, id, members);
  engine->launch();
  return ends(engine);
}

}  // namespace
}  // namespace halftone::distributed

void halftone::register_mpi() {
  auto& e = distributed::engines();
  e.mpi = distributed::open;
  e.mpi_place = [] { return distributed::Processes::get(1).place; };
}
