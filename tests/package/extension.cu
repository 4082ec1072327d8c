// The operator's CUDA kernel, where Halftone was built with CUDA.
#include <halftone/cuda/extend.cuh>

#include "extension.h"

HT_REGISTER_UNARY_CUDA(Snake)
