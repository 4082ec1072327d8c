// to() gives the module it was called on, which is no new one.
// expect: abstract
#include "halftone/nn/nn.h"
using namespace halftone;
void f(nn::Linear& fc) { auto m = fc.to(Device::cuda()); }
