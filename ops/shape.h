#pragma once
// Views and rearrangements: no element is computed. Views share storage; their gradients are views or scatters.
#include <vector>

#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef expand, permute, slice, slice_scatter, squeeze, unsqueeze, view, cat;
}

// x repeated along sizes of 1 and new leading dimensions, without a copy (stride 0).
HT_API Tensor expand(const Tensor& x, const Shape& shape);
// Undoes an expand: the sum over repeated dimensions, of this shape.
HT_API Tensor sum_to(const Tensor& x, const Shape& shape);
// Dimension i of the result is dimension order[i] of x.
HT_API Tensor permute(const Tensor& x, const Shape& order);
HT_API Tensor transpose(const Tensor& x, int64_t a, int64_t b);
// Elements begin, begin + step, ... below end of dimension dim; negative begin and end count from the back.
HT_API Tensor slice(const Tensor& x, int64_t dim, std::optional<int64_t> begin, std::optional<int64_t> end, int64_t step = 1);
// Zeros of `shape` with x written into that slice of it: the gradient of slice.
HT_API Tensor slice_scatter(const Tensor& x, const Shape& shape, int64_t dim, int64_t begin, int64_t step);
HT_API Tensor squeeze(const Tensor& x, int64_t dim);
HT_API Tensor unsqueeze(const Tensor& x, int64_t dim);
HT_API Tensor reshape(const Tensor& x, const Shape& shape);
// Tensors of equal shape, but for dimension dim, one after the other along it.
HT_API Tensor cat(const std::vector<Tensor>& tensors, int64_t dim = 0);
HT_API Tensor stack(const std::vector<Tensor>& tensors, int64_t dim = 0);

}  // namespace halftone
