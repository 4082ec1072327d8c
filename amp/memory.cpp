#include "halftone/amp/memory.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <ostream>
#include <sstream>

#include "halftone/amp/trace.h"
#include "halftone/autograd/autograd.h"
#include "halftone/core/backend.h"

namespace halftone::amp {
namespace {

class Meter final : public Watcher {
 public:
  explicit Meter(Device device) : device_(device) {}

  void before(const Call&) override {
    if (in_backward()) count_kept();
    reset_peak_memory(device_);
  }
  void after(const Call&, const Tensors& out) override {
    const Within* within = thread_state().within;
    const void* module = within ? within->object : nullptr;
    ModuleMemory& m = by_module_[module];
    m.module = module;
    if (int64_t peak = memory_stats(device_).peak; peak > m.peak) {
      m.peak = peak;
      m.in_backward = in_backward();
    }
    if (counted_) return;
    for (auto& t : out)
      if (t.defined() && t.device() == device_ && !t.body()->is_view) results_.push_back({t.storage(), module});
  }

  std::vector<ModuleMemory> result() {
    count_kept();
    std::vector<ModuleMemory> all;
    for (auto& [module, m] : by_module_) all.push_back(m);
    std::stable_sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.peak > b.peak; });
    return all;
  }

 private:
  struct Result { std::weak_ptr<Storage> storage; const void* module; };

  void count_kept() {
    counted_ = true;
    for (auto& r : results_)
      if (auto s = r.storage.lock()) by_module_[r.module].kept += s->bytes();
    results_.clear();
  }

  Device device_;
  std::vector<Result> results_;  // of forward
  bool counted_ = false;
  std::map<const void*, ModuleMemory> by_module_;
};

double mebibytes(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

std::vector<ModuleMemory> memory_by_module(Device device, const std::function<void()>& step) {
  HT_CHECK(step, "memory_by_module: the step is an empty function");
  Meter meter(device);
  {
    Watching on(meter);
    step();
  }
  auto all = meter.result();
  for (auto& m : all) m.name = "?";
  return all;
}

std::ostream& operator<<(std::ostream& os, const std::vector<ModuleMemory>& all) {
  size_t width = 6;
  for (auto& m : all) width = std::max(width, m.name.size());
  std::ostringstream s;
  s << std::left << std::setw(static_cast<int>(width)) << "module" << "   peak MiB            kept MiB\n" << std::fixed << std::setprecision(2);
  for (auto& m : all)
    s << std::left << std::setw(static_cast<int>(width)) << (m.name.empty() ? "(model)" : m.name) << std::right << std::setw(11) << mebibytes(m.peak)
      << (m.in_backward ? " backward" : " forward ") << std::setw(11) << mebibytes(m.kept) << '\n';
  return os << s.str();
}

}  // namespace halftone::amp
