#pragma once
// Errors. A message names the operator, the user's argument, what was expected and what came, then the cure:
//   conv2d: expected weight [out, in, kh, kw] with in = 3, got [8, 4, 3, 3] (f32)
#include <concepts>
#include <stdexcept>
#include <string>
#include <string_view>

#include "halftone/core/api.h"

namespace halftone {

struct HT_API Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace text {  // how a value reads in a message; other types add an overload of `str`
HT_API std::string str(double v);
HT_API std::string demangle(const char* type_name);  // of a std::type_info
inline std::string str(const char* v) { return v; }
inline std::string str(std::string_view v) { return std::string(v); }
template <std::integral T> std::string str(T v) {
  if constexpr (std::same_as<T, bool>) return v ? "true" : "false";
  else if constexpr (std::same_as<T, char>) return {v};
  else return std::to_string(v);
}

// The concatenation of its arguments as text.
template <class... A> std::string cat(const A&... a) {
  std::string s;
  ((s += str(a)), ...);  // of our own types, by argument-dependent lookup
  return s;
}
}  // namespace text

// Throws Error with the text of the arguments when `condition` is false; they are not evaluated otherwise.
#define HT_CHECK(condition, ...)                                          \
  do {                                                                    \
    if (!(condition)) throw ::halftone::Error(::halftone::text::cat(__VA_ARGS__)); \
  } while (0)

}  // namespace halftone
