#pragma once
// Losses. They read 16-bit inputs and return f32, so that a scaled loss does not overflow.
#include "halftone/ops/binary.h"

namespace halftone {

namespace op {
extern HT_API OpDef cross_entropy, cross_entropy_grad, nll_loss, nll_loss_grad, binary_cross_entropy, binary_cross_entropy_with_logits, squared_error, ctc_loss,
    ctc_loss_grad;
}

enum class Reduction : uint8_t { none, mean, sum };
struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  Reduction reduction = Reduction::mean;
  Tensor weight = {};  // of classes [c]
};
// The negative log of softmax(x) at the target class: x [n, c] or [n, c, d1, ...], target integers [n] or [n, d1, ...].
// The mean is over targets that are not ignored, weighted by their class's weight (NaN when all are ignored). With
// label_smoothing s the target distribution is (1 - s) at the class plus s / c everywhere (Szegedy et al., "Rethinking the
// Inception architecture", 2016). A class outside [0, c) is an error. A target of x's shape and a floating dtype is a
// distribution over classes itself; then the mean is over all n d1 ... of them.
HT_API Tensor cross_entropy(const Tensor& x, const Tensor& target, CrossEntropyOptions o = {});

// cross_entropy of log-probabilities: -x[i, target[i]], weighted; shapes, mean and errors as there.
struct NllOptions {
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
  Tensor weight = {};
};
HT_API Tensor nll_loss(const Tensor& x, const Tensor& target, NllOptions o = {});

// ---- distances of x from y: (x - y)^2 and |x - y|; huber is half the square up to delta and linear from there on;
// smooth_l1 is huber / beta
HT_API Tensor mse_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::mean);
HT_API Tensor l1_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::mean);
HT_API Tensor huber_loss(const Tensor& x, const Tensor& y, double delta = 1, Reduction reduction = Reduction::mean);
HT_API Tensor smooth_l1_loss(const Tensor& x, const Tensor& y, double beta = 1, Reduction reduction = Reduction::mean);

// ---- binary targets t in [0, 1]: -(t log p + (1 - t) log(1 - p)), from p in [0, 1] with logarithms of at least -100, or
// from x with p = sigmoid(x), which is accurate for any x and what mixed precision wants. Weights broadcast; pos_weight is
// on the first term.
struct BceOptions { Reduction reduction = Reduction::mean; Tensor weight = {}; };
struct BceWithLogitsOptions { Reduction reduction = Reduction::mean; Tensor weight = {}, pos_weight = {}; };
HT_API Tensor binary_cross_entropy(const Tensor& p, const Tensor& target, BceOptions o = {});
HT_API Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& target, BceWithLogitsOptions o = {});

// ---- distributions
// target * (log(target) - x) from log-probabilities x; the target may be logarithmic, too. by_batch: the sum over the size
// of the first dimension, which is what the divergence means.
struct KlDivOptions { Reduction reduction = Reduction::mean; bool log_target = false, by_batch = false; };
HT_API Tensor kl_div(const Tensor& x, const Tensor& target, KlDivOptions o = {});
// (log(v) + (x - target)^2 / v) / 2 with v = max(var, eps); full adds log(2 pi) / 2.
struct GaussianNllOptions { Reduction reduction = Reduction::mean; bool full = false; double eps = 1e-6; };
HT_API Tensor gaussian_nll_loss(const Tensor& x, const Tensor& target, const Tensor& var, GaussianNllOptions o = {});
// exp(x) - target x, or x - target log(x + eps) for a rate x itself; full adds Stirling's terms where target > 1.
struct PoissonNllOptions { Reduction reduction = Reduction::mean; bool log_input = true, full = false; double eps = 1e-8; };
HT_API Tensor poisson_nll_loss(const Tensor& x, const Tensor& target, PoissonNllOptions o = {});

// The negative log of the probability that a labelling emits a target (Graves et al., "Connectionist temporal
// classification", ICML 2006): log-probabilities x [t, n, c], targets [n, s] of classes other than blank, of which the first
// target_lengths [n] count, as do the first input_lengths [n] steps; infinite where no labelling fits, with the gradient 0.
// The mean is that of losses over their target's length, of at least 1. It can be differentiated once.
struct CtcOptions {
  int64_t blank = 0;
  Reduction reduction = Reduction::mean;
  bool zero_infinity = false;  // infinite losses are 0
};
HT_API Tensor ctc_loss(const Tensor& x, const Tensor& targets, const Tensor& input_lengths, const Tensor& target_lengths, CtcOptions o = {});

// ---- margins; y is 1 or -1
struct MarginOptions { Reduction reduction = Reduction::mean; double margin = 0; };
// max(0, margin - y x): margin 1.
HT_API Tensor hinge_loss(const Tensor& x, const Tensor& y, MarginOptions o = {.margin = 1});
// x where y is 1, max(0, margin - x) elsewhere.
HT_API Tensor hinge_embedding_loss(const Tensor& x, const Tensor& y, MarginOptions o = {.margin = 1});
// max(0, margin - y (a - b)).
HT_API Tensor margin_ranking_loss(const Tensor& a, const Tensor& b, const Tensor& y, MarginOptions o = {});
// 1 - cos where y is 1, max(0, cos - margin) elsewhere, of rows: a and b [..., d], y [...].
HT_API Tensor cosine_embedding_loss(const Tensor& a, const Tensor& b, const Tensor& y, MarginOptions o = {});
// max(0, |anchor - positive| - |anchor - negative| + margin) of rows [..., d], in the p-norm of the difference plus eps;
// swap takes the nearer of anchor and positive to the negative.
struct TripletOptions { Reduction reduction = Reduction::mean; double margin = 1, p = 2, eps = 1e-6; bool swap = false; };
HT_API Tensor triplet_margin_loss(const Tensor& anchor, const Tensor& positive, const Tensor& negative, TripletOptions o = {});

// How cross_entropy and its gradient are parametrised inside.
struct CrossEntropyAttrs { int64_t ignore_index; double label_smoothing; Reduction reduction; };
struct NllAttrs { int64_t ignore_index; Reduction reduction; int64_t classes = 0; DType dtype = {}; };  // the last two: of the gradient

// Elementwise losses.
namespace binary {

struct SquaredError {
  static constexpr auto name = "squared_error", doc = "(a - b)^2";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_inputs;
  template <class T> HT_HD static T f(T a, T b) { return (a - b) * (a - b); }
  static Tensor da(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) { return g * ((a - b) * 2); }
  static Tensor db(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) { return g * ((b - a) * 2); }
};
struct BinaryCrossEntropy {
  static constexpr auto name = "binary_cross_entropy", doc = "-(b log a + (1 - b) log(1 - a)), logarithms of at least -100";
  static constexpr Cast cast = Cast::banned;
  static constexpr Saves saves = saves_inputs;
  static constexpr double low = 0.02, high = 0.98;
  template <class T> HT_HD static T bounded(T v) { return v < T(-100) ? T(-100) : v; }
  template <class T> HT_HD static T f(T a, T b) { return -(b * bounded(::log(a)) + (T(1) - b) * bounded(::log1p(-a))); }
  static HT_API Tensor da(const Operand& a, const Operand& b, const Tensor&, const Tensor& g);
  static HT_API Tensor db(const Operand& a, const Operand& b, const Tensor&, const Tensor& g);
};
struct BceWithLogits {
  static constexpr auto name = "binary_cross_entropy_with_logits", doc = "binary_cross_entropy of sigmoid(a) and b, for any a";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_inputs;
  template <class T> HT_HD static T f(T a, T b) { return (a < T(0) ? T(0) : a) - a * b + ::log1p(::exp(-::fabs(a))); }
  static HT_API Tensor da(const Operand& a, const Operand& b, const Tensor&, const Tensor& g);
  static HT_API Tensor db(const Operand& a, const Operand& b, const Tensor&, const Tensor& g);
};

}  // namespace binary

}  // namespace halftone
