// Index operators on CUDA.
#include "halftone/ops/index.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"

namespace halftone::cuda {
namespace {

template <class Y>
__global__ void __launch_bounds__(256)
    one_hot_kernel(Y* y, const int64_t* target, const int64_t n, const Divisor classes) {
  const Y one = to<Y>(true), zero = to<Y>(false);
  for (int64_t i = thread_index(); i < n * classes.divisor; i += grid_threads()) {
    const int64_t row = classes.divide(i);
    y[i] = target[row] == i - row * classes.divisor ? one : zero;
  }
}

void run_one_hot(const Call& c, std::span<Tensor> out) {
  const Tensor target = c.in[0].contiguous();
  const int64_t blocks = std::min<int64_t>(ceil_div(out[0].numel(), 256), int64_t{32} * sm_count());
  visit(out[0].dtype(), [&]<class Y>(Type<Y>) {
    launch("one_hot", one_hot_kernel<Y>, blocks, 256, out[0].data<Y>(), target.data<int64_t>(), target.numel(),
           Divisor(c.as<OneHotAttrs>().classes));
  });
}

}  // namespace

void fill_cuda_index() { fill<run_one_hot>(op::one_hot); }

}  // namespace halftone::cuda
