// Unary operators on the CPU, and their public functions.
#include "halftone/ops/unary.h"

#include "halftone/ops/all.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/elementwise_cpu.h"

namespace halftone {

Metas elementwise::infer_same(const Call& c, DTypes allowed, bool boolean) {
  const Meta& x = c.in[0].meta();
  HT_CHECK(contains(allowed, x.dtype), c.op->name, ": ", x.dtype, " is not supported; cast x to a ",
           allowed == floating_types ? "floating" : "numeric", " dtype with to()");
  return {laid_out_like(x, boolean ? DType::b8 : x.dtype)};
}

void fill_cpu_unary() {
  elementwise::each(unary::All{}, []<class Op>(Type<Op>) { set_kernel(unary::def<Op>, DeviceType::cpu, unary::run_cpu<Op>); });
}

#define HT_DEFINE(function, Op) \
  Tensor function(const Tensor& x) { return unary::apply<unary::Op>(x); }
HT_UNARY_OPS(HT_DEFINE)
#undef HT_DEFINE
Tensor pow(const Tensor& x, double exponent) { return unary::apply(x, unary::Power{exponent}); }
Tensor leaky_relu(const Tensor& x, double negative_slope) { return unary::apply(x, unary::LeakyRelu{negative_slope}); }
Tensor elu(const Tensor& x, double alpha) { return unary::apply(x, unary::Elu{alpha}); }
Tensor softplus(const Tensor& x, double beta, double threshold) {
  HT_CHECK(beta > 0, "softplus: expected beta above 0, got ", beta);
  return unary::apply(x, unary::Softplus{beta, threshold});
}
Tensor gelu(const Tensor& x, Approximate form) { return form == Approximate::tanh ? gelu_tanh(x) : gelu(x); }

}  // namespace halftone
