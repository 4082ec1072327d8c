#pragma once
// Tables of vectors.
#include "halftone/nn/module.h"
#include "halftone/ops/index.h"

namespace halftone::nn {

// Integers in [0, count) of any shape -> [..., width]. Rows start normal, that of padding_idx zero.
class HT_API Embedding : public Module {
 public:
  Embedding(Size count, Size width, EmbeddingOptions o = {});
  Parameter weight;  // [count, width]
  HT_FIELDS(weight)
  Tensor forward(const Tensor& index) override { return embedding(weight, index, options_); }

 private:
  EmbeddingOptions options_;
};

}  // namespace halftone::nn
