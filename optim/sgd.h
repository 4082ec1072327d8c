#pragma once
// Stochastic gradient descent.
#include "halftone/optim/optimizer.h"

namespace halftone::optim {

struct SGDOptions {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
};

// g += weight_decay * p; m = momentum * m + (1 - dampening) * g (m = g at the first step); p -= lr * m, or with nesterov
// p -= lr * (g + momentum * m) (Sutskever et al., "On the importance of initialization and momentum", 2013).
class HT_API SGD final : public Optimizer {
 public:
  explicit SGD(std::vector<Tensor> params, SGDOptions o = {});
  explicit SGD(std::vector<Group<SGDOptions>> groups);
  void add_group(std::vector<Tensor> params, SGDOptions o);
  const char* name() const override { return "SGD"; }

 private:
  const OpDef& op() const override;
  Attrs attrs(size_t group, int n) const override;
  bool uses_state(size_t group, size_t) const override { return options_[group].momentum != 0; }
  std::vector<SGDOptions> options_;
};

}  // namespace halftone::optim
