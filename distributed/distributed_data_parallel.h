#pragma once
// DistributedDataParallel: every rank has the whole model and a share of the batch, and all take the same step.
//
//   distributed::Group group = distributed::init();
//   net.to(group.device());
//   nn::DistributedDataParallel ddp(net, group);
//   optim::AdamW opt(ddp.parameters());
//   ...                                              // the loop of one process: ddp(x) in the place of net(x)
#include <utility>

#include "halftone/distributed/gradient_buckets.h"
#include "halftone/distributed/results.h"

namespace halftone::nn {

// A view of `net`, which must outlive it; all ranks make theirs together. Parameters and buffers become rank 0's, and each
// parameter's .grad lies in a bucket from then on. During backward each bucket is reduced to the ranks' mean as soon as it is
// complete; backward returns when all are (on a GPU: when all are queued). What follows, clipping, scaler, optimizer, is the
// same on every rank, bit for bit: an inf or NaN of one rank is in the mean of all.
//
// Unused parameters: every rank's loss must reach every parameter, or backward throws, after the reductions, naming one. With
// unused_parameters = true it need not: what this rank did not use counts as 0 in the mean, a parameter that no rank used keeps
// an empty .grad, and buckets do not wait for what the model's outputs cannot reach. That costs a walk over the graph, one more
// small collective, and, on ranks that left something out, a wait for it (in a captured step the last eager one's answer holds).
//
// Refused, with an error: backward with create_graph (grad() may have it), and hooks that start a backward that reaches the
// model's parameters a second time. A rank whose backward throws leaves the others waiting for their deadline.
template <class M> class DistributedDataParallel {
 public:
  DistributedDataParallel(M& net, distributed::Group group, DistributedDataParallelOptions o = {}) : net_(net), buckets_(net, std::move(group), o) {}
  DistributedDataParallel(const M&&, distributed::Group, DistributedDataParallelOptions = {}) = delete;  // it is a view: net must outlive it
  DistributedDataParallel(const DistributedDataParallel&) = delete;

  template <class... X> auto operator()(X&&... x) {
    buckets_.before_forward();
    auto y = net_(std::forward<X>(x)...);
    buckets_.after_forward(detail::tensors_of(y));
    return y;
  }

  // While the guard lives, backward reduces nothing: gradients add up on each rank, and those of the first backward after it are
  // reduced with what came before. For all but the last part of an accumulated batch.
  class NoSync {
   public:
    [[nodiscard]] explicit NoSync(bool& reduces) : reduces_(reduces), before_(std::exchange(reduces, false)) {}
    ~NoSync() { reduces_ = before_; }
    NoSync(const NoSync&) = delete;

   private:
    bool& reduces_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(buckets_.reduces()); }

  // For GradScaler::set_agreement: all ranks skip when one does. With gradients that only this class has reduced they do so
  // anyway; it is for those that are changed afterwards, or that belong to parameters outside of the model.
  std::function<void(const Tensor&)> agreement() const {
    return [group = buckets_.group()](const Tensor& found_inf) { group.all_reduce(found_inf, distributed::Reduce::max).wait(); };
  }

  std::vector<Tensor> parameters() const { return net_.parameters(); }
  M& module() const { return net_; }
  const distributed::Group& group() const { return buckets_.group(); }
  size_t buckets() const { return buckets_.size(); }

 private:
  M& net_;
  detail::GradientBuckets buckets_;
};

}  // namespace halftone::nn
