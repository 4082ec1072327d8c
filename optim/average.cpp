// Averages as updates of the same kind as an optimizer's: multi-tensor, selected by found_inf.
#include "halftone/optim/average.h"

#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"

namespace halftone::optim {

struct Averages {
  std::vector<Tensor> params, values;
  Tensor count;  // real steps, f64 []
};

namespace {

std::shared_ptr<Averages> start(const Optimizer& opt) {
  NoGrad off;
  auto a = std::make_shared<Averages>();
  a->params = opt.parameters();
  for (auto& p : a->params) a->values.push_back(p.detach().to(p.dtype() == DType::f64 ? DType::f64 : DType::f32).clone());
  a->count = zeros({}, {.dtype = DType::f64, .device = a->params[0].device()});
  return a;
}

void follow(Averages& a) {
  for (size_t i = 0; i < a.params.size(); ++i)
    if (a.values[i].device() != a.params[i].device()) a.values[i] = a.values[i].to(a.params[i].device());
  if (a.count.device() != a.params[0].device()) a.count = a.count.to(a.params[0].device());
}

// Each of `to` goes `share` (f64 []) of the way to its fellow in `from`, unless `skip` (f32 []) is not 0. `copies`: 16-bit copies of `to`.
void approach(const std::vector<Tensor>& to, const std::vector<Tensor>& from, const Tensor& share, const Tensor& skip) {
  size_t n = to.size();
  Tensors in{share, zeros({}, {.dtype = DType::i64, .device = share.device()}), {}, skip, {}};
  in.resize(update::lists_at + 3 * n);
  for (size_t i = 0; i < n; ++i) {
    in[update::lists_at + i] = to[i].detach();
    in[update::lists_at + n + i] = from[i].detach();
  }
  call_all(update::def<update::Average>, std::move(in), Attrs::of(update::Given<update::Average>{static_cast<int>(n), {}}));
}

StateDict state_of(const Averages& a) {
  StateDict s;
  s.add("count", a.count);
  for (size_t i = 0; i < a.values.size(); ++i) s.add(std::to_string(i), a.values[i]);
  return s;
}
void load(Averages& a, const StateDict& state, const char* who) {
  NoGrad off;
  for (size_t i = 0; i < a.values.size(); ++i)
    HT_CHECK(state.at(std::to_string(i)).shape() == a.values[i].shape(), who, ": state '", i, "' is ", state.at(std::to_string(i)).meta(), ", the parameter is ",
             a.values[i].meta());
  HT_CHECK(state.at("count").numel() == 1, who, ": state 'count' is ", state.at("count").meta(), ", expected one number");
  for (size_t i = 0; i < a.values.size(); ++i) a.values[i].copy_(state.at(std::to_string(i)));
  a.count.copy_(state.at("count"));
}

}  // namespace

EMA::EMA(Optimizer& opt, EMAOptions o) : state_(start(opt)) {
  HT_CHECK(o.decay >= 0 && o.decay < 1, "EMA: expected decay in [0, 1), got ", o.decay);
  opt.after_step([weak = std::weak_ptr(state_), o](size_t group, const Tensor&, const Tensor& found_inf) {
    auto a = weak.lock();
    if (!a || group > 0) return a != nullptr;
    follow(*a);
    Tensor share = full({}, 1 - o.decay, {.dtype = DType::f64, .device = a->count.device()});
    if (o.warmup) {
      a->count.add_(found_inf.defined() ? eq(found_inf, 0) : ones_like(a->count));
      share = maximum(share, 1 - (a->count + 1) / (a->count + 10));
    }
    approach(a->values, a->params, share, found_inf);
    return true;
  });
}
const std::vector<Tensor>& EMA::averages() const { return state_->values; }
void EMA::swap() {
  NoGrad off;
  follow(*state_);
  for (size_t i = 0; i < state_->params.size(); ++i) {
    Tensor p = state_->params[i].detach(), saved = p.clone();
    p.copy_(state_->values[i]);
    state_->values[i].copy_(saved);
  }
}
StateDict EMA::state_dict() const { return state_of(*state_); }
void EMA::load_state_dict(const StateDict& state) { load(*state_, state, "EMA"); }

Lookahead::Lookahead(Optimizer& opt, LookaheadOptions o) : state_(start(opt)) {
  HT_CHECK(o.k > 0, "Lookahead: expected k above 0, got ", o.k);
  HT_CHECK(o.alpha > 0 && o.alpha <= 1, "Lookahead: expected alpha in (0, 1], got ", o.alpha);
  opt.after_step([weak = std::weak_ptr(state_), o](size_t group, const Tensor&, const Tensor& found_inf) {
    auto a = weak.lock();
    if (!a || group > 0) return a != nullptr;
    follow(*a);
    Tensor stepped = found_inf.defined() ? eq(found_inf, 0) : ones_like(a->count);
    a->count.add_(stepped);
    a->count.copy_(where(gt(a->count, static_cast<double>(o.k)), 1, a->count));  // counts 1 to k
    Tensor skip = 1 - eq(a->count, static_cast<double>(o.k)) * stepped.to(DType::f32);
    TensorOptions number{.dtype = DType::f64, .device = a->count.device()};
    approach(a->values, a->params, full({}, o.alpha, number), skip);
    approach(a->params, a->values, full({}, 1, number), skip);
    return true;
  });
}
const std::vector<Tensor>& Lookahead::slow_weights() const { return state_->values; }
StateDict Lookahead::state_dict() const { return state_of(*state_); }
void Lookahead::load_state_dict(const StateDict& state) { load(*state_, state, "Lookahead"); }

}  // namespace halftone::optim
