// Modules that call other modules.
#include "halftone/nn/container.h"

#include "halftone/nn/activation.h"
#include "halftone/nn/conv.h"
#include "halftone/nn/linear.h"
#include "halftone/nn/norm.h"
#include "halftone/nn/pool.h"
#include "halftone/ops/binary.h"

namespace halftone::nn {

const Any& ModuleList::at(size_t i) const {
  HT_CHECK(i < size(), "ModuleList: layer ", i, " of ", size());
  return layers_[i];
}

namespace {

// m, if it is exactly an M: a class derived from one may do anything.
template <class M> M* exactly(Module& m) { return typeid(m) == typeid(M) ? static_cast<M*>(&m) : nullptr; }
BatchNorm* as_batch_norm(Module& m) {
  return exactly<BatchNorm1d>(m) || exactly<BatchNorm2d>(m) || exactly<BatchNorm3d>(m) ? static_cast<BatchNorm*>(&m) : nullptr;
}

}  // namespace

Tensor Sequential::fused(Module& first, Module& second, const Tensor& x) try {
  auto* g = exactly<GELU>(second);
  bool to_relu = exactly<ReLU>(second), to_gelu = g && g->form() == Approximate::none;
  if (!(to_relu || to_gelu) || first.observed() || second.observed()) return {};
  if (auto* m = exactly<Linear>(first); m && m->activation() == Activation::none)
    return to_relu ? linear_relu(x, m->weight, m->bias) : linear_gelu(x, m->weight, m->bias);
  if (!to_relu) return {};
  if (auto* m = exactly<Conv2d>(first)) return conv2d_relu(x, m->weight, m->bias, m->options());
  if (auto* m = as_batch_norm(first)) return m->forward_relu(x);
  return {};
} catch (Error& e) {
  name_layer(e, first);
  throw;
}

// The largest element stays the largest under relu, whose gradient reaches the same element or none. What a batch norm makes of its
// relu costs nothing.
bool Sequential::pools_first(size_t i, size_t count) const {
  if (!fuse_ || i + 1 >= count || (i > 0 && as_batch_norm(layers_[i - 1].get()))) return false;
  Module &relu = layers_[i].get(), &pool = layers_[i + 1].get();
  const bool largest = exactly<MaxPool1d>(pool) || exactly<MaxPool2d>(pool) || exactly<AdaptiveMaxPool1d>(pool) || exactly<AdaptiveMaxPool2d>(pool);
  return largest && exactly<ReLU>(relu) && !relu.observed() && !pool.observed();
}

Tensor Sequential::forward(const Tensor& x) { return first_layers(layers_.size(), x); }

Tensor Sequential::first_layers(size_t count, const Tensor& x) {
  Tensor y = x;
  for (size_t i = 0; i < count; ++i) {
    if (pools_first(i, count)) {
      y = layers_[i](layers_[i + 1](y));
      ++i;
      continue;
    }
    Tensor both = fuse_ && i + 1 < count && !pools_first(i + 1, count) ? fused(layers_[i].get(), layers_[i + 1].get(), y) : Tensor();
    if (!both.defined()) y = layers_[i](y);
    else {
      y = both;
      ++i;
    }
  }
  return y;
}

Tensor BatchNorm::add_relu(const Tensor& x, Sequential& shortcut, const Tensor& z) {
  const size_t before = shortcut.size() - 1;  // layers before the last
  BatchNorm* last = shortcut.empty() || shortcut.observed() || !shortcut.fuse_ ? nullptr : as_batch_norm(shortcut[before]);
  return last ? add_relu(x, *last, shortcut.first_layers(before, z)) : add_relu(x, shortcut(z));
}

void ModuleDict::check_new(const std::string& name) {
  HT_CHECK(!name.empty() && name.find('.') == name.npos, "ModuleDict: expected a name without dots, got \"", name, "\"");
  HT_CHECK(!contains(name), "ModuleDict: there is a module \"", name, "\" already");
}
Any& ModuleDict::at(std::string_view name) {
  if (Any* m = modules_.find(name)) return *m;
  std::string all;
  for (auto& [known, m] : modules_) all += (all.empty() ? "" : ", ") + known;
  throw Error(text::cat("ModuleDict: no module \"", name, "\"; there are: ", all.empty() ? "none" : all));
}

Tensor Residual::forward(const Tensor& x) { return x + held_(x); }

PrecisionIsland::PrecisionIsland(Any module, DType dtype) : held_(std::move(module)), dtype_(dtype) {
  HT_CHECK(is_floating(dtype), "nn::PrecisionIsland: expected a floating dtype, got ", dtype);
  held_.get().to(dtype);
}
Tensor PrecisionIsland::forward(const Tensor& x) {
  Tensor in = x.to(dtype_);
  LayerScope off(Layer::autocast, false);
  return held_(in);
}

}  // namespace halftone::nn
