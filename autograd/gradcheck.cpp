// Central differences against the tape.
#include "halftone/autograd/gradcheck.h"

#include <cmath>

#include "halftone/core/random.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/reduce.h"

namespace halftone {
namespace {

// Numbers in [-1, 1] that depend on the seed and the place only; away from 0, so that no output goes unseen.
Tensor cotangent(const Meta& m, uint64_t seed, uint64_t stream) {
  std::vector<double> v(static_cast<size_t>(m.shape.numel()));
  for (size_t i = 0; i < v.size(); ++i) {
    double u = philox(seed, i, stream).v[0] * 0x1p-32;
    v[i] = u < 0.5 ? -1 + u : u;
  }
  return tensor(v).reshape(m.shape).to({.dtype = m.dtype, .device = m.device});
}

// The outputs weighed into one number.
Tensor weigh(const std::vector<Tensor>& y, uint64_t seed) {
  Tensor total;
  for (size_t i = 0; i < y.size(); ++i) {
    if (!y[i].defined() || !is_floating(y[i].dtype())) continue;
    Tensor part = sum(y[i] * cotangent(y[i].meta(), seed, i));
    total = total.defined() ? total + part : part;
  }
  HT_CHECK(total.defined(), "gradcheck: the function gave no floating output");
  return total;
}

void set_element(const Tensor& x, int64_t i, double v) {
  NoGrad off;
  Tensor at = x.detach();
  for (int d = 0; d < x.rank(); ++d) {
    int64_t inner = 1;
    for (int k = d + 1; k < x.rank(); ++k) inner *= x.size(k);
    at = at.select(0, i / inner % x.size(d));
  }
  at.fill_(v);
}

std::string compare(const std::function<Tensor()>& value, const std::vector<Tensor>& x, const std::vector<Tensor>& wrt, const std::vector<Tensor>& grads,
                    const GradcheckOptions& o, const char* what) {
  for (size_t k = 0; k < wrt.size(); ++k) {
    std::vector<double> values = wrt[k].to_vector<double>(), analytic;
    analytic = grads[k].defined() ? grads[k].to_vector<double>() : std::vector<double>(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      auto at = [&](double v) {
        set_element(wrt[k], static_cast<int64_t>(i), v);
        return value().item();
      };
      double h = o.step * std::max(1.0, std::abs(values[i])), numeric = (at(values[i] + h) - at(values[i] - h)) / (2 * h);
      set_element(wrt[k], static_cast<int64_t>(i), values[i]);
      if (std::abs(numeric - analytic[i]) <= o.atol + o.rtol * std::max(std::abs(numeric), std::abs(analytic[i]))) continue;
      size_t input = 0;
      while (input < x.size() && x[input].body() != wrt[k].body()) ++input;
      return text::cat(what, ": element ", i, " of input ", input, " ", wrt[k].meta(), ": the tape gives ", analytic[i], ", differences give ", numeric);
    }
  }
  return {};
}

std::vector<Tensor> differentiable(const std::vector<Tensor>& x) {
  std::vector<Tensor> wrt;
  for (auto& t : x) {
    if (!t.requires_grad()) continue;
    HT_CHECK(t.dtype() == DType::f64 && t.is_leaf(), "gradcheck: inputs that require a gradient must be f64 leaves, got ", t.meta());
    wrt.push_back(t);
  }
  HT_CHECK(!wrt.empty(), "gradcheck: no input requires a gradient");
  return wrt;
}

}  // namespace

std::string gradcheck_report(const GradcheckFunction& f, const std::vector<Tensor>& x, GradcheckOptions o) {
  std::vector<Tensor> wrt = differentiable(x);
  Tensor y = weigh(f(x), o.seed);
  if (!y.requires_grad()) return "gradcheck: the output does not depend on any input";
  auto grads = grad({y}, wrt, {.allow_unused = true});
  return compare([&] { NoGrad off; return weigh(f(x), o.seed); }, x, wrt, grads, o, "gradcheck");
}

std::string gradgradcheck_report(const GradcheckFunction& f, const std::vector<Tensor>& x, GradcheckOptions o) {
  std::vector<Tensor> wrt = differentiable(x);
  // The second derivative is the first derivative of the weighed gradient; cotangents of f's outputs are inputs of it too.
  std::vector<Tensor> y = f(x), weights;
  for (size_t i = 0; i < y.size(); ++i)
    if (y[i].defined() && y[i].requires_grad()) weights.push_back(cotangent(y[i].meta(), o.seed, i).requires_grad_());
  if (weights.empty()) return "gradgradcheck: the output does not depend on any input";
  auto first = [&] {
    std::vector<Tensor> out = f(x);
    Tensor total;
    size_t w = 0;
    for (auto& t : out) {
      if (!t.defined() || !t.requires_grad()) continue;
      Tensor part = sum(t * weights[w++]);
      total = total.defined() ? total + part : part;
    }
    std::vector<Tensor> g;
    for (auto& t : grad({total}, wrt, {.create_graph = true, .retain_graph = true, .allow_unused = true}))
      if (t.defined()) g.push_back(t);
    return g.empty() ? zeros({}, {.dtype = DType::f64}) : weigh(g, o.seed + 1);
  };
  std::vector<Tensor> all = wrt;
  all.insert(all.end(), weights.begin(), weights.end());
  Tensor value = first();
  std::vector<Tensor> grads(all.size());
  if (value.requires_grad()) grads = grad({value}, all, {.allow_unused = true});
  return compare(first, x, all, grads, o, "gradgradcheck");
}

void gradcheck(const GradcheckFunction& f, const std::vector<Tensor>& x, GradcheckOptions o) {
  std::string report = gradcheck_report(f, x, o);
  if (!report.empty()) throw Error(report);
}
void gradgradcheck(const GradcheckFunction& f, const std::vector<Tensor>& x, GradcheckOptions o) {
  std::string report = gradgradcheck_report(f, x, o);
  if (!report.empty()) throw Error(report);
}

}  // namespace halftone
