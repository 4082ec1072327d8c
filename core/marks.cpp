// Set as backends register, before anybody asks.
#include "halftone/core/marks.h"

#include "halftone/core/backend.h"

namespace halftone {

static RangeMarks current;

void set_range_marks(RangeMarks marks) { current = marks; }
RangeMarks range_marks() {
  ensure_backends();
  return current;
}

}  // namespace halftone
