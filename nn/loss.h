#pragma once
// Losses as modules: the functions of ops/loss.h with their options. Weights of classes are buffers, which move with the
// module and have PyTorch's names in its state.
#include "halftone/nn/module.h"
#include "halftone/ops/loss.h"

namespace halftone::nn {

// Of a prediction and a target.
class HT_API Loss : public Module {
 public:
  using Module::forward;
  using Module::operator();
  virtual Tensor forward(const Tensor& x, const Tensor& target) = 0;
  Tensor operator()(const Tensor& x, const Tensor& target) {
    WithinScope here(this);
    return forward(x, target);
  }
};

// ---- classes

class HT_API CrossEntropyLoss : public Loss {
 public:
  explicit CrossEntropyLoss(CrossEntropyOptions o = {}) : weight(o.weight), options_(o) {}
  Buffer weight;
  HT_FIELDS(weight)
  Tensor forward(const Tensor& x, const Tensor& target) override {
    CrossEntropyOptions o = options_;
    o.weight = weight;
    return cross_entropy(x, target, o);
  }

 private:
  CrossEntropyOptions options_;
};
class HT_API NLLLoss : public Loss {
 public:
  explicit NLLLoss(NllOptions o = {}) : weight(o.weight), options_(o) {}
  Buffer weight;
  HT_FIELDS(weight)
  Tensor forward(const Tensor& x, const Tensor& target) override {
    NllOptions o = options_;
    o.weight = weight;
    return nll_loss(x, target, o);
  }

 private:
  NllOptions options_;
};

// ---- values

class HT_API MSELoss : public Loss {
 public:
  explicit MSELoss(Reduction reduction = Reduction::mean) : reduction_(reduction) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& target) override { return mse_loss(x, target, reduction_); }

 private:
  Reduction reduction_;
};
class HT_API L1Loss : public Loss {
 public:
  explicit L1Loss(Reduction reduction = Reduction::mean) : reduction_(reduction) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& target) override { return l1_loss(x, target, reduction_); }

 private:
  Reduction reduction_;
};
class HT_API HuberLoss : public Loss {
 public:
  explicit HuberLoss(double delta = 1, Reduction reduction = Reduction::mean) : delta_(delta), reduction_(reduction) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& target) override { return huber_loss(x, target, delta_, reduction_); }

 private:
  double delta_;
  Reduction reduction_;
};
class HT_API SmoothL1Loss : public Loss {
 public:
  explicit SmoothL1Loss(double beta = 1, Reduction reduction = Reduction::mean) : beta_(beta), reduction_(reduction) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& target) override { return smooth_l1_loss(x, target, beta_, reduction_); }

 private:
  double beta_;
  Reduction reduction_;
};

// ---- binary targets

class HT_API BCELoss : public Loss {
 public:
  explicit BCELoss(BceOptions o = {}) : weight(o.weight), options_(o) {}
  Buffer weight;
  HT_FIELDS(weight)
  Tensor forward(const Tensor& x, const Tensor& target) override {
    BceOptions o = options_;
    o.weight = weight;
    return binary_cross_entropy(x, target, o);
  }

 private:
  BceOptions options_;
};
class HT_API BCEWithLogitsLoss : public Loss {
 public:
  explicit BCEWithLogitsLoss(BceWithLogitsOptions o = {}) : weight(o.weight), pos_weight(o.pos_weight), options_(o) {}
  Buffer weight, pos_weight;
  HT_FIELDS(weight, pos_weight)
  Tensor forward(const Tensor& x, const Tensor& target) override {
    BceWithLogitsOptions o = options_;
    o.weight = weight;
    o.pos_weight = pos_weight;
    return binary_cross_entropy_with_logits(x, target, o);
  }

 private:
  BceWithLogitsOptions options_;
};

// ---- distributions

class HT_API KLDivLoss : public Loss {
 public:
  explicit KLDivLoss(KlDivOptions o = {}) : options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& target) override { return kl_div(x, target, options_); }

 private:
  KlDivOptions options_;
};
class HT_API PoissonNLLLoss : public Loss {
 public:
  explicit PoissonNLLLoss(PoissonNllOptions o = {}) : options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& target) override { return poisson_nll_loss(x, target, options_); }

 private:
  PoissonNllOptions options_;
};
class HT_API GaussianNLLLoss : public Module {
 public:
  explicit GaussianNLLLoss(GaussianNllOptions o = {}) : options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& target, const Tensor& var) {
    return gaussian_nll_loss(x, target, var, options_);
  }
  Tensor operator()(const Tensor& x, const Tensor& target, const Tensor& var) {
    return forward(x, target, var);
  }

 private:
  GaussianNllOptions options_;
};
class HT_API CTCLoss : public Module {
 public:
  explicit CTCLoss(CtcOptions o = {}) : options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& targets, const Tensor& input_lengths, const Tensor& target_lengths) {
    return ctc_loss(x, targets, input_lengths, target_lengths, options_);
  }
  Tensor operator()(const Tensor& x, const Tensor& targets, const Tensor& input_lengths, const Tensor& target_lengths) {
    return forward(x, targets, input_lengths, target_lengths);
  }

 private:
  CtcOptions options_;
};

// ---- margins

class HT_API HingeLoss : public Loss {
 public:
  explicit HingeLoss(MarginOptions o = {.margin = 1}) : options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& target) override { return hinge_loss(x, target, options_); }

 private:
  MarginOptions options_;
};
class HT_API HingeEmbeddingLoss : public Loss {
 public:
  explicit HingeEmbeddingLoss(MarginOptions o = {.margin = 1}) : options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& target) override { return hinge_embedding_loss(x, target, options_); }

 private:
  MarginOptions options_;
};
class HT_API MarginRankingLoss : public Module {
 public:
  explicit MarginRankingLoss(MarginOptions o = {}) : options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& a, const Tensor& b, const Tensor& y) {
    return margin_ranking_loss(a, b, y, options_);
  }
  Tensor operator()(const Tensor& a, const Tensor& b, const Tensor& y) {
    return forward(a, b, y);
  }

 private:
  MarginOptions options_;
};
class HT_API CosineEmbeddingLoss : public Module {
 public:
  explicit CosineEmbeddingLoss(MarginOptions o = {}) : options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& a, const Tensor& b, const Tensor& y) {
    return cosine_embedding_loss(a, b, y, options_);
  }
  Tensor operator()(const Tensor& a, const Tensor& b, const Tensor& y) {
    return forward(a, b, y);
  }

 private:
  MarginOptions options_;
};
class HT_API TripletMarginLoss : public Module {
 public:
  explicit TripletMarginLoss(TripletOptions o = {}) : options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& anchor, const Tensor& positive, const Tensor& negative) {
    return triplet_margin_loss(anchor, positive, negative, options_);
  }
  Tensor operator()(const Tensor& anchor, const Tensor& positive, const Tensor& negative) {
    return forward(anchor, positive, negative);
  }

 private:
  TripletOptions options_;
};

}  // namespace halftone::nn
