// What tests of user reports share: the same body on every kind of device that is there, in both 16-bit dtypes.
#pragma once

#include "halftone/tests/operators.h"

namespace halftone::tests {

constexpr DType f16 = DType::f16, bf16 = DType::bf16, f32 = DType::f32, f64 = DType::f64;
inline DType other_than(DType low) { return low == f16 ? bf16 : f16; }

template <class F> void on_devices(F f) {
  std::vector<Device> all{Device::cpu()};
  if (auto gpus = devices(DeviceType::cuda); !gpus.empty()) all.push_back(gpus[0]);
  for (Device d : all) {
    INFO("on " << str(d));
    f(d);
  }
}
template <class F> void everywhere(F f) {
  on_devices([&](Device d) {
    for (DType t : {bf16, f16}) {
      INFO("in " << str(t));
      f(d, t);
    }
  });
}

inline std::vector<double> values(const Tensor& t) { return t.to_vector<double>(); }
// All elements are this number.
inline bool all_are(const Tensor& t, double v) {
  for (double e : values(t)) if (e != v) return false;
  return true;
}
inline bool finite(const Tensor& t) { return amp::all_finite(t.detach()); }
// What a number becomes in a dtype.
inline double rounded(double v, DType t) { return tensor(v).to(t).item(); }
inline std::vector<Tensor> gradients(const std::vector<Tensor>& leaves) {
  std::vector<Tensor> g;
  for (auto& l : leaves) g.push_back(l.grad().defined() ? l.grad().clone() : Tensor());
  return g;
}

struct Net {
  explicit Net(Device d, uint64_t seed = 1, DType t = f32) {
    manual_seed(seed);
    auto leaf = [&](const Shape& s) { return (randn(s, {.device = d}) * 0.5).to(t).requires_grad_(); };
    w1 = leaf({17, 6}), b1 = leaf({17}), w2 = leaf({3, 17}), b2 = leaf({3});
  }
  Tensor w1, b1, w2, b2;
  std::vector<Tensor> parameters() const { return {w1, b1, w2, b2}; }
  Tensor operator()(const Tensor& x) const { return linear(linear_relu(x, w1, b1), w2, b2); }
  // With casts by hand, which keep nothing.
  Tensor by_hand(const Tensor& x, DType t) const {
    auto c = [t](const Tensor& p) { return p.detach().to(t); };
    return linear(linear_relu(x.to(t), c(w1), c(b1)), c(w2), c(b2));
  }
};
struct Batch {
  explicit Batch(Device d, uint64_t seed = 2, int64_t n = 12) {
    manual_seed(seed);
    x = randn({n, 6}, {.device = d});
    target = randint(0, 3, {n}, {.device = d});
  }
  Tensor x, target;
};

// Keeps what is warned of while it lives.
class Warnings {
 public:
  Warnings() : before_(set_warning_handler([this](const std::string& text) { texts_.push_back(text); })) {}
  ~Warnings() { set_warning_handler(before_); }
  Warnings(const Warnings&) = delete;
  // Those since the last call.
  std::vector<std::string> taken() { return std::exchange(texts_, {}); }

 private:
  std::vector<std::string> texts_;
  WarningHandler before_;
};

// ---- for scalers and optimizers

constexpr float inf = std::numeric_limits<float>::infinity(), nan_ = std::numeric_limits<float>::quiet_NaN();

// A backward that leaves `g` times the scale in p's gradient.
inline void backward_with(amp::GradScaler& scaler, const Tensor& p, double g) { scaler.scale((p * g).to(f32).sum()).backward(); }

struct Single {
  explicit Single(Device d) : p(ones({2}, {.device = d, .requires_grad = true})), opt({p}, {.lr = 1}) {}
  Tensor p;
  optim::SGD opt;
  amp::StepOutcome iterate(amp::GradScaler& scaler, double g) {
    opt.zero_grad();
    backward_with(scaler, p, g);
    auto outcome = scaler.step(opt);
    scaler.update();
    return outcome;
  }
};

// One of each kind of optimizer; lr in powers of two. The first `kinds` of them stand for all where time is dear.
using Made = std::unique_ptr<optim::Optimizer>;
constexpr int kinds = 4, all_kinds = 11;
inline Made make(int kind, const std::vector<Tensor>& p) {
  if (kind == 0) return std::make_unique<optim::SGD>(p, optim::SGDOptions{.lr = 0.125});
  if (kind == 1) return std::make_unique<optim::SGD>(p, optim::SGDOptions{.lr = 0.125, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true});
  if (kind == 2) return std::make_unique<optim::Adam>(p, optim::AdamOptions{.lr = 0.03125});
  if (kind == 3) return std::make_unique<optim::AdamW>(p, optim::AdamWOptions{.lr = 0.03125});
  if (kind == 4) return std::make_unique<optim::Adamax>(p, optim::AdamaxOptions{.lr = 0.03125});
  if (kind == 5) return std::make_unique<optim::NAdam>(p, optim::NAdamOptions{.lr = 0.03125});
  if (kind == 6) return std::make_unique<optim::RAdam>(p, optim::RAdamOptions{.lr = 0.03125});
  if (kind == 7) return std::make_unique<optim::Lion>(p, optim::LionOptions{.lr = 0.00390625});
  if (kind == 8) return std::make_unique<optim::Adagrad>(p, optim::AdagradOptions{.lr = 0.03125});
  if (kind == 9) return std::make_unique<optim::Adadelta>(p, optim::AdadeltaOptions{.lr = 1});
  return std::make_unique<optim::RMSprop>(p, optim::RMSpropOptions{.lr = 0.0078125, .momentum = 0.9, .centered = true});
}
// Copies of everything that a step may change: parameters, their gradients, and the optimizer's state, counts and rates included.
inline std::vector<Tensor> everything(const optim::Optimizer& opt) {
  std::vector<Tensor> all;
  for (auto& p : opt.parameters()) all.push_back(p.detach().clone());
  for (auto& [name, t] : opt.state_dict()) all.push_back(t.clone());
  return all;
}
inline std::vector<Tensor> weights(const std::vector<Tensor>& p) {
  std::vector<Tensor> all;
  for (auto& t : p) all.push_back(t.detach().clone());
  return all;
}
// A forward in a region and a scaled backward.
inline void forward_backward(amp::GradScaler& scaler, const Net& net, const Batch& batch, DType t, double share = 1) {
  Tensor loss;
  { amp::Autocast region({.dtype = t}); loss = cross_entropy(net(batch.x), batch.target) * share; }
  scaler.scale(loss).backward();
}

}  // namespace halftone::tests
