// The user's program. Ends with 0 if the installed Halftone does its work.
#include <iostream>

#include "extension.h"

int main() {
  std::cout << halftone::build_info() << '\n';
  // One Halftone in the process, whoever asks: its registries depend on that.
  return version_seen_by_extension() == halftone::version() ? 0 : 1;
}
