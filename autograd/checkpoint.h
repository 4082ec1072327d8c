#pragma once
// Less memory for more time: a segment of a model whose intermediate results are not kept for backward but computed again
// when backward comes there (Chen et al., "Training deep nets with sublinear memory cost", 2016).
//   Tensor y = checkpoint([&](const Tensor& x) { return block(x); }, x);
#include <functional>
#include <memory>
#include <tuple>
#include <vector>

#include "halftone/autograd/autograd.h"

namespace halftone {

class Segment;

namespace detail {

// Notes the operators that are recorded on this thread while it lives. close() drops what they saved; they will call `again`
// for it. `inputs` are the segment's own and stay.
class HT_API CheckpointScope {
 public:
  CheckpointScope(std::function<void()> again, std::vector<Tensor> inputs);
  ~CheckpointScope();
  CheckpointScope(const CheckpointScope&) = delete;
  void close();

 private:
  std::shared_ptr<Segment> segment_;
  Segment* outer_;
};

template <class T> void collect_tensors(std::vector<Tensor>& all, const T& v) {
  if constexpr (std::derived_from<T, Tensor>) if (v.defined()) all.push_back(v);
}

}  // namespace detail

// f(x...), with the same value and gradients, of any order, as without. f is kept by value and called again during backward,
// under the autocast state, random numbers, device and stream of the first call: it must do the same operators each time. x are
// any values; what f captures by reference must still be there, and parameters unchanged, which is checked.
template <class F, class... X> auto checkpoint(F f, const X&... x) {
  if (!recording()) return f(x...);
  std::vector<Tensor> inputs;
  (detail::collect_tensors(inputs, x), ...);
  // The copies keep the history of x: what is computed again hangs on the same graph.
  detail::CheckpointScope scope([f, kept = std::tuple<X...>(x...)]() mutable { std::apply(f, kept); }, std::move(inputs));
  auto y = f(x...);
  scope.close();
  return y;
}

}  // namespace halftone
