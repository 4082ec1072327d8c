#pragma once
// Products of tiles by a warp on tensor cores, with f32 sums. In 16 bits (PTX ISA: ldmatrix, movmatrix, mma.m16n8k16). Lane l holds of a
// 16 x 16 tile on the left the words (l / 4, l % 4), (l / 4 + 8, l % 4), (l / 4, l % 4 + 4), (l / 4 + 8, l % 4 + 4), a word being two
// neighbours in a row; of a 16 x 8 tile on the right column l / 4, rows 2 (l % 4) and the next, and those 8 below; of the 16 x 8 sums
// row l / 4, columns 2 (l % 4) and the next, and the same 8 rows below.
#include "halftone/cuda/numeric.cuh"

namespace halftone::cuda {

struct Fragment { uint32_t word[4]; };

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Four 8 x 8 blocks of shared memory; lane l has the address of row l % 8 of block l / 8.
template <bool transposed> __device__ Fragment load_fragment(const void* row) {
  const uint32_t address = shared_address(row);
  Fragment f;
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.word[0]), "=r"(f.word[1]), "=r"(f.word[2]), "=r"(f.word[3]) : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.word[0]), "=r"(f.word[1]), "=r"(f.word[2]), "=r"(f.word[3]) : "r"(address));
  return f;
}

// Of an 8 x 8 block whose words (l / 4, l % 4) the lanes hold, the transpose's.
__device__ inline uint32_t transpose_block(uint32_t word) {
  uint32_t t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(word));
  return t;
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

// ---- f32

// f32 numbers, each as the sum of two in TF32, of which tensor cores ignore the last 13 bits (Ootomo and Yokota, "Recovering single
// precision accuracy from Tensor Cores", 2022). Of an infinity and of NaN the second is NaN, the first is not.
template <int n> struct Split {
  uint32_t high[n], low[n];
  __device__ void set(int i, float v) {
    high[i] = (bit_cast<uint32_t>(v) + 0x1000u) & 0xffffe000u;
    low[i] = bit_cast<uint32_t>(v - bit_cast<float>(high[i]));
  }
  // The first alone, and that of infinities and NaN, too.
  __device__ void set_first(int i, float v) { asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high[i]) : "f"(v)); }
  template <bool first> __device__ void set(int i, float v) {
    if constexpr (first) set_first(i, v);
    else set(i, v);
  }
};

// c += a b for a [16, 8] and b [8, 8] in TF32 (PTX ISA: mma.m16n8k8): lane l holds a's numbers (l / 4, l % 4), (l / 4 + 8, l % 4),
// (l / 4, l % 4 + 4), (l / 4 + 8, l % 4 + 4), and b's (l % 4, l / 4), (l % 4 + 4, l / 4).
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// c[i] += a b[i] for n of them. Tensor cores cut off what does not fit their sums, so that these are short ones, added by rounding to nearest; each
// waits for the one before it, so that those of all i take turns.
template <int n> __device__ void multiply_add(float (*c)[4], const Split<4>& a, const Split<2>* b) {
  float sum[n][4] = {};
#pragma unroll
  for (int i = 0; i < n; ++i) multiply_add(sum[i], a.low, b[i].high);
#pragma unroll
  for (int i = 0; i < n; ++i) multiply_add(sum[i], a.high, b[i].low);
#pragma unroll
  for (int i = 0; i < n; ++i) multiply_add(sum[i], a.high, b[i].high);
#pragma unroll
  for (int i = 0; i < n; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] += sum[i][j];
}

}  // namespace halftone::cuda
