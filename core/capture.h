#pragma once
// capture(step): a callable that replays a whole training step as one device graph; on the CPU it calls the function.
// Inputs are tensors; the first two calls of a shape are ordinary eager steps, the third is captured and replayed.
#include <array>
#include <functional>
#include <tuple>

#include "halftone/core/backend.h"
#include "halftone/core/op.h"

namespace halftone {

struct CaptureOptions {
  // Eager steps of a shape before it is captured. 0 is for functions that make nothing lasting on their first call: no optimizer,
  // no scaler, no 16-bit copies of weights.
  int warmup = 2;
  // Steps in one call, and so in one graph: every input has a batch for each along its first dimension, which the function
  // does not see, and so has every result.
  int64_t steps = 1;
};

// What the framework notes while a step is captured, so that replays leave the host's bookkeeping as eager steps would.
struct CaptureLog {
  // Tells captures apart for ever, as an address, which may come again, does not.
  const uint64_t serial = next_serial();
  // The graph was recorded under these conditions; when one no longer holds, another graph is needed.
  std::vector<std::function<bool()>> guards;
  // What a replay does to host-side state.
  std::vector<std::function<void()>> effects;
  // Run, last first, when the step fails: nothing of it has reached the device, so nothing may have changed on the host, but that a
  // large gradient which it had zeroed stays so (Tensor::zero_grad).
  std::vector<std::function<void()>> undo;
  // Every call that reached a kernel.
  virtual void launched(const Call& call, std::span<const Tensor> out) = 0;
  // A tensor that the step depends on though no kernel reads it: autocast reads its 16-bit copy in its place.
  virtual void uses(const Tensor& whole) = 0;

 protected:
  ~CaptureLog() = default;

 private:
  HT_API static uint64_t next_serial();
};

class HT_API CapturePlan {
 public:
  virtual ~CapturePlan() = default;
  using Step = std::function<Tensors(std::span<const Tensor> inputs)>;
  virtual Tensors run(std::span<const Tensor> inputs, const Step& step) = 0;
  virtual int64_t replays() const = 0;
};
// Several steps, one after the other: CaptureOptions::steps.
HT_API Tensors run_steps(int64_t steps, std::span<const Tensor> inputs, const CapturePlan::Step& step);

template <class F> class Captured {
 public:
  Captured(F f, CaptureOptions o) : f_(std::move(f)), options_(o) {}

  template <class... X> auto operator()(const X&... x) {
    static_assert((std::derived_from<X, Tensor> && ...),
                  "capture: the inputs of a captured step are tensors; capture other values by reference, or put them in a tensor");
    using Y = decltype(f_(x...));
    ++calls_;
    Tensors inputs{x...};
    DeviceType type = DeviceType::cpu;
    for (auto& t : inputs) if (t.device().type != DeviceType::cpu) type = t.device().type;
    bool on_cpu = type == DeviceType::cpu;
    if (on_cpu && options_.steps == 1) return f_(x...);
    CapturePlan::Step one = [&](std::span<const Tensor> in) { return pack(call(in, std::index_sequence_for<X...>())); };
    auto all = [&](std::span<const Tensor> in) { return options_.steps == 1 ? one(in) : run_steps(options_.steps, in, one); };
    if (!on_cpu && !plan_) plan_ = backend(type).make_capture(options_);
    Tensors y = on_cpu ? all(inputs) : plan_->run(inputs, all);
    return unpack<Y>(y);
  }
  // How many calls there were, and how many of them were replays of a graph.
  int64_t calls() const { return calls_; }
  int64_t replays() const { return plan_ ? plan_->replays() : 0; }

 private:
  struct Nothing {};
  template <size_t... I> auto call(std::span<const Tensor> in, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<decltype(f_(in[I]...))>) { f_(in[I]...); return Nothing{}; }
    else return f_(in[I]...);
  }
  template <class Y> static Tensors pack(const Y& y) {
    if constexpr (std::same_as<Y, Nothing>) return {};
    else if constexpr (std::same_as<Y, Tensor>) return {y};
    else if constexpr (requires { y.begin(); }) { Tensors t; for (auto& v : y) t.push_back(v); return t; }
    else return std::apply([](auto&... v) { return Tensors{v...}; }, y);
  }
  template <class Y> static Y unpack(Tensors& t) {
    if constexpr (std::is_void_v<Y>) return;
    else if constexpr (std::same_as<Y, Tensor>) return t[0];
    else if constexpr (requires(Y y) { y.push_back(t[0]); }) { Y y; for (auto& v : t) y.push_back(v); return y; }
    else return [&]<size_t... I>(std::index_sequence<I...>) { return Y{t[I]...}; }(std::make_index_sequence<std::tuple_size_v<Y>>());
  }

  F f_;
  CaptureOptions options_;
  std::unique_ptr<CapturePlan> plan_;
  int64_t calls_ = 0;
};

template <class F> Captured<std::decay_t<F>> capture(F&& f, CaptureOptions options = {}) {
  return {std::forward<F>(f), options};
}

}  // namespace halftone
