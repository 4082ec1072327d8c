// Records of TensorFlow's event files: a length and a message, each with a masked CRC-32C. The messages are Event, Summary and what
// they hold, by their field numbers in TensorFlow's event.proto, summary.proto and tensor.proto.
#include "halftone/io/tensorboard.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

#include "halftone/io/crc.h"
#include "halftone/io/png.h"
#include "halftone/io/proto.h"

namespace halftone::io {
namespace {

double system_clock() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// TensorBoard reads files whose names hold "tfevents"; time, process and number tell runs in one folder apart.
std::string file_name(const TensorBoardOptions& options) {
  static std::atomic<int> count{0};
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '?';
  return text::cat("events.out.tfevents.", static_cast<int64_t>(options.clock ? options.clock() : system_clock()), ".", host.data(), ".",
                   static_cast<int64_t>(::getpid()), ".", count++, options.suffix);
}
std::string in_folder(const std::string& folder, const TensorBoardOptions& options) {
  make_folders(folder);
  return folder + "/" + file_name(options);
}

template <class T>
void put(std::string& to, T v) {
  to.append(reinterpret_cast<const char*>(&v), sizeof v);
}
uint32_t masked_crc(std::string_view bytes) {
  const uint32_t c = crc32c(bytes.data(), bytes.size());
  return (c >> 15 | c << 17) + 0xa282ead8u;
}

// HistogramProto.
Message histogram_of(const Tensor& values) {
  constexpr int buckets = 30;
  double least = INFINITY, most = -INFINITY, sum = 0, squares = 0, count = 0;
  const std::vector<double> all = values.to_vector<double>();
  for (const double v : all) {
    if (!std::isfinite(v)) continue;
    least = std::min(least, v);
    most = std::max(most, v);
    sum += v;
    squares += v * v;
    ++count;
  }
  std::vector<double> limits, counts;
  if (count > 0) {
    const double width = most / buckets - least / buckets;  // the difference alone may not be finite
    const int n = width > 0 ? buckets : 1;
    counts.assign(static_cast<size_t>(n), 0);
    for (int i = 1; i <= n; ++i) limits.push_back(i == n ? most : least + width * i);
    for (const double v : all)
      if (std::isfinite(v)) ++counts[n == 1 ? 0 : static_cast<size_t>(std::clamp((v / width - least / width), 0., buckets - 1.))];
  }
  Message m;
  m.number(1, count > 0 ? least : 0.).number(2, count > 0 ? most : 0.).number(3, count).number(4, sum).number(5, squares);
  return m.packed_doubles(6, limits).packed_doubles(7, counts);
}

// Pixels of any dtype as bytes.
Tensor pixels(const Tensor& image) {
  HT_CHECK(image.dtype() == DType::u8 || is_floating(image.dtype()), "TensorBoard: expected an image of u8 or floats, got ", image.meta());
  if (image.dtype() == DType::u8) return image;
  const std::vector<float> values = image.detach().to_vector<float>();
  Tensor bytes = Tensor::empty(Meta(image.shape(), DType::u8, Device::cpu()));
  auto* to = bytes.data<uint8_t>();
  for (const float v : values) *to++ = static_cast<uint8_t>(std::isnan(v) ? 0 : std::lround(std::clamp(v, 0.f, 1.f) * 255));
  return bytes;
}

}  // namespace

TensorBoard::TensorBoard(const std::string& folder, TensorBoardOptions options)
    : clock_(options.clock ? options.clock : system_clock), file_(in_folder(folder, options), FileOps::Open::append) {
  record(Message().number(1, clock_()).bytes(3, "brain.Event:2"));
}

void TensorBoard::record(std::string_view event) const {
  std::string bytes;
  put(bytes, uint64_t{event.size()});
  put(bytes, masked_crc(bytes));
  bytes += event;
  put(bytes, masked_crc(event));
  file_.write(bytes);
}
void TensorBoard::write(std::string_view value, int64_t step) const {
  record(Message().number(1, clock_()).integer(2, step).bytes(5, Message().bytes(1, value)));
}

void TensorBoard::scalar(std::string_view tag, double value, int64_t step) {
  write(Message().bytes(1, tag).number(2, static_cast<float>(value)), step);
}
void TensorBoard::scalar(std::string_view tag, const Tensor& value, int64_t step) { scalar(tag, value.item(), step); }

void TensorBoard::histogram(std::string_view tag, const Tensor& values, int64_t step) {
  write(Message().bytes(1, tag).bytes(5, histogram_of(values.detach())), step);
}

void TensorBoard::text(std::string_view tag, std::string_view markdown, int64_t step) {
  constexpr int string_type = 7;
  const Message shape = Message().bytes(2, Message().integer(1, 1));
  const Message tensor = Message().integer(1, string_type).bytes(2, shape).bytes(8, markdown);
  const Message plugin = Message().bytes(1, Message().bytes(1, "text"));
  write(Message().bytes(1, tag).bytes(8, tensor).bytes(9, plugin), step);
}

void TensorBoard::image(std::string_view tag, const Tensor& image, int64_t step) {
  const std::string png = encode_png(pixels(image));
  const Message content = Message().integer(1, image.size(1)).integer(2, image.size(2)).integer(3, image.size(0)).bytes(4, png);
  write(Message().bytes(1, tag).bytes(4, content), step);
}

}  // namespace halftone::io
