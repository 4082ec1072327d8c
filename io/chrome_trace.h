#pragma once
// Where a step's time goes, as a file for chrome://tracing or ui.perfetto.dev: each operator that a thread calls, backward included,
// with its shapes.
//
//   io::ChromeTrace trace;
//   { amp::Watching on(trace); step(); }
//   trace.save("step.json");
#include <string>
#include <vector>

#include "halftone/amp/trace.h"

namespace halftone::io {

struct ChromeTraceOptions {
  bool wait = false;  // for the device after each call: without it, a GPU's operators take as long as their launch
};

// Calls inside a call lie below it. One trace is for one thread.
class HT_API ChromeTrace final : public amp::Watcher {
 public:
  explicit ChromeTrace(ChromeTraceOptions options = {});
  void before(const Call& call) override;
  void after(const Call& call, const Tensors& out) override;

  struct Event {
    std::string op, in, out;    // shapes and dtypes
    double begin = 0, end = 0;  // microseconds since the trace was made
  };
  // Those that have ended, the inner ones first.
  const std::vector<Event>& events() const { return events_; }
  // Replaces the file. Throws FileError when it cannot be written.
  void save(const std::string& path) const;

 private:
  double now() const;
  ChromeTraceOptions options_;
  double start_;
  std::vector<double> open_;  // when the calls that are under way began
  std::vector<Event> events_;
};

}  // namespace halftone::io
