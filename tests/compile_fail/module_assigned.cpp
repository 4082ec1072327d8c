// Modules move; they are not copied by =.
// expect: deleted
#include "halftone/nn/nn.h"
using namespace halftone;
void f(nn::Linear& a, nn::Linear& b) { a = b; }
