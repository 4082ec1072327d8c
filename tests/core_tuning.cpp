// tune(): what it keeps, and what it says of bad files. What it does to products and convolutions: tests/cuda_layouts.cpp.
#include <fstream>
#include <sstream>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

using namespace halftone;
using Catch::Matchers::Contains;

namespace {
std::string content(const std::string& file) {
  std::ostringstream all;
  all << std::ifstream(file).rdbuf();
  return all.str();
}
}  // namespace

TEST_CASE("tuning is on inside tune, and off again after an exception") {
  CHECK(!tuning());
  tune([] {
    CHECK(tuning());
    tune([] { CHECK(tuning()); });
    CHECK(tuning());
  });
  CHECK(!tuning());
  CHECK_THROWS_WITH(tune([] { throw Error("the step's own"); }), "the step's own");
  CHECK(!tuning());
}

TEST_CASE("choices go to a file and come from one, and what is known stays") {
  Temporary folder;
  std::string file = folder / "plans.txt";
  tune([] { set_tuned_choice("a library: 1 2", "fast one"); }, file);
  CHECK(content(file) == "halftone tuning 1\na library: 1 2 -> fast one\n");
  std::ofstream(file) << "halftone tuning 1\na library: 1 2 -> another\na library: 3 -> third\n";
  tune([] {
    CHECK(tuned_choice("a library: 1 2") == "fast one");
    CHECK(tuned_choice("a library: 3") == "third");
    CHECK(!tuned_choice("a library: 4"));
  }, file);
  CHECK_THAT(content(file), Contains("a library: 3 -> third\n") && Contains("a library: 1 2 -> fast one\n"));
}

TEST_CASE("a bad file of choices stops before the work, a bad place after it") {
  Temporary folder;
  std::string file = folder / "plans.txt";
  bool ran = false;
  auto work = [&] { ran = true; };
  std::ofstream(file) << "something else\n";
  CHECK_THROWS_WITH(tune(work, file), Contains(file + " is not a file of tuned choices"));
  std::ofstream(file) << "halftone tuning 1\na line\n";
  CHECK_THROWS_WITH(tune(work, file), Contains(file + ", line 2 is damaged"));
  CHECK(!ran);
  CHECK(content(file) == "halftone tuning 1\na line\n");
  CHECK_THROWS_WITH(tune(work, folder / "no/such/folder"), Contains("cannot write"));
  CHECK(ran);
  ForbidSync none;
  CHECK_THROWS_WITH(tune(work), Contains("tune"));
}
