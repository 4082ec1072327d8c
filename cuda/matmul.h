#pragma once
// Switches of the matrix products on CUDA.
#include "halftone/core/api.h"

namespace halftone::cuda {

// f32 products through TF32 tensor cores: about 8 times as fast, with 10 bits of mantissa in each factor. Off unless
// asked for; process-wide; changes no dtype.
HT_API void allow_tf32(bool on);
HT_API bool tf32_allowed();

}  // namespace halftone::cuda
