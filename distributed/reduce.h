#pragma once
// The arithmetic of a reduction on the CPU: element by element, rank after rank.
#include <span>

#include "halftone/distributed/group.h"

namespace halftone::distributed {

// out[i] = the reduction of in[0][i], in[1][i], ..., each of n elements of `dtype`. out may be one of the inputs.
void reduce_in_order(Reduce how, DType dtype, std::span<const void* const> in, void* out, int64_t n);

}  // namespace halftone::distributed
