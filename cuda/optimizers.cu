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

// A launch that is an optimizer's only one counts the step itself (`counts`): the upper bits of the count, 0 between launches, tell how
// many of its blocks have read it, and the last of them writes the next one.
constexpr int step_bits = 40;

template <class Op, class C>
__global__ void __launch_bounds__(update_threads)
    update_kernel(const Op op, const Rounding rounding, const Controls controls, const Arrays<Op> table, const Kinds kinds, const bool counts) {
  wait_for_previous();
  constexpr int n = pack_size<C>, states = states_of<Op>;
  using Now = decltype(op.template now<C>(0, 0, 0));
  __shared__ Now shared_now;
  __shared__ int64_t shared_step;
  __shared__ bool shared_skip;
  const auto part = table.part(static_cast<int>(blockIdx.x));
  void* const* data = table.data[part.tensor];
  bool packed = true;
#pragma unroll
  for (int k = 0; k < first_state + states; ++k) packed = packed && aligned(data[k], 16);
  struct Elements {
    Pack<C, n> p, g, s[states > 0 ? states : 1];
  };
  auto load = [&](int64_t i) {
    const int64_t live = part.end - i;
    Elements e;
    e.p = load_as<C, n>(kinds.parameter, data[parameter], i, live, packed);
    e.g = load_as<C, n>(kinds.gradient, data[gradient], i, live, packed);
#pragma unroll
    for (int k = 0; k < states; ++k)
      e.s[k] = data[first_state + k] ? load_part<n>(static_cast<const C*>(data[first_state + k]) + i, live, packed, C(0)) : Pack<C, n>{};
    return e;
  };
  // The first elements come while one thread finds out what to do with them.
  int64_t i = part.begin + threadIdx.x * n;
  Elements e = load(i);
  const C scale = controls.grad_scale ? static_cast<C>(*controls.grad_scale) : C(1);
  if (threadIdx.x == 0) {
    const double lr = *controls.lr, memory = controls.memory ? *controls.memory : 0;
    const bool skip = controls.skip();
    int64_t step;
    if (counts) {
      if constexpr (has_memory<Op>) __threadfence();  // the memory has been read, which the last block overwrites
      const auto old = atomicAdd(reinterpret_cast<unsigned long long*>(controls.step), 1ull << step_bits);
      step = static_cast<int64_t>(old & ((1ull << step_bits) - 1));
      if (old >> step_bits == gridDim.x - 1) {
        if constexpr (has_memory<Op>)
          if (!skip) *controls.memory = op.remember(memory, step);
        *controls.step = skip ? step : step + 1;
      }
    } else step = *controls.step;
    shared_skip = skip;
    shared_step = step;
    if (!skip) shared_now = op.template now<C>(lr, step, memory);
  }
  __syncthreads();
  if (shared_skip) return;
  const Now now = shared_now;
  const int64_t step = shared_step;
  for (; i < part.end; e = load(i += update_threads * n)) {
    const int64_t live = part.end - i;
#pragma unroll
    for (int j = 0; j < n; ++j) {
      C state[states > 0 ? states : 1];
#pragma unroll
      for (int k = 0; k < states; ++k) state[k] = e.s[k].v[j];
      e.p.v[j] = op(e.p.v[j], e.g.v[j] * scale, state, now);
#pragma unroll
      for (int k = 0; k < states; ++k) e.s[k].v[j] = state[k];
      // What will be stored, which is what the 16-bit copy is of.
      if (kinds.parameter == DType::bf16) e.p.v[j] = to<C>(round_parameter<bfloat16>(e.p.v[j], rounding, step, i + j));
      else if (kinds.parameter == DType::f16) e.p.v[j] = to<C>(to<half>(e.p.v[j]));
    }
    store_as(kinds.parameter, data[parameter], i, live, packed, e.p);
#pragma unroll
    for (int k = 0; k < states; ++k)
      if (data[first_state + k]) store_part(static_cast<C*>(data[first_state + k]) + i, live, packed, e.s[k]);
    if (data[copied]) store_as(kinds.copy, data[copied], i, live, packed, e.p);
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
    SmallVector<Kinds, 4> all;
    for (int i = 0; i < a_.n; ++i)
      if (Kinds k = kinds(i); std::find(all.begin(), all.end(), k) == all.end()) all.push_back(k);
    const bool one_launch = all.size() == 1 && a_.n <= Arrays<Op>::capacity && elements_ > 0;
    for (auto& k : all) k.parameter == DType::f64 ? update_all<double>(k, one_launch) : update_all<float>(k, one_launch);
    if (!one_launch) launch(call_.op->name, advance<Op>, 1, 1, a_.op, controls_);
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

  template <class C> void update_all(const Kinds& k, bool counts) {
    auto gather = gather_into<first_state + static_cast<int>(states)>(elements_, [&](const Arrays<Op>& table, int blocks) {
      launch(call_.op->name, update_kernel<Op, C>, blocks, update_threads, a_.op, a_.rounding, controls_, table, k, counts);
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
