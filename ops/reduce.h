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

// Which dimensions go (bit d for dimension d), whether they stay as size 1, and whether a sum of 16-bit elements
// stays in the f32 it accumulated in.
struct Dims { uint32_t dims = 0; bool keepdim = false, wide = false; };
// The same for var, with what its divisor lacks of n.
struct Var { uint32_t dims; bool keepdim; int64_t correction; };

inline constexpr Saves saves_x{.in = 1, .out = 0}, saves_both{.in = 1, .out = 1}, saves_none{};

template <class T> inline constexpr T infinity = std::numeric_limits<T>::infinity();  // 0 when there is none
template <class T> HT_HD constexpr T lowest() { return infinity<T> > T(0) ? static_cast<T>(-infinity<T>) : smallest<T>; }
template <class T> HT_HD constexpr T highest() { return infinity<T> > T(0) ? infinity<T> : largest<T>; }
// The number of elements that `d` reduces of a tensor of this shape.
HT_API int64_t count(const Shape& x, uint32_t dims);

struct Sum {
  static constexpr auto name = "sum", doc = "the sum over dimensions; of integers and bool, in i64";
  static constexpr Cast cast = Cast::keep;
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
  static constexpr Cast cast = Cast::keep;
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
// The largest element; NaN if there is one. Ties share the gradient equally.
struct Amax {
  static constexpr auto name = "amax", doc = "the largest element over dimensions; NaN if there is one";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_both;
  static constexpr DTypes types = number_types;
  template <class T> using Result = T;
  template <class A> using State = A;
  template <class A> HT_HD static A start() { return lowest<A>(); }
  template <class A> HT_HD static A add(A s, A x, int64_t) { return s >= x || s != s ? s : x; }
  template <class A> HT_HD static A merge(A s, A t) { return s >= t || s != s ? s : t; }
  template <class A> HT_HD static A finish(A s, int64_t) { return s; }
  static HT_API Tensor df(const Tensor& x, const Tensor& y, const Tensor& g, const Shape&);
};
struct Amin {
  static constexpr auto name = "amin", doc = "the smallest element over dimensions; NaN if there is one";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_both;
  static constexpr DTypes types = number_types;
  template <class T> using Result = T;
  template <class A> using State = A;
  template <class A> HT_HD static A start() { return highest<A>(); }
  template <class A> HT_HD static A add(A s, A x, int64_t) { return s <= x || s != s ? s : x; }
  template <class A> HT_HD static A merge(A s, A t) { return s <= t || s != s ? s : t; }
  template <class A> HT_HD static A finish(A s, int64_t) { return s; }
  static HT_API Tensor df(const Tensor& x, const Tensor& y, const Tensor& g, const Shape&) { return Amax::df(x, y, g, {}); }
};
template <class A> struct Best {
  A value;
  int64_t index;  // -1: nothing yet
};
// The lowest index of the largest element; a NaN counts as the largest.
struct Argmax {
  static constexpr auto name = "argmax", doc = "the index of the largest element, the lowest of several; NaN counts as the largest";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = number_types;
  template <class T> using Result = int64_t;
  template <class A> using State = Best<A>;
  template <class A> HT_HD static Best<A> start() { return {lowest<A>(), -1}; }
  template <class A> HT_HD static Best<A> add(Best<A> s, A x, int64_t i) { return merge(s, Best<A>{x, i}); }
  template <class A> HT_HD static Best<A> merge(Best<A> s, Best<A> t) {
    if (s.index < 0 || t.index < 0) return s.index < 0 ? t : s;
    bool s_nan = s.value != s.value, t_nan = t.value != t.value;
    if (s_nan != t_nan) return s_nan ? s : t;
    if (!s_nan && s.value != t.value) return s.value > t.value ? s : t;
    return s.index < t.index ? s : t;
  }
  template <class A> HT_HD static int64_t finish(Best<A> s, int64_t) { return s.index; }
};
struct Argmin {
  static constexpr auto name = "argmin", doc = "the index of the smallest element, the lowest of several; NaN counts as the smallest";
  static constexpr Cast cast = Cast::keep;
  static constexpr Saves saves = saves_none;
  static constexpr DTypes types = number_types;
  template <class T> using Result = int64_t;
  template <class A> using State = Best<A>;
  template <class A> HT_HD static Best<A> start() { return {highest<A>(), -1}; }
  template <class A> HT_HD static Best<A> add(Best<A> s, A x, int64_t i) { return merge(s, Best<A>{x, i}); }
  template <class A> HT_HD static Best<A> merge(Best<A> s, Best<A> t) {
    if (s.index < 0 || t.index < 0) return s.index < 0 ? t : s;
    bool s_nan = s.value != s.value, t_nan = t.value != t.value;
    if (s_nan != t_nan) return s_nan ? s : t;
    if (!s_nan && s.value != t.value) return s.value < t.value ? s : t;
    return s.index < t.index ? s : t;
  }
  template <class A> HT_HD static int64_t finish(Best<A> s, int64_t) { return s.index; }
};

using All = elementwise::List<Sum, Mean, Amax, Amin, Argmax, Argmin>;

HT_API Metas infer(const Call& c, DTypes allowed, bool identity, DType (*result)(DType));
HT_API std::vector<Sample> samples(bool identity);
HT_API Tensor restore_dims(const Tensor& y, const Shape& x, Dims d);  // back to size-1 dimensions where they went

template <class Op> DType result_dtype(DType t) {
  return visit<Op::types>(t, []<class T>(Type<T>) { return dtype_of<typename Op::template Result<T>>; });
}
// A sum or mean of nothing has a value; a maximum of nothing has none.
template <class Op> inline constexpr bool has_identity = std::same_as<Op, Sum> || std::same_as<Op, Mean>;

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
  d.samples = [] { return samples(has_identity<Op>); };
  return d;
}
template <class Op> HT_API inline constinit OpDef def = describe<Op>();
template <class Op> Tensor apply(const Tensor& x, Dims d) { return call(def<Op>, {x}, Attrs::of(d)); }

}  // namespace reduce

namespace op {
extern HT_API OpDef var;
}

// ---- over all elements, to a 0-d tensor; or over dims (negative count from the back)
HT_API Tensor sum(const Tensor& x);
HT_API Tensor sum(const Tensor& x, std::initializer_list<Size> dims, ReduceOptions o = {});
HT_API Tensor mean(const Tensor& x);
HT_API Tensor mean(const Tensor& x, std::initializer_list<Size> dims, ReduceOptions o = {});
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

}  // namespace halftone
