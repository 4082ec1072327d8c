#pragma once
// gelu by tanh and its gradient in 16 bits on CUDA, which arithmetic and not memory would bound: the same formulas by the hardware's exponential
// and reciprocal. Their relative error, below 2^-15 as far out as results are not 0, vanishes in the rounding.
#include "halftone/cuda/elementwise.cuh"

namespace halftone::cuda {

__device__ inline float quick_logistic(float x) {
  const float e = __expf(-::fabsf(x));
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1 + e));
  return (x >= 0 ? 1.f : e) * inverse;
}

template <class T> requires is_16bit<T> struct UnaryElement<unary::GeluTanh, T, T> {
  unary::GeluTanh op;
  __device__ T operator()(T v) const {
    constexpr float linear = static_cast<float>(unary::GeluTanh::linear), cubic = static_cast<float>(unary::GeluTanh::cubic);
    const float x = to<float>(v);
    return to<T>(x * quick_logistic(linear * x * (1 + cubic * (x * x))));
  }
};
template <class T> requires is_16bit<T> struct BinaryElement<binary::Slope<unary::GeluTanh>, T, T> {
  __device__ T operator()(T v, T g) const {
    constexpr float linear = static_cast<float>(unary::GeluTanh::linear);
    constexpr float cubic = static_cast<float>(unary::GeluTanh::linear * unary::GeluTanh::cubic);
    const float x = to<float>(v), c = x < -16 ? -16.f : x > 16 ? 16.f : x, square = c * c, s = quick_logistic(c * (square * cubic + linear));
    return to<T>(to<float>(g) * (s + c * (s * (1 - s)) * (square * (3 * cubic) + linear)));
  }
};

}  // namespace halftone::cuda
