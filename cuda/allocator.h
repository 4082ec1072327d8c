#pragma once
// The caching allocator of one device. Memory comes from the driver in segments, is cut into blocks and kept for reuse.
// A block belongs to the stream it was made for and returns to that stream's list without a wait: the next user's work
// is queued behind the last one's. Other streams that use it say so, and hold it back until they have passed.
// Small blocks that are freed stay as they are for the next request of their size, which is most of what a training step asks
// for; they are joined again when the free ones do not suffice.
// Invariant: blocks of a segment are linked in address order, have one stream and one pool, and no two free ones touch.
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "halftone/core/api.h"

namespace halftone::cuda {

// Where segments come from and how streams are watched: the driver, or a test. Streams are opaque.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  virtual void* allocate(size_t bytes) = 0;  // null when there is none left
  // Frees after all queued work that might use it.
  virtual void free(void* data) noexcept = 0;
  // A mark behind the work queued on a stream so far; null when none can be set now (the stream is being captured).
  virtual void* mark(void* stream) noexcept = 0;
  // Has the stream got past it? If so the mark is gone. `wait` makes it so.
  virtual bool passed(void* mark, bool wait) noexcept = 0;
};

class HT_API Allocator {
 public:
  class Pool;  // segments apart from the rest: those of one captured graph
  struct Stats {
    int64_t allocated = 0, peak_allocated = 0;  // bytes of blocks in use, sizes as rounded
    int64_t reserved = 0, peak_reserved = 0;    // bytes held from the driver
    int64_t driver_allocations = 0, driver_frees = 0;
  };

  // Without `cached`, every block is a segment of its exact size that goes straight back to the source, or once its pool retires: for
  // tools that look at accesses past a block's end.
  Allocator(MemorySource& source, std::string name, bool cached = true);
  ~Allocator();
  Allocator(const Allocator&) = delete;

  // Throws Error "out of memory: ..." after the cache was given back and the driver still had too little.
  void* allocate(size_t bytes, void* stream, Pool* pool = nullptr);
  void free(void* data) noexcept;
  // `stream`, not the block's own, has work queued that uses the block with this address in it.
  void record_stream(const void* data, void* stream);
  // Gives segments that are wholly free back to the driver; those of live pools stay.
  void empty_cache();
  // Blocks of a stream that has finished and will not be used again go to another's list.
  void adopt(void* from, void* to);

  Pool* make_pool();
  bool contains(const Pool* pool, const void* data) const;
  // The pool takes no more part: its segments go back as they become wholly free.
  void retire(Pool* pool) noexcept;

  Stats stats() const;
  void reset_peak();

 private:
  struct Block;
  struct Order { bool operator()(const Block* a, const Block* b) const; };
  using FreeList = std::set<Block*, Order>;
  struct Waiting { void* stream; void* mark; Block* block; };

  Block* take(size_t bytes, void* stream, Pool& pool);
  Block* take_kept(size_t bytes, void* stream, Pool& pool);
  Block* reserve(size_t bytes, void* stream, Pool& pool);
  void join_kept(Pool& pool) noexcept;
  void split(Block* block, size_t bytes);
  void release(Block* block) noexcept;
  Block* merge(Block* block) noexcept;
  void give_back(Block* segment) noexcept;
  void give_back_free(Pool& pool) noexcept;
  void collect(bool wait) noexcept;
  void drop_if_done(Pool* pool) noexcept;
  Block* block_at(const void* data) const;  // the one that this address lies in, if it is in use

  MemorySource& source_;
  std::string name_;
  bool cached_;
  mutable std::mutex lock_;
  std::vector<std::unique_ptr<Pool>> pools_;  // the first is everybody's
  std::unordered_map<const void*, Block*> blocks_;  // by address, in use or not
  std::vector<Waiting> waiting_;
  Stats stats_;
};

// That of a device that this process uses.
HT_API Allocator& allocator(int device);

}  // namespace halftone::cuda
