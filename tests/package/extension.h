// The user's own library, built on Halftone.
#pragma once

#include <halftone/halftone.h>

// The address of Halftone's version text as this library sees it.
const char* version_seen_by_extension();
