#pragma once
// Seeing inside: which operator ran in which dtype, every cast, what autocast left alone. The profile layer is the lowest,
// so what it sees is what really ran, backward included.
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "halftone/core/marks.h"
#include "halftone/core/op.h"

namespace halftone::amp {

struct HT_API TraceLine {
  std::string op;
  std::vector<Meta> in, out;
  bool left_alone = false;  // autocast was on and its policy is keep
  bool in_backward = false;
  // Of the f32 results that forward makes out of 16 bits, one number apart: what an island of f32 costs in memory.
  int64_t widened_bytes() const;
};
class HT_API Trace {
 public:
  std::vector<TraceLine> lines;
  // How many casts ran.
  int64_t casts() const;
  int64_t count(std::string_view op) const;
  int64_t widened_bytes() const;
};
HT_API std::ostream& operator<<(std::ostream& os, const Trace& t);

// Sees the calls of a thread, right before and after their kernels.
struct HT_API Watcher : LayerState {
  virtual void before(const Call&) {}
  virtual void after(const Call& c, const Tensors& out) = 0;
  // Autocast is on, and the policy of this call is keep.
  virtual void left_alone(const Call&) {}
};
// Has `watcher`, which outlives it, see this thread's calls for its lifetime, in the place of another.
class HT_API Watching {
 public:
  [[nodiscard]] explicit Watching(Watcher& watcher);
  ~Watching();
  Watching(const Watching&) = delete;

 private:
  LayerScope scope_;
  std::shared_ptr<const LayerState> saved_;
};

// Marks each call as a range that a profiler outside shows, calls inside it as ranges within: by NVTX for Nsight Systems where there is a GPU;
// elsewhere nothing happens.
//   amp::RangeMarker marker;
//   amp::Watching on(marker);
class HT_API RangeMarker final : public Watcher {
 public:
  RangeMarker() : marks_(range_marks()) {}
  ~RangeMarker();  // ends those that an exception left
  void before(const Call& c) override;
  void after(const Call&, const Tensors&) override;

 private:
  RangeMarks marks_;
  int open_ = 0;
};

// What f calls on this thread.
HT_API Trace trace(const std::function<void()>& f);

// Called by the autocast layer.
void note_left_alone(const Call& c);

}  // namespace halftone::amp
