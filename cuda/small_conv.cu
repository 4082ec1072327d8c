// Convolutions of 16-bit images of fewer than 8 channels whose windows hold at most 32 numbers, as those of a network's first layer do,
// and their weights' gradients: libraries want channels in eights. A window is a row of a matrix that is never stored: each thread picks the words that
// its tensor core wants of it from the image. Results and their gradients lie with their channels last; a warp works on 32 of them.
// Sums are f32, in a fixed order.
#include "halftone/cuda/small_conv.h"

#include "halftone/cuda/runtime.h"
#include "halftone/cuda/tensor_cores.cuh"
#include "halftone/ops/conv.h"
#include "halftone/ops/unary.h"

namespace halftone::cuda {
namespace {

constexpr int threads = 256, warps = threads / warp_size, tile = 16, channels = 32, blocks_of_8 = channels / 8;

struct Geometry {
  int windows, taps, outputs;         // in all images; numbers in each; channels of the result
  FastDivisor of_image, of_row;       // windows
  FastDivisor of_channel, of_kernel;  // taps in all of a channel's kernel; in one of its rows
  int in[2], stride[2], before[2], dilation[2];
  int64_t x[4], w[4];  // strides: image, channel, row, column; result's channel, channel, row, column
};

// The first number of a window, and where it is in its image; of a tap, how far from the first.
constexpr int outside = -(1 << 30);
template <class T> struct Window {
  const T* first;
  int row, column;
};
template <class T> __device__ Window<T> window(const Geometry& q, const T* x, int i) {
  if (i >= q.windows) return {x, outside, outside};
  const uint32_t image = q.of_image.divide(i), here = i - image * q.of_image.divisor, down = q.of_row.divide(here),
                 across = here - down * q.of_row.divisor;
  const int row = static_cast<int>(down) * q.stride[0] - q.before[0], column = static_cast<int>(across) * q.stride[1] - q.before[1];
  return {x + image * q.x[0] + row * q.x[2] + column * q.x[3], row, column};
}
struct Tap {
  int64_t offset;
  int row, column;
};
__device__ Tap tap(const Geometry& q, int k) {
  if (k >= q.taps) return {0, outside, outside};
  const uint32_t channel = q.of_channel.divide(k), here = k - channel * q.of_channel.divisor, v = q.of_kernel.divide(here);
  const int row = static_cast<int>(v) * q.dilation[0], column = static_cast<int>(here - v * q.of_kernel.divisor) * q.dilation[1];
  return {channel * q.x[1] + row * q.x[2] + column * q.x[3], row, column};
}
template <class T> __device__ uint32_t number(const Geometry& q, const Window<T>& at, const Tap& t) {
  const auto row = static_cast<unsigned>(at.row + t.row), column = static_cast<unsigned>(at.column + t.column);
  const bool inside = row < static_cast<unsigned>(q.in[0]) && column < static_cast<unsigned>(q.in[1]);
  return inside ? at.first[t.offset].bits : 0u;
}
template <class T> __device__ uint32_t weight(const Geometry& q, const T* w, int channel, int k) {
  if (channel >= q.outputs || k >= q.taps) return 0;
  const uint32_t in = q.of_channel.divide(k), here = k - in * q.of_channel.divisor, v = q.of_kernel.divide(here), t = here - v * q.of_kernel.divisor;
  return w[channel * q.w[0] + in * q.w[1] + v * q.w[2] + t * q.w[3]].bits;
}

// The channels of a tile of results are dealt out so that a thread's are neighbours: column j of its block b of 8 is channel
// (j / 2) * 8 + 2 * b + j % 2 of the 32.
struct Place {
  int quad, row, warp, first;  // threads 4 row to 4 row + 3 of a warp share a row; `first` of this warp's channels
  int64_t item;                // of the blocks that share these channels
  int64_t items;
  __device__ explicit Place(const Geometry& q) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size, groups = (q.outputs + channels - 1) / channels;
    quad = lane % 4;
    row = lane / 4;
    warp = static_cast<int>(threadIdx.x) / warp_size;
    first = static_cast<int>(blockIdx.x) % groups * channels;
    item = static_cast<int>(blockIdx.x) / groups;
    items = static_cast<int>(gridDim.x) / groups;
  }
};

// `steps` sixteens of taps.
template <class T, int steps>
__global__ void __launch_bounds__(threads) small_conv_kernel(const Geometry q, T* y, const T* x, const T* w, const T* bias, const int64_t bias_step, const bool relu) {
  wait_for_previous();
  const Place here(q);
  const int channel = here.first + here.quad * 8, live = q.outputs - channel;
  const bool packed = q.outputs % 8 == 0 && aligned(y, 16);
  Tap taps[steps][4];  // of the words of a row
  uint32_t right[steps][blocks_of_8][2];
  float add[8];
#pragma unroll
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int j = 0; j < 4; ++j) taps[s][j] = tap(q, s * tile + here.quad * 2 + j % 2 + j / 2 * 8);
#pragma unroll
    for (int b = 0; b < blocks_of_8; ++b)
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const int k = s * tile + below * 8 + here.quad * 2, c = here.first + here.row / 2 * 8 + 2 * b + here.row % 2;
        right[s][b][below] = weight(q, w, c, k) | weight(q, w, c, k + 1) << 16;
      }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) add[j] = bias && j < live ? to<float>(bias[(channel + j) * bias_step]) : 0.f;
  for (int64_t i = (here.item * warps + here.warp) * tile; i < q.windows; i += here.items * warps * tile) {
    const Window<T> upper = window(q, x, static_cast<int>(i) + here.row), lower = window(q, x, static_cast<int>(i) + here.row + 8);
    float c[blocks_of_8][4] = {};
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      const Tap(&t)[4] = taps[s];
      const Fragment left = {{number(q, upper, t[0]) | number(q, upper, t[1]) << 16, number(q, lower, t[0]) | number(q, lower, t[1]) << 16,
                              number(q, upper, t[2]) | number(q, upper, t[3]) << 16, number(q, lower, t[2]) | number(q, lower, t[3]) << 16}};
#pragma unroll
      for (int b = 0; b < blocks_of_8; ++b) multiply_add<T>(c[b], left, right[s][b][0], right[s][b][1]);
    }
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int64_t row = i + here.row + below * 8;
      if (row >= q.windows || live <= 0) continue;
      Pack<T, 8> out;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float v = c[j / 2][below * 2 + j % 2] + add[j];
        if (relu) v = unary::Relu::f(v);
        out.v[j] = to<T>(v);
      }
      store_part(y + row * q.outputs + channel, live, packed, out);
    }
  }
}

// Of `tiles` tiles of windows in a row: parts[block][channel][tap], each block adding up `share` of them.
template <class T, int steps>
__global__ void __launch_bounds__(threads) small_conv_weight_kernel(const Geometry q, float* parts, const T* x, const T* g, const int64_t tiles, const int share) {
  wait_for_previous();
  const Place here(q);
  const int channel = here.first + here.quad * 8, live = q.outputs - channel;
  const bool packed = q.outputs % 8 == 0 && aligned(g, 16);
  Tap taps[steps][2];
#pragma unroll
  for (int s = 0; s < steps; ++s)
#pragma unroll
    for (int j = 0; j < 2; ++j) taps[s][j] = tap(q, s * tile + here.row + j * 8);
  float c[steps][blocks_of_8][4] = {};
  const int64_t end = min(tiles, (here.item + 1) * share);
  for (int64_t at = here.item * share + here.warp; at < end; at += warps) {
    const int i = static_cast<int>(at) * tile;
    uint32_t right[2][blocks_of_8];
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int64_t row = i + here.row + below * 8;
      const auto v = load_part<8>(g + row * q.outputs + channel, row < q.windows ? live : 0, packed, to<T>(0.f));
#pragma unroll
      for (int b = 0; b < blocks_of_8; ++b) right[below][b] = v.v[2 * b].bits | static_cast<uint32_t>(v.v[2 * b + 1].bits) << 16;
    }
    Window<T> of[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) of[j] = window(q, x, i + here.quad * 2 + j % 2 + j / 2 * 8);
    Fragment left[steps];
#pragma unroll
    for (int s = 0; s < steps; ++s)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Tap& t = taps[s][j % 2];
        left[s].word[j] = number(q, of[j / 2 * 2], t) | number(q, of[j / 2 * 2 + 1], t) << 16;
      }
#pragma unroll
    for (int b = 0; b < blocks_of_8; ++b) {
      const uint32_t above = transpose_block(right[0][b]), below = transpose_block(right[1][b]);
#pragma unroll
      for (int s = 0; s < steps; ++s) multiply_add<T>(c[s][b], left[s], above, below);
    }
  }
  __shared__ float sums[warps][steps * tile][channels];
#pragma unroll
  for (int s = 0; s < steps; ++s)
#pragma unroll
    for (int b = 0; b < blocks_of_8; ++b)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[here.warp][s * tile + here.row + j / 2 * 8][here.quad * 8 + 2 * b + j % 2] = c[s][b][j];
  __syncthreads();
  float* part = parts + here.item * q.outputs * q.taps;
  for (int e = static_cast<int>(threadIdx.x); e < steps * tile * channels; e += threads) {
    const int k = e / channels, o = e % channels;
    if (k >= q.taps || here.first + o >= q.outputs) continue;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < warps; ++j) sum += sums[j][k][o];
    part[(here.first + o) * q.taps + k] = sum;
  }
}

// w[i] = the sum of parts[p][i]: a warp for 32 of the elements in each of 32 shares of the parts.
template <class W> __global__ void __launch_bounds__(1024) sum_parts(W* w, const float* parts, const int n, const int64_t count) {
  wait_for_previous();
  __shared__ float sums[warp_size][warp_size + 1];
  const int lane = static_cast<int>(threadIdx.x) % warp_size, share = static_cast<int>(threadIdx.x) / warp_size;
  const int first = static_cast<int>(blockIdx.x) * warp_size;
  float sum = 0;
  if (first + lane < n)
#pragma unroll 8
    for (int64_t p = share; p < count; p += warp_size) sum += parts[p * n + first + lane];
  sums[share][lane] = sum;
  __syncthreads();
  sum = sums[lane][share];
#pragma unroll
  for (int mask = 1; mask < warp_size; mask *= 2) sum += exchange(sum, mask);
  if (lane == 0 && first + share < n) w[first + share] = to<W>(sum);
}

// Nothing when the call is not for these kernels. `y` is the result or its gradient.
std::optional<Geometry> geometry(const ConvAttrs& a, const Tensor& x, const Tensor& w, const Tensor& y) {
  constexpr int64_t most = 1 << 29;
  if (!is_16bit_dtype(x.dtype()) || y.dtype() != x.dtype() || a.dims != 2 || a.groups != 1 || !y.meta().channels_last()) return std::nullopt;
  const ConvGeometry q = conv_geometry(a, x.shape(), w.shape(), y.shape());
  const int64_t taps = q.c * q.taps(), windows = q.n * q.positions();
  if (q.c >= 8 || taps < 1 || taps > 2 * tile || windows < 1 || windows > most || q.o < 1 || q.o > most / taps) return std::nullopt;
  Geometry g{static_cast<int>(windows), static_cast<int>(taps), static_cast<int>(q.o), FastDivisor(static_cast<uint32_t>(q.positions())),
             FastDivisor(static_cast<uint32_t>(q.out[2])), FastDivisor(static_cast<uint32_t>(q.taps())), FastDivisor(static_cast<uint32_t>(q.kernel[2])),
             {}, {}, {}, {}, {}, {}};
  for (int d = 0; d < 2; ++d) {
    // What a window reaches, on either side of an image.
    if (q.in[d + 1] > most / 2 || q.stride[d + 1] > most || q.before[d + 1] + q.after[d + 1] > most / 2) return std::nullopt;
    g.in[d] = static_cast<int>(q.in[d + 1]);
    g.stride[d] = static_cast<int>(q.stride[d + 1]);
    g.before[d] = static_cast<int>(q.before[d + 1]);
    g.dilation[d] = static_cast<int>(q.dilation[d + 1]);
  }
  for (size_t d = 0; d < 4; ++d) {
    g.x[d] = x.strides()[d];
    g.w[d] = w.strides()[d];
  }
  return g;
}

// f(Type<T>, std::integral_constant<int, steps>)
template <class F> void visit_case(DType t, int taps, F f) {
  auto with = [&]<class T>(Type<T> type) {
    if (taps <= tile) f(type, std::integral_constant<int, 1>{});
    else f(type, std::integral_constant<int, 2>{});
  };
  if (t == DType::f16) with(Type<half>{});
  else with(Type<bfloat16>{});
}
int64_t groups_of(const Geometry& q) { return ceil_div(q.outputs, channels); }

}  // namespace

bool small_conv(const Call& c, const Tensor& y, bool relu) {
  const Tensor &x = c.in[0], &w = c.in[1];
  const auto q = geometry(c.as<ConvAttrs>(), x, w, y);
  if (!q) return false;
  visit_case(x.dtype(), q->taps, [&]<class T, int steps>(Type<T>, std::integral_constant<int, steps>) {
    const int64_t blocks = std::min<int64_t>(ceil_div(q->windows, tile * warps), int64_t{3} * sm_count());
    launch("conv", small_conv_kernel<T, steps>, blocks * groups_of(*q), threads, *q, y.data<T>(), x.data<T>(), w.data<T>(),
           c.has(2) ? c.in[2].data<T>() : nullptr, c.has(2) ? c.in[2].strides()[0] : 0, relu);
  });
  return true;
}

bool small_conv_weight(const Call& c, const Tensor& w) {
  const Tensor &x = c.in[0], &g = c.in[1];
  const auto q = w.is_contiguous() ? geometry(c.as<ConvAttrs>(), x, w, g) : std::nullopt;
  if (!q) return false;
  // Shares of whole rounds of a block's warps, cut by sizes alone.
  constexpr int64_t most_parts = 512;
  const int64_t tiles = ceil_div(q->windows, tile), share = ceil_div(ceil_div(tiles, most_parts), warps) * warps, parts = ceil_div(tiles, share);
  const int n = q->outputs * q->taps;
  Scratch memory(static_cast<size_t>(parts * n) * sizeof(float));
  visit_case(x.dtype(), q->taps, [&]<class T, int steps>(Type<T>, std::integral_constant<int, steps>) {
    launch("conv_weight", small_conv_weight_kernel<T, steps>, parts * groups_of(*q), threads, *q, memory.as<float>(), x.data<T>(), g.data<T>(), tiles,
           static_cast<int>(share));
    auto into = [&]<class W>(Type<W>) { launch("conv_weight", sum_parts<W>, ceil_div(n, warp_size), 1024, w.data<W>(), memory.as<const float>(), n, parts); };
    if (w.dtype() == DType::f32) into(Type<float>{});
    else into(Type<T>{});
  });
  return true;
}

}  // namespace halftone::cuda
