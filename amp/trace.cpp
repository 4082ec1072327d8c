// The profile layer, and traces as text.
#include "halftone/amp/trace.h"

#include <algorithm>
#include <ostream>

#include "halftone/ops/copy.h"

namespace halftone {
namespace amp {
namespace {

struct Collector final : LayerState {
  explicit Collector(Trace* t) : trace(t) {}
  Trace* trace;
  const OpDef* left_alone = nullptr;  // the call that is on its way down
};
Collector* collector() {
  auto& slot = thread_state().slot[static_cast<size_t>(Layer::profile)];
  return static_cast<Collector*>(const_cast<LayerState*>(slot.get()));
}

std::string describe(const std::vector<Meta>& metas) {
  std::string s;
  for (auto& m : metas) s += (s.empty() ? "" : ", ") + std::string(name(m.dtype)) + str(m.shape);
  return s;
}

}  // namespace

int64_t Trace::count(std::string_view op) const {
  return std::count_if(lines.begin(), lines.end(), [&](auto& l) { return l.op == op; });
}
int64_t Trace::casts() const { return count("cast"); }

std::ostream& operator<<(std::ostream& os, const Trace& t) {
  for (auto& l : t.lines) {
    os << l.op << "  " << describe(l.in);
    if (!l.out.empty()) os << " -> " << describe(l.out);
    if (l.left_alone) os << "  (left alone)";
    os << '\n';
  }
  return os << t.lines.size() << " operators, " << t.casts() << " casts\n";
}

Tracing::Tracing(Trace& trace) : scope_(Layer::profile, true), saved_(thread_state().slot[static_cast<size_t>(Layer::profile)]) {
  thread_state().slot[static_cast<size_t>(Layer::profile)] = std::make_shared<Collector>(&trace);
}
Tracing::~Tracing() { thread_state().slot[static_cast<size_t>(Layer::profile)] = std::move(saved_); }

void note_left_alone(const Call& c) {
  if (Collector* k = collector()) k->left_alone = c.op;
}

}  // namespace amp

Tensors profile_layer(Call& c) {
  auto* k = amp::collector();
  if (!k || c.launched) return dispatch(c);
  amp::TraceLine line{c.op->name, {}, {}, std::exchange(k->left_alone, nullptr) == c.op};
  for (auto& t : c.in) if (t.defined()) line.in.push_back(t.meta());
  Tensors out = dispatch(c);
  for (auto& t : out) line.out.push_back(t.meta());
  k->trace->lines.push_back(std::move(line));
  return out;
}

}  // namespace halftone
