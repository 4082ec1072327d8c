#include "halftone/cuda/capture_inputs.h"

#include <utility>

#include "halftone/cuda/multi_tensor.cuh"

namespace halftone::cuda {
namespace {

constexpr int threads = 256;
using Copies = Table<2>;  // of bytes: to where, from where

template <class Word> __device__ void copy_words(char* to, const char* from, int64_t begin, int64_t end) {
  for (int64_t i = begin + static_cast<int64_t>(threadIdx.x * sizeof(Word)); i < end; i += static_cast<int64_t>(threads * sizeof(Word)))
    *reinterpret_cast<Word*>(to + i) = *reinterpret_cast<const Word*>(from + i);
}
__global__ void __launch_bounds__(threads) copy_inputs(const Copies copies) {
  wait_for_previous();
  const auto part = copies.part(static_cast<int>(blockIdx.x));
  auto *to = static_cast<char*>(copies.data[part.tensor][0]), *from = static_cast<char*>(copies.data[part.tensor][1]);
  const int64_t whole = aligned(from, 16) ? part.begin + (part.end - part.begin) / 16 * 16 : part.begin;
  copy_words<int4>(to, from, part.begin, whole);
  copy_words<char>(to, from, whole, part.end);
}

}  // namespace

struct InputKernel::Impl {
  Copies copies;
  cudaGraphNode_t node = nullptr;
};

InputKernel::InputKernel() : impl_(std::make_unique<Impl>()) {}
InputKernel::~InputKernel() = default;

bool InputKernel::takes(const Tensor& input) {
  constexpr size_t most = size_t{4} << 20;
  const size_t bytes = static_cast<size_t>(input.numel()) * size_of(input.dtype());
  return bytes > 0 && bytes <= most;
}

void InputKernel::record(const Tensors& to, std::span<const Tensor> from) {
  Copies& c = impl_->copies;
  c.chunk = int64_t{16} * threads;
  c.tensors = static_cast<int>(to.size());
  HT_CHECK(c.tensors <= Copies::capacity, "capture: expected at most ", Copies::capacity, " inputs, got ", c.tensors);
  c.first_block[0] = 0;
  for (size_t i = 0; i < to.size(); ++i) {
    c.count[i] = to[i].numel() * static_cast<int64_t>(size_of(to[i].dtype()));
    c.first_block[i + 1] = c.first_block[i] + static_cast<int>(ceil_div(c.count[i], c.chunk));
    c.data[i][0] = to[i].raw_data();
    c.data[i][1] = from[i].raw_data();
  }
  launch("copy of a captured step's inputs", copy_inputs, c.first_block[c.tensors], threads, c);
}

void InputKernel::find_in(cudaGraph_t graph) {
  size_t roots = 1;
  check(cudaGraphGetRootNodes(graph, &impl_->node, &roots), "capture");
  HT_CHECK(roots == 1, "capture: the graph begins with ", roots, " nodes");
}

void InputKernel::follow(cudaGraphExec_t executable, std::span<const Tensor> from) {
  Copies& c = impl_->copies;
  bool moved = false;
  for (size_t i = 0; i < from.size(); ++i) moved |= std::exchange(c.data[i][1], from[i].raw_data()) != from[i].raw_data();
  if (!moved) return;
  void* arguments[] = {&c};
  cudaKernelNodeParams p{};
  p.func = reinterpret_cast<void*>(copy_inputs);
  p.gridDim = dim3(static_cast<unsigned>(c.first_block[c.tensors]));
  p.blockDim = dim3(threads);
  p.kernelParams = arguments;
  check(cudaGraphExecKernelNodeSetParams(executable, impl_->node, &p), "inputs of a captured step");
}

}  // namespace halftone::cuda
