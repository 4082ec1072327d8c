#pragma once
// Sums of a channel over a batch, for whatever description F adds of an element: formed by blocks that each take some of the batch, in
// parts that are merged in order: cut by sizes alone, so that every run gives the same bits.
#include "halftone/cuda/numeric.cuh"
#include "halftone/ops/norm.h"

namespace halftone::cuda {

inline constexpr int channel_threads = 256;

template <class T> using wide_t = std::conditional_t<std::same_as<T, double>, double, float>;

template <class A> struct Pair {
  A a, b;
};
template <class A> struct Triple {
  A a, b, c;
};
struct Add {
  template <class A> __device__ Pair<A> operator()(Pair<A> s, Pair<A> t) const { return {s.a + t.a, s.b + t.b}; }
  template <class A> __device__ Triple<A> operator()(Triple<A> s, Triple<A> t) const { return {s.a + t.a, s.b + t.b, s.c + t.c}; }
};

// ---- sums over the batch, for each channel: f.at(image, channel) is what f.add(sum, element of a, element of b, that) reads,
// different from image to image when F::by_image, the same for n neighbouring channels when f.shared(n); f.finish(sum, channel).
// With a third tensor, f.z, whose channels are neighbours as well, it is f.add(sum, of a, of b, of z, that).
template <class F> concept ReadsThird = requires(const F& f) { f.z; };

struct Parts { int64_t count, images; };  // each takes so many images of every channel
inline Parts cut(int64_t images, int64_t blocks, int64_t enough) {
  const int64_t wanted = std::min(std::max<int64_t>(images, 1), std::max<int64_t>(1, enough / std::max<int64_t>(blocks, 1)));
  const int64_t each = std::max<int64_t>(1, ceil_div(images, wanted));
  return {std::max<int64_t>(1, ceil_div(images, each)), each};
}

// Channels are planes of `inner` neighbours: a block for each channel and part.
template <int n, class T, class F>
__global__ void __launch_bounds__(channel_threads)
    plane_sums(const F f, const T* a, const T* b, const Planes p, const Parts parts, const Divisor packs, typename F::Sum* sums) {
  wait_for_previous();
  const Group block(channel_threads);
  for (int64_t item = blockIdx.x; item < p.c * parts.count; item += gridDim.x) {
    const int64_t part = item / p.c, c = item - part * p.c, first = part * parts.images;
    const int64_t images = min(parts.images, p.n - first), count = images * packs.divisor;
    typename F::Sum sum{0, 0};
    for (int64_t k = threadIdx.x; k < count; k += channel_threads) {
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

// Channels are neighbours: `across` threads, a power of two up to a warp, share a strip of them, n channels each; above one
// another they take images.
struct Columns {
  int64_t images, c, strips;
  int across, n;
  Columns(int64_t images_, int64_t c_, int n_) : images(images_), c(c_), across(warp_size), n(n_) {
    const int64_t packs = ceil_div(c, n);
    while (across / 2 >= packs) across /= 2;
    strips = ceil_div(packs, across);
  }
  HT_HD int down() const { return channel_threads / across; }
  HT_HD int64_t strip() const { return int64_t{across} * n; }
};
// Channels for each thread: 16 bytes of them, or one.
template <class T> int channels_together(int64_t c, std::initializer_list<const T*> operands) {
  for (const T* t : operands) if (!aligned(t, 16)) return 1;
  return c % pack_size<T> == 0 ? pack_size<T> : 1;
}

// Loads that a thread has under way.
inline constexpr int in_flight = 2;
// Blocks of a multiprocessor between which its registers may be divided.
inline constexpr int resident = 4, resident_of_many = 3, resident_of_two_norms = 2;  // the second where several tensors are read
template <class F> constexpr int resident_for = ReadsThird<F> ? resident_of_two_norms : F::reads_both ? resident_of_many : resident;

// Where a is a gradient of relu's result y, it counts only where that is not 0, as in relu_grad: by y itself or by a bit for
// each element.
enum class Gate { none, result, bits };
template <class T> struct Relued {
  const T* y = nullptr;
  const uint8_t* bits = nullptr;
  T* masked = nullptr;  // where the gradient goes that counts, if anywhere
};
template <class T, int n, Gate gate> struct Gated {
  __device__ void load(const Relued<T>&, int64_t) {}
  __device__ void apply(Pack<T, n>&) const {}
};
template <class T, int n> struct Gated<T, n, Gate::result> {
  Pack<T, n> y;
  __device__ void load(const Relued<T>& r, int64_t at) { y = load_pack<n>(r.y + at); }
  __device__ void apply(Pack<T, n>& g) const {
#pragma unroll
    for (int j = 0; j < n; ++j)
      if (to<wide_t<T>>(y.v[j]) <= 0) g.v[j] = to<T>(0.f);
  }
};
template <class T, int n> struct Gated<T, n, Gate::bits> {
  static_assert(n == 8 && sizeof(T) == 2);
  uint32_t bits;
  __device__ void load(const Relued<T>& r, int64_t at) { bits = r.bits[at / 8]; }
  // Two elements at a time.
  __device__ void apply(Pack<T, n>& g) const {
    uint32_t words[n / 2];
    memcpy(words, &g, sizeof g);
#pragma unroll
    for (int k = 0; k < n / 2; ++k) words[k] &= (bits >> 2 * k & 1u) * 0xffffu | (bits >> (2 * k + 1) & 1u) * 0xffff0000u;
    memcpy(&g, words, sizeof g);
  }
};
// A bit for each of 8 elements: whether it is not 0.
template <class T> __device__ uint8_t nonzero_bits(const Pack<T, 8>& v) {
  uint32_t words[4], bits = 0;
  memcpy(words, &v, sizeof v);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t carry = (words[k] & 0x7fff7fffu) + 0x7fff7fffu;  // reaches the sign's place of what is not 0
    bits |= (carry >> 15 & 1u) << 2 * k | (carry >> 31) << (2 * k + 1);
  }
  return static_cast<uint8_t>(bits);
}
// Calls run(a constant: the gate).
template <class T, class F> void visit_gate(const Relued<T>& r, F run) {
  if constexpr (is_16bit<T>)
    if (r.bits) return run(std::integral_constant<Gate, Gate::bits>());
  if (r.y) run(std::integral_constant<Gate, Gate::result>());
  else run(std::integral_constant<Gate, Gate::none>());
}

template <int n, Gate gate, class T, class F>
__global__ void __launch_bounds__(channel_threads, F::by_image ? 2 : resident_for<F>)
    column_sums(const F f, const T* a, const T* b, const Relued<T> relu, const Columns k, const Parts parts, typename F::Sum* sums) {
  wait_for_previous();
  using Sum = typename F::Sum;
  constexpr int warps = channel_threads / warp_size;
  __shared__ Sum memory[warps][warp_size * n];
  const int tx = static_cast<int>(threadIdx.x) % k.across, ty = static_cast<int>(threadIdx.x) / k.across;
  const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
  for (int64_t item = blockIdx.x; item < k.strips * parts.count; item += gridDim.x) {
    const int64_t part = item / k.strips, first = (item - part * k.strips) * k.strip(), c = first + tx * n;
    const int64_t last = min(k.images, (part + 1) * parts.images);
    Sum sum[n];
#pragma unroll
    for (int j = 0; j < n; ++j) sum[j] = Sum{};
    if (c < k.c) {
      typename F::Here here[n];
      auto look = [&](int64_t image) {
#pragma unroll
        for (int j = 0; j < n; ++j) here[j] = j > 0 && f.shared(n) ? here[0] : f.at(image, c + j);
      };
      if constexpr (!F::by_image) look(0);
      const int64_t step = k.down();
      for (int64_t image = part * parts.images + ty; image < last; image += in_flight * step) {
        Pack<T, n> u[in_flight], v[in_flight], w[in_flight];
        Gated<T, n, gate> open[in_flight];
#pragma unroll
        for (int i = 0; i < in_flight; ++i) {
          const int64_t at = (image + i * step) * k.c + c;
          if (image + i * step < last) {
            u[i] = load_pack<n>(a + at);
            if constexpr (F::reads_both) v[i] = load_pack<n>(b + at);
            if constexpr (ReadsThird<F>) w[i] = load_pack<n>(f.z + at);
            open[i].load(relu, at);
          }
        }
#pragma unroll
        for (int i = 0; i < in_flight; ++i)
          if (image + i * step < last) {
            if constexpr (F::by_image) look(image + i * step);
            open[i].apply(u[i]);
            if (gate != Gate::none && relu.masked) store_pack(relu.masked + (image + i * step) * k.c + c, u[i]);
#pragma unroll
            for (int j = 0; j < n; ++j)
              if constexpr (ReadsThird<F>) sum[j] = f.add(sum[j], u[i].v[j], v[i].v[j], w[i].v[j], here[j]);
              else sum[j] = f.add(sum[j], u[i].v[j], F::reads_both ? v[i].v[j] : u[i].v[j], here[j]);
          }
      }
    }
#pragma unroll
    for (int j = 0; j < n; ++j) {
      for (int mask = k.across; mask < warp_size; mask *= 2) sum[j] = Add()(sum[j], exchange(sum[j], mask));
      if (lane < k.across) memory[warp][lane * n + j] = sum[j];
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < k.across * n && first + i < k.c; i += channel_threads) {
      Sum s = memory[0][i];
#pragma unroll
      for (int w = 1; w < warps; ++w) s = Add()(s, memory[w][i]);
      sums[part * k.c + first + i] = s;
    }
    __syncthreads();
  }
}

// A few neighbouring channels a block, so that their parts are read side by side.
template <class F>
__global__ void __launch_bounds__(channel_threads) merge_sums(const F f, const typename F::Sum* sums, const int64_t channels, const int64_t parts) {
  wait_for_previous();
  using Sum = typename F::Sum;
  constexpr int across = 8, down = channel_threads / across;
  __shared__ Sum memory[down][across];
  const int tx = static_cast<int>(threadIdx.x) % across, ty = static_cast<int>(threadIdx.x) / across;
  for (int64_t first = int64_t{blockIdx.x} * across; first < channels; first += int64_t{gridDim.x} * across) {
    const int64_t c = first + tx;
    Sum sum{};
    if (c < channels)
#pragma unroll 4
      for (int64_t k = ty; k < parts; k += down) sum = Add()(sum, sums[k * channels + c]);
    memory[ty][tx] = sum;
    __syncthreads();
    if (ty == 0 && c < channels) {
      for (int k = 1; k < down; ++k) sum = Add()(sum, memory[k][tx]);
      f.finish(sum, c);
    }
    __syncthreads();
  }
}

inline int64_t grid(int64_t items) { return std::min<int64_t>(items, int64_t{64} * sm_count()); }
// For so many blocks of each of 132 multiprocessors.
inline Parts parts_of(const Columns& k, int blocks) {
  const int64_t least_images = int64_t{4} * k.down();
  const Parts parts = cut(ceil_div(k.images, least_images), k.strips, int64_t{132} * blocks);
  return {parts.count, parts.images * least_images};
}

// a and b are dense [n, c, inner]; b may be a. Only where inner is 1 may there be a relu or a third tensor.
template <class T, class F> void channel_sums(const char* name, const F& f, const T* a, const T* b, Planes p, const Relued<T>& relu = {}) {
  if (p.c == 0) return;
  if (p.inner == 0) p = {0, p.c, 1};
  using Sum = typename F::Sum;
  auto merge = [&](const Sum* sums, int64_t parts) { launch(name, merge_sums<F>, grid(ceil_div(p.c, 8)), channel_threads, f, sums, p.c, parts); };
  if (p.inner == 1) {
    const T* third = nullptr;
    if constexpr (ReadsThird<F>) third = f.z;
    const Columns k(p.n, p.c, channels_together<T>(p.c, {a, b, third, relu.y, relu.masked}));
    const Parts parts = parts_of(k, resident_for<F>);
    Scratch memory(static_cast<size_t>(parts.count * p.c) * sizeof(Sum));
    auto run = [&](auto kernel) { launch(name, kernel, grid(k.strips * parts.count), channel_threads, f, a, b, relu, k, parts, memory.as<Sum>()); };
    visit_gate(relu, [&]<Gate gate>(std::integral_constant<Gate, gate>) {
      constexpr Gate used = F::after_relu ? gate : Gate::none;
      if (k.n > 1) run(column_sums<pack_size<T>, used, T, F>);
      else run(column_sums<1, used == Gate::bits ? Gate::result : used, T, F>);
    });
    return merge(memory.as<const Sum>(), parts.count);
  }
  if constexpr (!ReadsThird<F>) {
    constexpr int n = pack_size<T>;
    constexpr int64_t enough_blocks = 1024;
    const Parts parts = cut(p.n, p.c, enough_blocks);
    Scratch memory(static_cast<size_t>(parts.count * p.c) * sizeof(Sum));
    if (p.inner % n == 0 && aligned(a, 16) && aligned(b, 16))
      launch(name, plane_sums<n, T, F>, grid(p.c * parts.count), channel_threads, f, a, b, p, parts, Divisor(p.inner / n), memory.as<Sum>());
    else launch(name, plane_sums<1, T, F>, grid(p.c * parts.count), channel_threads, f, a, b, p, parts, Divisor(p.inner), memory.as<Sum>());
    merge(memory.as<const Sum>(), parts.count);
  }
}

// How x, which is dense, lies: with channels last an image is every place of one.
inline Planes planes_in_memory(const Tensor& x) {
  const Planes p = norm_planes(x.shape());
  return x.is_contiguous() ? p : Planes{p.n * p.inner, p.c, 1};
}

}  // namespace halftone::cuda
