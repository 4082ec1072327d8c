#pragma once
// Sizes and shapes. All arithmetic on them is 64-bit and checked; a shape has at most 8 dimensions and
// lives inline, so that metadata is copied, never allocated.
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "halftone/core/error.h"

namespace halftone {

template <class T> concept Integer = std::integral<T> && !std::same_as<T, bool>;
template <class T> concept Number = std::is_arithmetic_v<T>;

// A signed 64-bit size that any integer type may become, checked.
struct Size {
  int64_t value;
  template <Integer T> constexpr Size(T v) : value(static_cast<int64_t>(v)) {
    if (!std::in_range<int64_t>(v)) throw Error("size does not fit 64 bits");
  }
  constexpr operator int64_t() const { return value; }
};
// One size for both spatial dimensions, or {h, w}.
struct Size2 {
  int64_t h, w;
  template <Integer T> constexpr Size2(T n) : h(Size(n)), w(Size(n)) {}
  constexpr Size2(Size h_, Size w_) : h(h_), w(w_) {}
};

// Products and sums of sizes; throw Error when the result leaves 64 bits.
[[noreturn]] HT_API void refuse_overflow(const char* what, int64_t a, int64_t b);
constexpr int64_t checked_mul(int64_t a, int64_t b) {
  int64_t r = 0;
  if (__builtin_mul_overflow(a, b, &r)) refuse_overflow(" * ", a, b);
  return r;
}
constexpr int64_t checked_add(int64_t a, int64_t b) {
  int64_t r = 0;
  if (__builtin_add_overflow(a, b, &r)) refuse_overflow(" + ", a, b);
  return r;
}

inline constexpr int max_rank = 8;

// Dimensions, outermost first. Also used for strides, which may be 0 (a broadcast) but never negative.
class Shape {
 public:
  constexpr Shape() = default;
  constexpr Shape(std::initializer_list<Size> dims) { for (auto d : dims) push_back(d); }
  constexpr explicit Shape(std::span<const int64_t> dims) { for (auto d : dims) push_back(d); }
  Shape(const std::vector<int64_t>& dims) : Shape(std::span<const int64_t>(dims)) {}
  // `rank` dimensions, all equal to `value`.
  static constexpr Shape filled(int rank, int64_t value) {
    Shape s;
    for (int i = 0; i < rank; ++i) s.push_back(value);
    return s;
  }

  constexpr int rank() const { return rank_; }
  constexpr size_t size() const { return static_cast<size_t>(rank_); }
  constexpr int64_t& operator[](size_t i) { return dims_[i]; }
  constexpr int64_t operator[](size_t i) const { return dims_[i]; }
  constexpr const int64_t* begin() const { return dims_.data(); }
  constexpr const int64_t* end() const { return dims_.data() + rank_; }
  constexpr int64_t back() const { return dims_[size() - 1]; }
  constexpr void push_back(int64_t d) {
    if (rank_ == max_rank) throw Error("a tensor has at most 8 dimensions");
    dims_[static_cast<size_t>(rank_++)] = d;
  }
  HT_API void insert(int at, int64_t d);
  HT_API void erase(int at);
  constexpr int64_t numel() const {  // the product, checked
    int64_t n = 1;
    bool empty = false;
    for (size_t i = 0; i < size(); ++i) {
      if (dims_[i] == 0) empty = true;  // hides no size that does not fit
      else n = checked_mul(n, dims_[i]);
    }
    return empty ? 0 : n;
  }
  constexpr bool operator==(const Shape& o) const {
    if (rank_ != o.rank_) return false;
    for (size_t i = 0; i < size(); ++i) if (dims_[i] != o.dims_[i]) return false;
    return true;
  }

 private:
  std::array<int64_t, max_rank> dims_{};
  int rank_ = 0;
};
using Strides = Shape;  // in elements

HT_API std::string str(const Shape& s);                       // "[2, 3]"
// Row-major strides.
inline Strides contiguous_strides(const Shape& s) {
  Strides strides = s;
  for (size_t i = s.size(); i-- > 0;)
    strides[i] = i + 1 == s.size() ? 1 : checked_mul(strides[i + 1], s[i + 1] == 0 ? 1 : s[i + 1]);
  return strides;
}
// The shape both broadcast to, as in NumPy; `op` and both shapes are in the error.
HT_API Shape broadcast(std::string_view op, const Shape& a, const Shape& b);
// `dim` counted from the front; negative counts from the back. Throws naming `op` when out of range.
HT_API int normalize_dim(std::string_view op, int64_t dim, int rank);

}  // namespace halftone
