// Processes that die, leave, throw or never come: what the others see, and when. Each test starts its own mpirun of this
// program, whose ranks run the hidden case of the same name.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "halftone/core/version.h"
#include "halftone/tests/collectives.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;
using namespace halftone::tests;
namespace hd = halftone::distributed;

namespace {

constexpr double deadline = 4;

struct Outcome { int status; std::string output; double seconds; };

// Ranks of a job that outlives one of them, unless `plain`.
Outcome mpirun(int processes, const std::string& name, bool plain = false) {
  std::string self(4096, '\0');
  self.resize(static_cast<size_t>(readlink("/proc/self/exe", self.data(), self.size())));
  std::string command = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 HALFTONE_NUM_THREADS=1 timeout -k 1 100 mpirun --oversubscribe " +
                        std::string(plain ? "" : "--enable-recovery --mca orte_abort_on_non_zero_status 0 ") + "-n " +
                        std::to_string(processes) + " " + self + " '" + name + "' 2>&1";
  auto begin = std::chrono::steady_clock::now();
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe);
  Outcome o{};
  char line[4096];
  while (std::fgets(line, sizeof line, pipe)) o.output += line;
  o.status = WEXITSTATUS(pclose(pipe));
  o.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return o;
}

bool no_mpirun() {
  static const bool missing = build_info().find("MPI ") == std::string::npos || std::system("command -v mpirun >/dev/null") != 0;
  return missing;
}

int times(const std::string& text, const std::string& what) {
  int n = 0;
  for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += what.size()) ++n;
  return n;
}

// One rank's program: f, and what it ended with.
template <class F> void rank_program(F f) {
  hd::Group g = hd::init({.device = DeviceType::cpu, .deadline = deadline});
  auto begin = std::chrono::steady_clock::now();
  try {
    f(g, begin);
    std::printf("rank %d: through\n", g.rank());
  } catch (const hd::CommunicationError& e) {
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("rank %d: %s: %s\n", g.rank(), seconds < deadline + 2 ? "in time" : "too late", e.what());
    std::fflush(stdout);
    std::exit(hd::communication_exit_code);
  }
}

}  // namespace

// ---- the ranks' side

TEST_CASE("killed", "[.]") {
  rank_program([](hd::Group& g, auto& begin) {
    int calls = 20 + std::atoi(std::getenv("HALFTONE_TEST_ROUND"));
    for (int i = 0;; ++i) {
      Tensor x = ones({200000});
      auto pending = g.all_reduce(x);
      if (g.rank() == 1 && i == calls) raise(SIGKILL);
      begin = std::chrono::steady_clock::now();
      pending.wait();
    }
  });
}
TEST_CASE("throws", "[.]") {
  rank_program([](hd::Group& g, auto&) {
    g.barrier();
    try {
      g.run([](hd::Group& rank) {
        if (rank.rank() == 1) throw std::runtime_error("no data");
        rank.barrier();
      });
    } catch (const hd::CommunicationError&) {
      throw;
    } catch (const std::exception& e) {
      std::printf("rank %d: own error: %s\n", g.rank(), e.what());
      std::fflush(stdout);
      std::exit(3);
    }
  });
}
TEST_CASE("leaves", "[.]") {
  rank_program([](hd::Group& g, auto&) {
    g.barrier();
    if (g.rank() == 1) std::exit(0);
    g.barrier();
  });
}
TEST_CASE("never joins", "[.]") {
  rank_program([](hd::Group& g, auto& begin) {
    g.barrier();
    if (g.rank() == 1) std::this_thread::sleep_for(std::chrono::duration<double>(deadline + 3));
    begin = std::chrono::steady_clock::now();
    Tensor x = ones({3});
    g.all_reduce(x).wait();
  });
}

// ---- the launcher's side

TEST_CASE("a process that is killed during a collective ends the others within the deadline") {
  if (no_mpirun()) HT_SKIP("needs MPI and its mpirun");
  const char* rounds = std::getenv("HALFTONE_TEST_ROUNDS");
  for (int round = 0; round < (rounds ? std::atoi(rounds) : 20); ++round) {
    setenv("HALFTONE_TEST_ROUND", std::to_string(round * 3).c_str(), 1);
    Outcome o = mpirun(3, "killed");
    INFO(o.output);
    CHECK(times(o.output, ": in time: all_reduce: call ") == 2);
    CHECK(times(o.output, "rank 1 has not been heard of for ") == 2);
    halftone::tests::count("rank_deaths");
  }
}

TEST_CASE("a launcher that ends the job first gives the message") {
  if (no_mpirun()) HT_SKIP("needs MPI and its mpirun");
  setenv("HALFTONE_TEST_ROUND", "0", 1);
  Outcome o = mpirun(3, "killed", true);
  INFO(o.output);
  CHECK(o.status != 0);
  CHECK(times(o.output, "signal 9") >= 1);
}

TEST_CASE("a process whose rank throws releases the others at once, and ends with its own error") {
  if (no_mpirun()) HT_SKIP("needs MPI and its mpirun");
  Outcome o = mpirun(3, "throws");
  INFO(o.output);
  CHECK(times(o.output, "rank 1: own error: no data") == 1);
  CHECK(times(o.output, ": in time: run: rank 1 ended with an error: no data") == 2);
}

TEST_CASE("a process that ends the program early is named") {
  if (no_mpirun()) HT_SKIP("needs MPI and its mpirun");
  Outcome o = mpirun(3, "leaves");
  INFO(o.output);
  CHECK(times(o.output, ": in time: barrier: call 1 of this group of 3 cannot end: rank 1 has ended the program") == 2);
}

TEST_CASE("a process that never joins is named, and sees the error, too") {
  if (no_mpirun()) HT_SKIP("needs MPI and its mpirun");
  Outcome o = mpirun(3, "never joins", true);
  INFO(o.output);
  CHECK(times(o.output, ": in time: all_reduce: call 1 of this group of 3 did not end within 4 s: rank 1 is alive and has not made it") >= 1);
  CHECK(o.status == hd::communication_exit_code);
}
