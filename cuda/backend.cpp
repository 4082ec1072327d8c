// The CUDA backend: memory from the caching allocators, copies in every direction, mapped memory, waiting. Every call
// works on the calling thread's stream of the device that it names.
#include "halftone/cuda/backend.h"

#include <cstring>

#include "halftone/core/backend.h"
#include "halftone/cuda/capture.h"
#include "halftone/cuda/device_state.h"

namespace halftone::cuda {
namespace {

// Has the stream of one device wait for what is queued on another's.
void order_after(cudaStream_t later, int later_device, cudaStream_t earlier, int earlier_device) {
  cudaEvent_t event = nullptr;
  {
    BoundDevice bound(earlier_device);
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaEventRecord(event, earlier), "cudaEventRecord");
  }
  BoundDevice bound(later_device);
  check(cudaStreamWaitEvent(later, event, 0), "cudaStreamWaitEvent");
  cudaEventDestroy(event);  // lives on until it has been passed
}

// Direct access where the hardware has it; copies between devices work without, through the host.
void enable_peers(int a, int b) {
  static std::mutex lock;
  static std::set<std::pair<int, int>> known;
  std::lock_guard guard(lock);
  for (auto [from, to] : {std::pair{a, b}, std::pair{b, a}}) {
    int possible = 0;
    if (!known.insert({from, to}).second) continue;
    if (cudaDeviceCanAccessPeer(&possible, from, to) != cudaSuccess || !possible) continue;
    BoundDevice bound(from);
    cudaDeviceEnablePeerAccess(to, 0);
    cudaGetLastError();  // enabled before, by the program: as good
  }
}

// On the source's stream, between what the target's stream has queued before and after.
void copy_between(void* to, int to_device, const void* from, int from_device, size_t bytes) {
  enable_peers(to_device, from_device);
  auto stream_of = [](int index) {
    DeviceGuard guard(index);
    return stream();
  };
  cudaStream_t source = stream_of(from_device), target = stream_of(to_device);
  order_after(source, from_device, target, to_device);
  {
    BoundDevice bound(from_device);
    check(cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, source), "copy between devices");
  }
  order_after(target, to_device, source, from_device);
}

class Cuda final : public Backend {
 public:
  int device_count() const override { return driver_devices().count; }

  void* allocate(int64_t bytes, int index) override {
    const ThreadState& s = thread_state();
    DeviceState& state = device_state(index);
    void* on = index == s.cuda_device && s.stream ? s.stream : state.stream;
    return state.allocator.allocate(static_cast<size_t>(bytes), on, PoolScope::current(index));
  }
  void deallocate(void* data, int64_t, int index) noexcept override { allocator(index).free(data); }

  void copy(void* to, Device to_device, const void* from, Device from_device, int64_t size) override {
    if (size == 0) return;
    auto bytes = static_cast<size_t>(size);
    bool to_cuda = to_device.type == DeviceType::cuda, from_cuda = from_device.type == DeviceType::cuda;
    HT_CHECK(from_cuda || !thread_state().capture,
             "copy: a captured step cannot copy from the CPU; pass the tensor as an input, or make it before");
    HT_CHECK(to_cuda || !thread_state().capture,
             "copy: a captured step cannot copy to the CPU; return the tensor and read it after the call");
    DeviceGuard guard(from_cuda ? from_device.index : to_device.index);
    if (to_cuda && from_cuda && to_device.index != from_device.index) {
      copy_between(to, to_device.index, from, from_device.index, bytes);
    } else if (to_cuda && from_cuda) {
      check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream()), "copy on the device");
    } else if (to_cuda) {
      device_state(to_device.index).staging.upload(to, from, bytes);
    } else {
      device_state(from_device.index).staging.download(to, from, bytes);
      throw_faults(from_device.index);
    }
  }

  void synchronize(int index) override {
    check_may_sync("synchronize");
    DeviceGuard guard(index);
    check(cudaDeviceSynchronize(), "synchronize");
    throw_faults(index);
  }

  void order(Queue before, Queue after) override {
    auto handle = [](Queue q) { return q.stream ? static_cast<cudaStream_t>(q.stream) : device_state(q.index).stream; };
    order_after(handle(after), after.index, handle(before), before.index);
  }

  Mapped allocate_mapped(const Shape& shape, DType dtype, int index) override {
    DeviceGuard guard(index);
    auto bytes = checked_mul(shape.numel(), static_cast<int64_t>(size_of(dtype)));
    void* host = nullptr;
    {
      RelaxedCapture relaxed;
      auto kind = cudaHostAllocPortable | cudaHostAllocMapped;
      check(cudaHostAlloc(&host, static_cast<size_t>(bytes), kind), "mapped memory");
    }
    std::memset(host, 0, static_cast<size_t>(bytes));
    auto storage = Storage::borrow(host, bytes, Device::cuda(index), [](void* data) {
      RelaxedCapture relaxed;
      cudaFreeHost(data);
    });
    return {Tensor(Meta(shape, dtype, Device::cuda(index)), std::move(storage)), host};
  }

  std::unique_ptr<CapturePlan> make_capture(const CaptureOptions& options) override {
    return make_plan(options);
  }

  MemoryStats memory_stats(int index) const override {
    auto s = allocator(index).stats();
    return {s.allocated, s.peak_allocated, s.reserved};
  }
  void reset_peak_memory(int index) override { allocator(index).reset_peak(); }
};

}  // namespace

bool start() {
  const DeviceCount& devices = driver_devices();
  if (devices.count == 0) {
    auto why = text::cat("cuda: no usable GPU: ", devices.reason, "; use the device cpu");
    set_backend_unavailable(DeviceType::cuda, std::move(why));
    return false;
  }
  static auto* backend = new Cuda;  // never destroyed: tensors may outlive everything
  set_backend(DeviceType::cuda, backend);
  return true;
}

}  // namespace halftone::cuda
