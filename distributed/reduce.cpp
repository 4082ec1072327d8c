// Reductions over ranks. A block is read from every rank before it is written, so the result may lie over an input.
#include "halftone/distributed/reduce.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "halftone/core/parallel.h"

namespace halftone::distributed {
namespace {

constexpr int64_t block = 1024, grain = 32 * block;

template <class C> C combine(Reduce how, C a, C b) {
  if constexpr (std::same_as<C, bool>) return how == Reduce::min ? a && b : a || b;
  else if constexpr (std::integral<C>) {
    using U = std::make_unsigned_t<C>;
    if (how == Reduce::sum) return static_cast<C>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    return how == Reduce::min ? std::min(a, b) : std::max(a, b);
  } else {
    if (how == Reduce::sum || how == Reduce::mean) return a + b;
    return a != a || (how == Reduce::min ? a < b : a > b) ? a : b;  // an a that is NaN stays; a b that is one wins
  }
}

template <class T, Reduce how> void reduce(std::span<const void* const> in, void* out, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  std::array<C, block> sum;
  for (int64_t at = begin; at < end; at += block) {
    auto n = static_cast<size_t>(std::min(block, end - at));
    auto* first = static_cast<const T*>(in[0]) + at;
    for (size_t i = 0; i < n; ++i) sum[i] = static_cast<C>(first[i]);
    for (size_t r = 1; r < in.size(); ++r) {
      auto* x = static_cast<const T*>(in[r]) + at;
      for (size_t i = 0; i < n; ++i) sum[i] = combine(how, sum[i], static_cast<C>(x[i]));
    }
    if constexpr (how == Reduce::mean)
      for (size_t i = 0; i < n; ++i) sum[i] /= static_cast<C>(in.size());
    auto* y = static_cast<T*>(out) + at;
    for (size_t i = 0; i < n; ++i) y[i] = static_cast<T>(sum[i]);
  }
}

}  // namespace

void reduce_in_order(Reduce how, DType dtype, std::span<const void* const> in, void* out, int64_t n) {
  visit(dtype, [&]<class T>(Type<T>) {
    parallel_for(n, grain, [&](int64_t begin, int64_t end) {
      if (how == Reduce::sum) reduce<T, Reduce::sum>(in, out, begin, end);
      else if (how == Reduce::min) reduce<T, Reduce::min>(in, out, begin, end);
      else if (how == Reduce::max) reduce<T, Reduce::max>(in, out, begin, end);
      else if constexpr (is_16bit<T> || std::floating_point<T>) reduce<T, Reduce::mean>(in, out, begin, end);
    });
  });
}

}  // namespace halftone::distributed
