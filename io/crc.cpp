// Eight bytes a step, by tables (Kounavis and Berry, "A systematic approach to building high performance software-based CRC
// generators", 2005).
#include "halftone/io/crc.h"

#include <array>
#include <bit>
#include <cstring>

namespace halftone::io {
namespace {

static_assert(std::endian::native == std::endian::little);

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// Table k holds what a byte adds to the check k bytes later.
constexpr Tables make_tables(uint32_t reflected_polynomial) {
  Tables t{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t c = byte;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) != 0 ? reflected_polynomial : 0);
    t[0][byte] = c;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t byte = 0; byte < 256; ++byte) t[k][byte] = (t[k - 1][byte] >> 8) ^ t[0][t[k - 1][byte] & 255];
  return t;
}

uint32_t check(const Tables& t, const void* data, size_t bytes, uint32_t before) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint32_t c = ~before;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t eight;
    std::memcpy(&eight, at, 8);
    eight ^= c;
    c = 0;
    for (size_t k = 0; k < 8; ++k) c ^= t[7 - k][eight >> (8 * k) & 255];
  }
  for (; bytes > 0; --bytes, ++at) c = (c >> 8) ^ t[0][(c ^ *at) & 255];
  return ~c;
}

constexpr Tables zip = make_tables(0xedb88320), castagnoli = make_tables(0x82f63b78);

}  // namespace

uint32_t crc32(const void* data, size_t bytes, uint32_t before) { return check(zip, data, bytes, before); }
uint32_t crc32c(const void* data, size_t bytes, uint32_t before) { return check(castagnoli, data, bytes, before); }

}  // namespace halftone::io
