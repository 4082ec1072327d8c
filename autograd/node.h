#pragma once
// The tape: nodes, and what hangs on tensors. Internal to autograd/.
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "halftone/autograd/autograd.h"
#include "halftone/core/capture.h"
#include "halftone/core/op.h"

namespace halftone {

class Node;

using TensorHook = std::function<Tensor(const Tensor&)>;
template <class F> struct Numbered { uint64_t id; F f; };

// The gradient slot of a leaf: a buffer that stays, and whether it holds anything.
struct Leaf {
  std::mutex lock;  // concurrent backward runs may meet in a leaf
  Tensor buffer;
  bool empty = true;
  GradStamp stamp;
  const void* claimed_by = nullptr;  // the run that is writing the buffer from a kernel
  std::vector<Numbered<TensorHook>> hooks;
  std::vector<Numbered<std::function<void(const Tensor&)>>> post_accumulate;

  // While a step is captured: what the slot was when the step first looked, and what the step leaves.
  struct Final {
    bool empty;
    GradStamp stamp;
    bool written = false;
    bool has_buffer = false;
    std::weak_ptr<Storage> buffer = {};
  };
  uint64_t capture = 0;  // which one looked last: CaptureLog::serial
  std::shared_ptr<Final> final_state;
};

// On every tensor that requires a gradient: its place in the graph, or its slot. A leaf gets its slot when it begins to
// require a gradient, before several threads can meet there.
struct AutogradMeta {
  std::shared_ptr<Node> node;  // null: a leaf
  uint32_t output = 0;
  std::unique_ptr<Leaf> slot;
  Leaf& leaf() {
    if (!slot) slot = std::make_unique<Leaf>();
    return *slot;
  }
};

// Where an input's gradient goes.
struct Edge {
  std::shared_ptr<Node> node;
  uint32_t output = 0;
  std::shared_ptr<Body> leaf;
  explicit operator bool() const { return node || leaf; }
};
Edge edge_of(const Tensor& t);
AutogradMeta& meta_of(const Tensor& t);  // makes it when absent

class Node : public std::enable_shared_from_this<Node> {
 public:
  struct Input {
    Edge edge;
    Meta meta;
    Tensor saved;
    uint64_t version = 0;
    Input() noexcept {}
    Input(Edge e, const Meta& m) : edge(std::move(e)), meta(m) {}
  };
  struct Output {
    Meta meta;
    Tensor saved;  // without history
    uint64_t version = 0;
    explicit Output(const Meta& m) : meta(m) {}
  };

  explicit Node(const char* name);
  virtual ~Node();
  // One gradient per input, undefined where there is none.
  virtual Tensors backward(struct Step& step) = 0;
  // Whether backward knows what to do when the only gradient is the 1 that a run starts with, and is not there: Step::implied_one.
  virtual bool takes_implied_one() const { return false; }
  // Drops what was saved; the node cannot run again.
  virtual void release();
  // For a checkpoint: drops what was saved but for tensors that stay anyway; takes it from the same node of another run.
  virtual void drop_saved(const std::function<bool(const Tensor&)>& stays);
  virtual void take_saved(const Node& other, bool with_history);

  const char* name;
  uint64_t sequence;  // later nodes have larger ones: descending is a topological order
  bool released = false;
  const void* object;  // the module that recorded it: only a name
  int cuda_device;
  void* stream;
  SmallVector<Input, 2> inputs;  // so many that a node with them is small enough for malloc's per-thread cache
  SmallVector<Output, 1> outputs;
  std::vector<Numbered<std::pair<uint32_t, TensorHook>>> hooks;
  std::shared_ptr<class Segment> segment;  // computes again what was dropped (checkpoint.cpp)
};
// To the checkpoint that is open on this thread.
void note_recorded(const std::shared_ptr<Node>& n);
// Before a node runs: what a checkpoint dropped is there again; `with_history` to be differentiated.
void restore_saved(Node& n, bool with_history);

class OpNode final : public Node {
 public:
  OpNode(const Call& call, std::span<const Tensor> out);
  Tensors backward(Step& step) override;
  const OpDef& op;
  Attrs attrs;
};

// One node's turn in a run.
struct Step {
  Node& node;
  class Services& engine;
  Tensors grads;
  bool create_graph;
  bool implied_one = false;  // in place of a gradient
  SmallVector<bool, 4> needs = {};
  SmallVector<std::shared_ptr<Node>, 4> absorbed = {};  // producers whose backward this node answers for
};
// What the engine offers a node in its turn.
class Services {
 public:
  virtual bool may_absorb(Step&, size_t i) = 0;
  virtual Tensor destination(Step&, size_t i) = 0;
  virtual Tensor addend(Step&, size_t i) = 0;

 protected:
  ~Services() = default;
};

// Throws when a saved tensor has been written since.
void check_version(const Node& n, const char* what, size_t i, const Tensor& saved, uint64_t version);
Tensor reattach(Node& n, size_t output, const Tensor& saved);
void attach(const Tensor& t, std::shared_ptr<Node> n, uint32_t output);
uint64_t next_hook_id();

}  // namespace halftone
