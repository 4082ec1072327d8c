// Ternary operators on CUDA.
#include "halftone/cuda/all.h"
#include "halftone/cuda/elementwise.cuh"

namespace halftone::cuda {

void fill_cuda_ternary() {
  elementwise::each(ternary::All{}, []<class Op>(Type<Op>) { fill<run_ternary<Op>>(ternary::def<Op>); });
}

}  // namespace halftone::cuda
