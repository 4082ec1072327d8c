// The entry point that the build's table of backends calls: starts CUDA and fills the kernel slots. A machine without a
// usable GPU keeps empty slots and a reason; nothing in the library touches CUDA before this.
#include "halftone/cuda/all.h"

#include <initializer_list>

#include "halftone/cuda/backend.h"

namespace halftone {

void register_cuda();
void register_cuda() {
  if (!cuda::start()) return;
  for (auto* fill : {cuda::fill_cuda_unary, cuda::fill_cuda_activation, cuda::fill_cuda_binary, cuda::fill_cuda_comparison,
                     cuda::fill_cuda_ternary, cuda::fill_cuda_reduce, cuda::fill_cuda_product, cuda::fill_cuda_extremum,
                     cuda::fill_cuda_scan, cuda::fill_cuda_order, cuda::fill_cuda_copy, cuda::fill_cuda_softmax,
                     cuda::fill_cuda_loss, cuda::fill_cuda_ctc, cuda::fill_cuda_rearrange, cuda::fill_cuda_index,
                     cuda::fill_cuda_random, cuda::fill_cuda_update, cuda::fill_cuda_optimizers, cuda::fill_cuda_schedule,
                     cuda::fill_cuda_matmul, cuda::fill_cuda_relu_grad, cuda::fill_cuda_conv, cuda::fill_cuda_batch_norm,
                     cuda::fill_cuda_norm, cuda::fill_cuda_pool, cuda::fill_cuda_resize, cuda::fill_cuda_attention, cuda::fill_cuda_recurrent})
    fill();
  cuda::mark_by_nvtx();
}

}  // namespace halftone
