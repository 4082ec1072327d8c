#pragma once
// What a step's memory goes to, module by module.
//
//   std::cout << amp::memory_by_module(net, Device::cuda(), [&] { step(x, target); });
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "halftone/core/device.h"

namespace halftone::amp {

// The operators that a module's own forward calls, not those of modules inside it, and their backward.
struct ModuleMemory {
  const void* module = nullptr;
  std::string name;         // "" for the model itself; "?" for what runs outside of it: loss, optimizer
  int64_t kept = 0;         // bytes of forward's results that were alive when backward began, or at the end
  int64_t peak = 0;         // most bytes of the device that were in use while one of its operators ran
  bool in_backward = false;  // where that was
};

// Runs `step` once, on this thread, and sees which module uses how much of the device; by peak, the highest first. Sets the
// device's peak (memory_stats) back. A captured step is one call without modules: pass the plain one.
HT_API std::vector<ModuleMemory> memory_by_module(Device device, const std::function<void()>& step);
template <class Net> std::vector<ModuleMemory> memory_by_module(Net& net, Device device, const std::function<void()>& step) {
  auto all = memory_by_module(device, step);
  for (auto& m : all)
    for (auto& [name, module] : net.named_modules()) if (module == m.module) m.name = name;
  return all;
}
HT_API std::ostream& operator<<(std::ostream& os, const std::vector<ModuleMemory>& all);

}  // namespace halftone::amp
