// The engine: counts what each node will receive, then runs nodes latest first; gradients of a node wait until all have come.
#include <algorithm>
#include <optional>
#include <queue>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "halftone/autograd/node.h"
#include "halftone/core/backend.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"

namespace halftone {
namespace {

// A tensor's place, as a key: a node's output, or a leaf.
using Place = std::pair<const void*, uint32_t>;
struct HashPlace {
  size_t operator()(const Place& p) const { return std::hash<const void*>()(p.first) * 31 + p.second; }
};
Place place_of(const Edge& e) { return e.node ? Place{e.node.get(), e.output} : Place{e.leaf.get(), ~0u}; }

class Run final : public Services {
 public:
  Run(const std::vector<Tensor>& outputs, bool create_graph, bool retain_graph)
      : create_graph_(create_graph), retain_graph_(retain_graph || create_graph) {
    for (auto& t : outputs) roots_.push_back(edge_of(t));
  }

  // Limits the run to what these inputs' gradients take; without it, all leaves accumulate.
  void target(const std::vector<Tensor>& inputs) {
    accumulate_ = false;
    for (auto& t : inputs) targets_[place_of(edge_of(t))] = Tensor();
  }
  const Tensor& result(const Tensor& input) { return targets_[place_of(edge_of(input))]; }

  void execute(std::vector<Tensor> seeds);
  std::vector<Tensor> leaves();
  bool reaches(const Tensor& leaf) const { return leaves_.contains(leaf.body().get()); }

  void stamp(const GradStamp& s);
  std::vector<std::function<void()>> at_end;

 private:
  struct Waiting {
    int missing = 0, uses = 0;  // edges into the node that have not delivered, and all of them
    bool needed = false, implied_one = false;
    std::optional<bool> scaled;  // whether what has come is
    Tensors grads;
  };
  struct LeafWaiting {
    int missing = 0;
    Tensor handle;
    Tensor sum;  // for hooks, which see the whole gradient
    std::optional<bool> scaled;
  };

  void plan();
  bool wants(const Edge& e) const;
  bool is_target(const Node& n) const;
  bool implies_one(const Edge& root);
  void deliver(const Edge& e, const Meta& expected, Tensor g, const char* from);
  void run_node(Node& n);
  void enter(Backend::Queue next);
  Tensor through_hooks(const std::vector<Numbered<TensorHook>>& hooks, Tensor g);
  void accumulate(const std::shared_ptr<Body>& body, Leaf& leaf, Tensor g, bool scaled);
  void note_scaled(std::optional<bool>& before, const char* where) const;
  bool may_absorb(Step& s, size_t i) override;
  Tensor destination(Step& s, size_t i) override;
  Tensor addend(Step& s, size_t i) override;
  void deliver_to_leaf(const Edge& e, Tensor g);
  bool is_claimed(const Edge& e) const;
  void give_up_claims();
  void fire_hooks();
  void take(const Edge& e, Leaf& leaf, Tensor g, bool scaled);

  bool create_graph_, retain_graph_, accumulate_ = true;
  std::vector<Edge> roots_;
  std::unordered_map<Place, Tensor, HashPlace> targets_;
  std::unordered_map<Node*, Waiting> nodes_;
  std::unordered_map<Body*, LeafWaiting> leaves_;
  struct Later {
    bool operator()(Node* a, Node* b) const { return a->sequence < b->sequence; }
  };
  std::priority_queue<Node*, std::vector<Node*>, Later> ready_;
  std::vector<Leaf*> claimed_;    // of the node whose turn it is
  std::vector<Tensor> complete_;  // leaves whose last contribution has come and whose hooks have not run
  Backend::Queue last_{nullptr, 0};
  GradStamp stamp_;      // of what is scaled
  bool scaled_ = false;  // what the node gives whose turn it is
};

thread_local Run* current = nullptr;
const GradStamp unscaled;

struct CurrentRun {
  explicit CurrentRun(Run& r) : saved(current) { current = &r; }
  ~CurrentRun() { current = saved; }
  Run* saved;
};

// Finds every node below the roots, which of them lead to something wanted, and how many gradients each will get.
void Run::plan() {
  std::vector<Node*> all, stack;
  for (auto& e : roots_) if (e.node) stack.push_back(e.node.get());
  while (!stack.empty()) {
    Node* n = stack.back();
    stack.pop_back();
    if (!nodes_.try_emplace(n).second) continue;
    all.push_back(n);
    for (auto& i : n->inputs) if (i.edge.node) stack.push_back(i.edge.node.get());
  }
  std::sort(all.begin(), all.end(), [](Node* a, Node* b) { return a->sequence < b->sequence; });
  for (Node* n : all) {  // earliest first: what a node reaches is known before it
    Waiting& w = nodes_[n];
    w.grads.resize(n->outputs.size());
    for (auto& i : n->inputs) w.needed |= wants(i.edge);
    if (!w.needed) continue;
    for (auto& i : n->inputs) {
      if (!wants(i.edge)) continue;
      if (i.edge.node) {
        Waiting& below = nodes_[i.edge.node.get()];
        ++below.missing;
        ++below.uses;
      } else {
        auto& l = leaves_[i.edge.leaf.get()];
        ++l.missing;
        l.handle = Tensor(i.edge.leaf);
      }
    }
  }
}

bool Run::wants(const Edge& e) const {
  if (!e) return false;
  if (accumulate_) return true;
  if (targets_.contains(place_of(e))) return true;
  if (!e.node) return false;
  auto w = nodes_.find(e.node.get());
  return w != nodes_.end() && w->second.needed;
}

bool Run::is_target(const Node& n) const {
  for (uint32_t o = 0; o < n.outputs.size(); ++o) if (targets_.contains({&n, o})) return true;
  return false;
}

std::vector<Tensor> Run::leaves() {
  plan();
  for (auto& e : roots_) if (e.leaf) leaves_[e.leaf.get()].handle = Tensor(e.leaf);
  std::vector<Tensor> r;
  for (auto& [body, l] : leaves_) r.push_back(l.handle);
  return r;
}

// Whether a root's node makes do without a tensor of its 1. What it returns then may be somebody's who changes it later, so that only
// operators may see it: no hook, no other function, no result of the run.
bool Run::implies_one(const Edge& root) {
  if (create_graph_ || !accumulate_ || !root.node || !root.node->takes_implied_one() || nodes_[root.node.get()].uses != 1) return false;
  for (auto& [n, w] : nodes_) if (!n->hooks.empty() || (n != root.node.get() && !dynamic_cast<OpNode*>(n))) return false;
  for (auto& [body, l] : leaves_) if (!meta_of(l.handle).leaf().hooks.empty()) return false;
  return true;
}

// A seed that is undefined means 1.
void Run::execute(std::vector<Tensor> seeds) {
  plan();
  for (auto& e : roots_) {
    // A root counts as one more edge, so that an output used by another output waits for it.
    if (e.node) {
      Waiting& w = nodes_[e.node.get()];
      ++w.missing;
      ++w.uses;
    } else ++leaves_[e.leaf.get()].missing;
  }
  for (size_t i = 0; i < roots_.size(); ++i) {
    if (seeds[i].defined()) continue;
    const Edge& e = roots_[i];
    const Meta& meta = e.node ? e.node->outputs[e.output].meta : e.leaf->meta;
    if (implies_one(e)) nodes_[e.node.get()].implied_one = true;
    else seeds[i] = ones(meta.shape, {.dtype = meta.dtype, .device = meta.device});
  }
  CurrentRun here(*this);
  const ThreadState& state = thread_state();
  unsigned profile = state.layers & (1u << static_cast<int>(Layer::profile)), record = create_graph_ ? 1u << static_cast<int>(Layer::autograd) : 0u;
  LayerScope layers(static_cast<uint8_t>(profile | record));  // never autocast: backward runs in the dtypes that forward chose
  last_ = {state.stream, state.cuda_device};
  struct Restore {
    Run& run;
    Backend::Queue caller;
    ~Restore() {
      try {
        run.enter(caller);
      } catch (const Error&) {  // the device is beyond use, and the error that says so is on its way
      }
      run.give_up_claims();
    }
  } restore{*this, last_};

  for (size_t i = 0; i < roots_.size(); ++i) deliver(roots_[i], seeds[i].defined() ? seeds[i].meta() : Meta(), seeds[i], "backward");
  fire_hooks();
  while (!ready_.empty()) {
    Node* n = ready_.top();
    ready_.pop();
    run_node(*n);
  }
  enter(restore.caller);
  for (size_t i = 0; i < at_end.size(); ++i) at_end[i]();
}

// Goes on in this queue, behind what the run has queued so far.
void Run::enter(Backend::Queue next) {
  if (next.stream == last_.stream && next.index == last_.index) return;
  Backend::Queue before = std::exchange(last_, next);
  thread_state().stream = next.stream;
  thread_state().cuda_device = next.index;
  backend(DeviceType::cuda).order(before, next);
}

void Run::run_node(Node& n) {
  auto keep = n.shared_from_this();
  Waiting& w = nodes_[&n];
  bool any = w.implied_one;
  for (auto& g : w.grads) any |= g.defined();
  enter({n.stream, n.cuda_device});
  scaled_ = w.scaled.value_or(false);
  Step step{.node = n, .engine = *this, .grads = std::move(w.grads), .create_graph = create_graph_, .implied_one = w.implied_one};
  for (uint32_t o = 0; o < step.grads.size(); ++o) {
    if (!step.grads[o].defined()) continue;
    for (auto& h : std::vector(n.hooks))
      if (h.f.first == o) step.grads[o] = through_hooks({{h.id, h.f.second}}, step.grads[o]);
    if (auto t = targets_.find({&n, o}); t != targets_.end()) t->second = step.grads[o];
  }
  for (auto& i : n.inputs) step.needs.push_back(wants(i.edge));

  Tensors grads;
  if (any && w.needed) {
    HT_CHECK(!n.released, n.name, ": its graph was freed by an earlier backward; pass {.retain_graph = true} to that one");
    restore_saved(n, create_graph_);
    WithinScope of_forward(n.object);
    grads = n.backward(step);
    HT_CHECK(grads.size() <= n.inputs.size(), n.name, ": its backward returned ", grads.size(), " gradients for ", n.inputs.size(), " inputs");
  }
  grads.resize(n.inputs.size());
  step.absorbed.resize(n.inputs.size());
  // Buffers that a kernel has written are taken over before any hook runs, which may start a run of its own.
  auto deliver_inputs = [&](bool claimed) {
    for (size_t i = 0; i < n.inputs.size(); ++i) {
      if (!step.needs[i]) continue;
      auto& producer = step.absorbed[i];
      auto& input = producer ? producer->inputs[0] : n.inputs[i];
      if (is_claimed(input.edge) != claimed) continue;
      deliver(input.edge, input.meta, std::move(grads[i]), n.name);
      if (producer && !retain_graph_) producer->release();
    }
  };
  if (!claimed_.empty()) deliver_inputs(true);
  deliver_inputs(false);
  give_up_claims();
  if (!retain_graph_ && w.needed) n.release();
  fire_hooks();
}

bool Run::is_claimed(const Edge& e) const {
  return e.leaf && !claimed_.empty() && std::find(claimed_.begin(), claimed_.end(), &meta_of(Tensor(e.leaf)).leaf()) != claimed_.end();
}

void Run::give_up_claims() {
  for (Leaf* l : claimed_) {
    std::lock_guard guard(l->lock);
    if (l->claimed_by == this) l->claimed_by = nullptr;
  }
  claimed_.clear();
}

void Run::fire_hooks() {
  for (size_t i = 0; i < complete_.size(); ++i) {
    Tensor leaf = complete_[i];
    for (auto& h : std::vector(meta_of(leaf).leaf().post_accumulate)) h.f(leaf);
  }
  complete_.clear();
}

// Hands a gradient to where an edge leads. An undefined one still counts as having come.
void Run::deliver(const Edge& e, const Meta& expected, Tensor g, const char* from) {
  if (g.defined()) {
    HT_CHECK(g.shape() == expected.shape, from, ": its backward gave a gradient of shape ", g.shape(), " for an input of shape ", expected.shape);
    g = cast(g, expected.dtype);
  }
  if (e.node) {
    Waiting& w = nodes_[e.node.get()];
    Tensor& slot = w.grads[e.output];
    if (g.defined()) {
      note_scaled(w.scaled, e.node->name);
      slot = slot.defined() ? slot + g : std::move(g);
    }
    if (--w.missing == 0 && (w.needed || is_target(*e.node) || !e.node->hooks.empty())) ready_.push(e.node.get());
    return;
  }
  deliver_to_leaf(e, std::move(g));
}

void Run::deliver_to_leaf(const Edge& e, Tensor g) {
  Tensor handle(e.leaf);
  Leaf& leaf = meta_of(handle).leaf();
  LeafWaiting& w = leaves_[e.leaf.get()];
  if (g.defined()) {
    note_scaled(w.scaled, "a leaf");
    if (leaf.hooks.empty()) take(e, leaf, std::move(g), scaled_);
    else w.sum = w.sum.defined() ? w.sum + g : std::move(g);
  }
  if (--w.missing > 0) return;
  if (w.sum.defined()) take(e, leaf, through_hooks(leaf.hooks, std::move(w.sum)), *w.scaled);
  if (accumulate_ && !leaf.post_accumulate.empty()) complete_.push_back(handle);
}

void Run::take(const Edge& e, Leaf& leaf, Tensor g, bool scaled) {
  if (accumulate_) return accumulate(e.leaf, leaf, std::move(g), scaled);
  if (auto t = targets_.find(place_of(e)); t != targets_.end()) t->second = t->second.defined() ? t->second + g : std::move(g);
}

Tensor Run::through_hooks(const std::vector<Numbered<TensorHook>>& hooks, Tensor g) {
  for (auto& h : std::vector(hooks)) {  // a copy: a hook may take itself off
    Tensor r = h.f(g);
    if (!r.defined()) continue;
    HT_CHECK(r.shape() == g.shape() && r.dtype() == g.dtype(), "hook: returned ", r.meta(), " for a gradient ", g.meta());
    g = std::move(r);
  }
  return g;
}

Leaf::Final left(const Leaf& leaf, bool written) {
  return {leaf.empty, leaf.stamp, written, leaf.buffer.defined(), leaf.buffer.defined() ? leaf.buffer.storage() : nullptr};
}
// Notes for a captured step what it assumed of this slot, and what replays leave in it.
void note_capture(const std::shared_ptr<Body>& body, Leaf& leaf, bool reads) {
  CaptureLog* log = thread_state().capture;
  if (!log || leaf.capture == log->serial) return;
  leaf.capture = log->serial;
  leaf.final_state = std::make_shared<Leaf::Final>(left(leaf, false));
  std::weak_ptr<Body> weak = body;
  // The graph writes the buffer that it left; what the slot held before matters only where the step read it before it wrote.
  log->guards.push_back([weak, reads, before = left(leaf, false), last = leaf.final_state, age = leaf.stamp.age()] {
    auto b = weak.lock();
    if (!b) return false;
    Leaf& now = meta_of(Tensor(b)).leaf();
    auto has = [&now](const Leaf::Final& f) { return !f.has_buffer || (now.buffer.defined() && now.buffer.storage() == f.buffer.lock()); };
    auto as_before = [&] { return now.empty == before.empty && (now.empty || (now.stamp.scaler == before.stamp.scaler && now.stamp.age() == age)); };
    return has(*last) && (!reads || (has(before) && as_before()));
  });
  log->undo.push_back([weak, before = leaf.buffer, empty = leaf.empty, stamp = leaf.stamp] {
    if (auto b = weak.lock()) {
      Leaf& l = meta_of(Tensor(b)).leaf();
      l.buffer = before;
      l.empty = empty;
      l.stamp = stamp;
    }
  });
  log->effects.push_back([weak, last = leaf.final_state] {
    if (auto b = weak.lock(); b && last->written) {
      Leaf& l = meta_of(Tensor(b)).leaf();
      l.empty = last->empty;
      l.stamp = last->stamp;
      if (l.stamp.scaler) l.stamp.number += l.stamp.scaler->shift;
    }
  });
}
void set_slot(Leaf& leaf, bool empty, const GradStamp& stamp) {
  leaf.empty = empty;
  leaf.stamp = stamp;
  CaptureLog* log = thread_state().capture;
  if (log && leaf.capture == log->serial) *leaf.final_state = left(leaf, true);
}

bool can_become_buffer(const Tensor& g) {
  return g.is_contiguous() && !g.body()->is_view && g.body().use_count() == 1 && g.storage().use_count() == 1 && !g.requires_grad();
}

// Gradients that are scaled and gradients that are not do not add up.
void Run::note_scaled(std::optional<bool>& before, const char* where) const {
  HT_CHECK(before.value_or(scaled_) == scaled_, "backward: gradients of a scaled and of an unscaled loss meet in ", where,
           "; scale the whole loss, as in scaler.scale(a + b).backward()");
  before = scaled_;
}

void Run::stamp(const GradStamp& s) {
  HT_CHECK(!stamp_.scaler || stamp_.scaler == s.scaler, "backward: one run cannot mix the losses of two GradScalers");
  HT_CHECK(!scaled_, "backward: the loss was scaled twice; call scaler.scale(loss) once");
  stamp_ = s;
  scaled_ = true;
}

void Run::accumulate(const std::shared_ptr<Body>& body, Leaf& leaf, Tensor g, bool scaled) {
  const GradStamp& stamp = scaled ? stamp_ : unscaled;
  std::unique_lock guard(leaf.lock);
  while (leaf.claimed_by && leaf.claimed_by != this) {  // another run's kernel is writing the buffer
    guard.unlock();
    std::this_thread::yield();
    guard.lock();
  }
  note_capture(body, leaf, true);
  HT_CHECK(leaf.empty || leaf.stamp.scaler == stamp.scaler, "backward: the gradient of a leaf ", body->meta,
           leaf.stamp.scaler ? " is scaled by a GradScaler" : " is not scaled", ", what comes now is ",
           !stamp.scaler ? "not; unscale_ it" : leaf.stamp.scaler ? "by another; let one scale both losses" : "scaled; unscale_ it",
           ", or zero_grad() first");
  if (create_graph_) {
    HT_CHECK(!thread_state().capture, "backward: create_graph cannot be captured with .grad; use grad()");
    if (!leaf.empty) leaf.buffer = leaf.buffer + g;
    else leaf.buffer = g.requires_grad() || can_become_buffer(g) ? g : g.clone();  // never somebody else's tensor
  } else if (leaf.claimed_by == this) {
    leaf.claimed_by = nullptr;  // the kernel wrote it there
    if (!leaf.buffer.defined() || g.storage() != leaf.buffer.storage()) leaf.buffer.copy_(g);
  } else if (!leaf.empty && leaf.buffer.requires_grad()) {
    leaf.buffer = leaf.buffer.detach() + g;  // create_graph's buffer is part of a graph
  } else if (!leaf.empty) {
    call_into(binary::def<binary::Add>, {leaf.buffer, g}, binary::attrs_with<binary::Add>({}), leaf.buffer);
  } else if (leaf.buffer.defined() && leaf.buffer.dtype() == g.dtype() && leaf.buffer.device() == g.device() && !leaf.buffer.requires_grad()) {
    leaf.buffer.copy_(g);
  } else {
    leaf.buffer = can_become_buffer(g) ? std::move(g) : g.detach().clone();
  }
  set_slot(leaf, false, leaf.empty || !stamp.scaler ? stamp : leaf.stamp);
}

// The sole user of an operator's output may answer for it when nobody else is looking at that output.
bool Run::may_absorb(Step& s, size_t i) {
  auto& e = s.node.inputs[i].edge;
  auto* p = e.node ? dynamic_cast<OpNode*>(e.node.get()) : nullptr;
  if (!p || p->inputs.size() != 1 || !p->hooks.empty() || p->released || targets_.contains(place_of(e))) return false;
  return nodes_[p].uses == 1;
}

// The buffer of an empty leaf slot, when a kernel may write the gradient there.
Tensor Run::destination(Step& s, size_t i) {
  if (!accumulate_ || create_graph_) return {};
  auto& producer = s.absorbed[i];
  auto& e = producer ? producer->inputs[0].edge : s.node.inputs[i].edge;
  if (!e.leaf) return {};
  Leaf& leaf = meta_of(Tensor(e.leaf)).leaf();
  std::lock_guard guard(leaf.lock);
  if (leaves_[e.leaf.get()].missing != 1) return {};  // others are still to be added
  note_capture(e.leaf, leaf, true);
  const Tensor& b = leaf.buffer;
  bool fits = leaf.empty && !leaf.claimed_by && leaf.hooks.empty() && b.defined() && !b.requires_grad() && b.is_contiguous() &&
              b.dtype() == e.leaf->meta.dtype && b.device() == e.leaf->meta.device && b.shape() == e.leaf->meta.shape;
  if (!fits) return {};
  leaf.claimed_by = this;
  claimed_.push_back(&leaf);
  return b;
}

// What waits where input i's gradient goes. It leaves its slot, which the sum takes: nobody looks there before the last has come, so
// that hooks and targets get what they would have.
Tensor Run::addend(Step& s, size_t i) {
  auto& e = s.node.inputs[i].edge;
  if (create_graph_ || !s.needs[i] || s.absorbed[i] || !e.node) return {};
  return std::exchange(nodes_[e.node.get()].grads[e.output], {});
}

Tensor seed_for(const Tensor& output, const Tensor& given) {
  if (!given.defined()) return {};
  HT_CHECK(given.shape() == output.shape(), "backward: the gradient must have the tensor's shape ", output.shape(), ", got ", given.shape());
  return cast(given, output.dtype());
}

Leaf& leaf_of(const Tensor& t, const char* who) {
  HT_CHECK(t.defined() && t.requires_grad() && t.is_leaf(), who, ": expected a leaf that requires a gradient");
  return meta_of(t).leaf();
}

}  // namespace

std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs, GradOptions o) {
  HT_CHECK(!outputs.empty() && !inputs.empty(), "grad: expected at least one output and one input");
  for (size_t i = 0; i < outputs.size(); ++i)
    HT_CHECK(outputs[i].requires_grad(), "grad: output ", i, " does not depend on anything that requires a gradient");
  for (size_t i = 0; i < inputs.size(); ++i) HT_CHECK(inputs[i].requires_grad(), "grad: input ", i, " does not require a gradient");
  Run run(outputs, o.create_graph, o.retain_graph);
  run.target(inputs);
  run.execute(std::vector<Tensor>(outputs.size()));
  std::vector<Tensor> grads;
  for (size_t i = 0; i < inputs.size(); ++i) {
    grads.push_back(run.result(inputs[i]));
    HT_CHECK(grads[i].defined() || o.allow_unused, "grad: the outputs do not depend on input ", i, "; pass {.allow_unused = true} for an undefined gradient");
  }
  return grads;
}

std::vector<Tensor> reachable_leaves(const std::vector<Tensor>& outputs) { return Run(outputs, false, true).leaves(); }

void Tensor::backward() const { backward(BackwardOptions{}); }
void Tensor::backward(const BackwardOptions& o) const {
  HT_CHECK(defined() && requires_grad(), "backward: the tensor does not depend on anything that requires a gradient, or was computed under NoGrad");
  HT_CHECK(o.gradient.defined() || numel() == 1, "backward: ", meta(), " has more than one element; reduce it, or pass {.gradient = ...}");
  Tensor seed;
  {
    NoGrad off;
    seed = seed_for(*this, o.gradient);
  }
  Run run({*this}, o.create_graph, o.retain_graph);
  run.execute({seed});
}

bool in_backward() { return current != nullptr; }

void at_end_of_backward(std::function<void()> callback) {
  HT_CHECK(current, "at_end_of_backward: no backward is running on this thread");
  current->at_end.push_back(std::move(callback));
}

bool run_reaches(const Tensor& leaf) {
  HT_CHECK(current, "run_reaches: no backward is running on this thread");
  return current->reaches(leaf);
}

void stamp_this_run(const GradStamp& stamp) {
  HT_CHECK(current, "stamp_this_run: no backward is running on this thread");
  current->stamp(stamp);
}
const GradStamp& grad_stamp(const Tensor& leaf) {
  HT_CHECK(leaf.defined() && leaf.is_leaf(), "grad_stamp: expected a leaf");
  return leaf.body()->autograd ? leaf.body()->autograd->leaf().stamp : unscaled;
}
void set_grad_stamp(const Tensor& leaf, const GradStamp& stamp) {
  HT_CHECK(leaf.defined() && leaf.is_leaf(), "set_grad_stamp: expected a leaf");
  Leaf& l = meta_of(leaf).leaf();
  note_capture(leaf.body(), l, true);
  set_slot(l, l.empty, stamp);
}

// ---- hooks

HookHandle register_hook(const Tensor& t, std::function<Tensor(const Tensor&)> hook) {
  HT_CHECK(t.requires_grad(), "register_hook: the tensor does not require a gradient");
  AutogradMeta& m = meta_of(t);
  uint64_t id = next_hook_id();
  if (!m.node) {
    m.leaf().hooks.push_back({id, std::move(hook)});
    return HookHandle([weak = std::weak_ptr(t.body()), id] {
      if (auto b = weak.lock()) std::erase_if(meta_of(Tensor(b)).leaf().hooks, [id](auto& h) { return h.id == id; });
    });
  }
  m.node->hooks.push_back({id, {m.output, std::move(hook)}});
  return HookHandle([weak = std::weak_ptr(m.node), id] {
    if (auto n = weak.lock()) std::erase_if(n->hooks, [id](auto& h) { return h.id == id; });
  });
}

HookHandle register_post_accumulate_hook(const Tensor& leaf, std::function<void(const Tensor&)> hook) {
  uint64_t id = next_hook_id();
  leaf_of(leaf, "register_post_accumulate_hook").post_accumulate.push_back({id, std::move(hook)});
  return HookHandle([weak = std::weak_ptr(leaf.body()), id] {
    if (auto b = weak.lock()) std::erase_if(meta_of(Tensor(b)).leaf().post_accumulate, [id](auto& h) { return h.id == id; });
  });
}

// ---- the gradient members of Tensor

bool Tensor::is_leaf() const { return !body_ || !body_->autograd || !body_->autograd->node; }

Tensor& Tensor::requires_grad_(bool on) {
  HT_CHECK(defined(), "requires_grad_: the tensor is undefined");
  HT_CHECK(!on || is_floating(dtype()), "requires_grad_: ", dtype(), " has no gradient; use a floating dtype");
  HT_CHECK(is_leaf(), "requires_grad_: the tensor was computed; use detach() for one without history");
  if (on) meta_of(*this).leaf();
  body_->requires_grad = on;
  return *this;
}

Tensor Tensor::grad() const {
  if (!defined() || !body_->autograd || !is_leaf()) return {};
  Leaf& l = body_->autograd->leaf();
  note_capture(body_, l, true);
  return l.empty ? Tensor() : l.buffer;
}

void Tensor::set_grad(const Tensor& g) const {
  Leaf& l = leaf_of(*this, "set_grad");
  std::lock_guard guard(l.lock);
  note_capture(body_, l, false);
  if (!g.defined()) return set_slot(l, true, {});
  HT_CHECK(g.shape() == shape() && g.dtype() == dtype() && g.device() == device(), "set_grad: expected ", meta(), " on ", device(), ", got ", g.meta(),
           " on ", g.device());
  l.buffer = g.is_contiguous() ? g.detach() : g.detach().clone();
  set_slot(l, false, {nullptr, GradStamp::by_hand});
}

void Tensor::zero_grad() const {
  if (!defined() || !body_->autograd || !is_leaf()) return;
  Leaf& l = body_->autograd->leaf();
  std::lock_guard guard(l.lock);
  // A gradient of create_graph's is part of a graph, never a buffer. A large buffer's memory serves forward until backward needs it again,
  // unless somebody else has the tensor, too, or a captured step writes there. A step that is being captured lets it go, too: what it
  // zeroes stays zeroed when it fails.
  constexpr int64_t large = 1 << 20;  // elements
  const Tensor& b = l.buffer;
  const bool can_go = b.defined() && (b.requires_grad() || (b.numel() >= large && !l.capture && can_become_buffer(b)));
  if (can_go) {  // before the capture notes the slot, and with it the buffer
    l.buffer = {};
    set_slot(l, true, {});
  }
  note_capture(body_, l, false);
  set_slot(l, true, {});
}

}  // namespace halftone
