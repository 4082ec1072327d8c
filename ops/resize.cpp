// Resizing: shapes, derivatives, CPU kernels. It is linear, so that its derivative is its transpose.
#include "halftone/ops/resize.h"

#include <algorithm>

#include "halftone/ops/all.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/shape.h"

namespace halftone {
namespace {

// Calls f(output's place in the plane, its taps) for each output of a plane.
template <class F> void each_output(const ResizeGeometry& q, F f) {
  for (int64_t a = 0, at = 0; a < q.out[0]; ++a)
    for (int64_t b = 0; b < q.out[1]; ++b, ++at) f(at, q.tap(0, a), q.tap(1, b));
}
// Calls f(place in the input plane, weight) for the elements of an output.
template <class F> void each_element(const ResizeGeometry& q, const ResizeTap& u, const ResizeTap& v, F f) {
  f(u.low * q.in[1] + v.low, (1 - u.part) * (1 - v.part));
  if (q.options.mode == Interpolation::nearest) return;
  f(u.low * q.in[1] + v.high, (1 - u.part) * v.part);
  f(u.high * q.in[1] + v.low, u.part * (1 - v.part));
  f(u.high * q.in[1] + v.high, u.part * v.part);
}
template <class F> void each_plane(const ResizeGeometry& q, F f) {
  parallel_for(q.planes, std::max<int64_t>(1, parallel_grain / std::max<int64_t>(1, q.in[0] * q.in[1] + q.out[0] * q.out[1])), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) f(p);
  });
}

void run_resize(const Call& c, std::span<Tensor> out) {
  ResizeGeometry q = resize_geometry(c.as<ResizeAttrs>(), c.in[0].shape(), out[0].shape());
  Tensor input = c.in[0].contiguous();
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using A = accumulate_t<T>;
    each_plane(q, [&, x = input.data<T>(), y = out[0].data<T>()](int64_t p) {
      each_output(q, [&](int64_t at, const ResizeTap& u, const ResizeTap& v) {
        A sum = 0;
        each_element(q, u, v, [&](int64_t i, double weight) { sum += static_cast<A>(weight) * A(x[p * q.in[0] * q.in[1] + i]); });
        y[p * q.out[0] * q.out[1] + at] = T(sum);
      });
    });
  });
}

void run_resize_input(const Call& c, std::span<Tensor> out) {
  ResizeGeometry q = resize_geometry(c.as<ResizeAttrs>(), out[0].shape(), c.in[0].shape());
  Tensor gradient = c.in[0].contiguous();
  visit<floating_types>(gradient.dtype(), [&]<class T>(Type<T>) {
    using A = accumulate_t<T>;
    each_plane(q, [&, g = gradient.data<T>(), x = out[0].data<T>()](int64_t p) {
      std::vector<A> plane(static_cast<size_t>(q.in[0] * q.in[1]));
      each_output(q, [&](int64_t at, const ResizeTap& u, const ResizeTap& v) {
        A value = A(g[p * q.out[0] * q.out[1] + at]);
        each_element(q, u, v, [&](int64_t i, double weight) { plane[static_cast<size_t>(i)] += static_cast<A>(weight) * value; });
      });
      for (size_t i = 0; i < plane.size(); ++i) x[p * q.in[0] * q.in[1] + static_cast<int64_t>(i)] = T(plane[i]);
    });
  });
}

Metas infer(const Call& c) {
  const Meta& x = c.in[0].meta();
  auto a = c.as<ResizeAttrs>();
  HT_CHECK(is_floating(x.dtype) && x.shape.rank() == 4, c.op->name, ": expected x [n, channels, h, w] of a floating dtype, got ", x);
  HT_CHECK(x.shape[2] >= 1 && x.shape[3] >= 1 && a.size[0] >= 1 && a.size[1] >= 1, c.op->name, ": expected sizes of 1 or more, got ", x.shape[2], " by ",
           x.shape[3], " to ", a.size[0], " by ", a.size[1]);
  return {Meta({x.shape[0], x.shape[1], a.size[0], a.size[1]}, x.dtype, x.device)};
}

// The call's transpose, whose result has the input's size.
Attrs transposed(const Rule& r) {
  auto a = r.as<ResizeAttrs>();
  a.size[0] = r.in_meta().shape[2];
  a.size[1] = r.in_meta().shape[3];
  return Attrs::of(a);
}

std::vector<Sample> samples(bool transpose) {
  std::vector<Sample> all;
  auto add = [&](Shape x, int64_t h, int64_t w, ResizeOptions o) {
    ResizeAttrs a{{h, w}, o};
    if (transpose) {
      std::swap(x[2], a.size[0]);
      std::swap(x[3], a.size[1]);
    }
    all.push_back({{{.shape = x}}, Attrs::of(a)});
  };
  constexpr ResizeOptions edges{Interpolation::bilinear}, corners{Interpolation::bilinear, true};
  add({1, 1, 1, 1}, 1, 1, {});
  add({2, 3, 3, 4}, 6, 8, {});
  add({1, 2, 7, 5}, 3, 9, {});
  add({2, 2, 3, 4}, 6, 8, edges);
  add({1, 2, 7, 5}, 3, 9, edges);
  add({2, 2, 3, 4}, 5, 7, corners);
  add({1, 2, 7, 5}, 1, 2, corners);
  add({1, 3, 1, 33}, 2, 17, corners);
  add({0, 2, 3, 3}, 6, 6, edges);
  add({3, 1, 1, 257}, 1, 70, edges);
  add({1, 1, 1, 1}, 4, 3, corners);
  return all;
}

}  // namespace

ResizeGeometry resize_geometry(const ResizeAttrs& a, const Shape& x, const Shape& y) {
  return {x[0] * x[1], {x[2], x[3]}, {y[2], y[3]}, a.options};
}

namespace op {

constinit OpDef resize = {
    .name = "resize", .doc = "an image at another size, by the nearest element or bilinear interpolation", .cast = Cast::keep,
    .infer = infer,
    .backward = [](const Rule& r) -> Tensors { return {call(op::resize_input, {r.grad()}, transposed(r))}; },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return samples(false); },
    .kernel = {run_resize}};

constinit OpDef resize_input = {
    .name = "resize_input", .doc = "the transpose and gradient of resize", .cast = Cast::keep,
    .infer = infer,
    .backward = [](const Rule& r) -> Tensors { return {call(op::resize, {r.grad()}, transposed(r))}; },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return samples(true); },
    .kernel = {run_resize_input}};

}  // namespace op

std::span<OpDef* const> resize_ops() {
  static constexpr OpDef* all[] = {&op::resize, &op::resize_input};
  return all;
}

Tensor resize(const Tensor& x, Size2 size, ResizeOptions o) {
  HT_CHECK(x.defined(), "resize: x is undefined");
  return call(op::resize, {x}, Attrs::of(ResizeAttrs{{size.h, size.w}, o}));
}

Tensor pixel_shuffle(const Tensor& x, Size r) {
  HT_CHECK(x.defined() && x.rank() == 4 && r >= 1 && x.size(1) % (r * r) == 0, "pixel_shuffle: expected x [n, channels * ", r.value, "^2, h, w]",
           x.defined() ? text::cat(", got ", x.meta()) : "");
  int64_t n = x.size(0), c = x.size(1) / (r * r), h = x.size(2), w = x.size(3);
  return permute(reshape(x, {n, c, r, r, h, w}), {0, 1, 4, 2, 5, 3}).reshape({n, c, h * r, w * r});
}
Tensor pixel_unshuffle(const Tensor& x, Size r) {
  HT_CHECK(x.defined() && x.rank() == 4 && r >= 1 && x.size(2) % r == 0 && x.size(3) % r == 0, "pixel_unshuffle: expected x [n, channels, h * ", r.value,
           ", w * ", r.value, "]", x.defined() ? text::cat(", got ", x.meta()) : "");
  int64_t n = x.size(0), c = x.size(1), h = x.size(2) / r, w = x.size(3) / r;
  return permute(reshape(x, {n, c, h, r, w, r}), {0, 1, 3, 5, 2, 4}).reshape({n, c * r * r, h, w});
}

}  // namespace halftone
