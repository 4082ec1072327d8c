// Decompression through zlib, in a stream: never more is held than one buffer, whatever a file claims.
#include <zlib.h>

#include <algorithm>
#include <array>

#include "halftone/core/shape.h"
#include "halftone/data/source.h"

namespace halftone {
namespace data {
namespace {

class GzipFile final : public Source {
 public:
  GzipFile(std::unique_ptr<Source> file, std::string path) : file_(std::move(file)), path_(std::move(path)) {
    constexpr int gzip_format = 16;
    HT_CHECK(inflateInit2(&stream_, gzip_format + MAX_WBITS) == Z_OK, path_, ": out of memory for decompression");
  }
  ~GzipFile() override { inflateEnd(&stream_); }

  size_t read(void* to, size_t bytes) override {
    auto* at = static_cast<unsigned char*>(to);
    size_t done = 0;
    while (done < bytes && !over_) {
      const size_t room = std::min(bytes - done, size_t{1} << 30);
      stream_.next_out = at + done;
      stream_.avail_out = static_cast<uInt>(room);
      step();
      done += room - stream_.avail_out;
    }
    return done;
  }
  int64_t most_bytes() const override {
    constexpr int64_t greatest_ratio = 1032;  // of the format: 258 bytes from two bits
    return checked_mul(file_->most_bytes(), greatest_ratio);
  }

 private:
  // Decompresses until there is output, more input is needed, or a part of the file is over.
  void step() {
    HT_CHECK(more_input(), path_, ": its compressed data end too early; the file is truncated");
    const int result = inflate(&stream_, Z_NO_FLUSH);
    if (result == Z_STREAM_END)
      next_part();
    else
      HT_CHECK(result == Z_OK || result == Z_BUF_ERROR, path_, ": its compressed data are damaged");
  }
  // A .gz may be several, one after the other.
  void next_part() {
    over_ = !more_input();
    if (!over_) inflateReset(&stream_);
  }
  bool more_input() {
    if (stream_.avail_in == 0) {
      stream_.next_in = buffer_.data();
      stream_.avail_in = static_cast<uInt>(file_->read(buffer_.data(), buffer_.size()));
    }
    return stream_.avail_in > 0;
  }

  std::unique_ptr<Source> file_;
  std::string path_;
  z_stream stream_{};
  std::array<unsigned char, 1 << 16> buffer_;
  bool over_ = false;
};

std::unique_ptr<Source> gunzip(std::unique_ptr<Source> file, const std::string& path) {
  return std::make_unique<GzipFile>(std::move(file), path);
}

}  // namespace
}  // namespace data

void register_zlib();
void register_zlib() { data::set_gunzip(data::gunzip); }

}  // namespace halftone
