#pragma once
// Scaled dot-product attention (Vaswani et al., "Attention is all you need", 2017).
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef attention, attention_grad;
}

struct AttentionOptions {
  bool causal = false;             // query i sees keys 0 to i
  double dropout = 0;              // of the weights
  std::optional<double> scale = {};  // of q k^T; 1 / sqrt(d) unless given
};
// softmax(scale q k^T + mask) v for q [b, h, t, d], k [b, g, s, d] and v [b, g, s, e] -> [b, h, t, e]; without heads, [b, t, d]
// and so on. g divides h: so many neighbouring heads of q share one of k and v. The mask broadcasts to [b, h, t, s]: bool,
// false for what is not seen, or of a floating dtype, added. A query that sees nothing has the result 0 and the gradient 0.
// Products and the softmax are in f32 for 16-bit dtypes. Weights are never in memory but for a block of queries, except in f64 or wider
// than 256 on CUDA, and in derivatives of the gradient.
HT_API Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask = {}, AttentionOptions o = {});

// How attention and its gradient are parametrised inside. attention reads q, k, v, mask and key of dropout; attention_grad q, k,
// v, what attention gave, the gradient of that, log-sum-exps of scores, mask and key. All have heads, and the mask all of
// [b, h, t, s]. Results lie in memory as q, k and v do.
struct AttentionAttrs {
  double scale, dropout;
  bool causal;
  bool mask_gradient = false;
};
// Kernels of both in public operators, for any device: what another refuses.
HT_API void attention_composed(const Call& c, std::span<Tensor> out);
HT_API void attention_grad_composed(const Call& c, std::span<Tensor> out);

}  // namespace halftone
