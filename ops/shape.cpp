// View operators compute strides; cat and the scatters copy.
#include "halftone/ops/shape.h"

#include <algorithm>

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/reduce.h"

namespace halftone {
namespace {

Meta with_layout(const Meta& x, const Shape& shape, const Strides& strides, int64_t offset) {
  Meta m = x;
  m.shape = shape;
  m.strides = strides;
  m.offset = offset;
  return m;
}

struct Slice { Shape whole; int32_t dim; int64_t begin, length, step; };

// The strides with which `x` can be seen as `shape`; nothing when that takes a copy. Splits x into runs of dimensions
// that are contiguous with each other; each run must be covered by whole new dimensions.
std::optional<Strides> view_strides(const Meta& x, const Shape& shape) {
  if (shape.numel() == 0) return contiguous_strides(shape);
  Strides result = Shape::filled(shape.rank(), 1);
  size_t next = shape.size();
  for (size_t i = x.shape.size(); i > 0;) {
    int64_t run = 1, stride = x.strides[i - 1];
    for (bool first = true; i > 0 && (first || x.strides[i - 1] == stride * run || x.shape[i - 1] == 1); first = false) run *= x.shape[--i];
    int64_t covered = 1;
    while (next > 0 && covered < run) {
      if (run % (covered * shape[next - 1]) != 0) return {};
      result[--next] = stride * covered;
      covered *= shape[next];
    }
    if (covered != run) return {};
  }
  return result;  // what is left of `shape` are ones
}

Shape resolve(const Tensor& x, const Shape& shape) {
  Shape s = shape;
  int64_t known = 1, unknown = -1;
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] >= 0) { known = checked_mul(known, s[i]); continue; }
    HT_CHECK(s[i] == -1 && unknown < 0, "view: expected sizes of 0 or more and at most one -1, got ", shape);
    unknown = static_cast<int64_t>(i);
  }
  if (unknown >= 0) {
    HT_CHECK(known > 0 && x.numel() % known == 0, "view: ", x.shape(), " has ", x.numel(), " elements, which ", shape, " cannot hold");
    s[static_cast<size_t>(unknown)] = x.numel() / known;
  }
  HT_CHECK(s.numel() == x.numel(), "view: ", x.shape(), " has ", x.numel(), " elements, ", shape, " has ", s.numel());
  return s;
}

struct Parts { Shape sizes; int32_t dim; };

// Parts that lie one after the other in one storage, seen as the whole; undefined when they do not.
Tensor neighbours(const Tensors& parts, const Shape& whole, size_t dim) {
  int64_t offset = parts[0].meta().offset;
  for (const Tensor& t : parts) {
    if (t.storage() != parts[0].storage() || t.strides() != parts[0].strides() || t.meta().offset != offset) return {};
    offset += t.shape()[dim] * t.strides()[dim];
  }
  return parts[0].as_strided(whole, parts[0].strides(), parts[0].meta().offset);
}

// The gradients of parts, with zeros for those that have none.
Tensors part_gradients(const Rule& r) {
  auto p = r.as<Parts>();
  Tensors grads;
  for (size_t i = 0; i < p.sizes.size(); ++i) {
    Shape shape = r.in_meta().shape;
    shape[static_cast<size_t>(p.dim)] = p.sizes[i];
    grads.push_back(r.grad(i).defined() ? r.grad(i) : zeros(shape, {.dtype = r.in_meta().dtype, .device = r.in_meta().device}));
  }
  return grads;
}

struct Joined { int32_t dim; };
void run_cat(const Call& c, std::span<Tensor> out) {
  int64_t at = 0, dim = c.as<Joined>().dim;
  for (auto& x : c.in) {
    const Meta& y = out[0].meta();
    if (x.numel() > 0) call_all(op::copy, {out[0].as_strided(x.shape(), y.strides, y.offset + at * y.strides[static_cast<size_t>(dim)]), x});
    at += x.size(dim);
  }
}
void run_slice_scatter(const Call& c, std::span<Tensor> out) {
  Slice s = c.as<Slice>();
  call_all(op::fill, {out[0]}, Attrs::of(Scalar(0)));
  auto d = static_cast<size_t>(s.dim);
  Strides strides = out[0].strides();
  int64_t offset = out[0].meta().offset + s.begin * strides[d];
  strides[d] *= s.step;
  if (c.in[0].numel() > 0) call_all(op::copy, {out[0].as_strided(c.in[0].shape(), strides, offset), c.in[0]});
}

struct Diagonal { Shape whole; int64_t offset; int32_t dim1, dim2; };

// The layout of a diagonal of x.
Meta diagonal_of(const Meta& x, const Diagonal& a) {
  auto i = static_cast<size_t>(a.dim1), j = static_cast<size_t>(a.dim2);
  int64_t down = std::max<int64_t>(-a.offset, 0), right = std::max<int64_t>(a.offset, 0);
  int64_t length = std::max<int64_t>(0, std::min(x.shape[i] - std::min(down, x.shape[i]), x.shape[j] - std::min(right, x.shape[j])));
  Meta m = x;
  if (length > 0) m.offset += down * x.strides[i] + right * x.strides[j];
  for (int d : {std::max(a.dim1, a.dim2), std::min(a.dim1, a.dim2)}) {
    m.shape.erase(d);
    m.strides.erase(d);
  }
  m.shape.push_back(length);
  m.strides.push_back(x.strides[i] + x.strides[j]);
  return m;
}
void run_diagonal_scatter(const Call& c, std::span<Tensor> out) {
  call_all(op::fill, {out[0]}, Attrs::of(Scalar(0)));
  Meta m = diagonal_of(out[0].meta(), c.as<Diagonal>());
  if (m.shape.numel() > 0) call_all(op::copy, {out[0].as_strided(m.shape, m.strides, m.offset), c.in[0]});
}
std::vector<Sample> diagonal_samples(bool scatter) {
  std::vector<Sample> all;
  for (auto [whole, offset, dim1, dim2] : std::initializer_list<Diagonal>{
           {{3, 3}, 0, 0, 1}, {{2, 5}, 1, 0, 1}, {{5, 2}, -2, 0, 1}, {{1, 1}, 0, 0, 1}, {{3, 4}, 9, 0, 1}, {{2, 3, 4}, 0, 1, 2},
           {{4, 2, 3}, 1, 2, 0}, {{33, 7}, 0, 1, 0}, {{257, 1}, -256, 0, 1}, {{0, 3}, 0, 0, 1}}) {
    Diagonal a{whole, offset, dim1, dim2};
    all.push_back({{{.shape = scatter ? diagonal_of(Meta(whole, DType::f32, {}), a).shape : whole}}, Attrs::of(a)});
  }
  return all;
}

}  // namespace

namespace op {

constinit OpDef expand = {
    .name = "expand", .doc = "x broadcast to a shape without a copy", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& x = c.in[0].meta();
      Shape s = c.as<Shape>();
      HT_CHECK(s.rank() >= x.shape.rank(), "expand: cannot expand ", x.shape, " to ", s);
      Strides strides = Shape::filled(s.rank(), 0);
      size_t lead = s.size() - x.shape.size();
      for (size_t i = lead; i < s.size(); ++i) {
        HT_CHECK(x.shape[i - lead] == s[i] || x.shape[i - lead] == 1, "expand: cannot expand ", x.shape, " to ", s);
        strides[i] = x.shape[i - lead] == s[i] ? x.strides[i - lead] : 0;
      }
      return {with_layout(x, s, strides, x.offset)};
    },
    .view = true,
    .backward = [](const Rule& r) -> Tensors { return {sum_to(r.grad(), r.in_meta().shape)}; },
    .samples = []() -> std::vector<Sample> {
      return {{{{.shape = {3}}}, Attrs::of(Shape{2, 3})}, {{{.shape = {2, 1}}}, Attrs::of(Shape{2, 3})},
              {{{.shape = {}}}, Attrs::of(Shape{4})}, {{{.shape = {1}}}, Attrs::of(Shape{0})},
              {{{.shape = {1, 3, 1}}}, Attrs::of(Shape{5, 2, 3, 4})}, {{{.shape = {2, 3}}}, Attrs::of(Shape{2, 3})},
              {{{.shape = {1, 1}}}, Attrs::of(Shape{7, 33})}, {{{.shape = {33, 1}}}, Attrs::of(Shape{33, 17})}};
    }};

constinit OpDef permute = {
    .name = "permute", .doc = "x with its dimensions in another order", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& x = c.in[0].meta();
      Shape order = c.as<Shape>(), shape = order, strides = order;
      unsigned seen = 0;
      for (size_t i = 0; i < order.size(); ++i) seen |= order[i] >= 0 && order[i] < 8 ? 1u << order[i] : 0u;
      HT_CHECK(order.rank() == x.shape.rank() && seen == (1u << x.shape.rank()) - 1u, "permute: expected each dimension of ", x.shape,
               " once, got ", order);
      for (size_t i = 0; i < order.size(); ++i) {
        shape[i] = x.shape[static_cast<size_t>(order[i])];
        strides[i] = x.strides[static_cast<size_t>(order[i])];
      }
      return {with_layout(x, shape, strides, x.offset)};
    },
    .view = true,
    .backward = [](const Rule& r) -> Tensors {
      Shape order = r.as<Shape>(), inverse = order;
      for (size_t i = 0; i < order.size(); ++i) inverse[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
      return {halftone::permute(r.grad(), inverse)};
    },
    .samples = []() -> std::vector<Sample> {
      return {{{{.shape = {2, 3}}}, Attrs::of(Shape{1, 0})}, {{{.shape = {2, 3, 4}}}, Attrs::of(Shape{2, 0, 1})},
              {{{.shape = {}}}, Attrs::of(Shape{})}, {{{.shape = {5}}}, Attrs::of(Shape{0})},
              {{{.shape = {0, 3}}}, Attrs::of(Shape{1, 0})}, {{{.shape = {33, 7}}}, Attrs::of(Shape{1, 0})},
              {{{.shape = {1, 4, 1, 2}}}, Attrs::of(Shape{3, 1, 0, 2})}, {{{.shape = {2, 3, 4}}}, Attrs::of(Shape{0, 1, 2})}};
    }};

constinit OpDef slice = {
    .name = "slice", .doc = "every step-th element of one dimension, from begin to below end", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& x = c.in[0].meta();
      Slice s = c.as<Slice>();
      auto d = static_cast<size_t>(s.dim);
      Meta m = x;
      m.offset = checked_add(x.offset, checked_mul(s.begin, x.strides[d]));
      m.shape[d] = s.length;
      m.strides[d] = checked_mul(x.strides[d], s.step);
      return {m};
    },
    .view = true,
    .backward = [](const Rule& r) -> Tensors {
      Slice s = r.as<Slice>();
      return {halftone::slice_scatter(r.grad(), r.in_meta().shape, s.dim, s.begin, s.step)};
    },
    .samples = []() -> std::vector<Sample> {
      auto sample = [](Shape x, int dim, int64_t begin, int64_t length, int64_t step) {
        return Sample{{{.shape = x}}, Attrs::of(Slice{x, dim, begin, length, step})};
      };
      return {sample({5}, 0, 1, 3, 1), sample({4, 6}, 1, 1, 3, 2), sample({4, 6}, 0, 0, 4, 1), sample({33}, 0, 32, 1, 1),
              sample({257}, 0, 3, 50, 5), sample({2, 3, 4}, 1, 2, 1, 7), sample({3, 4}, 1, 4, 0, 1), sample({1, 7}, 1, 0, 4, 2), sample({4}, 0, 0, 0, 2)};
    }};

constinit OpDef split = {
    .name = "split", .doc = "parts of a dimension, one after the other", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      auto p = c.as<Parts>();
      auto d = static_cast<size_t>(p.dim);
      Metas parts;
      Meta m = c.in[0].meta();
      for (int64_t n : p.sizes) {
        m.shape[d] = n;
        parts.push_back(m);
        m.offset = checked_add(m.offset, checked_mul(n, m.strides[d]));
      }
      return parts;
    },
    .view = true,
    .backward = [](const Rule& r) -> Tensors {
      Tensors grads = part_gradients(r);
      return {halftone::cat(std::vector<Tensor>(grads.begin(), grads.end()), r.as<Parts>().dim)};
    },
    // Whoever took apart what he was given may have put its gradient together again.
    .fused_backward = [](const Rule& r) -> Tensors {
      Tensors grads = part_gradients(r);
      int dim = r.as<Parts>().dim;
      Tensor whole = neighbours(grads, r.in_meta().shape, static_cast<size_t>(dim));
      return {whole.defined() ? whole : halftone::cat(std::vector<Tensor>(grads.begin(), grads.end()), dim)};
    },
    .samples = []() -> std::vector<Sample> {
      auto sample = [](Shape x, int dim, Shape sizes) { return Sample{{{.shape = x}}, Attrs::of(Parts{sizes, dim})}; };
      return {sample({5}, 0, {2, 3}), sample({4, 6}, 1, {2, 2, 2}), sample({4, 6}, 0, {1, 0, 3}), sample({33, 2}, 0, {32, 1}), sample({257}, 0, {100, 157}),
              sample({2, 3, 4}, 1, {1, 1, 1}), sample({0, 4}, 1, {3, 1}), sample({9}, 0, {1, 1, 1, 1, 1, 1, 1, 2})};
    }};

constinit OpDef slice_scatter = {
    .name = "slice_scatter", .doc = "zeros with x written into a slice: the gradient of slice", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      Slice s = c.as<Slice>();
      auto d = static_cast<size_t>(s.dim);
      Shape expected = s.whole;
      expected[d] = s.length;
      HT_CHECK(c.in[0].shape() == expected && s.begin >= 0 && s.step > 0 && (s.length == 0 || s.begin + (s.length - 1) * s.step < s.whole[d]),
               "slice_scatter: ", c.in[0].shape(), " does not fit into ", s.whole, " along dimension ", s.dim, " from ", s.begin, " in steps of ", s.step);
      return {Meta(s.whole, c.in[0].dtype(), c.in[0].device())};
    },
    .backward = [](const Rule& r) -> Tensors {
      Slice s = r.as<Slice>();
      return {halftone::slice(r.grad(), s.dim, s.begin, s.length == 0 ? s.begin : s.begin + (s.length - 1) * s.step + 1, s.step)};
    },
    .samples = []() -> std::vector<Sample> {
      auto sample = [](Shape part, Shape whole, int dim, int64_t begin, int64_t step) {
        return Sample{{{.shape = part}}, Attrs::of(Slice{whole, dim, begin, part[static_cast<size_t>(dim)], step})};
      };
      return {sample({3}, {5}, 0, 1, 1), sample({4, 3}, {4, 6}, 1, 1, 2), sample({4, 6}, {4, 6}, 0, 0, 1), sample({1}, {33}, 0, 32, 1),
              sample({50}, {257}, 0, 3, 5), sample({2, 1, 4}, {2, 3, 4}, 1, 2, 7), sample({3, 1}, {3, 4}, 1, 3, 1), sample({1, 4}, {1, 7}, 1, 0, 2)};
    },
    .kernel = {run_slice_scatter, run_slice_scatter}};

constinit OpDef squeeze = {
    .name = "squeeze", .doc = "x without one dimension of size 1", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      Meta m = c.in[0].meta();
      int dim = c.as<int>();
      HT_CHECK(m.shape.rank() > 0 && m.shape[static_cast<size_t>(dim)] == 1, "squeeze: dimension ", dim, " of ", m.shape, " is not of size 1");
      m.shape.erase(dim);
      m.strides.erase(dim);
      return {m};
    },
    .view = true,
    .backward = [](const Rule& r) -> Tensors { return {halftone::unsqueeze(r.grad(), r.as<int>())}; },
    .samples = []() -> std::vector<Sample> {
      return {{{{.shape = {1}}}, Attrs::of(0)}, {{{.shape = {1, 3}}}, Attrs::of(0)}, {{{.shape = {3, 1}}}, Attrs::of(1)},
              {{{.shape = {2, 1, 3}}}, Attrs::of(1)}, {{{.shape = {0, 1}}}, Attrs::of(1)}, {{{.shape = {1, 1}}}, Attrs::of(0)},
              {{{.shape = {33, 1}}}, Attrs::of(1)}, {{{.shape = {1, 257}}}, Attrs::of(0)}};
    }};

constinit OpDef unsqueeze = {
    .name = "unsqueeze", .doc = "x with a new dimension of size 1", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      Meta m = c.in[0].meta();
      int dim = c.as<int>();
      int64_t stride = dim < m.shape.rank() ? m.shape[static_cast<size_t>(dim)] * m.strides[static_cast<size_t>(dim)] : 1;
      m.shape.insert(dim, 1);
      m.strides.insert(dim, stride);
      return {m};
    },
    .view = true,
    .backward = [](const Rule& r) -> Tensors { return {halftone::squeeze(r.grad(), r.as<int>())}; },
    .samples = []() -> std::vector<Sample> {
      return {{{{.shape = {}}}, Attrs::of(0)}, {{{.shape = {3}}}, Attrs::of(0)}, {{{.shape = {3}}}, Attrs::of(1)},
              {{{.shape = {2, 3}}}, Attrs::of(1)}, {{{.shape = {2, 3}}}, Attrs::of(2)}, {{{.shape = {0, 4}}}, Attrs::of(0)},
              {{{.shape = {33}}}, Attrs::of(1)}, {{{.shape = {257}}}, Attrs::of(0)}};
    }};

constinit OpDef view = {
    .name = "view", .doc = "the same elements in another shape, without a copy", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      Shape s = c.as<Shape>();
      auto strides = view_strides(c.in[0].meta(), s);
      HT_CHECK(strides, "view: ", c.in[0].shape(), " with strides ", c.in[0].strides(), " cannot be seen as ", s, " without a copy; use reshape");
      return {with_layout(c.in[0].meta(), s, *strides, c.in[0].meta().offset)};
    },
    .view = true,
    .backward = [](const Rule& r) -> Tensors { return {halftone::reshape(r.grad(), r.in_meta().shape)}; },
    .samples = []() -> std::vector<Sample> {
      return {{{{.shape = {6}}}, Attrs::of(Shape{2, 3})}, {{{.shape = {2, 3}}}, Attrs::of(Shape{6})}, {{{.shape = {}}}, Attrs::of(Shape{1, 1})},
              {{{.shape = {2, 3, 4}}}, Attrs::of(Shape{6, 4})}, {{{.shape = {0, 3}}}, Attrs::of(Shape{3, 0})},
              {{{.shape = {1}}}, Attrs::of(Shape{})}, {{{.shape = {33, 7}}}, Attrs::of(Shape{7, 33})}, {{{.shape = {257}}}, Attrs::of(Shape{1, 257, 1})}};
    }};

constinit OpDef diagonal = {
    .name = "diagonal", .doc = "a diagonal of two dimensions as a new last one, without a copy", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas { return {diagonal_of(c.in[0].meta(), c.as<Diagonal>())}; },
    .view = true,
    .backward = [](const Rule& r) -> Tensors {
      auto a = r.as<Diagonal>();
      return {halftone::diagonal_scatter(r.grad(), r.in_meta().shape, a.offset, a.dim1, a.dim2)};
    },
    .samples = [] { return diagonal_samples(false); }};

constinit OpDef diagonal_scatter = {
    .name = "diagonal_scatter", .doc = "zeros with x written into a diagonal: the gradient of diagonal", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      auto a = c.as<Diagonal>();
      Meta whole(a.whole, c.in[0].dtype(), c.in[0].device());
      Shape expected = diagonal_of(whole, a).shape;
      HT_CHECK(c.in[0].shape() == expected, "diagonal_scatter: expected x ", expected, " for diagonal ", a.offset, " of ", a.whole, ", got ", c.in[0].meta());
      return {whole};
    },
    .backward = [](const Rule& r) -> Tensors {
      auto a = r.as<Diagonal>();
      return {halftone::diagonal(r.grad(), a.offset, a.dim1, a.dim2)};
    },
    .samples = [] { return diagonal_samples(true); },
    .kernel = {run_diagonal_scatter, run_diagonal_scatter}};

constinit OpDef cat = {
    .name = "cat", .doc = "tensors one after the other along a dimension", .cast = Cast::widest,
    .infer = [](const Call& c) -> Metas {
      auto d = static_cast<size_t>(c.as<Joined>().dim);
      Meta m(c.in[0].shape(), c.in[0].dtype(), c.in[0].device());
      for (size_t i = 1; i < c.in.size(); ++i) {
        Shape expected = m.shape, got = c.in[i].shape();
        HT_CHECK(got.rank() == expected.rank() && c.in[i].dtype() == m.dtype, "cat: tensor ", i, " is ", c.in[i].meta(), ", the first is ", m);
        expected[d] = got[d];
        HT_CHECK(got == expected, "cat: tensor ", i, " is ", c.in[i].meta(), ", the first is ", c.in[0].meta(), "; only dimension ", d, " may differ");
        m.shape[d] = checked_add(m.shape[d], got[d]);
      }
      return {Meta(m.shape, m.dtype, m.device)};
    },
    .backward = [](const Rule& r) -> Tensors {
      int dim = r.as<Joined>().dim;
      Tensors grads;
      int64_t at = 0;
      for (size_t i = 0; i < r.size(); ++i) {
        int64_t n = r.in_meta(i).shape[static_cast<size_t>(dim)];
        grads.push_back(r.needs(i) ? halftone::slice(r.grad(), dim, at, at + n) : Tensor());
        at += n;
      }
      return grads;
    },
    .samples = []() -> std::vector<Sample> {
      auto sample = [](std::vector<Shape> shapes, int dim) {
        Sample s;
        for (auto& x : shapes) s.in.push_back({.shape = x});
        s.attrs = Attrs::of(Joined{dim});
        return s;
      };
      return {sample({{2}, {3}}, 0), sample({{2, 3}, {1, 3}}, 0), sample({{2, 3}, {2, 1}, {2, 4}}, 1), sample({{5}}, 0),
              sample({{0, 3}, {2, 3}}, 0), sample({{33, 7}, {33, 9}}, 1), sample({{257}, {1}}, 0), sample({{2, 2, 2}, {2, 2, 2}}, 2)};
    },
    .kernel = {run_cat, run_cat}};

}  // namespace op

std::span<OpDef* const> shape_ops() {
  static constexpr OpDef* all[] = {&op::expand,    &op::permute, &op::slice,    &op::slice_scatter, &op::split, &op::squeeze,
                                   &op::unsqueeze, &op::view,    &op::diagonal, &op::diagonal_scatter, &op::cat};
  return all;
}

Tensor expand(const Tensor& x, const Shape& shape) { return x.shape() == shape ? x : call(op::expand, {x}, Attrs::of(shape)); }

Tensor sum_to(const Tensor& x, const Shape& shape) {
  if (x.shape() == shape) return x;
  HT_CHECK(broadcast("sum_to", x.shape(), shape) == x.shape(), "sum_to: ", x.shape(), " is not a broadcast of ", shape);
  uint32_t lead = 0, kept = 0;
  size_t extra = x.shape().size() - shape.size();
  for (size_t i = 0; i < x.shape().size(); ++i) {
    if (i < extra) lead |= 1u << i;
    else if (shape[i - extra] != x.shape()[i]) kept |= 1u << (i - extra);
  }
  Tensor y = lead ? reduce::apply<reduce::Sum>(x, {lead, false}) : x;
  return kept ? reduce::apply<reduce::Sum>(y, {kept, true}) : y;
}

Tensor permute(const Tensor& x, const Shape& order) {
  Shape o = order;
  for (size_t i = 0; i < o.size(); ++i) o[i] = normalize_dim("permute", o[i], x.rank());
  return call(op::permute, {x}, Attrs::of(o));
}
Tensor transpose(const Tensor& x, int64_t a, int64_t b) {
  auto i = static_cast<size_t>(normalize_dim("transpose", a, x.rank())), j = static_cast<size_t>(normalize_dim("transpose", b, x.rank()));
  if (i == j) return x;
  Shape order;
  for (int d = 0; d < x.rank(); ++d) order.push_back(d);
  std::swap(order[i], order[j]);
  return call(op::permute, {x}, Attrs::of(order));
}

Tensor slice(const Tensor& x, int64_t dim, std::optional<int64_t> begin, std::optional<int64_t> end, int64_t step) {
  HT_CHECK(x.rank() > 0, "slice: a 0-d tensor has nothing to slice");
  HT_CHECK(step > 0, "slice: expected a step above 0, got ", step);
  int d = normalize_dim("slice", dim, x.rank());
  int64_t n = x.size(d);
  auto bound = [n](int64_t v) { return std::clamp<int64_t>(v < 0 ? v + n : v, 0, n); };
  int64_t from = bound(begin.value_or(0)), to = bound(end.value_or(n));
  int64_t length = to > from ? (to - from + step - 1) / step : 0;
  if (length == n) return x;
  return call(op::slice, {x}, Attrs::of(Slice{x.shape(), d, from, length, step}));
}
Tensor slice_scatter(const Tensor& x, const Shape& shape, int64_t dim, int64_t begin, int64_t step) {
  int d = normalize_dim("slice_scatter", dim, shape.rank());
  HT_CHECK(x.rank() == shape.rank() && x.rank() > 0, "slice_scatter: ", x.shape(), " and ", shape, " have different numbers of dimensions");
  return call(op::slice_scatter, {x}, Attrs::of(Slice{shape, d, begin, x.size(d), step}));
}
Tensor narrow(const Tensor& x, int64_t dim, int64_t begin, int64_t length) {
  HT_CHECK(x.rank() > 0, "narrow: a 0-d tensor has nothing to narrow");
  int d = normalize_dim("narrow", dim, x.rank());
  HT_CHECK(begin >= 0 && length >= 0 && begin <= x.size(d) && length <= x.size(d) - begin, "narrow: ", length, " elements from ", begin,
           " leave dimension ", d, " of ", x.shape());
  return slice(x, d, begin, begin + length);
}
std::vector<Tensor> split(const Tensor& x, const std::vector<int64_t>& sizes, int64_t dim) {
  HT_CHECK(x.rank() > 0, "split: a 0-d tensor has nothing to split");
  int d = normalize_dim("split", dim, x.rank());
  int64_t total = 0;
  for (int64_t n : sizes) {
    HT_CHECK(n >= 0, "split: expected sizes of 0 or more, got ", n);
    total = checked_add(total, n);
  }
  HT_CHECK(total == x.size(d), "split: sizes add up to ", total, ", dimension ", d, " of ", x.shape(), " has ", x.size(d));
  std::vector<Tensor> parts;
  if (sizes.size() > 1 && sizes.size() <= max_rank) {  // what the attributes hold
    Tensors views = call_all(op::split, {x}, Attrs::of(Parts{sizes, d}));
    for (Tensor& t : views) parts.push_back(std::move(t));
    return parts;
  }
  int64_t at = 0;
  for (int64_t n : sizes) {
    parts.push_back(slice(x, d, at, at + n));
    at += n;
  }
  return parts;
}
std::vector<Tensor> split(const Tensor& x, Size size, int64_t dim) {
  HT_CHECK(x.rank() > 0, "split: a 0-d tensor has nothing to split");
  int d = normalize_dim("split", dim, x.rank());
  HT_CHECK(size > 0, "split: expected a size above 0, got ", size.value);
  std::vector<int64_t> sizes;
  int64_t left = x.size(d);
  do {
    sizes.push_back(std::min<int64_t>(size, left));
    left -= sizes.back();
  } while (left > 0);
  return split(x, sizes, d);
}
std::vector<Tensor> chunk(const Tensor& x, Size n, int64_t dim) {
  HT_CHECK(x.rank() > 0, "chunk: a 0-d tensor has nothing to split");
  HT_CHECK(n > 0, "chunk: expected a number of chunks above 0, got ", n.value);
  int d = normalize_dim("chunk", dim, x.rank());
  return split(x, Size(std::max<int64_t>(1, (x.size(d) - 1) / n + 1)), d);
}

namespace {
Diagonal diagonal_attrs(const char* who, const Shape& whole, int64_t offset, int64_t dim1, int64_t dim2) {
  HT_CHECK(whole.rank() >= 2, who, ": expected at least two dimensions, got ", whole);
  Diagonal a{whole, std::max(offset, -largest<int64_t>), normalize_dim(who, dim1, whole.rank()), normalize_dim(who, dim2, whole.rank())};
  HT_CHECK(a.dim1 != a.dim2, who, ": expected two dimensions, got ", dim1, " and ", dim2);
  return a;
}
}  // namespace
Tensor diagonal(const Tensor& x, int64_t offset, int64_t dim1, int64_t dim2) {
  return call(op::diagonal, {x}, Attrs::of(diagonal_attrs("diagonal", x.shape(), offset, dim1, dim2)));
}
Tensor diagonal_scatter(const Tensor& x, const Shape& shape, int64_t offset, int64_t dim1, int64_t dim2) {
  return call(op::diagonal_scatter, {x}, Attrs::of(diagonal_attrs("diagonal_scatter", shape, offset, dim1, dim2)));
}
Tensor movedim(const Tensor& x, int64_t from, int64_t to) {
  int a = normalize_dim("movedim", from, x.rank()), b = normalize_dim("movedim", to, x.rank());
  if (a == b) return x;
  Shape order;
  for (int d = 0; d < x.rank(); ++d) if (d != a) order.push_back(d);
  order.insert(b, a);
  return permute(x, order);
}

Tensor squeeze(const Tensor& x, int64_t dim) { return call(op::squeeze, {x}, Attrs::of(normalize_dim("squeeze", dim, x.rank()))); }
Tensor unsqueeze(const Tensor& x, int64_t dim) { return call(op::unsqueeze, {x}, Attrs::of(normalize_dim("unsqueeze", dim, x.rank() + 1))); }
Tensor reshape(const Tensor& x, const Shape& shape) {
  Shape s = resolve(x, shape);
  if (s == x.shape()) return x;
  return call(op::view, {view_strides(x.meta(), s) ? x : x.contiguous()}, Attrs::of(s));
}

Tensor cat(const std::vector<Tensor>& tensors, int64_t dim) {
  HT_CHECK(!tensors.empty(), "cat: expected at least one tensor");
  int d = normalize_dim("cat", dim, tensors[0].rank());
  HT_CHECK(tensors[0].rank() > 0, "cat: 0-d tensors cannot be joined; use stack");
  return call(op::cat, Tensors(std::span(tensors)), Attrs::of(Joined{d}));
}
Tensor stack(const std::vector<Tensor>& tensors, int64_t dim) {
  HT_CHECK(!tensors.empty(), "stack: expected at least one tensor");
  int d = normalize_dim("stack", dim, tensors[0].rank() + 1);
  std::vector<Tensor> rows;
  for (auto& t : tensors) rows.push_back(unsqueeze(t, d));
  return cat(rows, d);
}

// ---- members of Tensor

Tensor Tensor::slice(int64_t dim, std::optional<int64_t> begin, std::optional<int64_t> end, int64_t step) const {
  return halftone::slice(*this, dim, begin, end, step);
}
Tensor Tensor::select(int64_t dim, int64_t index) const {
  int d = normalize_dim("select", dim, rank());
  HT_CHECK(rank() > 0, "select: a 0-d tensor has nothing to select");
  int64_t n = size(d), i = index < 0 ? index + n : index;
  HT_CHECK(i >= 0 && i < n, "select: index ", index, " is out of range for dimension ", d, " of ", shape());
  return halftone::squeeze(halftone::slice(*this, d, i, i + 1), d);
}
Tensor Tensor::transpose(int64_t a, int64_t b) const { return halftone::transpose(*this, a, b); }
Tensor Tensor::permute(const Shape& order) const { return halftone::permute(*this, order); }
Tensor Tensor::view(const Shape& shape) const {
  // That images on a GPU lie with their channels last is Halftone's choice: where a user may expect a view, they are copied.
  if (defined() && !laid_out_like(meta(), dtype()).contiguous()) return reshape(shape);
  return call(op::view, {*this}, Attrs::of(resolve(*this, shape)));
}
Tensor Tensor::reshape(const Shape& shape) const { return halftone::reshape(*this, shape); }
Tensor Tensor::flatten(int64_t from, int64_t to) const {
  if (rank() == 0) return reshape({1});
  int a = normalize_dim("flatten", from, rank()), b = normalize_dim("flatten", to, rank());
  HT_CHECK(a <= b, "flatten: dimension ", from, " comes after ", to);
  Shape s;
  for (int d = 0; d < rank(); ++d) {
    int64_t n = shape()[static_cast<size_t>(d)];
    if (d > a && d <= b) s[s.size() - 1] = checked_mul(s.back(), n);
    else s.push_back(n);
  }
  return reshape(s);
}
Tensor Tensor::expand(const Shape& shape) const { return halftone::expand(*this, shape); }
Tensor Tensor::squeeze(int64_t dim) const { return halftone::squeeze(*this, dim); }
Tensor Tensor::unsqueeze(int64_t dim) const { return halftone::unsqueeze(*this, dim); }

}  // namespace halftone
