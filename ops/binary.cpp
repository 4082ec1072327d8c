// Binary operators on the CPU, how their operands are made alike, and where.
#include "halftone/ops/binary.h"

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/elementwise_cpu.h"
#include "halftone/ops/shape.h"

namespace halftone {
namespace binary {

Operands::Operands(const Rule& r, const Number& n, Saves s) : number(n) {
  bool first = s.in & 1u, second = s.in & 2u;
  if (n.at == Number::At::left) {
    if (first) b_tensor = r.in(0);
    return;
  }
  if (first) a_tensor = r.in(0);
  if (second && n.at == Number::At::none) b_tensor = r.in(1);
}

Metas infer(const Call& c, DTypes allowed, bool boolean) {
  const Meta& a = c.in[0].meta();
  HT_CHECK(contains(allowed, a.dtype), c.op->name, ": ", a.dtype, " is not supported; cast with to()");
  if (c.has(1)) {
    const Meta& b = c.in[1].meta();
    HT_CHECK(a.shape == b.shape && a.dtype == b.dtype, c.op->name, ": expected equal shapes and dtypes, got ", a, " and ", b);
  }
  return {Meta(a.shape, boolean ? DType::b8 : a.dtype, a.device)};
}

std::vector<Sample> samples(double low, double high, bool differentiable_b, Attrs (*with)(Number)) {
  std::vector<Sample> all;
  for (auto& shape : elementwise::sample_shapes)
    all.push_back({{{.shape = shape, .low = low, .high = high},
                    {.shape = shape, .low = low, .high = high, .dtype = {}, .differentiable = differentiable_b}},
                   with({})});
  all.push_back({{{.shape = {2, 5}, .low = low, .high = high}}, with({1.5, Number::At::right})});
  all.push_back({{{.shape = {2, 5}, .low = low, .high = high}}, with({1.5, Number::At::left})});
  return all;
}

namespace {

bool is_host_scalar(const Tensor& t) { return t.rank() == 0 && t.device().type == DeviceType::cpu; }

// The dtype two operands meet in: 0-d tensors and numbers raise the kind, never the width within a kind.
DType meeting_dtype(DTypes allowed, const Operand& a, const Operand& b) {
  DType t;
  if (a.is_tensor() && b.is_tensor()) {
    DType ta = a.tensor().dtype(), tb = b.tensor().dtype();
    bool a_weak = a.tensor().rank() == 0 && b.tensor().rank() > 0, b_weak = b.tensor().rank() == 0 && a.tensor().rank() > 0;
    auto kind = [](DType d) { return is_floating(d) ? 2 : d == DType::b8 ? 0 : 1; };
    if (a_weak && kind(ta) <= kind(tb)) t = tb;
    else if (b_weak && kind(tb) <= kind(ta)) t = ta;
    else t = promote(ta, tb);
  } else {
    t = a.is_tensor() ? a.tensor().dtype() : b.tensor().dtype();
    Scalar s = a.is_tensor() ? b.scalar() : a.scalar();
    if (!s.integral() && !is_floating(t)) t = DType::f32;
  }
  if (t == DType::b8 && !contains(allowed, t) && contains(allowed, DType::i64)) return DType::i64;
  return contains(allowed, t) ? t : DType::f32;
}

// A whole number that an integer dtype cannot hold would silently become another one.
void check_fits(const OpDef& op, Scalar s, DType t) {
  if (!s.integral() || is_floating(t) || t == DType::b8) return;
  auto v = s.to<int64_t>();
  bool fits = visit<integer_types>(t, [v]<class T>(Type<T>) { return std::in_range<T>(v); });
  HT_CHECK(fits, op.name, ": ", v, " does not fit ", t, "; cast the tensor with to()");
}

}  // namespace

Tensor apply(const OpDef& op, DTypes types, const Operand& a, const Operand& b, Attrs (*with)(Number)) {
  HT_CHECK(a.is_tensor() || b.is_tensor(), op.name, ": expected at least one tensor, got two numbers");
  for (auto* o : {&a, &b}) HT_CHECK(!o->is_tensor() || o->tensor().defined(), op.name, ": a tensor is undefined");
  DType t = meeting_dtype(types, a, b);
  if (!a.is_tensor() || !b.is_tensor()) check_fits(op, a.is_tensor() ? b.scalar() : a.scalar(), t);
  if (!a.is_tensor()) return call(op, {cast(b.tensor(), t)}, with({a.scalar(), Number::At::left}));
  if (!b.is_tensor()) return call(op, {cast(a.tensor(), t)}, with({b.scalar(), Number::At::right}));

  Tensor x = cast(a.tensor(), t), y = cast(b.tensor(), t);
  if (x.device() != y.device()) {
    if (is_host_scalar(x)) x = x.to(y.device());
    else if (is_host_scalar(y)) y = y.to(x.device());
  }
  if (x.shape() != y.shape()) {
    Shape s = broadcast(op.name, x.shape(), y.shape());
    x = expand(x, s);
    y = expand(y, s);
  }
  Tensors in;
  in.push_back(std::move(x));
  in.push_back(std::move(y));
  return call(op, std::move(in), with({}));
}

}  // namespace binary

void fill_cpu_binary() {
  elementwise::each(binary::All{}, []<class Op>(Type<Op>) { set_kernel(binary::def<Op>, DeviceType::cpu, binary::run_cpu<Op>); });
}

#define HT_DEFINE(function, Op) \
  Tensor function(const Operand& a, const Operand& b) { return binary::apply<binary::Op>(a, b); }
HT_BINARY_OPS(HT_DEFINE)
#undef HT_DEFINE
Tensor operator+(const Operand& a, const Operand& b) { return add(a, b); }
Tensor operator-(const Operand& a, const Operand& b) { return sub(a, b); }
Tensor operator*(const Operand& a, const Operand& b) { return mul(a, b); }
Tensor operator/(const Operand& a, const Operand& b) { return div(a, b); }

}  // namespace halftone
