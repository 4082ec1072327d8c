#pragma once
// Normalisation. Statistics are taken in two passes about the mean, in f64 on the CPU and in at least f32 on a GPU, whatever
// the dtype of x; results have x's dtype. Weights and biases may be f32 beside a 16-bit x, and eps is never rounded to 16 bits.
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef batch_norm, batch_norm_relu, batch_norm_grad, batch_norms_relu, batch_norms_relu_grad, layer_norm, group_norm, rms_norm,
    row_norm_grad, add_layer_norm, add_layer_norm_grad;
}

struct BatchNormOptions {
  bool training = false;  // statistics of the batch, which also move the running ones; else the running ones
  double momentum = 0.1;  // running = (1 - momentum) * running + momentum * batch's
  double eps = 1e-5;
};
// (x - mean) / sqrt(var + eps) * w + b for each channel of x [n, channels, ...]. w, b [channels] may be undefined, together.
// running_mean and running_var [channels], of f32 (f64 for f64 x), are written in training; the variance that they take is
// the unbiased one, and a channel whose batch is not finite leaves them alone. Without them every batch counts by itself.
HT_API Tensor batch_norm(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& running_mean, const Tensor& running_var,
                         BatchNormOptions o = {});
// relu(batch_norm(...)) and relu(batch_norm(...) + z), rounded once; z is like x.
HT_API Tensor batch_norm_relu(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& running_mean, const Tensor& running_var,
                              BatchNormOptions o = {});
HT_API Tensor batch_norm_add_relu(const Tensor& x, const Tensor& z, const Tensor& w, const Tensor& b, const Tensor& running_mean,
                                  const Tensor& running_var, BatchNormOptions o = {});
// relu(batch_norm(x, ...) + batch_norm(z, ...)), rounded once, as a residual block with a projection ends; z is like x, and either both
// or none have running statistics.
struct BatchNormTensors { Tensor w, b, running_mean, running_var; };
HT_API Tensor batch_norms_relu(const Tensor& x, const BatchNormTensors& of_x, const Tensor& z, const BatchNormTensors& of_z, BatchNormOptions o = {});

// Over the last dimensions of x, which have this shape; so have w and b, which may be undefined.
HT_API Tensor layer_norm(const Tensor& x, const Shape& shape, const Tensor& w = {}, const Tensor& b = {}, double eps = 1e-5);
// sum = x + z, as a residual connection ends, and y = layer_norm(sum), with which the next branch begins: one pass over them, and one over
// their gradients. z is broadcast to x's shape. sum has the dtype in which x and z meet, y has x's: beside a sum in f32 a branch stays in 16 bits.
struct AddedNorm { Tensor y, sum; };
HT_API AddedNorm add_layer_norm(const Tensor& x, const Tensor& z, const Shape& shape, const Tensor& w = {}, const Tensor& b = {}, double eps = 1e-5);
// x / sqrt(mean(x^2) + eps) * w, over the same.
HT_API Tensor rms_norm(const Tensor& x, const Shape& shape, const Tensor& w = {}, double eps = 1e-6);
// Over groups of channels of each image of x [n, channels, ...]; w and b [channels].
HT_API Tensor group_norm(const Tensor& x, Size groups, const Tensor& w = {}, const Tensor& b = {}, double eps = 1e-5);
// Over each channel of each image.
HT_API Tensor instance_norm(const Tensor& x, const Tensor& w = {}, const Tensor& b = {}, double eps = 1e-5);

// ---- the operators' attributes. Their last output, for the tape, is [3, statistics] in f32 (f64): the mean, what of it did
// not fit, and 1 / sqrt(var + eps); batch_norms_relu has such of x and of z. Those with relu add the bits of their result, for images that
// lie with their channels last.

// Which gradients a gradient operator computes: bit 0 x, 1 w, 2 b, and of batch_norm_relu and add_layer_norm 3: what is added;
// of batch_norms_relu 3 to 5: z, its w and its b. The others are empty.
struct BatchNormAttrs {
  double eps = 1e-5, momentum = 0.1;
  bool training = true;
  uint32_t wanted = 7;
};
// `rest` is the number of last dimensions that are one row, or, of group_norm, the number of groups.
enum class RowNorm : uint8_t { layer, group, rms };
struct RowNormAttrs {
  double eps = 1e-5;
  int64_t rest = 1;
  RowNorm kind = RowNorm::layer;
  uint32_t wanted = 7;
};

// x as kernels see it: [n, c, inner], and rows of neighbours in memory of which one in `groups` has the same features;
// element i of row r has feature r % groups * (features / groups) + i / inner.
struct Planes { int64_t n, c, inner; };
struct NormRows {
  int64_t rows, length, groups, features, inner;
  int64_t feature(int64_t row) const { return row % groups * (features / groups); }
};
HT_API Planes norm_planes(const Shape& x);
HT_API NormRows norm_rows(const RowNormAttrs& a, const Shape& x);

// The kernels of add_layer_norm, batch_norms_relu and their gradients, by the operators that they are made of.
HT_API void add_layer_norm_by_parts(const Call& c, std::span<Tensor> out);
HT_API void add_layer_norm_grad_by_parts(const Call& c, std::span<Tensor> out);
HT_API void batch_norms_relu_by_parts(const Call& c, std::span<Tensor> out);
HT_API void batch_norms_relu_grad_by_parts(const Call& c, std::span<Tensor> out);

}  // namespace halftone
