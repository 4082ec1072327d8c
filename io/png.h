#pragma once
// Images as PNG, without a library: the pixels are stored, not compressed.
#include <string>

#include "halftone/core/tensor.h"

namespace halftone::io {

// The bytes of a PNG file. image [channels, h, w] (u8): 1 channel is gray, 2 gray and alpha, 3 red, green, blue, 4 with alpha.
HT_API std::string encode_png(const Tensor& image);
// Replaces the file by it.
HT_API void save_png(const std::string& path, const Tensor& image);

}  // namespace halftone::io
