// safetensors: what is read fits the file, and goes round.
#include "halftone/io/safetensors.h"

#include "halftone/tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace halftone;
  return feed(data, size, [&](const std::string& path) {
    const StateDict state = io::load(path);
    size_t bytes = 0;
    for (const auto& [name, t] : state) bytes += bytes_of(t);
    require(bytes <= size);
    io::save(path, state, {.metadata = io::load_metadata(path)});
    require(same(state, io::load(path)));
  });
}
