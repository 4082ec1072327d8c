// Ternary operators on the CPU, and what their numbers need.
#include "halftone/ops/ternary.h"

#include "halftone/ops/all.h"
#include "halftone/ops/elementwise_cpu.h"

namespace halftone {
namespace ternary {

Operands::Operands(const Rule& r, const Numbers& n, Saves s) : numbers(n) {
  size_t k = 0;
  for (size_t i = 0; i < 3; ++i) {
    if (n.has(i)) continue;
    input[i] = k++;
    if (s.in >> i & 1u) tensor[i] = r.in(*input[i]);
  }
}

Metas infer(const Call& c, DTypes allowed) {
  const Meta& a = c.in[0].meta();
  HT_CHECK(contains(allowed, a.dtype), c.op->name, ": ", a.dtype, " is not supported; cast with to()");
  for (size_t i = 1; i < c.in.size(); ++i) {
    const Meta& x = c.in[i].meta();
    HT_CHECK(a.shape == x.shape && a.dtype == x.dtype, c.op->name, ": expected equal shapes and dtypes, got ", a, " and ", x);
  }
  return {laid_out_like(a, a.dtype)};
}

std::vector<Sample> samples(double low, double high, Attrs (*with)(const Numbers&)) {
  std::vector<Sample> all;
  auto add = [&](const Shape& shape, const Numbers& n) {
    Sample s{{}, with(n)};
    for (size_t i = 0; i < 3; ++i) if (!n.has(i)) s.in.push_back({.shape = shape, .low = low, .high = high});
    all.push_back(s);
  };
  for (auto& shape : elementwise::sample_shapes) add(shape, {});
  add({2, 5}, {2, {0, 1}});
  add({2, 5}, {4, {0, 0, 1}});
  add({257}, {6, {0, 1, 2}});
  return all;
}

Numbers numbers_of(const Operand& b, const Operand& c) {
  Numbers n;
  if (!b.is_tensor()) n.at |= 2, n.value[1] = b.scalar();
  if (!c.is_tensor()) n.at |= 4, n.value[2] = c.scalar();
  return n;
}

}  // namespace ternary

void fill_cpu_ternary() {
  elementwise::each(ternary::All{}, []<class Op>(Type<Op>) { set_kernel(ternary::def<Op>, DeviceType::cpu, ternary::run_cpu<Op>); });
}

Tensor lerp(const Tensor& a, const Operand& b, const Operand& weight) { return ternary::apply<ternary::Lerp>(a, b, weight); }
Tensor addcmul(const Tensor& x, const Operand& a, const Operand& b, double value) { return ternary::apply(x, a, b, ternary::Addcmul{value}); }
Tensor addcdiv(const Tensor& x, const Operand& a, const Operand& b, double value) { return ternary::apply(x, a, b, ternary::Addcdiv{value}); }
Tensor clamp(const Tensor& x, const Operand& low, const Operand& high) { return ternary::apply<ternary::Clamp>(x, low, high); }

}  // namespace halftone
