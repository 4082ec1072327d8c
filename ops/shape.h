#pragma once
// Views and rearrangements: no element is computed. Views share storage; their gradients are views or scatters.
#include <vector>

#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef expand, permute, slice, slice_scatter, split, squeeze, unsqueeze, view, diagonal, diagonal_scatter, cat;
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
// Elements [begin, begin + length) of dimension dim, all of which must exist.
HT_API Tensor narrow(const Tensor& x, int64_t dim, int64_t begin, int64_t length);
// Views of `size` elements each along dimension dim; the last may have fewer. Or of the given sizes, which must add up.
HT_API std::vector<Tensor> split(const Tensor& x, Size size, int64_t dim = 0);
HT_API std::vector<Tensor> split(const Tensor& x, const std::vector<int64_t>& sizes, int64_t dim = 0);
// At most n views of equal size, but for the last.
HT_API std::vector<Tensor> chunk(const Tensor& x, Size n, int64_t dim = 0);
// The elements x[.., i, .., i + offset, ..] of two dimensions as a new last dimension: a view.
HT_API Tensor diagonal(const Tensor& x, int64_t offset = 0, int64_t dim1 = 0, int64_t dim2 = 1);
// Zeros of `shape` with x written into that diagonal: the gradient of diagonal.
HT_API Tensor diagonal_scatter(const Tensor& x, const Shape& shape, int64_t offset = 0, int64_t dim1 = 0, int64_t dim2 = 1);
// Dimension `from` becomes dimension `to`; the others keep their order.
HT_API Tensor movedim(const Tensor& x, int64_t from, int64_t to);
HT_API Tensor squeeze(const Tensor& x, int64_t dim);
HT_API Tensor unsqueeze(const Tensor& x, int64_t dim);
HT_API Tensor reshape(const Tensor& x, const Shape& shape);
// Tensors of equal shape, but for dimension dim, one after the other along it.
HT_API Tensor cat(const std::vector<Tensor>& tensors, int64_t dim = 0);
HT_API Tensor stack(const std::vector<Tensor>& tensors, int64_t dim = 0);

}  // namespace halftone
