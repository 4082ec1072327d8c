#pragma once
// Losses. They read 16-bit inputs and return f32, so that a scaled loss does not overflow.
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef cross_entropy, cross_entropy_grad;
}

enum class Reduction : uint8_t { none, mean, sum };
struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  Reduction reduction = Reduction::mean;
};
// The negative log of softmax(x) at the target class: x [n, c] or [n, c, d1, ...], target integers [n] or [n, d1, ...].
// The mean is over targets that are not ignored (NaN when all are). With label_smoothing s the target distribution is
// (1 - s) at the class plus s / c everywhere (Szegedy et al., "Rethinking the Inception architecture", 2016).
// A class outside [0, c) is an error.
HT_API Tensor cross_entropy(const Tensor& x, const Tensor& target, CrossEntropyOptions o = {});

// The mean of (x - y)^2.
HT_API Tensor mse_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::mean);

// How cross_entropy and its gradient are parametrised inside.
struct CrossEntropyAttrs { int64_t ignore_index; double label_smoothing; Reduction reduction; };

}  // namespace halftone
