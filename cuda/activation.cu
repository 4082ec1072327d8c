// Activations and unary operators with parameters on CUDA.
#include "halftone/cuda/all.h"
#include "halftone/cuda/gelu.cuh"

namespace halftone::cuda {

void fill_cuda_activation() {
  elementwise::each(unary::Activations{}, []<class Op>(Type<Op>) { fill<run_unary<Op>>(unary::def<Op>); });
}

}  // namespace halftone::cuda
