// Reading IDX. Memory is taken only after the sizes in the header have been held against what the file can hold.
#include "halftone/data/idx.h"

#include <algorithm>
#include <array>
#include <bit>

#include "halftone/data/source.h"

namespace halftone::data {
namespace {

std::string hex(uint8_t v) {
  constexpr std::string_view digits = "0123456789abcdef";
  return {digits[v >> 4], digits[v & 15]};
}

DType dtype_of_type(const std::string& path, uint8_t type) {
  switch (type) {
    case 0x08:
      return DType::u8;
    case 0x0c:
      return DType::i32;
    case 0x0d:
      return DType::f32;
    case 0x0e:
      return DType::f64;
    default:
      break;
  }
  HT_CHECK(type != 0x09 && type != 0x0b, path, ": holds signed integers of ", type == 0x09 ? 8 : 16,
           " bits, for which Halftone has no dtype");
  throw Error(text::cat(path, ": not an IDX file: there is no type ", hex(type)));
}

struct Header {
  DType dtype;
  Shape shape;
  int64_t bytes;
};  // bytes of the elements

Header read_header(Source& source, const std::string& path) {
  std::array<uint8_t, 4> magic{};
  const size_t got = source.read(magic.data(), magic.size());
  HT_CHECK(got == magic.size(), path, ": not an IDX file: it has ", got, " bytes, and the header alone has more");
  HT_CHECK(magic[0] == 0 && magic[1] == 0, path, ": not an IDX file: it begins with ", hex(magic[0]), " ",
           hex(magic[1]), ", expected 00 00");
  Header h{dtype_of_type(path, magic[2]), {}, 0};
  const int rank = magic[3];
  HT_CHECK(rank >= 1 && rank <= max_rank, path, ": not an IDX file: expected 1 to 8 dimensions, got ", rank);
  for (int i = 0; i < rank; ++i) {
    std::array<uint8_t, 4> size{};
    HT_CHECK(source.read(size.data(), size.size()) == size.size(), path, ": ends within its header");
    h.shape.push_back(int64_t{size[0]} << 24 | size[1] << 16 | size[2] << 8 | size[3]);
  }
  // Zeros count last, lest one hides that the other sizes are beyond all measure.
  auto bytes = static_cast<int64_t>(size_of(h.dtype));
  bool empty = false;
  for (int64_t d : h.shape) {
    if (d == 0)
      empty = true;
    else
      HT_CHECK(!__builtin_mul_overflow(bytes, d, &bytes), path, ": its sizes ", h.shape, " do not fit 64 bits");
  }
  h.bytes = empty ? 0 : bytes;
  return h;
}

// To the machine's order of bytes; elements of one byte have none.
void swap_bytes(uint8_t* elements, int64_t bytes, size_t width) {
  if (width == 1) return;
  for (uint8_t* e = elements; e < elements + bytes; e += width) std::reverse(e, e + width);
}

}  // namespace

Tensor read_idx(const std::string& path) {
  static_assert(std::endian::native == std::endian::little, "the format's order is swapped below");
  const auto source = open_source(path);
  const Header h = read_header(*source, path);
  const std::string expected =
      text::cat(path, ": expected ", h.bytes, " bytes of elements for ", h.shape, " (", h.dtype, ")");
  HT_CHECK(h.bytes <= source->most_bytes(), expected,
           ", which a file of this size cannot hold; it is truncated or damaged");
  Tensor t = Tensor::empty(Meta(h.shape, h.dtype, Device::cpu()));
  auto* elements = static_cast<uint8_t*>(t.raw_data());
  const size_t got = source->read(elements, static_cast<size_t>(h.bytes));
  HT_CHECK(static_cast<int64_t>(got) == h.bytes, expected, ", got ", got, "; the file is truncated");
  uint8_t more = 0;
  HT_CHECK(source->read(&more, 1) == 0, expected, ", and there are more");
  swap_bytes(elements, h.bytes, size_of(h.dtype));
  return t;
}

}  // namespace halftone::data
