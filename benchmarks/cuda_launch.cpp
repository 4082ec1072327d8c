// What an operator on the GPU costs the host beyond its launch call: nanoseconds of an empty kernel's launch with arguments of
// the same size, and of operators, medians of interleaved rounds. The queue is emptied between rounds, outside the time.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "halftone/halftone.h"

namespace ht = halftone;
using namespace ht;

void launch_nothing();  // cuda_launch.cu

int main() {
  std::printf("%s\n", build_info().c_str());
  if (devices(DeviceType::cuda).empty()) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  Tensor x = ones({1}, {.device = Device::cuda()}), w = ones({1}, {.device = Device::cuda(), .requires_grad = true});
  struct Case { const char* name; std::function<void()> run; std::vector<double> times; };
  std::vector<Case> cases = {{"launch alone", launch_nothing, {}},
                             {"bare: relu(x)", [&] { relu(x); }, {}},
                             {"bare: x * x", [&] { x * x; }, {}},
                             {"taped: relu(w)", [&] { relu(w); }, {}}};
  constexpr int rounds = 101, calls = 400;  // fewer than the driver queues before it waits
  using Clock = std::chrono::steady_clock;
  for (int r = 0; r < rounds; ++r)
    for (auto& c : cases) {
      backend(DeviceType::cuda).synchronize(0);
      auto start = Clock::now();
      for (int i = 0; i < calls; ++i) c.run();
      c.times.push_back(std::chrono::duration<double, std::nano>(Clock::now() - start).count() / calls);
    }
  for (auto& c : cases) {
    std::sort(c.times.begin(), c.times.end());
    double median = c.times[c.times.size() / 2], alone = cases[0].times[cases[0].times.size() / 2];
    std::printf("%-16s %6.0f ns, %+6.0f beyond the launch\n", c.name, median, median - alone);
  }
}
