#pragma once
// Kernels over many tensors. One launch takes many: a table among the kernel's parameters says where they are, and each
// block works on one chunk of one tensor.
#include "halftone/cuda/numeric.cuh"

namespace halftone::cuda {

inline constexpr int update_threads = 256;
inline constexpr int64_t smallest_chunk = 1024;

// Tensors of one launch, `pointers` arrays of count[i] elements each. Under 4 KB, what parameters may always have.
template <int pointers> struct Table {
  static constexpr int capacity = 3600 / (8 * pointers + 12);
  int64_t chunk;
  int tensors;
  int first_block[capacity + 1];  // of each tensor; after the last, how many there are
  int64_t count[capacity];
  void* data[capacity][pointers];

  // The tensor of a block, and its elements.
  struct Part { int tensor; int64_t begin, end; };
  __device__ Part part(int block) const {
    int low = 0, high = tensors;
    while (high - low > 1) {
      int middle = (low + high) / 2;
      if (first_block[middle] <= block) low = middle;
      else high = middle;
    }
    const int64_t begin = (block - first_block[low]) * chunk;
    return {low, begin, min(count[low], begin + chunk)};
  }
};

// Gathers tensors, and launches when the table is full and at the end. Keeps what it was given alive till then.
template <int pointers, class Launch> class Gather {
 public:
  // As many blocks as run at once, or more with long chunks: by sizes alone, so sums have one order.
  Gather(int64_t elements, Launch launch) : launch_(launch) {
    constexpr int64_t at_once = 512, longest = 8192;
    table_.chunk = std::clamp(ceil_div(elements, at_once * smallest_chunk) * smallest_chunk, smallest_chunk, longest);
    clear();
  }
  void add(const std::array<void*, pointers>& data, int64_t count, const Tensor& keep = {}) {
    if (count == 0) return;
    if (table_.tensors == Table<pointers>::capacity) flush();
    int i = table_.tensors++;
    table_.count[i] = count;
    std::copy(data.begin(), data.end(), table_.data[i]);
    table_.first_block[i + 1] = table_.first_block[i] + static_cast<int>(ceil_div(count, table_.chunk));
    if (keep.defined()) kept_.push_back(keep);
  }
  void flush() {
    if (table_.tensors > 0) launch_(table_, table_.first_block[table_.tensors]);
    clear();
  }

 private:
  void clear() {
    table_.tensors = table_.first_block[0] = 0;
    kept_.clear();
  }
  Table<pointers> table_;
  Launch launch_;
  Tensors kept_;
};

template <int pointers, class Launch> Gather<pointers, Launch> gather_into(int64_t elements, Launch launch) {
  return {elements, launch};
}

}  // namespace halftone::cuda
