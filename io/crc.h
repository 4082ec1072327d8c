#pragma once
// Cyclic redundancy checks, of 32 bits, as file formats want them. They find accidents, not attacks.
#include <cstddef>
#include <cstdint>

#include "halftone/core/api.h"

namespace halftone::io {

// Of zip and gzip (polynomial 0x04c11db7), and Castagnoli's (0x1edc6f41); both bit-reflected. `before` is the check of the bytes
// that come before these.
HT_API uint32_t crc32(const void* data, size_t bytes, uint32_t before = 0);
HT_API uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace halftone::io
