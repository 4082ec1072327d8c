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
  Copies copies{};
  cudaGraphNode_t node = nullptr;  // of the recorded graph, which must live as long as what was made of it

  int blocks() const { return copies.first_block[copies.tensors]; }
};

InputKernel::InputKernel() : impl_(std::make_unique<Impl>()) { impl_->copies.chunk = int64_t{16} * threads; }
InputKernel::~InputKernel() = default;

bool InputKernel::takes(const Tensor& input) const {
  constexpr size_t most = size_t{4} << 20;
  const size_t bytes = static_cast<size_t>(input.numel()) * size_of(input.dtype());
  return bytes > 0 && bytes <= most && impl_->copies.tensors < Copies::capacity;
}

void InputKernel::add(const Tensor& to) {
  Copies& c = impl_->copies;
  const int i = c.tensors++;
  c.count[i] = to.numel() * static_cast<int64_t>(size_of(to.dtype()));
  c.first_block[i + 1] = c.first_block[i] + static_cast<int>(ceil_div(c.count[i], c.chunk));
  c.data[i][0] = c.data[i][1] = to.raw_data();
}
bool InputKernel::empty() const { return impl_->copies.tensors == 0; }

void InputKernel::record() {
  launch("copy of a captured step's inputs", copy_inputs, impl_->blocks(), threads, impl_->copies);
  cudaStreamCaptureStatus status{};
  const cudaGraphNode_t* last = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
  auto ask = [&](auto about) {  // it has edges since CUDA 13
    if constexpr (requires { about(stream(), &status, nullptr, nullptr, &last, &edges, &count); })
      return about(stream(), &status, nullptr, nullptr, &last, &edges, &count);
    else return about(stream(), &status, nullptr, nullptr, &last, &count);
  };
  check(ask(cudaStreamGetCaptureInfo), "capture");
  HT_CHECK(count == 1, "capture: the first kernel has ", count, " nodes");
  impl_->node = last[0];
}

void InputKernel::follow(cudaGraphExec_t executable, std::span<const Tensor> from) {
  Copies next = impl_->copies;
  bool moved = false;
  for (size_t i = 0; i < from.size(); ++i) {
    void* here = from[i].raw_data();
    moved |= std::exchange(next.data[i][1], here) != here;
  }
  if (!moved) return;
  void* arguments[] = {&next};
  cudaKernelNodeParams p{};
  p.func = reinterpret_cast<void*>(copy_inputs);
  p.gridDim = dim3(static_cast<unsigned>(impl_->blocks()));
  p.blockDim = dim3(threads);
  p.kernelParams = arguments;
  check(cudaGraphExecKernelNodeSetParams(executable, impl_->node, &p), "inputs of a captured step");
  impl_->copies = next;
}

}  // namespace halftone::cuda
