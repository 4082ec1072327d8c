// Devices as this process knows them: the driver as a source of memory, staging, faults.
#include "halftone/cuda/device_state.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

namespace halftone::cuda {
namespace {

struct ThreadPool { int device = -1; Allocator::Pool* pool = nullptr; };
ThreadPool& thread_pool() {
  thread_local ThreadPool pool;
  return pool;
}

// Names of faults; a fault's number is its place here, counted from 1.
struct FaultNames {
  std::mutex lock;
  std::vector<const char*> names;
};
FaultNames& fault_names() {
  static auto* names = new FaultNames;
  return *names;
}

// HALFTONE_CUDA_NO_CACHE=n: each tensor has memory of its own, which compute-sanitizer then guards, in multiples of n bytes. With several
// GPUs n is 16: NCCL reads the words that a buffer's ends lie in, of 4 bytes (its protocol LL) or 16 (LL128), as cudaMalloc's alignment allows.
size_t no_cache() {
  static const char* n = std::getenv("HALFTONE_CUDA_NO_CACHE");
  return n ? static_cast<size_t>(std::max(1, std::atoi(n))) : 0;
}

}  // namespace

BoundDevice::BoundDevice(int index) {
  int now = -1;
  cudaGetDevice(&now);
  if (now == index) return;
  check(cudaSetDevice(index), "cudaSetDevice");
  before_ = now;
}
BoundDevice::~BoundDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

void* DriverMemory::allocate(size_t bytes) {
  BoundDevice bound(device_);
  RelaxedCapture relaxed;
  void* data = nullptr;
  size_t step = std::max<size_t>(no_cache(), 1);
  cudaError_t status = cudaMalloc(&data, (bytes + step - 1) / step * step);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check(status, "cudaMalloc");
  return data;
}

void DriverMemory::free(void* data) noexcept {
  RelaxedCapture relaxed;
  cudaFree(data);
  cudaGetLastError();
}

void* DriverMemory::mark(void* stream) noexcept {
  auto handle = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  RelaxedCapture relaxed;
  if (cudaStreamIsCapturing(handle, &capturing) != cudaSuccess) return nullptr;
  if (capturing != cudaStreamCaptureStatusNone) return nullptr;
  int before = -1;
  cudaGetDevice(&before);
  if (before != device_) cudaSetDevice(device_);
  cudaEvent_t event = nullptr;
  bool good = cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess &&
              cudaEventRecord(event, handle) == cudaSuccess;
  if (before != device_) cudaSetDevice(before);
  if (!good) cudaGetLastError();
  return good ? event : nullptr;
}

bool DriverMemory::passed(void* mark, bool wait) noexcept {
  auto event = static_cast<cudaEvent_t>(mark);
  RelaxedCapture relaxed;
  cudaError_t status = wait ? cudaEventSynchronize(event) : cudaEventQuery(event);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  cudaEventDestroy(event);
  return true;
}

Staging::Chunk& Staging::room_for(size_t bytes, cudaStream_t stream) {
  Chunk* chunk = &chunks_[current_];
  if (chunk->data && chunk->stream == stream && chunk->used + bytes <= chunk_bytes) return *chunk;
  if (chunk->stream) check(cudaEventRecord(chunk->done, chunk->stream), "cudaEventRecord");
  current_ = (current_ + 1) % std::size(chunks_);
  chunk = &chunks_[current_];
  if (!chunk->data) {
    check(cudaEventCreateWithFlags(&chunk->done, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaHostAlloc(reinterpret_cast<void**>(&chunk->data), chunk_bytes, cudaHostAllocPortable), "cudaHostAlloc");
  } else if (chunk->stream) {
    check(cudaEventSynchronize(chunk->done), "cudaEventSynchronize");
  }
  chunk->used = 0;
  chunk->stream = stream;
  return *chunk;
}

void Staging::upload(void* to, const void* from, size_t bytes) {
  std::lock_guard guard(lock_);
  cudaStream_t on = stream();
  for (size_t at = 0; at < bytes;) {
    size_t piece = std::min(bytes - at, chunk_bytes);
    Chunk& chunk = room_for(piece, on);
    char* staged = chunk.data + chunk.used;
    std::memcpy(staged, static_cast<const char*>(from) + at, piece);
    auto* target = static_cast<char*>(to) + at;
    check(cudaMemcpyAsync(target, staged, piece, cudaMemcpyHostToDevice, on), "copy to the device");
    chunk.used = std::min(chunk_bytes, (chunk.used + piece + 63) / 64 * 64);
    at += piece;
  }
}

void Staging::download(void* to, const void* from, size_t bytes) {
  cudaStream_t on = stream();
  if (bytes > inbox_bytes) {  // the driver pipelines large ones well
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, on), "copy from the device");
    check(cudaStreamSynchronize(on), "copy from the device");
    return;
  }
  std::lock_guard guard(inbox_lock_);
  if (!inbox_)
    check(cudaHostAlloc(reinterpret_cast<void**>(&inbox_), inbox_bytes, cudaHostAllocPortable), "cudaHostAlloc");
  check(cudaMemcpyAsync(inbox_, from, bytes, cudaMemcpyDeviceToHost, on), "copy from the device");
  check(cudaStreamSynchronize(on), "copy from the device");
  std::memcpy(to, inbox_, bytes);
}

void Staging::forget(cudaStream_t stream) {
  std::lock_guard guard(lock_);
  for (auto& chunk : chunks_) if (chunk.stream == stream) chunk.stream = nullptr;
}

DeviceState::DeviceState(int i) : index(i), memory(i), allocator(memory, text::cat("cuda:", i), no_cache() == 0) {
  BoundDevice bound(index);
  RelaxedCapture relaxed;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, index), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, index), "cudaDeviceGetAttribute");
  auto kind = cudaHostAllocPortable | cudaHostAllocMapped;
  check(cudaHostAlloc(reinterpret_cast<void**>(&fault), sizeof(Fault), kind), "cudaHostAlloc");
  *fault = {};
}

DeviceState& device_state(int index) {
  static std::array<std::atomic<DeviceState*>, 64> states{};
  static std::mutex lock;
  int count = driver_devices().count;
  HT_CHECK(index >= 0 && index < std::min<int>(count, static_cast<int>(states.size())), "cuda:", index, ": there ",
           count == 1 ? "is 1 device" : text::cat("are ", count, " devices"));
  auto& slot = states[static_cast<size_t>(index)];
  if (DeviceState* s = slot.load(std::memory_order_acquire)) return *s;
  std::lock_guard guard(lock);
  if (!slot.load()) slot.store(new DeviceState(index));
  return *slot.load();
}

const DeviceCount& driver_devices() {
  static const DeviceCount devices = [] {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (status != cudaSuccess) return DeviceCount{0, cudaGetErrorString(status)};
    return DeviceCount{count, count > 0 ? nullptr : "no device"};
  }();
  return devices;
}

Allocator& allocator(int device) { return device_state(device).allocator; }

PoolScope::PoolScope(int device, Allocator::Pool* pool) { thread_pool() = {device, pool}; }
PoolScope::~PoolScope() { thread_pool() = {}; }
Allocator::Pool* PoolScope::current(int device) {
  auto& p = thread_pool();
  return p.device == device ? p.pool : nullptr;
}

cudaStream_t take_stream(int device) {
  DeviceState& state = device_state(device);
  {
    std::lock_guard guard(state.idle_lock);
    if (!state.idle.empty()) {
      cudaStream_t last = state.idle.back();
      state.idle.pop_back();
      return last;
    }
  }
  BoundDevice bound(device);
  RelaxedCapture relaxed;
  cudaStream_t made = nullptr;
  check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
  return made;
}

void give_back_stream(int device, cudaStream_t stream) {
  DeviceState& state = device_state(device);
  state.staging.forget(stream);
  state.allocator.adopt(stream, state.stream);
  std::lock_guard guard(state.idle_lock);
  state.idle.push_back(stream);
}

FaultSite fault_site(const char* who) {
  FaultNames& all = fault_names();
  std::lock_guard guard(all.lock);
  auto found = std::find(all.names.begin(), all.names.end(), who);
  if (found == all.names.end()) found = all.names.insert(found, who);
  return {device_state(device()).fault, static_cast<int>(found - all.names.begin()) + 1};
}

void throw_faults(int device) {
  volatile Fault* f = device_state(device).fault;
  int who = f->who;
  if (who == 0) return;
  int64_t value = f->value, position = f->position, limit = f->limit;
  f->who = 0;
  FaultNames& all = fault_names();
  std::lock_guard guard(all.lock);
  const char* name = all.names[static_cast<size_t>(who) - 1];
  throw Error(text::cat(name, " ", value, " at ", position, " is out of range for ", limit));
}

}  // namespace halftone::cuda
