#pragma once
// A Tensor is a handle. Copies of a handle share one Body; the Body has identity (history, gradient, owners),
// its Storage has the bytes and the version. A view is another Body over the same Storage.
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "halftone/core/device.h"
#include "halftone/core/dtype.h"
#include "halftone/core/scalar.h"
#include "halftone/core/shape.h"
#include "halftone/core/small_vector.h"
#include "halftone/core/storage.h"

namespace halftone {

class Tensor;
struct AutogradMeta;  // defined in autograd/; core does not know what a gradient is
using Tensors = SmallVector<Tensor, 4>;

// Shape, layout and type of a tensor, without its memory. Strides and offset count elements.
struct Meta {
  Shape shape;
  Strides strides;
  int64_t offset = 0;
  DType dtype = DType::f32;
  Device device;

  Meta() = default;
  Meta(const Shape& s, DType t, Device d) : shape(s), strides(contiguous_strides(s)), dtype(t), device(d) {}
  HT_API bool contiguous() const;
  // Without gaps and with dimension 1, the channels, innermost, as tensor cores want images. Also true of what is
  // contiguous with one channel or one place.
  HT_API bool channels_last() const;
};
HT_API std::string str(const Meta& m);  // "[2, 3] (f32)"
HT_API Strides channels_last_strides(const Shape& s);
// Of a result that lies as x does: on a GPU images and volumes keep their channels last, all else is contiguous.
HT_API Meta laid_out_like(const Meta& x, DType dtype);

struct Body {
  Meta meta;
  std::shared_ptr<Storage> storage;
  std::shared_ptr<AutogradMeta> autograd;
  bool requires_grad = false, is_view = false;
  bool was_owned = false;
  int owners = 0;  // how many nn::Parameter and nn::Buffer slots hold this body

  Body(const Meta& m, std::shared_ptr<Storage> s, bool view = false) : meta(m), storage(std::move(s)), is_view(view) {}
};

// How to make a tensor. Order of fields: dtype, device, requires_grad.
struct TensorOptions {
  std::optional<DType> dtype = {};
  Device device = {};
  bool requires_grad = false;
};
struct ReduceOptions { bool keepdim = false; };
struct BackwardOptions;
class HookHandle;

class HT_API Tensor {
 public:
  Tensor() = default;
  explicit Tensor(std::shared_ptr<Body> body) : body_(std::move(body)) {}
  Tensor(const Meta& meta, std::shared_ptr<Storage> storage, bool is_view = false)
      : body_(std::make_shared<Body>(meta, std::move(storage), is_view)) {}
  // Uninitialised memory of this shape, dtype and device, contiguous.
  static Tensor empty(const Meta& meta) { return allocate(Meta(meta.shape, meta.dtype, meta.device)); }
  // As empty, with meta's strides, which must leave no gaps and no elements that share memory: those of a permutation.
  static Tensor allocate(const Meta& meta);

  // ---- what it is (core)
  bool defined() const { return body_ != nullptr; }
  const Meta& meta() const { return defined() ? body_->meta : refuse_undefined(); }
  const Shape& shape() const { return meta().shape; }
  const Strides& strides() const { return meta().strides; }
  int rank() const { return shape().rank(); }
  int64_t size(int64_t dim) const;
  int64_t numel() const { return shape().numel(); }
  DType dtype() const { return meta().dtype; }
  Device device() const { return meta().device; }
  bool is_contiguous() const { return meta().contiguous(); }
  const std::shared_ptr<Body>& body() const { return body_; }
  const std::shared_ptr<Storage>& storage() const {
    if (!defined()) refuse_undefined();
    return body_->storage;
  }
  uint64_t version() const { return storage()->version(); }
  TensorOptions options() const { return {.dtype = dtype(), .device = device()}; }

  // The first element's address, in device memory; T must be the dtype's type. Writing through it is
  // invisible to the tape, and to copies that are kept of weights: call bump_version() after.
  template <class T> T* data() const { return static_cast<T*>(data_of(dtype_of<T>)); }
  void* raw_data() const;
  void bump_version() const { storage()->bump_version(); }

  // The value of a tensor of one element. Waits for the device; refused under capture and ForbidSync.
  template <Number T = double> T item() const { return first().to<T>(); }
  // All elements in row-major order, converted. Waits for the device.
  template <class T> std::vector<T> to_vector() const;

  // Same memory, no history: shares storage and version, never requires a gradient.
  Tensor detach() const;
  // A view with this layout over the same storage; refused when it would leave the storage.
  Tensor as_strided(const Shape& shape, const Strides& strides, int64_t offset) const;
  // A base tensor over part of a contiguous one: [offset, offset + shape.numel()) of its elements, with a version of its own.
  Tensor carve(int64_t offset, const Shape& shape) const;
  // This body takes over value's storage, layout, dtype and device: every handle sees it. Drops shadow copies.
  void set_(const Tensor& value) const;

  // ---- gradients (autograd)
  bool requires_grad() const { return body_ && body_->requires_grad; }
  Tensor& requires_grad_(bool on = true);
  bool is_leaf() const;
  // What backward() accumulated for this leaf; undefined when it has none.
  Tensor grad() const;
  // Replaces it; shape and dtype must be those of the tensor. An undefined tensor empties the slot.
  void set_grad(const Tensor& g) const;
  // Empties the slot. The buffer stays for the next contribution, unless it is large and nobody else has it: no view, holder, captured step.
  void zero_grad() const;
  void backward() const;
  void backward(const BackwardOptions& options) const;

  // ---- conversions and copies (ops)
  Tensor to(DType dtype) const;
  Tensor to(Device device) const;
  Tensor to(const TensorOptions& options) const;
  Tensor cpu() const { return to(Device::cpu()); }
  Tensor clone() const;
  Tensor contiguous() const;

  // ---- views (ops)
  Tensor slice(int64_t dim, std::optional<int64_t> begin, std::optional<int64_t> end, int64_t step = 1) const;
  Tensor select(int64_t dim, int64_t index) const;
  Tensor operator[](Size index) const { return select(0, index); }
  Tensor transpose(int64_t a, int64_t b) const;
  Tensor t() const { return transpose(-2, -1); }
  Tensor permute(const Shape& order) const;
  Tensor view(const Shape& shape) const;     // one size may be -1; throws when a copy would be needed
  Tensor reshape(const Shape& shape) const;  // a view when possible, else a copy
  Tensor flatten(int64_t from = 0, int64_t to = -1) const;
  Tensor expand(const Shape& shape) const;
  Tensor squeeze(int64_t dim) const;
  Tensor unsqueeze(int64_t dim) const;

  // ---- mathematics (ops)
  Tensor sum() const;
  Tensor sum(Size dim, ReduceOptions o = {}) const;
  Tensor sum(std::initializer_list<Size> dims, ReduceOptions o = {}) const;
  Tensor mean() const;
  Tensor mean(Size dim, ReduceOptions o = {}) const;
  Tensor mean(std::initializer_list<Size> dims, ReduceOptions o = {}) const;
  Tensor max() const;
  Tensor argmax(Size dim, ReduceOptions o = {}) const;
  Tensor pow(double exponent) const;
  Tensor sqrt() const;
  Tensor exp() const;
  Tensor log() const;
  Tensor abs() const;

  // ---- in place (ops): refused on tensors with history; on leaves that require a gradient only under NoGrad
  Tensor& add_(const Tensor& other, double alpha = 1);
  Tensor& add_(double value);
  Tensor& mul_(const Tensor& other);
  Tensor& mul_(double value);
  Tensor& copy_(const Tensor& from);  // broadcasts, converts, crosses devices
  Tensor& fill_(Scalar value);
  Tensor& zero_() { return fill_(0); }
  Tensor& lerp_(const Tensor& other, double weight);

 protected:
  std::shared_ptr<Body> body_;

 private:
  Scalar first() const;
  void* data_of(DType expected) const;
  [[noreturn]] static const Meta& refuse_undefined();
};

HT_API std::string str(const Tensor& t);  // values, shape and dtype, abbreviated when large
// The text that str() gives.
HT_API std::ostream& operator<<(std::ostream& os, const Tensor& t);
HT_API std::ostream& operator<<(std::ostream& os, const Shape& s);
HT_API std::ostream& operator<<(std::ostream& os, DType t);
HT_API std::ostream& operator<<(std::ostream& os, Device d);

// The number in a CPU tensor of one element; needs no wait, so it is allowed wherever a call is.
HT_API Scalar host_value(const Tensor& t);
// A contiguous CPU copy (or the tensor itself when it is one already), outside the tape. Waits for the device.
HT_API Tensor to_host(const Tensor& t, const char* who);

template <class T> std::vector<T> Tensor::to_vector() const {
  Tensor host = to_host(*this, "to_vector");
  std::vector<T> v(static_cast<size_t>(numel()));
  visit(dtype(), [&]<class S>(Type<S>) {
    const S* p = host.data<S>();
    for (size_t i = 0; i < v.size(); ++i) v[i] = convert<T>(p[i]);
  });
  return v;
}

}  // namespace halftone
