// Complete events ("X") of the trace event format, one for each call.
#include "halftone/io/chrome_trace.h"

#include <chrono>

#include "halftone/core/backend.h"
#include "halftone/io/file.h"
#include "halftone/io/log.h"

namespace halftone::io {
namespace {

double microseconds() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
std::string described(const Tensors& tensors) {
  std::string s;
  for (const Tensor& t : tensors) s += (s.empty() ? "" : ", ") + (t.defined() ? str(t.meta()) : std::string("none"));
  return s;
}

}  // namespace

ChromeTrace::ChromeTrace(ChromeTraceOptions options) : options_(options), start_(microseconds()) {}

double ChromeTrace::now() const { return microseconds() - start_; }

void ChromeTrace::before(const Call&) { open_.push_back(now()); }

void ChromeTrace::after(const Call& call, const Tensors& out) {
  const Device device = out.empty() || !out[0].defined() ? Device::cpu() : out[0].device();
  if (options_.wait && device != Device::cpu()) backend(device.type).synchronize(device.index);
  events_.push_back({call.op->name, described(call.in), described(out), open_.back(), now()});
  open_.pop_back();
}

void ChromeTrace::save(const std::string& path) const {
  std::string text = "{\"traceEvents\":[";
  for (const Event& e : events_) {
    const Fields shapes{{"in", e.in}, {"out", e.out}};
    text += (text.back() == '[' ? "\n" : ",\n") +
            to_json(Fields{{"name", e.op}, {"ph", "X"}, {"ts", e.begin}, {"dur", e.end - e.begin}, {"pid", 0}, {"tid", 0}, {"args", shapes}});
  }
  replace_file(path, text + "\n]}\n");
}

}  // namespace halftone::io
