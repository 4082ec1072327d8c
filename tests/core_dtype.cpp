// Dtypes: conversions checked for every 16-bit pattern and around every rounding boundary, saturation, promotion.
#include "halftone/core/dtype.h"

#include <cmath>
#include <limits>

#include "halftone/core/scalar.h"
#include "halftone/tests/catch.h"

using namespace halftone;

namespace {

// The nearest value of a binary format with p bits of precision and least exponent `low`, ties to even; exact arithmetic of
// long double throughout. Overflow is decided by the format's largest number.
double nearest(long double v, int p, int low, double largest) {
  if (std::isnan(v) || std::isinf(v) || v == 0) return static_cast<double>(v);
  int e = std::max(std::ilogb(v) - (p - 1), low);
  long double scaled = std::ldexp(v, -e), floor = std::floor(scaled), rest = scaled - floor;
  bool odd = std::fmod(floor, 2.0L) != 0;
  long double r = rest > .5L || (rest == .5L && odd) ? floor + 1 : floor;
  auto result = static_cast<double>(std::ldexp(r, e));
  return static_cast<double>(std::copysign(std::abs(result) > largest ? std::numeric_limits<double>::infinity() : result, v));
}
double nearest_half(long double v) { return nearest(v, 11, -24, 65504); }
double nearest_bfloat16(long double v) { return nearest(v, 8, -133, 0x1.fep127); }

bool same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b); }

template <class T> T from_bits(uint32_t bits) {
  T v;
  v.bits = static_cast<uint16_t>(bits);
  return v;
}

// Doubles around each boundary between neighbours of T: the midpoint, and a hair to either side of it and of the neighbours.
template <class T, class F> void around_boundaries(F f) {
  for (uint32_t b = 0; b < 0x8000; ++b) {
    T v = from_bits<T>(b), next = from_bits<T>(b + 1);
    double x = static_cast<float>(v), y = static_cast<float>(next);
    if (!std::isfinite(x)) continue;
    if (!std::isfinite(y)) y = 2 * x - static_cast<float>(from_bits<T>(b - 1));
    double middle = (x + y) / 2;
    for (double at : {x, middle, std::nextafter(middle, 0.0), std::nextafter(middle, 1e300), middle * (1 + 0x1p-40), middle * (1 - 0x1p-40),
                      std::nextafter(x, 0.0), std::nextafter(x, 1e300)}) {
      f(at);
      f(-at);
    }
  }
}

}  // namespace

TEST_CASE("every half survives the way through wider types and back") {
  int64_t wrong = 0;
  for (uint32_t b = 0; b < 0x10000; ++b) {
    half h = from_bits<half>(b);
    float f = h;
    int e = (b >> 10) & 31;
    double m = b & 1023;
    double value = e == 31 ? (m != 0 ? NAN : INFINITY) : e == 0 ? m * 0x1p-24 : std::ldexp(1024 + m, e - 25);
    wrong += !same(f, b >> 15 ? -value : value);
    if (std::isnan(f)) {
      wrong += !std::isnan(static_cast<float>(half(f))) || !std::isnan(static_cast<float>(half(static_cast<double>(f))));
      continue;
    }
    wrong += half(f).bits != b;
    wrong += half(static_cast<double>(f)).bits != b;
  }
  CHECK(wrong == 0);
}

TEST_CASE("every bfloat16 survives the way through wider types and back") {
  int64_t wrong = 0;
  for (uint32_t b = 0; b < 0x10000; ++b) {
    bfloat16 h = from_bits<bfloat16>(b);
    float f = h;
    wrong += std::bit_cast<uint32_t>(f) != b << 16;
    if (std::isnan(f)) {
      wrong += !std::isnan(static_cast<float>(bfloat16(f))) || !std::isnan(static_cast<float>(bfloat16(static_cast<double>(f))));
      continue;
    }
    wrong += bfloat16(f).bits != b;
    wrong += bfloat16(static_cast<double>(f)).bits != b;
  }
  CHECK(wrong == 0);
}

TEST_CASE("f64 and f32 round once to 16 bits, to nearest even") {
  int64_t wrong = 0, checked = 0;
  around_boundaries<half>([&](double v) {
    ++checked;
    wrong += !same(static_cast<float>(half(v)), nearest_half(v));
    wrong += !same(static_cast<float>(half(static_cast<float>(v))), nearest_half(static_cast<float>(v)));
  });
  around_boundaries<bfloat16>([&](double v) {
    ++checked;
    wrong += !same(static_cast<float>(bfloat16(v)), nearest_bfloat16(v));
    wrong += !same(static_cast<float>(bfloat16(static_cast<float>(v))), nearest_bfloat16(static_cast<float>(v)));
  });
  CHECK(checked > 800000);
  CHECK(wrong == 0);
  // Through f32 these would become ties, and then something else.
  CHECK(static_cast<float>(half(1 + 0x1p-11 + 0x1p-40)) == 1 + 0x1p-10f);
  CHECK(static_cast<float>(bfloat16(1 + 0x1p-8 + 0x1p-40)) == 1 + 0x1p-7f);
  CHECK(static_cast<float>(bfloat16(std::ldexp(1 + 0x1p-9, -133))) == 0x1p-133f);
}

TEST_CASE("extremes become infinite, zero or stay NaN") {
  for (double v : {65520.0, 1e10, 1e300, std::numeric_limits<double>::max(), double(INFINITY)}) {
    CHECK(half(v).bits == 0x7C00);
    CHECK(half(-v).bits == 0xFC00);
  }
  CHECK(half(65519.99).bits == 0x7BFF);
  CHECK(half(0x1p-25).bits == 0);
  CHECK(half(std::nextafter(0x1p-25, 1)).bits == 1);
  CHECK(half(-1e-300).bits == 0x8000);
  CHECK(half(std::numeric_limits<double>::denorm_min()).bits == 0);
  CHECK(bfloat16(std::numeric_limits<float>::max()).bits == 0x7F80);
  CHECK(bfloat16(1e300).bits == 0x7F80);
  CHECK(bfloat16(std::numeric_limits<double>::denorm_min()).bits == 0);
  CHECK(bfloat16(std::bit_cast<float>(0x7F800001u)).bits == 0x7FC0);
  CHECK(bfloat16(std::bit_cast<float>(0x7FFFFFFFu)).bits == 0x7FFF);
  CHECK(half(std::bit_cast<float>(0x7F800001u)).bits == 0x7E00);
  CHECK(std::isnan(static_cast<float>(half(std::nan("")))));
}

TEST_CASE("integers round once to 16 bits") {
  int64_t wrong = 0;
  for (int64_t v = -70000; v <= 70000; ++v) {
    wrong += !same(static_cast<float>(convert<half>(v)), nearest_half(v));
    wrong += !same(static_cast<float>(convert<bfloat16>(v)), nearest_bfloat16(v));
    wrong += !same(static_cast<float>(convert<half>(static_cast<int32_t>(v))), nearest_half(v));
  }
  // Around ties that f64 cannot tell from their neighbours.
  for (int e = 9; e < 62; ++e)
    for (int64_t m = 129; m < 256; m += 2)
      for (int64_t near : {-1, 0, 1}) {
        auto v = static_cast<int64_t>(static_cast<uint64_t>(2 * m + 1) << (e - 9)) + near;
        wrong += !same(static_cast<float>(convert<bfloat16>(v)), nearest_bfloat16(v));
        wrong += !same(static_cast<float>(convert<bfloat16>(-v)), nearest_bfloat16(-v));
      }
  for (int64_t v : {std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()})
    wrong += !same(static_cast<float>(convert<bfloat16>(v)), nearest_bfloat16(v));
  CHECK(wrong == 0);
}

TEST_CASE("floating to integer truncates, saturates, and takes NaN to 0") {
  CHECK(convert<int32_t>(2.9f) == 2);
  CHECK(convert<int32_t>(-2.9) == -2);
  CHECK(convert<int32_t>(3e9) == 2147483647);
  CHECK(convert<int32_t>(-3e9f) == std::numeric_limits<int32_t>::min());
  CHECK(convert<int32_t>(2147483520.0f) == 2147483520);
  CHECK(convert<int32_t>(2147483648.0f) == 2147483647);
  CHECK(convert<int32_t>(-2147483648.0f) == std::numeric_limits<int32_t>::min());
  CHECK(convert<int64_t>(9.3e18) == std::numeric_limits<int64_t>::max());
  CHECK(convert<int64_t>(-1e30f) == std::numeric_limits<int64_t>::min());
  CHECK(convert<int64_t>(0x1p62) == int64_t{1} << 62);
  CHECK(convert<uint8_t>(-1.0f) == 0);
  CHECK(convert<uint8_t>(255.9) == 255);
  CHECK(convert<uint8_t>(1e9) == 255);
  for (double v : {double(INFINITY), -double(INFINITY)}) CHECK(convert<int32_t>(v) == (v > 0 ? std::numeric_limits<int32_t>::max() : std::numeric_limits<int32_t>::min()));
  CHECK(convert<int64_t>(std::nan("")) == 0);
  CHECK(convert<uint8_t>(half(std::nan(""))) == 0);
  CHECK(convert<int32_t>(half(-7.5f)) == -7);
  CHECK(convert<uint8_t>(bfloat16(300.f)) == 255);
  CHECK(convert<bool>(0.1f));
  CHECK_FALSE(convert<bool>(-0.0));
  CHECK(convert<bool>(std::nan("")));
  CHECK(convert<float>(true) == 1);
}

TEST_CASE("promotion") {
  using enum DType;
  CHECK(promote(f16, bf16) == f32);
  CHECK(promote(f16, f32) == f32);
  CHECK(promote(bf16, f64) == f64);
  CHECK(promote(f16, i64) == f16);
  CHECK(promote(b8, bf16) == bf16);
  CHECK(promote(u8, i32) == i32);
  CHECK(promote(i64, i32) == i64);
  CHECK(promote(b8, u8) == u8);
  for (int a = 0; a < num_dtypes; ++a)
    for (int b = 0; b < num_dtypes; ++b) {
      auto x = static_cast<DType>(a), y = static_cast<DType>(b);
      CHECK(promote(x, y) == promote(y, x));
      CHECK(promote(x, promote(x, y)) == promote(x, y));
    }
}

TEST_CASE("names and sizes of dtypes, and visiting them") {
  CHECK((str(DType::f16) == "f16" && str(DType::bf16) == "bf16" && str(DType::f32) == "f32" && str(DType::f64) == "f64"));
  CHECK((str(DType::i32) == "i32" && str(DType::i64) == "i64" && str(DType::u8) == "u8" && str(DType::b8) == "bool"));
  for (int d = 0; d < num_dtypes; ++d) {
    auto t = static_cast<DType>(d);
    visit(t, [&]<class T>(Type<T>) {
      CHECK(sizeof(T) == size_of(t));
      CHECK(dtype_of<T> == t);
    });
  }
  CHECK_THROWS_WITH(visit<floating_types>(DType::i64, [](auto) {}), "dtype i64 is not supported here");
}

TEST_CASE("a scalar keeps all 64 bits of an integer") {
  int64_t big = (int64_t{1} << 53) + 1;
  CHECK(Scalar(big).to<int64_t>() == big);
  CHECK(Scalar(true).to<int64_t>() == 1);
  CHECK(Scalar(1.5).to<int64_t>() == 1);
  CHECK(Scalar(7).to<double>() == 7);
  CHECK_THROWS_WITH(Scalar(std::numeric_limits<uint64_t>::max()), "size does not fit 64 bits");
  CHECK(Scalar(1).integral());
  CHECK_FALSE(Scalar(1.0).integral());
}
