// Replicas: what is copied to them when, the threads that they run on, and a node that stands for all of them in the caller's
// graph: its backward runs each replica's own graph, on that replica's thread.
#include "halftone/distributed/data_parallel.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "halftone/autograd/function.h"
#include "halftone/core/backend.h"
#include "halftone/ops/ops.h"

namespace halftone::nn::detail {
namespace {

constexpr const char* who = "DataParallel";

// Parameters and buffers, each once.
std::vector<Tensor> tensors_of(const Module& m) {
  std::vector<Tensor> all = m.parameters();
  for (auto& b : m.buffers()) all.push_back(b);
  return all;
}

// An end of several graphs: a backward from it is one from all of `ys`, with these gradients.
Tensor joint_end(const std::vector<Tensor>& ys, const std::vector<Tensor>& gradients) {
  EnableGrad on;
  Tensor end = zeros({});
  auto ctx = std::make_shared<Context>();
  ctx->save(gradients);
  auto backward = [](Context& c, std::span<const Tensor>) { return std::get<0>(c.saved<std::vector<Tensor>>()); };
  halftone::detail::attach_function({&end, 1}, ys, ctx, backward, FunctionCast::any, who);
  return end;
}

}  // namespace

// Threads that wait for work; number 0 is the caller's own.
struct Replicas::Workers {
  explicit Workers(size_t n) {
    for (size_t i = 1; i < n; ++i) threads.emplace_back([this, i] { serve(i); });
  }
  ~Workers() {
    {
      std::lock_guard guard(lock);
      stop = true;
    }
    wake.notify_all();
    for (auto& t : threads) t.join();
  }
  void run(size_t n, const std::function<void(size_t)>& f) {
    std::lock_guard one_at_a_time(busy);
    {
      std::lock_guard guard(lock);
      work = &f;
      count = n;
      left = n - 1;
      ++generation;
    }
    wake.notify_all();
    f(0);
    std::unique_lock guard(lock);
    done.wait(guard, [&] { return left == 0; });
  }
  void serve(size_t i) {
    uint64_t seen = 0;
    std::unique_lock guard(lock);
    for (;;) {
      wake.wait(guard, [&] { return stop || generation != seen; });
      if (stop) return;
      seen = generation;
      if (i >= count) continue;
      auto* f = work;
      guard.unlock();
      (*f)(i);
      guard.lock();
      if (--left == 0) done.notify_one();
    }
  }

  std::mutex lock, busy;
  std::condition_variable wake, done;
  const std::function<void(size_t)>* work = nullptr;
  size_t count = 0, left = 0;
  uint64_t generation = 0;
  bool stop = false;
  std::vector<std::thread> threads;
};

// What backward needs of a forward.
struct Replicas::Call {
  std::shared_ptr<Replicas> replicas;
  std::vector<std::vector<Tensor>> inputs, outputs;   // by part; inputs that require a gradient are leaves
  size_t parameters = 0;                              // of the master's, that take part
  bool over = false;
};

Replicas::Replicas(Module& master, std::vector<std::unique_ptr<Module>> replicas, std::vector<Device> devices)
    : master_(master), replicas_(std::move(replicas)), devices_(std::move(devices)) {
  HT_CHECK(!devices_.empty(), who, ": expected at least one device");
  for (auto& d : devices_) backend(d.type);
  for (auto& [name, t] : master.state_dict())
    HT_CHECK(t.device() == devices_[0], who, ": ", name, " is on ", t.device(), ", expected the first device, ", devices_[0], "; call net.to(",
             devices_[0], ") first");
  for (size_t i = 1; i < replicas_.size(); ++i) replicas_[i]->to(devices_[i]);
  seen_.resize(replicas_.size());
  workers_ = std::make_unique<Workers>(replicas_.size());
}
Replicas::~Replicas() = default;

void Replicas::refresh() {
  NoGrad off;
  LayerScope plain(Layer::autocast, false);
  std::vector<Tensor> from = tensors_of(master_);
  std::vector<Module*> modules = master_.modules();
  for (size_t i = 0; i < replicas_.size(); ++i) {
    std::vector<Tensor> to = tensors_of(*replicas_[i]);
    std::vector<Module*> copies = replicas_[i]->modules();
    HT_CHECK(to.size() == from.size() && copies.size() == modules.size(), who,
             ": the model has other layers or tensors than when this was made; make another");
    for (size_t k = 0; k < modules.size(); ++k)
      if (copies[k]->training() != modules[k]->training()) copies[k]->train(modules[k]->training());  // outermost first, so what is inside decides
    seen_[i].resize(from.size());
    for (size_t k = 0; k < from.size(); ++k) {
      if (to[k].requires_grad() != from[k].requires_grad()) to[k].requires_grad_(from[k].requires_grad());
      if (i == 0) {
        if (to[k].storage() != from[k].storage()) to[k].set_(from[k].detach());
        continue;
      }
      Version& seen = seen_[i][k];
      if (seen.master == from[k].version() + 1 && seen.replica == to[k].version()) continue;
      to[k].detach().copy_(from[k].detach());
      seen = {from[k].version() + 1, to[k].version()};
    }
  }
}

// f(i) on replica i's thread and device, under the caller's thread state. Under a profile all run on the caller's thread, which
// is the one that is looked at.
void Replicas::each(size_t n, bool draws, const std::function<void(size_t)>& f) {
  ThreadState state = capture_thread_state();
  std::vector<std::shared_ptr<Generator>> generators(n, state.generator);
  for (size_t i = 1; draws && i < n; ++i) {
    LayerScope kernels_only(0);
    Tensor key = draw_key(Device::cpu(), int64_t{1} << 32);  // numbers that nobody else draws
    std::vector<Tensor> states{key};
    if (devices_[i] != Device::cpu()) states.push_back(key.to(devices_[i]));
    generators[i] = std::make_shared<Generator>(states);
  }
  std::vector<std::exception_ptr> errors(n);
  std::function<void(size_t)> guarded = [&](size_t i) {
    try {
      if (i == 0) return f(0);
      ThreadState own = state;
      own.generator = generators[i];
      if (devices_[i].type == DeviceType::cuda) own.cuda_device = devices_[i].index, own.stream = nullptr;
      InstallThreadState installed(own);
      f(i);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  if (state.on(Layer::profile)) for (size_t i = 0; i < n; ++i) guarded(i);
  else workers_->run(n, guarded);
  for (auto& e : errors) if (e) std::rethrow_exception(e);
}

std::vector<Tensor> Replicas::run(const std::shared_ptr<Replicas>& self, const std::vector<Tensor>& inputs, const Forward& forward) {
  HT_CHECK(!inputs.empty(), who, ": expected a tensor among the arguments, whose rows are shared out");
  int64_t rows = inputs[0].rank() > 0 ? inputs[0].size(0) : 0;
  for (auto& x : inputs)
    HT_CHECK(x.rank() > 0 && x.size(0) == rows, who, ": expected tensor arguments of equally many rows, got ", inputs[0].meta(), " and ", x.meta());
  HT_CHECK(!thread_state().capture || self->devices_.size() == 1, who, ": a captured step has one device; capture a DistributedDataParallel on each");
  self->refresh();

  auto call = std::make_shared<Call>();
  call->replicas = self;
  auto n = static_cast<size_t>(std::max<int64_t>(1, std::min(rows, static_cast<int64_t>(self->devices_.size()))));
  call->inputs.resize(n);
  call->outputs.resize(n);
  {
    bool recorded = recording();
    NoGrad off;
    LayerScope plain(Layer::autocast, false);
    int64_t from = 0;
    for (size_t i = 0; i < n; ++i) {
      int64_t part = rows / static_cast<int64_t>(n) + (static_cast<int64_t>(i) < rows % static_cast<int64_t>(n) ? 1 : 0);
      for (auto& x : inputs) {
        Tensor own = x.detach().slice(0, from, from + part).to(self->devices_[i]);
        if (recorded && x.requires_grad()) own = own.detach().requires_grad_();
        call->inputs[i].push_back(own);
      }
      from += part;
    }
  }
  self->each(n, true, [&](size_t i) { call->outputs[i] = forward(i, call->inputs[i]); });

  std::vector<Tensor> joined;
  {
    NoGrad off;
    LayerScope plain(Layer::autocast, false);
    for (auto& part : call->outputs)
      HT_CHECK(part.size() == call->outputs[0].size() && !part.empty(), who, ": expected as many tensors from each replica, got ",
               call->outputs[0].size(), " and ", part.size());
    for (size_t k = 0; k < call->outputs[0].size(); ++k) {
      std::vector<Tensor> parts;
      for (auto& part : call->outputs) parts.push_back(part[k].detach().to(self->devices_[0]));
      joined.push_back(parts[0].rank() == 0 ? stack(parts) : n == 1 ? parts[0] : cat(parts));
    }
  }
  std::vector<Tensor> sources;
  for (auto& p : self->master_.parameters()) if (p.requires_grad()) sources.push_back(p);
  call->parameters = sources.size();
  sources.insert(sources.end(), inputs.begin(), inputs.end());
  auto ctx = std::make_shared<Context>();
  ctx->save(call);
  halftone::detail::attach_function(joined, sources, ctx, &Replicas::backward, FunctionCast::any, who);
  return joined;
}

std::vector<Tensor> Replicas::backward(Context& ctx, std::span<const Tensor> g) {
  HT_CHECK(!recording(), who, ": backward with create_graph does not reach the replicas' graphs; use the model itself");
  Call& call = *std::get<0>(ctx.saved<std::shared_ptr<Call>>());
  HT_CHECK(!call.over, who, ": a second backward through one call, whose replicas' graphs were freed by the first; call it again");
  call.over = true;
  Replicas& self = *call.replicas;
  size_t n = call.outputs.size();
  std::vector<std::vector<Tensor>> ends(n), gradients(n);
  for (size_t k = 0; k < g.size(); ++k) {
    int64_t from = 0;
    for (size_t i = 0; i < n; ++i) {
      const Tensor& y = call.outputs[i][k];
      int64_t rows = y.rank() == 0 ? 1 : y.size(0);
      if (y.requires_grad()) {
        ends[i].push_back(y);
        gradients[i].push_back(g[k].slice(0, from, from + rows).reshape(y.shape()).to(self.devices_[i]));
      }
      from += rows;
    }
  }
  self.each(n, false, [&](size_t i) {
    self.replicas_[i]->zero_grad();
    if (!ends[i].empty()) joint_end(ends[i], gradients[i]).backward();
  });
  return self.reduced(call);
}

std::vector<Tensor> Replicas::reduced(const Call& call) const {
  std::vector<Tensor> sums(call.parameters);
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    size_t k = 0;
    for (auto& p : replicas_[i]->parameters()) {
      if (!p.requires_grad()) continue;
      if (Tensor g = p.grad(); g.defined()) {
        g = g.detach().to(devices_[0]);
        sums[k] = sums[k].defined() ? sums[k] + g : g;
      }
      ++k;
    }
  }
  for (size_t k = 0; k < call.inputs[0].size(); ++k) {
    Tensor& of_input = sums.emplace_back();
    if (!call.inputs[0][k].requires_grad()) continue;
    std::vector<Tensor> parts;
    for (auto& part : call.inputs) parts.push_back((part[k].grad().defined() ? part[k].grad() : zeros_like(part[k])).to(devices_[0]));
    of_input = cat(parts);
  }
  return sums;
}

}  // namespace halftone::nn::detail
