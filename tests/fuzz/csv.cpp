// Tables: what is read has a field of the file for each number.
#include "halftone/data/csv.h"

#include "halftone/tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace halftone;
  return feed(data, size, [&](const std::string& path) {
    const data::Table table = data::read_csv(path, {.header = size % 2 == 0, .missing = 0});
    // "," alone has two fields, empty ones.
    require(static_cast<size_t>(table.values.numel()) <= size + 1 && table.values.size(1) == static_cast<int64_t>(table.names.size()));
  });
}
