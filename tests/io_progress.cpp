// Progress: exact text on a terminal and elsewhere, by a clock that the test turns.
#include "halftone/io/progress.h"

#include <list>
#include <stdexcept>
#include <vector>

#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"

namespace {

using namespace halftone;

struct Screen : ProgressScreen {
  std::string text;
  double now = 100;
  int columns = 80;
  explicit Screen(bool is_terminal) {
    terminal = is_terminal;
    set_progress_screen(this);
  }
  ~Screen() override { set_progress_screen(nullptr); }
  int width() const override { return columns; }
  double seconds() const override { return now; }
  void write(std::string_view s) override { text += s; }
  std::string take() { return std::exchange(text, {}); }
};

}  // namespace

TEST_CASE("elsewhere than on a terminal: a line now and then, and one at the end") {
  Screen screen(false);
  const std::vector<int> range(100);
  int64_t sum = 0;
  auto bar = progress(range, "epoch 1");
  for (auto& v : bar) {
    sum += v + 1;
    screen.now += 0.25;
    bar.show("loss", 1.0 / static_cast<double>(sum)).show("lr", 0.1f);
  }
  CHECK(sum == 100);
  CHECK(screen.text ==
        "epoch 1: 40/100, 4/s, 0:15 left, loss 0.025, lr 0.1\n"
        "epoch 1: 80/100, 4/s, 0:05 left, loss 0.0125, lr 0.1\n"
        "epoch 1: 100/100, 4/s, 0:25, loss 0.01, lr 0.1\n");
}

TEST_CASE("on a terminal: one line, drawn over at most ten times a second") {
  Screen screen(true);
  screen.columns = 50;
  auto bar = progress(std::vector<int>(4), "e");
  auto i = bar.begin();
  CHECK(screen.take() == "\re   0% .............................. 0/4\x1b[K");
  screen.now += 0.05;
  ++i;
  CHECK(screen.take().empty());
  screen.now += 0.45;
  ++i;
  CHECK(screen.take() == "\re  50% ###########........... 2/4  4/s  0:00 left\x1b[K");
  screen.now += 7200;
  bar.show("loss", 0.123456);
  ++i;
  CHECK(screen.take() == "\re 3/4  0.000417/s  40:00 left  loss 0.1235\x1b[K");
  ++i;
  CHECK(screen.take().empty());
  CHECK(i == bar.end());
  CHECK(screen.take() == "\re 4/4  0.000556/s  2:00:00  loss 0.1235\x1b[K\n");
  CHECK(i == bar.end());
  CHECK(screen.text.empty());
}

TEST_CASE("colours and finer characters where the terminal has them") {
  Screen screen(true);
  screen.columns = 33;
  screen.unicode = true;
  for ([[maybe_unused]] int v : progress(std::vector<int>(2))) screen.now += 1;
  CHECK(screen.take().find("\r 50% ━━━──── 1/2  1/s  0:01 left") != std::string::npos);
  screen.color = true;
  for ([[maybe_unused]] int v : progress(std::vector<int>(2))) screen.now += 1;
  CHECK(screen.take().find("\x1b[36m━━━\x1b[90m━━━━\x1b[0m") != std::string::npos);
}

TEST_CASE("a narrow terminal cuts the line, never inside a character") {
  Screen screen(true);
  for (screen.columns = 1; screen.columns < 40; ++screen.columns) {
    for ([[maybe_unused]] int v : progress(std::vector<int>(3), "épôque")) screen.now += 1;
    int columns = 0;
    for (const char c : screen.take()) {
      if (c == '\r') columns = 0;
      if (c == '\x1b') CHECK(columns <= std::max(screen.columns - 1, 1));
      columns += c >= ' ' || (static_cast<unsigned char>(c) & 0xC0u) == 0xC0u;
    }
  }
}

TEST_CASE("a loop that is left ends its line") {
  Screen screen(true);
  for ([[maybe_unused]] int v : progress(std::vector<int>(3), "e")) break;
  CHECK(screen.take().ends_with("0/3  0:00\x1b[K\n"));
  try {
    for ([[maybe_unused]] int v : progress(std::vector<int>(3), "e")) throw std::runtime_error("x");
  } catch (const std::runtime_error&) {}
  CHECK(screen.take().ends_with("\n"));
}

TEST_CASE("any range: of unknown length, an array, one that is empty") {
  Screen screen(false);
  int seen = 0;
  int array[] = {1, 2, 3};
  for (int& v : progress(array, "array")) seen += v++;
  CHECK(array[2] == 4);
  struct Endless {
    std::list<int> values{1, 2};
    auto begin() { return values.begin(); }
    auto end() { return values.end(); }
  };
  for (auto& v : progress(Endless(), "unknown")) seen += v;
  const std::vector<int> none;
  for (auto& v : progress(none, "empty")) seen += v;
  CHECK(seen == 9);
  CHECK(screen.text == "array: 3/3, 0:00\nunknown: 2, 0:00\nempty: 0/0, 0:00\n");
}

TEST_CASE("fast loops have whole rates") {
  Screen screen(false);
  for ([[maybe_unused]] int v : progress(std::vector<int>(3000))) screen.now += 0.0005;
  CHECK(screen.text == "3000/3000, 2000/s, 0:01\n");
}

TEST_CASE("a temporary range and label are owned, a named range is not copied") {
  Screen screen(false);
  struct Fixed {
    std::vector<int> values{1, 2};
    Fixed() = default;
    Fixed(Fixed&&) = default;
    size_t size() const { return values.size(); }
    auto begin() { return values.begin(); }
    auto end() { return values.end(); }
  };
  Fixed named;
  for (auto& v : progress(named, "named")) v = 5;
  CHECK(named.values[0] == 5);
  auto owned = progress(Fixed(), std::string("a label ") + "made on the spot").show("lr", 0.5);
  int sum = 0;
  for (auto& v : owned) sum += v;
  for (auto& v : owned) sum += v;  // again from the first
  CHECK(sum == 6);
  CHECK(screen.text.ends_with("a label made on the spot: 2/2, 0:00, lr 0.5\n"));
}

TEST_CASE("a tensor is read at most ten times a second, and never where the host may not wait") {
  Screen screen(false);
  auto bar = progress(std::vector<int>(1), "e");
  auto i = bar.begin();
  bar.show("loss", tensor(1.5f));
  bar.show("loss", tensor(2.5f));  // too early
  {
    const ForbidSync forbid;
    screen.now += 1;
    bar.show("loss", tensor(3.5f));
  }
  ++i;
  CHECK(i == bar.end());
  CHECK(screen.take().find("loss 1.5") != std::string::npos);
  bar.show("loss", tensor(4.5f));
  for ([[maybe_unused]] auto& v : bar) {}
  CHECK(screen.take().find("loss 4.5") != std::string::npos);
}
