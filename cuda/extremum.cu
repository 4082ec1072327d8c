// Reductions on CUDA that choose an element: of nothing they have no value.
#include "halftone/cuda/all.h"
#include "halftone/cuda/reduce.cuh"

namespace halftone::cuda {

void fill_cuda_extremum() {
  elementwise::each(reduce::All{}, []<class Op>(Type<Op>) {
    if constexpr (!reduce::has_identity<Op>) fill<run_reduce<Op>>(reduce::def<Op>);
  });
}

}  // namespace halftone::cuda
