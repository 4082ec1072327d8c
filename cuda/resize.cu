// Resizing on CUDA: a thread for each element of the result; the transpose gathers what reaches an element, in order.
#include "halftone/ops/resize.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"

namespace halftone::cuda {
namespace {

constexpr int threads = 256;

template <class T>
__global__ void __launch_bounds__(threads) resize_kernel(const ResizeGeometry q, const Divisor rows, const Divisor columns, const int64_t count, const T* x, T* y) {
  wait_for_previous();
  using A = accumulate_t<T>;
  for (int64_t o = thread_index(); o < count; o += grid_threads()) {
    const int64_t row = columns.divide(o), plane = rows.divide(row);
    const ResizeTap u = q.tap(0, row - plane * rows.divisor), v = q.tap(1, o - row * columns.divisor);
    const T *low = x + (plane * q.in[0] + u.low) * q.in[1], *high = x + (plane * q.in[0] + u.high) * q.in[1];
    A sum = static_cast<A>((1 - u.part) * (1 - v.part)) * to<A>(low[v.low]);
    if (q.options.mode == Interpolation::bilinear) {
      sum += static_cast<A>((1 - u.part) * v.part) * to<A>(low[v.high]);
      sum += static_cast<A>(u.part * (1 - v.part)) * to<A>(high[v.low]);
      sum += static_cast<A>(u.part * v.part) * to<A>(high[v.high]);
    }
    y[o] = to<T>(sum);
  }
}

template <class T>
__global__ void __launch_bounds__(threads) resize_input_kernel(const ResizeGeometry q, const Divisor rows, const Divisor columns, const int64_t count, const T* g, T* x) {
  wait_for_previous();
  using A = accumulate_t<T>;
  for (int64_t e = thread_index(); e < count; e += grid_threads()) {
    const int64_t row = columns.divide(e), plane = rows.divide(row), i = row - plane * rows.divisor, j = e - row * columns.divisor;
    const int64_t first = q.first_output(1, j), last = q.last_output(1, j);
    A sum = 0;
    for (int64_t a = q.first_output(0, i); a < q.last_output(0, i); ++a) {
      const double of_row = q.share(0, a, i);
      if (of_row == 0) continue;
      const T* line = g + (plane * q.out[0] + a) * q.out[1];
      for (int64_t b = first; b < last; ++b) {
        const double weight = of_row * q.share(1, b, j);
        if (weight != 0) sum += static_cast<A>(weight) * to<A>(line[b]);
      }
    }
    x[e] = to<T>(sum);
  }
}

int64_t blocks_for(int64_t elements) { return std::min<int64_t>(ceil_div(elements, threads), int64_t{64} * sm_count()); }

void run_resize(const Call& c, std::span<Tensor> out) {
  const Tensor x = c.in[0].contiguous(), &y = out[0];
  const ResizeGeometry q = resize_geometry(c.as<ResizeAttrs>(), x.shape(), y.shape());
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    launch("resize", resize_kernel<T>, blocks_for(y.numel()), threads, q, Divisor(q.out[0]), Divisor(q.out[1]), y.numel(), x.data<T>(), y.data<T>());
  });
}
void run_resize_input(const Call& c, std::span<Tensor> out) {
  const Tensor g = c.in[0].contiguous(), &x = out[0];
  const ResizeGeometry q = resize_geometry(c.as<ResizeAttrs>(), x.shape(), g.shape());
  visit<floating_types>(g.dtype(), [&]<class T>(Type<T>) {
    launch("resize_input", resize_input_kernel<T>, blocks_for(x.numel()), threads, q, Divisor(q.in[0]), Divisor(q.in[1]), x.numel(), g.data<T>(), x.data<T>());
  });
}

}  // namespace

void fill_cuda_resize() {
  fill<run_resize>(op::resize);
  fill<run_resize_input>(op::resize_input);
}

}  // namespace halftone::cuda
