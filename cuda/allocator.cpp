// The caching allocator: size classes, best fit, splitting and merging, streams, pools.
#include "halftone/cuda/allocator.h"

#include <algorithm>
#include <array>
#include <utility>

#include "halftone/core/error.h"

namespace halftone::cuda {
namespace {

constexpr size_t granule = 512, mebibyte = size_t{1} << 20;
constexpr size_t small_limit = mebibyte, small_segment = 2 * mebibyte;
constexpr size_t medium_limit = 10 * mebibyte, medium_segment = 20 * mebibyte, large_granule = 2 * mebibyte;

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
constexpr size_t segment_size(size_t bytes) {
  return bytes <= small_limit ? small_segment : bytes < medium_limit ? medium_segment : round_up(bytes, large_granule);
}

}  // namespace

struct Allocator::Block {
  char* data;
  size_t size;
  void* stream;
  Pool* pool;
  bool small;
  enum State : unsigned char { used, kept, free } state = used;
  Block *before = nullptr, *after = nullptr;  // neighbours in the segment
  std::vector<void*> used_on = {};            // other streams
  int marks = 0;                              // of those, how many are not known to have passed

  bool whole() const { return !before && !after; }
};

class Allocator::Pool {
 public:
  FreeList& list(bool small) { return free_[small]; }
  std::map<const char*, size_t> segments;  // address and size
  // Small blocks that were freed and not joined with their neighbours, by stream and size.
  using Kept = std::array<std::vector<Block*>, small_limit / granule + 1>;
  std::unordered_map<void*, Kept> kept;
  bool retired = false;

 private:
  FreeList free_[2];
};

bool Allocator::Order::operator()(const Block* a, const Block* b) const {
  if (a->stream != b->stream) return std::less<>{}(a->stream, b->stream);
  if (a->size != b->size) return a->size < b->size;
  return std::less<>{}(a->data, b->data);
}

Allocator::Allocator(MemorySource& source, std::string name, bool cached) : source_(source), name_(std::move(name)), cached_(cached) {
  pools_.push_back(std::make_unique<Pool>());
}

Allocator::~Allocator() {
  std::vector<void*> in_use;
  for (auto& [data, block] : blocks_) if (block->state == Block::used) in_use.push_back(block->data);
  for (void* data : in_use) free(data);
  collect(true);
  for (auto& pool : pools_) give_back_free(*pool);
}

void* Allocator::allocate(size_t bytes, void* stream, Pool* pool) {
  std::lock_guard guard(lock_);
  collect(false);
  Pool& from = pool ? *pool : *pools_.front();
  size_t rounded = cached_ ? round_up(std::max<size_t>(bytes, 1), granule) : std::max<size_t>(bytes, 1);
  HT_CHECK(rounded >= bytes, "out of memory: ", name_, " cannot allocate ", bytes, " bytes");
  Block* block = cached_ ? take_kept(rounded, stream, from) : reserve(rounded, stream, from);
  if (!block) {
    block = take(rounded, stream, from);
    if (!block && !from.kept.empty()) {
      join_kept(from);
      block = take(rounded, stream, from);
    }
    if (!block) block = reserve(rounded, stream, from);
    split(block, rounded);
  }
  stats_.allocated += static_cast<int64_t>(block->size);
  stats_.peak_allocated = std::max(stats_.peak_allocated, stats_.allocated);
  return block->data;
}

Allocator::Block* Allocator::take_kept(size_t bytes, void* stream, Pool& pool) {
  if (bytes > small_limit) return nullptr;
  auto found = pool.kept.find(stream);
  if (found == pool.kept.end()) return nullptr;
  auto& same_size = found->second[bytes / granule];
  if (same_size.empty()) return nullptr;
  Block* block = same_size.back();
  same_size.pop_back();
  block->state = Block::used;
  return block;
}

// Kept blocks become free ones.
void Allocator::join_kept(Pool& pool) noexcept {
  auto kept = std::exchange(pool.kept, {});
  for (auto& [stream, by_size] : kept)
    for (auto& same_size : by_size)
      for (Block* block : same_size) release(block);
}

// The smallest free block of the stream that is large enough.
Allocator::Block* Allocator::take(size_t bytes, void* stream, Pool& pool) {
  bool small = bytes <= small_limit;
  FreeList& list = pool.list(small);
  Block wanted{.data = nullptr, .size = bytes, .stream = stream, .pool = &pool, .small = small};
  auto found = list.lower_bound(&wanted);
  if (found == list.end() || (*found)->stream != stream) return nullptr;
  Block* block = *found;
  list.erase(found);
  block->state = Block::used;
  return block;
}

// A fresh segment as one block.
Allocator::Block* Allocator::reserve(size_t bytes, void* stream, Pool& pool) {
  size_t size = cached_ ? segment_size(bytes) : bytes;
  auto block = std::make_unique<Block>(
      Block{.data = nullptr, .size = size, .stream = stream, .pool = &pool, .small = bytes <= small_limit});
  void* data = source_.allocate(size);
  if (!data) {
    collect(true);
    join_kept(*pools_.front());
    give_back_free(*pools_.front());
    data = source_.allocate(size);
  }
  HT_CHECK(data, "out of memory: ", name_, " cannot allocate ", bytes, " bytes (allocated ", stats_.allocated,
           ", reserved ", stats_.reserved, ")");
  block->data = static_cast<char*>(data);
  pool.segments.emplace(block->data, size);
  blocks_.emplace(data, block.get());
  stats_.reserved += static_cast<int64_t>(size);
  stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
  ++stats_.driver_allocations;
  return block.release();
}

// Cuts off what is more than `bytes`, when that is worth a block of its own.
void Allocator::split(Block* block, size_t bytes) {
  size_t rest = block->size - bytes;
  if (block->small ? rest < granule : rest <= small_limit) return;
  auto* tail = new Block{.data = block->data + bytes, .size = rest, .stream = block->stream, .pool = block->pool,
                         .small = block->small, .state = Block::free, .before = block, .after = block->after};
  blocks_.emplace(tail->data, tail);
  if (tail->after) tail->after->before = tail;
  block->after = tail;
  block->size = bytes;
  tail->pool->list(tail->small).insert(tail);
}

void Allocator::free(void* data) noexcept {
  if (!data) return;
  std::lock_guard guard(lock_);
  auto found = blocks_.find(data);
  if (found == blocks_.end() || found->second->state != Block::used) return;
  Block* block = found->second;
  block->state = Block::kept;  // from now on nobody's
  stats_.allocated -= static_cast<int64_t>(block->size);
  block->marks = static_cast<int>(block->used_on.size());
  for (void* stream : block->used_on) waiting_.push_back({stream, source_.mark(stream), block});
  block->used_on.clear();
  if (block->marks > 0) return;
  if (cached_ && block->small && !block->pool->retired) block->pool->kept[block->stream][block->size / granule].push_back(block);
  else release(block);
}

// Back to its list, joined with free neighbours; out to the driver when its pool has retired, and when nothing is cached but for the
// pools of graphs, which may be replayed.
void Allocator::release(Block* block) noexcept {
  block = merge(block);
  block->state = Block::free;
  Pool* pool = block->pool;
  if ((pool->retired || (!cached_ && pool == pools_.front().get())) && block->whole()) {
    give_back(block);
    drop_if_done(pool);
  } else {
    pool->list(block->small).insert(block);
  }
}

Allocator::Block* Allocator::merge(Block* block) noexcept {
  auto join = [this](Block* left, Block* right) {
    blocks_.erase(right->data);
    left->size += right->size;
    left->after = right->after;
    if (left->after) left->after->before = left;
    delete right;
  };
  FreeList& list = block->pool->list(block->small);
  if (Block* next = block->after; next && next->state == Block::free) {
    list.erase(next);
    join(block, next);
  }
  if (Block* previous = block->before; previous && previous->state == Block::free) {
    list.erase(previous);
    join(previous, block);
    block = previous;
  }
  return block;
}

void Allocator::give_back(Block* segment) noexcept {
  segment->pool->segments.erase(segment->data);
  blocks_.erase(segment->data);
  source_.free(segment->data);
  stats_.reserved -= static_cast<int64_t>(segment->size);
  ++stats_.driver_frees;
  delete segment;
}

void Allocator::give_back_free(Pool& pool) noexcept {
  for (bool small : {false, true}) {
    FreeList& list = pool.list(small);
    for (auto i = list.begin(); i != list.end();) {
      Block* block = *i;
      if (!block->whole()) { ++i; continue; }
      i = list.erase(i);
      give_back(block);
    }
  }
}

// Releases blocks that the last of their other streams has passed.
void Allocator::collect(bool wait) noexcept {
  std::erase_if(waiting_, [&](Waiting& w) {
    if (!w.mark) w.mark = source_.mark(w.stream);
    if (!w.mark || !source_.passed(w.mark, wait)) return false;
    if (--w.block->marks == 0) release(w.block);
    return true;
  });
}

void Allocator::record_stream(const void* data, void* stream) {
  std::lock_guard guard(lock_);
  Block* block = block_at(data);
  if (!block || block->stream == stream) return;
  auto& used = block->used_on;
  if (std::find(used.begin(), used.end(), stream) == used.end()) used.push_back(stream);
}

Allocator::Block* Allocator::block_at(const void* data) const {
  auto* at = static_cast<const char*>(data);
  for (auto& pool : pools_) {
    auto next = pool->segments.upper_bound(at);
    if (next == pool->segments.begin()) continue;
    auto& [begin, size] = *std::prev(next);
    if (!std::less<>{}(at, begin + size)) continue;
    Block* block = blocks_.at(begin);
    while (!std::less<>{}(at, static_cast<const char*>(block->data) + block->size)) block = block->after;
    return block->state == Block::used ? block : nullptr;
  }
  return nullptr;
}

void Allocator::empty_cache() {
  std::lock_guard guard(lock_);
  collect(true);
  join_kept(*pools_.front());
  give_back_free(*pools_.front());
}

void Allocator::adopt(void* from, void* to) {
  std::lock_guard guard(lock_);
  std::erase_if(waiting_, [&](Waiting& w) {  // it has finished
    if (w.stream != from) return false;
    if (w.mark) source_.passed(w.mark, true);
    if (--w.block->marks == 0) release(w.block);
    return true;
  });
  for (auto& pool : pools_) join_kept(*pool);
  for (auto& [data, block] : blocks_) {
    if (block->stream == from && block->state != Block::free) block->stream = to;
    std::erase(block->used_on, from);
  }
  for (auto& pool : pools_)
    for (bool small : {false, true}) {
      std::vector<Block*> moving;  // the stream is part of the order, so out of the list first
      std::erase_if(pool->list(small), [&](Block* b) { return b->stream == from && (moving.push_back(b), true); });
      for (Block* b : moving) b->stream = to;
      pool->list(small).insert(moving.begin(), moving.end());
    }
}

Allocator::Pool* Allocator::make_pool() {
  std::lock_guard guard(lock_);
  return pools_.emplace_back(std::make_unique<Pool>()).get();
}

bool Allocator::contains(const Pool* pool, const void* data) const {
  std::lock_guard guard(lock_);
  auto* at = static_cast<const char*>(data);
  auto next = pool->segments.upper_bound(at);
  if (next == pool->segments.begin()) return false;
  auto& [begin, size] = *std::prev(next);
  return std::less<>{}(at, begin + size);
}

void Allocator::retire(Pool* pool) noexcept {
  std::lock_guard guard(lock_);
  join_kept(*pool);
  pool->retired = true;
  give_back_free(*pool);
  drop_if_done(pool);
}

void Allocator::drop_if_done(Pool* pool) noexcept {
  if (pool->retired && pool->segments.empty()) std::erase_if(pools_, [&](auto& p) { return p.get() == pool; });
}

Allocator::Stats Allocator::stats() const {
  std::lock_guard guard(lock_);
  return stats_;
}

void Allocator::reset_peak() {
  std::lock_guard guard(lock_);
  stats_.peak_allocated = stats_.allocated;
  stats_.peak_reserved = stats_.reserved;
}

}  // namespace halftone::cuda
