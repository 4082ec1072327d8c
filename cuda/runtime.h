#pragma once
// What every CUDA source stands on: checked calls, the current device and stream, launches, scratch memory, and the way
// a kernel's host function gets into its operator. Everything runs on stream(); nothing here waits for the device.
#include <cuda_runtime.h>
#include <nv/target>

#include <tuple>
#include <utility>

#include "halftone/core/op.h"

namespace halftone::cuda {

// Throws Error("cuda: <what>: <the error's text>") unless `status` is success. Clears the runtime's last error, too.
HT_API void check(cudaError_t status, const char* what);

// This thread's device, and its stream there: the one that thread_state() names, else the device's own.
HT_API int device();
HT_API cudaStream_t stream();
HT_API int device_count();
// Of this thread's device.
HT_API int sm_count();

// Makes a device this thread's for the guard's lifetime; free when it is already. On another device the stream is that
// device's own. The CUDA runtime's current device is right inside guards only: outside it is whatever was used last.
class HT_API DeviceGuard {
 public:
  [[nodiscard]] explicit DeviceGuard(int index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  int saved_device_;
  void* saved_stream_;
  int outer_;  // the enclosing guard's device, -1 without one
};

// Memory for the length of one kernel's host function, ordered on the stream: the next user of the block runs after
// what has been queued here. 256-byte aligned; uninitialised; null for 0 bytes.
class HT_API Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  template <class T = void> T* as() const { return static_cast<T*>(data_); }

 private:
  void* data_ = nullptr;
  int device_;
};

// Blocks and threads, in x only. Kernels loop over what a grid does not cover.
struct Grid {
  int64_t blocks;
  int threads;
  size_t shared = 0;  // dynamic shared memory, bytes
};
inline constexpr int64_t max_blocks = 2147483647;
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The first statement of every kernel, as tests/layering.cpp sees to. In a captured step a kernel's blocks are set up while the
// kernels before it still run (programmatic dependent launch): it may read and write only after this. Those of the kernel after
// it follow as soon as all of its own have started.
__device__ inline void wait_for_previous() {
  NV_IF_TARGET(NV_PROVIDES_SM_90, (asm volatile("griddepcontrol.launch_dependents;"); asm volatile("griddepcontrol.wait;" ::: "memory");))
}

// launch() without its types: `arguments` points to one pointer for each parameter of the kernel.
HT_API void launch_untyped(const char* name, const void* kernel, const Grid& grid, void** arguments);

// Queues a kernel on stream(), which begins with wait_for_previous(). No blocks: nothing happens. Errors name the kernel.
//   launch("softmax", softmax_rows<float>, {.blocks = rows, .threads = 256, .shared = bytes}, x, y, n);
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), const Grid& grid, A&&... arguments) {
  static_assert(sizeof...(P) == sizeof...(A), "launch: the kernel has another number of parameters");
  std::tuple<std::remove_cv_t<P>...> values(std::forward<A>(arguments)...);
  std::apply(
      [&](auto&... v) {
        void* pointers[] = {static_cast<void*>(&v)..., nullptr};
        launch_untyped(name, reinterpret_cast<const void*>(kernel), grid, pointers);
      },
      values);
}
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), int64_t blocks, int threads, A&&... arguments) {
  launch(name, kernel, Grid{blocks, threads}, std::forward<A>(arguments)...);
}

// Dispatch does not switch devices, so an operator's slot holds entry<kernel>: the kernel's host function runs with the
// device of its tensors current. Always fill slots with fill<kernel>(op), never with set_kernel:
//   void run_softmax(const Call& call, std::span<Tensor> out);
//   void fill_cuda_softmax() { fill<run_softmax>(op::softmax); }
HT_API int device_of(const Call& call, std::span<Tensor> out);
template <Kernel kernel> void entry(const Call& call, std::span<Tensor> out) {
  DeviceGuard guard(device_of(call, out));
  kernel(call, out);
}
template <Kernel kernel> void fill(OpDef& op) { set_kernel(op, DeviceType::cuda, entry<kernel>); }

// Kernels never trap. An index out of range makes the result NaN and is noted in host memory that the device sees, by
// report() of fault.cuh; the next wait for the device or replay throws
//   <who> <value> at <position> is out of range for <limit>
struct Fault { int who; int64_t value, position, limit; };  // who: 0 while nothing happened
struct FaultSite { Fault* fault; int who; };
// For one kind of index: fault_site("cross_entropy: target"). `who` must live for ever; cheap enough for every call.
HT_API FaultSite fault_site(const char* who);
// Throws what kernels of a device noted, once. Never waits.
void throw_faults(int device);

}  // namespace halftone::cuda
