// Normalisation on CUDA. Sums of a channel or a feature are formed by blocks that each take some of the batch, in parts that
// are merged in order: cut by sizes alone, so that every run gives the same bits. Moments are taken about the first element,
// in f64 for f32 and in f32 for 16-bit elements, so that one pass is enough and a large mean costs no digits.
#include "halftone/ops/norm.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"
#include "halftone/ops/copy.h"
#include "halftone/ops/unary.h"

namespace halftone::cuda {
namespace {

constexpr int threads = 256;

template <class T> using wide_t = std::conditional_t<std::same_as<T, double>, double, float>;
template <class T> using moment_t = std::conditional_t<is_16bit<T>, float, double>;

template <class A> struct Pair {
  A a, b;
};
struct Add {
  template <class A> __device__ Pair<A> operator()(Pair<A> s, Pair<A> t) const { return {s.a + t.a, s.b + t.b}; }
};

// The operator's statistics [3, count]: mean, rest of it, 1 / sqrt(var + eps).
template <class W, class A> __device__ void put(W* to, int64_t count, int64_t k, A mean, A var, double eps) {
  to[k] = static_cast<W>(mean);
  to[count + k] = static_cast<W>(mean - static_cast<A>(to[k]));
  to[2 * count + k] = static_cast<W>(1 / ::sqrt(var + static_cast<A>(eps)));
}
template <class W> struct Statistics {
  W mean, rest, rstd;
  __device__ Statistics(const W* from, int64_t count, int64_t k) : mean(from[k]), rest(from[count + k]), rstd(from[2 * count + k]) {}
  __device__ W normal(W x) const { return ((x - mean) - rest) * rstd; }
};

// ---- sums over the batch, for each channel: f.at(image, channel) is what f.add(sum, element of a, element of b, that) reads;
// f.finish(sum, channel)

struct Parts { int64_t count, images; };  // each takes so many images of every channel
Parts cut(const Planes& p, int64_t blocks) {
  constexpr int64_t enough_blocks = 1024;
  const int64_t wanted = std::min(std::max<int64_t>(p.n, 1), std::max<int64_t>(1, enough_blocks / std::max<int64_t>(blocks, 1)));
  const int64_t images = std::max<int64_t>(1, ceil_div(p.n, wanted));
  return {std::max<int64_t>(1, ceil_div(p.n, images)), images};
}

// Channels are planes of `inner` neighbours: a block for each channel and part.
template <int n, class T, class F>
__global__ void __launch_bounds__(threads)
    plane_sums(const F f, const T* a, const T* b, const Planes p, const Parts parts, const Divisor packs, typename F::Sum* sums) {
  const Group block(threads);
  for (int64_t item = blockIdx.x; item < p.c * parts.count; item += gridDim.x) {
    const int64_t part = item / p.c, c = item - part * p.c, first = part * parts.images;
    const int64_t images = min(parts.images, p.n - first), count = images * packs.divisor;
    typename F::Sum sum{0, 0};
    for (int64_t k = threadIdx.x; k < count; k += threads) {
      const int64_t image = packs.divide(k), i = (k - image * packs.divisor) * n;
      const int64_t at = ((first + image) * p.c + c) * p.inner + i;
      const auto u = load_pack<n>(a + at), v = load_pack<n>(b + at);
      const auto here = f.at(first + image, c);
#pragma unroll
      for (int j = 0; j < n; ++j) sum = f.add(sum, u.v[j], v.v[j], here);
    }
    sum = block.combine(sum, typename F::Sum{0, 0}, Add());
    if (threadIdx.x == 0) sums[item] = sum;
  }
}

// Channels are neighbours: a warp side by side for them, the warps of a block one above the other for images.
template <class T, class F>
__global__ void __launch_bounds__(threads)
    column_sums(const F f, const T* a, const T* b, const Planes p, const Parts parts, typename F::Sum* sums) {
  constexpr int down = threads / warp_size;
  __shared__ typename F::Sum memory[down][warp_size];
  const int tx = static_cast<int>(threadIdx.x) % warp_size, ty = static_cast<int>(threadIdx.x) / warp_size;
  const int64_t strips = (p.c + warp_size - 1) / warp_size;
  for (int64_t item = blockIdx.x; item < strips * parts.count; item += gridDim.x) {
    const int64_t part = item / strips, c = (item - part * strips) * warp_size + tx, last = min(p.n, (part + 1) * parts.images);
    typename F::Sum sum{0, 0};
    if (c < p.c)
      for (int64_t image = part * parts.images + ty; image < last; image += down)
        sum = f.add(sum, a[image * p.c + c], b[image * p.c + c], f.at(image, c));
    memory[ty][tx] = sum;
    __syncthreads();
    if (ty == 0 && c < p.c) {
      for (int k = 1; k < down; ++k) sum = Add()(sum, memory[k][tx]);
      sums[part * p.c + c] = sum;
    }
    __syncthreads();
  }
}

template <class F>
__global__ void __launch_bounds__(threads) merge_sums(const F f, const typename F::Sum* sums, const int64_t channels, const int64_t parts) {
  for (int64_t c = thread_index(); c < channels; c += grid_threads()) {
    typename F::Sum sum = sums[c];
    for (int64_t k = 1; k < parts; ++k) sum = Add()(sum, sums[k * channels + c]);
    f.finish(sum, c);
  }
}

int64_t grid(int64_t items) { return std::min<int64_t>(items, int64_t{64} * sm_count()); }

// a and b are dense [n, c, inner]; b may be a.
template <class T, class F> void channel_sums(const char* name, const F& f, const T* a, const T* b, Planes p) {
  if (p.c == 0) return;
  if (p.inner == 0) p = {0, p.c, 1};
  constexpr int n = pack_size<T>;
  const int64_t strips = ceil_div(p.c, warp_size);
  const Parts parts = cut(p, p.inner == 1 ? strips : p.c);
  Scratch memory(static_cast<size_t>(parts.count * p.c) * sizeof(typename F::Sum));
  auto* sums = memory.as<typename F::Sum>();
  if (p.inner == 1) launch(name, column_sums<T, F>, grid(strips * parts.count), threads, f, a, b, p, parts, sums);
  else if (p.inner % n == 0 && aligned(a, 16) && aligned(b, 16))
    launch(name, plane_sums<n, T, F>, grid(p.c * parts.count), threads, f, a, b, p, parts, Divisor(p.inner / n), sums);
  else launch(name, plane_sums<1, T, F>, grid(p.c * parts.count), threads, f, a, b, p, parts, Divisor(p.inner), sums);
  launch(name, merge_sums<F>, grid(ceil_div(p.c, threads)), threads, f, static_cast<const typename F::Sum*>(sums), p.c, parts.count);
}

// ---- batch norm

template <class W> struct Running {
  W *mean = nullptr, *var = nullptr;  // null: none
  int64_t mean_step = 0, var_step = 0;
  double momentum = 0;
};
template <class W> Running<W> running(const Call& c, const BatchNormAttrs& a) {
  if (!c.has(3)) return {};
  return {c.in[3].data<W>(), c.in[4].data<W>(), c.in[3].strides()[0], c.in[4].strides()[0], a.momentum};
}

// Sums of distances from the channel's first element and of their squares become the statistics, the running ones too.
template <class T> struct Moments {
  using A = moment_t<T>;
  using W = wide_t<T>;
  using Sum = Pair<A>;
  const T* x;
  Planes p;
  W* statistics;
  Running<W> running;
  double eps;
  __device__ A at(int64_t, int64_t c) const { return to<A>(x[c * p.inner]); }
  __device__ Sum add(Sum s, T v, T, A first) const {
    const A d = to<A>(v) - first;
    return {s.a + d, s.b + d * d};
  }
  __device__ void finish(Sum s, int64_t c) const {
    const A n = static_cast<A>(p.n * p.inner), offset = s.a / n, mean = at(0, c) + offset, rest = s.b - s.a * offset;
    const A squares = rest > 0 || rest != rest ? rest : A(0), var = squares / n;
    put(statistics, p.c, c, mean, var, eps);
    if (!running.mean || !::isfinite(mean) || !::isfinite(var)) return;
    W &m = running.mean[c * running.mean_step], &v = running.var[c * running.var_step];
    m = static_cast<W>((1 - running.momentum) * static_cast<double>(m) + running.momentum * static_cast<double>(mean));
    v = static_cast<W>((1 - running.momentum) * static_cast<double>(v) + running.momentum * static_cast<double>(squares / (n - 1)));
  }
};

template <class W> __global__ void __launch_bounds__(threads) running_statistics(const Running<W> r, const int64_t channels, const double eps, W* to) {
  for (int64_t c = thread_index(); c < channels; c += grid_threads())
    put(to, channels, c, static_cast<double>(r.mean[c * r.mean_step]), static_cast<double>(r.var[c * r.var_step]), eps);
}

// The channels of n neighbouring elements: one, or neighbours themselves.
struct Channels {
  Divisor inner, c;
  __device__ int64_t of(int64_t i) const {
    const int64_t plane = inner.divide(i);
    return plane - c.divide(plane) * c.divisor;
  }
};
template <class T> bool packs(const Planes& p, std::initializer_list<const T*> operands) {
  constexpr int n = pack_size<T>;
  for (const T* t : operands) if (!aligned(t, 16)) return false;
  return p.inner == 1 ? p.c % n == 0 : p.inner % n == 0;
}

// What an element of a channel becomes: normal(x) * w + b.
template <class W> struct Affine {
  Statistics<W> s;
  W w, b;
  __device__ Affine(const W* statistics, const W* weight, const W* bias, int64_t channels, int64_t c)
      : s(statistics, channels, c), w(weight ? weight[c] : W(1)), b(bias ? bias[c] : W(0)) {}
};

template <int n, bool with_relu, class T, class W>
__global__ void __launch_bounds__(threads)
    batch_norm_apply(T* y, const T* x, const T* z, const W* statistics, const W* w, const W* b, const int64_t count, const Channels of) {
  for (int64_t k = thread_index(); k < count; k += grid_threads()) {
    const int64_t channel = of.of(k * n);
    auto v = load_pack<n>(x + k * n);
    const auto added = z ? load_pack<n>(z + k * n) : v;
    Affine<W> here(statistics, w, b, of.c.divisor, channel);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      if (j > 0 && of.inner.divisor == 1) here = Affine<W>(statistics, w, b, of.c.divisor, channel + j);
      W r = here.s.normal(to<W>(v.v[j])) * here.w + here.b;
      if (z) r += to<W>(added.v[j]);
      if constexpr (with_relu) r = unary::Relu::f(r);
      v.v[j] = to<T>(r);
    }
    store_pack(y + k * n, v);
  }
}

// Weights and the like in the dtype that kernels compute in; null when there are none.
struct Vector {
  Tensor tensor;
  Vector(const Call& c, size_t i, DType t) : tensor(c.has(i) ? cast(c.in[i], t).contiguous() : Tensor()) {}
  template <class W> const W* data() const { return tensor.defined() ? tensor.data<W>() : nullptr; }
};

template <bool with_relu> void run_batch_norm(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<BatchNormAttrs>();
  const Tensor input = c.in[0].contiguous(), added = c.has(5) ? c.in[5].contiguous() : Tensor();
  const Planes p = norm_planes(input.shape());
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    constexpr int n = pack_size<T>;
    const T *x = input.data<T>(), *z = added.defined() ? added.data<T>() : nullptr;
    T* y = out[0].data<T>();
    Scratch own(out.size() > 1 ? 0 : static_cast<size_t>(3 * p.c) * sizeof(W));
    W* statistics = out.size() > 1 ? out[1].data<W>() : own.as<W>();
    const Running<W> r = running<W>(c, a);
    if (a.training || !r.mean) channel_sums(c.op->name, Moments<T>{x, p, statistics, a.training ? r : Running<W>{}, a.eps}, x, x, p);
    else launch(c.op->name, running_statistics<W>, grid(ceil_div(p.c, threads)), threads, r, p.c, a.eps, statistics);
    const Vector weight(c, 1, dtype_of<W>), bias(c, 2, dtype_of<W>);
    const Channels of{Divisor(std::max<int64_t>(p.inner, 1)), Divisor(std::max<int64_t>(p.c, 1))};
    auto apply = [&](auto kernel, int64_t count) {
      launch(c.op->name, kernel, grid(ceil_div(count, threads)), threads, y, x, z, static_cast<const W*>(statistics), weight.data<W>(), bias.data<W>(), count, of);
    };
    if (packs<T>(p, {x, y, z})) apply(batch_norm_apply<n, with_relu, T, W>, input.numel() / n);
    else apply(batch_norm_apply<1, with_relu, T, W>, input.numel());
  });
}

// ---- gradients

// A weight's or bias's gradient, in its dtype: T or the wide one.
template <class T> struct Gradient {
  void* data = nullptr;  // null: not wanted
  bool narrow = false;
  __device__ void put(int64_t c, wide_t<T> v) const {
    if (!data) return;
    if (narrow) static_cast<T*>(data)[c] = to<T>(v);
    else static_cast<wide_t<T>*>(data)[c] = v;
  }
};
template <class T> Gradient<T> gradient(const Tensor& t, bool wanted) { return {wanted ? t.raw_data() : nullptr, t.dtype() == dtype_of<T>}; }

// Sums of g * normal(x) and of g: the gradients of weight and bias. Image n and channel c have statistics
// n * of_image + c / of_statistic.
template <class T> struct Products {
  using W = wide_t<T>;
  using Sum = Pair<W>;
  const W* statistics;
  int64_t count, of_image;
  Divisor of_statistic;
  Gradient<T> dw, db;
  Sum* sums;  // null: not wanted
  __device__ Statistics<W> at(int64_t n, int64_t c) const { return {statistics, count, n * of_image + of_statistic.divide(c)}; }
  __device__ Sum add(Sum s, T g, T x, const Statistics<W>& here) const {
    const W v = to<W>(g);
    return {s.a + v * here.normal(to<W>(x)), s.b + v};
  }
  __device__ void finish(Sum s, int64_t c) const {
    dw.put(c, s.a);
    db.put(c, s.b);
    if (sums) sums[c] = s;
  }
};

template <int n, class T, class W>
__global__ void __launch_bounds__(threads)
    batch_norm_grad_apply(T* dx, const T* g, const T* x, const W* statistics, const W* w, const Pair<W>* sums, const W share, const int64_t count, const Channels of) {
  for (int64_t k = thread_index(); k < count; k += grid_threads()) {
    const int64_t channel = of.of(k * n);
    auto v = load_pack<n>(g + k * n);
    const auto u = load_pack<n>(x + k * n);
    Affine<W> here(statistics, w, nullptr, of.c.divisor, channel);
    Pair<W> sum = sums ? sums[channel] : Pair<W>{0, 0};
#pragma unroll
    for (int j = 0; j < n; ++j) {
      if (j > 0 && of.inner.divisor == 1) {
        here = Affine<W>(statistics, w, nullptr, of.c.divisor, channel + j);
        if (sums) sum = sums[channel + j];
      }
      W r = to<W>(v.v[j]);
      if (sums) r -= (sum.b + here.s.normal(to<W>(u.v[j])) * sum.a) * share;
      v.v[j] = to<T>(r * here.s.rstd * here.w);
    }
    store_pack(dx + k * n, v);
  }
}

void run_batch_norm_grad(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<BatchNormAttrs>();
  const Tensor upper = c.in[0].contiguous(), input = c.in[1].contiguous(), saved = c.in[3].contiguous();
  const Planes p = norm_planes(input.shape());
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    constexpr int n = pack_size<T>;
    const T *g = upper.data<T>(), *x = input.data<T>();
    const W* statistics = saved.data<W>();
    const bool of_x = a.wanted & 1u, through_sums = of_x && a.training;
    Scratch memory(through_sums ? static_cast<size_t>(p.c) * sizeof(Pair<W>) : 0);
    auto* sums = memory.as<Pair<W>>();
    if (through_sums || a.wanted & 6u) {
      Products<T> f{statistics, p.c, 0, Divisor(1), gradient<T>(out[1], a.wanted & 2u), gradient<T>(out[2], a.wanted & 4u), sums};
      channel_sums("batch_norm_grad", f, g, x, p);
    }
    if (!of_x) return;
    T* dx = out[0].data<T>();
    const Vector weight(c, 2, dtype_of<W>);
    const W share = W(1) / static_cast<W>(std::max<int64_t>(1, p.n * p.inner));
    const Channels of{Divisor(std::max<int64_t>(p.inner, 1)), Divisor(std::max<int64_t>(p.c, 1))};
    auto apply = [&](auto kernel, int64_t count) {
      launch("batch_norm_grad", kernel, grid(ceil_div(count, threads)), threads, dx, g, x, statistics, weight.data<W>(), static_cast<const Pair<W>*>(sums), share, count, of);
    };
    if (packs<T>(p, {g, x, dx})) apply(batch_norm_grad_apply<n, T, W>, input.numel() / n);
    else apply(batch_norm_grad_apply<1, T, W>, input.numel());
  });
}

// ---- rows: read twice, the second time from a cache

struct Lines {
  NormRows q;
  Divisor inner;
  bool centred, packed;
  double eps;
  int width;
  __device__ int64_t feature(int64_t first, int64_t i) const { return first + (q.inner == 1 ? i : inner.divide(i)); }
  __device__ int64_t first_feature(int64_t row) const { return q.groups == 1 ? 0 : row % q.groups * (q.features / q.groups); }
};

template <class T, class W>
__global__ void __launch_bounds__(threads)
    row_norm_kernel(T* y, const T* x, const W* w, const W* b, W* statistics, const Lines rows) {
  using A = moment_t<T>;
  constexpr int n = pack_size<T>;
  const Group group(rows.width);
  const int64_t length = rows.q.length;
  for (int64_t base = group.first(); base < rows.q.rows; base += group.step()) {
    const int64_t row = base + group.number;
    const bool live = row < rows.q.rows && length > 0;
    const T* from = x + row * length;
    const A pivot = live && rows.centred ? to<A>(from[0]) : A(0);
    Pair<A> sum{0, 0};
    if (live)
      for (int64_t i = int64_t{group.lane} * n; i < length; i += int64_t{rows.width} * n) {
        const auto v = load_part<n>(from + i, length - i, rows.packed, T());
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const A d = i + j < length ? to<A>(v.v[j]) - pivot : A(0);
          sum.a += d;
          sum.b += d * d;
        }
      }
    sum = group.combine(sum, Pair<A>{0, 0}, Add());
    if (!live) continue;
    const A count = static_cast<A>(length), offset = rows.centred ? sum.a / count : A(0), rest = sum.b - sum.a * offset;
    const A mean = pivot + offset, var = rest > 0 || rest != rest ? rest / count : A(0);
    const W rstd = static_cast<W>(1 / ::sqrt(var + static_cast<A>(rows.eps))), high = static_cast<W>(mean), low = static_cast<W>(mean - static_cast<A>(high));
    if (statistics && group.lane == 0) put(statistics, rows.q.rows, row, mean, var, rows.eps);
    const int64_t first = rows.first_feature(row);
    for (int64_t i = int64_t{group.lane} * n; i < length; i += int64_t{rows.width} * n) {
      auto v = load_part<n>(from + i, length - i, rows.packed, T());
#pragma unroll
      for (int j = 0; j < n; ++j) {
        if (i + j >= length) break;
        const int64_t k = rows.feature(first, i + j);
        W r = ((to<W>(v.v[j]) - high) - low) * rstd;
        if (w) r *= w[k];
        if (b) r += b[k];
        v.v[j] = to<T>(r);
      }
      store_part(y + row * length + i, length - i, rows.packed, v);
    }
  }
}

template <class T, class W>
__global__ void __launch_bounds__(threads)
    row_norm_grad_kernel(T* dx, const T* g, const T* x, const W* w, const W* statistics, const Lines rows) {
  constexpr int n = pack_size<T>;
  const Group group(rows.width);
  const int64_t length = rows.q.length;
  for (int64_t base = group.first(); base < rows.q.rows; base += group.step()) {
    const int64_t row = base + group.number;
    const bool live = row < rows.q.rows && length > 0;
    const int64_t at = row * length, first = rows.first_feature(row);
    const Statistics<W> s(statistics, rows.q.rows, live ? row : 0);
    // Calls f(element, its place in the row, its gradient times weight, normal(x)).
    auto each = [&](int64_t i, auto f) {
      const auto u = load_part<n>(g + at + i, length - i, rows.packed, T()), v = load_part<n>(x + at + i, length - i, rows.packed, T());
#pragma unroll
      for (int j = 0; j < n; ++j) {
        if (i + j >= length) break;
        W gw = to<W>(u.v[j]);
        if (w) gw *= w[rows.feature(first, i + j)];
        f(j, gw, s.normal(to<W>(v.v[j])));
      }
    };
    Pair<W> sum{0, 0};
    if (live)
      for (int64_t i = int64_t{group.lane} * n; i < length; i += int64_t{rows.width} * n)
        each(i, [&](int, W gw, W normal) { sum.a += gw * normal, sum.b += gw; });
    sum = group.combine(sum, Pair<W>{0, 0}, Add());
    if (!live) continue;
    const W share = W(1) / static_cast<W>(length), mean = rows.centred ? sum.b * share : W(0), slope = sum.a * share;
    for (int64_t i = int64_t{group.lane} * n; i < length; i += int64_t{rows.width} * n) {
      Pack<T, n> v;
      each(i, [&](int j, W gw, W normal) { v.v[j] = to<T>((gw - (mean + normal * slope)) * s.rstd); });
      store_part(dx + at + i, length - i, rows.packed, v);
    }
  }
}

template <class T> Lines rows_of(const RowNormAttrs& a, const NormRows& q, std::initializer_list<const T*> operands) {
  constexpr int n = pack_size<T>;
  bool packed = q.length % n == 0;
  for (const T* t : operands) packed = packed && aligned(t, 16);
  return {q, Divisor(std::max<int64_t>(q.inner, 1)), a.kind != RowNorm::rms, packed, a.eps, group_width(ceil_div(q.length, n), threads)};
}

void run_row_norm(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<RowNormAttrs>();
  const Tensor input = c.in[0].contiguous();
  const NormRows q = norm_rows(a, input.shape());
  if (input.numel() == 0) return;
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    const T* x = input.data<T>();
    T* y = out[0].data<T>();
    const Vector weight(c, 1, dtype_of<W>), bias(c, 2, dtype_of<W>);
    const Lines rows = rows_of<T>(a, q, {x, y});
    launch(c.op->name, row_norm_kernel<T, W>, grid(ceil_div(q.rows * rows.width, threads)), threads, y, x, weight.data<W>(), bias.data<W>(),
           out.size() > 1 ? out[1].data<W>() : nullptr, rows);
  });
}

void run_row_norm_grad(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<RowNormAttrs>();
  const Tensor upper = c.in[0].contiguous(), input = c.in[1].contiguous(), saved = c.in[3].contiguous();
  const NormRows q = norm_rows(a, input.shape());
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    const T *g = upper.data<T>(), *x = input.data<T>();
    const W* statistics = saved.data<W>();
    if (a.wanted & 1u && input.numel() > 0) {
      T* dx = out[0].data<T>();
      const Vector weight(c, 2, dtype_of<W>);
      const Lines rows = rows_of<T>(a, q, {g, x, dx});
      launch("row_norm_grad", row_norm_grad_kernel<T, W>, grid(ceil_div(q.rows * rows.width, threads)), threads, dx, g, x, weight.data<W>(), statistics, rows);
    }
    if (!(a.wanted & 6u)) return;
    const Planes p{q.rows / q.groups, q.features, q.inner};
    Products<T> f{statistics, q.rows, q.groups, Divisor(std::max<int64_t>(1, q.features / q.groups)), gradient<T>(out[1], a.wanted & 2u),
                  gradient<T>(out[2], a.wanted & 4u), nullptr};
    channel_sums("row_norm_grad", f, g, x, p);
  });
}

}  // namespace

void fill_cuda_norm() {
  fill<run_batch_norm<false>>(op::batch_norm);
  fill<run_batch_norm<true>>(op::batch_norm_relu);
  fill<run_batch_norm_grad>(op::batch_norm_grad);
  fill<run_row_norm>(op::layer_norm);
  fill<run_row_norm>(op::group_norm);
  fill<run_row_norm>(op::rms_norm);
  fill<run_row_norm_grad>(op::row_norm_grad);
}

}  // namespace halftone::cuda
