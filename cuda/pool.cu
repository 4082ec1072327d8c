// Pooling on CUDA: a thread for each element of the result, transposes too, which gather what reaches an element in a fixed
// order instead of adding atomically.
#include "halftone/ops/pool.h"

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
struct Plane { int64_t first, step; };  // its elements in memory: first + i * step
struct Places {
  FastDivisor size[3];
  Divisor channels;  // side by side: 1, or all of an image
  Places(const int32_t (&s)[3], const Tensor& t) : channels(t.is_contiguous() ? 1 : t.size(1)) {
    for (int d = 0; d < 3; ++d) size[d] = FastDivisor(static_cast<uint32_t>(s[d]));
  }
  // Where element i (in memory) is within its plane; and the same plane of a tensor with `pixels` elements in each.
  __device__ Plane locate(int64_t i, int32_t (&at)[3], int64_t pixels) const {
    const int64_t group = channels.divide(i), channel = i - group * channels.divisor;
    i = group;
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      const int64_t rest = i >> 31 == 0 ? size[d].divide(static_cast<uint32_t>(i)) : i / size[d].divisor;
      at[d] = static_cast<int32_t>(i - rest * size[d].divisor);
      i = rest;
    }
    return {i * pixels * channels.divisor + channel, channels.divisor};
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
  template <class F> __device__ void each(const PoolGeometry& q, const int32_t (&at)[3], F f) const {
    int32_t padded[3], first[3], last[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      padded[d] = at[d] + q.padding[d];
      const int32_t before = padded[d] - q.kernel[d];  // the last place whose window ends before the element
      first[d] = before < 0 ? 0 : static_cast<int32_t>(stride[d].divide(static_cast<uint32_t>(before))) + 1;
      last[d] = min(q.out[d], static_cast<int32_t>(stride[d].divide(static_cast<uint32_t>(padded[d]))) + 1);
    }
    for (int32_t a = first[0]; a < last[0]; ++a)
      for (int32_t b = first[1]; b < last[1]; ++b) {
        const int32_t row = ((padded[0] - a * q.stride[0]) * q.kernel[1] + padded[1] - b * q.stride[1]) * q.kernel[2] + padded[2];
        for (int32_t c = first[2]; c < last[2]; ++c) f((int64_t{a} * q.out[1] + b) * q.out[2] + c, row - c * q.stride[2]);
      }
  }
};

template <int n, class T, class N>
__global__ void __launch_bounds__(threads) max_pool_kernel(const PoolGeometry q, const Places places, const int64_t packs, const T* x, T* y, N* chosen) {
  wait_for_previous();
  using C = compute_t<T>;
  for (int64_t o = thread_index(); o < packs; o += grid_threads()) {
    int32_t at[3];
    const Plane plane = places.locate(o * n, at, q.pixels());
    C best[n];
    Pack<int32_t, n> taps;
#pragma unroll
    for (int c = 0; c < n; ++c) {
      best[c] = reduce::Argmax::start<C>().value;
      taps.v[c] = -1;
    }
    each_element(q, at, [&](int64_t i, int32_t tap) {
      const auto values = load_pack<n>(x + plane.first + i * plane.step);
#pragma unroll
      for (int c = 0; c < n; ++c) {
        const C value = to<C>(values.v[c]);
        if (best[c] != best[c] || (taps.v[c] >= 0 && !(value > best[c]) && value == value)) continue;
        best[c] = value;
        taps.v[c] = tap;
      }
    });
    Pack<T, n> out;
#pragma unroll
    for (int c = 0; c < n; ++c) out.v[c] = to<T>(best[c]);
    store_pack(y + o * n, out);
    if (!chosen) continue;
    Pack<N, n> numbers;
#pragma unroll
    for (int c = 0; c < n; ++c) numbers.v[c] = static_cast<N>(taps.v[c]);
    store_pack(chosen + o * n, numbers);
  }
}

template <class T, class N>
__global__ void __launch_bounds__(threads)
    max_pool_gather_kernel(const PoolGeometry q, const Places places, const int64_t count, const T* x, const N* chosen, T* y) {
  wait_for_previous();
  for (int64_t o = thread_index(); o < count; o += grid_threads()) {
    int32_t at[3];
    const Plane plane = places.locate(o, at, q.pixels());
    T value = to<T>(0.f);
    each_element(q, at, [&](int64_t i, int32_t tap) {
      if (tap == chosen[o]) value = x[plane.first + i * plane.step];
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
    const Plane plane = places.locate(e * n, at, q.positions());
    A sum[n] = {};
    auto add = [&](int64_t o, int32_t tap, int64_t = 1) {
      const int64_t from = plane.first + o * plane.step;
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

template <int n, class T>
__global__ void __launch_bounds__(threads) avg_pool_kernel(const PoolGeometry q, const Places places, const int64_t packs, const T* x, T* y) {
  wait_for_previous();
  using A = accumulate_t<T>;
  for (int64_t o = thread_index(); o < packs; o += grid_threads()) {
    int32_t at[3];
    const Plane plane = places.locate(o * n, at, q.pixels());
    A sum[n] = {};
    each_element(q, at, [&](int64_t i, int32_t) {
      const auto values = load_pack<n>(x + plane.first + i * plane.step);
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
    const Plane plane = places.locate(e * n, at, q.positions());
    A sum[n] = {};
    each_window(q, at, [&](int64_t o, int32_t, int64_t count) {
      const auto values = load_pack<n>(g + plane.first + o * plane.step);
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
        launch("max_pool", max_pool_kernel<n, T, N>, blocks_for(packs), threads, q, Places(q.out, y), packs, x.data<T>(), y.data<T>(), chosen);
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
      launch("max_pool_gather", max_pool_gather_kernel<T, N>, blocks_for(y.numel()), threads, q, Places(q.out, y), y.numel(), x.data<T>(), numbers,
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
        auto kernel = CloseWindows::fit(q) ? max_pool_scatter_kernel<n, true, T, N> : max_pool_scatter_kernel<n, false, T, N>;
        launch("max_pool_scatter", kernel, blocks_for(packs), threads, q, CloseWindows(q), Places(q.in, x), packs, g.data<T>(), numbers, x.data<T>());
      });
    });
  });
}
void run_avg_pool(const Call& c, std::span<Tensor> out) {
  const Tensor &y = out[0], x = like(c.in[0], y);
  dispatch(c, y, false, [&]<class T>(Type<T>, const PoolGeometry& q) {
    in_packs(y, {&x}, [&]<int n>(std::integral_constant<int, n>) {
      const int64_t packs = y.numel() / n;
      launch("avg_pool", avg_pool_kernel<n, T>, blocks_for(packs), threads, q, Places(q.out, y), packs, x.data<T>(), y.data<T>());
    });
  });
}
void run_avg_pool_input(const Call& c, std::span<Tensor> out) {
  const Tensor &x = out[0], g = like(c.in[0], x);
  dispatch(c, x, true, [&]<class T>(Type<T>, const PoolGeometry& q) {
    in_packs(x, {&g}, [&]<int n>(std::integral_constant<int, n>) {
      const int64_t packs = x.numel() / n;
      launch("avg_pool_input", avg_pool_input_kernel<n, T>, blocks_for(packs), threads, q, Places(q.in, x), packs, g.data<T>(), x.data<T>());
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
