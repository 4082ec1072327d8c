#pragma once
// How many columns a text takes: characters, not bytes. Internal to the library.
#include <algorithm>
#include <string_view>

namespace halftone::text {

// Whether a byte is not the first of a character.
inline bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xC0u) == 0x80; }
inline int columns(std::string_view s) {
  return static_cast<int>(std::count_if(s.begin(), s.end(), [](char c) { return !continues_character(c); }));
}

}  // namespace halftone::text
