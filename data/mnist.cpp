// The four files of MNIST as tensors.
#include "halftone/data/mnist.h"

#include <array>
#include <filesystem>

#include "halftone/data/idx.h"

namespace halftone::data {
namespace {

namespace fs = std::filesystem;

constexpr int64_t side = 28, classes = 10;

std::string find(const std::string& folder, const std::string& name) {
  constexpr std::string_view cure =
      "; for Fashion-MNIST install Debian's package dataset-fashion-mnist and use /usr/share/datasets/fashion-mnist, "
      "or put "
      "the four .gz files of https://github.com/zalandoresearch/fashion-mnist into a folder";
  std::error_code error;
  HT_CHECK(fs::is_directory(folder, error), folder, ": there is no such folder", cure);
  for (const char* suffix : {"", ".gz"}) {
    const std::string path = (fs::path(folder) / (name + suffix)).string();
    if (fs::exists(path, error)) return path;
  }
  throw Error(text::cat(folder, ": has no ", name, " and no ", name, ".gz", cure));
}

Tensor images(const std::string& path, const MnistOptions& o) {
  const Tensor pixels = read_idx(path);
  const Shape& s = pixels.shape();
  HT_CHECK(pixels.dtype() == DType::u8 && s.rank() == 3 && s[1] == side && s[2] == side, path,
           ": expected images [n, 28, 28] (u8), got ", pixels.meta());
  HT_CHECK(s[0] > 0, path, ": holds no images");
  std::array<float, 256> value;
  for (size_t i = 0; i < value.size(); ++i)
    value[i] = static_cast<float>((static_cast<double>(i) / 255 - o.mean) / o.std);
  Tensor x = Tensor::empty(Meta({s[0], 1, side, side}, DType::f32, Device::cpu()));
  const auto* from = pixels.data<uint8_t>();
  float* to = x.data<float>();
  for (int64_t i = 0; i < pixels.numel(); ++i) to[i] = value[from[i]];
  return x;
}

Tensor labels(const std::string& path) {
  const Tensor bytes = read_idx(path);
  HT_CHECK(bytes.dtype() == DType::u8 && bytes.rank() == 1, path, ": expected labels [n] (u8), got ", bytes.meta());
  Tensor target = Tensor::empty(Meta(bytes.shape(), DType::i64, Device::cpu()));
  const auto* from = bytes.data<uint8_t>();
  auto* to = target.data<int64_t>();
  for (int64_t i = 0; i < bytes.numel(); ++i) {
    HT_CHECK(from[i] < classes, path, ": expected labels of 0 to 9, got ", from[i], " for image ", i);
    to[i] = from[i];
  }
  return target;
}

}  // namespace

TensorDataset mnist(const std::string& folder, const MnistOptions& options) {
  HT_CHECK(options.std > 0, "mnist: expected std above 0, got ", options.std);
  const std::string set = options.train ? "train" : "t10k";
  const std::string image_path = find(folder, set + "-images-idx3-ubyte"),
                    label_path = find(folder, set + "-labels-idx1-ubyte");
  Tensor x = images(image_path, options), target = labels(label_path);
  HT_CHECK(x.size(0) == target.size(0), label_path, ": expected ", x.size(0),
           " labels, as many as there are images, got ", target.size(0));
  return {std::move(x), std::move(target)};
}

}  // namespace halftone::data
