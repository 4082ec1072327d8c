// Optimizers on CUDA: one kernel for each, over many tensors; what a step depends on is read from device memory.
#include "halftone/ops/optimizers.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/multi_tensor.cuh"
#include "halftone/ops/copy.h"

namespace halftone::cuda {
namespace {

using namespace update;

// What every parameter's update depends on, in device memory; the last three may be null.
struct Controls {
  const double* lr;
  int64_t* step;
  const float *grad_scale, *found_inf;
  double* memory;
  __device__ bool skip() const { return found_inf && *found_inf != 0; }
};
// The dtypes of the tensors of one launch.
struct Kinds {
  DType parameter, gradient, copy;
  bool operator==(const Kinds&) const = default;
};

// n neighbours of an array whose dtype is known at run time, which is the same for all threads.
template <class C, int n> __device__ Pack<C, n> load_as(DType dtype, const void* data, int64_t i, int64_t live, bool packed) {
  Pack<C, n> v;
  auto from = [&]<class T>(const T* p) {
    const auto raw = load_part<n>(p + i, live, packed, to<T>(0.f));
#pragma unroll
    for (int j = 0; j < n; ++j) v.v[j] = to<C>(raw.v[j]);
  };
  if constexpr (std::same_as<C, double>) from(static_cast<const double*>(data));
  else if (dtype == DType::f32) from(static_cast<const float*>(data));
  else if (dtype == DType::f16) from(static_cast<const half*>(data));
  else from(static_cast<const bfloat16*>(data));
  return v;
}
template <class C, int n> __device__ void store_as(DType dtype, void* data, int64_t i, int64_t live, bool packed, const Pack<C, n>& v) {
  auto into = [&]<class T>(T* p) {
    Pack<T, n> raw;
#pragma unroll
    for (int j = 0; j < n; ++j) raw.v[j] = to<T>(v.v[j]);
    store_part(p + i, live, packed, raw);
  };
  if constexpr (std::same_as<C, double>) {
    if (dtype == DType::f64) return into(static_cast<double*>(data));
  } else if (dtype == DType::f32) return into(static_cast<float*>(data));
  if (dtype == DType::f16) into(static_cast<half*>(data));
  else into(static_cast<bfloat16*>(data));
}

enum Array { parameter, gradient, copied, first_state };
template <class Op> inline constexpr int states_of = static_cast<int>(Op::states.size());
template <class Op> using Arrays = Table<first_state + states_of<Op>>;

template <class Op, class C>
__global__ void __launch_bounds__(update_threads)
    update_kernel(const Op op, const Rounding rounding, const Controls controls, const Arrays<Op> table, const Kinds kinds) {
  wait_for_previous();
  constexpr int n = pack_size<C>, states = states_of<Op>;
  using Now = decltype(op.template now<C>(0, 0, 0));
  __shared__ Now shared_now;
  if (controls.skip()) return;
  const int64_t step = *controls.step;
  if (threadIdx.x == 0) shared_now = op.template now<C>(*controls.lr, step, controls.memory ? *controls.memory : 0);
  __syncthreads();
  const Now now = shared_now;
  const C scale = controls.grad_scale ? static_cast<C>(*controls.grad_scale) : C(1);
  const auto part = table.part(static_cast<int>(blockIdx.x));
  void* const* data = table.data[part.tensor];
  bool packed = true;
#pragma unroll
  for (int k = 0; k < first_state + states; ++k) packed = packed && aligned(data[k], 16);
  for (int64_t i = part.begin + threadIdx.x * n; i < part.end; i += update_threads * n) {
    const int64_t live = part.end - i;
    auto p = load_as<C, n>(kinds.parameter, data[parameter], i, live, packed);
    const auto g = load_as<C, n>(kinds.gradient, data[gradient], i, live, packed);
    Pack<C, n> s[states > 0 ? states : 1];
#pragma unroll
    for (int k = 0; k < states; ++k)
      s[k] = data[first_state + k] ? load_part<n>(static_cast<const C*>(data[first_state + k]) + i, live, packed, C(0)) : Pack<C, n>{};
#pragma unroll
    for (int j = 0; j < n; ++j) {
      C state[states > 0 ? states : 1];
#pragma unroll
      for (int k = 0; k < states; ++k) state[k] = s[k].v[j];
      p.v[j] = op(p.v[j], g.v[j] * scale, state, now);
#pragma unroll
      for (int k = 0; k < states; ++k) s[k].v[j] = state[k];
      // What will be stored, which is what the 16-bit copy is of.
      if (kinds.parameter == DType::bf16) p.v[j] = to<C>(round_parameter<bfloat16>(p.v[j], rounding, step, i + j));
      else if (kinds.parameter == DType::f16) p.v[j] = to<C>(to<half>(p.v[j]));
    }
    store_as(kinds.parameter, data[parameter], i, live, packed, p);
#pragma unroll
    for (int k = 0; k < states; ++k)
      if (data[first_state + k]) store_part(static_cast<C*>(data[first_state + k]) + i, live, packed, s[k]);
    if (data[copied]) store_as(kinds.copy, data[copied], i, live, packed, p);
  }
}

template <class Op> __global__ void advance(const Op op, const Controls controls) {
  wait_for_previous();
  if (controls.skip()) return;
  if constexpr (has_memory<Op>) *controls.memory = op.remember(*controls.memory, *controls.step);
  ++*controls.step;
}

template <class Op> class Update {
 public:
  explicit Update(const Call& c) : call_(c), a_(c.as<Given<Op>>()) {
    auto optional = [&]<class T>(size_t i, Type<T>) { return c.has(i) ? c.in[i].data<T>() : nullptr; };
    controls_ = {c.in[lr_at].data<double>(), c.in[step_at].data<int64_t>(), optional(grad_scale_at, Type<float>{}), optional(found_inf_at, Type<float>{}),
                 optional(memory_at, Type<double>{})};
    for (int i = 0; i < a_.n; ++i) elements_ += item(0, i).numel();
  }

  void run() {
    SmallVector<Kinds, 4> done;
    for (int i = 0; i < a_.n; ++i) {
      Kinds k = kinds(i);
      if (std::find(done.begin(), done.end(), k) != done.end()) continue;
      done.push_back(k);
      k.parameter == DType::f64 ? update_all<double>(k) : update_all<float>(k);
    }
    launch(call_.op->name, advance<Op>, 1, 1, a_.op, controls_);
  }

 private:
  static constexpr size_t states = Op::states.size();
  const Tensor& item(size_t list, int i) const { return update::item(call_, a_.n, list, i); }
  const Tensor& copy(int i) const { return item(2 + states, i); }
  Kinds kinds(int i) const {
    const DType p = item(0, i).dtype(), g = item(1, i).dtype(), c = copy(i).defined() ? copy(i).dtype() : DType::f16;
    HT_CHECK(is_16bit_dtype(c), call_.op->name, ": expected 16-bit copies of parameters, got ", copy(i).meta());
    // A gradient is read in its dtype, but for f64 beside a narrower parameter and the reverse.
    return {p, p == DType::f64 || g == DType::f64 ? (p == DType::f64 ? p : DType::f32) : g, c};
  }

  template <class C> void update_all(const Kinds& k) {
    auto gather = gather_into<first_state + static_cast<int>(states)>(elements_, [&](const Arrays<Op>& table, int blocks) {
      launch(call_.op->name, update_kernel<Op, C>, blocks, update_threads, a_.op, a_.rounding, controls_, table, k);
    });
    auto address = [](const Tensor& t) { return t.defined() ? t.raw_data() : nullptr; };
    for (int i = 0; i < a_.n; ++i) {
      if (kinds(i) != k) continue;
      const Tensor &given = item(1, i), g = cast(given, k.gradient).contiguous();
      std::array<void*, first_state + states> data{item(0, i).raw_data(), g.raw_data(), address(copy(i))};
      for (size_t s = 0; s < states; ++s) data[first_state + s] = address(item(2 + s, i));
      gather.add(data, item(0, i).numel(), g.body() == given.body() ? Tensor() : g);
    }
    gather.flush();
  }

  const Call& call_;
  Given<Op> a_;
  Controls controls_;
  int64_t elements_ = 0;
};

template <class Op> void run_optimizer(const Call& c, std::span<Tensor>) { Update<Op>(c).run(); }

}  // namespace

void fill_cuda_optimizers() {
  elementwise::each(update::All{}, []<class Op>(Type<Op>) { fill<run_optimizer<Op>>(update::def<Op>); });
}

}  // namespace halftone::cuda
