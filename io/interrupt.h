#pragma once
// Ctrl-C as a question: the loop learns of it between two steps, and can save before it ends.
#include "halftone/core/api.h"

namespace halftone {

// While one lives, SIGINT (Ctrl-C) and SIGTERM (what schedulers send) only make asked() true. A second signal acts as it would have
// without it: it ends the process. One at a time; making another is an Error. Made on the process' first thread, which gets the signals.
class HT_API Interrupt {
 public:
  [[nodiscard]] Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  bool asked() const;
};

}  // namespace halftone
