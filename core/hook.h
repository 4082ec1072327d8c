#pragma once
// What every registration of a function to be called later returns.
#include <functional>
#include <utility>

namespace halftone {

// Keeps a hook registered; remove() or the handle's end takes it off unless detach() left it for good.
class HookHandle {
 public:
  HookHandle() = default;
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  HookHandle(HookHandle&& o) noexcept : remove_(std::exchange(o.remove_, nullptr)) {}
  HookHandle& operator=(HookHandle&& o) noexcept {
    remove();
    remove_ = std::exchange(o.remove_, nullptr);
    return *this;
  }
  ~HookHandle() { remove(); }
  void remove() { if (remove_) std::exchange(remove_, nullptr)(); }
  void detach() { remove_ = nullptr; }

 private:
  std::function<void()> remove_;
};

}  // namespace halftone
