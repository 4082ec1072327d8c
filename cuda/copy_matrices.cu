// Rows that begin anywhere allow no wide access. A warp takes a run of a row, and each thread has several of its elements under
// way before it writes the first.
#include "halftone/cuda/copy_matrices.h"

#include <algorithm>

#include "halftone/cuda/numeric.cuh"
#include "halftone/cuda/runtime.h"

namespace halftone::cuda {
namespace {

constexpr int threads = 256, warps = threads / warp_size, together = 8, run = together * warp_size;

template <class U>
__global__ void __launch_bounds__(threads) copy_matrices_kernel(U* to, const MatrixStack to_lies, const U* from, const MatrixStack from_lies,
                                                                const uint32_t runs_of_row, const uint32_t runs) {
  wait_for_previous();
  const uint32_t warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size, rows = static_cast<uint32_t>(to_lies.rows);
  for (uint32_t n = blockIdx.x * warps + warp; n < runs; n += gridDim.x * warps) {
    const int64_t line = n / runs_of_row, row = static_cast<uint32_t>(line) % rows, matrix = static_cast<uint32_t>(line) / rows;
    const int64_t first = int64_t{n % runs_of_row} * run + lane, live = row < from_lies.rows ? from_lies.cols : 0;
    const U* x = from + matrix * from_lies.step + row * from_lies.leading + first;
    U* y = to + matrix * to_lies.step + row * to_lies.leading + first;
    U v[together];
#pragma unroll
    for (int j = 0; j < together; ++j) v[j] = first + j * warp_size < live ? x[j * warp_size] : U{0};
#pragma unroll
    for (int j = 0; j < together; ++j) if (first + j * warp_size < to_lies.cols) y[j * warp_size] = v[j];
  }
}

template <class U> void copy_elements(void* to, const MatrixStack& to_lies, const void* from, const MatrixStack& from_lies, int64_t count) {
  const int64_t runs_of_row = ceil_div(to_lies.cols, run), runs = runs_of_row * to_lies.rows * count;
  const int64_t blocks = std::min<int64_t>(ceil_div(runs, warps), int64_t{16} * sm_count());
  launch("copy of matrices", copy_matrices_kernel<U>, blocks, threads, static_cast<U*>(to), to_lies, static_cast<const U*>(from), from_lies,
         static_cast<uint32_t>(runs_of_row), static_cast<uint32_t>(runs));
}

}  // namespace

void copy_matrices(void* to, const MatrixStack& to_lies, const void* from, const MatrixStack& from_lies, int64_t count, size_t width) {
  (width == 2 ? copy_elements<uint16_t> : copy_elements<uint32_t>)(to, to_lies, from, from_lies, count);
}

}  // namespace halftone::cuda
