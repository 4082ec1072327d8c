// Signals that ask instead of killing.
#include "halftone/io/interrupt.h"

#include <signal.h>

#include <array>
#include <atomic>
#include <cstddef>

#include "halftone/core/error.h"

namespace halftone {
namespace {

constexpr std::array signals{SIGINT, SIGTERM};
// For the handler: amid a product of oneDNN, whose kernels let the stack's register point to the heap (its issue 4845, mended in 2026), it
// would write over somebody's data.
alignas(64) std::array<std::byte, 1 << 16> stack;
stack_t stack_before;
std::array<struct sigaction, signals.size()> before;
std::atomic<bool> alive = false, asked_for = false;
static_assert(std::atomic<bool>::is_always_lock_free, "what a signal handler may touch");

void restore() {
  for (size_t i = 0; i < signals.size(); ++i) sigaction(signals[i], &before[i], nullptr);
}
void note(int) {
  asked_for = true;
  restore();
}

}  // namespace

Interrupt::Interrupt() {
  HT_CHECK(!alive.exchange(true), "Interrupt: there is one already; pass it on instead of making another");
  asked_for = false;
  stack_t own = {};
  own.ss_sp = stack.data();
  own.ss_size = stack.size();
  sigaltstack(&own, &stack_before);
  struct sigaction action = {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART | SA_ONSTACK;  // a write that is under way goes on
  for (size_t i = 0; i < signals.size(); ++i) sigaction(signals[i], &action, &before[i]);
}
Interrupt::~Interrupt() {
  restore();
  stack_t now = {};
  if (sigaltstack(nullptr, &now) == 0 && now.ss_sp == stack.data()) sigaltstack(&stack_before, nullptr);
  alive = false;
}
bool Interrupt::asked() const { return asked_for; }

}  // namespace halftone
