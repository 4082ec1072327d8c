#pragma once
// Line charts as SVG: loss curves and the like, without a plotting library.
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
  int width = 720, height = 420;  // pixels
};

// The chart as SVG text. Throws Error when a curve's x and y have different lengths, or the size is below 200 x 150.
HT_API std::string line_chart(const std::vector<Curve>& curves, const ChartOptions& options = {});
// Replaces the file by it.
HT_API void save_chart(const std::string& path, const std::vector<Curve>& curves, const ChartOptions& options = {});

}  // namespace halftone::io
