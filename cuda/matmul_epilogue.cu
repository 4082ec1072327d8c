// Bias, activation and rounding of a product in one pass: the erf form of gelu, which cuBLASLt does not have, f64, and
// whatever shape it offers no fused kernel for.
#include "halftone/cuda/matmul_epilogue.h"

#include <algorithm>

#include "halftone/cuda/runtime.h"
#include "halftone/ops/unary.h"

namespace halftone::cuda {
namespace {

template <class T, int width> struct alignas(sizeof(T) * width) Pack { T v[width]; };

template <Activation activation, class C> __device__ C activate(C v) {
  if constexpr (activation == Activation::relu) return unary::Relu::f(v);
  else if constexpr (activation == Activation::gelu) return unary::Gelu::f(v);
  else return v;
}

// Threads walk over packs of `width` columns; n is a multiple of it, so a pack never leaves its row.
template <class T, Activation activation, int width>
__global__ void finish_packs(const compute_t<T>* z, const T* bias, T* y, T* before, int64_t packs,
                             int64_t packs_per_row) {
  wait_for_previous();
  using C = compute_t<T>;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < packs; i += stride) {
    auto in = reinterpret_cast<const Pack<C, width>*>(z)[i];
    Pack<T, width> add{}, rounded, out;
    if (bias) {
      // 64-bit division is slow and seldom needed.
      int64_t column = packs <= 0xffffffff ? static_cast<uint32_t>(i) % static_cast<uint32_t>(packs_per_row)
                                           : i % packs_per_row;
      add = reinterpret_cast<const Pack<T, width>*>(bias)[column];
    }
#pragma unroll
    for (int j = 0; j < width; ++j) {
      C v = bias ? in.v[j] + C(add.v[j]) : in.v[j];
      rounded.v[j] = T(v);
      out.v[j] = T(activate<activation>(v));
    }
    if (before) reinterpret_cast<Pack<T, width>*>(before)[i] = rounded;
    reinterpret_cast<Pack<T, width>*>(y)[i] = out;
  }
}

template <class T, Activation activation>
void finish_as(const void* z, const void* bias, void* y, void* before, int64_t rows, int64_t n) {
  constexpr int width = 4, threads = 256;
  auto aligned = [](const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
  bool packed = n % width == 0 && aligned(z, sizeof(compute_t<T>) * width) &&
                aligned(bias, sizeof(T) * width) && aligned(y, sizeof(T) * width) && aligned(before, sizeof(T) * width);
  int64_t per_row = packed ? n / width : n, packs = rows * per_row;
  int64_t blocks = std::min(ceil_div(packs, threads), int64_t{sm_count()} * 16);
  auto* kernel = packed ? finish_packs<T, activation, width> : finish_packs<T, activation, 1>;
  launch("linear's epilogue", kernel, blocks, threads, static_cast<const compute_t<T>*>(z), static_cast<const T*>(bias),
         static_cast<T*>(y), static_cast<T*>(before), packs, per_row);
}

}  // namespace

void finish(const void* z, const void* bias, void* y, void* before, DType dtype, int64_t rows, int64_t n,
            Activation activation) {
  visit<floating_types>(dtype, [&]<class T>(Type<T>) {
    switch (activation) {
      case Activation::none: return finish_as<T, Activation::none>(z, bias, y, before, rows, n);
      case Activation::relu: return finish_as<T, Activation::relu>(z, bias, y, before, rows, n);
      case Activation::gelu: return finish_as<T, Activation::gelu>(z, bias, y, before, rows, n);
    }
  });
}

}  // namespace halftone::cuda
