// sum, mean, var and std on CUDA.
#include "halftone/cuda/reduce.cuh"

#include "halftone/cuda/all.h"

namespace halftone::cuda {
namespace {

// Variance: the mean, its correction by the mean distance from it, then the squared distances

template <class T> struct Recentre {
  using Element = T;
  using State = accumulate_t<T>;
  using Result = State;
  const State* centre;
  __device__ static State none() { return 0; }
  __device__ State add(State s, T v, int64_t, int64_t o) const { return s + (to<State>(v) - centre[o]); }
  __device__ static State merge(State s, State t) { return s + t; }
  __device__ State finish(State s, int64_t n, int64_t o) const { return centre[o] + s / static_cast<State>(n); }
};
template <class T> struct Spread {
  using Element = T;
  using State = accumulate_t<T>;
  using Result = T;
  const State* centre;
  int64_t correction;
  bool root;
  __device__ static State none() { return 0; }
  __device__ State add(State s, T v, int64_t, int64_t o) const {
    State d = to<State>(v) - centre[o];
    return s + d * d;
  }
  __device__ static State merge(State s, State t) { return s + t; }
  __device__ T finish(State s, int64_t n, int64_t) const {
    State square = s / static_cast<State>(n > correction ? n - correction : 0);
    return to<T>(root ? ::sqrt(square) : square);
  }
};

template <bool root> void run_spread(const Call& c, std::span<Tensor> out) {
  auto v = c.as<reduce::Var>();
  const Tensor& x = c.in[0];
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    using A = accumulate_t<T>;
    size_t bytes = static_cast<size_t>(out[0].numel()) * sizeof(A);
    Scratch first(bytes), second(bytes);
    reduce(c.op->name, Plain<reduce::Mean, T, A>{}, x, v.dims, first.as<A>());
    reduce(c.op->name, Recentre<T>{first.as<A>()}, x, v.dims, second.as<A>());
    reduce(c.op->name, Spread<T>{second.as<A>(), v.correction, root}, x, v.dims, out[0].data<T>());
  });
}

}  // namespace

void fill_cuda_reduce() {
  elementwise::each(reduce::Sums{}, []<class Op>(Type<Op>) { fill<run_reduce<Op>>(reduce::def<Op>); });
  fill<run_spread<false>>(op::var);
  fill<run_spread<true>>(op::stddev);
}

}  // namespace halftone::cuda
