#include "halftone/nn/conv.h"

#include <cmath>

#include "halftone/nn/init.h"

namespace halftone::nn {

Convolution::Convolution(const char* name, Size in, Size out, std::initializer_list<int64_t> kernel, Size groups,
                         bool with_bias, bool transposed) {
  HT_CHECK(groups > 0 && in % groups == 0 && out % groups == 0, name, ": expected channels that divide into ", groups,
           " groups, got ", in, " in and ", out, " out");
  Shape shape{transposed ? in : out, (transposed ? out : in) / groups};
  int64_t fan = shape[1];
  for (int64_t k : kernel) {
    HT_CHECK(k > 0, name, ": expected a kernel of positive size, got ", k);
    shape.push_back(k);
    fan *= k;
  }
  double bound = fan > 0 ? 1 / std::sqrt(static_cast<double>(fan)) : 0;
  weight = Parameter(init::uniform_(empty(shape), -bound, bound));
  if (with_bias) bias = Parameter(init::uniform_(empty({out}), -bound, bound));
}

}  // namespace halftone::nn
