#pragma once
// softmax and log_softmax along one dimension: computed in f32 for 16-bit dtypes, shifted by the largest element.
// A row of only -inf gives NaN.
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef softmax, softmax_grad, log_softmax, log_softmax_grad;
}

// exp(x) / sum(exp(x)) along dim, in x's dtype.
HT_API Tensor softmax(const Tensor& x, int64_t dim);
// x - log(sum(exp(x))) along dim; f32 for 16-bit x.
HT_API Tensor log_softmax(const Tensor& x, int64_t dim);

// The gradient operators' attributes; dtype is the gradient's.
struct SoftmaxGradAttrs { int dim; DType dtype; };

}  // namespace halftone
