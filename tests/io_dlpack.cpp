// DLPack: the memory is shared, lives as long as either side wants it, and what Halftone does not have is refused.
#include "halftone/io/dlpack.h"

#include <cstddef>

#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

using namespace halftone;
using namespace halftone::io;

namespace {

// The ABI, as compilers lay dlpack.h out on 64-bit machines.
static_assert(sizeof(DLTensor) == 48 && offsetof(DLTensor, device) == 8 && offsetof(DLTensor, rank) == 16 && offsetof(DLTensor, dtype) == 20 &&
              offsetof(DLTensor, shape) == 24 && offsetof(DLTensor, strides) == 32 && offsetof(DLTensor, byte_offset) == 40);
static_assert(sizeof(DLManagedTensor) == 64 && offsetof(DLManagedTensor, context) == 48 && offsetof(DLManagedTensor, deleter) == 56);
static_assert(sizeof(DLManagedTensorVersioned) == 80 && offsetof(DLManagedTensorVersioned, context) == 8 &&
              offsetof(DLManagedTensorVersioned, flags) == 24 && offsetof(DLManagedTensorVersioned, tensor) == 32);

// Another library's tensor [2, 3] of i32.
struct Foreign {
  int32_t elements[8] = {9, 0, 1, 2, 3, 4, 5, 9};
  int64_t shape[2] = {2, 3}, strides[2] = {3, 1};
  int deleted = 0;
  DLManagedTensorVersioned managed{{1, 0}, this, [](DLManagedTensorVersioned* m) { ++static_cast<Foreign*>(m->context)->deleted; }, 0,
                                   {elements, {1, 0}, 2, {0, 32, 1}, shape, strides, 4}};
};

}  // namespace

TEST_CASE("exports share memory and keep it") {
  for (int i = 0; i < num_dtypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    Tensor x = arange(12).to(dtype).view({3, 4});
    auto* m = to_dlpack(x.transpose(0, 1).slice(0, 1, 3));
    CHECK((m->version.major == 1 && m->flags == 0));
    CHECK(m->tensor.data == static_cast<char*>(x.raw_data()) + size_of(dtype));
    CHECK((m->tensor.rank == 2 && m->tensor.shape[0] == 2 && m->tensor.shape[1] == 3 && m->tensor.strides[0] == 1 && m->tensor.strides[1] == 4));
    CHECK((m->tensor.dtype.bits == 8 * size_of(dtype) && m->tensor.dtype.lanes == 1 && m->tensor.device.type == 1));
    const std::weak_ptr<Storage> memory = x.storage();
    const auto expected = x.transpose(0, 1).slice(0, 1, 3).to_vector<double>();
    x = Tensor();
    CHECK_FALSE(memory.expired());
    {
      const Tensor back = from_dlpack(m);  // calls the deleter at its end
      CHECK(back.dtype() == dtype);
      CHECK(back.to_vector<double>() == expected);
    }
    CHECK(memory.expired());
  }
  auto* old = to_dlpack_unversioned(tensor(2.5));
  CHECK(from_dlpack(old).item() == 2.5);
  auto* unused = to_dlpack(ones({2}));
  unused->deleter(unused);
  CHECK(error_of([] { to_dlpack(ones({2}, {.requires_grad = true})); }) ==
        "to_dlpack: the tensor requires a gradient, which the other side would not see; detach() it");
  CHECK(error_of([] { to_dlpack(Tensor()); }) == "to_dlpack: the tensor is undefined");
}

TEST_CASE("imports see what the producer has, and give it back once") {
  Foreign f;
  {
    const Tensor x = from_dlpack(&f.managed), row = x[1];
    CHECK(x.to_vector<int>() == std::vector<int>{0, 1, 2, 3, 4, 5});
    f.elements[1] = 7;
    CHECK(x[0][0].item<int>() == 7);
    CHECK((x + 1).sum().item<int>() == 28);
    x.slice(1, 0, 1).fill_(-1);
    CHECK((f.elements[1] == -1 && f.elements[4] == -1));
    CHECK(f.deleted == 0);
  }
  CHECK(f.deleted == 1);

  Foreign rows;
  rows.managed.tensor.strides = nullptr;
  rows.managed.flags = 1;
  const Tensor copy = from_dlpack(&rows.managed);
  CHECK(rows.deleted == 1);  // read-only memory was copied
  CHECK(copy.to_vector<int>() == std::vector<int>{0, 1, 2, 3, 4, 5});
  Foreign kept;
  kept.managed.deleter = nullptr;
  CHECK(from_dlpack(&kept.managed).numel() == 6);
  Foreign none;
  none.shape[0] = 0;
  none.managed.tensor.data = nullptr;
  none.managed.tensor.byte_offset = 0;
  CHECK(from_dlpack(&none.managed).shape() == Shape{0, 3});
  CHECK(none.deleted == 1);
}

TEST_CASE("a GPU's memory goes round, too") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device");
  const Tensor x = randn({3}).to(Device::cuda());
  auto* m = to_dlpack(x);
  CHECK((m->tensor.device.type == 2 && m->tensor.device.index == 0));
  const Tensor back = from_dlpack(m);
  CHECK(back.device() == Device::cuda());
  CHECK(back.raw_data() == x.raw_data());
}

TEST_CASE("what Halftone does not have is refused, and stays the producer's") {
  const auto error = [](auto&& change) {
    Foreign f;
    change(f.managed);
    const std::string text = error_of([&] { from_dlpack(&f.managed); });
    CHECK(f.deleted == 0);
    return text;
  };
  CHECK(error([](auto& m) { m.version.major = 2; }) == "from_dlpack: DLPack of version 2.0; expected 1.x");
  CHECK(error([](auto& m) { m.tensor.dtype = {5, 64, 1}; }) ==
        "from_dlpack: a type of code 5 with 64 bits and 1 lanes, which Halftone does not have");
  CHECK(error([](auto& m) { m.tensor.dtype.lanes = 4; }).find("4 lanes") != std::string::npos);
  CHECK(error([](auto& m) { m.tensor.device.type = 8; }) == "from_dlpack: memory of a device of type 8; expected the CPU's or CUDA's");
  CHECK(error([](auto& m) { m.tensor.device = {2, 99}; }) == "from_dlpack: there is no CUDA device 99 in this process");
  CHECK(error([](auto& m) { m.tensor.rank = 9; }) == "from_dlpack: a tensor of 9 dimensions; expected 0 to 8");
  CHECK(error([](auto& m) { m.tensor.shape[0] = -1; }) == "from_dlpack: a dimension of size -1");
  CHECK(error([](auto& m) { m.tensor.strides[1] = -1; }) ==
        "from_dlpack: a stride of -1; expected strides of 0 or more: make it contiguous first");
  CHECK(error([](auto& m) { m.tensor.byte_offset = 3; }) == "from_dlpack: its elements are not aligned for i32");
  CHECK(error([](auto& m) { m.tensor.data = nullptr; }) == "from_dlpack: its memory is null");
  CHECK(error([](auto& m) { m.tensor.shape[0] = int64_t{1} << 62, m.tensor.strides[0] = 8; }).find("does not fit") != std::string::npos);
  CHECK(error_of([] { from_dlpack(static_cast<DLManagedTensor*>(nullptr)); }) == "from_dlpack: the tensor is null");
}
