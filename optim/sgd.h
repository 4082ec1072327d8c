#pragma once
// Stochastic gradient descent.
#include "halftone/optim/fused.h"

namespace halftone::optim {

struct SGDOptions {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
};

// g += weight_decay * p; m = momentum * m + (1 - dampening) * g (m = g at the first step); p -= lr * m, or with nesterov
// p -= lr * (g + momentum * m) (Sutskever et al., "On the importance of initialization and momentum", 2013).
class HT_API SGD final : public Fused<SGD, SGDOptions, update::Sgd> {
 public:
  using Fused::Fused;
  static constexpr auto title = "SGD";
  static void check(const SGDOptions& o);
  static update::Sgd settings(const SGDOptions& o) { return {o.momentum, o.dampening, o.weight_decay, o.nesterov, o.maximize}; }
};

}  // namespace halftone::optim
