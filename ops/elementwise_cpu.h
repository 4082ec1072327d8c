#pragma once
// The CPU loops of the elementwise families, and the macro by which a program adds an operator of its own.
#include "halftone/ops/iterate.h"
#include "halftone/ops/ternary.h"

namespace halftone {

namespace unary {

template <class Op> void run_cpu(const Call& c, std::span<Tensor> out) {
  Op op = elementwise::from_attrs<Op>(c.attrs);
  visit<elementwise::types_of<Op>()>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    using Y = std::conditional_t<gives_bool<Op>(), bool, T>;
    const T* x = c.in[0].data<T>();
    Y* y = out[0].data<Y>();
    Rows<2>(c.in[0].shape(), {out[0].strides(), c.in[0].strides()}).run([&](auto at, auto step, int64_t n) {
      map_row(x + at[1], step[1], y + at[0], step[0], n, [&](T v) { return Y(op.f(compute_t<T>(v))); });
    });
  });
}

}  // namespace unary

namespace binary {

template <class Op> void run_cpu(const Call& c, std::span<Tensor> out) {
  Number number = c.as<Given<Op>>().number;
  visit<elementwise::types_of<Op>()>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    using Y = std::conditional_t<gives_bool<Op>(), bool, T>;
    using C = compute_t<T>;
    Y* y = out[0].data<Y>();
    const T* a = c.in[0].data<T>();
    if (number.at != Number::At::none) {
      C s = number.value.to<C>();
      bool left = number.at == Number::At::left;
      Rows<2>(c.in[0].shape(), {out[0].strides(), c.in[0].strides()}).run([&](auto at, auto step, int64_t n) {
        if (left) map_row(a + at[1], step[1], y + at[0], step[0], n, [&](T v) { return Y(Op::f(s, C(v))); });
        else map_row(a + at[1], step[1], y + at[0], step[0], n, [&](T v) { return Y(Op::f(C(v), s)); });
      });
      return;
    }
    const T* b = c.in[1].data<T>();
    Rows<3>(out[0].shape(), {out[0].strides(), c.in[0].strides(), c.in[1].strides()}).run([&](auto at, auto step, int64_t n) {
      Y* yr = y + at[0];
      const T *ar = a + at[1], *br = b + at[2];
      if (step[0] == 1 && step[1] == 1 && step[2] == 1) for (int64_t i = 0; i < n; ++i) yr[i] = Y(Op::f(C(ar[i]), C(br[i])));
      else for (int64_t i = 0; i < n; ++i) yr[i * step[0]] = Y(Op::f(C(ar[i * step[1]]), C(br[i * step[2]])));
    });
  });
}

}  // namespace binary

namespace ternary {

// A number's place is taken by a, read as one element again and again, whose value is not used.
template <class Op> void run_cpu(const Call& call, std::span<Tensor> out) {
  const Given<Op>& given = call.as<Given<Op>>();
  const Op& op = given.op;  // names of their own: Clang before 16 refuses structured bindings in lambdas
  const auto& numbers = given.numbers;
  visit<elementwise::types_of<Op>()>(call.in[0].dtype(), [&]<class T>(Type<T>) {
    using C = compute_t<T>;
    const Tensor& a = call.in[0];
    bool b_is_number = numbers.has(1), c_is_number = numbers.has(2);
    const Tensor &b = b_is_number ? a : call.in[1], &c = c_is_number ? a : call.in[b_is_number ? 1 : 2];
    C b_number = numbers.value[1].template to<C>(), c_number = numbers.value[2].template to<C>();
    const Strides still = Strides::filled(a.rank(), 0);
    T* y = out[0].data<T>();
    const T *pa = a.data<T>(), *pb = b.data<T>(), *pc = c.data<T>();
    Rows<4>(a.shape(), {out[0].strides(), a.strides(), b_is_number ? still : b.strides(), c_is_number ? still : c.strides()})
        .run([&](auto at, auto step, int64_t n) {
          for (int64_t i = 0; i < n; ++i)
            y[at[0] + i * step[0]] = T(op.f(C(pa[at[1] + i * step[1]]), b_is_number ? b_number : C(pb[at[2] + i * step[2]]),
                                            c_is_number ? c_number : C(pc[at[3] + i * step[3]])));
        });
  });
}

}  // namespace ternary
}  // namespace halftone

// At namespace scope, in a source file or a header: the function, its tape and autocast entry, and its CPU kernel. A .cu file
// that includes the same header adds HT_REGISTER_UNARY_CUDA(Op), from halftone/cuda/extend.cuh.
#define HT_REGISTER_UNARY(function, Op)                                                                                     \
  inline ::halftone::Tensor function(const ::halftone::Tensor& x) { return ::halftone::unary::apply<Op>(x); }                 \
  inline const ::halftone::Register function##_is_registered{                                                               \
      (::halftone::set_kernel(::halftone::unary::def<Op>, ::halftone::DeviceType::cpu, ::halftone::unary::run_cpu<Op>),       \
       ::halftone::unary::def<Op>)};
