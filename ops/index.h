#pragma once
// Operators that take integer indices, i64 or i32. An index below 0 or past the end is an error that names the operator,
// the index, its place and the limit: at once on the CPU; on a GPU at the next wait, and what was read there is NaN.
// Indices do not count from the back.
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef one_hot, gather, scatter, scatter_add, index_select, index_add, embedding, embedding_grad, nonzero;
}

// target [...] of integers in [0, classes) -> [..., classes]: 1 at the index, else 0. Indices outside give a row of zeros.
HT_API Tensor one_hot(const Tensor& target, Size classes, DType dtype = DType::i64);

// y[i, j, k] = x[index[i, j, k], j, k] for dim 0, and so on. The index has as many dimensions as x, and y has its shape.
HT_API Tensor gather(const Tensor& x, int64_t dim, const Tensor& index);
// x with y[index[i, j, k], j, k] = source[i, j, k] for dim 0, and so on. Where an index repeats, the last element wins, and
// it alone has a gradient.
HT_API Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source);
HT_API Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, Scalar value);
// The same with += instead of =; in f32 for 16-bit dtypes, in the order of the index on the CPU and in a fixed one on a GPU.
HT_API Tensor scatter_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source);
// The given slices of dimension dim, one after the other; index [n].
HT_API Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index);
// x with alpha * source added to the given slices: slice i of source goes to slice index[i].
HT_API Tensor index_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source, Scalar alpha = 1);
// Elements of x by their row-major number, in the index's shape.
HT_API Tensor take(const Tensor& x, const Tensor& index);

struct EmbeddingOptions { std::optional<int64_t> padding_idx = {}; };  // that row gets no gradient; negative counts from the back
// Rows of weight [n, width] -> [..., width].
HT_API Tensor embedding(const Tensor& weight, const Tensor& index, EmbeddingOptions o = {});

// These two wait for the device, since their results' sizes are values: they throw under capture and ForbidSync.
// The places of elements that are not 0, one a row: [n, dimensions] (i64), in row-major order.
HT_API Tensor nonzero(const Tensor& x);
// The elements of x where mask is true, broadcast against each other, as one dimension.
HT_API Tensor masked_select(const Tensor& x, const Tensor& mask);

// How these are parametrised inside.
struct OneHotAttrs { int64_t classes; DType dtype; };
struct ScatterAttrs { int32_t dim; Scalar value; };  // the value where there is no source
struct EmbeddingAttrs {
  int64_t rows, padding_idx;  // -1: none
  bool wide = false;          // the gradient of 16-bit rows stays in f32
};

namespace detail {

// A walk over the elements of an index: `shape` row-major, where the index lies, and where the indexed tensor lies but for
// the indexed dimension, which has `limit` elements `stride` apart.
struct IndexWalk {
  Shape shape;
  Strides index, x;
  int64_t stride, limit;
};
HT_API IndexWalk walk_dim(const Meta& x, int dim, const Meta& index);      // gather, scatter
HT_API IndexWalk walk_slices(const Meta& x, int dim, const Meta& index);   // index_select: index [n]
HT_API IndexWalk walk_rows(const Meta& weight, const Meta& index);         // embedding

}  // namespace detail
}  // namespace halftone
