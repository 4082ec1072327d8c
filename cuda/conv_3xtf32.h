#pragma once
// Convolutions of f32 images on tensor cores: see gemm_3xtf32.cu. Each returns false when it is not for them.
#include "halftone/core/op.h"

namespace halftone::cuda {

// A call of op::conv or op::conv_relu into y.
bool conv_3xtf32(const Call& c, const Tensor& y, bool relu);
// A call of op::conv_input into x.
bool conv_input_3xtf32(const Call& c, const Tensor& x);
// A call of op::conv_weight into w.
bool conv_weight_3xtf32(const Call& c, const Tensor& w);

}  // namespace halftone::cuda
