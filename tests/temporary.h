// A folder of a test's own, gone when the test is over; files as bytes; the text of an error.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "halftone/core/error.h"

struct Temporary {
  std::string folder = (std::filesystem::temp_directory_path() / "halftone-XXXXXX").string();
  Temporary() {
    if (!::mkdtemp(folder.data())) throw halftone::Error("no temporary folder");
  }
  ~Temporary() { std::filesystem::remove_all(folder); }
  Temporary(const Temporary&) = delete;
  std::string operator/(const std::string& name) const { return folder + "/" + name; }
  // Names of what it holds, in order, each followed by a space.
  std::string list() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    std::string all;
    for (const auto& name : names) all += name + " ";
    return all;
  }
};

inline std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::filesystem::remove(path);  // some file systems flush a file that is written over
  std::ofstream(path, std::ios::binary) << bytes;
}

// What f() throws, without the folder's changing name; "" when it throws nothing.
template <class F>
std::string error_of(F&& f, const std::string& folder = {}) {
  try {
    f();
  } catch (const halftone::Error& e) {
    std::string text = e.what();
    for (size_t at; !folder.empty() && (at = text.find(folder + "/")) != std::string::npos;)
      text.erase(at, folder.size() + 1);
    return text;
  }
  return {};
}
