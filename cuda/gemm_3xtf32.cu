// Products of f32 matrices on tensor cores. A number is the sum of two in TF32, its first 11 bits and the 11 after, and a product
// that of three of theirs (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022): off by at most 2^-19
// of itself. Tensor cores cut off what does not fit their sums, so that those are 8 or 16 terms long, and added by rounding. An
// infinity's second part is NaN: blocks that find anything but finite numbers among their results compute these again from first parts
// alone. TF32 ends at 2^-136, so that numbers below 2^-113 lose bits.
//
// A convolution is the product of a matrix that is never stored: the windows of its images, a row for each, whose columns are taps
// and, within them, channels. Its gradients are such products, too.
//
// A block computes a tile of the result from tiles of both matrices, which come into shared memory some steps ahead. A matrix lies
// either with the summed dimension k along its rows (as AlongK has it) or across them (AcrossK). Results are the same every time:
// where the sum is split, the parts are added in order. The kernel here is for any GPU with TF32, that of gemm_wgmma.cu for some.
#include <numeric>

#include "halftone/cuda/device_state.h"
#include "halftone/cuda/gemm_3xtf32.cuh"
#include "halftone/cuda/gemm_3xtf32.h"
#include "halftone/ops/shape.h"

namespace halftone::cuda {

const gemm::Kernels* gemm::by_wgmma = nullptr;

namespace {

using namespace gemm;

// ---- the kernel

constexpr int depth = 16, stages = 4;             // of k in a tile, and tiles under way
constexpr int warp_rows = 64, warp_columns = 32;  // of the result, for each warp

template <bool a_along, bool b_along, bool windows, bool narrow> struct Tiling {
  static constexpr int columns = tile_columns(narrow), warps_across = columns / warp_columns;
  static constexpr int threads = tile_rows / warp_rows * warps_across * warp_size;
  using A = std::conditional_t<a_along, AlongK<tile_rows, depth, threads, 8, windows>, AcrossK<tile_rows, depth, threads, windows>>;
  using B = std::conditional_t<b_along, AlongK<columns, depth, threads, 8, false>, AcrossK<columns, depth, threads, false>>;
  static constexpr int stage = A::size + B::size;
  static constexpr size_t shared = stages * stage * sizeof(float);
};

// Where a thread's numbers of a warp's part of the result lie: number j of tile (i, c), 16 x 8.
constexpr int tiles_down = warp_rows / 16, tiles_across = warp_columns / 8;
using Sums = float[tiles_down][tiles_across][4];

template <class A, class B, bool first_parts> __device__ void multiply_tiles(Sums& sums, const float* a_tile, const float* b_tile, int row, int column) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll 1
  for (int k = 0; k < depth; k += 8) {
    // The order of k is free: what the instruction calls t and t + 4 are 2 t and 2 t + 1 here.
    const int pair = k + lane % 4 * 2;
    Split<2> b[tiles_across];
#pragma unroll
    for (int c = 0; c < tiles_across; ++c) {
      const auto v = B::template numbers<2>(b_tile, column + c * 8 + lane / 4, pair);
      b[c].template set<first_parts>(0, v.v[0]);
      b[c].template set<first_parts>(1, v.v[1]);
    }
#pragma unroll
    for (int i = 0; i < tiles_down; ++i) {
      Split<4> a;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto v = A::template numbers<2>(a_tile, row + i * 16 + h * 8 + lane / 4, pair);
        a.template set<first_parts>(h, v.v[0]);
        a.template set<first_parts>(h + 2, v.v[1]);
      }
      if constexpr (first_parts) {
#pragma unroll
        for (int c = 0; c < tiles_across; ++c) multiply_add(sums[i][c], a.high, b[c].high);
      } else {
        multiply_add<tiles_across>(sums[i], a, b);
      }
    }
  }
}

// The numbers that `wanted` names, one bit for each.
__device__ void store(const Product& p, const Place& at, const Sums& sums, int row, int column, uint64_t wanted) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
  for (int i = 0; i < tiles_down; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = at.row + row + i * 16 + h * 8 + lane / 4;
      if (r >= p.m) continue;
      float* to = row_of(p, at, r);
#pragma unroll
      for (int c = 0; c < tiles_across; ++c)
        store_pair(p, to, at.column + column + c * 8 + lane % 4 * 2, sums[i][c][h * 2], sums[i][c][h * 2 + 1], wanted >> ((i * tiles_across + c) * 4 + h * 2));
    }
}

template <class T> __global__ void __launch_bounds__(T::threads, 2) gemm_3xtf32_kernel(const Product p) {
  wait_for_previous();
  extern __shared__ __align__(16) float memory[];
  using A = typename T::A;
  using B = typename T::B;
  const Place at(p, tile_rows, T::columns);
  const A a(p.a, p.windows, p.a.data + at.batch * p.a.step, at.row);
  const B b(p.b, p.windows, p.b.data + at.batch * p.b.step, at.column);
  const int first = at.part * p.split * depth, steps = min((p.k - first + depth - 1) / depth, p.split);
  const int warp = static_cast<int>(threadIdx.x) / warp_size, row = warp / T::warps_across * warp_rows, column = warp % T::warps_across * warp_columns;

  auto load = [&](int step) {
    float* tile = memory + step % stages * T::stage;
    if (step < steps) {
      a.load(tile, first + step * depth);
      b.load(tile + A::size, first + step * depth);
    }
    end_copies();
  };
  auto sum_up = [&]<bool first_parts>(Sums& sums, std::bool_constant<first_parts>) {
#pragma unroll
    for (int i = 0; i < tiles_down; ++i)
#pragma unroll
      for (int c = 0; c < tiles_across; ++c)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][c][j] = 0;
#pragma unroll 1
    for (int step = 0; step < stages - 1; ++step) load(step);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for_copies<stages - 2>();
      __syncthreads();
      load(step + stages - 1);
      const float* tile = memory + step % stages * T::stage;
      multiply_tiles<A, B, first_parts>(sums, tile, tile + A::size, row, column);
    }
  };

  Sums sums;
  sum_up(sums, std::false_type());
  uint64_t not_finite = 0;
#pragma unroll
  for (int i = 0; i < tiles_down; ++i)
#pragma unroll
    for (int c = 0; c < tiles_across; ++c)
#pragma unroll
      for (int j = 0; j < 4; ++j) if (!::isfinite(sums[i][c][j])) not_finite |= uint64_t{1} << ((i * tiles_across + c) * 4 + j);
  store(p, at, sums, row, column, ~uint64_t{0});
  if (!__syncthreads_or(not_finite != 0)) return;
  sum_up(sums, std::true_type());
  store(p, at, sums, row, column, not_finite);
}

const Kernels by_mma{depth, 2, [](const Form& form, const Product& p, int64_t blocks) {
                       visit_form(form, [&]<bool a_along, bool b_along, bool windows, bool narrow>() {
                         using T = Tiling<a_along, b_along, windows, narrow>;
                         launch("gemm_3xtf32", gemm_3xtf32_kernel<T>, Grid{blocks, T::threads, T::shared}, p);
                       });
                     }};

// ---- sums in parts

constexpr int threads = 256;
__global__ void __launch_bounds__(threads) add_parts_kernel(const Product p, float* y) {
  wait_for_previous();
  const int64_t count = p.y.step;
  for (int64_t i = thread_index(); i < count; i += grid_threads()) {
    float sum = 0;
    for (int part = 0; part < p.parts; ++part) sum += p.y.data[part * count + i];
    y[i] = p.finish(sum, static_cast<int>(i % p.n));
  }
}

// ---- host

constexpr int64_t most = int64_t{1} << 30;  // rows, columns, and elements of an image
bool paired(const float* data, int64_t leading) { return aligned(data, 8) && leading % 2 == 0; }

Matrix matrix_of(const GemmOperand& f) {
  const MatrixStack& s = f.lies;
  const bool packed = aligned(f.data, 16) && s.leading % chunk == 0 && s.step % chunk == 0;
  return {f.data, s.leading, s.step, static_cast<int>(s.rows), static_cast<int>(s.cols), packed};
}
// Of [rows, columns] without gaps.
Matrix dense(const float* data, int64_t rows, int64_t columns) { return matrix_of({data, {rows, columns, columns, 0}, false}); }
Result dense_result(float* data, int64_t rows, int64_t columns) {
  return {.data = data, .leading = columns, .step = rows * columns, .scattered = false, .image = 0, .line = 0, .pixel = 0,
          .paired = paired(data, columns) && rows * columns % 2 == 0};
}
FastDivisor divisor(int64_t d) { return FastDivisor(static_cast<uint32_t>(d)); }
int narrow_int(int64_t n) { return static_cast<int>(n); }

// Few tiles: several blocks share the sum of one, at least so much of it each.
void run(Form form, Product p, int64_t batches = 1) {
  form.narrow = ceil_div(p.n, 64) * 64 * 9 < ceil_div(p.n, 128) * 128 * 8;
  const Kernels& kernels = gemm::by_wgmma && device_state(device()).generation == 9 ? *gemm::by_wgmma : by_mma;
  constexpr int64_t least_depth = 256, most_bytes = int64_t{256} << 20;
  const int64_t tiles = ceil_div(p.m, tile_rows) * ceil_div(p.n, tile_columns(form.narrow)) * batches, at_once = int64_t{kernels.blocks} * sm_count();
  const int64_t steps = ceil_div(p.k, kernels.depth), size = int64_t{p.m} * p.n;
  int64_t parts = 1;
  if (batches == 1 && !p.y.scattered && 2 * tiles <= at_once)
    parts = std::clamp<int64_t>(at_once / tiles, 1, std::max<int64_t>(1, std::min(p.k / least_depth, most_bytes / (4 * size))));
  p.split = static_cast<int>(std::max<int64_t>(1, ceil_div(steps, parts)));
  p.parts = static_cast<int>(std::max<int64_t>(1, ceil_div(steps, p.split)));
  const Scratch scratch(p.parts > 1 ? static_cast<size_t>(p.parts * size) * sizeof(float) : 0);
  float* y = p.y.data;
  if (p.parts > 1) p.y = dense_result(scratch.as<float>(), p.m, p.n);
  kernels.launch(form, p, tiles * p.parts);
  if (p.parts > 1) launch("gemm_3xtf32", add_parts_kernel, std::min<int64_t>(ceil_div(size, threads), int64_t{8} * sm_count()), threads, p, y);
}

}  // namespace

bool gemm_3xtf32_takes(const GemmOperand& a, const GemmOperand& b, int64_t batches) {
  constexpr double least_products = 0x1p27;  // fewer keep too few multiprocessors busy
  const MatrixStack &x = a.lies, &y = b.lies;
  const int64_t m = a.turned ? x.cols : x.rows, k = a.turned ? x.rows : x.cols, n = b.turned ? y.rows : y.cols;
  const bool kernel = !(a.turned && b.turned);
  return kernel && std::max({m, n, k}) < most &&
         static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) * static_cast<double>(batches) >= least_products;
}

void gemm_3xtf32(const GemmOperand& a, const GemmOperand& b, const float* bias, float* y, int64_t batches) {
  const MatrixStack &x = a.lies, &z = b.lies;
  const int64_t m = a.turned ? x.cols : x.rows, k = a.turned ? x.rows : x.cols, n = b.turned ? z.rows : z.cols;
  const Product p{.a = matrix_of(a), .b = matrix_of(b), .windows = {}, .y = dense_result(y, m, n), .bias = bias, .relu = false,
                  .m = narrow_int(m), .n = narrow_int(n), .k = narrow_int(k)};
  if (a.turned) run({false, false, false, false}, p, batches);
  else if (b.turned) run({true, true, false, false}, p, batches);
  else run({true, false, false, false}, p, batches);
}

bool conv_3xtf32_takes(const ConvGeometry& q) {
  return q.groups == 1 && q.in[0] == 1 && q.kernel[0] == 1 && q.out[0] == 1 && q.before[0] == 0 &&
         std::max({q.n * q.positions(), q.n * q.pixels(), q.c * q.taps(), q.o * q.taps(), q.c * q.pixels(), q.o * q.positions()}) < most;
}

namespace {

// Of x, for each of y's pixels.
Windows windows_of(const ConvGeometry& q) {
  auto both = [](const int64_t (&v)[3], int sign) { return std::array{sign * narrow_int(v[1]), sign * narrow_int(v[2])}; };
  const auto stride = both(q.stride, 1), dilation = both(q.dilation, 1), origin = both(q.before, -1);
  return {.positions = divisor(q.positions()), .across = divisor(q.out[2]), .channels = divisor(q.c), .taps_across = divisor(q.kernel[2]),
          .height = narrow_int(q.in[1]), .width = narrow_int(q.in[2]), .line = narrow_int(q.in[2] * q.c), .stride = {stride[0], stride[1]},
          .dilation = {dilation[0], dilation[1]}, .origin = {origin[0], origin[1]}};
}
// A matrix of windows: from image to image in its `leading`.
Matrix windows_matrix(const float* data, int64_t rows, int64_t columns, int64_t image) {
  return {data, image, 0, narrow_int(rows), narrow_int(columns), true};
}

}  // namespace

void conv_3xtf32(const ConvGeometry& q, const Tensor& x, const Tensor& w, const float* bias, bool relu, const Tensor& y) {
  const int64_t m = q.n * q.positions(), k = q.taps() * q.c;
  run({true, true, true, false}, {.a = windows_matrix(x.data<float>(), m, k, q.pixels() * q.c), .b = dense(w.data<float>(), q.o, k), .windows = windows_of(q),
                         .y = dense_result(y.data<float>(), m, q.o), .bias = bias, .relu = relu, .m = narrow_int(m), .n = narrow_int(q.o),
                         .k = narrow_int(k)});
}

// Pixels of x whose places have the same rest to the stride see the same taps: a product for each rest. Window (y, x) of g is what
// pixel (y, x) of these sees, the first tap last.
void conv_3xtf32_input(const ConvGeometry& q, const Tensor& g, const Tensor& w, const Tensor& x) {
  struct Axis { int64_t first, step, taps, size, origin, dilation; };  // taps of a rest; its pixels; where their windows lie in g
  auto axis = [&](int d, int64_t rest) {
    Axis a{0, q.stride[d] / std::gcd(q.stride[d], q.dilation[d]), 0, ceil_div(q.in[d] - rest, q.stride[d]), 0, 0};
    auto seen = [&](int64_t tap) { return (rest + q.before[d] - tap * q.dilation[d]) % q.stride[d] == 0; };
    while (a.first < q.kernel[d] && !seen(a.first)) ++a.first;
    a.taps = ceil_div(q.kernel[d] - a.first, a.step);
    a.origin = (rest + q.before[d] - a.first * q.dilation[d]) / q.stride[d];
    a.dilation = -(a.step * q.dilation[d] / q.stride[d]);
    return a;
  };
  for (int64_t down = 0; down < std::min(q.stride[1], q.in[1]); ++down)
    for (int64_t right = 0; right < std::min(q.stride[2], q.in[2]); ++right) {
      const Axis h = axis(1, down), v = axis(2, right);
      const bool none = h.taps <= 0 || v.taps <= 0;
      const int64_t m = q.n * h.size * v.size, k = none ? 0 : h.taps * v.taps * q.o, line = q.in[2] * q.c;
      // [c, taps, o], as the windows of g have them.
      Tensor taps = w;
      if (!none) taps = w.slice(2, h.first, q.kernel[1], h.step).slice(3, v.first, q.kernel[2], v.step).permute({1, 2, 3, 0}).contiguous();
      float* first = x.data<float>() + down * line + right * q.c;
      run({true, true, true, false},
          {.a = windows_matrix(g.data<float>(), m, k, q.positions() * q.o), .b = dense(taps.data<float>(), q.c, k),
           .windows = {.positions = divisor(h.size * v.size), .across = divisor(v.size), .channels = divisor(q.o),
                       .taps_across = divisor(std::max<int64_t>(1, v.taps)), .height = narrow_int(q.out[1]), .width = narrow_int(q.out[2]),
                       .line = narrow_int(q.out[2] * q.o), .stride = {1, 1}, .dilation = {narrow_int(h.dilation), narrow_int(v.dilation)},
                       .origin = {narrow_int(h.origin), narrow_int(v.origin)}},
           .y = {.data = first, .leading = 0, .step = 0, .scattered = true, .image = q.pixels() * q.c, .line = q.stride[1] * line,
                 .pixel = q.stride[2] * q.c, .paired = q.c % 2 == 0},
           .bias = nullptr, .relu = false, .m = narrow_int(m), .n = narrow_int(q.c), .k = narrow_int(k)});
    }
}

void conv_3xtf32_weight(const ConvGeometry& q, const Tensor& x, const Tensor& g, const Tensor& w) {
  const int64_t k = q.n * q.positions(), m = q.taps() * q.c;
  run({false, false, true, false}, {.a = windows_matrix(x.data<float>(), k, m, q.pixels() * q.c), .b = dense(g.data<float>(), k, q.o), .windows = windows_of(q),
                                    .y = dense_result(w.data<float>(), m, q.o), .bias = nullptr, .relu = false, .m = narrow_int(m), .n = narrow_int(q.o),
                                    .k = narrow_int(k)});
}

}  // namespace halftone::cuda
