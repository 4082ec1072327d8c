// GradScaler: a stage machine on the host that only ever looks at what the program called, and device tensors for the rest.
#include "halftone/amp/scaler.h"

#include <atomic>
#include <cmath>

#include "halftone/autograd/autograd.h"
#include "halftone/autograd/function.h"
#include "halftone/core/backend.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/update.h"

namespace halftone::amp {

// Where kernels write outcomes and the host reads them: memory that both see.
struct OutcomeBoard {
  static constexpr int64_t slots = 256;
  Backend::Mapped memory;
  int64_t next = 0;
  int64_t take() {
    std::atomic_ref(*at(next)).store(0, std::memory_order_relaxed);
    return next++;
  }
  int64_t* at(int64_t slot) const { return static_cast<int64_t*>(const_cast<void*>(memory.host_side)) + slot % slots; }
  int64_t read(int64_t slot) const { return std::atomic_ref(*at(slot)).load(std::memory_order_acquire); }
};

namespace {

// y = x * scale in f32; its backward stamps the run, so that the leaves it reaches know whose scale they carry.
struct ScaleLoss : Function<ScaleLoss> {
  static Tensor forward(Context& ctx, const Tensor& x, const Tensor& scale, uint64_t stamp) {
    LayerScope plain(Layer::autocast, false);
    ctx.save(scale, stamp);
    return (is_16bit_dtype(x.dtype()) ? x.to(DType::f32) : x) * scale;
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) {
    LayerScope plain(Layer::autocast, false);
    auto& [scale, stamp] = ctx.saved<Tensor, uint64_t>();
    stamp_this_run(stamp);
    return {g * scale, {}};
  }
};

std::atomic<uint64_t> stamps{1};

}  // namespace

StepOutcome::State StepOutcome::state() const {
  if (known_ != State::unknown || !board_) return known_;
  int64_t v = board_->read(slot_);
  return v == 1 ? State::stepped : v == 2 ? State::skipped : State::unknown;
}
StepOutcome::State StepOutcome::wait() const {
  if (state() == State::unknown && board_) {
    check_may_sync("StepOutcome");
    backend(board_->memory.device_side.device().type).synchronize(board_->memory.device_side.device().index);
  }
  HT_CHECK(state() != State::unknown, "StepOutcome: the outcome is known after scaler.update()");
  return state();
}

GradScaler::GradScaler(const GradScalerOptions& o) : options_(o), stamp_(stamps++) {
  HT_CHECK(o.init_scale > 0 && std::isfinite(o.init_scale), "GradScaler: expected a finite init_scale above 0, got ", o.init_scale);
  HT_CHECK(o.growth_factor >= 1, "GradScaler: expected growth_factor of 1 or more, got ", o.growth_factor);
  HT_CHECK(o.backoff_factor > 0 && o.backoff_factor <= 1, "GradScaler: expected backoff_factor in (0, 1], got ", o.backoff_factor);
  HT_CHECK(o.growth_interval > 0, "GradScaler: expected growth_interval above 0, got ", o.growth_interval);
  HT_CHECK(o.min_scale >= 0 && o.min_scale <= o.init_scale && o.init_scale <= o.max_scale, "GradScaler: expected min_scale <= init_scale <= max_scale, got ",
           o.min_scale, ", ", o.init_scale, " and ", o.max_scale);
  HT_CHECK(o.max_consecutive_skips >= 0, "GradScaler: expected max_consecutive_skips of 0 or more, got ", o.max_consecutive_skips);
}

void GradScaler::make_state(Device device) {
  NoGrad off;
  auto number = [&](Scalar v, DType t) { return full({}, v, {.dtype = t, .device = device}); };
  scale_ = number(options_.init_scale, DType::f32);
  inverse_ = number(1 / options_.init_scale, DType::f32);
  streak_ = number(0, DType::i64);
  skipped_ = number(0, DType::i64);
  board_ = std::make_shared<OutcomeBoard>(OutcomeBoard{backend(device.type).allocate_mapped({OutcomeBoard::slots}, DType::i64, device.index)});
}

// A state that was loaded, or asked for, before the first loss follows it.
void GradScaler::move_state(Device device) {
  NoGrad off;
  Tensor scale = scale_, inverse = inverse_, streak = streak_, skipped = skipped_;
  make_state(device);
  scale_.copy_(scale);
  inverse_.copy_(inverse);
  streak_.copy_(streak);
  skipped_.copy_(skipped);
  for (auto& [id, e] : optimizers_) e.found_inf = {};
  seen_ = 0;
}

void GradScaler::check_made(const char* who) const { HT_CHECK(scale_.defined(), who, ": nothing has been scaled yet; call scale(loss) and backward() first"); }

Tensor GradScaler::scale(const Tensor& loss) {
  HT_CHECK(loss.defined() && is_floating(loss.dtype()), "GradScaler::scale: expected a floating loss");
  if (!options_.enabled) return loss;
  if (!scale_.defined()) make_state(loss.device());
  else if (scale_.device() != loss.device() && order_.empty()) move_state(loss.device());
  return ScaleLoss::apply(loss, scale_, stamp_);
}
std::vector<Tensor> GradScaler::scale(const std::vector<Tensor>& losses) {
  std::vector<Tensor> r;
  for (auto& l : losses) r.push_back(scale(l));
  return r;
}
const Tensor& GradScaler::scale_tensor() {
  if (!scale_.defined()) make_state(Device::cpu());
  return scale_;
}
const Tensor& GradScaler::inverse_scale() {
  scale_tensor();
  return inverse_;
}

GradScaler::PerOptimizer& GradScaler::entry(optim::Optimizer& opt) {
  PerOptimizer& e = optimizers_[opt.id()];
  e.name = opt.name();
  return e;
}

std::vector<Tensor> GradScaler::gradients(optim::Optimizer& opt, const char* who) const {
  std::vector<Tensor> grads, params = opt.parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    Tensor g = params[i].grad();
    if (!g.defined()) continue;
    HT_CHECK(g.dtype() != DType::f16, who, ": the gradient of parameter ", i, " ", params[i].meta(), " is f16, which unscaling would underflow; keep parameters in f32 and use amp::Autocast");
    uint64_t stamp = grad_stamp(params[i]);
    HT_CHECK(stamp == 0 || stamp == stamp_, who, ": the gradient of parameter ", i, " ", params[i].meta(), " was scaled by another GradScaler");
    grads.push_back(g);
  }
  return grads;
}

void GradScaler::begin_check(const optim::Optimizer& opt, PerOptimizer& e) {
  if (!e.found_inf.defined()) e.found_inf = zeros({}, {.dtype = DType::f32, .device = scale_.device()});
  if (e.checked) return;  // again, after an exception
  e.checked = true;
  e.slot = board_->take();
  order_.push_back(opt.id());
}

void GradScaler::unscale_(optim::Optimizer& opt) {
  if (!options_.enabled) return;
  check_made("unscale_");
  PerOptimizer& e = entry(opt);
  HT_CHECK(e.stage != Stage::unscaled, "unscale_: already called for ", e.name, " since the last update()");
  HT_CHECK(e.stage != Stage::stepped, "unscale_: called for ", e.name, " after step(); call update() first");
  NoGrad off;
  LayerScope plain(Layer::autocast, false);
  std::vector<Tensor> grads = gradients(opt, "unscale_");
  if (grads.empty()) return;
  begin_check(opt, e);
  Tensors in{inverse_, e.found_inf};
  in.append(grads.data(), grads.data() + grads.size());
  call_all(op::unscale, std::move(in));
  e.stage = Stage::unscaled;
  for (auto& p : opt.parameters()) if (p.grad().defined()) set_grad_stamp(p, 0);
}

// Reads the outcomes that have arrived, without waiting for the others.
void GradScaler::count_skips() {
  if (options_.max_consecutive_skips == 0) return;
  for (; seen_ < board_->next; ++seen_) {
    int64_t outcome = board_->read(seen_);
    if (outcome == 0) return;
    skips_in_a_row_ = outcome == 2 ? skips_in_a_row_ + 1 : 0;
  }
  HT_CHECK(skips_in_a_row_ <= options_.max_consecutive_skips, "step: ", skips_in_a_row_, " steps in a row were skipped because a gradient was not finite, more than max_consecutive_skips = ",
           options_.max_consecutive_skips, "; look for inf or NaN in the model, or lower the learning rate");
}

StepOutcome GradScaler::step(optim::Optimizer& opt, StepOptions o) {
  StepOutcome outcome;
  HT_CHECK(o.clip_norm >= 0, "step: expected clip_norm of 0 or more, got ", o.clip_norm);
  if (!options_.enabled) {
    if (o.clip_norm > 0) optim::clip_grad_norm_(opt.parameters(), o.clip_norm);
    opt.step();
    outcome.known_ = StepOutcome::State::stepped;
    return outcome;
  }
  check_made("step");
  count_skips();
  PerOptimizer& e = entry(opt);
  HT_CHECK(e.stage != Stage::stepped, "step: already called for ", e.name, " since the last update()");
  NoGrad off;
  LayerScope plain(Layer::autocast, false);
  std::vector<Tensor> grads = gradients(opt, "step");
  bool unscaled = e.stage == Stage::unscaled;
  std::vector<Tensor> params = opt.parameters();
  for (size_t i = 0; unscaled && i < params.size(); ++i)
    HT_CHECK(!params[i].grad().defined() || grad_stamp(params[i]) == 0, "step: the gradient of parameter ", i, " ", params[i].meta(),
             " came after unscale_ and is still scaled; run every backward before unscale_");
  if (grads.empty()) {
    e.stage = Stage::stepped;
    outcome.known_ = StepOutcome::State::no_gradients;
    return outcome;
  }
  if (!unscaled) {
    begin_check(opt, e);
    Tensors in{e.found_inf};
    in.append(grads.data(), grads.data() + grads.size());
    call_all(op::check_finite, std::move(in));
  }
  Tensor factor = unscaled ? Tensor() : inverse_;
  if (o.clip_norm > 0) {
    Tensor norm = total_norm(grads).to(DType::f32);
    if (!unscaled) norm = norm * inverse_;
    Tensor clip = minimum(o.clip_norm / (norm + 1e-6), 1);
    factor = unscaled ? clip : clip * inverse_;
  }
  opt.step({.grad_scale = factor, .found_inf = e.found_inf});
  e.stage = Stage::stepped;
  outcome.board_ = board_;
  outcome.slot_ = e.slot;
  return outcome;
}

// Ends the iteration: the scale changes by its rule, and outcomes become known.
void GradScaler::settle(const Tensor& scale, const Tensor& inverse, const Tensor& streak) {
  if (!order_.empty()) {
    Tensors in{scale, inverse, streak, skipped_, board_->memory.device_side};
    for (auto id : order_) in.push_back(optimizers_[id].found_inf);
    update::ScalerAttrs a{options_.growth_factor, options_.backoff_factor, options_.min_scale, options_.max_scale, options_.growth_interval,
                          optimizers_[order_[0]].slot};
    call_all(op::scaler_update, std::move(in), Attrs::of(a));
  }
  order_.clear();
  for (auto& [id, e] : optimizers_) {
    e.stage = Stage::ready;
    e.checked = false;
  }
}

void GradScaler::update() {
  if (!options_.enabled) return;
  check_made("update");
  NoGrad off;
  settle(scale_, inverse_, streak_);
}
void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  HT_CHECK(new_scale > 0 && std::isfinite(new_scale), "update: expected a finite scale above 0, got ", new_scale);
  check_made("update");
  NoGrad off;
  settle(scale_, inverse_, streak_.clone());
  scale_.fill_(new_scale);
  inverse_.fill_(1 / new_scale);
}

double GradScaler::get_scale() const {
  if (!options_.enabled) return 1;
  return scale_.defined() ? scale_.item() : options_.init_scale;
}
int64_t GradScaler::skipped_steps() const { return skipped_.defined() ? skipped_.item<int64_t>() : 0; }

StateDict GradScaler::state_dict() const {
  StateDict s;
  if (!options_.enabled) return s;
  s.add("scale", scale_.defined() ? scale_ : full({}, options_.init_scale));
  s.add("streak", streak_.defined() ? streak_ : zeros({}, {.dtype = DType::i64}));
  s.add("skipped", skipped_.defined() ? skipped_ : zeros({}, {.dtype = DType::i64}));
  return s;
}

void GradScaler::load_state_dict(const StateDict& s) {
  if (!options_.enabled) return;
  HT_CHECK(s.size() > 0, "GradScaler: the state is empty; it probably comes from a disabled scaler");
  NoGrad off;
  const Tensor &scale = s.at("scale"), &streak = s.at("streak"), &skipped = s.at("skipped");
  if (!scale_.defined()) {
    double value = scale.item();
    HT_CHECK(value > 0 && std::isfinite(value), "GradScaler: the state's scale is ", value);
    make_state(scale.device());
  }
  scale_.copy_(scale);
  inverse_.copy_(1 / scale.to(DType::f64));
  streak_.copy_(streak);
  skipped_.copy_(skipped);
}

}  // namespace halftone::amp
