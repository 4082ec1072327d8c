#pragma once
// progress(range, "epoch 1"): a range that says how far a loop is. On a terminal it draws a bar, elsewhere plain lines;
// both at most so often that a loop does not notice. It never reads what the range holds.
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "halftone/core/tensor.h"

namespace halftone {

// Where progress is shown, and when it is. By default standard error; NO_COLOR and TERM=dumb are respected.
class HT_API ProgressScreen {
 public:
  bool terminal = false, color = false, unicode = false;
  ProgressScreen() = default;
  ProgressScreen(const ProgressScreen&) = delete;
  virtual ~ProgressScreen() = default;
  virtual int width() const = 0;       // columns
  virtual double seconds() const = 0;  // of a clock that only goes forward
  virtual void write(std::string_view text) = 0;
};
// Null: standard error again. The screen must outlive the loops that use it.
HT_API void set_progress_screen(ProgressScreen* screen);

// The bar without the range. Its number of steps is unknown when it is negative.
class HT_API ProgressBar {
 public:
  ProgressBar(std::string label, int64_t steps);
  ~ProgressBar();  // ends the line, where finish() did not
  ProgressBar(ProgressBar&&) noexcept;
  ProgressBar& operator=(ProgressBar&&) = delete;
  void start();    // from the first step again
  void advance();  // one step done
  void finish();   // none is left
  void show(const std::string& name, double value);
  // A tensor of one element. It is read at most ten times a second, since reading waits for the device, and never
  // under ForbidSync or capture.
  void show(const std::string& name, const Tensor& value);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// R is T& for a named range, and T for a temporary, which it then owns.
template <class R>
class Progress {
  using Range = std::remove_reference_t<R>;
  using Inner = decltype(std::begin(std::declval<Range&>()));

 public:
  Progress(R&& range, std::string label) : range_(std::forward<R>(range)), bar_(std::move(label), steps()) {}

  class iterator {
   public:
    iterator(Inner at, ProgressBar& bar) : at_(std::move(at)), bar_(&bar) {}
    decltype(auto) operator*() { return *at_; }
    iterator& operator++() {
      bar_->advance();
      ++at_;
      return *this;
    }
    template <class End>
    friend bool operator==(const iterator& i, const End& end) {
      const bool over = i.at_ == end;
      if (over) i.bar_->finish();
      return over;
    }

   private:
    Inner at_;
    ProgressBar* bar_;
  };
  iterator begin() {
    bar_.start();
    return iterator(std::begin(range_), bar_);
  }
  auto end() { return std::end(range_); }
  ProgressBar& bar() { return bar_; }

  // Shown behind the bar: bar.show("loss", loss).
  template <class V>
  Progress& show(const std::string& name, const V& value) & {
    bar_.show(name, value);
    return *this;
  }
  template <class V>
  Progress show(const std::string& name, const V& value) && {
    bar_.show(name, value);
    return std::move(*this);
  }

 private:
  int64_t steps() const {
    if constexpr (requires(const Range& r) { r.size(); })
      return static_cast<int64_t>(range_.size());
    else if constexpr (std::is_array_v<Range>)
      return static_cast<int64_t>(std::extent_v<Range>);
    else
      return -1;
  }

  R range_;
  ProgressBar bar_;
};
template <class R>
Progress<R> progress(R&& range, std::string label = {}) {
  return {std::forward<R>(range), std::move(label)};
}

}  // namespace halftone
