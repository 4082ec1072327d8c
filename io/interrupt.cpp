// Signals that ask instead of killing.
#include "halftone/io/interrupt.h"

#include <signal.h>

#include <array>
#include <atomic>

#include "halftone/core/error.h"

namespace halftone {
namespace {

constexpr std::array signals{SIGINT, SIGTERM};
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
  struct sigaction action = {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;  // a write that is under way goes on
  for (size_t i = 0; i < signals.size(); ++i) sigaction(signals[i], &action, &before[i]);
}
Interrupt::~Interrupt() {
  restore();
  alive = false;
}
bool Interrupt::asked() const { return asked_for; }

}  // namespace halftone
