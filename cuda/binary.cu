// Binary operators on CUDA whose results are numbers; the others are in comparison.cu, so that both compile at once.
#include "halftone/cuda/all.h"
#include "halftone/cuda/gelu.cuh"

namespace halftone::cuda {

void fill_cuda_binary() {
  elementwise::each(binary::All{}, []<class Op>(Type<Op>) {
    if constexpr (!binary::gives_bool<Op>()) fill<run_binary<Op>>(binary::def<Op>);
  });
}

}  // namespace halftone::cuda
