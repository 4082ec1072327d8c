// What a test program counted while it ran; its main leaves it where scripts/scoreboard adds it up.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace halftone::tests {

inline std::map<std::string, int64_t>& scoreboard() {
  static std::map<std::string, int64_t> counts;
  return counts;
}
inline void count(const char* key, int64_t n = 1) { scoreboard()[key] += n; }

// The test replays what users of another framework reported, under the first of their threads.
inline void report(const char* thread) {
  static std::set<std::string> replayed;
  if (replayed.insert(thread).second) count("reports");
}

}  // namespace halftone::tests
