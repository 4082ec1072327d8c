// PNG and Netpbm: an image that is read has the size that its file can hold, and goes round.
#include "halftone/data/image.h"

#include "halftone/tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace halftone;
  return feed(data, size, [&](const std::string& path) {
    const Tensor image = data::read_image(path);
    require(bytes_of(image) <= (size + 1) * 1032 * 8 * 3);
    data::write_pnm(path, image);
    require(same(image, data::read_image(path)));
  });
}
