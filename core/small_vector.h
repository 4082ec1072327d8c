#pragma once
// A vector whose first N elements live inline. Operator calls carry their tensors in one, so that an
// ordinary call allocates nothing for its argument list.
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <utility>

namespace halftone {

template <class T, size_t N> class SmallVector {
 public:
  SmallVector() noexcept {}  // not defaulted: `{}` would clear the inline room first
  SmallVector(std::initializer_list<T> v) { append(v.begin(), v.end()); }
  explicit SmallVector(std::span<const T> v) { append(v.data(), v.data() + v.size()); }
  explicit SmallVector(size_t n) { resize(n); }
  SmallVector(const SmallVector& o) { append(o.begin(), o.end()); }
  SmallVector(SmallVector&& o) noexcept { take(o); }
  SmallVector& operator=(const SmallVector& o) {
    if (this != &o) { clear(); append(o.begin(), o.end()); }
    return *this;
  }
  SmallVector& operator=(SmallVector&& o) noexcept {
    if (this != &o) { clear(); release(); take(o); }
    return *this;
  }
  ~SmallVector() { clear(); release(); }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T& back() { return data_[size_ - 1]; }
  operator std::span<T>() { return {data_, size_}; }
  operator std::span<const T>() const { return {data_, size_}; }

  // `v` may be one of this vector's own: it is taken before they move.
  void push_back(const T& v) { full() ? emplace_back(T(v)) : emplace_back(v); }
  void push_back(T&& v) { full() ? emplace_back(T(std::move(v))) : emplace_back(std::move(v)); }
  template <class... A> T& emplace_back(A&&... a) {
    if (full()) grow(capacity_ * 2);
    T* at = std::construct_at(data_ + size_, std::forward<A>(a)...);
    ++size_;
    return *at;
  }
  void append(const T* first, const T* last) {
    reserve(size_ + static_cast<size_t>(last - first));
    for (; first != last; ++first) std::construct_at(data_ + size_++, *first);
  }
  void resize(size_t n) {
    reserve(n);
    while (size_ < n) std::construct_at(data_ + size_++);
    while (size_ > n) std::destroy_at(data_ + --size_);
  }
  void reserve(size_t n) { if (n > capacity_) grow(n); }
  void clear() { std::destroy_n(data_, size_); size_ = 0; }

 private:
  T* inline_data() { return reinterpret_cast<T*>(inline_); }
  bool full() const { return size_ == capacity_; }
  bool on_heap() { return data_ != inline_data(); }
  void grow(size_t n) {
    T* bigger = static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(alignof(T))));
    std::uninitialized_move_n(data_, size_, bigger);
    std::destroy_n(data_, size_);
    release();
    data_ = bigger;
    capacity_ = n;
  }
  void release() {
    if (on_heap()) ::operator delete(data_, std::align_val_t(alignof(T)));
    data_ = inline_data();
    capacity_ = N;
  }
  void take(SmallVector& o) noexcept {
    if (o.on_heap()) {
      data_ = std::exchange(o.data_, o.inline_data());
      capacity_ = std::exchange(o.capacity_, N);
      size_ = std::exchange(o.size_, 0);
    } else {
      std::uninitialized_move_n(o.data_, o.size_, data_);
      size_ = o.size_;
      o.clear();
    }
  }

  alignas(T) std::byte inline_[N * sizeof(T)];
  T* data_ = inline_data();
  size_t size_ = 0, capacity_ = N;
};

}  // namespace halftone
