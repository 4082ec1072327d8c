// Multi-tensor updates on the CPU.
#include "halftone/ops/update.h"

#include <cmath>
#include <numeric>

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/iterate.h"

namespace halftone {
namespace {

// Contiguous tensors are what optimizers hold; anything else goes through a dense copy of the gradient.
Tensor dense(const Tensor& t) { return t.contiguous(); }

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

void run_clamp_all(const Call& c, std::span<Tensor>) {
  double limit = c.as<double>();
  for (auto& t : c.in)
    visit<floating_types>(t.dtype(), [&]<class T>(Type<T>) {
      using C = compute_t<T>;
      T* p = t.data<T>();
      C most = static_cast<C>(limit);
      Rows<1>(t.shape(), {t.strides()}).run([&](auto at, auto step, int64_t n) {
        for (int64_t k = 0; k < n; ++k) {
          C v = C(p[at[0] + k * step[0]]);
          p[at[0] + k * step[0]] = T(v > most ? most : v < -most ? -most : v);
        }
      });
    });
}

// Partial sums over pieces of one length, so that the bits do not depend on the number of threads.
double squares(const Tensor& t) {
  constexpr int64_t piece = 4096;
  Tensor x = dense(t);
  std::vector<double> sums(static_cast<size_t>((x.numel() + piece - 1) / piece));
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    const T* p = x.data<T>();
    parallel_for(x.numel(), piece, [&](int64_t begin, int64_t end) {
      double s = 0;
      for (int64_t k = begin; k < end; ++k) s += double(compute_t<T>(p[k])) * double(compute_t<T>(p[k]));
      sums[static_cast<size_t>(begin / piece)] = s;
    });
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

void run_trust_ratio(const Call& c, std::span<Tensor>) {
  const size_t n = c.in.size() / 2;
  for (size_t i = 0; i < n; ++i) {
    const Tensor& u = c.in[i];
    double ratio = std::sqrt(squares(c.in[n + i])) / std::sqrt(squares(u));
    if (!(ratio > 0) || std::isinf(ratio)) continue;
    visit<only(DType::f32) | only(DType::f64)>(u.dtype(), [&]<class C>(Type<C>) {
      C* p = u.data<C>();
      parallel_for(u.numel(), parallel_grain, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) p[k] *= static_cast<C>(ratio);
      });
    });
  }
}

Metas nothing(const Call&) { return {}; }

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

constinit OpDef clamp_all = {
    .name = "clamp_all", .doc = "limits the elements of many tensors to [-limit, limit]", .cast = Cast::keep,
    .infer = nothing, .writes = [](const Call&, size_t) { return true; },
    .dtypes = {floating_types, floating_types},
    .samples = [] {
      std::vector<Sample> all = list_samples(0);
      for (auto& s : all) s.attrs = Attrs::of(0.75);
      return all;
    },
    .kernel = {run_clamp_all}};

constinit OpDef trust_ratio = {
    .name = "trust_ratio", .doc = "gives directions of many parameters the parameters' norms", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const size_t n = c.in.size() / 2;
      HT_CHECK(n > 0 && c.in.size() % 2 == 0, "trust_ratio: expected as many directions as parameters, got ", c.in.size(), " tensors");
      for (size_t i = 0; i < n; ++i) {
        const Meta &u = c.in[i].meta(), &p = c.in[n + i].meta();
        HT_CHECK(is_floating(p.dtype) && u.dtype == (p.dtype == DType::f64 ? DType::f64 : DType::f32) && u.shape == p.shape && u.contiguous(),
                 "trust_ratio: direction ", i, " is ", u, " with strides ", u.strides, ", its parameter ", p,
                 "; expected it contiguous, of that shape, in f32 or, beside f64, in f64");
      }
      return {};
    },
    .writes = [](const Call& c, size_t i) { return i < c.in.size() / 2; },
    .dtypes = {only(DType::f32) | only(DType::f64), only(DType::f32) | only(DType::f64)},
    .samples = [] {
      std::vector<Sample> all;
      for (auto& shape : {Shape{1}, Shape{7}, Shape{33}, Shape{257}, Shape{0}, Shape{5, 7}, Shape{2, 3, 4}, Shape{9000}})
        all.push_back({{{.shape = shape, .differentiable = false}, {.shape = {3}, .differentiable = false},
                        {.shape = shape, .differentiable = false}, {.shape = {3}, .differentiable = false}}});
      return all;
    },
    .kernel = {run_trust_ratio}};

}  // namespace op

std::span<OpDef* const> update_ops() {
  static constexpr OpDef* all[] = {&op::unscale, &op::check_finite, &op::scaler_update, &op::total_norm, &op::scale_all, &op::clamp_all,
                                  &op::trust_ratio};
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
void clamp_all_(const std::vector<Tensor>& tensors, double limit) {
  if (!tensors.empty()) call_all(op::clamp_all, Tensors(std::span(tensors)), Attrs::of(limit));
}
void trust_ratio_(const std::vector<Tensor>& directions, const std::vector<Tensor>& parameters) {
  if (directions.empty() && parameters.empty()) return;
  Tensors in(std::span{directions});
  in.append(parameters.data(), parameters.data() + parameters.size());
  call_all(op::trust_ratio, std::move(in));
}

}  // namespace halftone
