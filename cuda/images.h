#pragma once
// Operands and results as libraries and kernels take them: without gaps, row-major or with their channels last, and beginning at
// a multiple of 16 bytes.
#include "halftone/core/tensor.h"

namespace halftone::cuda {

Tensor empty_images(const Shape& shape, DType dtype, Device device, bool channels_last);

// t, or a copy of it that lies so, with zeros for channels (dimension 1) that it lacks.
Tensor operand(const Tensor& t, bool channels_last, int64_t channels);
inline Tensor operand(const Tensor& t, bool channels_last) { return operand(t, channels_last, t.size(1)); }

// Where a result is written in a dtype: `out` itself, or memory that finish() copies it from.
struct Result {
  const Tensor& out;
  Tensor to;
  Result(const Tensor& t, DType dtype, bool channels_last);
  void finish() const;
};

}  // namespace halftone::cuda
