#include "halftone/nn/attention.h"

#include <limits>

#include "halftone/nn/init.h"
#include "halftone/ops/attention.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/shape.h"

namespace halftone::nn {
namespace {

// Both masks as one that broadcasts to [n, heads, t, s].
Tensor combined(const AttentionMasks& m) {
  Tensor mask = m.mask.defined() && m.mask.rank() == 3 ? m.mask.unsqueeze(1) : m.mask;
  if (!m.keys.defined()) return mask;
  HT_CHECK(m.keys.rank() == 2 && m.keys.dtype() == DType::b8, "MultiheadAttention: expected keys [n, s] (b8), got ",
           m.keys.meta());
  Tensor keys = m.keys.unsqueeze(1).unsqueeze(1);
  if (!mask.defined()) return keys;
  return mask.dtype() == DType::b8 ? logical_and(mask, keys)
                                   : where(keys, mask, -std::numeric_limits<double>::infinity());
}

MultiheadAttentionOptions attention_of(const TransformerLayerOptions& o) {
  return {.dropout = o.dropout, .bias = o.bias, .batch_first = o.batch_first};
}
LayerNormOptions norm_of(const TransformerLayerOptions& o) { return {.eps = o.eps, .bias = o.bias}; }

// x plus what `f` makes of it, normalised before or after.
template <class F> Tensor block(const Tensor& x, LayerNorm& norm, bool norm_first, F f) {
  return norm_first ? x + f(norm(x)) : norm(x + f(x));
}

}  // namespace

MultiheadAttention::MultiheadAttention(Size width, Size heads, MultiheadAttentionOptions o)
    : out_proj(width, width, {.bias = o.bias}), width_(width), heads_(heads), options_(o) {
  HT_CHECK(width > 0 && heads > 0 && width % heads == 0, "MultiheadAttention: a width of ", width, " does not divide into ",
           heads, " heads");
  HT_CHECK(o.dropout >= 0 && o.dropout <= 1, "MultiheadAttention: expected dropout in [0, 1], got ", o.dropout);
  Size k = o.kdim.value_or(width), v = o.vdim.value_or(width);
  auto draw = [](const Shape& shape) { return Parameter(init::xavier_uniform_(empty(shape))); };
  if (k == width && v == width) in_proj_weight = draw({3 * width, width});
  else {
    q_proj_weight = draw({width, width});
    k_proj_weight = draw({width, k});
    v_proj_weight = draw({width, v});
  }
  if (!o.bias) return;
  in_proj_bias = Parameter(zeros({3 * width}));
  init::zeros_(out_proj.bias);
}

Tensor MultiheadAttention::forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionMasks& m) {
  const char* layout = options_.batch_first ? "[n, t, " : "[t, n, ";
  auto check = [&](const Tensor& x, const char* what, int64_t width) {
    HT_CHECK(x.rank() == 3 && x.size(2) == width, "MultiheadAttention: expected ", what, " ", layout, width, "], got ", x.meta());
  };
  check(q, "q", width_);
  check(k, "k", options_.kdim.value_or(width_));
  check(v, "v", options_.vdim.value_or(width_));

  std::vector<Tensor> parts;
  if (in_proj_weight.defined() && q.body() == k.body() && k.body() == v.body()) {
    parts = chunk(linear(q, in_proj_weight, in_proj_bias), 3, -1);
  } else {
    std::vector<Tensor> weights{q_proj_weight, k_proj_weight, v_proj_weight}, biases(3);
    if (in_proj_weight.defined()) weights = chunk(in_proj_weight, 3);
    if (in_proj_bias.defined()) biases = chunk(in_proj_bias, 3);
    const Tensor* inputs[] = {&q, &k, &v};
    for (size_t i = 0; i < 3; ++i) parts.push_back(linear(*inputs[i], weights[i], biases[i]));
  }
  for (auto& x : parts) {  // [n, heads, t, width / heads]
    x = x.reshape({x.size(0), x.size(1), heads_, width_ / heads_});
    x = options_.batch_first ? x.transpose(1, 2) : x.permute({1, 2, 0, 3});
  }
  Tensor y = scaled_dot_product_attention(parts[0], parts[1], parts[2], combined(m),
                                          {.causal = m.causal, .dropout = training() ? options_.dropout : 0});
  y = options_.batch_first ? y.transpose(1, 2) : y.permute({2, 0, 1, 3});
  return out_proj(y.reshape(q.shape()));
}

TransformerEncoderLayer::TransformerEncoderLayer(Size width, Size heads, TransformerLayerOptions o)
    : self_attn(width, heads, attention_of(o)),
      linear1(width, o.feedforward, {.bias = o.bias, .activation = o.activation}),
      dropout(o.dropout),
      linear2(o.feedforward, width, {.bias = o.bias}),
      norm1(Shape{width}, norm_of(o)),
      norm2(Shape{width}, norm_of(o)),
      dropout1(o.dropout),
      dropout2(o.dropout),
      norm_first_(o.norm_first) {}
Tensor TransformerEncoderLayer::forward(const Tensor& x, const AttentionMasks& m) {
  Tensor y = block(x, norm1, norm_first_, [&](const Tensor& t) { return dropout1(self_attn(t, t, t, m)); });
  return block(y, norm2, norm_first_, [&](const Tensor& t) { return dropout2(linear2(dropout(linear1(t)))); });
}

TransformerDecoderLayer::TransformerDecoderLayer(Size width, Size heads, TransformerLayerOptions o)
    : self_attn(width, heads, attention_of(o)),
      multihead_attn(width, heads, attention_of(o)),
      linear1(width, o.feedforward, {.bias = o.bias, .activation = o.activation}),
      dropout(o.dropout),
      linear2(o.feedforward, width, {.bias = o.bias}),
      norm1(Shape{width}, norm_of(o)),
      norm2(Shape{width}, norm_of(o)),
      norm3(Shape{width}, norm_of(o)),
      dropout1(o.dropout),
      dropout2(o.dropout),
      dropout3(o.dropout),
      norm_first_(o.norm_first) {}
Tensor TransformerDecoderLayer::forward(const Tensor& x, const Tensor& memory, const AttentionMasks& m,
                                        const AttentionMasks& of_memory) {
  Tensor y = block(x, norm1, norm_first_, [&](const Tensor& t) { return dropout1(self_attn(t, t, t, m)); });
  y = block(y, norm2, norm_first_, [&](const Tensor& t) { return dropout2(multihead_attn(t, memory, memory, of_memory)); });
  return block(y, norm3, norm_first_, [&](const Tensor& t) { return dropout3(linear2(dropout(linear1(t)))); });
}

}  // namespace halftone::nn
