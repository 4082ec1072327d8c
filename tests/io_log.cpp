// Logs and charts: exact text, whatever the values.
#include "halftone/io/log.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "halftone/io/chart.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

namespace {

using namespace halftone;
using namespace halftone::io;

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN(),
                 infinite = std::numeric_limits<double>::infinity();

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++n;
  return n;
}

}  // namespace

TEST_CASE("values as JSON") {
  CHECK(to_json({}) == "null");
  CHECK(to_json(true) == "true");
  CHECK(to_json(-3) == "-3");
  CHECK(to_json(size_t{7}) == "7");
  CHECK(to_json(std::numeric_limits<int64_t>::min()) == "-9223372036854775808");
  CHECK(to_json(0.1) == "0.1");
  CHECK(to_json(0.1f) == "0.10000000149011612");
  CHECK(to_json(not_a_number) == "null");
  CHECK(to_json(-infinite) == "null");
  CHECK(to_json("a \"b\"\n\xff") == "\"a \\\"b\\\"\\n\xef\xbf\xbd\"");
  CHECK(to_json(std::vector<double>{1, 2.5}) == "[1.0, 2.5]");
  CHECK(to_json(Fields{{"a", 1}, {"b", Fields{{"c", "d"}}}}) == R"({"a": 1, "b": {"c": "d"}})");
  CHECK_THROWS_AS(Value(~uint64_t{0}), Error);
}

TEST_CASE("one JSON file") {
  const Temporary t;
  write_json(t / "m", {{"test_accuracy", 88.25}, {"device", "cpu"}, {"curve", std::vector<int>{1, 2}}});
  CHECK(bytes_of(t / "m") == "{\n  \"test_accuracy\": 88.25,\n  \"device\": \"cpu\",\n  \"curve\": [1, 2]\n}\n");
  write_json(t / "m", {});
  CHECK(bytes_of(t / "m") == "{}\n");
}

TEST_CASE("JSON lines") {
  const Temporary t;
  {
    JsonLog log(t / "log");
    log.write({{"step", 1}, {"loss", 0.5}});
    CHECK(bytes_of(t / "log") == "{\"step\": 1, \"loss\": 0.5}\n");  // at once
    log.write({{"step", 2}, {"loss", not_a_number}});
  }
  JsonLog(t / "log", {.append = true}).write({{"step", 3}});
  CHECK(bytes_of(t / "log") == "{\"step\": 1, \"loss\": 0.5}\n{\"step\": 2, \"loss\": null}\n{\"step\": 3}\n");
  JsonLog(t / "log").write({});
  CHECK(bytes_of(t / "log") == "{}\n");
  write_bytes(t / "log", "{\"step\": 1");  // a process was killed here
  JsonLog(t / "log", {.append = true}).write({{"step", 2}});
  CHECK(bytes_of(t / "log") == "{\"step\": 1\n{\"step\": 2}\n");
}

TEST_CASE("CSV") {
  const Temporary t;
  {
    CsvLog log(t / "log");
    log.write({{"step", 1}, {"loss", 0.25}, {"note, long", "say \"hi\""}, {"", {}}});
    log.write({{"step", 2}, {"loss", not_a_number}, {"note, long", "a\nb"}, {"", -infinite}});
    CHECK(error_of(
              [&] {
                log.write({{"step", 3}});
              },
              t.folder) == "log: its columns are step,loss,\"note, long\",, the record has step");
  }
  const std::string text = "step,loss,\"note, long\",\n1,0.25,\"say \"\"hi\"\"\",\n2,nan,\"a\nb\",-inf\n";
  CHECK(bytes_of(t / "log") == text);
  CsvLog more(t / "log", {.append = true});
  CHECK(error_of([&] { more.write({{"step", 3}}); }).find("its columns are") != std::string::npos);
  more.write({{"step", 3}, {"loss", 1}, {"note, long", true}, {"", 0}});
  CHECK(bytes_of(t / "log") == text + "3,1,true,0\n");
  CsvLog fresh(t / "fresh", {.append = true});
  fresh.write({{"a", 1}});
  CHECK(bytes_of(t / "fresh") == "a\n1\n");
}

TEST_CASE("a log on a full disk says so") {
  if (!std::filesystem::exists("/dev/full")) HT_SKIP("no /dev/full");
  JsonLog log("/dev/full");
  CHECK(error_of([&] { log.write({}); }) == "/dev/full: cannot write: No space left on device");
  CHECK(error_of([&] { CsvLog("no/folder"); }) == "no/folder: cannot open for writing: No such file or directory");
}

TEST_CASE("a chart has a line for each curve, ticks at round numbers, a legend") {
  Curve down{"fp32", {}}, other{"bf16 <mixed>", {}};
  for (int i = 0; i < 40; ++i) {
    down.y.push_back(2.3 * std::exp(-i / 12.0));
    other.y.push_back(2.2 * std::exp(-i / 14.0) + 0.02 * std::sin(i));
  }
  const std::string svg = line_chart({down, other}, {.title = "Loss & co", .x_label = "step", .y_label = "loss"});
  CHECK(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  CHECK(svg.ends_with("</svg>\n"));
  CHECK(count(svg, "<polyline") == 2);
  CHECK(count(svg, "Loss &amp; co") == 1);
  CHECK(count(svg, "bf16 &lt;mixed>") == 1);
  for (const char* tick : {">0.0<", ">0.5<", ">2.5<", ">10<", ">40<"}) CHECK(count(svg, tick) == 1);
}

TEST_CASE("names that do not fit beside each other begin new rows of the legend, and the chart is higher") {
  std::vector<Curve> curves(8, {"a curve with a name", {1, 2}});
  const std::string svg = line_chart(curves, {.width = 600});  // three in a row
  for (int row : {0, 1, 2}) CHECK(count(svg, text::cat("y=\"", 24 + 18 * row, ".0\" text-anchor=\"start\"")) == (row < 2 ? 3 : 2));
  CHECK(svg.find("width=\"600\" height=\"456\"") != std::string::npos);
}

TEST_CASE("a name takes the room of its characters, whatever their bytes") {
  auto rows = [](const char* name) {
    const std::string svg = line_chart(std::vector<Curve>(8, {name, {1, 2}}), {.width = 600});
    return count(svg, "y=\"24.0\" text-anchor=\"start\"");  // in the first row
  };
  CHECK(rows("обучение") == rows("training"));
}

TEST_CASE("gaps split a curve, and a lone point is a dot") {
  const std::string svg = line_chart({{"a", {1, 2, not_a_number, 3, infinite, 1, 2}}});
  CHECK(count(svg, "<polyline") == 2);
  CHECK(count(svg, "<circle") == 1);
}

TEST_CASE("any values make a chart") {
  const std::vector<std::vector<double>> all = {{},
                                                {not_a_number},
                                                {5},
                                                {0, 0},
                                                {-3, -3, -3},
                                                {1e-300, 2e-300},
                                                {-1e299, 1e299},
                                                {1e308, -1e308},
                                                {1e17, 1e17 + 16},
                                                {1e7, 3e7},
                                                {1e-9, 5e-9}};
  for (const auto& y : all)
    for (const bool log_y : {false, true}) {
      const std::string svg = line_chart({{"a", y}}, {.log_y = log_y});
      INFO(svg);
      CHECK(svg.find("nan") == std::string::npos);
      CHECK(svg.find("inf") == std::string::npos);
      CHECK(svg.size() < 10000);
    }
  CHECK(count(line_chart({{"a", {0.001, 1, 1000}}}, {.log_y = true}), "<line") >= 8);
  CHECK(count(line_chart({}), "<polyline") == 0);
}

TEST_CASE("a long curve is thinned without losing its peaks") {
  Curve c{"a", std::vector<double>(100000, 1.0)};
  c.y[54321] = 10;
  const std::string svg = line_chart({c});
  CHECK(svg.size() < 60000);
  CHECK(svg.find(",44.0") != std::string::npos);  // the top of the plot
}

TEST_CASE("what is no chart is refused") {
  CHECK(error_of([] { line_chart({{"a", {1, 2}, {1}}}); }) == "line_chart: curve 'a' has 1 values of x and 2 of y");
  CHECK(error_of([] { line_chart({}, {.width = 10}); }) ==
        "line_chart: expected at least 200 x 150 pixels, got 10 x 420");
}

TEST_CASE("bars as long as their values, in groups, with their notes and a mark") {
  const std::string svg = bar_chart(
      {{"mlp & co", {{"fp32", 1, "2.0 ms"}, {"bf16 <mixed>", 2.5, "0.8 ms", 1}}}, {"nothing", {{"no value", not_a_number}, {"too much", infinite}}}},
      {.title = "Speed", .x_label = "times", .mark = 1});
  CHECK(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  CHECK(svg.ends_with("</svg>\n"));
  CHECK(count(svg, "rx=\"1.5\"") == 4);
  for (const char* text : {">mlp &amp; co<", ">bf16 &lt;mixed><", ">0.8 ms<", ">Speed<", ">times<", ">2.5<"}) CHECK(count(svg, text) == 1);
  const auto width = [&](const char* color) {  // of the first bar of a colour
    const size_t at = svg.rfind("width=\"", svg.find(std::string("height=\"14\" rx=\"1.5\" fill=\"") + color)) + 7;
    return std::stod(svg.substr(at));
  };
  CHECK(std::abs(width("#d55e00") / width("#0072b2") - 2.5) < 0.01);
  CHECK(count(svg, "stroke=\"#333333\"") == 1);
  CHECK(svg.find("nan") == std::string::npos);
  CHECK(count(bar_chart({}), "rx=") == 0);
  CHECK(error_of([] { bar_chart({}, {.width = 100}); }) == "bar_chart: expected a width of at least 300 pixels, got 100");
}
