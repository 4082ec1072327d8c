#pragma once
// What the options of these programs may be.
#include <cmath>
#include <cstdlib>
#include <string>

namespace benchmarks {

// What is wrong with it, for CLI11's check(): the error of its own PositiveNumber names a range of 300 digits.
inline std::string positive_number(const std::string& text) {
  char* end = nullptr;
  const double v = std::strtod(text.c_str(), &end);
  return end != text.c_str() && *end == '\0' && v > 0 && std::isfinite(v) ? "" : "expected a number above 0, got " + text;
}

}  // namespace benchmarks
