// What runs on threads: the pool, the state that calls depend on, small vectors that carry their arguments.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <set>
#include <thread>

#include "halftone/core/parallel.h"
#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/threads.h"

using namespace halftone;
using halftone::tests::Threads;

TEST_CASE("parallel_for covers a range once, cut by size only") {
  std::set<std::pair<int64_t, int64_t>> first;
  for (int n : {1, 2, 5}) {
    Threads threads(n);
    CHECK(num_threads() == n);
    std::vector<std::atomic<int>> seen(10007);
    std::mutex lock;
    std::set<std::pair<int64_t, int64_t>> ranges;
    parallel_for(10007, 100, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
      std::lock_guard guard(lock);
      ranges.insert({begin, end});
    });
    CHECK(std::all_of(seen.begin(), seen.end(), [](auto& v) { return v == 1; }));
    CHECK(ranges.size() == 101);
    if (n == 1) first = ranges;
    CHECK(ranges == first);
  }
  int calls = 0;
  parallel_for(0, 10, [&](int64_t, int64_t) { ++calls; });
  parallel_for(-1, 10, [&](int64_t, int64_t) { ++calls; });
  CHECK(calls == 0);
  CHECK_THROWS_WITH(set_num_threads(0), "set_num_threads: expected a number from 1 to 4096, got 0");
  CHECK_THROWS_WITH(set_num_threads(5000), "set_num_threads: expected a number from 1 to 4096, got 5000");
}

constexpr int one_thread = 42;  // what a process ends with that finds itself with one
TEST_CASE("one thread on one processor", "[.]") { _exit(num_threads() == 1 ? one_thread : 1); }

TEST_CASE("there is a thread for each processor that a process may run on") {
  pid_t child = fork();
  if (child == 0) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<size_t>(sched_getcpu()), &one);
    unsetenv("HALFTONE_NUM_THREADS");
    if (sched_setaffinity(0, sizeof one, &one) != 0) _exit(2);
    execl("/proc/self/exe", "core_threads", "one thread on one processor", nullptr);
    _exit(3);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == one_thread);
}

TEST_CASE("a child process starts threads of its own") {
  Threads threads(3);
  manual_seed(5);
  Tensor x = randn({300000});
  float expected = x.sum().item<float>();
  pid_t child = fork();
  if (child == 0) _exit(num_threads() == 3 && x.sum().item<float>() == expected ? 0 : 1);
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(x.sum().item<float>() == expected);
}

TEST_CASE("parallel_for hands exceptions to its caller and stays usable") {
  for (int n : {1, 2, 5}) {
    Threads threads(n);
    for (int round = 0; round < 20; ++round) {
      CHECK_THROWS_WITH(parallel_for(1000, 1, [](int64_t i, int64_t) { if (i == 500) throw Error("at 500"); }), "at 500");
      std::atomic<int64_t> sum = 0;
      parallel_for(1000, 7, [&](int64_t b, int64_t e) { sum += e - b; });
      CHECK(sum == 1000);
    }
  }
}

TEST_CASE("parallel_for nests, on the calling thread") {
  for (int n : {1, 2, 5}) {
    Threads threads(n);
    std::atomic<int64_t> sum = 0, elsewhere = 0;
    parallel_for(20, 1, [&](int64_t, int64_t) {
      auto me = std::this_thread::get_id();
      parallel_for(50, 1, [&](int64_t, int64_t) {
        ++sum;
        elsewhere += std::this_thread::get_id() != me;
      });
    });
    CHECK(sum == 1000);
    CHECK(elsewhere == 0);
  }
}

TEST_CASE("several threads may use the pool, and its size may change meanwhile") {
  Threads threads(3);
  std::atomic<int64_t> sum = 0;
  std::vector<std::thread> users;
  for (int t = 0; t < 4; ++t)
    users.emplace_back([&] { for (int r = 0; r < 100; ++r) parallel_for(100, 10, [&](int64_t b, int64_t e) { sum += e - b; }); });
  for (int r = 0; r < 10; ++r) set_num_threads(1 + r % 4);
  for (auto& u : users) u.join();
  CHECK(sum == 4 * 100 * 100);
}

TEST_CASE("results have the same bits for any number of threads") {
  manual_seed(5);
  Tensor x = randn({400000}), m = randn({257, 300}), w = randn({130, 300});
  std::vector<std::vector<float>> first;
  for (int n : {1, 2, 5}) {
    Threads threads(n);
    manual_seed(6);
    std::vector<std::vector<float>> y;
    for (auto& t : {sum(x), mean(m, {0}), var(m, {1}), matmul(m, w.t()), linear_relu(m, w), exp(x), softmax(m, 0), randn({100000}), rand({100000})})
      y.push_back(t.to_vector<float>());
    if (n == 1) first = y;
    CHECK((y == first));
  }
}

TEST_CASE("a thread's state is taken along and given back") {
  ThreadState here;
  auto own = std::make_shared<Generator>(uint64_t{42});
  {
    NoGrad off;
    amp::Autocast region({.dtype = DType::f16});
    ForbidSync forbidden;
    thread_state().generator = own;
    here = capture_thread_state();
    thread_state().generator = nullptr;
  }
  CHECK(recording());
  std::thread([&] {
    CHECK(recording());
    {
      InstallThreadState installed(here);
      CHECK_FALSE(recording());
      CHECK(amp::is_autocast_enabled());
      CHECK(amp::autocast_dtype() == DType::f16);
      CHECK(generator().seed() == 42);
      CHECK_THROWS_WITH(check_may_sync("test"), "test: waits for the device, and ForbidSync is on");
    }
    CHECK(recording());
    CHECK_FALSE(amp::is_autocast_enabled());
    CHECK_NOTHROW(check_may_sync("test"));
  }).join();
  CHECK_FALSE(amp::is_autocast_enabled());
}

TEST_CASE("eight threads may draw from the process's generator, seed it and compute segments again") {
  constexpr int n = 8, draws = 200;
  auto together = [](auto f) {
    std::vector<std::thread> all;
    for (int t = 0; t < n; ++t) all.emplace_back([&f, t] { f(t); });
    for (auto& t : all) t.join();
  };
  // Each draw has numbers of its own, and all of them are the stream's.
  manual_seed(7);
  std::vector<float> expected = rand({n * draws * 4}).to_vector<float>();
  manual_seed(7);
  std::vector<std::vector<float>> drawn(n);
  together([&](int t) {
    for (int i = 0; i < draws; ++i) for (float v : rand({4}).to_vector<float>()) drawn[size_t(t)].push_back(v);
  });
  std::vector<float> all;
  for (auto& d : drawn) all.insert(all.end(), d.begin(), d.end());
  std::sort(all.begin(), all.end());
  std::sort(expected.begin(), expected.end());
  CHECK((all == expected));
  // A segment that is computed again takes its first numbers, while others go on: none comes twice.
  manual_seed(7);
  std::vector<std::set<int64_t>> places(n);
  std::atomic<int> wrong = 0;
  together([&](int t) {
    for (int i = 0; i < draws; ++i) {
      if (t % 2 == 0) {
        int64_t place = draw_key(Device::cpu(), 4).data<int64_t>()[1];
        wrong += !places[size_t(t)].insert(place).second;
        continue;
      }
      Tensor x = ones({16}, {.requires_grad = true});
      checkpoint([](const Tensor& v) { return dropout(v, 0.5); }, x).sum().backward();
    }
  });
  std::set<int64_t> once;
  for (auto& p : places) once.insert(p.begin(), p.end());
  CHECK(wrong == 0);
  CHECK(once.size() == n / 2 * draws);
  // Seeding meanwhile.
  together([&](int t) {
    for (int i = 0; i < draws; ++i) {
      if (t == 0) manual_seed(uint64_t(i));
      for (float v : rand({4}).to_vector<float>()) wrong += !(v >= 0 && v < 1);
      randint(0, 5, {3});
      randn({5});
      bernoulli(full({3}, 0.5));
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("a new thread begins with nothing on") {
  NoGrad off;
  amp::Autocast region;
  std::thread([] {
    CHECK(recording());
    CHECK_FALSE(amp::is_autocast_enabled());
  }).join();
}

TEST_CASE("small vectors: inline, on the heap, moved and copied") {
  using Vector = SmallVector<std::shared_ptr<int>, 2>;
  auto value = std::make_shared<int>(7);
  {
    Vector a;
    CHECK(a.empty());
    for (int i = 0; i < 5; ++i) {
      a.push_back(value);
      CHECK(value.use_count() == i + 2);
    }
    Vector b = a, c = std::move(a);
    CHECK((b.size() == 5 && c.size() == 5 && a.size() == 0));
    CHECK(value.use_count() == 11);
    b.resize(1);
    b = b;
    CHECK((b.size() == 1 && *b[0] == 7));
    c = std::move(b);
    CHECK((c.size() == 1 && value.use_count() == 2));
    c.resize(4);
    CHECK_FALSE(c[3]);
    c.clear();
    CHECK((c.empty() && value.use_count() == 1));
    Vector inline_one{value}, moved = std::move(inline_one);
    CHECK((moved.size() == 1 && inline_one.empty()));
    a = moved;  // usable after having been moved from
    CHECK(a.back() == value);
    std::vector<std::shared_ptr<int>> more(3, value);
    a.append(more.data(), more.data() + 3);
    CHECK(a.size() == 4);
  }
  CHECK(value.use_count() == 1);
  SmallVector<int, 2> v{1, 2, 3};
  v.push_back(v[0]);  // an element of its own while it grows
  CHECK(std::accumulate(v.begin(), v.end(), 0) == 7);
  CHECK(std::span<const int>(v).size() == 4);
}

TEST_CASE("attributes are values of their own") {
  struct P { int64_t a[18]; };
  P p{};
  p.a[17] = 5;
  Attrs x = Attrs::of(p), y = x, none;
  CHECK(y.as<P>().a[17] == 5);
  CHECK(none.as<P>().a[17] == 0);
  y = none;
  CHECK(y.as<P>().a[17] == 0);
}
