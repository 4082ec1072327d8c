// Pooling on CUDA: a thread for each element of the result, or each square of 2 x 2, transposes too, which gather what reaches an element in a
// fixed order instead of adding atomically. What instructions a thread needs, and not memory, bounds these kernels.
#include "halftone/ops/pool.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"
#include "halftone/ops/copy.h"
#include "halftone/ops/reduce.h"

namespace halftone::cuda {
namespace {

constexpr int threads = 256;

// Planes of three dimensions, one after the other or, with channels last, element by element side by side. A thread takes n
// neighbours: one element, or those of n channels in one place.
constexpr int channel_pack = 8;
struct Plane {
  int64_t group, channel, step;  // planes that lie side by side; which of them; and how many, the step from element to element
  // Where it begins in memory if planes have so many elements.
  __device__ int64_t first(int64_t pixels) const { return group * pixels * step + channel; }
};
struct Places {
  Divisor size[3], packs;  // of channels side by side
  int n;
  Places(const int32_t (&s)[3], const Tensor& t, int together) : packs(t.is_contiguous() ? 1 : t.size(1) / together), n(together) {
    for (int d = 0; d < 3; ++d) size[d] = Divisor(s[d]);
  }
  // Where pack i (in memory) is within its planes.
  __device__ Plane locate(int64_t i, int32_t (&at)[3]) const {
    const int64_t pixel = packs.divide(i), channel = (i - pixel * packs.divisor) * n;
    i = pixel;
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      const int64_t rest = size[d].divide(i);
      at[d] = static_cast<int32_t>(i - rest * size[d].divisor);
      i = rest;
    }
    return {i, channel, packs.divisor * n};
  }
};

// Calls f(place in the plane, number in the window) for the elements of a window, row-major.
template <class F> __device__ void each_element(const PoolGeometry& q, const int32_t (&at)[3], F f) {
  const PoolWindow u = q.window(0, at[0]), v = q.window(1, at[1]), w = q.window(2, at[2]);
  for (int32_t a = u.begin, i = u.tap; a < u.end; a += u.step, ++i)
    for (int32_t b = v.begin, j = v.tap; b < v.end; b += v.step, ++j)
      for (int32_t c = w.begin, k = w.tap; c < w.end; c += w.step, ++k)
        f((int64_t{a} * q.in[1] + b) * q.in[2] + c, (i * q.kernel[1] + j) * q.kernel[2] + k);
}

// Element i's number in a window; -1 when it is none of the window's.
__device__ int32_t number_in(const PoolWindow& w, int32_t i) {
  const int32_t distance = i - w.begin, steps = w.step == 1 ? distance : distance / w.step;
  return distance >= 0 && i < w.end && steps * w.step == distance ? w.tap + steps : -1;
}
// Calls f(window's place, the element's number in it, what its average divides by) for every window that holds an element.
template <class F> __device__ void each_window(const PoolGeometry& q, const int32_t (&at)[3], F f) {
  for (int32_t a = q.first_output(0, at[0]); a < q.last_output(0, at[0]); ++a) {
    const PoolWindow u = q.window(0, a);
    const int32_t i = number_in(u, at[0]);
    for (int32_t b = q.first_output(1, at[1]); i >= 0 && b < q.last_output(1, at[1]); ++b) {
      const PoolWindow v = q.window(1, b);
      const int32_t j = number_in(v, at[1]);
      for (int32_t c = q.first_output(2, at[2]); j >= 0 && c < q.last_output(2, at[2]); ++c) {
        const PoolWindow w = q.window(2, c);
        const int32_t k = number_in(w, at[2]);
        if (k >= 0) f((int64_t{a} * q.out[1] + b) * q.out[2] + c, (i * q.kernel[1] + j) * q.kernel[2] + k, int64_t{u.count} * v.count * w.count);
      }
    }
  }
}

// The same, without what an average divides by, where a window's elements are neighbours and all windows have one size: with fewer divisions.
struct CloseWindows {
  FastDivisor stride[3];
  explicit CloseWindows(const PoolGeometry& q) {
    for (int d = 0; d < 3; ++d) stride[d] = FastDivisor(static_cast<uint32_t>(q.stride[d]));
  }
  static bool fit(const PoolGeometry& q) { return !q.adaptive && q.dilation[0] == 1 && q.dilation[1] == 1 && q.dilation[2] == 1; }
  // The windows along a dimension that hold one of elements i to j: from first to below last.
  struct Range { int32_t first, last; };
  __device__ Range hold(const PoolGeometry& q, int d, int32_t i, int32_t j) const {
    const int32_t before = i + q.padding[d] - q.kernel[d];  // the last place whose window ends before element i
    return {before < 0 ? 0 : static_cast<int32_t>(stride[d].divide(static_cast<uint32_t>(before))) + 1,
            min(q.out[d], static_cast<int32_t>(stride[d].divide(static_cast<uint32_t>(j + q.padding[d]))) + 1)};
  }
  template <class F> __device__ void each(const PoolGeometry& q, const int32_t (&at)[3], F f) const {
    const Range u = hold(q, 0, at[0], at[0]), v = hold(q, 1, at[1], at[1]), w = hold(q, 2, at[2], at[2]);
    for (int32_t a = u.first; a < u.last; ++a)
      for (int32_t b = v.first; b < v.last; ++b) {
        const int32_t row = ((at[0] + q.padding[0] - a * q.stride[0]) * q.kernel[1] + at[1] + q.padding[1] - b * q.stride[1]) * q.kernel[2];
        for (int32_t c = w.first; c < w.last; ++c) f((int64_t{a} * q.out[1] + b) * q.out[2] + c, row + at[2] + q.padding[2] - c * q.stride[2]);
      }
  }
};

// The largest element of each of n windows so far, and its number in it. A NaN is larger than any number, and the first of equal ones stays.
template <int n, class T, class N> struct Largest {
  compute_t<T> best[n];
  int32_t numbers[n];
  __device__ Largest() {
#pragma unroll
    for (int c = 0; c < n; ++c) {
      best[c] = reduce::Argmax::start<compute_t<T>>().value;
      numbers[c] = -1;
    }
  }
  __device__ void take(const Pack<T, n>& values, int32_t tap) {
#pragma unroll
    for (int c = 0; c < n; ++c) {
      const auto value = to<compute_t<T>>(values.v[c]);
      if (best[c] != best[c] || (numbers[c] >= 0 && !(value > best[c]) && value == value)) continue;
      best[c] = value;
      numbers[c] = tap;
    }
  }
  __device__ T value(int c) const { return to<T>(best[c]); }
  __device__ int32_t number(int c) const { return numbers[c]; }
};
// Elements of 16 bits two at a time, as they lie in memory, and numbers that fit a byte as well.
template <int n, class T> requires(is_16bit<T> && n % 2 == 0) struct Largest<n, T, uint8_t> {
  using Two = std::conditional_t<std::same_as<T, half>, __half2, __nv_bfloat162>;
  struct Words { uint32_t v[n / 2]; };
  Words best, numbers;
  bool empty = true;
  __device__ Largest() {
#pragma unroll
    for (int c = 0; c < n / 2; ++c) {
      best.v[c] = to<T>(reduce::Argmax::start<float>().value).bits * 0x10001u;
      numbers.v[c] = ~0u;
    }
  }
  __device__ void take(const Pack<T, n>& values, int32_t tap) {
    const auto words = bit_cast<Words>(values);
    const uint32_t all = empty ? ~0u : 0u, here = static_cast<uint32_t>(tap) * 0x10001u;
#pragma unroll
    for (int c = 0; c < n / 2; ++c) {
      const auto &value = reinterpret_cast<const Two&>(words.v[c]), &largest = reinterpret_cast<const Two&>(best.v[c]);
      const uint32_t larger = (__hgtu2_mask(value, largest) & __heq2_mask(largest, largest)) | all;  // u: or one of them is NaN
      best.v[c] = (words.v[c] & larger) | (best.v[c] & ~larger);
      numbers.v[c] = (here & larger) | (numbers.v[c] & ~larger);
    }
    empty = false;
  }
  __device__ T value(int c) const {
    T v;
    v.bits = static_cast<uint16_t>(best.v[c / 2] >> c % 2 * 16);
    return v;
  }
  __device__ uint8_t number(int c) const { return static_cast<uint8_t>(numbers.v[c / 2] >> c % 2 * 16); }
};

template <int n, class T, class N>
__global__ void __launch_bounds__(threads) max_pool_kernel(const PoolGeometry q, const Places places, const int64_t packs, const T* x, T* y, N* chosen) {
  wait_for_previous();
  for (int64_t o = thread_index(); o < packs; o += grid_threads()) {
    int32_t at[3];
    const Plane plane = places.locate(o, at);
    const int64_t first = plane.first(q.pixels());
    Largest<n, T, N> largest;
    each_element(q, at, [&](int64_t i, int32_t tap) { largest.take(load_pack<n>(x + first + i * plane.step), tap); });
    Pack<T, n> out;
    Pack<N, n> numbers;
#pragma unroll
    for (int c = 0; c < n; ++c) {
      out.v[c] = largest.value(c);
      numbers.v[c] = static_cast<N>(largest.number(c));
    }
    store_pack(y + o * n, out);
    if (chosen) store_pack(chosen + o * n, numbers);
  }
}

template <class T, class N>
__global__ void __launch_bounds__(threads)
    max_pool_gather_kernel(const PoolGeometry q, const Places places, const int64_t count, const T* x, const N* chosen, T* y) {
  wait_for_previous();
  for (int64_t o = thread_index(); o < count; o += grid_threads()) {
    int32_t at[3];
    const Plane plane = places.locate(o, at);
    const int64_t first = plane.first(q.pixels());
    T value = to<T>(0.f);
    each_element(q, at, [&](int64_t i, int32_t tap) {
      if (tap == chosen[o]) value = x[first + i * plane.step];
    });
    y[o] = value;
  }
}

template <int n, bool close, class T, class N>
__global__ void __launch_bounds__(threads)
    max_pool_scatter_kernel(const PoolGeometry q, const CloseWindows windows, const Places places, const int64_t packs, const T* g, const N* chosen, T* x) {
  wait_for_previous();
  using A = accumulate_t<T>;
  for (int64_t e = thread_index(); e < packs; e += grid_threads()) {
    int32_t at[3];
    const Plane plane = places.locate(e, at);
    const int64_t first = plane.first(q.positions());
    A sum[n] = {};
    auto add = [&](int64_t o, int32_t tap, int64_t = 1) {
      const int64_t from = first + o * plane.step;
      const auto taps = load_pack<n>(chosen + from);
      const auto values = load_pack<n>(g + from);
#pragma unroll
      for (int c = 0; c < n; ++c) if (taps.v[c] == tap) sum[c] += to<A>(values.v[c]);
    };
    if constexpr (close) windows.each(q, at, add);
    else each_window(q, at, add);
    Pack<T, n> out;
#pragma unroll
    for (int c = 0; c < n; ++c) out.v[c] = to<T>(sum[c]);
    store_pack(x + e * n, out);
  }
}

// The same for squares of 2 x 2 elements whose windows are close: what comes from a window is read once.
template <int n, class T, class N>
__global__ void __launch_bounds__(threads)
    max_pool_scatter_squares(const PoolGeometry q, const CloseWindows windows, const Places squares, const int64_t packs, const T* g, const N* chosen, T* x) {
  wait_for_previous();
  using A = accumulate_t<T>;
  for (int64_t e = thread_index(); e < packs; e += grid_threads()) {
    int32_t at[3];
    const Plane plane = squares.locate(e, at);
    const int32_t row = 2 * at[1], column = 2 * at[2], last_row = min(row + 1, q.in[1] - 1), last_column = min(column + 1, q.in[2] - 1);
    const auto u = windows.hold(q, 0, at[0], at[0]), v = windows.hold(q, 1, row, last_row), w = windows.hold(q, 2, column, last_column);
    const int64_t from = plane.first(q.positions());
    A sum[4][n] = {};
    for (int32_t a = u.first; a < u.last; ++a)
      for (int32_t b = v.first; b < v.last; ++b)
        for (int32_t c = w.first; c < w.last; ++c) {
          const int64_t o = from + ((int64_t{a} * q.out[1] + b) * q.out[2] + c) * plane.step;
          const auto taps = load_pack<n>(chosen + o);
          const auto values = load_pack<n>(g + o);
          const int32_t depth = at[0] + q.padding[0] - a * q.stride[0], down = row + q.padding[1] - b * q.stride[1],
                        across = column + q.padding[2] - c * q.stride[2];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int32_t i = down + k / 2, j = across + k % 2, tap = (depth * q.kernel[1] + i) * q.kernel[2] + j;
            if (i < 0 || i >= q.kernel[1] || j < 0 || j >= q.kernel[2]) continue;
#pragma unroll
            for (int m = 0; m < n; ++m) if (taps.v[m] == tap) sum[k][m] += to<A>(values.v[m]);
          }
        }
    const int64_t into = plane.first(q.pixels());
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (row + k / 2 > last_row || column + k % 2 > last_column) continue;
      Pack<T, n> out;
#pragma unroll
      for (int m = 0; m < n; ++m) out.v[m] = to<T>(sum[k][m]);
      store_pack(x + into + ((int64_t{at[0]} * q.in[1] + row + k / 2) * q.in[2] + column + k % 2) * plane.step, out);
    }
  }
}

template <int n, class T>
__global__ void __launch_bounds__(threads) avg_pool_kernel(const PoolGeometry q, const Places places, const int64_t packs, const T* x, T* y) {
  wait_for_previous();
  using A = accumulate_t<T>;
  for (int64_t o = thread_index(); o < packs; o += grid_threads()) {
    int32_t at[3];
    const Plane plane = places.locate(o, at);
    const int64_t first = plane.first(q.pixels());
    A sum[n] = {};
    each_element(q, at, [&](int64_t i, int32_t) {
      const auto values = load_pack<n>(x + first + i * plane.step);
#pragma unroll
      for (int c = 0; c < n; ++c) sum[c] += to<A>(values.v[c]);
    });
    const auto count = static_cast<A>(int64_t{q.window(0, at[0]).count} * q.window(1, at[1]).count * q.window(2, at[2]).count);
    Pack<T, n> out;
#pragma unroll
    for (int c = 0; c < n; ++c) out.v[c] = to<T>(sum[c] / count);
    store_pack(y + o * n, out);
  }
}

template <int n, class T>
__global__ void __launch_bounds__(threads) avg_pool_input_kernel(const PoolGeometry q, const Places places, const int64_t packs, const T* g, T* x) {
  wait_for_previous();
  using A = accumulate_t<T>;
  for (int64_t e = thread_index(); e < packs; e += grid_threads()) {
    int32_t at[3];
    const Plane plane = places.locate(e, at);
    const int64_t first = plane.first(q.positions());
    A sum[n] = {};
    each_window(q, at, [&](int64_t o, int32_t, int64_t count) {
      const auto values = load_pack<n>(g + first + o * plane.step);
#pragma unroll
      for (int c = 0; c < n; ++c) sum[c] += to<A>(values.v[c]) / static_cast<A>(count);
    });
    Pack<T, n> out;
#pragma unroll
    for (int c = 0; c < n; ++c) out.v[c] = to<T>(sum[c]);
    store_pack(x + e * n, out);
  }
}

// t, laid out as a result is.
Tensor like(const Tensor& t, const Tensor& result) { return dense(t, !result.is_contiguous()); }

int64_t blocks_for(int64_t packs) { return std::min<int64_t>(ceil_div(packs, threads), int64_t{64} * sm_count()); }

// Calls run(Type<T>, geometry) for a call whose result is the output (or, of a transpose, the input) of a pool.
template <class F> void dispatch(const Call& c, const Tensor& out, bool transpose, F run) {
  if (out.numel() == 0) return;
  const Shape &from = c.in[0].shape(), &to = out.shape();
  const PoolGeometry q = pool_geometry(c.as<PoolAttrs>(), transpose ? to : from, transpose ? from : to);
  visit<floating_types>(out.dtype(), [&]<class T>(Type<T> t) { run(t, q); });
}

// Calls run(a constant: elements a thread takes) for a result and operands that lie like it.
template <class F> void in_packs(const Tensor& out, std::initializer_list<const Tensor*> operands, F run) {
  auto fits = [](const Tensor& t) { return aligned(t.raw_data(), channel_pack * size_of(t.dtype())); };
  bool packed = !out.is_contiguous() && out.size(1) % channel_pack == 0 && fits(out);
  for (auto* t : operands) packed = packed && fits(*t);
  if (packed) run(std::integral_constant<int, channel_pack>{});
  else run(std::integral_constant<int, 1>{});
}

void run_max_pool(const Call& c, std::span<Tensor> out) {
  const Tensor &y = out[0], x = like(c.in[0], y);
  dispatch(c, y, false, [&]<class T>(Type<T>, const PoolGeometry& q) {
    in_packs(y, {&x}, [&]<int n>(std::integral_constant<int, n>) {
      const int64_t packs = y.numel() / n;
      auto run = [&]<class N>(N* chosen) {
        launch("max_pool", max_pool_kernel<n, T, N>, blocks_for(packs), threads, q, Places(q.out, y, n), packs, x.data<T>(), y.data<T>(), chosen);
      };
      if (out.size() > 1) visit_numbers(out[1], run);
      else run(static_cast<uint8_t*>(nullptr));
    });
  });
}
void run_max_pool_gather(const Call& c, std::span<Tensor> out) {
  const Tensor &y = out[0], x = like(c.in[0], y), chosen = like(c.in[1], y);
  dispatch(c, y, false, [&]<class T>(Type<T>, const PoolGeometry& q) {
    visit_numbers(chosen, [&]<class N>(const N* numbers) {
      launch("max_pool_gather", max_pool_gather_kernel<T, N>, blocks_for(y.numel()), threads, q, Places(q.out, y, 1), y.numel(), x.data<T>(), numbers,
             y.data<T>());
    });
  });
}
void run_max_pool_scatter(const Call& c, std::span<Tensor> out) {
  const Tensor &x = out[0], g = like(c.in[0], x), chosen = like(c.in[1], x);
  dispatch(c, x, true, [&]<class T>(Type<T>, const PoolGeometry& q) {
    in_packs(x, {&g, &chosen}, [&]<int n>(std::integral_constant<int, n>) {
      const int64_t packs = x.numel() / n;
      visit_numbers(chosen, [&]<class N>(const N* numbers) {
        auto run = [&](auto kernel, const Places& places, int64_t count) {
          launch("max_pool_scatter", kernel, blocks_for(count), threads, q, CloseWindows(q), places, count, g.data<T>(), numbers, x.data<T>());
        };
        if (!CloseWindows::fit(q)) return run(max_pool_scatter_kernel<n, false, T, N>, Places(q.in, x, n), packs);
        if constexpr (n == 1) run(max_pool_scatter_kernel<n, true, T, N>, Places(q.in, x, n), packs);
        else {
          const int32_t squares[] = {q.in[0], (q.in[1] + 1) / 2, (q.in[2] + 1) / 2};
          run(max_pool_scatter_squares<n, T, N>, Places(squares, x, n), q.planes * squares[0] * squares[1] * squares[2] / n);
        }
      });
    });
  });
}
void run_avg_pool(const Call& c, std::span<Tensor> out) {
  const Tensor &y = out[0], x = like(c.in[0], y);
  dispatch(c, y, false, [&]<class T>(Type<T>, const PoolGeometry& q) {
    in_packs(y, {&x}, [&]<int n>(std::integral_constant<int, n>) {
      const int64_t packs = y.numel() / n;
      launch("avg_pool", avg_pool_kernel<n, T>, blocks_for(packs), threads, q, Places(q.out, y, n), packs, x.data<T>(), y.data<T>());
    });
  });
}
void run_avg_pool_input(const Call& c, std::span<Tensor> out) {
  const Tensor &x = out[0], g = like(c.in[0], x);
  dispatch(c, x, true, [&]<class T>(Type<T>, const PoolGeometry& q) {
    in_packs(x, {&g}, [&]<int n>(std::integral_constant<int, n>) {
      const int64_t packs = x.numel() / n;
      launch("avg_pool_input", avg_pool_input_kernel<n, T>, blocks_for(packs), threads, q, Places(q.in, x, n), packs, g.data<T>(), x.data<T>());
    });
  });
}

}  // namespace

void fill_cuda_pool() {
  fill<run_max_pool>(op::max_pool);
  fill<run_max_pool_gather>(op::max_pool_gather);
  fill<run_max_pool_scatter>(op::max_pool_scatter);
  fill<run_avg_pool>(op::avg_pool);
  fill<run_avg_pool_input>(op::avg_pool_input);
}

}  // namespace halftone::cuda
