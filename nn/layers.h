#pragma once
// Linear, activations, losses, and modules made of modules. A layer's call costs what its operators cost.
#include "halftone/nn/module.h"
#include "halftone/ops/loss.h"
#include "halftone/ops/matmul.h"
#include "halftone/ops/softmax.h"
#include "halftone/ops/unary.h"

namespace halftone::nn {

// ---- linear

enum class Activation : uint8_t { none, relu, gelu };
struct LinearOptions {
  bool bias = true;
  Activation activation = Activation::none;  // fused: one kernel, and one rounding in 16-bit dtypes
};
// x [..., in] -> [..., out], f(x weight^T + bias). Weights and bias start uniform in [-1/sqrt(in), 1/sqrt(in)).
class HT_API Linear : public Module {
 public:
  Linear(Size in, Size out, LinearOptions o = {});
  Parameter weight, bias;  // [out, in], [out]; bias is undefined without one
  HT_FIELDS(weight, bias)
  Tensor forward(const Tensor& x) override { return forward_with(x, activation_); }
  Activation activation() const { return activation_; }

 private:
  friend class Sequential;
  Tensor forward_with(const Tensor& x, Activation a) const;
  Activation activation_;
};

// ---- activations: any shape, elementwise unless a dimension is named

class HT_API Identity : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return x; }
};
class HT_API ReLU : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return relu(x); }
};
class HT_API LeakyReLU : public Module {
 public:
  explicit LeakyReLU(double negative_slope = 0.01) : negative_slope_(negative_slope) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return leaky_relu(x, negative_slope_); }

 private:
  double negative_slope_;
};
class HT_API GELU : public Module {  // the erf form
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return gelu(x); }
};
class HT_API SiLU : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return silu(x); }
};
class HT_API Tanh : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return tanh(x); }
};
class HT_API Sigmoid : public Module {
 public:
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return sigmoid(x); }
};
class HT_API Softmax : public Module {
 public:
  explicit Softmax(int64_t dim = -1) : dim_(dim) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return softmax(x, dim_); }

 private:
  int64_t dim_;
};
class HT_API LogSoftmax : public Module {
 public:
  explicit LogSoftmax(int64_t dim = -1) : dim_(dim) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return log_softmax(x, dim_); }

 private:
  int64_t dim_;
};

// ---- shapes and functions

// Dimensions `from` to `to`, both included, become one: [n, c, h, w] -> [n, c * h * w].
class HT_API Flatten : public Module {
 public:
  explicit Flatten(int64_t from = 1, int64_t to = -1) : from_(from), to_(to) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return x.flatten(from_, to_); }

 private:
  int64_t from_, to_;
};
// Any function of one tensor. What it captures is shared with clones and has no name in the state.
class HT_API Lambda : public Module {
 public:
  explicit Lambda(std::function<Tensor(const Tensor&)> f) : f_(std::move(f)) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return f_(x); }

 private:
  std::function<Tensor(const Tensor&)> f_;
};

// ---- losses: of a prediction and a target

class HT_API CrossEntropyLoss : public Module {
 public:
  explicit CrossEntropyLoss(CrossEntropyOptions o = {}) : options_(o) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& target) { return cross_entropy(x, target, options_); }
  Tensor operator()(const Tensor& x, const Tensor& target) { return forward(x, target); }

 private:
  CrossEntropyOptions options_;
};
class HT_API MSELoss : public Module {
 public:
  explicit MSELoss(Reduction reduction = Reduction::mean) : reduction_(reduction) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& y) { return mse_loss(x, y, reduction_); }
  Tensor operator()(const Tensor& x, const Tensor& y) { return forward(x, y); }

 private:
  Reduction reduction_;
};

// ---- modules in a row

// Whether these can be moved into a list of modules.
template <class... M> concept Modules = sizeof...(M) > 0 && (std::derived_from<std::remove_cvref_t<M>, Module> && ...);

// Modules of any types, named "0", "1", ...; what calls them is up to the model. Braces, not parentheses: only they
// make the layers, and so draw their weights, from left to right. A lone list in braces is moved, not nested; add()
// nests.
class HT_API ModuleList : public Module {
 public:
  ModuleList() = default;
  template <class... M> requires Modules<M...> explicit ModuleList(M&&... m) {
    layers_.reserve(sizeof...(M));
    (ModuleList::add(std::forward<M>(m)), ...);
  }
  template <class M> requires Modules<M> ModuleList& add(M&& m) & {
    static_assert(!std::is_lvalue_reference_v<M>,
                  "Sequential and ModuleList own their layers: "
                  "construct them in place, std::move them in, or pass layer.clone()");
    layers_.emplace_back(std::forward<M>(m));
    return *this;
  }
  template <class M> requires Modules<M> ModuleList add(M&& m) && { return std::move(add(std::forward<M>(m))); }

  size_t size() const { return layers_.size(); }
  bool empty() const { return layers_.empty(); }
  Module& operator[](size_t i) { return at(i).get(); }
  // Layer i as an M; throws, naming both types, when it is not one.
  template <class M> M& as(size_t i) { return at(i).template as<M>(); }
  auto begin() { return layers_.begin(); }  // of nn::Any, which is called like the layer in it
  auto end() { return layers_.end(); }

  using Module::forward;
  void ht_fields(Fields& f) override { f.list(*this, "", layers_); }
  auto clone() const { return nn::clone(*this, layers_); }

 protected:
  std::vector<Any> layers_;

 private:
  const Any& at(size_t i) const;
};

// Layers called one after the other. A Linear that a ReLU or GELU follows runs with it as one fused operator: names,
// state and, in f32, results stay; a 16-bit result is rounded once instead of twice. fuse(false) turns that off.
class HT_API Sequential : public ModuleList {
 public:
  Sequential() = default;
  template <class... M> requires Modules<M...> explicit Sequential(M&&... m) : ModuleList(std::forward<M>(m)...) {}
  template <class M> requires Modules<M> Sequential& add(M&& m) & {
    ModuleList::add(std::forward<M>(m));
    return *this;
  }
  template <class M> requires Modules<M> Sequential add(M&& m) && { return std::move(add(std::forward<M>(m))); }
  Sequential& fuse(bool on) & {
    fuse_ = on;
    return *this;
  }
  Sequential fuse(bool on) && { return std::move(fuse(on)); }

  HT_FIELDS_AFTER(ModuleList)
  Tensor forward(const Tensor& x) override;

 private:
  bool fuse_ = true;
};

// A module that runs in one dtype whatever region surrounds it: its parameters and its argument are converted to it, and
// autocast is off inside. It adds nothing to names.
//   nn::PrecisionIsland stable{nn::Linear(128, 10), DType::f32};
class HT_API PrecisionIsland final : public Module {
 public:
  PrecisionIsland(Any module, DType dtype);
  DType dtype() const { return dtype_; }
  Module& module() const { return held_.get(); }

  using Module::forward;
  void ht_fields(Fields& f) override { f.list(*this, "", held_); }
  auto clone() const { return nn::clone(*this, held_); }
  Tensor forward(const Tensor& x) override;

 private:
  Any held_;
  DType dtype_;
};

}  // namespace halftone::nn
