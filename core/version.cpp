// Reads the generated config.h, so that no other file depends on how the library was configured.
#include "halftone/core/version.h"

#include "halftone/config.h"

namespace halftone {

const char* version() noexcept { return HALFTONE_VERSION; }

std::string build_info() {
  std::string features = HALFTONE_FEATURES;
  if (features.empty()) features = "no optional parts";
  return std::string("Halftone ") + HALFTONE_VERSION + " (" + HALFTONE_COMPILER +
         "; operators for " + HALFTONE_PROCESSOR + "; " + features + ")";
}

}  // namespace halftone
