// Counts as sums of masks and of ones, in integers, so that their order is of no account.
#include "halftone/train/metrics.h"

#include <limits>

#include "halftone/core/thread_state.h"
#include "halftone/ops/ops.h"

namespace halftone::metrics {
namespace {

void check(const char* who, const Tensor& outputs, const Tensor& target, bool classes) {
  HT_CHECK(outputs.defined() && target.defined(), who, ": outputs and target must be defined");
  HT_CHECK((outputs.rank() == 2 || (classes && outputs.rank() == 1 && !is_floating(outputs.dtype()))) && target.rank() == 1 &&
               target.size(0) == outputs.size(0) && !is_floating(target.dtype()),
           who, ": expected outputs [n, classes]", classes ? " or classes [n]" : "", " and a target [n] of integers, got ", outputs.meta(), " and ",
           target.meta());
}
void accumulate(Tensor& sum, const Tensor& more) {
  if (sum.defined()) sum.add_(more);
  else sum = more;
}

}  // namespace

void Mean::add(const Tensor& value, double weight) {
  HT_CHECK(value.defined() && value.numel() == 1, "Mean: expected one number, got ", value.defined() ? str(value.meta()) : "an undefined tensor");
  const NoGrad off;
  accumulate(sum_, value.detach().reshape({}).to(DType::f64) * weight);
  weight_ += weight;
}
double Mean::value() const { return sum_.defined() ? sum_.item() / weight_ : std::numeric_limits<double>::quiet_NaN(); }

Accuracy::Accuracy(Size k, int64_t ignore_index) : k_(k), ignore_(ignore_index) { HT_CHECK(k > 0, "Accuracy: expected k above 0, got ", k.value); }
void Accuracy::add(const Tensor& outputs, const Tensor& target) {
  check("Accuracy", outputs, target, false);
  HT_CHECK(k_ <= outputs.size(1), "Accuracy: the target cannot be among the ", k_, " largest of ", outputs.size(1), " outputs");
  const NoGrad off;
  const Tensor whole = target.to(DType::i64), counts = ne(whole, ignore_);
  const Tensor found = k_ == 1 ? eq(outputs.argmax(1), whole) : any(eq(topk(outputs, k_, 1).indices, whole.unsqueeze(1)), {1});
  accumulate(counts_, stack({logical_and(found, counts).to(DType::i64).sum(), counts.to(DType::i64).sum()}));
}
double Accuracy::value() const {
  if (!counts_.defined()) return std::numeric_limits<double>::quiet_NaN();
  const auto n = counts_.to_vector<double>();
  return n[0] / n[1];
}

ConfusionMatrix::ConfusionMatrix(Size classes, int64_t ignore_index) : classes_(classes), ignore_(ignore_index) {
  HT_CHECK(classes > 0, "ConfusionMatrix: expected classes above 0, got ", classes.value);
}
void ConfusionMatrix::add(const Tensor& outputs, const Tensor& target) {
  check("ConfusionMatrix", outputs, target, true);
  HT_CHECK(outputs.rank() == 1 || outputs.size(1) == classes_, "ConfusionMatrix: expected outputs of ", classes_, " classes, got ", outputs.meta());
  const NoGrad off;
  const Tensor whole = target.to(DType::i64), counts = ne(whole, ignore_);
  const Tensor predicted = outputs.rank() == 1 ? outputs.to(DType::i64) : outputs.argmax(1);
  // A predicted class that is none goes to a place that is none; so does such a target, by itself. Ignored ones count 0 at the first.
  const Tensor is_class = logical_and(ge(predicted, 0), lt(predicted, classes_));
  const Tensor at = where(is_class, whole * classes_ + predicted, classes_ * classes_);
  const Tensor none = zeros({classes_ * classes_}, {.dtype = DType::i64, .device = whole.device()});
  accumulate(counts_, index_add(none, 0, where(counts, at, 0), counts.to(DType::i64)));
}
Tensor ConfusionMatrix::counts() const {
  if (!counts_.defined()) return zeros({classes_, classes_}, {.dtype = DType::i64});
  return counts_.view({classes_, classes_}).to(Device::cpu());
}
Tensor ConfusionMatrix::recall() const {
  const Tensor n = counts().to(DType::f64);
  return diagonal(n) / n.sum({1});
}
Tensor ConfusionMatrix::precision() const {
  const Tensor n = counts().to(DType::f64);
  return diagonal(n) / n.sum({0});
}
double ConfusionMatrix::accuracy() const {
  const Tensor n = counts().to(DType::f64);
  return diagonal(n).sum().item() / n.sum().item();
}

}  // namespace halftone::metrics
