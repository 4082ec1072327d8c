#pragma once
// A number of threads for as long as a test wants it.
#include "halftone/core/parallel.h"

namespace halftone::tests {

struct Threads {
  explicit Threads(int n) { set_num_threads(n); }
  ~Threads() { set_num_threads(before_); }
  Threads(const Threads&) = delete;

 private:
  const int before_ = num_threads();
};

}  // namespace halftone::tests
