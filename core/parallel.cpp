// The thread pool behind parallel_for. Workers sleep until a job comes; chunks are claimed one by one from a counter.
#include "halftone/core/parallel.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
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

struct Job {
  int64_t chunks;
  void (*run)(void*, int64_t);
  void* context;
  std::atomic<int64_t> next{0};
  int working = 0;  // under the pool's lock
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
    {
      std::lock_guard guard(lock_);
      job_ = &job;
      ++generation_;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock guard(lock_);
    job_ = nullptr;
    done_.wait(guard, [&] { return job.working == 0; });
  }

 private:
  void stop() {
    {
      std::lock_guard guard(lock_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& w : workers_) w.join();
  }
  void serve() {
    uint64_t seen = 0;
    std::unique_lock guard(lock_);
    for (;;) {
      wake_.wait(guard, [&] { return stop_ || (job_ && generation_ != seen); });
      if (stop_) return;
      seen = generation_;
      Job& job = *job_;
      ++job.working;
      guard.unlock();
      job.work();
      guard.lock();
      if (--job.working == 0) done_.notify_all();
    }
  }

  std::mutex lock_, busy_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

int default_threads() {
  if (const char* v = std::getenv("HALFTONE_NUM_THREADS")) {
    int n = std::atoi(v);
    HT_CHECK(n > 0, "HALFTONE_NUM_THREADS: expected a number above 0, got '", std::string(v), "'");
    return n;
  }
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
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
