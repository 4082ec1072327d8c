// The caching allocator against a driver made of numbers: no memory is touched, so every rule can be seen.
#include "halftone/cuda/allocator.h"

#include <map>
#include <random>
#include <set>

#include "halftone/core/error.h"
#include "halftone/tests/catch.h"

using namespace halftone;
using cuda::Allocator;

namespace {

constexpr size_t kib = 1024, mib = 1024 * kib;

// Hands out addresses up to a limit. Streams pass their marks when a test says so.
struct FakeDriver final : cuda::MemorySource {
  size_t limit = size_t{1} << 40, used = 0;
  char* next = reinterpret_cast<char*>(uintptr_t{1} << 40);
  std::map<void*, size_t> segments;
  std::set<void*> finished, capturing;  // streams
  std::map<void*, void*> marks;         // mark and its stream
  uintptr_t last_mark = 0;

  void* allocate(size_t bytes) override {
    if (used + bytes > limit) return nullptr;
    used += bytes;
    segments[next] = bytes;
    return std::exchange(next, next + bytes + mib);
  }
  void free(void* data) noexcept override {
    used -= segments.at(data);
    segments.erase(data);
  }
  void* mark(void* stream) noexcept override {
    if (capturing.contains(stream)) return nullptr;
    void* m = reinterpret_cast<void*>(++last_mark);
    marks[m] = stream;
    return m;
  }
  bool passed(void* mark, bool wait) noexcept override {
    if (!wait && !finished.contains(marks.at(mark))) return false;
    marks.erase(mark);
    return true;
  }
};

void* const s1 = reinterpret_cast<void*>(uintptr_t{0x100});
void* const s2 = reinterpret_cast<void*>(uintptr_t{0x200});

struct Bench {
  FakeDriver driver;
  Allocator allocator{driver, "cuda:7"};
};

}  // namespace

TEST_CASE("small blocks share a slab, rounded to 512 bytes") {
  Bench b;
  auto* x = static_cast<char*>(b.allocator.allocate(1, s1));
  auto* y = static_cast<char*>(b.allocator.allocate(513, s1));
  auto* z = static_cast<char*>(b.allocator.allocate(0, s1));
  CHECK(y - x == 512);
  CHECK(z - y == 1024);
  CHECK(b.allocator.stats().allocated == 512 + 1024 + 512);
  CHECK(b.allocator.stats().reserved == int64_t(2 * mib));
  CHECK(b.allocator.stats().driver_allocations == 1);
}

TEST_CASE("segments by size") {
  Bench b;
  auto reserved_by = [&](size_t bytes) {
    int64_t before = b.allocator.stats().reserved;
    b.allocator.allocate(bytes, s1);
    return static_cast<size_t>(b.allocator.stats().reserved - before);
  };
  CHECK(reserved_by(mib) == 2 * mib);
  CHECK(reserved_by(mib + 1) == 20 * mib);
  CHECK(reserved_by(5 * mib) == 0);  // from the rest of the 20
  CHECK(reserved_by(10 * mib) == 0);
  CHECK(reserved_by(10 * mib) == 10 * mib);
  CHECK(reserved_by(33 * mib + 7) == 34 * mib);
}

TEST_CASE("a freed block serves its own stream again, and no other") {
  Bench b;
  void* x = b.allocator.allocate(3000, s1);
  b.allocator.free(x);
  CHECK(b.allocator.allocate(3000, s2) != x);
  CHECK(b.allocator.allocate(3000, s1) == x);
  CHECK(b.allocator.stats().driver_allocations == 2);
}

TEST_CASE("the smallest block that fits is taken") {
  Bench b;
  void* big = b.allocator.allocate(64 * kib, s1);
  void* wall = b.allocator.allocate(512, s1);
  void* small = b.allocator.allocate(8 * kib, s1);
  void* wall2 = b.allocator.allocate(512, s1);
  b.allocator.free(big);
  b.allocator.free(small);
  b.allocator.empty_cache();
  CHECK(b.allocator.allocate(6 * kib, s1) == small);
  static_cast<void>(wall);
  static_cast<void>(wall2);
}

TEST_CASE("small blocks are kept for the next of their size, and joined when a larger one is wanted") {
  Bench b;
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(b.allocator.allocate(256 * kib, s1));
  for (void* x : blocks) b.allocator.free(x);
  for (size_t i = 8; i-- > 0;) CHECK(b.allocator.allocate(256 * kib, s1) == blocks[i]);  // the last one freed is warm
  for (void* x : blocks) b.allocator.free(x);
  CHECK(b.allocator.allocate(mib, s1) == blocks[0]);
  CHECK(b.allocator.allocate(mib, s1) == blocks[4]);
  CHECK(b.allocator.stats().driver_allocations == 1);
}

TEST_CASE("without a cache each block is its own and goes straight back") {
  FakeDriver driver;
  cuda::Allocator allocator(driver, "test", false);
  void *x = allocator.allocate(100, s1), *y = allocator.allocate(3 * mib, s1);
  CHECK(allocator.stats().reserved == int64_t(100 + 3 * mib));
  allocator.free(x);
  CHECK(allocator.stats().reserved == int64_t(3 * mib));
  allocator.free(y);
  CHECK(driver.segments.empty());
}

TEST_CASE("without a cache the blocks of a graph's pool stay as long as it does") {
  FakeDriver driver;
  cuda::Allocator allocator(driver, "test", false);
  auto* pool = allocator.make_pool();
  void* x = allocator.allocate(100, s1, pool);
  allocator.free(x);
  void* y = allocator.allocate(100, s1, pool);  // never the same: a tool is to see who uses what
  CHECK(x != y);
  CHECK(allocator.stats().reserved == 200);
  allocator.retire(pool);
  CHECK(allocator.stats().reserved == 100);
  allocator.free(y);
  CHECK(driver.segments.empty());
}

TEST_CASE("free neighbours merge, and whole segments go back") {
  Bench b;
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(b.allocator.allocate(256 * kib, s1));
  CHECK(b.driver.segments.size() == 1);
  for (int i : {3, 1, 2, 7, 0, 5, 6}) b.allocator.free(blocks[static_cast<size_t>(i)]);
  b.allocator.empty_cache();
  CHECK(b.driver.segments.size() == 1);  // one block is in use
  CHECK(b.allocator.allocate(mib, s1) == blocks[0]);
  b.allocator.free(blocks[0]);
  b.allocator.free(blocks[4]);
  b.allocator.empty_cache();
  CHECK(b.driver.segments.empty());
  CHECK(b.allocator.stats().reserved == 0);
  CHECK(b.allocator.stats().allocated == 0);
  CHECK(b.allocator.stats().driver_frees == 1);
  CHECK(b.allocator.stats().peak_allocated == int64_t(2 * mib));
  b.allocator.reset_peak();
  CHECK(b.allocator.stats().peak_allocated == 0);
}

TEST_CASE("another stream's use holds a block back") {
  Bench b;
  void* x = b.allocator.allocate(4096, s1);
  b.allocator.record_stream(static_cast<char*>(x) + 100, s2);
  b.allocator.record_stream(x, s2);
  b.allocator.record_stream(x, s1);  // its own: nothing to wait for
  b.allocator.free(x);
  CHECK(b.driver.marks.size() == 1);
  CHECK(b.allocator.allocate(4096, s1) != x);
  b.driver.finished.insert(s2);
  CHECK(b.allocator.allocate(4096, s1) == x);
  CHECK(b.driver.marks.empty());
}

TEST_CASE("a stream that is being captured is marked when that is over") {
  Bench b;
  b.driver.finished.insert(s2);
  b.driver.capturing.insert(s2);
  void* x = b.allocator.allocate(4096, s1);
  b.allocator.record_stream(x, s2);
  b.allocator.free(x);
  CHECK(b.allocator.allocate(4096, s1) != x);
  b.driver.capturing.clear();
  CHECK(b.allocator.allocate(4096, s1) == x);
}

TEST_CASE("out of memory: the cache is given back, then an error, then life goes on") {
  Bench b;
  b.driver.limit = 64 * mib;
  void* x = b.allocator.allocate(40 * mib, s1);
  b.allocator.free(x);
  void* y = b.allocator.allocate(50 * mib, s2);  // fits only when x's segment has gone
  CHECK(b.driver.segments.size() == 1);
  CHECK_THROWS_WITH(b.allocator.allocate(20 * mib, s2),
                    "out of memory: cuda:7 cannot allocate 20971520 bytes (allocated 52428800, reserved 52428800)");
  b.allocator.free(y);
  CHECK(b.allocator.allocate(20 * mib, s2) == y);
}

TEST_CASE("out of memory waits for blocks that other streams hold") {
  Bench b;
  b.driver.limit = 40 * mib;
  void* x = b.allocator.allocate(30 * mib, s1);
  b.allocator.record_stream(x, s2);
  b.allocator.free(x);
  CHECK(b.allocator.allocate(36 * mib, s1) != nullptr);
}

TEST_CASE("a pool is apart, outlives its retirement where blocks are in use, and then goes") {
  Bench b;
  Allocator::Pool* pool = b.allocator.make_pool();
  void* x = b.allocator.allocate(4096, s1, pool);
  void* y = b.allocator.allocate(30 * mib, s1, pool);
  CHECK(b.allocator.contains(pool, x));
  CHECK(b.allocator.contains(pool, static_cast<char*>(y) + 30 * mib - 1));
  CHECK_FALSE(b.allocator.contains(pool, static_cast<char*>(y) + 30 * mib));
  b.allocator.free(y);
  void* z = b.allocator.allocate(30 * mib, s1);
  CHECK(z != y);
  CHECK_FALSE(b.allocator.contains(pool, z));
  CHECK(b.allocator.allocate(30 * mib, s1, pool) == y);  // reused within
  b.allocator.free(y);
  b.allocator.empty_cache();
  CHECK(b.driver.segments.contains(y));  // the graph knows the address
  b.allocator.retire(pool);
  CHECK_FALSE(b.driver.segments.contains(y));
  CHECK(b.allocator.stats().reserved == int64_t(2 * mib + 30 * mib));
  b.allocator.free(x);
  CHECK(b.allocator.stats().reserved == int64_t(30 * mib));
}

TEST_CASE("a finished stream leaves its blocks to another") {
  Bench b;
  void* x = b.allocator.allocate(4096, s1);
  void* y = b.allocator.allocate(4096, s1);
  void* z = b.allocator.allocate(4096, s2);
  b.allocator.record_stream(z, s1);
  b.allocator.free(x);
  b.allocator.free(z);  // waits for s1
  b.allocator.adopt(s1, s2);
  CHECK(b.driver.marks.empty());
  CHECK(b.allocator.allocate(4096, s2) == x);
  b.allocator.free(x);
  b.allocator.free(y);
  b.allocator.empty_cache();
  CHECK(b.driver.segments.empty());
}

TEST_CASE("blocks never overlap, and all memory comes back") {
  Bench b;
  std::mt19937 random(7);
  std::map<char*, size_t> live;
  for (int i = 0; i < 20000; ++i) {
    if (live.size() < 50 || random() % 2) {
      size_t bytes = size_t{1} << (random() % 24);
      bytes += random() % bytes;
      void* stream = random() % 3 ? s1 : s2;
      auto* p = static_cast<char*>(b.allocator.allocate(bytes, stream));
      auto after = live.upper_bound(p);
      REQUIRE((after == live.end() || p + bytes <= after->first));
      REQUIRE((after == live.begin() || std::prev(after)->first + std::prev(after)->second <= p));
      live[p] = bytes;
      if (random() % 8 == 0) b.allocator.record_stream(p, s2);
    } else {
      auto at = std::next(live.begin(), static_cast<int64_t>(random() % live.size()));
      b.allocator.free(at->first);
      live.erase(at);
    }
    if (i == 10000) b.driver.finished = {s1, s2};
  }
  for (auto& [p, bytes] : live) b.allocator.free(p);
  b.allocator.empty_cache();
  CHECK(b.driver.segments.empty());
  CHECK(b.allocator.stats().allocated == 0);
  CHECK(b.driver.marks.empty());
}
