#include "extension.h"

const char* version_seen_by_extension() { return halftone::version(); }
