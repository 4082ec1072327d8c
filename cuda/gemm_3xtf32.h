#pragma once
// Products of f32 matrices, and convolutions as such products, on tensor cores with f32's accuracy: see gemm_3xtf32.cu.
#include "halftone/core/tensor.h"
#include "halftone/cuda/copy_matrices.h"
#include "halftone/ops/conv.h"

namespace halftone::cuda {

// A stack of matrices, or of their transposes where they are `turned`; its step is 0 where one serves all products.
struct GemmOperand {
  const float* data;
  MatrixStack lies;
  bool turned;
};

// Whether there are kernels for it, and it is large enough for tensor cores.
bool gemm_3xtf32_takes(const GemmOperand& a, const GemmOperand& b, int64_t batches);
// y[i] = a[i] b[i] + bias for each of the batches; y has no gaps, bias [n] may be null.
void gemm_3xtf32(const GemmOperand& a, const GemmOperand& b, const float* bias, float* y, int64_t batches);

// Whether there are kernels for a convolution: of images, in one group, neither of them huge.
bool conv_3xtf32_takes(const ConvGeometry& q);
// All tensors in f32, without gaps, beginning at multiples of 16 bytes, and with their channels last in memory: x [n, c, h, w], c and o
// being multiples of 4, w [o, c, kh, kw], y and g [n, o, ...]; bias [o] may be null.
void conv_3xtf32(const ConvGeometry& q, const Tensor& x, const Tensor& w, const float* bias, bool relu, const Tensor& y);  // o: any
// w may lie in any way; c: any
void conv_3xtf32_input(const ConvGeometry& q, const Tensor& g, const Tensor& w, const Tensor& x);
// w is [kh, kw, c, o], row-major; o: any
void conv_3xtf32_weight(const ConvGeometry& q, const Tensor& x, const Tensor& g, const Tensor& w);

}  // namespace halftone::cuda
