// PNG (ISO/IEC 15948) around a zlib stream (RFC 1950) of stored blocks (RFC 1951, 3.2.4).
#include "halftone/io/png.h"

#include <algorithm>

#include "halftone/io/crc.h"
#include "halftone/io/file.h"

namespace halftone::io {
namespace {

void big_endian(std::string& to, uint32_t v) {
  for (int shift = 24; shift >= 0; shift -= 8) to += static_cast<char>(v >> shift);
}
void chunk(std::string& to, const char* type, const std::string& content) {
  big_endian(to, static_cast<uint32_t>(content.size()));
  const std::string checked = type + content;
  to += checked;
  big_endian(to, crc32(checked.data(), checked.size()));
}

uint32_t adler32(const std::string& bytes) {
  constexpr uint32_t prime = 65521;
  uint32_t a = 1, b = 0;
  for (const char c : bytes) {
    a = (a + static_cast<uint8_t>(c)) % prime;
    b = (b + a) % prime;
  }
  return b << 16 | a;
}
std::string stored(const std::string& bytes) {
  constexpr size_t longest = 65535;
  std::string z = "\x78\x01";
  for (size_t at = 0; at == 0 || at < bytes.size(); at += longest) {
    const auto n = static_cast<uint32_t>(std::min(longest, bytes.size() - at));
    z += static_cast<char>(bytes.size() - at <= longest);  // whether it is the last block
    for (const uint32_t v : {n, n >> 8, ~n, ~n >> 8}) z += static_cast<char>(v);
    z.append(bytes, at, n);
  }
  big_endian(z, adler32(bytes));
  return z;
}

}  // namespace

std::string encode_png(const Tensor& image) {
  HT_CHECK(image.rank() == 3 && image.dtype() == DType::u8 && image.size(0) >= 1 && image.size(0) <= 4 && image.numel() > 0,
           "encode_png: expected an image [1 to 4, h, w] (u8), got ", image.meta());
  const int64_t channels = image.size(0), h = image.size(1), w = image.size(2), row = w * channels;
  constexpr int64_t largest = int64_t{1} << 30;  // a chunk's length has 31 bits
  HT_CHECK(h * (row + 1) < largest, "encode_png: the image ", image.meta(), " is too large for one chunk of PNG");
  const Tensor host = to_host(image.detach().permute({1, 2, 0}), "encode_png");
  std::string lines;
  for (int64_t y = 0; y < h; ++y) {
    lines += '\0';  // no filter
    lines.append(static_cast<const char*>(host.raw_data()) + y * row, static_cast<size_t>(row));
  }
  constexpr char kinds[] = {0, 4, 2, 6};
  std::string header;
  big_endian(header, static_cast<uint32_t>(w));
  big_endian(header, static_cast<uint32_t>(h));
  header += {8, kinds[channels - 1], 0, 0, 0};
  std::string png = "\x89PNG\r\n\x1a\n";
  chunk(png, "IHDR", header);
  chunk(png, "IDAT", stored(lines));
  chunk(png, "IEND", "");
  return png;
}

void save_png(const std::string& path, const Tensor& image) { replace_file(path, encode_png(image)); }

}  // namespace halftone::io
