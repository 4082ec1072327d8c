// Which Halftone this is: its version, and what it was built with.
#pragma once

#include <string>

#include "halftone/core/api.h"

namespace halftone {

// "major.minor.patch". While major is 0, a new minor version may change names and files.
HT_API const char* version() noexcept;

// One line for reports: version, compiler, processor, and the optional parts with their versions.
HT_API std::string build_info();

}  // namespace halftone
