#pragma once
// What this process keeps for each CUDA device that it uses: made at first use, never destroyed, because tensors in
// static variables may be freed after everything else.
#include <mutex>

#include "halftone/cuda/allocator.h"
#include "halftone/cuda/runtime.h"

namespace halftone::cuda {

// Binds a device to the CUDA runtime of this thread and says nothing to thread_state(): for driver calls.
class BoundDevice {
 public:
  [[nodiscard]] explicit BoundDevice(int index);
  ~BoundDevice();
  BoundDevice(const BoundDevice&) = delete;

 private:
  int before_ = -1;
};

// While a thread captures, calls that are not part of a graph (cudaMalloc, event queries) are refused unless it says
// that it knows what it does.
class RelaxedCapture {
 public:
  [[nodiscard]] RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class DriverMemory final : public MemorySource {
 public:
  explicit DriverMemory(int device) : device_(device) {}
  void* allocate(size_t bytes) override;
  void free(void* data) noexcept override;
  void* mark(void* stream) noexcept override;
  bool passed(void* mark, bool wait) noexcept override;

 private:
  int device_;
};

// Pinned memory through which pageable memory travels, so that a copy to the device returns as soon as the source has
// been read. A chunk serves one stream at a time and is taken again when that stream has passed its last copy.
class Staging {
 public:
  // Copies on the calling thread's stream; the source may be overwritten when this returns.
  void upload(void* to, const void* from, size_t bytes);
  // Copies and waits.
  void download(void* to, const void* from, size_t bytes);
  // The stream has finished and is given back.
  void forget(cudaStream_t stream);

 private:
  struct Chunk {
    char* data = nullptr;
    size_t used = 0;
    cudaStream_t stream = nullptr;
    cudaEvent_t done = nullptr;
  };
  static constexpr size_t chunk_bytes = size_t{4} << 20, inbox_bytes = size_t{64} << 10;
  Chunk& room_for(size_t bytes, cudaStream_t stream);

  std::mutex lock_, inbox_lock_;
  Chunk chunks_[4];
  size_t current_ = 0;
  char* inbox_ = nullptr;
};

struct DeviceState {
  explicit DeviceState(int index);

  int index, sm_count;
  int generation;  // of its architecture, 9 for Hopper, which can start kernels before those ahead of them have ended
  cudaStream_t stream;  // the device's own
  DriverMemory memory;
  Allocator allocator;
  Staging staging;
  Fault* fault;  // pinned; one address on both sides
  std::mutex idle_lock;
  std::vector<cudaStream_t> idle;  // streams of ours that nobody has
};
DeviceState& device_state(int index);

// How many devices there are, or why there is none. Asks the driver once.
struct DeviceCount { int count; const char* reason; };
const DeviceCount& driver_devices();

// Where this thread's memory comes from while it captures on a device.
class PoolScope {
 public:
  [[nodiscard]] PoolScope(int device, Allocator::Pool* pool);
  ~PoolScope();
  PoolScope(const PoolScope&) = delete;
  // The pool to use on a device; null: the cache that all share.
  static Allocator::Pool* current(int device);
};

// Streams of ours. One that has finished is kept for the next who wants one, never destroyed: tapes and 16-bit copies may
// still know it. What it used goes to the device's own stream.
cudaStream_t take_stream(int device);
void give_back_stream(int device, cudaStream_t stream);

}  // namespace halftone::cuda
