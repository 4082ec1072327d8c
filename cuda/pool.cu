// Pooling on CUDA: a thread for each element of the result, transposes too, which gather what reaches an element in a fixed
// order instead of adding atomically.
#include "halftone/ops/pool.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"
#include "halftone/ops/reduce.h"

namespace halftone::cuda {
namespace {

constexpr int threads = 256;

// Places in planes of three dimensions.
struct Places {
  Divisor size[3];
  explicit Places(const int64_t (&s)[3]) {
    for (int d = 0; d < 3; ++d) size[d] = Divisor(s[d]);
  }
  // The plane of element i, and where in it.
  __device__ int64_t locate(int64_t i, int64_t (&at)[3]) const {
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      const int64_t rest = size[d].divide(i);
      at[d] = i - rest * size[d].divisor;
      i = rest;
    }
    return i;
  }
};

template <class T>
__global__ void __launch_bounds__(threads) max_pool_kernel(const PoolGeometry q, const Places places, const int64_t count, const T* x, T* y, int32_t* chosen) {
  using C = compute_t<T>;
  for (int64_t o = thread_index(); o < count; o += grid_threads()) {
    int64_t at[3];
    const T* plane = x + places.locate(o, at) * q.pixels();
    const PoolWindow u = q.window(0, at[0]), v = q.window(1, at[1]), w = q.window(2, at[2]);
    C best = reduce::Argmax::start<C>().value;
    int64_t tap = -1;
    for (int64_t a = u.begin, i = u.tap; a < u.end; a += u.step, ++i)
      for (int64_t b = v.begin, j = v.tap; b < v.end; b += v.step, ++j)
        for (int64_t c = w.begin, k = w.tap; c < w.end; c += w.step, ++k) {
          const C value = to<C>(plane[(a * q.in[1] + b) * q.in[2] + c]);
          if (tap >= 0 && !(value > best) && !(value != value && best == best)) continue;
          if (best != best) continue;
          best = value;
          tap = (i * q.kernel[1] + j) * q.kernel[2] + k;
        }
    y[o] = to<T>(best);
    if (chosen) chosen[o] = static_cast<int32_t>(tap);
  }
}

template <class T>
__global__ void __launch_bounds__(threads) max_pool_gather_kernel(const PoolGeometry q, const Places places, const int64_t count, const T* x, const int32_t* chosen, T* y) {
  for (int64_t o = thread_index(); o < count; o += grid_threads()) {
    int64_t at[3];
    const T* plane = x + places.locate(o, at) * q.pixels();
    const int64_t tap = chosen[o];
    const PoolWindow u = q.window(0, at[0]), v = q.window(1, at[1]), w = q.window(2, at[2]);
    const int64_t a = u.begin + (tap / (q.kernel[1] * q.kernel[2]) - u.tap) * u.step, b = v.begin + (tap / q.kernel[2] % q.kernel[1] - v.tap) * v.step,
                  c = w.begin + (tap % q.kernel[2] - w.tap) * w.step;
    const bool inside = tap >= 0 && a >= u.begin && a < u.end && b >= v.begin && b < v.end && c >= w.begin && c < w.end;
    y[o] = inside ? plane[(a * q.in[1] + b) * q.in[2] + c] : to<T>(0.f);
  }
}

// Element i's number in a window; -1 when it is none of the window's.
__device__ int64_t number_in(const PoolWindow& w, int64_t i) {
  const int64_t distance = i - w.begin, steps = distance / w.step;
  return distance >= 0 && i < w.end && steps * w.step == distance ? w.tap + steps : -1;
}

template <class T>
__global__ void __launch_bounds__(threads) max_pool_scatter_kernel(const PoolGeometry q, const Places places, const int64_t count, const T* g, const int32_t* chosen, T* x) {
  using A = accumulate_t<T>;
  for (int64_t e = thread_index(); e < count; e += grid_threads()) {
    int64_t at[3];
    const int64_t plane = places.locate(e, at) * q.positions();
    A sum = 0;
    for (int64_t a = q.first_output(0, at[0]); a < q.last_output(0, at[0]); ++a) {
      const int64_t i = number_in(q.window(0, a), at[0]);
      for (int64_t b = q.first_output(1, at[1]); i >= 0 && b < q.last_output(1, at[1]); ++b) {
        const int64_t j = number_in(q.window(1, b), at[1]);
        for (int64_t c = q.first_output(2, at[2]); j >= 0 && c < q.last_output(2, at[2]); ++c) {
          const int64_t k = number_in(q.window(2, c), at[2]), o = plane + (a * q.out[1] + b) * q.out[2] + c;
          if (k >= 0 && chosen[o] == (i * q.kernel[1] + j) * q.kernel[2] + k) sum += to<A>(g[o]);
        }
      }
    }
    x[e] = to<T>(sum);
  }
}

template <class T>
__global__ void __launch_bounds__(threads) avg_pool_kernel(const PoolGeometry q, const Places places, const int64_t count, const T* x, T* y) {
  using A = accumulate_t<T>;
  for (int64_t o = thread_index(); o < count; o += grid_threads()) {
    int64_t at[3];
    const T* plane = x + places.locate(o, at) * q.pixels();
    const PoolWindow u = q.window(0, at[0]), v = q.window(1, at[1]), w = q.window(2, at[2]);
    A sum = 0;
    for (int64_t a = u.begin; a < u.end; a += u.step)
      for (int64_t b = v.begin; b < v.end; b += v.step)
        for (int64_t c = w.begin; c < w.end; c += w.step) sum += to<A>(plane[(a * q.in[1] + b) * q.in[2] + c]);
    y[o] = to<T>(sum / static_cast<A>(u.count * v.count * w.count));
  }
}

template <class T>
__global__ void __launch_bounds__(threads) avg_pool_input_kernel(const PoolGeometry q, const Places places, const int64_t count, const T* g, T* x) {
  using A = accumulate_t<T>;
  for (int64_t e = thread_index(); e < count; e += grid_threads()) {
    int64_t at[3];
    const T* plane = g + places.locate(e, at) * q.positions();
    A sum = 0;
    for (int64_t a = q.first_output(0, at[0]); a < q.last_output(0, at[0]); ++a) {
      const PoolWindow u = q.window(0, a);
      for (int64_t b = q.first_output(1, at[1]); b < q.last_output(1, at[1]); ++b) {
        const PoolWindow v = q.window(1, b);
        for (int64_t c = q.first_output(2, at[2]); c < q.last_output(2, at[2]); ++c) {
          const PoolWindow w = q.window(2, c);
          sum += to<A>(plane[(a * q.out[1] + b) * q.out[2] + c]) / static_cast<A>(u.count * v.count * w.count);
        }
      }
    }
    x[e] = to<T>(sum);
  }
}

int64_t blocks_for(int64_t elements) { return std::min<int64_t>(ceil_div(elements, threads), int64_t{64} * sm_count()); }

// Calls run(Type<T>, geometry) for a call whose result is the output (or, of a transpose, the input) of a pool.
template <class F> void dispatch(const Call& c, const Tensor& out, bool transpose, F run) {
  if (out.numel() == 0) return;
  const Shape &from = c.in[0].shape(), &to = out.shape();
  const PoolGeometry q = pool_geometry(c.as<PoolAttrs>(), transpose ? to : from, transpose ? from : to);
  visit<floating_types>(out.dtype(), [&]<class T>(Type<T> t) { run(t, q); });
}

void run_max_pool(const Call& c, std::span<Tensor> out) {
  const Tensor x = c.in[0].contiguous(), &y = out[0];
  int32_t* chosen = out.size() > 1 ? out[1].data<int32_t>() : nullptr;
  dispatch(c, y, false, [&]<class T>(Type<T>, const PoolGeometry& q) {
    launch("max_pool", max_pool_kernel<T>, blocks_for(y.numel()), threads, q, Places(q.out), y.numel(), x.data<T>(), y.data<T>(), chosen);
  });
}
void run_max_pool_gather(const Call& c, std::span<Tensor> out) {
  const Tensor x = c.in[0].contiguous(), chosen = c.in[1].contiguous(), &y = out[0];
  dispatch(c, y, false, [&]<class T>(Type<T>, const PoolGeometry& q) {
    launch("max_pool_gather", max_pool_gather_kernel<T>, blocks_for(y.numel()), threads, q, Places(q.out), y.numel(), x.data<T>(), chosen.data<int32_t>(), y.data<T>());
  });
}
void run_max_pool_scatter(const Call& c, std::span<Tensor> out) {
  const Tensor g = c.in[0].contiguous(), chosen = c.in[1].contiguous(), &x = out[0];
  dispatch(c, x, true, [&]<class T>(Type<T>, const PoolGeometry& q) {
    launch("max_pool_scatter", max_pool_scatter_kernel<T>, blocks_for(x.numel()), threads, q, Places(q.in), x.numel(), g.data<T>(), chosen.data<int32_t>(), x.data<T>());
  });
}
void run_avg_pool(const Call& c, std::span<Tensor> out) {
  const Tensor x = c.in[0].contiguous(), &y = out[0];
  dispatch(c, y, false, [&]<class T>(Type<T>, const PoolGeometry& q) {
    launch("avg_pool", avg_pool_kernel<T>, blocks_for(y.numel()), threads, q, Places(q.out), y.numel(), x.data<T>(), y.data<T>());
  });
}
void run_avg_pool_input(const Call& c, std::span<Tensor> out) {
  const Tensor g = c.in[0].contiguous(), &x = out[0];
  dispatch(c, x, true, [&]<class T>(Type<T>, const PoolGeometry& q) {
    launch("avg_pool_input", avg_pool_input_kernel<T>, blocks_for(x.numel()), threads, q, Places(q.in), x.numel(), g.data<T>(), x.data<T>());
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
