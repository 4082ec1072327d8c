// L-BFGS by two loops over the remembered pairs, and its line search.
#include "halftone/optim/lbfgs.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "halftone/autograd/autograd.h"
#include "halftone/core/warning.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/matmul.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/shape.h"
#include "halftone/ops/unary.h"

namespace halftone::optim {
namespace {

double inner(const Tensor& a, const Tensor& b) { return dot(a, b).item(); }
double largest(const Tensor& x) { return amax(abs(x)).item(); }

}  // namespace

LBFGS::LBFGS(std::vector<Tensor> params, LBFGSOptions o) : options_(o), params_(std::move(params)) {
  HT_CHECK(!params_.empty(), "LBFGS: there are no parameters to optimize; is HT_FIELDS complete?");
  for (size_t i = 0; i < params_.size(); ++i) {
    const Tensor& p = params_[i];
    HT_CHECK(p.defined() && p.is_leaf() && p.requires_grad(), "LBFGS: parameter ", i, " is not a leaf that requires a gradient");
    HT_CHECK(p.dtype() == DType::f32 || p.dtype() == DType::f64, "LBFGS: parameter ", i, " is ", p.meta(), ", expected f32 or f64; train 16-bit models with another optimizer");
  }
  HT_CHECK(o.lr > 0, "LBFGS: expected lr above 0, got ", o.lr);
  HT_CHECK(o.max_iterations > 0 && o.history > 0, "LBFGS: expected max_iterations and history above 0, got ", o.max_iterations, " and ", o.history);
  HT_CHECK(o.max_evaluations >= 0, "LBFGS: expected max_evaluations of 0 or more, got ", o.max_evaluations);
  HT_CHECK(o.tolerance_grad >= 0 && o.tolerance_change >= 0, "LBFGS: expected tolerances of 0 or more, got ", o.tolerance_grad, " and ", o.tolerance_change);
  if (o.max_evaluations == 0) options_.max_evaluations = o.max_iterations * 5 / 4;
}

void LBFGS::zero_grad() { for (auto& p : params_) p.zero_grad(); }

double LBFGS::evaluate(const Closure& closure) {
  Tensor loss;
  {
    EnableGrad on;
    loss = closure();
  }
  ++evaluations_;
  HT_CHECK(loss.defined() && loss.numel() == 1, "LBFGS: the closure must return the loss, of one element, got ", loss.defined() ? str(loss.meta()) : "an undefined tensor");
  double value = loss.item();
  HT_CHECK(std::isfinite(value), "LBFGS: the closure's loss is ", value, "; a smaller lr or .line_search = true takes shorter steps");
  return value;
}

Tensor LBFGS::gradient() const {
  DType wide = DType::f32;
  for (auto& p : params_) if (p.dtype() == DType::f64) wide = DType::f64;
  std::vector<Tensor> all;
  for (size_t i = 0; i < params_.size(); ++i) {
    Tensor g = params_[i].grad();
    HT_CHECK(!grad_stamp(params_[i]).scaler, "LBFGS: the gradient of parameter ", i, " is scaled by a GradScaler, whose skipped steps a closure does not know; call backward on the loss itself");
    all.push_back((g.defined() ? g.detach() : zeros_like(params_[i].detach())).to({.dtype = wide, .device = params_[0].device()}).flatten());
  }
  return cat(all).clone();
}

void LBFGS::move(double t) {
  int64_t at = 0;
  for (auto& p : params_) {
    p.detach().add_(narrow(direction_, 0, at, p.numel()).view(p.shape()).to(p.options()), t);
    at += p.numel();
  }
}

LBFGS::Point LBFGS::at(double t, const std::vector<Tensor>& start, const Closure& closure) {
  for (size_t i = 0; i < params_.size(); ++i) params_[i].detach().copy_(start[i]);
  move(t);
  Point p{.t = t, .loss = evaluate(closure)};
  p.gradient = gradient();
  p.slope = inner(p.gradient, direction_);
  return p;
}

// The last step and what it did to the gradient, unless the curvature along it is not above 0.
void LBFGS::remember(const Tensor& gradient) {
  Tensor difference = gradient - previous_, step = direction_ * length_;
  double curvature = inner(difference, step);
  if (!(curvature > 1e-10)) return;
  if (static_cast<int64_t>(steps_.size()) == options_.history) {
    steps_.erase(steps_.begin());
    differences_.erase(differences_.begin());
  }
  scale_ = curvature / inner(difference, difference);
  steps_.push_back(step);
  differences_.push_back(difference);
}

// The direction: minus the remembered inverse Hessian times the gradient.
void LBFGS::turn(const Tensor& gradient) {
  const size_t n = steps_.size();
  std::vector<double> weight(n), inverse(n);
  Tensor q = -gradient;
  for (size_t i = n; i-- > 0;) {
    inverse[i] = 1 / inner(differences_[i], steps_[i]);
    weight[i] = inner(steps_[i], q) * inverse[i];
    q.add_(differences_[i], -weight[i]);
  }
  q.mul_(scale_);
  for (size_t i = 0; i < n; ++i) q.add_(steps_[i], weight[i] - inner(differences_[i], q) * inverse[i]);
  direction_ = q;
}

namespace {

// The minimum of the cubic through two points with their slopes, within bounds.
double cubic_minimum(double t1, double loss1, double slope1, double t2, double loss2, double slope2, double low, double high) {
  if (t1 > t2) {
    std::swap(t1, t2);
    std::swap(loss1, loss2);
    std::swap(slope1, slope2);
  }
  double a = slope1 + slope2 - 3 * (loss1 - loss2) / (t1 - t2), b = a * a - slope1 * slope2;
  if (b < 0) return (low + high) / 2;
  b = std::sqrt(b);
  return std::clamp(t2 - (t2 - t1) * ((slope2 + b - a) / (slope2 - slope1 + 2 * b)), low, high);
}

}  // namespace

LBFGS::Point LBFGS::search(double t, Point start, const Closure& closure) {
  constexpr double enough = 1e-4, flat = 0.9;  // the Wolfe conditions' constants
  constexpr int most = 25;
  std::vector<Tensor> from;
  for (auto& p : params_) from.push_back(p.detach().clone());
  auto falls = [&](const Point& p) { return p.loss <= start.loss + enough * p.t * start.slope; };
  auto is_flat = [&](const Point& p) { return std::abs(p.slope) <= -flat * start.slope; };
  auto finish = [&](Point p) {
    for (size_t i = 0; i < params_.size(); ++i) params_[i].detach().copy_(from[i]);
    move(p.t);
    return p;
  };

  // Farther and farther, until a good length lies between two points.
  Point before = start, now = at(t, from, closure);
  int tries = 0;
  for (; tries < most; ++tries) {
    if (!falls(now) || (tries > 1 && now.loss >= before.loss)) break;
    if (is_flat(now)) return finish(now);
    if (now.slope >= 0) break;
    t = cubic_minimum(before.t, before.loss, before.slope, now.t, now.loss, now.slope, now.t + 0.01 * (now.t - before.t), now.t * 10);
    before = std::move(now);
    now = at(t, from, closure);
  }
  // Closer and closer: `low` is the better end.
  Point low = tries == most ? start : before, high = now;
  if (low.loss > high.loss) std::swap(low, high);
  double size = largest(direction_);
  for (bool stuck = false; tries < most && std::abs(high.t - low.t) * size >= options_.tolerance_change; ++tries) {
    double left = std::min(low.t, high.t), right = std::max(low.t, high.t), margin = 0.1 * (right - left);
    t = cubic_minimum(low.t, low.loss, low.slope, high.t, high.loss, high.slope, left, right);
    if (std::min(right - t, t - left) < margin) {  // at an end: stay off it the second time
      bool pushed = stuck || t >= right || t <= left;
      if (pushed) t = std::abs(t - right) < std::abs(t - left) ? right - margin : left + margin;
      stuck = !pushed;
    } else {
      stuck = false;
    }
    Point p = at(t, from, closure);
    if (!falls(p) || p.loss >= low.loss) {
      high = std::move(p);
      continue;
    }
    if (is_flat(p)) return finish(p);
    if (p.slope * (high.t - low.t) >= 0) high = low;
    low = std::move(p);
  }
  return finish(low);
}

double LBFGS::step(const Closure& closure) {
  NoGrad off;
  const int64_t evaluated = evaluations_;
  const double before = evaluate(closure);
  Point now{.loss = before};
  now.gradient = gradient();
  const bool none = std::none_of(params_.begin(), params_.end(), [](const Tensor& p) { return p.grad().defined(); });
  if (none && !std::exchange(warned_, true))
    warn("LBFGS: step() changes nothing: the closure left no gradient; it calls zero_grad(), then backward() on a loss of the parameters");
  if (largest(now.gradient) <= options_.tolerance_grad) return before;
  for (int64_t i = 1;; ++i) {
    if (iterations_++ == 0) {
      direction_ = -now.gradient;
    } else {
      remember(now.gradient);
      turn(now.gradient);
    }
    previous_ = now.gradient;
    length_ = iterations_ == 1 ? std::min(1.0, 1 / sum(abs(now.gradient)).item()) * options_.lr : options_.lr;
    now.t = 0;
    now.slope = inner(now.gradient, direction_);
    if (now.slope > -options_.tolerance_change) break;  // no way down

    const double loss = now.loss;
    if (options_.line_search) {
      now = search(length_, now, closure);
      length_ = now.t;
    } else {
      move(length_);
      if (i == options_.max_iterations) break;  // the next call evaluates there
      now.loss = evaluate(closure);
      now.gradient = gradient();
    }
    if (i == options_.max_iterations || evaluations_ - evaluated >= options_.max_evaluations || largest(now.gradient) <= options_.tolerance_grad ||
        largest(direction_) * std::abs(length_) <= options_.tolerance_change || std::abs(now.loss - loss) < options_.tolerance_change)
      break;
  }
  return before;
}

StateDict LBFGS::state_dict() const {
  StateDict s;
  s.add("iterations", full({}, iterations_, {.dtype = DType::i64}));
  s.add("evaluations", full({}, evaluations_, {.dtype = DType::i64}));
  s.add("length", full({}, length_, {.dtype = DType::f64}));
  s.add("scale", full({}, scale_, {.dtype = DType::f64}));
  if (direction_.defined()) {
    s.add("direction", direction_);
    s.add("gradient", previous_);
  }
  for (size_t i = 0; i < steps_.size(); ++i) {
    s.add(text::cat("step.", i), steps_[i]);
    s.add(text::cat("difference.", i), differences_[i]);
  }
  return s;
}

void LBFGS::load_state_dict(const StateDict& state) {
  NoGrad off;
  const Tensor like = gradient();
  auto vector = [&](const std::string& name) {
    const Tensor& t = state.at(name);
    HT_CHECK(t.shape() == like.shape(), "LBFGS: state '", name, "' is ", t.meta(), ", the parameters have ", like.numel(), " elements");
    return t.to(like.options()).clone();
  };
  LBFGS loaded(params_, options_);
  loaded.iterations_ = state.at("iterations").item<int64_t>();
  loaded.evaluations_ = state.at("evaluations").item<int64_t>();
  loaded.length_ = state.at("length").item();
  loaded.scale_ = state.at("scale").item();
  if (loaded.iterations_ > 0) {
    loaded.direction_ = vector("direction");
    loaded.previous_ = vector("gradient");
  }
  for (size_t i = 0; state.find(text::cat("step.", i)); ++i) {
    loaded.steps_.push_back(vector(text::cat("step.", i)));
    loaded.differences_.push_back(vector(text::cat("difference.", i)));
  }
  *this = std::move(loaded);
}

}  // namespace halftone::optim
