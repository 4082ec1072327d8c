// auto makes a parameter, which cannot be rebound; a local variable is a Tensor.
// expect: w.copy_(values) writes; for a local variable, say Tensor w, not auto
#include "halftone/nn/nn.h"
#include "halftone/ops/ops.h"
using namespace halftone;
Tensor f(nn::Linear& a) {
  auto w = a.weight;
  w = w / w.sum();
  return w;
}
