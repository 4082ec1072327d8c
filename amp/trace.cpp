// The profile layer, and traces as text.
#include "halftone/amp/trace.h"

#include <algorithm>
#include <ostream>

#include "halftone/autograd/autograd.h"

namespace halftone {
namespace amp {
namespace {

constexpr auto profile_slot = static_cast<size_t>(Layer::profile);

Watcher* watcher() { return static_cast<Watcher*>(const_cast<LayerState*>(thread_state().slot[profile_slot].get())); }

class Collector final : public Watcher {
 public:
  void after(const Call& c, const Tensors& out) override {
    TraceLine line{c.op->name, {}, {}, std::exchange(left_alone_, nullptr) == c.op, in_backward()};
    for (auto& t : c.in) if (t.defined()) line.in.push_back(t.meta());
    for (auto& t : out) line.out.push_back(t.meta());
    trace.lines.push_back(std::move(line));
  }
  void left_alone(const Call& c) override { left_alone_ = c.op; }
  Trace trace;

 private:
  const OpDef* left_alone_ = nullptr;  // the call that is on its way down
};

std::string describe(const std::vector<Meta>& metas) {
  std::string s;
  for (auto& m : metas) s += (s.empty() ? "" : ", ") + std::string(name(m.dtype)) + str(m.shape);
  return s;
}

}  // namespace

int64_t TraceLine::widened_bytes() const {
  bool narrow = std::any_of(in.begin(), in.end(), [](auto& m) { return is_16bit_dtype(m.dtype) && m.shape.rank() > 0; });
  int64_t bytes = 0;
  for (auto& m : out) if (narrow && !in_backward && m.dtype == DType::f32 && m.shape.rank() > 0) bytes += m.shape.numel() * 4;
  return bytes;
}
int64_t Trace::widened_bytes() const {
  int64_t bytes = 0;
  for (auto& l : lines) bytes += l.widened_bytes();
  return bytes;
}
int64_t Trace::count(std::string_view op) const {
  return std::count_if(lines.begin(), lines.end(), [&](auto& l) { return l.op == op; });
}
int64_t Trace::casts() const { return count("cast"); }

std::ostream& operator<<(std::ostream& os, const Trace& t) {
  for (auto& l : t.lines) {
    os << l.op << "  " << describe(l.in);
    if (!l.out.empty()) os << " -> " << describe(l.out);
    if (l.left_alone) os << "  (left alone)";
    if (int64_t bytes = l.widened_bytes()) os << "  (f32 out of 16 bits, " << bytes << " bytes)";
    if (l.in_backward) os << "  (backward)";
    os << '\n';
  }
  os << t.lines.size() << " operators, " << t.casts() << " casts";
  if (int64_t bytes = t.widened_bytes()) os << ", " << bytes << " bytes of f32 out of 16 bits";
  return os << '\n';
}

Watching::Watching(Watcher& w) : scope_(Layer::profile, true), saved_(thread_state().slot[profile_slot]) {
  thread_state().slot[profile_slot] = std::shared_ptr<const LayerState>(std::shared_ptr<void>(), &w);
}
Watching::~Watching() { thread_state().slot[profile_slot] = std::move(saved_); }

RangeMarker::~RangeMarker() {
  while (open_-- > 0) marks_.end();
}
void RangeMarker::before(const Call& c) {
  if (!marks_.begin) return;
  marks_.begin(c.op->name);
  ++open_;
}
void RangeMarker::after(const Call&, const Tensors&) {
  if (open_ == 0) return;
  marks_.end();
  --open_;
}

Trace trace(const std::function<void()>& f) {
  HT_CHECK(f, "trace: the function is empty");
  Collector collector;
  {
    Watching on(collector);
    f();
  }
  return std::move(collector.trace);
}

void note_left_alone(const Call& c) {
  if (Watcher* w = watcher()) w->left_alone(c);
}

}  // namespace amp

Tensors profile_layer(Call& c) {
  amp::Watcher* w = amp::watcher();
  if (!w || c.launched) return dispatch(c);
  w->before(c);
  Tensors out = dispatch(c);
  w->after(c, out);
  return out;
}

}  // namespace halftone
