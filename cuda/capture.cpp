// Captured steps: per kind of input some eager calls, then one that is recorded into a graph, then replays. A step's kernels
// read copies of its inputs at fixed addresses, which are made before the launch or by the graph's first kernel. A graph works in a pool
// of its own and hands out results that are good until its next replay.
#include "halftone/cuda/capture.h"

#include <map>
#include <mutex>

#include "halftone/cuda/capture_inputs.h"
#include "halftone/cuda/device_state.h"
#include "halftone/cuda/recording.h"
#include "halftone/cuda/stream.h"

namespace halftone::cuda {
namespace {

constexpr const char* overwritten =
    "this result of a captured step was overwritten by a later replay; clone() it before the next call";

// While it lives, what this thread queues goes into a graph instead of to the device, and its memory comes from a pool.
class CaptureScope {
 public:
  CaptureScope(CaptureLog& log, const Stream& side, Allocator::Pool* pool)
      : stream_(side), side_(static_cast<cudaStream_t>(side.handle())), pool_(side.device(), pool) {
    check(cudaStreamBeginCapture(side_, cudaStreamCaptureModeThreadLocal), "capture");
    open_ = true;
    thread_state().capture = &log;
  }
  ~CaptureScope() {
    thread_state().capture = nullptr;
    if (!open_) return;
    cudaGraph_t broken = nullptr;
    cudaStreamEndCapture(side_, &broken);
    if (broken) cudaGraphDestroy(broken);
    cudaGetLastError();
  }
  CaptureScope(const CaptureScope&) = delete;

  void finish(cudaGraph_t& graph, cudaGraphExec_t& executable) {
    open_ = false;
    check(cudaStreamEndCapture(side_, &graph), "capture");
    check(cudaGraphInstantiate(&executable, graph, 0), "instantiate the captured step");
  }

 private:
  StreamGuard stream_;
  cudaStream_t side_;
  PoolScope pool_;
  bool open_ = false;
};

class Graph {
 public:
  // Records the step; nothing has run on the device when this returns.
  Graph(int device, std::span<const Tensor> inputs, const CapturePlan::Step& step, const Stream& side)
      : allocator_(allocator(device)), pool_(allocator_.make_pool()), recording_(allocator_, pool_) {
    try {
      for (auto& t : inputs) {
        inputs_.push_back(Tensor::empty(Meta(t.shape(), t.dtype(), Device::cuda(device))));
        small_.push_back(input_kernel_.takes(t));
        if (small_.back()) input_kernel_.add(inputs_.back());
      }
      record(step, side);
    } catch (...) {
      close();
      throw;
    }
  }
  ~Graph() { close(); }
  Graph(const Graph&) = delete;

  bool holds() const { return recording_.holds(); }

  // Takes the inputs' values and runs the graph. Recording the step was the host's part of its first launch.
  Tensors launch(std::span<const Tensor> inputs, bool first) {
    Backend::Queue here{thread_state().stream, inputs_.empty() ? device() : inputs_[0].device().index};
    if (!first && here.stream != last_.stream) backend(DeviceType::cuda).order(last_, here);
    last_ = here;
    if (!first) recording_.refresh();
    const Tensors read = feed(inputs);  // until it is queued
    for (auto& weak : results_) if (auto s = weak.lock()) s->expire(overwritten);
    check(cudaGraphLaunch(executable_, stream()), "replay a captured step");
    if (!first) recording_.replayed();
    return results();
  }

 private:
  void record(const CapturePlan::Step& step, const Stream& side) {
    try {
      CaptureScope scope(recording_, side, pool_);
      if (!input_kernel_.empty()) input_kernel_.record();
      for (auto& t : step(inputs_)) outputs_.push_back(t.defined() && graphs_own(t) ? t.detach() : t);
      for (size_t i = 0; i < inputs_.size(); ++i)
        HT_CHECK(!recording_.writes(*inputs_[i].storage()), "capture: the step changes its input ", i,
                 " in place, which a replay would do to a copy; capture that tensor by reference instead");
      scope.finish(graph_, executable_);
      recording_.finish();
    } catch (const Error& e) {
      recording_.abandon();
      throw Error(text::cat(e.what(), " (while a step was captured; the last operator before was ",
                            recording_.last_operator(), ")"));
    } catch (...) {
      recording_.abandon();
      throw;
    }
  }

  void close() noexcept {
    outputs_.clear();
    if (executable_) cudaGraphExecDestroy(executable_);
    if (graph_) cudaGraphDestroy(graph_);
    allocator_.retire(pool_);
  }

  // Brings inputs to where the graph reads them, or tells its first kernel where they are; gives what that one reads.
  Tensors feed(std::span<const Tensor> inputs) {
    LayerScope kernels_only(0);
    Tensors from, small;
    for (size_t i = 0; i < inputs.size(); ++i) from.push_back(overwritten_by_others(inputs[i], i) ? inputs[i].clone() : inputs[i]);
    for (size_t i = 0; i < from.size(); ++i) {
      const Tensor &x = from[i], &to = inputs_[i];
      const bool by_kernel = small_[i] && x.device() == to.device() && x.is_contiguous();
      if (small_[i]) small.push_back(by_kernel ? x : to);
      if (x.storage() == to.storage() || x.numel() == 0) continue;
      if (!by_kernel) bring(x, to);
      to.bump_version();
    }
    if (!small.empty()) input_kernel_.follow(executable_, small);
    return small;
  }
  static void bring(const Tensor& from, const Tensor& to) {
    const int64_t bytes = from.numel() * static_cast<int64_t>(size_of(from.dtype()));
    if (!from.is_contiguous()) Tensor(to).copy_(from);
    else backend(DeviceType::cuda).copy(to.raw_data(), to.device(), from.raw_data(), from.device(), bytes);
  }
  // Whether input i lies where an input is brought to, as one does that a step has handed out as a result, and not where it belongs.
  bool overwritten_by_others(const Tensor& x, size_t i) const {
    if (x.device() != inputs_[i].device() || x.numel() == 0) return false;
    auto *here = static_cast<const char*>(x.storage()->data());
    for (auto& t : inputs_) {
      auto* data = static_cast<const char*>(t.storage()->data());
      if (here >= data && here < data + t.storage()->bytes())
        return &t != &inputs_[i] || !x.is_contiguous() || x.raw_data() != t.raw_data();
    }
    return false;
  }

  bool graphs_own(const Tensor& t) const {
    for (auto& input : inputs_) if (input.storage() == t.storage()) return true;
    return recording_.inside(*t.storage());
  }

  // Each replay gives the same memory under fresh storages, so that the last ones can be told to have expired.
  Tensors results() {
    results_.clear();
    std::map<const Storage*, std::shared_ptr<Storage>> fresh;
    Tensors all;
    for (auto& t : outputs_) {
      if (!t.defined() || !graphs_own(t)) {
        all.push_back(t);
        continue;
      }
      auto& s = fresh[t.storage().get()];
      if (!s) {
        s = Storage::borrow(t.storage()->data(), t.storage()->bytes(), t.device(), [keep = t.storage()](void*) {});
        results_.push_back(s);
      }
      all.push_back(Tensor(t.meta(), s));
    }
    return all;
  }

  Allocator& allocator_;
  Allocator::Pool* pool_;
  Recording recording_;
  Tensors inputs_, outputs_;
  InputKernel input_kernel_;
  std::vector<bool> small_;  // the inputs that it takes
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  std::vector<std::weak_ptr<Storage>> results_;
  Backend::Queue last_{nullptr, 0};  // where it was launched last: two launches share its memory
};

// One thread at a time calls a plan.
class GraphPlan final : public CapturePlan {
 public:
  explicit GraphPlan(const CaptureOptions& options) : options_(options) {}
  int64_t replays() const override { return replays_; }

  Tensors run(std::span<const Tensor> inputs, const Step& step) override {
    if (thread_state().capture) return step(inputs);  // part of another captured step
    int device = device_for(inputs);
    DeviceGuard guard(device);
    throw_faults(device);
    Kind& kind = kinds_[key(inputs)];
    for (auto& graph : kind.graphs)
      if (graph->holds()) return launch(*graph, inputs, false);
    // Whatever a step makes on its first call (states, 16-bit copies) must be there before it is captured; so a step
    // that has taken a new turn runs eagerly once, too.
    if (kind.eager < (kind.graphs.empty() ? options_.warmup : 1)) {
      ++kind.eager;
      return step(inputs);
    }
    constexpr size_t most_graphs = 8;
    auto graph = std::make_unique<Graph>(device, inputs, step, sides_.try_emplace(device, device).first->second);
    if (kind.graphs.size() == most_graphs) kind.graphs.erase(kind.graphs.begin());
    kind.eager = 0;
    return launch(*kind.graphs.emplace_back(std::move(graph)), inputs, true);
  }

 private:
  using Key = std::vector<int64_t>;
  struct Kind {
    int eager = 0;  // calls since the last capture
    std::vector<std::unique_ptr<Graph>> graphs;  // they differ in what their guards ask
  };

  Tensors launch(Graph& graph, std::span<const Tensor> inputs, bool first) {
    Tensors results = graph.launch(inputs, first);
    ++replays_;
    return results;
  }

  static int device_for(std::span<const Tensor> inputs) {
    int device = -1;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Tensor& t = inputs[i];
      HT_CHECK(t.defined(), "capture: input ", i, " is undefined");
      HT_CHECK(!t.requires_grad(), "capture: input ", i, " requires a gradient, which a replay could not hand back; "
               "call requires_grad_() on a clone inside the step");
      if (t.device().type != DeviceType::cuda) continue;
      HT_CHECK(device < 0 || device == t.device().index, "capture: inputs are on cuda:", device, " and ", t.device(),
               "; move them to one device");
      device = t.device().index;
    }
    return device;
  }

  // What decides, besides guards, which graph may stand for a call.
  static Key key(std::span<const Tensor> inputs) {
    const ThreadState& s = thread_state();
    Key k{s.layers, s.deterministic, tf32_allowed()};
    for (auto& layer : s.slot) {
      k.push_back(layer != nullptr);
      if (layer) layer->append_key(k);
    }
    for (auto& t : inputs) {
      auto type = static_cast<int64_t>(t.dtype()), place = static_cast<int64_t>(t.device().type);
      k.insert(k.end(), {type, place, t.device().index, t.rank()});
      k.insert(k.end(), t.shape().begin(), t.shape().end());
    }
    return k;
  }

  CaptureOptions options_;
  std::map<int, Stream> sides_;  // where steps are recorded, per device; outlives the graphs
  std::map<Key, Kind> kinds_;
  int64_t replays_ = 0;
};

}  // namespace

std::unique_ptr<CapturePlan> make_plan(const CaptureOptions& options) { return std::make_unique<GraphPlan>(options); }

}  // namespace halftone::cuda
