#pragma once
// Adam and AdamW.
#include "halftone/optim/optimizer.h"

namespace halftone::optim {

struct AdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool maximize = false;
};
struct AdamWOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-2;
  bool maximize = false;
};

namespace detail {
// What both have in common; `decoupled` is AdamW's way with weight decay.
class HT_API AdamFamily : public Optimizer {
 public:
  const char* name() const override { return decoupled_ ? "AdamW" : "Adam"; }

 protected:
  explicit AdamFamily(bool decoupled);
  void add(std::vector<Tensor> params, const AdamOptions& o);

 private:
  const OpDef& op() const override;
  Attrs attrs(size_t group, int n) const override;
  bool decoupled_;
  std::vector<AdamOptions> options_;
};
}  // namespace detail

// m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; p -= lr * m^ / (sqrt(v^) + eps) with m^ = m / (1 - beta1^t),
// v^ = v / (1 - beta2^t) (Kingma and Ba, "Adam", 2015). weight_decay adds to g.
class HT_API Adam final : public detail::AdamFamily {
 public:
  explicit Adam(std::vector<Tensor> params, AdamOptions o = {}) : AdamFamily(false) { add_group(std::move(params), o); }
  explicit Adam(std::vector<Group<AdamOptions>> groups) : AdamFamily(false) {
    for (auto& g : groups) add_group(std::move(g.params), g.options);
  }
  void add_group(std::vector<Tensor> params, AdamOptions o) { add(std::move(params), o); }
};

// Adam with p -= lr * weight_decay * p first (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019).
class HT_API AdamW final : public detail::AdamFamily {
 public:
  explicit AdamW(std::vector<Tensor> params, AdamWOptions o = {}) : AdamFamily(true) { add_group(std::move(params), o); }
  explicit AdamW(std::vector<Group<AdamWOptions>> groups) : AdamFamily(true) {
    for (auto& g : groups) add_group(std::move(g.params), g.options);
  }
  void add_group(std::vector<Tensor> params, AdamWOptions o) {
    add(std::move(params), {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.maximize});
  }
};

}  // namespace halftone::optim
