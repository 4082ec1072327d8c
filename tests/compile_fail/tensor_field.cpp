// A plain Tensor in HT_FIELDS: trained or not?
// expect: make this Tensor an nn::Parameter (trained) or an nn::Buffer (not trained)
#include "halftone/nn/nn.h"
using namespace halftone;
struct Net : nn::Module {
  Tensor gain = ones({2});
  HT_FIELDS(gain)
};
Net net;
