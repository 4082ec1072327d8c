// Storage, the CPU's memory, and the table of backends.
#include "halftone/core/storage.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "halftone/core/backend.h"
#include "halftone/core/capture.h"
#include "halftone/core/packed.h"
#include "halftone/core/op.h"
#include "halftone/core/shadow.h"

namespace halftone {
namespace {

constexpr size_t canary_bytes = 64;
constexpr unsigned char canary = 0xA5;
MemoryChecks checks;
std::atomic<int64_t> bytes_now{0}, bytes_peak{0}, overwritten{0};

// A CPU block: a header, the data at a multiple of 64 bytes; under `guard`, canaries on both sides of the data.
struct Block {
  struct Header { void* base; bool guarded; };  // right before the data, or before the canaries

  static void* make(int64_t bytes) {
    size_t size = static_cast<size_t>(rounded(bytes)), room = checks.guard ? canary_bytes : 0;
    size_t front = sizeof(Header) + canary_bytes + 63;  // the header, canaries or not, at a fixed place
    auto* base = static_cast<unsigned char*>(std::malloc(front + size + room));
    if (!base) return nullptr;
    if (size >= own_pages) ask_for_large_pages(base, size);
    auto* data = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(base) + front) / 64 * 64);
    new (header(data)) Header{base, checks.guard};
    if (!checks.guard) return data;
    std::memset(data - canary_bytes, canary, canary_bytes);
    std::memset(data + bytes, canary, canary_bytes);
    return data;
  }
  static void free(void* pointer, int64_t bytes) {
    auto* data = static_cast<unsigned char*>(pointer);
    Header h = *header(data);
    if (h.guarded && !(intact(data - canary_bytes) && intact(data + bytes))) ++overwritten;
    std::free(h.base);
  }
  static bool guarded(void* pointer) { return header(static_cast<unsigned char*>(pointer))->guarded; }

  // Rows of a batch lie anywhere in a dataset; on pages of 4 KiB, finding them takes nearly a third of their copy's time. Where the system has
  // no larger ones, it refuses, and nothing is lost. From `own_pages` bytes on malloc gives a block pages of its own, which end with it.
  static constexpr size_t own_pages = size_t{32} << 20;
  static void ask_for_large_pages(unsigned char* base, size_t size) {
    constexpr uintptr_t page = uintptr_t{2} << 20;
    const auto begin = (reinterpret_cast<uintptr_t>(base) + page - 1) / page * page, end = (reinterpret_cast<uintptr_t>(base) + size) / page * page;
    ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }

  // Large blocks come in eight sizes to the octave, so that one serves tensors of about its size.
  static constexpr int64_t large = 1 << 16;
  static int64_t rounded(int64_t bytes) {
    if (bytes < large) return bytes;
    int64_t step = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes))) / 8;
    return (bytes + step - 1) / step * step;
  }
  static Header* header(unsigned char* data) { return reinterpret_cast<Header*>(data - canary_bytes - sizeof(Header)); }
  static bool intact(const unsigned char* p) { return std::all_of(p, p + canary_bytes, [](unsigned char c) { return c == canary; }); }
};

}  // namespace
// There where an address sanitizer runs, which would not see a use of a block that is kept.
extern "C" __attribute__((weak)) void __asan_init();
namespace {

// Large blocks that this thread gave back, for its next tensors: the system would take their pages away and clear them again.
// Without locks, so that a forked child finds them usable.
class Kept {
  using Blocks = std::multimap<int64_t, void*>;

 public:
  ~Kept() {
    clear();
    gone = true;
  }
  // Null when none of this size is here.
  static void* take(int64_t bytes) {
    if (bytes < Block::large || gone) return nullptr;
    auto found = mine.blocks_.find(Block::rounded(bytes));
    if (found == mine.blocks_.end()) return nullptr;
    void* data = found->second;
    kept_now -= found->first;
    mine.blocks_.erase(found);
    return data;
  }
  // Whether it was kept. All that is in use or kept stays near the most that ever was in use.
  static bool give(void* data, int64_t bytes) {
    constexpr int64_t spare = 16 << 20;
    if (bytes < Block::large || gone || checks.guard || checks.poison || Block::guarded(data) || __asan_init) return false;
    int64_t size = Block::rounded(bytes);
    if (bytes_now + kept_now + size > bytes_peak / 4 * 5 + spare) return false;
    mine.blocks_.emplace(size, data);
    kept_now += size;
    return true;
  }
  // Before more is asked of the system: as many blocks of other sizes as it takes make room, the largest first.
  static void make_room(int64_t bytes) {
    if (gone || bytes < Block::large) return;
    while (!mine.blocks_.empty() && bytes_now + kept_now > bytes_peak) mine.free(std::prev(mine.blocks_.end()));
  }
  static void drop() { if (!gone) mine.clear(); }
  static int64_t bytes() { return kept_now; }

 private:
  void free(Blocks::iterator block) {
    Block::free(block->second, block->first);
    kept_now -= block->first;
    blocks_.erase(block);
  }
  void clear() { while (!blocks_.empty()) free(blocks_.begin()); }
  Blocks blocks_;
  static inline std::atomic<int64_t> kept_now{0};
  static thread_local bool gone;  // tensors of static life outlive this
  static thread_local Kept mine;
};
thread_local bool Kept::gone = false;
thread_local Kept Kept::mine;

class Cpu final : public Backend {
 public:
  int device_count() const override { return 1; }
  void* allocate(int64_t bytes, int) override {
    int64_t now = bytes_now += bytes, peak = bytes_peak;
    while (now > peak && !bytes_peak.compare_exchange_weak(peak, now)) {}
    void* data = Kept::take(bytes);
    if (!data) {
      Kept::make_room(bytes);
      data = Block::make(bytes);
    }
    if (!data) {
      Kept::drop();
      data = Block::make(bytes);
    }
    if (!data) {
      bytes_now -= bytes;
      throw Error(text::cat("out of memory: cannot allocate ", bytes, " bytes on the CPU"));
    }
    if (checks.poison) std::memset(data, 0xFF, static_cast<size_t>(bytes));  // NaN in every floating dtype
    return data;
  }
  void deallocate(void* data, int64_t bytes, int) noexcept override {
    bytes_now -= bytes;
    if (!Kept::give(data, bytes)) Block::free(data, bytes);
  }
  void copy(void* to, Device, const void* from, Device, int64_t bytes) override { std::memmove(to, from, static_cast<size_t>(bytes)); }
  void synchronize(int) override {}
  void order(Queue, Queue) override {}
  Mapped allocate_mapped(const Shape& shape, DType dtype, int) override {
    Tensor t = Tensor::empty(Meta(shape, dtype, Device::cpu()));
    std::memset(t.raw_data(), 0, static_cast<size_t>(t.numel()) * size_of(dtype));
    return {t, t.raw_data()};
  }
  std::unique_ptr<CapturePlan> make_capture(const CaptureOptions&) override {
    throw Error("capture: the CPU has no graphs; Captured calls the function there");
  }
  MemoryStats memory_stats(int) const override { return {bytes_now, bytes_peak, bytes_now + Kept::bytes()}; }
  void reset_peak_memory(int) override { bytes_peak = bytes_now.load(); }
};

Backend* table[num_device_types] = {};
std::string unavailable[num_device_types];

}  // namespace

void ensure_backends() {
  static const bool done = [] {
    // Never destroyed: static tensors of a program outlive objects of this file.
    table[static_cast<int>(DeviceType::cpu)] = new Cpu;
    library_ops();  // fills the CPU's kernel slots
    register_backends();
    return true;
  }();
  static_cast<void>(done);
}
void set_backend(DeviceType type, Backend* backend) { table[static_cast<int>(type)] = backend; }
void set_backend_unavailable(DeviceType type, std::string why) { unavailable[static_cast<int>(type)] = std::move(why); }

Backend& backend(DeviceType type) {
  ensure_backends();
  Backend* b = table[static_cast<int>(type)];
  if (b) return *b;
  auto& why = unavailable[static_cast<int>(type)];
  throw Error(why.empty() ? "cuda: this build has no CUDA; configure with -DHALFTONE_CUDA=ON, or use the device cpu" : why);
}

std::vector<Device> devices(DeviceType type) {
  ensure_backends();
  std::vector<Device> all;
  if (Backend* b = table[static_cast<int>(type)])
    for (int i = 0; i < b->device_count(); ++i) all.push_back({type, i});
  return all;
}

namespace { std::atomic<bool> tf32{false}; }
void allow_tf32(bool on) { tf32.store(on, std::memory_order_relaxed); }
bool tf32_allowed() { return tf32.load(std::memory_order_relaxed); }

void set_memory_checks(MemoryChecks c) { checks = c; }
int64_t overwritten_guards() { return overwritten; }
MemoryStats memory_stats(Device d) { return backend(d.type).memory_stats(d.index); }
void reset_peak_memory(Device d) { backend(d.type).reset_peak_memory(d.index); }

Storage::Storage(void* data, int64_t bytes, Device device, std::function<void(void*)> release)
    : data_(data), bytes_(bytes), device_(device), release_(std::move(release)) {}

Storage::~Storage() {
  delete shadows_.load();
  delete packed_.load();
  if (release_) release_(data_);
  else if (bytes_ > 0) backend(device_.type).deallocate(data_, bytes_, device_.index);
}

std::shared_ptr<Storage> Storage::allocate(int64_t bytes, Device device) {
  void* data = bytes > 0 ? backend(device.type).allocate(bytes, device.index) : nullptr;
  return std::make_shared<Storage>(data, bytes, device, nullptr);
}
std::shared_ptr<Storage> Storage::borrow(void* data, int64_t bytes, Device device, std::function<void(void*)> release) {
  if (!release) release = [](void*) {};
  return std::make_shared<Storage>(data, bytes, device, std::move(release));
}
std::shared_ptr<Storage> Storage::carve(std::shared_ptr<Storage> whole, int64_t offset_bytes, int64_t bytes) {
  HT_CHECK(offset_bytes >= 0 && bytes >= 0 && checked_add(offset_bytes, bytes) <= whole->bytes(), "carve: bytes ", offset_bytes,
           " to ", offset_bytes + bytes, " leave a storage of ", whole->bytes());
  void* data = static_cast<char*>(whole->data()) + offset_bytes;
  Device device = whole->device();
  auto part = std::make_shared<Storage>(data, bytes, device, [keep = std::move(whole)](void*) {});
  part->carved_ = true;
  return part;
}

namespace {
// What hangs on a storage, made when it is first asked for.
template <class T> T& made_once(std::atomic<T*>& at) {
  T* there = at.load(std::memory_order_acquire);
  if (there) return *there;
  auto fresh = std::make_unique<T>();
  if (at.compare_exchange_strong(there, fresh.get(), std::memory_order_acq_rel)) there = fresh.release();
  return *there;
}
}  // namespace

Shadows& Storage::shadows() { return made_once(shadows_); }
void Storage::drop_shadows() { delete shadows_.exchange(nullptr); }
Packed& Storage::packed() { return made_once(packed_); }

std::shared_ptr<void> Packed::find(const std::vector<int64_t>& key, uint64_t version) {
  std::lock_guard guard(lock_);
  if (version_ == version && key_ == key) return made_;
  made_.reset();
  return nullptr;
}
void Packed::offer(const std::vector<int64_t>& key, uint64_t version, std::shared_ptr<void> made) {
  std::lock_guard guard(lock_);
  if (version_ == version && key_ == key) made_ = std::move(made);
  key_ = key;
  version_ = version;
}
void Packed::drop() {
  std::lock_guard guard(lock_);
  made_.reset();
}

void Shadows::Shadow::wrote(uint64_t v) {
  version = v;
  written_on = thread_state().stream;
  awaited_on.clear();
}
void Shadows::Shadow::await() {
  const ThreadState& state = thread_state();
  Device device = copy.device();
  if (state.stream == written_on || device.type == DeviceType::cpu || state.capture) return;  // a graph's launch awaits its copies
  if (std::find(awaited_on.begin(), awaited_on.end(), state.stream) != awaited_on.end()) return;
  backend(device.type).order({written_on, device.index}, {state.stream, device.index});
  awaited_on.push_back(state.stream);
}
Shadows::Shadow* Shadows::find(DType dtype) {
  for (auto& s : all_) if (s.dtype == dtype) return &s;
  return nullptr;
}

}  // namespace halftone
