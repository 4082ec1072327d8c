// What a training step asks of CUDA, as CUDA's own profiling interface reports it: every call of the driver, those of cuBLASLt
// and cuDNN included.
#include <cupti.h>

#include <algorithm>
#include <map>
#include <set>

#include "halftone/tests/catch.h"
#include "halftone/tests/trainings.h"

using namespace halftone;
using namespace halftone::tests;

namespace {

#define CHECK_CUPTI(call) REQUIRE((call) == CUPTI_SUCCESS)

struct DriverCall {
  std::string name, kernel;  // the kernel's name, of a launch
  std::string op;            // the operator under way on this thread, by name
};

// Notes the driver's calls of this process while it lives, and, asked to, which operator makes them: for that it is a layer of
// dispatch, which no captured step before it has seen.
class Recorded final : public amp::Watcher {
 public:
  explicit Recorded(bool operators = true) {
    if (operators) watching_.emplace(*this);
    CHECK_CUPTI(cuptiSubscribe(&subscriber_, reinterpret_cast<CUpti_CallbackFunc>(note), this));
    CHECK_CUPTI(cuptiEnableDomain(1, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API));
  }
  ~Recorded() override { cuptiUnsubscribe(subscriber_); }
  Recorded(const Recorded&) = delete;
  void before(const Call& c) override { open_.push_back(c.op->name); }
  void after(const Call& c, const Tensors& out) override {
    open_.pop_back();
    if (!c.op->view && !out.empty() && out[0].device().type == DeviceType::cuda && out[0].numel() > 0) ops.emplace_back(c.op->name);
  }

  std::vector<DriverCall> calls;
  std::vector<std::string> ops;  // those that have something to compute on the GPU

  std::map<std::string, int> by_name() const {
    std::map<std::string, int> counts;
    for (auto& c : calls) ++counts[c.name];
    return counts;
  }
  // Launches of kernels with this in their names, by an operator.
  int64_t launches(std::string_view op, std::string_view part) const {
    return std::count_if(calls.begin(), calls.end(), [&](auto& c) { return c.op == op && c.kernel.find(part) != std::string::npos; });
  }

 private:
  static void CUPTIAPI note(void* self, CUpti_CallbackDomain, CUpti_CallbackId, const CUpti_CallbackData* data) {
    if (data->callbackSite != CUPTI_API_ENTER) return;
    auto& r = *static_cast<Recorded*>(self);
    r.calls.push_back({data->functionName, data->symbolName ? data->symbolName : "", r.open_.empty() ? "" : r.open_.back()});
  }

  std::optional<amp::Watching> watching_;
  CUpti_SubscriberHandle subscriber_ = nullptr;
  std::vector<const char*> open_;
};

bool is_launch(const DriverCall& c) { return c.name.starts_with("cuLaunch"); }

// Waits for the device, moves data to the host, or takes memory from the driver.
bool is_forbidden(std::string_view name) {
  for (const char* part : {"Synchronize", "DtoH", "HtoD", "MemAlloc", "MemFree", "MemCreate", "MemMap", "HostAlloc", "HostRegister", "EventCreate", "StreamCreate",
                           "ModuleLoad", "ModuleUnload"})
    if (name.find(part) != std::string_view::npos) return true;
  return name == "cuMemcpy" || name == "cuMemcpyAsync" || name == "cuMemcpyAsync_ptsz";  // of which nobody can tell the direction
}

void check_asks_nothing(const Recorded& r) {
  for (auto& [name, times] : r.by_name()) {
    INFO(name << ", " << times << " times");
    CHECK_FALSE(is_forbidden(name));
  }
}

}  // namespace

TEST_CASE("a training step asks the host nothing, by the driver's own record") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("needs a CUDA device");
  for (auto& [name, make] : trainings) {
    INFO(name);
    Training step = make(Device::cuda());
    for (int i = 0; i < 10; ++i) step(step.x);  // until no block of memory is missing
    {
      Recorded eager;
      for (int i = 0; i < 3; ++i) step(step.x);
      check_asks_nothing(eager);
      CHECK(eager.calls.size() > 30);
    }
    auto captured = capture([&](const Tensor& in) { return step(in); });
    for (int i = 0; i < 4; ++i) captured(step.x);
    REQUIRE(captured.replays() > 0);
    Recorded replay(false);
    for (int i = 0; i < 3; ++i) captured(step.x);
    check_asks_nothing(replay);
    int graphs = 0;
    for (auto& [called, times] : replay.by_name()) if (called.starts_with("cuGraphLaunch")) graphs += times;
    CHECK(graphs == 3);
    CHECK(std::none_of(replay.calls.begin(), replay.calls.end(), is_launch));
  }
}

TEST_CASE("the trace lists what the profiler sees") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("needs a CUDA device");
  for (auto& [name, make] : trainings) {
    INFO(name);
    Training step = make(Device::cuda());
    for (int i = 0; i < 3; ++i) step(step.x);
    amp::Trace trace = amp::trace([&] { step(step.x); });
    Recorded r;
    step(step.x);
    // Every kernel is launched by an operator that the trace lists, and every operator that computes launches one.
    std::multiset<std::string> listed(r.ops.begin(), r.ops.end()), traced;
    for (auto& line : trace.lines) traced.insert(line.op);
    std::set<std::string> launching;
    for (auto& call : r.calls) {
      if (!is_launch(call)) continue;
      INFO(call.kernel);
      CHECK(traced.contains(call.op));
      launching.insert(call.op);
    }
    for (auto& op : std::set<std::string>(listed.begin(), listed.end())) {
      INFO(op);
      CHECK(traced.count(op) >= listed.count(op));
      CHECK(launching.contains(op));
    }
    CHECK(r.launches("cast", "Convert") == trace.casts());
  }
}
