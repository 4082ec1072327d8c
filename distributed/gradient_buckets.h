#pragma once
// What DistributedDataParallel does apart from the model's type: parameters and buffers that begin alike on all ranks, and
// gradients that lie side by side in buckets, each of which is reduced as soon as the last of its gradients is there.
// Every rank issues the same collectives in the same order, whichever of its gradients come first: bucket after bucket.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halftone/core/hook.h"
#include "halftone/distributed/group.h"
#include "halftone/nn/module.h"

namespace halftone::nn {

struct DistributedDataParallelOptions {
  double bucket_mib = 25, first_bucket_mib = 1;  // gradients reduced together; the first are there first, and need not wait for many
  std::optional<DType> compress = {};            // f16 or bf16: gradients are rounded to it on their way
  bool broadcast_buffers = true;                 // before each forward in training, buffers (statistics) become rank 0's
  bool unused_parameters = false;                // some ranks' losses may leave out parameters; see DistributedDataParallel
};

namespace detail {

class HT_API GradientBuckets {
 public:
  // Throws MismatchError, with the first difference, on every rank when the ranks' models differ.
  GradientBuckets(Module& net, distributed::Group group, const DistributedDataParallelOptions& options);
  GradientBuckets(const GradientBuckets&) = delete;

  // Around each call of the model.
  void before_forward();
  void after_forward(const std::vector<Tensor>& outputs);
  const distributed::Group& group() const { return group_; }
  size_t size() const { return buckets_.size(); }
  bool& reduces() { return reduces_; }

 private:
  struct Entry {
    std::string name;
    Tensor parameter, gradient;  // the gradient's place in its bucket, which is the parameter's .grad
    size_t bucket = 0;
    bool here = false;       // in this run its place has what is to be reduced
    bool absent = false;     // which is 0, as there is no gradient
    bool reachable = true;   // from the outputs of the forwards since the last run
    bool used = true;        // by some rank, when that was asked last
  };
  struct Bucket {
    Tensor flat;                   // the gradients, and zeros between them
    std::vector<size_t> entries;
    size_t missing = 0;
    Tensor wire, largest, factor;  // compressed; of all ranks; by which it was multiplied
    distributed::Pending pending;
  };
  void compare(const std::vector<std::string>& descriptions) const;
  void broadcast_parameters();
  void make_buckets();
  void place_buffers();
  void arrived(size_t i);
  void begin();
  void take(Entry& e);
  void issue_complete();
  void measure(Bucket& b);
  void send(Bucket& b);
  void receive(Bucket& b);
  void end();
  void settle_absent();
  bool scaled(const Bucket& b) const;

  Module& net_;
  distributed::Group group_;
  DistributedDataParallelOptions options_;
  std::vector<Entry> entries_;   // in the order of their registration
  std::vector<Bucket> buckets_;  // in the order in which they are reduced
  std::vector<Tensor> buffers_, flat_buffers_, placed_buffers_;
  Tensor usage_;
  std::vector<HookHandle> hooks_;
  bool reduces_ = true, walked_ = false;
  std::weak_ptr<int> run_;  // expired: no backward run is being followed
  size_t next_ = 0;         // the bucket whose turn it is
};

}  // namespace detail
}  // namespace halftone::nn
