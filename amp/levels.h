#pragma once
// Apex's levels: how much of a model has 16 bits, by one word. What initialize returns is called in the model's place.
//   auto mixed = amp::initialize(net, opt, {.level = amp::O2});
//   ...
//   Tensor loss = cross_entropy(mixed(x), target);
//   mixed.scaler.scale(loss).backward();
//   mixed.scaler.step(opt);
//   mixed.scaler.update();
#include <concepts>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "halftone/amp/autocast.h"
#include "halftone/amp/scaler.h"
#include "halftone/core/state_dict.h"

namespace halftone::amp {

enum class Level : uint8_t {
  O0,  // f32
  O1,  // f32 weights under autocast
  O2,  // 16-bit weights with f32 masters; batch norms stay f32
  O3,  // 16-bit weights, those of batch norms, too; only running statistics stay f32
};
using enum Level;

struct InitializeOptions {
  Level level = O1;
  std::optional<DType> dtype = {};                // f16 or bf16; by default f16 on CUDA, bf16 on the CPU
  std::optional<GradScalerOptions> scaler = {};   // by default a dynamic scale at O1 and O2, and none at O0 and O3
};

// What does not depend on the model's type: its level, its scaler, and the masters that its optimizers keep.
class HT_API LevelState {
 public:
  GradScaler scaler;
  Level level() const { return level_; }
  DType dtype() const { return dtype_; }  // of 16-bit weights or products; f32 at O0

 protected:
  using NamedTensors = std::vector<std::pair<std::string, Tensor>>;
  LevelState(const InitializeOptions& o, std::vector<optim::Optimizer*> optimizers, const NamedTensors& parameters);
  bool converts() const { return level_ >= O2; }
  // At O2: the masters of converted parameters become what these were.
  void start_masters(const std::vector<Tensor>& parameters, const std::vector<Tensor>& before);
  Tensor argument(const Tensor& x) const;
  Tensor result(const Tensor& y) const;
  template <class T> const T& argument(const T& other) const requires(!std::derived_from<T, Tensor>) { return other; }
  template <class T> T result(T other) const requires(!std::derived_from<T, Tensor>) { return other; }
  // The model's state with masters in the place of 16-bit tensors, and others widened.
  StateDict widened(const StateDict& model) const;
  void load_masters(const StateDict& model, const StateDict& loaded);

 private:
  Level level_;
  DType dtype_;
  std::vector<optim::Optimizer*> optimizers_;
};

// A model at its level. It refers to the model and to its optimizers.
template <class Net> class Leveled final : public LevelState {
 public:
  Leveled(Net& net, std::vector<optim::Optimizer*> optimizers, const InitializeOptions& o)
      : LevelState(o, std::move(optimizers), unfixed(net)), net_(&net) {
    if (!converts()) return;
    std::vector<Tensor> parameters = net.parameters(), before;
    for (auto& p : parameters) before.push_back(p.detach());
    net.to(dtype());
    if (level() == O3) {
      NoGrad off;
      std::set<const Body*> own = fixed(net);
      for (auto* m : net.modules())
        if (m->keeps_f32())
          for (auto& p : m->parameters()) if (!own.contains(p.body().get())) p.set_(p.detach().to(dtype()));
    }
    start_masters(parameters, before);
  }

  // The model's result. Floating arguments are cast to 16 bits at O2 and O3, and a 16-bit result to f32 at all levels, so that
  // losses are f32; arguments and results that are no tensors are handed on.
  template <class... A> auto operator()(const A&... a) {
    std::optional<Autocast> region;
    if (level() == O1) region.emplace(AutocastOptions{.dtype = dtype()});
    return result((*net_)(argument(a)...));
  }
  // The model's state in f32, whatever its level: that of the masters where there are some, which it aliases. It loads into a
  // model of any level, or of none.
  StateDict state_dict() const { return widened(net_->state_dict()); }
  // Masters take the state's values, and weights their rounding.
  void load_state_dict(const StateDict& state, LoadOptions o = {}) {
    net_->load_state_dict(state, o);
    load_masters(net_->state_dict(), state);
  }

 private:
  // The parameters of modules that state a dtype of their own, and those of all others.
  static std::set<const Body*> fixed(Net& net) {
    std::set<const Body*> all;
    for (auto* m : net.modules())
      if (m->fixed_dtype()) for (auto& p : m->parameters()) all.insert(p.body().get());
    return all;
  }
  static NamedTensors unfixed(Net& net) {
    NamedTensors all = net.named_parameters();
    std::erase_if(all, [own = fixed(net)](auto& named) { return own.contains(named.second.body().get()); });
    return all;
  }

  Net* net_;
};

// Brings an f32 model without gradients to a level, once and before the first step: converts it at O2 and O3, and at O2 has the optimizers keep
// masters, which begin as the f32 weights. Model and optimizers must outlive the result.
template <class Net> Leveled<Net> initialize(Net& net, optim::Optimizer& opt, const InitializeOptions& o = {}) { return {net, {&opt}, o}; }
template <class Net> Leveled<Net> initialize(Net& net, std::vector<optim::Optimizer*> optimizers, const InitializeOptions& o = {}) {
  return {net, std::move(optimizers), o};
}

}  // namespace halftone::amp
