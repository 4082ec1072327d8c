#pragma once
// What the kernels of gemm_3xtf32.cu and gemm_wgmma.cu have in common: how they are told a product, how its matrices come into
// shared memory, and where its results go.
#include "halftone/cuda/tensor_cores.cuh"
#include "halftone/ops/unary.h"

namespace halftone::cuda::gemm {

constexpr int chunk = 4;  // numbers that one instruction copies

// ---- what a kernel is told

struct Matrix {
  const float* data;
  int64_t leading, step;  // from row to row, and from batch to batch
  int rows, columns;
  bool packed;  // rows begin at multiples of 16 bytes
};

__device__ inline int divide(int n, const FastDivisor& d) { return static_cast<int>(d.divide(static_cast<uint32_t>(n))); }
__device__ inline int rest(int n, int quotient, const FastDivisor& d) { return n - quotient * static_cast<int>(d.divisor); }

// Rows of such a matrix that are windows of images [n, height, width, channels]: row (n, y, x) has a column for each tap (u, v) and
// channel, which lies at pixel (y * stride + u * dilation + origin, ...).
struct Windows {
  FastDivisor positions, across, channels, taps_across;  // of a row: windows of an image, and in a line of it; of a column
  int height, width, line;                               // line: elements
  int stride[2], dilation[2], origin[2];

  struct Row { int n, y, x; };
  __device__ Row row(int r) const {
    const int n = divide(r, positions), in_image = rest(r, n, positions), y = divide(in_image, across);
    return {n, y, rest(in_image, y, across)};
  }
  struct Column { int down, right, channel; };  // pixels from a window's first
  __device__ Column column(int c) const {
    const int tap = divide(c, channels), u = divide(tap, taps_across);
    return {u * dilation[0], rest(tap, u, taps_across) * dilation[1], rest(c, tap, channels)};
  }
};

struct Result {
  float* data;
  int64_t leading, step;       // step: from batch to batch, and from one part of the sum to the next
  bool scattered;              // rows lie as pixels (n, y, x) do in images
  int64_t image, line, pixel;  // elements, where scattered
  bool paired;                 // two neighbours may be written at once
};

// A product, and how its blocks share it.
struct Product {
  Matrix a, b;
  Windows windows;
  Result y;
  const float* bias;  // or null
  bool relu;
  int m, n, k;
  int split = 0, parts = 1;  // of k: as many steps of `depth` for each part, a block of its own

  __device__ float finish(float sum, int column) const {
    if (bias) sum += bias[column];
    return relu ? unary::Relu::f(sum) : sum;
  }
};

// ---- tiles

// `bytes` of 16, and zeros for the others, into shared memory; some time until wait_for_copies().
__device__ inline void copy_chunk(float* to, const float* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copy_number(float* to, const float* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int under_way> __device__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(under_way) : "memory"); }

// The first `live` of a chunk, at most. What is not copied is not read.
__device__ inline void copy_part(bool packed, float* to, const float* from, int live) {
  if (packed) return copy_chunk(to, from, 4 * live);
#pragma unroll
  for (int i = 0; i < chunk; ++i) copy_number(to + i, from + i, i < live ? 4 : 0);
}

// A chunk at a pixel of an image; zeros beside it, and where it is not live.
__device__ inline void copy_pixel(const Windows& w, float* to, const float* image, int y, int x, int channel, bool live) {
  const bool inside = live && static_cast<unsigned>(y) < static_cast<unsigned>(w.height) && static_cast<unsigned>(x) < static_cast<unsigned>(w.width);
  const int offset = y * w.line + x * static_cast<int>(w.channels.divisor) + channel;
  copy_chunk(to, image + offset, inside ? 16 : 0);
}

// Tiles of `rows` rows and `depth` of their columns, k. With 8 numbers between rows a warp reads pairs without conflicts, with 4
// chunks. A thread copies chunks of every `step`th row.
template <int rows, int depth, int threads, int between, bool windows> struct AlongK {
  static constexpr int chunks = depth / chunk, step = threads / chunks, passes = rows / step, pitch = depth + between, size = rows * pitch;
  static_assert(passes * step == rows);
  const Matrix& matrix;
  const Windows& shape;
  int row;  // this thread's first
  const float* at[windows ? passes : 1];                      // of a row's image, or the first row
  int top[windows ? passes : 1], left[windows ? passes : 1];  // of a window; far outside where there is no row

  __device__ AlongK(const Matrix& m, const Windows& w, const float* data, int first)
      : matrix(m), shape(w), row(first + static_cast<int>(threadIdx.x) / chunks) {
    if constexpr (windows) {
#pragma unroll
      for (int i = 0; i < passes; ++i) {
        const auto [n, y, x] = w.row(row + i * step);
        at[i] = data + static_cast<int64_t>(n) * m.leading;
        top[i] = row + i * step < m.rows ? y * w.stride[0] + w.origin[0] : -(1 << 30);
        left[i] = x * w.stride[1] + w.origin[1];
      }
    } else {
      at[0] = data + static_cast<int64_t>(row) * m.leading;
    }
  }
  __device__ void load(float* tile, int k) const {
    const int column = static_cast<int>(threadIdx.x) % chunks * chunk, from = k + column;
    float* to = tile + static_cast<int>(threadIdx.x) / chunks * pitch + column;
    if constexpr (windows) {
      const auto [down, right, channel] = shape.column(from);
#pragma unroll
      for (int i = 0; i < passes; ++i)
        copy_pixel(shape, to + i * step * pitch, at[i], top[i] + down, left[i] + right, channel, from < matrix.columns);
    } else {
      const int live = min(max(matrix.columns - from, 0), chunk);
      const float* source = at[0] + from;
#pragma unroll
      for (int i = 0; i < passes; ++i, source += step * matrix.leading)
        copy_part(matrix.packed, to + i * step * pitch, source, row + i * step < matrix.rows ? live : 0);
    }
  }
  // Of a row: numbers k to k + n - 1, k a multiple of n.
  template <int n> __device__ static Pack<float, n> numbers(const float* tile, int row, int k) { return load_pack<n>(tile + row * pitch + k); }
};

// Tiles of `depth` rows, k, and `columns` of their columns.
template <int columns, int depth, int threads, bool windows> struct AcrossK {
  static constexpr int chunks = columns / chunk, step = threads / chunks, passes = depth / step, pitch = columns + 4, size = depth * pitch;
  static_assert(passes * step == depth);
  const Matrix& matrix;
  const Windows& shape;
  const float* data;
  int column, down = 0, right = 0, channel = 0;

  __device__ AcrossK(const Matrix& m, const Windows& w, const float* d, int first) : matrix(m), shape(w), data(d) {
    column = first + static_cast<int>(threadIdx.x) % chunks * chunk;
    if constexpr (windows) {
      const auto c = w.column(column);
      channel = c.channel;
      down = c.down + w.origin[0];
      right = c.right + w.origin[1];
    }
  }
  __device__ void load(float* tile, int k) const {
#pragma unroll
    for (int i = 0; i < passes; ++i) {
      const int in_tile = static_cast<int>(threadIdx.x) / chunks + i * step, row = k + in_tile;
      float* to = tile + in_tile * pitch + static_cast<int>(threadIdx.x) % chunks * chunk;
      const bool live = row < matrix.rows;
      if constexpr (windows) {
        const auto [n, y, x] = shape.row(row);
        copy_pixel(shape, to, data + static_cast<int64_t>(n) * matrix.leading, y * shape.stride[0] + down, x * shape.stride[1] + right, channel,
                   live && column < matrix.columns);
      } else {
        copy_part(matrix.packed, to, data + static_cast<int64_t>(row) * matrix.leading + column, live ? min(max(matrix.columns - column, 0), chunk) : 0);
      }
    }
  }
  template <int n> __device__ static Pack<float, n> numbers(const float* tile, int column, int k) {
    Pack<float, n> v;
#pragma unroll
    for (int i = 0; i < n; ++i) v.v[i] = tile[(k + i) * pitch + column];
    return v;
  }
};

// ---- results

// Tiles that use the same columns of b, or the same rows of a, run at about the same time.
struct Place {
  int row, column, part;
  int64_t batch;
  __device__ Place(const Product& p, int rows, int columns) {
    constexpr int together = 8;
    const int down = (p.m + rows - 1) / rows, across = (p.n + columns - 1) / columns;
    const int64_t tiles = static_cast<int64_t>(down) * across, block = blockIdx.x, rest = block / tiles;
    const int tile = static_cast<int>(block - rest * tiles), group = tile / (together * across), in_group = tile - group * together * across;
    const int height = min(together, down - group * together);
    row = (group * together + in_group % height) * rows;
    column = in_group / height * columns;
    batch = rest / p.parts;
    part = static_cast<int>(rest - batch * p.parts);
  }
};

// Of row r of the result, where its first column is.
__device__ inline float* row_of(const Product& p, const Place& at, int r) {
  float* data = p.y.data + (at.batch * p.parts + at.part) * p.y.step;
  if (!p.y.scattered) return data + static_cast<int64_t>(r) * p.y.leading;
  const auto [n, y, x] = p.windows.row(r);
  return data + n * p.y.image + y * p.y.line + x * p.y.pixel;
}
// Columns `column` and the next; of those only the ones with a bit in `wanted`.
__device__ inline void store_pair(const Product& p, float* row, int column, float v0, float v1, uint64_t wanted) {
  if (p.parts == 1) {
    if (column < p.n) v0 = p.finish(v0, column);
    if (column + 1 < p.n) v1 = p.finish(v1, column + 1);
  }
  if ((wanted & 3) == 3 && p.y.paired && column + 1 < p.n) return store_pack(row + column, Pack<float, 2>{v0, v1});
  if ((wanted & 1) && column < p.n) row[column] = v0;
  if ((wanted & 2) && column + 1 < p.n) row[column + 1] = v1;
}

// ---- kernels

// How both matrices lie, whether a's rows are windows, and whether tiles of the result have 64 columns and not 128.
struct Form { bool a_along, b_along, windows, narrow; };
constexpr int tile_rows = 128;
constexpr int tile_columns(bool narrow) { return narrow ? 64 : 128; }
// f.operator()<a_along, b_along, windows, narrow>() for those that there are kernels for.
template <class F> void visit_form(const Form& form, F f) {
  auto by_width = [&]<bool a_along, bool b_along, bool windows>() {
    if (form.narrow) f.template operator()<a_along, b_along, windows, true>();
    else f.template operator()<a_along, b_along, windows, false>();
  };
  if (form.a_along && form.b_along) form.windows ? by_width.template operator()<true, true, true>() : by_width.template operator()<true, true, false>();
  else if (form.a_along) by_width.template operator()<true, false, false>();
  else form.windows ? by_width.template operator()<false, false, true>() : by_width.template operator()<false, false, false>();
}

// Kernels for one generation of GPU.
struct Kernels {
  int depth;              // of k, in a step
  int blocks;             // that a multiprocessor runs at once
  void (*launch)(const Form& form, const Product& p, int64_t blocks);
};
// With wgmma, for devices of compute capability 9.0; null where they were not built.
extern const Kernels* by_wgmma;

}  // namespace halftone::cuda::gemm
