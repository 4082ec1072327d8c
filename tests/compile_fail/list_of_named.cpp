// nn::list moves, so it takes nothing that has a name.
// expect: nn::list owns its modules: construct them in place or std::move them in
#include "halftone/nn/nn.h"
using namespace halftone;
void f(nn::Linear& a, nn::Linear& b) { auto v = nn::list(a, b); }
