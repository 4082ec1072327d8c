// prod, logsumexp, all, any and norm on CUDA.
#include "halftone/cuda/all.h"
#include "halftone/cuda/reduce.cuh"

namespace halftone::cuda {
namespace {

void run_norm(const Call& c, std::span<Tensor> out) {
  auto a = c.as<reduce::Norm>();
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    if (a.p == 2) reduce("norm", Plain<reduce::NormOf<true>, T, T>{{a.p}}, c.in[0], a.dims, out[0].data<T>());
    else reduce("norm", Plain<reduce::NormOf<false>, T, T>{{a.p}}, c.in[0], a.dims, out[0].data<T>());
  });
}

}  // namespace

void fill_cuda_product() {
  elementwise::each(reduce::Others{}, []<class Op>(Type<Op>) { fill<run_reduce<Op>>(reduce::def<Op>); });
  fill<run_norm>(op::norm);
}

}  // namespace halftone::cuda
