// Derivatives of every operator: against differences, fused against composed rules, and one input at a time. What a rule
// may read is enforced by the tape: a rule that reads more than the operator saves throws here.
#include "halftone/tests/operators.h"

using namespace halftone;
using namespace halftone::tests;

namespace {

bool differentiated(const SampleInput& in, const Tensor& x) { return in.present && in.differentiable && is_floating(x.dtype()); }

// Inputs of which the differentiable ones require a gradient, and their places.
struct Point {
  Tensors in;
  std::vector<size_t> at;
  Point(const Sample& s, DType t) : in(make_inputs(s, t)) {
    for (size_t i = 0; i < in.size(); ++i) {
      if (!differentiated(s.in[i], in[i])) continue;
      in[i].requires_grad_();
      at.push_back(i);
    }
  }
  std::vector<Tensor> leaves() const {
    std::vector<Tensor> v;
    for (size_t i : at) v.push_back(in[i]);
    return v;
  }
  int64_t elements() const {
    int64_t n = 0;
    for (size_t i : at) n += in[i].numel();
    return n;
  }
};

std::vector<Tensor> outputs(const OpDef& op, const Tensors& in, const Attrs& attrs) {
  Tensors y = call_all(op, in, attrs);
  return {y.begin(), y.end()};
}

Tensor direction(const Tensor& x, uint64_t seed, uint64_t stream) {
  std::vector<double> v(static_cast<size_t>(x.numel()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = philox(seed, i, stream).v[0] * 0x1p-31 - 1;
  return from_values(v, x.shape(), DType::f64);
}

// x with its dimensions in another order in memory and gaps between elements; so is, on the way back, its gradient.
Tensor turned(const Tensor& x) {
  Shape order;
  for (int d = x.rank(); d-- > 0;) order.push_back(d);
  Tensor y = x.permute(order);
  return stack({y, y}, -1).select(-1, 0).permute(order);
}

bool takes_strides(const OpDef& op) { return &op != &op::view && &op != &op::transfer; }

// A small function to check, and where. Many elements are checked along random lines through them.
struct Check {
  GradcheckFunction f;
  std::vector<Tensor> x;
};
Check check_of(const OpDef& op, const Sample& s, bool strided) {
  Point p(s, DType::f64);
  auto called = [&op, s, p, strided](Tensors in) {
    if (!strided) return outputs(op, in, s.attrs);
    for (size_t i : p.at) in[i] = turned(in[i]);
    auto y = outputs(op, in, s.attrs);
    for (auto& o : y) if (is_floating(o.dtype())) o = turned(o);
    return y;
  };
  if (p.elements() <= 40)
    return {[called, p](const std::vector<Tensor>& x) {
              Tensors in = p.in;
              for (size_t k = 0; k < x.size(); ++k) in[p.at[k]] = x[k];
              return called(in);
            },
            p.leaves()};
  constexpr size_t lines = 3;
  std::vector<Tensor> t;
  for (size_t k = 0; k < lines; ++k) t.push_back(zeros({}, {.dtype = DType::f64, .requires_grad = true}));
  return {[called, p](const std::vector<Tensor>& along) {
            Tensors in = p.in;
            for (size_t i : p.at) {
              Tensor x = p.in[i].detach();
              for (size_t k = 0; k < along.size(); ++k) x = x + along[k] * direction(p.in[i], k, i);
              in[i] = x;
            }
            std::vector<Tensor> y;
            for (auto& o : called(in))
              for (uint64_t k = 0; k < 2; ++k)
                if (is_floating(o.dtype())) y.push_back(sum(o * direction(o, 100 + k, 0)));
            return y;
          },
          t};
}

double largest_in(const Tensor& t) {
  double m = 0;
  for (double v : t.to_vector<double>()) m = std::max(m, std::abs(v));
  return m;
}

}  // namespace

TEST_CASE("the first derivative of every operator agrees with differences") {
  Shares cases("gradchecks");
  each_sample([&](const OpDef& op, const Sample& s, size_t k) {
    if (!op.backward) return;
    for (bool strided : {false, true}) {
      if (strided && !takes_strides(op)) continue;
      Check c = check_of(op, s, strided);
      INFO(describe(op, s, k) << (strided ? ", strided" : ""));
      CHECK(gradcheck_report(c.f, c.x, {.rtol = 1e-5, .atol = 1e-6}) == "");
      cases.count(op.name);
    }
  });
  cases.check();
}

TEST_CASE("the second derivative of every operator agrees with differences") {
  Shares cases("gradgradchecks");
  each_sample([&](const OpDef& op, const Sample& s, size_t k) {
    if (!op.backward) return;
    INFO(describe(op, s, k));
    if (op.order < 2) {  // says so
      Point p(s, DType::f64);
      CHECK_THROWS_WITH(grad({weighed(outputs(op, p.in, s.attrs))}, p.leaves(), {.create_graph = true}), Catch::Contains("can be differentiated once"));
      return;
    }
    for (bool strided : {false, true}) {
      if (strided && !takes_strides(op)) continue;
      Check c = check_of(op, s, strided);
      INFO((strided ? "strided" : "contiguous"));
      CHECK(gradgradcheck_report(c.f, c.x, {.rtol = 1e-5, .atol = 1e-6}) == "");
      cases.count(op.name);
    }
  });
  cases.check();
}

TEST_CASE("the fused gradient equals the composed one") {
  each_sample([](const OpDef& op, const Sample& s, size_t k) {
    if (!op.fused_backward) return;
    for (DType t : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
      if (!supports(op, s, t)) continue;
      Point p(s, t);
      auto loss = [&] { return weighed(outputs(op, p.in, s.attrs)); };
      auto fused = grad({loss()}, p.leaves(), {.allow_unused = true}), composed = grad({loss()}, p.leaves(), {.create_graph = true, .allow_unused = true});
      double unit = t == DType::f64 ? 0x1p-53 : t == DType::f32 ? 0x1p-24 : t == DType::f16 ? 0x1p-11 : 0x1p-8;
      for (size_t i = 0; i < fused.size(); ++i) {
        INFO(describe(op, s, k) << ", " << str(t) << ", input " << i);
        REQUIRE(fused[i].defined() == composed[i].defined());
        if (!fused[i].defined()) continue;
        CHECK(largest_in(fused[i].to(DType::f64) - composed[i].detach().to(DType::f64)) <= 32 * unit * std::max(1.0, largest_in(composed[i])));
      }
    }
  });
}

TEST_CASE("the gradient of one input has the bits that it has among all") {
  each_sample([](const OpDef& op, const Sample& s, size_t k) {
    if (!op.backward) return;
    for (DType t : {DType::f64, DType::bf16}) {
      if (!supports(op, s, t)) continue;
      for (bool create_graph : {false, true}) {
        if (create_graph && op.order < 2) continue;
        Point p(s, t);
        auto loss = [&] { return weighed(outputs(op, p.in, s.attrs)); };
        auto all = grad({loss()}, p.leaves(), {.create_graph = create_graph, .allow_unused = true});
        for (size_t i = 0; i < p.at.size(); ++i) {
          INFO(describe(op, s, k) << ", " << str(t) << ", input " << i);
          auto one = grad({loss()}, {p.leaves()[i]}, {.create_graph = create_graph, .allow_unused = true})[0];
          CHECK(same_bits(one, all[i]));
          if (one.defined()) CHECK((one.shape() == p.leaves()[i].shape() && one.dtype() == p.leaves()[i].dtype()));
        }
      }
    }
  });
}

TEST_CASE("an operator that is not differentiable gives results without history") {
  each_sample([](const OpDef& op, const Sample& s, size_t) {
    if (op.backward || op.writes) return;
    Point p(s, DType::f32);
    if (!supports(op, s, DType::f32)) return;
    for (auto& y : outputs(op, p.in, s.attrs)) CHECK(!y.requires_grad());
  });
}
