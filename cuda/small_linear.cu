// Products of small matrices in 16 bits on tensor cores, for layers whose time is the launches: a whole linear layer, with
// bias and relu, is one kernel, and so are all of its gradients, relu's part and the bias's included. Blocks compute tiles of
// 32 x 32; the long dimension comes in slices of 64 through shared memory, several of them under way. Sums are f32, in a
// fixed order.
#include "halftone/cuda/small_linear.h"

#include "halftone/cuda/numeric.cuh"
#include "halftone/cuda/runtime.h"
#include "halftone/ops/matmul.h"

namespace halftone::cuda {
namespace {

constexpr int tile = 32, slice = 64, stages = 6, threads = 128;

// ---- tensor cores (PTX ISA: ldmatrix, mma.m16n8k16, cp.async)

struct Fragment { uint32_t word[4]; };

template <bool transposed> __device__ Fragment load_fragment(const void* row) {
  auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  Fragment f;
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.word[0]), "=r"(f.word[1]), "=r"(f.word[2]), "=r"(f.word[3]) : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.word[0]), "=r"(f.word[1]), "=r"(f.word[2]), "=r"(f.word[3]) : "r"(address));
  return f;
}
template <class T> __device__ void multiply_add(float (&c)[4], const Fragment& a, uint32_t b0, uint32_t b1) {
  if constexpr (std::same_as<T, half>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
}

// The two elements of a word.
template <class T> __device__ Pack<T, 2> halves(uint32_t word) {
  Pack<T, 2> p;
  memcpy(&p, &word, sizeof word);
  return p;
}

// ---- tiles

// A matrix in memory, row-major without gaps; `vectors` when every row can be read 16 bytes at a time.
template <class T> struct Matrix {
  const T* data;
  int rows, cols;
  bool vectors;
};
template <class T> Matrix<T> matrix(const Tensor& t) {
  const T* data = t.data<T>();
  return {data, static_cast<int>(t.size(0)), static_cast<int>(t.size(1)), t.size(1) % 8 == 0 && aligned(data, 16)};
}

// Rows of a tile in shared memory are a little longer than what they hold, so that eight of them lie in different banks.
template <int cols> constexpr int pitch = cols + 8;
constexpr int tile_elements = tile * pitch<slice> > slice * pitch<tile> ? tile * pitch<slice> : slice * pitch<tile>;

// Queues the copy of a tile whose first element is (row, col); zeros beyond the matrix.
template <int rows, int cols, class T> __device__ void fetch(T* into, const Matrix<T>& m, int row, int col) {
  constexpr int chunks = cols / 8;
  for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += threads) {
    const int r = i / chunks, c = i % chunks * 8;
    T* here = into + r * pitch<cols> + c;
    const bool inside = row + r < m.rows && col + c < m.cols;
    const T* from = m.data + static_cast<int64_t>(row + r) * m.cols + col + c;
    if (m.vectors) {
      auto address = static_cast<uint32_t>(__cvta_generic_to_shared(here));
      const int bytes = inside ? 16 : 0;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(inside ? from : m.data), "r"(bytes));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) here[j] = inside && col + c + j < m.cols ? from[j] : to<T>(0.f);
    }
  }
}

// One tile of a product a b, whose sums run over `depth`. a is [rows, depth], or, turned, stored [depth, rows]; b is stored
// [cols, depth], or, turned, [depth, cols]. With `relued`, stored like a, elements of a count only where that is above 0.
template <class T> struct Shared {
  T a[stages][tile_elements], b[stages][tile_elements], relued[stages][tile_elements];  // relued last: it may be left out
  static constexpr size_t bytes(bool with_relued) { return (with_relued ? 3 : 2) * sizeof a; }
};
template <class T> __device__ Shared<T>& shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return *reinterpret_cast<Shared<T>*>(memory);
}
struct Sums {
  float c[2][4] = {};   // of this thread: two blocks of 16 x 8
  float rows[2] = {};   // with sums_rows, of a over the depth: this thread's part of its rows
};
template <bool a_turned, bool b_turned, bool sums_rows, class T>
__device__ Sums product(Shared<T>& memory, const Matrix<T>& a, const Matrix<T>& b, const T* relued, int row, int col, int depth) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
  const int down = warp / 2 * 16, across = warp % 2 * 16;
  const Matrix<T> mask{relued, a.rows, a.cols, a.vectors && aligned(relued, 16)};
  auto fetch_slice = [&](int s) {
    const int k = s * slice, at = s % stages;
    if (k < depth) {
      if constexpr (a_turned) {
        fetch<slice, tile>(memory.a[at], a, k, row);
        if (relued) fetch<slice, tile>(memory.relued[at], mask, k, row);
      } else {
        fetch<tile, slice>(memory.a[at], a, row, k);
        if (relued) fetch<tile, slice>(memory.relued[at], mask, row, k);
      }
      if constexpr (b_turned) fetch<slice, tile>(memory.b[at], b, k, col);
      else fetch<tile, slice>(memory.b[at], b, col, k);
    }
    asm volatile("cp.async.commit_group;");
  };
  // Addresses of this thread's rows of four 8 x 8 blocks (ldmatrix.x4).
  auto a_fragment = [&](const T* from, int k) {
    if constexpr (a_turned) return load_fragment<true>(from + (k + lane / 16 * 8 + lane % 8) * pitch<tile> + down + lane / 8 % 2 * 8);
    else return load_fragment<false>(from + (down + lane % 16) * pitch<slice> + k + lane / 16 * 8);
  };
  auto b_fragment = [&](const T* from, int k) {
    if constexpr (b_turned) return load_fragment<true>(from + (k + lane / 8 % 2 * 8 + lane % 8) * pitch<tile> + across + lane / 16 * 8);
    else return load_fragment<false>(from + (across + lane / 16 * 8 + lane % 8) * pitch<slice> + k + lane / 8 % 2 * 8);
  };
  Sums sums;
  for (int s = 0; s < stages - 1; ++s) fetch_slice(s);
  const int slices = (depth + slice - 1) / slice;
  for (int s = 0; s < slices; ++s) {
    asm volatile("cp.async.wait_group %0;" ::"n"(stages - 2));
    __syncthreads();  // the slice is there, and the one to be overwritten has been used
    fetch_slice(s + stages - 1);
    const int at = s % stages;
#pragma unroll
    for (int k = 0; k < slice; k += 16) {
      Fragment left = a_fragment(memory.a[at], k);
      if (relued) {
        const Fragment y = a_fragment(memory.relued[at], k);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const auto v = halves<T>(y.word[w]);
          if (to<float>(v.v[0]) <= 0) left.word[w] &= 0xffff0000u;
          if (to<float>(v.v[1]) <= 0) left.word[w] &= 0x0000ffffu;
        }
      }
      const Fragment right = b_fragment(memory.b[at], k);
      multiply_add<T>(sums.c[0], left, right.word[0], right.word[1]);
      multiply_add<T>(sums.c[1], left, right.word[2], right.word[3]);
      if constexpr (sums_rows) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const auto v = halves<T>(left.word[w]);
          sums.rows[w % 2] += to<float>(v.v[0]) + to<float>(v.v[1]);
        }
      }
    }
  }
  return sums;
}

// Calls f(row, col, value) for this thread's elements of a tile.
template <class F> __device__ void each_sum(const Sums& sums, int row, int col, F f) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
#pragma unroll
  for (int block = 0; block < 2; ++block)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      f(row + warp / 2 * 16 + lane / 4 + i / 2 * 8, col + warp % 2 * 16 + block * 8 + lane % 4 * 2 + i % 2, sums.c[block][i]);
}

// ---- kernels

template <class T>
__global__ void __launch_bounds__(threads) linear_kernel(const Matrix<T> x, const Matrix<T> w, const T* bias, T* y, const bool relu) {
  wait_for_previous();
  Shared<T>& memory = shared_memory<T>();
  const int across = (w.rows + tile - 1) / tile, row = static_cast<int>(blockIdx.x) / across * tile, col = static_cast<int>(blockIdx.x) % across * tile;
  const Sums sums = product<false, false, false>(memory, x, w, static_cast<const T*>(nullptr), row, col, x.cols);
  each_sum(sums, row, col, [&](int i, int j, float v) {
    if (i >= x.rows || j >= w.rows) return;
    if (bias) v += to<float>(bias[j]);
    if (relu && v < 0) v = 0;
    y[static_cast<int64_t>(i) * w.rows + j] = to<T>(v);
  });
}

// What a gradient is written to, in 16 bits or f32; null: not wanted.
template <class T> struct Target {
  void* data = nullptr;
  bool wide = false;
  __device__ void put(int64_t i, float v) const {
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
  int block = static_cast<int>(blockIdx.x);
  const int across = (x.cols + tile - 1) / tile;
  if (block < blocks_of_x) {
    const int row = block / across * tile, col = block % across * tile;
    const Sums sums = product<false, true, false>(memory, g, w, relued, row, col, g.cols);
    each_sum(sums, row, col, [&](int i, int j, float v) {
      if (i < g.rows && j < x.cols) dx.put(static_cast<int64_t>(i) * x.cols + j, v);
    });
    return;
  }
  block -= blocks_of_x;
  const int row = block / across * tile, col = block % across * tile;
  Sums sums = product<true, true, true>(memory, g, x, relued, row, col, g.rows);
  if (dw.data)
    each_sum(sums, row, col, [&](int i, int j, float v) {
      if (i < g.cols && j < x.cols) dw.put(static_cast<int64_t>(i) * x.cols + j, v);
    });
  if (!db.data || col > 0) return;
  const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
#pragma unroll
  for (int half_of_rows = 0; half_of_rows < 2; ++half_of_rows) {
    float v = sums.rows[half_of_rows];
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    v += __shfl_xor_sync(0xffffffffu, v, 2);
    const int i = row + warp / 2 * 16 + half_of_rows * 8 + lane / 4;
    if (warp % 2 == 0 && lane % 4 == 0 && i < g.cols) db.put(i, v);
  }
}

// Above these a library's larger tiles win.
constexpr int64_t most_depth = 1024, most_products = int64_t{1} << 25;
bool small(const Tensor& t) { return t.is_contiguous() && t.numel() > 0 && t.size(0) <= most_depth && t.size(1) <= most_depth; }
int tiles(int64_t n) { return static_cast<int>(ceil_div(n, tile)); }

template <class F> void visit_16bit(DType t, F f) {
  if (t == DType::f16) f(Type<half>{});
  else f(Type<bfloat16>{});
}
}  // namespace

bool small_linear(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& y, bool relu) {
  if (!is_16bit_dtype(x.dtype()) || !small(x) || !small(w) || !y.is_contiguous() || x.numel() * w.size(0) > most_products) return false;
  visit_16bit(x.dtype(), [&]<class T>(Type<T>) {
    const Grid grid{.blocks = tiles(x.size(0)) * tiles(w.size(0)), .threads = threads, .shared = Shared<T>::bytes(false)};
    launch("linear", linear_kernel<T>, grid, matrix<T>(x), matrix<T>(w), bias.defined() ? bias.data<T>() : nullptr,
           y.data<T>(), relu);
  });
  return true;
}

bool small_linear_grad(const Call& c, std::span<Tensor> out) {
  const Tensor &g = c.in[0], &x = c.in[1], &w = c.in[2];
  if (!is_16bit_dtype(g.dtype()) || !small(g) || !small(x) || !small(w) || g.numel() * x.size(1) > most_products) return false;
  if (c.has(3) && !c.in[3].is_contiguous()) return false;
  for (auto& t : out) if (!t.is_contiguous()) return false;
  const uint32_t wanted = c.as<LinearGradAttrs>().wanted;
  visit_16bit(g.dtype(), [&]<class T>(Type<T>) {
    auto target = [&](size_t i) { return Target<T>{wanted >> i & 1u ? out[i].raw_data() : nullptr, out[i].dtype() == DType::f32}; };
    const int of_x = wanted & 1u ? tiles(g.size(0)) * tiles(x.size(1)) : 0, of_w = wanted & 6u ? tiles(g.size(1)) * tiles(x.size(1)) : 0;
    const Grid grid{.blocks = of_x + of_w, .threads = threads, .shared = Shared<T>::bytes(c.has(3))};
    launch("linear_grad", linear_grad_kernel<T>, grid, matrix<T>(g), matrix<T>(x), matrix<T>(w),
           c.has(3) ? static_cast<const T*>(c.in[3].data<T>()) : nullptr, target(0), target(1), target(2), of_x);
  });
  return true;
}

}  // namespace halftone::cuda
