// Names and promotion of dtypes.
#include "halftone/core/dtype.h"

#include <algorithm>
#include <array>

namespace halftone {

std::string_view name(DType t) {
  constexpr std::array<std::string_view, num_dtypes> names{"f16", "bf16", "f32", "f64", "i32", "i64", "u8", "bool"};
  return static_cast<size_t>(t) < names.size() ? names[static_cast<size_t>(t)] : "no dtype";
}

DType promote(DType a, DType b) {
  if (a == b) return a;
  if (is_floating(a) != is_floating(b)) return is_floating(a) ? a : b;
  if (is_floating(a)) return is_16bit_dtype(a) && is_16bit_dtype(b) ? DType::f32 : std::max(a, b);
  // Integers: bool < u8 < i32 < i64.
  auto width = [](DType t) { return t == DType::b8 ? 0 : t == DType::u8 ? 1 : t == DType::i32 ? 2 : 3; };
  return width(a) > width(b) ? a : b;
}

}  // namespace halftone
