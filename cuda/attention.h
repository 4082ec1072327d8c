#pragma once
// Attention's kernels on CUDA: internal to cuda/.
#include "halftone/core/op.h"

namespace halftone::cuda {

// Our own, for whatever no library takes.
void run_attention(const Call& c, std::span<Tensor> out);
void run_attention_grad(const Call& c, std::span<Tensor> out);
// b times `first` from `lengths` on, b times `second` from `lengths + step` on.
void fill_lengths(int32_t* lengths, int64_t step, int64_t b, int64_t first, int64_t second);

// Has cuDNN asked first.
void fill_cudnn_attention();

}  // namespace halftone::cuda
