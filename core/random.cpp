// Generators: seeds, and their state on each device.
#include "halftone/core/random.h"

#include <atomic>
#include <map>
#include <mutex>

#include "halftone/core/backend.h"
#include "halftone/core/thread_state.h"

namespace halftone {

struct Generator::States {
  mutable std::mutex lock;
  uint64_t seed;
  std::map<std::pair<int, int>, Tensor> of_device;
};

namespace {

void write_state(const Tensor& t, uint64_t seed) {
  int64_t values[2] = {static_cast<int64_t>(seed), 0};
  if (t.device().type == DeviceType::cpu) {  // whose draws on other threads go on meanwhile
    for (int i : {0, 1}) std::atomic_ref(t.data<int64_t>()[i]).store(values[i], std::memory_order_relaxed);
  } else backend(t.device().type).copy(t.raw_data(), t.device(), values, Device::cpu(), sizeof values);
  t.bump_version();
}

const std::shared_ptr<Generator>& process_generator() {
  static const auto g = std::make_shared<Generator>(0x68616c66746f6e65);
  return g;
}

}  // namespace

Generator::Generator(uint64_t seed) : states_(new States{.lock = {}, .seed = seed, .of_device = {}}) {}
Generator::Generator(const std::vector<Tensor>& states) : Generator(uint64_t{0}) {
  LayerScope kernels_only(0);
  for (auto& t : states) states_->of_device[{static_cast<int>(t.device().type), t.device().index}] = t.clone();
}
Generator::~Generator() = default;

void Generator::seed(uint64_t seed) {
  std::lock_guard guard(states_->lock);
  states_->seed = seed;
  for (auto& [device, state] : states_->of_device) write_state(state, seed);
}
uint64_t Generator::seed() const {
  std::lock_guard guard(states_->lock);
  return states_->seed;
}

Tensor Generator::state(Device device) {
  std::lock_guard guard(states_->lock);
  Tensor& t = states_->of_device[{static_cast<int>(device.type), device.index}];
  if (!t.defined()) {
    HT_CHECK(!thread_state().capture, "random: draw from this generator once before the step is captured");
    t = Tensor::empty(Meta({2}, DType::i64, device));
    write_state(t, states_->seed);
  }
  return t;
}

Generator& generator() {
  auto& own = thread_state().generator;
  return own ? *own : *process_generator();
}
void manual_seed(uint64_t seed) { generator().seed(seed); }

}  // namespace halftone
