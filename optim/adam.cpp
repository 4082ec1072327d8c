// The Adam family's options as the operator's attributes.
#include "halftone/optim/adam.h"

#include "halftone/ops/update.h"

namespace halftone::optim::detail {

AdamFamily::AdamFamily(bool decoupled) : Optimizer(decoupled ? "AdamW" : "Adam", {"m", "v"}), decoupled_(decoupled) {}
void AdamFamily::add(std::vector<Tensor> params, const AdamOptions& o) {
  HT_CHECK(o.lr >= 0 && o.eps >= 0 && o.weight_decay >= 0, name(), ": expected lr, eps and weight_decay of 0 or more, got ", o.lr, ", ", o.eps, " and ",
           o.weight_decay);
  HT_CHECK(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, name(), ": expected beta1 and beta2 in [0, 1), got ", o.beta1, " and ", o.beta2);
  Optimizer::add_group(std::move(params), o.lr);
  options_.push_back(o);
}
const OpDef& AdamFamily::op() const { return halftone::op::adam; }
Attrs AdamFamily::attrs(size_t group, int n) const {
  auto& o = options_[group];
  return Attrs::of(update::AdamAttrs{n, o.beta1, o.beta2, o.eps, o.weight_decay, decoupled_, o.maximize, rounding()});
}

}  // namespace halftone::optim::detail
