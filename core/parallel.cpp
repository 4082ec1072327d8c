// The thread pool behind parallel_for. Workers look out for a job for a moment, then sleep until one comes; chunks are claimed
// one by one from a counter.
#include "halftone/core/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "halftone/core/error.h"
#include "halftone/core/own_thread.h"
#include "halftone/core/thread_state.h"

namespace halftone {
namespace {

thread_local bool inside_chunk = false;  // or on a thread that keeps to itself

// Waits while `value` is `old`. What a program of short kernels waits for is near, and to sleep and be woken takes longer than many of
// them: it looks on for a moment before it sleeps.
template <class T> void wait_while(const std::atomic<T>& value, T old) {
  constexpr auto moment = std::chrono::microseconds(50);
  for (auto start = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() - start < moment;)
    if (value != old) return;
  value.wait(old);
}

struct Job {
  int64_t chunks;
  void (*run)(void*, int64_t);
  void* context;
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_lock;

  void work() {
    inside_chunk = true;
    for (int64_t i; (i = next.fetch_add(1)) < chunks;) {
      try {
        run(context, i);
      } catch (...) {
        std::lock_guard guard(error_lock);
        if (!error) error = std::current_exception();
        next = chunks;
      }
    }
    inside_chunk = false;
  }
};

class Pool {
 public:
  explicit Pool(int threads) {
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
    } catch (const std::exception& e) {
      auto started = workers_.size();
      stop();
      throw Error(text::cat("set_num_threads: the system gave ", started + 1, " of ", threads, " threads: ", e.what()));
    }
  }
  ~Pool() { stop(); }
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  void run(Job& job) {
    std::lock_guard one_at_a_time(busy_);
    job_ = &job;
    ++calls_;
    calls_.notify_all();
    job.work();
    job_ = nullptr;
    for (int n; (n = working_) != 0;) wait_while(working_, n);
  }

 private:
  void stop() {
    stop_ = true;
    ++calls_;
    calls_.notify_all();
    for (auto& w : workers_) w.join();
  }
  void serve() {
    for (uint32_t seen = 0;;) {
      wait_while(calls_, seen);
      if (stop_) return;
      seen = calls_;
      // Counted before it looks for a job, so that run() either counts it or has taken the job away.
      ++working_;
      if (Job* job = job_) job->work();
      if (--working_ == 0) working_.notify_all();
    }
  }

  std::mutex busy_;
  std::atomic<Job*> job_ = nullptr;
  std::atomic<uint32_t> calls_ = 0;
  std::atomic<int> working_ = 0;
  std::atomic<bool> stop_ = false;
  std::vector<std::thread> workers_;
};

// Processors that this process may run on, of which a container may grant it the time of fewer.
int own_processors() {
  int n = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) n = CPU_COUNT(&allowed);
  std::ifstream limit("/sys/fs/cgroup/cpu.max");  // of control groups, version 2: microseconds of each period, or "max"
  double granted = 0, period = 0;
  if (limit >> granted >> period && granted > 0 && period > 0) n = std::min(n, static_cast<int>(std::ceil(granted / period)));
  return std::max(1, n);
}

int default_threads() {
  if (const char* v = std::getenv("HALFTONE_NUM_THREADS")) {
    int n = std::atoi(v);
    HT_CHECK(n > 0, "HALFTONE_NUM_THREADS: expected a number above 0, got '", std::string(v), "'");
    return n;
  }
  return own_processors();
}

std::mutex pool_lock;
// Never destroyed: kernels may run in destructors of static objects. The process's end takes the threads along.
std::shared_ptr<Pool>* current_pool = nullptr;

// A child of fork() has no threads but the one that forked: it leaves the parent's pool alone and starts its own when it
// needs one, with as many threads.
int threads_of_parent = 0;
void survive_fork() {
  pthread_atfork([] { pool_lock.lock(); }, [] { pool_lock.unlock(); },
                 [] {
                   threads_of_parent = *current_pool ? (*current_pool)->threads() : threads_of_parent;
                   current_pool = new std::shared_ptr<Pool>();
                   inside_chunk = false;
                   pool_lock.unlock();
                 });
}

std::shared_ptr<Pool>& the_pool() {
  if (!current_pool) {
    current_pool = new std::shared_ptr<Pool>();
    survive_fork();
  }
  return *current_pool;
}
std::shared_ptr<Pool> pool() {
  std::lock_guard guard(pool_lock);
  if (!the_pool()) the_pool() = std::make_shared<Pool>(threads_of_parent > 0 ? threads_of_parent : default_threads());
  return the_pool();
}

}  // namespace

int num_threads() { return pool()->threads(); }
void set_num_threads(int n) {
  HT_CHECK(n > 0 && n <= 4096, "set_num_threads: expected a number from 1 to 4096, got ", n);
  auto fresh = std::make_shared<Pool>(n);
  std::lock_guard guard(pool_lock);
  the_pool() = std::move(fresh);
}

OwnThread::OwnThread() : saved_(std::exchange(inside_chunk, true)) {}
OwnThread::~OwnThread() { inside_chunk = saved_; }

void detail::run_chunks(int64_t chunks, void (*run)(void*, int64_t), void* context) {
  Job job{.chunks = chunks, .run = run, .context = context, .error = {}, .error_lock = {}};
  auto p = inside_chunk ? nullptr : pool();
  if (!p || p->threads() == 1) {
    for (int64_t i = 0; i < chunks; ++i) run(context, i);
    return;
  }
  p->run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace halftone
