#pragma once
// Products of 16-bit tiles by a warp on tensor cores, with f32 sums (PTX ISA: ldmatrix, movmatrix, mma.m16n8k16). Lane l holds of a
// 16 x 16 tile on the left the words (l / 4, l % 4), (l / 4 + 8, l % 4), (l / 4, l % 4 + 4), (l / 4 + 8, l % 4 + 4), a word being two
// neighbours in a row; of a 16 x 8 tile on the right column l / 4, rows 2 (l % 4) and the next, and those 8 below; of the 16 x 8 sums
// row l / 4, columns 2 (l % 4) and the next, and the same 8 rows below.
#include "halftone/cuda/numeric.cuh"

namespace halftone::cuda {

struct Fragment { uint32_t word[4]; };

// Four 8 x 8 blocks of shared memory; lane l has the address of row l % 8 of block l / 8.
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

}  // namespace halftone::cuda
