#pragma once
// How weights start. Each function writes into a tensor of a floating dtype on any device, outside the tape, and
// returns it. Draws come from this thread's generator: the same seed gives the same weights. A weight is
// [out, in, ...]: its fan in is in times the trailing sizes, its fan out is out times them.
#include "halftone/core/scalar.h"
#include "halftone/core/tensor.h"

namespace halftone::nn::init {

HT_API Tensor constant_(const Tensor& x, double value);
HT_API Tensor zeros_(const Tensor& x);
HT_API Tensor ones_(const Tensor& x);
// Uniform in [low, high); normal.
HT_API Tensor uniform_(const Tensor& x, double low = 0, double high = 1);
HT_API Tensor normal_(const Tensor& x, double mean = 0, double std = 1);

struct TruncatedNormalOptions { double mean = 0, std = 1, low = -2, high = 2; };
// Normal, given that it lies in [low, high], which are values, not multiples of std.
HT_API Tensor truncated_normal_(const Tensor& x, TruncatedNormalOptions o = {});

enum class Nonlinearity : uint8_t { linear, sigmoid, tanh, relu, leaky_relu, selu };
// How much larger the weights before such a function must be for the signal to keep its size:
// 1, 1, 5/3, sqrt(2), sqrt(2 / (1 + slope^2)), 3/4.
HT_API double gain(Nonlinearity f, double slope = 0.01);

// Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010: standard
// deviation gain * sqrt(2 / (fan in + fan out)). Rank 2 or more.
HT_API Tensor xavier_uniform_(const Tensor& x, double gain = 1);
HT_API Tensor xavier_normal_(const Tensor& x, double gain = 1);

enum class Fan : uint8_t { in, out };
// slope is that of leaky_relu.
struct KaimingOptions {
  double slope = 0;
  Fan mode = Fan::in;
  Nonlinearity nonlinearity = Nonlinearity::leaky_relu;
};
// He et al., "Delving deep into rectifiers", 2015: standard deviation gain / sqrt(fan). Rank 2 or more.
HT_API Tensor kaiming_uniform_(const Tensor& x, KaimingOptions o = {});
HT_API Tensor kaiming_normal_(const Tensor& x, KaimingOptions o = {});

// x as a matrix [size(0), the rest]: gain times orthonormal rows, or columns where there are fewer of them, uniform
// among all such matrices (Saxe et al., "Exact solutions to the nonlinear dynamics of learning", 2014). Rank 2 or more.
HT_API Tensor orthogonal_(const Tensor& x, double gain = 1);
// The weight [out, in, k...] of a convolution that hands its channels through: in each group of outputs, number i has 1 at
// the middle of the kernel of input i, 0 elsewhere, as far as there are inputs. Rank 3 to 5.
HT_API Tensor dirac_(const Tensor& x, Size groups = 1);

}  // namespace halftone::nn::init
