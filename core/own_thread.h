#pragma once
// For threads that work beside the one that trains.
#include "halftone/core/api.h"

namespace halftone {

// While it lives, kernels that this thread calls run on it alone and leave the pool to others, who would wait for each other there. Results
// have the same bits.
class HT_API OwnThread {
 public:
  [[nodiscard]] OwnThread();
  ~OwnThread();
  OwnThread(const OwnThread&) = delete;

 private:
  bool saved_;
};

}  // namespace halftone
