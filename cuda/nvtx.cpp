// Ranges by NVTX, which Nsight Systems shows. They cost a few nanoseconds where nobody looks on.
#include <nvtx3/nvToolsExt.h>

#include "halftone/core/marks.h"
#include "halftone/cuda/all.h"

namespace halftone::cuda {

void mark_by_nvtx() {
  set_range_marks({.begin = [](const char* name) { nvtxRangePushA(name); }, .end = [] { nvtxRangePop(); }});
}

}  // namespace halftone::cuda
