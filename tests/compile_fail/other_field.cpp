// HT_FIELDS names what a model owns, not its plain members.
// expect: HT_FIELDS takes modules, nn::Parameter, nn::Buffer, and optionals, unique_ptrs, arrays
#include "halftone/nn/nn.h"
using namespace halftone;
struct Net : nn::Module {
  double rate = 0.5;
  HT_FIELDS(rate)
};
Net net;
