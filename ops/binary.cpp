// Binary operators on the CPU, how their operands are made alike, and where.
#include "halftone/ops/binary.h"

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/elementwise_cpu.h"
#include "halftone/ops/shape.h"

namespace halftone {

namespace elementwise {
namespace {

bool is_host_scalar(const Tensor& t) { return t.rank() == 0 && t.device().type == DeviceType::cpu; }
int kind(DType t) { return is_floating(t) ? 2 : t == DType::b8 ? 0 : 1; }

// A whole number that an integer dtype cannot hold would silently become another one.
void check_fits(const OpDef& op, Scalar s, DType t) {
  if (!s.integral() || is_floating(t) || t == DType::b8) return;
  auto v = s.to<int64_t>();
  bool fits = visit<integer_types>(t, [v]<class T>(Type<T>) { return std::in_range<T>(v); });
  HT_CHECK(fits, op.name, ": ", v, " does not fit ", t, "; cast the tensor with to()");
}

}  // namespace

DType meeting_dtype(const OpDef& op, DTypes allowed, std::initializer_list<const Operand*> operands) {
  std::optional<DType> of_arrays, of_scalars;
  bool fraction = false, beyond_bool = false, low = false;
  for (auto* o : operands) {
    if (!o->is_tensor()) {
      Scalar s = o->scalar();
      fraction |= !s.integral();
      beyond_bool |= s.integral() && s.to<int64_t>() >> 1 != 0;
      continue;
    }
    HT_CHECK(o->tensor().defined(), op.name, ": a tensor is undefined");
    auto& t = o->tensor().rank() > 0 ? of_arrays : of_scalars;
    t = t ? promote(*t, o->tensor().dtype()) : o->tensor().dtype();
    low |= o->tensor().rank() > 0 && is_16bit_dtype(o->tensor().dtype());
  }
  HT_CHECK(of_arrays || of_scalars, op.name, ": expected at least one tensor, got ", operands.size() == 2 ? "two" : "only", " numbers");
  DType t = of_arrays.value_or(of_scalars.value_or(DType::f32));
  if (of_arrays && of_scalars && kind(*of_scalars) > kind(t)) t = promote(t, *of_scalars);
  if (fraction && !is_floating(t)) t = DType::f32;
  if (t == DType::b8 && (beyond_bool || !contains(allowed, t)) && contains(allowed, DType::i64)) t = DType::i64;
  if (!contains(allowed, t)) t = DType::f32;
  for (auto* o : operands) if (!o->is_tensor()) check_fits(op, o->scalar(), t);
  if (low && t == DType::f32 && thread_state().on(Layer::autocast)) {
    Tensors tensors;
    for (auto* o : operands) if (o->is_tensor()) tensors.push_back(o->tensor());
    autocast_climbs(op, tensors);
  }
  return t;
}

void align(const OpDef& op, Tensors& tensors) {
  size_t main = 0;
  while (main + 1 < tensors.size() && is_host_scalar(tensors[main])) ++main;
  Device device = tensors[main].device();
  Shape shape = tensors[0].shape();
  for (auto& t : tensors) {
    if (is_host_scalar(t)) t = t.to(device);
    if (t.shape() != shape) shape = broadcast(op.name, shape, t.shape());
  }
  for (auto& t : tensors) if (t.shape() != shape) t = expand(t, shape);
}

Tensors meet(const OpDef& op, DTypes allowed, std::initializer_list<const Operand*> operands) {
  DType t = meeting_dtype(op, allowed, operands);
  Tensors tensors;
  for (auto* o : operands) if (o->is_tensor()) tensors.push_back(cast(o->tensor(), t));
  if (tensors.size() > 1) align(op, tensors);
  return tensors;
}

}  // namespace elementwise

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
  DType t = boolean ? DType::b8 : a.dtype;
  if (!c.has(1)) return {laid_out_like(a, t)};
  const Meta& b = c.in[1].meta();
  HT_CHECK(a.shape == b.shape && a.dtype == b.dtype, c.op->name, ": expected equal shapes and dtypes, got ", a, " and ", b);
  return {laid_out_like(a.shape.rank() >= 4 && a.contiguous() ? b : a, t)};
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

Tensor apply(const OpDef& op, DTypes types, const Operand& a, const Operand& b, Attrs (*with)(Number)) {
  Number n;
  if (!a.is_tensor()) n = {a.scalar(), Number::At::left};
  else if (!b.is_tensor()) n = {b.scalar(), Number::At::right};
  return call(op, elementwise::meet(op, types, {&a, &b}), with(n));
}

namespace {

// The operands as tensors (a number, of g's dtype and device), and where both are 0.
struct Corner {
  Tensor a, b;
  Corner(const Operand& x, const Operand& y, const Tensor& g) : a(as_tensor(x, g)), b(as_tensor(y, g)) {}
  static Tensor as_tensor(const Operand& o, const Tensor& g) { return o.is_tensor() ? o.tensor() : full({}, o.scalar(), g.options()); }
};

}  // namespace

Tensor Pow::da(const Operand& a, const Operand& b, const Tensor&, const Tensor& g) {
  Corner c(a, b, g);
  Tensor both_zero = logical_and(eq(c.a, 0), eq(c.b, 0));
  return g * (c.b * pow(c.a, where(both_zero, 0, c.b - 1)));
}
Tensor Pow::db(const Operand& a, const Operand& b, const Tensor& y, const Tensor& g) {
  Corner c(a, b, g);
  Tensor flat = logical_and(eq(c.a, 0), ge(c.b, 0));
  return g * (y * log(where(flat, 1, c.a)));
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
