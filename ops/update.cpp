// Multi-tensor updates on the CPU.
#include "halftone/ops/update.h"

#include <cmath>

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/iterate.h"

namespace halftone {
namespace {

using update::item;

// Contiguous tensors are what optimizers hold; anything else goes through a dense copy of the gradient.
Tensor dense(const Tensor& t) { return t.contiguous(); }

template <class T> struct Updated { T* p; const T* g; T* first; T* second; };

struct Common {
  double lr, grad_scale;
  int64_t step;
  bool skip;
  explicit Common(const Call& c)
      : lr(*c.in[update::lr_at].data<double>()),
        grad_scale(c.has(update::grad_scale_at) ? *c.in[update::grad_scale_at].data<float>() : 1),
        step(*c.in[update::step_at].data<int64_t>()),
        skip(c.has(update::found_inf_at) && *c.in[update::found_inf_at].data<float>() != 0) {}
};

// Runs element(p, g, state1, state2) over every parameter in its accumulation type, writing parameter, states and shadow.
template <class F> void update_all(const Call& c, int n, size_t states, const update::Rounding& rounding, const Common& common, F element) {
  if (common.skip) return;
  for (int i = 0; i < n; ++i) {
    const Tensor &p = item(c, n, 0, i), &shadow = item(c, n, 2 + states, i);
    Tensor g = dense(item(c, n, 1, i));
    visit<floating_types>(p.dtype(), [&]<class P>(Type<P>) {
      using C = accumulate_t<P>;
      visit<floating_types>(g.dtype(), [&]<class G>(Type<G>) {
        P* pp = p.data<P>();
        const G* gp = g.data<G>();
        C *s1 = states > 0 && item(c, n, 2, i).defined() ? item(c, n, 2, i).data<C>() : nullptr;
        C *s2 = states > 1 ? item(c, n, 3, i).data<C>() : nullptr;
        parallel_for(p.numel(), parallel_grain, [&](int64_t begin, int64_t end) {
          for (int64_t k = begin; k < end; ++k) {
            C none1 = 0, none2 = 0;
            C value = element(C(pp[k]), C(compute_t<G>(gp[k])) * static_cast<C>(common.grad_scale), s1 ? s1[k] : none1, s2 ? s2[k] : none2);
            pp[k] = update::round_parameter<P>(value, rounding, common.step, k);
          }
        });
        if (shadow.defined()) call_all(op::copy, {shadow, p});
      });
    });
  }
  *c.in[update::step_at].data<int64_t>() = common.step + 1;
}

void run_sgd(const Call& c, std::span<Tensor>) {
  auto a = c.as<update::SgdAttrs>();
  Common common(c);
  update_all(c, a.n, 1, a.rounding, common, [&]<class C>(C p, C g, C& momentum, C&) {
    return update::sgd_element(p, g, momentum, a, static_cast<C>(common.lr), common.step == 0);
  });
}

void run_adam(const Call& c, std::span<Tensor>) {
  auto a = c.as<update::AdamAttrs>();
  Common common(c);
  double t = static_cast<double>(common.step + 1), correction1 = 1 - std::pow(a.beta1, t), correction2 = 1 - std::pow(a.beta2, t);
  update_all(c, a.n, 2, a.rounding, common, [&]<class C>(C p, C g, C& m, C& v) {
    return update::adam_element(p, g, m, v, a, static_cast<C>(common.lr), static_cast<C>(correction1), static_cast<C>(correction2));
  });
}

// Writes g * inverse for each gradient, or only looks; raises found_inf at a value that is not finite.
template <bool multiply> void run_unscale(const Call& c, std::span<Tensor>) {
  constexpr size_t first = multiply ? 2 : 1;
  float* found_inf = c.in[multiply ? 1 : 0].data<float>();
  float inverse = multiply ? *c.in[0].data<float>() : 1;
  for (size_t i = first; i < c.in.size(); ++i) {
    const Tensor& g = c.in[i];
    std::atomic<bool> bad = false;
    visit<floating_types>(g.dtype(), [&]<class T>(Type<T>) {
      T* p = g.data<T>();
      Rows<1>(g.shape(), {g.strides()}).run([&](auto at, auto step, int64_t n) {
        bool finite = true;
        for (int64_t k = 0; k < n; ++k) {
          T& v = p[at[0] + k * step[0]];
          finite &= static_cast<bool>(std::isfinite(compute_t<T>(v)));
          if constexpr (multiply) v = T(compute_t<T>(v) * static_cast<compute_t<T>>(inverse));
        }
        if (!finite) bad = true;
      });
    });
    if (bad) *found_inf = 1;
  }
}

void run_scaler_update(const Call& c, std::span<Tensor>) {
  auto a = c.as<update::ScalerAttrs>();
  int64_t* outcomes = c.in[update::outcomes_at].data<int64_t>();
  int64_t n = c.in[update::outcomes_at].numel();
  bool overflow = false;
  for (size_t i = update::found_infs_at; i < c.in.size(); ++i) {
    float* found_inf = c.in[i].data<float>();
    update::Outcome o{a.first_slot + static_cast<int64_t>(i - update::found_infs_at), *found_inf != 0};
    outcomes[update::Outcome::place(o.number, n)] = o.packed();
    overflow |= *found_inf != 0;
    *found_inf = 0;
  }
  update::ScalerState s{*c.in[0].data<float>(), *c.in[1].data<float>(), *c.in[2].data<int64_t>(), *c.in[3].data<int64_t>(), *c.in[4].data<int64_t>()};
  s = update::next_scale(s, overflow, a);
  *c.in[0].data<float>() = s.scale;
  *c.in[1].data<float>() = s.inverse;
  *c.in[2].data<int64_t>() = s.streak;
  *c.in[3].data<int64_t>() = s.skipped;
  *c.in[4].data<int64_t>() = s.patience;
  outcomes[0] = s.streak;
}

void run_total_norm(const Call& c, std::span<Tensor> out) {
  double squares = 0;
  for (auto& t : c.in) {
    Tensor g = dense(t);
    visit<floating_types>(g.dtype(), [&]<class T>(Type<T>) {
      const T* p = g.data<T>();
      for (int64_t k = 0, n = g.numel(); k < n; ++k) squares += double(compute_t<T>(p[k])) * double(compute_t<T>(p[k]));
    });
  }
  visit<floating_types>(out[0].dtype(), [&]<class Y>(Type<Y>) { *out[0].data<Y>() = Y(std::sqrt(squares)); });
}

void run_scale_all(const Call& c, std::span<Tensor>) {
  double factor = c.in[0].dtype() == DType::f64 ? *c.in[0].data<double>() : *c.in[0].data<float>();
  for (size_t i = 1; i < c.in.size(); ++i)
    visit<floating_types>(c.in[i].dtype(), [&]<class T>(Type<T>) {
      using C = compute_t<T>;
      T* p = c.in[i].data<T>();
      Rows<1>(c.in[i].shape(), {c.in[i].strides()}).run([&](auto at, auto step, int64_t n) {
        for (int64_t k = 0; k < n; ++k) p[at[0] + k * step[0]] = T(C(p[at[0] + k * step[0]]) * static_cast<C>(factor));
      });
    });
}

Metas nothing(const Call&) { return {}; }

// Parameters, states and shadow copies are written element by element: contiguous, and alike.
template <class A> Metas infer_optimizer(const Call& c) {
  int n = c.as<A>().n;
  size_t lists = (c.in.size() - update::lists_at) / static_cast<size_t>(std::max(n, 1));
  for (int i = 0; i < n; ++i) {
    const Meta& p = item(c, n, 0, i).meta();
    HT_CHECK(is_floating(p.dtype) && p.contiguous(), c.op->name, ": parameter ", i, " ", p, " must be contiguous and floating, its strides are ", p.strides);
    for (size_t k = 1; k < lists; ++k) {
      const Tensor& t = item(c, n, k, i);
      if (!t.defined()) continue;
      bool state = k > 1 && k + 1 < lists;
      DType wide = p.dtype == DType::f64 ? DType::f64 : DType::f32;
      HT_CHECK(t.shape() == p.shape && is_floating(t.dtype()) && (k == 1 || t.is_contiguous()) && (!state || t.dtype() == wide), c.op->name, ": ",
               k == 1 ? "gradient " : state ? "state " : "shadow copy ", i, " is ", t.meta(), ", the parameter is ", p);
    }
  }
  return {};
}

// Everything from `step` on but the gradients and the two control tensors.
template <class A> bool optimizer_writes(const Call& c, size_t i) {
  if (i < update::lists_at) return i == update::step_at;
  return (i - update::lists_at) / static_cast<size_t>(c.as<A>().n) != 1;
}

template <class A> std::vector<Sample> optimizer_samples(size_t states, std::initializer_list<A> variants) {
  std::vector<Sample> all;
  for (A a : variants)
    for (auto& shape : {Shape{1}, Shape{33}, Shape{5, 7}, Shape{1030}}) {
      Sample s;
      s.in = {{.shape = {}, .low = 0.1, .high = 0.2, .dtype = DType::f64, .differentiable = false},
              {.shape = {}, .low = 0, .high = 3, .dtype = DType::i64, .differentiable = false},
              {.shape = {}, .low = 0.5, .high = 1, .dtype = DType::f32, .differentiable = false},
              {.shape = {}, .low = 0, .high = 1e-9, .dtype = DType::f32, .differentiable = false, .present = false}};
      a.n = 2;
      for (size_t k = 0; k < 2 + states + 1; ++k)
        for (int i = 0; i < a.n; ++i)
          s.in.push_back({.shape = i == 0 ? shape : Shape{3}, .low = k < 2 ? -2.0 : 0.0, .high = 2, .differentiable = false, .present = k < 2 + states,
                          .wide = k >= 2});
      s.attrs = Attrs::of(a);
      all.push_back(s);
    }
  return all;
}
std::vector<Sample> list_samples(size_t controls) {
  std::vector<Sample> all;
  for (auto& shape : {Shape{1}, Shape{7}, Shape{33}, Shape{257}, Shape{0}, Shape{5, 7}, Shape{2, 3, 4}, Shape{5000}}) {
    Sample s;
    for (size_t i = 0; i < controls; ++i) s.in.push_back({.shape = {}, .low = 0.5, .high = 0.9, .dtype = DType::f32, .differentiable = false});
    s.in.push_back({.shape = shape, .low = -2, .high = 2, .dtype = {}, .differentiable = false});
    s.in.push_back({.shape = {3}, .low = -2, .high = 2, .dtype = {}, .differentiable = false});
    all.push_back(s);
  }
  return all;
}

}  // namespace

namespace op {

constinit OpDef sgd = {
    .name = "sgd", .doc = "one step of stochastic gradient descent with momentum over many parameters", .cast = Cast::keep,
    .infer = infer_optimizer<update::SgdAttrs>, .writes = optimizer_writes<update::SgdAttrs>,
    .samples = [] {
      return optimizer_samples<update::SgdAttrs>(1, {{0, 0.9, 0, 0, false, false}, {0, 0.9, 0.1, 0.1, false, true}, {0, 0.9, 0, 0.01, true, false, {7, true}}});
    },
    .kernel = {run_sgd}};

constinit OpDef adam = {
    .name = "adam", .doc = "one step of Adam or AdamW over many parameters", .cast = Cast::keep,
    .infer = infer_optimizer<update::AdamAttrs>, .writes = optimizer_writes<update::AdamAttrs>,
    .samples = [] {
      return optimizer_samples<update::AdamAttrs>(2, {{0, 0.9, 0.999, 1e-8, 0, false, false}, {0, 0.8, 0.99, 1e-3, 0.1, false, true}, {0, 0.9, 0.999, 1e-8, 0.1, true, false}});
    },
    .kernel = {run_adam}};

constinit OpDef unscale = {
    .name = "unscale", .doc = "multiplies gradients by the inverse scale and flags any that is not finite", .cast = Cast::keep,
    .infer = nothing, .writes = [](const Call&, size_t i) { return i > 0; },
    .samples = [] { return list_samples(2); },
    .kernel = {run_unscale<true>}};

constinit OpDef check_finite = {
    .name = "check_finite", .doc = "flags gradients that are not finite", .cast = Cast::keep,
    .infer = nothing, .writes = writes_first,
    .samples = [] { return list_samples(1); },
    .kernel = {run_unscale<false>}};

constinit OpDef scaler_update = {
    .name = "scaler_update", .doc = "grows the loss scale after a run of clean steps, backs off after an overflow", .cast = Cast::keep,
    .infer = nothing, .writes = [](const Call&, size_t) { return true; },
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (double overflow : {0.0, 1.0})
        for (int64_t interval : {1, 2, 5, 2000}) {
          SampleInput number{.shape = {}, .low = 1, .high = 4, .dtype = DType::i64, .differentiable = false};
          Sample s{{{.shape = {}, .low = 2, .high = 9, .dtype = DType::f32, .differentiable = false},
                    {.shape = {}, .low = 0.1, .high = 1, .dtype = DType::f32, .differentiable = false}, number, number, number,
                    {.shape = {4}, .low = 0, .high = 1, .dtype = DType::i64, .differentiable = false},
                    {.shape = {}, .low = overflow, .high = overflow + 1e-9, .dtype = DType::f32, .differentiable = false}},
                   Attrs::of(update::ScalerAttrs{2, 0.5, 0, 0x1p127, interval, 3, 2})};
          all.push_back(s);
        }
      return all;
    },
    .kernel = {run_scaler_update}};

constinit OpDef total_norm = {
    .name = "total_norm", .doc = "the 2-norm of all elements of many tensors", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      DType t = DType::f32;
      for (auto& g : c.in) if (g.dtype() == DType::f64) t = DType::f64;
      return {Meta({}, t, c.in[0].device())};
    },
    .samples = [] { return list_samples(0); },
    .kernel = {run_total_norm}};

constinit OpDef scale_all = {
    .name = "scale_all", .doc = "multiplies many tensors by one number", .cast = Cast::keep,
    .infer = nothing, .writes = [](const Call&, size_t i) { return i > 0; },
    .samples = [] { return list_samples(1); },
    .kernel = {run_scale_all}};

}  // namespace op

std::span<OpDef* const> update_ops() {
  static constexpr OpDef* all[] = {&op::sgd, &op::adam, &op::unscale, &op::check_finite, &op::scaler_update, &op::total_norm, &op::scale_all};
  return all;
}

Tensor total_norm(const std::vector<Tensor>& tensors) {
  if (tensors.empty()) return zeros({});
  return call(op::total_norm, Tensors(std::span(tensors)));
}
void scale_all_(const std::vector<Tensor>& tensors, const Tensor& factor) {
  if (tensors.empty()) return;
  Tensors in{is_16bit_dtype(factor.dtype()) ? factor.to(DType::f32) : factor};
  in.append(tensors.data(), tensors.data() + tensors.size());
  call_all(op::scale_all, std::move(in));
}

}  // namespace halftone
