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
// Products and the softmax are in f32 for 16-bit dtypes. On the CPU, weights are never in memory but for a block of queries.
HT_API Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask = {}, AttentionOptions o = {});

// How attention and its gradient are parametrised inside.
struct AttentionAttrs {
  double scale, dropout;
  bool causal;
  bool mask_gradient = false;
};

}  // namespace halftone
