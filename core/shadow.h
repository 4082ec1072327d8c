#pragma once
// 16-bit copies of one storage. A copy is current while its version equals the storage's; autocast makes copies,
// an optimizer that rewrites the storage rewrites them in the same kernel.
#include <mutex>

#include "halftone/core/tensor.h"

namespace halftone {

class HT_API Shadows {
 public:
  struct Shadow {
    DType dtype;
    uint64_t version;  // of the storage when the copy was written
    Tensor copy;
  };
  // Held while a copy is looked up, made or written.
  std::mutex lock;
  // The copy in this dtype, current or not; null when there is none.
  Shadow* find(DType dtype);
  void add(Shadow s) { all_.push_back(std::move(s)); }
  std::span<Shadow> all() { return all_; }
  // The dtype that a region asked for last: the copy that an optimizer keeps current.
  DType in_use = DType::f16;

 private:
  std::vector<Shadow> all_;
};

}  // namespace halftone
