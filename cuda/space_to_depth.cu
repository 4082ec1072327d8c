// A block's channel is (row * columns + column) * channels + channel, and those up to a multiple of eight are 0. A kernel gets rows and columns of
// zeros before its first, so that all blocks begin at multiples of their size.
#include "halftone/cuda/space_to_depth.h"

#include <algorithm>

#include "halftone/cuda/images.h"
#include "halftone/cuda/numeric.cuh"
#include "halftone/cuda/runtime.h"

namespace halftone::cuda {
namespace {

constexpr int threads = 256, most_channels = 4, together = 8;

// Pixels of a block along dimension d, 0 or 1.
HT_HD constexpr int pixels_of_block(int d, int results) { return d == 1 ? 2 * results : 2; }
HT_HD constexpr int deep_channels(int channels, int results) { return (4 * results * channels + together - 1) / together * together; }
// Zeros before a kernel's first row or column.
int64_t zeros_before(const ConvGeometry& q, int d, int results) {
  const int64_t side = pixels_of_block(d, results);
  return ceil_div(q.before[d + 1], side) * side - q.before[d + 1];
}

// A kernel parameter.
struct Blocks {
  int64_t count;                 // in all images
  FastDivisor of_image, across;  // blocks: of an image, of a row of it
  int pixels[2];                 // rows and columns of an image
  int64_t stride[4] = {};        // of the images
};
template <int channels, int results>
__global__ void __launch_bounds__(threads) images_to_depth_kernel(uint16_t* to, const uint16_t* from, const Blocks q) {
  wait_for_previous();
  constexpr int rows = pixels_of_block(0, results), columns = pixels_of_block(1, results), deep = deep_channels(channels, results);
  for (int64_t n = thread_index(); n < q.count; n += grid_threads()) {
    const uint32_t image = q.of_image.divide(static_cast<uint32_t>(n)), here = static_cast<uint32_t>(n) - image * q.of_image.divisor,
                   down = q.across.divide(here), across = here - down * q.across.divisor;
    const int row = rows * static_cast<int>(down), column = columns * static_cast<int>(across);
    const uint16_t* x = from + image * q.stride[0] + row * q.stride[2] + column * q.stride[3];
    Pack<uint16_t, together> out[deep / together];
#pragma unroll
    for (int k = 0; k < deep; ++k) {
      const int place = k / channels, a = place / columns, b = place % columns;
      const bool inside = a < rows && row + a < q.pixels[0] && column + b < q.pixels[1];
      out[k / together].v[k % together] = inside ? x[k % channels * q.stride[1] + a * q.stride[2] + b * q.stride[3]] : uint16_t(0);
    }
#pragma unroll
    for (int k = 0; k < deep / together; ++k) store_pack(to + n * deep + k * together, out[k]);
  }
}

// A kernel parameter.
struct Weights {
  int outputs, results, channels, deep;                // deep: channels of a block
  int kernel[2] = {}, blocks[2] = {}, before[2] = {};  // rows and columns: of a kernel, of its blocks, of zeros before it
  int64_t stride[4] = {};                              // of the weights of pixels
};
// Calls f(place among the weights of blocks, place among those of pixels or -1) for each of the former.
template <class F> __device__ void each_weight(const Weights& q, F f) {
  const int columns = pixels_of_block(1, q.results), count = q.outputs * q.results * q.blocks[0] * q.blocks[1] * q.deep;
  for (int n = static_cast<int>(thread_index()); n < count; n += static_cast<int>(grid_threads())) {
    const int k = n % q.deep, block = n / q.deep, place = k / q.channels;
    const int v = block % q.blocks[1], u = block / q.blocks[1] % q.blocks[0], output = block / q.blocks[1] / q.blocks[0];
    const int row = 2 * u + place / columns - q.before[0], column = columns * v + place % columns - q.before[1] - 2 * (output / q.outputs);
    const bool inside = place < 2 * columns && row >= 0 && row < q.kernel[0] && column >= 0 && column < q.kernel[1];
    f(n, inside ? output % q.outputs * q.stride[0] + k % q.channels * q.stride[1] + row * q.stride[2] + column * q.stride[3] : int64_t{-1});
  }
}
__global__ void __launch_bounds__(threads) weights_to_depth_kernel(uint16_t* to, const uint16_t* from, const Weights q) {
  wait_for_previous();
  each_weight(q, [&](int deep, int64_t at) { to[deep] = at < 0 ? uint16_t(0) : from[at]; });
}
__global__ void __launch_bounds__(threads) weights_to_space_kernel(uint16_t* to, const uint16_t* from, const Weights q) {
  wait_for_previous();
  each_weight(q, [&](int deep, int64_t at) { if (at >= 0) to[at] = from[deep]; });
}

Weights weights_of(const Tensor& w, const ConvGeometry& q, int results) {
  const ConvGeometry to = space_to_depth(q, results);
  Weights r{.outputs = static_cast<int>(q.o), .results = results, .channels = static_cast<int>(q.c), .deep = static_cast<int>(to.c)};
  for (int d = 0; d < 2; ++d) {
    r.kernel[d] = static_cast<int>(q.kernel[d + 1]);
    r.blocks[d] = static_cast<int>(to.kernel[d + 1]);
    r.before[d] = static_cast<int>(zeros_before(q, d, results));
  }
  for (size_t d = 0; d < 4; ++d) r.stride[d] = w.strides()[d];
  return r;
}
uint16_t* bits(const Tensor& t) { return static_cast<uint16_t*>(t.raw_data()); }
Tensor empty_weights(const Tensor& like, const ConvGeometry& to) {
  return empty_images({to.o, to.c, to.kernel[1], to.kernel[2]}, like.dtype(), like.device(), true);
}

int64_t blocks_for(int64_t count) { return std::min<int64_t>(ceil_div(count, threads), int64_t{32} * sm_count()); }

}  // namespace

int space_to_depth_results(const ConvGeometry& q) {
  constexpr int64_t large = 25;  // smaller windows are left to small_conv and to libraries
  if (q.c > most_channels || q.groups != 1 || q.taps() < large || q.in[0] != 1 || q.kernel[0] != 1 || q.out[0] != 1) return 0;
  for (int d = 1; d < 3; ++d) if (q.stride[d] != 2 || q.dilation[d] != 1) return 0;
  constexpr int64_t most = (int64_t{1} << 31) - 8;
  if (q.in[1] > most || q.in[2] > most) return 0;
  const int results = q.out[2] % 2 == 0 ? 2 : 1;
  for (const ConvGeometry& to : {space_to_depth(q, 1), space_to_depth(q, results)})
    if (to.in[1] <= 0 || to.in[2] <= 0 || q.n * to.pixels() > most || to.o * to.taps() * to.c > most) return 0;
  return results;
}

ConvGeometry space_to_depth(const ConvGeometry& q, int results) {
  ConvGeometry to = q;
  to.c = deep_channels(static_cast<int>(q.c), results);
  to.o = results * q.o;
  to.out[2] = q.out[2] / results;
  for (int d = 0; d < 2; ++d) {
    const int64_t side = pixels_of_block(d, results), more = d == 1 ? 2 * (results - 1) : 0;  // pixels that the last of the results reaches further
    to.stride[d + 1] = 1;
    to.before[d + 1] = ceil_div(q.before[d + 1], side);
    to.kernel[d + 1] = ceil_div(q.kernel[d + 1] + zeros_before(q, d, results) + more, side);
    const int64_t reached = to.out[d + 1] - 1 + to.kernel[d + 1] - to.before[d + 1];  // blocks, from the first on
    to.in[d + 1] = std::min(ceil_div(q.in[d + 1], side), reached);
    to.after[d + 1] = reached - to.in[d + 1];
  }
  return to;
}

Tensor images_to_depth(const Tensor& x, const ConvGeometry& q, int results) {
  const ConvGeometry to = space_to_depth(q, results);
  Tensor y = empty_images({q.n, to.c, to.in[1], to.in[2]}, x.dtype(), x.device(), true);
  Blocks b{.count = q.n * to.pixels(),
           .of_image = FastDivisor(static_cast<uint32_t>(to.pixels())),
           .across = FastDivisor(static_cast<uint32_t>(to.in[2])),
           .pixels = {static_cast<int>(q.in[1]), static_cast<int>(q.in[2])}};
  for (size_t d = 0; d < 4; ++d) b.stride[d] = x.strides()[d];
  auto run = [&]<int channels>(std::integral_constant<int, channels>) {
    auto kernel = results == 2 ? images_to_depth_kernel<channels, 2> : images_to_depth_kernel<channels, 1>;
    launch("conv", kernel, blocks_for(b.count), threads, bits(y), bits(x), b);
  };
  switch (q.c) {
    case 1: run(std::integral_constant<int, 1>()); break;
    case 2: run(std::integral_constant<int, 2>()); break;
    case 3: run(std::integral_constant<int, 3>()); break;
    default: run(std::integral_constant<int, 4>());
  }
  return y;
}

Tensor weights_to_depth(const Tensor& w, const ConvGeometry& q, int results) {
  Tensor y = empty_weights(w, space_to_depth(q, results));
  launch("conv", weights_to_depth_kernel, blocks_for(y.numel()), threads, bits(y), bits(w), weights_of(w, q, results));
  return y;
}

Tensor empty_deep_weights(const Tensor& w, const ConvGeometry& q) { return empty_weights(w, space_to_depth(q, 1)); }

void weights_to_space(const Tensor& from, const Tensor& w, const ConvGeometry& q) {
  launch("conv", weights_to_space_kernel, blocks_for(from.numel()), threads, bits(w), bits(from), weights_of(w, q, 1));
}

}  // namespace halftone::cuda
