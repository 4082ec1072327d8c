#pragma once
// Optimizers whose step depends on each parameter as a whole: its norm, or the matrix that it is.
#include "halftone/optim/directed.h"

namespace halftone::optim {

struct LAMBOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-6, weight_decay = 0.01;
  bool adapt = true;  // false: a ratio of 1, as is usual for biases and norms, in a group without weight decay
  bool maximize = false;
};
// u = m^ / (sqrt(v^) + eps) + weight_decay * p with Adam's m^ and v^; p -= lr * |p| / |u| * u, where a norm of 0 makes the ratio
// 1 (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020, algorithm 2).
class HT_API LAMB final : public Directed<LAMB, LAMBOptions, update::Lamb> {
 public:
  using Directed::Directed;
  static constexpr auto title = "LAMB";
  static void check(const LAMBOptions& o);
  static update::Lamb settings(const LAMBOptions& o) { return {o.beta1, o.beta2, o.eps, o.weight_decay, o.maximize}; }
  static double decay(const LAMBOptions&) { return 0; }  // it is in the direction
  static void shape(const LAMBOptions& o, const Directions& d);
};

struct OrthogonalizeOptions {
  int steps = 5;
  double eps = 1e-7;             // added to the norm that the matrix is divided by first
  DType products = DType::bf16;  // of the products of matrices; f64 matrices are multiplied in f64
};
// Matrices [..., m, n] with about the singular vectors of x's and singular values of about 1 (between 0.7 and 1.2), by steps of
// Newton and Schulz with a quintic: x = a x + (b A + c A^2) x, A = x x^T, from x / |x| (Jordan et al., "Muon: an optimizer for
// hidden layers in neural networks", 2024). In the dtype of x.
HT_API Tensor orthogonalize(const Tensor& x, const OrthogonalizeOptions& o = {});

struct MuonOptions {
  double lr = 2e-2, momentum = 0.95, weight_decay = 0;
  bool nesterov = true;
  bool match_adamw = false;      // false: times sqrt(max(1, rows / columns)); true: times 0.2 sqrt(max(rows, columns)), so that
                                 // AdamW's lr and weight_decay fit (Liu et al., "Muon is scalable for LLM training", 2025)
  int steps = 5;                 // of Newton and Schulz
  DType products = DType::bf16;  // in which they multiply matrices; f64 parameters do in f64
  bool maximize = false;
};
// m += (1 - momentum) (g - m); p -= lr * (scale * orthogonalize(m, or with nesterov g + momentum (m - g)) + weight_decay * p)
// (Jordan et al., 2024). For the weights of hidden layers: parameters [rows, columns], and kernels [rows, ...] as such. Give all
// else (biases, norms, embeddings, the last layer) to AdamW, as an optimizer of its own.
class HT_API Muon final : public Directed<Muon, MuonOptions, update::Muon> {
 public:
  using Directed::Directed;
  static constexpr auto title = "Muon";
  static void check(const MuonOptions& o);
  static void check_parameters(const std::vector<Tensor>& params);
  static update::Muon settings(const MuonOptions& o) { return {o.momentum, o.nesterov, o.maximize}; }
  static double decay(const MuonOptions& o) { return o.weight_decay; }
  static void shape(const MuonOptions& o, const Directions& d);
};

}  // namespace halftone::optim
