// = on a parameter would rebind the handle: the optimizer would go on training the old one.
// expect: a.tie(b) shares one parameter; a.copy_(b) copies values
#include "halftone/nn/nn.h"
using namespace halftone;
void f(nn::Linear& a, nn::Linear& b) { a.weight = b.weight; }
