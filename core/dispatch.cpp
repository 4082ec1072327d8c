// dispatch(): while a bit of the thread's layer byte is set, the topmost layer gets the call; then infer, allocate, launch.
#include <bit>
#include <mutex>

#include "halftone/core/backend.h"
#include "halftone/core/capture.h"
#include "halftone/core/op.h"

namespace halftone {
namespace {

using LayerFunction = Tensors (*)(Call&);
constexpr LayerFunction layer_table[num_layers] = {profile_layer, autograd_layer, autocast_layer};

// The operators, in one vector that only grows. Readers get a span of what was there when they asked.
struct Registry {
  std::mutex lock;
  std::vector<const OpDef*> ops;
  Registry() {
    ops.reserve(4096);  // so that spans stay valid while users register theirs
    for (OpDef* op : library_ops()) ops.push_back(op);
  }
};
Registry& the_registry() {
  static Registry r;
  return r;
}

const char* device_name(DeviceType t) { return t == DeviceType::cpu ? "cpu" : "cuda"; }

Device common_device(const Call& c) {
  const Tensor* first = nullptr;
  for (auto& t : c.in) {
    if (!t.defined()) continue;
    if (!first) first = &t;
    else HT_CHECK(c.op->any_device || t.device() == first->device(), c.op->name, ": inputs are on ", first->device(), " and ", t.device(),
                  "; move them to one device with to()");
  }
  HT_CHECK(first, c.op->name, ": needs at least one tensor");
  return first->device();
}

void check_given(const OpDef& op, const Tensors& out, const Metas& metas) {
  for (size_t i = 0; i < out.size(); ++i) {
    if (!out[i].defined()) continue;
    const Meta& m = out[i].meta();
    HT_CHECK(m.shape == metas[i].shape && m.dtype == metas[i].dtype && m.device == metas[i].device, op.name, ": writes ", metas[i],
             " on ", metas[i].device, ", the tensor given for it is ", m, " on ", m.device);
  }
}

void check_writable(const Call& c, size_t i) {
  const Meta& m = c.in[i].meta();
  for (size_t d = 0; d < m.shape.size(); ++d)
    HT_CHECK(m.strides[d] != 0 || m.shape[d] <= 1, c.op->name, ": writes to an expanded tensor ", m, ", whose elements share memory; clone() it first");
}

Tensors launch(Call& c) {
  if (c.launched) return c.out;
  ensure_backends();
  const OpDef& op = *c.op;
  Device device = common_device(c);
  Metas metas = op.infer(c);
  if (op.view) {
    Tensors views;
    for (const Meta& m : metas) views.push_back(Tensor(m, c.in[0].storage(), true));
    return views;
  }

  auto type = static_cast<size_t>(device.type);
  Kernel kernel = op.kernel[type];
  HT_CHECK(kernel, op.name, ": no ", device_name(device.type), " kernel in this build",
           device.type == DeviceType::cuda ? "; configure with -DHALFTONE_CUDA=ON" : "");
  HT_CHECK(contains(op.dtypes[type], c.in[0].dtype()), op.name, ": ", c.in[0].dtype(), " is not supported on ", device_name(device.type));

  Tensors out = std::move(c.out);
  if (out.empty()) {
    size_t n = metas.size() - (c.recording ? 0 : static_cast<size_t>(op.aux));
    out.reserve(n);
    for (size_t i = 0; i < n; ++i) out.push_back(Tensor::allocate(metas[i]));
  } else {
    check_given(op, out, metas);
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i].defined()) out[i].bump_version();
      else out[i] = Tensor::allocate(metas[i]);
    }
  }
  if (op.writes)
    for (size_t i = 0; i < c.in.size(); ++i)
      if (c.in[i].defined() && op.writes(c, i)) {
        check_writable(c, i);
        c.in[i].bump_version();
      }
  kernel(c, out);
  if (auto* log = thread_state().capture) log->launched(c, out);
  return out;
}

}  // namespace

Tensors dispatch(Call& c) {
  ThreadState& state = thread_state();
  if (unsigned live = state.layers) {
    int top = std::bit_width(live) - 1;
    LayerScope below(state, static_cast<uint8_t>(live & ((1u << top) - 1u)));
    return layer_table[top](c);
  }
  return launch(c);
}

Tensors call_all(const OpDef& op, Tensors in, const Attrs& attrs) {
  Call c{.op = &op, .in = std::move(in), .attrs = attrs, .out = {}};
  return dispatch(c);
}
Tensor call(const OpDef& op, Tensors in, const Attrs& attrs) { return std::move(call_all(op, std::move(in), attrs)[0]); }

Tensors call_all_into(const OpDef& op, Tensors in, const Attrs& attrs, Tensors out) {
  Call c{.op = &op, .in = std::move(in), .attrs = attrs, .out = std::move(out)};
  if (thread_state().on(Layer::autocast)) autocast_passed_by(c);
  LayerScope kernel_only(static_cast<uint8_t>(thread_state().layers & (1u << static_cast<int>(Layer::profile))));
  return dispatch(c);
}
Tensor call_into(const OpDef& op, Tensors in, const Attrs& attrs, const Tensor& out) {
  return std::move(call_all_into(op, std::move(in), attrs, {out})[0]);
}

std::span<const OpDef* const> registry() {
  ensure_backends();
  Registry& r = the_registry();
  std::lock_guard guard(r.lock);
  return r.ops;
}

const OpDef* find_op(std::string_view name) {
  for (const OpDef* op : registry()) if (name == op->name) return op;
  return nullptr;
}

Register::Register(OpDef& op) {
  HT_CHECK(op.name && op.doc, "register: an operator needs a name and a doc");
  Registry& r = the_registry();
  std::lock_guard guard(r.lock);
  for (const OpDef* other : r.ops) {
    if (other == &op) return;
    if (std::string_view(other->name) != op.name) continue;
    // A program and its library that hide their symbols each have a copy of an operator from their common header.
    bool a_copy = std::string_view(other->doc) == op.doc;
    HT_CHECK(a_copy, "register: there is another operator named '", op.name, "' already");
    return;
  }
  HT_CHECK(r.ops.size() < r.ops.capacity(), "register: too many operators");
  r.ops.push_back(&op);
}

void set_kernel(OpDef& op, DeviceType type, Kernel kernel) { op.kernel[static_cast<size_t>(type)] = kernel; }

}  // namespace halftone
