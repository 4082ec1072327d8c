#pragma once
// Learning-rate schedules. A schedule belongs to an optimizer and advances with its real steps, on the device: nothing is
// called in the training loop, a captured step carries it, and a skipped step leaves it where it was. Steps count from 0, which
// is the rate of the first step; the rates a group was made with are its base. For schedules by epochs, multiply by the
// number of steps in one.
#include <functional>
#include <vector>

#include "halftone/optim/optimizer.h"

namespace halftone::optim {

// The rate of each step, in pieces; built by the functions below.
class HT_API Curve {
 public:
  // The rate at a step, on the host.
  double at(int64_t step) const;
  // This curve until `step`, from there `next` as if it began.
  Curve then(int64_t step, const Curve& next) const;

  static Curve constant(double rate);
  static Curve linear(double from, double to, int64_t steps);
  static Curve exponential(double rate, double gamma);
  static Curve staircase(double rate, double gamma, int64_t every);
  static Curve cosine(double from, double to, int64_t steps);
  static Curve restarts(double from, double to, int64_t first_steps, double longer = 1);
  static Curve polynomial(double from, double to, int64_t steps, double power);
  static Curve noam(double factor, int64_t warmup_steps);
  static Curve listed(std::vector<double> rates);

 private:
  friend class Schedule;
  std::vector<double> pieces_, values_;
};

// What all schedules are: for each group, a curve over its base rate.
class HT_API Schedule {
 public:
  Schedule(Optimizer& opt, const std::function<Curve(double base)>& curve);
  // From here the optimizer's rates stay as they are.
  ~Schedule();
  Schedule(Schedule&&) noexcept = default;
  Schedule(const Schedule&) = delete;
  int64_t steps() const;  // real ones so far; waits for the device
  // The rate that the curve gives a group at a step.
  double at(int64_t step, size_t group = 0) const { return curves_.at(group).at(step); }
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  std::vector<Curve> curves_;
  std::shared_ptr<struct Attached> attached_;
};

// rate * gamma^floor(step / every)
struct StepLROptions { int64_t every; double gamma = 0.1; };
class HT_API StepLR final : public Schedule { public: StepLR(Optimizer& opt, StepLROptions o); };

// Times gamma at each of some steps.
struct MultiStepLROptions { std::vector<int64_t> milestones; double gamma = 0.1; };
class HT_API MultiStepLR final : public Schedule { public: MultiStepLR(Optimizer& opt, const MultiStepLROptions& o); };

// rate * gamma^step
struct ExponentialLROptions { double gamma; };
class HT_API ExponentialLR final : public Schedule { public: ExponentialLR(Optimizer& opt, ExponentialLROptions o); };

// Half a cosine wave from the rate to min_lr over `steps`, after a linear warm-up of `warmup` of them (Loshchilov and Hutter,
// "SGDR", 2017, without restarts).
struct CosineAnnealingLROptions { int64_t steps; double min_lr = 0; int64_t warmup = 0; };
class HT_API CosineAnnealingLR final : public Schedule { public: CosineAnnealingLR(Optimizer& opt, CosineAnnealingLROptions o); };

// The same wave again and again, each `longer` times as long as the one before (SGDR).
struct CosineAnnealingWarmRestartsOptions { int64_t first_steps; double longer = 1, min_lr = 0; };
class HT_API CosineAnnealingWarmRestarts final : public Schedule { public: CosineAnnealingWarmRestarts(Optimizer& opt, CosineAnnealingWarmRestartsOptions o); };

// From rate * start to rate * end over `steps`: a warm-up.
struct LinearLROptions { int64_t steps; double start = 1.0 / 3, end = 1; };
class HT_API LinearLR final : public Schedule { public: LinearLR(Optimizer& opt, LinearLROptions o); };

// (1 - step / steps)^power from the rate to min_lr.
struct PolynomialLROptions { int64_t steps; double power = 1, min_lr = 0; };
class HT_API PolynomialLR final : public Schedule { public: PolynomialLR(Optimizer& opt, PolynomialLROptions o); };

// Up from max_lr / divide to max_lr in the first share of the steps and down to max_lr / divide / divide_last, by cosines (Smith
// and Topin, "Super-convergence", 2018).
struct OneCycleLROptions { double max_lr; int64_t steps; double share = 0.3, divide = 25, divide_last = 1e4; };
class HT_API OneCycleLR final : public Schedule { public: OneCycleLR(Optimizer& opt, OneCycleLROptions o); };

// rate * width^-0.5 * min(step^-0.5, step * warmup^-1.5), steps counted from 1 (Vaswani et al., 2017).
struct NoamLROptions { int64_t width, warmup; };
class HT_API NoamLR final : public Schedule { public: NoamLR(Optimizer& opt, NoamLROptions o); };

// rate * factor(step), tabulated for `steps` steps ahead; the last value from there on.
struct LambdaLROptions { std::function<double(int64_t step)> factor; int64_t steps; };
class HT_API LambdaLR final : public Schedule { public: LambdaLR(Optimizer& opt, const LambdaLROptions& o); };

// Times `factor` when the metric has not got better for more than `patience` calls. Driven by the host: call step with each
// epoch's metric, between training steps.
struct ReduceLROnPlateauOptions {
  double factor = 0.1;
  int64_t patience = 10, cooldown = 0;
  double threshold = 1e-4, min_lr = 0;  // better: below best * (1 - threshold), or with maximize above best * (1 + threshold)
  bool maximize = false;
};
class HT_API ReduceLROnPlateau {
 public:
  explicit ReduceLROnPlateau(Optimizer& opt, ReduceLROnPlateauOptions o = {});
  // Whether the rates were lowered.
  bool step(double metric);
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  Optimizer& opt_;
  ReduceLROnPlateauOptions options_;
  double best_;
  int64_t bad_ = 0, resting_ = 0;
};

}  // namespace halftone::optim
