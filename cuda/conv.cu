// Convolutions on CUDA, each result element by itself, straight from the formula, for any dtype and layout: what runs
// without cuDNN, in f64, and where cuDNN has no engine. Sums are formed in a fixed order.
#include "halftone/cuda/conv.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"
#include "halftone/cuda/conv_3xtf32.h"
#include "halftone/cuda/small_conv.h"
#include "halftone/ops/conv.h"
#include "halftone/ops/unary.h"

namespace halftone::cuda {
namespace {

constexpr int threads = 256;

// A tensor [n, channels, d, h, w] in memory; dimensions that it lacks have stride 0.
struct Volume {
  int64_t image, channel, at[3];
  explicit Volume(const Strides& s) : image(s[0]), channel(s[1]), at{} {
    for (size_t d = 2; d < s.size(); ++d) at[d + 3 - s.size()] = s[d];
  }
};
struct Problem {
  ConvGeometry q;
  Volume x, w, y;
};

// Index i of the last of several dimensions, and what is left for those before it.
__device__ int64_t peel(int64_t& i, int64_t size) {
  const int64_t rest = i / size, here = i - rest * size;
  i = rest;
  return here;
}

template <class T, bool with_relu>
__global__ void __launch_bounds__(threads)
    conv_kernel(const Problem p, T* y, const T* x, const T* w, const T* bias, const int64_t bias_step) {
  wait_for_previous();
  using A = accumulate_t<T>;
  const ConvGeometry& q = p.q;
  const int64_t count = q.n * q.o * q.positions();
  for (int64_t i = thread_index(); i < count; i += grid_threads()) {
    int64_t rest = i;
    const int64_t c = peel(rest, q.out[2]), b = peel(rest, q.out[1]), a = peel(rest, q.out[0]), o = peel(rest, q.o);
    const T* image = x + rest * p.x.image + o / q.o_group() * q.c_group() * p.x.channel;
    const T* kernel = w + o * p.w.image;
    A sum = 0;
    for (int64_t channel = 0; channel < q.c_group(); ++channel)
      for (int64_t u = 0; u < q.kernel[0]; ++u) {
        const int64_t d = a * q.stride[0] + u * q.dilation[0] - q.before[0];
        if (d < 0 || d >= q.in[0]) continue;
        for (int64_t v = 0; v < q.kernel[1]; ++v) {
          const int64_t h = b * q.stride[1] + v * q.dilation[1] - q.before[1];
          if (h < 0 || h >= q.in[1]) continue;
          const T* line = image + channel * p.x.channel + d * p.x.at[0] + h * p.x.at[1];
          const T* taps = kernel + channel * p.w.channel + u * p.w.at[0] + v * p.w.at[1];
          for (int64_t t = 0; t < q.kernel[2]; ++t) {
            const int64_t e = c * q.stride[2] + t * q.dilation[2] - q.before[2];
            if (e >= 0 && e < q.in[2]) sum += to<A>(line[e * p.x.at[2]]) * to<A>(taps[t * p.w.at[2]]);
          }
        }
      }
    if (bias) sum += to<A>(bias[o * bias_step]);
    if constexpr (with_relu) sum = unary::Relu::f(sum);
    y[rest * p.y.image + o * p.y.channel + a * p.y.at[0] + b * p.y.at[1] + c * p.y.at[2]] = to<T>(sum);
  }
}

// The output whose window has tap t on input i, along dimension d; -1: none.
__device__ int64_t output_at(const ConvGeometry& q, int d, int64_t i, int64_t t) {
  const int64_t from = i + q.before[d] - t * q.dilation[d], o = from / q.stride[d];
  return from >= 0 && o * q.stride[d] == from && o < q.out[d] ? o : -1;
}

template <class T>
__global__ void __launch_bounds__(threads) conv_input_kernel(const Problem p, T* x, const T* g, const T* w) {
  wait_for_previous();
  using A = accumulate_t<T>;
  const ConvGeometry& q = p.q;
  const int64_t count = q.n * q.c * q.pixels();
  for (int64_t i = thread_index(); i < count; i += grid_threads()) {
    int64_t rest = i;
    const int64_t e = peel(rest, q.in[2]), h = peel(rest, q.in[1]), d = peel(rest, q.in[0]), channel = peel(rest, q.c);
    const int64_t group = channel / q.c_group(), in_group = channel - group * q.c_group();
    A sum = 0;
    for (int64_t o = group * q.o_group(); o < (group + 1) * q.o_group(); ++o)
      for (int64_t u = 0; u < q.kernel[0]; ++u) {
        const int64_t a = output_at(q, 0, d, u);
        if (a < 0) continue;
        for (int64_t v = 0; v < q.kernel[1]; ++v) {
          const int64_t b = output_at(q, 1, h, v);
          if (b < 0) continue;
          const T* line = g + rest * p.y.image + o * p.y.channel + a * p.y.at[0] + b * p.y.at[1];
          const T* taps = w + o * p.w.image + in_group * p.w.channel + u * p.w.at[0] + v * p.w.at[1];
          for (int64_t t = 0; t < q.kernel[2]; ++t) {
            const int64_t c = output_at(q, 2, e, t);
            if (c >= 0) sum += to<A>(line[c * p.y.at[2]]) * to<A>(taps[t * p.w.at[2]]);
          }
        }
      }
    x[rest * p.x.image + channel * p.x.channel + d * p.x.at[0] + h * p.x.at[1] + e * p.x.at[2]] = to<T>(sum);
  }
}

struct Add {
  template <class A> __device__ A operator()(A a, A b) const { return a + b; }
};

// A block for each weight.
template <class T, class W>
__global__ void __launch_bounds__(threads) conv_weight_kernel(const Problem p, W* w, const T* x, const T* g) {
  wait_for_previous();
  using A = accumulate_t<T>;
  const ConvGeometry& q = p.q;
  const Group block(threads);
  const int64_t count = q.o * q.c_group() * q.taps(), terms = q.n * q.positions();
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    int64_t rest = i;
    const int64_t t = peel(rest, q.kernel[2]), v = peel(rest, q.kernel[1]), u = peel(rest, q.kernel[0]), in_group = peel(rest, q.c_group());
    const int64_t channel = rest / q.o_group() * q.c_group() + in_group;
    A sum = 0;
    for (int64_t k = threadIdx.x; k < terms; k += threads) {
      int64_t n = k;
      const int64_t c = peel(n, q.out[2]), b = peel(n, q.out[1]), a = peel(n, q.out[0]);
      const int64_t d = a * q.stride[0] + u * q.dilation[0] - q.before[0], h = b * q.stride[1] + v * q.dilation[1] - q.before[1],
                    e = c * q.stride[2] + t * q.dilation[2] - q.before[2];
      if (d < 0 || d >= q.in[0] || h < 0 || h >= q.in[1] || e < 0 || e >= q.in[2]) continue;
      sum += to<A>(x[n * p.x.image + channel * p.x.channel + d * p.x.at[0] + h * p.x.at[1] + e * p.x.at[2]]) *
             to<A>(g[n * p.y.image + rest * p.y.channel + a * p.y.at[0] + b * p.y.at[1] + c * p.y.at[2]]);
    }
    sum = block.combine(sum, A(0), Add());
    if (threadIdx.x == 0)
      w[rest * p.w.image + in_group * p.w.channel + u * p.w.at[0] + v * p.w.at[1] + t * p.w.at[2]] = to<W>(sum);
  }
}

// ---- windows as columns [n, c * taps, positions]

template <class T> __global__ void __launch_bounds__(threads) unfold_kernel(const ConvGeometry q, const T* x, T* y) {
  wait_for_previous();
  const int64_t count = q.n * q.c * q.taps() * q.positions();
  for (int64_t i = thread_index(); i < count; i += grid_threads()) {
    int64_t rest = i;
    const int64_t c = peel(rest, q.out[2]), b = peel(rest, q.out[1]), t = peel(rest, q.kernel[2]), v = peel(rest, q.kernel[1]);
    const int64_t h = b * q.stride[1] + v * q.dilation[1] - q.before[1], e = c * q.stride[2] + t * q.dilation[2] - q.before[2];
    y[i] = h >= 0 && h < q.in[1] && e >= 0 && e < q.in[2] ? x[(rest * q.in[1] + h) * q.in[2] + e] : to<T>(0.f);
  }
}
template <class T> __global__ void __launch_bounds__(threads) fold_kernel(const ConvGeometry q, const T* y, T* x) {
  wait_for_previous();
  using A = accumulate_t<T>;
  const int64_t count = q.n * q.c * q.pixels();
  for (int64_t i = thread_index(); i < count; i += grid_threads()) {
    int64_t rest = i;
    const int64_t e = peel(rest, q.in[2]), h = peel(rest, q.in[1]);
    A sum = 0;
    for (int64_t v = 0; v < q.kernel[1]; ++v) {
      const int64_t b = output_at(q, 1, h, v);
      for (int64_t t = 0; b >= 0 && t < q.kernel[2]; ++t) {
        const int64_t c = output_at(q, 2, e, t);
        if (c >= 0) sum += to<A>(y[(((rest * q.kernel[1] + v) * q.kernel[2] + t) * q.out[1] + b) * q.out[2] + c]);
      }
    }
    x[i] = to<T>(sum);
  }
}

Problem problem(const Call& c, const Tensor& x, const Tensor& w, const Tensor& y) {
  return {conv_geometry(c.as<ConvAttrs>(), x.shape(), w.shape(), y.shape()), Volume(x.strides()), Volume(w.strides()), Volume(y.strides())};
}
int64_t blocks_for(int64_t elements) { return std::min<int64_t>(ceil_div(elements, threads), int64_t{64} * sm_count()); }

template <bool with_relu> void forward(const Call& c, const Tensor& y) {
  const Tensor &x = c.in[0], &w = c.in[1];
  if (small_conv(c, y, with_relu) || conv_3xtf32(c, y, with_relu)) return;
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    const T* bias = c.has(2) ? c.in[2].data<T>() : nullptr;
    launch("conv", conv_kernel<T, with_relu>, blocks_for(y.numel()), threads, problem(c, x, w, y), y.data<T>(), x.data<T>(), w.data<T>(), bias,
           bias ? c.in[2].strides()[0] : 0);
  });
}

void run_unfold(const Call& c, std::span<Tensor> out) {
  const Tensor x = c.in[0].contiguous(), &y = out[0];
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    launch("unfold", unfold_kernel<T>, blocks_for(y.numel()), threads, unfold_geometry(c.as<UnfoldAttrs>(), x.shape()), x.data<T>(), y.data<T>());
  });
}
void run_fold(const Call& c, std::span<Tensor> out) {
  const Tensor y = c.in[0].contiguous(), &x = out[0];
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    launch("fold", fold_kernel<T>, blocks_for(x.numel()), threads, unfold_geometry(c.as<UnfoldAttrs>(), x.shape()), y.data<T>(), x.data<T>());
  });
}

}  // namespace

void run_conv(const Call& c, std::span<Tensor> out) { forward<false>(c, out[0]); }
void run_conv_relu(const Call& c, std::span<Tensor> out) { forward<true>(c, out[0]); }

void run_conv_input(const Call& c, std::span<Tensor> out) {
  const Tensor &g = c.in[0], &w = c.in[1], &x = out[0];
  if (conv_input_3xtf32(c, x)) return;
  visit<floating_types>(g.dtype(), [&]<class T>(Type<T>) {
    launch("conv_input", conv_input_kernel<T>, blocks_for(x.numel()), threads, problem(c, x, w, g), x.data<T>(), g.data<T>(), w.data<T>());
  });
  if (c.has(2)) add_into(x, c.in[2]);
}

void run_conv_weight(const Call& c, std::span<Tensor> out) {
  const Tensor &x = c.in[0], &g = c.in[1], &w = out[0];
  if (small_conv_weight(c, w) || conv_weight_3xtf32(c, w)) return;
  const int64_t blocks = std::min<int64_t>(w.numel(), int64_t{64} * sm_count());
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    auto run = [&]<class W>(Type<W>) {
      launch("conv_weight", conv_weight_kernel<T, W>, blocks, threads, problem(c, x, w, g), w.data<W>(), x.data<T>(), g.data<T>());
    };
    if (w.dtype() == x.dtype()) run(Type<T>{});
    else if constexpr (is_16bit<T>) run(Type<float>{});
  });
}

void fill_cuda_conv() {
  fill<run_conv>(op::conv);
  fill<run_conv_relu>(op::conv_relu);
  fill<run_conv_input>(op::conv_input);
  fill<run_conv_weight>(op::conv_weight);
  fill<run_unfold>(op::unfold);
  fill<run_fold>(op::fold);
}

}  // namespace halftone::cuda
