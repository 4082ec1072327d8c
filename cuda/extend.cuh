#pragma once
// For a program's own operators: the CUDA kernel of an elementwise operator, from its struct alone. Public; the only
// header of this folder that a program includes, in a .cu file of its own. Halftone launches the kernel, so the program must
// share its CUDA runtime: set(CMAKE_CUDA_RUNTIME_LIBRARY Shared).
#include "halftone/cuda/elementwise.cuh"
#include "halftone/cuda/runtime.h"

#define HT_CUDA_JOIN(a, b) a##b
#define HT_CUDA_NAME(line) HT_CUDA_JOIN(ht_cuda_kernel_, line)

// At namespace scope, once, in a file that includes the header with HT_REGISTER_UNARY(function, Op).
#define HT_REGISTER_UNARY_CUDA(Op)                                                                      \
  [[maybe_unused]] static const bool HT_CUDA_NAME(__LINE__) =                                           \
      (::halftone::cuda::fill<::halftone::cuda::run_unary<Op>>(::halftone::unary::def<Op>), true);
