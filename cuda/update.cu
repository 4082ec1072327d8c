// Updates of many tensors on CUDA: the gradient scaler, norms, scaling. What a step depends on is read from device memory.
#include "halftone/ops/update.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/elementwise.cuh"
#include "halftone/cuda/multi_tensor.cuh"
#include "halftone/ops/copy.h"

namespace halftone::cuda {
namespace {

__device__ inline bool is_finite(float v) { return ::fabs(v) <= largest<float>; }
__device__ inline bool is_finite(double v) { return ::fabs(v) <= largest<double>; }

int64_t total_elements(const char* name, std::span<const Tensor> tensors) {
  int64_t n = 0;
  for (auto& t : tensors) {
    HT_CHECK(is_floating(t.dtype()), name, ": expected tensors of floating dtypes, got ", t.meta());
    n += t.numel();
  }
  return n;
}

// ---- elementwise over many tensors, in place

// Multiplies by *inverse, when there is one, and flags what is not finite; every writer of the flag writes 1.
template <class T> struct Unscale {
  const float* inverse;
  float* found_inf;
  __device__ T operator()(T x) const {
    using C = compute_t<T>;
    const C v = to<C>(x);
    if (!is_finite(v)) *found_inf = 1;
    return inverse ? to<T>(v * static_cast<C>(__ldg(inverse))) : x;
  }
  bool writes() const { return inverse != nullptr; }
};
template <class T> struct Scale {
  const float* narrow;  // the factor, in one of two dtypes
  const double* wide;
  __device__ T operator()(T x) const {
    using C = compute_t<T>;
    return to<T>(to<C>(x) * (wide ? static_cast<C>(__ldg(wide)) : static_cast<C>(__ldg(narrow))));
  }
  bool writes() const { return true; }
};

template <class T> struct Clamp {
  double limit;
  __device__ T operator()(T x) const {
    using C = compute_t<T>;
    const C v = to<C>(x), most = static_cast<C>(limit);
    return v > most ? to<T>(most) : v < -most ? to<T>(-most) : x;
  }
  bool writes() const { return true; }
};

template <class F, class T>
__global__ void __launch_bounds__(update_threads) change_kernel(const F f, const Table<1> table, const bool writes) {
  wait_for_previous();
  constexpr int n = pack_size<T>;
  const auto part = table.part(static_cast<int>(blockIdx.x));
  auto* p = static_cast<T*>(table.data[part.tensor][0]);
  const bool packed = aligned(p, 16);
  for (int64_t i = part.begin + threadIdx.x * n; i < part.end; i += update_threads * n) {
    auto v = load_part<n>(p + i, part.end - i, packed, to<T>(0.f));
#pragma unroll
    for (int j = 0; j < n; ++j) v.v[j] = f(v.v[j]);
    if (writes) store_part(p + i, part.end - i, packed, v);
  }
}

// Replaces every element by f(element), F<T>(arguments...) being f for dtype T.
template <template <class> class F, class... A>
void change_all(const char* name, std::span<const Tensor> tensors, A... arguments) {
  const int64_t elements = total_elements(name, tensors);
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64})
    visit<floating_types>(dtype, [&]<class T>(Type<T>) {
      const F<T> f{arguments...};
      auto gather = gather_into<1>(elements, [&](const Table<1>& table, int blocks) {
        launch(name, change_kernel<F<T>, T>, blocks, update_threads, f, table, f.writes());
      });
      for (auto& t : tensors) {
        if (t.dtype() != dtype) continue;
        if (t.is_contiguous()) gather.add({t.raw_data()}, t.numel());
        else map<T, T>(name, f, t.shape(), {place(t), place(t)});
      }
      gather.flush();
    });
}

std::span<const Tensor> from(const Call& c, size_t first) { return std::span<const Tensor>(c.in).subspan(first); }

void run_unscale(const Call& c, std::span<Tensor>) {
  change_all<Unscale>("unscale", from(c, 2), static_cast<const float*>(c.in[0].data<float>()), c.in[1].data<float>());
}
void run_check_finite(const Call& c, std::span<Tensor>) {
  change_all<Unscale>("check_finite", from(c, 1), static_cast<const float*>(nullptr), c.in[0].data<float>());
}
void run_clamp_all(const Call& c, std::span<Tensor>) { change_all<Clamp>("clamp_all", c.in, c.as<double>()); }
void run_scale_all(const Call& c, std::span<Tensor>) {
  const Tensor& factor = c.in[0];
  const bool wide = factor.dtype() == DType::f64;
  change_all<Scale>("scale_all", from(c, 1), static_cast<const float*>(wide ? nullptr : factor.data<float>()),
                    static_cast<const double*>(wide ? factor.data<double>() : nullptr));
}

// ---- the norm of all elements: a sum of squares for each block, then one block adds those up

__device__ double sum_of_block(double s) {
  return Group(static_cast<int>(blockDim.x)).combine(s, 0.0, [](double a, double b) { return a + b; });
}
template <class T>
__global__ void __launch_bounds__(update_threads) squares_kernel(const Table<1> table, double* sums) {
  wait_for_previous();
  constexpr int n = pack_size<T>;
  const auto part = table.part(static_cast<int>(blockIdx.x));
  auto* p = static_cast<const T*>(table.data[part.tensor][0]);
  const bool packed = aligned(p, 16);
  double s = 0;
  for (int64_t i = part.begin + threadIdx.x * n; i < part.end; i += update_threads * n) {
    auto v = load_part<n>(p + i, part.end - i, packed, to<T>(0.f));
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const double x = to<compute_t<T>>(v.v[j]);
      s += x * x;
    }
  }
  s = sum_of_block(s);
  if (threadIdx.x == 0) sums[blockIdx.x] = s;
}
template <class Y> __global__ void __launch_bounds__(1024) norm_kernel(Y* y, const double* sums, const int64_t n) {
  wait_for_previous();
  double s = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) s += sums[i];
  s = sum_of_block(s);
  if (threadIdx.x == 0) *y = to<Y>(::sqrt(s));
}

void run_total_norm(const Call& c, std::span<Tensor> out) {
  const int64_t elements = total_elements("total_norm", c.in);
  int64_t chunks = static_cast<int64_t>(c.in.size()) + ceil_div(elements, smallest_chunk), used = 0;  // at most
  Scratch sums(static_cast<size_t>(chunks) * sizeof(double));
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64})
    visit<floating_types>(dtype, [&]<class T>(Type<T>) {
      auto gather = gather_into<1>(elements, [&](const Table<1>& table, int blocks) {
        launch("total_norm", squares_kernel<T>, blocks, update_threads, table, sums.as<double>() + used);
        used += blocks;
      });
      for (auto& t : c.in) {
        if (t.dtype() != dtype) continue;
        const Tensor dense = t.contiguous();
        gather.add({dense.raw_data()}, dense.numel(), dense);
      }
      gather.flush();
    });
  visit<only(DType::f32) | only(DType::f64)>(out[0].dtype(), [&]<class Y>(Type<Y>) {
    launch("total_norm", norm_kernel<Y>, 1, 1024, out[0].data<Y>(), sums.as<const double>(), used);
  });
}

// ---- directions of their parameters' norms: sums of squares of both for each block, then each pair's ratio, then products

template <class U, class P>
__global__ void __launch_bounds__(update_threads) pair_squares_kernel(const Table<2> table, double2* sums) {
  wait_for_previous();
  constexpr int n = pack_size<U>;
  const auto part = table.part(static_cast<int>(blockIdx.x));
  auto squares = [&]<class T>(const T* p) {
    const bool packed = aligned(p, n * sizeof(T));
    double s = 0;
    for (int64_t i = part.begin + threadIdx.x * n; i < part.end; i += update_threads * n) {
      auto v = load_part<n>(p + i, part.end - i, packed, to<T>(0.f));
#pragma unroll
      for (int j = 0; j < n; ++j) {
        const double x = to<compute_t<T>>(v.v[j]);
        s += x * x;
      }
    }
    return sum_of_block(s);
  };
  const double u = squares(static_cast<const U*>(table.data[part.tensor][0]));
  const double p = squares(static_cast<const P*>(table.data[part.tensor][1]));
  if (threadIdx.x == 0) sums[blockIdx.x] = {u, p};
}
__global__ void __launch_bounds__(update_threads) ratio_kernel(const Table<2> table, const double2* sums, double* ratios) {
  wait_for_previous();
  const int tensor = static_cast<int>(blockIdx.x);
  double u = 0, p = 0;
  for (int i = table.first_block[tensor] + threadIdx.x; i < table.first_block[tensor + 1]; i += blockDim.x) {
    u += sums[i].x;
    p += sums[i].y;
  }
  u = sum_of_block(u);
  p = sum_of_block(p);
  const double ratio = ::sqrt(p) / ::sqrt(u);
  if (threadIdx.x == 0) ratios[tensor] = ratio > 0 && is_finite(ratio) ? ratio : 1;
}
template <class U> __global__ void __launch_bounds__(update_threads) ratio_product_kernel(const Table<2> table, const double* ratios) {
  wait_for_previous();
  constexpr int n = pack_size<U>;
  const auto part = table.part(static_cast<int>(blockIdx.x));
  auto* u = static_cast<U*>(table.data[part.tensor][0]);
  const U ratio = static_cast<U>(ratios[part.tensor]);
  const bool packed = aligned(u, 16);
  for (int64_t i = part.begin + threadIdx.x * n; i < part.end; i += update_threads * n) {
    auto v = load_part<n>(u + i, part.end - i, packed, U(0));
#pragma unroll
    for (int j = 0; j < n; ++j) v.v[j] *= ratio;
    store_part(u + i, part.end - i, packed, v);
  }
}

void run_trust_ratio(const Call& c, std::span<Tensor>) {
  const size_t n = c.in.size() / 2;
  const int64_t elements = total_elements("trust_ratio", from(c, n));
  Scratch sums((n + static_cast<size_t>(ceil_div(elements, smallest_chunk))) * sizeof(double2)), ratios(Table<2>::capacity * sizeof(double));
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64})
    visit<floating_types>(dtype, [&]<class P>(Type<P>) {
      using U = accumulate_t<P>;
      auto gather = gather_into<2>(elements, [&](const Table<2>& table, int blocks) {
        launch("trust_ratio", pair_squares_kernel<U, P>, blocks, update_threads, table, sums.as<double2>());
        launch("trust_ratio", ratio_kernel, table.tensors, update_threads, table, sums.as<const double2>(), ratios.as<double>());
        launch("trust_ratio", ratio_product_kernel<U>, blocks, update_threads, table, ratios.as<const double>());
      });
      for (size_t i = 0; i < n; ++i) {
        if (c.in[n + i].dtype() != dtype) continue;
        const Tensor parameter = c.in[n + i].contiguous();
        gather.add({c.in[i].raw_data(), parameter.raw_data()}, parameter.numel(), parameter);
      }
      gather.flush();
    });
}

// ---- the gradient scaler

struct Outcomes {
  static constexpr int capacity = 64;
  float* found_inf[capacity];
  int n;
  int64_t* slots;
  int64_t count;
};
__global__ void scaler_update_kernel(float* scale, float* inverse, int64_t* streak, int64_t* skipped,
                                     int64_t* patience, const Outcomes outcomes, const update::ScalerAttrs attrs) {
  wait_for_previous();
  bool overflow = false;
  for (int i = 0; i < outcomes.n; ++i) {
    const bool bad = *outcomes.found_inf[i] != 0;
    const update::Outcome o{attrs.first_slot + i, bad};
    outcomes.slots[update::Outcome::place(o.number, outcomes.count)] = o.packed();
    overflow |= bad;
    *outcomes.found_inf[i] = 0;
  }
  const auto s = update::next_scale({*scale, *inverse, *streak, *skipped, *patience}, overflow, attrs);
  *scale = s.scale;
  *inverse = s.inverse;
  *streak = s.streak;
  *skipped = s.skipped;
  *patience = s.patience;
  outcomes.slots[0] = s.streak;
}
void run_scaler_update(const Call& c, std::span<Tensor>) {
  const Tensor& slots = c.in[update::outcomes_at];
  Outcomes outcomes{};
  outcomes.slots = slots.data<int64_t>();
  outcomes.count = slots.numel();
  for (auto& t : from(c, update::found_infs_at)) {
    HT_CHECK(outcomes.n < Outcomes::capacity, "scaler_update: at most ", Outcomes::capacity,
             " optimizers may step between updates");
    outcomes.found_inf[outcomes.n++] = t.data<float>();
  }
  launch("scaler_update", scaler_update_kernel, 1, 1, c.in[0].data<float>(), c.in[1].data<float>(),
         c.in[2].data<int64_t>(), c.in[3].data<int64_t>(), c.in[4].data<int64_t>(), outcomes, c.as<update::ScalerAttrs>());
}

}  // namespace

void fill_cuda_update() {
  fill<run_unscale>(op::unscale);
  fill<run_check_finite>(op::check_finite);
  fill<run_scaler_update>(op::scaler_update);
  fill<run_total_norm>(op::total_norm);
  fill<run_scale_all>(op::scale_all);
  fill<run_clamp_all>(op::clamp_all);
  fill<run_trust_ratio>(op::trust_ratio);
}

}  // namespace halftone::cuda
