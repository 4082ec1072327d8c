#pragma once
// How the inputs of a captured step come to where its graph reads them: small ones by the graph's first kernel, whose parameters say
// where they are this time. A copy before the launch costs a few microseconds each, as much as a small network's kernels.
#include <cuda_runtime.h>

#include <memory>
#include <span>

#include "halftone/core/tensor.h"

namespace halftone::cuda {

class InputKernel {
 public:
  InputKernel();
  ~InputKernel();
  InputKernel(const InputKernel&) = delete;

  // Whether it takes one more input, of this size; larger ones are left to the driver, which copies as fast.
  bool takes(const Tensor& input) const;
  void add(const Tensor& to);
  bool empty() const;
  // Queues the kernel, before all others of a graph that is being recorded.
  void record();
  // From where the next launches copy, contiguous and on the device, in the order of add(). When it throws nothing has changed.
  void follow(cudaGraphExec_t executable, std::span<const Tensor> from);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halftone::cuda
