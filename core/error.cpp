// Values as text in messages.
#include "halftone/core/error.h"

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>

namespace halftone::text {

std::string str(double v) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.6g", v);
  return buffer;
}

std::string demangle(const char* type_name) {
  int status = 0;
  char* readable = abi::__cxa_demangle(type_name, nullptr, nullptr, &status);
  std::string s = status == 0 ? readable : type_name;
  std::free(readable);
  return s;
}

}  // namespace halftone::text
