#pragma once
// A loader whose batches are an input and a target, whatever dataset and type it has: what train() takes.
#include <functional>
#include <memory>

#include "halftone/core/state_dict.h"

namespace halftone {

// Refers to the loader, which must outlive it. Each batch is auto& [x, target], two tensors with the examples in dimension 0.
class HT_API Batches {
 public:
  template <class Loader>
    requires(Stateful<Loader> && !std::same_as<std::remove_cv_t<Loader>, Batches>)
  Batches(Loader& loader) : source_(std::make_shared<Of<Loader>>(loader)) {}

  int64_t size() const { return source_->size(); }  // of an epoch
  // One epoch, or what is left of it: f(x, target) until it returns false.
  using Each = std::function<bool(const Tensor& x, const Tensor& target)>;
  void each(const Each& f) const { source_->each(f); }
  StateDict state_dict() const { return source_->state_dict(); }
  void load_state_dict(const StateDict& state) { source_->load_state_dict(state); }

 private:
  struct Source {
    virtual ~Source() = default;
    virtual int64_t size() const = 0;
    virtual void each(const Each& f) = 0;
    virtual StateDict state_dict() const = 0;
    virtual void load_state_dict(const StateDict& state) = 0;
  };
  template <class Loader> struct Of final : Source {
    Loader& loader;
    explicit Of(Loader& l) : loader(l) {}
    int64_t size() const override { return static_cast<int64_t>(loader.size()); }
    void each(const Each& f) override {
      for (auto& [x, target] : loader)
        if (!f(x, target)) break;
    }
    StateDict state_dict() const override { return loader.state_dict(); }
    void load_state_dict(const StateDict& state) override { loader.load_state_dict(state); }
  };
  std::shared_ptr<Source> source_;
};

}  // namespace halftone
