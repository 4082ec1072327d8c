// GradScaler: a stage machine on the host that only ever looks at what the program called, and device tensors for the rest.
#include "halftone/amp/scaler.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>

#include "halftone/autograd/autograd.h"
#include "halftone/autograd/function.h"
#include "halftone/core/backend.h"
#include "halftone/core/capture.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/update.h"

namespace halftone::amp {

// Where kernels write the streak and outcomes (update::Outcome) and the host reads them: memory that both see.
struct OutcomeBoard {
  static constexpr int64_t slots = 256;
  Backend::Mapped memory;
  int64_t next = 0;

  int64_t read(int64_t place) const {
    return std::atomic_ref(static_cast<int64_t*>(const_cast<void*>(memory.host_side))[place]).load(std::memory_order_acquire);
  }
  int64_t streak() const { return read(0); }
  // What is in the slot of an outcome: its own, an older or a younger one's, or nothing yet.
  std::optional<update::Outcome> at(int64_t number) const {
    int64_t v = read(update::Outcome::place(number, 1 + slots));
    return v > 0 ? std::optional(update::Outcome::unpacked(v)) : std::nullopt;
  }
};

namespace {

// y = x * scale in f32; its backward stamps the run, so that the leaves it reaches know whose scale they carry.
struct ScaleLoss : Function<ScaleLoss> {
  // Not watched for writes as a tensor alone would be: the stamp tells whether the scale is still that of forward.
  struct Applied {
    Tensor scale;
    GradStamp stamp;
  };
  static Tensor forward(Context& ctx, const Tensor& x, const Tensor& scale, const GradStamp& stamp) {
    LayerScope plain(Layer::autocast, false);
    ctx.save(Applied{scale, stamp});
    if (x.rank() == 0 && x.device() == scale.device()) ctx.take_implied_one();
    return (is_16bit_dtype(x.dtype()) ? x.to(DType::f32) : x) * scale;
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) {
    LayerScope plain(Layer::autocast, false);
    auto& [scale, stamp] = std::get<0>(ctx.saved<Applied>());
    HT_CHECK(stamp.age() == 0, "backward: the scale has changed since scaler.scale(loss), by update() or load_state_dict(); "
             "scale the loss again, and run backward before update()");
    stamp_this_run(stamp);
    return {g.defined() ? g * scale : scale, {}};
  }
};

// The scale and its inverse are kept in f32, which holds both in this range.
constexpr double smallest_scale = 0x1p-126, largest_scale = std::numeric_limits<float>::max();
bool in_range(double scale) { return scale >= smallest_scale && scale <= largest_scale; }

}  // namespace

StepOutcome::State StepOutcome::state() const {
  if (known_ != State::unknown || !board_) return known_;
  auto o = board_->at(number_);
  if (!o || o->number != number_) return State::unknown;
  return o->skipped ? State::skipped : State::stepped;
}
StepOutcome::State StepOutcome::wait() const {
  if (state() == State::unknown && board_) {
    check_may_sync("StepOutcome");
    backend(board_->memory.device_side.device().type).synchronize(board_->memory.device_side.device().index);
    auto o = board_->at(number_);
    HT_CHECK(!o || o->number <= number_, "StepOutcome: the step lies more than ", OutcomeBoard::slots, " steps back; ask sooner");
  }
  HT_CHECK(state() != State::unknown, "StepOutcome: the outcome is known after scaler.update()");
  return state();
}

GradScaler::GradScaler(const GradScalerOptions& o) : options_(o) {
  HT_CHECK(o.init_scale > 0 && std::isfinite(o.init_scale), "GradScaler: expected a finite init_scale above 0, got ", o.init_scale);
  HT_CHECK(o.growth_factor >= 1 && std::isfinite(o.growth_factor),
           "GradScaler: expected a finite growth_factor of 1 or more, got ", o.growth_factor);
  HT_CHECK(o.backoff_factor > 0 && o.backoff_factor <= 1, "GradScaler: expected backoff_factor in (0, 1], got ", o.backoff_factor);
  HT_CHECK(o.growth_interval > 0, "GradScaler: expected growth_interval above 0, got ", o.growth_interval);
  HT_CHECK(o.min_scale > 0 && o.min_scale <= o.init_scale && o.init_scale <= o.max_scale, "GradScaler: expected 0 < min_scale <= init_scale <= max_scale, got ",
           o.min_scale, ", ", o.init_scale, " and ", o.max_scale);
  HT_CHECK(in_range(o.min_scale) && in_range(o.max_scale), "GradScaler: expected min_scale and max_scale in [", smallest_scale, ", ", largest_scale,
           "], where f32 holds a scale and its inverse, got ", o.min_scale, " and ", o.max_scale);
  HT_CHECK(o.hysteresis > 0, "GradScaler: expected hysteresis above 0, got ", o.hysteresis);
  HT_CHECK(o.max_consecutive_skips >= 0, "GradScaler: expected max_consecutive_skips of 0 or more, got ", o.max_consecutive_skips);
}

GradScalerOptions static_scale(double scale) {
  GradScalerOptions fixed{.init_scale = scale, .growth_factor = 1, .backoff_factor = 1};
  fixed.min_scale = std::min(fixed.min_scale, scale);
  fixed.max_scale = std::max(fixed.max_scale, scale);
  return fixed;
}

void GradScaler::make_state(Device device) {
  NoGrad off;
  auto number = [&](Scalar v, DType t) { return full({}, v, {.dtype = t, .device = device}); };
  double scale = options_.enabled ? options_.init_scale : 1;
  scale_ = number(scale, DType::f32);
  inverse_ = number(1 / scale, DType::f32);
  streak_ = number(0, DType::i64);
  skipped_ = number(0, DType::i64);
  patience_ = number(options_.hysteresis, DType::i64);
  board_ = std::make_shared<OutcomeBoard>(OutcomeBoard{backend(device.type).allocate_mapped({1 + OutcomeBoard::slots}, DType::i64, device.index)});
}

// A state that was loaded, or asked for, before the first loss follows it.
void GradScaler::move_state(Device device) {
  NoGrad off;
  Tensor scale = scale_, inverse = inverse_, streak = streak_, skipped = skipped_, patience = patience_;
  make_state(device);
  scale_.copy_(scale);
  inverse_.copy_(inverse);
  streak_.copy_(streak);
  skipped_.copy_(skipped);
  patience_.copy_(patience);
  found_infs_.clear();
}

bool GradScaler::on() const {
  HT_CHECK(progress_, "GradScaler: this scaler was moved from; use the one that it was moved to");
  return options_.enabled;
}
void GradScaler::check_limits(const char* who, double scale) const {
  HT_CHECK(scale >= options_.min_scale && scale <= options_.max_scale, who, ": expected a scale from min_scale to max_scale, [",
           options_.min_scale, ", ", options_.max_scale, "], got ", scale);
}
void GradScaler::check_made(const char* who) const { HT_CHECK(scale_.defined(), who, ": nothing has been scaled yet; call scale(loss) and backward() first"); }

Tensor GradScaler::scale(const Tensor& loss) {
  HT_CHECK(loss.defined() && is_floating(loss.dtype()), "GradScaler::scale: expected a floating loss");
  if (!on()) return loss;
  if (!scale_.defined()) make_state(loss.device());
  else if (scale_.device() != loss.device() && progress_->now.order.empty()) move_state(loss.device());
  note_capture();
  return ScaleLoss::apply(loss, scale_, GradStamp{scales_, scales_->now});
}
std::vector<Tensor> GradScaler::scale(const std::vector<Tensor>& losses) {
  std::vector<Tensor> r;
  for (auto& l : losses) r.push_back(scale(l));
  return r;
}
const Tensor& GradScaler::scale_tensor() {
  on();
  if (!scale_.defined()) make_state(Device::cpu());
  return scale_;
}
const Tensor& GradScaler::inverse_scale() {
  scale_tensor();
  return inverse_;
}

GradScaler::Stage GradScaler::stage(const optim::Optimizer& opt) const {
  auto i = progress_->now.optimizers.find(opt.id());
  return i == progress_->now.optimizers.end() ? Stage::ready : i->second.stage;
}
GradScaler::PerOptimizer& GradScaler::entry(const optim::Optimizer& opt) { return progress_->now.optimizers[opt.id()]; }

std::vector<Tensor> GradScaler::gradients(const optim::Optimizer& opt, const std::vector<Tensor>& params, const char* who, bool in_place) const {
  bool unscaled = stage(opt) == Stage::unscaled;
  std::vector<Tensor> grads;
  for (size_t i = 0; i < params.size(); ++i) {
    Tensor g = params[i].grad();
    if (!g.defined()) continue;
    HT_CHECK(g.dtype() != DType::f16 || (opt.keeps_master(params[i]) && !in_place), who, ": the gradient of parameter ", i, " ", params[i].meta(),
             " is f16, which unscaling would underflow; ",
             opt.keeps_master(params[i]) ? "the optimizer unscales it on the way to its master weight: clip with step(opt, {.clip_norm = ...})"
                                         : "keep parameters in f32 and use amp::Autocast, or give the optimizer master weights");
    const GradStamp& stamp = grad_stamp(params[i]);
    const char* wrong = nullptr;
    if (unscaled) {
      if (stamp.scaler) wrong = " came after unscale_ and is still scaled; run every backward before unscale_";
    } else if (!stamp.scaler) {
      if (!stamp.assigned())
        wrong = " is not scaled: backward ran on the loss itself, or unscale_ came before the last update(); "
                "call scaler.scale(loss).backward(), and zero_grad() for each step";
    } else if (stamp.scaler != scales_) {
      wrong = " was scaled by another GradScaler; let that one take this step, or zero_grad() and scale the loss by this one";
    } else if (stamp.age() != 0) {
      wrong = " carries a scale that update() or load_state_dict() has replaced since; zero_grad() before the next backward, "
              "and call update() once for each step, after it";
    }
    HT_CHECK(!wrong, who, ": the gradient of parameter ", i, " ", params[i].meta(), " of ", opt.name(), wrong);
    grads.push_back(std::move(g));
  }
  return grads;
}

// The optimizer's found_inf, which holds this iteration's answer from now on.
const Tensor& GradScaler::begin_check(const optim::Optimizer& opt, const std::vector<Tensor>& params, const char* who) {
  Tensor& found_inf = found_infs_[opt.id()];
  if (!found_inf.defined()) found_inf = zeros({}, {.dtype = DType::f32, .device = scale_.device()});
  PerOptimizer& e = entry(opt);
  if (!e.checked) {  // else again, after an exception
    e.checked = true;
    e.number = board_->next++;
    Iteration& now = progress_->now;
    now.order.push_back(opt.id());
    for (size_t i = 0; i < params.size(); ++i) {
      auto [other, fresh] = now.parameters.try_emplace(params[i].body().get(), opt.name());
      HT_CHECK(fresh, who, ": parameter ", i, " ", params[i].meta(), " of ", opt.name(), " belongs to ", other->second, ", too, which has had its turn since the last "
               "update(); a parameter has one optimizer");
    }
  }
  return found_inf;
}

// A captured step is replayed only where the program stands where it stood, and leaves it where the step did.
void GradScaler::note_capture() {
  CaptureLog* log = thread_state().capture;
  if (!log || progress_->capture == log->serial) return;
  progress_->capture = log->serial;
  progress_->left = std::make_shared<Place>(Place{progress_->now, scales_->now});
  std::weak_ptr<Progress> weak = progress_;
  log->guards.push_back([weak, before = progress_->now] {
    auto p = weak.lock();
    return p && p->now == before;
  });
  if (int64_t most = options_.max_consecutive_skips; most > 0)
    log->guards.push_back([board = board_, most] { return -board->streak() <= most; });
  log->undo.push_back([weak, before = progress_->now, scales = scales_, number = scales_->now] {
    scales->now = number;
    if (auto p = weak.lock()) p->now = before;
  });
  // Before those of gradients, whose stamps follow the shift.
  log->effects.insert(log->effects.begin(), [weak, left = progress_->left, scales = scales_, number = scales_->now] {
    scales->now += left->scale - number;
    scales->shift = scales->now - left->scale;
    if (auto p = weak.lock()) p->now = left->iteration;
  });
}
void GradScaler::leave() {
  CaptureLog* log = thread_state().capture;
  if (log && progress_->capture == log->serial) *progress_->left = {progress_->now, scales_->now};
}

void GradScaler::unscale_(optim::Optimizer& opt) {
  if (!on()) return;
  check_made("unscale_");
  note_capture();
  HT_CHECK(stage(opt) != Stage::unscaled,
           "unscale_: already called for ", opt.name(), " since the last update(); call update() once, after all steps");
  HT_CHECK(stage(opt) != Stage::stepped, "unscale_: called for ", opt.name(), " after step(); call update() first");
  NoGrad off;
  LayerScope plain(Layer::autocast, false);
  std::vector<Tensor> params = opt.parameters(), grads = gradients(opt, params, "unscale_", true);
  if (grads.empty()) return;
  const Tensor& found_inf = begin_check(opt, params, "unscale_");
  Tensors in{inverse_, found_inf};
  in.append(grads.data(), grads.data() + grads.size());
  call_all(op::unscale, std::move(in));
  if (agree_) agree_(found_inf);
  entry(opt).stage = Stage::unscaled;
  leave();
  for (auto& p : params) if (p.grad().defined()) set_grad_stamp(p, {});
}

StepOutcome GradScaler::step(optim::Optimizer& opt, StepOptions o) {
  StepOutcome outcome;
  HT_CHECK(o.clip_norm >= 0, "step: expected clip_norm of 0 or more, got ", o.clip_norm);
  if (!on()) {
    if (o.clip_norm > 0) optim::clip_grad_norm_(opt.parameters(), o.clip_norm);
    opt.step();
    outcome.known_ = StepOutcome::State::stepped;
    return outcome;
  }
  check_made("step");
  note_capture();
  int64_t most = options_.max_consecutive_skips;
  HT_CHECK(most == 0 || -board_->streak() <= most, "step: ", -board_->streak(), " steps in a row were skipped because a gradient was not finite, more than max_consecutive_skips = ",
           most, "; look for inf or NaN in the model, or lower the learning rate");
  HT_CHECK(stage(opt) != Stage::stepped,
           "step: already called for ", opt.name(), " since the last update(); call update() once, after all steps");
  NoGrad off;
  LayerScope plain(Layer::autocast, false);
  std::vector<Tensor> params = opt.parameters(), grads = gradients(opt, params, "step", false);
  bool unscaled = stage(opt) == Stage::unscaled;
  if (grads.empty()) {
    entry(opt).stage = Stage::stepped;
    leave();
    outcome.known_ = StepOutcome::State::no_gradients;
    return outcome;
  }
  const Tensor& found_inf = begin_check(opt, params, "step");
  if (!unscaled) {
    Tensors in{found_inf};
    in.append(grads.data(), grads.data() + grads.size());
    call_all(op::check_finite, std::move(in));
    if (agree_) agree_(found_inf);
  }
  Tensor factor = unscaled ? Tensor() : inverse_;
  if (o.clip_norm > 0) {
    Tensor norm = total_norm(grads).to(DType::f32);
    if (!unscaled) norm = norm * inverse_;
    Tensor clip = minimum(o.clip_norm / (norm + 1e-6), 1);
    factor = unscaled ? clip : clip * inverse_;
  }
  opt.step({.grad_scale = factor, .found_inf = found_inf});
  entry(opt).stage = Stage::stepped;
  leave();
  outcome.board_ = board_;
  outcome.number_ = entry(opt).number;
  return outcome;
}

// Ends the iteration: the scale changes by its rule, and outcomes become known.
void GradScaler::settle(const Tensor& scale, const Tensor& inverse, const Tensor& streak) {
  note_capture();
  Iteration& now = progress_->now;
  if (!now.order.empty()) {
    Tensors in{scale, inverse, streak, skipped_, patience_, board_->memory.device_side};
    for (auto id : now.order) in.push_back(found_infs_[id]);
    update::ScalerAttrs a{options_.growth_factor, options_.backoff_factor, options_.min_scale, options_.max_scale, options_.growth_interval,
                          now.optimizers[now.order[0]].number, options_.hysteresis};
    call_all(op::scaler_update, std::move(in), Attrs::of(a));
    if (options_.growth_factor != 1 || options_.backoff_factor != 1) ++scales_->now;
  }
  now = {};
  leave();
}

void GradScaler::update() {
  if (!on()) return;
  check_made("update");
  NoGrad off;
  settle(scale_, inverse_, streak_);
}
void GradScaler::update(double new_scale) {
  if (!on()) return;
  HT_CHECK(new_scale > 0 && std::isfinite(new_scale), "update: expected a finite scale above 0, got ", new_scale);
  check_limits("update", new_scale);
  check_made("update");
  NoGrad off;
  settle(scale_, inverse_, streak_.clone());
  scale_.fill_(new_scale);
  inverse_.fill_(1 / new_scale);
  ++scales_->now;
  leave();
}

double GradScaler::get_scale() const {
  if (!on()) return 1;
  return scale_.defined() ? scale_.item() : options_.init_scale;
}
int64_t GradScaler::skipped_steps() const { return on() && skipped_.defined() ? skipped_.item<int64_t>() : 0; }

StateDict GradScaler::state_dict() const {
  StateDict s;
  if (!on()) return s;
  s.add("scale", scale_.defined() ? scale_ : full({}, options_.init_scale));
  s.add("streak", streak_.defined() ? streak_ : zeros({}, {.dtype = DType::i64}));
  s.add("skipped", skipped_.defined() ? skipped_ : zeros({}, {.dtype = DType::i64}));
  s.add("patience", patience_.defined() ? patience_ : full({}, options_.hysteresis, {.dtype = DType::i64}));
  return s;
}

void GradScaler::load_state_dict(const StateDict& s) {
  if (!on()) return;
  HT_CHECK(s.size() > 0, "GradScaler: the state is empty; it probably comes from a disabled scaler");
  NoGrad off;
  const Tensor &scale = s.at("scale"), &streak = s.at("streak"), &skipped = s.at("skipped");
  double value = scale.item();
  check_limits("load_state_dict", value);
  if (!scale_.defined()) make_state(scale.device());
  if (value != scale_.item()) {  // else gradients that carry it stay good
    scale_.copy_(scale);
    inverse_.copy_(1 / scale.to(DType::f64));
    ++scales_->now;
  }
  streak_.copy_(streak);
  skipped_.copy_(skipped);
  if (auto* patience = s.find("patience")) patience_.copy_(*patience);
}

}  // namespace halftone::amp
