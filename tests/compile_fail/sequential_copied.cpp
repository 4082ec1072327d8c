// Nor is another Sequential.
// expect: construct them in place, std::move them in, or pass layer.clone()
#include "halftone/nn/nn.h"
using namespace halftone;
void f() {
  nn::Sequential a{nn::ReLU()};
  nn::Sequential b{a};
}
