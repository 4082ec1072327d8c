// Plain files, and the choice between plain and compressed.
#include "halftone/data/source.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "halftone/core/backend.h"

namespace halftone::data {
namespace {

class PlainFile final : public Source {
 public:
  explicit PlainFile(const std::string& path) : path_(path) {
    std::error_code error;
    const auto type = std::filesystem::status(path, error).type();
    HT_CHECK(type != std::filesystem::file_type::not_found, path, ": there is no such file");
    HT_CHECK(type != std::filesystem::file_type::directory, path, ": not a file, but a folder");
    // A pipe or a device has no size, and opening it could wait for ever.
    HT_CHECK(type == std::filesystem::file_type::regular, path, ": not a file that can be read");
    size_ = static_cast<int64_t>(std::filesystem::file_size(path, error));
    file_.open(path, std::ios::binary);
    HT_CHECK(!error && file_.is_open(), path, ": cannot be opened");
  }
  size_t read(void* to, size_t bytes) override {
    file_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
    HT_CHECK(!file_.bad(), path_, ": cannot be read");
    return static_cast<size_t>(file_.gcount());
  }
  int64_t most_bytes() const override { return size_; }
  bool is_gzip() {
    unsigned char magic[2] = {};
    const bool gzip = read(magic, 2) == 2 && magic[0] == 0x1f && magic[1] == 0x8b;
    file_.clear();
    file_.seekg(0);
    return gzip;
  }

 private:
  std::string path_;
  std::ifstream file_;
  int64_t size_ = 0;
};

Gunzip the_gunzip = nullptr;

}  // namespace

std::string read_all(Source& source) {
  // Memory follows what there really is; a byte more shows the end.
  const auto piece = static_cast<size_t>(std::min<int64_t>(source.most_bytes(), 1 << 20)) + 1;
  std::string bytes;
  for (size_t got = piece; got == piece;) {
    const size_t at = bytes.size();
    bytes.resize(at + piece);
    got = source.read(bytes.data() + at, piece);
    bytes.resize(at + got);
  }
  return bytes;
}

void set_gunzip(Gunzip gunzip) { the_gunzip = gunzip; }

std::unique_ptr<Source> open_source(const std::string& path) {
  ensure_backends();  // zlib's part registers itself there
  auto file = std::make_unique<PlainFile>(path);
  if (!file->is_gzip()) return file;
  HT_CHECK(the_gunzip, path,
           ": is compressed, and this build has no zlib; configure with -DHALFTONE_ZLIB=ON, or run gunzip on it");
  return the_gunzip(std::move(file), path);
}

}  // namespace halftone::data
