#pragma once
// Learning-rate schedules as data on the device: a table of pieces that a kernel evaluates at the count of real steps, so that
// a schedule needs no host, may be captured, and stands still over a skipped step.
#include "halftone/core/hd.h"
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef schedule;
}

namespace schedule {

// A piece begins at some step; u counts from there. Each is one row of the table: kind, begin, and six parameters.
//   constant      a
//   linear        from a to b over c steps, then b
//   exponential   a * b^u
//   staircase     a * b^floor(u / c), from then on
//   cosine        from a to b over c steps, half a wave; then b
//   restarts      cosine from a to b over c steps, again and again, each time d times as long
//   polynomial    from a to b over c steps as (1 - u / c)^d, then b
//   noam          a * min((u + 1)^-0.5, (u + 1) * b^-1.5)   (Vaswani et al., "Attention is all you need", 2017, section 5.3)
//   listed        one of the b values behind the pieces, from number a on: the u-th, then the last
enum class Kind : int { constant, linear, exponential, staircase, cosine, restarts, polynomial, noam, listed };
inline constexpr int64_t columns = 8;

HT_HD inline double between(double a, double b, double share) { return a + (b - a) * share; }
HT_HD inline double cosine(double a, double b, double share) { return b + (a - b) * 0.5 * (1 + ::cos(3.14159265358979323846 * share)); }

// The value at step `t` of a table of n pieces.
HT_HD inline double value_at(const double* table, int64_t n, int64_t t) {
  int64_t i = 0;
  while (i + 1 < n && static_cast<double>(t) >= table[(i + 1) * columns + 1]) ++i;
  const double* p = table + i * columns;
  double u = static_cast<double>(t) - p[1], a = p[2], b = p[3], c = p[4], d = p[5];
  switch (static_cast<Kind>(static_cast<int>(p[0]))) {
    case Kind::constant: return a;
    case Kind::linear: return u >= c ? b : between(a, b, u / c);
    case Kind::exponential: return a * ::pow(b, u);
    case Kind::staircase: return a * ::pow(b, ::floor(u / c));
    case Kind::cosine: return u >= c ? b : cosine(a, b, u / c);
    case Kind::restarts: {
      if (d == 1) return cosine(a, b, (u - ::floor(u / c) * c) / c);
      double begun = ::floor(::log(u / c * (d - 1) + 1) / ::log(d) + 1e-9), length = c * ::pow(d, begun);
      return cosine(a, b, (u - c * (::pow(d, begun) - 1) / (d - 1)) / length);
    }
    case Kind::polynomial: return u >= c ? b : b + (a - b) * ::pow(1 - u / c, d);
    case Kind::noam: return a * ((u + 1) < b ? (u + 1) * ::pow(b, -1.5) : ::pow(u + 1, -0.5));
    case Kind::listed: return table[n * columns + static_cast<int64_t>(a) + static_cast<int64_t>(u < b ? u : b - 1)];
  }
  return 0;
}

}  // namespace schedule
}  // namespace halftone
