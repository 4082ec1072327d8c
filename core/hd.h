#pragma once
// HT_HD marks a function that both compilers must see: host code and CUDA device code.
// <math.h>, not <cmath>: ::sin(float) must be an overload of its own on the host too.
#include <math.h>

#ifdef __CUDACC__
#define HT_HD __host__ __device__
#else
#define HT_HD
#endif

namespace halftone {
// std::bit_cast, which nvcc refuses in device code.
template <class To, class From> HT_HD constexpr To bit_cast(From v) { return __builtin_bit_cast(To, v); }
}  // namespace halftone
