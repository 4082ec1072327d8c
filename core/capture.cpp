// Several steps as one.
#include "halftone/core/capture.h"

namespace halftone {

Tensors run_steps(int64_t steps, std::span<const Tensor> inputs, const CapturePlan::Step& step) {
  HT_CHECK(steps > 0, "capture: expected 1 step or more in a call, got ", steps);
  for (size_t i = 0; i < inputs.size(); ++i)
    HT_CHECK(inputs[i].rank() > 0 && inputs[i].size(0) == steps, "capture: input ", i, " is ", inputs[i].meta(), "; with .steps = ", steps,
             " its first dimension must have that size, a batch for each step");
  Tensors all;
  for (int64_t s = 0; s < steps; ++s) {
    Tensors batch;
    for (auto& t : inputs) batch.push_back(t.select(0, s));
    Tensors results = step(batch);
    for (size_t i = 0; i < results.size(); ++i) {
      if (s == 0) {
        Meta meta = results[i].meta();
        meta.shape.insert(0, steps);
        all.push_back(Tensor::empty(meta));
      }
      all[i].select(0, s).copy_(results[i].detach());
    }
  }
  return all;
}

}  // namespace halftone
