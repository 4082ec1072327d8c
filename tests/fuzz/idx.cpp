// IDX, plain and compressed: what is read fits the file, of which deflate makes at most 1032 times as many bytes.
#include "halftone/data/idx.h"

#include "halftone/tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return feed(data, size, [&](const std::string& path) { require(bytes_of(halftone::data::read_idx(path)) <= size * 1032); });
}
