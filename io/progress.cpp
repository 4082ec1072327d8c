// The bar's text and when it is written. A line never wraps: it is cut at the terminal's width, so that the next one
// overwrites it.
#include "halftone/io/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "halftone/core/thread_state.h"
#include "halftone/io/utf8.h"

namespace halftone {
namespace {

constexpr double terminal_interval = 0.1, plain_interval = 10, read_interval = 0.1;  // seconds

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

class StandardError final : public ProgressScreen {
 public:
  StandardError() {
    terminal = ::isatty(STDERR_FILENO) == 1 && environment("TERM") != "dumb";
    color = terminal && environment("NO_COLOR").empty();
    std::string locale = environment("LC_ALL");
    for (const char* name : {"LC_CTYPE", "LANG"})
      if (locale.empty()) locale = environment(name);
    for (const char* utf8 : {"UTF-8", "utf-8", "UTF8", "utf8"})
      unicode = unicode || locale.find(utf8) != std::string::npos;
  }
  int width() const override {
    winsize size{};
    return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
  }
  double seconds() const override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void write(std::string_view text) override {
    // Nobody to tell when it fails: a closed terminal must not end a training run.
    while (!text.empty()) {
      const ssize_t n = ::write(STDERR_FILENO, text.data(), text.size());
      if (n <= 0) return;
      text.remove_prefix(static_cast<size_t>(n));
    }
  }
};

ProgressScreen* substitute = nullptr;
ProgressScreen& screen() {
  static StandardError standard;
  return substitute ? *substitute : standard;
}

std::string short_number(double v, int digits) {
  std::array<char, 64> text;
  const auto r = std::to_chars(text.data(), text.data() + text.size(), v, std::chars_format::general, digits);
  return {text.data(), r.ptr};
}
std::string two_digits(int64_t v) { return (v < 10 ? "0" : "") + std::to_string(v); }
std::string clock_time(double seconds) {  // 0:07, 1:02:03
  const auto s = static_cast<int64_t>(std::clamp(seconds, 0.0, 1e9));
  const std::string rest = two_digits(s % 60);
  if (s < 3600) return text::cat(s / 60, ":", rest);
  return text::cat(s / 3600, ":", two_digits(s / 60 % 60), ":", rest);
}

std::string cut(const std::string& s, int width) {
  size_t end = 0;
  for (int n = 0; end < s.size(); ++end)
    if (!text::continues_character(s[end]) && ++n > width) break;
  return s.substr(0, end);
}

std::string repeat(const char* s, int times) {
  std::string r;
  for (int i = 0; i < times; ++i) r += s;
  return r;
}
std::string draw_bar(double share, int width, const ProgressScreen& screen) {
  const int full = std::clamp(static_cast<int>(share * width), 0, width);
  if (screen.color && screen.unicode)
    return "\x1b[36m" + repeat("━", full) + "\x1b[90m" + repeat("━", width - full) + "\x1b[0m";
  if (screen.color) return "\x1b[36m" + repeat("#", full) + "\x1b[90m" + repeat(".", width - full) + "\x1b[0m";
  return screen.unicode ? repeat("━", full) + repeat("─", width - full) : repeat("#", full) + repeat(".", width - full);
}

}  // namespace

void set_progress_screen(ProgressScreen* s) { substitute = s; }

struct ProgressBar::State {
  struct Shown {
    std::string name, value;
    double read = -INFINITY;  // when
  };
  std::string label;
  int64_t steps, done = 0;
  std::vector<Shown> shown;
  double begun = 0, drawn = 0;
  bool running = false;

  Shown& find(const std::string& name) {
    for (auto& s : shown)
      if (s.name == name) return s;
    return shown.emplace_back(Shown{.name = name, .value = {}});
  }

  // "423/938", "35.2/s", "0:14 left", "loss 0.41".
  std::vector<std::string> facts(double now, bool over) const {
    const double seconds = now - begun, rate = seconds > 0 ? static_cast<double>(done) / seconds : 0;
    std::vector<std::string> all = {steps >= 0 ? text::cat(done, "/", steps) : std::to_string(done)};
    if (done > 0 && rate > 0)
      all.push_back((rate < 100 ? short_number(rate, 3) : std::to_string(std::llround(std::min(rate, 1e15)))) + "/s");
    if (over)
      all.push_back(clock_time(seconds));
    else if (done > 0 && rate > 0 && steps >= done)
      all.push_back(clock_time(static_cast<double>(steps - done) / rate) + " left");
    for (auto& s : shown)
      if (!s.value.empty()) all.push_back(s.name + " " + s.value);
    return all;
  }
  void draw(double now, bool over) {
    drawn = now;
    ProgressScreen& out = screen();
    std::string rest;
    for (auto& fact : facts(now, over)) rest += (rest.empty() ? "" : out.terminal ? "  " : ", ") + fact;
    if (!out.terminal) {
      out.write((label.empty() ? rest : label + ": " + rest) + "\n");
      return;
    }
    const int width = std::max(out.width() - 1, 1);  // a full line would move the cursor to the next
    const std::string head = label.empty() ? "" : label + " ";
    std::string line = "\r";
    const int room = width - text::columns(head) - text::columns(rest) - 6;  // "100% " and a space after the bar
    if (steps > 0 && room >= 5) {
      const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(steps));
      std::string percent = std::to_string(static_cast<int>(100 * share)) + "% ";
      line +=
          head + std::string(5 - percent.size(), ' ') + percent + draw_bar(share, std::min(room, 30), out) + " " + rest;
    } else {
      line += cut(head + rest, width);
    }
    out.write(line + "\x1b[K" + (over ? "\n" : ""));
  }
  void end() {
    if (!running) return;
    running = false;
    draw(screen().seconds(), true);
  }
};

ProgressBar::ProgressBar(std::string label, int64_t steps)
    : state_(std::make_unique<State>(State{.label = std::move(label), .steps = steps, .shown = {}})) {}
ProgressBar::ProgressBar(ProgressBar&&) noexcept = default;
ProgressBar::~ProgressBar() {
  if (!state_) return;
  try {
    state_->end();
  } catch (...) {
    // A line less to read; a destructor has nobody to tell.
  }
}

void ProgressBar::start() {
  State& s = *state_;
  s.end();
  s.done = 0;
  s.running = true;
  s.begun = screen().seconds();
  if (screen().terminal)
    s.draw(s.begun, false);
  else
    s.drawn = s.begun;
}

void ProgressBar::advance() {
  State& s = *state_;
  ++s.done;
  const double now = screen().seconds();
  if (s.done != s.steps && now - s.drawn >= (screen().terminal ? terminal_interval : plain_interval))
    s.draw(now, false);
}

void ProgressBar::finish() { state_->end(); }

void ProgressBar::show(const std::string& name, double value) { state_->find(name).value = short_number(value, 4); }

void ProgressBar::show(const std::string& name, const Tensor& value) {
  const ThreadState& thread = thread_state();
  if (thread.forbid_sync || thread.capture) return;
  State::Shown& s = state_->find(name);
  const double now = screen().seconds();
  if (now - s.read < read_interval) return;
  s.value = short_number(value.item(), 4);
  s.read = now;
}

}  // namespace halftone
