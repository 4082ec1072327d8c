#pragma once
// Families of elementwise operators. One struct is the whole operator: name, doc, autocast policy, the scalar function
// that both devices compile, and its derivative in tensor algebra. Backends loop over a family's type list and name no
// operator. A struct with data members is its own attributes (leaky_relu's slope).
//
//   unary     y = f(x)        df(x, y, g): the gradient of x
//   binary    y = f(a, b)     da(a, b, y, g) and db(a, b, y, g); a or b may be a number
//   ternary   y = f(a, b, c)  da, db, dc(a, b, c, y, g)
//
// f computes in float for 16-bit dtypes. When f returns bool, y is a bool tensor and has no gradient.
#include <array>

#include "halftone/core/hd.h"
#include "halftone/ops/operand.h"

namespace halftone {

namespace elementwise {

template <class... Op> struct List {};
template <class... A, class... B> constexpr auto operator+(List<A...>, List<B...>) { return List<A..., B...>{}; }
template <class... Op, class F> void each(List<Op...>, F f) { (f(Type<Op>{}), ...); }

template <class Op> constexpr DTypes types_of() {
  if constexpr (requires { Op::types; }) return Op::types;
  else return floating_types;
}
template <class Op> constexpr Cast cast_of() {
  if constexpr (requires { Op::cast; }) return Op::cast;
  else return Cast::unset;
}
template <class Op> constexpr Saves saves_of() {
  if constexpr (requires { Op::saves; }) return Op::saves;
  else return {every, every};
}
template <class Op> constexpr double low_of() { if constexpr (requires { Op::low; }) return Op::low; else return -2; }
template <class Op> constexpr double high_of() { if constexpr (requires { Op::high; }) return Op::high; else return 2; }
// An operator without data members takes no attribute bytes.
template <class Op> Attrs attrs_of(const Op& op) {
  if constexpr (std::is_empty_v<Op>) return {};
  else return Attrs::of(op);
}
template <class Op> Op from_attrs(const Attrs& a) {
  if constexpr (std::is_empty_v<Op>) return {};
  else return a.as<Op>();
}
// What samples pass for an operator's own data: Op::example() when it has one.
template <class Op> Op example_of() {
  if constexpr (requires { Op::example(); }) return Op::example();
  else return Op{};
}
// Sizes around vector and tile edges, a scalar, an empty tensor, and more than one dimension.
inline constexpr std::array<Shape, 9> sample_shapes = {Shape{}, Shape{1}, Shape{7}, Shape{33}, Shape{257}, Shape{0, 3}, Shape{5, 1},
                                                       Shape{2, 3, 4}, Shape{3, 1, 70}};

HT_API Metas infer_same(const Call& c, DTypes allowed, bool boolean);

}  // namespace elementwise

namespace unary {

template <class Op> constexpr bool gives_bool() {
  using T = std::conditional_t<contains(elementwise::types_of<Op>(), DType::f32), float,
                               std::conditional_t<contains(elementwise::types_of<Op>(), DType::i64), int64_t, bool>>;
  return std::same_as<decltype(std::declval<const Op&>().f(T{})), bool> && !std::same_as<T, bool>;
}

template <class Op> constexpr OpDef describe() {
  using namespace elementwise;
  OpDef d{.name = Op::name, .doc = Op::doc};
  d.cast = cast_of<Op>();
  d.saves = saves_of<Op>();
  d.infer = [](const Call& c) { return infer_same(c, types_of<Op>(), gives_bool<Op>()); };
  if constexpr (requires { &Op::df; })
    d.backward = [](const Rule& r) -> Tensors {
      constexpr Saves s = saves_of<Op>();
      return {from_attrs<Op>(r.attrs()).df(s.in & 1u ? r.in() : Tensor(), s.out & 1u ? r.out() : Tensor(), r.grad())};
    };
  for (auto& t : d.dtypes) t = types_of<Op>();
  d.samples = [] {
    std::vector<Sample> all;
    for (auto& shape : sample_shapes)
      all.push_back({{{.shape = shape, .low = low_of<Op>(), .high = high_of<Op>()}}, attrs_of(example_of<Op>())});
    return all;
  };
  return d;
}
// Constant-initialised, so that a backend may fill its kernel slot whenever it comes.
template <class Op> HT_API inline constinit OpDef def = describe<Op>();
template <class Op> Tensor apply(const Tensor& x, const Op& op = {}) {
  Tensors in;
  in.push_back(x);
  return call(def<Op>, std::move(in), elementwise::attrs_of(op));
}

}  // namespace unary

namespace binary {

// The number operand, when there is one; the tensor is then input 0.
struct Number { Scalar value; enum class At : uint8_t { none, left, right } at = At::none; };
template <class Op> struct Given { Op op; Number number; };

// The two operands of a recorded call, as a derivative sees them: tensors, or the number.
struct HT_API Operands {
  Tensor a_tensor, b_tensor;
  Number number;
  Operands(const Rule& r, const Number& n, Saves s);
  Operand a() const { return number.at == Number::At::left ? Operand(number.value) : Operand(a_tensor); }
  Operand b() const { return number.at == Number::At::right ? Operand(number.value) : Operand(b_tensor); }
};

template <class Op> constexpr bool gives_bool() {
  using T = std::conditional_t<contains(elementwise::types_of<Op>(), DType::f32), float,
                               std::conditional_t<contains(elementwise::types_of<Op>(), DType::i64), int64_t, bool>>;
  return std::same_as<decltype(std::declval<const Op&>().f(T{}, T{})), bool> && !std::same_as<T, bool>;
}
HT_API Metas infer(const Call& c, DTypes allowed, bool boolean);
HT_API std::vector<Sample> samples(double low, double high, bool differentiable_b, Attrs (*with)(Number));
// Promotes, moves 0-d CPU tensors, and broadcasts: then the operator sees equal shapes and dtypes.
HT_API Tensor apply(const OpDef& op, DTypes types, const Operand& a, const Operand& b, Attrs (*with)(Number));

template <class Op> Attrs attrs_with(Number n) { return Attrs::of(Given<Op>{{}, n}); }

template <class Op> constexpr OpDef describe() {
  using namespace elementwise;
  static_assert(std::is_empty_v<Op>, "a binary operator has no data members");
  OpDef d{.name = Op::name, .doc = Op::doc};
  d.cast = cast_of<Op>();
  d.saves = saves_of<Op>();
  d.infer = [](const Call& c) { return infer(c, types_of<Op>(), gives_bool<Op>()); };
  if constexpr (requires { &Op::da; })
    d.backward = [](const Rule& r) -> Tensors {
      constexpr Saves s = saves_of<Op>();
      Number n = r.as<Given<Op>>().number;
      Operands x(r, n, s);
      Tensor y = s.out & 1u ? r.out() : Tensor();
      if (n.at == Number::At::left) return {Op::db(x.a(), x.b(), y, r.grad())};
      Tensors grads{r.needs(0) ? Op::da(x.a(), x.b(), y, r.grad()) : Tensor()};
      if (n.at == Number::At::none) grads.push_back(r.needs(1) ? Op::db(x.a(), x.b(), y, r.grad()) : Tensor());
      return grads;
    };
  for (auto& t : d.dtypes) t = types_of<Op>();
  d.samples = [] { return samples(low_of<Op>(), high_of<Op>(), true, attrs_with<Op>); };
  return d;
}
template <class Op> HT_API inline constinit OpDef def = describe<Op>();
template <class Op> Tensor apply(const Operand& a, const Operand& b) {
  return apply(def<Op>, elementwise::types_of<Op>(), a, b, attrs_with<Op>);
}

}  // namespace binary

}  // namespace halftone
