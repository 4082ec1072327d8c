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
// Whether no hook looks at what it takes and gives.
bool unobserved(Any& m) { return !m.observed() && !m.get().observed(); }
BatchNorm* as_batch_norm(Module& m) {
  return exactly<BatchNorm1d>(m) || exactly<BatchNorm2d>(m) || exactly<BatchNorm3d>(m) ? static_cast<BatchNorm*>(&m) : nullptr;
}
// A max pool each of whose windows holds an element: with dilation one may lie in the padding, whose largest is -inf.
bool pools_elements(Module& m) {
  if (auto* p = exactly<MaxPool1d>(m)) return p->options().dilation == 1;
  if (auto* p = exactly<MaxPool2d>(m)) return p->options().dilation.h == 1 && p->options().dilation.w == 1;
  return exactly<AdaptiveMaxPool1d>(m) || exactly<AdaptiveMaxPool2d>(m);
}

}  // namespace

Tensor Sequential::fused(Any& one, Any& two, const Tensor& x) try {
  Module &first = one.get(), &second = two.get();
  auto* g = exactly<GELU>(second);
  bool to_relu = exactly<ReLU>(second), to_gelu = g && g->form() == Approximate::none;
  if (!(to_relu || to_gelu) || !unobserved(one) || !unobserved(two)) return {};
  if (auto* m = exactly<Linear>(first); m && m->activation() == Activation::none)
    return to_relu ? linear_relu(x, m->weight, m->bias) : linear_gelu(x, m->weight, m->bias);
  if (!to_relu) return {};
  if (auto* m = exactly<Conv2d>(first)) return conv2d_relu(x, m->weight, m->bias, m->options());
  if (auto* m = as_batch_norm(first)) return m->forward_relu(x);
  return {};
} catch (Error& e) {
  name_layer(e, one.get());
  throw;
}

// The largest element stays the largest under relu, whose gradient reaches the same element or none. What a batch norm makes of its
// relu costs nothing.
bool Sequential::pools_first(size_t i, size_t count) {
  if (!fuse_ || i + 1 >= count || (i > 0 && as_batch_norm(layers_[i - 1].get()))) return false;
  Any &relu = layers_[i], &pool = layers_[i + 1];
  return exactly<ReLU>(relu.get()) && pools_elements(pool.get()) && unobserved(relu) && unobserved(pool);
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
    Tensor both = fuse_ && i + 1 < count && !pools_first(i + 1, count) ? fused(layers_[i], layers_[i + 1], y) : Tensor();
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
  const bool apart = shortcut.empty() || shortcut.observed() || !shortcut.fuse_ || !unobserved(shortcut.layers_[before]);
  BatchNorm* last = apart ? nullptr : as_batch_norm(shortcut[before]);
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
