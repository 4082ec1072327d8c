#pragma once
// What optimizers have in common whose step looks at whole tensors. Three parts make it, and none asks the host: the
// optimizer's operator updates its states and gives a direction for each element (update::directs), Self::shape makes of the
// directions what it likes, and one update operator goes along them: p -= lr * (direction + decay * p), with masters, 16-bit
// copies and rounding as in any step. A step that found_inf skips shapes directions of 0 and writes nothing.
#include "halftone/optim/fused.h"

namespace halftone::optim {

// The directions of a step, in f32 (f64 for f64 parameters). Those of one shape and dtype lie side by side.
struct Directions {
  std::vector<Tensor> parameters, each;  // each[i] has parameters[i]'s shape
  std::vector<Tensor> batches;           // all of `each` once more, as [how many, size of dimension 0, product of the other sizes]
};

namespace detail {
HT_API void step_along(Call& call, int n, size_t states, double decay, const update::Rounding& rounding,
                       const std::function<void(const Directions&)>& shape);
}

// Self has, besides what Fused asks for, shape(options, directions), which changes directions in place, and decay(options).
template <class Self, class Options, class Op> class Directed : public Fused<Self, Options, Op> {
 public:
  using Fused<Self, Options, Op>::Fused;

 private:
  void run(size_t group, Call& call, int n) override {
    const Options& o = this->options(group);
    detail::step_along(call, n, Op::states.size() - 1, Self::decay(o), this->rounding(), [&o](const Directions& d) { Self::shape(o, d); });
  }
};

}  // namespace halftone::optim
