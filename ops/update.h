#pragma once
// The gradient scaler's operators, and others over many tensors in one call. All state lives on the device; the host is
// never asked.
#include "halftone/core/hd.h"
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef unscale, check_finite, scaler_update, total_norm, scale_all, clamp_all, trust_ratio;
}

namespace update {

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
// Limits every element of every tensor to [-limit, limit] in place; NaN stays.
HT_API void clamp_all_(const std::vector<Tensor>& tensors, double limit);
// Multiplies each direction by |parameter| / |direction|, 2-norms over all of its elements, in place; one whose norms are not
// both above 0 stays as it is. Directions are contiguous, in f32 (f64 for f64 parameters), each of its parameter's shape.
HT_API void trust_ratio_(const std::vector<Tensor>& directions, const std::vector<Tensor>& parameters);

}  // namespace halftone
