#pragma once
// Functions that compilers keep in vectors, for loops over rows. Internal to ops/*.cpp.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace halftone {

// e to the x within 2 ulp, denormal results too: 2^n times the Taylor polynomial of e^r, r = x - n ln 2, of at most ln 2 / 2; the rest
// after degree 7 is below 2^-27. ln 2 is taken off in two parts, of which the first has few digits (Cody and Waite, 1980).
[[gnu::always_inline]] inline float vector_exp(float x) {
  constexpr float whole = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  float v = x < -105.f ? -105.f : x > 89.f ? 89.f : x;  // beyond, the result is 0 or inf; NaN stays
  float shifted = v * 1.44269504088896341f + whole, n = shifted - whole;
  float r = (v - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.f / 5040;
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1;
  // 2^n in two factors, so that neither leaves the range and a denormal result is rounded once.
  int32_t power = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(whole), half = power >> 1;
  auto two_to = [](int32_t e) { return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23); };
  return p * two_to(half) * two_to(power - half);
}
inline double vector_exp(double x) { return std::exp(x); }

// The largest of n values x(i), which are not all NaN, and of `least`.
template <class C, class F> C row_max(int64_t n, F x, C least) {
  constexpr int64_t lanes = 16;
  C most[lanes];
  std::fill_n(most, lanes, least);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int64_t j = 0; j < lanes; ++j) most[j] = x(i + j) > most[j] ? x(i + j) : most[j];
  for (; i < n; ++i) most[0] = x(i) > most[0] ? x(i) : most[0];
  return *std::max_element(most, most + lanes);
}

// N sums in f64, of terms that come in runs: side by side, then added up in one order.
template <size_t N> struct Sums {
  static constexpr int64_t lanes = 16;
  double lane[N][lanes] = {};
  // f(i) gives the N terms of element i.
  template <class F> void add(int64_t n, F f) {
    double s[N][lanes];
    std::memcpy(s, lane, sizeof s);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
      for (int64_t j = 0; j < lanes; ++j) {
        std::array<double, N> terms = f(i + j);
        for (size_t k = 0; k < N; ++k) s[k][j] += terms[k];
      }
    for (; i < n; ++i) {
      std::array<double, N> terms = f(i);
      for (size_t k = 0; k < N; ++k) s[k][i % lanes] += terms[k];
    }
    std::memcpy(lane, s, sizeof s);
  }
  double total(size_t k) const {
    double s[lanes];
    std::memcpy(s, lane[k], sizeof s);
    for (int64_t half = lanes / 2; half > 0; half /= 2)
      for (int64_t j = 0; j < half; ++j) s[j] += s[j + half];
    return s[0];
  }
};

// The sum over i of f(i).
template <class F> double row_sum(int64_t n, F f) {
  Sums<1> s;
  s.add(n, [f](int64_t i) { return std::array{static_cast<double>(f(i))}; });
  return s.total(0);
}

}  // namespace halftone
