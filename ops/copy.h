#pragma once
// Making, converting and copying tensors.
#include <concepts>
#include <functional>
#include <initializer_list>
#include <vector>

#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef cast, clone, copy, fill, transfer, where;
}

// ---- new tensors; options: dtype (f32 unless given), device, requires_grad
HT_API Tensor empty(const Shape& shape, const TensorOptions& o = {});  // uninitialised
HT_API Tensor full(const Shape& shape, Scalar value, const TensorOptions& o = {});
HT_API Tensor zeros(const Shape& shape, const TensorOptions& o = {});
HT_API Tensor ones(const Shape& shape, const TensorOptions& o = {});
HT_API Tensor arange(Size n, const TensorOptions& o = {});             // 0, 1, ..., n - 1; i64 unless given
// Uninitialised, zero or one, with x's shape, dtype and device.
HT_API Tensor empty_like(const Tensor& x);
HT_API Tensor zeros_like(const Tensor& x);
HT_API Tensor ones_like(const Tensor& x);

// A copy of `values` (row-major) as a tensor of this shape; the dtype is that of T unless given.
HT_API Tensor from_bytes(const void* values, DType dtype, const Shape& shape, const TensorOptions& o);
template <Number T> Tensor tensor(T v, const TensorOptions& o = {}) { return from_bytes(&v, dtype_of<T>, {}, o); }
template <Number T> Tensor tensor(const std::vector<T>& v, const TensorOptions& o = {}) {
  if constexpr (std::same_as<T, bool>) {
    std::vector<uint8_t> bytes(v.begin(), v.end());
    return from_bytes(bytes.data(), DType::b8, {v.size()}, o);
  } else return from_bytes(v.data(), dtype_of<T>, {v.size()}, o);
}
template <Number T> Tensor tensor(std::initializer_list<T> v, const TensorOptions& o = {}) {
  return from_bytes(v.begin(), dtype_of<T>, {v.size()}, o);
}
template <Number T> Tensor tensor(std::initializer_list<std::initializer_list<T>> rows, const TensorOptions& o = {}) {
  std::vector<T> all;
  size_t columns = rows.size() ? rows.begin()->size() : 0;
  for (auto& r : rows) {
    HT_CHECK(r.size() == columns, "tensor: rows of ", columns, " and ", r.size(), " elements; all must be equally long");
    all.insert(all.end(), r.begin(), r.end());
  }
  return from_bytes(all.data(), dtype_of<T>, {rows.size(), columns}, o);
}
// Borrows `data` (contiguous, of dtype o.dtype or f32, on o.device); `release(data)` runs when the last view goes.
HT_API Tensor from_blob(void* data, const Shape& shape, std::function<void(void*)> release = {}, const TensorOptions& o = {});

// How where is parametrised inside: which branches are numbers, so that they are no inputs.
struct WhereAttrs { Scalar a, b; bool a_is_number = false, b_is_number = false; };

// ---- conversions
// x in another dtype, rounded to nearest even; x itself when it has that dtype. Differentiable.
HT_API Tensor cast(const Tensor& x, DType dtype);

// For kernels: t, or a copy of it, without gaps, its channels last when asked for.
HT_API Tensor dense(const Tensor& t, bool channels_last);

}  // namespace halftone
