// Translation of types, devices and layouts; ownership by deleters.
#include "halftone/io/dlpack.h"

#include <memory>

namespace halftone::io {
namespace {

enum Code : uint8_t { integer = 0, natural = 1, floating = 2, bfloat = 4, boolean = 6 };
constexpr int32_t on_cpu = 1, on_cuda = 2, pinned = 3, managed_memory = 13;
constexpr uint64_t read_only = 1;
constexpr DLDataType types[num_dtypes] = {{floating, 16, 1}, {bfloat, 16, 1}, {floating, 32, 1}, {floating, 64, 1},
                                          {integer, 32, 1},  {integer, 64, 1}, {natural, 8, 1},  {boolean, 8, 1}};

DType dtype_of_type(const DLDataType& t) {
  for (int i = 0; i < num_dtypes; ++i)
    if (types[i].code == t.code && types[i].bits == t.bits && types[i].lanes == t.lanes) return static_cast<DType>(i);
  throw Error(text::cat("from_dlpack: a type of code ", t.code, " with ", t.bits, " bits and ", t.lanes, " lanes, which Halftone does not have"));
}
Device device_of(const DLDevice& d) {
  if (d.type == on_cpu || d.type == pinned) return Device::cpu();
  HT_CHECK(d.type == on_cuda || d.type == managed_memory, "from_dlpack: memory of a device of type ", d.type, "; expected the CPU's or CUDA's");
  HT_CHECK(d.index >= 0 && d.index < static_cast<int>(devices(DeviceType::cuda).size()), "from_dlpack: there is no CUDA device ", d.index,
           " in this process");
  return Device::cuda(d.index);
}

// What an exported tensor keeps alive, with the arrays that its struct points to.
template <class Managed>
struct Exported {
  Tensor tensor;
  Shape shape;
  Strides strides;
  Managed managed;
};

template <class Managed>
Managed* export_tensor(const Tensor& t) {
  HT_CHECK(t.defined(), "to_dlpack: the tensor is undefined");
  HT_CHECK(!t.requires_grad(), "to_dlpack: the tensor requires a gradient, which the other side would not see; detach() it");
  auto kept = std::make_unique<Exported<Managed>>(Exported<Managed>{t.detach(), t.shape(), t.strides(), Managed{}});
  DLTensor& d = kept->managed.tensor;
  d.data = t.raw_data();
  d.device = {t.device().type == DeviceType::cpu ? on_cpu : on_cuda, t.device().index};
  d.rank = t.rank();
  d.dtype = types[static_cast<int>(t.dtype())];
  d.shape = &kept->shape[0];
  d.strides = &kept->strides[0];
  kept->managed.context = kept.get();
  kept->managed.deleter = [](Managed* m) { delete static_cast<Exported<Managed>*>(m->context); };
  return &kept.release()->managed;
}

Meta meta_of(const DLTensor& d) {
  HT_CHECK(d.rank >= 0 && d.rank <= max_rank, "from_dlpack: a tensor of ", d.rank, " dimensions; expected 0 to ", max_rank);
  Meta meta;
  meta.dtype = dtype_of_type(d.dtype);
  meta.device = device_of(d.device);
  for (int32_t i = 0; i < d.rank; ++i) {
    HT_CHECK(d.shape[i] >= 0, "from_dlpack: a dimension of size ", d.shape[i]);
    meta.shape.push_back(d.shape[i]);
  }
  if (!d.strides) {
    meta.strides = contiguous_strides(meta.shape);
  } else {
    for (int32_t i = 0; i < d.rank; ++i) {
      HT_CHECK(d.strides[i] >= 0, "from_dlpack: a stride of ", d.strides[i], "; expected strides of 0 or more: make it contiguous first");
      meta.strides.push_back(d.strides[i]);
    }
  }
  const auto at = reinterpret_cast<uintptr_t>(d.data) + d.byte_offset;
  HT_CHECK(at % size_of(meta.dtype) == 0, "from_dlpack: its elements are not aligned for ", meta.dtype);
  HT_CHECK(d.data || meta.shape.numel() == 0, "from_dlpack: its memory is null");
  return meta;
}
// From the first element to the end of the last.
int64_t bytes_of(const Meta& meta) {
  if (meta.shape.numel() == 0) return 0;
  int64_t last = 0;
  for (size_t i = 0; i < meta.shape.size(); ++i) last = checked_add(last, checked_mul(meta.shape[i] - 1, meta.strides[i]));
  return checked_mul(checked_add(last, 1), static_cast<int64_t>(size_of(meta.dtype)));
}

template <class Managed>
Tensor import_tensor(Managed* m) {
  const Meta meta = meta_of(m->tensor);
  const int64_t bytes = bytes_of(meta);
  return Tensor(meta, Storage::borrow(static_cast<char*>(m->tensor.data) + m->tensor.byte_offset, bytes, meta.device, [m](void*) {
                  if (m->deleter) m->deleter(m);
                }));
}

}  // namespace

DLManagedTensorVersioned* to_dlpack(const Tensor& tensor) {
  auto* m = export_tensor<DLManagedTensorVersioned>(tensor);
  m->version = {1, 1};
  return m;
}
DLManagedTensor* to_dlpack_unversioned(const Tensor& tensor) { return export_tensor<DLManagedTensor>(tensor); }

Tensor from_dlpack(DLManagedTensorVersioned* managed) {
  HT_CHECK(managed, "from_dlpack: the tensor is null");
  HT_CHECK(managed->version.major == 1, "from_dlpack: DLPack of version ", managed->version.major, ".", managed->version.minor, "; expected 1.x");
  const Tensor shared = import_tensor(managed);
  return (managed->flags & read_only) != 0 ? shared.clone() : shared;
}
Tensor from_dlpack(DLManagedTensor* managed) {
  HT_CHECK(managed, "from_dlpack: the tensor is null");
  return import_tensor(managed);
}

}  // namespace halftone::io
