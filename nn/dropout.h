#pragma once
// Dropout: in training, elements or whole channels are set to 0 with probability p and the others divided by 1 - p.
#include "halftone/nn/module.h"
#include "halftone/ops/random.h"

namespace halftone::nn {

// The probability, checked where the layer is made.
class HT_API DropoutLayer : public Module {
 public:
  double p() const { return p_; }

 protected:
  explicit DropoutLayer(double p) : p_(p) {
    HT_CHECK(p >= 0 && p <= 1, "Dropout: expected a probability in [0, 1], got ", p);
  }

 private:
  double p_;
};

class HT_API Dropout : public DropoutLayer {
 public:
  explicit Dropout(double p = 0.5) : DropoutLayer(p) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return dropout(x, p(), training()); }
};
class HT_API Dropout1d : public DropoutLayer {  // channels of [n, channels, length] or [channels, length]
 public:
  explicit Dropout1d(double p = 0.5) : DropoutLayer(p) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return dropout1d(x, p(), training()); }
};
class HT_API Dropout2d : public DropoutLayer {  // channels of [n, channels, h, w] or [channels, h, w]
 public:
  explicit Dropout2d(double p = 0.5) : DropoutLayer(p) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return dropout2d(x, p(), training()); }
};

}  // namespace halftone::nn
