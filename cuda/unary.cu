// Unary operators on CUDA.
#include "halftone/cuda/all.h"
#include "halftone/cuda/elementwise.cuh"

namespace halftone::cuda {

void fill_cuda_unary() {
  elementwise::each(unary::All{}, []<class Op>(Type<Op>) { fill<run_unary<Op>>(unary::def<Op>); });
}

}  // namespace halftone::cuda
