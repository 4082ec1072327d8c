// Checked calls, the current device and stream, launches, scratch memory.
#include "halftone/cuda/runtime.h"

#include "halftone/cuda/device_state.h"

namespace halftone::cuda {
namespace {

// The device of the innermost DeviceGuard of this thread; -1 outside all of them.
int& guarded_device() {
  thread_local int device = -1;
  return device;
}

void bind(int index) {
  int now = -1;
  check(cudaGetDevice(&now), "cudaGetDevice");
  if (now == index) return;
  device_state(index);  // refuses one that is not there
  check(cudaSetDevice(index), "cudaSetDevice");
}

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw Error(text::cat("cuda: ", what, ": ", cudaGetErrorString(status)));
}

int device() { return thread_state().cuda_device; }
int device_count() { return driver_devices().count; }
int sm_count() { return device_state(device()).sm_count; }
cudaStream_t stream() {
  const ThreadState& s = thread_state();
  return s.stream ? static_cast<cudaStream_t>(s.stream) : device_state(s.cuda_device).stream;
}

// The runtime's own device is left where the last guard put it: a process that only ever uses cuda:1 makes no context
// on cuda:0, and a thread that stays on one device never switches.
DeviceGuard::DeviceGuard(int index)
    : saved_device_(thread_state().cuda_device), saved_stream_(thread_state().stream), outer_(guarded_device()) {
  ThreadState& s = thread_state();
  HT_CHECK(index == s.cuda_device || !s.capture, "capture: a captured step runs on one device; this one runs on cuda:",
           s.cuda_device, " and now asks for cuda:", index);
  if (index != outer_) bind(index);
  guarded_device() = index;
  if (index == s.cuda_device) return;
  s.cuda_device = index;
  s.stream = nullptr;
}

DeviceGuard::~DeviceGuard() {
  ThreadState& s = thread_state();
  if (outer_ >= 0 && outer_ != guarded_device()) cudaSetDevice(outer_);
  guarded_device() = outer_;
  s.cuda_device = saved_device_;
  s.stream = saved_stream_;
}

Scratch::Scratch(size_t bytes) : device_(device()) {
  if (bytes > 0) data_ = allocator(device_).allocate(bytes, stream(), PoolScope::current(device_));
}
Scratch::~Scratch() {
  if (data_) allocator(device_).free(data_);
}

void launch_untyped(const char* name, const void* kernel, const Grid& grid, void** arguments) {
  if (grid.blocks == 0) return;
  HT_CHECK(grid.blocks > 0 && grid.blocks <= max_blocks, "cuda: ", name, ": a grid of ", grid.blocks, " blocks");
  constexpr size_t shared_without_asking = size_t{48} << 10;
  if (grid.shared > shared_without_asking)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared)),
          name);
  dim3 blocks(static_cast<unsigned>(grid.blocks)), threads(static_cast<unsigned>(grid.threads));
  if (!thread_state().capture || device_state(device()).generation < 9)
    return check(cudaLaunchKernel(kernel, blocks, threads, arguments, grid.shared, stream()), name);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{blocks, threads, grid.shared, stream(), &early, 1};
  check(cudaLaunchKernelExC(&config, kernel, arguments), name);
}

int device_of(const Call& call, std::span<Tensor> out) {
  for (auto& t : out) if (t.defined() && t.device().type == DeviceType::cuda) return t.device().index;
  for (auto& t : call.in) if (t.defined() && t.device().type == DeviceType::cuda) return t.device().index;
  return device();
}

}  // namespace halftone::cuda
