// The options that fused optimizers refuse.
#include "halftone/optim/adam.h"
#include "halftone/optim/adaptive.h"
#include "halftone/optim/layerwise.h"
#include "halftone/optim/sgd.h"

namespace halftone::optim {
namespace {

// eps, weight_decay and both betas, by the names that every relative of Adam gives them.
template <class O> void check_adam(const char* who, const O& o) {
  detail::check_share(who, "beta1", o.beta1);
  detail::check_share(who, "beta2", o.beta2);
  detail::check_positive(who, "weight_decay", o.weight_decay);
  if constexpr (requires { o.eps; }) detail::check_positive(who, "eps", o.eps);
}

}  // namespace

void detail::check_share(const char* who, const char* what, double v) {
  HT_CHECK(v >= 0 && v < 1, who, ": expected ", what, " in [0, 1), got ", v);
}
void detail::check_positive(const char* who, const char* what, double v) {
  HT_CHECK(v >= 0, who, ": expected ", what, " of 0 or more, got ", v);
}

void SGD::check(const SGDOptions& o) {
  detail::check_positive(title, "momentum", o.momentum);
  detail::check_positive(title, "weight_decay", o.weight_decay);
  HT_CHECK(!o.nesterov || (o.momentum > 0 && o.dampening == 0), "SGD: nesterov needs a momentum and no dampening");
}
void Adam::check(const AdamOptions& o) { check_adam(title, o); }
void AdamW::check(const AdamWOptions& o) { check_adam(title, o); }
void Adamax::check(const AdamaxOptions& o) { check_adam(title, o); }
void NAdam::check(const NAdamOptions& o) {
  check_adam(title, o);
  detail::check_positive(title, "momentum_decay", o.momentum_decay);
}
void RAdam::check(const RAdamOptions& o) { check_adam(title, o); }
void Lion::check(const LionOptions& o) { check_adam(title, o); }
void LAMB::check(const LAMBOptions& o) { check_adam(title, o); }
void Muon::check(const MuonOptions& o) {
  detail::check_share(title, "momentum", o.momentum);
  detail::check_positive(title, "weight_decay", o.weight_decay);
  HT_CHECK(o.steps >= 0, "Muon: expected steps of 0 or more, got ", o.steps);
  HT_CHECK(is_floating(o.products), "Muon: expected products of a floating dtype, got ", o.products);
}
void Adagrad::check(const AdagradOptions& o) {
  detail::check_positive(title, "lr_decay", o.lr_decay);
  detail::check_positive(title, "weight_decay", o.weight_decay);
  detail::check_positive(title, "eps", o.eps);
  detail::check_positive(title, "initial_accumulator", o.initial_accumulator);
}
void Adadelta::check(const AdadeltaOptions& o) {
  HT_CHECK(o.rho >= 0 && o.rho <= 1, "Adadelta: expected rho in [0, 1], got ", o.rho);
  detail::check_positive(title, "eps", o.eps);
  detail::check_positive(title, "weight_decay", o.weight_decay);
}
void RMSprop::check(const RMSpropOptions& o) {
  detail::check_share(title, "alpha", o.alpha);
  detail::check_positive(title, "eps", o.eps);
  detail::check_positive(title, "weight_decay", o.weight_decay);
  detail::check_positive(title, "momentum", o.momentum);
}

}  // namespace halftone::optim
