// Sequential owns its layers, so a named one is not taken silently.
// expect: construct them in place, std::move them in, or pass layer.clone()
#include "halftone/nn/nn.h"
using namespace halftone;
void f() {
  nn::Linear fc(2, 2);
  nn::Sequential s{fc};
}
