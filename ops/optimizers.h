#pragma once
// Optimizers as operators: one struct is the whole update of an element, compiled for both devices; a call updates many
// parameters at once. All state lives on the device, and a step whose gradients are not finite changes nothing: kernels
// select, the host never asks. To add one: its struct here, its name in `All`, and a class in optim/.
//
// An operator takes, in this order,
//   lr           f64 []   step         i64 []  real steps so far; raised by one unless skipped
//   grad_scale   f32 []   gradients are multiplied by it; may be undefined
//   found_inf    f32 []   not 0: skip; may be undefined
//   memory       f64 []   one number kept from step to step; undefined where the optimizer needs none
// then n of each: parameters, gradients, the optimizer's states, and 16-bit copies (undefined where there is none).
#include <array>

#include "halftone/core/random.h"
#include "halftone/ops/elementwise.h"

namespace halftone::update {

inline constexpr size_t lr_at = 0, step_at = 1, grad_scale_at = 2, found_inf_at = 3, memory_at = 4, lists_at = 5;
inline constexpr size_t most_states = 3;

// How bf16 parameters are rounded: to nearest, or up with the odds of the distance from below, so that small updates count
// in the mean. Element i of a parameter takes 16 bits of Philox at (seed, i, real step).
struct Rounding {
  uint64_t seed = 0;
  bool stochastic = false;
};
HT_HD inline bfloat16 round_stochastic(float v, uint32_t bits) {
  uint32_t u = bit_cast<uint32_t>(v);
  if ((u & 0x7f800000u) == 0x7f800000u) return bfloat16(v);
  bfloat16 r;
  r.bits = static_cast<uint16_t>((u + (bits & 0xffffu)) >> 16);
  return r;
}
template <class P, class C> HT_HD P round_parameter(C v, [[maybe_unused]] const Rounding& r, [[maybe_unused]] int64_t step, [[maybe_unused]] int64_t i) {
  if constexpr (std::same_as<P, bfloat16>)
    if (r.stochastic) {
      Philox4 block = philox(r.seed, static_cast<uint64_t>(i) / 8, static_cast<uint64_t>(step));
      return round_stochastic(static_cast<float>(v), block.v[i / 2 % 4] >> (i % 2 * 16));
    }
  return convert<P>(v);
}

// The attributes of a call over n parameters.
template <class Op> struct Given {
  int n;
  Op op;
  Rounding rounding = {};
};
// The k-th list's i-th tensor of a call over n parameters.
inline const Tensor& item(const Call& c, int n, size_t k, int i) { return c.in[lists_at + k * static_cast<size_t>(n) + static_cast<size_t>(i)]; }

// An optimizer's struct has
//   name, doc, states                       names of its per-element states, which start at 0
//   uses(k)                                 whether these settings need state k
//   Now<C>, now<C>(lr, step, memory)        what all elements of a step share; `step` counts from 0
//   operator()(p, g, s, now)                the new parameter from parameter, gradient and states, which it updates
//   examples()                              settings for samples, every one off its default
// and, where it keeps a number, first_memory and remember(memory, step). One whose step looks at whole tensors says
// `directs`: it leaves the parameter as it is and its direction in the last state (optim/directed.h takes that further).
template <class Op> inline constexpr bool has_memory = requires { Op::first_memory; };
template <class Op> inline constexpr bool directs = requires { Op::directs; };

// b to the power of n, by squares: on a GPU all of a block wait for the thread that computes it, and pow() takes several times as long. Errs by
// n units in the last place or so.
HT_HD inline double power(double b, int64_t n) {
  double product = 1;
  for (; n > 0; n /= 2, b *= b)
    if (n % 2 == 1) product *= b;
  return product;
}
// Moments of the gradient: first decays with beta1, second with beta2.
template <class C> HT_HD void follow_moments(C g, C& m, C& v, double beta1, double beta2) {
  m += (g - m) * static_cast<C>(1 - beta1);
  v = static_cast<C>(beta2) * v + static_cast<C>(1 - beta2) * g * g;
}

struct HT_API Sgd {
  double momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
  static constexpr auto name = "sgd", doc = "one step of stochastic gradient descent with momentum over many parameters";
  static constexpr std::array states{"momentum"};
  static constexpr std::array<Sgd, 3> examples() { return {{{0.9}, {0.9, 0.1, 0.1, false, true}, {0.9, 0, 0.01, true}}}; }
  HT_HD bool uses(size_t) const { return momentum != 0; }

  template <class C> struct Now { C lr; bool first; };
  template <class C> HT_HD Now<C> now(double lr, int64_t step, double) const { return {static_cast<C>(lr), step == 0}; }
  template <class C> HT_HD C operator()(C p, C g, C* s, const Now<C>& t) const {
    if (maximize) g = -g;
    g += static_cast<C>(weight_decay) * p;
    if (momentum != 0) {
      s[0] = t.first ? g : static_cast<C>(momentum) * s[0] + static_cast<C>(1 - dampening) * g;
      g = nesterov ? g + static_cast<C>(momentum) * s[0] : s[0];
    }
    return p - t.lr * g;
  }
};

struct HT_API Adam {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = false, maximize = false, amsgrad = false;
  static constexpr auto name = "adam", doc = "one step of Adam, AdamW or AMSGrad over many parameters";
  static constexpr std::array states{"m", "v", "v_max"};
  static constexpr std::array<Adam, 3> examples() { return {{{}, {0.8, 0.99, 1e-3, 0.1, false, true, true}, {0.9, 0.999, 1e-8, 0.1, true}}}; }
  HT_HD bool uses(size_t k) const { return k < 2 || amsgrad; }

  template <class C> struct Now { C lr, correction1, root2; };
  template <class C> HT_HD Now<C> now(double lr, int64_t step, double) const {
    return {static_cast<C>(lr), static_cast<C>(1 - power(beta1, step + 1)), static_cast<C>(::sqrt(1 - power(beta2, step + 1)))};
  }
  template <class C> HT_HD C operator()(C p, C g, C* s, const Now<C>& t) const {
    if (maximize) g = -g;
    if (decoupled) p -= t.lr * static_cast<C>(weight_decay) * p;
    else g += static_cast<C>(weight_decay) * p;
    follow_moments(g, s[0], s[1], beta1, beta2);
    if (amsgrad) s[2] = s[1] > s[2] ? s[1] : s[2];
    C denominator = ::sqrt(amsgrad ? s[2] : s[1]) / t.root2 + static_cast<C>(eps);
    return p - t.lr / t.correction1 * (s[0] / denominator);
  }
};

struct HT_API Adamax {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool maximize = false;
  static constexpr auto name = "adamax", doc = "one step of Adamax over many parameters";
  static constexpr std::array states{"m", "u"};
  static constexpr std::array<Adamax, 2> examples() { return {{{}, {0.8, 0.99, 1e-3, 0.1, true}}}; }
  HT_HD bool uses(size_t) const { return true; }

  template <class C> struct Now { C rate; };
  template <class C> HT_HD Now<C> now(double lr, int64_t step, double) const {
    return {static_cast<C>(lr / (1 - power(beta1, step + 1)))};
  }
  template <class C> HT_HD C operator()(C p, C g, C* s, const Now<C>& t) const {
    if (maximize) g = -g;
    g += static_cast<C>(weight_decay) * p;
    s[0] += (g - s[0]) * static_cast<C>(1 - beta1);
    C decayed = static_cast<C>(beta2) * s[1], size = ::fabs(g) + static_cast<C>(eps);
    s[1] = decayed > size ? decayed : size;
    return p - t.rate * (s[0] / s[1]);
  }
};

struct HT_API Nadam {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, momentum_decay = 4e-3;
  bool decoupled = false, maximize = false;
  static constexpr auto name = "nadam", doc = "one step of NAdam over many parameters";
  static constexpr std::array states{"m", "v"};
  static constexpr double first_memory = 1;  // the product of all momenta so far
  static constexpr std::array<Nadam, 3> examples() { return {{{}, {0.8, 0.99, 1e-3, 0.1, 1e-2, false, true}, {0.9, 0.999, 1e-8, 0.1, 4e-3, true}}}; }
  HT_HD bool uses(size_t) const { return true; }
  HT_HD double momentum_at(int64_t t) const { return beta1 * (1 - 0.5 * ::pow(0.96, static_cast<double>(t) * momentum_decay)); }
  HT_HD double remember(double product, int64_t step) const { return product * momentum_at(step + 1); }

  template <class C> struct Now { C lr, by_gradient, by_moment, root2; };
  template <class C> HT_HD Now<C> now(double lr, int64_t step, double product) const {
    double momentum = momentum_at(step + 1), next = momentum_at(step + 2), now = product * momentum;
    return {static_cast<C>(lr), static_cast<C>(lr * (1 - momentum) / (1 - now)), static_cast<C>(lr * next / (1 - now * next)),
            static_cast<C>(::sqrt(1 - power(beta2, step + 1)))};
  }
  template <class C> HT_HD C operator()(C p, C g, C* s, const Now<C>& t) const {
    if (maximize) g = -g;
    if (decoupled) p -= t.lr * static_cast<C>(weight_decay) * p;
    else g += static_cast<C>(weight_decay) * p;
    follow_moments(g, s[0], s[1], beta1, beta2);
    C denominator = ::sqrt(s[1]) / t.root2 + static_cast<C>(eps);
    return p - (t.by_gradient * g + t.by_moment * s[0]) / denominator;
  }
};

struct HT_API Radam {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = false, maximize = false;
  static constexpr auto name = "radam", doc = "one step of RAdam over many parameters";
  static constexpr std::array states{"m", "v"};
  static constexpr std::array<Radam, 3> examples() { return {{{}, {0.8, 0.6, 1e-3, 0.1, false, true}, {0.9, 0.8, 1e-8, 0.1, true}}}; }
  HT_HD bool uses(size_t) const { return true; }

  template <class C> struct Now { C lr, rate, root2, rectification; };  // rectification 0: the variance is not known yet
  template <class C> HT_HD Now<C> now(double lr, int64_t step, double) const {
    auto t = static_cast<double>(step + 1);
    double decayed = power(beta2, step + 1), most = 2 / (1 - beta2) - 1, length = most - 2 * t * decayed / (1 - decayed);
    double r = length > 5 ? ::sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)) : 0;
    return {static_cast<C>(lr), static_cast<C>(lr / (1 - power(beta1, step + 1))), static_cast<C>(::sqrt(1 - decayed)), static_cast<C>(r)};
  }
  template <class C> HT_HD C operator()(C p, C g, C* s, const Now<C>& t) const {
    if (maximize) g = -g;
    if (decoupled) p -= t.lr * static_cast<C>(weight_decay) * p;
    else g += static_cast<C>(weight_decay) * p;
    follow_moments(g, s[0], s[1], beta1, beta2);
    C adaptive = t.rectification > C(0) ? t.rectification * t.root2 / (::sqrt(s[1]) + static_cast<C>(eps)) : C(1);
    return p - t.rate * s[0] * adaptive;
  }
};

struct HT_API Adagrad {
  double lr_decay = 0, weight_decay = 0, eps = 1e-10, initial = 0;
  bool maximize = false;
  static constexpr auto name = "adagrad", doc = "one step of Adagrad over many parameters";
  static constexpr std::array states{"sum"};
  static constexpr std::array<Adagrad, 2> examples() { return {{{}, {0.1, 0.1, 1e-3, 0.5, true}}}; }
  HT_HD bool uses(size_t) const { return true; }

  template <class C> struct Now { C rate; bool first; };
  template <class C> HT_HD Now<C> now(double lr, int64_t step, double) const {
    return {static_cast<C>(lr / (1 + static_cast<double>(step) * lr_decay)), step == 0};
  }
  template <class C> HT_HD C operator()(C p, C g, C* s, const Now<C>& t) const {
    if (maximize) g = -g;
    g += static_cast<C>(weight_decay) * p;
    s[0] = (t.first ? static_cast<C>(initial) : s[0]) + g * g;
    return p - t.rate * g / (::sqrt(s[0]) + static_cast<C>(eps));
  }
};

struct HT_API Adadelta {
  double rho = 0.9, eps = 1e-6, weight_decay = 0;
  bool maximize = false;
  static constexpr auto name = "adadelta", doc = "one step of Adadelta over many parameters";
  static constexpr std::array states{"square_average", "delta_average"};
  static constexpr std::array<Adadelta, 2> examples() { return {{{}, {0.7, 1e-3, 0.1, true}}}; }
  HT_HD bool uses(size_t) const { return true; }

  template <class C> struct Now { C lr; };
  template <class C> HT_HD Now<C> now(double lr, int64_t, double) const { return {static_cast<C>(lr)}; }
  template <class C> HT_HD C operator()(C p, C g, C* s, const Now<C>& t) const {
    if (maximize) g = -g;
    g += static_cast<C>(weight_decay) * p;
    C keep = static_cast<C>(rho), take = static_cast<C>(1 - rho), e = static_cast<C>(eps);
    s[0] = keep * s[0] + take * g * g;
    C delta = ::sqrt(s[1] + e) / ::sqrt(s[0] + e) * g;
    s[1] = keep * s[1] + take * delta * delta;
    return p - t.lr * delta;
  }
};

struct HT_API Rmsprop {
  double alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false, maximize = false;
  static constexpr auto name = "rmsprop", doc = "one step of RMSprop over many parameters";
  static constexpr std::array states{"square_average", "momentum", "average"};
  static constexpr std::array<Rmsprop, 3> examples() { return {{{}, {0.9, 1e-3, 0.1, 0.9, false, true}, {0.9, 1e-1, 0.01, 0.8, true}}}; }
  HT_HD bool uses(size_t k) const { return k == 0 || (k == 1 ? momentum != 0 : centered); }

  template <class C> struct Now { C lr; };
  template <class C> HT_HD Now<C> now(double lr, int64_t, double) const { return {static_cast<C>(lr)}; }
  template <class C> HT_HD C operator()(C p, C g, C* s, const Now<C>& t) const {
    if (maximize) g = -g;
    g += static_cast<C>(weight_decay) * p;
    s[0] = static_cast<C>(alpha) * s[0] + static_cast<C>(1 - alpha) * g * g;
    C variance = s[0];
    if (centered) {
      s[2] += (g - s[2]) * static_cast<C>(1 - alpha);
      variance -= s[2] * s[2];
      if (variance < C(0)) variance = 0;  // of rounding
    }
    g = g / (::sqrt(variance) + static_cast<C>(eps));
    if (momentum != 0) g = s[1] = static_cast<C>(momentum) * s[1] + g;
    return p - t.lr * g;
  }
};

struct HT_API Lion {
  double beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
  bool maximize = false;
  static constexpr auto name = "lion", doc = "one step of Lion over many parameters";
  static constexpr std::array states{"m"};
  static constexpr std::array<Lion, 2> examples() { return {{{}, {0.8, 0.95, 0.1, true}}}; }
  HT_HD bool uses(size_t) const { return true; }

  template <class C> struct Now { C lr; };
  template <class C> HT_HD Now<C> now(double lr, int64_t, double) const { return {static_cast<C>(lr)}; }
  template <class C> HT_HD C operator()(C p, C g, C* s, const Now<C>& t) const {
    if (maximize) g = -g;
    C blend = s[0] + (g - s[0]) * static_cast<C>(1 - beta1);
    C direction = blend > C(0) ? C(1) : blend < C(0) ? C(-1) : blend;
    s[0] += (g - s[0]) * static_cast<C>(1 - beta2);
    return p - t.lr * (direction + static_cast<C>(weight_decay) * p);
  }
};

struct HT_API Lamb {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-6, weight_decay = 0;
  bool maximize = false;
  static constexpr auto name = "lamb_direction", doc = "the direction of a step of LAMB, before layers' ratios, for many parameters";
  static constexpr std::array states{"m", "v", "direction"};
  static constexpr bool directs = true;
  static constexpr std::array<Lamb, 2> examples() { return {{{}, {0.8, 0.99, 1e-3, 0.1, true}}}; }
  HT_HD bool uses(size_t) const { return true; }

  template <class C> struct Now { C correction1, root2; };
  template <class C> HT_HD Now<C> now(double, int64_t step, double) const {
    return {static_cast<C>(1 - power(beta1, step + 1)), static_cast<C>(::sqrt(1 - power(beta2, step + 1)))};
  }
  template <class C> HT_HD C operator()(C p, C g, C* s, const Now<C>& t) const {
    if (maximize) g = -g;
    follow_moments(g, s[0], s[1], beta1, beta2);
    s[2] = s[0] / t.correction1 / (::sqrt(s[1]) / t.root2 + static_cast<C>(eps)) + static_cast<C>(weight_decay) * p;
    return p;
  }
};

struct HT_API Muon {
  double momentum = 0.95;
  bool nesterov = true, maximize = false;
  static constexpr auto name = "muon_direction", doc = "the direction of a step of Muon, before orthogonalization, for many parameters";
  static constexpr std::array states{"momentum", "direction"};
  static constexpr bool directs = true;
  static constexpr std::array<Muon, 2> examples() { return {{{}, {0.8, false, true}}}; }
  HT_HD bool uses(size_t) const { return true; }

  template <class C> struct Now {};
  template <class C> HT_HD Now<C> now(double, int64_t, double) const { return {}; }
  template <class C> HT_HD C operator()(C p, C g, C* s, const Now<C>&) const {
    if (maximize) g = -g;
    s[0] += (g - s[0]) * static_cast<C>(1 - momentum);
    s[1] = nesterov ? g + (s[0] - g) * static_cast<C>(momentum) : s[0];
    return p;
  }
};

// Not an optimizer, but updated like one: parameters go the share `lr` of their way to the "gradients".
struct HT_API Average {
  static constexpr auto name = "average", doc = "many tensors go a share of the way to others";
  static constexpr std::array<const char*, 0> states{};
  static constexpr std::array<Average, 2> examples() { return {}; }
  HT_HD bool uses(size_t) const { return false; }

  template <class C> struct Now { C share; };
  template <class C> HT_HD Now<C> now(double lr, int64_t, double) const { return {static_cast<C>(lr)}; }
  template <class C> HT_HD C operator()(C p, C g, C*, const Now<C>& t) const { return t.share == C(1) ? g : p + (g - p) * t.share; }
};

using All = elementwise::List<Sgd, Adam, Adamax, Nadam, Radam, Adagrad, Adadelta, Rmsprop, Lion, Lamb, Muon, Average>;

HT_API Metas infer(const Call& c, int n, size_t states);
HT_API std::vector<Sample> samples(size_t states, bool memory, std::span<const Attrs> settings);

template <class Op> constexpr OpDef describe() {
  OpDef d{.name = Op::name, .doc = Op::doc};
  d.cast = Cast::keep;
  d.infer = [](const Call& c) { return infer(c, c.as<Given<Op>>().n, Op::states.size()); };
  // Everything from `step` on but the gradients and the two control tensors.
  d.writes = [](const Call& c, size_t i) {
    if (i < lists_at) return i == step_at || i == memory_at;
    return (i - lists_at) / static_cast<size_t>(c.as<Given<Op>>().n) != 1;
  };
  d.samples = [] {
    std::vector<Attrs> settings;
    for (auto& e : Op::examples()) settings.push_back(Attrs::of(Given<Op>{2, e, {7, true}}));
    return samples(Op::states.size(), has_memory<Op>, settings);
  };
  return d;
}
template <class Op> HT_API inline constinit OpDef def = describe<Op>();

}  // namespace halftone::update
