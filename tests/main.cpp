// The main program of every test.
#define CATCH_CONFIG_RUNNER
#include <cstdio>

#include "halftone/tests/catch.h"
#include "halftone/tests/scoreboard.h"

namespace {

int cases = 0;

struct CountCases : Catch::TestEventListenerBase {
  using TestEventListenerBase::TestEventListenerBase;
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    TestEventListenerBase::testCaseEnded(stats);
    ++cases;
  }
};
CATCH_REGISTER_LISTENER(CountCases)

}  // namespace

int main(int argc, char** argv) {
  const int failed = Catch::Session().run(argc, argv);
  for (const auto& [key, n] : halftone::tests::scoreboard())
    std::printf("scoreboard %s=%lld\n", key.c_str(), static_cast<long long>(n));
  return failed == 0 && cases > 0 && skipped_cases == cases ? 77 : failed;
}
