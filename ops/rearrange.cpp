// Rearrangements on the CPU. Elements move as bits, so one loop serves every dtype of a size.
#include "halftone/ops/rearrange.h"

#include <algorithm>
#include <cstring>

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/shape.h"

namespace halftone {
namespace detail {

PadPlan pad_plan(const PadAttrs& a, const Meta& padded) {
  PadPlan p;
  p.rank = padded.shape.rank();
  p.mode = a.mode;
  for (size_t d = 0; d < padded.shape.size(); ++d) {
    p.dim[d] = {padded.shape[d] - a.before[d] - a.after[d], a.before[d], a.after[d]};
    p.stride[d] = padded.strides[d];
  }
  return p;
}

}  // namespace detail

namespace {

// f(Type<U>) with the unsigned type of a dtype's size.
template <class F> void visit_bits(DType t, F f) {
  switch (size_of(t)) {
    case 1: return f(Type<uint8_t>{});
    case 2: return f(Type<uint16_t>{});
    case 4: return f(Type<uint32_t>{});
    default: return f(Type<uint64_t>{});
  }
}
template <class U> U* bits(const Tensor& t) { return static_cast<U*>(t.raw_data()); }

// Calls f(row, index) for the rows of a shape along its last dimension; the last entry of index is 0.
template <class F> void each_row(const Shape& y, F f) {
  size_t last = y.size() - 1;
  int64_t n = y[last];
  if (y.numel() == 0) return;
  parallel_for(y.numel() / n, std::max<int64_t>(1, parallel_grain / n), [&](int64_t begin, int64_t end) {
    Shape index = Shape::filled(y.rank(), 0);
    int64_t rest = begin;
    for (size_t d = last; d-- > 0;) {
      index[d] = rest % y[d];
      rest /= y[d];
    }
    for (int64_t row = begin; row < end; ++row) {
      f(row, index);
      for (size_t d = last; d-- > 0;) {
        if (++index[d] < y[d]) break;
        index[d] = 0;
      }
    }
  });
}

// ---- pad

void run_pad(const Call& c, std::span<Tensor> out) {
  auto a = c.as<PadAttrs>();
  const Tensor &x = c.in[0], &y = out[0];
  detail::PadPlan plan = detail::pad_plan(a, y.meta());
  size_t last = y.shape().size() - 1;
  int64_t n = y.shape()[last], step = x.strides()[last];
  uint64_t value = 0;
  visit(x.dtype(), [&]<class T>(Type<T>) {
    T v = convert<T>(a.value);
    std::memcpy(&value, &v, sizeof v);
  });
  visit_bits(x.dtype(), [&]<class U>(Type<U>) {
    each_row(y.shape(), [&](int64_t row, const Shape& index) {
      U* to = bits<U>(y) + row * n;
      int64_t at = 0;
      for (size_t d = 0; d < last && at >= 0; ++d) {
        int64_t from = plan.dim[d].source(a.mode, index[d]);
        at = from < 0 ? -1 : at + from * x.strides()[d];
      }
      if (at < 0) {
        std::fill_n(to, n, static_cast<U>(value));
        return;
      }
      const U* from = bits<U>(x) + at;
      const detail::PadDim& inner = plan.dim[last];
      auto padding = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          int64_t j = inner.source(a.mode, i);
          to[i] = j < 0 ? static_cast<U>(value) : from[j * step];
        }
      };
      padding(0, inner.before);
      map_row(from, step, to + inner.before, 1, inner.n, [](U v) { return v; });
      padding(inner.before + inner.n, n);
    });
  });
}

void run_pad_grad(const Call& c, std::span<Tensor> out) {
  detail::PadPlan plan = detail::pad_plan(c.as<PadAttrs>(), c.in[0].meta());
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    const T* g = c.in[0].data<T>();
    T* y = out[0].data<T>();
    parallel_for(out[0].numel(), parallel_grain / 4, [&](int64_t begin, int64_t end) {
      for (int64_t e = begin; e < end; ++e) y[e] = T(plan.sum_of_images<compute_t<T>>(g, e));
    });
  });
}

Metas infer_pad(const Call& c) {
  const Meta& x = c.in[0].meta();
  auto a = c.as<PadAttrs>();
  HT_CHECK(x.shape.rank() > 0, "pad: a 0-d tensor has nothing to pad");
  Shape y = x.shape;
  for (size_t d = 0; d < y.size(); ++d) {
    int64_t most = std::max(a.before[d], a.after[d]);
    HT_CHECK(a.before[d] >= 0 && a.after[d] >= 0, "pad: expected 0 or more elements, got ", a.before[d], " and ", a.after[d]);
    HT_CHECK(a.mode != PadMode::reflect || most == 0 || most < y[d], "pad: reflect adds fewer elements than there are, got ", a.before[d], " and ",
             a.after[d], " for dimension ", d, " of ", x.shape);
    HT_CHECK(a.mode != PadMode::replicate || most == 0 || y[d] > 0, "pad: replicate needs an element, dimension ", d, " of ", x.shape, " has none");
    y[d] = checked_add(y[d], checked_add(a.before[d], a.after[d]));
  }
  return {Meta(y, x.dtype, x.device)};
}

// The part of a padded tensor that was there before.
Tensor inner_part(const Tensor& padded, const PadAttrs& a) {
  Tensor x = padded;
  for (int d = 0; d < padded.rank(); ++d) {
    auto k = static_cast<size_t>(d);
    x = slice(x, d, a.before[k], padded.size(d) - a.after[k]);
  }
  return x;
}

std::vector<Sample> pad_samples(bool grad) {
  std::vector<Sample> all;
  auto add = [&](Shape x, std::initializer_list<std::pair<int64_t, int64_t>> pads, PadMode mode, double value = 0) {
    PadAttrs a;
    size_t d = 0;
    Shape padded = x;
    for (auto [before, after] : pads) {
      a.before[d] = before;
      a.after[d] = after;
      padded[d] += before + after;
      ++d;
    }
    a.value = value;
    a.mode = mode;
    all.push_back({{{.shape = grad ? padded : x}}, Attrs::of(a)});
  };
  using enum PadMode;
  if (!grad) {
    add({1}, {{0, 0}}, constant);
    add({7}, {{2, 1}}, constant, 3);
    add({2, 3}, {{1, 0}, {0, 2}}, constant, 1);
    add({33, 2, 3}, {{0, 1}, {1, 1}, {2, 0}}, constant);
    add({257}, {{3, 300}}, constant);
    add({0, 3}, {{1, 1}, {0, 1}}, constant, 2);
  }
  add({7}, {{6, 6}}, reflect);
  add({2, 3}, {{1, 1}, {2, 0}}, reflect);
  add({33, 2}, {{3, 30}, {0, 1}}, reflect);
  add({2, 3, 4}, {{0, 0}, {1, 2}, {3, 1}}, reflect);
  add({1}, {{2, 3}}, replicate);
  add({257}, {{1, 40}}, replicate);
  add({2, 3}, {{4, 0}, {1, 5}}, replicate);
  add({3, 2, 2}, {{0, 0}, {0, 3}, {2, 1}}, replicate);
  return all;
}

// ---- flip

// A reversed dimension is one with a negative stride, from the last element on.
void run_flip(const Call& c, std::span<Tensor> out) {
  const Tensor& x = c.in[0];
  auto dims = c.as<uint32_t>();
  if (x.numel() == 0) return;
  Strides strides = x.strides();
  int64_t last = 0;
  for (size_t d = 0; d < strides.size(); ++d) {
    if (!(dims >> d & 1u)) continue;
    last += (x.shape()[d] - 1) * strides[d];
    strides[d] = -strides[d];
  }
  visit_bits(x.dtype(), [&]<class U>(Type<U>) {
    const U* from = bits<U>(x) + last;
    U* to = bits<U>(out[0]);
    Rows<2>(x.shape(), {out[0].strides(), strides}).run([&](auto at, auto step, int64_t n) {
      map_row(from + at[1], step[1], to + at[0], step[0], n, [](U v) { return v; });
    });
  });
}

// ---- roll

struct Roll { int32_t dim; int64_t shift; };  // shift in [0, size)

void run_roll(const Call& c, std::span<Tensor> out) {
  auto r = c.as<Roll>();
  const Tensor& x = c.in[0];
  int64_t n = x.size(r.dim);
  auto part = [&](const Tensor& t, int64_t begin, int64_t length) {
    Shape s = t.shape();
    s[static_cast<size_t>(r.dim)] = length;
    return t.as_strided(s, t.strides(), t.meta().offset + begin * t.strides()[static_cast<size_t>(r.dim)]);
  };
  if (x.numel() == 0) return;
  call_all(op::copy, {part(out[0], r.shift, n - r.shift), part(x, 0, n - r.shift)});
  if (r.shift > 0) call_all(op::copy, {part(out[0], 0, r.shift), part(x, n - r.shift, r.shift)});
}

// ---- triangles

template <bool upper> void run_triangle(const Call& c, std::span<Tensor> out) {
  const Tensor &x = c.in[0], &y = out[0];
  auto diagonal = c.as<int64_t>();
  size_t last = y.shape().size() - 1;
  int64_t n = y.shape()[last], step = x.strides()[last];
  visit_bits(x.dtype(), [&]<class U>(Type<U>) {
    each_row(y.shape(), [&](int64_t row, const Shape& index) {
      const U* from = bits<U>(x);
      for (size_t d = 0; d < last; ++d) from += index[d] * x.strides()[d];
      int64_t edge = std::clamp<int64_t>(index[last - 1] + diagonal + (upper ? 0 : 1), 0, n);  // the first column of the other side
      U* to = bits<U>(y) + row * n;
      if constexpr (upper) {
        std::fill_n(to, edge, U(0));
        map_row(from + edge * step, step, to + edge, 1, n - edge, [](U v) { return v; });
      } else {
        map_row(from, step, to, 1, edge, [](U v) { return v; });
        std::fill_n(to + edge, n - edge, U(0));
      }
    });
  });
}
Metas infer_triangle(const Call& c) {
  const Meta& x = c.in[0].meta();
  HT_CHECK(x.shape.rank() >= 2, c.op->name, ": expected at least two dimensions, got ", x);
  return {Meta(x.shape, x.dtype, x.device)};
}
std::vector<Sample> triangle_samples() {
  std::vector<Sample> all;
  for (auto& [shape, diagonal] : std::vector<std::pair<Shape, int64_t>>{
           {{1, 1}, 0}, {{3, 3}, 0}, {{2, 5}, 1}, {{5, 2}, -2}, {{2, 3, 4}, -1}, {{33, 7}, 2}, {{257, 3}, -250}, {{0, 3}, 0}, {{3, 4}, 9}, {{3, 4}, -9}})
    all.push_back({{{.shape = shape}}, Attrs::of(diagonal)});
  return all;
}

}  // namespace

namespace op {

constinit OpDef pad = {
    .name = "pad", .doc = "x with elements around it: a constant, its mirror image, or its edge", .cast = Cast::keep,
    .infer = infer_pad,
    .backward = [](const Rule& r) -> Tensors {
      auto a = r.as<PadAttrs>();
      return {a.mode == PadMode::constant ? inner_part(r.grad(), a) : call(op::pad_grad, {r.grad()}, r.attrs())};
    },
    .samples = [] { return pad_samples(false); },
    .kernel = {run_pad}};

constinit OpDef pad_grad = {
    .name = "pad_grad", .doc = "the gradient of a mirrored or repeated padding: sums of what came from each element", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      auto a = c.as<PadAttrs>();
      Shape x = c.in[0].shape();
      for (size_t d = 0; d < x.size(); ++d) {
        x[d] -= a.before[d] + a.after[d];
        HT_CHECK(x[d] >= 0, "pad_grad: ", c.in[0].meta(), " is smaller than its padding");
      }
      return {Meta(x, c.in[0].dtype(), c.in[0].device())};
    },
    .backward = [](const Rule& r) -> Tensors { return {call(op::pad, {r.grad()}, r.attrs())}; },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return pad_samples(true); },
    .kernel = {run_pad_grad}};

constinit OpDef flip = {
    .name = "flip", .doc = "the order of elements reversed along dimensions", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas { return {Meta(c.in[0].shape(), c.in[0].dtype(), c.in[0].device())}; },
    .backward = [](const Rule& r) -> Tensors { return {call(op::flip, {r.grad()}, r.attrs())}; },
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& [shape, dims] : std::vector<std::pair<Shape, uint32_t>>{
               {{1}, 1}, {{7}, 1}, {{2, 3}, 1}, {{2, 3}, 2}, {{2, 3, 4}, 5}, {{33, 5}, 3}, {{257}, 1}, {{0, 3}, 2}, {{3, 4}, 0}})
        all.push_back({{{.shape = shape}}, Attrs::of(dims)});
      return all;
    },
    .kernel = {run_flip}};

constinit OpDef roll = {
    .name = "roll", .doc = "elements of a dimension shifted around its end", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas { return {Meta(c.in[0].shape(), c.in[0].dtype(), c.in[0].device())}; },
    .backward = [](const Rule& r) -> Tensors {
      auto a = r.as<Roll>();
      int64_t n = r.in_meta().shape[static_cast<size_t>(a.dim)];
      return {call(op::roll, {r.grad()}, Attrs::of(Roll{a.dim, a.shift == 0 ? 0 : n - a.shift}))};
    },
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& [shape, r] : std::vector<std::pair<Shape, Roll>>{
               {{1}, {0, 0}}, {{7}, {0, 3}}, {{2, 3}, {0, 1}}, {{2, 3}, {1, 2}}, {{2, 3, 4}, {1, 1}}, {{33, 5}, {0, 32}}, {{257}, {0, 100}}, {{3, 0}, {0, 1}}, {{4}, {0, 0}}})
        all.push_back({{{.shape = shape}}, Attrs::of(r)});
      return all;
    },
    .kernel = {run_roll, run_roll}};

constinit OpDef tril = {
    .name = "tril", .doc = "elements on and below a diagonal, 0 above", .cast = Cast::keep,
    .infer = infer_triangle,
    .backward = [](const Rule& r) -> Tensors { return {call(op::tril, {r.grad()}, r.attrs())}; },
    .samples = triangle_samples,
    .kernel = {run_triangle<false>}};

constinit OpDef triu = {
    .name = "triu", .doc = "elements on and above a diagonal, 0 below", .cast = Cast::keep,
    .infer = infer_triangle,
    .backward = [](const Rule& r) -> Tensors { return {call(op::triu, {r.grad()}, r.attrs())}; },
    .samples = triangle_samples,
    .kernel = {run_triangle<true>}};

}  // namespace op

std::span<OpDef* const> rearrange_ops() {
  static constexpr OpDef* all[] = {&op::pad, &op::pad_grad, &op::flip, &op::roll, &op::tril, &op::triu};
  return all;
}

Tensor pad(const Tensor& x, const std::vector<int64_t>& pads, PadOptions o) {
  HT_CHECK(x.defined(), "pad: x is undefined");
  HT_CHECK(pads.size() % 2 == 0 && pads.size() / 2 <= x.shape().size(), "pad: expected {before, after} for at most ", x.rank(),
           " dimensions, got ", pads.size(), " numbers");
  PadAttrs a;
  a.value = o.value;
  a.mode = o.mode;
  Tensor inner = x;
  bool any = false;
  for (size_t k = 0; k < pads.size() / 2; ++k) {
    size_t d = x.shape().size() - 1 - k;
    int64_t before = pads[2 * k], after = pads[2 * k + 1], n = x.shape()[d];
    int64_t from = std::max<int64_t>(0, -std::max(before, -n)), to = n - std::max<int64_t>(0, -std::max(after, -n));
    HT_CHECK(before >= -n && after >= -n && from <= to, "pad: ", before, " and ", after, " take more elements than dimension ", d, " of ", x.shape(), " has");
    inner = slice(inner, static_cast<int>(d), from, to);
    a.before[d] = std::max<int64_t>(before, 0);
    a.after[d] = std::max<int64_t>(after, 0);
    any |= a.before[d] > 0 || a.after[d] > 0;
  }
  return any ? call(op::pad, {inner}, Attrs::of(a)) : inner;
}

Tensor flip(const Tensor& x, const Shape& dims) {
  HT_CHECK(x.defined(), "flip: x is undefined");
  uint32_t bits = 0;
  for (int64_t dim : dims) {
    uint32_t bit = 1u << normalize_dim("flip", dim, x.rank());
    HT_CHECK(!(bits & bit), "flip: dim ", dim, " is given twice");
    bits |= bit;
  }
  return x.rank() == 0 ? x : call(op::flip, {x}, Attrs::of(bits));
}

Tensor roll(const Tensor& x, const Shape& shifts, const Shape& dims) {
  HT_CHECK(x.defined(), "roll: x is undefined");
  HT_CHECK(shifts.rank() == dims.rank(), "roll: expected one shift for each dimension, got shifts ", shifts, " and dims ", dims);
  Tensor y = x;
  for (size_t i = 0; i < dims.size() && x.rank() > 0; ++i) {
    int d = normalize_dim("roll", dims[i], x.rank());
    int64_t n = std::max<int64_t>(x.size(d), 1), shift = shifts[i] % n;
    y = call(op::roll, {y}, Attrs::of(Roll{d, shift < 0 ? shift + n : shift}));
  }
  return y;
}

Tensor repeat(const Tensor& x, const Shape& repeats) {
  HT_CHECK(x.defined(), "repeat: x is undefined");
  HT_CHECK(repeats.rank() >= x.rank(), "repeat: expected at least ", x.rank(), " repeats for ", x.shape(), ", got ", repeats);
  Tensor y = x;
  while (y.rank() < repeats.rank()) y = unsqueeze(y, 0);
  // The innermost first: what is copied again is small.
  for (int d = repeats.rank() - 1; d >= 0; --d) {
    auto k = static_cast<size_t>(d);
    HT_CHECK(repeats[k] >= 0, "repeat: expected repeats of 0 or more, got ", repeats);
    if (repeats[k] == 1) continue;
    Shape joined = y.shape(), apart = joined;
    joined[k] = checked_mul(joined[k], repeats[k]);
    if (y.rank() < max_rank) {
      apart.insert(d, repeats[k]);
      y = reshape(expand(unsqueeze(y, d), apart), joined);
    } else {
      std::vector<Tensor> parts(static_cast<size_t>(repeats[k]), y);
      y = parts.empty() ? slice(y, d, 0, 0) : cat(parts, d);
    }
  }
  return y;
}

namespace {
Tensor triangle(const OpDef& op, const Tensor& x, int64_t diagonal) {
  HT_CHECK(x.defined(), op.name, ": x is undefined");
  constexpr int64_t far = int64_t{1} << 62;
  return call(op, {x}, Attrs::of(std::clamp(diagonal, -far, far)));
}
}  // namespace
Tensor tril(const Tensor& x, int64_t diagonal) { return triangle(op::tril, x, diagonal); }
Tensor triu(const Tensor& x, int64_t diagonal) { return triangle(op::triu, x, diagonal); }

}  // namespace halftone
