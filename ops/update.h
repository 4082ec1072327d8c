#pragma once
// Updates of many tensors in one call: optimizers, the gradient scaler, clipping. All state lives on the device, and a
// step whose gradients are not finite changes nothing: kernels select, the host never asks.
//
// An optimizer's operator takes, in this order,
//   lr           f64 []        step        i64 []  real steps so far; raised by one unless skipped
//   grad_scale   f32 []        gradients are multiplied by it; may be undefined
//   found_inf    f32 []        not 0: skip; may be undefined
// then n of each: parameters, gradients, one or two states, and 16-bit shadow copies (undefined where there is none).
#include "halftone/core/op.h"
#include "halftone/core/random.h"

namespace halftone {

namespace op {
extern HT_API OpDef sgd, adam, unscale, check_finite, scaler_update, total_norm, scale_all;
}

namespace update {

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

inline constexpr size_t lr_at = 0, step_at = 1, grad_scale_at = 2, found_inf_at = 3, lists_at = 4;

struct SgdAttrs {
  int n;
  double momentum, dampening, weight_decay;
  bool nesterov, maximize;
  Rounding rounding = {};
};
struct AdamAttrs {
  int n;
  double beta1, beta2, eps, weight_decay;
  bool decoupled, maximize;  // decoupled: weight decay as in AdamW
  Rounding rounding = {};
};
// The k-th list's i-th tensor of an optimizer call over n parameters.
inline const Tensor& item(const Call& c, int n, size_t k, int i) { return c.in[lists_at + k * static_cast<size_t>(n) + static_cast<size_t>(i)]; }

// One element's update, the same code on both devices; C is float or double.
template <class C> HT_HD C sgd_element(C p, C g, C& momentum, const SgdAttrs& a, C lr, bool first) {
  if (a.maximize) g = -g;
  g += static_cast<C>(a.weight_decay) * p;
  if (a.momentum != 0) {
    momentum = first ? g : static_cast<C>(a.momentum) * momentum + static_cast<C>(1 - a.dampening) * g;
    g = a.nesterov ? g + static_cast<C>(a.momentum) * momentum : momentum;
  }
  return p - lr * g;
}
// correction1 = 1 - beta1^t, correction2 = 1 - beta2^t; t counts from 1 (Kingma and Ba, 2015; Loshchilov and Hutter, 2019).
template <class C> HT_HD C adam_element(C p, C g, C& m, C& v, const AdamAttrs& a, C lr, C correction1, C correction2) {
  if (a.maximize) g = -g;
  C decay = static_cast<C>(a.weight_decay);
  if (a.decoupled) p -= lr * decay * p;
  else g += decay * p;
  m += (g - m) * static_cast<C>(1 - a.beta1);
  v = static_cast<C>(a.beta2) * v + static_cast<C>(1 - a.beta2) * g * g;
  C denominator = ::sqrt(v) / ::sqrt(correction2) + static_cast<C>(a.eps);
  return p - lr / correction1 * (m / denominator);
}

struct ScalerAttrs {
  double growth_factor, backoff_factor, min_scale, max_scale;
  int64_t growth_interval, first_slot;
  int64_t hysteresis = 1;
};
// The scaler's state after a step; every field lives on the device.
//   in: scale f32 [], inverse f32 [], streak i64 [] (clean steps since the last change; below 0: steps skipped in a row),
//       skipped i64 [] (steps in all), patience i64 [] (overflows until the scale backs off; filled to `hysteresis` as the
//       scale grows), outcomes i64 [1 + slots], then the found_inf of each optimizer that stepped.
// The streak is written to outcomes[0]; the k-th optimizer's outcome to slot (first_slot + k) % slots behind it, together
// with its number first_slot + k; and its found_inf is cleared for the next step.
inline constexpr size_t outcomes_at = 5, found_infs_at = 6;
struct ScalerState { float scale, inverse; int64_t streak, skipped, patience; };
// What a slot holds.
struct Outcome {
  int64_t number;  // of the step, counted from 0
  bool skipped;
  HT_HD static constexpr int64_t place(int64_t number, int64_t outcomes) { return 1 + number % (outcomes - 1); }
  HT_HD constexpr int64_t packed() const { return number * 2 + skipped + 1; }
  static constexpr Outcome unpacked(int64_t v) { return {(v - 1) / 2, (v - 1) % 2 != 0}; }  // of v > 0
};
HT_HD inline ScalerState next_scale(ScalerState s, bool overflow, const ScalerAttrs& a) {
  double scale = s.scale;
  if (overflow) {
    if (--s.patience <= 0) {
      s.patience = 0;
      scale *= a.backoff_factor;
      if (scale < a.min_scale) scale = a.min_scale;
    }
    s.streak = s.streak < 0 ? s.streak - 1 : -1;
    ++s.skipped;
  } else if (s.streak = s.streak < 0 ? 1 : s.streak + 1; s.streak >= a.growth_interval) {
    double grown = scale * a.growth_factor;
    if (grown <= a.max_scale) scale = grown;
    s.streak = 0;
    s.patience = a.hysteresis;
  }
  s.scale = static_cast<float>(scale);
  s.inverse = static_cast<float>(1.0 / scale);
  return s;
}

}  // namespace update

// ---- multi-tensor helpers; tensors of one device, floating dtypes
// The 2-norm of all elements of all tensors together, f32 (f64 if any is), 0-d.
HT_API Tensor total_norm(const std::vector<Tensor>& tensors);
// Multiplies every tensor by a 0-d factor in place.
HT_API void scale_all_(const std::vector<Tensor>& tensors, const Tensor& factor);

}  // namespace halftone
