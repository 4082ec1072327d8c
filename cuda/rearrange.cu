// Rearrangements on CUDA: each thread computes where its elements come from. Elements move as bits.
#include "halftone/ops/rearrange.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"

namespace halftone::cuda {
namespace {

constexpr int threads = 256;
int64_t grid_for(int64_t n) { return std::min<int64_t>(ceil_div(n, threads), int64_t{32} * sm_count()); }

template <class U> U* bits(const Tensor& t) { return static_cast<U*>(t.raw_data()); }

// ---- flip: a copy with negative strides

template <class U>
__global__ void __launch_bounds__(threads) gather_kernel(U* y, const U* x, const Layout<1, int64_t> at) {
  wait_for_previous();
  for (int64_t i = thread_index(); i < at.count; i += grid_threads()) y[i] = x[at.locate(i)];
}

void run_flip(const Call& c, std::span<Tensor> out) {
  const Tensor& x = c.in[0];
  const auto dims = c.as<uint32_t>();
  if (x.numel() == 0) return;
  Strides strides = x.strides();
  int64_t last = 0;
  for (size_t d = 0; d < strides.size(); ++d) {
    if (!(dims >> d & 1u)) continue;
    last += (x.shape()[d] - 1) * strides[d];
    strides[d] = -strides[d];
  }
  visit_bits(x.dtype(), [&]<class U>(Type<U>) {
    launch("flip", gather_kernel<U>, grid_for(x.numel()), threads, bits<U>(out[0]),
           static_cast<const U*>(bits<U>(x) + last), Layout<1, int64_t>(Rows<1>(x.shape(), {strides})));
  });
}

// ---- triangles

template <bool upper, class U>
__global__ void __launch_bounds__(threads)
    triangle_kernel(U* y, const U* x, const Layout<1, int64_t> at, const Divisor rows, const Divisor columns,
                    const int64_t diagonal) {
  wait_for_previous();
  for (int64_t e = thread_index(); e < at.count; e += grid_threads()) {
    const int64_t row = columns.divide(e), j = e - row * columns.divisor;
    const int64_t i = row - rows.divide(row) * rows.divisor;
    const bool kept = upper ? j >= i + diagonal : j <= i + diagonal;
    y[e] = kept ? x[at.locate(e)] : U(0);
  }
}

template <bool upper> void run_triangle(const Call& c, std::span<Tensor> out) {
  const Tensor& x = c.in[0];
  if (x.numel() == 0) return;
  visit_bits(x.dtype(), [&]<class U>(Type<U>) {
    launch(c.op->name, triangle_kernel<upper, U>, grid_for(x.numel()), threads, bits<U>(out[0]),
           static_cast<const U*>(bits<U>(x)), Layout<1, int64_t>(Rows<1>(x.shape(), {x.strides()})),
           Divisor(x.size(-2)), Divisor(x.size(-1)), c.as<int64_t>());
  });
}

// ---- pad

// The padded sizes, for dividing, and the strides of the tensor inside.
struct Padded {
  detail::PadPlan plan;
  Divisor size[max_rank];
  int64_t stride[max_rank];
  int64_t count;
};

template <class U>
__global__ void __launch_bounds__(threads) pad_kernel(U* y, const U* x, const Padded p, const U value) {
  wait_for_previous();
  for (int64_t e = thread_index(); e < p.count; e += grid_threads()) {
    int64_t rest = e, at = 0;
    bool outside = false;
    for (int d = p.plan.rank - 1; d >= 0; --d) {
      const int64_t above = p.size[d].divide(rest);
      const int64_t from = p.plan.dim[d].source(p.plan.mode, rest - above * p.size[d].divisor);
      outside |= from < 0;
      at += from * p.stride[d];
      rest = above;
    }
    y[e] = outside ? value : x[at];
  }
}

void run_pad(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<PadAttrs>();
  const Tensor &x = c.in[0], &y = out[0];
  if (y.numel() == 0) return;
  Padded p{detail::pad_plan(a, y.meta()), {}, {}, y.numel()};
  for (size_t d = 0; d < y.shape().size(); ++d) {
    p.size[d] = Divisor(y.shape()[d]);
    p.stride[d] = x.strides()[d];
  }
  visit(x.dtype(), [&]<class T>(Type<T>) {
    const T value = convert<T>(a.value);
    visit_bits(x.dtype(), [&]<class U>(Type<U>) {
      if constexpr (sizeof(U) == sizeof(T))
        launch("pad", pad_kernel<U>, grid_for(p.count), threads, bits<U>(y), static_cast<const U*>(bits<U>(x)), p,
               bit_cast<U>(value));
    });
  });
}

template <class T>
__global__ void __launch_bounds__(threads)
    pad_grad_kernel(T* y, const T* g, const detail::PadPlan plan, const int64_t count) {
  wait_for_previous();
  for (int64_t e = thread_index(); e < count; e += grid_threads())
    y[e] = to<T>(plan.sum_of_images<compute_t<T>>(g, e));
}

void run_pad_grad(const Call& c, std::span<Tensor> out) {
  const int64_t n = out[0].numel();
  if (n == 0) return;
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    launch("pad_grad", pad_grad_kernel<T>, grid_for(n), threads, out[0].data<T>(),
           static_cast<const T*>(c.in[0].data<T>()), detail::pad_plan(c.as<PadAttrs>(), c.in[0].meta()), n);
  });
}

}  // namespace

void fill_cuda_rearrange() {
  fill<run_flip>(op::flip);
  fill<run_triangle<false>>(op::tril);
  fill<run_triangle<true>>(op::triu);
  fill<run_pad>(op::pad);
  fill<run_pad_grad>(op::pad_grad);
}

}  // namespace halftone::cuda
