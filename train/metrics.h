#pragma once
// Figures of many batches, summed where the tensors are: add() queues kernels and never waits for the device; what gives a number does.
//
//   metrics::Accuracy accuracy, top5(5);
//   for (auto& [x, target] : test_loader) accuracy.add(y = net(x), target), top5.add(y, target);
#include "halftone/core/tensor.h"

namespace halftone::metrics {

// A mean by weight: add(loss, batch.size()).
class HT_API Mean {
 public:
  void add(const Tensor& value, double weight = 1);  // [] or one element
  double value() const;                              // NaN before anything was added
  void reset() { *this = {}; }

 private:
  Tensor sum_;  // f64 []
  double weight_ = 0;
};

// The share of examples whose target is among the k largest outputs; of equal ones the first count.
class HT_API Accuracy {
 public:
  explicit Accuracy(Size k = 1, int64_t ignore_index = -100);
  // outputs [n, classes], target [n] (integers); examples whose target is ignore_index do not count.
  void add(const Tensor& outputs, const Tensor& target);
  double value() const;  // in [0, 1]; NaN before any example
  void reset() { counts_ = {}; }

 private:
  int64_t k_, ignore_;
  Tensor counts_;  // right ones, and all: i64 [2]
};

// How often which class was taken for which.
class HT_API ConfusionMatrix {
 public:
  explicit ConfusionMatrix(Size classes, int64_t ignore_index = -100);
  // outputs [n, classes], of which the largest counts, or classes [n] (integers); target [n] (integers). Numbers that are no class and not
  // ignore_index are an error of the operator that meets them.
  void add(const Tensor& outputs, const Tensor& target);
  Tensor counts() const;     // [target, predicted] (i64), on the CPU
  Tensor recall() const;     // [classes] (f64): of the examples of a class, the share that was found; NaN where there are none
  Tensor precision() const;  // [classes] (f64): of those taken for a class, the share that is one
  double accuracy() const;
  void reset() { counts_ = {}; }

 private:
  int64_t classes_, ignore_;
  Tensor counts_;  // i64 [classes * classes]
};

}  // namespace halftone::metrics
