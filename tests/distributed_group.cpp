// Groups of threads: every collective, and what a rank gets to see when another one errs.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "halftone/core/parallel.h"
#include "halftone/halftone.h"
#include "halftone/tests/collectives.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/threads.h"

using namespace halftone;
using namespace halftone::tests;
namespace hd = halftone::distributed;

TEST_CASE("one rank is a group") {
  for (hd::Group g : {hd::Group(), hd::threads(1), hd::init({.device = DeviceType::cpu})}) {
    CHECK(g.rank() == 0);
    CHECK(g.size() == 1);
    CHECK(g.local_size() == 1);
    check_collectives(g);
    hd::Group part = g.split(3, 1);
    CHECK(part.size() == 1);
    check_collectives(part);
    g.run([](hd::Group& rank) { rank.barrier(); });
  }
}

TEST_CASE("collectives of threads, every dtype and shape") {
  for (int n : {2, 3, 4}) hd::threads(n).run([](hd::Group& rank) { check_collectives(rank); });
}

TEST_CASE("large collectives use the pool, and its size changes no bit") {
  std::vector<std::vector<float>> seen;
  for (int threads : {1, 3}) {
    const Threads pool(threads);
    hd::threads(3).run([&](hd::Group& rank) {
      Tensor x = values_of(rank.rank(), {300001}, DType::f32);
      rank.all_reduce(x).wait();
      if (rank.rank() == 2) seen.push_back(x.to_vector<float>());
    });
  }
  CHECK(seen[0] == seen[1]);
}

TEST_CASE("sub-groups of threads") {
  hd::threads(5).run([](hd::Group& rank) { check_subgroups(rank); });
}

TEST_CASE("groups of a thousand calls in flight") {
  hd::threads(4).run([](hd::Group& rank) {
    std::vector<Tensor> x;
    std::vector<hd::Pending> pending;
    for (int i = 0; i < 1000; ++i) {
      x.push_back(full({3}, rank.rank() + i));
      pending.push_back(rank.all_reduce(x.back()));
    }
    for (int i = 999; i >= 0; --i) {
      pending[static_cast<size_t>(i)].wait();
      CHECK_RANK(pending[static_cast<size_t>(i)].done());
      CHECK_RANK(x[static_cast<size_t>(i)].to_vector<int>() == std::vector<int>(3, 4 * i + 6));
    }
  });
}

TEST_CASE("a group runs with the caller's state, and draws as a process would") {
  manual_seed(5);
  std::vector<float> alone = randn({4}).to_vector<float>(), after = randn({4}).to_vector<float>();
  manual_seed(5);
  amp::Autocast autocast({.device = DeviceType::cpu});
  NoGrad no_grad;
  hd::threads(3).run([&](hd::Group& rank) {
    CHECK_RANK(matmul(ones({2, 2}), ones({2, 2})).dtype() == DType::bf16);
    CHECK_RANK(!thread_state().on(Layer::autograd));
    CHECK_RANK(randn({4}).to_vector<float>() == alone);
    CHECK_RANK(rank.device() == Device::cpu());
  });
  CHECK(randn({4}).to_vector<float>() == after);
}

TEST_CASE("hooks see what a rank issues") {
  hd::threads(2).run([](hd::Group& rank) {
    std::vector<hd::Issued> log;
    auto hook = rank.on_issue([&](const hd::Issued& i) { log.push_back(i); });
    rank.all_reduce(ones({3})).wait();
    rank.barrier();
    hook.remove();
    rank.barrier();
    CHECK_RANK(log.size() == 2);
    CHECK_RANK(log[0].operation == hd::Operation::all_reduce);
    CHECK_RANK((log[0].sequence == 0 && log[0].bytes == 12));
    CHECK_RANK((log[1].operation == hd::Operation::barrier && log[1].sequence == 1));
  });
}

TEST_CASE("ranks that make different calls all learn what each one called") {
  for (auto& m : mismatches()) {
    hd::Group g = hd::threads(2);
    for (auto& text : told(g, m)) CHECK(text == mismatch_text(m, 0));
    CHECK_THROWS_AS(g.run([](hd::Group& rank) { rank.barrier(); }), hd::MismatchError);  // from then on
    count("error_texts");
  }
}

TEST_CASE("a group goes on after a failed run") {
  hd::Group g = hd::threads(3);
  for (int round = 0; round < 20; ++round) {
    CHECK_THROWS_WITH(g.run([&](hd::Group& rank) {
      if (rank.rank() == round % 3) throw std::runtime_error("no data");
      for (;;) rank.all_reduce(ones({10})).wait();
    }), "no data");
    g.run([](hd::Group& rank) {  // its calls have new numbers
      int64_t sequence = -1;
      auto hook = rank.on_issue([&](const hd::Issued& i) { sequence = i.sequence; });
      rank.barrier();
      CHECK_RANK(sequence == 0);
    });
  }
}

TEST_CASE("a rank that throws releases the others") {
  std::atomic<int> released = 0;
  CHECK_THROWS_WITH(hd::threads(3).run([&](hd::Group& rank) {
    if (rank.rank() == 1) throw std::runtime_error("no data");
    try {
      rank.barrier();
    } catch (const hd::CommunicationError& e) {
      CHECK_RANK(std::string(e.what()) == "run: rank 1 ended with an error: no data");
      CHECK_RANK(e.ranks == std::vector<int>{1});
      ++released;
      throw;
    }
  }), "no data");
  CHECK(released == 2);
}

TEST_CASE("a rank that never joins ends the others at the deadline") {
  auto begin = std::chrono::steady_clock::now();
  std::atomic<int> ended = 0;
  CHECK_THROWS_AS(hd::threads(3, 0.3).run([&](hd::Group& rank) {
    rank.barrier();
    if (rank.rank() == 2) return;
    try {
      rank.all_reduce(ones({2})).wait();
    } catch (const hd::CommunicationError& e) {
      CHECK_RANK(std::string(e.what()) == "all_reduce: call 1 of this group of 3 did not end within 0.3 s: rank 2 has not made it");
      CHECK_RANK((e.operation == "all_reduce" && e.sequence == 1));
      CHECK_RANK(e.ranks == std::vector<int>{2});
      ++ended;
      throw;
    }
  }), hd::CommunicationError);
  CHECK(ended == 2);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
}

TEST_CASE("bad arguments are refused before anybody is told") {
  hd::Group g;
  Tensor x = ones({2, 3});
  TEXT(g.all_reduce(Tensor()), "all_reduce: x is undefined");
  TEXT(g.broadcast(x, 1), "broadcast: expected a root from 0 to 0, got 1");
  TEXT(g.all_reduce(x.slice(1, 0, 2)),
       "all_reduce: expected x without gaps, got [2, 2] (f32) with strides [3, 1]; pass x.contiguous()");
  TEXT(g.all_reduce(x.expand({4, 2, 3})),
       "all_reduce: expected x without gaps, got [4, 2, 3] (f32) with strides [0, 3, 1]; pass x.contiguous()");
  TEXT(g.all_gather(x, ones({2, 2, 3})), "all_gather: expected out [size, ...x] = [1, 2, 3] (f32), got [2, 2, 3] (f32)");
  TEXT(g.all_gather(x, ones({1, 2, 3}).to(DType::f16)), "all_gather: expected out [size, ...x] = [1, 2, 3] (f32), got [1, 2, 3] (f16)");
  TEXT(g.all_gather(x.t(), ones({1, 3, 2})), "all_gather: expected x to be contiguous, got [3, 2] (f32) with strides [1, 3]; pass a contiguous one");
  TEXT(g.reduce_scatter(x, ones({3})), "reduce_scatter: expected x [size, ...out] = [1, 3] (f32), got [2, 3] (f32)");
  TEXT(g.all_reduce(x.to(DType::i64), hd::Reduce::mean), "all_reduce: no mean of i64; take the sum, or a floating dtype");
  Tensor w = ones({2}).requires_grad_();
  CHECK_NOTHROW(g.all_reduce(w).wait());
  TEXT(g.all_reduce(w * w), "all_reduce: x has history, and collectives are not recorded; pass x.detach()");
  TEXT(hd::threads(2).barrier(),
       "barrier: this group stands for 2 ranks of this process; call run(), and make collective calls with the rank it gives");
  TEXT(hd::threads(0), "threads: expected a number of ranks from 1 to 4096, got 0");
  TEXT(hd::threads(std::vector<Device>{}), "threads: expected at least one device");
  TEXT(hd::threads(2, 0), "deadline: expected seconds above 0, got 0");
  TEXT(hd::init({.devices_per_process = 0}), "init: expected devices_per_process from 1 to 4096, got 0");
}
