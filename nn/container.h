#pragma once
// Modules made of modules.
#include "halftone/nn/module.h"

namespace halftone::nn {

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

// Layers called one after the other. A Linear that a ReLU or GELU follows runs with it as one fused operator, and so do Conv2d and
// BatchNorm with a ReLU: names, state and, in f32, results stay; a 16-bit result is rounded once instead of twice. A ReLU runs behind
// the max pool that follows it, on fewer elements; the result is the same, but for a zero's sign. fuse(false) turns all that off.
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
  friend class BatchNorm;
  Tensor first_layers(size_t count, const Tensor& x);
  // second(first(x)) by one operator, where there is one; else undefined.
  static Tensor fused(Any& first, Any& second, const Tensor& x);
  // Whether layer i is a ReLU that runs behind the next, a max pool.
  bool pools_first(size_t i, size_t count);
  bool fuse_ = true;
};

// Modules of any types under names of their own, in the order in which they were added; what calls them is up to the model.
class HT_API ModuleDict : public Module {
 public:
  ModuleDict() = default;
  template <class M> requires Modules<M> ModuleDict& add(std::string name, M&& m) & {
    static_assert(!std::is_lvalue_reference_v<M>,
                  "ModuleDict owns its modules: construct them in place, std::move them in, or pass module.clone()");
    check_new(name);
    modules_.emplace_back(std::move(name), std::forward<M>(m));
    return *this;
  }
  template <class M> requires Modules<M> ModuleDict add(std::string name, M&& m) && {
    return std::move(add(std::move(name), std::forward<M>(m)));
  }

  size_t size() const { return modules_.size(); }
  bool empty() const { return modules_.empty(); }
  bool contains(std::string_view name) { return modules_.find(name); }
  Module& operator[](std::string_view name) { return at(name).get(); }
  // The module of this name as an M; throws, naming both types, when it is not one.
  template <class M> M& as(std::string_view name) { return at(name).template as<M>(); }
  auto begin() { return modules_.begin(); }  // of pairs of a name and an nn::Any
  auto end() { return modules_.end(); }

  using Module::forward;
  void ht_fields(Fields& f) override { f.list(*this, "", modules_); }
  auto clone() const { return nn::clone(*this, modules_); }

 private:
  void check_new(const std::string& name);
  Any& at(std::string_view name);
  Ordered<Any> modules_;
};

// x plus what a module makes of it. It adds nothing to names.
class HT_API Residual final : public Module {
 public:
  explicit Residual(Any module) : held_(std::move(module)) {}
  Module& module() const { return held_.get(); }

  using Module::forward;
  void ht_fields(Fields& f) override { f.list(*this, "", held_); }
  auto clone() const { return nn::clone(*this, held_); }
  Tensor forward(const Tensor& x) override;

 private:
  Any held_;
};

// A module that runs in one dtype whatever region or model surrounds it: its parameters have it and keep it, its argument is
// converted to it, and autocast is off inside. It adds nothing to names.
//   nn::PrecisionIsland stable{nn::Linear(128, 10), DType::f32};
class HT_API PrecisionIsland final : public Module {
 public:
  PrecisionIsland(Any module, DType dtype);
  DType dtype() const { return dtype_; }
  std::optional<DType> fixed_dtype() const override { return dtype_; }
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
