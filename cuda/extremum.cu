// Reductions on CUDA that choose an element.
#include "halftone/cuda/all.h"
#include "halftone/cuda/reduce.cuh"

namespace halftone::cuda {

void fill_cuda_extremum() {
  elementwise::each(reduce::Extrema{}, []<class Op>(Type<Op>) { fill<run_reduce<Op>>(reduce::def<Op>); });
}

}  // namespace halftone::cuda
