#pragma once
// DataParallel: one process and several devices. Each has a copy of the model and runs a part of the batch.
//
//   nn::DataParallel dp(net, devices(DeviceType::cuda));
//   { amp::Autocast a; loss = cross_entropy(dp(x), target); }   // dp(x) in the place of net(x); all else is as before
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "halftone/distributed/results.h"
#include "halftone/nn/module.h"

namespace halftone {
class Context;
}
namespace halftone::nn {
namespace detail {

// The replicas, apart from the model's type.
class HT_API Replicas {
 public:
  // Replica i is of the type of `master` and on devices[i]. The first one shares the master's memory.
  Replicas(Module& master, std::vector<std::unique_ptr<Module>> replicas, std::vector<Device> devices);
  ~Replicas();
  Replicas(const Replicas&) = delete;
  void refresh();
  Module& at(size_t i) const { return *replicas_.at(i); }

  // forward(i, its parts of `inputs`) for each replica that has rows; the results joined, with the history of the master's
  // parameters and of the inputs. `self` keeps the replicas for backward.
  using Forward = std::function<std::vector<Tensor>(size_t replica, const std::vector<Tensor>& inputs)>;
  static std::vector<Tensor> run(const std::shared_ptr<Replicas>& self, const std::vector<Tensor>& inputs, const Forward& forward);

 private:
  struct Call;
  struct Workers;
  struct Version { uint64_t master, replica; };
  void each(size_t n, bool draws, const std::function<void(size_t replica)>& f);
  static std::vector<Tensor> backward(Context& ctx, std::span<const Tensor> g);
  std::vector<Tensor> reduced(const Call& call) const;

  Module& master_;
  std::vector<std::unique_ptr<Module>> replicas_;
  std::vector<Device> devices_;
  std::vector<std::vector<Version>> seen_;  // of replica and tensor, at the last refresh
  std::unique_ptr<Workers> workers_;
};

}  // namespace detail

// A view of `net`, which must outlive it and keep its layers; net's tensors are on devices[0]. A device may stand in the list
// more than once: {Device::cpu(), Device::cpu()} are two threads.
//
// A call cuts each tensor argument along dimension 0 into one part a device, the first ones a row longer where that does not
// come out even; devices without a row stay idle. The replicas run under the whole thread state of the caller, autocast
// included, with random numbers of their own that follow from the caller's generator, and results are joined along dimension 0
// on devices[0]; a result that is one number becomes a vector of one number a part. In backward, which runs on all devices as
// well, parameters get the sum of the replicas' gradients in the order of the devices, ((g0 + g1) + g2) + ...
//
// Replicas last from call to call; a call copies to them what has changed in net since. Buffers of net, such as running
// statistics, are written by the first replica alone, which sees a part of the batch. An exception of a replica reaches the caller
// as it is, the first one's where there are several, when all have ended.
//
// Refused: backward with create_graph, and a second backward through one call. One process with one device each
// (DistributedDataParallel) is faster.
template <class M> class DataParallel {
 public:
  DataParallel(M& net, const std::vector<Device>& devices) {
    using Copy = decltype(net.clone());
    static_assert(std::derived_from<Copy, Module>, "DataParallel: a field of this model cannot be copied, and each device needs a copy");
    std::vector<std::unique_ptr<Module>> all;
    for (size_t i = 0; i < devices.size(); ++i) all.push_back(std::make_unique<Copy>(net.clone()));
    count_ = devices.size();
    replicas_ = std::make_shared<detail::Replicas>(net, std::move(all), devices);
  }
  DataParallel(const M&&, const std::vector<Device>&) = delete;  // it is a view: net must outlive it
  DataParallel(const DataParallel&) = delete;

  template <class... X> auto operator()(const X&... x) {
    using Y = std::decay_t<decltype(std::declval<M&>()(x...))>;
    std::tuple<std::conditional_t<std::derived_from<X, Tensor>, Tensor, std::decay_t<X>>...> arguments(x...);
    std::vector<std::optional<Y>> results(count_);
    auto forward = [&](size_t i, const std::vector<Tensor>& part) {
      auto own = arguments;
      size_t k = 0;
      detail::each_tensor(own, [&](Tensor& t) { if (t.defined()) t = part[k++]; });
      results[i].emplace(std::apply([&](const auto&... v) { return replica(i)(v...); }, own));
      return detail::tensors_of(*results[i]);
    };
    std::vector<Tensor> joined = detail::Replicas::run(replicas_, detail::tensors_of(arguments), forward);
    size_t k = 0;
    detail::each_tensor(*results[0], [&](Tensor& t) { if (t.defined()) t = joined[k++]; });
    return std::move(*results[0]);
  }

  // Brings the replicas up to date, as the next call would.
  void refresh() { replicas_->refresh(); }
  M& replica(size_t i) const { return static_cast<M&>(replicas_->at(i)); }

 private:
  size_t count_ = 0;
  std::shared_ptr<detail::Replicas> replicas_;
};

}  // namespace halftone::nn
