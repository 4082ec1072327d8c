#pragma once
// Warnings: what a program should know and may go on without.
#include <functional>
#include <string>

#include "halftone/core/api.h"

namespace halftone {

using WarningHandler = std::function<void(const std::string& text)>;
// Hands the text to the handler. At first that prints a line on stderr.
HT_API void warn(const std::string& text);
// Another handler for all threads, which may call it at once; an empty one ignores warnings. Returns the one before.
HT_API WarningHandler set_warning_handler(WarningHandler handler);

}  // namespace halftone
