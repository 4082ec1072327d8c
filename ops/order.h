#pragma once
// Elements along one dimension in order. NaN counts as the largest of all, as in argmax; -0 and 0 are equal, and equal
// elements keep the order in which they came.
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef sort, topk, take_along, put_along;
}

// Elements, and where along the dimension they were (i64).
struct ValuesIndices { Tensor values, indices; };

struct SortOptions { bool descending = false; };
HT_API ValuesIndices sort(const Tensor& x, Size dim = -1, SortOptions o = {});
struct TopkOptions { bool largest = true; };
// The k largest (smallest) elements, the largest (smallest) first.
HT_API ValuesIndices topk(const Tensor& x, Size k, Size dim = -1, TopkOptions o = {});
// The largest (smallest) elements along a dimension, of equal ones the first, which gets the gradient. In min, NaN counts as
// the smallest.
HT_API ValuesIndices max(const Tensor& x, Size dim, ReduceOptions o = {});
HT_API ValuesIndices min(const Tensor& x, Size dim, ReduceOptions o = {});

// How they are parametrised inside. The first k of a line in order; a place that take_along reads is read once.
struct OrderAttrs { int dim; int64_t k; bool descending; };
struct AlongAttrs { int dim; int64_t n; };

}  // namespace halftone
