// What the fuzz targets share: bytes become a file, and a reader either takes it or throws an Error. Any other exception, and
// whatever the sanitizers see, is a finding.
//
//   cmake --preset fuzz && cmake --build --preset fuzz && TMPDIR=/dev/shm build/fuzz/tests/fuzz/npy -max_total_time=600
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "halftone/core/state_dict.h"
#include "halftone/tests/temporary.h"

template <class F>
int feed(const uint8_t* data, size_t size, F&& read) {
  static const Temporary folder;
  write_bytes(folder / "f", std::string(reinterpret_cast<const char*>(data), size));
  try {
    read(folder / "f");
  } catch (const halftone::Error&) {
  }
  return 0;
}

inline void require(bool good) {
  if (!good) std::abort();
}
inline size_t bytes_of(const halftone::Tensor& t) { return static_cast<size_t>(t.numel()) * size_of(t.dtype()); }
inline bool same(const halftone::Tensor& a, const halftone::Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() && (a.numel() == 0 || std::memcmp(a.raw_data(), b.raw_data(), bytes_of(a)) == 0);
}
inline bool same(const halftone::StateDict& a, const halftone::StateDict& b) {
  if (a.size() != b.size()) return false;
  for (auto i = a.begin(), j = b.begin(); i != a.end(); ++i, ++j)
    if (i->first != j->first || !same(i->second, j->second)) return false;
  return true;
}
