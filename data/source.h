#pragma once
// Bytes in order, from a plain file or out of a compressed one. Not part of the public interface.
#include <cstdint>
#include <memory>
#include <string>

#include "halftone/core/error.h"

namespace halftone::data {

class Source {
 public:
  Source() = default;
  Source(const Source&) = delete;
  virtual ~Source() = default;
  // The next `bytes` bytes; fewer only where they end. Throws Error, naming the file, when they cannot be had.
  virtual size_t read(void* to, size_t bytes) = 0;
  // What the file can hold at most.
  virtual int64_t most_bytes() const = 0;
};

// All that is left.
std::string read_all(Source& source);

// A file, decompressed when it is a .gz, whatever its name.
std::unique_ptr<Source> open_source(const std::string& path);

// Decompresses `file`, which is at its beginning. Null in a build without zlib.
using Gunzip = std::unique_ptr<Source> (*)(std::unique_ptr<Source> file, const std::string& path);
void set_gunzip(Gunzip gunzip);

}  // namespace halftone::data
