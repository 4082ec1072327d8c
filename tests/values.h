#pragma once
// Tensors as numbers, for tests that compare what two trainings came to.
#include <algorithm>
#include <cmath>
#include <vector>

#include "halftone/core/tensor.h"

namespace halftone::tests {

using Values = std::vector<std::vector<double>>;
inline Values values(const std::vector<Tensor>& tensors) {
  Values v;
  for (auto& t : tensors) v.push_back(t.to_vector<double>());
  return v;
}
// Relative to the largest element of b.
inline double largest_difference(const Values& a, const Values& b) {
  double most = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t k = 0; k < a[i].size(); ++k) {
      most = std::max(most, std::fabs(a[i][k] - b[i][k]));
      size = std::max(size, std::fabs(b[i][k]));
    }
  return most / size;
}

}  // namespace halftone::tests
