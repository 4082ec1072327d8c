#pragma once
// Tools that compare derivatives with finite differences, for users' own operators and functions as for ours.
#include <functional>
#include <string>
#include <vector>

#include "halftone/autograd/autograd.h"

namespace halftone {

using GradcheckFunction = std::function<std::vector<Tensor>(const std::vector<Tensor>& x)>;
struct GradcheckOptions {
  double step = 1e-6;         // of the central differences
  double rtol = 1e-6, atol = 1e-7;
  uint64_t seed = 1;          // of the random cotangents
};
// What went wrong, or empty. Every input that requires a gradient must be f64. f is called many times with the inputs changed in
// place; its outputs are weighed with random cotangents.
HT_API std::string gradcheck_report(const GradcheckFunction& f, const std::vector<Tensor>& x, GradcheckOptions o = {});
HT_API std::string gradgradcheck_report(const GradcheckFunction& f, const std::vector<Tensor>& x, GradcheckOptions o = {});
// The same, throwing the report.
HT_API void gradcheck(const GradcheckFunction& f, const std::vector<Tensor>& x, GradcheckOptions o = {});
HT_API void gradgradcheck(const GradcheckFunction& f, const std::vector<Tensor>& x, GradcheckOptions o = {});

}  // namespace halftone
