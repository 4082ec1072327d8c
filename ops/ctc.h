#pragma once
// The recursions of ctc_loss over one item of a batch, for both devices. Internal to ops/ and cuda/.
#include "halftone/ops/loss.h"

namespace halftone::detail {

inline constexpr double never = -HUGE_VAL;  // the logarithm of probability 0

HT_HD inline double log_add(double a, double b) {
  const double high = a > b ? a : b;
  return high == never ? never : high + ::log1p(::exp((a > b ? b : a) - high));
}

// A target's states are a blank, its first class, a blank, and so on: state s emits label(s).
template <class T> struct CtcItem {
  const T* x;
  int64_t step, column;  // strides of x
  const int64_t* target;
  int64_t steps, length, blank, classes;

  HT_HD int64_t states() const { return 2 * length + 1; }
  HT_HD int64_t label(int64_t s) const { return s % 2 == 0 ? blank : target[s / 2]; }
  HT_HD double emission(int64_t t, int64_t s) const {
    return static_cast<double>(static_cast<compute_t<T>>(x[t * step + label(s) * column]));
  }
  // A state may follow the one before the last when both are classes and differ.
  HT_HD bool jumps(int64_t s) const { return s % 2 == 1 && s >= 3 && target[s / 2] != target[s / 2 - 1]; }

  // All beginnings that end in state s at time t, emissions included; `before` has those of t - 1.
  HT_HD double alpha(const double* before, int64_t t, int64_t s) const {
    if (t == 0) return s < 2 ? emission(0, s) : never;
    double sum = before[s];
    if (s >= 1) sum = log_add(sum, before[s - 1]);
    if (jumps(s)) sum = log_add(sum, before[s - 2]);
    return sum == never ? never : sum + emission(t, s);
  }
  // All ends from state s at time t, its own emission excluded; `after` has those of t + 1.
  HT_HD double beta(const double* after, int64_t t, int64_t s) const {
    if (t == steps - 1) return s >= states() - 2 ? 0 : never;
    double sum = after[s] + emission(t + 1, s);
    if (s + 1 < states()) sum = log_add(sum, after[s + 1] + emission(t + 1, s + 1));
    if (s + 2 < states() && jumps(s + 2)) sum = log_add(sum, after[s + 2] + emission(t + 1, s + 2));
    return sum;
  }
  // From the beginnings of the last step. Nothing emits nothing.
  HT_HD double loss(const double* last) const {
    if (steps == 0) return length == 0 ? 0 : HUGE_VAL;
    return -(length == 0 ? last[0] : log_add(last[states() - 1], last[states() - 2]));
  }
};

}  // namespace halftone::detail
