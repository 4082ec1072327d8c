#pragma once
// An argument that may be a tensor or a number: what binary operators take. A parameter type, like string_view:
// it refers to the caller's tensor.
#include "halftone/core/op.h"

namespace halftone {

class Operand {
 public:
  Operand(const Tensor& t) : tensor_(&t) {}
  template <Number T> Operand(T v) : scalar_(v) {}
  Operand(Scalar v) : scalar_(v) {}
  bool is_tensor() const { return tensor_ != nullptr; }
  const Tensor& tensor() const { return *tensor_; }
  Scalar scalar() const { return scalar_; }

 private:
  const Tensor* tensor_ = nullptr;
  Scalar scalar_;
};

}  // namespace halftone
