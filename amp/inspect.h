#pragma once
// Where numbers go wrong under mixed precision, and what it brings: the operator that made the first inf, the gradients that
// vanish, the precisions compared on a step of the program's own. These wait for the device; they are for looking, not for training.
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "halftone/amp/scaler.h"

namespace halftone::amp {

// ---- overflows

// The first operator whose result is not finite though its arguments were, or that read what was not finite before the step.
// Infinities that a program writes by `full` or hands in as a tensor of -inf, such as masks, are its own, and so is what
// operators pass on of them: an operator that makes NaN of them, or an inf of the other sign, is the first.
struct Overflow {
  std::string op;
  const void* module = nullptr;  // the module whose forward called it, or recorded it where it ran in backward
  std::string module_name;       // "" for the model itself; "?" outside of it
  bool in_backward = false;
  Meta result;
  int64_t call = 0;                     // of the step's operators, counted from 0
  int argument = -1;                    // >= 0: this one of the operator's, whose form `result` tells, was not finite before the step
  std::vector<std::string> given;       // parameters and buffers that were not finite before the step
  std::vector<std::string> parameters;  // whose gradients are not finite after the step
};
HT_API std::ostream& operator<<(std::ostream& os, const Overflow& o);

// Waits for the device.
HT_API bool all_finite(const Tensor& t);
// The names of parameters that are not finite, and of buffers that hold more than -inf.
HT_API std::vector<std::string> not_finite(const std::vector<std::pair<std::string, Tensor>>& parameters,
                                           const std::vector<std::pair<std::string, Tensor>>& buffers);
// Runs `step` once with every operator's arguments and results looked at.
HT_API std::optional<Overflow> find_overflow(const std::function<void()>& step);
// The same, with names from `net`: replay the step that overflowed, on the same batch, forward and backward.
template <class Net> std::optional<Overflow> find_overflow(Net& net, const std::function<void()>& step) {
  std::vector<std::string> given = not_finite(net.named_parameters(), net.named_buffers());
  auto found = find_overflow(step);
  if (!found) return found;
  found->given = std::move(given);
  for (auto& [name, module] : net.named_modules()) if (module == found->module) found->module_name = name;
  for (auto& [name, p] : net.named_parameters())
    if (Tensor g = p.grad(); g.defined() && !all_finite(g)) found->parameters.push_back(name);
  return found;
}

// ---- underflows

// A parameter's gradient after backward.
struct GradientStats {
  std::string name;
  double largest = 0;           // of |g|, unscaled
  double smallest = 0;          // of those that are not 0
  double zeros = 0;             // share of elements that are 0
  double vanishing = 0;         // share of elements that are not 0 and would be in f16 at this scale
  double subnormal = 0;         // share that would keep fewer than 11 bits there
  int64_t not_finite = 0;
  bool defined = false;         // it has a gradient
};
// `scale`: by which the gradients in .grad are multiplied, 1 when they are unscaled; `at`: the scale in question.
HT_API std::vector<GradientStats> gradient_stats(const std::vector<std::pair<std::string, Tensor>>& named_parameters, double scale, double at);
// Of gradients as backward left them under this scaler, at its present scale.
HT_API std::vector<GradientStats> gradient_stats(const std::vector<std::pair<std::string, Tensor>>& named_parameters, const GradScaler& scaler);
HT_API std::ostream& operator<<(std::ostream& os, const std::vector<GradientStats>& all);

// ---- which precision

struct Advice {
  struct Row {
    std::string precision;      // "fp32", "tf32" (CUDA), "bf16", "fp16"
    double ms = 0;              // forward and backward, the median of some
    int64_t peak_bytes = 0;     // beyond what was there before
    double gradient_error = 0;  // |g - g_fp32| / |g_fp32| over all parameters together
    bool finite = true;
  };
  std::vector<Row> rows;
  std::string recommended, reason;
};
HT_API std::ostream& operator<<(std::ostream& os, const Advice& a);

// Runs forward and backward of `loss` in every precision that the device has, some times each, with the same random
// numbers; gradients, buffers and random state are put back. fp16 is scaled by `scale`.
HT_API Advice advise(const std::vector<Tensor>& parameters, const std::vector<Tensor>& buffers, const std::function<Tensor()>& loss, double scale = 65536);
template <class Net> Advice advise(Net& net, const std::function<Tensor()>& loss, double scale = 65536) {
  return advise(net.parameters(), net.buffers(), loss, scale);
}

}  // namespace halftone::amp
