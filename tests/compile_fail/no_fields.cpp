// A model without HT_FIELDS is abstract.
// expect: ht_fields
#include "halftone/nn/nn.h"
using namespace halftone;
struct Net : nn::Module {
  nn::Linear fc{2, 2};
  Tensor forward(const Tensor& x) override { return fc(x); }
};
Net net;
