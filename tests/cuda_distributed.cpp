// Groups of GPUs: a group of one on one GPU, and of two where there are two. What hangs is aborted.
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <thread>

#include "halftone/tests/collectives.h"
#include "halftone/tests/error_text.h"

using namespace halftone;
using namespace halftone::tests;
namespace hd = halftone::distributed;

namespace {

std::vector<Device> gpus(size_t n) {
  auto all = devices(DeviceType::cuda);
  if (all.size() > n) all.resize(n);
  return all;
}
#define HT_NEEDS_GPUS(n) if (devices(DeviceType::cuda).size() < (n)) HT_SKIP("needs " #n " GPUs")

// Ends a program that hangs, with what each of its threads is at.
class Limit {
 public:
  explicit Limit(int seconds) {
    if (std::getenv("HALFTONE_CUDA_NO_CACHE")) seconds *= 5;  // under compute-sanitizer
    signal(SIGUSR2, [](int) {
      static std::mutex lock;
      std::lock_guard guard(lock);
      void* frames[40];
      std::fprintf(stderr, "---- thread %ld\n", static_cast<long>(syscall(SYS_gettid)));
      backtrace_symbols_fd(frames, backtrace(frames, 40), STDERR_FILENO);
    });
    thread_ = std::thread([this, seconds] {
      std::unique_lock guard(lock_);
      if (changed_.wait_for(guard, std::chrono::seconds(seconds), [this] { return over_; })) return;
      std::fprintf(stderr, "%s does not end within %d s\n", Catch::getResultCapture().getCurrentTestName().c_str(), seconds);
      for (auto& task : std::filesystem::directory_iterator("/proc/self/task"))
        if (long id = std::atol(task.path().filename().c_str()); id != syscall(SYS_gettid)) syscall(SYS_tgkill, getpid(), id, SIGUSR2);
      std::this_thread::sleep_for(std::chrono::seconds(3));
      std::_Exit(3);
    });
  }
  ~Limit() {
    {
      std::lock_guard guard(lock_);
      over_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  Limit(const Limit&) = delete;

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

double seconds_since(std::chrono::steady_clock::time_point t) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - t).count();
}

// A step with collectives inside, eager and captured.
void check_capture(hd::Group& g) {
  NoGrad no_grad;
  int n = g.size(), me = g.rank();
  Tensor seen = zeros({4}, {.device = g.device()});
  for (DType dtype : {DType::f32, DType::bf16}) {
    auto step = capture([&](const Tensor& x) {
      Tensor y = (x + me).to(dtype), all = zeros({n, 4}, {.dtype = dtype, .device = g.device()}), least = y.clone();
      auto sum = g.all_reduce(y);
      g.all_gather(least.clone(), all).wait();
      g.all_reduce(least, hd::Reduce::min).wait();
      sum.wait();
      seen.copy_(y);
      g.broadcast(seen, n - 1).wait();
      return all.sum(0) + least;
    });
    for (int i = 0; i < 6; ++i) {
      Tensor y = step(full({4}, i, {.device = g.device()}));
      int sum = n * i + n * (n - 1) / 2;
      CHECK_RANK(y.to_vector<int>() == std::vector<int>(4, sum + i));
      CHECK_RANK(seen.to_vector<int>() == std::vector<int>(4, sum));
    }
    CHECK_RANK(step.replays() == 4);
  }
}

}  // namespace

TEST_CASE("a group of one GPU") {
  HT_NEEDS_GPUS(1u);
  Limit limit(120);
  for (hd::Group g : {hd::threads(gpus(1)), hd::init()}) {
    CHECK(g.device() == Device::cuda(0));
    check_collectives(g, false);
    check_capture(g);
    hd::Group part = g.split(0);
    check_collectives(part, false);
    g.run([](hd::Group& rank) { rank.barrier(); });
    Tensor x = ones({3}, {.device = g.device()});
    auto pending = g.all_reduce(x);
    {
      ForbidSync forbid;  // the host waits for nothing
      g.all_reduce(x).wait();
      pending.wait();
    }
    CHECK(x.sum().item<int>() == 3);
    CHECK(pending.done());
  }
}

TEST_CASE("a collective is ordered behind the caller's stream, and the caller's behind it") {
  HT_NEEDS_GPUS(1u);
  hd::Group g = hd::threads(gpus(1));
  for (int i = 0; i < 20; ++i) {
    Tensor a = full({2048, 2048}, 1, {.device = g.device()});
    for (int k = 0; k < 4; ++k) a = matmul(a, a) / 2048;
    Tensor all = zeros({1, 2048, 2048}, {.device = g.device()});
    g.all_gather(a, all).wait();
    CHECK(all.mean().item() == 1);
  }
}

TEST_CASE("two ranks on one GPU are refused") {
  HT_NEEDS_GPUS(1u);
  TEXT(hd::threads({Device::cuda(0), Device::cuda(0)}), "threads: ranks 0 and 1 would share cuda:0; a GPU serves one rank of a group");
  TEXT(hd::threads({Device::cuda(0), Device::cpu()}), "threads: the ranks of a group are all on GPUs or all on the CPU, got cuda:0 and cpu");
  hd::Group g = hd::threads(gpus(1));
  TEXT(g.all_reduce(ones({2})), "all_reduce: expected x on cuda:0, this rank's device, got one on cpu");
}

TEST_CASE("a collective that outlasts its deadline is aborted, and the next call says so") {
  HT_NEEDS_GPUS(1u);
  Limit limit(120);
  hd::Group g = hd::threads(gpus(1), 0.3);
  Tensor x = ones({4}, {.device = g.device()}), a = ones({8192, 8192}, {.device = g.device()});
  g.all_reduce(x).wait();
  a = matmul(a, a);
  auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 150; ++i) matmul(a, a);  // longer than the deadline
  auto pending = g.all_reduce(x);
  while (seconds_since(begin) < 2) {}
  CHECK_THROWS_WITH(pending.wait(), "all_reduce(sum) of [4] (f32): call 1 of this group of 1 did not end within 0.3 s on cuda:0");
  CHECK_THROWS_AS(g.all_reduce(x), hd::CommunicationError);
  CHECK(ones({3}, {.device = g.device()}).sum().item<int>() == 3);  // the device is as good as before
}

TEST_CASE("collectives of two GPUs") {
  HT_NEEDS_GPUS(2u);
  Limit limit(120);
  hd::threads(gpus(2)).run([](hd::Group& rank) {
    check_collectives(rank, false);
    check_subgroups(rank);
    check_capture(rank);
  });
}

TEST_CASE("collectives of four GPUs") {
  HT_NEEDS_GPUS(4u);
  Limit limit(120);
  hd::threads(gpus(4)).run([](hd::Group& rank) {
    check_collectives(rank, false);
    check_subgroups(rank);
    check_capture(rank);
  });
}

TEST_CASE("GPUs whose ranks make different calls all learn what each one called") {
  HT_NEEDS_GPUS(2u);
  Limit limit(120);
  for (auto& m : mismatches()) {
    auto texts = told(hd::threads(gpus(2), 20), m, [](hd::Group& rank) {
      rank.barrier();
      return rank;
    });
    for (auto& text : texts) CHECK(text == mismatch_text(m, 2));
  }
}

TEST_CASE("a GPU that does not come, or whose rank throws, ends the other within the deadline") {
  HT_NEEDS_GPUS(2u);
  constexpr double deadline = 4;
  hd::Group g = hd::threads(gpus(2), deadline);
  for (bool throws : {false, true, false, true}) {
    Limit limit(90);
    auto begin = std::chrono::steady_clock::now();
    double waited = 0;
    std::string seen;
    auto run = [&] {
      g.run([&](hd::Group& rank) {
        Tensor x = ones({1000}, {.device = rank.device()});
        rank.all_reduce(x).wait();
        CHECK_RANK(x[0].item<int>() == 2);
        if (rank.rank() == 1) {
          if (throws) throw std::runtime_error("no data");
          return;
        }
        begin = std::chrono::steady_clock::now();
        try {
          for (;;) {
            rank.all_reduce(x).wait();
            x[0].item();  // returns: the kernel was aborted
          }
        } catch (const hd::CommunicationError& e) {
          waited = seconds_since(begin);
          seen = e.what();
          throw;
        }
      });
    };
    INFO("rank 1 throws: " << throws);
    if (throws) CHECK_THROWS_WITH(run(), "no data");
    else CHECK_THROWS_AS(run(), hd::CommunicationError);
    INFO("rank 0 was told after " << waited << " s: " << seen << "; run() returned after " << seconds_since(begin) << " s");
    CHECK(seen == (throws ? "run: rank 1 ended with an error: no data"
                          : "all_reduce(sum) of [1000] (f32): call 1 of this group of 2 did not end within 4 s on cuda:0: rank 1 has not made it"));
    CHECK(waited < (throws ? 2 : deadline + 2));
    CHECK(seconds_since(begin) < 20);
  }
  Limit limit(120);
  g.run([](hd::Group& rank) { check_collectives(rank, false); });  // a fresh communicator
}

TEST_CASE("a rank that waits in a captured step is released when another throws") {
  HT_NEEDS_GPUS(2u);
  hd::Group g = hd::threads(gpus(2), 60);
  for (int round = 0; round < 2; ++round) {
    Limit limit(90);
    auto begin = std::chrono::steady_clock::now();
    std::string seen;
    CHECK_THROWS_WITH(g.run([&](hd::Group& rank) {
      NoGrad no_grad;
      auto step = capture([&](const Tensor& x) {
        Tensor y = x + 1;
        rank.all_reduce(y).wait();
        return y;
      });
      Tensor x = ones({1000}, {.device = rank.device()});
      for (int i = 0; i < 5; ++i) CHECK_RANK(step(x)[0].item<int>() == 4);
      CHECK_RANK(step.replays() == 3);
      if (rank.rank() == 1) throw std::runtime_error("no data");
      begin = std::chrono::steady_clock::now();
      step(x)[0].item();  // returns: the kernel was aborted, while its graph lives on
      try {
        rank.all_reduce(x).wait();
      } catch (const hd::CommunicationError& e) {
        seen = e.what();
        throw;
      }
    }), "no data");
    INFO("run() returned after " << seconds_since(begin) << " s");
    CHECK(seen == "run: rank 1 ended with an error: no data");
    CHECK(seconds_since(begin) < 15);
    g.run([](hd::Group& rank) {
      Tensor x = ones({1000}, {.device = rank.device()});
      rank.all_reduce(x).wait();
      CHECK_RANK(x[0].item<int>() == 2);
    });
  }
}

// One rank each: mpirun -n 2 cuda_distributed "GPUs of several processes"
TEST_CASE("GPUs of several processes") {
  HT_NEEDS_GPUS(2u);
  if (!std::getenv("OMPI_COMM_WORLD_SIZE")) HT_SKIP("not started by mpirun");
  Limit limit(240);
  hd::Group world = hd::init({.deadline = 60});
  REQUIRE(world.size() > 1);
  check_collectives(world, false);
  check_subgroups(world);
  check_capture(world);
  for (auto& m : mismatches()) {
    hd::Group g = world.split(0);
    auto texts = told(g, m, [](hd::Group& rank) {
      rank.barrier();
      return rank;
    });
    CHECK(texts[0] == mismatch_text(m, 2, world.size()));
  }
  world.barrier();
}
