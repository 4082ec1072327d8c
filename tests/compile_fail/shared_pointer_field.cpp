// A clone would share what a shared_ptr holds, then write over the original.
// expect: a pointer or shared_ptr would be shared with every clone; hold the module by value or in nn::Any
#include "halftone/nn/nn.h"
using namespace halftone;
struct Net : nn::Module {
  std::shared_ptr<nn::Linear> fc;
  HT_FIELDS(fc)
};
Net net;
