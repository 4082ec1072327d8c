#pragma once
// Optimizer states shared out over the ranks (ZeRO stage 1: Rajbhandari et al., "ZeRO: memory optimizations toward training
// trillion parameter models", 2020): each rank keeps the states of some parameters, updates these, and hands them to the others.
//
//   optim::AdamW opt(ddp.parameters(), {.lr = 1e-3});
//   distributed::ShardedState shards(opt, group);        // everything else as before
#include <memory>

#include "halftone/distributed/group.h"
#include "halftone/optim/optimizer.h"

namespace halftone::distributed {

// Shares out an optimizer's states while it lives; before the first step, on all ranks, whose optimizers are made alike and step
// together. Steps have the bits of the plain optimizer's where gradients are the same on all ranks, as DistributedDataParallel
// leaves them; scaler, clipping, schedules and masters work as they do there. Averages (EMA, Lookahead) are made after it.
// Parameters move into one tensor for each rank and dtype, from which the broadcasts at the end of a step go without copies.
// It refers to the optimizer, which must outlive it and stay in its place.
class HT_API ShardedState {
 public:
  ShardedState(optim::Optimizer& opt, const Group& group);
  ~ShardedState();
  ShardedState(const ShardedState&) = delete;

  // Which rank has the states of parameter i of a group. By size, the largest first, each to the rank with the least so far.
  int owner(size_t group, size_t i) const;

  // For a checkpoint: consolidate(), on all ranks, brings the states to rank 0 (in its devices' memory); state_dict() then gives
  // them there until the next step, as the plain optimizer's would be. Elsewhere, and else, it gives this rank's own.
  void consolidate();
  StateDict state_dict() const;
  // Each rank takes its share of a state from state_dict() of any number of ranks, or from a plain optimizer's.
  void load_state_dict(const StateDict& state);

 private:
  struct Shards;
  std::shared_ptr<Shards> shards_;
  optim::Optimizer& opt_;
};

}  // namespace halftone::distributed
