#pragma once
// Averages of weights over training, kept on the device; a skipped step moves none of them.
#include <memory>

#include "halftone/optim/optimizer.h"

namespace halftone::optim {

// The exponential moving average of an optimizer's parameters, in f32 (f64 for f64): a = decay * a + (1 - decay) * p after each
// real step. `warmup` lets early steps count more: the decay of step t is at most (1 + t) / (10 + t).
struct EMAOptions { double decay = 0.999; bool warmup = false; };
class HT_API EMA {
 public:
  explicit EMA(Optimizer& opt, EMAOptions o = {});
  const std::vector<Tensor>& averages() const;  // in the order of opt.parameters()
  // Exchanges parameters and averages: call it before and after an evaluation, or let a Swapped do it.
  void swap();
  class Swapped {
   public:
    [[nodiscard]] explicit Swapped(EMA& ema) : ema_(ema) { ema_.swap(); }
    ~Swapped() { ema_.swap(); }
    Swapped(const Swapped&) = delete;

   private:
    EMA& ema_;
  };
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  std::shared_ptr<struct Averages> state_;
};

// Every k real steps the slow weights go `alpha` of the way to the optimizer's parameters, which then go on from there (Zhang
// et al., "Lookahead optimizer: k steps forward, 1 step back", 2019). Belongs to the optimizer while it lives.
struct LookaheadOptions { int64_t k = 5; double alpha = 0.5; };
class HT_API Lookahead {
 public:
  explicit Lookahead(Optimizer& opt, LookaheadOptions o = {});
  const std::vector<Tensor>& slow_weights() const;
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  std::shared_ptr<struct Averages> state_;
};

}  // namespace halftone::optim
