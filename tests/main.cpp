// The main program of every test.
#define CATCH_CONFIG_RUNNER
#include <cstdlib>
#include <filesystem>
#include <fstream>

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
  // For scripts/scoreboard.
  if (const char* folder = std::getenv("HALFTONE_COUNTS")) {
    std::filesystem::create_directories(folder);
    std::ofstream counts(std::filesystem::path(folder) / std::filesystem::path(argv[0]).filename());
    for (const auto& [key, n] : halftone::tests::scoreboard()) counts << key << '=' << n << '\n';
  }
  return failed == 0 && cases > 0 && skipped_cases == cases ? 77 : failed;
}
