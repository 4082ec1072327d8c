#include "halftone/nn/embedding.h"

#include "halftone/nn/init.h"

namespace halftone::nn {

Embedding::Embedding(Size count, Size width, EmbeddingOptions o) : weight(empty({count, width})), options_(o) {
  init::normal_(weight);
  if (!o.padding_idx) return;
  int64_t row = *o.padding_idx < 0 ? *o.padding_idx + count : *o.padding_idx;
  HT_CHECK(row >= 0 && row < count, "Embedding: padding_idx ", *o.padding_idx, " of ", count, " rows");
  init::zeros_(weight.detach().select(0, row));
}

}  // namespace halftone::nn
