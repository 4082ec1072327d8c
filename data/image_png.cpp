// PNG through libpng's simplified interface, whose errors come back as values.
#include <png.h>

#include "halftone/core/shape.h"
#include "halftone/data/image.h"

namespace halftone {
namespace data {
namespace {

struct Image : png_image {
  Image() : png_image{} { version = PNG_IMAGE_VERSION; }
  ~Image() { png_image_free(this); }
  Image(const Image&) = delete;
};

Tensor read_png(const std::string& bytes, const std::string& path) {
  Image image;
  HT_CHECK(png_image_begin_read_from_memory(&image, bytes.data(), bytes.size()), path, ": cannot be read as PNG: ", image.message);
  const int64_t channels = (image.format & PNG_FORMAT_FLAG_COLOR) != 0 ? 3 : 1, h = image.height, w = image.width;
  image.format = channels == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_GRAY;
  // Deflate makes at most 1032 bytes of one; a pixel may be a single bit.
  constexpr int64_t greatest_ratio = 1032, pixels_a_byte = 8;
  HT_CHECK(checked_mul(h, w) / pixels_a_byte <= checked_mul(static_cast<int64_t>(bytes.size()), greatest_ratio), path, ": claims ", h, " x ", w,
           " pixels, which a file of this size cannot hold; it is truncated or damaged");
  std::string pixels(static_cast<size_t>(checked_mul(checked_mul(h, w), channels)), '\0');
  const png_color white{255, 255, 255};
  HT_CHECK(png_image_finish_read(&image, &white, pixels.data(), 0, nullptr), path, ": cannot be read as PNG: ", image.message);
  Tensor t = Tensor::empty(Meta({channels, h, w}, DType::u8, Device::cpu()));
  auto* to = t.data<uint8_t>();
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t i = 0; i < h * w; ++i) *to++ = static_cast<uint8_t>(pixels[static_cast<size_t>(i * channels + c)]);
  return t;
}

}  // namespace
}  // namespace data

void register_png();
void register_png() { data::detail::set_read_png(data::read_png); }

}  // namespace halftone
