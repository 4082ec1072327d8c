// Netpbm's binary forms, the choice of a format by a file's first bytes, and folders.
#include "halftone/data/image.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>

#include "halftone/core/backend.h"
#include "halftone/core/thread_state.h"
#include "halftone/data/source.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/resize.h"
#include "halftone/ops/shape.h"
#include "halftone/ops/unary.h"

namespace halftone::data {
namespace {

namespace fs = std::filesystem;

detail::ReadPng the_read_png = nullptr;

// The numbers of a Netpbm header: decimal, apart by white space and comments.
class PnmHeader {
 public:
  PnmHeader(const std::string& bytes, const std::string& path) : bytes_(bytes), path_(path) {}
  int64_t number(const char* what, int64_t most) {
    skip();
    int64_t n = 0;
    const size_t begin = at_;
    for (; at_ < bytes_.size() && is_digit(bytes_[at_]); ++at_) {
      n = n * 10 + (bytes_[at_] - '0');
      HT_CHECK(n <= most, path_, ": its ", what, " is beyond ", most);
    }
    HT_CHECK(at_ > begin && n > 0, path_, ": expected a ", what, " above 0 in its header");
    return n;
  }
  // Where the pixels begin: one blank after the last number.
  size_t end() const {
    HT_CHECK(at_ < bytes_.size() && is_blank(bytes_[at_]), path_, ": ends within its header");
    return at_ + 1;
  }

 private:
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }
  static bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
  void skip() {
    for (; at_ < bytes_.size(); ++at_) {
      if (bytes_[at_] == '#')
        at_ = std::min(bytes_.find('\n', at_), bytes_.size() - 1);
      else if (!is_blank(bytes_[at_]))
        return;
    }
  }
  const std::string& bytes_;
  const std::string& path_;
  size_t at_ = 2;
};

Tensor read_pnm(const std::string& bytes, const std::string& path) {
  PnmHeader header(bytes, path);
  constexpr int64_t largest = 1'000'000;
  const int64_t channels = bytes[1] == '6' ? 3 : 1, w = header.number("width", largest), h = header.number("height", largest),
                most = header.number("largest value", 65535), width = most > 255 ? 2 : 1, samples = h * w * channels;
  const size_t begin = header.end();
  const auto found = static_cast<int64_t>(bytes.size() - begin);
  HT_CHECK(found == samples * width, path, ": expected ", samples * width, " bytes of pixels for ", h, " x ", w, " with ", channels,
           channels == 1 ? " channel" : " channels", ", got ", found);
  Tensor t = Tensor::empty(Meta({channels, h, w}, DType::u8, Device::cpu()));
  auto* to = t.data<uint8_t>();
  const auto sample = [&](int64_t i) -> int64_t {
    const auto* at = reinterpret_cast<const uint8_t*>(bytes.data() + begin) + i * width;
    return width == 1 ? at[0] : at[0] << 8 | at[1];
  };
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t i = 0; i < h * w; ++i) {
      const int64_t v = sample(i * channels + c);
      HT_CHECK(v <= most, path, ": has a sample of ", v, ", above its largest value ", most);
      *to++ = static_cast<uint8_t>((v * 255 + most / 2) / most);
    }
  return t;
}

bool is_image(const fs::path& path) {
  std::string kind = path.extension().string();
  std::transform(kind.begin(), kind.end(), kind.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return kind == ".png" || kind == ".ppm" || kind == ".pgm" || kind == ".pnm";
}

// u8 -> u8 through f32, which ops work in; to the nearest number.
Tensor rounded(const Tensor& x) { return round(clamp(x, 0, 255)).to(DType::u8); }

}  // namespace

namespace detail {
void set_read_png(ReadPng read) { the_read_png = read; }
}  // namespace detail

Tensor read_image(const std::string& path) {
  ensure_backends();  // libpng's part registers itself there
  const std::string bytes = read_all(*open_source(path));
  if (bytes.starts_with("\x89PNG")) {
    HT_CHECK(the_read_png, path, ": is PNG, and this build has no libpng; configure with -DHALFTONE_PNG=ON, or convert it to PPM");
    return the_read_png(bytes, path);
  }
  HT_CHECK(bytes.starts_with("P5") || bytes.starts_with("P6"), path, ": not an image; expected PNG, PGM (P5) or PPM (P6)");
  return read_pnm(bytes, path);
}

void write_pnm(const std::string& path, const Tensor& image) {
  HT_CHECK(image.rank() == 3 && (image.size(0) == 1 || image.size(0) == 3) && image.dtype() == DType::u8 && image.numel() > 0,
           "write_pnm: expected an image [1 or 3, h, w] (u8), got ", image.meta());
  const int64_t channels = image.size(0), h = image.size(1), w = image.size(2);
  const Tensor host = to_host(image.detach().permute({1, 2, 0}), "write_pnm");
  std::ofstream file(path, std::ios::binary);
  file << "P" << (channels == 3 ? 6 : 5) << "\n" << w << " " << h << "\n255\n";
  file.write(static_cast<const char*>(host.raw_data()), host.numel());
  file.close();  // reports what a buffer held back
  HT_CHECK(file, path, ": cannot be written");
}

ImageFolder::ImageFolder(const std::string& folder, ImageFolderOptions options) : options_(options) {
  HT_CHECK(options_.channels == 1 || options_.channels == 3, "ImageFolder: expected 1 or 3 channels, got ", options_.channels);
  std::error_code error;
  HT_CHECK(fs::is_directory(folder, error), folder, ": there is no such folder");
  std::vector<fs::path> subfolders;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.is_directory()) subfolders.push_back(entry.path());
  std::sort(subfolders.begin(), subfolders.end());
  for (const auto& sub : subfolders) {
    std::vector<std::string> images;
    for (const auto& entry : fs::recursive_directory_iterator(sub))
      if (entry.is_regular_file() && is_image(entry.path())) images.push_back(entry.path().string());
    if (images.empty()) continue;
    std::sort(images.begin(), images.end());
    for (auto& path : images) files_.push_back({std::move(path), static_cast<int64_t>(classes_.size())});
    classes_.push_back(sub.filename().string());
  }
  HT_CHECK(!files_.empty(), folder, ": expected a subfolder for each class, with .png, .ppm or .pgm images in it");
}

Tensor ImageFolder::read(const std::string& path) const {
  Tensor x = read_image(path);
  const bool gray = x.size(0) == 1;
  if (gray && options_.channels == 3) x = x.expand({3, x.size(1), x.size(2)});
  if (!gray && options_.channels == 1) x = rounded((x.to(DType::f32) * tensor({.299f, .587f, .114f}).view({3, 1, 1})).sum(0, {.keepdim = true}));
  if (options_.size && !(x.size(1) == options_.size->h && x.size(2) == options_.size->w))
    x = rounded(resize(x.to(DType::f32).unsqueeze(0), *options_.size, {.mode = Interpolation::bilinear})).squeeze(0);
  return x;
}

Batch ImageFolder::get(std::span<const int64_t> indices) const {
  check_indices("ImageFolder", indices, size());
  HT_CHECK(!indices.empty(), "ImageFolder: expected at least one index");
  const NoGrad off;
  std::vector<Tensor> images;
  Tensor target = Tensor::empty(Meta({static_cast<int64_t>(indices.size())}, DType::i64, Device::cpu()));
  for (size_t i = 0; i < indices.size(); ++i) {
    const File& file = files_[static_cast<size_t>(indices[i])];
    images.push_back(read(file.path));
    HT_CHECK(images[i].shape() == images[0].shape(), file.path, ": expected an image of ", images[0].shape(), " like the others of the batch, got ",
             images[i].shape(), "; ImageFolder's .size makes all equal");
    target.data<int64_t>()[i] = file.label;
  }
  return {stack(images), std::move(target)};
}

}  // namespace halftone::data
