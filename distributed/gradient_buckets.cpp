// Buckets: what goes in which, and when each is on its way.
#include "halftone/distributed/gradient_buckets.h"

#include <algorithm>
#include <map>
#include <unordered_set>

#include "halftone/autograd/autograd.h"
#include "halftone/ops/ops.h"

namespace halftone::nn::detail {
namespace {

constexpr const char* who = "DistributedDataParallel";

// Elements between one gradient's place and the next: kernels that read several at once find each aligned.
int64_t padded(const Tensor& t) {
  int64_t line = 64 / static_cast<int64_t>(size_of(t.dtype()));
  return (t.numel() + line - 1) / line * line;
}
// Tensors of one dtype side by side in fresh memory of zeros, which comes first.
std::pair<Tensor, std::vector<Tensor>> side_by_side(const std::vector<Tensor>& tensors) {
  int64_t elements = 0;
  for (auto& t : tensors) elements += padded(t);
  Tensor flat = zeros({elements}, tensors[0].options());
  std::vector<Tensor> places;
  elements = 0;
  for (auto& t : tensors) {
    places.push_back(flat.carve(elements, t.shape()));
    elements += padded(t);
  }
  return {flat, places};
}

uint64_t hash_of(const std::string& text) {  // FNV-1a: the same in every process
  uint64_t h = 14695981039346656037u;
  for (char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return h;
}

// What every rank gives, in order of rank. Waits.
std::vector<std::vector<int64_t>> gathered(const distributed::Group& group, const std::vector<int64_t>& mine) {
  auto n = static_cast<int64_t>(mine.size());
  Tensor all = zeros({group.size(), n}, {.dtype = DType::i64, .device = group.device()});
  group.all_gather(tensor(mine).to(group.device()), all).wait();
  std::vector<int64_t> values = all.to_vector<int64_t>();
  std::vector<std::vector<int64_t>> by_rank;
  for (auto at = values.begin(); at != values.end(); at += n) by_rank.emplace_back(at, at + n);
  return by_rank;
}

}  // namespace

GradientBuckets::GradientBuckets(Module& net, distributed::Group group, const DistributedDataParallelOptions& o)
    : net_(net), group_(std::move(group)), options_(o) {
  HT_CHECK(o.bucket_mib > 0 && o.first_bucket_mib > 0, who, ": expected bucket_mib and first_bucket_mib above 0, got ", o.bucket_mib, " and ",
           o.first_bucket_mib);
  HT_CHECK(!o.compress || is_16bit_dtype(*o.compress), who, ": expected compress = f16 or bf16, got ", *o.compress);
  NoGrad off;
  LayerScope plain(Layer::autocast, false);
  std::vector<std::string> descriptions;
  auto describe = [&](const char* kind, const std::string& name, const Tensor& t) {
    HT_CHECK(t.device() == group_.device(), who, ": ", kind, " ", name, " is on ", t.device(), ", the group on ", group_.device(),
             "; call net.to(group.device()) first");
    descriptions.push_back(text::cat(kind, " ", name, " ", t.meta(), t.requires_grad() || kind[0] == 'b' ? "" : " frozen"));
  };
  for (auto& [name, p] : net.named_parameters()) {
    describe("parameter", name, p);
    if (p.requires_grad()) entries_.push_back({.name = name, .parameter = p, .gradient = {}});
  }
  for (auto& [name, b] : net.named_buffers()) {
    describe("buffer", name, b);
    buffers_.push_back(b);
  }
  compare(descriptions);
  HT_CHECK(!entries_.empty(), who, ": the model has no parameter that requires a gradient");
  make_buckets();
  broadcast_parameters();
  place_buffers();
  for (auto& b : flat_buffers_) group_.broadcast(b).wait();
  usage_ = ones({static_cast<int64_t>(entries_.size())}, {.device = group_.device()});
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    if (!e.parameter.grad().defined()) {
      e.parameter.set_grad(e.gradient);
      e.parameter.zero_grad();  // the place stays
    }
    hooks_.push_back(register_post_accumulate_hook(e.parameter, [this, i](const Tensor&) { arrived(i); }));
  }
}

// The first line that some rank has otherwise than rank 0 is told on all ranks.
void GradientBuckets::compare(const std::vector<std::string>& descriptions) const {
  int64_t most = 0;
  for (auto& counts : gathered(group_, {static_cast<int64_t>(descriptions.size())})) most = std::max(most, counts[0]);
  auto line = [&](size_t i) { return i < descriptions.size() ? descriptions[i] : std::string("nothing"); };
  if (most == 0) return;
  std::vector<int64_t> hashes;
  for (size_t i = 0; i < static_cast<size_t>(most); ++i) hashes.push_back(static_cast<int64_t>(hash_of(line(i))));
  auto all = gathered(group_, hashes);
  for (size_t i = 0; i < hashes.size(); ++i)
    for (size_t rank = 1; rank < all.size(); ++rank) {
      if (all[rank][i] == all[0][i]) continue;
      constexpr size_t longest = 240;
      std::string mine = line(i).substr(0, longest);
      std::vector<int64_t> letters(longest);
      std::copy(mine.begin(), mine.end(), letters.begin());
      auto lines = gathered(group_, letters);
      auto text_of = [&](size_t r) {
        std::string text(lines[r].begin(), lines[r].end());
        return text.substr(0, text.find('\0'));
      };
      throw distributed::MismatchError(text::cat(who, ": the ranks' models differ, at tensor ", i, ": rank 0 has ", text_of(0), ", rank ", rank,
                                                 " has ", text_of(rank),
                                                 "; build the same model on every rank"));
    }
}

// In reverse order of registration, in which backward gives gradients, as a rule.
void GradientBuckets::make_buckets() {
  struct Open {
    std::vector<size_t> entries;
    int64_t bytes = 0;
  };
  std::map<DType, Open> open;
  auto close = [&](Open& o) {
    Bucket& b = buckets_.emplace_back();
    std::vector<Tensor> tensors;
    for (size_t i : o.entries) tensors.push_back(entries_[i].parameter);
    std::vector<Tensor> places;
    std::tie(b.flat, places) = side_by_side(tensors);
    for (size_t k = 0; k < places.size(); ++k) {
      entries_[o.entries[k]].gradient = places[k];
      entries_[o.entries[k]].bucket = buckets_.size() - 1;
    }
    b.entries = std::move(o.entries);
    o = {};
  };
  for (size_t i = entries_.size(); i-- > 0;) {
    const Tensor& p = entries_[i].parameter;
    Open& o = open[p.dtype()];
    auto bytes = p.numel() * static_cast<int64_t>(size_of(p.dtype()));
    double most = (buckets_.empty() ? options_.first_bucket_mib : options_.bucket_mib) * 1048576;
    if (!o.entries.empty() && static_cast<double>(o.bytes + bytes) > most) close(o);
    o.entries.push_back(i);
    o.bytes += bytes;
  }
  for (auto& [dtype, o] : open) if (!o.entries.empty()) close(o);
  std::map<size_t, Bucket> by_last;  // a bucket is complete with its earliest parameter
  for (auto& b : buckets_) by_last.emplace(entries_.size() - b.entries.back(), std::move(b));
  buckets_.clear();
  for (auto& [at, b] : by_last) {
    for (size_t i : b.entries) entries_[i].bucket = buckets_.size();
    buckets_.push_back(std::move(b));
  }
}

// By way of the buckets, in few collectives. Frozen parameters go one by one.
void GradientBuckets::broadcast_parameters() {
  for (auto& e : entries_) e.gradient.copy_(e.parameter.detach());
  for (auto& b : buckets_) b.pending = group_.broadcast(b.flat);
  for (auto& b : buckets_) b.pending.wait();
  for (auto& e : entries_) e.parameter.detach().copy_(e.gradient);
  for (auto& p : net_.parameters()) {
    if (p.requires_grad()) continue;
    Tensor dense = p.detach().contiguous();
    group_.broadcast(dense).wait();
    p.detach().copy_(dense);
  }
}

// Buffers move into one tensor for each dtype, so that a broadcast of all needs no copies.
void GradientBuckets::place_buffers() {
  bool placed = placed_buffers_.size() == buffers_.size();
  for (size_t i = 0; placed && i < buffers_.size(); ++i) placed = buffers_[i].storage() == placed_buffers_[i].storage();
  if (placed || !options_.broadcast_buffers) return;
  std::map<DType, std::vector<size_t>> by_dtype;
  for (size_t i = 0; i < buffers_.size(); ++i) by_dtype[buffers_[i].dtype()].push_back(i);
  flat_buffers_.clear();
  placed_buffers_.assign(buffers_.size(), {});
  for (auto& [dtype, indices] : by_dtype) {
    std::vector<Tensor> tensors;
    for (size_t i : indices) tensors.push_back(buffers_[i]);
    auto [flat, places] = side_by_side(tensors);
    for (size_t k = 0; k < indices.size(); ++k) {
      places[k].copy_(tensors[k]);
      tensors[k].set_(places[k]);
      placed_buffers_[indices[k]] = places[k];
    }
    flat_buffers_.push_back(flat);
  }
}

void GradientBuckets::before_forward() {
  if (!reduces_ || !options_.broadcast_buffers || buffers_.empty() || !net_.training()) return;
  NoGrad off;
  LayerScope plain(Layer::autocast, false);
  place_buffers();
  std::vector<distributed::Pending> all;
  for (auto& b : flat_buffers_) all.push_back(group_.broadcast(b));
  for (auto& p : all) p.wait();
  for (auto& b : buffers_) b.bump_version();
}

// Several forwards may share one backward: what any of them reaches counts.
void GradientBuckets::after_forward(const std::vector<Tensor>& outputs) {
  if (!options_.unused_parameters || !recording()) return;
  std::unordered_set<const Body*> reached;
  std::vector<Tensor> recorded;
  for (auto& y : outputs) if (y.requires_grad()) recorded.push_back(y);
  if (reduces_) for (auto& leaf : reachable_leaves(recorded)) reached.insert(leaf.body().get());
  for (auto& e : entries_) e.reachable = !reduces_ || (walked_ && e.reachable) || reached.contains(e.parameter.body().get());
  walked_ = true;
}

// ---- a backward run

void GradientBuckets::arrived(size_t i) {
  if (!reduces_) return;
  if (run_.expired()) begin();
  Entry& e = entries_[i];
  HT_CHECK(!e.here, who, ": parameter ", e.name,
           " got a gradient twice in one backward; a hook that starts a backward of its own may not reach the model's parameters");
  take(e);
  issue_complete();
}

void GradientBuckets::begin() {
  for (auto& e : entries_)  // before anything is sent: such a gradient would be written while its bucket is reduced
    HT_CHECK(e.reachable || !run_reaches(e.parameter), who, ": parameter ", e.name,
             " has a gradient, and the model's outputs since the last backward do not depend on it; with unused_parameters = true, "
             "a loss may read parameters only through the model's outputs");
  // Held by the run alone: one that fails lets go of it, and the next begins anew.
  auto token = std::make_shared<int>(0);
  run_ = token;
  at_end_of_backward([this, token] { end(); });
  next_ = 0;
  for (auto& b : buckets_) b.missing = b.entries.size();
  for (auto& e : entries_) e.here = false;
  for (auto& e : entries_) if (!e.reachable) take(e);
}

// The gradient, of this run or left by earlier ones, is in its place in the bucket.
void GradientBuckets::take(Entry& e) {
  NoGrad off;
  Tensor g = e.parameter.grad();
  e.here = true;
  e.absent = !g.defined();
  if (e.absent) e.gradient.zero_();
  else {
    HT_CHECK(!g.requires_grad(), who, ": the gradient of parameter ", e.name,
             " has a graph: backward ran with create_graph, which cannot be reduced; "
             "take inner derivatives with grad(), and call backward() once, without create_graph");
    if (g.storage() != e.gradient.storage()) {  // somebody has set another buffer
      HT_CHECK(g.dtype() == e.gradient.dtype() && g.device() == e.gradient.device(), who, ": parameter ", e.name,
               " was moved or converted since this was made; make another");
      GradStamp stamp = grad_stamp(e.parameter);
      e.gradient.copy_(g);
      e.parameter.set_grad(e.gradient);
      set_grad_stamp(e.parameter, stamp);
    }
  }
  --buckets_[e.bucket].missing;
}

void GradientBuckets::issue_complete() {
  for (; next_ < buckets_.size() && buckets_[next_].missing == 0; ++next_) {
    Bucket& b = buckets_[next_];
    if (!scaled(b)) send(b);
    else measure(b);
    // What needs the ranks' largest value goes one bucket later, when that has come meanwhile.
    if (next_ > 0 && scaled(buckets_[next_ - 1])) send(buckets_[next_ - 1]);
  }
}

// f16 has no room for sums of large values, nor for small ones beside them.
bool GradientBuckets::scaled(const Bucket& b) const { return options_.compress.value_or(b.flat.dtype()) == DType::f16; }

void GradientBuckets::measure(Bucket& b) {
  Tensor largest = maximum(amax(b.flat), -amin(b.flat)).to(DType::f32);
  b.largest = where(isfinite(largest), largest, 0);  // one that is not survives any factor
  b.pending = group_.all_reduce(b.largest, distributed::Reduce::max);
}

void GradientBuckets::send(Bucket& b) {
  using distributed::Reduce;
  if (!scaled(b)) {
    bool narrow = options_.compress && b.flat.dtype() != *options_.compress;
    b.wire = narrow ? b.flat.to(*options_.compress) : b.flat;
    b.pending = group_.all_reduce(b.wire, Reduce::mean);
    return;
  }
  // A power of two at which the sum of all ranks' largest is at most 2^14; f16 ends at 65504.
  b.pending.wait();
  Tensor room = 0x1p14 / group_.size() / maximum(b.largest, 0x1p-110);
  b.factor = pow(full({}, 2, b.largest.options()), floor(log2(room)));
  b.wire = (b.flat.to(DType::f32) * b.factor).to(DType::f16);
  b.pending = group_.all_reduce(b.wire, Reduce::sum);
}

void GradientBuckets::receive(Bucket& b) {
  b.pending.wait();
  if (scaled(b)) b.flat.copy_(b.wire.to(DType::f32) / (b.factor * group_.size()));
  else if (b.wire.body() != b.flat.body()) b.flat.copy_(b.wire);
  b.wire = b.largest = b.factor = {};
  b.pending = {};
  for (size_t i : b.entries) entries_[i].gradient.bump_version();
}

void GradientBuckets::end() {
  run_.reset();
  NoGrad off;
  for (auto& e : entries_) {
    if (!e.here) take(e);
    e.reachable = true;
  }
  walked_ = false;
  issue_complete();
  if (scaled(buckets_.back())) send(buckets_.back());
  if (options_.unused_parameters) {
    usage_.fill_(1);
    for (size_t i = 0; i < entries_.size(); ++i)
      if (entries_[i].absent) usage_.slice(0, static_cast<int64_t>(i), static_cast<int64_t>(i) + 1).zero_();
    group_.all_reduce(usage_, distributed::Reduce::max).wait();
  }
  for (auto& b : buckets_) receive(b);
  settle_absent();
}

// A parameter that this rank did not use has the other ranks' mean, or no gradient where none did.
void GradientBuckets::settle_absent() {
  auto absent = std::find_if(entries_.begin(), entries_.end(), [](auto& e) { return e.absent; });
  if (absent == entries_.end()) return;
  HT_CHECK(options_.unused_parameters, who, ": parameter ", absent->name, " ", absent->parameter.meta(),
           " got no gradient in this backward; if a loss may leave out "
           "parameters, pass {.unused_parameters = true}; freeze what is never trained by requires_grad_(false) before");
  bool captured = thread_state().capture != nullptr;  // where the host cannot look, what the last eager step saw holds
  if (!captured) {
    std::vector<float> used = usage_.to_vector<float>();
    for (size_t i = 0; i < entries_.size(); ++i) entries_[i].used = used[i] > 0;
  }
  GradStamp stamp;
  for (auto& e : entries_) if (!e.absent) stamp = grad_stamp(e.parameter);
  for (auto& e : entries_) {
    if (!e.absent || !e.used) continue;
    e.parameter.set_grad(e.gradient);
    set_grad_stamp(e.parameter, stamp);
  }
}

}  // namespace halftone::nn::detail
