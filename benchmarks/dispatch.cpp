// What an operator call costs beside its kernel: bare, taped, under autocast. Prints nanoseconds of host time a call, medians of
// interleaved rounds on tensors of one element.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "halftone/halftone.h"

namespace ht = halftone;
using namespace ht;

namespace {

double nanoseconds(const std::function<void()>& f, int calls) {
  auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) f();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / calls;
}

}  // namespace

int main() {
  std::printf("%s\n", build_info().c_str());
  Device device = devices(DeviceType::cuda).empty() ? Device::cpu() : Device::cuda();
  Tensor x = ones({1}, {.device = device}), w = ones({1}, {.device = device, .requires_grad = true});
  struct Case { const char* name; std::function<void()> run; std::vector<double> times; };
  std::vector<Case> cases = {
      {"bare: relu(x)", [&] { relu(x); }, {}},
      {"bare: x * x", [&] { x * x; }, {}},
      {"taped: relu(w)", [&] { relu(w); }, {}},
      {"taped: w * x", [&] { w * x; }, {}},
      {"view: x.view", [&] { x.view({1, 1}); }, {}},
      {"autocast: relu(x)", [&] { relu(x); }, {}},
  };
  amp::AutocastOptions on;
  constexpr int rounds = 31, calls = 20000;
  for (int r = 0; r < rounds; ++r)
    for (auto& c : cases) {
      std::optional<amp::Autocast> region;
      if (std::string_view(c.name).starts_with("autocast")) region.emplace(on);
      c.times.push_back(nanoseconds(c.run, calls));
      if (device.type == DeviceType::cuda) backend(DeviceType::cuda).synchronize(0);
    }
  for (auto& c : cases) {
    std::sort(c.times.begin(), c.times.end());
    std::printf("%-20s %7.0f ns on %s\n", c.name, c.times[c.times.size() / 2], str(device).c_str());
  }
}
