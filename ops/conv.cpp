// The convolutions: shapes, derivatives, CPU kernels. Groups of one channel are added up directly, others are unfolded
// into a matrix for gemm(), image by image, so that an image's result does not depend on its batch.
#include "halftone/ops/conv.h"

#include <algorithm>
#include <cstring>

#include "halftone/core/backend.h"
#include "halftone/ops/all.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/gemm.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/matmul.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/unary.h"

namespace halftone {
namespace {

// ---- kernels, on dense tensors of f32 or f64

// Calls f(offset in an input plane, offset in an output plane, n) for each row of n outputs whose inputs under this tap of
// the kernel lie inside the plane; neighbours in the row are stride[2] apart in the input.
template <class F> void inside(const ConvGeometry& q, int64_t tap, F f) {
  int64_t shift[3], first[3], last[3];
  for (size_t d = 3; d-- > 0; tap /= q.kernel[d]) {
    shift[d] = tap % q.kernel[d] * q.dilation[d] - q.before[d];
    int64_t room = q.in[d] - 1 - shift[d];
    first[d] = shift[d] < 0 ? (-shift[d] + q.stride[d] - 1) / q.stride[d] : 0;
    last[d] = std::min(q.out[d], room < 0 ? 0 : room / q.stride[d] + 1);
  }
  int64_t n = last[2] - first[2];
  if (n <= 0) return;
  for (int64_t a = first[0]; a < last[0]; ++a)
    for (int64_t b = first[1]; b < last[1]; ++b) {
      int64_t plane = a * q.stride[0] + shift[0], row = b * q.stride[1] + shift[1], column = first[2] * q.stride[2] + shift[2];
      f((plane * q.in[1] + row) * q.in[2] + column, (a * q.out[1] + b) * q.out[2] + first[2], n);
    }
}

// The input is its own unfolded matrix.
bool pointwise(const ConvGeometry& q) {
  for (size_t d = 0; d < 3; ++d)
    if (q.kernel[d] != 1 || q.stride[d] != 1 || q.before[d] != 0 || q.in[d] != q.out[d]) return false;
  return true;
}

// Channels of one image -> matrix [channels * taps, positions], its rows `pitch` apart.
template <class C> void unfold(const ConvGeometry& q, const C* x, C* matrix, int64_t pitch) {
  int64_t taps = q.taps(), positions = q.positions(), grain = std::max<int64_t>(1, parallel_grain / std::max<int64_t>(positions, 1));
  parallel_for(q.c_group() * taps, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const C* plane = x + r / taps * q.pixels();
      C* row = matrix + r * pitch;
      std::fill(row, row + positions, C(0));
      inside(q, r % taps, [&](int64_t from, int64_t to, int64_t n) { map_row(plane + from, q.stride[2], row + to, 1, n, [](C v) { return v; }); });
    }
  });
}

// The transpose: adds the matrix up into the channels.
template <class C> void fold(const ConvGeometry& q, const C* matrix, C* x) {
  int64_t taps = q.taps(), positions = q.positions(), grain = std::max<int64_t>(1, parallel_grain / std::max<int64_t>(positions * taps, 1));
  parallel_for(q.c_group(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      C* plane = x + c * q.pixels();
      std::fill(plane, plane + q.pixels(), C(0));
      for (int64_t tap = 0; tap < taps; ++tap) {
        const C* row = matrix + (c * taps + tap) * positions;
        inside(q, tap, [&](int64_t to, int64_t from, int64_t n) { for (int64_t i = 0; i < n; ++i) plane[to + i * q.stride[2]] += row[from + i]; });
      }
    }
  });
}

// f(i) for i in [0, n), side by side when there are enough of them; else one after the other, and f may share its own work.
template <class F> void share(int64_t n, F f) {
  constexpr int64_t enough = 8;
  parallel_for(n, n >= enough ? 1 : n, [&](int64_t begin, int64_t end) { for (int64_t i = begin; i < end; ++i) f(i); });
}

template <class C> void forward(const ConvGeometry& q, const C* x, const C* w, C* y) {
  int64_t cg = q.c_group(), og = q.o_group(), taps = q.taps(), p = q.positions();
  if (cg == 1) {
    share(q.n * q.o, [&](int64_t i) {
      const C *plane = x + (i / q.o * q.c + i % q.o / og) * q.pixels(), *kernel = w + i % q.o * taps;
      C* to = y + i * p;
      std::fill(to, to + p, C(0));
      for (int64_t tap = 0; tap < taps; ++tap)
        inside(q, tap, [&](int64_t from, int64_t at, int64_t n) { for (int64_t k = 0; k < n; ++k) to[at + k] += kernel[tap] * plane[from + k * q.stride[2]]; });
    });
    return;
  }
  share(q.n * q.groups, [&](int64_t i) {
    const C *image = x + i * cg * q.pixels(), *kernel = w + i % q.groups * og * cg * taps;
    std::vector<C> matrix;
    if (!pointwise(q)) {
      matrix.resize(static_cast<size_t>(cg * taps * p));
      unfold(q, image, matrix.data(), p);
      image = matrix.data();
    }
    gemm<C, C>({kernel, cg * taps, 1}, {image, p, 1}, y + i * og * p, og, p, cg * taps);
  });
}

template <class C> void backward_input(const ConvGeometry& q, const C* g, const C* w, C* x) {
  int64_t cg = q.c_group(), og = q.o_group(), taps = q.taps(), p = q.positions();
  if (cg == 1) {
    share(q.n * q.c, [&](int64_t i) {
      C* plane = x + i * q.pixels();
      std::fill(plane, plane + q.pixels(), C(0));
      for (int64_t o = i % q.c * og; o < (i % q.c + 1) * og; ++o)
        for (int64_t tap = 0; tap < taps; ++tap) {
          const C *from = g + (i / q.c * q.o + o) * p, factor = w[o * taps + tap];
          inside(q, tap, [&](int64_t to, int64_t at, int64_t n) { for (int64_t k = 0; k < n; ++k) plane[to + k * q.stride[2]] += factor * from[at + k]; });
        }
    });
    return;
  }
  share(q.n * q.groups, [&](int64_t i) {
    const C* kernel = w + i % q.groups * og * cg * taps;
    C* image = x + i * cg * q.pixels();
    std::vector<C> matrix(pointwise(q) ? 0 : static_cast<size_t>(cg * taps * p));
    gemm<C, C>({kernel, 1, cg * taps}, {g + i * og * p, p, 1}, matrix.empty() ? image : matrix.data(), cg * taps, p, og);
    if (!pointwise(q)) fold(q, matrix.data(), image);
  });
}

// Adds up images in a few runs of them, then the runs: both cut by the batch's size alone. Small images are unfolded side by
// side, so that a product has terms enough.
template <class C> void backward_weight(const ConvGeometry& q, const C* x, const C* g, C* w) {
  int64_t cg = q.c_group(), og = q.o_group(), taps = q.taps(), p = q.positions(), size = og * cg * taps;
  constexpr int64_t terms = 256, most_runs = 16;
  if (cg == 1) {
    share(q.o, [&](int64_t o) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        double total = 0;
        for (int64_t n = 0; n < q.n; ++n) {
          const C *plane = x + (n * q.c + o / og) * q.pixels(), *from = g + (n * q.o + o) * p;
          inside(q, tap, [&](int64_t i, int64_t at, int64_t count) {
            for (int64_t k = 0; k < count; ++k) total += static_cast<double>(plane[i + k * q.stride[2]]) * static_cast<double>(from[at + k]);
          });
        }
        w[o * taps + tap] = static_cast<C>(total);
      }
    });
    return;
  }
  int64_t together = std::clamp<int64_t>(terms / std::max<int64_t>(p, 1), 1, std::max<int64_t>(q.n, 1));
  int64_t run = std::max<int64_t>(1, (q.n + most_runs - 1) / most_runs + together - 1) / together * together;
  int64_t runs = std::max<int64_t>(1, (q.n + run - 1) / run);
  std::vector<C> sums(static_cast<size_t>(runs * q.groups * size));
  share(runs * q.groups, [&](int64_t i) {
    int64_t group = i % q.groups, first = i / q.groups * run, last = std::min(q.n, first + run);
    C* sum = sums.data() + i * size;
    std::vector<C> matrix, outputs, product(static_cast<size_t>(size));
    for (int64_t n = first; n < last; n += together) {
      int64_t images = std::min(together, last - n), width = images * p;
      const C *from = x + (n * q.c + group * cg) * q.pixels(), *grads = g + (n * q.o + group * og) * p;
      if (images > 1) {
        outputs.resize(static_cast<size_t>(og * width));
        for (int64_t o = 0; o < og; ++o)
          for (int64_t k = 0; k < images; ++k) std::copy_n(grads + (k * q.o + o) * p, p, outputs.data() + o * width + k * p);
        grads = outputs.data();
      }
      if (images > 1 || !pointwise(q)) {
        matrix.resize(static_cast<size_t>(cg * taps * width));
        for (int64_t k = 0; k < images; ++k) unfold(q, from + k * q.c * q.pixels(), matrix.data() + k * p, width);
        from = matrix.data();
      }
      gemm<C, C>({grads, width, 1}, {from, 1, width}, product.data(), og, cg * taps, width);
      for (int64_t k = 0; k < size; ++k) sum[k] += product[static_cast<size_t>(k)];
    }
  });
  parallel_for(q.groups * size, parallel_grain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      w[k] = sums[static_cast<size_t>(k)];
      for (int64_t r = 1; r < runs; ++r) w[k] += sums[static_cast<size_t>(r * q.groups * size + k)];
    }
  });
}

// Dense, in the dtype that products accumulate in.
Tensor dense(const Tensor& t) { return (is_16bit_dtype(t.dtype()) ? t.to(DType::f32) : t).contiguous(); }

// Runs f(Type<C>, result) into `out` itself, or into a wider tensor that is rounded after.
template <class F> void widened(const Tensor& out, F f) {
  Tensor y = is_16bit_dtype(out.dtype()) ? Tensor::empty(Meta(out.shape(), DType::f32, out.device())) : out;
  if (y.dtype() == DType::f64) f(Type<double>{}, y);
  else f(Type<float>{}, y);
  if (y.dtype() != out.dtype()) call_all(op::copy, {out, y});
}

template <bool with_relu> void run_conv(const Call& c, std::span<Tensor> out) {
  ConvGeometry q = conv_geometry(c.as<ConvAttrs>(), c.in[0].shape(), c.in[1].shape(), out[0].shape());
  Tensor x = dense(c.in[0]), w = dense(c.in[1]), b = c.has(2) ? dense(c.in[2]) : Tensor();
  widened(out[0], [&]<class C>(Type<C>, const Tensor& to) {
    C* y = to.data<C>();
    forward(q, x.data<C>(), w.data<C>(), y);
    if (!b.defined() && !with_relu) return;
    const C* bias = b.defined() ? b.data<C>() : nullptr;
    int64_t p = q.positions(), grain = std::max<int64_t>(1, parallel_grain / std::max<int64_t>(p, 1));
    parallel_for(q.n * q.o, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        map_row(y + i * p, 1, y + i * p, 1, p, [add = bias ? bias[i % q.o] : C(0), bias](C v) {
          v = bias ? v + add : v;
          return with_relu ? unary::Relu::f(v) : v;
        });
    });
  });
}

void run_conv_input(const Call& c, std::span<Tensor> out) {
  ConvGeometry q = conv_geometry(c.as<ConvAttrs>(), out[0].shape(), c.in[1].shape(), c.in[0].shape());
  Tensor g = dense(c.in[0]), w = dense(c.in[1]);
  widened(out[0], [&]<class C>(Type<C>, const Tensor& to) {
    backward_input(q, g.data<C>(), w.data<C>(), to.data<C>());
    if (c.has(2)) add_into(to, dense(c.in[2]));
  });
}

void run_conv_weight(const Call& c, std::span<Tensor> out) {
  ConvGeometry q = conv_geometry(c.as<ConvAttrs>(), c.in[0].shape(), out[0].shape(), c.in[1].shape());
  Tensor x = dense(c.in[0]), g = dense(c.in[1]);
  widened(out[0], [&]<class C>(Type<C>, const Tensor& to) { backward_weight(q, x.data<C>(), g.data<C>(), to.data<C>()); });
}

void run_unfold(const Call& c, std::span<Tensor> out) {
  ConvGeometry q = unfold_geometry(c.as<UnfoldAttrs>(), c.in[0].shape());
  Tensor x = c.in[0].contiguous();
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    share(q.n, [&](int64_t n) { unfold(q, x.data<T>() + n * q.c * q.pixels(), out[0].data<T>() + n * q.c * q.taps() * q.positions(), q.positions()); });
  });
}
void run_fold(const Call& c, std::span<Tensor> out) {
  ConvGeometry q = unfold_geometry(c.as<UnfoldAttrs>(), out[0].shape());
  Tensor columns = dense(c.in[0]);
  widened(out[0], [&]<class C>(Type<C>, const Tensor& x) {
    share(q.n, [&](int64_t n) { fold(q, columns.data<C>() + n * q.c * q.taps() * q.positions(), x.data<C>() + n * q.c * q.pixels()); });
  });
}

// ---- shapes

// The name that the program called it by: "conv2d_weight".
std::string who(const Call& c) { return text::cat("conv", c.as<ConvAttrs>().dims, "d", c.op->name + 4); }

constexpr const char* kernel_names[] = {"k", "kh, kw", "kd, kh, kw"};

// Checks what does not depend on shapes; returns the attributes.
ConvAttrs checked(const Call& c, const std::string& name, const Meta& a, const Meta& b, const char* second) {
  auto at = c.as<ConvAttrs>();
  HT_CHECK(is_floating(a.dtype), name, ": expected a floating dtype, got ", a.dtype);
  HT_CHECK(a.dtype == b.dtype, name, ": expected ", second, " in the dtype of the first argument, ", a.dtype, ", got ", b,
           "; cast one with to() or use amp::Autocast");
  HT_CHECK(a.shape.rank() == at.dims + 2 && b.shape.rank() == at.dims + 2, name, ": expected tensors of ", at.dims + 2, " dimensions, got ", a, " and ", b);
  HT_CHECK(at.groups >= 1, name, ": expected groups of 1 or more, got ", at.groups);
  for (size_t d = 0; d < static_cast<size_t>(at.dims); ++d)
    HT_CHECK(at.stride[d] >= 1 && at.dilation[d] >= 1 && at.before[d] >= 0 && at.after[d] >= 0, name,
             ": expected stride and dilation of 1 or more and padding of 0 or more, got ", at.stride[d], ", ", at.dilation[d], " and ", at.before[d]);
  return at;
}

// The output's size along dimension d.
int64_t output_size(const std::string& name, const ConvAttrs& a, size_t d, int64_t in, int64_t kernel) {
  HT_CHECK(kernel >= 1, name, ": expected a kernel of size 1 or more, got ", kernel);
  int64_t extent = checked_add(checked_mul(kernel - 1, a.dilation[d]), 1), padded = checked_add(in, checked_add(a.before[d], a.after[d]));
  HT_CHECK(extent <= padded, name, ": a kernel of size ", kernel, " with dilation ", a.dilation[d], " spans ", extent, ", more than the input's ", in,
           " with padding ", a.before[d], " and ", a.after[d]);
  return (padded - extent) / a.stride[d] + 1;
}

void check_groups(const std::string& name, const ConvAttrs& a, int64_t in, int64_t out) {
  HT_CHECK(in % a.groups == 0 && out % a.groups == 0, name, ": expected channels that groups = ", a.groups, " divides, got ", in, " in and ", out, " out");
}

// Images on a GPU lie with their channels last where tensor cores compute: f32 by kernels of ours for one group (cuda/gemm_3xtf32.cu),
// the others by cuDNN.
Meta image(const Shape& shape, DType dtype, Device device, int64_t groups) {
  Meta m(shape, dtype, device);
  bool tensor_cores = is_16bit_dtype(dtype) || (dtype == DType::f32 && (tf32_allowed() || (groups == 1 && shape.rank() == 4)));
  if (device.type == DeviceType::cuda && shape.rank() >= 4 && tensor_cores) m.strides = channels_last_strides(shape);
  return m;
}

Metas infer_conv(const Call& c) {
  const Meta &x = c.in[0].meta(), &w = c.in[1].meta();
  std::string name = who(c);
  ConvAttrs a = checked(c, name, x, w, "weight");
  check_groups(name, a, x.shape[1], w.shape[0]);
  HT_CHECK(w.shape[1] == x.shape[1] / a.groups, name, ": expected weight [out, in, ", kernel_names[a.dims - 1], "] with in = ", x.shape[1] / a.groups,
           " for x ", x.shape, ", got ", w);
  if (c.has(2)) {
    const Meta& b = c.in[2].meta();
    HT_CHECK(b.shape == Shape({w.shape[0]}) && b.dtype == x.dtype, name, ": expected bias [", w.shape[0], "] (", x.dtype, "), got ", b);
  }
  Shape y{x.shape[0], w.shape[0]};
  for (size_t d = 0; d < static_cast<size_t>(a.dims); ++d) y.push_back(output_size(name, a, d, x.shape[d + 2], w.shape[d + 2]));
  return {image(y, x.dtype, x.device, a.groups)};
}

Metas infer_conv_input(const Call& c) {
  const Meta &g = c.in[0].meta(), &w = c.in[1].meta();
  std::string name = who(c);
  ConvAttrs a = checked(c, name, g, w, "weight");
  HT_CHECK(w.shape[0] == g.shape[1], name, ": expected weight [out, in, ", kernel_names[a.dims - 1], "] with out = ", g.shape[1], ", got ", w);
  Shape x{g.shape[0], checked_mul(w.shape[1], a.groups)};
  check_groups(name, a, x[1], g.shape[1]);
  for (size_t d = 0; d < static_cast<size_t>(a.dims); ++d) {
    x.push_back(a.size[d]);
    int64_t expected = output_size(name, a, d, a.size[d], w.shape[d + 2]);
    HT_CHECK(g.shape[d + 2] == expected, name, ": expected size ", expected, " in dimension ", d + 2, " for an input of size ", a.size[d], ", got ", g);
  }
  if (c.has(2))
    HT_CHECK(c.in[2].shape() == x && c.in[2].dtype() == g.dtype, name, ": expected an addend ", x, " (", g.dtype, "), got ", c.in[2].meta());
  return {image(x, g.dtype, g.device, a.groups)};
}

Metas infer_conv_weight(const Call& c) {
  const Meta &x = c.in[0].meta(), &g = c.in[1].meta();
  std::string name = who(c);
  ConvAttrs a = checked(c, name, x, g, "gradient");
  HT_CHECK(x.shape[0] == g.shape[0], name, ": expected a gradient for a batch of ", x.shape[0], ", got ", g);
  check_groups(name, a, x.shape[1], g.shape[1]);
  Shape w{g.shape[1], x.shape[1] / a.groups};
  for (size_t d = 0; d < static_cast<size_t>(a.dims); ++d) {
    w.push_back(a.size[d]);
    int64_t expected = output_size(name, a, d, x.shape[d + 2], a.size[d]);
    HT_CHECK(g.shape[d + 2] == expected, name, ": expected size ", expected, " in dimension ", d + 2, " for a kernel of size ", a.size[d], ", got ", g);
  }
  return {Meta(w, a.wide && is_16bit_dtype(x.dtype) ? DType::f32 : x.dtype, x.device)};
}

// The numbers of windows over an image of these sizes.
void check_windows(const char* name, const UnfoldAttrs& a, const Meta& x) {
  ConvAttrs as_conv;
  for (size_t d = 0; d < 2; ++d) {
    HT_CHECK(a.stride[d] >= 1 && a.dilation[d] >= 1 && a.padding[d] >= 0, name, ": expected stride and dilation of 1 or more and padding of 0 or more, got ",
             a.stride[d], ", ", a.dilation[d], " and ", a.padding[d]);
    as_conv.dilation[d] = a.dilation[d];
    as_conv.before[d] = as_conv.after[d] = a.padding[d];
    output_size(name, as_conv, d, x.shape[d + 2], a.kernel[d]);
  }
  HT_CHECK(is_floating(x.dtype), name, ": expected a floating dtype, got ", x.dtype);
}

// ---- derivatives

// The attributes with the spatial sizes of `result`.
ConvAttrs giving(ConvAttrs a, const Shape& result) {
  for (size_t d = 0; d < static_cast<size_t>(a.dims); ++d) a.size[d] = result[d + 2];
  a.wide = false;
  return a;
}
Tensor forward_of(const Tensor& x, const Tensor& w, const ConvAttrs& a) { return call(op::conv, {x, w}, Attrs::of(giving(a, w.shape()))); }
Tensor input_of(const Tensor& g, const Tensor& w, const ConvAttrs& a, const Shape& x) { return call(op::conv_input, {g, w}, Attrs::of(giving(a, x))); }
Tensor weight_of(const Tensor& x, const Tensor& g, const ConvAttrs& a, const Shape& w) { return call(op::conv_weight, {x, g}, Attrs::of(giving(a, w))); }

// The same, plus what the input has received already.
Tensor input_of(const Tensor& g, const Tensor& w, const ConvAttrs& a, const Shape& x, const Tensor& addend) {
  return addend.defined() ? call(op::conv_input, {g, w, addend}, Attrs::of(giving(a, x))) : input_of(g, w, a, x);
}

// All dimensions but the channels.
uint32_t but_channels(const ConvAttrs& a) { return ((1u << (a.dims + 2)) - 1u) & ~2u; }

Tensors gradients(const Rule& r, const Tensor& g) {
  auto a = r.as<ConvAttrs>();
  Tensors grads{r.needs(0) ? input_of(g, r.in(1), a, r.in_meta(0).shape) : Tensor(), r.needs(1) ? weight_of(r.in(0), g, a, r.in_meta(1).shape) : Tensor()};
  if (r.size() > 2) grads.push_back(r.needs(2) ? reduce::apply<reduce::Sum>(g, {but_channels(a), false}) : Tensor());
  return grads;
}

// The same outside a graph: the input's gradient takes up what came along a shortcut; gradients of weights that autocast cast down
// leave the product in f32, and go straight into their leaf's buffer. The bias's may be there already.
Tensors fused_gradients(const Rule& r, const Tensor& g, const Tensor& of_bias = {}) {
  auto a = r.as<ConvAttrs>();
  auto into = [&](size_t i, const OpDef& op, Tensors in, const Attrs& attrs) {
    Tensor buffer = r.destination(i);
    return buffer.defined() ? call_into(op, std::move(in), attrs, buffer) : call(op, std::move(in), attrs);
  };
  Tensors grads{r.needs(0) ? input_of(g, r.in(1), a, r.in_meta(0).shape, r.addend(0)) : Tensor(), {}};
  if (r.needs(1)) {
    ConvAttrs to_weight = giving(a, r.in_meta(1).shape);
    to_weight.wide = r.absorbed(1) != nullptr;
    grads[1] = into(1, op::conv_weight, {r.in(0), g}, Attrs::of(to_weight));
  }
  if (of_bias.defined()) grads.push_back(of_bias);
  else if (r.size() > 2)
    grads.push_back(r.needs(2) ? into(2, reduce::def<reduce::Sum>, {g}, Attrs::of(reduce::Dims{but_channels(a), false, r.absorbed(2) != nullptr})) : Tensor());
  return grads;
}

// From that of its relu.
Tensors fused_relu_gradients(const Rule& r) {
  if (r.size() <= 2 || !r.needs(2)) return fused_gradients(r, relu_grad(r.out(), r.take_grad()));
  const ReluGradSumsAttrs a{.wide = r.absorbed(2) != nullptr};
  Tensors both = call_all_into(op::relu_grad_sums, {r.out(), r.take_grad()}, Attrs::of(a), {{}, r.destination(2)});
  return fused_gradients(r, both[0], both[1]);
}

// A weight's or bias's cast from f32.
bool absorb_cast(const Rule&, size_t i, const Producer& p) { return i > 0 && p.op == &op::cast && p.input.dtype == DType::f32; }

// ---- samples

struct Example {
  Shape x, w;
  ConvAttrs a = {};
  bool bias = true;
};
std::vector<Example> examples() {
  auto with = [](Shape stride, Shape dilation, Shape before, Shape after, int64_t groups = 1) {
    ConvAttrs a;
    a.dims = stride.rank();
    a.groups = groups;
    for (size_t d = 0; d < stride.size(); ++d) {
      a.stride[d] = stride[d];
      a.dilation[d] = dilation[d];
      a.before[d] = before[d];
      a.after[d] = after[d];
    }
    return a;
  };
  auto padded = [&](int dims, int64_t padding, int64_t groups = 1) {
    Shape one = Shape::filled(dims, 1), p = Shape::filled(dims, padding);
    return with(one, one, p, p, groups);
  };
  return {{{1, 1, 1}, {1, 1, 1}, padded(1, 0)},
          {{2, 3, 7}, {4, 3, 3}, with({2}, {1}, {1}, {1})},
          {{1, 2, 33}, {2, 2, 4}, with({1}, {1}, {1}, {2}), false},
          {{1, 1, 257}, {2, 1, 5}, with({3}, {2}, {0}, {4})},
          {{2, 3, 5, 6}, {4, 3, 3, 3}, padded(2, 0)},
          {{2, 4, 5, 5}, {6, 2, 3, 2}, with({2, 1}, {1, 1}, {1, 0}, {1, 1}, 2), false},
          {{1, 3, 6, 5}, {3, 1, 3, 3}, padded(2, 1, 3)},
          {{2, 2, 7, 7}, {4, 1, 3, 3}, with({2, 2}, {1, 1}, {0, 1}, {1, 0}, 2)},
          {{2, 5, 4, 4}, {3, 5, 1, 1}, padded(2, 0)},
          {{2, 5, 5, 4}, {3, 5, 1, 1}, with({2, 2}, {1, 1}, {0, 0}, {0, 0})},
          {{0, 2, 5, 5}, {3, 2, 3, 3}, padded(2, 0)},
          {{1, 2, 9, 8}, {3, 2, 2, 3}, with({1, 1}, {2, 3}, {3, 1}, {0, 2})},
          {{3, 17, 9, 9}, {33, 17, 3, 3}, padded(2, 1)},
          {{9, 2, 3, 3}, {3, 2, 3, 3}, padded(2, 0)},
          {{1, 2, 4, 3, 5}, {3, 2, 2, 3, 2}, with({1, 2, 1}, {1, 1, 2}, {1, 1, 0}, {0, 1, 1})},
          {{2, 4, 2, 3, 2}, {4, 2, 1, 1, 1}, padded(3, 0, 2)}};
}
Shape result_shape(const Example& e) {
  Shape y{e.x[0], e.w[0]};
  for (size_t d = 0; d < static_cast<size_t>(e.a.dims); ++d) y.push_back(output_size("samples", e.a, d, e.x[d + 2], e.w[d + 2]));
  return y;
}

std::vector<Sample> conv_samples() {
  std::vector<Sample> all;
  for (auto& e : examples())
    all.push_back({{{.shape = e.x}, {.shape = e.w}, {.shape = {e.w[0]}, .low = -2, .high = 2, .dtype = {}, .differentiable = true, .present = e.bias}},
                   Attrs::of(e.a)});
  return all;
}

struct UnfoldExample { Shape x; UnfoldAttrs a; };
std::vector<UnfoldExample> unfold_examples() {
  std::vector<UnfoldExample> all = {{{1, 1, 1, 1}, {}},
                                    {{2, 3, 5, 6}, {.kernel = {2, 3}}},
                                    {{1, 2, 7, 7}, {.kernel = {3, 3}, .stride = {2, 1}, .padding = {1, 0}}},
                                    {{1, 1, 33, 2}, {.kernel = {4, 1}, .stride = {3, 1}, .dilation = {2, 1}}},
                                    {{2, 2, 4, 5}, {.kernel = {2, 2}, .stride = {2, 2}, .dilation = {1, 3}, .padding = {0, 1}}},
                                    {{0, 2, 4, 4}, {.kernel = {2, 2}}},
                                    {{1, 1, 1, 257}, {.kernel = {1, 5}, .stride = {1, 5}}},
                                    {{9, 3, 9, 8}, {.kernel = {3, 3}, .padding = {1, 1}}}};
  for (auto& e : all)
    for (size_t d = 0; d < 2; ++d) e.a.size[d] = e.x[d + 2];
  return all;
}
Shape columns_shape(const UnfoldAttrs& a, const Shape& x) {
  ConvGeometry q = unfold_geometry(a, x);
  return {q.n, checked_mul(q.c, q.taps()), q.positions()};
}

}  // namespace

ConvGeometry unfold_geometry(const UnfoldAttrs& a, const Shape& x) {
  ConvGeometry q{x[0], x[1], 0, 1, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {}, {}};
  for (size_t d = 0; d < 2; ++d) {
    q.in[d + 1] = x[d + 2];
    q.kernel[d + 1] = a.kernel[d];
    q.stride[d + 1] = a.stride[d];
    q.dilation[d + 1] = a.dilation[d];
    q.before[d + 1] = q.after[d + 1] = a.padding[d];
    q.out[d + 1] = (x[d + 2] + 2 * a.padding[d] - (a.kernel[d] - 1) * a.dilation[d] - 1) / a.stride[d] + 1;
  }
  return q;
}

void add_into(const Tensor& sum, const Tensor& addend) {
  call_into(binary::def<binary::Add>, {sum, addend}, binary::attrs_with<binary::Add>({}), sum);
}

ConvGeometry conv_geometry(const ConvAttrs& a, const Shape& x, const Shape& w, const Shape& y) {
  ConvGeometry q{x[0], x[1], w[0], a.groups, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {}, {}};
  for (size_t d = 0, to = static_cast<size_t>(3 - a.dims); to < 3; ++d, ++to) {
    q.in[to] = x[d + 2];
    q.out[to] = y[d + 2];
    q.kernel[to] = w[d + 2];
    q.stride[to] = a.stride[d];
    q.dilation[to] = a.dilation[d];
    q.before[to] = a.before[d];
    q.after[to] = a.after[d];
  }
  return q;
}

namespace op {

constinit OpDef conv = {
    .name = "conv", .doc = "convolution over the last one to three dimensions, plus bias: conv1d, conv2d, conv3d", .cast = Cast::lower,
    .infer = infer_conv,
    .saves = {.in = 3, .out = 0},
    .backward = [](const Rule& r) { return gradients(r, r.grad()); },
    .fused_backward = [](const Rule& r) { return fused_gradients(r, r.grad()); },
    .absorb = absorb_cast,
    .dtypes = {floating_types, floating_types},
    .samples = conv_samples,
    .kernel = {run_conv<false>}};

constinit OpDef conv_relu = {
    .name = "conv_relu", .doc = "relu of conv, rounded once", .cast = Cast::lower,
    .infer = infer_conv,
    .saves = {.in = 3, .out = 1},
    .backward = [](const Rule& r) { return gradients(r, relu_grad(r.out(), r.grad())); },
    .fused_backward = fused_relu_gradients,
    .absorb = absorb_cast,
    .dtypes = {floating_types, floating_types},
    .samples = conv_samples,
    .kernel = {run_conv<true>}};

constinit OpDef conv_input = {
    .name = "conv_input", .doc = "the transpose of conv over its input, plus an addend: the gradient of x, and conv_transpose1d and 2d",
    .cast = Cast::lower,
    .infer = infer_conv_input,
    .saves = {.in = 3, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      auto a = r.as<ConvAttrs>();
      Tensors grads{r.needs(0) ? forward_of(r.grad(), r.in(1), a) : Tensor(),
                    r.needs(1) ? weight_of(r.grad(), r.in(0), a, r.in_meta(1).shape) : Tensor()};
      if (r.size() > 2) grads.push_back(r.needs(2) ? r.grad() : Tensor());
      return grads;
    },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (bool addend : {false, true})
        for (auto& e : examples())
          all.push_back({{{.shape = result_shape(e)},
                          {.shape = e.w},
                          {.shape = e.x, .low = -2, .high = 2, .dtype = {}, .differentiable = true, .present = addend}},
                         Attrs::of(giving(e.a, e.x))});
      return all;
    },
    .kernel = {run_conv_input}};

constinit OpDef conv_weight = {
    .name = "conv_weight", .doc = "the transpose of conv over its weight: the gradient of w from x and that of the result", .cast = Cast::lower,
    .infer = infer_conv_weight,
    .saves = {.in = 3, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      auto a = r.as<ConvAttrs>();
      Tensor w = halftone::cast(r.grad(), r.in_meta().dtype);
      return {r.needs(0) ? input_of(r.in(1), w, a, r.in_meta(0).shape) : Tensor(), r.needs(1) ? forward_of(r.in(0), w, a) : Tensor()};
    },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& e : examples()) {
        ConvAttrs a = giving(e.a, e.w);
        a.wide = all.size() % 3 == 2;
        all.push_back({{{.shape = e.x}, {.shape = result_shape(e)}}, Attrs::of(a)});
      }
      return all;
    },
    .kernel = {run_conv_weight}};

constinit OpDef unfold = {
    .name = "unfold", .doc = "the windows of an image as columns", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& x = c.in[0].meta();
      auto a = c.as<UnfoldAttrs>();
      HT_CHECK(x.shape.rank() == 4, "unfold: expected x [n, channels, h, w], got ", x);
      check_windows("unfold", a, x);
      return {Meta(columns_shape(a, x.shape), x.dtype, x.device)};
    },
    .backward = [](const Rule& r) -> Tensors {
      auto a = r.as<UnfoldAttrs>();
      for (size_t d = 0; d < 2; ++d) a.size[d] = r.in_meta().shape[d + 2];
      return {call(op::fold, {r.grad()}, Attrs::of(a))};
    },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& e : unfold_examples()) all.push_back({{{.shape = e.x}}, Attrs::of(e.a)});
      return all;
    },
    .kernel = {run_unfold}};

constinit OpDef fold = {
    .name = "fold", .doc = "columns added up to the image whose windows they are: the transpose and gradient of unfold", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& columns = c.in[0].meta();
      auto a = c.as<UnfoldAttrs>();
      int64_t taps = checked_mul(a.kernel[0], a.kernel[1]);
      HT_CHECK(taps >= 1 && columns.shape.rank() == 3 && columns.shape[1] % taps == 0, "fold: expected columns [n, channels * ", taps, ", windows], got ", columns);
      Meta x({columns.shape[0], columns.shape[1] / taps, a.size[0], a.size[1]}, columns.dtype, columns.device);
      check_windows("fold", a, x);
      HT_CHECK(columns_shape(a, x.shape) == columns.shape, "fold: expected columns ", columns_shape(a, x.shape), " for an image of ", a.size[0], " by ", a.size[1],
               ", got ", columns);
      return {x};
    },
    .backward = [](const Rule& r) -> Tensors { return {call(op::unfold, {r.grad()}, r.attrs())}; },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& e : unfold_examples()) all.push_back({{{.shape = columns_shape(e.a, e.x)}}, Attrs::of(e.a)});
      return all;
    },
    .kernel = {run_fold}};

}  // namespace op

std::span<OpDef* const> conv_ops() {
  static constexpr OpDef* all[] = {&op::conv, &op::conv_relu, &op::conv_input, &op::conv_weight, &op::unfold, &op::fold};
  return all;
}

namespace {

Shape sizes(Size s) { return {s}; }
Shape sizes(Size2 s) { return {s.h, s.w}; }
Shape sizes(Size3 s) { return {s.d, s.h, s.w}; }

template <class O> ConvAttrs common_attrs(const O& o) {
  ConvAttrs a;
  Shape stride = sizes(o.stride), dilation = sizes(o.dilation);
  a.dims = stride.rank();
  a.groups = o.groups;
  for (size_t d = 0; d < stride.size(); ++d) {
    a.stride[d] = stride[d];
    a.dilation[d] = dilation[d];
  }
  return a;
}

// `kernel` has the sizes in its last dimensions.
template <class S> ConvAttrs attrs_of(const char* name, const Shape& kernel, const ConvOptions<S>& o) {
  ConvAttrs a = common_attrs(o);
  Shape padding = sizes(o.padding.size);
  auto dims = static_cast<size_t>(a.dims);
  HT_CHECK(kernel.size() >= dims, name, ": expected a kernel of ", dims, " dimensions, got ", kernel);
  for (size_t d = 0; d < dims; ++d) {
    a.before[d] = a.after[d] = padding[d];
    if (!o.padding.same) continue;
    HT_CHECK(a.stride[d] == 1, name, ": expected stride 1 with same_padding, got ", a.stride[d]);
    int64_t lost = checked_mul(kernel[kernel.size() - dims + d] - 1, a.dilation[d]);
    a.before[d] = lost / 2;
    a.after[d] = lost - lost / 2;
  }
  return a;
}

template <class S> Tensor convolve(const OpDef& op, const char* name, const Tensor& x, const Tensor& w, const Tensor& b, const ConvOptions<S>& o) {
  HT_CHECK(x.defined() && w.defined(), name, ": x or weight is undefined");
  Tensors in{x, w};
  if (b.defined()) in.push_back(b);
  return call(op, std::move(in), Attrs::of(attrs_of(name, w.shape(), o)));
}

template <class S> Tensor transposed(const char* name, const Tensor& x, const Tensor& w, const Tensor& b, const ConvTransposeOptions<S>& o) {
  HT_CHECK(x.defined() && w.defined(), name, ": x or weight is undefined");
  ConvAttrs a = common_attrs(o);
  Shape padding = sizes(o.padding), more = sizes(o.output_padding), channels = Shape::filled(a.dims + 2, 1);
  auto dims = static_cast<size_t>(a.dims);
  HT_CHECK(x.rank() == a.dims + 2 && w.rank() == a.dims + 2 && w.size(0) == x.size(1), name, ": expected x [n, in, ...] and weight [in, out, ",
           kernel_names[dims - 1], "], got ", x.meta(), " and ", w.meta());
  for (size_t d = 0; d < dims; ++d) {
    a.before[d] = a.after[d] = padding[d];
    HT_CHECK(more[d] >= 0 && more[d] < a.stride[d], name, ": expected output_padding of 0 or more and below the stride ", a.stride[d], ", got ", more[d]);
    int64_t extent = checked_add(checked_mul(w.shape()[d + 2] - 1, a.dilation[d]), 1);
    a.size[d] = checked_add(checked_add(checked_mul(x.shape()[d + 2] - 1, a.stride[d]), extent), checked_add(more[d], -checked_mul(2, padding[d])));
    HT_CHECK(a.size[d] >= 1, name, ": the result would have size ", a.size[d], " in dimension ", d + 2);
  }
  Tensor y = call(op::conv_input, {x, w}, Attrs::of(a));
  if (!b.defined()) return y;
  channels[1] = y.size(1);
  HT_CHECK(b.shape() == Shape({y.size(1)}), name, ": expected bias [", y.size(1), "], got ", b.meta());
  return y + cast(b, y.dtype()).view(channels);
}

}  // namespace

Tensor conv1d(const Tensor& x, const Tensor& w, const Tensor& b, Conv1dOptions o) { return convolve(op::conv, "conv1d", x, w, b, o); }
Tensor conv2d(const Tensor& x, const Tensor& w, const Tensor& b, Conv2dOptions o) { return convolve(op::conv, "conv2d", x, w, b, o); }
Tensor conv3d(const Tensor& x, const Tensor& w, const Tensor& b, Conv3dOptions o) { return convolve(op::conv, "conv3d", x, w, b, o); }
Tensor conv2d_relu(const Tensor& x, const Tensor& w, const Tensor& b, Conv2dOptions o) { return convolve(op::conv_relu, "conv2d_relu", x, w, b, o); }

Tensor conv2d_input(const Tensor& g, const Tensor& w, Size2 size, Conv2dOptions o) {
  HT_CHECK(g.defined() && w.defined(), "conv2d_input: g or weight is undefined");
  ConvAttrs a = attrs_of("conv2d_input", w.shape(), o);
  a.size[0] = size.h;
  a.size[1] = size.w;
  return call(op::conv_input, {g, w}, Attrs::of(a));
}
Tensor conv2d_weight(const Tensor& x, const Tensor& g, Size2 kernel, Conv2dOptions o) {
  HT_CHECK(x.defined() && g.defined(), "conv2d_weight: x or g is undefined");
  ConvAttrs a = attrs_of("conv2d_weight", sizes(kernel), o);
  a.size[0] = kernel.h;
  a.size[1] = kernel.w;
  return call(op::conv_weight, {x, g}, Attrs::of(a));
}

Tensor conv_transpose1d(const Tensor& x, const Tensor& w, const Tensor& b, ConvTranspose1dOptions o) { return transposed("conv_transpose1d", x, w, b, o); }
Tensor conv_transpose2d(const Tensor& x, const Tensor& w, const Tensor& b, ConvTranspose2dOptions o) { return transposed("conv_transpose2d", x, w, b, o); }

namespace {
UnfoldAttrs attrs_of(Size2 kernel, const UnfoldOptions& o) {
  return {.kernel = {kernel.h, kernel.w}, .stride = {o.stride.h, o.stride.w}, .dilation = {o.dilation.h, o.dilation.w}, .padding = {o.padding.h, o.padding.w}};
}
}  // namespace
Tensor unfold(const Tensor& x, Size2 kernel, UnfoldOptions o) {
  HT_CHECK(x.defined(), "unfold: x is undefined");
  return call(op::unfold, {x}, Attrs::of(attrs_of(kernel, o)));
}
Tensor fold(const Tensor& columns, Size2 size, Size2 kernel, UnfoldOptions o) {
  HT_CHECK(columns.defined(), "fold: columns is undefined");
  UnfoldAttrs a = attrs_of(kernel, o);
  a.size[0] = size.h;
  a.size[1] = size.w;
  return call(op::fold, {columns}, Attrs::of(a));
}

}  // namespace halftone
