#pragma once
// Where loaders of several ranks are in their data, said so that another number of ranks can go on from there.
#include "halftone/core/state_dict.h"
#include "halftone/distributed/group.h"

namespace halftone::distributed {

namespace detail {
HT_API StateDict position_of_all(const StateDict& own, int ranks);
HT_API StateDict position_of_one(const StateDict& saved, const StateDict& own, int ranks);
}  // namespace detail

// In the place of a loader with a DistributedSampler, in a checkpoint: its state counts the batches of all ranks together. It loads
// on any number of ranks whose batches together are as large; each step then has the examples that it would have had. Throws Error
// where batches together are of another size. A view: the loader must outlive it.
template <Stateful Loader> class SharedPosition {
 public:
  SharedPosition(Loader& loader, const Group& group) : loader_(loader), ranks_(group.size()) {}
  StateDict state_dict() const { return detail::position_of_all(loader_.state_dict(), ranks_); }
  void load_state_dict(const StateDict& state) { loader_.load_state_dict(detail::position_of_one(state, loader_.state_dict(), ranks_)); }

 private:
  Loader& loader_;
  int ranks_;
};

}  // namespace halftone::distributed
