// Index operators on the CPU. Every reading operator is one loop over a walk, and every adding one another: lines that
// differ only in the indexed dimension are independent, so threads share lines and sums keep the order of the index.
#include "halftone/ops/index.h"

#include <algorithm>

#include "halftone/ops/all.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/shape.h"

namespace halftone {
namespace detail {

IndexWalk walk_dim(const Meta& x, int dim, const Meta& index) {
  auto d = static_cast<size_t>(dim);
  IndexWalk w{index.shape, index.strides, x.strides, x.strides[d], x.shape[d]};
  w.x[d] = 0;
  return w;
}
IndexWalk walk_slices(const Meta& x, int dim, const Meta& index) {
  auto d = static_cast<size_t>(dim);
  Meta expanded = x;
  expanded.shape[d] = index.shape[0];
  expanded.strides = Shape::filled(x.shape.rank(), 0);
  expanded.strides[d] = index.strides[0];
  return walk_dim(x, dim, expanded);
}
IndexWalk walk_rows(const Meta& weight, const Meta& index) {
  IndexWalk w{index.shape, index.strides, Shape::filled(index.shape.rank(), 0), weight.strides[0], weight.shape[0]};
  w.shape.push_back(weight.shape[1]);
  w.index.push_back(0);
  w.x.push_back(weight.strides[1]);
  return w;
}

}  // namespace detail

namespace {

using detail::IndexWalk;

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

void check_indices(const char* who, const Tensor& index, int64_t limit) {
  Tensor all = index.contiguous();
  const int64_t* p = all.data<int64_t>();
  for (int64_t i = 0; i < all.numel(); ++i)
    HT_CHECK(p[i] >= 0 && p[i] < limit, who, ": index ", p[i], " at ", i, " is out of range for ", limit);
}

// y[e] = x[index[e]] along the walk.
void read(const IndexWalk& w, const Tensor& x, const Tensor& index, const Tensor& y) {
  const int64_t* i = index.data<int64_t>();
  visit_bits(x.dtype(), [&]<class U>(Type<U>) {
    const U* from = bits<U>(x);
    U* to = bits<U>(y);
    Rows<3>(w.shape, {y.strides(), w.index, w.x}).run([&](auto at, auto step, int64_t n) {
      if (step[1] == 0) return map_row(from + at[2] + i[at[1]] * w.stride, step[2], to + at[0], step[0], n, [](U v) { return v; });
      for (int64_t k = 0; k < n; ++k) to[at[0] + k * step[0]] = from[at[2] + k * step[2] + i[at[1] + k * step[1]] * w.stride];
    });
  });
}

// Calls f({offsets}) for the elements of `shape`, offsets by N strides; those that differ in dimension d alone come in
// order on one thread.
template <size_t N, class F> void each_line(const Shape& shape, size_t d, const std::array<Strides, N>& strides, F f) {
  int64_t length = shape[d];
  std::array<int64_t, N> along;
  for (size_t k = 0; k < N; ++k) along[k] = strides[k][d];
  Shape across = shape;
  across[d] = 1;
  auto rows = [&]<size_t... K>(std::index_sequence<K...>) { return Rows<N>(across, {strides[K]...}); }(std::make_index_sequence<N>());
  size_t last = rows.shape.size() - 1;
  int64_t inner = rows.shape[last], lines = rows.shape.numel();
  if (lines == 0 || length == 0) return;
  parallel_for(lines, std::max<int64_t>(1, parallel_grain / length), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      int64_t n = std::min(end - begin, inner - begin % inner), rest = begin / inner;
      std::array<int64_t, N> base;
      for (size_t k = 0; k < N; ++k) base[k] = begin % inner * rows.strides[k][last];
      for (size_t r = last; r-- > 0; rest /= rows.shape[r])
        for (size_t k = 0; k < N; ++k) base[k] += rest % rows.shape[r] * rows.strides[k][r];
      for (int64_t j = 0; j < length; ++j)
        for (int64_t i = 0; i < n; ++i) {
          std::array<int64_t, N> at;
          for (size_t k = 0; k < N; ++k) at[k] = base[k] + j * along[k] + i * rows.strides[k][last];
          f(at);
        }
      begin += n;
    }
  });
}

// y[index[e]] += source[e] along the walk, whose dimension d is the one that repeats an element of y; y begins as x, or as
// zeros. Sums of 16-bit elements are kept in f32 beside y.
void accumulate(const IndexWalk& w, size_t d, const Tensor& x, const Tensor& index, const Tensor& source, const Tensor& y, int64_t skipped) {
  bool widened = source.dtype() != DType::f32 && is_16bit_dtype(source.dtype()) && is_16bit_dtype(y.dtype());
  Tensor sums = widened ? Tensor::empty(Meta(y.shape(), DType::f32, y.device())) : y;
  if (x.defined()) call_all(op::copy, {sums, x});
  else call_all(op::fill, {sums}, Attrs::of(Scalar(0)));
  const int64_t* i = index.data<int64_t>();
  visit<number_types>(source.dtype(), [&]<class T>(Type<T>) {
    using C = compute_t<T>;
    const T* from = source.data<T>();
    C* to = sums.data<C>();
    each_line<3>(w.shape, d, {w.index, w.x, source.strides()}, [&](const std::array<int64_t, 3>& at) {
      int64_t row = i[at[0]];
      if (row == skipped) return;
      C& sum = to[at[1] + row * w.stride];
      sum = static_cast<C>(sum + C(from[at[2]]));
    });
  });
  if (widened) call_all(op::copy, {y, sums});
}

void run_one_hot(const Call& c, std::span<Tensor> out) {
  Tensor target = c.in[0].contiguous();
  int64_t classes = c.as<OneHotAttrs>().classes, n = target.numel();
  const int64_t* t = target.data<int64_t>();
  visit(out[0].dtype(), [&]<class Y>(Type<Y>) {
    Y* y = out[0].data<Y>();
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < classes; ++k) y[i * classes + k] = convert<Y>(t[i] == k);
  });
}

void run_gather(const Call& c, std::span<Tensor> out) {
  IndexWalk w = detail::walk_dim(c.in[0].meta(), c.as<int32_t>(), c.in[1].meta());
  check_indices("gather", c.in[1], w.limit);
  read(w, c.in[0], c.in[1], out[0]);
}
void run_index_select(const Call& c, std::span<Tensor> out) {
  IndexWalk w = detail::walk_slices(c.in[0].meta(), c.as<int32_t>(), c.in[1].meta());
  check_indices("index_select", c.in[1], w.limit);
  read(w, c.in[0], c.in[1], out[0]);
}
void run_embedding(const Call& c, std::span<Tensor> out) {
  IndexWalk w = detail::walk_rows(c.in[0].meta(), c.in[1].meta());
  check_indices("embedding", c.in[1], w.limit);
  read(w, c.in[0], c.in[1], out[0]);
}

void run_scatter(const Call& c, std::span<Tensor> out) {
  auto a = c.as<ScatterAttrs>();
  const Tensor &y = out[0], &index = c.in[1];
  auto d = static_cast<size_t>(a.dim);
  IndexWalk w = detail::walk_dim(y.meta(), a.dim, index.meta());
  check_indices("scatter", index, w.limit);
  call_all(op::copy, {y, c.in[0]});
  const int64_t* i = index.data<int64_t>();
  visit(y.dtype(), [&]<class T>(Type<T>) {
    T* to = y.data<T>();
    T value = a.value.to<T>();
    const T* from = c.has(2) ? c.in[2].data<T>() : &value;
    Strides source = c.has(2) ? c.in[2].strides() : Shape::filled(index.rank(), 0);
    each_line<3>(w.shape, d, {w.index, w.x, source},
                 [&](const std::array<int64_t, 3>& at) { to[at[1] + i[at[0]] * w.stride] = from[at[2]]; });
  });
  if (out.size() == 1) return;
  // For the tape, which elements came last in their place.
  std::vector<int64_t> last(static_cast<size_t>(y.numel()));
  bool* wins = out[1].data<bool>();
  auto place = [&](const std::array<int64_t, 3>& at) -> int64_t& { return last[static_cast<size_t>(at[1] + i[at[0]] * w.stride)]; };
  std::array<Strides, 3> strides{w.index, w.x, out[1].strides()};
  each_line<3>(w.shape, d, strides, [&](const std::array<int64_t, 3>& at) { place(at) = at[2]; });
  each_line<3>(w.shape, d, strides, [&](const std::array<int64_t, 3>& at) { wins[at[2]] = place(at) == at[2]; });
}

void run_scatter_add(const Call& c, std::span<Tensor> out) {
  int dim = c.as<int32_t>();
  IndexWalk w = detail::walk_dim(out[0].meta(), dim, c.in[1].meta());
  check_indices("scatter_add", c.in[1], w.limit);
  accumulate(w, static_cast<size_t>(dim), c.in[0], c.in[1], c.in[2], out[0], -1);
}
void run_index_add(const Call& c, std::span<Tensor> out) {
  int dim = c.as<int32_t>();
  IndexWalk w = detail::walk_slices(out[0].meta(), dim, c.in[1].meta());
  check_indices("index_add", c.in[1], w.limit);
  accumulate(w, static_cast<size_t>(dim), c.in[0], c.in[1], c.in[2], out[0], -1);
}
void run_embedding_grad(const Call& c, std::span<Tensor> out) {
  Tensor index = c.in[1].contiguous(), g = c.in[0].contiguous();
  Meta flat({index.numel()}, DType::i64, index.device());
  check_indices("embedding", index, out[0].size(0));
  g = g.as_strided({index.numel(), out[0].size(1)}, {out[0].size(1), 1}, g.meta().offset);
  accumulate(detail::walk_rows(out[0].meta(), flat), 0, {}, index, g, out[0], c.as<EmbeddingAttrs>().padding_idx);
}

void run_nonzero(const Call& c, std::span<Tensor> out) {
  Tensor mask = c.in[0].contiguous();
  const bool* p = mask.data<bool>();
  int64_t count = out[0].size(0), found = 0, n = mask.numel();
  size_t rank = mask.shape().size();
  int64_t* y = out[0].data<int64_t>();
  std::fill_n(y, out[0].numel(), -1);
  for (int64_t i = 0; i < n && found < count; ++i) {
    if (!p[i]) continue;
    int64_t rest = i;
    for (size_t d = rank; d-- > 0; rest /= mask.shape()[d]) y[found * static_cast<int64_t>(rank) + static_cast<int64_t>(d)] = rest % mask.shape()[d];
    ++found;
  }
}

// ---- shapes

// x and an index of as many dimensions, which does not leave x but in dimension dim.
void check_walk(const Call& c, int dim) {
  const Meta &x = c.in[0].meta(), &index = c.in[1].meta();
  HT_CHECK(index.dtype == DType::i64, c.op->name, ": expected i64 indices, got ", index.dtype);
  bool fits = x.shape.rank() > 0 && x.shape.rank() == index.shape.rank();
  for (size_t d = 0; fits && d < x.shape.size(); ++d) fits = static_cast<int>(d) == dim || index.shape[d] <= x.shape[d];
  HT_CHECK(fits, c.op->name, ": expected an index of as many dimensions as x ", x, " and no larger but in dimension ", dim, ", got ", index);
}
void check_source(const Call& c, const Shape& expected) {
  const Meta &x = c.in[0].meta(), &source = c.in[2].meta();
  HT_CHECK(source.shape == expected && source.dtype == x.dtype, c.op->name, ": expected source ", expected, " (", x.dtype, "), got ", source);
}
void check_slices(const Call& c, int dim) {
  const Meta &x = c.in[0].meta(), &index = c.in[1].meta();
  HT_CHECK(x.shape.rank() > dim, c.op->name, ": expected x with a dimension ", dim, ", got ", x);
  HT_CHECK(index.dtype == DType::i64 && index.shape.rank() == 1, c.op->name, ": expected an index [n] (i64), got ", index);
}
Shape with_size(Shape s, int dim, int64_t n) {
  s[static_cast<size_t>(dim)] = n;
  return s;
}
Meta like(const Meta& x, const Shape& shape) { return Meta(shape, x.dtype, x.device); }

// ---- samples

SampleInput indices(Shape shape, int64_t limit) {
  return {.shape = shape, .low = 0, .high = static_cast<double>(limit), .dtype = DType::i64, .differentiable = false};
}
struct DimCase { Shape x; int32_t dim; Shape index; };
std::vector<DimCase> dim_cases() {
  return {{{1}, 0, {1}}, {{7}, 0, {33}}, {{2, 3}, 0, {4, 3}}, {{2, 3}, 1, {2, 5}}, {{3, 4}, 1, {2, 2}}, {{2, 3, 4}, 1, {2, 5, 3}}, {{257}, 0, {40}},
          {{3, 1}, 1, {3, 4}}, {{33, 5}, 0, {20, 5}}, {{4}, 0, {0}}};
}
std::vector<DimCase> slice_cases() {
  return {{{1}, 0, {1}}, {{7}, 0, {33}}, {{2, 3}, 0, {4}}, {{2, 3}, 1, {5}}, {{2, 3, 4}, 1, {5}}, {{257, 8}, 0, {9}}, {{3, 40}, 0, {70}},
          {{3, 4}, 1, {0}}, {{2, 5, 16}, 1, {3}}};
}

template <class F> Tensor add_into_zeros(const Rule& r, F add) { return add(zeros(r.in_meta().shape, {.dtype = r.in_meta().dtype, .device = r.in_meta().device})); }

}  // namespace

namespace op {

constinit OpDef one_hot = {
    .name = "one_hot", .doc = "1 at each index, else 0, in a new last dimension", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& t = c.in[0].meta();
      auto a = c.as<OneHotAttrs>();
      HT_CHECK(t.dtype == DType::i64, "one_hot: expected i64 indices, got ", t.dtype);
      HT_CHECK(a.classes > 0, "one_hot: expected at least one class, got ", a.classes);
      Shape y = t.shape;
      y.push_back(a.classes);
      return {Meta(y, a.dtype, t.device)};
    },
    .dtypes = {only(DType::i64), only(DType::i64)},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto [shape, classes] : {std::pair{Shape{}, 3}, {Shape{1}, 1}, {Shape{7}, 5}, {Shape{33}, 10}, {Shape{257}, 3}, {Shape{0}, 4}, {Shape{2, 3}, 4}, {Shape{4, 1}, 70}})
        all.push_back({{indices(shape, classes)}, Attrs::of(OneHotAttrs{classes, DType::f32})});
      return all;
    },
    .kernel = {run_one_hot}};

constinit OpDef gather = {
    .name = "gather", .doc = "elements of x along a dimension, at the index of each result", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      check_walk(c, c.as<int32_t>());
      return {like(c.in[0].meta(), c.in[1].shape())};
    },
    .saves = {.in = 2, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      return {add_into_zeros(r, [&](const Tensor& z) { return halftone::scatter_add(z, r.as<int32_t>(), r.in(1), r.grad()); }), {}};
    },
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& s : dim_cases()) all.push_back({{{.shape = s.x}, indices(s.index, s.x[static_cast<size_t>(s.dim)])}, Attrs::of(s.dim)});
      return all;
    },
    .kernel = {run_gather}};

constinit OpDef scatter = {
    .name = "scatter", .doc = "x with elements written along a dimension, at the index of each; the last of several stays", .cast = Cast::widest,
    .infer = [](const Call& c) -> Metas {
      check_walk(c, c.as<ScatterAttrs>().dim);
      if (c.has(2)) check_source(c, c.in[1].shape());
      return {like(c.in[0].meta(), c.in[0].shape()), Meta(c.in[1].shape(), DType::b8, c.in[0].device())};
    },
    .aux = 1,
    .saves = {.in = 2, .out = 2},
    .backward = [](const Rule& r) -> Tensors {
      int dim = r.as<ScatterAttrs>().dim;
      Tensors grads{r.needs(0) ? halftone::scatter(r.grad(), dim, r.in(1), Scalar(0)) : Tensor(), {}};
      if (r.size() > 2) grads.push_back(r.needs(2) ? halftone::where(r.out(1), halftone::gather(r.grad(), dim, r.in(1)), 0) : Tensor());
      return grads;
    },
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& s : dim_cases())
        all.push_back({{{.shape = s.x}, indices(s.index, s.x[static_cast<size_t>(s.dim)]), {.shape = s.index}}, Attrs::of(ScatterAttrs{s.dim, 0})});
      all.push_back({{{.shape = {2, 3}}, indices({2, 2}, 3)}, Attrs::of(ScatterAttrs{1, 3})});
      all.push_back({{{.shape = {5}}, indices({3}, 5)}, Attrs::of(ScatterAttrs{0, 0})});
      return all;
    },
    .kernel = {run_scatter}};

constinit OpDef scatter_add = {
    .name = "scatter_add", .doc = "x with elements added along a dimension, at the index of each", .cast = Cast::widest,
    .infer = [](const Call& c) -> Metas {
      check_walk(c, c.as<int32_t>());
      check_source(c, c.in[1].shape());
      return {like(c.in[0].meta(), c.in[0].shape())};
    },
    .saves = {.in = 2, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      return {r.needs(0) ? r.grad() : Tensor(), {}, r.needs(2) ? halftone::gather(r.grad(), r.as<int32_t>(), r.in(1)) : Tensor()};
    },
    .dtypes = {number_types, number_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& s : dim_cases())
        all.push_back({{{.shape = s.x}, indices(s.index, s.x[static_cast<size_t>(s.dim)]), {.shape = s.index}}, Attrs::of(s.dim)});
      all.push_back({{{.shape = {3}}, indices({1000}, 3), {.shape = {1000}}}, Attrs::of(int32_t{0})});
      return all;
    },
    .kernel = {run_scatter_add}};

constinit OpDef index_select = {
    .name = "index_select", .doc = "slices of a dimension by their index", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      int dim = c.as<int32_t>();
      check_slices(c, dim);
      return {like(c.in[0].meta(), with_size(c.in[0].shape(), dim, c.in[1].numel()))};
    },
    .saves = {.in = 2, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      return {add_into_zeros(r, [&](const Tensor& z) { return halftone::index_add(z, r.as<int32_t>(), r.in(1), r.grad()); }), {}};
    },
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& s : slice_cases()) all.push_back({{{.shape = s.x}, indices(s.index, s.x[static_cast<size_t>(s.dim)])}, Attrs::of(s.dim)});
      return all;
    },
    .kernel = {run_index_select}};

constinit OpDef index_add = {
    .name = "index_add", .doc = "x with slices added to those of an index", .cast = Cast::widest,
    .infer = [](const Call& c) -> Metas {
      int dim = c.as<int32_t>();
      check_slices(c, dim);
      check_source(c, with_size(c.in[0].shape(), dim, c.in[1].numel()));
      return {like(c.in[0].meta(), c.in[0].shape())};
    },
    .saves = {.in = 2, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      return {r.needs(0) ? r.grad() : Tensor(), {}, r.needs(2) ? halftone::index_select(r.grad(), r.as<int32_t>(), r.in(1)) : Tensor()};
    },
    .dtypes = {number_types, number_types},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& s : slice_cases())
        all.push_back({{{.shape = s.x}, indices(s.index, s.x[static_cast<size_t>(s.dim)]), {.shape = with_size(s.x, s.dim, s.index[0])}}, Attrs::of(s.dim)});
      all.push_back({{{.shape = {3, 2}}, indices({500}, 3), {.shape = {500, 2}}}, Attrs::of(int32_t{0})});
      return all;
    },
    .kernel = {run_index_add}};

constinit OpDef embedding = {
    .name = "embedding", .doc = "rows of a table by their index", .cast = Cast::lower,
    .infer = [](const Call& c) -> Metas {
      const Meta &weight = c.in[0].meta(), &index = c.in[1].meta();
      HT_CHECK(weight.shape.rank() == 2 && is_floating(weight.dtype), "embedding: expected weight [rows, width] of a floating dtype, got ", weight);
      HT_CHECK(index.dtype == DType::i64, "embedding: expected i64 indices, got ", index.dtype);
      Shape y = index.shape;
      y.push_back(weight.shape[1]);
      return {like(weight, y)};
    },
    .saves = {.in = 2, .out = 0},
    .backward = [](const Rule& r) -> Tensors { return {call(op::embedding_grad, {r.grad(), r.in(1)}, r.attrs()), {}}; },
    .fused_backward = [](const Rule& r) -> Tensors {
      auto a = r.as<EmbeddingAttrs>();
      a.wide = r.absorbed(0) != nullptr;
      Tensor into = r.destination(0);
      Tensors in{r.grad(), r.in(1)};
      return {into.defined() ? call_into(op::embedding_grad, in, Attrs::of(a), into) : call(op::embedding_grad, in, Attrs::of(a)), {}};
    },
    .absorb = [](const Rule&, size_t i, const Producer& p) { return i == 0 && p.op == &op::cast && p.input.dtype == DType::f32; },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      auto sample = [](Shape weight, Shape index, int64_t padding) {
        // A padding row has no gradient, which differences do not know: these indices stay below it.
        return Sample{{{.shape = weight}, indices(index, padding < 0 ? weight[0] : padding)}, Attrs::of(EmbeddingAttrs{weight[0], padding})};
      };
      return {sample({1, 1}, {1}, -1), sample({7, 3}, {}, -1), sample({7, 3}, {33}, 6), sample({3, 8}, {2, 5}, -1), sample({257, 16}, {9}, 256),
              sample({5, 33}, {4, 1, 3}, 4), sample({2, 4}, {0}, -1), sample({4, 257}, {70}, 3)};
    },
    .kernel = {run_embedding}};

constinit OpDef embedding_grad = {
    .name = "embedding_grad", .doc = "the gradient of embedding over its table: the sum of what each row gave", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta &g = c.in[0].meta(), &index = c.in[1].meta();
      auto a = c.as<EmbeddingAttrs>();
      Shape expected = index.shape;
      expected.push_back(g.shape.rank() > 0 ? g.shape.back() : 0);
      HT_CHECK(index.dtype == DType::i64 && g.shape == expected, "embedding_grad: expected a gradient [..., width] and an index [...] (i64), got ", g, " and ", index);
      return {Meta({a.rows, g.shape.back()}, a.wide && is_16bit_dtype(g.dtype) ? DType::f32 : g.dtype, g.device)};
    },
    .saves = {.in = 2, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      auto a = r.as<EmbeddingAttrs>();
      a.wide = false;
      Tensor g = call(op::embedding, {halftone::cast(r.grad(), r.in_meta().dtype), r.in(1)}, Attrs::of(a));
      if (a.padding_idx >= 0) g = halftone::where(halftone::unsqueeze(eq(r.in(1), a.padding_idx), -1), 0, g);
      return {g, {}};
    },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      auto sample = [](Shape g, int64_t rows, int64_t padding, bool wide = false) {
        Shape index = g;
        index.erase(g.rank() - 1);
        return Sample{{{.shape = g}, indices(index, rows)}, Attrs::of(EmbeddingAttrs{rows, padding, wide})};
      };
      return {sample({1, 1}, 1, -1), sample({3}, 4, -1), sample({33, 3}, 7, 2), sample({2, 5, 8}, 3, -1), sample({9, 16}, 257, 256),
              sample({4, 1, 3, 33}, 5, 0), sample({0, 4}, 2, -1), sample({257, 4}, 3, 1), sample({40, 5}, 3, -1, true)};
    },
    .kernel = {run_embedding_grad}};

constinit OpDef nonzero = {
    .name = "nonzero", .doc = "the places of the first `count` true elements; -1 where there are fewer", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& x = c.in[0].meta();
      HT_CHECK(x.dtype == DType::b8, "nonzero: expected a bool mask, got ", x.dtype);
      return {Meta({c.as<int64_t>(), x.shape.rank()}, DType::i64, x.device)};
    },
    .dtypes = {only(DType::b8), only(DType::b8)},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto& [shape, count] : std::vector<std::pair<Shape, int64_t>>{
               {{}, 1}, {{1}, 1}, {{7}, 3}, {{33}, 40}, {{257}, 128}, {{2, 3}, 3}, {{3, 5, 7}, 52}, {{0, 3}, 0}, {{5000}, 2500}, {{90, 100}, 10}})
        all.push_back({{{.shape = shape, .low = 0, .high = 2, .dtype = DType::b8, .differentiable = false}}, Attrs::of(count)});
      return all;
    },
    .kernel = {run_nonzero}};

}  // namespace op

std::span<OpDef* const> index_ops() {
  static constexpr OpDef* all[] = {&op::one_hot,      &op::gather,    &op::scatter,   &op::scatter_add,   &op::index_select,
                                   &op::index_add,    &op::embedding, &op::embedding_grad, &op::nonzero};
  return all;
}

namespace {

Tensor as_index(const char* who, const Tensor& index) {
  HT_CHECK(index.defined(), who, ": the index is undefined");
  HT_CHECK(index.dtype() == DType::i64 || index.dtype() == DType::i32, who, ": expected an index of i64 or i32, got ", index.meta());
  return index.to(DType::i64);
}
int indexed_dim(const char* who, const Tensor& x, int64_t dim) {
  HT_CHECK(x.defined(), who, ": x is undefined");
  HT_CHECK(x.rank() > 0, who, ": a 0-d tensor has no dimension to index");
  return normalize_dim(who, dim, x.rank());
}
// The part of a source that the index speaks of.
Tensor source_part(const char* who, const Tensor& source, const Tensor& index) {
  HT_CHECK(source.defined(), who, ": the source is undefined");
  bool fits = source.rank() == index.rank();
  for (size_t d = 0; fits && d < index.shape().size(); ++d) fits = index.shape()[d] <= source.shape()[d];
  HT_CHECK(fits, who, ": expected a source no smaller than the index ", index.shape(), ", got ", source.meta());
  Tensor part = source;
  for (int d = 0; d < index.rank(); ++d) part = slice(part, d, 0, index.size(d));
  return part;
}

}  // namespace

Tensor one_hot(const Tensor& target, Size classes, DType dtype) {
  HT_CHECK(target.defined() && !is_floating(target.dtype()), "one_hot: expected a tensor of integers");
  return call(op::one_hot, {target.to(DType::i64)}, Attrs::of(OneHotAttrs{classes, dtype}));
}

Tensor gather(const Tensor& x, int64_t dim, const Tensor& index) {
  int32_t d = indexed_dim("gather", x, dim);
  return call(op::gather, {x, as_index("gather", index)}, Attrs::of(d));
}
Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  int32_t d = indexed_dim("scatter", x, dim);
  Tensor i = as_index("scatter", index);
  return call(op::scatter, {x, i, source_part("scatter", source, i)}, Attrs::of(ScatterAttrs{d, 0}));
}
Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, Scalar value) {
  int32_t d = indexed_dim("scatter", x, dim);
  return call(op::scatter, {x, as_index("scatter", index)}, Attrs::of(ScatterAttrs{d, value}));
}
Tensor scatter_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  int32_t d = indexed_dim("scatter_add", x, dim);
  Tensor i = as_index("scatter_add", index);
  return call(op::scatter_add, {x, i, source_part("scatter_add", source, i)}, Attrs::of(d));
}
Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index) {
  int32_t d = indexed_dim("index_select", x, dim);
  return call(op::index_select, {x, as_index("index_select", index)}, Attrs::of(d));
}
Tensor index_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source, Scalar alpha) {
  int32_t d = indexed_dim("index_add", x, dim);
  HT_CHECK(source.defined(), "index_add: the source is undefined");
  return call(op::index_add, {x, as_index("index_add", index), alpha.to<double>() == 1 ? source : source * alpha}, Attrs::of(d));
}
Tensor take(const Tensor& x, const Tensor& index) {
  HT_CHECK(x.defined(), "take: x is undefined");
  Tensor i = as_index("take", index);
  return reshape(index_select(reshape(x, {x.numel()}), 0, reshape(i, {i.numel()})), i.shape());
}

Tensor embedding(const Tensor& weight, const Tensor& index, EmbeddingOptions o) {
  HT_CHECK(weight.defined(), "embedding: weight is undefined");
  HT_CHECK(weight.rank() == 2, "embedding: expected weight [rows, width], got ", weight.meta());
  int64_t rows = weight.size(0), padding = -1;
  if (o.padding_idx) {
    padding = *o.padding_idx < 0 ? *o.padding_idx + rows : *o.padding_idx;
    HT_CHECK(padding >= 0 && padding < rows, "embedding: padding_idx ", *o.padding_idx, " is out of range for ", rows, " rows");
  }
  return call(op::embedding, {weight, as_index("embedding", index)}, Attrs::of(EmbeddingAttrs{rows, padding}));
}

namespace {
Tensor places(const Tensor& mask) {
  NoGrad off;
  return call(op::nonzero, {mask}, Attrs::of(sum(mask).item<int64_t>()));
}
}  // namespace
Tensor nonzero(const Tensor& x) {
  HT_CHECK(x.defined(), "nonzero: x is undefined");
  check_may_sync("nonzero");
  NoGrad off;
  return places(x.dtype() == DType::b8 ? x : ne(x, 0));
}
Tensor masked_select(const Tensor& x, const Tensor& mask) {
  HT_CHECK(x.defined() && mask.defined(), "masked_select: x or mask is undefined");
  HT_CHECK(mask.dtype() == DType::b8, "masked_select: expected a bool mask, got ", mask.dtype());
  check_may_sync("masked_select");
  Shape s = broadcast("masked_select", x.shape(), mask.shape());
  Tensor at = places(reshape(expand(mask, s), {s.numel()}));
  return index_select(reshape(expand(x, s), {s.numel()}), 0, squeeze(at, 1));
}

}  // namespace halftone
