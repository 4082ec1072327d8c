// Random draws on CUDA: element i is word i % 4 of the Philox block at offset + i / 4, as on the CPU, and a thread
// takes whole blocks. Compiled without contraction to fused multiply-adds, so that values have the CPU's bits.
#include "halftone/ops/random.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/fault.cuh"
#include "halftone/cuda/numeric.cuh"
#include "halftone/ops/copy.h"

namespace halftone::cuda {
namespace {

__device__ void advance(uint64_t* state, int64_t n) { state[1] += static_cast<uint64_t>((n + 3) / 4); }
__global__ void advance_kernel(uint64_t* state, const int64_t n) { wait_for_previous(); advance(state, n); }

// state: {seed, offset}. A grid of one block advances it, too.
template <bool normal, class T>
__global__ void __launch_bounds__(256) draw_kernel(T* x, const int64_t n, uint64_t* state, const DrawRange range) {
  wait_for_previous();
  constexpr int pack = pack_size<T> < 4 ? pack_size<T> : 4;
  const uint64_t seed = state[0], first = state[1];
  const bool packed = aligned(x, sizeof(Pack<T, pack>));
  for (int64_t q = thread_index(); q * 4 < n; q += grid_threads()) {
    const Philox4 block = philox(seed, first + static_cast<uint64_t>(q));
#pragma unroll
    for (int k = 0; k < 4; k += pack) {
      Pack<T, pack> v;
#pragma unroll
      for (int j = 0; j < pack; ++j) {
        const double u = normal ? normal_from(block, k + j) : static_cast<double>(uniform01(block.v[k + j]));
        v.v[j] = draw_value<T, normal>(u, range);
      }
      store_part(x + q * 4 + k, n - q * 4 - k, packed, v);
    }
  }
  if (gridDim.x > 1) return;
  __syncthreads();
  if (threadIdx.x == 0) advance(state, n);
}

template <bool normal> void run_draw(const Call& c, std::span<Tensor>) {
  const Tensor& x = c.in[0];
  const int64_t n = x.numel();
  if (n == 0) return;
  const Tensor dense = x.is_contiguous() ? x : Tensor::empty(Meta(x.shape(), x.dtype(), x.device()));
  auto* state = static_cast<uint64_t*>(c.in[1].raw_data());
  const int64_t blocks = std::min<int64_t>(ceil_div(n, 4 * 256), int64_t{16} * sm_count());
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    launch(c.op->name, draw_kernel<normal, T>, blocks, 256, dense.data<T>(), n, state, c.as<DrawRange>());
  });
  if (blocks > 1) launch(c.op->name, advance_kernel, 1, 1, state, n);
  if (dense.storage() != x.storage()) call_all(op::copy, {x, dense});
}

// ---- draws by key

// y = f(x, u), one u for `together` neighbours. Dense: a thread takes the elements of one block, or of two where 16 bytes hold them.
template <class F, class T>
__global__ void __launch_bounds__(256) draw_dense(T* y, const T* x, const int64_t n, const uint64_t* key, const F f) {
  wait_for_previous();
  constexpr int pack = pack_size<T>, together = pack < 4 ? 4 : pack;
  using C = compute_t<T>;
  const bool packed = aligned(x, sizeof(Pack<T, pack>)) && aligned(y, sizeof(Pack<T, pack>));
  const uint64_t seed = key[0], first = key[1];
  for (int64_t q = thread_index(); q * together < n; q += grid_threads()) {
    Pack<T, pack> v[together / pack];
#pragma unroll
    for (int k = 0; k < together; k += pack) v[k / pack] = load_part<pack>(x + q * together + k, n - q * together - k, packed, to<T>(0.f));
    Philox4 block[together / 4];
#pragma unroll
    for (int k = 0; k < together / 4; ++k) block[k] = philox(seed, first + static_cast<uint64_t>(q * (together / 4) + k));
#pragma unroll
    for (int k = 0; k < together; k += pack) {
#pragma unroll
      for (int j = 0; j < pack; ++j) v[k / pack].v[j] = to<T>(f(to<C>(v[k / pack].v[j]), uniform01(block[(k + j) / 4].v[(k + j) % 4])));
      store_part(y + q * together + k, n - q * together - k, packed, v[k / pack]);
    }
  }
}
template <class F, class T>
__global__ void __launch_bounds__(256) draw_any(T* y, const T* x, const Layout<1, int64_t> layout,
                                                const Divisor together, const uint64_t* key, const F f) {
  wait_for_previous();
  for (int64_t e = thread_index(); e < layout.count; e += grid_threads()) {
    const int64_t number = together.divide(e);
    const Philox4 block = philox(key[0], key[1] + static_cast<uint64_t>(number / 4));
    y[e] = to<T>(f(to<compute_t<T>>(x[layout.locate(e)]), uniform01(block.v[number % 4])));
  }
}
template <class F> void draw_by_key(const Call& c, const Tensor& y, int64_t together, const F& f) {
  const Tensor &x = c.in[0], key = c.in[1].contiguous();
  const int64_t n = x.numel();
  if (n == 0) return;
  const auto* k = static_cast<const uint64_t*>(key.raw_data());
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    const T* from = x.data<T>();
    if (together == 1 && x.is_contiguous())
      return launch(c.op->name, draw_dense<F, T>, std::min<int64_t>(ceil_div(n, std::max(pack_size<T>, 4) * 256), int64_t{16} * sm_count()), 256,
                    y.data<T>(), from, n, k, f);
    launch(c.op->name, draw_any<F, T>, std::min<int64_t>(ceil_div(n, 256), int64_t{32} * sm_count()), 256, y.data<T>(),
           from, Layout<1, int64_t>(Rows<1>(x.shape(), {x.strides()})), Divisor(together), k, f);
  });
}
// Dropout without a number of 64 bits for each element: u is not less than p just where it is not less than the first float that is not.
struct FloatDropout {
  float p;
  double scale;
  explicit FloatDropout(const Dropout& d) : p(static_cast<float>(d.p)), scale(d.scale) {
    if (p < d.p) p = std::nextafter(p, 2.f);
  }
  template <class C> __device__ C operator()(C x, float u) const { return u >= p ? x * static_cast<C>(scale) : C(0); }
};
void run_dropout(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<DropoutAttrs>();
  draw_by_key(c, out[0], a.together, FloatDropout(Dropout(a.p)));
}
void run_bernoulli(const Call& c, std::span<Tensor> out) { draw_by_key(c, out[0], 1, Bernoulli{}); }

__global__ void draw_key_kernel(uint64_t* key, uint64_t* state, const int64_t n) {
  wait_for_previous();
  key[0] = state[0];
  key[1] = state[1];
  advance(state, n);
}
void run_draw_key(const Call& c, std::span<Tensor> out) {
  launch("draw_key", draw_key_kernel, 1, 1, static_cast<uint64_t*>(out[0].raw_data()),
         static_cast<uint64_t*>(c.in[0].raw_data()), c.as<int64_t>());
}

__global__ void __launch_bounds__(256)
    integers_kernel(int64_t* x, const int64_t n, const uint64_t* state, const IntegerRange range) {
  wait_for_previous();
  for (int64_t i = thread_index(); i < n; i += grid_threads())
    x[i] = detail::draw_integer(detail::random_bits(state[0], state[1], static_cast<uint64_t>(i)), range);
}
void run_integers(const Call& c, std::span<Tensor>) {
  const int64_t n = c.in[0].numel();
  auto* state = static_cast<uint64_t*>(c.in[1].raw_data());
  launch("integers", integers_kernel, std::min<int64_t>(ceil_div(n, 256), int64_t{32} * sm_count()), 256,
         c.in[0].data<int64_t>(), n, static_cast<const uint64_t*>(state), c.as<IntegerRange>());
  if (n > 0) launch("integers", advance_kernel, 1, 1, state, 2 * n);
}

// ---- multinomial

struct Weights {
  int64_t rows, n, chunks, count;
  FaultSite site;
};
__device__ bool usable(double w) { return w >= 0 && w < HUGE_VAL; }

template <class T>
__global__ void __launch_bounds__(256) cumulate(double* within, const T* w, const Weights s) {
  wait_for_previous();
  for (int64_t k = thread_index(); k < s.rows * s.chunks; k += grid_threads()) {
    const int64_t row = k / s.chunks, begin = (k - row * s.chunks) * detail::cumulated;
    double sum = 0;
    for (int64_t i = begin; i < min(s.n, begin + detail::cumulated); ++i) {
      const double v = to<double>(w[row * s.n + i]);
      sum += usable(v) ? v : static_cast<double>(NAN);
      within[row * s.n + i] = sum;
    }
  }
}
// What lies before each chunk of a row; after the last, the total.
__global__ void __launch_bounds__(256) cumulate_chunks(double* before, const double* within, const Weights s) {
  wait_for_previous();
  for (int64_t row = thread_index(); row < s.rows; row += grid_threads()) {
    double total = 0;
    for (int64_t c = 0; c < s.chunks; ++c) {
      before[row * (s.chunks + 1) + c] = total;
      total += within[row * s.n + min(s.n, (c + 1) * detail::cumulated) - 1];
    }
    before[row * (s.chunks + 1) + s.chunks] = total;
  }
}
__global__ void __launch_bounds__(256)
    choose_kernel(int64_t* y, const double* within, const double* before, const uint64_t* key, const Weights s) {
  wait_for_previous();
  for (int64_t e = thread_index(); e < s.rows * s.count; e += grid_threads()) {
    const int64_t row = e / s.count;
    const double* from = before + row * (s.chunks + 1);
    const double total = from[s.chunks];
    if (total > 0 && total < HUGE_VAL)
      y[e] = detail::choose(within + row * s.n, from, s.n, total,
                            detail::random_bits(key[0], key[1], static_cast<uint64_t>(e)));
    else {
      y[e] = -1;
      report(s.site, -1, row, s.n);
    }
  }
}

struct Arrival {
  double at;
  int64_t i;
  __device__ bool before(const Arrival& o) const { return at < o.at || (at == o.at && i < o.i); }
};
// A block for each row finds one after the other; none leaves -1.
template <class T>
__global__ void __launch_bounds__(256) arrive(int64_t* y, const T* w, const uint64_t* key, const Weights s) {
  wait_for_previous();
  const Group group(256);
  const Arrival none{HUGE_VAL, largest<int64_t>};
  for (int64_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
    Arrival last{-1, -1};
    for (int64_t j = 0; j < s.count; ++j) {
      Arrival next = none;
      bool bad = false;
      for (int64_t i = threadIdx.x; i < s.n; i += 256) {
        const double v = to<double>(w[row * s.n + i]);
        bad |= !usable(v);
        const Arrival a{detail::arrival(v, detail::random_bits(key[0], key[1], static_cast<uint64_t>(row * s.n + i))), i};
        if (last.before(a) && a.before(next)) next = a;
      }
      if (bad) next = {-HUGE_VAL, -1};  // before all others
      next = group.combine(next, none, [](Arrival a, Arrival b) { return b.before(a) ? b : a; });
      const bool found = next.i >= 0 && next.at < HUGE_VAL;
      if (threadIdx.x == 0) {
        y[row * s.count + j] = found ? next.i : -1;
        if (!found) report(s.site, -1, row, s.n);
      }
      last = next;
    }
  }
}

void run_multinomial(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<MultinomialAttrs>();
  const Tensor weights = c.in[0].contiguous(), key = c.in[1].contiguous(), &y = out[0];
  if (y.numel() == 0) return;
  const int64_t n = weights.size(-1);
  const Weights s{weights.numel() / n, n, ceil_div(n, detail::cumulated), a.count, fault_site("multinomial: choice")};
  const auto* k = static_cast<const uint64_t*>(key.raw_data());
  auto grid = [](int64_t items) { return std::min<int64_t>(ceil_div(items, 256), int64_t{32} * sm_count()); };
  visit<floating_types>(weights.dtype(), [&]<class T>(Type<T>) {
    const T* w = weights.data<T>();
    if (!a.replacement)
      return launch("multinomial", arrive<T>, std::min<int64_t>(s.rows, int64_t{16} * sm_count()), 256,
                    y.data<int64_t>(), w, k, s);
    Scratch within(static_cast<size_t>(s.rows * n) * sizeof(double)),
        before(static_cast<size_t>(s.rows * (s.chunks + 1)) * sizeof(double));
    launch("multinomial", cumulate<T>, grid(s.rows * s.chunks), 256, within.as<double>(), w, s);
    launch("multinomial", cumulate_chunks, grid(s.rows), 256, before.as<double>(),
           static_cast<const double*>(within.as<double>()), s);
    launch("multinomial", choose_kernel, grid(y.numel()), 256, y.data<int64_t>(),
           static_cast<const double*>(within.as<double>()), static_cast<const double*>(before.as<double>()), k, s);
  });
}

}  // namespace

void fill_cuda_random() {
  fill<run_integers>(op::integers);
  fill<run_draw_key>(op::draw_key);
  fill<run_dropout>(op::dropout);
  fill<run_bernoulli>(op::bernoulli);
  fill<run_multinomial>(op::multinomial);
  fill<run_draw<false>>(op::uniform);
  fill<run_draw<true>>(op::normal);
}

}  // namespace halftone::cuda
