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

  // Whether it takes an input of this size; larger ones are left to the driver, which copies as fast.
  static bool takes(const Tensor& input);
  // Queues the kernel, before all others of a graph that is being recorded: from[i] to to[i], contiguous and on the current device.
  void record(const Tensors& to, std::span<const Tensor> from);
  // The recorded graph, which must live as long as what was made of it.
  void find_in(cudaGraph_t graph);
  // What the next launches copy.
  void follow(cudaGraphExec_t executable, std::span<const Tensor> from);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halftone::cuda
