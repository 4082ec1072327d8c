// Scans on the CPU: a line after the other, in f64.
#include "halftone/ops/scan.h"

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/reduce.h"

namespace halftone {
namespace {

template <class Op> void run_scan(const Call& c, std::span<Tensor> out) {
  auto attrs = c.as<ScanAttrs>();
  visit(c.in[0].dtype(), [&]<class T>(Type<T>) {
    using A = std::conditional_t<std::integral<T>, int64_t, double>;
    using Y = std::conditional_t<std::integral<T>, int64_t, T>;
    const T* x = c.in[0].data<T>();
    Y* y = out[0].data<Y>();
    lines<2>({&out[0], &c.in[0]}, attrs.dim, [&](auto at, auto step, int64_t n) {
      A value = Op::template nothing<A>();
      for (int64_t k = 0; k < n; ++k) {
        int64_t i = attrs.reverse ? n - 1 - k : k;
        value = Op::then(value, static_cast<A>(compute_t<T>(x[at[1] + i * step[1]])));
        y[at[0] + i * step[0]] = convert<Y>(value);
      }
    });
  });
}

void run_recurrence(const Call& c, std::span<Tensor> out) {
  auto attrs = c.as<ScanAttrs>();
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    using C = compute_t<T>;
    const T *a = c.in[0].data<T>(), *b = c.in[1].data<T>();
    T* y = out[0].data<T>();
    lines<3>({&out[0], &c.in[0], &c.in[1]}, attrs.dim, [&](auto at, auto step, int64_t n) {
      auto value = scan::Recurrence::nothing<double>();
      for (int64_t k = 0; k < n; ++k) {
        int64_t i = attrs.reverse ? n - 1 - k : k;
        value = scan::Recurrence::then(value, {double(C(a[at[1] + i * step[1]])), double(C(b[at[2] + i * step[2]]))});
        y[at[0] + i * step[0]] = T(value.b);
      }
    });
  });
}

Metas infer_scan(const Call& c) {
  const Meta& x = c.in[0].meta();
  return {Meta(x.shape, is_floating(x.dtype) ? x.dtype : DType::i64, x.device)};
}

// Long lines take values from `low_long` to `high_long`, so that products stay near 1.
std::vector<Sample> samples(size_t inputs, double low, double high, double low_long, double high_long) {
  std::vector<Sample> all;
  auto add = [&](const Shape& shape, int dim, bool reverse) {
    bool is_long = shape.numel() > 3000;
    std::vector<SampleInput> in(inputs, SampleInput{.shape = shape, .low = is_long ? low_long : low, .high = is_long ? high_long : high});
    all.push_back({in, Attrs::of(ScanAttrs{dim, reverse})});
  };
  add({1}, 0, false);
  add({7}, 0, false);
  add({33}, 0, true);
  add({257}, 0, false);
  add({3, 70}, 1, true);
  add({70, 3}, 0, false);
  add({2, 300, 3}, 1, true);
  add({2, 3, 4}, 2, false);
  add({4, 1, 3}, 1, false);
  add({}, 0, false);
  add({0, 3}, 0, false);
  add({2, 0}, 1, true);
  add({2, 2500}, 1, false);
  return all;
}

ScanAttrs attrs_of(const OpDef& op, const Tensor& x, int64_t dim, const ScanOptions& o) {
  HT_CHECK(x.defined(), op.name, ": x is undefined");
  return {normalize_dim(op.name, dim, std::max(x.rank(), 1)), o.reverse};
}

}  // namespace

namespace op {

constinit OpDef cumsum = {
    .name = "cumsum", .doc = "running sums along a dimension; of integers and bool, in i64", .cast = Cast::full,
    .infer = infer_scan,
    .backward = [](const Rule& r) -> Tensors {
      auto a = r.as<ScanAttrs>();
      return {is_floating(r.in_meta().dtype) ? halftone::cumsum(r.grad(), a.dim, {.reverse = !a.reverse}) : Tensor()};
    },
    .samples = [] { return samples(1, -2, 2, -2, 2); },
    .kernel = {run_scan<scan::Sum>}};

// With P the product before an element, its gradient is P times what the elements from it on make of the gradients, which
// divides by nothing: zeros are right in derivatives of any order.
constinit OpDef cumprod = {
    .name = "cumprod", .doc = "running products along a dimension; of integers and bool, in i64", .cast = Cast::full,
    .infer = infer_scan,
    .saves = {.in = 1, .out = 1},
    .backward = [](const Rule& r) -> Tensors {
      if (!is_floating(r.in_meta().dtype)) return {Tensor()};
      auto a = r.as<ScanAttrs>();
      Tensor later = halftone::recurrence(shifted(r.in(), a.dim, !a.reverse, 0), r.grad(), a.dim, {.reverse = !a.reverse});
      return {shifted(r.out(), a.dim, a.reverse, 1) * later};
    },
    .samples = [] { return samples(1, 0.8, 1.215, 0.99, 1.01); },
    .kernel = {run_scan<scan::Product>}};

constinit OpDef recurrence = {
    .name = "recurrence", .doc = "y[i] = a[i] * y[i - 1] + b[i] along a dimension, from 0", .cast = Cast::full,
    .infer = [](const Call& c) -> Metas {
      const Meta &a = c.in[0].meta(), &b = c.in[1].meta();
      HT_CHECK(is_floating(a.dtype), "recurrence: expected a floating dtype, got ", a.dtype, "; cast with to()");
      HT_CHECK(a.shape == b.shape && a.dtype == b.dtype, "recurrence: expected equal shapes and dtypes, got ", a, " and ", b);
      return {Meta(a.shape, a.dtype, a.device)};
    },
    .saves = {.in = 1, .out = 1},
    .backward = [](const Rule& r) -> Tensors {
      auto s = r.as<ScanAttrs>();
      Tensor b = halftone::recurrence(shifted(r.in(), s.dim, !s.reverse, 0), r.grad(), s.dim, {.reverse = !s.reverse});
      return {r.needs(0) ? b * shifted(r.out(), s.dim, s.reverse, 0) : Tensor(), r.needs(1) ? b : Tensor()};
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return samples(2, -0.95, 0.95, -0.95, 0.95); },
    .kernel = {run_recurrence}};

}  // namespace op

std::span<OpDef* const> scan_ops() {
  static constexpr OpDef* all[] = {&op::cumsum, &op::cumprod, &op::recurrence};
  return all;
}

Tensor cumsum(const Tensor& x, int64_t dim, ScanOptions o) { return call(op::cumsum, {x}, Attrs::of(attrs_of(op::cumsum, x, dim, o))); }
Tensor cumprod(const Tensor& x, int64_t dim, ScanOptions o) { return call(op::cumprod, {x}, Attrs::of(attrs_of(op::cumprod, x, dim, o))); }
Tensor recurrence(const Tensor& a, const Tensor& b, int64_t dim, ScanOptions o) {
  HT_CHECK(b.defined(), "recurrence: b is undefined");
  return call(op::recurrence, {a, b}, Attrs::of(attrs_of(op::recurrence, a, dim, o)));
}

Tensor shifted(const Tensor& x, int64_t dim, bool reverse, double fill) {
  if (x.numel() == 0) return x;
  if (x.rank() == 0) return full({}, fill, x.options());
  int64_t n = x.size(dim);
  Shape edge = x.shape();
  edge[static_cast<size_t>(normalize_dim("shifted", dim, x.rank()))] = 1;
  Tensor in = full(edge, fill, x.options());
  return reverse ? cat({slice(x, dim, 1, n), in}, dim) : cat({in, slice(x, dim, 0, n - 1)}, dim);
}

}  // namespace halftone
