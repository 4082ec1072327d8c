#pragma once
// Dynamic loss scaling. Scale, streak of clean steps, found_inf and the count of skipped steps live on the device; a step
// asks the host nothing.
#include <map>
#include <string>

#include "halftone/autograd/autograd.h"
#include "halftone/optim/optimizer.h"

namespace halftone::amp {

struct GradScalerOptions {
  double init_scale = 65536, growth_factor = 2, backoff_factor = 0.5;
  int64_t growth_interval = 2000;          // clean steps before the scale grows
  double min_scale = 0x1p-64, max_scale = 0x1p64;
  int64_t hysteresis = 1;                  // the scale backs off at this overflow since it last grew, and at those after
  int64_t max_consecutive_skips = 0;       // 0: any number; more iterations than this in a row is an error at the next step
  bool enabled = true;                     // false: scale() returns its argument, step() is the optimizer's
};
// A scale that neither grows nor backs off; steps that overflow are skipped all the same.
HT_API GradScalerOptions static_scale(double scale);

// What a step did; known some time later, without a wait, and for the next 256 steps.
class HT_API StepOutcome {
 public:
  enum class State : uint8_t { unknown, stepped, skipped, no_gradients };
  State state() const;  // never waits
  bool stepped() const { return wait() == State::stepped; }
  bool skipped() const { return wait() == State::skipped; }

 private:
  friend class GradScaler;
  State wait() const;
  std::shared_ptr<struct OutcomeBoard> board_;
  int64_t number_ = 0;
  State known_ = State::unknown;
};

class HT_API GradScaler {
 public:
  GradScaler() : GradScaler(GradScalerOptions{}) {}
  explicit GradScaler(const GradScalerOptions& options);
  GradScaler(GradScaler&&) noexcept = default;
  GradScaler& operator=(GradScaler&&) noexcept = default;

  // loss times the scale, in f32 (f64 for f64). The first call decides the scaler's device. Gradients of a backward through it
  // are stamped with the scale: accumulating unscaled ones onto them, clipping them, or a step after the scale has changed throws.
  Tensor scale(const Tensor& loss);
  std::vector<Tensor> scale(const std::vector<Tensor>& losses);
  // The current scale and 1 / scale, f32 [], on the device.
  const Tensor& scale_tensor();
  const Tensor& inverse_scale();

  // Divides the optimizer's gradients by the scale, and notes whether all are finite. Once between two updates.
  void unscale_(optim::Optimizer& opt);
  struct StepOptions { double clip_norm = 0; };  // > 0: gradients are clipped to this norm on the way, as unscale_ and clip_grad_norm_ would
  // Steps unless a gradient is not finite. Gradients must carry the present scale; those that set_grad put there count as scaled.
  StepOutcome step(optim::Optimizer& opt) { return step(opt, StepOptions()); }
  StepOutcome step(optim::Optimizer& opt, StepOptions o);
  // Grows the scale after growth_interval clean steps, backs off after an overflow. Once an iteration, after all steps.
  void update();
  // Replaces the scale by one within min_scale and max_scale; the streak stays.
  void update(double new_scale);

  // Several processes or devices that share a model must skip together: `agree` is called with each found_inf (f32 [], not 0
  // for an overflow), on its device and before it counts, and makes it the largest of all ranks without asking the host.
  void set_agreement(std::function<void(const Tensor& found_inf)> agree) { agree_ = std::move(agree); }

  bool enabled() const { return on(); }
  double get_scale() const;           // waits for the device
  int64_t skipped_steps() const;      // in all; waits for the device
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);  // its scale must lie within min_scale and max_scale

 private:
  enum class Stage : uint8_t { ready, unscaled, stepped };
  // What the program has called since the last update(): by optimizer, and in which order they were checked.
  struct PerOptimizer {
    Stage stage = Stage::ready;
    bool checked = false;  // found_inf holds this iteration's answer
    int64_t number = 0;    // its outcome's
    bool operator==(const PerOptimizer& o) const { return stage == o.stage && checked == o.checked; }
  };
  struct Iteration {
    std::map<const void*, PerOptimizer> optimizers;  // those that are not ready
    std::vector<const void*> order;
    std::map<const Body*, std::string> parameters;  // of the optimizers in `order`, and whose each is
    bool operator==(const Iteration& o) const { return optimizers == o.optimizers && order == o.order; }
  };
  struct Place {
    Iteration iteration;
    uint64_t scale;  // its number
  };
  // Shared with the logs of captured steps, which put it where the step left it.
  struct Progress {
    Iteration now;
    uint64_t capture = 0;  // which one looked last
    std::shared_ptr<Place> left;
  };
  Stage stage(const optim::Optimizer& opt) const;
  PerOptimizer& entry(const optim::Optimizer& opt);
  const Tensor& begin_check(const optim::Optimizer& opt, const std::vector<Tensor>& params, const char* who);
  // `in_place`: they are to be unscaled where they are.
  std::vector<Tensor> gradients(const optim::Optimizer& opt, const std::vector<Tensor>& params, const char* who, bool in_place) const;
  void make_state(Device device);
  void move_state(Device device);
  bool on() const;  // enabled, and not moved from
  void check_limits(const char* who, double scale) const;
  void check_made(const char* who) const;
  void note_capture();
  void leave();
  void settle(const Tensor& scale, const Tensor& inverse, const Tensor& streak);

  GradScalerOptions options_;
  Tensor scale_, inverse_, streak_, skipped_, patience_;
  std::function<void(const Tensor&)> agree_;
  std::shared_ptr<OutcomeBoard> board_;
  std::map<const void*, Tensor> found_infs_;
  std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  std::shared_ptr<GradStamp::Scales> scales_ = std::make_shared<GradStamp::Scales>();
};

}  // namespace halftone::amp
