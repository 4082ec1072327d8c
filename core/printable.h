#pragma once
// A stranger's text within a message of ours.
#include <string>
#include <string_view>

namespace halftone::text {

// Its first bytes, control characters as '?': a message is one line.
inline std::string printable(std::string_view s, size_t longest = 100) {
  std::string shown(s.substr(0, longest));
  for (char& c : shown)
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
  return s.size() > longest ? shown + "..." : shown;
}

}  // namespace halftone::text
