#pragma once
// Images in files: PNG (where libpng is found) and the binary forms of Netpbm; and folders of them, one for each class.
#include <optional>
#include <string>
#include <vector>

#include "halftone/data/dataset.h"

namespace halftone::data {

// [channels, h, w] (u8) on the CPU: one channel for gray, three for colour. 16-bit samples become 8-bit ones; what is transparent lies
// on white. Reads PNG, PGM (P5) and PPM (P6). Throws Error, naming the file, unless it is whole and of one of these formats; memory
// follows the file's size, not what its header claims.
HT_API Tensor read_image(const std::string& path);
// As PGM or PPM, by the channels of a tensor [1 or 3, h, w] (u8).
HT_API void write_pnm(const std::string& path, const Tensor& image);

struct ImageFolderOptions {
  int channels = 3;                   // 3: gray becomes equal channels; 1: colour becomes its luma (ITU-R BT.601)
  std::optional<Size2> size = {};     // images are resized to it, bilinearly; absent: all must have one size
};

// Each subfolder is a class, numbered in the order of names; its images are the files .png, .pgm, .ppm and .pnm in it and below it,
// read when a batch asks for them. Batches: x [n, channels, h, w] (u8), target [n] (i64).
class HT_API ImageFolder {
 public:
  // Throws Error when the folder has no subfolder with an image.
  explicit ImageFolder(const std::string& folder, ImageFolderOptions options = {});
  int64_t size() const { return static_cast<int64_t>(files_.size()); }
  Batch get(std::span<const int64_t> indices) const;
  const std::vector<std::string>& classes() const { return classes_; }
  const std::string& path(int64_t i) const { return files_.at(static_cast<size_t>(i)).path; }

 private:
  struct File {
    std::string path;
    int64_t label;
  };
  Tensor read(const std::string& path) const;
  ImageFolderOptions options_;
  std::vector<std::string> classes_;
  std::vector<File> files_;
};

namespace detail {

// A PNG file's bytes. Null in a build without libpng.
using ReadPng = Tensor (*)(const std::string& bytes, const std::string& path);
void set_read_png(ReadPng read);

}  // namespace detail
}  // namespace halftone::data
