// Random draws on CUDA: element i is word i % 4 of the Philox block at offset + i / 4, as on the CPU, and a thread
// takes whole blocks. Compiled without contraction to fused multiply-adds, so that values have the CPU's bits.
#include "halftone/ops/random.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"
#include "halftone/ops/copy.h"

namespace halftone::cuda {
namespace {

__device__ void advance(uint64_t* state, int64_t n) { state[1] += static_cast<uint64_t>((n + 3) / 4); }
__global__ void advance_kernel(uint64_t* state, const int64_t n) { advance(state, n); }

// state: {seed, offset}. A grid of one block advances it, too.
template <bool normal, class T>
__global__ void __launch_bounds__(256) draw_kernel(T* x, const int64_t n, uint64_t* state, const DrawRange range) {
  constexpr int pack = pack_size<T> < 4 ? pack_size<T> : 4;
  const uint64_t seed = state[0], first = state[1];
  const bool packed = aligned(x, sizeof(Pack<T, pack>));
  for (int64_t q = thread_index(); q * 4 < n; q += grid_threads()) {
    const Philox4 block = philox(seed, first + static_cast<uint64_t>(q));
#pragma unroll
    for (int k = 0; k < 4; k += pack) {
      Pack<T, pack> v;
#pragma unroll
      for (int j = 0; j < pack; ++j) {
        const double u = normal ? normal_from(block, k + j) : static_cast<double>(uniform01(block.v[k + j]));
        v.v[j] = draw_value<T, normal>(u, range);
      }
      store_part(x + q * 4 + k, n - q * 4 - k, packed, v);
    }
  }
  if (gridDim.x > 1) return;
  __syncthreads();
  if (threadIdx.x == 0) advance(state, n);
}

template <bool normal> void run_draw(const Call& c, std::span<Tensor>) {
  const Tensor& x = c.in[0];
  const int64_t n = x.numel();
  if (n == 0) return;
  const Tensor dense = x.is_contiguous() ? x : Tensor::empty(Meta(x.shape(), x.dtype(), x.device()));
  auto* state = static_cast<uint64_t*>(c.in[1].raw_data());
  const int64_t blocks = std::min<int64_t>(ceil_div(n, 4 * 256), int64_t{16} * sm_count());
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    launch(c.op->name, draw_kernel<normal, T>, blocks, 256, dense.data<T>(), n, state, c.as<DrawRange>());
  });
  if (blocks > 1) launch(c.op->name, advance_kernel, 1, 1, state, n);
  if (dense.storage() != x.storage()) call_all(op::copy, {x, dense});
}

}  // namespace

void fill_cuda_random() {
  fill<run_draw<false>>(op::uniform);
  fill<run_draw<true>>(op::normal);
}

}  // namespace halftone::cuda
