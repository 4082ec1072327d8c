// Attention on CUDA without weights in memory (Dao et al., "FlashAttention", 2022): a block holds 64 rows, of queries or of
// keys, and walks over tiles of the other in shared memory. Queries walk over keys in the forward, with a running maximum,
// and for their gradient; keys walk over queries for theirs. So every sum has one owner and one order: the same bits every time.
//
// A warp multiplies 16 rows by tiles 8 wide. Thread (g, t) of a warp, lane 4 g + t, holds of each the elements (g, 2 t),
// (g, 2 t + 1), (g + 8, 2 t) and (g + 8, 2 t + 1), which is what tensor cores do. An f32 factor goes into them as the sum of two
// TF32 numbers, its first 11 bits and the 11 after: three products of these give what f32 arithmetic gives, to 2^-21 of each product.
#include "halftone/cuda/attention.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/tensor_cores.cuh"
#include "halftone/ops/attention.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/random.h"

namespace halftone::cuda {
namespace {

constexpr int warps = 4, threads = warps * warp_size, warp_rows = 16, block_rows = warps * warp_rows;
constexpr int64_t widest = 256;  // a head

enum class Pass { forward, query, key_and_value, key, value };
template <Pass pass> inline constexpr bool by_key = pass != Pass::forward && pass != Pass::query;
template <Pass pass> inline constexpr bool gives_key = pass == Pass::key_and_value || pass == Pass::key;
template <Pass pass> inline constexpr bool gives_value = pass == Pass::key_and_value || pass == Pass::value;

// ---- arguments

template <class T> struct Operand {
  T* data;
  int64_t step[4];  // between batches, heads, rows, columns
  bool packed;      // rows are of whole, aligned packs
  __device__ Operand at(int64_t batch, int64_t head) const {
    Operand o = *this;
    o.data += batch * step[0] + head * step[1];
    return o;
  }
};
struct Mask {
  void* data;  // null: none
  int64_t step[4];
  DType dtype;
};
template <class T> struct Arguments {
  int64_t b, h, g;  // batches, heads of q and of k
  int t, s, d, e;   // queries, keys, widths of k and of v
  float scale;
  bool causal;
  Mask mask;
  void* mask_grad;  // [b, h, t, s], dense, of the mask's dtype; null: none
  const uint64_t* key;  // null: no dropout
  Dropout dropout = Dropout(0);
  Operand<T> q, k, v, grad, y, dq, dk, dv;
  const float *lse, *delta;  // [b, h, t]: log-sum-exps, and each row of y times that of grad
  float* lse_out;            // null: not wanted
};

// ---- tiles in shared memory

// Of rows `pitch` elements apart, so that neither rows nor columns meet in a bank.
template <class T, int width, Pass pass> struct Tiles {
  static constexpr int columns = width == 64 || (pass == Pass::forward && width == 128 && sizeof(T) == 2) ? 64 : 32;
  static constexpr int pitch = width + 16 / static_cast<int>(sizeof(T));
  static constexpr int row_tiles = pass == Pass::forward || pass == Pass::value ? 1 : 2;
  static constexpr int statistics = by_key<pass> ? 2 * columns : 0;
  static constexpr size_t bytes = static_cast<size_t>(row_tiles * block_rows + 2 * columns) * pitch * sizeof(T) +
                                  static_cast<size_t>(statistics) * sizeof(float);
};

// Rows [first, first + rows) of a matrix of `limit` rows and `columns` columns; zeros where it has none.
template <int width, int rows, class T>
__device__ void load_tile(T* to, const Operand<T>& from, int first, int limit, int columns) {
  constexpr int n = pack_size<T>, packs = width / n, pitch = width + n;
  const int padded = (columns + 15) / 16 * 16;
  for (int i = static_cast<int>(threadIdx.x); i < rows * packs; i += threads) {
    const int row = i / packs, column = i % packs * n;
    if (column >= padded) continue;
    Pack<T, n> v;
#pragma unroll
    for (int j = 0; j < n; ++j) v.v[j] = T{};
    const T* at = from.data + static_cast<int64_t>(first + row) * from.step[2];
    if (first + row < limit) {
      if (from.packed) {
        if (column < columns) v = load_pack<n>(at + column);
      } else
        for (int j = 0; j < n; ++j) if (column + j < columns) v.v[j] = at[(column + j) * from.step[3]];
    }
    store_pack(to + row * pitch + column, v);
  }
}

// ---- products of a warp

// Four 8 x 8 matrices of 16-bit elements; each lane gives a row's address, those of matrix i by lanes 8 i to 8 i + 7.
__device__ inline void load_matrices(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}
// c += a b for a [16, 16] and b [16, 8].
template <class T> __device__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::same_as<T, half>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <class T> __device__ uint32_t narrow_pair(float low, float high) {
  uint32_t pair;
  if constexpr (std::same_as<T, half>) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

constexpr int together = 4;  // products in f32 that take turns

// x y^T for the warp's rows x and a tile y, both with `depth` columns.
template <int width, int columns, class T>
__device__ void multiply(float (&c)[columns / 8][4], const T* x, const T* y, int depth) {
  constexpr int pitch = width + pack_size<T>;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
  for (int n = 0; n < columns / 8; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) c[n][j] = 0;
  if constexpr (sizeof(T) == 2) {
    const T* row = x + lane % 16 * pitch + lane / 16 * 8;
    const T* column = y + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8;
#pragma unroll 2
    for (int k = 0; k < depth; k += 16) {
      uint32_t a[4], b[4];
      load_matrices(a, row + k);
#pragma unroll
      for (int n = 0; n < columns / 8; n += 2) {
        load_matrices(b, column + n * 8 * pitch + k);
        multiply_add<T>(c[n], a, b[0], b[1]);
        multiply_add<T>(c[n + 1], a, b[2], b[3]);
      }
    }
  } else {
    const T *row = x + lane / 4 * pitch + lane % 4, *column = y + lane / 4 * pitch + lane % 4;
    for (int k = 0; k < depth; k += 8) {
      Split<4> a;
#pragma unroll
      for (int i = 0; i < 4; ++i) a.set(i, row[i % 2 * 8 * pitch + k + i / 2 * 4]);
#pragma unroll
      for (int n = 0; n < columns / 8; n += together) {
        Split<2> b[together];
#pragma unroll
        for (int i = 0; i < 2 * together; ++i) b[i / 2].set(i % 2, column[(n + i / 2) * 8 * pitch + k + i % 2 * 4]);
        multiply_add<together>(c + n, a, b);
      }
    }
  }
}

// out += p y for weights p of the warp's rows and a tile y, of which `used` columns count. 16-bit factors round p.
template <int width, int columns, class T>
__device__ void accumulate(float (&out)[width / 8][4], const float (&p)[columns / 8][4], const T* y, int used) {
  constexpr int pitch = width + pack_size<T>;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  if constexpr (sizeof(T) == 2) {
    const T* corner = y + (lane / 8 % 2 * 8 + lane % 8) * pitch + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < columns / 16; ++k) {
      const uint32_t a[4] = {narrow_pair<T>(p[2 * k][0], p[2 * k][1]), narrow_pair<T>(p[2 * k][2], p[2 * k][3]),
                             narrow_pair<T>(p[2 * k + 1][0], p[2 * k + 1][1]), narrow_pair<T>(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < width / 8; n += 2) {
        if (n * 8 >= used) break;
        uint32_t b[4];
        load_matrices_transposed(b, corner + k * 16 * pitch + n * 8);
        multiply_add<T>(out[n], a, b[0], b[1]);
        multiply_add<T>(out[n + 1], a, b[2], b[3]);
      }
    }
  } else {
    // The order of k is free: what the instruction calls t and t + 4 are 2 t and 2 t + 1 here, as this thread holds p.
    const T* corner = y + lane % 4 * 2 * pitch + lane / 4;
#pragma unroll
    for (int k = 0; k < columns / 8; ++k) {
      Split<4> a;
#pragma unroll
      for (int i = 0; i < 4; ++i) a.set(i, p[k][i % 2 * 2 + i / 2]);
#pragma unroll
      for (int n = 0; n < width / 8; n += together) {
        if (n * 8 >= used) break;
        Split<2> b[together];
#pragma unroll
        for (int i = 0; i < 2 * together; ++i) b[i / 2].set(i % 2, corner[(k * 8 + i % 2) * pitch + (n + i / 2) * 8]);
        multiply_add<together>(out + n, a, b);
      }
    }
  }
}

// The warp's rows, from `first` on, by way of its own part of a tile in shared memory.
template <int width, class T>
__device__ void store_rows(const Operand<T>& to, T* memory, const float (&x)[width / 8][4], int first, int limit, int columns) {
  constexpr int n = pack_size<T>, packs = width / n, pitch = width + n;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  __syncwarp();
#pragma unroll
  for (int c = 0; c < width / 8; ++c)
#pragma unroll
    for (int j = 0; j < 4; ++j) memory[(lane / 4 + j / 2 * 8) * pitch + c * 8 + lane % 4 * 2 + j % 2] = halftone::cuda::to<T>(x[c][j]);
  __syncwarp();
  for (int i = lane; i < warp_rows * packs; i += warp_size) {
    const int row = i / packs, column = i % packs * n;
    if (first + row >= limit || column >= columns) continue;
    T* at = to.data + static_cast<int64_t>(first + row) * to.step[2];
    const auto v = load_pack<n>(memory + row * pitch + column);
    if (to.packed) store_pack(at + column, v);
    else
      for (int j = 0; j < n; ++j) if (column + j < columns) at[(column + j) * to.step[3]] = v.v[j];
  }
  __syncwarp();
}

// ---- elements

template <class T> __device__ float power(float x) {
  if constexpr (sizeof(T) == 2) return __expf(x);
  else return ::expf(x);
}
// NaN wins, as on the CPU.
__device__ inline float larger(float a, float b) { return a > b || a != a ? a : b; }

// What one block looks at: a batch and a head of q.
template <class T> struct View {
  const Arguments<T>& a;
  int64_t batch, head;

  __device__ bool has(int i, int j) const { return i < a.t && j < a.s; }
  // All of these queries see all of these keys, and nothing is added to their scores.
  __device__ bool plain(int i, int queries, int j, int keys) const {
    return !a.mask.data && has(i + queries - 1, j + keys - 1) && !(a.causal && j + keys - 1 > i);
  }
  // q k, of query i and key j, as a score: -inf where it is hidden.
  __device__ float score(float product, int i, int j, bool is_plain) const {
    const float s = product * a.scale;
    if (is_plain) return s;
    if (!has(i, j) || (a.causal && j > i)) return -HUGE_VALF;
    if (!a.mask.data) return s;
    const int64_t at = batch * a.mask.step[0] + head * a.mask.step[1] + i * a.mask.step[2] + j * a.mask.step[3];
    switch (a.mask.dtype) {
      case DType::b8: return static_cast<const bool*>(a.mask.data)[at] ? s : -HUGE_VALF;
      case DType::f16: return s + to<float>(static_cast<const half*>(a.mask.data)[at]);
      case DType::bf16: return s + to<float>(static_cast<const bfloat16*>(a.mask.data)[at]);
      case DType::f64: return s + to<float>(static_cast<const double*>(a.mask.data)[at]);
      default: return s + static_cast<const float*>(a.mask.data)[at];
    }
  }
  __device__ int64_t number(int i, int j) const { return ((batch * a.h + head) * a.t + i) * a.s + j; }
  __device__ void store_mask_grad(float ds, int i, int j) const {
    if (!has(i, j)) return;
    switch (a.mask.dtype) {
      case DType::f16: static_cast<half*>(a.mask_grad)[number(i, j)] = to<half>(ds); break;
      case DType::bf16: static_cast<bfloat16*>(a.mask_grad)[number(i, j)] = to<bfloat16>(ds); break;
      case DType::f64: static_cast<double*>(a.mask_grad)[number(i, j)] = to<double>(ds); break;
      default: static_cast<float*>(a.mask_grad)[number(i, j)] = ds; break;
    }
  }
};

// Dropout of weights; a thread's neighbouring numbers share their random block.
template <class T> struct Drop {
  const View<T>& view;
  int64_t block = -1;
  Philox4 four{};
  // Of a weight, and of its gradient, too: x is either.
  __device__ float uniform(int i, int j) {
    const int64_t number = view.number(i, j);
    if (number / 4 != block) {
      block = number / 4;
      four = philox(view.a.key[0], view.a.key[1] + static_cast<uint64_t>(block));
    }
    const auto word = static_cast<int>(number % 4);
    return uniform01(word < 2 ? (word == 0 ? four.v[0] : four.v[1]) : (word == 2 ? four.v[2] : four.v[3]));
  }
};

// f(n, j, row, column) for each element that this thread holds of [16, columns], row by row.
template <int columns, class F> __device__ void each(F f) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
  for (int half_of = 0; half_of < 2; ++half_of)
#pragma unroll
    for (int n = 0; n < columns / 8; ++n)
#pragma unroll
      for (int j = 2 * half_of; j < 2 * half_of + 2; ++j) f(n, j, lane / 4 + 8 * half_of, n * 8 + lane % 4 * 2 + j % 2);
}
template <int n> __device__ void clear(float (&x)[n][4]) {
#pragma unroll
  for (int i = 0; i < n; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i][j] = 0;
}

// ---- passes

// Queries over keys: results and log-sum-exps.
template <class T, int width>
__global__ void __launch_bounds__(threads) attention_forward(const __grid_constant__ Arguments<T> a) {
  wait_for_previous();
  using Memory = Tiles<T, width, Pass::forward>;
  constexpr int columns = Memory::columns, pitch = Memory::pitch;
  extern __shared__ __align__(16) unsigned char memory[];
  T *queries = reinterpret_cast<T*>(memory), *keys = queries + block_rows * pitch, *values = keys + columns * pitch;
  const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = static_cast<int>(threadIdx.x) % warp_size;
  T* own = queries + warp * warp_rows * pitch;

  const int tiles = (a.t + block_rows - 1) / block_rows, number = static_cast<int>(blockIdx.x) % tiles;
  const int first = (tiles - 1 - number) * block_rows, row = first + warp * warp_rows;  // long rows first
  const int64_t line = static_cast<int>(blockIdx.x) / tiles;
  const View<T> view{a, line / a.h, line % a.h};
  const int64_t shared = view.head / (a.h / a.g);
  const int end = a.causal ? min(a.s, first + block_rows) : a.s;
  const auto k = a.k.at(view.batch, shared), v = a.v.at(view.batch, shared);
  load_tile<width, block_rows>(queries, a.q.at(view.batch, view.head), first, a.t, a.d);

  float out[width / 8][4], high[2] = {-HUGE_VALF, -HUGE_VALF}, total[2] = {0, 0};
  clear(out);
  Drop<T> drop{view};
  for (int begin = 0; begin < end; begin += columns) {
    __syncthreads();
    load_tile<width, columns>(keys, k, begin, a.s, a.d);
    load_tile<width, columns>(values, v, begin, a.s, a.e);
    __syncthreads();
    if (a.causal && begin > row + warp_rows - 1) continue;
    float p[columns / 8][4];
    multiply<width, columns>(p, own, keys, a.d);
    const bool plain = view.plain(row, warp_rows, begin, columns);
    float top[2] = {high[0], high[1]}, shift[2];
    each<columns>([&](int n, int j, int r, int c) {
      p[n][j] = view.score(p[n][j], row + r, begin + c, plain);
      top[j / 2] = larger(top[j / 2], p[n][j]);
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int mask = 1; mask < 4; mask *= 2) top[i] = larger(top[i], exchange(top[i], mask));
      shift[i] = top[i] == -HUGE_VALF ? 0 : top[i];
      const float fade = power<T>(high[i] - shift[i]);
      high[i] = top[i];
      total[i] *= fade;
#pragma unroll
      for (int n = 0; n < width / 8; ++n) {
        out[n][2 * i] *= fade;
        out[n][2 * i + 1] *= fade;
      }
    }
    each<columns>([&](int n, int j, int r, int c) {
      p[n][j] = power<T>(p[n][j] - shift[j / 2]);
      total[j / 2] += p[n][j];
      if (a.key && view.has(row + r, begin + c)) p[n][j] = a.dropout(p[n][j], drop.uniform(row + r, begin + c));
    });
    accumulate<width, columns>(out, p, values, a.e);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    for (int mask = 1; mask < 4; mask *= 2) total[i] += exchange(total[i], mask);
    const bool seen = high[i] != -HUGE_VALF;
    const int query = row + lane / 4 + 8 * i;
    if (a.lse_out && lane % 4 == 0 && query < a.t) a.lse_out[line * a.t + query] = seen ? high[i] + ::logf(total[i]) : high[i];
#pragma unroll
    for (int n = 0; n < width / 8; ++n)
#pragma unroll
      for (int j = 2 * i; j < 2 * i + 2; ++j) out[n][j] = seen ? out[n][j] / total[i] : 0;
  }
  __syncthreads();  // where there are no keys, the tile that stores pass through has only been loaded
  store_rows<width>(a.y.at(view.batch, view.head), own, out, row, a.t, a.e);
}

// A weight of the forward, again: 0 in a row that sees nothing.
template <class T> __device__ float weight(float score, float lse) { return lse == -HUGE_VALF ? 0 : power<T>(score - lse); }

// Queries over keys: gradients of q, and of the mask.
template <class T, int width>
__global__ void __launch_bounds__(threads) attention_query_grad(const __grid_constant__ Arguments<T> a) {
  wait_for_previous();
  using Memory = Tiles<T, width, Pass::query>;
  constexpr int columns = Memory::columns, pitch = Memory::pitch;
  extern __shared__ __align__(16) unsigned char memory[];
  T *queries = reinterpret_cast<T*>(memory), *grads = queries + block_rows * pitch, *keys = grads + block_rows * pitch,
    *values = keys + columns * pitch;
  const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = static_cast<int>(threadIdx.x) % warp_size;
  T *own = queries + warp * warp_rows * pitch, *own_grads = grads + warp * warp_rows * pitch;

  const int tiles = (a.t + block_rows - 1) / block_rows, number = static_cast<int>(blockIdx.x) % tiles;
  const int first = (tiles - 1 - number) * block_rows, row = first + warp * warp_rows;
  const int64_t line = static_cast<int>(blockIdx.x) / tiles;
  const View<T> view{a, line / a.h, line % a.h};
  const int64_t shared = view.head / (a.h / a.g);
  const bool skips = a.causal && !a.mask_grad;  // whose zeros are written, too
  const int end = skips ? min(a.s, first + block_rows) : a.s;
  const auto k = a.k.at(view.batch, shared), v = a.v.at(view.batch, shared);
  load_tile<width, block_rows>(queries, a.q.at(view.batch, view.head), first, a.t, a.d);
  load_tile<width, block_rows>(grads, a.grad.at(view.batch, view.head), first, a.t, a.e);
  float lse[2], delta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = row + lane / 4 + 8 * i;
    lse[i] = query < a.t ? a.lse[line * a.t + query] : HUGE_VALF;
    delta[i] = query < a.t ? a.delta[line * a.t + query] : 0;
  }

  float out[width / 8][4];
  clear(out);
  Drop<T> drop{view};
  for (int begin = 0; begin < end; begin += columns) {
    __syncthreads();
    load_tile<width, columns>(keys, k, begin, a.s, a.d);
    load_tile<width, columns>(values, v, begin, a.s, a.e);
    __syncthreads();
    if (skips && begin > row + warp_rows - 1) continue;
    float p[columns / 8][4], dp[columns / 8][4];
    multiply<width, columns>(p, own, keys, a.d);
    multiply<width, columns>(dp, own_grads, values, a.e);
    const bool plain = view.plain(row, warp_rows, begin, columns);
    each<columns>([&](int n, int j, int r, int c) {
      const int query = row + r, key = begin + c;
      if (a.key && view.has(query, key)) dp[n][j] = a.dropout(dp[n][j], drop.uniform(query, key));
      const float ds = weight<T>(view.score(p[n][j], query, key, plain), lse[j / 2]) * (dp[n][j] - delta[j / 2]);
      if (a.mask_grad) view.store_mask_grad(ds, query, key);
      p[n][j] = ds * a.scale;
    });
    accumulate<width, columns>(out, p, keys, a.d);
  }
  __syncthreads();  // as in attention_forward
  store_rows<width>(a.dq.at(view.batch, view.head), own, out, row, a.t, a.d);
}

// Keys over queries of all heads that share them: gradients of k, of v, or of both.
template <class T, int width, Pass pass>
__global__ void __launch_bounds__(threads) attention_key_grad(const __grid_constant__ Arguments<T> a) {
  wait_for_previous();
  using Memory = Tiles<T, width, pass>;
  constexpr int columns = Memory::columns, pitch = Memory::pitch;
  extern __shared__ __align__(16) unsigned char memory[];
  T *keys = reinterpret_cast<T*>(memory), *values = keys + (Memory::row_tiles - 1) * block_rows * pitch,
    *queries = keys + Memory::row_tiles * block_rows * pitch, *grads = queries + columns * pitch;
  const int warp = static_cast<int>(threadIdx.x) / warp_size;
  float *lse = reinterpret_cast<float*>(grads + columns * pitch), *delta = lse + columns;
  T *own = keys + warp * warp_rows * pitch, *own_values = values + warp * warp_rows * pitch;

  const int tiles = (a.s + block_rows - 1) / block_rows;
  const int first = static_cast<int>(blockIdx.x) % tiles * block_rows, row = first + warp * warp_rows;
  const int64_t line = static_cast<int>(blockIdx.x) / tiles, batch = line / a.g, shared = line % a.g;
  load_tile<width, block_rows>(keys, a.k.at(batch, shared), first, a.s, a.d);
  if constexpr (gives_key<pass>) load_tile<width, block_rows>(values, a.v.at(batch, shared), first, a.s, a.e);

  constexpr int none = 1;
  float dk[gives_key<pass> ? width / 8 : none][4], dv[gives_value<pass> ? width / 8 : none][4];
  clear(dk);
  clear(dv);
  for (int64_t head = shared * (a.h / a.g); head < (shared + 1) * (a.h / a.g); ++head) {
    const View<T> view{a, batch, head};
    const auto q = a.q.at(batch, head), g = a.grad.at(batch, head);
    Drop<T> drop{view};
    for (int begin = a.causal ? first / columns * columns : 0; begin < a.t; begin += columns) {
      __syncthreads();
      load_tile<width, columns>(queries, q, begin, a.t, a.d);
      load_tile<width, columns>(grads, g, begin, a.t, a.e);
      for (int c = static_cast<int>(threadIdx.x); c < columns; c += threads) {
        const int64_t at = (batch * a.h + head) * a.t + begin + c;
        const bool there = begin + c < a.t;
        lse[c] = there ? a.lse[at] : HUGE_VALF;  // no weight
        delta[c] = there ? a.delta[at] : 0;
      }
      __syncthreads();
      if (a.causal && begin + columns - 1 < row) continue;
      float p[columns / 8][4];
      multiply<width, columns>(p, own, queries, a.d);
      const bool plain = view.plain(begin, columns, row, warp_rows);
      each<columns>([&](int n, int j, int r, int c) { p[n][j] = weight<T>(view.score(p[n][j], begin + c, row + r, plain), lse[c]); });
      if constexpr (!gives_key<pass>) {
        each<columns>([&](int n, int j, int r, int c) {
          if (a.key && view.has(begin + c, row + r)) p[n][j] = a.dropout(p[n][j], drop.uniform(begin + c, row + r));
        });
        accumulate<width, columns>(dv, p, grads, a.e);
      } else {
        float dp[columns / 8][4];
        multiply<width, columns>(dp, own_values, grads, a.e);
        each<columns>([&](int n, int j, int r, int c) {
          float kept = p[n][j], back = dp[n][j];
          if (a.key && view.has(begin + c, row + r)) {
            const float u = drop.uniform(begin + c, row + r);
            kept = a.dropout(kept, u);
            back = a.dropout(back, u);
          }
          dp[n][j] = p[n][j] * (back - delta[c]) * a.scale;
          p[n][j] = kept;
        });
        if constexpr (gives_value<pass>) accumulate<width, columns>(dv, p, grads, a.e);
        accumulate<width, columns>(dk, dp, queries, a.d);
      }
    }
  }
  __syncthreads();  // where no query came after these keys, the tiles that stores pass through have only been loaded
  if constexpr (gives_key<pass>) store_rows<width>(a.dk.at(batch, shared), own, dk, row, a.s, a.d);
  if constexpr (gives_value<pass>) store_rows<width>(a.dv.at(batch, shared), own, dv, row, a.s, a.e);
}

// delta[row] = y[row] . grad[row], a warp each.
template <class T> __global__ void __launch_bounds__(256) row_products(float* delta, const Arguments<T> a) {
  wait_for_previous();
  const Group group(warp_size);
  const int64_t rows = a.b * a.h * a.t;
  for (int64_t base = group.first(); base < rows; base += group.step()) {
    const int64_t row = base + group.number, line = row / a.t, i = row % a.t;
    float sum = 0;
    if (row < rows) {
      const auto y = a.y.at(line / a.h, line % a.h), g = a.grad.at(line / a.h, line % a.h);
      for (int c = group.lane; c < a.e; c += warp_size)
        sum += to<float>(y.data[i * y.step[2] + c * y.step[3]]) * to<float>(g.data[i * g.step[2] + c * g.step[3]]);
    }
    sum = group.combine(sum, 0.f, [](float x, float y) { return x + y; });
    if (group.lane == 0 && row < rows) delta[row] = sum;
  }
}

__global__ void fill_lengths_kernel(int32_t* lengths, const int64_t step, const int64_t b, const int32_t first, const int32_t second) {
  wait_for_previous();
  for (int64_t i = thread_index(); i < b; i += grid_threads()) {
    lengths[i] = first;
    lengths[step + i] = second;
  }
}

// ---- launching

template <class T> Operand<T> operand(const Tensor& x) {
  constexpr int64_t n = pack_size<T>;
  Operand<T> o{x.data<T>(), {}, x.size(3) % n == 0 && aligned(x.raw_data(), 16)};
  for (size_t i = 0; i < 4; ++i) {
    o.step[i] = x.strides()[i];
    o.packed = o.packed && (x.shape()[i] == 1 || (i == 3 ? o.step[i] == 1 : o.step[i] % n == 0));
  }
  return o;
}

template <class T> Arguments<T> arguments(const Call& c, size_t mask) {
  const auto a = c.as<AttentionAttrs>();
  const Tensor &q = c.in[0], &k = c.in[1];
  Arguments<T> r{};
  r.b = q.size(0);
  r.h = q.size(1);
  r.g = k.size(1);
  r.t = static_cast<int>(q.size(2));
  r.s = static_cast<int>(k.size(2));
  r.d = static_cast<int>(q.size(3));
  r.e = static_cast<int>(c.in[2].size(3));
  r.scale = static_cast<float>(a.scale);
  r.causal = a.causal;
  r.q = operand<T>(q);
  r.k = operand<T>(k);
  r.v = operand<T>(c.in[2]);
  r.dropout = Dropout(a.dropout);
  if (!c.has(mask)) return r;
  r.mask.data = c.in[mask].raw_data();
  r.mask.dtype = c.in[mask].dtype();
  for (size_t i = 0; i < 4; ++i) r.mask.step[i] = c.in[mask].strides()[i];
  return r;
}

// The key of dropout, dense; undefined without.
Tensor key_of(const Call& c, size_t at) { return c.has(at) ? c.in[at].contiguous() : Tensor(); }

template <class T, int width> constexpr size_t most_shared = std::max(Tiles<T, width, Pass::query>::bytes, Tiles<T, width, Pass::key>::bytes);

// f(Type<T>, width) for the kernels that take these tensors; false when none does.
template <class F> bool choose(const Call& c, F f) {
  const int64_t wide = std::max(c.in[0].size(3), c.in[2].size(3)), longest = std::max(c.in[0].size(2), c.in[1].size(2));
  if (c.in[0].dtype() == DType::f64 || wide > widest || longest > (int64_t{1} << 30)) return false;
  int room = 0;
  check(cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device()), "cudaDeviceGetAttribute");
  auto with = [&]<class T, int width>(Type<T> type, std::integral_constant<int, width> w) {
    if (static_cast<size_t>(room) < most_shared<T, width>) return false;
    f(type, w);
    return true;
  };
  return visit<floating_types & static_cast<DTypes>(~only(DType::f64))>(c.in[0].dtype(), [&]<class T>(Type<T> type) {
    if (wide <= 64) return with(type, std::integral_constant<int, 64>());
    if (wide <= 128) return with(type, std::integral_constant<int, 128>());
    return with(type, std::integral_constant<int, 256>());
  });
}

template <class T, int width, Pass pass> void launch_pass(void (*kernel)(Arguments<T>), const Arguments<T>& a) {
  const int64_t lines = by_key<pass> ? a.b * a.g : a.b * a.h, rows = by_key<pass> ? a.s : a.t;
  launch("attention", kernel, {.blocks = lines * ceil_div(rows, block_rows), .threads = threads, .shared = Tiles<T, width, pass>::bytes}, a);
}

}  // namespace

void fill_lengths(int32_t* lengths, int64_t step, int64_t b, int64_t first, int64_t second) {
  launch("attention", fill_lengths_kernel, std::min<int64_t>(ceil_div(b, 256), 1024), 256, lengths, step, b, static_cast<int32_t>(first),
         static_cast<int32_t>(second));
}

void run_attention(const Call& c, std::span<Tensor> out) {
  bool ran = choose(c, [&]<class T, int width>(Type<T>, std::integral_constant<int, width>) {
    auto a = arguments<T>(c, 3);
    const Tensor key = key_of(c, 4);
    const Tensor lse = out.size() > 1 && !out[1].is_contiguous() ? Tensor::empty(out[1].meta()) : out.size() > 1 ? out[1] : Tensor();
    if (key.defined()) a.key = static_cast<const uint64_t*>(key.raw_data());
    a.y = operand<T>(out[0]);
    if (lse.defined()) a.lse_out = lse.data<float>();
    launch_pass<T, width, Pass::forward>(attention_forward<T, width>, a);
    if (lse.defined() && lse.body() != out[1].body()) call_all(op::copy, {out[1], lse});
  });
  if (!ran) attention_composed(c, out);
}

void run_attention_grad(const Call& c, std::span<Tensor> out) {
  bool ran = choose(c, [&]<class T, int width>(Type<T>, std::integral_constant<int, width>) {
    auto a = arguments<T>(c, 6);
    const Tensor key = key_of(c, 7), lse = c.in[5].contiguous();
    if (key.defined()) a.key = static_cast<const uint64_t*>(key.raw_data());
    a.y = operand<T>(c.in[3]);
    a.grad = operand<T>(c.in[4]);
    a.dq = operand<T>(out[0]);
    a.dk = operand<T>(out[1]);
    a.dv = operand<T>(out[2]);
    a.lse = lse.data<float>();
    const Tensor dmask = out.size() < 4 ? Tensor() : out[3].is_contiguous() ? out[3] : Tensor::empty(out[3].meta());
    if (dmask.defined()) a.mask_grad = dmask.raw_data();
    const int64_t rows = a.b * a.h * a.t;
    Scratch delta(static_cast<size_t>(rows) * sizeof(float));
    launch("attention", row_products<T>, std::min<int64_t>(ceil_div(rows, 8), int64_t{64} * sm_count()), 256, delta.as<float>(), a);
    a.delta = delta.as<float>();
    launch_pass<T, width, Pass::query>(attention_query_grad<T, width>, a);
    if constexpr (width <= 128) launch_pass<T, width, Pass::key_and_value>(attention_key_grad<T, width, Pass::key_and_value>, a);
    else {  // sums of both do not fit a thread's registers
      launch_pass<T, width, Pass::key>(attention_key_grad<T, width, Pass::key>, a);
      launch_pass<T, width, Pass::value>(attention_key_grad<T, width, Pass::value>, a);
    }
    if (dmask.defined() && dmask.body() != out[3].body()) call_all(op::copy, {out[3], dmask});
  });
  if (!ran) attention_grad_composed(c, out);
}

void fill_cuda_attention() {
  fill<run_attention>(op::attention);
  fill<run_attention_grad>(op::attention_grad);
}

}  // namespace halftone::cuda
