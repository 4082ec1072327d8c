// Generators: seeds, and their state on each device.
#include "halftone/core/random.h"

#include "halftone/core/backend.h"
#include "halftone/core/thread_state.h"

namespace halftone {
namespace {

void write_state(const Tensor& t, uint64_t seed) {
  int64_t values[2] = {static_cast<int64_t>(seed), 0};
  backend(t.device().type).copy(t.raw_data(), t.device(), values, Device::cpu(), sizeof values);
  t.bump_version();
}

const std::shared_ptr<Generator>& process_generator() {
  static const auto g = std::make_shared<Generator>(0x68616c66746f6e65);
  return g;
}

}  // namespace

void Generator::seed(uint64_t seed) {
  std::lock_guard guard(lock_);
  seed_ = seed;
  for (auto& [device, state] : states_) write_state(state, seed);
}

Tensor Generator::state(Device device) {
  std::lock_guard guard(lock_);
  Tensor& t = states_[{static_cast<int>(device.type), device.index}];
  if (!t.defined()) {
    HT_CHECK(!thread_state().capture, "random: draw from this generator once before the step is captured");
    t = Tensor::empty(Meta({2}, DType::i64, device));
    write_state(t, seed_);
  }
  return t;
}

Generator& generator() {
  auto& own = thread_state().generator;
  return own ? *own : *process_generator();
}
void manual_seed(uint64_t seed) { generator().seed(seed); }

}  // namespace halftone
