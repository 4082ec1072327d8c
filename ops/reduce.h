#pragma once
// Reductions. One struct is the whole operator: how a partial result starts, takes an element, merges with another and
// becomes the output, plus its derivative. Backends only decide the order of merging, which depends on sizes alone.
//
//   State<A>          the partial result; A is what the dtype accumulates in
//   start, add(s, x, i), merge(s, t), finish(s, n): i is the element's place among the n reduced ones, row-major
//   Result<T>         the output's element type for input type T
//   df(x, y, g)       the gradient of x; y and g keep the reduced dimensions as size 1
#include <limits>

#include "halftone/ops/binary.h"
#include "halftone/ops/shape.h"

namespace halftone {

namespace reduce {

// Which dimensions go (bit d for dimension d), whether they stay as size 1, and whether a sum or mean of 16-bit elements
// stays in the f32 it accumulated in.
struct Dims { uint32_t dims = 0; bool keepdim = false, wide = false; };
// The same for var and std, with what the divisor lacks of n; and for norm, with its p.
struct Var { uint32_t dims; bool keepdim; int64_t correction; };
struct Norm { uint32_t dims; bool keepdim; double p; };

inline constexpr Saves saves_x{.in = 1, .out = 0}, saves_both{.in = 1, .out = 1}, saves_none{};

template <class T> inline constexpr T infinity = std::numeric_limits<T>::infinity();  // 0 when there is none
template <class T> HT_HD constexpr T lowest() { return infinity<T> > T(0) ? static_cast<T>(-infinity<T>) : smallest<T>; }
template <class T> HT_HD constexpr T highest() { return infinity<T> > T(0) ? infinity<T> : largest<T>; }
// The number of elements that `d` reduces of a tensor of this shape.
HT_API int64_t count(const Shape& x, uint32_t dims);

struct Sum {
  static constexpr auto name = "sum", doc = "the sum over dimensions; of integers and bool, in i64";
  static constexpr Cast cast = Cast::total;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = all_types;
  template <class T> using Result = std::conditional_t<std::integral<T>, int64_t, T>;
  template <class A> using State = A;
  template <class A> HT_HD static A start() { return A(0); }
  template <class A> HT_HD static A add(A s, A x, int64_t) { return s + x; }
  template <class A> HT_HD static A merge(A s, A t) { return s + t; }
  template <class A> HT_HD static A finish(A s, int64_t) { return s; }
  static HT_API Tensor df(const Tensor&, const Tensor&, const Tensor& g, const Shape& x) { return expand(g, x); }
};
struct Mean {
  static constexpr auto name = "mean", doc = "the mean over dimensions; of nothing, NaN";
  static constexpr Cast cast = Cast::total;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = floating_types;
  template <class T> using Result = T;
  template <class A> using State = A;
  template <class A> HT_HD static A start() { return A(0); }
  template <class A> HT_HD static A add(A s, A x, int64_t) { return s + x; }
  template <class A> HT_HD static A merge(A s, A t) { return s + t; }
  template <class A> HT_HD static A finish(A s, int64_t n) { return s / static_cast<A>(n); }
  static HT_API Tensor df(const Tensor&, const Tensor&, const Tensor& g, const Shape& x);
};
// In f64, where partial products have room.
struct Prod {
  static constexpr auto name = "prod", doc = "the product over dimensions; of integers, in i64";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_x;
  static constexpr DTypes types = number_types;
  static constexpr double low = 0.8, high = 1.215;
  template <class T> using Result = std::conditional_t<std::integral<T>, int64_t, T>;
  template <class A> using State = std::conditional_t<std::integral<A>, A, double>;
  template <class A> HT_HD static State<A> start() { return State<A>(1); }
  template <class A> HT_HD static State<A> add(State<A> s, A x, int64_t) { return s * x; }
  template <class A> HT_HD static State<A> merge(State<A> s, State<A> t) { return s * t; }
  template <class A> HT_HD static State<A> finish(State<A> s, int64_t) { return s; }
  static HT_API Tensor df(const Tensor& x, const Tensor&, const Tensor& g, const Shape&);
};
// In one pass, relative to the largest element so far. Where that is infinite only its equals count, so that -inf alone gives
// -inf; the gradient there is 0.
struct LogSumExp {
  static constexpr auto name = "logsumexp", doc = "log(sum(exp(x))) over dimensions, without overflow; of nothing and of -inf alone, -inf";
  static constexpr Cast cast = Cast::full;
  static constexpr Saves saves = saves_both;
  static constexpr DTypes types = floating_types;
  template <class T> using Result = T;
  template <class A> struct State { A high, sum; };
  template <class A> HT_HD static State<A> start() { return {lowest<A>(), A(0)}; }
  template <class A> HT_HD static State<A> add(State<A> s, A x, int64_t) { return merge(s, State<A>{x, A(1)}); }
  template <class A> HT_HD static State<A> merge(State<A> s, State<A> t) {
    if (s.high == t.high) return {s.high, s.sum + t.sum};
    if (s.high > t.high) return {s.high, s.sum + t.sum * ::exp(t.high - s.high)};
    return {t.high, t.sum + s.sum * ::exp(s.high - t.high)};
  }
  template <class A> HT_HD static A finish(State<A> s, int64_t) { return s.high + ::log(s.sum); }
  static HT_API Tensor df(const Tensor& x, const Tensor& y, const Tensor& g, const Shape&);
};
// Of bool alone; what is not bool is compared with 0 first.
struct All {
  static constexpr auto name = "all", doc = "whether every element is true; so it is of nothing";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = only(DType::b8);
  template <class T> using Result = bool;
  template <class A> using State = A;
  template <class A> HT_HD static A start() { return A(1); }
  template <class A> HT_HD static A add(A s, A x, int64_t) { return s & x; }
  template <class A> HT_HD static A merge(A s, A t) { return s & t; }
  template <class A> HT_HD static A finish(A s, int64_t) { return s; }
};
struct Any {
  static constexpr auto name = "any", doc = "whether some element is true";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = only(DType::b8);
  template <class T> using Result = bool;
  template <class A> using State = A;
  template <class A> HT_HD static A start() { return A(0); }
  template <class A> HT_HD static A add(A s, A x, int64_t) { return s | x; }
  template <class A> HT_HD static A merge(A s, A t) { return s | t; }
  template <class A> HT_HD static A finish(A s, int64_t) { return s; }
};

// What is best: an order, the element that every other one beats, and the texts.
struct Largest {
  static constexpr auto amax = "amax", amax_doc = "the largest element over dimensions; NaN if there is one";
  static constexpr auto argmax = "argmax", argmax_doc = "the index of the largest element, the lowest of several; NaN counts as the largest";
  template <class A> HT_HD static bool better(A a, A b) { return a > b; }
  template <class A> HT_HD static A worst() { return lowest<A>(); }
};
struct Smallest {
  static constexpr auto amax = "amin", amax_doc = "the smallest element over dimensions; NaN if there is one";
  static constexpr auto argmax = "argmin", argmax_doc = "the index of the smallest element, the lowest of several; NaN counts as the smallest";
  template <class A> HT_HD static bool better(A a, A b) { return a < b; }
  template <class A> HT_HD static A worst() { return highest<A>(); }
};
HT_API Tensor share_among_ties(const Tensor& x, const Tensor& y, const Tensor& g);

// The best element; NaN if there is one. Ties share the gradient equally.
template <class Order> struct Extremum {
  static constexpr auto name = Order::amax, doc = Order::amax_doc;
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_both;
  static constexpr DTypes types = number_types;
  static constexpr bool chooses = true;
  template <class T> using Result = T;
  template <class A> using State = A;
  template <class A> HT_HD static A start() { return Order::template worst<A>(); }
  template <class A> HT_HD static A add(A s, A x, int64_t) { return merge(s, x); }
  template <class A> HT_HD static A merge(A s, A t) { return Order::better(t, s) || t != t ? t : s; }
  template <class A> HT_HD static A finish(A s, int64_t) { return s; }
  static Tensor df(const Tensor& x, const Tensor& y, const Tensor& g, const Shape&) { return share_among_ties(x, y, g); }
};
template <class A> struct Best {
  A value;
  int64_t index;  // -1: nothing yet
};
// The lowest index of the best element; a NaN is better than any other.
template <class Order> struct BestIndex {
  static constexpr auto name = Order::argmax, doc = Order::argmax_doc;
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = number_types;
  static constexpr bool chooses = true;
  template <class T> using Result = int64_t;
  template <class A> using State = Best<A>;
  template <class A> HT_HD static Best<A> start() { return {Order::template worst<A>(), -1}; }
  template <class A> HT_HD static Best<A> add(Best<A> s, A x, int64_t i) { return merge(s, Best<A>{x, i}); }
  template <class A> HT_HD static Best<A> merge(Best<A> s, Best<A> t) {
    if (s.index < 0 || t.index < 0) return s.index < 0 ? t : s;
    bool s_nan = s.value != s.value, t_nan = t.value != t.value;
    if (s_nan != t_nan) return s_nan ? s : t;
    if (!s_nan && s.value != t.value) return Order::better(s.value, t.value) ? s : t;
    return s.index < t.index ? s : t;
  }
  template <class A> HT_HD static int64_t finish(Best<A> s, int64_t) { return s.index; }
};
using Amax = Extremum<Largest>;
using Amin = Extremum<Smallest>;
using Argmax = BestIndex<Largest>;
using Argmin = BestIndex<Smallest>;

// A p-norm, for p neither 0 nor infinite: a struct of the family but for its number. Sums in f64, so that no square overflows.
template <bool squares> struct NormOf {
  double p;
  template <class A> using State = double;
  template <class A> HT_HD static double start() { return 0; }
  template <class A> HT_HD double add(double s, A x, int64_t) const {
    double v = ::fabs(static_cast<double>(x));
    if constexpr (squares) return s + v * v;
    else return s + (p == 1 ? v : ::pow(v, p));
  }
  template <class A> HT_HD static double merge(double s, double t) { return s + t; }
  template <class A> HT_HD double finish(double s, int64_t) const {
    if constexpr (squares) return ::sqrt(s);
    else return p == 1 ? s : ::pow(s, 1 / p);
  }
};

// In lists that a backend may compile side by side.
using Sums = elementwise::List<Sum, Mean>;
using Others = elementwise::List<Prod, LogSumExp, All, Any>;
using Extrema = elementwise::List<Amax, Amin, Argmax, Argmin>;
using Family = decltype(Sums{} + Others{} + Extrema{});

HT_API Metas infer(const Call& c, DTypes allowed, bool identity, DType (*result)(DType));
HT_API std::vector<Sample> samples(bool identity, SampleInput values);
HT_API Tensor restore_dims(const Tensor& y, const Shape& x, Dims d);  // back to size-1 dimensions where they went

template <class Op> DType result_dtype(DType t) {
  return visit<Op::types>(t, []<class T>(Type<T>) { return dtype_of<typename Op::template Result<T>>; });
}
// A sum or mean of nothing has a value; a maximum of nothing has none.
template <class Op> inline constexpr bool has_identity = !requires { Op::chooses; };
// Whether Dims::wide counts.
template <class Op> inline constexpr bool may_be_wide = Op::cast == Cast::total;
// Elements as samples need them; a dtype that is the only one is named.
template <class Op> SampleInput sample_values() {
  if (Op::types == only(DType::b8)) return {.shape = {}, .low = 0, .high = 2, .dtype = DType::b8, .differentiable = false};
  return {.shape = {}, .low = elementwise::low_of<Op>(), .high = elementwise::high_of<Op>()};
}

template <class Op> constexpr OpDef describe() {
  OpDef d{.name = Op::name, .doc = Op::doc};
  d.cast = Op::cast;
  d.saves = Op::saves;
  d.infer = [](const Call& c) { return infer(c, Op::types, has_identity<Op>, result_dtype<Op>); };
  if constexpr (requires { &Op::df; })
    d.backward = [](const Rule& r) -> Tensors {
      constexpr Saves s = Op::saves;
      Dims dims = r.as<Dims>();
      const Shape& x = r.in_meta().shape;
      if (!is_floating(r.in_meta().dtype)) return {Tensor()};
      return {Op::df(s.in & 1u ? r.in() : Tensor(), s.out & 1u ? restore_dims(r.out(), x, dims) : Tensor(), restore_dims(r.grad(), x, dims), x)};
    };
  for (auto& t : d.dtypes) t = Op::types;
  if constexpr (may_be_wide<Op>)
    d.in_f32 = [](const Attrs& a) {
      auto wide = a.as<Dims>();
      wide.wide = true;
      return Attrs::of(wide);
    };
  d.samples = [] { return samples(has_identity<Op>, sample_values<Op>()); };
  return d;
}
template <class Op> HT_API inline constinit OpDef def = describe<Op>();
template <class Op> Tensor apply(const Tensor& x, Dims d) { return call(def<Op>, {x}, Attrs::of(d)); }

}  // namespace reduce

namespace op {
extern HT_API OpDef var, stddev, norm;
}

// ---- over all elements, to a 0-d tensor; or over dims (negative count from the back)
HT_API Tensor sum(const Tensor& x);
HT_API Tensor sum(const Tensor& x, std::initializer_list<Size> dims, ReduceOptions o = {});
HT_API Tensor mean(const Tensor& x);
HT_API Tensor mean(const Tensor& x, std::initializer_list<Size> dims, ReduceOptions o = {});
HT_API Tensor prod(const Tensor& x);
HT_API Tensor prod(const Tensor& x, std::initializer_list<Size> dims, ReduceOptions o = {});
HT_API Tensor logsumexp(const Tensor& x);
HT_API Tensor logsumexp(const Tensor& x, std::initializer_list<Size> dims, ReduceOptions o = {});
// Of elements that are not 0: whether all are, whether some are, and how many (i64). NaN is not 0.
HT_API Tensor all(const Tensor& x);
HT_API Tensor all(const Tensor& x, std::initializer_list<Size> dims, ReduceOptions o = {});
HT_API Tensor any(const Tensor& x);
HT_API Tensor any(const Tensor& x, std::initializer_list<Size> dims, ReduceOptions o = {});
HT_API Tensor count_nonzero(const Tensor& x);
HT_API Tensor count_nonzero(const Tensor& x, std::initializer_list<Size> dims, ReduceOptions o = {});
HT_API Tensor amax(const Tensor& x);
HT_API Tensor amax(const Tensor& x, std::initializer_list<Size> dims, ReduceOptions o = {});
HT_API Tensor amin(const Tensor& x);
HT_API Tensor amin(const Tensor& x, std::initializer_list<Size> dims, ReduceOptions o = {});
// Indices (i64) along one dimension; of the flattened tensor when none is given.
HT_API Tensor argmax(const Tensor& x);
HT_API Tensor argmax(const Tensor& x, Size dim, ReduceOptions o = {});
HT_API Tensor argmin(const Tensor& x);
HT_API Tensor argmin(const Tensor& x, Size dim, ReduceOptions o = {});

struct VarOptions {
  int64_t correction = 1;  // the divisor is n - correction: 1 the sample variance, 0 the population's
  bool keepdim = false;
};
// The variance, from two passes with a second centring: c = x - mean(x); c -= mean(c); sum(c * c) / (n - correction).
HT_API Tensor var(const Tensor& x, VarOptions o = {});
HT_API Tensor var(const Tensor& x, std::initializer_list<Size> dims, VarOptions o = {});
// Its square root, the standard deviation (std is a namespace); the gradient at equal elements is 0.
HT_API Tensor stddev(const Tensor& x, VarOptions o = {});
HT_API Tensor stddev(const Tensor& x, std::initializer_list<Size> dims, VarOptions o = {});

struct NormOptions {
  double p = 2;
  bool keepdim = false;
};
// sum(|x|^p)^(1/p); p = 0 counts what is not 0, p = inf and -inf are the largest and the smallest |x|. The gradient is 0 at
// an element of 0 and where the norm is 0.
HT_API Tensor norm(const Tensor& x, NormOptions o = {});
HT_API Tensor norm(const Tensor& x, std::initializer_list<Size> dims, NormOptions o = {});

}  // namespace halftone
