// The version is a version, and build_info says it.
#include "halftone/core/version.h"

#include <regex>

#include "halftone/tests/catch.h"

TEST_CASE("the version has three numbers") {
  CHECK(std::regex_match(halftone::version(), std::regex(R"(\d+\.\d+\.\d+)")));
}

TEST_CASE("build_info names the version and the compiler") {
  const std::string info = halftone::build_info();
  INFO(info);
  CHECK(info.find(halftone::version()) != std::string::npos);
  CHECK(info.find("operators for") != std::string::npos);
}
