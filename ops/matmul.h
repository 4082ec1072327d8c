#pragma once
// Matrix products and the linear layer.
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef matmul, linear, linear_relu, linear_gelu;
}

// The product of matrices, batched with broadcasting: a [..., m, k], b [..., k, n] -> [..., m, n]. A 1-d a is a row, a 1-d b a
// column, and their dimension goes from the result. Products accumulate in f32 (f64 for f64); strides may be any.
HT_API Tensor matmul(const Tensor& a, const Tensor& b);

// x [..., in] times w [out, in] transposed, plus b [out] -> [..., out]. b may be an undefined tensor: no bias.
HT_API Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b = {});
// The same with the activation fused: relu(linear(...)), gelu(linear(...)) rounded once.
HT_API Tensor linear_relu(const Tensor& x, const Tensor& w, const Tensor& b = {});
HT_API Tensor linear_gelu(const Tensor& x, const Tensor& w, const Tensor& b = {});

struct MatmulAttrs {
  bool wide = false;  // 16-bit operands, f32 result: how the gradients of cast weights leave the product
};

}  // namespace halftone
