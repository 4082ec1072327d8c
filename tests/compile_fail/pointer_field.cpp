// So would a clone with a raw pointer.
// expect: a pointer or shared_ptr would be shared with every clone
#include "halftone/nn/nn.h"
using namespace halftone;
struct Net : nn::Module {
  nn::Linear* fc = nullptr;
  HT_FIELDS(fc)
};
Net net;
