#pragma once
// Autocast: a region in which operators pick their dtypes by policy. It sits above autograd, so casts are recorded: the tape
// keeps 16-bit tensors, and gradients of f32 parameters are f32. Weights are cast once and the copy is kept current (core/shadow.h).
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "halftone/amp/policy.h"

namespace halftone::amp {

struct AutocastOptions {
  std::optional<DType> dtype = {};        // f16 or bf16; by default that of the region around, or f16 on CUDA and bf16 on the CPU
  std::optional<DeviceType> device = {};  // by default every type
  bool enabled = true;                    // false: an island that runs in the dtypes it is given
  bool cache = true;                      // keep 16-bit copies of weights; false holds for regions inside, too
  bool strict = false;                    // an operator that climbs back to f32 by its inputs, also in place, is an error that
                                          // names it; so is a call into a given tensor that autocast would have cast for
  std::optional<Policy> policy = {};      // by default that of the region around
};

// The state of a region, one per thread; workers get it with the thread's state.
struct HT_API AutocastState final : LayerState {
  struct PerDevice { bool enabled = false; DType dtype = DType::f16; };
  PerDevice device[num_device_types] = {{false, DType::bf16}, {false, DType::f16}};
  bool cache = true, strict = false;
  std::shared_ptr<const Policy> policy;  // null: the default

  void append_key(std::vector<int64_t>& key) const override;
};

// Enters a region on this thread until the end of its scope. Regions nest: dtype and policy are inherited unless they are given,
// .cache = false and .strict = true hold inside, too, and .enabled is each region's own. One that ends before a region inside
// it leaves that in force; one that ends on another thread is in force on its own until a region begins or ends there.
class HT_API Autocast {
 public:
  [[nodiscard]] Autocast() : Autocast(AutocastOptions{}) {}
  [[nodiscard]] explicit Autocast(const AutocastOptions& options);
  ~Autocast();
  Autocast(const Autocast&) = delete;

 private:
  std::shared_ptr<struct OpenRegion> open_;
};

// Whether operators on this device type are autocast on this thread now, and to what.
HT_API bool is_autocast_enabled(DeviceType type = DeviceType::cpu);
HT_API DType autocast_dtype(DeviceType type = DeviceType::cpu);

// A function whose calls run in a region of their own: autocast travels with it. The function is kept by value; pass
// a lambda or std::ref(module).
template <class F> class Autocasted {
 public:
  Autocasted(F f, AutocastOptions o) : f_(std::move(f)), options_(std::move(o)) {
    if constexpr (requires { f_.operator bool(); }) HT_CHECK(f_, "autocasted: the function is empty");
  }
  template <class... A> decltype(auto) operator()(A&&... a) {
    Autocast region(options_);
    return f_(std::forward<A>(a)...);
  }

 private:
  F f_;
  AutocastOptions options_;
};
template <class F> Autocasted<std::decay_t<F>> autocasted(F&& f, AutocastOptions o = {}) { return {std::forward<F>(f), std::move(o)}; }

}  // namespace halftone::amp
