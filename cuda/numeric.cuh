#pragma once
// What kernels do with numbers and places: conversions by the hardware, 16-byte accesses, indices into strided tensors,
// and groups of threads that combine partial results. Conversions have the bits of core/dtype.h; the order in which a
// group combines depends on its width alone.
#include "halftone/core/dtype.h"
#include "halftone/cuda/runtime.h"
#include "halftone/ops/iterate.h"

namespace halftone::cuda {

using ::max, ::min;  // of numbers: halftone::max and halftone::min are operators

// ---- conversions

// By the hardware, which has one NaN.
__device__ inline float widen(half h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h.bits));
  return f;
}
__device__ inline float widen(bfloat16 b) { return static_cast<float>(b); }
template <class H> __device__ H narrow(float f) {
  H h;
  if constexpr (std::same_as<H, half>) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(f));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h.bits) : "f"(f));
  return h;
}

// The same with a NaN's sign and payload, as on the CPU: for casts.
__device__ inline float widen_exactly(half h) {
  uint32_t bits = h.bits;
  return (bits & 0x7fffu) > 0x7c00u ? bit_cast<float>((bits & 0x8000u) << 16 | 0x7f800000u | (bits & 0x3ffu) << 13) : widen(h);
}
__device__ inline float widen_exactly(bfloat16 b) { return widen(b); }
template <class H> __device__ H narrow_exactly(float f) {
  H h = narrow<H>(f);
  if (f == f) return h;
  uint32_t bits = bit_cast<uint32_t>(f);
  if constexpr (std::same_as<H, half>) h.bits = static_cast<uint16_t>((bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu));
  else h.bits = static_cast<uint16_t>(bits >> 16 | 0x40u);
  return h;
}

// convert() of core/dtype.h, with the hardware's 16-bit conversions; `exactly`, for NaN, too.
template <class To, bool exactly = false, class From> __device__ To to(From v) {
  if constexpr (std::same_as<To, From>) return v;
  else if constexpr (is_16bit<From>) return to<To, exactly>(exactly ? widen_exactly(v) : widen(v));
  else if constexpr (!is_16bit<To>) return convert<To>(v);
  else if constexpr (!std::same_as<From, float>) return to<To, exactly>(round_to_odd(static_cast<double>(v)));
  else if constexpr (exactly) return narrow_exactly<To>(v);
  else return narrow<To>(v);
}

// f(Type<U>) with the unsigned type of a dtype's size: one kernel moves all dtypes of a size.
template <class F> void visit_bits(DType t, F f) {
  switch (size_of(t)) {
    case 1: return f(Type<uint8_t>{});
    case 2: return f(Type<uint16_t>{});
    case 4: return f(Type<uint32_t>{});
    default: return f(Type<uint64_t>{});
  }
}

// ---- 16-byte accesses

// n neighbouring elements, read and written by one instruction; n * sizeof(T) is at most 16.
template <class T, int n> struct alignas(sizeof(T) * n) Pack { T v[n]; };
template <class... T> inline constexpr int pack_size = static_cast<int>(16 / std::max({sizeof(T)...}));

template <int n, class T>
__device__ Pack<T, n> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, n>*>(p);
}
template <int n, class T>
__device__ void store_pack(T* p, const Pack<T, n>& v) {
  *reinterpret_cast<Pack<T, n>*>(p) = v;
}

// The same where only `live` elements are left or the address may not be aligned (packed is false); `past` fills up.
template <int n, class T> __device__ Pack<T, n> load_part(const T* p, int64_t live, bool packed, T past) {
  if (packed && live >= n) return load_pack<n>(p);
  Pack<T, n> v;
#pragma unroll
  for (int j = 0; j < n; ++j) v.v[j] = j < live ? p[j] : past;
  return v;
}
template <int n, class T> __device__ void store_part(T* p, int64_t live, bool packed, const Pack<T, n>& v) {
  if (packed && live >= n) return store_pack(p, v);
#pragma unroll
  for (int j = 0; j < n; ++j)
    if (j < live) p[j] = v.v[j];
}

HT_HD inline bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// ---- indices

// Division by a number that the host knows (Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994); exact for dividends below 2^31.
struct FastDivisor {
  uint32_t divisor = 1, multiplier = 1, shift = 0;
  FastDivisor() = default;
  explicit FastDivisor(uint32_t d) : divisor(d) {
    while (shift < 31 && (1u << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  __device__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};
// The same for 64 bits: fast where the numbers allow it.
struct Divisor {
  int64_t divisor = 1;
  FastDivisor fast;
  Divisor() = default;
  explicit Divisor(int64_t d) : divisor(d), fast(d < int64_t{1} << 31 ? static_cast<uint32_t>(d) : 1u) {}
  __device__ int64_t divide(int64_t n) const {
    return ((n | divisor) >> 31) == 0 ? static_cast<int64_t>(fast.divide(static_cast<uint32_t>(n))) : n / divisor;
  }
};

// Where element i (row-major) of N operands of one shape lies. Dimensions are innermost first and already merged.
// I is uint32_t, when every size and offset is below 2^31, or int64_t. A kernel parameter.
template <int N, class I> struct Layout {
  using Division = std::conditional_t<std::same_as<I, uint32_t>, FastDivisor, Divisor>;
  int rank = 1;
  I count = 1;
  Division size[max_rank];
  I stride[max_rank][N] = {};

  Layout() = default;
  // The innermost dimension counts in packs of `pack` elements; what is left over of it is not covered.
  explicit Layout(const Rows<N>& rows, int pack = 1) : rank(rows.shape.rank()) {
    for (int d = 0; d < rank; ++d) {
      auto from = static_cast<size_t>(rank - 1 - d);
      int64_t scale = d == 0 ? pack : 1, n = rows.shape[from] / scale;
      size[d] = Division(static_cast<I>(n > 0 ? n : 1));
      count *= static_cast<I>(n);
      for (size_t k = 0; k < N; ++k) stride[d][k] = static_cast<I>(rows.strides[k][from] * scale);
    }
  }
  __device__ void locate(I i, I (&at)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) at[k] = 0;
#pragma unroll
    for (int d = 0; d < max_rank; ++d) {
      bool last = d + 1 == rank;
      I rest = last ? I(0) : static_cast<I>(size[d].divide(i));
      I here = i - rest * static_cast<I>(size[d].divisor);
      if (last) here = i;
#pragma unroll
      for (int k = 0; k < N; ++k) at[k] += here * stride[d][k];
      if (last) break;
      i = rest;
    }
  }
  __device__ I locate(I i) const requires(N == 1) {
    I at[1];
    locate(i, at);
    return at[0];
  }
};

// ---- groups of threads

inline constexpr int warp_size = 32;
__device__ inline int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t grid_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// v of the lane whose number differs by `mask`; any trivially copyable type.
template <class T> __device__ T exchange(T v, int mask) {
  static_assert(sizeof(T) % 4 == 0);
  constexpr int words = sizeof(T) / 4;
  uint32_t w[words];
  memcpy(w, &v, sizeof v);
#pragma unroll
  for (int i = 0; i < words; ++i) w[i] = __shfl_xor_sync(0xffffffffu, w[i], mask);
  memcpy(&v, w, sizeof v);
  return v;
}

// `width` neighbouring threads of a block that work on one item: a power of two up to a warp, or the whole block, whose
// size is then a multiple of 32. All threads of the block must call combine() together.
struct Group {
  int width, lane, number;  // this thread's place in its group, and the group's place in the block
  __device__ explicit Group(int w)
      : width(w), lane(static_cast<int>(threadIdx.x) % w), number(static_cast<int>(threadIdx.x) / w) {}
  __device__ int64_t first() const { return static_cast<int64_t>(blockIdx.x) * (blockDim.x / width); }
  __device__ int64_t step() const { return static_cast<int64_t>(gridDim.x) * (blockDim.x / width); }

  // The merged states of the group's threads, to every one of them. `none` merges as nothing.
  template <class S, class Merge> __device__ S combine(S s, S none, Merge merge) const {
    int narrow = min(width, warp_size);
    for (int mask = 1; mask < narrow; mask *= 2) s = merge(s, exchange(s, mask));
    if (width <= warp_size) return s;
    __shared__ __align__(16) unsigned char memory[warp_size * sizeof(S)];
    auto* of_warp = reinterpret_cast<S*>(memory);
    int lane_of_warp = static_cast<int>(threadIdx.x) % warp_size, warps = width / warp_size;
    __syncthreads();  // the last combine() may still be reading
    if (lane_of_warp == 0) of_warp[threadIdx.x / warp_size] = s;
    __syncthreads();
    s = lane_of_warp < warps ? of_warp[lane_of_warp] : none;
    for (int mask = 1; mask < warp_size; mask *= 2) s = merge(s, exchange(s, mask));
    return s;
  }
};

// The width for items of `packs` packs each: as many threads as packs, a power of two up to a warp, or the block.
inline int group_width(int64_t packs, int block) {
  if (packs > 4 * warp_size) return block;
  int width = 1;
  while (width < warp_size && width < packs) width *= 2;
  return width;
}

}  // namespace halftone::cuda
