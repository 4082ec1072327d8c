#pragma once
// Pooling over windows of the last one or two dimensions of x [n, channels, ...].
#include "halftone/nn/module.h"
#include "halftone/ops/pool.h"

namespace halftone::nn {

class HT_API MaxPool1d : public Module {
 public:
  explicit MaxPool1d(Size kernel, MaxPool1dOptions o = {}) : kernel_(kernel), options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return max_pool1d(x, kernel_, options_); }
  const MaxPool1dOptions& options() const { return options_; }

 private:
  Size kernel_;
  MaxPool1dOptions options_;
};
class HT_API MaxPool2d : public Module {
 public:
  explicit MaxPool2d(Size2 kernel, MaxPool2dOptions o = {}) : kernel_(kernel), options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return max_pool2d(x, kernel_, options_); }
  const MaxPool2dOptions& options() const { return options_; }

 private:
  Size2 kernel_;
  MaxPool2dOptions options_;
};

class HT_API AvgPool1d : public Module {
 public:
  explicit AvgPool1d(Size kernel, AvgPool1dOptions o = {}) : kernel_(kernel), options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return avg_pool1d(x, kernel_, options_); }

 private:
  Size kernel_;
  AvgPool1dOptions options_;
};
class HT_API AvgPool2d : public Module {
 public:
  explicit AvgPool2d(Size2 kernel, AvgPool2dOptions o = {}) : kernel_(kernel), options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return avg_pool2d(x, kernel_, options_); }

 private:
  Size2 kernel_;
  AvgPool2dOptions options_;
};

// To a given size, whatever that of x.
class HT_API AdaptiveMaxPool1d : public Module {
 public:
  explicit AdaptiveMaxPool1d(Size size) : size_(size) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return adaptive_max_pool1d(x, size_); }

 private:
  Size size_;
};
class HT_API AdaptiveMaxPool2d : public Module {
 public:
  explicit AdaptiveMaxPool2d(Size2 size) : size_(size) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return adaptive_max_pool2d(x, size_); }

 private:
  Size2 size_;
};
class HT_API AdaptiveAvgPool1d : public Module {
 public:
  explicit AdaptiveAvgPool1d(Size size) : size_(size) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return adaptive_avg_pool1d(x, size_); }

 private:
  Size size_;
};
class HT_API AdaptiveAvgPool2d : public Module {
 public:
  explicit AdaptiveAvgPool2d(Size2 size) : size_(size) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return adaptive_avg_pool2d(x, size_); }

 private:
  Size2 size_;
};

}  // namespace halftone::nn
