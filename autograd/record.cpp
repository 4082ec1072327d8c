// The recording layer: dispatch, then hang one node on the outputs if an input requires a gradient.
#include <algorithm>
#include <utility>

#include "halftone/autograd/node.h"
#include "halftone/ops/copy.h"

namespace halftone {
namespace {

std::atomic<uint64_t> sequences{1}, hook_ids{1};

// Destroying a node may free the last handle to the node before it, and so on along a graph of any depth: what a node
// held is queued and destroyed in a loop.
// The queue lives on the stack of the outermost call, so that graphs in static objects may die after the thread's own.
using Graveyard = std::vector<SmallVector<Node::Input, 2>>;
thread_local Graveyard* graveyard = nullptr;

void bury(SmallVector<Node::Input, 2> inputs) {
  if (graveyard) return graveyard->push_back(std::move(inputs));
  Graveyard waiting;
  graveyard = &waiting;
  waiting.push_back(std::move(inputs));
  while (!waiting.empty()) {
    auto next = std::move(waiting.back());
    waiting.pop_back();
  }
  graveyard = nullptr;
}

// What a rule of an operator sees.
class OpRule final : public Rule {
 public:
  OpRule(OpNode& n, Step& s) : Rule(n.attrs), node_(n), step_(s) {
    for (size_t i = 0; i < n.outputs.size(); ++i) {
      auto& o = n.outputs[i];
      if (o.saved.defined()) out_.push_back(step_.create_graph ? reattach(n, i, o.saved) : o.saved);
      else out_.push_back({});
    }
  }
  const Tensor& in(size_t i) const override {
    auto& x = node_.inputs[i];
    HT_CHECK(node_.op.saves.in >> std::min<size_t>(i, 31) & 1u, node_.name, ": its backward rule reads input ", i, ", which it does not save");
    if (x.saved.defined()) check_version(node_, "input", i, x.saved, x.version);
    return x.saved;
  }
  const Tensor& out(size_t i) const override {
    HT_CHECK(node_.op.saves.out >> i & 1u, node_.name, ": its backward rule reads output ", i, ", which it does not save");
    check_version(node_, "output", i, node_.outputs[i].saved, node_.outputs[i].version);
    return out_[i];
  }
  const Tensor& grad(size_t i) const override {
    static const Tensor none;
    return i < step_.grads.size() ? step_.grads[i] : none;
  }
  Tensor take_grad(size_t i) const override { return i < step_.grads.size() ? std::exchange(step_.grads[i], {}) : Tensor(); }
  const Meta& in_meta(size_t i) const override { return node_.inputs[i].meta; }
  bool needs(size_t i) const override { return step_.needs[i]; }
  size_t size() const override { return node_.inputs.size(); }
  const Producer* absorbed(size_t i) const override { return i < producers_.size() && producers_[i].op ? &producers_[i] : nullptr; }
  Tensor destination(size_t i) const override { return step_.engine.destination(step_, i); }
  Tensor addend(size_t i) const override { return step_.engine.addend(step_, i); }

  // Lets the operator answer for producers of its inputs.
  void absorb() {
    producers_.resize(node_.inputs.size());
    step_.absorbed.resize(node_.inputs.size());
    if (!node_.op.absorb) return;
    for (size_t i = 0; i < node_.inputs.size(); ++i) {
      if (!step_.needs[i] || !step_.engine.may_absorb(step_, i)) continue;
      auto& p = static_cast<OpNode&>(*node_.inputs[i].edge.node);
      Producer producer{&p.op, p.attrs, p.inputs[0].meta};
      if (!node_.op.absorb(*this, i, producer)) continue;
      producers_[i] = producer;
      step_.absorbed[i] = node_.inputs[i].edge.node;
    }
  }

 private:
  OpNode& node_;
  Step& step_;
  SmallVector<Tensor, 2> out_;
  SmallVector<Producer, 3> producers_;
};

}  // namespace

uint64_t next_hook_id() { return hook_ids++; }

Node::Node(const char* n) : name(n), sequence(sequences++) {
  const ThreadState& s = thread_state();
  object = s.within ? s.within->object : nullptr;
  cuda_device = s.cuda_device;
  stream = s.stream;
}
Node::~Node() {
  bool ends_here = true;  // nothing below dies with this node
  for (auto& i : inputs) ends_here &= !i.edge.node && !(i.saved.defined() && i.saved.body()->autograd && i.saved.body()->autograd->node);
  if (!ends_here) bury(std::move(inputs));
}
void Node::release() {
  released = true;
  for (auto& i : inputs) i.saved = {};
  for (auto& o : outputs) o.saved = {};
  segment.reset();
}
void Node::drop_saved(const std::function<bool(const Tensor&)>& stays) {
  for (auto& i : inputs) if (i.saved.defined() && !stays(i.saved)) i.saved = {};
  for (auto& o : outputs) o.saved = {};
}
void Node::take_saved(const Node& other, bool with_history) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto& from = other.inputs[i];
    bool stayed = inputs[i].saved.defined() && inputs[i].saved.body() == from.saved.body();
    if (!from.saved.defined() || stayed) continue;
    inputs[i].saved = with_history ? from.saved : from.saved.detach();
    inputs[i].version = from.version;
  }
  for (size_t o = 0; o < outputs.size(); ++o) {
    outputs[o].saved = other.outputs[o].saved;
    outputs[o].version = other.outputs[o].version;
  }
}

Edge edge_of(const Tensor& t) {
  if (!t.requires_grad()) return {};
  AutogradMeta& m = meta_of(t);
  if (m.node) return {m.node, m.output, nullptr};
  return {nullptr, 0, t.body()};
}

AutogradMeta& meta_of(const Tensor& t) {
  auto& slot = t.body()->autograd;
  if (!slot) slot = std::make_shared<AutogradMeta>();
  return *slot;
}

void attach(const Tensor& t, std::shared_ptr<Node> n, uint32_t output) {
  t.body()->requires_grad = true;
  AutogradMeta& m = meta_of(t);
  m.node = std::move(n);
  m.output = output;
}

Tensor reattach(Node& n, size_t output, const Tensor& saved) {
  Tensor t = saved.detach();
  attach(t, n.shared_from_this(), static_cast<uint32_t>(output));
  return t;
}

void check_version(const Node& n, const char* what, size_t i, const Tensor& saved, uint64_t version) {
  HT_CHECK(saved.version() == version, n.name, ": ", what, " ", i, " ", saved.meta(), " was saved for backward and has been written since (version ", version,
           ", now ", saved.version(), "); write to a clone() of it, or before the forward");
}

OpNode::OpNode(const Call& call, std::span<const Tensor> out) : Node(call.op->name), op(*call.op), attrs(call.attrs) {
  inputs.reserve(call.in.size());
  for (size_t i = 0; i < call.in.size(); ++i) {
    const Tensor& t = call.in[i];
    if (!t.defined()) {
      inputs.emplace_back();
      continue;
    }
    Input& x = inputs.emplace_back(edge_of(t), t.meta());
    if (!(op.saves.in >> std::min<size_t>(i, 31) & 1u)) continue;
    x.saved = t;
    x.version = t.version();
  }
  for (size_t i = 0; i < out.size(); ++i) {
    Output& y = outputs.emplace_back(out[i].meta());
    if (!(op.saves.out >> i & 1u)) continue;
    y.saved = out[i].detach();
    y.version = out[i].version();
  }
}

Tensors OpNode::backward(Step& step) {
  OpRule rule(*this, step);
  HT_CHECK(!step.create_graph || op.order > 1, name, ": can be differentiated once, and create_graph asks for more");
  bool fused = op.fused_backward && !step.create_graph;
  step.absorbed.resize(inputs.size());
  if (fused) rule.absorb();
  return fused ? op.fused_backward(rule) : op.backward(rule);
}

Tensors autograd_layer(Call& c) {
  bool record = false;
  for (auto& t : c.in) record |= t.requires_grad();
  if (!record) return dispatch(c);
  if (c.op->writes) {
    for (size_t i = 0; i < c.in.size(); ++i)
      HT_CHECK(!c.in[i].requires_grad() || !c.op->writes(c, i), c.op->name, ": writes in place to a tensor ",
               c.in[i].is_leaf() ? "that requires a gradient; do it under NoGrad" : "that has a history; use the operator that returns a new tensor, or detach()");
    HT_CHECK(c.op->backward, c.op->name, ": writes values that have a gradient into a tensor that has none, which would lose it; write their detach(), "
             "use an operator that returns a new tensor, or do it under NoGrad");
  }
  if (!c.op->backward) return dispatch(c);

  c.recording = true;
  Tensors out = dispatch(c);
  auto node = std::make_shared<OpNode>(c, std::span<const Tensor>(out));
  note_recorded(node);
  out.resize(out.size() - static_cast<size_t>(c.op->aux));
  for (size_t i = 0; i < out.size(); ++i)
    if (is_floating(out[i].dtype())) attach(out[i], node, static_cast<uint32_t>(i));
  return out;
}

}  // namespace halftone
