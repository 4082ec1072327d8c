// Steps of any optimizer: which parameters take part, with which counts, states and shadow copies.
#include "halftone/optim/optimizer.h"

#include <algorithm>

#include "halftone/autograd/autograd.h"
#include "halftone/core/capture.h"
#include "halftone/core/shadow.h"
#include "halftone/core/warning.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/update.h"

namespace halftone::optim {
namespace {

DType state_dtype(const Tensor& p) { return p.dtype() == DType::f64 ? DType::f64 : DType::f32; }

// The parameter's 16-bit copy that the update should rewrite: the one in use. A copy that is stale already stays so and is
// made anew when it is asked for: a skipped step would not rewrite it.
Tensor current_shadow(const Tensor& p) {
  if (!p.storage()->has_shadows()) return {};
  Shadows& shadows = p.storage()->shadows();
  std::lock_guard guard(shadows.lock);
  Shadows::Shadow* s = shadows.find(shadows.in_use);
  if (!s || s->version != p.version()) return {};
  s->await();
  return s->copy;
}
void note_rewritten(const Tensor& p, const Tensor& copy) {
  Shadows& shadows = p.storage()->shadows();
  std::lock_guard guard(shadows.lock);
  Shadows::Shadow* s = shadows.find(copy.dtype());
  if (s && s->copy.storage() == copy.storage()) s->wrote(p.version());
}

void follow(Tensor& state, const Tensor& like) {
  if (state.defined() && state.device() != like.device()) state = state.to(like.device());
}

// Into the tensor that is there, which a captured step may know by its address.
void load_state(Tensor& state, const Tensor* loaded, const Tensor& p) {
  if (!loaded) state = {};
  else if (state.defined() && state.device() == p.device()) state.copy_(*loaded);
  else state = loaded->to({.dtype = state_dtype(p), .device = p.device()}).clone();
}

}  // namespace

Optimizer::Optimizer(const char* name, std::vector<const char*> states) : class_name_(name), state_names_(std::move(states)) {}

void Optimizer::add_group(std::vector<Tensor> params, double lr) {
  HT_CHECK(!params.empty(), class_name_, ": there are no parameters to optimize; is HT_FIELDS complete?");
  std::vector<Tensor> known = parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    HT_CHECK(params[i].defined() && params[i].is_leaf() && params[i].requires_grad(), class_name_, ": parameter ", i, " is not a leaf that requires a gradient");
    for (auto& k : known) HT_CHECK(k.body() != params[i].body(), class_name_, ": parameter ", i, " ", params[i].meta(), " is given twice");
    known.push_back(params[i]);
  }
  ParameterGroup g;
  g.lr = full({}, lr, {.dtype = DType::f64, .device = params[0].device()});
  g.states.assign(state_names_.size(), std::vector<Tensor>(params.size()));
  g.masters.resize(params.size());
  g.params = std::move(params);
  groups_.push_back(std::move(g));
}

std::vector<Tensor> Optimizer::parameters() const {
  std::vector<Tensor> all;
  for (auto& g : groups_) all.insert(all.end(), g.params.begin(), g.params.end());
  return all;
}

void Optimizer::zero_grad() {
  for (auto& g : groups_) for (auto& p : g.params) p.zero_grad();
}

void Optimizer::set_lr(double lr, size_t group) {
  NoGrad off;
  groups_.at(group).lr.fill_(lr);
}

void Optimizer::use_master_weights(bool on) {
  for (auto& g : groups_) HT_CHECK(g.cohorts.empty(), class_name_, ": use_master_weights comes before the first step");
  masters_ = on;
}
void Optimizer::set_share(Share share) {
  for (auto& g : groups_) HT_CHECK(g.cohorts.empty(), class_name_, ": set_share comes before the first step");
  share_ = std::move(share);
}
Tensor Optimizer::master(const Tensor& parameter) const {
  for (auto& g : groups_)
    for (size_t i = 0; i < g.params.size(); ++i)
      if (g.params[i].body() == parameter.body() && g.masters[i]) return g.masters[i]->value;
  return {};
}

// The f32 copy to update, taken from the parameter where somebody else has written to that.
const Tensor& Optimizer::current_master(ParameterGroup& group, size_t i) {
  const Tensor& p = group.params[i];
  auto& m = group.masters[i];
  if (!m) m = std::make_shared<Master>();
  follow(m->value, p);
  if (m->version != p.version() || !m->value.defined()) {
    if (m->value.defined()) m->value.copy_(p.detach());
    else m->value = p.detach().to(DType::f32);
    m->version = p.version();
  }
  if (CaptureLog* log = thread_state().capture) {
    std::weak_ptr<Body> body = p.body();
    log->guards.push_back([m, body] {
      auto b = body.lock();
      return b && b->storage->version() == m->version;
    });
    log->effects.push_back([m, body] {
      if (auto b = body.lock()) m->version = b->storage->version();
    });
  }
  return m->value;
}

void Optimizer::step(const StepControls& controls) {
  NoGrad off;
  LayerScope plain(Layer::autocast, false);
  for (size_t g = 0; g < groups_.size(); ++g) step_group(g, controls);
  if (!controls.found_inf.defined()) warn_of_no_gradients();
  std::erase_if(after_step_, [&](auto& f) {
    for (size_t g = 0; g < groups_.size(); ++g) if (!f(g, groups_[g].lr, controls.found_inf)) return true;
    return false;
  });
}

void Optimizer::step_group(size_t g, const StepControls& controls) {
  ParameterGroup& group = groups_[g];
  std::vector<Tensor> grads;
  for (size_t i = 0; i < group.params.size(); ++i) {
    auto& body = *group.params[i].body();
    HT_CHECK(!body.was_owned || body.owners > 0, class_name_, ": parameter ", i, " ", body.meta,
             " belongs to no module any more; it was replaced after this optimizer was made");
    grads.push_back(share_ && !share_(g, i) ? Tensor() : group.params[i].grad());
    if (!controls.found_inf.defined() && grads.back().defined())
      HT_CHECK(!grad_stamp(group.params[i]).scaler, class_name_, ": the gradient of parameter ", i, " ", body.meta,
               " is scaled by a GradScaler; let scaler.step(opt) take the step, or call scaler.unscale_(opt) first");
  }
  follow(group.lr, group.params[0]);
  regroup(group, grads);
  for (auto& c : group.cohorts)
    if (grads[c.members[0]].defined()) step_cohort(g, c, grads, controls);
}

// Cohorts whose members all have a gradient now, or all have none. Newcomers start one together, at 0 steps.
void Optimizer::regroup(ParameterGroup& group, const std::vector<Tensor>& grads) {
  auto has_grad = [&](size_t i) { return grads[i].defined(); };
  std::vector<bool> known(group.params.size());
  bool mixed = false;
  for (auto& c : group.cohorts)
    for (size_t i : c.members) {
      known[i] = true;
      mixed |= has_grad(i) != has_grad(c.members[0]);
    }
  Cohort fresh;
  for (size_t i = 0; i < known.size(); ++i) if (!known[i] && has_grad(i)) fresh.members.push_back(i);
  if (!mixed && fresh.members.empty()) return;

  std::vector<Cohort> result;
  for (auto& c : group.cohorts) {
    std::vector<size_t> with, without;
    for (size_t i : c.members) (has_grad(i) ? with : without).push_back(i);
    bool split = !with.empty() && !without.empty();
    auto own = [&](const Tensor& t) { return split && t.defined() ? t.clone() : t; };
    if (!with.empty()) result.push_back({c.steps, c.memory, std::move(with)});
    if (!without.empty()) result.push_back({own(c.steps), own(c.memory), std::move(without)});
  }
  if (!fresh.members.empty()) {
    warn_of_rounding(group, fresh.members);
    start(fresh, 0, group.params[fresh.members[0]].device());
    result.push_back(std::move(fresh));
  }
  group.cohorts = std::move(result);
}

// Once, of the first parameter that loses small updates.
void Optimizer::warn_of_rounding(const ParameterGroup& group, const std::vector<size_t>& members) {
  for (size_t i : members) {
    const Tensor& p = group.params[i];
    if (warned_of_rounding_ || !is_16bit_dtype(p.dtype()) || masters_ || (rounding_.stochastic && p.dtype() == DType::bf16)) continue;
    warned_of_rounding_ = true;
    warn(text::cat(class_name_, ": parameter ", i, " ", p.meta(), " has 16 bits and no master weight: updates below ", p.dtype() == DType::f16 ? "1/2048" : "1/256",
                   " of a weight are rounded away. Call use_master_weights()", p.dtype() == DType::bf16 ? " or use_stochastic_rounding()" : "",
                   ", or keep weights in f32 and use amp::Autocast"));
  }
}

// Once, and only before the first real step: later ones without gradients are phases of training, and a frozen model is meant so.
void Optimizer::warn_of_no_gradients() {
  if (warned_of_no_gradients_) return;
  auto stepped = [](const ParameterGroup& g) { return !g.cohorts.empty(); };
  if (std::any_of(groups_.begin(), groups_.end(), stepped)) return;
  const std::vector<Tensor> all = parameters();  // with those that other processes update
  auto has_grad = [](const Tensor& p) { return p.grad().defined(); };
  auto trained = [](const Tensor& p) { return p.requires_grad(); };
  if (std::any_of(all.begin(), all.end(), has_grad) || std::none_of(all.begin(), all.end(), trained)) return;
  warned_of_no_gradients_ = true;
  warn(text::cat(class_name_, ": step() changes nothing: none of the ", all.size(), " parameters has a gradient. Call zero_grad(), ",
                 "loss.backward() and step(), in this order; the loss must come from these parameters, without NoGrad and detach(), and "
                 "requires_grad_(false) freezes them"));
}

void Optimizer::start(Cohort& c, int64_t steps, Device device) const {
  c.steps = full({}, steps, {.dtype = DType::i64, .device = device});
  if (auto memory = first_memory()) c.memory = full({}, *memory, {.dtype = DType::f64, .device = device});
}

void Optimizer::step_cohort(size_t g, Cohort& cohort, const std::vector<Tensor>& grads, const StepControls& controls) {
  ParameterGroup& group = groups_[g];
  auto n = cohort.members.size();
  size_t kinds = state_names_.size();
  follow(cohort.steps, group.params[cohort.members[0]]);
  follow(cohort.memory, group.params[cohort.members[0]]);
  Tensors in{group.lr, cohort.steps, controls.grad_scale, controls.found_inf, cohort.memory};
  in.resize(update::lists_at + n * (3 + kinds));
  auto slot = [&](size_t list, size_t k) -> Tensor& { return in[update::lists_at + list * n + k]; };
  for (size_t k = 0; k < n; ++k) {
    size_t i = cohort.members[k];
    const Tensor& p = group.params[i];
    bool master = keeps_master(p);
    slot(0, k) = master ? current_master(group, i) : p.detach();
    slot(1, k) = grads[i];
    for (size_t s = 0; s < kinds; ++s) {
      if (!uses_state(g, s)) continue;
      Tensor& state = group.states[s][i];
      if (!state.defined()) state = zeros(p.shape(), {.dtype = state_dtype(p), .device = p.device()});
      follow(state, p);
      slot(2 + s, k) = state;
    }
    slot(2 + kinds, k) = master ? p.detach() : current_shadow(p);
  }
  Call call{.op = &op(), .in = std::move(in), .attrs = attrs(g, static_cast<int>(n)), .out = {}};
  run(g, call, static_cast<int>(n));
  for (size_t k = 0; k < n; ++k) {
    const Tensor &p = group.params[cohort.members[k]], &copy = call.in[update::lists_at + (2 + kinds) * n + k];
    if (keeps_master(p)) group.masters[cohort.members[k]]->version = p.version();
    else if (copy.defined()) note_rewritten(p, copy);
  }
}

void Optimizer::run(size_t, Call& call, int) { dispatch(call); }

void Optimizer::set_master(const Tensor& parameter, const Tensor& value) {
  NoGrad off;
  HT_CHECK(parameter.defined() && value.defined(), class_name_, ": set_master: a tensor is undefined");
  HT_CHECK(keeps_master(parameter), class_name_, ": set_master: ", parameter.meta(), " has no master weight; only 16-bit parameters have, after use_master_weights()");
  HT_CHECK(value.shape() == parameter.shape(), class_name_, ": set_master: expected a value ", parameter.shape(), ", got ", value.meta());
  for (auto& g : groups_)
    for (size_t i = 0; i < g.params.size(); ++i)
      if (g.params[i].body() == parameter.body()) return load_master(g, i, &value);
  throw Error(text::cat(class_name_, ": set_master: ", parameter.meta(), " is no parameter of this optimizer"));
}

// The parameter follows its master, so that the order in which model and optimizer are loaded does not matter.
void Optimizer::load_master(ParameterGroup& group, size_t i, const Tensor* loaded) {
  const Tensor& p = group.params[i];
  if (!loaded || !keeps_master(p)) return;
  const Tensor& m = current_master(group, i);
  m.detach().copy_(*loaded);
  p.detach().copy_(m);
  group.masters[i]->version = p.version();
}

StateDict Optimizer::state_dict() const {
  StateDict s;
  for (size_t g = 0; g < groups_.size(); ++g) {
    auto& group = groups_[g];
    std::string at = std::to_string(g);
    s.add(at + ".lr", group.lr);
    for (auto& c : group.cohorts)
      for (size_t i : c.members) {
        s.add(text::cat(at, ".", i, ".steps"), c.steps);
        if (c.memory.defined()) s.add(text::cat(at, ".", i, ".memory"), c.memory);
      }
    for (size_t k = 0; k < state_names_.size(); ++k)
      for (size_t i = 0; i < group.params.size(); ++i)
        if (group.states[k][i].defined()) s.add(text::cat(at, ".", i, ".", state_names_[k]), group.states[k][i]);
    for (size_t i = 0; i < group.params.size(); ++i)
      if (group.masters[i] && group.masters[i]->value.defined()) s.add(text::cat(at, ".", i, ".master"), group.masters[i]->value);
  }
  return s;
}

void Optimizer::load_state_dict(const StateDict& state) {
  NoGrad off;
  // Check everything first: a state that does not fit changes nothing.
  for (auto& [name, t] : state)
    HT_CHECK(t.defined(), class_name_, ": state '", name, "' is undefined");
  for (size_t g = 0; g < groups_.size(); ++g) {
    auto& group = groups_[g];
    HT_CHECK(state.at(text::cat(g, ".lr")).numel() == 1, class_name_, ": state '", g, ".lr' is ", state.at(text::cat(g, ".lr")).meta(), ", expected one number");
    for (size_t i = 0; i < group.params.size(); ++i) {
      const Tensor* steps = state.find(text::cat(g, ".", i, ".steps"));
      HT_CHECK(!steps || steps->numel() == 1, class_name_, ": state '", g, ".", i, ".steps' is ", steps ? steps->meta() : Meta(), ", expected one number");
      const Tensor* memory = state.find(text::cat(g, ".", i, ".memory"));
      HT_CHECK(!steps || !first_memory() || (memory && memory->numel() == 1), class_name_, ": state '", g, ".", i, ".memory' is ",
               memory ? str(memory->meta()) : "missing", ", expected one number");
    }
    std::vector<const char*> kinds = state_names_;
    kinds.push_back("master");
    for (const char* kind : kinds)
      for (size_t i = 0; i < group.params.size(); ++i) {
        const Tensor* t = state.find(text::cat(g, ".", i, ".", kind));
        HT_CHECK(!t || t->shape() == group.params[i].shape(), class_name_, ": state '", g, ".", i, ".", kind, "' is ", t ? t->meta() : Meta(),
                 ", the parameter is ", group.params[i].meta());
      }
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    auto& group = groups_[g];
    group.lr.copy_(state.at(text::cat(g, ".lr")));
    std::vector<std::pair<int64_t, Cohort>> by_steps;
    for (size_t i = 0; i < group.params.size(); ++i) {
      const Tensor& p = group.params[i];
      for (size_t k = 0; k < state_names_.size(); ++k)
        load_state(group.states[k][i], state.find(text::cat(g, ".", i, ".", state_names_[k])), p);
      load_master(group, i, state.find(text::cat(g, ".", i, ".master")));
      const Tensor* steps = state.find(text::cat(g, ".", i, ".steps"));
      if (!steps) continue;
      int64_t count = steps->item<int64_t>();
      auto it = std::find_if(by_steps.begin(), by_steps.end(), [count](auto& c) { return c.first == count; });
      if (it == by_steps.end()) {
        it = by_steps.insert(it, {count, Cohort{}});
        start(it->second, count, p.device());
        if (it->second.memory.defined()) it->second.memory.copy_(state.at(text::cat(g, ".", i, ".memory")));
      }
      it->second.members.push_back(i);
    }
    for (auto& [count, c] : by_steps)
      for (auto& old : group.cohorts)
        if (old.members == c.members) {  // the tensors that are there, which a captured step may know
          c.steps = old.steps.fill_(count);
          if (c.memory.defined()) c.memory = old.memory.copy_(c.memory);
        }
    group.cohorts.clear();
    for (auto& [count, c] : by_steps) group.cohorts.push_back(std::move(c));
  }
}

namespace {

std::vector<Tensor> unscaled_gradients(const std::vector<Tensor>& parameters, const char* who) {
  std::vector<Tensor> grads;
  for (size_t i = 0; i < parameters.size(); ++i) {
    Tensor g = parameters[i].grad();
    if (!g.defined()) continue;
    HT_CHECK(!grad_stamp(parameters[i]).scaler, who, ": the gradient of parameter ", i, " is scaled by a GradScaler; call unscale_ first");
    grads.push_back(std::move(g));
  }
  return grads;
}

}  // namespace

Tensor clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm) {
  NoGrad off;
  HT_CHECK(max_norm >= 0, "clip_grad_norm_: expected max_norm of 0 or more, got ", max_norm);
  std::vector<Tensor> grads = unscaled_gradients(parameters, "clip_grad_norm_");
  Tensor norm = total_norm(grads);
  scale_all_(grads, minimum(max_norm / (norm + 1e-6), 1));
  return norm;
}

void clip_grad_value_(const std::vector<Tensor>& parameters, double limit) {
  NoGrad off;
  HT_CHECK(limit >= 0, "clip_grad_value_: expected a limit of 0 or more, got ", limit);
  clamp_all_(unscaled_gradients(parameters, "clip_grad_value_"), limit);
}

}  // namespace halftone::optim
