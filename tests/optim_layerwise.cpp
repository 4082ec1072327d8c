// LAMB and Muon beyond their trajectories (optim_golden): what the ratio and the matrices are, several tensors in one step,
// 16-bit parameters, masters and copies of weights, skipped steps.
#include <cmath>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;

namespace {

Tensor parameter(const Shape& shape, DType t = DType::f32) { return randn(shape).to(t).requires_grad_(); }
void give(const Tensor& p, uint64_t seed) {
  manual_seed(seed);
  p.set_grad(randn(p.shape()).to(p.dtype()));
}
// The largest difference, in units of the largest element.
double apart(const Tensor& a, const Tensor& b) { return (amax(abs(a.detach().to(DType::f64) - b.detach().to(DType::f64))) / amax(abs(b.detach()))).item(); }

}  // namespace

TEST_CASE("trust ratios give directions their parameters' norms") {
  manual_seed(1);
  for (DType t : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
    std::vector<Tensor> p, u, before;
    for (auto& shape : {Shape{}, Shape{7}, Shape{0}, Shape{3, 5}, Shape{70, 130}}) {
      p.push_back(randn(shape).to(t) * 3);
      u.push_back(randn(shape).to(t == DType::f64 ? t : DType::f32));
      before.push_back(u.back().clone());
    }
    p.push_back(zeros({4}, {.dtype = t}));
    u.push_back(ones({4}, {.dtype = u[0].dtype()}));
    p.push_back(ones({4}, {.dtype = t}));
    u.push_back(zeros({4}, {.dtype = u[0].dtype()}));
    trust_ratio_(u, p);
    for (size_t i = 0; i < before.size(); ++i) {
      if (u[i].numel() == 0) continue;
      double norm_p = norm(p[i].to(DType::f64)).item();
      CHECK(norm(u[i].to(DType::f64)).item() == Approx(norm_p).epsilon(1e-6));
      CHECK(apart(u[i], before[i] * (norm_p / norm(before[i].to(DType::f64)).item())) < 1e-6);
    }
    CHECK(u[5].to_vector<double>() == std::vector<double>(4, 1));  // a norm of 0: left alone
    CHECK(u[6].to_vector<double>() == std::vector<double>(4, 0));
  }
}

TEST_CASE("LAMB: without ratios it is AdamW, and its step is as long as its parameter") {
  manual_seed(2);
  Tensor a = parameter({5, 7}), b = a.detach().clone().requires_grad_(), c = a.detach().clone().requires_grad_();
  optim::LAMB plain({a}, {.lr = .01, .eps = 1e-8, .weight_decay = .1, .adapt = false}), lamb({c}, {.lr = .01});
  optim::AdamW adamw({b}, {.lr = .01, .weight_decay = .1});
  for (uint64_t i = 0; i < 5; ++i) {
    for (auto* p : {&a, &b, &c}) give(*p, i);
    Tensor before = c.detach().clone();
    plain.step();
    adamw.step();
    lamb.step();
    CHECK(norm(c.detach() - before).item() == Approx(.01 * norm(before).item()).epsilon(1e-4));
  }
  CHECK(apart(a, b) < 1e-5);
}

TEST_CASE("orthogonalize brings singular values near 1 and keeps singular vectors") {
  manual_seed(3);
  for (auto& shape : {Shape{6, 6}, Shape{3, 20}, Shape{20, 3}, Shape{2, 3, 8, 5}})
    for (DType products : {DType::f32, DType::bf16}) {
      Tensor x = randn(shape), y = optim::orthogonalize(x, {.steps = 8, .products = products});
      CHECK(y.shape() == shape);
      CHECK(y.dtype() == DType::f32);
      bool tall = shape[shape.rank() - 2] > shape[shape.rank() - 1];
      Tensor gram = tall ? matmul(y.t(), y) : matmul(y, y.t());
      // |gram| is the norm of the squared singular values, sum(diagonal) their sum: both of numbers in [0.7, 1.2] squared.
      auto n = static_cast<double>(gram.size(-1));
      Tensor trace = sum(diagonal(gram, 0, gram.rank() - 2, gram.rank() - 1), {-1}) / n;
      CHECK(amin(trace).item() > .45);
      CHECK(amax(trace).item() < 1.45);
      CHECK(amax(norm(gram, {-2, -1})).item() < 1.45 * std::sqrt(n));
      // x's polar factor has the largest inner product with x of all such matrices: y shares its vectors where x y^T is symmetric.
      Tensor product = tall ? matmul(x.t(), y) : matmul(x, y.t());
      CHECK(apart(product, product.t()) < (products == DType::f32 ? 1e-4 : .05));
    }
  CHECK(optim::orthogonalize(zeros({2, 3})).to_vector<double>() == std::vector<double>(6, 0));
  // The norm of a matrix in 16 bits may be beyond them.
  const Tensor x = randn({40, 30}) * 1e4;
  CHECK(apart(optim::orthogonalize(x.to(DType::f16)), optim::orthogonalize(x)) < .05);
}

TEST_CASE("LAMB and Muon: parameters step together as they would alone, kernels as matrices") {
  for (bool muon : {false, true}) {
    INFO(muon);
    auto make = [&](std::vector<Tensor> p) -> std::unique_ptr<optim::Optimizer> {
      if (muon) return std::make_unique<optim::Muon>(std::move(p), optim::MuonOptions{.lr = .1, .weight_decay = .1, .products = DType::f32});
      return std::make_unique<optim::LAMB>(std::move(p), optim::LAMBOptions{.lr = .1});
    };
    manual_seed(4);
    std::vector<Tensor> all{parameter({3, 4}), parameter({4, 3}), parameter({3, 4}), parameter({3, 2, 2}), parameter({5, 3, 2, 2}), parameter({0, 3})}, alone;
    std::vector<std::unique_ptr<optim::Optimizer>> singles;
    for (auto& p : all) {
      alone.push_back(p.detach().clone().requires_grad_());
      singles.push_back(make({alone.back()}));
    }
    auto together = make(all);
    for (uint64_t step = 0; step < 4; ++step) {
      for (size_t i = 0; i < all.size(); ++i) {
        if (step == 1 && i == 2) {  // one that sits a step out
          all[i].set_grad({});
          alone[i].set_grad({});
          continue;
        }
        give(all[i], 10 * step + i);
        give(alone[i], 10 * step + i);
        singles[i]->step();
      }
      together->step();
    }
    for (size_t i = 0; i < all.size(); ++i)
      if (all[i].numel() > 0) CHECK(apart(all[i], alone[i]) < 1e-5);
    if (muon) {  // [5, 3, 2, 2] is the matrix [5, 12]
      Tensor kernel = parameter({5, 3, 2, 2}), matrix = kernel.detach().clone().view({5, 12}).requires_grad_();
      auto a = make({kernel}), b = make({matrix});
      give(kernel, 1);
      matrix.set_grad(kernel.grad().view({5, 12}));
      a->step();
      b->step();
      CHECK(kernel.to_vector<double>() == matrix.to_vector<double>());
    }
  }
}

TEST_CASE("LAMB and Muon under a scaler: masters, copies of weights and skips, without a wait") {
  for (bool muon : {false, true})
    for (DType t : {DType::f32, DType::f16, DType::bf16}) {
      INFO(muon << " " << str(t));
      manual_seed(5);
      nn::Linear layer(6, 4, {.bias = false});
      layer.to(t);
      Tensor w = layer.parameters()[0], exact = w.detach().to(DType::f32).clone().requires_grad_();
      std::unique_ptr<optim::Optimizer> opt, reference;
      if (muon) {
        optim::MuonOptions o{.lr = .05, .products = DType::f32};
        opt = std::make_unique<optim::Muon>(layer.parameters(), o);
        reference = std::make_unique<optim::Muon>(std::vector{exact}, o);
      } else {
        optim::LAMBOptions o{.lr = .05};
        opt = std::make_unique<optim::LAMB>(layer.parameters(), o);
        reference = std::make_unique<optim::LAMB>(std::vector{exact}, o);
      }
      opt->use_master_weights();
      amp::GradScaler scaler({.init_scale = 128, .growth_interval = 3});
      for (int i = 0; i < 8; ++i) {
        Tensor x = randn({5, 6}).to(t);
        bool overflow = i == 3;
        StateDict before = opt->state_dict().clone();
        std::vector<double> weights = w.to_vector<double>();
        {
          ForbidSync no_waiting;
          opt->zero_grad();
          Tensor loss;
          {
            amp::Autocast region({.dtype = DType::f16, .enabled = t == DType::f32});
            loss = layer(x).to(DType::f32).pow(2).sum() * (overflow ? std::numeric_limits<double>::infinity() : 1);
          }
          scaler.scale(loss).backward();
          exact.set_grad(w.grad().to(DType::f32) * scaler.inverse_scale());
          scaler.step(*opt);
          scaler.update();
          if (!overflow) reference->step();
        }
        if (overflow) {
          CHECK(w.to_vector<double>() == weights);
          for (auto& [name, tensor] : opt->state_dict()) CHECK(tensor.to_vector<double>() == before.at(name).to_vector<double>());
        }
        CHECK(apart(t == DType::f32 ? w : opt->master(w), exact) < 1e-6);
        if (t == DType::f32) {  // the 16-bit copy that autocast reads is the weight's
          amp::Autocast region({.dtype = DType::f16});
          NoGrad off;
          CHECK(layer(x).to_vector<double>() == linear(x.to(DType::f16), w.detach().to(DType::f16)).to_vector<double>());
        } else {
          CHECK(w.to_vector<double>() == exact.detach().to(t).to_vector<double>());
        }
      }
      CHECK(scaler.skipped_steps() == 1);
    }
}

TEST_CASE("Muon in bf16 and AdamW for the rest train a network") {
  manual_seed(6);
  nn::Sequential net{nn::Linear(2, 32), nn::ReLU(), nn::Linear(32, 32), nn::ReLU(), nn::Linear(32, 4)};
  std::vector<Tensor> hidden, rest;
  for (auto& [name, p] : net.named_parameters()) (name == "2.weight" ? hidden : rest).push_back(p);
  optim::Muon muon(hidden);
  optim::AdamW adamw(rest, {.lr = 1e-2});
  Tensor x = randn({256, 2}), target = gt(x.select(1, 0), 0).to(DType::i64) * 2 + gt(x.select(1, 1), 0).to(DType::i64);
  double first = 0, last = 0;
  for (int i = 0; i < 60; ++i) {
    net.zero_grad();
    Tensor loss = cross_entropy(net(x), target);
    loss.backward();
    muon.step();
    adamw.step();
    last = loss.item();
    if (i == 0) first = last;
  }
  CHECK(last < .2 * first);
}
