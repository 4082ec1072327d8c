// Ctrl-C as a question: the first signal asks, the second is the program's own again.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "halftone/halftone.h"
#include "halftone/io/interrupt.h"
#include "halftone/tests/catch.h"

using namespace halftone;
using Catch::Contains;

namespace {
volatile sig_atomic_t seen = 0;
}

TEST_CASE("the first signal asks, the second acts as before") {
  for (int signal : {SIGINT, SIGTERM}) {
    auto before = ::signal(signal, [](int) { seen = seen + 1; });
    seen = 0;
    {
      Interrupt interrupt;
      CHECK(!interrupt.asked());
      CHECK_THROWS_WITH(Interrupt(), Contains("Interrupt: there is one already"));
      raise(signal);
      CHECK(interrupt.asked());
      CHECK(seen == 0);
      ::raise(signal);
      CHECK(seen == 1);
      CHECK(interrupt.asked());
    }
    Interrupt again;
    CHECK(!again.asked());
    ::signal(signal, before);
  }
}

TEST_CASE("signals are the program's own again when it is gone") {
  auto before = ::signal(SIGINT, [](int) { seen = seen + 1; });
  seen = 0;
  { Interrupt interrupt; }
  raise(SIGINT);
  CHECK(seen == 1);
  ::signal(SIGINT, before);
}

TEST_CASE("a signal amid products changes no bit and no memory") {
  auto net = nn::Sequential{nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 128), nn::ReLU(), nn::Linear(128, 10)};
  Tensor x = randn({64, 784}), target = randint(0, 10, {64});
  auto gradients = [&] {
    amp::Autocast region({.dtype = DType::bf16});
    return grad({cross_entropy(net(x), target)}, net.parameters());
  };
  const auto expected = gradients();
  for (int round = 0; round < 500; ++round) {
    Interrupt interrupt;
    std::thread sender([round] {
      std::this_thread::sleep_for(std::chrono::microseconds(100 + 37 * round % 2000));
      kill(getpid(), SIGINT);
    });
    bool same = true;
    for (int more = 2; more > 0; more -= interrupt.asked()) {
      auto g = gradients();
      for (size_t i = 0; i < g.size(); ++i) same &= all(eq(g[i], expected[i])).item() != 0;
    }
    sender.join();
    REQUIRE(same);
  }
}
