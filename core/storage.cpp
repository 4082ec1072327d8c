// Storage, the CPU's memory, and the table of backends.
#include "halftone/core/storage.h"

#include <cstring>
#include <limits>
#include <mutex>
#include <new>

#include "halftone/core/backend.h"
#include "halftone/core/capture.h"
#include "halftone/core/op.h"
#include "halftone/core/shadow.h"

namespace halftone {
namespace {

constexpr size_t canary_bytes = 64;
constexpr unsigned char canary = 0xA5;
MemoryChecks checks;
std::atomic<int64_t> bytes_now{0}, bytes_peak{0}, overwritten{0};

// Block layout under `guard`: canaries, size of the block, data, canaries. Both paddings keep 64-byte alignment.
struct GuardedBlock {
  static void* make(int64_t bytes) {
    auto* base = static_cast<unsigned char*>(::operator new(2 * canary_bytes + static_cast<size_t>(bytes), std::align_val_t(64)));
    std::memset(base, canary, canary_bytes);
    std::memset(base + canary_bytes + bytes, canary, canary_bytes);
    return base + canary_bytes;
  }
  static void free(void* data, int64_t bytes) {
    auto* base = static_cast<unsigned char*>(data) - canary_bytes;
    for (size_t i = 0; i < canary_bytes; ++i)
      if (base[i] != canary || base[canary_bytes + static_cast<size_t>(bytes) + i] != canary) { ++overwritten; break; }
    ::operator delete(base, std::align_val_t(64));
  }
};

class Cpu final : public Backend {
 public:
  int device_count() const override { return 1; }
  void* allocate(int64_t bytes, int) override {
    int64_t now = bytes_now += bytes, peak = bytes_peak;
    while (now > peak && !bytes_peak.compare_exchange_weak(peak, now)) {}
    // Always guarded in size and place, so that checks may be switched at any time.
    void* data = nullptr;
    try {
      data = GuardedBlock::make(bytes);
    } catch (const std::bad_alloc&) {
      bytes_now -= bytes;
      throw Error(text::cat("out of memory: cannot allocate ", bytes, " bytes on the CPU"));
    }
    if (checks.poison) std::memset(data, 0xFF, static_cast<size_t>(bytes));  // NaN in every floating dtype
    return data;
  }
  void deallocate(void* data, int64_t bytes, int) noexcept override {
    bytes_now -= bytes;
    GuardedBlock::free(data, bytes);
  }
  void copy(void* to, Device, const void* from, Device, int64_t bytes) override { std::memmove(to, from, static_cast<size_t>(bytes)); }
  void synchronize(int) override {}
  void order(void*, void*) override {}
  Mapped allocate_mapped(const Shape& shape, DType dtype, int) override {
    Tensor t = Tensor::empty(Meta(shape, dtype, Device::cpu()));
    std::memset(t.raw_data(), 0, static_cast<size_t>(t.numel()) * size_of(dtype));
    return {t, t.raw_data()};
  }
  std::unique_ptr<CapturePlan> make_capture(const CaptureOptions&) override {
    throw Error("capture: the CPU has no graphs; Captured calls the function there");
  }
};

Backend* table[num_device_types] = {};
std::string unavailable[num_device_types];

}  // namespace

void ensure_backends() {
  static const bool done = [] {
    static Cpu cpu;
    table[static_cast<int>(DeviceType::cpu)] = &cpu;
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

void set_memory_checks(MemoryChecks c) { checks = c; }
int64_t overwritten_guards() { return overwritten; }
int64_t cpu_bytes() { return bytes_now; }
int64_t cpu_peak_bytes() { return bytes_peak; }
void reset_cpu_peak() { bytes_peak = bytes_now.load(); }

Storage::Storage(void* data, int64_t bytes, Device device, std::function<void(void*)> release)
    : data_(data), bytes_(bytes), device_(device), release_(std::move(release)) {}

Storage::~Storage() {
  delete shadows_.load();
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

Shadows& Storage::shadows() {
  Shadows* s = shadows_.load(std::memory_order_acquire);
  if (s) return *s;
  auto fresh = std::make_unique<Shadows>();
  if (shadows_.compare_exchange_strong(s, fresh.get(), std::memory_order_acq_rel)) s = fresh.release();
  return *s;
}
void Storage::drop_shadows() { delete shadows_.exchange(nullptr); }

Shadows::Shadow* Shadows::find(DType dtype) {
  for (auto& s : all_) if (s.dtype == dtype) return &s;
  return nullptr;
}

}  // namespace halftone
