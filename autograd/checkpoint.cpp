// Segments that are computed again: which operators they hold, and how these get back what was dropped.
#include "halftone/autograd/checkpoint.h"

#include <algorithm>

#include "halftone/autograd/node.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/random.h"

namespace halftone {
namespace {

thread_local Segment* open_segment = nullptr;

// Another segment, or none, notes what is recorded while it lives.
struct OpenSegment {
  explicit OpenSegment(Segment* s) : outer(open_segment) { open_segment = s; }
  ~OpenSegment() { open_segment = outer; }
  OpenSegment(const OpenSegment&) = delete;
  Segment* outer;
};

}  // namespace

class Segment : public std::enable_shared_from_this<Segment> {
 public:
  Segment(std::function<void()> again, std::vector<Tensor> inputs)
      : again_(std::move(again)), state_(capture_thread_state()), inputs_(std::move(inputs)) {
    for (auto& t : inputs_) watch(t.body());
    NoGrad off;
    LayerScope kernels_only(0);
    std::vector<Device> devices{Device::cpu()};
    for (auto& t : inputs_)
      if (std::find(devices.begin(), devices.end(), t.device()) == devices.end()) devices.push_back(t.device());
    for (auto& d : devices) random_.push_back(draw_key(d, 0));
  }

  void add(std::shared_ptr<Node> n) { nodes_.push_back(std::move(n)); }

  void close() {
    for (auto& n : nodes_) {
      for (auto& i : n->inputs) if (i.edge.leaf) watch(i.edge.leaf);
      n->drop_saved([this](const Tensor& t) { return stays(t); });
      n->segment = shared_from_this();
      waiting_.push_back(n);
    }
    nodes_.clear();
  }

  void restore(bool with_history) {
    if (restored_ && (history_ || !with_history)) return;
    for (auto& w : watched_)
      HT_CHECK(w.body->storage->version() == w.version, "checkpoint: a tensor ", w.body->meta,
               " that the segment reads has been written since its forward (version ", w.version, ", now ", w.body->storage->version(),
               "); run backward before the write");
    Segment second(*this, Second());
    {
      const ThreadState& now = thread_state();
      auto* capture = now.capture;
      bool forbid_sync = now.forbid_sync;
      InstallThreadState then(state_);
      thread_state().capture = capture;
      thread_state().forbid_sync = forbid_sync;
      thread_state().generator = std::make_shared<Generator>(random_);  // the numbers of the first run; other threads' go on
      OpenSegment open(&second);
      again_();
    }
    HT_CHECK(second.nodes_.size() == waiting_.size(), "checkpoint: the segment recorded ", waiting_.size(), " operators at first and ",
             second.nodes_.size(), " when it was computed again; it must do the same each time");
    for (size_t i = 0; i < waiting_.size(); ++i) {
      auto n = waiting_[i].lock();
      if (!n || n->released) continue;
      HT_CHECK(std::string_view(n->name) == second.nodes_[i]->name, "checkpoint: operator ", i, " of the segment was ", n->name, " at first and ",
               second.nodes_[i]->name, " when it was computed again; it must do the same each time");
      n->take_saved(*second.nodes_[i], with_history);
    }
    restored_ = true;
    history_ = with_history;
  }

 private:
  struct Second {};  // the run that computes `first` again
  Segment(const Segment& first, Second) : state_(first.state_), inputs_(first.inputs_) {}

  struct Watched {
    std::shared_ptr<Body> body;
    uint64_t version;
  };
  void watch(const std::shared_ptr<Body>& body) {
    for (auto& w : watched_) if (w.body == body) return;
    watched_.push_back({body, body->storage->version()});
  }
  // What lives anyway: the segment's inputs, and leaves that are trained.
  bool stays(const Tensor& t) const {
    if (t.requires_grad() && t.is_leaf()) return true;
    return std::any_of(inputs_.begin(), inputs_.end(), [&](auto& x) { return x.storage() == t.storage(); });
  }

  std::function<void()> again_;
  ThreadState state_;
  std::vector<Tensor> inputs_, random_;
  std::vector<Watched> watched_;
  std::vector<std::shared_ptr<Node>> nodes_;   // while it is open
  std::vector<std::weak_ptr<Node>> waiting_;   // once it is closed
  bool restored_ = false, history_ = false;
};

void note_recorded(const std::shared_ptr<Node>& n) {
  if (open_segment) open_segment->add(n);
}
void restore_saved(Node& n, bool with_history) {
  if (auto segment = n.segment) segment->restore(with_history);
}

namespace detail {

CheckpointScope::CheckpointScope(std::function<void()> again, std::vector<Tensor> inputs)
    : segment_(std::make_shared<Segment>(std::move(again), std::move(inputs))), outer_(std::exchange(open_segment, segment_.get())) {}
CheckpointScope::~CheckpointScope() { open_segment = outer_; }
void CheckpointScope::close() { segment_->close(); }

}  // namespace detail
}  // namespace halftone
