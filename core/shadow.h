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
    void* written_on = nullptr;           // the stream that wrote it last
    std::vector<void*> awaited_on = {};   // others that wait for that write already

    // This thread's stream has queued a write of the copy, after which it is current for `v`.
    void wrote(uint64_t v);
    // This thread's stream goes on after the last write.
    void await();
  };
  // Held while a copy is looked up, made or written.
  std::mutex lock;
  // The copy in this dtype, current or not; null when there is none.
  Shadow* find(DType dtype);
  Shadow* add(DType dtype, Tensor copy) { return &all_.emplace_back(Shadow{dtype, ~uint64_t{0}, std::move(copy)}); }
  std::span<Shadow> all() { return all_; }
  // The dtype that a region asked for last: the copy that an optimizer keeps current.
  DType in_use = DType::f16;

 private:
  std::vector<Shadow> all_;
};

}  // namespace halftone
