#pragma once
// ONNX: a model as a file that other runtimes execute. The graph is what the model calls on an example, so any model can be written
// whose operators are among those below, not only a Sequential.
//
//   net.eval();
//   io::save_onnx("net.onnx", net, zeros({1, 3, 32, 32}));
#include <functional>
#include <string>

#include "halftone/core/state_dict.h"

namespace halftone::io {

struct OnnxOptions {
  std::string input = "input", output = "output";  // names in the file
  bool any_batch = true;  // the size of dimension 0 is left open; else it is the example's
};

// Writes what `net` does to one tensor like `example`, with the weights that it has now, under the names of its state (opset 21).
// Operators: linear, matmul, conv (1d to 3d) and its transpose, max and average pooling, batch, layer (of a sum, too) and group norm, softmax,
// activations, arithmetic, mean and sum, embedding, cat, cast and changes of shape. Throws Error when the model is in training mode,
// calls another operator, or is larger than the 2 GiB that a file can hold.
HT_API void save_onnx(const std::string& path, const StateDict& state, const std::function<Tensor(const Tensor&)>& f, const Tensor& example,
                      const OnnxOptions& options = {});
template <class Net>
  requires requires(Net& net, const Tensor& x) { net.state_dict(), Tensor(net(x)), bool(net.training()); }
void save_onnx(const std::string& path, Net& net, const Tensor& example, const OnnxOptions& options = {}) {
  HT_CHECK(!net.training(), "save_onnx: the model is in training mode; call eval() before");
  save_onnx(path, net.state_dict(), [&net](const Tensor& x) { return net(x); }, example, options);
}

}  // namespace halftone::io
