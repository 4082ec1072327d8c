// The softmax family on CUDA. A line along the dimension that is dense and fits the registers of a block is read once;
// any other is walked three times, by one thread where neighbouring lines are neighbours in memory.
#include "halftone/ops/softmax.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"
#include "halftone/ops/copy.h"
#include "halftone/ops/reduce.h"

namespace halftone::cuda {
namespace {

template <class T> using line_t = std::conditional_t<std::same_as<T, double>, double, float>;
using reduce::Amax;

struct Max {
  template <class C> __device__ C operator()(C a, C b) const { return Amax::merge(a, b); }
};
struct Plus {
  template <class C> __device__ C operator()(C a, C b) const { return a + b; }
};

// The lines of N tensors of one shape: where each begins, and how far apart its elements are.
template <int N> struct Lines {
  Layout<N, int64_t> at;
  int64_t step[N];
  int64_t length;
  bool packed;  // dense, and each line begins at a whole pack
};

// ---- lines in registers: up to `packs` packs of n elements for each thread of a group

constexpr int most_threads = 512;
template <class T, int n> constexpr int most_packs = (sizeof(T) == 8 ? 16 : 32) / n;  // what registers hold

template <int packs, bool logarithm, class T, class Y>
__global__ void __launch_bounds__(most_threads)
    softmax_registers(Y* y, const T* x, const Lines<2> lines, const int width) {
  wait_for_previous();
  using C = line_t<T>;
  constexpr int n = pack_size<T, Y>;
  const Group group(width);
  for (int64_t base = group.first(); base < lines.at.count; base += group.step()) {
    const int64_t line = base + group.number;
    int64_t at[2] = {0, 0};
    const int64_t length = line < lines.at.count ? lines.length : 0;
    if (length > 0) lines.at.locate(line, at);
    C v[packs][n];
    C high = Amax::start<C>();
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      const int64_t i = static_cast<int64_t>(k * width + group.lane) * n;
      if (k * width * n >= lines.length) break;
      auto in = load_part<n>(x + at[1] + i, length - i, lines.packed, to<T>(Amax::start<C>()));
#pragma unroll
      for (int j = 0; j < n; ++j) {
        v[k][j] = to<C>(in.v[j]);
        high = Amax::add(high, v[k][j], 0);
      }
    }
    high = group.combine(high, Amax::start<C>(), Max());
    C total = 0;
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      if (k * width * n >= lines.length) break;
#pragma unroll
      for (int j = 0; j < n; ++j) {
        v[k][j] -= high;
        C e = ::exp(v[k][j]);  // 0 past the end
        total += e;
        if constexpr (!logarithm) v[k][j] = e;
      }
    }
    total = group.combine(total, C(0), Plus());
    const C scale = logarithm ? ::log(total) : 1 / total;
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      const int64_t i = static_cast<int64_t>(k * width + group.lane) * n;
      if (k * width * n >= lines.length) break;
      Pack<Y, n> out;
#pragma unroll
      for (int j = 0; j < n; ++j) out.v[j] = to<Y>(logarithm ? v[k][j] - scale : v[k][j] * scale);
      store_part(y + at[0] + i, length - i, lines.packed, out);
    }
  }
}

template <bool logarithm, class C> __device__ C grad_term(C y, C g) { return logarithm ? g : g * y; }
template <bool logarithm, class C> __device__ C grad_value(C y, C g, C total) {
  return logarithm ? g - ::exp(y) * total : y * (g - total);
}

template <int packs, bool logarithm, class T, class X>
__global__ void __launch_bounds__(most_threads)
    softmax_grad_registers(X* dx, const T* y, const T* g, const Lines<3> lines, const int width) {
  wait_for_previous();
  using C = line_t<T>;
  constexpr int n = pack_size<T, X>;
  const Group group(width);
  for (int64_t base = group.first(); base < lines.at.count; base += group.step()) {
    const int64_t line = base + group.number;
    int64_t at[3] = {0, 0, 0};
    const int64_t length = line < lines.at.count ? lines.length : 0;
    if (length > 0) lines.at.locate(line, at);
    Pack<T, n> yv[packs], gv[packs];
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      const int64_t i = static_cast<int64_t>(k * width + group.lane) * n;
      if (k * width * n >= lines.length) break;
      yv[k] = load_part<n>(y + at[1] + i, length - i, lines.packed, to<T>(0.f));
      gv[k] = load_part<n>(g + at[2] + i, length - i, lines.packed, to<T>(0.f));
    }
    C total = 0;
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      if (k * width * n >= lines.length) break;
#pragma unroll
      for (int j = 0; j < n; ++j) total += grad_term<logarithm>(to<C>(yv[k].v[j]), to<C>(gv[k].v[j]));
    }
    total = group.combine(total, C(0), Plus());
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      const int64_t i = static_cast<int64_t>(k * width + group.lane) * n;
      if (k * width * n >= lines.length) break;
      Pack<X, n> out;
#pragma unroll
      for (int j = 0; j < n; ++j) out.v[j] = to<X>(grad_value<logarithm>(to<C>(yv[k].v[j]), to<C>(gv[k].v[j]), total));
      store_part(dx + at[0] + i, length - i, lines.packed, out);
    }
  }
}

// ---- any lines

template <bool logarithm, class T, class Y>
__global__ void __launch_bounds__(256) softmax_lines(Y* y, const T* x, const Lines<2> lines, const int width) {
  wait_for_previous();
  using C = line_t<T>;
  const Group group(width);
  for (int64_t base = group.first(); base < lines.at.count; base += group.step()) {
    const int64_t line = base + group.number;
    const bool live = line < lines.at.count;
    int64_t at[2] = {0, 0};
    if (live) lines.at.locate(line, at);
    const int64_t length = live ? lines.length : 0;
    C high = Amax::start<C>(), total = 0;
    for (int64_t i = group.lane; i < length; i += width) high = Amax::add(high, to<C>(x[at[1] + i * lines.step[1]]), i);
    high = group.combine(high, Amax::start<C>(), Max());
    for (int64_t i = group.lane; i < length; i += width) total += ::exp(to<C>(x[at[1] + i * lines.step[1]]) - high);
    total = group.combine(total, C(0), Plus());
    const C scale = logarithm ? ::log(total) : 1 / total;
    for (int64_t i = group.lane; i < length; i += width) {
      C v = to<C>(x[at[1] + i * lines.step[1]]) - high;
      y[at[0] + i * lines.step[0]] = to<Y>(logarithm ? v - scale : ::exp(v) * scale);
    }
  }
}

template <bool logarithm, class T, class X>
__global__ void __launch_bounds__(256)
    softmax_grad_lines(X* dx, const T* y, const T* g, const Lines<3> lines, const int width) {
  wait_for_previous();
  using C = line_t<T>;
  const Group group(width);
  for (int64_t base = group.first(); base < lines.at.count; base += group.step()) {
    const int64_t line = base + group.number;
    const bool live = line < lines.at.count;
    int64_t at[3] = {0, 0, 0};
    if (live) lines.at.locate(line, at);
    const int64_t length = live ? lines.length : 0;
    C total = 0;
    for (int64_t i = group.lane; i < length; i += width)
      total += grad_term<logarithm>(to<C>(y[at[1] + i * lines.step[1]]), to<C>(g[at[2] + i * lines.step[2]]));
    total = group.combine(total, C(0), Plus());
    for (int64_t i = group.lane; i < length; i += width)
      dx[at[0] + i * lines.step[0]] =
          to<X>(grad_value<logarithm>(to<C>(y[at[1] + i * lines.step[1]]), to<C>(g[at[2] + i * lines.step[2]]), total));
  }
}

// ---- launching

// Lines along `dim` of tensors of one shape, in packs of n.
template <int N> Lines<N> lines_of(const std::array<const Tensor*, N>& t, int dim, int n) {
  Shape rest = t[0]->shape();
  auto d = static_cast<size_t>(dim);
  bool scalar = rest.rank() == 0;
  Lines<N> lines;
  lines.length = scalar ? 1 : rest[d];
  if (!scalar) rest[d] = 1;
  lines.packed = true;
  for (size_t k = 0; k < N; ++k) {
    lines.step[k] = scalar || lines.length == 1 ? 1 : t[k]->strides()[d];
    lines.packed = lines.packed && lines.step[k] == 1 &&
                   aligned(t[k]->raw_data(), size_of(t[k]->dtype()) * static_cast<size_t>(n));
  }
  auto rows = [&]<size_t... K>(std::index_sequence<K...>) { return Rows<N>(rest, {t[K]->strides()...}); }(std::make_index_sequence<N>());
  for (auto& s : rows.strides)
    for (int64_t stride : s) lines.packed = lines.packed && stride % n == 0;
  lines.at = Layout<N, int64_t>(rows);
  return lines;
}

// Calls registers(packs a thread holds, width, block) or walk(width, block).
template <int most, int N, class R, class W> void choose(const Lines<N>& lines, int n, R registers, W walk) {
  const int64_t packs = ceil_div(lines.length, n);
  const bool dense = std::all_of(lines.step, lines.step + N, [](int64_t s) { return s == 1; });
  if (dense && packs <= warp_size) return registers(std::integral_constant<int, 1>(), group_width(packs, 256), 256);
  if (dense && packs <= most * most_threads) {
    // A warp a line while that holds it and there are many; else half of what a thread can hold, so that long lines spread.
    const bool warps = packs <= most * warp_size && lines.at.count >= 1024;
    const int width = warps ? warp_size : static_cast<int>(std::min<int64_t>(most_threads, ceil_div(packs, most / 2 * warp_size) * warp_size));
    return registers(std::integral_constant<int, most>(), width, width == warp_size ? 256 : width);
  }
  walk(!dense && lines.at.count >= 8192 ? 1 : group_width(lines.length, 256), 256);
}
int64_t blocks_for(int64_t lines, int width, int block) {
  return std::min<int64_t>(ceil_div(lines * width, block), int64_t{64} * sm_count());
}

template <bool logarithm, class T, class Y> void softmax(const Tensor& x, const Tensor& y, int dim) {
  constexpr int n = pack_size<T, Y>;
  auto lines = lines_of<2>({&y, &x}, dim, n);
  choose<most_packs<T, n>>(
      lines, n,
      [&]<int packs>(std::integral_constant<int, packs>, int width, int block) {
        launch("softmax", softmax_registers<packs, logarithm, T, Y>, blocks_for(lines.at.count, width, block), block,
               y.data<Y>(), x.data<T>(), lines, width);
      },
      [&](int width, int block) {
        launch("softmax", softmax_lines<logarithm, T, Y>, blocks_for(lines.at.count, width, block), block, y.data<Y>(),
               x.data<T>(), lines, width);
      });
}
template <bool logarithm, class T, class X>
void softmax_grad(const Tensor& y, const Tensor& g, const Tensor& dx, int dim) {
  constexpr int n = pack_size<T, X>;
  auto lines = lines_of<3>({&dx, &y, &g}, dim, n);
  choose<most_packs<T, n>>(
      lines, n,
      [&]<int packs>(std::integral_constant<int, packs>, int width, int block) {
        launch("softmax_grad", softmax_grad_registers<packs, logarithm, T, X>, blocks_for(lines.at.count, width, block),
               block, dx.data<X>(), y.data<T>(), g.data<T>(), lines, width);
      },
      [&](int width, int block) {
        launch("softmax_grad", softmax_grad_lines<logarithm, T, X>, blocks_for(lines.at.count, width, block), block,
               dx.data<X>(), y.data<T>(), g.data<T>(), lines, width);
      });
}

template <bool logarithm> void run(const Call& c, std::span<Tensor> out) {
  if (out[0].numel() == 0) return;
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    softmax<logarithm, T, std::conditional_t<logarithm, line_t<T>, T>>(c.in[0], out[0], c.as<int>());
  });
}

// The gradient's dtype is y's, what y's lines are computed in, or, of f32 lines, 16-bit; any other is converted after.
template <bool logarithm> void run_grad(const Call& c, std::span<Tensor> out) {
  const Tensor &y = c.in[0], &g = c.in[1], &dx = out[0];
  const int dim = c.as<SoftmaxGradAttrs>().dim;
  if (dx.numel() == 0) return;
  visit<floating_types>(y.dtype(), [&]<class T>(Type<T>) {
    using C = line_t<T>;
    if (dx.dtype() == dtype_of<T>) return softmax_grad<logarithm, T, T>(y, g, dx, dim);
    if constexpr (!std::same_as<T, C>)
      if (dx.dtype() == dtype_of<C>) return softmax_grad<logarithm, T, C>(y, g, dx, dim);
    if constexpr (std::same_as<T, float>) {
      if (dx.dtype() == DType::f16) return softmax_grad<logarithm, T, half>(y, g, dx, dim);
      if (dx.dtype() == DType::bf16) return softmax_grad<logarithm, T, bfloat16>(y, g, dx, dim);
    }
    Tensor wide = Tensor::empty(Meta(dx.shape(), dtype_of<C>, dx.device()));
    softmax_grad<logarithm, T, C>(y, g, wide, dim);
    call_all(op::copy, {dx, wide});
  });
}

}  // namespace

void fill_cuda_softmax() {
  fill<run<false>>(op::softmax);
  fill<run<true>>(op::log_softmax);
  fill<run_grad<false>>(op::softmax_grad);
  fill<run_grad<true>>(op::log_softmax_grad);
}

}  // namespace halftone::cuda
