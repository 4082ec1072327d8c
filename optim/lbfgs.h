#pragma once
// L-BFGS: few parameters, whole batches, many evaluations. Driven by the host, unlike every other optimizer: each iteration
// waits for the loss and some sums, so that it is neither captured nor run under a gradient scaler.
#include <functional>
#include <vector>

#include "halftone/core/state_dict.h"

namespace halftone::optim {

struct LBFGSOptions {
  double lr = 1;                    // length of a step in units of the direction; with a line search, the length tried first
  int64_t max_iterations = 20;      // in a call of step()
  int64_t max_evaluations = 0;      // of the closure in a call of step(); 0: 5 / 4 of max_iterations
  double tolerance_grad = 1e-7;     // done when no element of the gradient is larger
  double tolerance_change = 1e-9;   // done when no element moves by more, nor the loss changes by more
  int64_t history = 100;            // pairs of steps and gradient differences that are kept
  bool line_search = false;         // look for a length that meets the strong Wolfe conditions
};

// Quasi-Newton steps from the last `history` of them (Liu and Nocedal, "On the limited memory BFGS method for large scale
// optimization", 1989), with lengths by cubic interpolation where a line search is asked for (Nocedal and Wright, "Numerical
// optimization", 2006, algorithms 3.5 and 3.6).
class HT_API LBFGS {
 public:
  // Empties the gradients, evaluates the loss (one element), calls backward on it and returns it: the same function each time.
  using Closure = std::function<Tensor()>;

  explicit LBFGS(std::vector<Tensor> params, LBFGSOptions o = {});
  // The loss before the step. Throws Error when a loss is not finite, which leaves parameters where they were tried last.
  double step(const Closure& closure);
  void zero_grad();
  const std::vector<Tensor>& parameters() const { return params_; }
  int64_t iterations() const { return iterations_; }    // so far, in all
  int64_t evaluations() const { return evaluations_; }  // of closures
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  // A place along the direction: how far it is, the loss there, its slope along the direction, and its gradient.
  struct Point { double t = 0, loss = 0, slope = 0; Tensor gradient = {}; };
  double evaluate(const Closure& closure);
  Tensor gradient() const;  // all of them, [elements]
  void move(double t);      // along the direction
  Point at(double t, const std::vector<Tensor>& start, const Closure& closure);
  void remember(const Tensor& gradient);
  void turn(const Tensor& gradient);
  Point search(double t, Point start, const Closure& closure);

  LBFGSOptions options_;
  std::vector<Tensor> params_;
  int64_t iterations_ = 0, evaluations_ = 0;
  // Of the last iteration: where it went, how far, from which gradient; and the pairs so far, oldest first.
  Tensor direction_, previous_;
  double length_ = 0, scale_ = 1;  // scale_: of the first guess of the inverse Hessian
  std::vector<Tensor> steps_, differences_;
  bool warned_ = false;  // that there was no gradient
};

}  // namespace halftone::optim
