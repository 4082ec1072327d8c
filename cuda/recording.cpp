// The log of a captured step.
#include "halftone/cuda/recording.h"

#include "halftone/core/shadow.h"
#include "halftone/ops/copy.h"

namespace halftone::cuda {
namespace {

// Does the handle stay, so that what it refers to later tells whether the graph still reads the right memory?
bool stays(const Tensor& t) {
  return t.body()->owners > 0 || (t.requires_grad() && t.is_leaf() && !t.body()->is_view);
}

// The tensor that a 16-bit copy is of. Views have no copies: it is all of its storage.
Tensor original(const std::shared_ptr<Storage>& storage, DType dtype, const Tensor& copy) {
  return Tensor(Meta(copy.shape(), dtype, copy.device()), storage);
}

}  // namespace

void Recording::touch(const Tensor& t, bool written) {
  if (!t.defined() || t.device().type != DeviceType::cuda || !t.storage()->data()) return;
  const Storage* s = t.storage().get();
  if (inside(*s)) {
    if (written) written_inside_.insert_or_assign(s, t.storage());
    return;
  }
  auto [at, fresh] = outside_.try_emplace(s, Outside{t.storage(), t.dtype(), written, !written});
  if (!fresh && written) at->second.written = true;
  if (stays(t)) lasting_.insert_or_assign(t.body().get(), Lasting{t.body(), s});
}

void Recording::launched(const Call& call, std::span<const Tensor> out) {
  last_ = call.op->name;
  for (size_t i = 0; i < call.in.size(); ++i) touch(call.in[i], call.op->writes && call.op->writes(call, i));
  for (auto& t : out) touch(t, true);
}

void Recording::uses(const Tensor& whole) {
  if (!whole.defined() || inside(*whole.storage())) return;
  outside_.try_emplace(whole.storage().get(), Outside{whole.storage(), whole.dtype(), false, false});
  if (stays(whole)) lasting_.insert_or_assign(whole.body().get(), Lasting{whole.body(), whole.storage().get()});
}

bool Recording::writes(const Storage& s) const {
  auto found = outside_.find(&s);
  return found != outside_.end() && found->second.written;
}

void Recording::finish() {
  undo.clear();
  for (auto& [s, o] : outside_) {
    if (o.written) written_.push_back(o.storage);
    if (!o.storage->has_shadows()) continue;
    Shadows& shadows = o.storage->shadows();
    std::lock_guard guard(shadows.lock);
    for (auto& shadow : shadows.all()) {
      const Storage* copy = shadow.copy.storage().get();
      auto found = outside_.find(copy);
      if (found == outside_.end() && !written_inside_.contains(copy)) continue;
      bool read = found != outside_.end() && found->second.read_first;
      bool current = shadow.version == o.storage->version();
      copies_.push_back({original(o.storage, o.dtype, shadow.copy), shadow.copy, read, current});
    }
  }
  for (auto& [s, weak] : written_inside_)
    if (!weak.expired()) survivors_.push_back(weak);
  written_inside_.clear();
}

void Recording::abandon() noexcept {
  for (auto u = undo.rbegin(); u != undo.rend(); ++u) (*u)();
  for (auto& [s, o] : outside_)
    if (o.storage->has_shadows()) o.storage->drop_shadows();
}

bool Recording::holds() const {
  for (auto& guard : guards) if (!guard()) return false;
  for (auto& [b, known] : lasting_) {
    auto body = known.body.lock();
    if (!body || body->storage.get() != known.storage) return false;
  }
  for (auto& c : copies_) {
    if (!c.whole.storage()->has_shadows()) return false;
    Shadows& shadows = c.whole.storage()->shadows();
    std::lock_guard guard(shadows.lock);
    auto* shadow = shadows.find(c.copy.dtype());
    if (!shadow || shadow->copy.storage() != c.copy.storage()) return false;
  }
  return true;
}

void Recording::refresh() const {
  for (auto& c : copies_) {
    if (!c.read && !c.current_at_end) continue;  // the graph reads it, or may leave it unwritten in a skipped step
    Storage& whole = *c.whole.storage();
    std::lock_guard guard(whole.shadows().lock);
    auto* shadow = whole.shadows().find(c.copy.dtype());
    if (shadow->version != whole.version()) {
      call_into(op::cast, {c.whole}, Attrs::of(c.copy.dtype()), c.copy);
      shadow->wrote(whole.version());
    }
    shadow->await();
  }
}

void Recording::replayed() const {
  for (auto& s : written_) s->bump_version();
  for (auto& weak : survivors_) if (auto s = weak.lock()) s->bump_version();
  for (auto& c : copies_) {
    Storage& whole = *c.whole.storage();
    std::lock_guard guard(whole.shadows().lock);
    if (auto* shadow = whole.shadows().find(c.copy.dtype()))
      shadow->wrote(c.current_at_end ? whole.version() : whole.version() - 1);
  }
  for (auto& effect : effects) effect();
}

}  // namespace halftone::cuda
