// A chart is drawn top down: title, legend, grid with ticks at round numbers, curves. Numbers are written without the
// locale, and nothing depends on how far apart or how extreme the values are.
#include "halftone/io/chart.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "halftone/io/file.h"
#include "halftone/io/utf8.h"

namespace halftone::io {
namespace {

// Told apart in most kinds of colour blindness (Okabe and Ito, "Color universal design", 2008).
constexpr std::array<const char*, 7> palette = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                "#e69f00", "#56b4e9", "#333333"};
constexpr double largest = 1e300;  // what is beyond is a gap, like infinity: differences stay finite

std::string number(double v, int decimals) {
  std::array<char, 400> text;
  const auto r = std::to_chars(text.data(), text.data() + text.size(), v, std::chars_format::fixed, decimals);
  return {text.data(), r.ptr};
}
std::string px(double v) { return number(v, 1); }

std::string escaped(const std::string& s) {
  std::string r;
  for (char c : s) {
    if (c == '<')
      r += "&lt;";
    else if (c == '&')
      r += "&amp;";
    else if (c == '"')
      r += "&quot;";
    else
      r += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return r;
}

struct Tick {
  double at;
  std::string label;
};

// One axis: from values to pixels, and its ticks.
class Axis {
 public:
  // `round`: widen the range to whole ticks.
  Axis(double low, double high, bool logarithmic, bool round, int most_ticks) : log_(logarithmic) {
    if (!(low <= high)) low = log_ ? 1 : 0, high = log_ ? 10 : 1;  // no value at all
    low_ = scale(low), high_ = scale(high);
    const double magnitude = std::max(std::abs(low_), std::abs(high_));
    if (high_ - low_ <= 1e-9 * magnitude || high_ == low_) {
      const double margin = log_ ? 0.5 : magnitude > 0 ? magnitude / 10 : 1;
      low_ -= margin, high_ += margin;
    }
    step_ = round_step((high_ - low_) / most_ticks);
    if (log_) step_ = std::max(1.0, step_);
    if (round) low_ = std::floor(low_ / step_) * step_, high_ = std::ceil(high_ / step_) * step_;
  }
  bool shows(double v) const { return std::abs(v) < largest && (!log_ || v > 0); }
  // 0 at the low end, 1 at the high.
  double place(double v) const { return (scale(v) - low_) / (high_ - low_); }
  std::vector<Tick> ticks() const {
    std::vector<Tick> all;
    const double first = std::ceil(low_ / step_ - 1e-9);
    for (int i = 0; i < 30 && (first + i) * step_ <= high_ + 1e-9 * step_; ++i) {
      const double v = (first + i) * step_;
      all.push_back({(v - low_) / (high_ - low_), label(v)});
    }
    return all;
  }

 private:
  double scale(double v) const { return log_ ? std::log10(v) : v; }
  // 1, 2 or 5 times a power of ten, the least that is not below `v`.
  static double round_step(double v) {
    const double power = std::pow(10, std::floor(std::log10(v)));
    for (double factor : {1.0, 2.0, 5.0})
      if (factor * power >= v * (1 - 1e-9)) return factor * power;
    return 10 * power;
  }
  std::string label(double v) const {
    const double value = log_ ? std::pow(10, v) : v == 0 ? 0 : v, size = std::max(std::abs(value), log_ ? 0 : step_);
    if (size >= 1e6 || (size < 1e-3 && size > 0)) {
      std::array<char, 32> text;
      const auto r = std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::general, 4);
      return {text.data(), r.ptr};
    }
    const double spacing = log_ ? value : step_;
    return number(value, static_cast<int>(std::max(0.0, -std::floor(std::log10(spacing) + 1e-9))));
  }

  bool log_;
  double low_, high_, step_;
};

struct Point {
  double x, y;
};

// Of all points within one pixel column the first, lowest, highest and last, which draw the same picture.
std::vector<Point> thinned(const std::vector<Point>& points) {
  std::vector<Point> kept;
  for (size_t begin = 0, end; begin < points.size(); begin = end) {
    end = begin + 1;
    while (end < points.size() && std::floor(points[end].x) == std::floor(points[begin].x)) ++end;
    auto [low, high] = std::minmax_element(points.begin() + static_cast<std::ptrdiff_t>(begin),
                                           points.begin() + static_cast<std::ptrdiff_t>(end),
                                           [](const Point& a, const Point& b) { return a.y < b.y; });
    std::array<size_t, 4> keep = {begin, static_cast<size_t>(low - points.begin()),
                                  static_cast<size_t>(high - points.begin()), end - 1};
    std::sort(keep.begin(), keep.end());
    for (size_t i = 0; i < keep.size(); ++i)
      if (i == 0 || keep[i] != keep[i - 1]) kept.push_back(points[keep[i]]);
  }
  return kept;
}

// SVG text under way.
class Drawing {
 protected:
  template <class... A>
  void add(const A&... a) {
    svg_ += text::cat(a...);
  }
  void head(int width, int height) {
    add("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", width, " ", height, "\" width=\"", width, "\" height=\"", height,
        "\" font-family=\"system-ui, Helvetica, Arial, sans-serif\" font-size=\"12\">\n",
        "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n");
  }
  void text(double x, double y, const char* anchor, const std::string& s, const std::string& style) {
    add("<text x=\"", px(x), "\" y=\"", px(y), "\" text-anchor=\"", anchor, "\" ", style, ">", escaped(s), "</text>\n");
  }
  void title(double x, const std::string& s) {
    if (!s.empty()) text(x, 28, "start", s, "font-size=\"16\" font-weight=\"600\" fill=\"#222222\"");
  }
  void line(double x0, double y0, double x1, double y1, const char* color) {
    add("<line x1=\"", px(x0), "\" y1=\"", px(y0), "\" x2=\"", px(x1), "\" y2=\"", px(y1), "\" stroke=\"", color,
        "\"/>\n");
  }
  static constexpr const char *grey = "fill=\"#666666\"", *black = "fill=\"#333333\"", *grid = "#e6e6e6", *axis = "#999999";
  std::string svg_;
};

class Chart : Drawing {
 public:
  Chart(const std::vector<Curve>& curves, const ChartOptions& o)
      : curves_(curves),
        o_(o),
        height_(o.height),
        top_(o.title.empty() ? 44 : 68),
        right_(o.width - 24),
        bottom_(o.height - (o.x_label.empty() ? 36 : 56)),
        left_(o.y_label.empty() ? 60 : 80),
        x_(0, 0, false, false, 1),
        y_(0, 0, false, false, 1) {
    place_names();
    double low[2] = {INFINITY, INFINITY}, high[2] = {-INFINITY, -INFINITY};
    for (const Curve& c : curves) {
      for (size_t i = 0; i < c.y.size(); ++i) {
        const double at[2] = {x_of(c, i), c.y[i]};
        if (!(std::abs(at[0]) < largest && std::abs(at[1]) < largest && (!o.log_y || at[1] > 0))) continue;
        for (int a = 0; a < 2; ++a) low[a] = std::min(low[a], at[a]), high[a] = std::max(high[a], at[a]);
      }
    }
    x_ = Axis(low[0], high[0], false, false, std::max(2, (right_ - left_) / 90));
    y_ = Axis(low[1], high[1], o.log_y, true, std::max(2, (bottom_ - top_) / 50));
  }

  std::string svg() {
    head(o_.width, height_);
    title(left_, o_.title);
    legend(o_.title.empty() ? 24 : 50);
    axes();
    for (size_t i = 0; i < curves_.size(); ++i) draw(curves_[i], palette[i % palette.size()]);
    add("</svg>\n");
    return std::move(svg_);
  }

 private:
  static double x_of(const Curve& c, size_t i) { return c.x.empty() ? static_cast<double>(i + 1) : c.x[i]; }
  double across(double share) const { return left_ + share * (right_ - left_); }
  double up(double share) const { return bottom_ - share * (bottom_ - top_); }

  // In rows, as many as the names need: with more than one the chart is higher.
  void place_names() {
    constexpr int row = 18;
    Point at{static_cast<double>(left_), 0};
    for (const Curve& c : curves_) {
      const double width = 24 + 6.6 * text::columns(c.name);
      if (at.x > left_ && at.x + width > right_) at = {static_cast<double>(left_), at.y + row};
      names_.push_back(at);
      at.x += width + 24;
    }
    for (int* edge : {&top_, &bottom_, &height_}) *edge += static_cast<int>(at.y);
  }
  void legend(double top) {
    for (size_t i = 0; i < curves_.size(); ++i) {
      const double x = names_[i].x, y = top + names_[i].y;
      add("<rect x=\"", px(x), "\" y=\"", px(y - 6), "\" width=\"18\" height=\"3\" rx=\"1.5\" fill=\"",
          palette[i % palette.size()], "\"/>\n");
      text(x + 24, y, "start", curves_[i].name, "fill=\"#333333\"");
    }
  }
  void axes() {
    for (const Tick& t : y_.ticks()) {
      line(left_, up(t.at), right_, up(t.at), grid);
      text(left_ - 8, up(t.at) + 4, "end", t.label, grey);
    }
    for (const Tick& t : x_.ticks()) {
      line(across(t.at), bottom_, across(t.at), bottom_ + 5, axis);
      text(across(t.at), bottom_ + 19, "middle", t.label, grey);
    }
    line(left_, bottom_, right_, bottom_, axis);
    if (!o_.x_label.empty()) text((left_ + right_) / 2.0, height_ - 12, "middle", o_.x_label, "fill=\"#333333\"");
    if (!o_.y_label.empty()) {
      const double y = (top_ + bottom_) / 2.0;
      text(20, y, "middle", o_.y_label, "fill=\"#333333\" transform=\"rotate(-90 20 " + px(y) + ")\"");
    }
  }
  void draw(const Curve& c, const char* color) {
    std::vector<Point> run;
    for (size_t i = 0; i <= c.y.size(); ++i) {
      if (i < c.y.size() && std::abs(x_of(c, i)) < largest && y_.shows(c.y[i])) {
        run.push_back({across(x_.place(x_of(c, i))), up(y_.place(c.y[i]))});
      } else if (!run.empty()) {
        draw(thinned(run), color);
        run.clear();
      }
    }
  }
  void draw(const std::vector<Point>& run, const char* color) {
    if (run.size() == 1) {
      add("<circle cx=\"", px(run[0].x), "\" cy=\"", px(run[0].y), "\" r=\"2.5\" fill=\"", color, "\"/>\n");
      return;
    }
    add("<polyline fill=\"none\" stroke=\"", color,
        "\" stroke-width=\"1.8\" stroke-opacity=\"0.9\" stroke-linejoin=\"round\" points=\"");
    for (const Point& p : run) add(&p == &run.front() ? "" : " ", px(p.x), ",", px(p.y));
    add("\"/>\n");
  }

  const std::vector<Curve>& curves_;
  const ChartOptions& o_;
  int height_;                       // in pixels
  int top_, right_, bottom_, left_;  // of the plot
  std::vector<Point> names_;         // where the legend has them, below its top
  Axis x_, y_;
};

// Groups from top to bottom, each with its name above its bars; ticks below the last.
class Bars : Drawing {
 public:
  Bars(const std::vector<BarGroup>& groups, const BarChartOptions& o) : groups_(groups), o_(o), x_(0, 0, false, false, 1) {
    double high = std::abs(o.mark) < largest ? std::max(o.mark, 0.0) : 0;
    int letters = 0;
    for (const BarGroup& g : groups)
      for (const Bar& b : g.bars) {
        if (std::abs(b.value) < largest) high = std::max(high, b.value);
        letters = std::max(letters, text::columns(b.name));
      }
    left_ = 36 + 6.6 * letters;
    right_ = std::max(left_ + 40.0, o.width - 160.0);  // notes stand behind the bars
    x_ = Axis(0, high > 0 ? high : 1, false, true, std::max(2, static_cast<int>(right_ - left_) / 60));
  }

  std::string svg() {
    const double top = o_.title.empty() ? 16 : 44;
    double bottom = top;
    for (const BarGroup& g : groups_) bottom += group_height(g);
    head(o_.width, static_cast<int>(bottom) + (o_.x_label.empty() ? 36 : 56));
    title(24, o_.title);
    for (const Tick& t : x_.ticks()) {
      line(across(t.at), top, across(t.at), bottom, grid);
      text(across(t.at), bottom + 16, "middle", t.label, grey);
    }
    double y = top;
    for (const BarGroup& g : groups_) {
      text(24, y + 17, "start", g.name, "font-weight=\"600\" fill=\"#222222\"");
      double at = y + 24;
      for (const Bar& b : g.bars) {
        const bool shown = std::abs(b.value) < largest && b.value > 0;
        const double end = shown ? across(x_.place(b.value)) : left_;
        text(left_ - 8, at + 12, "end", b.name, black);
        add("<rect x=\"", px(left_), "\" y=\"", px(at + 1), "\" width=\"", px(end - left_), "\" height=\"14\" rx=\"1.5\" fill=\"",
            palette[b.color % palette.size()], "\"/>\n");
        text(end + 6, at + 12, "start", b.note, grey);
        at += bar;
      }
      y += group_height(g);
    }
    if (std::abs(o_.mark) < largest) line(across(x_.place(o_.mark)), top, across(x_.place(o_.mark)), bottom, "#333333");
    if (!o_.x_label.empty()) text((left_ + right_) / 2, bottom + 40, "middle", o_.x_label, black);
    add("</svg>\n");
    return std::move(svg_);
  }

 private:
  static constexpr double bar = 18;
  static double group_height(const BarGroup& g) { return 32 + bar * static_cast<double>(g.bars.size()); }
  double across(double share) const { return left_ + share * (right_ - left_); }

  const std::vector<BarGroup>& groups_;
  const BarChartOptions& o_;
  double left_ = 0, right_ = 0;
  Axis x_;
};

}  // namespace

std::string line_chart(const std::vector<Curve>& curves, const ChartOptions& options) {
  HT_CHECK(options.width >= 200 && options.height >= 150, "line_chart: expected at least 200 x 150 pixels, got ",
           options.width, " x ", options.height);
  for (const Curve& c : curves)
    HT_CHECK(c.x.empty() || c.x.size() == c.y.size(), "line_chart: curve '", c.name, "' has ", c.x.size(),
             " values of x and ", c.y.size(), " of y");
  return Chart(curves, options).svg();
}

std::string bar_chart(const std::vector<BarGroup>& groups, const BarChartOptions& options) {
  HT_CHECK(options.width >= 300, "bar_chart: expected a width of at least 300 pixels, got ", options.width);
  return Bars(groups, options).svg();
}

void save_chart(const std::string& path, const std::vector<Curve>& curves, const ChartOptions& options) {
  replace_file(path, line_chart(curves, options));
}
void save_chart(const std::string& path, const std::vector<BarGroup>& groups, const BarChartOptions& options) {
  replace_file(path, bar_chart(groups, options));
}

}  // namespace halftone::io
