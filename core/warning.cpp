// Where warnings go.
#include "halftone/core/warning.h"

#include <cstdio>
#include <memory>
#include <mutex>
#include <utility>

namespace halftone {
namespace {

struct Handler {
  std::mutex lock;
  std::shared_ptr<const WarningHandler> now = std::make_shared<const WarningHandler>(
      [](const std::string& text) { std::fprintf(stderr, "halftone: warning: %s\n", text.c_str()); });
};
Handler& handler() {
  static Handler h;
  return h;
}

}  // namespace

void warn(const std::string& text) {
  std::shared_ptr<const WarningHandler> now;
  {
    std::lock_guard guard(handler().lock);
    now = handler().now;
  }
  if (*now) (*now)(text);  // outside of the lock: it may warn, or set another
}

WarningHandler set_warning_handler(WarningHandler h) {
  auto next = std::make_shared<const WarningHandler>(std::move(h));
  std::lock_guard guard(handler().lock);
  return *std::exchange(handler().now, std::move(next));
}

}  // namespace halftone
