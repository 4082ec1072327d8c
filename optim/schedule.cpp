// Curves as tables, and their place in an optimizer's step.
#include "halftone/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "halftone/ops/copy.h"
#include "halftone/ops/schedule.h"

namespace halftone::optim {
namespace {

using halftone::schedule::columns;
using halftone::schedule::Kind;

std::vector<double> piece(Kind kind, double a, double b = 0, double c = 0, double d = 0) {
  return {static_cast<double>(static_cast<int>(kind)), 0, a, b, c, d, 0, 0};
}
void check_steps(const char* who, int64_t steps) { HT_CHECK(steps > 0, who, ": expected a number of steps above 0, got ", steps); }

}  // namespace

double Curve::at(int64_t step) const {
  std::vector<double> table = pieces_;
  table.insert(table.end(), values_.begin(), values_.end());
  return halftone::schedule::value_at(table.data(), static_cast<int64_t>(pieces_.size()) / columns, step);
}
Curve Curve::then(int64_t step, const Curve& next) const {
  HT_CHECK(step > 0, "Curve::then: expected a step above 0, got ", step);
  Curve joined;
  for (size_t i = 0; i < pieces_.size(); i += columns)
    if (pieces_[i + 1] < static_cast<double>(step)) joined.pieces_.insert(joined.pieces_.end(), pieces_.begin() + static_cast<ptrdiff_t>(i), pieces_.begin() + static_cast<ptrdiff_t>(i) + columns);
  joined.values_ = values_;
  for (size_t i = 0; i < next.pieces_.size(); i += columns) {
    std::vector<double> p(next.pieces_.begin() + static_cast<ptrdiff_t>(i), next.pieces_.begin() + static_cast<ptrdiff_t>(i) + columns);
    p[1] += static_cast<double>(step);
    if (static_cast<Kind>(static_cast<int>(p[0])) == Kind::listed) p[2] += static_cast<double>(values_.size());
    joined.pieces_.insert(joined.pieces_.end(), p.begin(), p.end());
  }
  joined.values_.insert(joined.values_.end(), next.values_.begin(), next.values_.end());
  return joined;
}

#define HT_CURVE(...)               \
  Curve curve;                      \
  curve.pieces_ = piece(__VA_ARGS__); \
  return curve
Curve Curve::constant(double rate) { HT_CURVE(Kind::constant, rate); }
Curve Curve::linear(double from, double to, int64_t steps) {
  check_steps("Curve::linear", steps);
  HT_CURVE(Kind::linear, from, to, static_cast<double>(steps));
}
Curve Curve::exponential(double rate, double gamma) { HT_CURVE(Kind::exponential, rate, gamma); }
Curve Curve::staircase(double rate, double gamma, int64_t every) {
  check_steps("Curve::staircase", every);
  HT_CURVE(Kind::staircase, rate, gamma, static_cast<double>(every));
}
Curve Curve::cosine(double from, double to, int64_t steps) {
  check_steps("Curve::cosine", steps);
  HT_CURVE(Kind::cosine, from, to, static_cast<double>(steps));
}
Curve Curve::restarts(double from, double to, int64_t first_steps, double longer) {
  check_steps("Curve::restarts", first_steps);
  HT_CHECK(longer >= 1, "Curve::restarts: expected `longer` of 1 or more, got ", longer);
  HT_CURVE(Kind::restarts, from, to, static_cast<double>(first_steps), longer);
}
Curve Curve::polynomial(double from, double to, int64_t steps, double power) {
  check_steps("Curve::polynomial", steps);
  HT_CURVE(Kind::polynomial, from, to, static_cast<double>(steps), power);
}
Curve Curve::noam(double factor, int64_t warmup_steps) {
  check_steps("Curve::noam", warmup_steps);
  HT_CURVE(Kind::noam, factor, static_cast<double>(warmup_steps));
}
#undef HT_CURVE
Curve Curve::listed(std::vector<double> rates) {
  HT_CHECK(!rates.empty(), "Curve::listed: there are no rates");
  Curve curve;
  curve.pieces_ = piece(Kind::listed, 0, static_cast<double>(rates.size()));
  curve.values_ = std::move(rates);
  return curve;
}

// What an optimizer runs after each of its steps.
struct Attached {
  struct Group { Tensor count, table; int64_t pieces; };
  std::vector<Group> groups;

  void advance(size_t g, const Tensor& lr, const Tensor& found_inf) {
    Group& group = groups[g];
    for (Tensor* t : {&group.count, &group.table}) if (t->device() != lr.device()) *t = t->to(lr.device());
    call_all(op::schedule, {lr, group.count, group.table, found_inf}, Attrs::of(group.pieces));
  }
};

Schedule::Schedule(Optimizer& opt, const std::function<Curve(double)>& curve) : attached_(std::make_shared<Attached>()) {
  NoGrad off;
  for (size_t g = 0; g < opt.groups(); ++g) {
    const Curve& c = curves_.emplace_back(curve(opt.lr(g)));
    std::vector<double> table = c.pieces_;
    table.insert(table.end(), c.values_.begin(), c.values_.end());
    Device device = opt.lr_tensor(g).device();
    attached_->groups.push_back({zeros({}, {.dtype = DType::i64, .device = device}), tensor(table).to(device),
                                 static_cast<int64_t>(c.pieces_.size()) / columns});
    opt.set_lr(c.at(0), g);
  }
  opt.after_step([weak = std::weak_ptr(attached_)](size_t group, const Tensor& lr, const Tensor& found_inf) {
    auto a = weak.lock();
    if (a && group < a->groups.size()) a->advance(group, lr, found_inf);
    return a != nullptr;
  });
}
Schedule::~Schedule() = default;

int64_t Schedule::steps() const { return attached_->groups[0].count.item<int64_t>(); }
StateDict Schedule::state_dict() const {
  StateDict s;
  for (size_t g = 0; g < attached_->groups.size(); ++g) s.add(text::cat(g, ".steps"), attached_->groups[g].count);
  return s;
}
void Schedule::load_state_dict(const StateDict& state) {
  NoGrad off;
  for (size_t g = 0; g < attached_->groups.size(); ++g) {
    const Tensor& t = state.at(text::cat(g, ".steps"));
    HT_CHECK(t.numel() == 1, "Schedule: state '", g, ".steps' is ", t.meta(), ", expected one number");
  }
  for (size_t g = 0; g < attached_->groups.size(); ++g) attached_->groups[g].count.copy_(state.at(text::cat(g, ".steps")));
}

StepLR::StepLR(Optimizer& opt, StepLROptions o) : Schedule(opt, [o](double base) { return Curve::staircase(base, o.gamma, o.every); }) {}
MultiStepLR::MultiStepLR(Optimizer& opt, const MultiStepLROptions& o) : Schedule(opt, [o](double base) {
  Curve c = Curve::constant(base);
  int64_t last = 0;
  for (int64_t step : o.milestones) {
    HT_CHECK(step > last, "MultiStepLR: expected milestones above 0 in rising order, got ", step, " after ", last);
    c = c.then(step, Curve::constant(base *= o.gamma));
    last = step;
  }
  return c;
}) {}
ExponentialLR::ExponentialLR(Optimizer& opt, ExponentialLROptions o) : Schedule(opt, [o](double base) { return Curve::exponential(base, o.gamma); }) {}
CosineAnnealingLR::CosineAnnealingLR(Optimizer& opt, CosineAnnealingLROptions o) : Schedule(opt, [o](double base) {
  HT_CHECK(o.warmup >= 0 && o.warmup < o.steps, "CosineAnnealingLR: expected a warm-up of fewer than ", o.steps, " steps, got ", o.warmup);
  if (o.warmup == 0) return Curve::cosine(base, o.min_lr, o.steps);
  return Curve::linear(base / static_cast<double>(o.warmup + 1), base, o.warmup).then(o.warmup, Curve::cosine(base, o.min_lr, o.steps - o.warmup));
}) {}
CosineAnnealingWarmRestarts::CosineAnnealingWarmRestarts(Optimizer& opt, CosineAnnealingWarmRestartsOptions o)
    : Schedule(opt, [o](double base) { return Curve::restarts(base, o.min_lr, o.first_steps, o.longer); }) {}
LinearLR::LinearLR(Optimizer& opt, LinearLROptions o) : Schedule(opt, [o](double base) { return Curve::linear(base * o.start, base * o.end, o.steps); }) {}
PolynomialLR::PolynomialLR(Optimizer& opt, PolynomialLROptions o)
    : Schedule(opt, [o](double base) { return Curve::polynomial(base, o.min_lr, o.steps, o.power); }) {}
OneCycleLR::OneCycleLR(Optimizer& opt, OneCycleLROptions o) : Schedule(opt, [o](double) {
  auto up = static_cast<int64_t>(o.share * static_cast<double>(o.steps)) - 1;
  HT_CHECK(up > 0 && up < o.steps - 1, "OneCycleLR: a share of ", o.share, " of ", o.steps, " steps leaves no way up or none down");
  double start = o.max_lr / o.divide;
  return Curve::cosine(start, o.max_lr, up).then(up, Curve::cosine(o.max_lr, start / o.divide_last, o.steps - 1 - up));
}) {}
NoamLR::NoamLR(Optimizer& opt, NoamLROptions o) : Schedule(opt, [o](double base) {
  HT_CHECK(o.width > 0, "NoamLR: expected a width above 0, got ", o.width);
  return Curve::noam(base / std::sqrt(static_cast<double>(o.width)), o.warmup);
}) {}
LambdaLR::LambdaLR(Optimizer& opt, const LambdaLROptions& o) : Schedule(opt, [&o](double base) {
  check_steps("LambdaLR", o.steps);
  HT_CHECK(o.factor, "LambdaLR: there is no factor");
  std::vector<double> rates;
  for (int64_t i = 0; i < o.steps; ++i) rates.push_back(base * o.factor(i));
  return Curve::listed(std::move(rates));
}) {}

ReduceLROnPlateau::ReduceLROnPlateau(Optimizer& opt, ReduceLROnPlateauOptions o)
    : opt_(opt), options_(o), best_(o.maximize ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity()) {
  HT_CHECK(o.factor > 0 && o.factor < 1, "ReduceLROnPlateau: expected factor in (0, 1), got ", o.factor);
  HT_CHECK(o.patience >= 0 && o.cooldown >= 0, "ReduceLROnPlateau: expected patience and cooldown of 0 or more, got ", o.patience, " and ", o.cooldown);
}
bool ReduceLROnPlateau::step(double metric) {
  bool better = options_.maximize ? metric > best_ + std::abs(best_) * options_.threshold : metric < best_ - std::abs(best_) * options_.threshold;
  if (std::isinf(best_)) better = !std::isnan(metric);
  if (better) {
    best_ = metric;
    bad_ = 0;
  } else {
    ++bad_;
  }
  if (resting_ > 0) {
    --resting_;
    bad_ = 0;
  }
  if (bad_ <= options_.patience) return false;
  for (size_t g = 0; g < opt_.groups(); ++g) opt_.set_lr(std::max(opt_.lr(g) * options_.factor, options_.min_lr), g);
  resting_ = options_.cooldown;
  bad_ = 0;
  return true;
}
StateDict ReduceLROnPlateau::state_dict() const {
  StateDict s;
  s.add("best", full({}, best_, {.dtype = DType::f64}));
  s.add("bad", full({}, bad_, {.dtype = DType::i64}));
  s.add("resting", full({}, resting_, {.dtype = DType::i64}));
  return s;
}
void ReduceLROnPlateau::load_state_dict(const StateDict& state) {
  double best = state.at("best").item();
  int64_t bad = state.at("bad").item<int64_t>(), resting = state.at("resting").item<int64_t>();
  best_ = best;
  bad_ = bad;
  resting_ = resting;
}

}  // namespace halftone::optim
