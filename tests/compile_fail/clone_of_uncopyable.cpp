// A model with a field that cannot be copied compiles as long as nobody clones it.
// expect: one_of_the_fields_cannot_be_copied
#include "halftone/nn/nn.h"
using namespace halftone;
struct Net : nn::Module {
  std::vector<std::unique_ptr<nn::Module>> layers;
  HT_FIELDS(layers)
};
void f(Net& net) { Net copy = net.clone(); }
