#pragma once
// Charts as SVG, without a plotting library: lines for loss curves and the like, bars for comparisons.
#include <limits>
#include <string>
#include <vector>

#include "halftone/core/api.h"

namespace halftone::io {

struct Curve {
  std::string name;            // in the legend
  std::vector<double> y;       // NaN and infinities are gaps
  std::vector<double> x = {};  // as long as y; empty: 1, 2, 3, ...
};
struct ChartOptions {
  std::string title = {}, x_label = {}, y_label = {};
  bool log_y = false;             // a logarithmic axis; values of 0 and less are gaps
  int width = 720, height = 420;  // pixels; 18 more in height for each row of the legend after its first
};

// The chart as SVG text. Throws Error when a curve's x and y have different lengths, or the size is below 200 x 150.
HT_API std::string line_chart(const std::vector<Curve>& curves, const ChartOptions& options = {});
// Replaces the file by it.
HT_API void save_chart(const std::string& path, const std::vector<Curve>& curves, const ChartOptions& options = {});

struct Bar {
  std::string name;
  double value = 0;       // from the axis at 0; what is not above it has no bar
  std::string note = {};  // behind the bar
  size_t color = 0;       // of the seven that curves have
};
struct BarGroup {
  std::string name;
  std::vector<Bar> bars;
};
struct BarChartOptions {
  std::string title = {}, x_label = {};
  double mark = std::numeric_limits<double>::quiet_NaN();  // a line at this value
  int width = 720;                                         // pixels; the height follows from the bars
};

// Horizontal bars, one below the other, as SVG text. Throws Error when the width is below 300.
HT_API std::string bar_chart(const std::vector<BarGroup>& groups, const BarChartOptions& options = {});
HT_API void save_chart(const std::string& path, const std::vector<BarGroup>& groups, const BarChartOptions& options = {});

}  // namespace halftone::io
