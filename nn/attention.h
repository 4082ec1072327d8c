#pragma once
// Attention with heads, and the layers of transformers (Vaswani et al., "Attention is all you need", 2017), with PyTorch's names.
#include "halftone/nn/dropout.h"
#include "halftone/nn/linear.h"
#include "halftone/nn/norm.h"

namespace halftone::nn {

struct MultiheadAttentionOptions {
  double dropout = 0;  // of the weights of attention, in training
  bool bias = true;
  std::optional<Size> kdim = {}, vdim = {};  // widths of k and v, where they are not that of q
  bool batch_first = false;                  // [n, t, width], not [t, n, width]
};
// What queries may see; all of these at once. Masks are those of scaled_dot_product_attention: bool, true for what is seen
// (PyTorch's module has it the other way round), or of a floating dtype, added.
struct AttentionMasks {
  Tensor mask = {};     // [t, s], [n, t, s] or [n, heads, t, s]
  Tensor keys = {};     // [n, s], bool: false for padding
  bool causal = false;  // query i sees keys 0 to i
};
// q [t, n, width], k [s, n, kdim], v [s, n, vdim] -> [t, n, width]. Weights start xavier_uniform_, biases as zeros, out_proj
// as Linear's weight.
class HT_API MultiheadAttention : public Module {
 public:
  MultiheadAttention(Size width, Size heads, MultiheadAttentionOptions o = {});
  Parameter in_proj_weight;                                // [3 * width, width]: of q, k, v; undefined where widths differ
  Parameter q_proj_weight, k_proj_weight, v_proj_weight;  // in its place: [width, width], [width, kdim], [width, vdim]
  Parameter in_proj_bias;                                  // [3 * width]
  Linear out_proj;
  HT_FIELDS(in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, in_proj_bias, out_proj)
  Tensor forward(const Tensor& x) override { return forward(x, x, x); }  // self-attention without a mask
  Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionMasks& m = {});
  using Module::operator();
  Tensor operator()(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionMasks& m = {}) {
    return forward(q, k, v, m);
  }

 private:
  int64_t width_, heads_;
  MultiheadAttentionOptions options_;
};

struct TransformerLayerOptions {
  Size feedforward = 2048;
  double dropout = 0.1;
  Activation activation = Activation::relu;  // between the two linear layers
  double eps = 1e-5;
  bool batch_first = false;
  bool norm_first = false;  // x + f(norm(x)), not norm(x + f(x))
  bool bias = true;
};
// Self-attention, then two linear layers.
class HT_API TransformerEncoderLayer : public Module {
 public:
  TransformerEncoderLayer(Size width, Size heads, TransformerLayerOptions o = {});
  MultiheadAttention self_attn;
  Linear linear1;
  Dropout dropout;
  Linear linear2;
  LayerNorm norm1, norm2;
  Dropout dropout1, dropout2;
  HT_FIELDS(self_attn, linear1, dropout, linear2, norm1, norm2, dropout1, dropout2)
  Tensor forward(const Tensor& x) override { return forward(x, AttentionMasks()); }
  Tensor forward(const Tensor& x, const AttentionMasks& m);
  using Module::operator();
  Tensor operator()(const Tensor& x, const AttentionMasks& m) { return forward(x, m); }

 private:
  bool norm_first_;
};
// Self-attention, attention to `memory`, what an encoder gave, then two linear layers.
class HT_API TransformerDecoderLayer : public Module {
 public:
  TransformerDecoderLayer(Size width, Size heads, TransformerLayerOptions o = {});
  MultiheadAttention self_attn, multihead_attn;
  Linear linear1;
  Dropout dropout;
  Linear linear2;
  LayerNorm norm1, norm2, norm3;
  Dropout dropout1, dropout2, dropout3;
  HT_FIELDS(self_attn, multihead_attn, linear1, dropout, linear2, norm1, norm2, norm3, dropout1, dropout2, dropout3)
  // m: what x sees of itself; of_memory: what it sees of memory.
  Tensor forward(const Tensor& x, const Tensor& memory, const AttentionMasks& m = {}, const AttentionMasks& of_memory = {});
  Tensor operator()(const Tensor& x, const Tensor& memory, const AttentionMasks& m = {},
                    const AttentionMasks& of_memory = {}) {
    return forward(x, memory, m, of_memory);
  }

 private:
  bool norm_first_;
};

}  // namespace halftone::nn
