#pragma once
// Matrix products and the linear layer.
#include <string_view>
#include <vector>

#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef matmul, linear, linear_relu, linear_gelu, linear_grad, relu_grad_sums;
}

// The product of matrices, batched with broadcasting: a [..., m, k], b [..., k, n] -> [..., m, n]. A 1-d a is a row, a 1-d b a
// column, and their dimension goes from the result. Products accumulate in f32 (f64 for f64); strides may be any.
HT_API Tensor matmul(const Tensor& a, const Tensor& b);

// x [..., in] times w [out, in] transposed, plus b [out] -> [..., out]. b may be an undefined tensor: no bias.
HT_API Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b = {});
// The same with the activation fused: relu(linear(...)), gelu(linear(...)) rounded once.
HT_API Tensor linear_relu(const Tensor& x, const Tensor& w, const Tensor& b = {});
HT_API Tensor linear_gelu(const Tensor& x, const Tensor& w, const Tensor& b = {});

// ---- spelled in matmul
// Pairs of matrices [b, m, k] and [b, k, n].
HT_API Tensor bmm(const Tensor& a, const Tensor& b);
// beta * c + alpha * (a b), c broadcast to the product; with beta 0, c is not read. Of matrices, and of batches of them.
struct AddmmOptions { double beta = 1, alpha = 1; };
HT_API Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, AddmmOptions o = {});
HT_API Tensor baddbmm(const Tensor& c, const Tensor& a, const Tensor& b, AddmmOptions o = {});
// The sum of products of two vectors; all products of their elements, [m, n].
HT_API Tensor dot(const Tensor& a, const Tensor& b);
HT_API Tensor outer(const Tensor& a, const Tensor& b);
// Sums of products by Einstein's notation: "bij,bjk->bik". A letter names a dimension of each operand, "..." the others,
// which broadcast; letters that the result lacks are summed. Without "->", the result has the letters that appear once,
// sorted. Operands are multiplied from left to right, pairs with a common sum as batched matrix products.
HT_API Tensor einsum(std::string_view equation, const std::vector<Tensor>& operands);

struct MatmulAttrs {
  bool wide = false;  // 16-bit operands, f32 result: how the gradients of cast weights leave the product
};
// Of linear_grad: which gradients it computes, bit 0 of x, 1 of w, 2 of b; the others are empty. `wide` has the same bits.
struct LinearGradAttrs { uint32_t wanted = 7, wide = 0; };
// Of relu_grad_sums, the gradient before relu and its sums over all dimensions but the second, which are a bias's gradient: sums of 16-bit
// elements in f32.
struct ReluGradSumsAttrs { bool wide = false; };
// Their kernels on any device: products and a sum, one by one.
HT_API void linear_grad_by_parts(const Call& c, std::span<Tensor> out);
HT_API void relu_grad_sums_by_parts(const Call& c, std::span<Tensor> out);

}  // namespace halftone
