#pragma once
// Convolutions and their transposes. Weights and bias start uniform in [-1/sqrt(fan), 1/sqrt(fan)), where fan is the number
// of weights to an output: weight.size(1) times the kernel's size.
#include "halftone/nn/module.h"
#include "halftone/ops/conv.h"

namespace halftone::nn {

// What all of them have: the parameters and how they start.
class HT_API Convolution : public Module {
 public:
  Parameter weight, bias;  // [out, in / groups, k...], transposed [in, out / groups, k...]; [out], undefined without one
  HT_FIELDS(weight, bias)

 protected:
  Convolution(const char* name, Size in, Size out, std::initializer_list<int64_t> kernel, Size groups, bool bias,
              bool transposed = false);
};

// x [n, in, length] -> [n, out, length']; 2d: [n, in, h, w]; 3d: [n, in, d, h, w].
class HT_API Conv1d : public Convolution {
 public:
  Conv1d(Size in, Size out, Size kernel, Conv1dOptions o = {})
      : Convolution("Conv1d", in, out, {kernel}, o.groups, o.bias), options_(o) {}
  HT_FIELDS_AFTER(Convolution)
  Tensor forward(const Tensor& x) override { return conv1d(x, weight, bias, options_); }
  const Conv1dOptions& options() const { return options_; }

 private:
  Conv1dOptions options_;
};
class HT_API Conv2d : public Convolution {
 public:
  Conv2d(Size in, Size out, Size2 kernel, Conv2dOptions o = {})
      : Convolution("Conv2d", in, out, {kernel.h, kernel.w}, o.groups, o.bias), options_(o) {}
  HT_FIELDS_AFTER(Convolution)
  Tensor forward(const Tensor& x) override { return conv2d(x, weight, bias, options_); }
  const Conv2dOptions& options() const { return options_; }

 private:
  Conv2dOptions options_;
};
class HT_API Conv3d : public Convolution {
 public:
  Conv3d(Size in, Size out, Size3 kernel, Conv3dOptions o = {})
      : Convolution("Conv3d", in, out, {kernel.d, kernel.h, kernel.w}, o.groups, o.bias), options_(o) {}
  HT_FIELDS_AFTER(Convolution)
  Tensor forward(const Tensor& x) override { return conv3d(x, weight, bias, options_); }
  const Conv3dOptions& options() const { return options_; }

 private:
  Conv3dOptions options_;
};

class HT_API ConvTranspose1d : public Convolution {
 public:
  ConvTranspose1d(Size in, Size out, Size kernel, ConvTranspose1dOptions o = {})
      : Convolution("ConvTranspose1d", in, out, {kernel}, o.groups, o.bias, true), options_(o) {}
  HT_FIELDS_AFTER(Convolution)
  Tensor forward(const Tensor& x) override { return conv_transpose1d(x, weight, bias, options_); }
  const ConvTranspose1dOptions& options() const { return options_; }

 private:
  ConvTranspose1dOptions options_;
};
class HT_API ConvTranspose2d : public Convolution {
 public:
  ConvTranspose2d(Size in, Size out, Size2 kernel, ConvTranspose2dOptions o = {})
      : Convolution("ConvTranspose2d", in, out, {kernel.h, kernel.w}, o.groups, o.bias, true), options_(o) {}
  HT_FIELDS_AFTER(Convolution)
  Tensor forward(const Tensor& x) override { return conv_transpose2d(x, weight, bias, options_); }
  const ConvTranspose2dOptions& options() const { return options_; }

 private:
  ConvTranspose2dOptions options_;
};

}  // namespace halftone::nn
