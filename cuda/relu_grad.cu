// The gradient before relu and a bias's in one pass, where channels are neighbours in memory.
#include "halftone/cuda/all.h"
#include "halftone/cuda/channel_sums.cuh"
#include "halftone/ops/matmul.h"

namespace halftone::cuda {
namespace {

// The second sum of a pair is not used.
template <class T, class Y> struct BiasGradient {
  using A = accumulate_t<T>;
  using Sum = Pair<A>;
  struct Here {};
  static constexpr bool by_image = false, after_relu = true, reads_both = false;
  Y* y;
  __device__ Here at(int64_t, int64_t) const { return {}; }
  __device__ bool shared(int) const { return true; }
  __device__ Sum add(Sum s, T g, T, Here) const { return {s.a + to<A>(g), s.b}; }
  __device__ void finish(Sum s, int64_t c) const { y[c] = to<Y>(s.a); }
};

void run_relu_grad_sums(const Call& c, std::span<Tensor> out) {
  const Tensor &y = c.in[0], &g = c.in[1];
  const Planes p = planes_in_memory(y);
  const bool alike = g.strides() == y.strides() && out[0].strides() == y.strides();
  if (p.inner != 1 || !alike || y.numel() == 0) return relu_grad_sums_by_parts(c, out);
  visit<floating_types>(y.dtype(), [&]<class T>(Type<T>) {
    auto run = [&]<class Y>(Y* sums) {
      channel_sums<T>("relu_grad_sums", BiasGradient<T, Y>{sums}, g.data<T>(), g.data<T>(), p, Relued<T>{.y = y.data<T>(), .masked = out[0].data<T>()});
    };
    if (out[1].dtype() == y.dtype()) run(out[1].data<T>());
    else run(out[1].data<float>());
  });
}

}  // namespace

void fill_cuda_relu_grad() { fill<run_relu_grad_sums>(op::relu_grad_sums); }

}  // namespace halftone::cuda
