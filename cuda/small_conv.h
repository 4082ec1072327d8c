#pragma once
// Convolutions of images whose windows hold few numbers: see small_conv.cu. Each returns false when it is not for them.
#include "halftone/core/op.h"

namespace halftone::cuda {

// A call of op::conv or op::conv_relu into y.
bool small_conv(const Call& c, const Tensor& y, bool relu);
// A call of op::conv_weight into w.
bool small_conv_weight(const Call& c, const Tensor& w);

}  // namespace halftone::cuda
