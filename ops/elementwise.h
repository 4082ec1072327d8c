#pragma once
// Families of elementwise operators. One struct is the whole operator: name, doc, autocast policy, the scalar function
// that both devices compile, and its derivative in tensor algebra. Backends loop over a family's type list and name no
// operator. A struct with data members is its own attributes (leaky_relu's slope).
//
//   unary     y = f(x)        df(x, y, g): the gradient of x; and, where that takes several passes, slope(v): the same for
//                             one element and g = 1, of y where `saves` says so, else of x, for backward outside a graph
//   binary    y = f(a, b)     da(a, b, y, g) and db(a, b, y, g); a or b may be a number
//   ternary   y = f(a, b, c)  da, db, dc(a, b, c, y, g); b and c may be numbers
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
// The dtype in which operands meet, by the table in binary.h, or f32 where the operator does not take that one.
HT_API DType meeting_dtype(const OpDef& op, DTypes allowed, std::initializer_list<const Operand*> operands);
// One device for all (0-d CPU tensors move) and one shape (by broadcasting).
HT_API void align(const OpDef& op, Tensors& tensors);
// Both: the operands that are tensors, as an operator of equal shapes and dtypes takes them.
HT_API Tensors meet(const OpDef& op, DTypes allowed, std::initializer_list<const Operand*> operands);

}  // namespace elementwise

namespace binary { template <class Op> Tensor times_slope(const Tensor& v, const Tensor& g); }

namespace unary {

template <class Op> constexpr bool gives_bool() {
  using T = std::conditional_t<contains(elementwise::types_of<Op>(), DType::f32), float,
                               std::conditional_t<contains(elementwise::types_of<Op>(), DType::i64), int64_t, bool>>;
  return std::same_as<decltype(std::declval<const Op&>().f(T{})), bool> && !std::same_as<T, bool>;
}

template <class Op> inline constexpr bool has_slope = requires(float v) { Op::slope(v); };

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
  if constexpr (has_slope<Op>)
    d.fused_backward = [](const Rule& r) -> Tensors { return {binary::times_slope<Op>(saves_of<Op>().out & 1u ? r.out() : r.in(), r.grad())}; };
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
HT_API Tensor apply(const OpDef& op, DTypes types, const Operand& a, const Operand& b, Attrs (*with)(Number));

template <class Op> Attrs attrs_with(Number n) { return n.at == Number::At::none ? Attrs() : Attrs::of(Given<Op>{{}, n}); }

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

constexpr std::array<char, 32> joined(const char* a, const char* b) {
  std::array<char, 32> all{};
  size_t n = 0;
  while (*a) all[n++] = *a++;
  while (*b) all[n++] = *b++;
  return all;
}
// The gradient of a unary operator in one pass, from its argument or result.
template <class Op> struct Slope {
  static constexpr std::array<char, 32> text = joined(Op::name, "_grad");
  static constexpr const char *name = text.data(), *doc = "b times the slope of a unary operator, from its argument (tanh, sigmoid: its result) a";
  static constexpr Cast cast = Cast::keep;
  template <class T> HT_HD static T f(T v, T g) { return g * Op::slope(v); }
};
template <class Op> Tensor times_slope(const Tensor& v, const Tensor& g) { return call(def<Slope<Op>>, {v, g}, attrs_with<Slope<Op>>({})); }

}  // namespace binary

namespace ternary {

// Which of b and c are numbers (bit 1 and bit 2), and their values; the tensors follow each other as inputs.
struct Numbers {
  uint8_t at = 0;
  Scalar value[3] = {};
  bool has(size_t i) const { return at >> i & 1u; }
};
template <class Op> struct Given { Op op; Numbers numbers; };

// The operands of a recorded call, as a derivative sees them, and where each is among the inputs.
struct HT_API Operands {
  Tensor tensor[3];
  Numbers numbers;
  std::optional<size_t> input[3];
  Operands(const Rule& r, const Numbers& n, Saves s);
  Operand operator[](size_t i) const { return numbers.has(i) ? Operand(numbers.value[i]) : Operand(tensor[i]); }
};

HT_API Metas infer(const Call& c, DTypes allowed);
HT_API std::vector<Sample> samples(double low, double high, Attrs (*with)(const Numbers&));
HT_API Numbers numbers_of(const Operand& b, const Operand& c);

template <class Op> constexpr OpDef describe() {
  using namespace elementwise;
  OpDef d{.name = Op::name, .doc = Op::doc};
  d.cast = cast_of<Op>();
  d.saves = saves_of<Op>();
  d.infer = [](const Call& c) { return infer(c, types_of<Op>()); };
  d.backward = [](const Rule& r) -> Tensors {
    auto [op, numbers] = r.as<Given<Op>>();
    constexpr Saves s = saves_of<Op>();
    Operands x(r, numbers, s);
    Tensor y = s.out & 1u ? r.out() : Tensor();
    auto wanted = [&](size_t i) { return x.input[i] && r.needs(*x.input[i]); };
    Tensors grads;
    grads.push_back(wanted(0) ? op.da(x[0], x[1], x[2], y, r.grad()) : Tensor());
    if (x.input[1]) grads.push_back(wanted(1) ? op.db(x[0], x[1], x[2], y, r.grad()) : Tensor());
    if (x.input[2]) grads.push_back(wanted(2) ? op.dc(x[0], x[1], x[2], y, r.grad()) : Tensor());
    return grads;
  };
  for (auto& t : d.dtypes) t = types_of<Op>();
  d.samples = [] {
    return samples(low_of<Op>(), high_of<Op>(), [](const Numbers& n) { return Attrs::of(Given<Op>{example_of<Op>(), n}); });
  };
  return d;
}
template <class Op> HT_API inline constinit OpDef def = describe<Op>();
template <class Op> Tensor apply(const Tensor& a, const Operand& b, const Operand& c, const Op& op = {}) {
  Operand first(a);
  return call(def<Op>, elementwise::meet(def<Op>, elementwise::types_of<Op>(), {&first, &b, &c}), Attrs::of(Given<Op>{op, numbers_of(b, c)}));
}

}  // namespace ternary

}  // namespace halftone
