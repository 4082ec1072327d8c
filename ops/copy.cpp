// cast, clone, copy, fill, transfer between devices, where; and the functions that make tensors.
#include "halftone/ops/copy.h"

#include <cstring>
#include <numeric>

#include "halftone/core/backend.h"
#include "halftone/ops/all.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/shape.h"

namespace halftone {
namespace {

template <class From, class To> void convert_rows(const Tensor& from, const Tensor& to) {
  const From* x = from.data<From>();
  To* y = to.data<To>();
  Rows<2>(from.shape(), {to.strides(), from.strides()}).run([&](auto at, auto step, int64_t n) {
    map_row(x + at[1], step[1], y + at[0], step[0], n, [](From v) { return convert<To>(v); });
  });
}
void convert_into(const Tensor& from, const Tensor& to) {
  visit(from.dtype(), [&]<class From>(Type<From>) {
    visit(to.dtype(), [&]<class To>(Type<To>) { convert_rows<From, To>(from, to); });
  });
}
void run_convert(const Call& c, std::span<Tensor> out) { convert_into(c.in[0], out[0]); }
void run_copy(const Call& c, std::span<Tensor>) { convert_into(c.in[1], c.in[0]); }

void run_fill(const Call& c, std::span<Tensor>) {
  visit(c.in[0].dtype(), [&]<class T>(Type<T>) {
    T value = c.as<Scalar>().to<T>();
    T* y = c.in[0].data<T>();
    Rows<1>(c.in[0].shape(), {c.in[0].strides()}).run([&](auto at, auto step, int64_t n) {
      for (int64_t i = 0; i < n; ++i) y[at[0] + i * step[0]] = value;
    });
  });
}

void run_transfer(const Call& c, std::span<Tensor> out) {
  const Tensor &x = c.in[0], &y = out[0];
  int64_t bytes = x.numel() * static_cast<int64_t>(size_of(x.dtype()));
  if (bytes == 0) return;
  DeviceType plug_in = x.device().type == DeviceType::cpu ? y.device().type : x.device().type;
  backend(plug_in).copy(y.raw_data(), y.device(), x.raw_data(), x.device(), bytes);
}

template <class T> void select_rows(const Call& c, const Tensor& out) {
  const bool* condition = c.in[0].data<bool>();
  const T *a = c.in[1].data<T>(), *b = c.in[2].data<T>();
  T* y = out.data<T>();
  Rows<4>(out.shape(), {out.strides(), c.in[0].strides(), c.in[1].strides(), c.in[2].strides()}).run([&](auto at, auto step, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
      y[at[0] + i * step[0]] = condition[at[1] + i * step[1]] ? a[at[2] + i * step[2]] : b[at[3] + i * step[3]];
  });
}
void run_where(const Call& c, std::span<Tensor> out) {
  visit(c.in[1].dtype(), [&]<class T>(Type<T>) { select_rows<T>(c, out[0]); });
}

std::vector<Sample> shapes_with(Attrs attrs) {
  std::vector<Sample> all;
  for (auto& shape : elementwise::sample_shapes) all.push_back({{{.shape = shape}}, attrs});
  return all;
}

}  // namespace

namespace op {

constinit OpDef cast = {
    .name = "cast", .doc = "x in another dtype, rounded to nearest even", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas { return {Meta(c.in[0].shape(), c.as<DType>(), c.in[0].device())}; },
    .backward = [](const Rule& r) -> Tensors {
      return {is_floating(r.in_meta().dtype) ? halftone::cast(r.grad(), r.in_meta().dtype) : Tensor()};
    },
    .samples = [] { return shapes_with(Attrs::of(DType::f64)); },
    .kernel = {run_convert}};

constinit OpDef clone = {
    .name = "clone", .doc = "a contiguous copy", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas { return {Meta(c.in[0].shape(), c.in[0].dtype(), c.in[0].device())}; },
    .backward = [](const Rule& r) -> Tensors { return {r.grad()}; },
    .samples = [] { return shapes_with({}); },
    .kernel = {run_convert}};

constinit OpDef copy = {
    .name = "copy", .doc = "writes the values of the second tensor into the first, converted", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      HT_CHECK(c.in[0].shape() == c.in[1].shape(), "copy: expected a source of shape ", c.in[0].shape(), ", got ", c.in[1].shape());
      return {};
    },
    .writes = writes_first,
    .samples = [] {
      std::vector<Sample> all;
      for (auto& shape : elementwise::sample_shapes) all.push_back({{{.shape = shape}, {.shape = shape}}, {}});
      return all;
    },
    .kernel = {run_copy}};

constinit OpDef fill = {
    .name = "fill", .doc = "writes one number into every element", .cast = Cast::keep,
    .infer = [](const Call&) -> Metas { return {}; },
    .writes = writes_first,
    .samples = [] { return shapes_with(Attrs::of(Scalar(1.5))); },
    .kernel = {run_fill}};

constinit OpDef transfer = {
    .name = "transfer", .doc = "the same values on another device", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      HT_CHECK(c.in[0].is_contiguous(), "transfer: expected a contiguous tensor");
      return {Meta(c.in[0].shape(), c.in[0].dtype(), c.as<Device>())};
    },
    .backward = [](const Rule& r) -> Tensors { return {r.grad().to(r.in_meta().device)}; },
    .samples = [] { return shapes_with(Attrs::of(Device::cpu())); },
    .kernel = {run_transfer, run_transfer}};

constinit OpDef where = {
    .name = "where", .doc = "elements of the second tensor where the first is true, of the third elsewhere", .cast = Cast::widest,
    .infer = [](const Call& c) -> Metas {
      const Meta &condition = c.in[0].meta(), &a = c.in[1].meta(), &b = c.in[2].meta();
      HT_CHECK(condition.dtype == DType::b8, "where: expected a bool condition, got ", condition.dtype);
      HT_CHECK(condition.shape == a.shape && a.shape == b.shape && a.dtype == b.dtype, "where: expected equal shapes and dtypes, got ",
               condition, ", ", a, " and ", b);
      return {Meta(a.shape, a.dtype, a.device)};
    },
    .saves = {.in = 1, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      return {{}, r.needs(1) ? halftone::where(r.in(), r.grad(), 0) : Tensor(), r.needs(2) ? halftone::where(r.in(), 0, r.grad()) : Tensor()};
    },
    .samples = [] {
      std::vector<Sample> all;
      for (auto& s : elementwise::sample_shapes)
        all.push_back({{{.shape = s, .low = 0, .high = 2, .dtype = DType::b8}, {.shape = s}, {.shape = s}}, {}});
      return all;
    },
    .kernel = {run_where}};

}  // namespace op

std::span<OpDef* const> copy_ops() {
  static constexpr OpDef* all[] = {&op::cast, &op::clone, &op::copy, &op::fill, &op::transfer, &op::where};
  return all;
}

Tensor cast(const Tensor& x, DType dtype) {
  HT_CHECK(x.defined(), "cast: the tensor is undefined");
  return x.dtype() == dtype ? x : call(op::cast, {x}, Attrs::of(dtype));
}

Tensor where(const Tensor& condition, const Operand& a, const Operand& b) {
  HT_CHECK(a.is_tensor() || b.is_tensor(), "where: expected at least one tensor to choose from, got two numbers");
  const Tensor& some = a.is_tensor() ? a.tensor() : b.tensor();
  DType t = a.is_tensor() && b.is_tensor() ? promote(a.tensor().dtype(), b.tensor().dtype()) : some.dtype();
  if ((!a.is_tensor() && !a.scalar().integral()) || (!b.is_tensor() && !b.scalar().integral())) t = is_floating(t) ? t : DType::f32;
  auto dense = [&](const Operand& o) {
    if (!o.is_tensor()) return full({}, o.scalar(), {.dtype = t, .device = some.device()});
    Tensor x = cast(o.tensor(), t);
    return x.rank() == 0 ? x.to(condition.device()) : x;
  };
  Tensor x = dense(a), y = dense(b);
  Shape s = broadcast("where", condition.shape(), broadcast("where", x.shape(), y.shape()));
  return call(op::where, {expand(condition, s), expand(x, s), expand(y, s)});
}

// ---- making tensors

Tensor empty(const Shape& shape, const TensorOptions& o) {
  Tensor t = Tensor::empty(Meta(shape, o.dtype.value_or(DType::f32), o.device));
  if (o.requires_grad) t.requires_grad_();
  return t;
}
Tensor full(const Shape& shape, Scalar value, const TensorOptions& o) {
  Tensor t = empty(shape, {.dtype = o.dtype, .device = o.device});
  call_all(op::fill, {t}, Attrs::of(value));
  if (o.requires_grad) t.requires_grad_();
  return t;
}
Tensor zeros(const Shape& shape, const TensorOptions& o) { return full(shape, 0, o); }
Tensor ones(const Shape& shape, const TensorOptions& o) { return full(shape, 1, o); }
Tensor empty_like(const Tensor& x) { return empty(x.shape(), x.options()); }
Tensor zeros_like(const Tensor& x) { return zeros(x.shape(), x.options()); }
Tensor ones_like(const Tensor& x) { return ones(x.shape(), x.options()); }

Tensor arange(Size n, const TensorOptions& o) {
  HT_CHECK(n >= 0, "arange: expected a size of 0 or more, got ", n.value);
  std::vector<int64_t> v(static_cast<size_t>(n.value));
  std::iota(v.begin(), v.end(), 0);
  return tensor(v, {.dtype = o.dtype.value_or(DType::i64), .device = o.device, .requires_grad = o.requires_grad});
}

Tensor from_bytes(const void* values, DType dtype, const Shape& shape, const TensorOptions& o) {
  Tensor t = empty(shape, {.dtype = dtype});
  int64_t bytes = t.numel() * static_cast<int64_t>(size_of(dtype));
  if (bytes > 0) std::memcpy(t.raw_data(), values, static_cast<size_t>(bytes));
  NoGrad off;
  t = cast(t, o.dtype.value_or(dtype)).to(o.device);
  if (o.requires_grad) t.requires_grad_();
  return t;
}

Tensor from_blob(void* data, const Shape& shape, std::function<void(void*)> release, const TensorOptions& o) {
  DType dtype = o.dtype.value_or(DType::f32);
  int64_t bytes = checked_mul(shape.numel(), static_cast<int64_t>(size_of(dtype)));
  HT_CHECK(data || bytes == 0, "from_blob: data is null");
  Tensor t(Meta(shape, dtype, o.device), Storage::borrow(data, bytes, o.device, std::move(release)));
  if (o.requires_grad) t.requires_grad_();
  return t;
}

// ---- members of Tensor

Tensor Tensor::to(DType dtype) const { return cast(*this, dtype); }
Tensor Tensor::to(Device device) const {
  HT_CHECK(defined(), "to: the tensor is undefined");
  if (this->device() == device) return *this;
  backend(device.type);  // says clearly when there is none
  if (device.type == DeviceType::cpu) check_may_sync("to(cpu)");
  // One number travels as a kernel's argument: no copy, no wait, and legal while a step is captured.
  if (rank() == 0 && this->device().type == DeviceType::cpu && !requires_grad()) 
    return full({}, host_value(*this), {.dtype = dtype(), .device = device});
  return call(op::transfer, {contiguous()}, Attrs::of(device));
}
Tensor Tensor::to(const TensorOptions& o) const {
  DType dtype = o.dtype.value_or(this->dtype());
  // Convert on the side where fewer bytes travel.
  return size_of(dtype) < size_of(this->dtype()) ? to(dtype).to(o.device) : to(o.device).to(dtype);
}
Tensor Tensor::clone() const { return call(op::clone, {*this}); }
Tensor Tensor::contiguous() const { return is_contiguous() ? *this : clone(); }

Tensor& Tensor::copy_(const Tensor& from) {
  HT_CHECK(defined() && from.defined(), "copy_: a tensor is undefined");
  Tensor source = from;
  if (source.device() != device()) source = from.to({.dtype = dtype(), .device = device()});
  if (source.shape() != shape()) {
    HT_CHECK(broadcast("copy_", shape(), source.shape()) == shape(), "copy_: cannot broadcast ", source.shape(), " to ", shape());
    source = halftone::expand(source, shape());
  }
  if (source.storage() == storage() && source.body() != body()) source = source.clone();  // the two may overlap
  call_all(op::copy, {*this, source});
  return *this;
}
Tensor& Tensor::fill_(Scalar value) {
  call_all(op::fill, {*this}, Attrs::of(value));
  return *this;
}
Tensor& Tensor::add_(const Tensor& other, double alpha) { return copy_(*this + (alpha == 1 ? other : other * alpha)); }
Tensor& Tensor::add_(double value) { return copy_(*this + value); }
Tensor& Tensor::mul_(const Tensor& other) { return copy_(*this * other); }
Tensor& Tensor::mul_(double value) { return copy_(*this * value); }
Tensor& Tensor::lerp_(const Tensor& other, double weight) { return copy_(*this + (other - *this) * weight); }

}  // namespace halftone
