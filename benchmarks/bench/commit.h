#pragma once
// What was built, told by the build.
namespace benchmarks {

extern const char* const commit;  // "1a2b3c4", "1a2b3c4 with changes", or "unknown"

}  // namespace benchmarks
