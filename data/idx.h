#pragma once
// IDX, the format of MNIST and its relatives: two zero bytes, a type, a rank, the sizes (big-endian), the elements.
#include "halftone/core/tensor.h"

namespace halftone::data {

// The tensor in an IDX file, plain or compressed (.gz, which needs zlib), on the CPU: u8, i32, f32 or f64, as stored.
// Throws Error, naming the file, unless it is exactly as its header says: a missing file, another format, a type that
// Halftone does not have, too few bytes, too many.
HT_API Tensor read_idx(const std::string& path);

}  // namespace halftone::data
