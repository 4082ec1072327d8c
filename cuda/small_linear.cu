// Products of small matrices on tensor cores, for layers whose time is the launches: a whole linear layer, with bias and relu, is
// one kernel, and so are all of its gradients, relu's part and the bias's included. Blocks compute tiles of 32 x 32; the long
// dimension comes in slices of 128 bytes through shared memory, several of them under way, and four warps for each quarter of a
// slice work side by side. Sums are f32, in a fixed order. f32 factors are pairs of TF32 numbers, as in gemm_3xtf32.cu, whose way
// with infinities this has, too.
#include "halftone/cuda/small_linear.h"

#include "halftone/cuda/runtime.h"
#include "halftone/cuda/tensor_cores.cuh"
#include "halftone/ops/matmul.h"

namespace halftone::cuda {
namespace {

constexpr int tile = 32, stages = 6, quarters = 4, threads = quarters * 4 * warp_size;
// In elements: a slice, what one instruction copies at best, and what it copies where rows begin anywhere.
template <class T> constexpr int slice = 128 / sizeof(T);
template <class T> constexpr int chunk = 16 / sizeof(T);
template <class T> constexpr int word = sizeof(T) == 2 ? 2 : 1;

// The two elements of a word.
template <class T> __device__ Pack<T, 2> halves(uint32_t bits) {
  Pack<T, 2> p;
  memcpy(&p, &bits, sizeof bits);
  return p;
}

// ---- tiles

// A matrix in memory, row-major without gaps; `together` elements of any row can be read at a time: a chunk, a word or 1.
template <class T> struct Matrix {
  const T* data;
  int rows, cols, together;
  HT_HD Matrix(const T* from, int r, int c)
      : data(from), rows(r), cols(c),
        together(c % chunk<T> == 0 && aligned(from, 16) ? chunk<T> : c % word<T> == 0 && aligned(from, 4) ? word<T> : 1) {}
};
template <class T> Matrix<T> matrix(const Tensor& t) { return {t.data<T>(), static_cast<int>(t.size(0)), static_cast<int>(t.size(1))}; }

// Rows of a tile in shared memory, of a slice's length or, turned, of a tile's, are a little longer than what they hold, so that those
// which are read together lie in different banks.
template <class T, bool turned> constexpr int pitch = turned ? tile + (sizeof(T) == 2 ? 8 : 4) : slice<T> + 8;
template <class T> constexpr int tile_elements = std::max(tile * pitch<T, false>, slice<T> * pitch<T, true>);

// Copies `bytes` to shared memory, some time before the group is waited for; zeros unless `inside`.
template <int bytes> __device__ void copy_async(void* to, const void* from, bool inside) {
  auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int size = inside ? bytes : 0;
  if constexpr (bytes == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(size));
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(bytes), "r"(size));
}

// Queues the copy of a chunk of a tile whose first element is (row, col); zeros beyond the matrix. Half of the block's threads do for
// a tile.
constexpr int fetchers = threads / 2;
template <class T> constexpr bool fetchers_do = tile * slice<T> == fetchers * chunk<T>;
static_assert(fetchers_do<half> && fetchers_do<float>);
template <bool turned, class T> __device__ void fetch(T* into, const Matrix<T>& m, int row, int col, int thread) {
  constexpr int chunks = (turned ? tile : slice<T>) / chunk<T>;
  const int r = thread / chunks, c = thread % chunks * chunk<T>;
  T* here = into + r * pitch<T, turned> + c;
  const int live = row + r < m.rows ? m.cols - col - c : 0;
  const T* from = live > 0 ? m.data + static_cast<int64_t>(row + r) * m.cols + col + c : m.data;
  if (m.together == chunk<T>) copy_async<16>(here, from, live > 0);
  else if (m.together == word<T>) {
#pragma unroll
    for (int j = 0; j < chunk<T>; j += word<T>) copy_async<4>(here + j, j < live ? from + j : m.data, j < live);
  } else {
#pragma unroll
    for (int j = 0; j < chunk<T>; ++j) here[j] = j < live ? from[j] : to<T>(0.f);
  }
}

// One tile of a product a b, whose sums run over `depth`. a is [rows, depth], or, turned, stored [depth, rows]; b is stored
// [cols, depth], or, turned, [depth, cols]. With `relued`, stored like a, elements of a count only where that is above 0.
template <class T> struct Shared {
  T a[stages][tile_elements<T>], b[stages][tile_elements<T>], relued[stages][tile_elements<T>];  // relued last: it may be left out
  static constexpr size_t bytes(bool with_relued) { return (with_relued ? 3 : 2) * sizeof a; }
};
template <class T> __device__ Shared<T>& shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return *reinterpret_cast<Shared<T>*>(memory);
}
// Of this thread: two neighbours in a row of the tile; with sums_rows, of the first 32 threads a row's sum of a over the depth.
struct Sums { float v[2], row; };
__device__ int row_of_thread() { return static_cast<int>(threadIdx.x) / (tile / 2); }
__device__ int col_of_thread() { return static_cast<int>(threadIdx.x) % (tile / 2) * 2; }

// What the quarters add up to, in the memory where the slices were. A row's length keeps its neighbours in other banks.
struct Parts { float c[quarters][tile][tile + 8], rows[quarters][tile]; };
static_assert(sizeof(Parts) <= Shared<half>::bytes(false));

// A warp's part of a slice: 16 rows of a by as many columns of b, over a quarter of the slice.
template <class T, bool a_turned, bool b_turned> struct Quarter {
  static constexpr int depth = slice<T> / quarters;  // an instruction's
  int lane, down, across, k;
  // Of this thread: numbers (lane / 4, ...) of a, those 8 rows below, and so on; of 16 bits two in a word. Those of `relued`, where there
  // is one, say which count. Sums of rows go to `rows`.
  template <bool sums_rows, bool first_parts> __device__ void add(float (&c)[2][4], float (&rows)[2], const T* a, const T* b, const T* relued) const {
    if constexpr (sizeof(T) == 2) {
      // Addresses of this thread's rows of four 8 x 8 blocks.
      auto a_fragment = [&](const T* from) {
        if constexpr (a_turned) return load_fragment<true>(from + (k + lane / 16 * 8 + lane % 8) * pitch<T, true> + down + lane / 8 % 2 * 8);
        else return load_fragment<false>(from + (down + lane % 16) * pitch<T, false> + k + lane / 16 * 8);
      };
      Fragment left = a_fragment(a), right;
      if constexpr (b_turned) right = load_fragment<true>(b + (k + lane / 8 % 2 * 8 + lane % 8) * pitch<T, true> + across + lane / 16 * 8);
      else right = load_fragment<false>(b + (across + lane / 16 * 8 + lane % 8) * pitch<T, false> + k + lane / 8 % 2 * 8);
      if (relued) {
        const Fragment y = a_fragment(relued);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const auto v = halves<T>(y.word[w]);
          if (to<float>(v.v[0]) <= 0) left.word[w] &= 0xffff0000u;
          if (to<float>(v.v[1]) <= 0) left.word[w] &= 0x0000ffffu;
        }
      }
      multiply_add<T>(c[0], left, right.word[0], right.word[1]);
      multiply_add<T>(c[1], left, right.word[2], right.word[3]);
      if constexpr (sums_rows) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const auto v = halves<T>(left.word[w]);
          rows[w % 2] += to<float>(v.v[0]) + to<float>(v.v[1]);
        }
      }
    } else {
      // The order of k is free: what the instruction calls t and t + 4 are 2 t and 2 t + 1 here.
      const int first = k + lane % 4 * 2;
      auto pair = [&]<bool turned>(std::bool_constant<turned>, const T* from, int row) {
        if constexpr (turned) return Pack<float, 2>{from[first * pitch<T, true> + row], from[(first + 1) * pitch<T, true> + row]};
        else return load_pack<2>(from + row * pitch<T, false> + first);
      };
      Split<4> left;
      Split<2> right[2];
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        auto v = pair(std::bool_constant<a_turned>(), a, down + lane / 4 + below * 8);
        if (relued) {
          const auto y = pair(std::bool_constant<a_turned>(), relued, down + lane / 4 + below * 8);
#pragma unroll
          for (int j = 0; j < 2; ++j) if (y.v[j] <= 0) v.v[j] = 0;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) left.template set<first_parts>(below + j * 2, v.v[j]);
        if constexpr (sums_rows) rows[below] += v.v[0] + v.v[1];
        const auto u = pair(std::bool_constant<b_turned>(), b, across + lane / 4 + below * 8);
#pragma unroll
        for (int j = 0; j < 2; ++j) right[below].template set<first_parts>(j, u.v[j]);
      }
      if constexpr (first_parts) {
        multiply_add(c[0], left.high, right[0].high);
        multiply_add(c[1], left.high, right[1].high);
      } else {
        multiply_add<2>(c, left, right);
      }
    }
  }
};

template <bool a_turned, bool b_turned, bool sums_rows, class T>
__device__ Sums product(Shared<T>& memory, const Matrix<T>& a, const Matrix<T>& b, const T* relued, int row, int col, int depth) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, warp = thread / warp_size, quarter = warp / 4;
  const int down = warp % 4 / 2 * 16, across = warp % 2 * 16;
  const Quarter<T, a_turned, b_turned> part{lane, down, across, quarter * Quarter<T, a_turned, b_turned>::depth};
  const Matrix<T> mask(relued, a.rows, a.cols);
  auto fetch_left = [&](T* into, const Matrix<T>& m, int s) {
    if constexpr (a_turned) fetch<true>(into, m, s, row, thread % fetchers);
    else fetch<false>(into, m, row, s, thread % fetchers);
  };
  auto fetch_slice = [&](int s) {
    const int first = s * slice<T>, at = s % stages;
    if (first < depth) {
      if (thread < fetchers) fetch_left(memory.a[at], a, first);
      else {
        if constexpr (b_turned) fetch<true>(memory.b[at], b, first, col, thread - fetchers);
        else fetch<false>(memory.b[at], b, col, first, thread - fetchers);
      }
      if (relued && thread < fetchers) fetch_left(memory.relued[at], mask, first);
    }
    asm volatile("cp.async.commit_group;");
  };
  float c[2][4], rows[2];  // of this thread: two blocks of 16 x 8; its part of two rows' sums
  auto sum_up = [&]<bool first_parts>(std::bool_constant<first_parts>) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) c[i][j] = 0;
    }
    for (int s = 0; s < stages - 1; ++s) fetch_slice(s);
    const int slices = (depth + slice<T> - 1) / slice<T>;
    for (int s = 0; s < slices; ++s) {
      asm volatile("cp.async.wait_group %0;" ::"n"(stages - 2));
      __syncthreads();  // the slice is there, and the one to be overwritten has been used
      fetch_slice(s + stages - 1);
      const int at = s % stages;
      part.template add<sums_rows, first_parts>(c, rows, memory.a[at], memory.b[at], relued ? memory.relued[at] : nullptr);
    }
  };
  sum_up(std::false_type());
  if constexpr (std::same_as<T, float>) {
    float whole[8];  // counts where it is finite
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      whole[i] = c[i / 4][i % 4];
      finite = finite && ::isfinite(whole[i]);
    }
    if (__syncthreads_or(!finite)) {
      sum_up(std::true_type());
#pragma unroll
      for (int i = 0; i < 8; ++i) if (::isfinite(whole[i])) c[i / 4][i % 4] = whole[i];
    }
  }
  __syncthreads();  // the slices have been used
  auto& parts = reinterpret_cast<Parts&>(memory);
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    const int r = down + lane / 4 + below * 8;
#pragma unroll
    for (int block = 0; block < 2; ++block)
      store_pack(&parts.c[quarter][r][across + block * 8 + lane % 4 * 2], Pack<float, 2>{{c[block][below * 2], c[block][below * 2 + 1]}});
    if constexpr (sums_rows) {
      float sum = rows[below];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (across == 0 && lane % 4 == 0) parts.rows[quarter][r] = sum;
    }
  }
  __syncthreads();
  Sums sums = {};
#pragma unroll
  for (int q = 0; q < quarters; ++q) {
    const auto v = load_pack<2>(&parts.c[q][row_of_thread()][col_of_thread()]);
    sums.v[0] += v.v[0];
    sums.v[1] += v.v[1];
    if (sums_rows && thread < tile) sums.row += parts.rows[q][thread];
  }
  return sums;
}

// Writes this thread's part of a tile of a matrix with `cols` columns in a row, whose first column here is `col`.
template <class T> __device__ void store_sums(T* y, int64_t row, int col, int cols, const Sums& sums) {
  T* at = y + row * cols + col;
  store_part(at, cols - col, cols % 2 == 0 && aligned(y, 2 * sizeof(T)), Pack<T, 2>{{to<T>(sums.v[0]), to<T>(sums.v[1])}});
}

// ---- kernels

template <class T>
__global__ void __launch_bounds__(threads) linear_kernel(const Matrix<T> x, const Matrix<T> w, const T* bias, T* y, const bool relu) {
  wait_for_previous();
  Shared<T>& memory = shared_memory<T>();
  const int across = (w.rows + tile - 1) / tile, row = static_cast<int>(blockIdx.x) / across * tile, col = static_cast<int>(blockIdx.x) % across * tile;
  const int i = row + row_of_thread(), j = col + col_of_thread();
  const float add[2] = {bias && j < w.rows ? to<float>(bias[j]) : 0.f, bias && j + 1 < w.rows ? to<float>(bias[j + 1]) : 0.f};
  Sums sums = product<false, false, false>(memory, x, w, static_cast<const T*>(nullptr), row, col, x.cols);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float& v = sums.v[k];
    if (bias) v += add[k];
    if (relu && v < 0) v = 0;
  }
  if (i < x.rows) store_sums(y, i, j, w.rows, sums);
}

// What a gradient is written to, in 16 bits or f32; null: not wanted.
template <class T> struct Target {
  void* data = nullptr;
  bool wide = false;
  __device__ void put(int row, int col, int cols, const Sums& sums) const {
    if (wide) store_sums(static_cast<float*>(data), row, col, cols, sums);
    else store_sums(static_cast<T*>(data), row, col, cols, sums);
  }
  __device__ void put(int i, float v) const {
    if (wide) static_cast<float*>(data)[i] = v;
    else static_cast<T*>(data)[i] = to<T>(v);
  }
};
template <class T>
__global__ void __launch_bounds__(threads)
    linear_grad_kernel(const Matrix<T> g, const Matrix<T> x, const Matrix<T> w, const T* relued, const Target<T> dx, const Target<T> dw, const Target<T> db,
                       const int blocks_of_x) {
  wait_for_previous();
  Shared<T>& memory = shared_memory<T>();
  const int across = (x.cols + tile - 1) / tile, of_x = static_cast<int>(blockIdx.x), of_w = of_x - blocks_of_x;
  const int block = of_w < 0 ? of_x : of_w, row = block / across * tile, col = block % across * tile;
  const int i = row + row_of_thread(), j = col + col_of_thread();
  if (of_w < 0) {
    const Sums sums = product<false, true, false>(memory, g, w, relued, row, col, g.cols);
    if (i < g.rows) dx.put(i, j, x.cols, sums);
    return;
  }
  const Sums sums = product<true, true, true>(memory, g, x, relued, row, col, g.rows);
  if (dw.data && i < g.cols) dw.put(i, j, x.cols, sums);
  const int of_bias = row + static_cast<int>(threadIdx.x);
  if (db.data && col == 0 && static_cast<int>(threadIdx.x) < tile && of_bias < g.cols) db.put(of_bias, sums.row);
}

// Above these a library's larger tiles win.
constexpr int64_t most_depth = 1024, most_products = int64_t{1} << 25;
bool small(const Tensor& t) { return t.is_contiguous() && t.numel() > 0 && t.size(0) <= most_depth && t.size(1) <= most_depth; }
int tiles(int64_t n) { return static_cast<int>(ceil_div(n, tile)); }

bool known(DType t) { return is_16bit_dtype(t) || t == DType::f32; }
template <class F> void visit_known(DType t, F f) {
  if (t == DType::f16) f(Type<half>{});
  else if (t == DType::bf16) f(Type<bfloat16>{});
  else f(Type<float>{});
}

}  // namespace

bool small_linear(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& y, bool relu) {
  if (!known(x.dtype()) || !small(x) || !small(w) || !y.is_contiguous() || x.numel() * w.size(0) > most_products) return false;
  visit_known(x.dtype(), [&]<class T>(Type<T>) {
    const Grid grid{.blocks = tiles(x.size(0)) * tiles(w.size(0)), .threads = threads, .shared = Shared<T>::bytes(false)};
    launch("linear", linear_kernel<T>, grid, matrix<T>(x), matrix<T>(w), bias.defined() ? bias.data<T>() : nullptr,
           y.data<T>(), relu);
  });
  return true;
}

bool small_linear_grad(const Call& c, std::span<Tensor> out) {
  const Tensor &g = c.in[0], &x = c.in[1], &w = c.in[2];
  if (!known(g.dtype()) || !small(g) || !small(x) || !small(w) || g.numel() * x.size(1) > most_products) return false;
  if (c.has(3) && !c.in[3].is_contiguous()) return false;
  for (auto& t : out) if (!t.is_contiguous()) return false;
  const uint32_t wanted = c.as<LinearGradAttrs>().wanted;
  visit_known(g.dtype(), [&]<class T>(Type<T>) {
    auto target = [&](size_t i) { return Target<T>{wanted >> i & 1u ? out[i].raw_data() : nullptr, out[i].dtype() == DType::f32}; };
    const int of_x = wanted & 1u ? tiles(g.size(0)) * tiles(x.size(1)) : 0, of_w = wanted & 6u ? tiles(g.size(1)) * tiles(x.size(1)) : 0;
    const Grid grid{.blocks = of_x + of_w, .threads = threads, .shared = Shared<T>::bytes(c.has(3))};
    launch("linear_grad", linear_grad_kernel<T>, grid, matrix<T>(g), matrix<T>(x), matrix<T>(w),
           c.has(3) ? static_cast<const T*>(c.in[3].data<T>()) : nullptr, target(0), target(1), target(2), of_x);
  });
  return true;
}

}  // namespace halftone::cuda
