#pragma once
// TensorBoard: event files that the real TensorBoard reads, written without protobuf.
//
//   io::TensorBoard board("runs/amp");
//   board.scalar("loss", loss, step);
#include <functional>
#include <string>
#include <string_view>

#include "halftone/core/tensor.h"
#include "halftone/io/file.h"

namespace halftone::io {

struct TensorBoardOptions {
  std::string suffix = {};            // of the file's name
  std::function<double()> clock = {};  // seconds since 1970; by default the system's
};

// One event file in a folder, which is made where it is missing; runs are compared by their folders. What was written is on its way to
// the disk when a call returns. Throws FileError when the file cannot be written.
class HT_API TensorBoard {
 public:
  explicit TensorBoard(const std::string& folder, TensorBoardOptions options = {});
  const std::string& path() const { return file_.path(); }

  void scalar(std::string_view tag, double value, int64_t step);
  // Of one element; waits for the device.
  void scalar(std::string_view tag, const Tensor& value, int64_t step);
  // How values of any shape are distributed, in 30 buckets of equal width; NaN and infinities are left out. Waits for the device.
  void histogram(std::string_view tag, const Tensor& values, int64_t step);
  // Shown as Markdown.
  void text(std::string_view tag, std::string_view markdown, int64_t step);
  // [channels, h, w], 1 channel for gray, 3 for colour, 2 and 4 with alpha; u8, or floats from 0 to 1. Waits for the device.
  void image(std::string_view tag, const Tensor& image, int64_t step);

 private:
  void record(std::string_view event) const;
  void write(std::string_view value, int64_t step) const;
  std::function<double()> clock_;
  OpenFile file_;
};

}  // namespace halftone::io
