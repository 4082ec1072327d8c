// Steps of recurrent networks on CUDA: a thread for each element of the state.
#include "halftone/ops/recurrent.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"

namespace halftone::cuda {
namespace {

using recurrent::GRU;
using recurrent::LSTM;

constexpr int threads = 256;
int64_t blocks(int64_t n) { return std::min<int64_t>(ceil_div(n, threads), int64_t{16} * sm_count()); }
Divisor width_of(const Tensor& state) { return Divisor(std::max<int64_t>(1, state.shape().back())); }

// Where element e of the state has its gates, m apart.
__device__ inline int64_t gates_at(int64_t e, const Divisor& m, int gates) {
  const int64_t row = m.divide(e);
  return row * gates * m.divisor + (e - row * m.divisor);
}
template <class C, int n, class X> __device__ void gather(C (&v)[n], const X* from, int64_t at, int64_t step) {
#pragma unroll
  for (int k = 0; k < n; ++k) v[k] = to<C>(from[at + k * step]);
}
template <class C, int n, class X> __device__ void scatter(const C (&v)[n], X* x, int64_t at, int64_t step) {
#pragma unroll
  for (int k = 0; k < n; ++k) x[at + k * step] = to<X>(v[k]);
}
template <class C, class X> __device__ void gather_sum(C (&sum)[4], const X* x, const X* y, int64_t at, int64_t step) {
  C other[4];
  gather(sum, x, at, step);
  gather(other, y, at, step);
#pragma unroll
  for (int k = 0; k < 4; ++k) sum[k] += other[k];
}

template <class X, class S>
__global__ void __launch_bounds__(threads)
    lstm_kernel(X* h_new, S* c_new, const X* x, const X* y, const S* c, const int64_t n, const Divisor m) {
  wait_for_previous();
  using C = compute_t<S>;
  for (int64_t e = thread_index(); e < n; e += grid_threads()) {
    C sum[4], h, state;
    gather_sum(sum, x, y, gates_at(e, m, 4), m.divisor);
    LSTM::forward(sum, to<C>(c[e]), h, state);
    h_new[e] = to<X>(h);
    c_new[e] = to<S>(state);
  }
}
template <class X, class S>
__global__ void __launch_bounds__(threads)
    lstm_grad_kernel(X* d, S* dc, const X* x, const X* y, const S* c, const X* gh, const S* gc, const int64_t n, const Divisor m) {
  wait_for_previous();
  using C = compute_t<S>;
  for (int64_t e = thread_index(); e < n; e += grid_threads()) {
    const int64_t at = gates_at(e, m, 4);
    C sum[4], slopes[4], state;
    gather_sum(sum, x, y, at, m.divisor);
    LSTM::backward(sum, to<C>(c[e]), gh ? to<C>(gh[e]) : C(0), gc ? to<C>(gc[e]) : C(0), slopes, state);
    scatter(slopes, d, at, m.divisor);
    dc[e] = to<S>(state);
  }
}
template <class X>
__global__ void __launch_bounds__(threads) gru_kernel(X* h_new, const X* x, const X* y, const X* h, const int64_t n, const Divisor m) {
  wait_for_previous();
  using C = compute_t<X>;
  for (int64_t e = thread_index(); e < n; e += grid_threads()) {
    const int64_t at = gates_at(e, m, 3);
    C a[3], b[3];
    gather(a, x, at, m.divisor);
    gather(b, y, at, m.divisor);
    h_new[e] = to<X>(GRU::forward(a, b, to<C>(h[e])));
  }
}
template <class X>
__global__ void __launch_bounds__(threads)
    gru_grad_kernel(X* dx, X* dy, X* dh, const X* x, const X* y, const X* h, const X* g, const int64_t n, const Divisor m) {
  wait_for_previous();
  using C = compute_t<X>;
  for (int64_t e = thread_index(); e < n; e += grid_threads()) {
    const int64_t at = gates_at(e, m, 3);
    C a[3], b[3], da[3], db[3], state;
    gather(a, x, at, m.divisor);
    gather(b, y, at, m.divisor);
    GRU::backward(a, b, to<C>(h[e]), to<C>(g[e]), da, db, state);
    scatter(da, dx, at, m.divisor);
    scatter(db, dy, at, m.divisor);
    dh[e] = to<X>(state);
  }
}

Tensors dense(const Call& c) {
  Tensors in;
  for (const Tensor& t : c.in) in.push_back(t.defined() ? t.contiguous() : t);
  return in;
}
template <class T> const T* data_or_null(const Tensor& t) { return t.defined() ? t.data<T>() : nullptr; }

void run_lstm(const Call& call, std::span<Tensor> out) {
  const Tensors in = dense(call);
  const int64_t n = in[2].numel();
  recurrent::visit_pair(call, [&]<class X, class S>(Type<X>, Type<S>) {
    launch("lstm_step", lstm_kernel<X, S>, blocks(n), threads, out[0].data<X>(), out[1].data<S>(), in[0].data<X>(), in[1].data<X>(),
           in[2].data<S>(), n, width_of(in[2]));
  });
}
void run_lstm_grad(const Call& call, std::span<Tensor> out) {
  const Tensors in = dense(call);
  const int64_t n = in[2].numel();
  recurrent::visit_pair(call, [&]<class X, class S>(Type<X>, Type<S>) {
    launch("lstm_step_grad", lstm_grad_kernel<X, S>, blocks(n), threads, out[0].data<X>(), out[1].data<S>(), in[0].data<X>(),
           in[1].data<X>(), in[2].data<S>(), data_or_null<X>(in[3]), data_or_null<S>(in[4]), n, width_of(in[2]));
  });
}
void run_gru(const Call& call, std::span<Tensor> out) {
  const Tensors in = dense(call);
  const int64_t n = in[2].numel();
  visit<floating_types>(in[0].dtype(), [&]<class X>(Type<X>) {
    launch("gru_step", gru_kernel<X>, blocks(n), threads, out[0].data<X>(), in[0].data<X>(), in[1].data<X>(), in[2].data<X>(), n,
           width_of(in[2]));
  });
}
void run_gru_grad(const Call& call, std::span<Tensor> out) {
  const Tensors in = dense(call);
  const int64_t n = in[2].numel();
  visit<floating_types>(in[0].dtype(), [&]<class X>(Type<X>) {
    launch("gru_step_grad", gru_grad_kernel<X>, blocks(n), threads, out[0].data<X>(), out[1].data<X>(), out[2].data<X>(), in[0].data<X>(),
           in[1].data<X>(), in[2].data<X>(), in[3].data<X>(), n, width_of(in[2]));
  });
}

}  // namespace

void fill_cuda_recurrent() {
  fill<run_lstm>(op::lstm_step);
  fill<run_lstm_grad>(op::lstm_step_grad);
  fill<run_gru>(op::gru_step);
  fill<run_gru_grad>(op::gru_step_grad);
}

}  // namespace halftone::cuda
