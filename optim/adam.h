#pragma once
// Adam and its relatives: first and second moments of the gradient, m and v, decay with beta1 and beta2; t counts from 1.
#include "halftone/optim/fused.h"

namespace halftone::optim {

struct AdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool amsgrad = false, maximize = false;
};
// m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; p -= lr * m^ / (sqrt(v^) + eps) with m^ = m / (1 - beta1^t),
// v^ = v / (1 - beta2^t) (Kingma and Ba, "Adam", 2015). weight_decay adds to g. amsgrad divides by the largest v so far
// (Reddi et al., "On the convergence of Adam and beyond", 2018).
class HT_API Adam final : public Fused<Adam, AdamOptions, update::Adam> {
 public:
  using Fused::Fused;
  static constexpr auto title = "Adam";
  static void check(const AdamOptions& o);
  static update::Adam settings(const AdamOptions& o) { return {o.beta1, o.beta2, o.eps, o.weight_decay, false, o.maximize, o.amsgrad}; }
};

struct AdamWOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-2;
  bool amsgrad = false, maximize = false;
};
// Adam with p -= lr * weight_decay * p first (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019).
class HT_API AdamW final : public Fused<AdamW, AdamWOptions, update::Adam> {
 public:
  using Fused::Fused;
  static constexpr auto title = "AdamW";
  static void check(const AdamWOptions& o);
  static update::Adam settings(const AdamWOptions& o) { return {o.beta1, o.beta2, o.eps, o.weight_decay, true, o.maximize, o.amsgrad}; }
};

struct AdamaxOptions {
  double lr = 2e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool maximize = false;
};
// u = max(beta2 u, |g| + eps); p -= lr / (1 - beta1^t) * m / u (Kingma and Ba, 2015, section 7.1).
class HT_API Adamax final : public Fused<Adamax, AdamaxOptions, update::Adamax> {
 public:
  using Fused::Fused;
  static constexpr auto title = "Adamax";
  static void check(const AdamaxOptions& o);
  static update::Adamax settings(const AdamaxOptions& o) { return {o.beta1, o.beta2, o.eps, o.weight_decay, o.maximize}; }
};

struct NAdamOptions {
  double lr = 2e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, momentum_decay = 4e-3;
  bool decoupled = false, maximize = false;  // decoupled: weight decay as in AdamW
};
// Adam with Nesterov's momentum, whose schedule is beta1 (1 - 0.96^(t momentum_decay) / 2) (Dozat, "Incorporating Nesterov
// momentum into Adam", 2016).
class HT_API NAdam final : public Fused<NAdam, NAdamOptions, update::Nadam> {
 public:
  using Fused::Fused;
  static constexpr auto title = "NAdam";
  static void check(const NAdamOptions& o);
  static update::Nadam settings(const NAdamOptions& o) { return {o.beta1, o.beta2, o.eps, o.weight_decay, o.momentum_decay, o.decoupled, o.maximize}; }
};

struct RAdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = false, maximize = false;
};
// Adam whose division by sqrt(v^) is rectified, and left out while too few steps have been seen (Liu et al., "On the variance
// of the adaptive learning rate and beyond", 2020).
class HT_API RAdam final : public Fused<RAdam, RAdamOptions, update::Radam> {
 public:
  using Fused::Fused;
  static constexpr auto title = "RAdam";
  static void check(const RAdamOptions& o);
  static update::Radam settings(const RAdamOptions& o) { return {o.beta1, o.beta2, o.eps, o.weight_decay, o.decoupled, o.maximize}; }
};

struct LionOptions {
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
  bool maximize = false;
};
// p -= lr * (sign(beta1 m + (1 - beta1) g) + weight_decay * p); m = beta2 m + (1 - beta2) g (Chen et al., "Symbolic discovery
// of optimization algorithms", 2023).
class HT_API Lion final : public Fused<Lion, LionOptions, update::Lion> {
 public:
  using Fused::Fused;
  static constexpr auto title = "Lion";
  static void check(const LionOptions& o);
  static update::Lion settings(const LionOptions& o) { return {o.beta1, o.beta2, o.weight_decay, o.maximize}; }
};

}  // namespace halftone::optim
