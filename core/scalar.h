#pragma once
// One number of any kind, exact: an integer keeps all 64 bits.
#include <concepts>
#include <cstdint>

#include "halftone/core/dtype.h"
#include "halftone/core/shape.h"

namespace halftone {

class Scalar {
 public:
  Scalar() = default;
  template <Number T> Scalar(T v) : integral_(std::integral<T>) {
    if constexpr (std::integral<T>) i_ = Size(static_cast<std::conditional_t<std::same_as<T, bool>, int, T>>(v));
    else d_ = static_cast<double>(v);
    if (integral_) d_ = static_cast<double>(i_);
  }
  bool integral() const { return integral_; }
  template <class T> T to() const {
    if constexpr (std::integral<T>) return integral_ ? convert<T>(i_) : convert<T>(d_);
    else return integral_ ? convert<T>(i_) : convert<T>(d_);
  }

 private:
  double d_ = 0;
  int64_t i_ = 0;
  bool integral_ = false;
};

}  // namespace halftone
