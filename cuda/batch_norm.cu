// Batch norm on CUDA. Sums of a channel are formed by blocks that each take some of the batch, in parts that are merged in order: cut by
// sizes alone, so that every run gives the same bits.
#include "halftone/ops/norm.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/norms.cuh"
#include "halftone/ops/unary.h"

namespace halftone::cuda {
namespace {

constexpr int threads = channel_threads;

// The operator's statistics [3, count]: mean, rest of it, 1 / sqrt(var + eps).
template <class W, class A> __device__ void put(W* to, int64_t count, int64_t k, A mean, A var, double eps) {
  to[k] = static_cast<W>(mean);
  to[count + k] = static_cast<W>(mean - static_cast<A>(to[k]));
  to[2 * count + k] = static_cast<W>(1 / ::sqrt(var + static_cast<A>(eps)));
}

// ---- forward

template <class W> struct Running {
  W *mean = nullptr, *var = nullptr;  // null: none
  int64_t mean_step = 0, var_step = 0;
  double momentum = 0;
};
// Of the tensor that is normalised, input x.
template <class W> Running<W> running(const Call& c, const BatchNormAttrs& a, size_t x) {
  if (!c.has(x + 3)) return {};
  const Tensor &mean = c.in[x + 3], &var = c.in[x + 4];
  return {mean.data<W>(), var.data<W>(), mean.strides()[0], var.strides()[0], a.momentum};
}

// Sums of distances from the channel's first element and of their squares become the statistics, the running ones too.
template <class T> struct Moments {
  using A = moment_t<T>;
  using W = wide_t<T>;
  using Sum = Pair<A>;
  using Here = A;
  static constexpr bool by_image = false, after_relu = false, reads_both = false;
  const T* x;
  Planes p;
  W* statistics;
  Running<W> running;
  double eps;
  __device__ A at(int64_t, int64_t c) const { return to<A>(x[c * p.inner]); }
  __device__ bool shared(int) const { return false; }
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
  wait_for_previous();
  for (int64_t c = thread_index(); c < channels; c += grid_threads())
    put(to, channels, c, static_cast<double>(r.mean[c * r.mean_step]), static_cast<double>(r.var[c * r.var_step]), eps);
}

// The channel of packs of elements that all are of one.
struct Channels {
  Divisor packs, c;
  Channels(const Planes& p, int n) : packs(std::max<int64_t>(p.inner / n, 1)), c(std::max<int64_t>(p.c, 1)) {}
  __device__ int64_t of(int64_t pack) const {
    const int64_t plane = packs.divide(pack);
    return plane - c.divide(plane) * c.divisor;
  }
};
template <class T> bool packs(const Planes& p, std::initializer_list<const T*> operands) {
  for (const T* t : operands) if (!aligned(t, 16)) return false;
  return p.inner % pack_size<T> == 0;
}

// Calls finish(where a pack of a thread's own channels lies, what load() gave for it) for a part of the images, the last first: what
// column_sums() read last of its part may still be in the cache.
template <int n, class Begin, class Load, class Finish>
__device__ void each_image(const Columns& k, const Parts& parts, Begin begin, Load load, Finish finish) {
  const int tx = static_cast<int>(threadIdx.x) % k.across, ty = static_cast<int>(threadIdx.x) / k.across;
  const int64_t part = blockIdx.x / k.strips, c = (blockIdx.x - part * k.strips) * k.strip() + tx * n, step = k.down();
  const int64_t first = part * parts.images, last = min(k.images, first + parts.images);
  if (c >= k.c) return;
  begin(c);
  for (int64_t image = last - 1 - ty; image >= first; image -= in_flight * step) {
    decltype(load(c)) in[in_flight];
#pragma unroll
    for (int i = 0; i < in_flight; ++i)
      if (image - i * step >= first) in[i] = load((image - i * step) * k.c + c);
#pragma unroll
    for (int i = 0; i < in_flight; ++i)
      if (image - i * step >= first) finish((image - i * step) * k.c + c, in[i]);
  }
}

// Those of the tensor that is normalised, input i of c, which lies at x; the running ones move in training.
template <class T> void statistics_of(const Call& c, size_t i, const T* x, const Planes& p, wide_t<T>* statistics) {
  using W = wide_t<T>;
  const auto a = c.as<BatchNormAttrs>();
  const Running<W> r = running<W>(c, a, i);
  if (a.training || !r.mean) channel_sums(c.op->name, Moments<T>{x, p, statistics, a.training ? r : Running<W>{}, a.eps}, x, x, p);
  else launch(c.op->name, running_statistics<W>, grid(ceil_div(p.c, threads)), threads, r, p.c, a.eps, statistics);
}

// What an element of a channel becomes: normal(x) * w + b. For 16-bit elements as x * scale + shift: what that loses beside a
// mean of many deviations is less than x itself lost.
template <class T> struct Affine {
  using W = wide_t<T>;
  W mean, rest, scale, shift;
  Affine() = default;
  __device__ Affine(const W* statistics, const W* weight, const W* bias, int64_t channels, int64_t c) {
    const Statistics<W> s(statistics, channels, c);
    mean = s.mean;
    rest = s.rest;
    scale = s.rstd * (weight ? weight[c] : W(1));
    shift = bias ? bias[c] : W(0);
  }
  __device__ W of(T x) const { return ((to<W>(x) - mean) - rest) * scale + shift; }
};
template <class T> requires is_16bit<T> struct Affine<T> {
  float scale, shift;
  Affine() = default;
  __device__ Affine(const float* statistics, const float* weight, const float* bias, int64_t channels, int64_t c) {
    const Statistics<float> s(statistics, channels, c);
    scale = s.rstd * (weight ? weight[c] : 1.f);
    shift = (bias ? bias[c] : 0.f) - (s.mean + s.rest) * scale;
  }
  __device__ float of(T x) const { return to<float>(x) * scale + shift; }
};

template <class T, int n, bool added> struct Operands { Pack<T, n> x; };
template <class T, int n> struct Operands<T, n, true> { Pack<T, n> x, z; };
template <int n, bool added, class T> __device__ Operands<T, n, added> load_operands(const T* x, const T* z, int64_t at) {
  Operands<T, n, added> in;
  in.x = load_pack<n>(x + at);
  if constexpr (added) in.z = load_pack<n>(z + at);
  return in;
}
template <bool with_relu, int n, bool added, class T> __device__ void normalise(T* y, uint8_t* bits, Operands<T, n, added> in, const Affine<T>* here, int step) {
#pragma unroll
  for (int j = 0; j < n; ++j) {
    wide_t<T> r = here[j * step].of(in.x.v[j]);
    if constexpr (added) r += to<wide_t<T>>(in.z.v[j]);
    if constexpr (with_relu) r = unary::Relu::f(r);
    in.x.v[j] = to<T>(r);
  }
  store_pack(y, in.x);
  if constexpr (with_relu && n == 8)
    if (bits) *bits = nonzero_bits(in.x);
}
template <int n, bool with_relu, bool added, class T, class W>
__global__ void __launch_bounds__(threads)
    batch_norm_planes(T* y, const T* x, const T* z, const W* statistics, const W* w, const W* b, const int64_t count, const Channels of) {
  wait_for_previous();
  for (int64_t k = thread_index(); k < count; k += grid_threads()) {
    const Affine<T> here(statistics, w, b, of.c.divisor, of.of(k));
    normalise<with_relu>(y + k * n, nullptr, load_operands<n, added>(x, z, k * n), &here, 0);
  }
}
template <int n, bool with_relu, bool added, class T, class W>
__global__ void __launch_bounds__(threads, added ? resident_of_many : resident)
    batch_norm_columns(T* y, const T* x, const T* z, const W* statistics, const W* w, const W* b, uint8_t* bits, const Columns k, const Parts parts) {
  wait_for_previous();
  Affine<T> here[n];
  auto look = [&](int64_t c) {
#pragma unroll
    for (int j = 0; j < n; ++j) here[j] = Affine<T>(statistics, w, b, k.c, c + j);
  };
  each_image<n>(k, parts, look, [&](int64_t at) { return load_operands<n, added>(x, z, at); },
                [&](int64_t at, const Operands<T, n, added>& in) { normalise<with_relu>(y + at, bits ? bits + at / 8 : nullptr, in, here, 1); });
}

// t, or a copy of it that lies as a kernel wants it; `packed` where it reads 16 bytes at a time and nothing else.
Tensor operand(const Tensor& t, bool channels_last, bool packed) {
  Tensor d = dense(t, channels_last);
  if (!packed || aligned(d.raw_data(), 16)) return d;
  Tensor copy = Tensor::allocate(laid_out_like(d.meta(), d.dtype()));
  return copy.copy_(d);
}

template <bool with_relu> void run_batch_norm(const Call& c, std::span<Tensor> out) {
  const bool last = !out[0].is_contiguous();
  uint8_t* bits = out.size() > 2 && out[2].numel() > 0 ? out[2].data<uint8_t>() : nullptr;
  const Tensor input = operand(c.in[0], last, bits), added = c.has(5) ? operand(c.in[5], last, bits) : Tensor();
  const Planes p = planes_in_memory(input);
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    constexpr int n = pack_size<T>;
    const T *x = input.data<T>(), *z = added.defined() ? added.data<T>() : nullptr;
    T* y = out[0].data<T>();
    Scratch own(out.size() > 1 ? 0 : static_cast<size_t>(3 * p.c) * sizeof(W));
    W* statistics = out.size() > 1 ? out[1].data<W>() : own.as<W>();
    statistics_of(c, 0, x, p, statistics);
    const Vector weight(c, 1, dtype_of<W>), bias(c, 2, dtype_of<W>);
    const int64_t count = input.numel();
    if (count == 0) return;
    auto apply = [&](auto kernel, int64_t blocks, auto... rest) {
      launch(c.op->name, kernel, blocks, threads, y, x, z, static_cast<const W*>(statistics), weight.data<W>(), bias.data<W>(), rest...);
    };
    auto run = [&]<bool added>(std::bool_constant<added>) {
      if (p.inner == 1) {
        const Columns k(p.n, p.c, channels_together<T>(p.c, {x, y, z}));
        const Parts parts = parts_of(k, added ? resident_of_many : resident);
        const int64_t blocks = k.strips * parts.count;
        if (k.n > 1) apply(batch_norm_columns<n, with_relu, added, T, W>, blocks, bits, k, parts);
        else apply(batch_norm_columns<1, with_relu, added, T, W>, blocks, bits, k, parts);
      } else if (packs<T>(p, {x, y, z})) apply(batch_norm_planes<n, with_relu, added, T, W>, grid(ceil_div(count / n, threads)), count / n, Channels(p, n));
      else apply(batch_norm_planes<1, with_relu, added, T, W>, grid(ceil_div(count, threads)), count, Channels(p, 1));
    };
    z ? run(std::true_type()) : run(std::false_type());
  });
}

// relu(normal x * w + b + normal z * w + b), where channels are neighbours.
template <class W> struct Norm { const W *statistics, *w, *b; };
template <int n, class T, class W>
__global__ void __launch_bounds__(threads, resident_of_many)
    batch_norms_columns(T* y, const T* x, const T* z, const Norm<W> of_x, const Norm<W> of_z, uint8_t* bits, const Columns k, const Parts parts) {
  wait_for_previous();
  Affine<T> here[n], there[n];
  auto look = [&](int64_t c) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      here[j] = Affine<T>(of_x.statistics, of_x.w, of_x.b, k.c, c + j);
      there[j] = Affine<T>(of_z.statistics, of_z.w, of_z.b, k.c, c + j);
    }
  };
  auto finish = [&](int64_t at, const Operands<T, n, true>& in) {
    Pack<T, n> sum;
#pragma unroll
    for (int j = 0; j < n; ++j) sum.v[j] = to<T>(unary::Relu::f(here[j].of(in.x.v[j]) + there[j].of(in.z.v[j])));
    store_pack(y + at, sum);
    if constexpr (n == 8)
      if (bits) bits[at / 8] = nonzero_bits(sum);
  };
  each_image<n>(k, parts, look, [&](int64_t at) { return load_operands<n, true>(x, z, at); }, finish);
}

void run_batch_norms_relu(const Call& c, std::span<Tensor> out) {
  const bool last = !out[0].is_contiguous();
  if (!last && norm_planes(out[0].shape()).inner > 1) return batch_norms_relu_by_parts(c, out);
  uint8_t* bits = out.size() > 3 && out[3].numel() > 0 ? out[3].data<uint8_t>() : nullptr;
  const Tensor first = operand(c.in[0], last, bits), second = operand(c.in[5], last, bits);
  const Planes p = planes_in_memory(first);
  visit<floating_types>(first.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    const T *x = first.data<T>(), *z = second.data<T>();
    T* y = out[0].data<T>();
    Scratch own(out.size() > 1 ? 0 : static_cast<size_t>(6 * p.c) * sizeof(W));
    W *of_x = out.size() > 1 ? out[1].data<W>() : own.as<W>(), *of_z = out.size() > 1 ? out[2].data<W>() : of_x + 3 * p.c;
    statistics_of(c, 5, z, p, of_z);  // the order of operators by themselves, which counts where one norm is both
    statistics_of(c, 0, x, p, of_x);
    const Vector w(c, 1, dtype_of<W>), b(c, 2, dtype_of<W>), zw(c, 6, dtype_of<W>), zb(c, 7, dtype_of<W>);
    if (first.numel() == 0) return;
    const Columns k(p.n, p.c, channels_together<T>(p.c, {x, y, z}));
    const Parts parts = parts_of(k, resident_of_many);
    auto apply = [&](auto kernel) {
      launch("batch_norms_relu", kernel, k.strips * parts.count, threads, y, x, z, Norm<W>{of_x, w.data<W>(), b.data<W>()},
             Norm<W>{of_z, zw.data<W>(), zb.data<W>()}, bits, k, parts);
    };
    if (k.n > 1) apply(batch_norms_columns<pack_size<T>, T, W>);
    else apply(batch_norms_columns<1, T, W>);
  });
}

// ---- gradients

// Of channels: of g * (x - mean) until the end.
template <class T> struct ChannelProducts : Products<T> {
  using typename Products<T>::W, typename Products<T>::Sum;
  using Here = W;
  static constexpr bool by_image = false, after_relu = true;
  const W* statistics;
  int64_t count;
  Sum* sums;  // null: not wanted
  __device__ Here at(int64_t, int64_t c) const { return statistics[c]; }
  __device__ bool shared(int) const { return false; }
  __device__ Sum add(Sum s, T g, T x, W mean) const {
    const W v = to<W>(g);
    return {s.a + v * (to<W>(x) - mean), s.b + v};
  }
  __device__ void finish(Sum s, int64_t c) const {
    const Statistics<W> here(statistics, count, c);
    s.a = (s.a - here.rest * s.b) * here.rstd;
    Products<T>::finish(s, c);
    if (sums) sums[c] = s;
  }
};

// dx = slope * g - tilt * (x - the statistics' mean) - mean. Without sums the last two are 0. For 16-bit elements the mean is
// taken together, as in Affine.
template <class W> struct SlopeParts {
  Statistics<W> s;
  W slope, tilt, mean;
  __device__ SlopeParts(const W* statistics, const W* w, const Pair<W>* sums, W share, int64_t channels, int64_t c) : s(statistics, channels, c) {
    slope = s.rstd * (w ? w[c] : W(1));
    tilt = sums ? slope * sums[c].a * share * s.rstd : W(0);
    mean = sums ? slope * sums[c].b * share : W(0);
  }
};
template <class T> struct Slope {
  using W = wide_t<T>;
  W centre, rest, slope, tilt, mean;
  Slope() = default;
  __device__ explicit Slope(const SlopeParts<W>& p) : centre(p.s.mean), rest(p.s.rest), slope(p.slope), tilt(p.tilt), mean(p.mean) {}
  __device__ W of(T g, T x) const { return slope * to<W>(g) - (tilt * ((to<W>(x) - centre) - rest) + mean); }
};
template <class T> requires is_16bit<T> struct Slope<T> {
  float slope, tilt, mean;
  Slope() = default;
  __device__ explicit Slope(const SlopeParts<float>& p) : slope(p.slope), tilt(p.tilt), mean(p.mean - p.tilt * (p.s.mean + p.s.rest)) {}
  __device__ float of(T g, T x) const { return slope * to<float>(g) - (tilt * to<float>(x) + mean); }
};
template <int n, class T> __device__ void slopes(T* dx, Pack<T, n> g, const Pack<T, n>& x, const Slope<T>* here, int step) {
#pragma unroll
  for (int j = 0; j < n; ++j) g.v[j] = to<T>(here[j * step].of(g.v[j], x.v[j]));
  store_pack(dx, g);
}
template <int n, class T, class W>
__global__ void __launch_bounds__(threads)
    batch_norm_grad_planes(T* dx, const T* g, const T* x, const W* statistics, const W* w, const Pair<W>* sums, const W share, const int64_t count, const Channels of) {
  wait_for_previous();
  for (int64_t k = thread_index(); k < count; k += grid_threads()) {
    const Slope<T> here(SlopeParts<W>(statistics, w, sums, share, of.c.divisor, of.of(k)));
    slopes<n>(dx + k * n, load_pack<n>(g + k * n), load_pack<n>(x + k * n), &here, 0);
  }
}
template <int n, Gate gate, class T, class W>
__global__ void __launch_bounds__(threads, resident_of_many)
    batch_norm_grad_columns(T* dx, const T* g, const T* x, const W* statistics, const W* w, const Pair<W>* sums, const W share, const Relued<T> relu,
                            const Columns k, const Parts parts) {
  wait_for_previous();
  Slope<T> here[n];
  auto look = [&](int64_t c) {
#pragma unroll
    for (int j = 0; j < n; ++j) here[j] = Slope<T>(SlopeParts<W>(statistics, w, sums, share, k.c, c + j));
  };
  struct In {
    Pack<T, n> g, x;
    Gated<T, n, gate> open;
  };
  auto load = [&](int64_t at) {
    In in;
    in.g = load_pack<n>(g + at);
    in.x = load_pack<n>(x + at);
    in.open.load(relu, at);
    return in;
  };
  each_image<n>(k, parts, look, load, [&](int64_t at, In in) {
    in.open.apply(in.g);
    slopes<n>(dx + at, in.g, in.x, here, 1);
  });
}

void run_batch_norm_grad(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<BatchNormAttrs>();
  const bool of_x = a.wanted & 1u, of_added = a.wanted & 8u, last = !(of_x ? out[0].meta() : laid_out_like(c.in[1].meta(), c.in[1].dtype())).contiguous();
  const bool by_bits = c.has(4) && c.in[4].dtype() == DType::u8;
  const Tensor input = operand(c.in[1], last, by_bits), saved = c.in[3].contiguous();
  const Planes p = planes_in_memory(input);
  // Where channels are neighbours relu's part is done on the way.
  const bool relu_inside = c.has(4) && p.inner == 1;
  const Tensor relued = relu_inside && !by_bits ? dense(c.in[4], last) : Tensor(),
               upper = operand(c.has(4) && !relu_inside ? relu_grad(c.in[4], c.in[0]) : c.in[0], last, by_bits);
  if (of_added && !relu_inside) call_all(op::copy, {out[3], upper});
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    constexpr int n = pack_size<T>;
    const T *g = upper.data<T>(), *x = input.data<T>();
    const W* statistics = saved.data<W>();
    const bool through_sums = of_x && a.training;
    Scratch memory(through_sums ? static_cast<size_t>(p.c) * sizeof(Pair<W>) : 0);
    auto* sums = memory.as<Pair<W>>();
    Relued<T> relu;
    if (relu_inside) relu = {by_bits ? nullptr : relued.data<T>(), by_bits ? c.in[4].data<uint8_t>() : nullptr, of_added ? out[3].data<T>() : nullptr};
    if (through_sums || a.wanted & 14u) {
      const ChannelProducts<T> f{{gradient<T>(out[1], a.wanted & 2u), gradient<T>(out[2], a.wanted & 4u)}, statistics, p.c, sums};
      channel_sums("batch_norm_grad", f, g, x, p, relu);
      if (relu.masked) g = relu.masked, relu = {};
    }
    const int64_t count = input.numel();
    if (!of_x || count == 0) return;
    T* dx = out[0].data<T>();
    const Vector weight(c, 2, dtype_of<W>);
    const W share = W(1) / static_cast<W>(std::max<int64_t>(1, p.n * p.inner));
    auto apply = [&](auto kernel, int64_t blocks, auto... rest) {
      launch("batch_norm_grad", kernel, blocks, threads, dx, g, x, statistics, weight.data<W>(), static_cast<const Pair<W>*>(sums), share, rest...);
    };
    if (p.inner == 1) {
      const Columns k(p.n, p.c, channels_together<T>(p.c, {dx, g, x, relu.y}));
      const Parts parts = parts_of(k, resident_of_many);
      const int64_t blocks = k.strips * parts.count;
      visit_gate(relu, [&]<Gate gate>(std::integral_constant<Gate, gate>) {
        if (k.n > 1) apply(batch_norm_grad_columns<n, gate, T, W>, blocks, relu, k, parts);
        else apply(batch_norm_grad_columns<1, gate == Gate::bits ? Gate::result : gate, T, W>, blocks, relu, k, parts);
      });
    } else if (packs<T>(p, {g, x, dx})) apply(batch_norm_grad_planes<n, T, W>, grid(ceil_div(count / n, threads)), count / n, Channels(p, n));
    else apply(batch_norm_grad_planes<1, T, W>, grid(ceil_div(count, threads)), count, Channels(p, 1));
  });
}

// Of two norms whose sum went through relu: sums of g * (x - its mean), of g and of g * (z - its mean).
template <class T> struct TwoProducts {
  using W = wide_t<T>;
  using Sum = Triple<W>;
  struct Here { W x, z; };
  static constexpr bool by_image = false, after_relu = true, reads_both = true;
  ChannelProducts<T> of_x, of_z;
  const T* z;
  __device__ Here at(int64_t, int64_t c) const { return {of_x.at(0, c), of_z.at(0, c)}; }
  __device__ bool shared(int) const { return false; }
  __device__ Sum add(Sum s, T g, T x, T third, const Here& here) const {
    const W v = to<W>(g);
    return {s.a + v * (to<W>(x) - here.x), s.b + v, s.c + v * (to<W>(third) - here.z)};
  }
  __device__ void finish(Sum s, int64_t c) const {
    of_x.finish({s.a, s.b}, c);
    of_z.finish({s.c, s.b}, c);
  }
};
// Where the gradient of x goes, if anywhere, and what it takes.
template <class T> struct NormGradient {
  using W = wide_t<T>;
  T* dx;
  const T* x;
  const W *statistics, *w;
  const Pair<W>* sums;
};
template <int n, Gate gate, class T, class W>
__global__ void __launch_bounds__(threads, resident_of_two_norms)
    batch_norms_grad_columns(const T* g, const NormGradient<T> first, const NormGradient<T> second, const W share, const Relued<T> relu,
                             const Columns k, const Parts parts) {
  wait_for_previous();
  Slope<T> here[n], there[n];
  auto look = [&](int64_t c) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      here[j] = Slope<T>(SlopeParts<W>(first.statistics, first.w, first.sums, share, k.c, c + j));
      there[j] = Slope<T>(SlopeParts<W>(second.statistics, second.w, second.sums, share, k.c, c + j));
    }
  };
  struct In {
    Pack<T, n> g, x, z;
    Gated<T, n, gate> open;
  };
  auto load = [&](int64_t at) {
    In in;
    in.g = load_pack<n>(g + at);
    in.x = load_pack<n>(first.x + at);
    in.z = load_pack<n>(second.x + at);
    in.open.load(relu, at);
    return in;
  };
  each_image<n>(k, parts, look, load, [&](int64_t at, In in) {
    in.open.apply(in.g);
    if (first.dx) slopes<n>(first.dx + at, in.g, in.x, here, 1);
    if (second.dx) slopes<n>(second.dx + at, in.g, in.z, there, 1);
  });
}

void run_batch_norms_relu_grad(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<BatchNormAttrs>();
  const bool last = !laid_out_like(c.in[1].meta(), c.in[1].dtype()).contiguous();
  if (!last && norm_planes(c.in[1].shape()).inner > 1) return batch_norms_relu_grad_by_parts(c, out);
  const bool by_bits = c.in[4].dtype() == DType::u8;
  const Tensor first = operand(c.in[1], last, by_bits), second = operand(c.in[5], last, by_bits), upper = operand(c.in[0], last, by_bits),
               relued = by_bits ? Tensor() : dense(c.in[4], last), of_x = c.in[3].contiguous(), of_z = c.in[7].contiguous();
  const Planes p = planes_in_memory(first);
  visit<floating_types>(first.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    constexpr int n = pack_size<T>;
    const T *g = upper.data<T>(), *x = first.data<T>(), *z = second.data<T>();
    const bool of_tensors = a.wanted & 9u, through_sums = of_tensors && a.training;
    Scratch memory(through_sums ? static_cast<size_t>(2 * p.c) * sizeof(Pair<W>) : 0);
    Pair<W> *sums = memory.as<Pair<W>>(), *sums_z = through_sums ? sums + p.c : nullptr;
    const Relued<T> relu{by_bits ? nullptr : relued.data<T>(), by_bits ? c.in[4].data<uint8_t>() : nullptr, nullptr};
    auto products = [&](size_t dw, const Tensor& statistics, Pair<W>* to) {
      auto at = [&](size_t k) { return gradient<T>(out[k], a.wanted >> k & 1u); };
      return ChannelProducts<T>{{at(dw), at(dw + 1)}, statistics.data<W>(), p.c, to};
    };
    if (through_sums || a.wanted & 54u)
      channel_sums("batch_norms_relu_grad", TwoProducts<T>{products(1, of_x, sums), products(4, of_z, sums_z), z}, g, x, p, relu);
    if (!of_tensors || first.numel() == 0) return;
    const Vector w(c, 2, dtype_of<W>), zw(c, 6, dtype_of<W>);
    const W share = W(1) / static_cast<W>(std::max<int64_t>(1, p.n * p.inner));
    const NormGradient<T> to_x{a.wanted & 1u ? out[0].data<T>() : nullptr, x, of_x.data<W>(), w.data<W>(), sums},
        to_z{a.wanted & 8u ? out[3].data<T>() : nullptr, z, of_z.data<W>(), zw.data<W>(), sums_z};
    const Columns k(p.n, p.c, channels_together<T>(p.c, {to_x.dx, to_z.dx, g, x, z, relu.y}));
    const Parts parts = parts_of(k, resident_of_two_norms);
    auto apply = [&](auto kernel) { launch("batch_norms_relu_grad", kernel, k.strips * parts.count, threads, g, to_x, to_z, share, relu, k, parts); };
    visit_gate(relu, [&]<Gate gate>(std::integral_constant<Gate, gate>) {
      if (k.n > 1) apply(batch_norms_grad_columns<n, gate, T, W>);
      else apply(batch_norms_grad_columns<1, gate == Gate::bits ? Gate::result : gate, T, W>);
    });
  });
}

}  // namespace

void fill_cuda_batch_norm() {
  fill<run_batch_norm<false>>(op::batch_norm);
  fill<run_batch_norm<true>>(op::batch_norm_relu);
  fill<run_batch_norm_grad>(op::batch_norm_grad);
  fill<run_batch_norms_relu>(op::batch_norms_relu);
  fill<run_batch_norms_relu_grad>(op::batch_norms_relu_grad);
}

}  // namespace halftone::cuda
