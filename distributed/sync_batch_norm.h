#pragma once
// Batch norm over the batches of all ranks: for networks whose share of a batch is too small for statistics of its own.
#include "halftone/distributed/group.h"
#include "halftone/nn/norm.h"

namespace halftone::nn {

// batch_norm in training (ops/norm.h), with the statistics of every rank's x [n, channels, ...] together, each element counting
// once: ranks may have different n, and none. One collective in forward and one in backward. Gradients of x are those of the
// joined batch; of w and b they are this rank's share of the sum, which DistributedDataParallel makes a mean of, as of any
// parameter's. running_mean and running_var move alike on all ranks. Statistics are taken in f32 (f64 for f64), about each
// rank's own mean, and joined by Chan et al., "Algorithms for computing the sample variance", 1983. Can be differentiated once.
HT_API Tensor sync_batch_norm(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& running_mean, const Tensor& running_var,
                              const BatchNormOptions& o, const distributed::Group& group);

// A BatchNorm of any rank of x; in evaluation it is one without a group.
class HT_API SyncBatchNorm : public BatchNorm {
 public:
  SyncBatchNorm(Size channels, const distributed::Group& group, BatchNormLayerOptions o = {});
  HT_FIELDS_AFTER(BatchNorm)
};

// Has every batch norm in `net` take its statistics over the group, as long as it lives, and says how many there are. Names,
// parameters and running statistics stay as they are.
HT_API int convert_sync_batch_norm(Module& net, const distributed::Group& group);

}  // namespace halftone::nn
