// Pooling: shapes, derivatives, CPU kernels. The largest elements are remembered as numbers within their windows; averages
// are linear, so that their derivatives are their transposes.
#include "halftone/ops/pool.h"

#include <algorithm>
#include <limits>

#include "halftone/ops/all.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/reduce.h"

namespace halftone {
namespace {

// ---- kernels, on dense planes

// Calls f(output's place in the plane, its window in each dimension).
template <class F> void each_window(const PoolGeometry& q, F f) {
  int64_t at = 0;
  for (int32_t a = 0; a < q.out[0]; ++a)
    for (int32_t b = 0; b < q.out[1]; ++b)
      for (int32_t c = 0; c < q.out[2]; ++c) f(at++, q.window(0, a), q.window(1, b), q.window(2, c));
}
// Calls f(place in the input plane, number within the window) for a window's elements, row-major.
template <class F> void each_element(const PoolGeometry& q, const PoolWindow& u, const PoolWindow& v, const PoolWindow& w, F f) {
  for (int64_t a = u.begin, i = u.tap; a < u.end; a += u.step, ++i)
    for (int64_t b = v.begin, j = v.tap; b < v.end; b += v.step, ++j)
      for (int64_t c = w.begin, k = w.tap; c < w.end; c += w.step, ++k)
        f((a * q.in[1] + b) * q.in[2] + c, (i * q.kernel[1] + j) * q.kernel[2] + k);
}
template <class F> void each_plane(const PoolGeometry& q, F f) {
  parallel_for(q.planes, std::max<int64_t>(1, parallel_grain / std::max<int64_t>(1, q.pixels() + q.positions())), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) f(p);
  });
}

// A plane by rows of results, tap by tap, so that neighbours share vectors. Windows of one size only. Calls take(row, first, last, step, tap) where
// result o of the row, from `first` to below `last`, has the element row[o * step], step being a constant where it is small; then end(windows of the row).
template <class T, class Take, class End> void by_rows(const PoolGeometry& q, const T* x, Take take, End end) {
  int64_t n = q.out[2], stride = q.stride[2];
  for (int32_t a = 0; a < q.out[0]; ++a)
    for (int32_t b = 0; b < q.out[1]; ++b) {
      PoolWindow u = q.window(0, a), v = q.window(1, b);
      for (int32_t i = u.begin, ti = u.tap; i < u.end; i += u.step, ++ti)
        for (int32_t j = v.begin, tj = v.tap; j < v.end; j += v.step, ++tj)
          for (int32_t k = 0; k < q.kernel[2]; ++k) {
            int64_t shift = int64_t{k} * q.dilation[2] - q.padding[2], room = q.in[2] - 1 - shift;
            int64_t first = shift < 0 ? (-shift + stride - 1) / stride : 0, last = room < 0 ? 0 : std::min(n, room / stride + 1);
            const T* row = x + (int64_t{i} * q.in[1] + j) * q.in[2] + shift;
            int32_t tap = (ti * q.kernel[1] + tj) * q.kernel[2] + k;
            if (stride == 1) take(row, first, last, std::integral_constant<int64_t, 1>(), tap);
            else if (stride == 2) take(row, first, last, std::integral_constant<int64_t, 2>(), tap);
            else take(row, first, last, stride, tap);
          }
      end(u, v);
    }
}

template <class T, class N> void max_by_rows(const PoolGeometry& q, const T* x, T* y, N* chosen) {
  using C = compute_t<T>;
  const auto n = static_cast<size_t>(q.out[2]);
  const C least = reduce::Argmax::start<C>().value;
  std::vector<C> best(n, least);
  std::vector<int32_t> taps(n, -1);
  auto take = [to = best.data(), tap = taps.data()](const T* row, int64_t first, int64_t last, auto step, int32_t number) {
    for (int64_t o = first; o < last; ++o) {  // as Argmax: the first of the largest, and the first NaN before all
      C value = C(row[o * step]);
      bool better = (tap[o] < 0) | (!(value <= to[o]) & (to[o] == to[o]));
      to[o] = better ? value : to[o];
      tap[o] = better ? number : tap[o];
    }
  };
  by_rows(q, x, take, [&](const PoolWindow&, const PoolWindow&) {
    for (size_t o = 0; o < n; ++o) *y++ = T(best[o]);
    if (chosen) chosen = std::transform(taps.begin(), taps.end(), chosen, [](int32_t number) { return static_cast<N>(number); });
    std::fill(best.begin(), best.end(), least);
    std::fill(taps.begin(), taps.end(), -1);
  });
}

template <class T> void average_by_rows(const PoolGeometry& q, const T* x, T* y) {
  using A = accumulate_t<T>;
  const auto n = static_cast<size_t>(q.out[2]);
  std::vector<A> sums(n);
  auto take = [to = sums.data()](const T* row, int64_t first, int64_t last, auto step, int32_t) {
    for (int64_t o = first; o < last; ++o) to[o] += A(row[o * step]);
  };
  by_rows(q, x, take, [&](const PoolWindow& u, const PoolWindow& v) {
    for (size_t o = 0; o < n; ++o) *y++ = T(sums[o] / static_cast<A>(u.count * v.count * q.window(2, static_cast<int32_t>(o)).count));
    std::fill(sums.begin(), sums.end(), A(0));
  });
}

void run_max_pool(const Call& c, std::span<Tensor> out) {
  PoolGeometry q = pool_geometry(c.as<PoolAttrs>(), c.in[0].shape(), out[0].shape());
  Tensor input = c.in[0].contiguous();
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using C = compute_t<T>;
    const T* x = input.data<T>();
    T* y = out[0].data<T>();
    auto run = [&]<class N>(N* chosen) {
      each_plane(q, [&](int64_t p) {
        if (!q.adaptive) return max_by_rows(q, x + p * q.pixels(), y + p * q.positions(), chosen ? chosen + p * q.positions() : nullptr);
        each_window(q, [&](int64_t at, const PoolWindow& u, const PoolWindow& v, const PoolWindow& w) {
          reduce::Best<C> best = reduce::Argmax::start<C>();
          each_element(q, u, v, w, [&](int64_t i, int64_t tap) { best = reduce::Argmax::add(best, C(x[p * q.pixels() + i]), tap); });
          y[p * q.positions() + at] = T(best.value);
          if (chosen) chosen[p * q.positions() + at] = static_cast<N>(best.index);
        });
      });
    };
    if (out.size() > 1) visit_numbers(out[1], run);
    else run(static_cast<int32_t*>(nullptr));
  });
}

// Where the taps of a window lie from its first, for windows that are whole.
std::vector<int64_t> tap_offsets(const PoolGeometry& q) {
  std::vector<int64_t> all;
  if (q.adaptive) return all;
  for (int64_t i = 0; i < q.kernel[0]; ++i)
    for (int64_t j = 0; j < q.kernel[1]; ++j)
      for (int64_t k = 0; k < q.kernel[2]; ++k) all.push_back((i * q.dilation[0] * q.in[1] + j * q.dilation[1]) * q.in[2] + k * q.dilation[2]);
  return all;
}

// Calls f(place in the input plane) for the element of this number in a window, if it is inside the input.
template <class F>
void chosen_element(const PoolGeometry& q, const std::vector<int64_t>& offsets, const PoolWindow& u, const PoolWindow& v, const PoolWindow& w, int64_t tap, F f) {
  if (tap < 0) return;
  auto whole = [&](const PoolWindow& s, size_t d) { return s.tap == 0 && s.begin + (q.kernel[d] - 1) * s.step < s.end; };
  if (static_cast<size_t>(tap) < offsets.size() && whole(u, 0) && whole(v, 1) && whole(w, 2))
    return f((int64_t{u.begin} * q.in[1] + v.begin) * q.in[2] + w.begin + offsets[static_cast<size_t>(tap)]);
  int64_t a = u.begin + (tap / (q.kernel[1] * q.kernel[2]) - u.tap) * u.step, b = v.begin + (tap / q.kernel[2] % q.kernel[1] - v.tap) * v.step,
          c = w.begin + (tap % q.kernel[2] - w.tap) * w.step;
  if (a >= u.begin && a < u.end && b >= v.begin && b < v.end && c >= w.begin && c < w.end) f((a * q.in[1] + b) * q.in[2] + c);
}

void run_max_pool_gather(const Call& c, std::span<Tensor> out) {
  PoolGeometry q = pool_geometry(c.as<PoolAttrs>(), c.in[0].shape(), out[0].shape());
  Tensor input = c.in[0].contiguous(), taps = c.in[1].contiguous();
  const std::vector<int64_t> offsets = tap_offsets(q);
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    const T* x = input.data<T>();
    T* y = out[0].data<T>();
    visit_numbers(taps, [&](const auto* chosen) {
      each_plane(q, [&](int64_t p) {
        each_window(q, [&](int64_t at, const PoolWindow& u, const PoolWindow& v, const PoolWindow& w) {
          int64_t o = p * q.positions() + at;
          y[o] = T(0);
          chosen_element(q, offsets, u, v, w, chosen[o], [&](int64_t i) { y[o] = x[p * q.pixels() + i]; });
        });
      });
    });
  });
}

// Adds up a plane's contributions in the dtype of sums, then rounds them.
template <class T, class F> void scatter_planes(const PoolGeometry& q, T* x, F contribute) {
  using A = accumulate_t<T>;
  each_plane(q, [&](int64_t p) {
    std::vector<A> plane(static_cast<size_t>(q.pixels()));
    contribute(p, plane.data());
    for (size_t i = 0; i < plane.size(); ++i) x[p * q.pixels() + static_cast<int64_t>(i)] = T(plane[i]);
  });
}

void run_max_pool_scatter(const Call& c, std::span<Tensor> out) {
  PoolGeometry q = pool_geometry(c.as<PoolAttrs>(), out[0].shape(), c.in[0].shape());
  Tensor gradient = c.in[0].contiguous(), taps = c.in[1].contiguous();
  const std::vector<int64_t> offsets = tap_offsets(q);
  visit<floating_types>(gradient.dtype(), [&]<class T>(Type<T>) {
    const T* g = gradient.data<T>();
    visit_numbers(taps, [&](const auto* chosen) {
      scatter_planes(q, out[0].data<T>(), [&]<class A>(int64_t p, A* plane) {
        each_window(q, [&](int64_t at, const PoolWindow& u, const PoolWindow& v, const PoolWindow& w) {
          int64_t o = p * q.positions() + at;
          chosen_element(q, offsets, u, v, w, chosen[o], [&](int64_t i) { plane[i] += A(g[o]); });
        });
      });
    });
  });
}

void run_avg_pool(const Call& c, std::span<Tensor> out) {
  PoolGeometry q = pool_geometry(c.as<PoolAttrs>(), c.in[0].shape(), out[0].shape());
  Tensor input = c.in[0].contiguous();
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    const T* x = input.data<T>();
    T* y = out[0].data<T>();
    each_plane(q, [&](int64_t p) {
      if (!q.adaptive) return average_by_rows(q, x + p * q.pixels(), y + p * q.positions());
      each_window(q, [&](int64_t at, const PoolWindow& u, const PoolWindow& v, const PoolWindow& w) {
        accumulate_t<T> sum = 0;
        each_element(q, u, v, w, [&](int64_t i, int64_t) { sum += accumulate_t<T>(x[p * q.pixels() + i]); });
        y[p * q.positions() + at] = T(sum / static_cast<accumulate_t<T>>(u.count * v.count * w.count));
      });
    });
  });
}

void run_avg_pool_input(const Call& c, std::span<Tensor> out) {
  PoolGeometry q = pool_geometry(c.as<PoolAttrs>(), out[0].shape(), c.in[0].shape());
  Tensor gradient = c.in[0].contiguous();
  visit<floating_types>(gradient.dtype(), [&]<class T>(Type<T>) {
    const T* g = gradient.data<T>();
    scatter_planes(q, out[0].data<T>(), [&]<class A>(int64_t p, A* plane) {
      each_window(q, [&](int64_t at, const PoolWindow& u, const PoolWindow& v, const PoolWindow& w) {
        A share = A(g[p * q.positions() + at]) / static_cast<A>(u.count * v.count * w.count);
        each_element(q, u, v, w, [&](int64_t i, int64_t) { plane[i] += share; });
      });
    });
  });
}

// ---- shapes

// The name that the program called it by: "adaptive_max_pool2d".
std::string who(const Call& c) {
  auto a = c.as<PoolAttrs>();
  return text::cat(a.adaptive ? "adaptive_" : "", std::string_view(c.op->name).substr(0, 8), a.dims, "d", c.op->name + 8);
}

// The spatial sizes of the output for an input of these, which follow two dimensions.
constexpr int64_t most_places = int64_t{1} << 30;  // of one dimension, so that 32 bits do for what is added to it
Shape output_sizes(const Call& c, const Meta& tensor, const Shape& x) {
  auto a = c.as<PoolAttrs>();
  std::string name = who(c);
  HT_CHECK(is_floating(tensor.dtype), name, ": expected a floating dtype, got ", tensor.dtype, "; cast x with to()");
  HT_CHECK(x.rank() == a.dims + 2, name, ": expected x of ", a.dims + 2, " dimensions, got ", tensor);
  Shape y;
  for (size_t d = 0; d < static_cast<size_t>(a.dims); ++d) {
    int64_t in = x[d + 2], kernel = a.kernel[d], stride = a.stride[d], padding = a.padding[d];
    HT_CHECK(in >= 1, name, ": dimension ", d + 2, " of x is empty: ", tensor);
    HT_CHECK(in + padding < most_places && a.size[d] < most_places, name, ": dimension ", d + 2, " has more than ", most_places, " places: ", tensor);
    if (a.adaptive) {
      HT_CHECK(a.size[d] >= 1, name, ": expected a size of 1 or more, got ", a.size[d]);
      y.push_back(a.size[d]);
      continue;
    }
    HT_CHECK(kernel >= 1 && stride >= 1 && a.dilation[d] >= 1, name, ": expected kernel, stride and dilation of 1 or more, got ", kernel, ", ", stride, " and ",
             a.dilation[d]);
    HT_CHECK(padding >= 0 && padding <= kernel / 2, name, ": expected padding from 0 to half the kernel's ", kernel, ", got ", padding);
    int64_t extent = checked_add(checked_mul(kernel - 1, a.dilation[d]), 1), padded = checked_add(in, 2 * padding);
    HT_CHECK(extent <= padded, name, ": a window of ", kernel, " with dilation ", a.dilation[d], " spans ", extent, ", more than the input's ", in,
             " with padding ", padding);
    int64_t n = (padded - extent + (a.ceil_mode ? stride - 1 : 0)) / stride + 1;
    if (a.ceil_mode && (n - 1) * stride >= in + padding) --n;  // a window of nothing but padding
    y.push_back(n);
  }
  HT_CHECK(a.adaptive || checked_mul(checked_mul(a.kernel[0], a.kernel[1]), a.kernel[2]) < int64_t{1} << 31, name, ": the window is too large");
  return y;
}
Shape joined(const Shape& x, const Shape& spatial) {
  Shape s{x[0], x[1]};
  for (auto d : spatial) s.push_back(d);
  return s;
}
Shape given_size(const PoolAttrs& a) { return Shape(std::span(a.size, static_cast<size_t>(a.dims))); }

// Of another size, laid out like x.
Meta like(const Meta& x, const Shape& shape, DType dtype) {
  Meta m(shape, dtype, x.device);
  if (!laid_out_like(x, dtype).contiguous()) m.strides = channels_last_strides(shape);
  return m;
}

bool are_numbers(const Meta& taps) { return taps.dtype == DType::u8 || taps.dtype == DType::i32; }

Metas infer_forward(const Call& c) {
  const Meta& x = c.in[0].meta();
  Shape sizes = output_sizes(c, x, x.shape), y = joined(x.shape, sizes);
  if (c.op == &op::avg_pool) return {like(x, y, x.dtype)};
  return {like(x, y, x.dtype), like(x, y, number_type(c.as<PoolAttrs>()))};
}

// From a gradient of the output's shape.
Metas infer_transpose(const Call& c) {
  const Meta& g = c.in[0].meta();
  auto a = c.as<PoolAttrs>();
  HT_CHECK(g.shape.rank() == a.dims + 2, who(c), ": expected a gradient of ", a.dims + 2, " dimensions, got ", g);
  Shape x = joined(g.shape, given_size(a));
  if (!a.adaptive) {
    Shape expected = joined(g.shape, output_sizes(c, g, x));
    HT_CHECK(g.shape == expected, who(c), ": expected a gradient ", expected, " for an input ", x, ", got ", g);
  }
  HT_CHECK(is_floating(g.dtype), who(c), ": expected a floating dtype, got ", g.dtype);
  if (c.op == &op::max_pool_scatter)
    HT_CHECK(are_numbers(c.in[1].meta()) && c.in[1].shape() == g.shape, who(c), ": expected elements' numbers ", g.shape, " (u8 or i32), got ", c.in[1].meta());
  return {like(c.op == &op::max_pool_scatter ? c.in[1].meta() : g, x, g.dtype)};
}

Metas infer_gather(const Call& c) {
  const Meta &x = c.in[0].meta(), &taps = c.in[1].meta();
  auto a = c.as<PoolAttrs>();
  HT_CHECK(x.shape.rank() == a.dims + 2 && taps.shape.rank() == a.dims + 2, who(c), ": expected tensors of ", a.dims + 2, " dimensions, got ", x, " and ", taps);
  Shape y = a.adaptive ? taps.shape : joined(x.shape, output_sizes(c, x, x.shape));
  HT_CHECK(is_floating(x.dtype) && are_numbers(taps) && taps.shape == y, who(c), ": expected elements' numbers ", y, " (u8 or i32), got ", taps);
  return {like(x, y, x.dtype)};
}

// ---- derivatives

Attrs sized(PoolAttrs a, const Shape& x) {
  for (size_t d = 0; d < static_cast<size_t>(a.dims); ++d) a.size[d] = x[d + 2];
  return Attrs::of(a);
}

// ---- samples

struct Example { Shape x; PoolAttrs a; };
std::vector<Example> examples(bool average) {
  auto strided = [&](Shape kernel, Shape stride, Shape padding, Shape dilation, bool ceil_mode = false, bool include_pad = true) {
    PoolAttrs a;
    a.dims = kernel.rank();
    a.ceil_mode = ceil_mode;
    a.include_pad = include_pad;
    for (size_t d = 0; d < kernel.size(); ++d) {
      a.kernel[d] = kernel[d];
      a.stride[d] = stride[d];
      a.padding[d] = padding[d];
      a.dilation[d] = average ? 1 : dilation[d];
    }
    return a;
  };
  auto adaptive = [](Shape x, Shape size) {
    PoolAttrs a;
    a.dims = size.rank();
    a.adaptive = true;
    for (size_t d = 0; d < size.size(); ++d) {
      a.size[d] = size[d];
      a.kernel[d] = x[d + 2] / size[d] + 2;
    }
    return Example{x, a};
  };
  return {{{1, 1, 1}, strided({1}, {1}, {0}, {1})},
          {{2, 3, 7}, strided({3}, {2}, {1}, {1})},
          {{1, 2, 33}, strided({4}, {3}, {2}, {2}, true)},
          {{1, 1, 257}, strided({5}, {5}, {0}, {1})},
          {{2, 2, 6, 5}, strided({2, 2}, {2, 2}, {0, 0}, {1, 1})},
          {{1, 3, 7, 8}, strided({3, 2}, {1, 2}, {1, 1}, {2, 3}, false, false)},
          {{2, 1, 5, 7}, strided({3, 3}, {2, 2}, {1, 1}, {1, 1}, true, false)},
          {{2, 1, 5, 6}, strided({2, 3}, {3, 2}, {1, 0}, {1, 1}, true)},
          {{0, 2, 5, 5}, strided({3, 3}, {1, 1}, {0, 0}, {1, 1})},
          {{3, 40, 6, 6}, strided({3, 3}, {2, 2}, {1, 1}, {1, 1})},
          adaptive({2, 3, 7}, {3}),
          adaptive({2, 2, 5, 7}, {1, 1}),
          adaptive({1, 3, 5, 4}, {3, 6}),
          {{1, 2, 4, 3, 5}, strided({2, 2, 3}, {2, 1, 2}, {1, 0, 1}, {1, 1, 1})},
          {{1, 1, 16, 18}, strided({15, 17}, {1, 1}, {0, 0}, {1, 1})},
          {{1, 1, 17, 17}, strided({16, 16}, {1, 1}, {0, 0}, {1, 1})}};
}
// Output shapes need no tensor: the same arithmetic as infer's.
Shape result_shape(const Example& e) {
  Call c{.op = &op::avg_pool, .in = {}, .attrs = Attrs::of(e.a), .out = {}};
  return joined(e.x, output_sizes(c, Meta(e.x, DType::f32, Device::cpu()), e.x));
}
SampleInput taps_of(const Example& e) {
  auto taps = static_cast<double>(e.a.kernel[0] * e.a.kernel[1] * e.a.kernel[2]);
  return {.shape = result_shape(e), .low = 0, .high = taps, .dtype = number_type(e.a), .differentiable = false};
}

}  // namespace

DType number_type(const PoolAttrs& a) {
  int64_t room = a.adaptive ? 0 : std::numeric_limits<uint8_t>::max();
  for (int64_t k : a.kernel) room /= std::max<int64_t>(k, 1);
  return room > 0 ? DType::u8 : DType::i32;
}

PoolGeometry pool_geometry(const PoolAttrs& a, const Shape& x, const Shape& y) {
  PoolGeometry q{x[0] * x[1], {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {}, {1, 1, 1}, a.include_pad, a.adaptive};
  for (size_t d = 0, to = static_cast<size_t>(3 - a.dims); to < 3; ++d, ++to) {
    // Sizes fit, by infer's check; steps that do not are never taken.
    auto narrow = [](int64_t v) { return static_cast<int32_t>(std::min<int64_t>(v, std::numeric_limits<int32_t>::max())); };
    q.in[to] = narrow(x[d + 2]);
    q.out[to] = narrow(y[d + 2]);
    q.kernel[to] = narrow(a.kernel[d]);
    q.stride[to] = narrow(a.stride[d]);
    q.padding[to] = narrow(a.padding[d]);
    q.dilation[to] = narrow(a.dilation[d]);
  }
  return q;
}

namespace op {

constinit OpDef max_pool = {
    .name = "max_pool", .doc = "the largest element of each window; NaN if there is one", .cast = Cast::keep,
    .infer = infer_forward,
    .aux = 1,
    .saves = {.in = 0, .out = 2},
    .backward = [](const Rule& r) -> Tensors { return {call(op::max_pool_scatter, {r.grad(), r.out(1)}, sized(r.as<PoolAttrs>(), r.in_meta().shape))}; },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& e : examples(false)) all.push_back({{{.shape = e.x}}, Attrs::of(e.a)});
      return all;
    },
    .kernel = {run_max_pool}};

constinit OpDef max_pool_gather = {
    .name = "max_pool_gather", .doc = "of each window the element that max_pool chose", .cast = Cast::keep,
    .infer = infer_gather,
    .saves = {.in = 2, .out = 0},
    .backward = [](const Rule& r) -> Tensors { return {call(op::max_pool_scatter, {r.grad(), r.in(1)}, sized(r.as<PoolAttrs>(), r.in_meta().shape)), {}}; },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& e : examples(false)) all.push_back({{{.shape = e.x}, taps_of(e)}, Attrs::of(e.a)});
      return all;
    },
    .kernel = {run_max_pool_gather}};

constinit OpDef max_pool_scatter = {
    .name = "max_pool_scatter", .doc = "each element added to the one that max_pool chose of its window: the gradient of max_pool", .cast = Cast::keep,
    .infer = infer_transpose,
    .saves = {.in = 2, .out = 0},
    .backward = [](const Rule& r) -> Tensors { return {call(op::max_pool_gather, {r.grad(), r.in(1)}, r.attrs()), {}}; },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& e : examples(false)) all.push_back({{{.shape = result_shape(e)}, taps_of(e)}, sized(e.a, e.x)});
      return all;
    },
    .kernel = {run_max_pool_scatter}};

constinit OpDef avg_pool = {
    .name = "avg_pool", .doc = "the mean of each window", .cast = Cast::keep,
    .infer = infer_forward,
    .saves = {},
    .backward = [](const Rule& r) -> Tensors { return {call(op::avg_pool_input, {r.grad()}, sized(r.as<PoolAttrs>(), r.in_meta().shape))}; },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& e : examples(true)) all.push_back({{{.shape = e.x}}, Attrs::of(e.a)});
      return all;
    },
    .kernel = {run_avg_pool}};

constinit OpDef avg_pool_input = {
    .name = "avg_pool_input", .doc = "each element shared out over its window: the transpose and gradient of avg_pool", .cast = Cast::keep,
    .infer = infer_transpose,
    .saves = {},
    .backward = [](const Rule& r) -> Tensors { return {call(op::avg_pool, {r.grad()}, sized(r.as<PoolAttrs>(), r.in_meta().shape))}; },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& e : examples(true)) all.push_back({{{.shape = result_shape(e)}}, sized(e.a, e.x)});
      return all;
    },
    .kernel = {run_avg_pool_input}};

}  // namespace op

std::span<OpDef* const> pool_ops() {
  static constexpr OpDef* all[] = {&op::max_pool, &op::max_pool_gather, &op::max_pool_scatter, &op::avg_pool, &op::avg_pool_input};
  return all;
}

namespace {

Shape sizes(Size s) { return {s}; }
Shape sizes(Size2 s) { return {s.h, s.w}; }
void put(int64_t (&to)[3], const Shape& from) { std::copy(from.begin(), from.end(), to); }

template <class S> PoolAttrs windows(S kernel, std::optional<S> stride, S padding, bool ceil_mode) {
  PoolAttrs a;
  a.dims = sizes(kernel).rank();
  a.ceil_mode = ceil_mode;
  put(a.kernel, sizes(kernel));
  put(a.stride, sizes(stride.value_or(kernel)));
  put(a.padding, sizes(padding));
  return a;
}
template <class S> Tensor max_pool(const char* name, const Tensor& x, S kernel, const MaxPoolOptions<S>& o) {
  HT_CHECK(x.defined(), name, ": x is undefined");
  PoolAttrs a = windows(kernel, o.stride, o.padding, o.ceil_mode);
  put(a.dilation, sizes(o.dilation));
  return call(op::max_pool, {x}, Attrs::of(a));
}
template <class S> Tensor avg_pool(const char* name, const Tensor& x, S kernel, const AvgPoolOptions<S>& o) {
  HT_CHECK(x.defined(), name, ": x is undefined");
  PoolAttrs a = windows(kernel, o.stride, o.padding, o.ceil_mode);
  a.include_pad = o.count_include_pad;
  return call(op::avg_pool, {x}, Attrs::of(a));
}
Tensor adaptive(const OpDef& op, const char* name, const Tensor& x, const Shape& size) {
  HT_CHECK(x.defined(), name, ": x is undefined");
  PoolAttrs a;
  a.dims = size.rank();
  a.adaptive = true;
  put(a.size, size);
  HT_CHECK(x.rank() == a.dims + 2, name, ": expected x of ", a.dims + 2, " dimensions, got ", x.meta());
  bool global = true, empty = false;
  for (size_t d = 0; d < size.size(); ++d) {
    global = global && size[d] == 1;
    empty = empty || x.shape()[d + 2] == 0;
    a.kernel[d] = x.shape()[d + 2] / std::max<int64_t>(size[d], 1) + 2;
  }
  if (&op == &op::avg_pool && global && !empty && is_floating(x.dtype()))  // one mean for each plane
    return reduce::apply<reduce::Mean>(x, {((1u << x.rank()) - 1u) & ~3u, true});
  return call(op, {x}, Attrs::of(a));
}

}  // namespace

Tensor max_pool1d(const Tensor& x, Size kernel, MaxPool1dOptions o) { return max_pool("max_pool1d", x, kernel, o); }
Tensor max_pool2d(const Tensor& x, Size2 kernel, MaxPool2dOptions o) { return max_pool("max_pool2d", x, kernel, o); }
Tensor avg_pool1d(const Tensor& x, Size kernel, AvgPool1dOptions o) { return avg_pool("avg_pool1d", x, kernel, o); }
Tensor avg_pool2d(const Tensor& x, Size2 kernel, AvgPool2dOptions o) { return avg_pool("avg_pool2d", x, kernel, o); }
Tensor adaptive_max_pool1d(const Tensor& x, Size size) { return adaptive(op::max_pool, "adaptive_max_pool1d", x, sizes(size)); }
Tensor adaptive_max_pool2d(const Tensor& x, Size2 size) { return adaptive(op::max_pool, "adaptive_max_pool2d", x, sizes(size)); }
Tensor adaptive_avg_pool1d(const Tensor& x, Size size) { return adaptive(op::avg_pool, "adaptive_avg_pool1d", x, sizes(size)); }
Tensor adaptive_avg_pool2d(const Tensor& x, Size2 size) { return adaptive(op::avg_pool, "adaptive_avg_pool2d", x, sizes(size)); }

}  // namespace halftone
