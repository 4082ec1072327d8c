// cast, clone, copy, fill, transfer between devices, where; and the functions that make tensors.
#include "halftone/ops/copy.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "halftone/core/backend.h"
#include "halftone/ops/all.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/scan.h"
#include "halftone/ops/shape.h"
#include "halftone/ops/ternary.h"

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

// A number is read as one element again and again.
void run_where(const Call& call, std::span<Tensor> out) {
  auto attrs = call.as<WhereAttrs>();
  const Tensor& condition = call.in[0];
  const Tensor *a = attrs.a_is_number ? nullptr : &call.in[1], *b = attrs.b_is_number ? nullptr : &call.in[call.in.size() - 1];
  Strides still = Strides::filled(condition.rank(), 0);
  visit(out[0].dtype(), [&]<class T>(Type<T>) {
    const bool* c = condition.data<bool>();
    T a_number = attrs.a.to<T>(), b_number = attrs.b.to<T>(), *y = out[0].data<T>();
    const T *pa = a ? a->data<T>() : &a_number, *pb = b ? b->data<T>() : &b_number;
    Rows<4>(out[0].shape(), {out[0].strides(), condition.strides(), a ? a->strides() : still, b ? b->strides() : still})
        .run([&](auto at, auto step, int64_t n) {
          for (int64_t i = 0; i < n; ++i)
            y[at[0] + i * step[0]] = c[at[1] + i * step[1]] ? pa[at[2] + i * step[2]] : pb[at[3] + i * step[3]];
        });
  });
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
    .infer = [](const Call& c) -> Metas { return {laid_out_like(c.in[0].meta(), c.as<DType>())}; },
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
      const Meta& condition = c.in[0].meta();
      HT_CHECK(condition.dtype == DType::b8, "where: expected a bool condition, got ", condition.dtype);
      const Meta &a = c.in[1].meta(), &b = c.in[c.in.size() - 1].meta();
      HT_CHECK(condition.shape == a.shape && a.shape == b.shape && a.dtype == b.dtype, "where: expected equal shapes and dtypes, got ",
               condition, ", ", a, " and ", b);
      return {Meta(a.shape, a.dtype, a.device)};
    },
    .saves = {.in = 1, .out = 0},
    .backward = [](const Rule& r) -> Tensors {
      auto attrs = r.as<WhereAttrs>();
      Tensors grads{Tensor()};
      if (!attrs.a_is_number) grads.push_back(r.needs(1) ? halftone::where(r.in(), r.grad(), 0) : Tensor());
      if (!attrs.b_is_number) grads.push_back(r.needs(r.size() - 1) ? halftone::where(r.in(), 0, r.grad()) : Tensor());
      return grads;
    },
    .samples = [] {
      std::vector<Sample> all;
      auto condition = [](const Shape& s) { return SampleInput{.shape = s, .low = 0, .high = 2, .dtype = DType::b8}; };
      for (auto& s : elementwise::sample_shapes) all.push_back({{condition(s), {.shape = s}, {.shape = s}}, {}});
      for (auto& s : {Shape{33}, Shape{2, 5}}) {
        all.push_back({{condition(s), {.shape = s}}, Attrs::of(WhereAttrs{{}, 1, false, true})});
        all.push_back({{condition(s), {.shape = s}}, Attrs::of(WhereAttrs{1, {}, true, false})});
      }
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
  HT_CHECK(condition.defined(), "where: the condition is undefined");
  DType t = elementwise::meeting_dtype(op::where, all_types, {&a, &b});
  Tensors in{condition};
  for (auto* o : {&a, &b}) if (o->is_tensor()) in.push_back(cast(o->tensor(), t));
  elementwise::align(op::where, in);
  return call(op::where, std::move(in), Attrs::of(WhereAttrs{a.scalar(), b.scalar(), !a.is_tensor(), !b.is_tensor()}));
}

Tensor masked_fill(const Tensor& x, const Tensor& mask, const Operand& value) {
  HT_CHECK(x.defined() && mask.defined(), "masked_fill: a tensor is undefined");
  HT_CHECK(mask.dtype() == DType::b8, "masked_fill: expected a bool mask, got ", mask.dtype());
  return where(mask, value, x).to(x.dtype());
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
  DType dtype = o.dtype.value_or(DType::i64);
  NoGrad off;
  // Counted on the device: nothing to wait for, and legal while a step is captured.
  Tensor t = cast(cumsum(ones({n.value}, {.dtype = DType::i64, .device = o.device}), 0) - 1, dtype);
  return t.requires_grad_(o.requires_grad);
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

Tensor dense(const Tensor& t, bool channels_last) {
  if (!channels_last || t.rank() < 3) return t.contiguous();
  if (t.meta().channels_last()) return t;
  Meta m(t.shape(), t.dtype(), t.device());
  m.strides = channels_last_strides(t.shape());
  return Tensor::allocate(m).copy_(t);
}

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

namespace {

// x = op(x, ...), written straight into x where dtypes, shapes and memory allow it; otherwise by way of the operator's own
// result, which copy_ writes or refuses.
Tensor& update(Tensor& x, const OpDef& op, DTypes types, std::initializer_list<const Operand*> operands, const Attrs& attrs) {
  bool tracked = false, repeats = false;
  for (auto* o : operands) tracked |= o->is_tensor() && o->tensor().requires_grad();
  Tensors in = elementwise::meet(op, types, operands);
  for (size_t d = 0; d < x.shape().size(); ++d) repeats |= x.strides()[d] == 0 && x.shape()[d] > 1;
  auto fits = [&](const Tensor& t) {
    bool apart = t.storage() != x.storage() || (t.strides() == x.strides() && t.meta().offset == x.meta().offset);
    return apart && t.dtype() == x.dtype() && t.shape() == x.shape() && t.device() == x.device();
  };
  if ((tracked && thread_state().on(Layer::autograd)) || repeats || !std::all_of(in.begin(), in.end(), fits)) return x.copy_(call(op, in, attrs));
  call_into(op, in, attrs, x);
  return x;
}
template <class Op> Tensor& update(Tensor& x, const Operand& other) {
  Operand self(x);
  auto n = other.is_tensor() ? binary::Number{} : binary::Number{other.scalar(), binary::Number::At::right};
  return update(x, binary::def<Op>, elementwise::types_of<Op>(), {&self, &other}, binary::attrs_with<Op>(n));
}
// Whole numbers stay so beside i64, which would else go by way of f32.
Operand number_for(const Tensor& x, double value) {
  bool whole = x.dtype() == DType::i64 && std::trunc(value) == value && std::abs(value) < 0x1p62;
  return whole ? Operand(static_cast<int64_t>(value)) : Operand(value);
}
template <class Op> Tensor& update(Tensor& x, const Operand& b, const Operand& c, const Op& op) {
  Operand self(x);
  return update(x, ternary::def<Op>, elementwise::types_of<Op>(), {&self, &b, &c}, Attrs::of(ternary::Given<Op>{op, ternary::numbers_of(b, c)}));
}

}  // namespace

Tensor& Tensor::add_(const Tensor& other, double alpha) {
  return alpha == 1 ? update<binary::Add>(*this, other) : update(*this, other, 1, ternary::Addcmul{alpha});
}
Tensor& Tensor::add_(double value) { return update<binary::Add>(*this, number_for(*this, value)); }
Tensor& Tensor::mul_(const Tensor& other) { return update<binary::Mul>(*this, other); }
Tensor& Tensor::mul_(double value) { return update<binary::Mul>(*this, number_for(*this, value)); }
Tensor& Tensor::lerp_(const Tensor& other, double weight) { return update(*this, other, weight, ternary::Lerp{}); }

}  // namespace halftone
