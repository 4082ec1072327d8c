#pragma once
// Operators that take integer indices. An index out of range is an error that names the operator, the argument and the value.
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef one_hot;
}

// target [...] of integers in [0, classes) -> [..., classes]: 1 at the index, else 0. Indices outside give a row of zeros.
HT_API Tensor one_hot(const Tensor& target, Size classes, DType dtype = DType::i64);

// How one_hot is parametrised inside.
struct OneHotAttrs { int64_t classes; DType dtype; };

}  // namespace halftone
