#pragma once
// Seeing inside: which operator ran in which dtype, every cast, what autocast left alone. The profile layer is the lowest,
// so what it sees is what really ran, backward included.
#include <iosfwd>
#include <string>
#include <vector>

#include "halftone/core/op.h"

namespace halftone::amp {

struct TraceLine {
  std::string op;
  std::vector<Meta> in, out;
  bool left_alone = false;  // autocast was on and its policy is keep
};
class HT_API Trace {
 public:
  std::vector<TraceLine> lines;
  // How many casts ran.
  int64_t casts() const;
  int64_t count(std::string_view op) const;
};
HT_API std::ostream& operator<<(std::ostream& os, const Trace& t);

// Collects this thread's calls into `trace` for the guard's lifetime.
class HT_API Tracing {
 public:
  [[nodiscard]] explicit Tracing(Trace& trace);
  ~Tracing();
  Tracing(const Tracing&) = delete;

 private:
  LayerScope scope_;
  std::shared_ptr<const LayerState> saved_;
};
template <class F> Trace trace(F&& f) {
  Trace t;
  {
    Tracing on(t);
    f();
  }
  return t;
}

// Called by the autocast layer about a call whose policy is keep.
void note_left_alone(const Call& c);

}  // namespace halftone::amp
