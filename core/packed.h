#pragma once
// What an operator makes of a tensor and may want again, such as weights in the layout that products read.
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "halftone/core/storage.h"

namespace halftone {

// The last such thing made of one storage, shared by all threads. It is kept from its second use on, so that weights that every
// step rewrites keep none, and is out of date once the storage's version has changed.
class Packed {
 public:
  // What make(), a shared_ptr<V>, gave for this key, or gives now. The key tells everything but the storage's bytes, V included.
  template <class Make> static auto get(Storage& storage, const std::vector<int64_t>& key, Make make) -> decltype(make()) {
    using V = typename decltype(make())::element_type;
    const uint64_t version = storage.version();
    Packed& packed = storage.packed();
    if (auto found = packed.find(key, version)) return std::static_pointer_cast<V>(std::move(found));
    auto made = make();
    packed.offer(key, version, made);
    return made;
  }
  // Gives its memory back.
  static void drop(Storage& storage) {
    if (storage.has_packed()) storage.packed().drop();
  }

 private:
  // Null when there is none. What is for another key or version goes.
  std::shared_ptr<void> find(const std::vector<int64_t>& key, uint64_t version);
  void offer(const std::vector<int64_t>& key, uint64_t version, std::shared_ptr<void> made);
  void drop();

  std::mutex lock_;
  std::vector<int64_t> key_;  // of the last use, as is version_
  uint64_t version_ = 0;
  std::shared_ptr<void> made_;
};

}  // namespace halftone
