// Unary operators on CUDA, but for activations: those are in activation.cu, so that both compile at once.
#include "halftone/cuda/all.h"
#include "halftone/cuda/elementwise.cuh"

namespace halftone::cuda {

void fill_cuda_unary() {
  elementwise::each(unary::Plain{}, []<class Op>(Type<Op>) { fill<run_unary<Op>>(unary::def<Op>); });
}

}  // namespace halftone::cuda
