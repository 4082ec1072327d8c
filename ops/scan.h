#pragma once
// Running sums and products along one dimension, and the linear recurrence that is their derivative. Floating types
// accumulate in f64, integers and bool in i64.
#include "halftone/core/hd.h"
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef cumsum, cumprod, recurrence;
}

struct ScanOptions { bool reverse = false; };  // from the end of the dimension
// Element i of the result is the sum (product) of elements 0 to i along dim; of integers, in i64.
HT_API Tensor cumsum(const Tensor& x, int64_t dim, ScanOptions o = {});
HT_API Tensor cumprod(const Tensor& x, int64_t dim, ScanOptions o = {});
// y[i] = a[i] * y[i - 1] + b[i] along dim, from 0; 0 times infinity is 0 here. Shapes and dtypes must be equal. In reverse,
// y[i + 1] takes the place of y[i - 1].
HT_API Tensor recurrence(const Tensor& a, const Tensor& b, int64_t dim, ScanOptions o = {});

// x moved by one along dim, towards the end or, in reverse, the beginning; `fill` comes in, and what goes out is lost.
HT_API Tensor shifted(const Tensor& x, int64_t dim, bool reverse, double fill);

// How scans are parametrised inside.
struct ScanAttrs { int dim; bool reverse; };

namespace scan {

// What a run of elements does to the value before it: nothing() does nothing, and then(s, t) first s, then t.
struct Sum {
  template <class A> using Step = A;
  template <class A> HT_HD static A nothing() { return A(0); }
  template <class A> HT_HD static A then(A s, A t) { return s + t; }
};
struct Product {
  template <class A> using Step = A;
  template <class A> HT_HD static A nothing() { return A(1); }
  template <class A> HT_HD static A then(A s, A t) { return s * t; }
};
template <class A> struct Linear { A a, b; };  // y becomes a * y + b
struct Recurrence {
  template <class A> using Step = Linear<A>;
  template <class A> HT_HD static Linear<A> nothing() { return {A(1), A(0)}; }
  template <class A> HT_HD static Linear<A> then(Linear<A> s, Linear<A> t) { return {s.a * t.a, s.b == A(0) ? t.b : t.a * s.b + t.b}; }
};

}  // namespace scan
}  // namespace halftone
