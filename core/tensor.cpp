// Tensor: metadata, memory access, views without history. What needs an operator is defined in ops/, what needs
// a gradient in autograd/.
#include "halftone/core/tensor.h"

#include "halftone/core/backend.h"
#include "halftone/core/state_dict.h"
#include "halftone/core/thread_state.h"

namespace halftone {
namespace {

// Elements from the first to one past the last that a layout touches.
int64_t extent(const Shape& shape, const Strides& strides) {
  int64_t last = 0;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return 0;
    last = checked_add(last, checked_mul(shape[i] - 1, strides[i]));
  }
  return last + 1;
}

}  // namespace

bool Meta::contiguous() const {
  int64_t expected = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 0) return true;
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

Strides channels_last_strides(const Shape& s) {
  HT_CHECK(s.rank() >= 3, "channels last: expected [n, channels, ...], got ", s);
  Strides strides = s;
  int64_t step = strides[1] = 1;
  auto next = [&, size = s[1]](size_t d) mutable {
    step = checked_mul(step, size == 0 ? 1 : size);
    strides[d] = step;
    size = s[d];
  };
  for (size_t d = s.size(); d-- > 2;) next(d);
  next(0);
  return strides;
}

bool Meta::channels_last() const {
  if (shape.rank() < 3) return false;
  Strides expected = channels_last_strides(shape);
  for (size_t d = 0; d < shape.size(); ++d)
    if (shape[d] > 1 && strides[d] != expected[d]) return false;
  return true;
}

Meta laid_out_like(const Meta& x, DType dtype) {
  Meta m(x.shape, dtype, x.device);
  if (x.device.type != DeviceType::cpu && x.shape.rank() >= 4 && !x.contiguous() && x.channels_last()) m.strides = channels_last_strides(x.shape);
  return m;
}

std::string str(const Meta& m) { return text::cat(m.shape, " (", m.dtype, ")"); }

Tensor Tensor::allocate(const Meta& meta) {
  for (auto d : meta.shape) HT_CHECK(d >= 0, "a tensor's sizes must be 0 or more, got ", meta.shape);
  int64_t bytes = checked_mul(meta.shape.numel(), static_cast<int64_t>(size_of(meta.dtype)));
  return Tensor(meta, Storage::allocate(bytes, meta.device));
}

int64_t Tensor::size(int64_t dim) const {
  HT_CHECK(rank() > 0, "size: a 0-d tensor has no dimension ", dim);
  return shape()[static_cast<size_t>(normalize_dim("size", dim, rank()))];
}

const Meta& Tensor::refuse_undefined() { throw Error("a tensor is undefined; it has no shape, dtype or data"); }

void* Tensor::raw_data() const {
  HT_CHECK(defined(), "data: the tensor is undefined");
  HT_CHECK(!storage()->expired(), "data: ", storage()->expired());
  auto* base = static_cast<char*>(storage()->data());
  return base ? base + meta().offset * static_cast<int64_t>(size_of(dtype())) : nullptr;
}

void* Tensor::data_of(DType expected) const {
  HT_CHECK(defined(), "data: the tensor is undefined");
  HT_CHECK(dtype() == expected, "data: asked for ", expected, ", the tensor is ", dtype());
  return raw_data();
}

Tensor Tensor::detach() const {
  if (!defined()) return {};
  return Tensor(meta(), storage(), body_->is_view);
}

Tensor Tensor::as_strided(const Shape& shape, const Strides& strides, int64_t offset) const {
  HT_CHECK(shape.rank() == strides.rank(), "as_strided: shape ", shape, " and strides ", strides, " have different lengths");
  for (size_t i = 0; i < shape.size(); ++i)
    HT_CHECK(shape[i] >= 0 && strides[i] >= 0, "as_strided: sizes and strides must be 0 or more, got ", shape, " and ", strides);
  HT_CHECK(offset >= 0, "as_strided: offset must be 0 or more, got ", offset);
  int64_t end = checked_mul(checked_add(offset, extent(shape, strides)), static_cast<int64_t>(size_of(dtype())));
  HT_CHECK(end <= storage()->bytes(), "as_strided: shape ", shape, " with strides ", strides, " at offset ", offset, " needs ", end,
           " bytes, the storage has ", storage()->bytes());
  Tensor t = detach();
  t.body_->meta.shape = shape;
  t.body_->meta.strides = strides;
  t.body_->meta.offset = offset;
  t.body_->is_view = true;
  return t;
}

Tensor Tensor::carve(int64_t offset, const Shape& shape) const {
  HT_CHECK(is_contiguous(), "carve: the tensor must be contiguous, got strides ", strides());
  auto width = static_cast<int64_t>(size_of(dtype()));
  HT_CHECK(offset >= 0 && checked_add(offset, shape.numel()) <= numel(), "carve: elements ", offset, " to ", offset + shape.numel(),
           " leave a tensor of ", numel());
  return Tensor(Meta(shape, dtype(), device()),
                Storage::carve(storage(), checked_mul(meta().offset + offset, width), checked_mul(shape.numel(), width)));
}

void Tensor::set_(const Tensor& value) const {
  HT_CHECK(defined() && value.defined(), "set_: both tensors must be defined");
  storage()->drop_shadows();
  value.storage()->raise_version(version() + 1);  // what a tape saved of this body has changed
  body_->meta = value.meta();
  body_->storage = value.storage();
  body_->is_view = value.body_->is_view;
}

Scalar Tensor::first() const {
  HT_CHECK(defined(), "item: the tensor is undefined");
  HT_CHECK(numel() == 1, "item: needs a tensor of one element, got ", meta());
  return host_value(to_host(*this, "item"));
}

Scalar host_value(const Tensor& t) {
  HT_CHECK(t.numel() == 1 && t.device().type == DeviceType::cpu, "host_value: expected one element on the CPU, got ", t.meta(), " on ", t.device());
  return visit(t.dtype(), [&]<class T>(Type<T>) {
    T v = *t.data<T>();
    if constexpr (is_16bit<T>) return Scalar(static_cast<float>(v));
    else return Scalar(v);
  });
}

Tensor to_host(const Tensor& t, const char* who) {
  HT_CHECK(t.defined(), who, ": the tensor is undefined");
  check_may_sync(who);
  NoGrad off;
  Tensor dense = t.detach().contiguous();
  if (dense.device().type == DeviceType::cpu) return dense;
  Tensor host = Tensor::empty(Meta(t.shape(), t.dtype(), Device::cpu()));
  int64_t bytes = t.numel() * static_cast<int64_t>(size_of(t.dtype()));
  if (bytes > 0) backend(t.device().type).copy(host.raw_data(), host.device(), dense.raw_data(), dense.device(), bytes);
  return host;
}

void StateDict::add(const std::string& prefix, const StateDict& other) {
  for (auto& [name, t] : other) add(prefix.empty() ? name : prefix + "." + name, t);
}
Tensor* StateDict::find(std::string_view name) {
  for (auto& [n, t] : entries_) if (n == name) return &t;
  return nullptr;
}
const Tensor& StateDict::at(std::string_view name) const {
  if (const Tensor* t = find(name)) return *t;
  std::string cure;
  for (auto& [n, t] : entries_)
    if (size_t dot = n.find('.'); dot != n.npos && n.substr(dot + 1) == name)
      cure = text::cat("; there is '", n, "', so this is a state of several parts, as a checkpoint's: take part(\"", n.substr(0, dot), "\") of it");
  throw Error(text::cat("state: there is no entry '", name, "'", cure));
}
StateDict StateDict::part(std::string_view prefix) const {
  StateDict r;
  for (auto& [n, t] : entries_)
    if (n.size() > prefix.size() && n.starts_with(prefix) && n[prefix.size()] == '.') r.add(n.substr(prefix.size() + 1), t);
  return r;
}
StateDict StateDict::clone() const {
  StateDict r;
  for (auto& [n, t] : entries_) r.add(n, t.detach().clone());
  return r;
}

}  // namespace halftone
