// The autocast layer: looks up the policy, casts the arguments, passes the call on.
#include "halftone/amp/autocast.h"

#include <atomic>

#include "halftone/amp/trace.h"
#include "halftone/core/capture.h"
#include "halftone/core/shadow.h"
#include "halftone/core/warning.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/gemm.h"

namespace halftone {
namespace amp {

// What a region goes back to; on a list of its thread's, as regions may end in any order.
struct OpenRegion {
  std::shared_ptr<const LayerState> saved;
  uint8_t saved_layers = 0;
  std::shared_ptr<OpenRegion> outer;
  std::atomic<bool> ended = false;
};

namespace {

constexpr auto slot_of_layer = static_cast<size_t>(Layer::autocast);
constexpr unsigned layer_bit = 1u << slot_of_layer;

thread_local std::shared_ptr<OpenRegion> innermost;

void leave_ended() {
  ThreadState& t = thread_state();
  while (innermost && innermost->ended) {
    t.layers = static_cast<uint8_t>((t.layers & ~layer_bit) | (innermost->saved_layers & layer_bit));
    t.slot[slot_of_layer] = std::move(innermost->saved);
    innermost = std::move(innermost->outer);
  }
}

const AutocastState& state() {
  static const AutocastState none;
  auto& slot = thread_state().slot[slot_of_layer];
  return slot ? static_cast<const AutocastState&>(*slot) : none;
}
const Policy& policy_of(const AutocastState& s) { return s.policy ? *s.policy : default_policy(); }

bool eligible(const Tensor& t, DeviceType type) {
  return t.defined() && t.device().type == type && is_floating(t.dtype()) && t.dtype() != DType::f64;
}

// A weight: the cast of it is worth keeping.
bool is_weight(const Tensor& t) {
  return t.dtype() == DType::f32 && (t.requires_grad() || t.body()->owners > 0) && t.is_leaf() && !t.body()->is_view;
}

// The current 16-bit copy of a weight, made or rewritten when it is not.
Tensor current_copy(const Tensor& w, DType dtype) {
  Shadows& shadows = w.storage()->shadows();
  std::lock_guard guard(shadows.lock);
  Shadows::Shadow* s = shadows.find(dtype);
  if (auto* log = thread_state().capture) log->uses(w);
  if (!s) {
    if (thread_state().capture) return {};  // memory of a graph must not outlive it
    s = shadows.add(dtype, Tensor::empty(Meta(w.shape(), dtype, w.device())));
  }
  shadows.in_use = dtype;
  if (s->version != w.version()) {
    call_into(op::cast, {w.detach()}, Attrs::of(dtype), s->copy);
    s->wrote(w.version());
  }
  s->await();
  return s->copy;
}

Tensor lowered(const Tensor& t, DType dtype, bool cache) {
  if (t.dtype() == dtype) return t;
  if (!cache || !is_weight(t)) return cast(t, dtype);
  Tensor copy = current_copy(t, dtype);
  if (!copy.defined()) return cast(t, dtype);
  // One recorded cast per use, all on the same copy: gradients of several uses are summed in f32.
  Call use{.op = &op::cast, .in = {t}, .attrs = Attrs::of(dtype), .out = {copy.detach()}, .recording = false, .launched = true};
  return dispatch(use)[0];
}

DeviceType device_of(std::span<const Tensor> in) {
  DeviceType type = DeviceType::cpu;
  for (auto& t : in) if (t.defined()) type = std::max(type, t.device().type);
  return type;
}

// The dtype of a result never depends on the processor; its speed does. Said once a process.
void tell_of_units(DType dtype) {
  static std::atomic<bool> told = false;
  if (told.exchange(true, std::memory_order_relaxed) || multiplies_natively(dtype)) return;
  warn(text::cat("autocast: this build multiplies no ", dtype, " on this processor; products are computed in f32, which saves memory and no time"));
}

// An operator that is to run in f32: an error where that lifts an input of 16 bits, which names the input that makes it.
void refuse_climb(const OpDef& op, std::span<const Tensor> in, DeviceType type, DType low) {
  auto counts = [type](const Tensor& t) { return eligible(t, type) && t.rank() > 0; };
  if (std::none_of(in.begin(), in.end(), [&](auto& t) { return counts(t) && is_16bit_dtype(t.dtype()); })) return;
  for (auto& t : in)
    HT_CHECK(!counts(t) || t.dtype() == low, op.name, ": runs in f32 inside a strict ", low, " region because an input ", t.meta(), " is ", t.dtype(),
             "; cast it, or take the operator out of the region");
}

// What would not do its work on casts of its arguments.
bool is_untouched(const OpDef& op) {
  return op.view || (op.writes && !op.backward) || &op == &op::cast || &op == &op::transfer || &op == &op::clone || &op == &op::copy;
}

}  // namespace

const Policy& default_policy() {
  static const Policy p;
  return p;
}
Policy& Policy::set(std::string_view op, Cast cast) {
  const OpDef* def = find_op(op);
  HT_CHECK(def, "Policy::set: there is no operator named '", op, "'");
  HT_CHECK(cast != Cast::unset && cast <= Cast::banned, "Policy::set: expected a policy for '", op, "', got ",
           cast == Cast::unset ? "Cast::unset" : std::to_string(static_cast<int>(cast)));
  HT_CHECK(cast == Cast::keep || !is_untouched(*def), "Policy::set: '", op, "' is an operator that autocast does not touch, as it is a view, "
           "copies or casts, or updates what it is given; only Cast::keep is possible");
  overrides_[def] = cast;
  return *this;
}
Cast Policy::get(std::string_view op) const {
  const OpDef* def = find_op(op);
  HT_CHECK(def, "Policy::get: there is no operator named '", op, "'");
  return get(*def);
}

void Policy::append_key(std::vector<int64_t>& key) const {
  key.push_back(static_cast<int64_t>(overrides_.size()));
  for (auto& [op, cast] : overrides_) key.insert(key.end(), {reinterpret_cast<int64_t>(op), static_cast<int64_t>(cast)});
}

Autocast::Autocast(const AutocastOptions& o) {
  HT_CHECK(!o.device || static_cast<int>(*o.device) < num_device_types, "Autocast: expected device cpu or cuda, got ", static_cast<int>(*o.device));
  HT_CHECK(!o.enabled || !o.dtype || is_16bit_dtype(*o.dtype), "Autocast: expected dtype f16 or bf16, got ", *o.dtype, "; for an f32 region say {.enabled = false}");
  leave_ended();
  auto next = std::make_shared<AutocastState>(state());
  bool any = false;
  for (int i = 0; i < num_device_types; ++i) {
    auto& d = next->device[i];
    if (!o.device || static_cast<int>(*o.device) == i) {
      d.enabled = o.enabled;
      if (o.dtype && is_16bit_dtype(*o.dtype)) d.dtype = *o.dtype;
    }
    any |= d.enabled;
  }
  next->cache &= o.cache;
  next->strict |= o.strict;
  if (o.policy) next->policy = std::make_shared<const Policy>(*o.policy);
  ThreadState& t = thread_state();
  open_ = std::make_shared<OpenRegion>();
  open_->saved = std::exchange(t.slot[slot_of_layer], std::move(next));
  open_->saved_layers = t.layers;
  open_->outer = std::exchange(innermost, open_);
  t.layers = static_cast<uint8_t>(any ? t.layers | layer_bit : t.layers & ~layer_bit);
}

Autocast::~Autocast() {
  open_->ended = true;
  leave_ended();
}

void AutocastState::append_key(std::vector<int64_t>& key) const {
  for (auto& d : device) key.insert(key.end(), {d.enabled, static_cast<int64_t>(d.dtype)});
  key.insert(key.end(), {cache, strict});
  policy_of(*this).append_key(key);
}

bool is_autocast_enabled(DeviceType type) { return thread_state().on(Layer::autocast) && state().device[static_cast<int>(type)].enabled; }
DType autocast_dtype(DeviceType type) { return state().device[static_cast<int>(type)].dtype; }

}  // namespace amp

Tensors autocast_layer(Call& c) {
  using namespace amp;
  const AutocastState& s = state();
  std::span<const Tensor> in(c.in.begin(), c.in.size());
  DeviceType type = device_of(in);
  auto& region = s.device[static_cast<int>(type)];
  if (!region.enabled) return dispatch(c);
  auto each = [&](auto f) {
    for (size_t i = 0; i < c.in.size(); ++i)
      if (Tensor& t = c.in[i]; eligible(t, type) && !(c.op->writes && c.op->writes(c, i))) t = f(t);  // a cast of what is written would be lost
  };
  switch (policy_of(s).get(*c.op)) {
    case Cast::lower:
      if (type == DeviceType::cpu) tell_of_units(region.dtype);
      each([&](const Tensor& t) { return lowered(t, region.dtype, s.cache); });
      break;
    case Cast::full:
      each([](const Tensor& t) { return cast(t, DType::f32); });
      break;
    case Cast::widest: {
      DType widest = region.dtype;
      for (auto& t : c.in) if (eligible(t, type)) widest = promote(widest, t.dtype());
      if (s.strict && widest == DType::f32) refuse_climb(*c.op, in, type, region.dtype);
      each([&](const Tensor& t) { return cast(t, widest); });
      break;
    }
    case Cast::total:
      if (c.op->infer(c)[0].shape.rank() > 0) note_left_alone(c);
      else if (c.op->in_f32) c.attrs = c.op->in_f32(c.attrs);
      else each([](const Tensor& t) { return cast(t, DType::f32); });
      break;
    case Cast::banned:
      HT_CHECK(region.dtype != DType::f16, c.op->name, ": unsafe under f16 autocast; use ", c.op->ban ? c.op->ban : "another operator",
               ", or run it in f32 inside amp::Autocast({.enabled = false})");
      break;
    case Cast::unset:
      throw Error(text::cat(c.op->name, ": states no autocast policy; set OpDef::cast, to Cast::keep when it should run in the dtype it is given"));
    case Cast::keep:
      note_left_alone(c);
  }
  return dispatch(c);
}

void autocast_climbs(const OpDef& op, std::span<const Tensor> operands) {
  using namespace amp;
  const AutocastState& s = state();
  DeviceType type = device_of(operands);
  auto& region = s.device[static_cast<int>(type)];
  if (s.strict && region.enabled && policy_of(s).get(op) != Cast::full) refuse_climb(op, operands, type, region.dtype);
}

void autocast_passed_by(const Call& c) {
  using namespace amp;
  const AutocastState& s = state();
  std::span<const Tensor> in(c.in.begin(), c.in.size());
  DeviceType type = device_of(in);
  auto& region = s.device[static_cast<int>(type)];
  if (!s.strict || !region.enabled) return;
  Cast policy = policy_of(s).get(*c.op);
  if (policy != Cast::lower && policy != Cast::full) return;  // inputs of one dtype, as kernels take them, are left as they are
  DType wanted = policy == Cast::lower ? region.dtype : DType::f32;
  for (auto& t : in)
    HT_CHECK(!eligible(t, type) || t.dtype() == wanted, c.op->name, ": writes into a given tensor inside a strict ", region.dtype,
             " region, and autocast, which would cast an input ", t.meta(), " to ", wanted, ", does not see it; cast it, or call the operator without a destination");
}

}  // namespace halftone
