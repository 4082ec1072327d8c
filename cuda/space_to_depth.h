#pragma once
// Convolutions of 2-D images of few channels whose kernel goes two pixels at a time, as that of a large network's first layer does: the
// same sums are formed over blocks of pixels, each taken as one pixel with the channels of all of them ("space to depth"), by a smaller kernel that
// goes one block at a time. Libraries want channels in eights, and are several times as fast then. Blocks are of 2 x 2 pixels, or of 2 x 4 for two
// neighbouring results at a time: channels c and o + c of the one are channel c of the other's columns 2 j and 2 j + 1, where channels
// come last the same memory. A block that a window holds in part is multiplied by zeros for the rest, so that an infinity or a NaN there reaches
// that window's result, too.
#include "halftone/core/tensor.h"
#include "halftone/ops/conv.h"

namespace halftone::cuda {

// Whether a 2-D convolution is one of these, and how many results it can form at a time: 0 when it is not, else 1 or 2.
int space_to_depth_results(const ConvGeometry& q);
// The geometry of the one that takes its place.
ConvGeometry space_to_depth(const ConvGeometry& q, int results);

// That one's operands, with channels last, from q's: images [n, c, h, w] and weights [o, c, kernel, kernel], strided as they like, of 16 bits an
// element.
Tensor images_to_depth(const Tensor& x, const ConvGeometry& q, int results);
Tensor weights_to_depth(const Tensor& w, const ConvGeometry& q, int results);
// Memory for the weights' gradient there, of one result at a time, and that gradient as one of w's own.
Tensor empty_deep_weights(const Tensor& w, const ConvGeometry& q);
void weights_to_space(const Tensor& from, const Tensor& w, const ConvGeometry& q);

}  // namespace halftone::cuda
