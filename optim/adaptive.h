#pragma once
// Optimizers that divide by the size of past gradients.
#include "halftone/optim/fused.h"

namespace halftone::optim {

struct AdagradOptions {
  double lr = 1e-2, lr_decay = 0, weight_decay = 0, eps = 1e-10, initial_accumulator = 0;
  bool maximize = false;
};
// s += g^2; p -= lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps) (Duchi et al., "Adaptive subgradient methods", 2011).
class HT_API Adagrad final : public Fused<Adagrad, AdagradOptions, update::Adagrad> {
 public:
  using Fused::Fused;
  static constexpr auto title = "Adagrad";
  static void check(const AdagradOptions& o);
  static update::Adagrad settings(const AdagradOptions& o) { return {o.lr_decay, o.weight_decay, o.eps, o.initial_accumulator, o.maximize}; }
};

struct AdadeltaOptions {
  double lr = 1, rho = 0.9, eps = 1e-6, weight_decay = 0;
  bool maximize = false;
};
// v = rho v + (1 - rho) g^2; d = sqrt(a + eps) / sqrt(v + eps) * g; a = rho a + (1 - rho) d^2; p -= lr * d (Zeiler,
// "ADADELTA", 2012).
class HT_API Adadelta final : public Fused<Adadelta, AdadeltaOptions, update::Adadelta> {
 public:
  using Fused::Fused;
  static constexpr auto title = "Adadelta";
  static void check(const AdadeltaOptions& o);
  static update::Adadelta settings(const AdadeltaOptions& o) { return {o.rho, o.eps, o.weight_decay, o.maximize}; }
};

struct RMSpropOptions {
  double lr = 1e-2, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false, maximize = false;
};
// v = alpha v + (1 - alpha) g^2; p -= lr * g / (sqrt(v) + eps), by way of a momentum where one is given (Hinton, "Neural
// networks for machine learning", lecture 6, 2012). centered subtracts the square of the average gradient from v (Graves, 2013).
class HT_API RMSprop final : public Fused<RMSprop, RMSpropOptions, update::Rmsprop> {
 public:
  using Fused::Fused;
  static constexpr auto title = "RMSprop";
  static void check(const RMSpropOptions& o);
  static update::Rmsprop settings(const RMSpropOptions& o) { return {o.alpha, o.eps, o.weight_decay, o.momentum, o.centered, o.maximize}; }
};

}  // namespace halftone::optim
