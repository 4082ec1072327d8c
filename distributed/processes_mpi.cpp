// Heartbeats, the failures of others, and how MPI begins and ends.
#include "halftone/distributed/processes_mpi.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace halftone::distributed {

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char said[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, said, &length);
  throw Error(text::cat("distributed: MPI: ", what, ": ", std::string_view(said, static_cast<size_t>(length))));
}

Processes& Processes::get(double deadline) {
  static auto* processes = new Processes(deadline);  // never destroyed: its thread may be in MPI to the end
  processes->meet(deadline);
  return *processes;
}

Processes::Processes(double deadline) : deadline_(deadline), interval_(seconds(std::clamp(deadline / 20, 0.02, 1.0))) {
  instance = this;
  thread_ = std::thread([this] { serve(); });
  std::atexit([] { instance->end(); });
}

void Processes::meet(double deadline) {
  std::unique_lock guard(lock_);
  if (!changed_.wait_for(guard, seconds(deadline), [&] { return started_ || !refused_.empty(); })) {
    broken_ = true;
    throw CommunicationError(text::cat("init: the processes of this launcher did not meet within ", deadline, " s"), "init", 0, {});
  }
  HT_CHECK(refused_.empty(), refused_);
}

void Processes::start() {
  int initialised = 0, level = 0;
  MPI_Initialized(&initialised);
  if (initialised) check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
  else check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  ours_ = !initialised;
  HT_CHECK(level >= MPI_THREAD_SERIALIZED, "init: this MPI lets only one thread call it (MPI_THREAD_", level == MPI_THREAD_SINGLE ? "SINGLE" : "FUNNELED",
           "), and groups need MPI_THREAD_SERIALIZED or more; ", ours_ ? "use an MPI that was built with threads" : "ask MPI_Init_thread for MPI_THREAD_MULTIPLE");
  multiple = level == MPI_THREAD_MULTIPLE;
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN);
  if (ours_) MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &size);
  MPI_Comm machine = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine), "MPI_Comm_split_type");
  MPI_Comm_rank(machine, &place.index);
  MPI_Comm_size(machine, &place.count);
  MPI_Comm_free(&machine);
  if (!ours_) {  // stop when the program ends MPI
    int key = 0;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, [](MPI_Comm, int, void*, void*) { instance->end(); return MPI_SUCCESS; }, &key, nullptr);
    MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
  }
  auto n = static_cast<size_t>(size);
  heard_.assign(n, Clock::now());
  left_.assign(n, 0);
  calls_of_.resize(n);
}

void Processes::serve() {
  try {
    start();
  } catch (const std::exception& e) {
    std::lock_guard guard(lock_);
    refused_ = e.what();
    broken_ = ended_ = true;
    changed_.notify_all();
    return;
  }
  {
    std::lock_guard guard(lock_);
    started_ = true;
  }
  changed_.notify_all();
  receive();
  Clock::time_point next = Clock::now();
  for (;;) {
    int arrived = 0;
    do {
      {
        auto held = call();
        if (MPI_Test(&receiving_, &arrived, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
      }
      if (!arrived) break;
      take(incoming_);
      receive();
    } while (true);
    std::vector<std::pair<uint64_t, Failure>> failures;
    {
      std::lock_guard guard(lock_);
      failures.swap(failures_);
    }
    for (auto& [id, failure] : failures) {
      Message m{};
      m.process = rank;
      m.failed = 1;
      m.id[0] = id;
      m.calls[0] = failure.sequence;
      std::string text = failure.operation + '\n' + failure.text;
      std::strncpy(m.text, text.c_str(), sizeof m.text - 1);
      for (int p = 0; p < size; ++p) send(m, p);
    }
    bool last = leaving_ && !said_;
    if (last || Clock::now() >= next) {
      beat(last);
      said_ = last || said_;
      next = Clock::now() + interval_;
    }
    outgoing_.remove_if([&](Letter& l) {
      int sent = 0;
      auto held = call();
      return MPI_Test(&l.request, &sent, MPI_STATUS_IGNORE) == MPI_SUCCESS && sent;
    });
    std::unique_lock guard(lock_);
    if (said_ && may_end()) break;
    changed_.wait_for(guard, std::min<Clock::duration>(interval_, std::chrono::milliseconds(10)), [&] { return !failures_.empty(); });
  }
  if (!broken_) {
    auto held = call();
    MPI_Cancel(&receiving_);
    MPI_Wait(&receiving_, MPI_STATUS_IGNORE);
    for (auto& l : outgoing_) MPI_Wait(&l.request, MPI_STATUS_IGNORE);
    if (ours_) MPI_Finalize();
  }
  ended_ = true;
}

void Processes::receive() {
  auto held = call();
  MPI_Irecv(&incoming_, sizeof incoming_, MPI_BYTE, MPI_ANY_SOURCE, 0, world, &receiving_);
}

void Processes::send(const Message& m, int to) {
  if (to == rank) return;
  auto& letter = outgoing_.emplace_back(Letter{m, to});
  auto held = call();
  if (MPI_Isend(&letter.message, sizeof m, MPI_BYTE, to, 0, world, &letter.request) != MPI_SUCCESS) letter.request = MPI_REQUEST_NULL;
}

void Processes::beat(bool last) {
  Message m{};
  m.process = rank;
  m.left = last || said_;
  {
    std::vector<std::shared_ptr<CpuEngine>> keep;  // let go of without the lock: it may be the last handle
    std::lock_guard guard(lock_);
    for (auto& [id, weak] : engines_) {
      auto engine = m.groups < max_groups ? weak.lock() : nullptr;
      if (!engine) continue;
      m.id[m.groups] = id;
      m.calls[m.groups++] = engine->calls();
      keep.push_back(std::move(engine));
    }
  }
  std::vector<char> unsent(static_cast<size_t>(size));  // to whom a beat is under way still
  for (auto& l : outgoing_) if (!l.message.failed) unsent[static_cast<size_t>(l.to)] = 1;
  for (int p = 0; p < size; ++p) if (last || !unsent[static_cast<size_t>(p)]) send(m, p);
}

void Processes::take(const Message& m) {
  auto from = static_cast<size_t>(m.process);
  std::shared_ptr<CpuEngine> engine;
  Failure failure;
  {
    std::lock_guard guard(lock_);
    heard_[from] = Clock::now();
    if (m.left) left_[from] = 1;
    for (int i = 0; i < m.groups; ++i) calls_of_[from][m.id[i]] = m.calls[i];
    if (!m.failed) return;
    std::string text = m.text;
    auto cut = text.find('\n');
    failure = {.text = text.substr(cut + 1), .operation = text.substr(0, cut), .sequence = m.calls[0]};
    if (auto found = engines_.find(m.id[0]); found != engines_.end()) engine = found->second.lock();
    else early_[m.id[0]] = failure;
    broken_ = true;
  }
  if (engine) engine->fail(failure);
}

void Processes::enter(uint64_t id, const std::shared_ptr<CpuEngine>& engine) {
  Failure failure;
  {
    std::lock_guard guard(lock_);
    engines_[id] = engine;
    if (auto found = early_.find(id); found != early_.end()) failure = found->second;
  }
  if (!failure.text.empty()) engine->fail(failure);
}
void Processes::leave(uint64_t id) {
  std::lock_guard guard(lock_);
  engines_.erase(id);
}
void Processes::tell_failure(uint64_t id, const Failure& failure) {
  {
    std::lock_guard guard(lock_);
    if (!broken_) failures_.emplace_back(id, failure);
    broken_ = true;
  }
  changed_.notify_all();
}

Processes::Seen Processes::seen(int process, uint64_t id) {
  std::lock_guard guard(lock_);
  auto p = static_cast<size_t>(process);
  auto found = calls_of_[p].find(id);
  return {std::chrono::duration<double>(Clock::now() - heard_[p]).count(), left_[p] != 0, found == calls_of_[p].end() ? 0 : found->second};
}

// Under the lock: everybody is at the end, or somebody will not come.
bool Processes::may_end() {
  if (broken_) return failures_.empty() && outgoing_.empty();
  bool all = true;
  for (int p = 0; p < size; ++p) {
    auto i = static_cast<size_t>(p);
    if (p == rank || left_[i]) continue;
    all = false;
    if (Clock::now() - heard_[i] > std::chrono::duration<double>(deadline_)) broken_ = true;
  }
  return all || broken_;
}

// With the program, or when it ends MPI. A broken group is not waited for: its launcher sees to the rest.
void Processes::end() {
  leaving_ = true;
  changed_.notify_all();
  if (!thread_.joinable()) return;
  auto until = Clock::now() + std::chrono::seconds(2);
  while (!ended_ && !(broken_ && Clock::now() > until)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (ended_) thread_.join();
  else thread_.detach();
}

}  // namespace halftone::distributed
