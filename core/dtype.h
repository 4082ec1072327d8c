#pragma once
// Element types, and the two 16-bit storage types with correctly rounded conversions.
// Arithmetic never happens in 16 bits: `compute_t<half>` is float.
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include "halftone/core/error.h"
#include "halftone/core/hd.h"

namespace halftone {

enum class DType : uint8_t { f16, bf16, f32, f64, i32, i64, u8, b8 };
inline constexpr int num_dtypes = 8;

// Rounds to float so that a second rounding to a shorter type is exact: an inexact result gets an odd
// last bit (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
HT_HD inline float round_to_odd(double v) {
  float f = static_cast<float>(v);
  if (static_cast<double>(f) == v || f != f || ::isinf(v)) return f;
  uint32_t u = bit_cast<uint32_t>(f);
  // Truncate: step back towards zero when rounding moved away from it, then set the sticky bit.
  if (::fabs(static_cast<double>(f)) > ::fabs(v)) --u;
  return bit_cast<float>(u | 1u);
}

// The same for an integer on its way to double: beyond 2^53 the bits that will not fit become one sticky bit.
template <std::integral T> HT_HD inline double round_to_odd(T v) {
  if constexpr (sizeof(T) == 8) {
    if (v > (T{1} << 53) || (std::signed_integral<T> && v < -(int64_t{1} << 53)))
      v = static_cast<T>((v & ~T{4095}) | ((v & T{4095}) != 0 ? T{2048} : T{0}));
  }
  return static_cast<double>(v);
}

// IEEE 754 binary16. Rounds to nearest even; NaN stays NaN.
struct half {
  uint16_t bits = 0;
  half() = default;
  HT_HD explicit half(float f) : bits(from(f)) {}
  HT_HD explicit half(double d) : bits(from(round_to_odd(d))) {}
  template <std::integral T> HT_HD explicit half(T v) : half(round_to_odd(v)) {}
  HT_HD operator float() const { return to(bits); }

 private:
  HT_HD static uint16_t from(float f) {
    uint32_t x = bit_cast<uint32_t>(f), sign = (x >> 16) & 0x8000u;
    x &= 0x7fffffffu;
    if (x > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((x >> 13) & 0x3ffu));
    if (x >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to inf
    if (x < 0x33000001u) return static_cast<uint16_t>(sign);             // 2^-25 and below round to 0
    int e = static_cast<int>(x >> 23) - 112;
    uint32_t m = (x & 0x7fffffu) | 0x800000u;
    int shift = e > 0 ? 13 : 14 - e;
    uint32_t q = m >> shift, rest = m & ((1u << shift) - 1u), tie = 1u << (shift - 1);
    if (rest > tie || (rest == tie && (q & 1u))) ++q;
    return static_cast<uint16_t>(sign | (e > 0 ? (static_cast<uint32_t>(e - 1) << 10) + q : q));
  }
  HT_HD static float to(uint16_t h) {
    uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu;
    if (e == 31u) return bit_cast<float>(sign | 0x7f800000u | (m << 13));
    if (e == 0u) {
      float v = static_cast<float>(m) * 0x1p-24f;
      return sign ? -v : v;
    }
    return bit_cast<float>(sign | ((e + 112u) << 23) | (m << 13));
  }
};

// The upper half of an IEEE 754 binary32. Rounds to nearest even; NaN stays NaN.
struct bfloat16 {
  uint16_t bits = 0;
  bfloat16() = default;
  HT_HD explicit bfloat16(float f) : bits(from(f)) {}
  HT_HD explicit bfloat16(double d) : bits(from(round_to_odd(d))) {}
  template <std::integral T> HT_HD explicit bfloat16(T v) : bfloat16(round_to_odd(v)) {}
  HT_HD operator float() const { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

 private:
  HT_HD static uint16_t from(float f) {
    uint32_t x = bit_cast<uint32_t>(f);
    if (f != f) return static_cast<uint16_t>((x >> 16) | 0x40u);
    return static_cast<uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
  }
};

template <class T> struct Type;  // the T of a visit, as a value
template <class T> struct Type { using type = T; };

template <class T> inline constexpr bool is_16bit = std::same_as<T, half> || std::same_as<T, bfloat16>;
// What arithmetic on T runs in.
template <class T> using compute_t = std::conditional_t<is_16bit<T>, float, T>;
// What a sum of T is kept in: one type per kind, wide enough that no count of elements saturates it.
template <class T>
using accumulate_t =
    std::conditional_t<is_16bit<T> || std::same_as<T, float>, float, std::conditional_t<std::same_as<T, double>, double, int64_t>>;

template <class T> inline constexpr DType dtype_of = DType::f32;
template <> inline constexpr DType dtype_of<half> = DType::f16;
template <> inline constexpr DType dtype_of<bfloat16> = DType::bf16;
template <> inline constexpr DType dtype_of<double> = DType::f64;
template <> inline constexpr DType dtype_of<int32_t> = DType::i32;
template <> inline constexpr DType dtype_of<int64_t> = DType::i64;
template <> inline constexpr DType dtype_of<long long> = DType::i64;
template <> inline constexpr DType dtype_of<uint8_t> = DType::u8;
template <> inline constexpr DType dtype_of<bool> = DType::b8;

constexpr bool is_floating(DType t) { return t <= DType::f64; }
constexpr bool is_16bit_dtype(DType t) { return t <= DType::bf16; }
constexpr size_t size_of(DType t) {
  constexpr uint8_t bytes[num_dtypes] = {2, 2, 4, 8, 4, 8, 1, 1};
  return bytes[static_cast<int>(t)];
}
HT_API std::string_view name(DType t);
inline std::string str(DType t) { return std::string(name(t)); }

// The dtype that holds both: the wider of one kind, the floating one of two kinds, f32 for f16 with bf16.
HT_API DType promote(DType a, DType b);

// A set of dtypes.
using DTypes = uint8_t;
constexpr DTypes only(DType t) { return static_cast<DTypes>(1u << static_cast<int>(t)); }
inline constexpr DTypes floating_types = 0x0f, integer_types = 0x70, number_types = 0x7f, all_types = 0xff;
constexpr bool contains(DTypes s, DType t) { return (s & only(t)) != 0; }

// Calls f(Type<T>{}) with the C++ type of `t`, which must be in `set`; types outside `set` are not instantiated.
template <DTypes set = all_types, class F> decltype(auto) visit(DType t, F&& f) {
#define HT_CASE(d, T) \
  case DType::d:      \
    if constexpr (contains(set, DType::d)) return f(Type<T>{}); else break;
  switch (t) {
    HT_CASE(f16, half) HT_CASE(bf16, bfloat16) HT_CASE(f32, float) HT_CASE(f64, double)
    HT_CASE(i32, int32_t) HT_CASE(i64, int64_t) HT_CASE(u8, uint8_t) HT_CASE(b8, bool)
  }
#undef HT_CASE
  throw Error(text::cat("dtype ", name(t), " is not supported here"));
}

// std::numeric_limits as constants: device code may read them, but not call its functions.
template <class T> inline constexpr T smallest = std::numeric_limits<T>::lowest();
template <class T> inline constexpr T largest = std::numeric_limits<T>::max();

// Value conversions, the same on every device: floating to integer truncates, saturates, and takes NaN to 0;
// anything to bool asks "is it not zero".
template <class To, class From> HT_HD To convert(From v) {
  if constexpr (std::same_as<To, From>) return v;
  else if constexpr (is_16bit<From>) return convert<To>(static_cast<float>(v));
  else if constexpr (std::same_as<To, bool>) return v != From(0);
  else if constexpr (is_16bit<To>) return To(v);
  else if constexpr (std::floating_point<From> && std::integral<To>) {
    if (v != v) return To(0);
    if (v <= static_cast<From>(smallest<To>)) return smallest<To>;
    if (v >= static_cast<From>(largest<To>)) return largest<To>;
    return static_cast<To>(v);
  } else return static_cast<To>(v);
}

}  // namespace halftone
