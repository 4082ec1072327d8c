#pragma once
// Optimizers. Every number that a step depends on or changes lives on the device: learning rate, count of real steps, states.
// A step asks the host nothing; with found_inf set it changes nothing. Parameters without a gradient are left out, and their
// count of steps with them.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halftone/core/state_dict.h"
#include "halftone/ops/optimizers.h"

namespace halftone::optim {

// What a scaler hands to a step; undefined tensors stand for 1 and for "no".
struct StepControls {
  Tensor grad_scale;  // f32 []: gradients are multiplied by it
  Tensor found_inf;   // f32 []: not 0 skips the step
};

// Parameters with options of their own.
template <class Options> struct Group {
  std::vector<Tensor> params;
  Options options = {};
};

class HT_API Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(Optimizer&&) noexcept = default;
  Optimizer(const Optimizer&) = delete;

  void zero_grad();
  // Warns, once, when no parameter has had a gradient so far, unless all are frozen: the step changes nothing.
  void step() { step(StepControls{}); }
  void step(const StepControls& controls);

  std::vector<Tensor> parameters() const;  // of all groups, in order
  const std::vector<Tensor>& parameters(size_t group) const { return groups_.at(group).params; }
  size_t groups() const { return groups_.size(); }
  // The learning rate of a group, written to the device without a wait; reading it waits.
  void set_lr(double lr, size_t group);
  void set_lr(double lr) { for (size_t i = 0; i < groups(); ++i) set_lr(lr, i); }
  double lr(size_t group = 0) const { return groups_.at(group).lr.item(); }
  const Tensor& lr_tensor(size_t group = 0) const { return groups_.at(group).lr; }

  // f16 and bf16 parameters are updated in f32 copies that the optimizer keeps, and rounded from them in the same kernel; their
  // gradients may be f16, too: a scaler unscales them on the way. A parameter that was written by others (loaded weights)
  // is taken over. Before the first step. An optimizer of 16-bit parameters without masters warns at its first step.
  void use_master_weights(bool on = true);
  // bf16 parameters without masters are rounded at random, up with the odds of the distance from below, so that updates
  // smaller than half a unit count in the mean (Gupta et al., "Deep learning with limited numerical precision", 2015).
  void use_stochastic_rounding(uint64_t seed = 0) { rounding_ = {seed, true}; }
  bool keeps_master(const Tensor& parameter) const { return masters_ && is_16bit_dtype(parameter.dtype()); }
  // The f32 copy of a parameter; undefined while there is none.
  Tensor master(const Tensor& parameter) const;
  // Writes f32 values into the copy, and their rounding into the parameter, which must have masters.
  void set_master(const Tensor& parameter, const Tensor& value);

  // `f` runs at the end of every step for each group, with its rate and the step's found_inf (undefined where there is none),
  // until it returns false. It must not ask the host: schedules and averages.
  using AfterStep = std::function<bool(size_t group, const Tensor& lr, const Tensor& found_inf)>;
  void after_step(AfterStep f) { after_step_.push_back(std::move(f)); }

  // Which parameters this process updates, by group and place in it; all unless this is set. The others are left out of every step
  // and have no state: another process does theirs (distributed/sharded_state.h). Before the first step.
  using Share = std::function<bool(size_t group, size_t i)>;
  void set_share(Share share);

  const void* id() const { return id_.get(); }  // stays the same when the optimizer is moved
  virtual const char* name() const = 0;
  // "0.weight-state" per parameter, counts of steps and learning rates; aliases live tensors.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 protected:
  // Parameters that began together: they share a count of real steps.
  struct Cohort {
    Tensor steps;   // i64 []
    Tensor memory;  // f64 [], where the optimizer keeps a number
    std::vector<size_t> members;
  };
  // A parameter's f32 copy, current while the parameter has this version.
  struct Master {
    Tensor value;
    uint64_t version = 0;
  };
  struct ParameterGroup {
    std::vector<Tensor> params;
    Tensor lr;                                 // f64 []
    std::vector<std::vector<Tensor>> states;   // one list per kind of state, undefined until the first step
    std::vector<std::shared_ptr<Master>> masters;
    std::vector<Cohort> cohorts;
  };
  // `states`: the names of the buffers that each parameter has, of its shape, in f32 (f64 for f64).
  Optimizer(const char* name, std::vector<const char*> states);
  void add_group(std::vector<Tensor> params, double lr);
  // The operator, and its attributes for `n` parameters of a group.
  virtual const OpDef& op() const = 0;
  virtual Attrs attrs(size_t group, int n) const = 0;
  // Whether the group's parameters carry state number k.
  virtual bool uses_state(size_t, size_t) const { return true; }
  // The number that a cohort keeps from step to step, at its first step.
  virtual std::optional<double> first_memory() const { return {}; }
  const update::Rounding& rounding() const { return rounding_; }
  // Steps n parameters: the operator's call, unless a step takes more than that.
  virtual void run(size_t group, Call& call, int n);

 private:
  void step_group(size_t g, const StepControls& controls);
  void step_cohort(size_t g, Cohort& cohort, const std::vector<Tensor>& grads, const StepControls& controls);
  void start(Cohort& cohort, int64_t steps, Device device) const;
  void regroup(ParameterGroup& group, const std::vector<Tensor>& grads);
  void warn_of_rounding(const ParameterGroup& group, const std::vector<size_t>& members);
  void warn_of_no_gradients();

  std::unique_ptr<int> id_ = std::make_unique<int>(0);
  const Tensor& current_master(ParameterGroup& group, size_t i);
  void load_master(ParameterGroup& group, size_t i, const Tensor* loaded);

  const char* class_name_;
  bool masters_ = false, warned_of_rounding_ = false, warned_of_no_gradients_ = false;
  std::vector<AfterStep> after_step_;
  Share share_;
  update::Rounding rounding_;
  std::vector<const char*> state_names_;
  std::vector<ParameterGroup> groups_;
};

// The 2-norm of all gradients together (0-d, on their device), after which they are scaled so that it is at most max_norm:
// g *= min(1, max_norm / (norm + 1e-6)). Refuses gradients that a GradScaler has scaled: unscale_ them first.
HT_API Tensor clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm);
// Every element of every gradient is limited to [-limit, limit]; scaled ones are refused.
HT_API void clip_grad_value_(const std::vector<Tensor>& parameters, double limit);

}  // namespace halftone::optim
