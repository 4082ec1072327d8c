// Ctrl-C as a question: the first signal asks, the second is the program's own again.
#include <signal.h>

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
