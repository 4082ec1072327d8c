// Thread state and its guards.
#include "halftone/core/thread_state.h"

#include <atomic>

#include "halftone/core/capture.h"

namespace halftone {

uint64_t CaptureLog::next_serial() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

LayerState::~LayerState() = default;

ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

ThreadState capture_thread_state() {
  ThreadState s = thread_state();
  s.capture = nullptr;
  s.within = nullptr;  // on this thread's stack
  return s;
}

InstallThreadState::InstallThreadState(const ThreadState& state) : saved_(thread_state()) { thread_state() = state; }
InstallThreadState::~InstallThreadState() { thread_state() = std::move(saved_); }

ForbidSync::ForbidSync() : saved_(thread_state().forbid_sync) { thread_state().forbid_sync = true; }
ForbidSync::~ForbidSync() { thread_state().forbid_sync = saved_; }

void check_may_sync(const char* who) {
  const ThreadState& s = thread_state();
  HT_CHECK(!s.capture, who, ": waits for the device, which a captured step cannot; return the tensor and read it after the call");
  HT_CHECK(!s.forbid_sync, who, ": waits for the device, and ForbidSync is on");
}

}  // namespace halftone
