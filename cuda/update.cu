// Multi-tensor updates on CUDA. One launch takes many tensors: a table among the kernel's parameters says where they
// are, and each block works on one chunk of one tensor. What a step depends on is read from device memory.
#include "halftone/ops/update.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/elementwise.cuh"
#include "halftone/ops/copy.h"

namespace halftone::cuda {
namespace {

constexpr int update_threads = 256;

// Tensors of one launch, `pointers` arrays of count[i] elements each. Under 4 KB, what parameters may always have.
template <int pointers> struct Table {
  static constexpr int capacity = 3600 / (8 * pointers + 12);
  int64_t chunk;
  int tensors;
  int first_block[capacity + 1];  // of each tensor; after the last, how many there are
  int64_t count[capacity];
  void* data[capacity][pointers];

  // The tensor of a block, and its elements.
  struct Part { int tensor; int64_t begin, end; };
  __device__ Part part(int block) const {
    int low = 0, high = tensors;
    while (high - low > 1) {
      int middle = (low + high) / 2;
      if (first_block[middle] <= block) low = middle;
      else high = middle;
    }
    const int64_t begin = (block - first_block[low]) * chunk;
    return {low, begin, min(count[low], begin + chunk)};
  }
};

// Gathers tensors, and launches when the table is full and at the end. Keeps what it was given alive till then.
template <int pointers, class Launch> class Gather {
 public:
  // Many blocks when there is little, long chunks when there is much: by sizes alone, so sums have one order.
  Gather(int64_t elements, Launch launch) : launch_(launch) {
    table_.chunk = elements < 1 << 22 ? 2048 : 8192;
    clear();
  }
  void add(const std::array<void*, pointers>& data, int64_t count, const Tensor& keep = {}) {
    if (count == 0) return;
    if (table_.tensors == Table<pointers>::capacity) flush();
    int i = table_.tensors++;
    table_.count[i] = count;
    std::copy(data.begin(), data.end(), table_.data[i]);
    table_.first_block[i + 1] = table_.first_block[i] + static_cast<int>(ceil_div(count, table_.chunk));
    if (keep.defined()) kept_.push_back(keep);
  }
  void flush() {
    if (table_.tensors > 0) launch_(table_, table_.first_block[table_.tensors]);
    clear();
  }

 private:
  void clear() {
    table_.tensors = table_.first_block[0] = 0;
    kept_.clear();
  }
  Table<pointers> table_;
  Launch launch_;
  Tensors kept_;
};

template <int pointers, class Launch> Gather<pointers, Launch> gather_into(int64_t elements, Launch launch) {
  return {elements, launch};
}

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

// ---- optimizers

// What every parameter's update depends on, in device memory; the last two may be null.
struct Controls {
  const double* lr;
  const int64_t* step;
  const float *grad_scale, *found_inf;
  __device__ bool skip() const { return found_inf && *found_inf != 0; }
};

struct Sgd {
  static constexpr size_t states = 1;
  update::SgdAttrs attrs;
  template <class C> struct Step {
    C lr;
    bool first;
  };
  // By all threads of a block, together.
  template <class C> __device__ Step<C> step(const Controls& c) const { return {static_cast<C>(*c.lr), *c.step == 0}; }
  template <class C> __device__ C element(C p, C g, C& momentum, C&, const Step<C>& s) const {
    return update::sgd_element(p, g, momentum, attrs, s.lr, s.first);
  }
};
struct Adam {
  static constexpr size_t states = 2;
  update::AdamAttrs attrs;
  template <class C> struct Step { C lr, correction1, correction2; };
  template <class C> __device__ Step<C> step(const Controls& c) const {
    __shared__ double correction[2];
    if (threadIdx.x < 2)
      correction[threadIdx.x] =
          1 - ::pow(threadIdx.x == 0 ? attrs.beta1 : attrs.beta2, static_cast<double>(*c.step + 1));
    __syncthreads();
    return {static_cast<C>(*c.lr), static_cast<C>(correction[0]), static_cast<C>(correction[1])};
  }
  template <class C> __device__ C element(C p, C g, C& m, C& v, const Step<C>& s) const {
    return update::adam_element(p, g, m, v, attrs, s.lr, s.correction1, s.correction2);
  }
};

template <class P, class C>
__device__ P rounded(C v, const update::Rounding& rounding, const Controls& controls, int64_t i) {
  if (std::same_as<P, bfloat16> && rounding.stochastic)
    return update::round_parameter<P>(v, rounding, *controls.step, i);
  return to<P>(v);
}

enum Array { parameter, gradient, state1, state2, shadow_copy, optimizer_arrays };

template <class Optimizer, class P, class G>
__global__ void __launch_bounds__(update_threads)
    update_kernel(const Optimizer optimizer, const Controls controls, const Table<optimizer_arrays> table,
                  const DType shadow_dtype) {
  using C = accumulate_t<P>;
  constexpr int n = pack_size<P, G, C>;
  if (controls.skip()) return;
  const auto step = optimizer.template step<C>(controls);
  const C scale = controls.grad_scale ? static_cast<C>(*controls.grad_scale) : C(1);
  const auto part = table.part(static_cast<int>(blockIdx.x));
  void* const* data = table.data[part.tensor];
  auto* p = static_cast<P*>(data[parameter]);
  auto* g = static_cast<const G*>(data[gradient]);
  auto *s1 = static_cast<C*>(data[state1]), *s2 = static_cast<C*>(data[state2]);
  auto* copy = static_cast<uint16_t*>(data[shadow_copy]);
  const bool packed = aligned(p, 16) && aligned(g, 16) && aligned(s1, 16) && aligned(s2, 16) && aligned(copy, 16);
  for (int64_t i = part.begin + threadIdx.x * n; i < part.end; i += update_threads * n) {
    const int64_t live = part.end - i;
    auto pv = load_part<n>(p + i, live, packed, to<P>(0.f));
    auto gv = load_part<n>(g + i, live, packed, to<G>(0.f));
    Pack<C, n> v1 = {}, v2 = {};
    if (s1) v1 = load_part<n>(s1 + i, live, packed, C(0));
    if (s2) v2 = load_part<n>(s2 + i, live, packed, C(0));
#pragma unroll
    for (int j = 0; j < n; ++j)
      pv.v[j] = rounded<P>(optimizer.element(to<C>(pv.v[j]), to<C>(gv.v[j]) * scale, v1.v[j], v2.v[j], step),
                           optimizer.attrs.rounding, controls, i + j);
    store_part(p + i, live, packed, pv);
    if (s1) store_part(s1 + i, live, packed, v1);
    if (s2) store_part(s2 + i, live, packed, v2);
    if (!copy) continue;
    Pack<uint16_t, n> bits;
#pragma unroll
    for (int j = 0; j < n; ++j)
      bits.v[j] = shadow_dtype == DType::f16 ? to<half>(pv.v[j]).bits : to<bfloat16>(pv.v[j]).bits;
    store_part(copy + i, live, packed, bits);
  }
}

__global__ void advance_step(int64_t* step, const Controls controls) {
  if (!controls.skip()) ++*step;
}

// What the tensors of one launch have in common.
struct Kinds {
  DType parameter, gradient, shadow;
  bool operator==(const Kinds&) const = default;
};

template <class Optimizer> class Update {
 public:
  Update(const Call& c, const Optimizer& optimizer) : call_(c), optimizer_(optimizer), n_(optimizer.attrs.n) {
    controls_ = {c.in[update::lr_at].data<double>(), c.in[update::step_at].data<int64_t>(),
                 c.has(update::grad_scale_at) ? c.in[update::grad_scale_at].data<float>() : nullptr,
                 c.has(update::found_inf_at) ? c.in[update::found_inf_at].data<float>() : nullptr};
    for (int i = 0; i < n_; ++i) {
      elements_ += item(0, i).numel();
      kinds_.push_back(kinds(i));
    }
  }

  void run() {
    for (DType shadow_dtype : {DType::f16, DType::bf16}) {
      update_with<float, float>(shadow_dtype);
      update_with<float, half>(shadow_dtype);
      update_with<float, bfloat16>(shadow_dtype);
      update_with<double, double>(shadow_dtype);
      update_with<half, half>(shadow_dtype);
      update_with<half, float>(shadow_dtype);
      update_with<bfloat16, bfloat16>(shadow_dtype);
      update_with<bfloat16, float>(shadow_dtype);
    }
    launch(call_.op->name, advance_step, 1, 1, call_.in[update::step_at].data<int64_t>(), controls_);
  }

 private:
  const Tensor& item(size_t list, int i) const { return update::item(call_, n_, list, i); }
  const Tensor& shadow(int i) const { return item(2 + Optimizer::states, i); }
  // Gradients whose dtype has no kernel of its own are converted to the one that the update computes in.
  Kinds kinds(int i) const {
    const DType p = item(0, i).dtype(), g = item(1, i).dtype(), wide = p == DType::f64 ? p : DType::f32;
    const bool own = g == p || g == wide || (p == DType::f32 && is_16bit_dtype(g)), copied = shadow(i).defined();
    HT_CHECK(!copied || (is_16bit_dtype(shadow(i).dtype()) && shadow(i).is_contiguous()), call_.op->name,
             ": expected dense 16-bit copies of parameters, got ", shadow(i).meta());
    return {p, own ? g : wide, copied ? shadow(i).dtype() : DType::f16};
  }

  template <class P, class G> void update_with(DType shadow_dtype) {
    auto gather = gather_into<optimizer_arrays>(elements_, [&](const Table<optimizer_arrays>& table, int blocks) {
      launch(call_.op->name, update_kernel<Optimizer, P, G>, blocks, update_threads, optimizer_, controls_, table,
             shadow_dtype);
    });
    auto address = [](const Tensor& t) { return t.defined() ? t.raw_data() : nullptr; };
    for (int i = 0; i < n_; ++i) {
      if (kinds_[static_cast<size_t>(i)] != Kinds{dtype_of<P>, dtype_of<G>, shadow_dtype}) continue;
      const Tensor &given = item(1, i), g = cast(given, dtype_of<G>).contiguous();
      gather.add({item(0, i).raw_data(), g.raw_data(), address(item(2, i)),
                  Optimizer::states == 2 ? address(item(3, i)) : nullptr, address(shadow(i))},
                 item(0, i).numel(), g.body() == given.body() ? Tensor() : g);
    }
    gather.flush();
  }

  const Call& call_;
  Optimizer optimizer_;
  int n_;
  Controls controls_;
  int64_t elements_ = 0;
  SmallVector<Kinds, 64> kinds_;
};

void run_sgd(const Call& c, std::span<Tensor>) { Update<Sgd>(c, {c.as<update::SgdAttrs>()}).run(); }
void run_adam(const Call& c, std::span<Tensor>) { Update<Adam>(c, {c.as<update::AdamAttrs>()}).run(); }

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

template <class F, class T>
__global__ void __launch_bounds__(update_threads) change_kernel(const F f, const Table<1> table, const bool writes) {
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
  double s = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) s += sums[i];
  s = sum_of_block(s);
  if (threadIdx.x == 0) *y = to<Y>(::sqrt(s));
}

void run_total_norm(const Call& c, std::span<Tensor> out) {
  const int64_t elements = total_elements("total_norm", c.in);
  int64_t chunks = static_cast<int64_t>(c.in.size()) + ceil_div(elements, 2048), used = 0;  // at most
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
  fill<run_sgd>(op::sgd);
  fill<run_adam>(op::adam);
  fill<run_unscale>(op::unscale);
  fill<run_check_finite>(op::check_finite);
  fill<run_scaler_update>(op::scaler_update);
  fill<run_total_norm>(op::total_norm);
  fill<run_scale_all>(op::scale_all);
}

}  // namespace halftone::cuda
