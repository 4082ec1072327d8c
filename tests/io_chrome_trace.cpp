// Traces of calls: which ran, within which, and a file that is JSON.
#include "halftone/io/chrome_trace.h"

#include <algorithm>

#include "halftone/autograd/autograd.h"
#include "halftone/core/marks.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

using namespace halftone;

TEST_CASE("each call of a step has its event") {
  Tensor w = ones({3, 2}, {.requires_grad = true});
  const Tensor x = ones({4, 3});
  io::ChromeTrace trace({.wait = true});
  matmul(x, w);
  CHECK(trace.events().empty());
  {
    const amp::Watching on(trace);
    relu(matmul(x, w)).sum().backward();
  }
  matmul(x, w);
  const auto& events = trace.events();
  const auto count = [&](const char* op) { return std::count_if(events.begin(), events.end(), [&](auto& e) { return e.op == op; }); };
  CHECK(events.front().op == "matmul");
  CHECK(events.front().in == "[4, 3] (f32), [3, 2] (f32)");
  CHECK(events.front().out == "[4, 2] (f32)");
  CHECK(count("matmul") >= 2);  // forward, and the weight's gradient
  CHECK(count("relu") == 1);
  for (size_t i = 0; i < events.size(); ++i) {
    CHECK((events[i].begin >= 0 && events[i].end >= events[i].begin));
    if (i > 0) CHECK(events[i].end >= events[i - 1].end);
  }

  const Temporary t;
  trace.save(t / "trace.json");
  const std::string text = bytes_of(t / "trace.json");
  CHECK(text.rfind("{\"traceEvents\":[\n{\"name\": \"matmul\", \"ph\": \"X\", \"ts\": ", 0) == 0);
  CHECK(text.ends_with("}}\n]}\n"));
  CHECK(std::count(text.begin(), text.end(), '\n') == static_cast<int64_t>(events.size()) + 2);
  io::ChromeTrace().save(t / "empty.json");
  CHECK(bytes_of(t / "empty.json") == "{\"traceEvents\":[\n]}\n");
}

namespace {
std::vector<std::string> marked;  // what begins, and "" for each end
}

TEST_CASE("each call is a range for a profiler outside, and all ranges end") {
  const RangeMarks before = range_marks();
  set_range_marks({.begin = [](const char* name) { marked.emplace_back(name); }, .end = [] { marked.emplace_back(); }});
  Tensor w = ones({3, 2}, {.requires_grad = true});
  {
    amp::RangeMarker marker;
    const amp::Watching on(marker);
    relu(matmul(ones({4, 3}), w)).sum().backward();
    CHECK_THROWS(matmul(ones({4, 3}), ones({4, 3})));
  }
  set_range_marks(before);
  int open = 0;
  for (const auto& name : marked) {
    open += name.empty() ? -1 : 1;
    REQUIRE(open >= 0);
  }
  CHECK(open == 0);
  CHECK(std::count(marked.begin(), marked.end(), "matmul") >= 2);  // forward, and the weight's gradient
  CHECK(std::count(marked.begin(), marked.end(), "relu") == 1);

  set_range_marks({});
  marked.clear();
  amp::RangeMarker silent;
  const amp::Watching on(silent);
  relu(ones({2}));
  CHECK(marked.empty());
  set_range_marks(before);
}
