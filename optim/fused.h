#pragma once
// What optimizers have in common whose step is one operator (ops/optimizers.h): groups with options, and how options become
// the operator's attributes.
#include "halftone/ops/optimizers.h"
#include "halftone/optim/optimizer.h"

namespace halftone::optim {

// Self has `title`; check(options), which throws; settings(options), the operator's struct; where not every parameter will do,
// check_parameters(params). Options have `lr`.
template <class Self, class Options, class Op> class Fused : public Optimizer {
 public:
  explicit Fused(std::vector<Tensor> params, Options o = {}) : Optimizer(Self::title, kept_states()) { add_group(std::move(params), o); }
  explicit Fused(std::vector<Group<Options>> groups) : Optimizer(Self::title, kept_states()) {
    for (auto& g : groups) add_group(std::move(g.params), g.options);
  }
  // Parameters from now on, with options of their own.
  void add_group(std::vector<Tensor> params, Options o = {}) {
    HT_CHECK(o.lr >= 0, Self::title, ": expected lr of 0 or more, got ", o.lr);
    Self::check(o);
    if constexpr (requires { Self::check_parameters(params); }) Self::check_parameters(params);
    Optimizer::add_group(std::move(params), o.lr);
    options_.push_back(o);
  }
  const char* name() const override { return Self::title; }
  const Options& options(size_t group = 0) const { return options_.at(group); }

 private:
  static std::vector<const char*> kept_states() { return {Op::states.begin(), Op::states.end() - update::directs<Op>}; }
  const OpDef& op() const override { return update::def<Op>; }
  Attrs attrs(size_t group, int n) const override { return Attrs::of(update::Given<Op>{n, Self::settings(options_[group]), rounding()}); }
  bool uses_state(size_t group, size_t k) const override { return Self::settings(options_[group]).uses(k); }
  std::optional<double> first_memory() const override {
    if constexpr (update::has_memory<Op>) return Op::first_memory;
    else return {};
  }
  std::vector<Options> options_;
};

namespace detail {
// "Adam: expected beta1 in [0, 1), got 1.5".
HT_API void check_share(const char* who, const char* what, double v);
HT_API void check_positive(const char* who, const char* what, double v);  // or 0
}  // namespace detail

}  // namespace halftone::optim
