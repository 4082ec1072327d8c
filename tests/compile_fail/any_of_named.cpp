// nn::Any owns its module.
// expect: construct it in place, std::move it in, or pass m.clone()
#include "halftone/nn/nn.h"
using namespace halftone;
void f(nn::Linear& fc) { nn::Any any(fc); }
