// Reductions on the CPU: floating types accumulate in f64, so the order of merging hardly shows; it depends on sizes only.
#include "halftone/ops/reduce.h"

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/scan.h"

namespace halftone {
namespace reduce {

namespace {

template <class T> using cpu_accumulate_t = std::conditional_t<std::integral<T>, int64_t, double>;

// A tensor's dimensions, split into those that stay and those that go.
struct Split {
  Shape kept, gone;
  Strides kept_strides, gone_strides;
  Split(const Meta& x, uint32_t dims) {
    for (size_t d = 0; d < x.shape.size(); ++d) {
      bool goes = dims >> d & 1u;
      (goes ? gone : kept).push_back(x.shape[d]);
      (goes ? gone_strides : kept_strides).push_back(x.strides[d]);
    }
  }
};

// Walks a shape row-major, giving offsets.
struct Walk {
  const Shape& shape;
  const Strides& strides;
  Shape index;
  int64_t at = 0;
  Walk(const Shape& s, const Strides& t, int64_t first) : shape(s), strides(t), index(Shape::filled(s.rank(), 0)) {
    for (size_t d = s.size(); d-- > 0;) {
      index[d] = first % s[d];
      first /= s[d];
      at += index[d] * t[d];
    }
  }
  void next() {
    for (size_t d = shape.size(); d-- > 0;) {
      at += strides[d];
      if (++index[d] < shape[d]) return;
      at -= strides[d] * shape[d];
      index[d] = 0;
    }
  }
};

constexpr int64_t chunk = 1 << 14;

// Elements [begin, end) of the reduced space, starting at x.
template <class A, class Op, class T> auto reduce_range(const Op& op, const T* x, const Rows<1>& gone, int64_t begin, int64_t end) {
  auto state = Op::template start<A>();
  Walk walk(gone.shape, gone.strides[0], begin);
  int64_t inner = gone.shape.back(), step = gone.strides[0].back();
  for (int64_t i = begin; i < end;) {
    int64_t in_row = i % inner, n = std::min(inner - in_row, end - i);
    const T* row = x + walk.at;
    for (int64_t k = 0; k < n; ++k) state = op.template add<A>(state, static_cast<A>(compute_t<T>(row[k * step])), i + k);
    i += n;
    if (i < end) {
      walk.at -= walk.index[walk.index.size() - 1] * step;
      walk.index[walk.index.size() - 1] = inner - 1;
      walk.at += (inner - 1) * step;
      walk.next();
    }
  }
  return state;
}

template <class T, class Y, class Op> void run_as(const Op& op, const Tensor& x, uint32_t dims, const Tensor& out) {
  using A = cpu_accumulate_t<T>;
  Split split(x.meta(), dims);
  Rows<1> gone(split.gone, {split.gone_strides});
  int64_t n = split.gone.numel(), outputs = split.kept.numel();
  const T* base = x.data<T>();
  Y* y = out.data<Y>();  // contiguous: freshly allocated, or a buffer of the same layout
  auto store = [&](int64_t o, auto state) { y[o] = convert<Y>(op.template finish<A>(state, n)); };
  if (n == 0) {
    for (int64_t o = 0; o < outputs; ++o) store(o, Op::template start<A>());
    return;
  }
  if (outputs == 1 && n > chunk) {  // one long sum: fixed chunks, merged in order
    auto chunks = static_cast<size_t>((n + chunk - 1) / chunk);
    std::vector<decltype(Op::template start<A>())> parts(chunks);
    parallel_for(static_cast<int64_t>(chunks), 1, [&](int64_t i, int64_t) {
      parts[static_cast<size_t>(i)] = reduce_range<A>(op, base, gone, i * chunk, std::min(n, (i + 1) * chunk));
    });
    auto state = parts[0];
    for (size_t i = 1; i < chunks; ++i) state = Op::template merge<A>(state, parts[i]);
    store(0, state);
    return;
  }
  bool columns = split.kept.rank() > 0 && split.kept_strides.back() == 1 && gone.strides[0].back() != 1;
  if (columns) {  // neighbours in memory are different outputs: go row by row over a strip of outputs
    constexpr int64_t strip = 64;
    int64_t width = split.kept.back(), strips = (width + strip - 1) / strip;
    parallel_for(outputs / width * strips, std::max<int64_t>(1, parallel_grain / (n * strip)), [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        int64_t first = s / strips * width + s % strips * strip, m = std::min(strip, width - s % strips * strip);
        decltype(Op::template start<A>()) state[strip];
        for (auto& v : state) v = Op::template start<A>();
        const T* at = base + Walk(split.kept, split.kept_strides, first).at;
        Walk walk(gone.shape, gone.strides[0], 0);
        for (int64_t i = 0; i < n; ++i, walk.next())
          for (int64_t k = 0; k < m; ++k) state[k] = op.template add<A>(state[k], static_cast<A>(compute_t<T>(at[walk.at + k])), i);
        for (int64_t k = 0; k < m; ++k) store(first + k, state[k]);
      }
    });
    return;
  }
  parallel_for(outputs, std::max<int64_t>(1, parallel_grain / n), [&](int64_t begin, int64_t end) {
    Walk walk(split.kept, split.kept_strides, begin);
    for (int64_t o = begin; o < end; ++o, walk.next()) store(o, reduce_range<A>(op, base + walk.at, gone, 0, n));
  });
}

template <class Op> void run_cpu(const Call& c, std::span<Tensor> out) {
  auto d = c.as<Dims>();
  visit<Op::types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    if constexpr (may_be_wide<Op> && is_16bit<T>)
      if (d.wide) return run_as<T, float>(Op{}, c.in[0], d.dims, out[0]);
    run_as<T, typename Op::template Result<T>>(Op{}, c.in[0], d.dims, out[0]);
  });
}

void run_norm(const Call& c, std::span<Tensor> out) {
  auto a = c.as<Norm>();
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    if (a.p == 2) run_as<T, T>(NormOf<true>{a.p}, c.in[0], a.dims, out[0]);
    else run_as<T, T>(NormOf<false>{a.p}, c.in[0], a.dims, out[0]);
  });
}

uint32_t mask(std::string_view op, const Tensor& x, std::span<const Size> dims) {
  uint32_t m = 0;
  for (auto d : dims) {
    uint32_t bit = 1u << normalize_dim(op, d, x.rank());
    HT_CHECK(!(m & bit), op, ": dim ", d.value, " is given twice");
    m |= bit;
  }
  return m;
}
uint32_t all_dims(const Tensor& x) { return (1u << x.rank()) - 1u; }

Shape reduced_shape(const Shape& x, Dims d) {
  Shape y;
  for (size_t i = 0; i < x.size(); ++i) {
    if (!(d.dims >> i & 1u)) y.push_back(x[i]);
    else if (d.keepdim) y.push_back(1);
  }
  return y;
}

// ---- variance: two passes with a second centring, so that a large mean costs no digits

template <class T> double variance(const T* x, const Rows<1>& gone, int64_t n, double correction) {
  auto each = [&](auto f) {
    Walk walk(gone.shape, gone.strides[0], 0);
    for (int64_t i = 0; i < n; ++i, walk.next()) f(static_cast<double>(compute_t<T>(x[walk.at])));
  };
  double s = 0, rest = 0, squares = 0;
  each([&](double v) { s += v; });
  double m = s / static_cast<double>(n);
  each([&](double v) { rest += v - m; });
  m += rest / static_cast<double>(n);
  each([&](double v) { squares += (v - m) * (v - m); });
  return squares / std::max(0.0, static_cast<double>(n) - correction);
}

template <bool root> void run_var(const Call& c, std::span<Tensor> out) {
  Var v = c.as<Var>();
  Split split(c.in[0].meta(), v.dims);
  Rows<1> gone(split.gone, {split.gone_strides});
  int64_t n = split.gone.numel();
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    const T* x = c.in[0].data<T>();
    T* y = out[0].data<T>();
    parallel_for(split.kept.numel(), std::max<int64_t>(1, parallel_grain / std::max<int64_t>(n, 1)), [&](int64_t begin, int64_t end) {
      Walk walk(split.kept, split.kept_strides, begin);
      for (int64_t o = begin; o < end; ++o, walk.next()) {
        double square = variance(x + walk.at, gone, n, static_cast<double>(v.correction));
        y[o] = T(root ? std::sqrt(square) : square);
      }
    });
  });
}

}  // namespace

int64_t count(const Shape& x, uint32_t dims) {
  int64_t n = 1;
  for (size_t i = 0; i < x.size(); ++i) if (dims >> i & 1u) n = checked_mul(n, x[i]);
  return n;
}

Metas infer(const Call& c, DTypes allowed, bool identity, DType (*result)(DType)) {
  const Meta& x = c.in[0].meta();
  Dims d = c.as<Dims>();
  HT_CHECK(contains(allowed, x.dtype), c.op->name, ": ", x.dtype, " is not supported; cast x to a floating dtype with to()");
  HT_CHECK(identity || count(x.shape, d.dims) > 0, c.op->name, ": ", x.shape, " has no elements to choose from");
  return {Meta(reduced_shape(x.shape, d), d.wide && is_16bit_dtype(x.dtype) ? DType::f32 : result(x.dtype), x.device)};
}

std::vector<Sample> samples(bool identity, SampleInput values) {
  auto sample = [&](Shape x, uint32_t dims, bool keepdim) {
    values.shape = x;
    return Sample{{values}, Attrs::of(Dims{dims, keepdim})};
  };
  std::vector<Sample> all = {sample({7}, 1, false),       sample({33}, 1, true),       sample({2, 3}, 1, false),      sample({2, 3}, 2, true),
                             sample({257, 3}, 1, false),  sample({3, 257}, 2, false),  sample({2, 3, 4}, 5, false),   sample({2, 3, 4}, 2, true),
                             sample({4, 1, 5}, 7, false), sample({}, 0, false),        sample({70, 70}, 1, false)};
  if (identity) {
    all.push_back(sample({0, 3}, 1, false));
    all.push_back(sample({0, 3}, 2, true));
  }
  return all;
}

Tensor restore_dims(const Tensor& y, const Shape& x, Dims d) {
  if (d.keepdim) return y;
  return reshape(y, reduced_shape(x, {d.dims, true}));
}

Tensor Mean::df(const Tensor&, const Tensor&, const Tensor& g, const Shape& x) {
  int64_t n = x.numel() / std::max<int64_t>(g.numel(), 1);
  return expand(g / std::max<int64_t>(n, 1), x);
}
// The product of all others, from both sides, so that zeros are right in derivatives of any order.
Tensor Prod::df(const Tensor& x, const Tensor&, const Tensor& g, const Shape&) {
  Shape order, back = Shape::filled(x.rank(), 0), rows;
  for (bool goes : {false, true})
    for (int d = 0; d < x.rank(); ++d) {
      if ((g.size(d) != x.size(d)) != goes) continue;
      back[static_cast<size_t>(d)] = order.rank();
      order.push_back(d);
      if (!goes) rows.push_back(x.size(d));
    }
  if (rows.rank() == x.rank()) return g;
  Tensor turned = permute(x, order);
  rows.push_back(turned.numel() / std::max<int64_t>(1, rows.numel()));
  Tensor lines = reshape(is_16bit_dtype(x.dtype()) ? turned.to(DType::f32) : turned, rows);
  Tensor others = shifted(cumprod(lines, -1), -1, false, 1) * shifted(cumprod(lines, -1, {.reverse = true}), -1, true, 1);
  return g * permute(reshape(others, turned.shape()), back).to(x.dtype());
}
Tensor LogSumExp::df(const Tensor& x, const Tensor& y, const Tensor& g, const Shape&) {
  return g * exp(x - where(eq(y, -infinity<double>), 0, y));
}
Tensor share_among_ties(const Tensor& x, const Tensor& y, const Tensor& g) {
  Tensor ties = eq(x, y).to(x.dtype());
  return ties * (g / sum_to(ties, g.shape()));
}

}  // namespace reduce

namespace {

using reduce::Dims, reduce::restore_dims;

Metas infer_spread(const Call& c) {
  const Meta& x = c.in[0].meta();
  HT_CHECK(is_floating(x.dtype), c.op->name, ": expected a floating dtype, got ", x.dtype, "; cast x with to()");
  auto v = c.as<reduce::Var>();
  return {Meta(reduce::reduced_shape(x.shape, {v.dims, v.keepdim}), x.dtype, x.device)};
}
std::vector<Sample> spread_samples() {
  auto sample = [](Shape x, uint32_t dims, bool keepdim, int64_t correction) {
    return Sample{{{.shape = x}}, Attrs::of(reduce::Var{dims, keepdim, correction})};
  };
  return {sample({7}, 1, false, 1), sample({33}, 1, true, 0), sample({2, 3}, 1, false, 1), sample({2, 3}, 2, true, 0), sample({257, 3}, 1, false, 1),
          sample({3, 257}, 2, false, 0), sample({2, 3, 4}, 5, false, 1), sample({4, 1, 5}, 7, false, 0)};
}
// What the derivatives share: the dimensions that went, x - mean, and the divisor.
struct Centred {
  Dims d;
  Tensor x;
  double n;
  explicit Centred(const Rule& r) {
    auto v = r.as<reduce::Var>();
    d = {v.dims, v.keepdim};
    x = r.in() - reduce::apply<reduce::Mean>(r.in(), {v.dims, true});
    n = static_cast<double>(std::max<int64_t>(0, reduce::count(x.shape(), v.dims) - v.correction));
  }
};
// a / b, but 0 where b is 0, in all derivatives.
Tensor ratio(const Tensor& a, const Tensor& b) {
  Tensor nothing = eq(b, 0);
  return where(nothing, 0, a / where(nothing, 1, b));
}

}  // namespace

namespace op {

constinit OpDef var = {
    .name = "var", .doc = "the variance over dimensions: sum((x - mean)^2) / (n - correction)", .cast = Cast::keep,
    .infer = infer_spread,
    .saves = {.in = 1, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      Centred c(r);
      return {c.x * (restore_dims(r.grad(), c.x.shape(), c.d) * (2 / c.n))};
    },
    .dtypes = {floating_types, floating_types},
    .samples = spread_samples,
    .kernel = {reduce::run_var<false>}};

constinit OpDef stddev = {
    .name = "std", .doc = "the standard deviation over dimensions, the square root of var; its derivative at 0 is 0", .cast = Cast::keep,
    .infer = infer_spread,
    .saves = {.in = 1, .out = 1},
    .backward = [](const Rule& r) -> Tensors {
      Centred c(r);
      return {c.x * (restore_dims(ratio(r.grad(), r.out()), c.x.shape(), c.d) * (1 / c.n))};
    },
    .dtypes = {floating_types, floating_types},
    .samples = spread_samples,
    .kernel = {reduce::run_var<true>}};

constinit OpDef norm = {
    .name = "norm", .doc = "the p-norm over dimensions, sum(|x|^p)^(1/p); its derivative at 0 is 0", .cast = Cast::full,
    .infer = [](const Call& c) -> Metas {
      const Meta& x = c.in[0].meta();
      auto a = c.as<reduce::Norm>();
      HT_CHECK(is_floating(x.dtype), "norm: expected a floating dtype, got ", x.dtype, "; cast x with to()");
      HT_CHECK(a.p != 0 && std::isfinite(a.p), "norm: expected a finite p, and not 0, got ", a.p);
      return {Meta(reduce::reduced_shape(x.shape, {a.dims, a.keepdim}), x.dtype, x.device)};
    },
    .saves = {.in = 1, .out = 1},
    .backward = [](const Rule& r) -> Tensors {
      auto a = r.as<reduce::Norm>();
      const Tensor& x = r.in();
      Tensor y = restore_dims(r.out(), x.shape(), {a.dims, a.keepdim}), g = restore_dims(r.grad(), x.shape(), {a.dims, a.keepdim});
      if (a.p == 2) return {x * ratio(g, y)};
      if (a.p == 1) return {sign(x) * g};
      Tensor part = ratio(abs(x), y);  // in [0, 1]; 0 is left out, where the power or one of its derivatives may be infinite
      return {sign(x) * g * halftone::pow(halftone::where(eq(part, 0), 1, part), a.p - 1)};
    },
    .dtypes = {floating_types, floating_types},
    .samples = []() -> std::vector<Sample> {
      auto sample = [](Shape x, uint32_t dims, bool keepdim, double p) { return Sample{{{.shape = x}}, Attrs::of(reduce::Norm{dims, keepdim, p})}; };
      return {sample({7}, 1, false, 2), sample({33}, 1, true, 1), sample({2, 3}, 1, false, 3), sample({2, 3}, 2, true, 1.5), sample({257, 3}, 1, false, 2),
              sample({3, 257}, 2, false, 2), sample({2, 3, 4}, 5, false, 1), sample({4, 1, 5}, 7, false, 2.5), sample({3, 70}, 2, true, 0.5),
              sample({}, 0, false, 2), sample({0, 3}, 1, false, 2)};
    },
    .kernel = {reduce::run_norm}};

}  // namespace op

std::span<OpDef* const> reduce_ops() {
  static constexpr OpDef* all[] = {&op::var, &op::stddev, &op::norm};
  return all;
}
void fill_cpu_reduce() {
  elementwise::each(reduce::Family{}, []<class Op>(Type<Op>) { set_kernel(reduce::def<Op>, DeviceType::cpu, reduce::run_cpu<Op>); });
}

namespace {
using Sizes = std::initializer_list<Size>;
template <class Op> Tensor reduce_dims(const Tensor& x, Sizes dims, ReduceOptions o) {
  return reduce::apply<Op>(x, {reduce::mask(Op::name, x, {dims.begin(), dims.size()}), o.keepdim});
}
template <class Op> Tensor reduce_all(const Tensor& x) { return reduce::apply<Op>(x, {reduce::all_dims(x), false}); }
Tensor floating(const Tensor& x) { return is_floating(x.dtype()) ? x : x.to(DType::f32); }
Tensor truth(const Tensor& x) { return x.dtype() == DType::b8 ? x : ne(x, 0); }
Tensor spread(const OpDef& op, const Tensor& x, uint32_t dims, const VarOptions& o) {
  return call(op, {x}, Attrs::of(reduce::Var{dims, o.keepdim, o.correction}));
}
Tensor norm_over(const Tensor& x, uint32_t dims, const NormOptions& o) {
  Dims d{dims, o.keepdim};
  HT_CHECK(o.p == o.p, "norm: p is NaN");
  if (o.p == 0) return reduce::apply<reduce::Sum>(ne(x, 0), d).to(x.dtype());
  if (std::isinf(o.p)) return o.p > 0 ? reduce::apply<reduce::Amax>(abs(x), d) : reduce::apply<reduce::Amin>(abs(x), d);
  return call(op::norm, {x}, Attrs::of(reduce::Norm{dims, o.keepdim, o.p}));
}
}  // namespace

Tensor sum(const Tensor& x) { return reduce_all<reduce::Sum>(x); }
Tensor sum(const Tensor& x, Sizes dims, ReduceOptions o) { return reduce_dims<reduce::Sum>(x, dims, o); }
Tensor mean(const Tensor& x) { return reduce_all<reduce::Mean>(floating(x)); }
Tensor mean(const Tensor& x, Sizes dims, ReduceOptions o) { return reduce_dims<reduce::Mean>(floating(x), dims, o); }
Tensor prod(const Tensor& x) { return reduce_all<reduce::Prod>(x); }
Tensor prod(const Tensor& x, Sizes dims, ReduceOptions o) { return reduce_dims<reduce::Prod>(x, dims, o); }
Tensor logsumexp(const Tensor& x) { return reduce_all<reduce::LogSumExp>(x); }
Tensor logsumexp(const Tensor& x, Sizes dims, ReduceOptions o) { return reduce_dims<reduce::LogSumExp>(x, dims, o); }
Tensor all(const Tensor& x) { return reduce_all<reduce::All>(truth(x)); }
Tensor all(const Tensor& x, Sizes dims, ReduceOptions o) { return reduce_dims<reduce::All>(truth(x), dims, o); }
Tensor any(const Tensor& x) { return reduce_all<reduce::Any>(truth(x)); }
Tensor any(const Tensor& x, Sizes dims, ReduceOptions o) { return reduce_dims<reduce::Any>(truth(x), dims, o); }
Tensor count_nonzero(const Tensor& x) { return sum(truth(x)); }
Tensor count_nonzero(const Tensor& x, Sizes dims, ReduceOptions o) { return reduce_dims<reduce::Sum>(truth(x), dims, o); }
Tensor amax(const Tensor& x) { return reduce_all<reduce::Amax>(x); }
Tensor amax(const Tensor& x, Sizes dims, ReduceOptions o) { return reduce_dims<reduce::Amax>(x, dims, o); }
Tensor amin(const Tensor& x) { return reduce_all<reduce::Amin>(x); }
Tensor amin(const Tensor& x, Sizes dims, ReduceOptions o) { return reduce_dims<reduce::Amin>(x, dims, o); }
Tensor argmax(const Tensor& x) { return reduce_all<reduce::Argmax>(x); }
Tensor argmax(const Tensor& x, Size dim, ReduceOptions o) { return reduce_dims<reduce::Argmax>(x, {dim}, o); }
Tensor argmin(const Tensor& x) { return reduce_all<reduce::Argmin>(x); }
Tensor argmin(const Tensor& x, Size dim, ReduceOptions o) { return reduce_dims<reduce::Argmin>(x, {dim}, o); }
Tensor var(const Tensor& x, VarOptions o) { return spread(op::var, x, reduce::all_dims(x), o); }
Tensor var(const Tensor& x, Sizes dims, VarOptions o) { return spread(op::var, x, reduce::mask("var", x, {dims.begin(), dims.size()}), o); }
Tensor stddev(const Tensor& x, VarOptions o) { return spread(op::stddev, x, reduce::all_dims(x), o); }
Tensor stddev(const Tensor& x, Sizes dims, VarOptions o) { return spread(op::stddev, x, reduce::mask("std", x, {dims.begin(), dims.size()}), o); }
Tensor norm(const Tensor& x, NormOptions o) { return norm_over(x, reduce::all_dims(x), o); }
Tensor norm(const Tensor& x, Sizes dims, NormOptions o) { return norm_over(x, reduce::mask("norm", x, {dims.begin(), dims.size()}), o); }

Tensor Tensor::sum() const { return halftone::sum(*this); }
Tensor Tensor::sum(Size dim, ReduceOptions o) const { return halftone::sum(*this, {dim}, o); }
Tensor Tensor::sum(Sizes dims, ReduceOptions o) const { return halftone::sum(*this, dims, o); }
Tensor Tensor::mean() const { return halftone::mean(*this); }
Tensor Tensor::mean(Size dim, ReduceOptions o) const { return halftone::mean(*this, {dim}, o); }
Tensor Tensor::mean(Sizes dims, ReduceOptions o) const { return halftone::mean(*this, dims, o); }
Tensor Tensor::max() const { return amax(*this); }
Tensor Tensor::argmax(Size dim, ReduceOptions o) const { return halftone::argmax(*this, dim, o); }
Tensor Tensor::pow(double exponent) const { return halftone::pow(*this, exponent); }
Tensor Tensor::sqrt() const { return halftone::sqrt(*this); }
Tensor Tensor::exp() const { return halftone::exp(*this); }
Tensor Tensor::log() const { return halftone::log(*this); }
Tensor Tensor::abs() const { return halftone::abs(*this); }

}  // namespace halftone
