#pragma once
// Gradients: backward() fills the .grad of leaves, grad() returns them; hooks, and tools that check derivatives.
// A leaf is a tensor that requires a gradient and was not computed. Recording happens in dispatch (record.cpp), backward in
// one iterative engine (engine.cpp): building, running and destroying a graph never recurse.
#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "halftone/core/hook.h"
#include "halftone/core/tensor.h"
#include "halftone/core/thread_state.h"

namespace halftone {

struct BackwardOptions {
  Tensor gradient = {};        // of the tensor backward() is called on; 1 for a tensor of one element when absent
  bool retain_graph = false;   // keep what was saved, so that backward can run again
  bool create_graph = false;   // record backward itself, so that gradients can be differentiated; retains the graph
};
struct GradOptions {
  bool create_graph = false;
  bool retain_graph = false;
  bool allow_unused = false;   // give an undefined tensor for an input the outputs do not depend on, instead of throwing
};

// The gradients of the sum of `outputs` over `inputs`, one per input, out of place; no .grad changes. A non-scalar output
// counts with a gradient of ones.
HT_API std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs, GradOptions o = {});
template <size_t N> std::array<Tensor, N> grad(const std::vector<Tensor>& outputs, const Tensor (&inputs)[N], GradOptions o = {}) {
  auto v = grad(outputs, std::vector<Tensor>(inputs, inputs + N), o);
  std::array<Tensor, N> r;
  for (size_t i = 0; i < N; ++i) r[i] = std::move(v[i]);
  return r;
}

// Called with the gradient of t, complete for this run, before it goes on; may return a replacement of the same shape and dtype, or
// an undefined tensor to leave it. t must require a gradient.
[[nodiscard]] HT_API HookHandle register_hook(const Tensor& t, std::function<Tensor(const Tensor& g)> hook);
// Called with the leaf during a backward run, as soon as its last contribution of that run is in .grad.
[[nodiscard]] HT_API HookHandle register_post_accumulate_hook(const Tensor& leaf, std::function<void(const Tensor& leaf)> hook);
// Whether a backward run is going on on this thread.
HT_API bool in_backward();
// From inside a hook: runs when this backward run has finished without an error.
HT_API void at_end_of_backward(std::function<void()> callback);
// From inside a hook: whether this backward run gives the leaf a gradient.
HT_API bool run_reaches(const Tensor& leaf);
// The leaves that a backward run from these outputs will reach, each once.
HT_API std::vector<Tensor> reachable_leaves(const std::vector<Tensor>& outputs);

// Whether calls on this thread are recorded.
inline bool recording() { return thread_state().on(Layer::autograd); }
// Records again inside a NoGrad region, for the guard's lifetime.
class HT_API EnableGrad {
 public:
  [[nodiscard]] EnableGrad() : scope_(Layer::autograd, true) {}
  ~EnableGrad() {}
  EnableGrad(const EnableGrad&) = delete;

 private:
  LayerScope scope_;
};

// ---- stamps: by whose scale, and by which of its scales, the gradients in .grad are multiplied. Adding those of another
// scaler, or of none, throws; adding those of a later scale of the same one leaves the earlier stamp, which stays stale.
struct GradStamp {
  struct Scales {
    uint64_t now = 1;    // the number of the present scale
    uint64_t shift = 0;  // of the last replay of a captured step: from numbers then to numbers when it was captured
  };
  static constexpr uint64_t by_hand = 1;  // set_grad: whether it is scaled is not known

  std::shared_ptr<const Scales> scaler;  // null: not scaled
  uint64_t number = 0;                   // of the scale
  bool assigned() const { return !scaler && number == by_hand; }
  uint64_t age() const { return scaler ? scaler->now - number : number; }  // 0: current
};
// From inside a node of the run: the gradients that it gives are scaled, and so are those they lead to.
HT_API void stamp_this_run(const GradStamp& stamp);
HT_API const GradStamp& grad_stamp(const Tensor& leaf);
HT_API void set_grad_stamp(const Tensor& leaf, const GradStamp& stamp);

}  // namespace halftone
