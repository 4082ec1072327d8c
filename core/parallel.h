#pragma once
// One pool of threads for all CPU kernels. Work is cut by its size only, never by the number of threads, so results
// have the same bits for any number of them.
#include <algorithm>
#include <cstdint>

#include "halftone/core/api.h"

namespace halftone {

// Number of threads kernels use, the caller's included. Default: HALFTONE_NUM_THREADS, else one for each processor that this
// process may run on, and no more than a container grants it (control groups, version 2).
HT_API int num_threads();
HT_API void set_num_threads(int n);

namespace detail {
HT_API void run_chunks(int64_t chunks, void (*run)(void* context, int64_t chunk), void* context);
}
// Calls f(begin, end) for consecutive ranges of at most `grain` covering [0, n). Exceptions of f reach the caller. Ranges run
// on several threads when there is more than one; a call from inside a range runs on the calling thread.
template <class F> void parallel_for(int64_t n, int64_t grain, F&& f) {
  if (n <= 0) return;
  if (n <= grain) return f(int64_t{0}, n);
  struct Task { F& f; int64_t n, grain; } task{f, n, grain};
  detail::run_chunks((n + grain - 1) / grain, [](void* p, int64_t chunk) {
    auto& c = *static_cast<Task*>(p);
    c.f(chunk * c.grain, std::min(c.n, (chunk + 1) * c.grain));
  }, &task);
}

}  // namespace halftone
