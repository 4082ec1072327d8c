// Ranks of one process meeting, and what they do in memory.
#include "halftone/distributed/cpu_engine.h"

#include <algorithm>
#include <cstring>

#include "halftone/core/parallel.h"
#include "halftone/distributed/reduce.h"

namespace halftone::distributed {
namespace {

void copy_bytes(void* to, const void* from, int64_t bytes) {
  parallel_for(bytes, int64_t{1} << 20, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, static_cast<size_t>(end - begin));
  });
}

void perform(std::span<const Request> requests) {
  const Description& d = requests[0].what;
  if (requests[0].compare_only || d.operation == Operation::barrier || d.x.shape.numel() == 0) return;
  auto size = static_cast<int64_t>(requests.size());
  std::vector<char*> x, out;
  for (auto& r : requests) {
    x.push_back(static_cast<char*>(r.x.raw_data()));
    if (r.out.defined()) out.push_back(static_cast<char*>(r.out.raw_data()));
  }
  int64_t bytes = bytes_of(requests[0].x), n = requests[0].x.numel();
  if (d.operation == Operation::all_reduce) {
    reduce_in_order(d.how, d.x.dtype, std::vector<const void*>(x.begin(), x.end()), x[0], n);
    for (size_t r = 1; r < x.size(); ++r) copy_bytes(x[r], x[0], bytes);
  } else if (d.operation == Operation::broadcast) {
    for (auto* to : x) if (to != x[static_cast<size_t>(d.root)]) copy_bytes(to, x[static_cast<size_t>(d.root)], bytes);
  } else if (d.operation == Operation::reduce_scatter) {
    std::vector<const void*> part(x.size());
    for (int64_t r = 0; r < size; ++r) {
      for (size_t s = 0; s < x.size(); ++s) part[s] = x[s] + r * (bytes / size);
      reduce_in_order(d.how, d.x.dtype, part, out[static_cast<size_t>(r)], n / size);
    }
  } else {
    for (auto* to : out)
      for (size_t r = 0; r < x.size(); ++r) copy_bytes(to + static_cast<int64_t>(r) * bytes, x[r], bytes);
  }
}

class CpuWork final : public Work {
 public:
  CpuWork(std::shared_ptr<CpuEngine> engine, std::shared_ptr<CpuEngine::Round> round)
      : engine_(std::move(engine)), round_(std::move(round)), since_(Clock::now()) {}
  void wait() override { engine_->wait(*round_, since_); }
  bool done() override { return engine_->done(*round_); }

 private:
  std::shared_ptr<CpuEngine> engine_;
  std::shared_ptr<CpuEngine::Round> round_;
  Clock::time_point since_;
};

class CpuRank final : public Transport {
 public:
  CpuRank(std::shared_ptr<CpuEngine> engine, size_t local) : engine_(std::move(engine)), local_(local) {}

  int rank() const override { return engine_->ranks_here()[local_]; }
  int size() const override { return engine_->size(); }
  Device device() const override { return Device::cpu(); }
  double deadline() const override { return engine_->deadline(); }
  std::shared_ptr<Work> issue(const Request& r) override {
    return std::make_shared<CpuWork>(engine_, engine_->issue(local_, r));
  }
  std::shared_ptr<Transport> part(const std::vector<int>& ranks, int color) override {
    auto engine = engine_->part(local_, ranks, color);
    auto here = ends(engine);
    auto me = std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin();
    return *std::find_if(here.begin(), here.end(), [&](auto& end) { return end->rank() == me; });
  }
  void fail(const Failure& failure) override { engine_->fail(failure); }
  void check() override { engine_->check(); }
  std::vector<int> silent() override { return engine_->silent(); }
  void revive() override { engine_->revive(); }

 private:
  std::shared_ptr<CpuEngine> engine_;
  size_t local_;
};

}  // namespace

std::string list_ranks(const std::vector<int>& ranks) {
  std::string s = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    s += text::cat(i ? ", " : "", ranks[i]);
    if (last > i + 1) s += text::cat(" to ", ranks[i = last]);
  }
  return s;
}

uint64_t fingerprint(const Description& d) {
  uint64_t h = 0xcbf29ce484222325u;  // FNV-1a over 64-bit words
  auto add = [&](int64_t v) { h = (h ^ static_cast<uint64_t>(v)) * 0x100000001b3u; h ^= h >> 29; };
  for (int v : {static_cast<int>(d.operation), static_cast<int>(d.how), d.root, static_cast<int>(d.x.dtype), d.x.shape.rank()}) add(v);
  for (auto v : d.x.shape) add(v);
  for (auto v : d.x.strides) add(v);
  return h;
}

Failure disagreement(int64_t sequence, const std::vector<std::string>& texts) {
  std::map<std::string, std::vector<int>> ranks;
  for (size_t r = 0; r < texts.size(); ++r) ranks[texts[r]].push_back(static_cast<int>(r));
  std::vector<std::pair<std::vector<int>, std::string>> calls;
  for (auto& [call, who] : ranks) calls.emplace_back(who, call);
  std::sort(calls.begin(), calls.end());
  std::string s = text::cat("distributed: the ranks made different calls (call ", sequence, " of this group of ", texts.size(), "): ");
  for (auto& [who, call] : calls) s += text::cat(list_ranks(who), " ", call, "; ");
  return {.mismatch = true, .text = s + "all ranks make the same calls in the same order, with equal shapes, dtypes and options"};
}

CpuEngine::CpuEngine(std::vector<int> process_of, int here, double deadline)
    : process_of_(std::move(process_of)), here_(here),
      deadline_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(deadline))) {
  for (int r = 0; r < size(); ++r) if (process_of_[static_cast<size_t>(r)] == here) ranks_here_.push_back(r);
  next_.resize(ranks_here_.size());
}

std::shared_ptr<CpuEngine::Round> CpuEngine::issue(size_t local, const Request& r) {
  std::shared_ptr<Round> round;
  {
    std::lock_guard guard(lock_);
    if (failure_) failure_->raise();
    int64_t sequence = next_[local]++;
    size_t at = open_.empty() ? 0 : static_cast<size_t>(sequence - open_.front()->sequence);
    if (at == open_.size()) {
      size_t n = ranks_here_.size();
      open_.push_back(std::make_shared<Round>(Round{.sequence = sequence, .requests = std::vector<Request>(n), .arrived = std::vector<char>(n),
                                                    .missing = n, .since = Clock::now()}));
    }
    round = open_[at];
    round->requests[local] = r;
    round->arrived[local] = true;
    if (--round->missing > 0) return round;
    open_.pop_front();  // every rank has made the calls before
  }
  start(round);
  return round;
}

void CpuEngine::start(const std::shared_ptr<Round>& round) {
  uint64_t first = fingerprint(round->requests[0].what);
  bool equal = true;
  for (auto& r : round->requests) equal = equal && fingerprint(r.what) == first;
  if (!equal) {
    std::vector<std::string> texts;
    for (auto& r : round->requests) texts.push_back(str(r.what));
    return fail(disagreement(round->sequence, texts));
  }
  try {
    perform(round->requests);
  } catch (const std::exception& e) {
    return fail({.text = text::cat(round->requests[0].what.operation, ": ", e.what()), .operation = str(round->requests[0].what.operation),
                 .sequence = round->sequence});
  }
  finish(*round);
}

void CpuEngine::finish(Round& round) {
  {
    std::lock_guard guard(lock_);
    round.done = true;
    round.requests.clear();  // lets the tensors go
  }
  changed_.notify_all();
}

Failure CpuEngine::overdue(const Round& round, const std::string& why, std::vector<int> ranks) const {
  size_t some = static_cast<size_t>(std::find(round.arrived.begin(), round.arrived.end(), 1) - round.arrived.begin());
  std::string who = str(round.requests[some].what.operation);
  return {.text = text::cat(who, ": call ", round.sequence, " of this group of ", size(), " did not end within ", deadline(), " s: ", why),
          .operation = who, .sequence = round.sequence, .ranks = std::move(ranks)};
}

void CpuEngine::wait(const Round& round, Clock::time_point since) {
  constexpr auto grace = std::chrono::seconds(5);  // for the thread that does the call, which knows more
  std::unique_lock guard(lock_);
  auto over = [&] { return round.done || failure_; };
  if (!changed_.wait_until(guard, since + deadline_, over)) {
    std::vector<int> late;
    for (size_t i = 0; i < round.arrived.size(); ++i) if (!round.arrived[i]) late.push_back(ranks_here_[i]);
    if (!late.empty()) fail_locked(overdue(round, list_ranks(late) + (late.size() == 1 ? " has" : " have") + " not made it", late));
    else if (!changed_.wait_for(guard, grace, over)) fail_locked(overdue(round, "the engine does not answer", {}));
  }
  if (!round.done) failure_->raise();
}

bool CpuEngine::done(const Round& round) {
  std::lock_guard guard(lock_);
  if (!round.done && failure_) failure_->raise();
  return round.done;
}

void CpuEngine::check() {
  std::lock_guard guard(lock_);
  if (failure_) failure_->raise();
}

void CpuEngine::fail(const Failure& failure) {
  std::lock_guard guard(lock_);
  fail_locked(failure);
}
void CpuEngine::fail_locked(const Failure& failure) {
  if (failure_) return;
  failure_ = failure;
  failed();
  changed_.notify_all();
}

void CpuEngine::revive() {
  std::lock_guard guard(lock_);
  failure_.reset();
  open_.clear();
  parts_.clear();
  std::fill(next_.begin(), next_.end(), 0);
}

std::shared_ptr<CpuEngine> CpuEngine::part(size_t local, const std::vector<int>& ranks, int color) {
  std::unique_lock guard(lock_);
  int64_t sequence = next_[local];
  Part& part = parts_[{sequence, ranks}];
  if (part.left == 0) {
    for (int r : ranks) part.left += process_of_[static_cast<size_t>(r)] == here_;
    guard.unlock();
    std::shared_ptr<CpuEngine> engine;
    try {
      engine = make_part(ranks, sequence, color);
    } catch (const std::exception& e) {
      fail({.text = text::cat("split: ", e.what()), .operation = "split", .sequence = sequence});
    }
    guard.lock();
    part.engine = std::move(engine);
    changed_.notify_all();
  } else if (!changed_.wait_for(guard, deadline_, [&] { return part.engine || failure_; })) {
    fail_locked({.text = text::cat("split: ", list_ranks(ranks), " did not meet within ", deadline(), " s"), .operation = "split",
                 .sequence = sequence});
  }
  if (failure_) failure_->raise();
  auto engine = part.engine;
  if (--part.left == 0) parts_.erase({sequence, ranks});
  return engine;
}

std::shared_ptr<CpuEngine> CpuEngine::make_part(const std::vector<int>& ranks, int64_t, int) {
  return std::make_shared<CpuEngine>(std::vector<int>(ranks.size()), 0, deadline());
}

std::vector<std::shared_ptr<Transport>> ends(const std::shared_ptr<CpuEngine>& engine) {
  std::vector<std::shared_ptr<Transport>> all;
  for (size_t i = 0; i < engine->ranks_here().size(); ++i) all.push_back(std::make_shared<CpuRank>(engine, i));
  return all;
}

std::vector<std::shared_ptr<Transport>> cpu_threads(int n, double deadline) {
  return ends(std::make_shared<CpuEngine>(std::vector<int>(static_cast<size_t>(n)), 0, deadline));
}

}  // namespace halftone::distributed
