// Small elementwise kernels around NCCL's collectives.
#include "halftone/cuda/nccl_reduce.h"

#include "halftone/cuda/runtime.h"

namespace halftone::cuda {
namespace {

constexpr int threads = 256;
int64_t blocks_for(int64_t n) { return std::min<int64_t>(ceil_div(n, threads), 4096); }

template <class T> __global__ void sum_kernel(const T* x, T* y, int64_t n, int ranks, float divisor) {
  wait_for_previous();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    float sum = static_cast<float>(x[i]);
    for (int r = 1; r < ranks; ++r) sum += static_cast<float>(x[r * n + i]);
    y[i] = T(sum / divisor);
  }
}

template <class T> struct KeyOf { using value = float; using type = int32_t; };
template <> struct KeyOf<double> { using value = double; using type = int64_t; };

// Negative values have the order of their magnitudes, reversed.
template <class K> __device__ K flip(K bits) { return bits >= 0 ? bits : static_cast<K>(bits ^ largest<K>); }

template <class T> __global__ void to_keys_kernel(const T* x, typename KeyOf<T>::type* keys, int64_t n, bool maximum) {
  wait_for_previous();
  using K = typename KeyOf<T>::type;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    auto v = static_cast<typename KeyOf<T>::value>(x[i]);
    keys[i] = v != v ? (maximum ? largest<K> : smallest<K>) : flip(bit_cast<K>(v));
  }
}
template <class T> __global__ void from_keys_kernel(const typename KeyOf<T>::type* keys, T* x, int64_t n) {
  wait_for_previous();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
    x[i] = T(bit_cast<typename KeyOf<T>::value>(flip(keys[i])));
}

}  // namespace

void sum_ranks(DType dtype, const void* x, void* y, int64_t n, int ranks, bool mean) {
  visit<only(DType::f16) | only(DType::bf16)>(dtype, [&]<class T>(Type<T>) {
    launch("sum_ranks", sum_kernel<T>, {.blocks = blocks_for(n), .threads = threads}, static_cast<const T*>(x), static_cast<T*>(y), n, ranks,
           mean ? static_cast<float>(ranks) : 1.f);
  });
}
void to_keys(DType dtype, const void* x, void* keys, int64_t n, bool maximum) {
  visit<floating_types>(dtype, [&]<class T>(Type<T>) {
    launch("to_keys", to_keys_kernel<T>, {.blocks = blocks_for(n), .threads = threads},
           static_cast<const T*>(x), static_cast<typename KeyOf<T>::type*>(keys), n, maximum);
  });
}
void from_keys(DType dtype, const void* keys, void* x, int64_t n) {
  visit<floating_types>(dtype, [&]<class T>(Type<T>) {
    launch("from_keys", from_keys_kernel<T>, {.blocks = blocks_for(n), .threads = threads},
           static_cast<const typename KeyOf<T>::type*>(keys), static_cast<T*>(x), n);
  });
}

}  // namespace halftone::cuda
