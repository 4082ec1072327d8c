#include "halftone/cuda/plans.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "halftone/cuda/runtime.h"

namespace halftone::cuda {

namespace {

const std::string& gpu_name() {
  static std::mutex lock;
  static std::unordered_map<int, std::string> names;
  std::lock_guard guard(lock);
  std::string& name = names[device()];
  if (name.empty()) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device()), "cudaGetDeviceProperties");
    name = properties.name;
  }
  return name;
}

}  // namespace

std::string tuning_name(const std::string& library, std::span<const int64_t> problem) {
  std::string name = library + ", " + gpu_name() + ":";
  for (int64_t word : problem) name += ' ' + std::to_string(word);
  return name;
}

double time_call(const std::function<void()>& call) {
  struct Event {
    cudaEvent_t event;
    Event() { check(cudaEventCreate(&event), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(event); }
  } begin, end;
  constexpr int runs = 5;
  double least = std::numeric_limits<double>::max();
  call();
  for (int i = 0; i < runs; ++i) {
    check(cudaEventRecord(begin.event, stream()), "cudaEventRecord");
    call();
    check(cudaEventRecord(end.event, stream()), "cudaEventRecord");
    check(cudaEventSynchronize(end.event), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin.event, end.event), "cudaEventElapsedTime");
    least = std::min(least, static_cast<double>(ms));
  }
  return least;
}

}  // namespace halftone::cuda
