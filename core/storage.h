#pragma once
// A block of device memory with a version. Every write through any view raises the version, which is how
// a tape notices that something it saved has changed.
#include <atomic>
#include <functional>
#include <memory>

#include "halftone/core/device.h"

namespace halftone {

class Packed;
class Shadows;

class HT_API Storage {
 public:
  // Fresh, uninitialised memory. Throws Error when the device has none left or is absent.
  static std::shared_ptr<Storage> allocate(int64_t bytes, Device device);
  // Memory of someone else; `release(data)` runs when the last view goes.
  static std::shared_ptr<Storage> borrow(void* data, int64_t bytes, Device device, std::function<void(void*)> release);
  // Part of `whole` with a version of its own: a base tensor's storage, not a view's.
  static std::shared_ptr<Storage> carve(std::shared_ptr<Storage> whole, int64_t offset_bytes, int64_t bytes);

  Storage(void* data, int64_t bytes, Device device, std::function<void(void*)> release);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  bool carved() const { return carved_; }
  uint64_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }
  // Lifts it to `least` where it is lower.
  void raise_version(uint64_t least) {
    if (version() < least) version_.store(least, std::memory_order_relaxed);
  }

  // The bytes are about to hold something else, and not for this storage's tensors: from now on reading them throws `why`,
  // a text that lives for ever. Null while they are good.
  void expire(const char* why) { expired_.store(why, std::memory_order_relaxed); }
  const char* expired() const { return expired_.load(std::memory_order_relaxed); }

  // The 16-bit copies of this storage that autocast made and optimizers keep current.
  Shadows& shadows();
  bool has_shadows() const { return shadows_.load(std::memory_order_acquire) != nullptr; }
  void drop_shadows();
  // What an operator made of this storage and keeps, such as weights in another layout.
  Packed& packed();
  bool has_packed() const { return packed_.load(std::memory_order_acquire) != nullptr; }

 private:
  void* data_;
  int64_t bytes_;
  Device device_;
  bool carved_ = false;
  std::atomic<uint64_t> version_{0};
  std::atomic<Shadows*> shadows_{nullptr};
  std::atomic<Packed*> packed_{nullptr};
  std::atomic<const char*> expired_{nullptr};
  std::function<void(void*)> release_;  // empty: the backend's memory
};

}  // namespace halftone
