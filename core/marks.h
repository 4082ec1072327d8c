#pragma once
// Named ranges of a thread's time for a profiler that looks on from outside. A backend that knows one sets them: CUDA's, NVTX.
#include "halftone/core/api.h"

namespace halftone {

struct RangeMarks {
  void (*begin)(const char* name) = nullptr;
  void (*end)() = nullptr;  // the range that this thread began last
};
HT_API void set_range_marks(RangeMarks marks);
// Both null where there is no such backend.
HT_API RangeMarks range_marks();

}  // namespace halftone
