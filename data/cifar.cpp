// Records of one or two labels and 3072 pixels.
#include "halftone/data/cifar.h"

#include <cstring>
#include <filesystem>

#include "halftone/data/source.h"

namespace halftone::data {
namespace {

namespace fs = std::filesystem;

constexpr int64_t side = 32, pixels = 3 * side * side;

struct Format {
  const char* name;
  std::vector<std::string> files;
  int64_t labels, label, classes;  // bytes of labels before the pixels; which of them counts
};

std::string find(const std::string& folder, const std::string& name, const char* set) {
  std::error_code error;
  HT_CHECK(fs::is_directory(folder, error), folder, ": there is no such folder; ", set,
           " is at https://www.cs.toronto.edu/~kriz/cifar.html, in its binary version");
  for (const char* suffix : {"", ".gz"}) {
    const std::string path = (fs::path(folder) / (name + suffix)).string();
    if (fs::exists(path, error)) return path;
  }
  throw Error(text::cat(folder, ": has no ", name, "; ", set, " is at https://www.cs.toronto.edu/~kriz/cifar.html, in its binary version"));
}

TensorDataset read(const std::string& folder, const Format& f) {
  const int64_t record = f.labels + pixels;
  std::string bytes;
  for (const std::string& name : f.files) {
    const std::string path = find(folder, name, f.name);
    const std::string file = read_all(*open_source(path));
    const auto size = static_cast<int64_t>(file.size());
    HT_CHECK(size > 0 && size % record == 0, path, ": expected records of ", record, " bytes, got ", size,
             " bytes; it is truncated, or not ", f.name, " in its binary version");
    for (int64_t at = 0; at < size; at += record) {
      const int label = static_cast<uint8_t>(file[static_cast<size_t>(at + f.label)]);
      HT_CHECK(label < f.classes, path, ": expected labels of 0 to ", f.classes - 1, ", got ", label, " for image ", at / record);
    }
    bytes += file;
  }
  const int64_t n = static_cast<int64_t>(bytes.size()) / record;
  Tensor x = Tensor::empty(Meta({n, 3, side, side}, DType::u8, Device::cpu())), target = Tensor::empty(Meta({n}, DType::i64, Device::cpu()));
  for (int64_t i = 0; i < n; ++i) {
    const char* at = bytes.data() + i * record;
    target.data<int64_t>()[i] = static_cast<uint8_t>(at[f.label]);
    std::memcpy(x.data<uint8_t>() + i * pixels, at + f.labels, static_cast<size_t>(pixels));
  }
  return {std::move(x), std::move(target)};
}

}  // namespace

TensorDataset cifar10(const std::string& folder, const CifarOptions& options) {
  std::vector<std::string> files;
  for (int i = 1; options.train && i <= 5; ++i) files.push_back(text::cat("data_batch_", i, ".bin"));
  if (!options.train) files.emplace_back("test_batch.bin");
  return read(folder, {"CIFAR-10", std::move(files), 1, 0, 10});
}
TensorDataset cifar100(const std::string& folder, const CifarOptions& options) {
  return read(folder, {"CIFAR-100", {options.train ? "train.bin" : "test.bin"}, 2, options.fine, options.fine ? 100 : 20});
}

}  // namespace halftone::data
