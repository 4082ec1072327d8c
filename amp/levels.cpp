// What Apex's levels mean: the scaler of each, and the f32 side of a 16-bit model.
#include "halftone/amp/levels.h"

#include <map>

#include "halftone/ops/copy.h"

namespace halftone::amp {
namespace {

GradScalerOptions scaling(const InitializeOptions& o) { return o.scaler.value_or(GradScalerOptions{.enabled = o.level == O1 || o.level == O2}); }

bool narrow(const Tensor& t) { return is_16bit_dtype(t.dtype()); }

}  // namespace

LevelState::LevelState(const InitializeOptions& o, std::vector<optim::Optimizer*> optimizers, const NamedTensors& parameters)
    : scaler(scaling(o)), level_(o.level), dtype_(DType::f32), optimizers_(std::move(optimizers)) {
  HT_CHECK(level_ <= O3, "initialize: expected level O0, O1, O2 or O3, got ", static_cast<int>(level_));
  HT_CHECK(!parameters.empty(), "initialize: the model has no parameters");
  for (auto* opt : optimizers_) HT_CHECK(opt, "initialize: an optimizer is null");
  for (auto& [name, p] : parameters)
    HT_CHECK(p.dtype() == DType::f32, "initialize: expected a model in f32, which the level converts; parameter '", name, "' is ", p.meta());
  HT_CHECK(!o.dtype || is_16bit_dtype(*o.dtype), "initialize: expected dtype f16 or bf16, got ", *o.dtype, "; for f32 say {.level = amp::O0}");
  if (level_ != O0) dtype_ = o.dtype.value_or(parameters[0].second.device().type == DeviceType::cuda ? DType::f16 : DType::bf16);
  HT_CHECK(level_ != O3 || dtype_ != DType::f16 || !scaler.enabled(), "initialize: gradients of O3 in f16 are f16, which unscaling would underflow; use O2, whose "
           "masters take them in f32, or bf16");
  for (auto& [name, p] : parameters)
    HT_CHECK(!converts() || !p.grad().defined(),
             "initialize: parameter '", name, "' has a gradient, which a 16-bit level does not take over; zero_grad() first");
  if (level_ == O2) for (auto* opt : optimizers_) opt->use_master_weights();
}

void LevelState::start_masters(const std::vector<Tensor>& parameters, const std::vector<Tensor>& before) {
  std::map<const Body*, Tensor> values;
  for (size_t i = 0; i < parameters.size(); ++i) values[parameters[i].body().get()] = before[i];
  for (auto* opt : optimizers_)
    for (auto& p : opt->parameters())
      if (auto v = values.find(p.body().get()); v != values.end() && opt->keeps_master(p)) opt->set_master(p, v->second);
}

Tensor LevelState::argument(const Tensor& x) const {
  bool cast = converts() && x.defined() && is_floating(x.dtype()) && x.dtype() != DType::f64;
  return cast ? x.to(dtype_) : x;
}
Tensor LevelState::result(const Tensor& y) const { return level_ != O0 && y.defined() && narrow(y) ? y.to(DType::f32) : y; }

StateDict LevelState::widened(const StateDict& model) const {
  NoGrad off;
  std::map<const Storage*, Tensor> masters;
  for (auto* opt : optimizers_)
    for (auto& p : opt->parameters())
      if (Tensor m = opt->master(p); m.defined()) masters[p.storage().get()] = m;
  StateDict state;
  for (auto& [name, t] : model) {
    auto m = masters.find(t.storage().get());
    state.add(name, m != masters.end() ? m->second : narrow(t) ? t.to(DType::f32) : t);
  }
  return state;
}

void LevelState::load_masters(const StateDict& model, const StateDict& loaded) {
  for (auto* opt : optimizers_)
    for (auto& p : opt->parameters()) {
      if (!opt->keeps_master(p)) continue;
      for (auto& [name, t] : model)
        if (const Tensor* value = t.storage() == p.storage() ? loaded.find(name) : nullptr) opt->set_master(p, *value);
    }
}

}  // namespace halftone::amp
