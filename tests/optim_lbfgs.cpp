// L-BFGS: twenty calls of step in f64 are PyTorch's; it solves what first-order methods do not; its state goes round.
#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;
using Catch::Contains;

namespace {

constexpr int64_t elements = 12;

Tensor start() {
  std::vector<double> v;
  for (int64_t k = 0; k < elements; ++k) v.push_back(-1.5 + 3.5 * static_cast<double>(k) / (elements - 1));
  return tensor(v).requires_grad_();
}
// As in tests/golden/optimizers.py; p may be several tensors.
Tensor bowl(const Tensor& p) {
  Tensor scale = arange(elements).to(p.dtype()) / 4 + .25;
  Tensor head = p.slice(0, 0, elements - 1), tail = p.slice(0, 1, elements);
  return (scale * log((exp(p) + exp(-p)) / 2)).sum() + square(tail - head).sum() / 2;
}
Tensor rosenbrock(const Tensor& p) {
  Tensor head = p.slice(0, 0, p.size(0) - 1), tail = p.slice(0, 1, p.size(0));
  return (100 * square(tail - square(head)) + square(1 - head)).sum();
}
optim::LBFGS::Closure minimise(Tensor (*f)(const Tensor&), const Tensor& p) {
  return [f, p] {
    p.zero_grad();
    Tensor loss = f(p);
    loss.backward();
    return loss;
  };
}

}  // namespace

TEST_CASE("twenty calls of step are PyTorch's") {
  StateDict golden = io::load(std::string(HALFTONE_SOURCE_DIR) + "/tests/golden/optimizers.safetensors");
  struct Case { const char* name; Tensor (*f)(const Tensor&); optim::LBFGSOptions options; };
  for (auto& [name, f, options] : {Case{"lbfgs", bowl, {.lr = .5, .max_iterations = 3, .history = 4}},
                                   Case{"lbfgs_wolfe", rosenbrock, {.max_iterations = 2, .history = 5, .line_search = true}}}) {
    INFO(name);
    auto expected = golden.at(name).to_vector<double>();
    Tensor p = start();
    optim::LBFGS opt({p}, options);
    for (size_t i = 0; i < 20; ++i) {
      opt.step(minimise(f, p));
      auto got = p.to_vector<double>();
      for (size_t k = 0; k < elements; ++k) REQUIRE(got[k] == Approx(expected[i * elements + k]).epsilon(1e-8).margin(1e-9));
    }
    tests::count("golden_cases");
  }
}

TEST_CASE("L-BFGS finds the end of Rosenbrock's valley; parameters in pieces, a parameter that takes no part") {
  Tensor whole = start();
  optim::LBFGS opt({whole}, {.max_iterations = 200, .line_search = true});
  double before = opt.step(minimise(rosenbrock, whole));
  CHECK(before == Approx(rosenbrock(start()).item()));
  CHECK(rosenbrock(whole.detach()).item() < 1e-8);
  CHECK(opt.iterations() <= 200);
  CHECK(opt.evaluations() >= opt.iterations());

  Tensor p = start(), a = p.detach().slice(0, 0, 5).clone().requires_grad_(), b = p.detach().slice(0, 5, 12).clone().view({7, 1}).requires_grad_(), unused = ones({3}).requires_grad_();
  optim::LBFGS one({p}, {.max_iterations = 8}), several({a, b, unused}, {.max_iterations = 8});
  one.step(minimise(bowl, p));
  several.step([&] {
    several.zero_grad();
    Tensor loss = bowl(cat({a, b.flatten()}));
    loss.backward();
    return loss;
  });
  auto got = a.to_vector<double>(), rest = b.to_vector<double>();
  got.insert(got.end(), rest.begin(), rest.end());
  CHECK(got == p.to_vector<double>());
  CHECK(unused.to_vector<double>() == std::vector<double>(3, 1));
}

TEST_CASE("L-BFGS goes on from its state, and stops where it says") {
  Tensor p = start(), q = start();
  optim::LBFGSOptions options{.lr = .5, .max_iterations = 3, .history = 4};
  optim::LBFGS opt({p}, options), other({q}, options);
  for (int i = 0; i < 3; ++i) opt.step(minimise(bowl, p));
  {
    NoGrad off;
    q.copy_(p);
  }
  other.load_state_dict(opt.state_dict().clone());  // two iterations a call: they come to three evaluations
  CHECK(other.iterations() == 6);
  for (int i = 0; i < 3; ++i) {
    opt.step(minimise(bowl, p));
    other.step(minimise(bowl, q));
  }
  CHECK(p.to_vector<double>() == q.to_vector<double>());
  StateDict bad;
  CHECK_THROWS_WITH(other.load_state_dict(bad), Contains("there is no entry 'iterations'"));
  bad = opt.state_dict().clone();
  *bad.find("step.0") = zeros({3});
  CHECK_THROWS_WITH(other.load_state_dict(bad), Contains("LBFGS: state 'step.0' is [3] (f32), the parameters have 12 elements"));
  CHECK(other.iterations() == 12);  // a state that does not fit changes nothing

  Tensor r = start();
  optim::LBFGS limited({r}, {.max_iterations = 50, .max_evaluations = 4});
  limited.step(minimise(bowl, r));
  CHECK(limited.evaluations() == 4);
  Tensor done = zeros({elements}, {.dtype = DType::f64}).requires_grad_();
  optim::LBFGS nothing_to_do({done});
  nothing_to_do.step(minimise(bowl, done));
  CHECK(nothing_to_do.evaluations() == 1);
}

TEST_CASE("errors of L-BFGS") {
  Tensor p = start();
  CHECK_THROWS_WITH(optim::LBFGS({}), Contains("LBFGS: there are no parameters to optimize"));
  CHECK_THROWS_WITH(optim::LBFGS({ones({2})}), Contains("LBFGS: parameter 0 is not a leaf that requires a gradient"));
  CHECK_THROWS_WITH(optim::LBFGS({ones({2}, {.dtype = DType::f16}).requires_grad_()}), Contains("LBFGS: parameter 0 is [2] (f16), expected f32 or f64"));
  CHECK_THROWS_WITH(optim::LBFGS({p}, {.history = 0}), Contains("LBFGS: expected max_iterations and history above 0, got 20 and 0"));
  optim::LBFGS opt({p});
  CHECK_THROWS_WITH(opt.step([&] { return p.detach(); }), Contains("LBFGS: the closure must return the loss, of one element, got [12] (f64)"));
  CHECK_THROWS_WITH(opt.step([&] { return full({}, NAN); }), Contains("LBFGS: the closure's loss is nan; a smaller lr or .line_search = true"));
  amp::GradScaler scaler;
  CHECK_THROWS_WITH(opt.step([&] {
    opt.zero_grad();
    Tensor loss = bowl(p);
    scaler.scale(loss).backward();
    return loss;
  }), Contains("LBFGS: the gradient of parameter 0 is scaled by a GradScaler"));
}
