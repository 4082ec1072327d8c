// .npy, and .npz where the bytes are a zip archive's: what is read fits the file, and goes round.
#include "halftone/io/npy.h"

#include "halftone/tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace halftone;
  return feed(data, size, [&](const std::string& path) {
    if (size > 0 && data[0] == 'P') {
      const StateDict state = io::load_npz(path);
      size_t bytes = 0;
      for (const auto& [name, t] : state) bytes += bytes_of(t);
      require(bytes <= size);
      io::save_npz(path, state);
      require(same(state, io::load_npz(path)));
    } else {
      const Tensor t = io::load_npy(path);
      require(bytes_of(t) <= size);
      io::save_npy(path, t);
      require(same(t, io::load_npy(path)));
    }
  });
}
