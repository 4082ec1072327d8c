// The node behind a custom function.
#include "halftone/autograd/function.h"

#include "halftone/autograd/node.h"
#include "halftone/ops/copy.h"

namespace halftone {
namespace {

constexpr int autocast_bit = 1 << static_cast<int>(Layer::autocast);
constexpr auto autocast_slot = static_cast<size_t>(Layer::autocast);

}  // namespace

class FunctionNode final : public Node {
 public:
  FunctionNode(const std::vector<Tensor>& x, std::span<const Tensor> y, std::shared_ptr<Context> ctx, detail::FunctionBackward f, FunctionCast cast,
               const char* function)
      : Node(function), context_(std::move(ctx)), backward_(f) {
    for (auto& t : x) {
      if (t.defined()) inputs.emplace_back(edge_of(t), t.meta());
      else inputs.emplace_back();
    }
    for (auto& t : y) outputs.emplace_back(t.defined() ? t.meta() : Meta());
    if (cast == FunctionCast::any && thread_state().on(Layer::autocast)) autocast_ = thread_state().slot[autocast_slot];
  }

  Tensors backward(Step& step) override {
    for (size_t i = 0; i < outputs.size(); ++i)  // a rule of users' sees every gradient, zero where none came
      if (!step.grads[i].defined() && !step.implied_one) step.grads[i] = zeros(outputs[i].meta.shape, {.dtype = outputs[i].meta.dtype, .device = outputs[i].meta.device});
    ThreadState& state = thread_state();
    LayerScope layers(static_cast<uint8_t>(autocast_ ? state.layers | autocast_bit : state.layers));
    auto saved_slot = state.slot[autocast_slot];
    struct Restore {
      std::shared_ptr<const LayerState>& slot;
      std::shared_ptr<const LayerState> value;
      ~Restore() { slot = std::move(value); }
    } restore{state.slot[autocast_slot], std::move(saved_slot)};
    if (autocast_) state.slot[autocast_slot] = autocast_;
    AttachedOutputs attached(*this, step.create_graph);
    std::vector<Tensor> g = backward_(*context_, step.grads);
    HT_CHECK(g.size() == inputs.size(), name, "::backward: expected one gradient for each of ", inputs.size(), " tensor arguments, got ", g.size());
    return Tensors(std::span<const Tensor>(g));
  }
  bool takes_implied_one() const override { return context_->takes_implied_one_ && outputs.size() == 1; }
  void release() override {
    Node::release();
    context_->clear();
  }
  void drop_saved(const std::function<bool(const Tensor&)>&) override { context_->clear(); }
  void take_saved(const Node& other, bool) override { context_ = static_cast<const FunctionNode&>(other).context_; }

  // Forward saw its outputs before they had a history: what it saved of them is told apart here.
  static void mark_outputs(Context& ctx, std::span<const Tensor> y) {
    for (auto& w : ctx.watched_)
      for (size_t k = 0; k < y.size(); ++k)
        if (y[k].body() == w.tensor->body() && !w.tensor->requires_grad()) w.output = static_cast<int>(k);  // else an argument
  }

 private:
  // While it lives, saved outputs have their history, so that the backward of a backward finds its way. Not longer: the
  // node would own itself.
  class AttachedOutputs {
   public:
    AttachedOutputs(FunctionNode& node, bool on) : context_(*node.context_) {
      if (!on) return;
      for (auto& w : context_.watched_)
        if (w.output >= 0) *w.tensor = reattach(node, static_cast<size_t>(w.output), *w.tensor);
    }
    ~AttachedOutputs() {
      for (auto& w : context_.watched_) if (w.output >= 0) *w.tensor = w.tensor->detach();
    }
    AttachedOutputs(const AttachedOutputs&) = delete;

   private:
    Context& context_;
  };

  std::shared_ptr<Context> context_;
  detail::FunctionBackward backward_;
  std::shared_ptr<const LayerState> autocast_;  // the region's state at the call, when backward is to run in it
};

void Context::check() const {
  for (auto& w : watched_)
    HT_CHECK(w.tensor->version() == w.version, "Context::saved: a tensor ", w.tensor->meta(), " has been written since forward (version ", w.version,
             ", now ", w.tensor->version(), ")");
}
void Context::fail(bool has_value) {
  throw Error(has_value ? "Context::saved: the types asked for are not those given to save"
                        : "Context::saved: nothing is saved, or the graph was freed by an earlier backward; pass {.retain_graph = true} to that one");
}

namespace detail {

FunctionRegion::FunctionRegion(FunctionCast cast)
    : scope_(static_cast<uint8_t>(thread_state().layers & ~(1 << static_cast<int>(Layer::autograd)) & (cast == FunctionCast::f32 ? ~autocast_bit : ~0))) {}
FunctionRegion::~FunctionRegion() {}

Tensor function_argument(const Tensor& x, FunctionCast cast) {
  bool narrow = x.defined() && is_floating(x.dtype()) && x.dtype() != DType::f64;
  if (cast != FunctionCast::f32 || !narrow || !thread_state().on(Layer::autocast)) return x;
  LayerScope off(Layer::autocast, false);
  return x.to(DType::f32);
}

void attach_function(std::span<Tensor> y, const std::vector<Tensor>& x, std::shared_ptr<Context> ctx, FunctionBackward backward, FunctionCast cast,
                     const char* name) {
  bool any = false;
  for (auto& t : x) any |= t.requires_grad();
  FunctionNode::mark_outputs(*ctx, y);
  for (auto& t : y) t = t.detach();  // also where forward returned an argument, or saved what it returns
  if (!any || !recording()) return;
  auto node = std::make_shared<FunctionNode>(x, y, std::move(ctx), backward, cast, name);
  note_recorded(node);
  for (size_t i = 0; i < y.size(); ++i)
    if (y[i].defined() && is_floating(y[i].dtype())) attach(y[i], node, static_cast<uint32_t>(i));
}

}  // namespace detail
}  // namespace halftone
