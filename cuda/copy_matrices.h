#pragma once
// Copies of matrices whose rows begin anywhere into rows that begin where tensor cores want them, and back.
#include <cstddef>
#include <cstdint>

namespace halftone::cuda {

// How matrices lie in memory, row-major: `leading` elements from row to row, `step` from matrix to matrix.
struct MatrixStack { int64_t rows, cols, leading, step; };

// The first `count` matrices of a stack into those of another, elements of `width` bytes, 2 or 4, fewer than 2^32 of them. What
// `from` lacks of a matrix of `to` is 0, what it has beyond is left out.
void copy_matrices(void* to, const MatrixStack& to_lies, const void* from, const MatrixStack& from_lies, int64_t count, size_t width);

}  // namespace halftone::cuda
