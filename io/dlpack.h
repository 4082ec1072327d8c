#pragma once
// DLPack: tensors shared with other libraries of the process, without a copy, both ways. The structs are DLPack's ABI (version 1.1 and
// the one before 1.0), so pointers to those of dlpack.h may be cast to these and back.
#include <cstdint>

#include "halftone/core/tensor.h"

namespace halftone::io {

struct DLDevice {
  int32_t type;  // 1 CPU, 2 CUDA, 3 pinned memory of the CPU, 13 CUDA's managed memory
  int32_t index;
};
struct DLDataType {
  uint8_t code;  // 0 integer, 1 unsigned, 2 floating, 4 bfloat, 6 bool
  uint8_t bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t rank;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row-major
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor* self);  // may be null
};
struct DLManagedTensorVersioned {
  struct Version { uint32_t major, minor; } version;
  void* context;
  void (*deleter)(DLManagedTensorVersioned* self);  // may be null
  uint64_t flags;  // 1: read only; 2: is a copy
  DLTensor tensor;
};

// The same memory for a consumer, who calls the deleter once; it keeps the memory alive. A tensor that requires a gradient is refused:
// detach() it. Of a GPU's tensor, work that was queued on the thread's stream may still be under way.
HT_API DLManagedTensorVersioned* to_dlpack(const Tensor& tensor);
HT_API DLManagedTensor* to_dlpack_unversioned(const Tensor& tensor);

// A tensor over the producer's memory; the deleter runs when its last view goes. Read-only memory is copied. Throws Error when it is
// of a dtype, device or layout that Halftone does not have; it is then still the caller's.
HT_API Tensor from_dlpack(DLManagedTensorVersioned* managed);
HT_API Tensor from_dlpack(DLManagedTensor* managed);

}  // namespace halftone::io
