// SGD's options as the operator's attributes.
#include "halftone/optim/sgd.h"

#include "halftone/ops/update.h"

namespace halftone::optim {

SGD::SGD(std::vector<Tensor> params, SGDOptions o) : Optimizer("SGD", {"momentum"}) { add_group(std::move(params), o); }
SGD::SGD(std::vector<Group<SGDOptions>> groups) : Optimizer("SGD", {"momentum"}) {
  for (auto& g : groups) add_group(std::move(g.params), g.options);
}
void SGD::add_group(std::vector<Tensor> params, SGDOptions o) {
  HT_CHECK(o.lr >= 0, "SGD: expected lr of 0 or more, got ", o.lr);
  HT_CHECK(o.momentum >= 0 && o.weight_decay >= 0, "SGD: expected momentum and weight_decay of 0 or more, got ", o.momentum, " and ", o.weight_decay);
  HT_CHECK(!o.nesterov || (o.momentum > 0 && o.dampening == 0), "SGD: nesterov needs a momentum and no dampening");
  Optimizer::add_group(std::move(params), o.lr);
  options_.push_back(o);
}
const OpDef& SGD::op() const { return halftone::op::sgd; }
Attrs SGD::attrs(size_t group, int n) const {
  auto& o = options_[group];
  return Attrs::of(update::SgdAttrs{n, o.momentum, o.dampening, o.weight_decay, o.nesterov, o.maximize, rounding()});
}

}  // namespace halftone::optim
