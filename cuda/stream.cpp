// Streams and events.
#include "halftone/cuda/stream.h"

#include "halftone/core/backend.h"
#include "halftone/cuda/device_state.h"

namespace halftone::cuda {
namespace {

cudaEvent_t event(void* handle) { return static_cast<cudaEvent_t>(handle); }

}  // namespace

Stream::Stream(int device) : device_(device) {
  backend(DeviceType::cuda);  // says clearly when there is none
  handle_ = take_stream(device);
}

Stream::~Stream() {
  auto mine = static_cast<cudaStream_t>(handle_);
  RelaxedCapture relaxed;
  cudaStreamSynchronize(mine);
  cudaGetLastError();
  give_back_stream(device_, mine);
}

void Stream::wait(const Event& e) const {
  if (!e.handle()) return;
  check(cudaStreamWaitEvent(static_cast<cudaStream_t>(handle_), event(e.handle()), 0), "cudaStreamWaitEvent");
}
void Stream::synchronize() const {
  check_may_sync("synchronize");
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(handle_)), "synchronize");
}

Event::~Event() {
  if (handle_) cudaEventDestroy(event(handle_));
}

void Event::record(int device) {
  DeviceGuard guard(device);
  if (!handle_) {
    cudaEvent_t made = nullptr;
    check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreate");
    handle_ = made;
  }
  check(cudaEventRecord(event(handle_), stream()), "cudaEventRecord");
}

bool Event::done() const {
  if (!handle_) return true;
  cudaError_t status = cudaEventQuery(event(handle_));
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

void Event::synchronize() const {
  check_may_sync("synchronize");
  if (handle_) check(cudaEventSynchronize(event(handle_)), "synchronize");
}

void Event::wait(int device) const {
  DeviceGuard guard(device);
  if (handle_) check(cudaStreamWaitEvent(stream(), event(handle_), 0), "cudaStreamWaitEvent");
}

StreamGuard::StreamGuard(const Stream& stream)
    : saved_device_(thread_state().cuda_device), saved_stream_(thread_state().stream) {
  thread_state().cuda_device = stream.device();
  thread_state().stream = stream.handle();
}
StreamGuard::~StreamGuard() {
  thread_state().cuda_device = saved_device_;
  thread_state().stream = saved_stream_;
}

void record_stream(const Tensor& t, const Stream& stream) {
  HT_CHECK(t.defined() && t.device() == Device::cuda(stream.device()), "record_stream: expected a tensor on cuda:",
           stream.device());
  allocator(stream.device()).record_stream(t.storage()->data(), stream.handle());
}

}  // namespace halftone::cuda
