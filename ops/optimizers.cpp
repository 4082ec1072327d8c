// Optimizers on the CPU, and what a call of any of them is checked for.
#include "halftone/ops/optimizers.h"

#include <algorithm>

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/iterate.h"

namespace halftone {
namespace update {

// Parameters, states and 16-bit copies are written element by element: contiguous, and alike.
Metas infer(const Call& c, int n, size_t states) {
  const char* op = c.op->name;
  size_t lists = 3 + states;
  HT_CHECK(n > 0 && c.in.size() == lists_at + static_cast<size_t>(n) * lists, op, ": expected ", lists_at, " tensors and ", lists, " lists of ", n, ", got ",
           c.in.size(), " tensors");
  for (int i = 0; i < n; ++i) {
    const Meta& p = item(c, n, 0, i).meta();
    HT_CHECK(is_floating(p.dtype) && p.contiguous(), op, ": parameter ", i, " ", p, " must be contiguous and floating, its strides are ", p.strides);
    for (size_t k = 1; k < lists; ++k) {
      const Tensor& t = item(c, n, k, i);
      if (!t.defined()) continue;
      bool state = k > 1 && k + 1 < lists;
      DType wide = p.dtype == DType::f64 ? DType::f64 : DType::f32;
      HT_CHECK(t.shape() == p.shape && is_floating(t.dtype()) && (k == 1 || t.is_contiguous()) && (!state || t.dtype() == wide), op, ": ",
               k == 1 ? "gradient " : state ? "state " : "16-bit copy ", i, " is ", t.meta(), ", the parameter is ", p);
    }
  }
  return {};
}

std::vector<Sample> samples(size_t states, bool memory, std::span<const Attrs> settings) {
  std::vector<Sample> all;
  for (auto& a : settings)
    for (auto& shape : {Shape{1}, Shape{33}, Shape{5, 7}, Shape{1030}}) {
      Sample s;
      s.in = {{.shape = {}, .low = 0.1, .high = 0.2, .dtype = DType::f64, .differentiable = false},
              {.shape = {}, .low = 0, .high = 3, .dtype = DType::i64, .differentiable = false},
              {.shape = {}, .low = 0.5, .high = 1, .dtype = DType::f32, .differentiable = false},
              {.shape = {}, .low = 0, .high = 1e-9, .dtype = DType::f32, .differentiable = false, .present = false},
              {.shape = {}, .low = 0.5, .high = 0.9, .dtype = DType::f64, .differentiable = false, .present = memory}};
      constexpr int n = 2;
      for (size_t k = 0; k < 3 + states; ++k)
        for (int i = 0; i < n; ++i)
          // A third state is an average beside one of squares: small enough for a variance.
          s.in.push_back({.shape = i == 0 ? shape : Shape{3}, .low = k < 2 ? -2.0 : k == 4 ? 0.0 : 0.5, .high = k == 4 ? 0.3 : 2.0, .differentiable = false,
                          .present = k < 2 + states, .wide = k >= 2});
      s.attrs = a;
      all.push_back(s);
    }
  return all;
}

}  // namespace update

namespace {

using namespace update;

// One parameter: element by element in its accumulation type.
template <class Op, class P, class G>
void update_one(const Given<Op>& a, const Tensor& parameter, const Tensor& gradient, const Tensor* states, double lr, double grad_scale, int64_t step,
                double memory) {
  using C = accumulate_t<P>;
  P* p = parameter.data<P>();
  const G* g = gradient.data<G>();
  constexpr size_t n = Op::states.size();
  std::array<C*, n> s{};
  for (size_t k = 0; k < n; ++k) s[k] = states[k].defined() ? states[k].data<C>() : nullptr;
  auto now = a.op.template now<C>(lr, step, memory);
  C scale = static_cast<C>(grad_scale);
  // With the first K states there and no others, nothing is asked for in the loop: it runs in vectors.
  auto run = [&]<size_t K>(std::integral_constant<size_t, K>) {
    parallel_for(parameter.numel(), parallel_grain, [&](int64_t begin, int64_t end) __attribute__((flatten)) {
      auto op = a.op;
      auto same = now;
      std::array<C*, n> to = s;
      for (int64_t i = begin; i < end; ++i) {
        std::array<C, std::max<size_t>(n, 1)> state{};
        for (size_t k = 0; k < K; ++k) state[k] = to[k][i];
        p[i] = P(op(C(p[i]), C(compute_t<G>(g[i])) * scale, state.data(), same));
        for (size_t k = 0; k < K; ++k) to[k][i] = state[k];
      }
    });
  };
  if constexpr (std::same_as<P, C>) {
    size_t there = static_cast<size_t>(std::find(s.begin(), s.end(), nullptr) - s.begin());
    if (there == n) return run(std::integral_constant<size_t, n>());
    if constexpr (n > 0)
      if (there + 1 == n) return run(std::integral_constant<size_t, n - 1>());
  }
  parallel_for(parameter.numel(), parallel_grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::array<C, std::max<size_t>(n, 1)> state{};
      for (size_t k = 0; k < n; ++k) if (s[k]) state[k] = s[k][i];
      C value = a.op(C(p[i]), C(compute_t<G>(g[i])) * scale, state.data(), now);
      p[i] = round_parameter<P>(value, a.rounding, step, i);
      for (size_t k = 0; k < n; ++k) if (s[k]) s[k][i] = state[k];
    }
  });
}

template <class Op> void run_optimizer(const Call& c, std::span<Tensor>) {
  auto a = c.as<Given<Op>>();
  if (c.has(found_inf_at) && *c.in[found_inf_at].data<float>() != 0) return;
  double lr = *c.in[lr_at].data<double>(), grad_scale = c.has(grad_scale_at) ? *c.in[grad_scale_at].data<float>() : 1;
  int64_t& step = *c.in[step_at].data<int64_t>();
  double memory = c.has(memory_at) ? *c.in[memory_at].data<double>() : 0;
  constexpr size_t n = Op::states.size();
  for (int i = 0; i < a.n; ++i) {
    const Tensor &p = item(c, a.n, 0, i), &copy = item(c, a.n, 2 + n, i);
    Tensor g = item(c, a.n, 1, i).contiguous();
    std::array<Tensor, n> states;
    for (size_t k = 0; k < n; ++k) states[k] = item(c, a.n, 2 + k, i);
    visit<floating_types>(p.dtype(), [&]<class P>(Type<P>) {
      visit<floating_types>(g.dtype(), [&]<class G>(Type<G>) { update_one<Op, P, G>(a, p, g, states.data(), lr, grad_scale, step, memory); });
    });
    if (copy.defined()) call_all(op::copy, {copy, p});
  }
  if constexpr (has_memory<Op>) *c.in[memory_at].data<double>() = a.op.remember(memory, step);
  ++step;
}

}  // namespace

void fill_cpu_optimizers() {
  elementwise::each(update::All{}, []<class Op>(Type<Op>) { set_kernel(update::def<Op>, DeviceType::cpu, run_optimizer<Op>); });
}

}  // namespace halftone
