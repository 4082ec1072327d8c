#pragma once
// Loops of CPU kernels over strided tensors: dimensions are merged where every operand allows it, the innermost runs as
// a row, rows are spread over threads. Internal to ops/*.cpp.
#include <algorithm>
#include <array>
#include <functional>

#include "halftone/core/op.h"
#include "halftone/core/parallel.h"

namespace halftone {

inline constexpr int64_t parallel_grain = 1 << 15;  // elements a thread should have at least

template <size_t N> struct Rows {
  Shape shape;                      // outermost first; at least one dimension
  std::array<Strides, N> strides;

  Rows(const Shape& s, const std::array<std::reference_wrapper<const Strides>, N>& given) {
    auto stride = [&](size_t k, size_t d) { return given[k].get()[d]; };
    for (size_t d = 0; d < s.size(); ++d) {
      if (s[d] == 1) continue;
      int64_t together = 0, next = 0;  // sizes of a tensor without elements may be huge
      bool merges = shape.rank() > 0 && !__builtin_mul_overflow(shape.back(), s[d], &together);
      for (size_t k = 0; k < N && merges; ++k) merges = !__builtin_mul_overflow(stride(k, d), s[d], &next) && strides[k].back() == next;
      if (merges) {
        shape[shape.size() - 1] = together;
        for (size_t k = 0; k < N; ++k) strides[k][strides[k].size() - 1] = stride(k, d);
      } else {
        shape.push_back(s[d]);
        for (size_t k = 0; k < N; ++k) strides[k].push_back(stride(k, d));
      }
    }
    if (shape.rank() > 0) return;
    shape.push_back(1);
    for (auto& k : strides) k.push_back(0);
  }

  // row(offsets, steps, n): n elements of each operand from offsets[k], steps[k] apart. An element stands for `work` of them.
  template <class F> void run(F&& row, int64_t work = 1) const {
    size_t last = shape.size() - 1;
    int64_t inner = shape[last], rows = 1;
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return;
    for (size_t d = 0; d < last; ++d) rows = checked_mul(rows, shape[d]);
    std::array<int64_t, N> steps;
    for (size_t k = 0; k < N; ++k) steps[k] = strides[k][last];
    if (rows == 1) {
      parallel_for(inner, std::max<int64_t>(1, parallel_grain / work), [&](int64_t begin, int64_t end) {
        std::array<int64_t, N> at;
        for (size_t k = 0; k < N; ++k) at[k] = begin * steps[k];
        row(at, steps, end - begin);
      });
      return;
    }
    int64_t grain = std::max<int64_t>(1, parallel_grain / work / inner);
    parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
      Shape index = Shape::filled(shape.rank(), 0);
      std::array<int64_t, N> at{};
      int64_t rest = begin;
      for (size_t d = last; d-- > 0;) {
        index[d] = rest % shape[d];
        rest /= shape[d];
        for (size_t k = 0; k < N; ++k) at[k] += index[d] * strides[k][d];
      }
      for (int64_t r = begin; r < end; ++r) {
        row(at, steps, inner);
        for (size_t d = last; d-- > 0;) {
          for (size_t k = 0; k < N; ++k) at[k] += strides[k][d];
          if (++index[d] < shape[d]) break;
          for (size_t k = 0; k < N; ++k) at[k] -= strides[k][d] * shape[d];
          index[d] = 0;
        }
      }
    });
  }
};

// Runs f(offset in each tensor, step in each, n) for every line along dim, of n elements. All tensors have one shape, but for
// their sizes along dim: the first one's counts. A 0-d tensor is one line of one element.
template <size_t N, class F> void lines(const std::array<const Tensor*, N>& t, int dim, F f) {
  if (t[0]->rank() == 0) return f(std::array<int64_t, N>{}, std::array<int64_t, N>{}, int64_t{1});
  auto d = static_cast<size_t>(dim);
  Shape rest = t[0]->shape();
  int64_t n = rest[d];
  rest[d] = 1;
  std::array<int64_t, N> along;
  for (size_t k = 0; k < N; ++k) along[k] = t[k]->strides()[d];
  auto rows = [&]<size_t... K>(std::index_sequence<K...>) { return Rows<N>(rest, {t[K]->strides()...}); }(std::make_index_sequence<N>());
  rows.run(
      [&](auto at, auto step, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
          f(at, along, n);
          for (size_t k = 0; k < N; ++k) at[k] += step[k];
        }
      },
      std::max<int64_t>(n, 1));
}

// y = f(x) over a row; unit steps get their own loop so that the compiler can use vectors.
template <class X, class Y, class F> void map_row(const X* x, int64_t dx, Y* y, int64_t dy, int64_t n, F f) {
  if (dx == 1 && dy == 1) for (int64_t i = 0; i < n; ++i) y[i] = f(x[i]);
  else for (int64_t i = 0; i < n; ++i) y[i * dy] = f(x[i * dx]);
}

}  // namespace halftone
