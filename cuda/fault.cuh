#pragma once
// The device's side of Fault: how a kernel notes an index that is out of range.
#include "halftone/cuda/runtime.h"

namespace halftone::cuda {

// Among threads that report at once one wins each field; any of them is worth an error.
__device__ inline void report(FaultSite site, int64_t value, int64_t position, int64_t limit) {
  volatile Fault* f = site.fault;
  if (f->who != 0) return;
  f->value = value;
  f->position = position;
  f->limit = limit;
  __threadfence_system();
  f->who = site.who;
}

}  // namespace halftone::cuda
