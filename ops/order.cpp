// sort, topk and choices along a dimension on the CPU.
#include "halftone/ops/order.h"

#include <algorithm>

#include "halftone/ops/all.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/reduce.h"

namespace halftone {
namespace {

template <class C> bool comes_before(C a, C b, bool descending) {
  bool a_nan = a != a, b_nan = b != b;
  if (a_nan || b_nan) return descending ? a_nan && !b_nan : b_nan && !a_nan;
  return descending ? a > b : a < b;
}

void run_order(const Call& c, std::span<Tensor> out) {
  auto a = c.as<OrderAttrs>();
  visit(c.in[0].dtype(), [&]<class T>(Type<T>) {
    using C = compute_t<T>;
    struct Item { C value; int64_t index; };
    const T* x = c.in[0].data<T>();
    T* values = out[0].data<T>();
    int64_t* indices = out[1].data<int64_t>();
    lines<3>({&c.in[0], &out[0], &out[1]}, a.dim, [&](auto at, auto step, int64_t n) {
      std::vector<Item> items(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) items[static_cast<size_t>(i)] = {C(x[at[0] + i * step[0]]), i};
      auto before = [&](const Item& p, const Item& q) {
        if (comes_before(p.value, q.value, a.descending)) return true;
        return !comes_before(q.value, p.value, a.descending) && p.index < q.index;
      };
      if (a.k == n) std::sort(items.begin(), items.end(), before);
      else std::partial_sort(items.begin(), items.begin() + a.k, items.end(), before);
      for (int64_t i = 0; i < a.k; ++i) {
        int64_t from = items[static_cast<size_t>(i)].index;
        values[at[1] + i * step[1]] = x[at[0] + from * step[0]];
        indices[at[2] + i * step[2]] = from;
      }
    });
  });
}

template <bool put> void run_along(const Call& c, std::span<Tensor> out) {
  auto a = c.as<AlongAttrs>();
  visit(c.in[0].dtype(), [&]<class T>(Type<T>) {
    const T* x = c.in[0].data<T>();
    const int64_t* index = c.in[1].data<int64_t>();
    T* y = out[0].data<T>();
    lines<3>({&c.in[1], &c.in[0], &out[0]}, a.dim, [&](auto at, auto step, int64_t k) {
      if constexpr (put) for (int64_t i = 0; i < a.n; ++i) y[at[2] + i * step[2]] = T();
      for (int64_t i = 0; i < k; ++i) {
        int64_t place = index[at[0] + i * step[0]];
        HT_CHECK(place >= 0 && place < a.n, c.op->name, ": index ", place, " is out of range for ", a.n);
        if constexpr (put) y[at[2] + place * step[2]] = x[at[1] + i * step[1]];
        else y[at[2] + i * step[2]] = x[at[1] + place * step[1]];
      }
    });
  });
}

Metas infer_order(const Call& c) {
  const Meta& x = c.in[0].meta();
  auto a = c.as<OrderAttrs>();
  Shape y = x.shape;
  if (y.rank() > 0) y[static_cast<size_t>(a.dim)] = a.k;
  return {Meta(y, x.dtype, x.device), Meta(y, DType::i64, x.device)};
}

Tensors order_gradient(const Rule& r) {
  auto a = r.as<OrderAttrs>();
  const Meta& x = r.in_meta();
  if (!is_floating(x.dtype)) return {Tensor()};
  int64_t n = x.shape.rank() == 0 ? 1 : x.shape[static_cast<size_t>(a.dim)];
  return {call(op::put_along, {r.grad(), r.out(1)}, Attrs::of(AlongAttrs{a.dim, n}))};
}

std::vector<Sample> order_samples(bool all_of_them) {
  std::vector<Sample> all;
  auto add = [&](const Shape& shape, int dim, int64_t k, bool descending) {
    if (all_of_them) k = shape.rank() == 0 ? 1 : shape[static_cast<size_t>(dim)];
    all.push_back({{{.shape = shape}}, Attrs::of(OrderAttrs{dim, k, descending})});
  };
  add({1}, 0, 1, false);
  add({7}, 0, 3, true);
  add({33}, 0, 33, false);
  add({257}, 0, 5, true);
  add({3, 70}, 1, 4, false);
  add({70, 3}, 0, 70, true);
  add({2, 300, 3}, 1, 2, false);
  add({2, 3, 4}, 2, 1, true);
  add({}, 0, 1, false);
  add({2, 5000}, 1, 9, true);
  add({0, 3}, 1, 2, false);
  add({2, 0}, 1, 0, true);
  return all;
}

// One index a line: drawn ones might meet. The gradients of sort and topk use more.
std::vector<Sample> along_samples(bool put) {
  std::vector<Sample> all;
  auto add = [&](const Shape& shape, int dim) {
    Shape one = shape;
    if (one.rank() > 0) one[static_cast<size_t>(dim)] = 1;
    int64_t n = shape.rank() == 0 ? 1 : shape[static_cast<size_t>(dim)];
    SampleInput index{.shape = one, .low = 0, .high = static_cast<double>(n), .dtype = DType::i64, .differentiable = false};
    all.push_back({{{.shape = put ? one : shape}, index}, Attrs::of(AlongAttrs{dim, n})});
  };
  add({1}, 0);
  add({7}, 0);
  add({33}, 0);
  add({257, 3}, 0);
  add({3, 257}, 1);
  add({2, 3, 4}, 1);
  add({4, 1, 70}, 0);
  add({}, 0);
  add({0, 3}, 1);
  return all;
}

}  // namespace

namespace op {

constinit OpDef sort = {
    .name = "sort", .doc = "elements along a dimension in order, and their indices; NaN is the largest, equal elements keep their order", .cast = Cast::keep,
    .infer = infer_order,
    .saves = {.in = 0, .out = 2},
    .backward = order_gradient,
    .samples = [] { return order_samples(true); },
    .kernel = {run_order}};

constinit OpDef topk = {
    .name = "topk", .doc = "the first elements along a dimension in order, and their indices; NaN is the largest", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Shape& x = c.in[0].shape();
      auto a = c.as<OrderAttrs>();
      int64_t n = x.rank() == 0 ? 1 : x[static_cast<size_t>(a.dim)];
      HT_CHECK(a.k >= 0 && a.k <= n, "topk: expected k from 0 to ", n, ", the size of dimension ", a.dim, " of ", x, ", got ", a.k);
      HT_CHECK(x.rank() > 0 || a.k == 1, "topk: a 0-d tensor has one element, got k = ", a.k);
      return infer_order(c);
    },
    .saves = {.in = 0, .out = 2},
    .backward = order_gradient,
    .samples = [] { return order_samples(false); },
    .kernel = {run_order}};

constinit OpDef take_along = {
    .name = "take_along", .doc = "elements at indices along a dimension, no place twice", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      HT_CHECK(c.in[1].dtype() == DType::i64, "take_along: expected i64 indices, got ", c.in[1].dtype());
      return {Meta(c.in[1].shape(), c.in[0].dtype(), c.in[0].device())};
    },
    .saves = {.in = 2, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      return {is_floating(r.in_meta().dtype) ? call(put_along, {r.grad(), r.in(1)}, r.attrs()) : Tensor(), Tensor()};
    },
    .samples = [] { return along_samples(false); },
    .kernel = {run_along<false>}};

constinit OpDef put_along = {
    .name = "put_along", .doc = "zeros with elements at indices along a dimension, no place twice: the gradient of take_along", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      auto a = c.as<AlongAttrs>();
      HT_CHECK(c.in[1].dtype() == DType::i64, "put_along: expected i64 indices, got ", c.in[1].dtype());
      HT_CHECK(c.in[0].shape() == c.in[1].shape(), "put_along: expected an index for each element, got ", c.in[1].meta(), " for ", c.in[0].meta());
      Shape y = c.in[0].shape();
      if (y.rank() > 0) y[static_cast<size_t>(a.dim)] = a.n;
      return {Meta(y, c.in[0].dtype(), c.in[0].device())};
    },
    .saves = {.in = 2, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      return {is_floating(r.in_meta().dtype) ? call(take_along, {r.grad(), r.in(1)}, r.attrs()) : Tensor(), Tensor()};
    },
    .samples = [] { return along_samples(true); },
    .kernel = {run_along<true>}};

}  // namespace op

std::span<OpDef* const> order_ops() {
  static constexpr OpDef* all[] = {&op::sort, &op::topk, &op::take_along, &op::put_along};
  return all;
}

namespace {

int dim_of(const OpDef& op, const Tensor& x, Size dim) {
  HT_CHECK(x.defined(), op.name, ": x is undefined");
  return normalize_dim(op.name, dim, std::max(x.rank(), 1));
}
ValuesIndices in_order(const OpDef& op, const Tensor& x, const OrderAttrs& a) {
  Tensors out = call_all(op, {x}, Attrs::of(a));
  return {out[0], out[1]};
}
ValuesIndices best(const Tensor& x, Size dim, bool keepdim, Tensor (*choose)(const Tensor&, Size, ReduceOptions)) {
  Tensor index = choose(x, dim, {.keepdim = true});
  int d = normalize_dim("max", dim, x.rank());
  Tensor value = call(op::take_along, {x, index}, Attrs::of(AlongAttrs{d, x.size(d)}));
  if (keepdim) return {value, index};
  return {squeeze(value, d), squeeze(index, d)};
}

}  // namespace

ValuesIndices sort(const Tensor& x, Size dim, SortOptions o) {
  int d = dim_of(op::sort, x, dim);
  return in_order(op::sort, x, {d, x.rank() == 0 ? 1 : x.size(d), o.descending});
}
ValuesIndices topk(const Tensor& x, Size k, Size dim, TopkOptions o) { return in_order(op::topk, x, {dim_of(op::topk, x, dim), k, o.largest}); }
ValuesIndices max(const Tensor& x, Size dim, ReduceOptions o) { return best(x, dim, o.keepdim, argmax); }
ValuesIndices min(const Tensor& x, Size dim, ReduceOptions o) { return best(x, dim, o.keepdim, argmin); }

}  // namespace halftone
