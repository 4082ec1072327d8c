#pragma once
// An operator is a constant (OpDef). A call (Call) falls through a byte's worth of layers to a kernel: dispatch().
#include <cstring>
#include <type_traits>

#include "halftone/core/tensor.h"
#include "halftone/core/thread_state.h"

namespace halftone {

struct OpDef;

// Operator attributes: any trivially copyable struct of at most 144 bytes, held by value. A call without attributes gives P{}.
class Attrs {
 public:
  static constexpr size_t capacity = 144;
  Attrs() noexcept {}  // not defaulted: `{}` would clear the bytes first
  template <class P> static Attrs of(const P& p) {
    static_assert(std::is_trivially_copyable_v<P> && sizeof(P) <= capacity, "attributes: trivially copyable, at most 144 bytes");
    Attrs a;
    a.size_ = sizeof(P);
    std::memcpy(a.bytes_, &p, sizeof p);
    return a;
  }
  template <class P> P as() const {
    P p{};
    if (size_ != 0) std::memcpy(&p, bytes_, sizeof p);
    return p;
  }
  Attrs(const Attrs& o) noexcept : size_(o.size_) { std::memcpy(bytes_, o.bytes_, size_); }
  Attrs& operator=(const Attrs& o) noexcept {
    size_ = o.size_;
    std::memcpy(bytes_, o.bytes_, size_);
    return *this;
  }

 private:
  alignas(8) std::byte bytes_[capacity];
  size_t size_ = 0;
};

// What autocast does to the floating-point arguments of an operator.
//   keep    nothing: it runs in the dtype it is given        lower   cast to the region's 16-bit dtype
//   full    cast to f32                                      widest  cast all to the widest among them
//   total   nothing, but a result that is one number is f32: it may be a loss
//   banned  refuse f16, with the cure in `OpDef::doc`'s place `ban` (bf16 is allowed)
enum class Cast : uint8_t { unset, keep, lower, full, widest, total, banned };

// Which inputs and outputs of a call the tape holds until backward: bit i for input or output i.
struct Saves { uint32_t in = 0, out = 0; };
inline constexpr uint32_t every = ~0u;

using Metas = SmallVector<Meta, 3>;

struct Call {
  const OpDef* op;
  Tensors in;          // an undefined tensor is an optional argument left out
  Attrs attrs;
  Tensors out;         // given: results go there instead of into fresh memory
  bool recording = false;  // produce the auxiliary outputs too
  bool launched = false;   // `out` already holds the result: only record it

  const Tensor& x(size_t i) const { return in[i]; }
  bool has(size_t i) const { return i < in.size() && in[i].defined(); }
  template <class P> P as() const { return attrs.as<P>(); }
};

// The backward of an input's producer, which a node may answer for: OpDef::absorb.
struct Producer { const OpDef* op = nullptr; Attrs attrs; Meta input; };

// What a backward rule sees. It returns one gradient per input, undefined where there is none or where
// needs(i) is false. It may read only what the operator `saves`.
class Rule {
 public:
  virtual const Tensor& in(size_t i = 0) const = 0;     // a saved input, with its history
  virtual const Tensor& out(size_t i = 0) const = 0;    // a saved output, with its history
  virtual const Tensor& grad(size_t i = 0) const = 0;   // may be undefined for i > 0
  virtual Tensor take_grad(size_t i = 0) const = 0;     // the same, whose memory goes with the caller's last use of it
  virtual const Meta& in_meta(size_t i = 0) const = 0;
  virtual bool needs(size_t i) const = 0;
  virtual size_t size() const = 0;                      // number of inputs
  // Not null: return the gradient past input i's producer (of dtype and shape `input`) instead of the input's.
  virtual const Producer* absorbed(size_t i) const = 0;
  // Defined: input i's gradient may be written there, overwriting; returning that tensor says it was.
  virtual Tensor destination(size_t i) const = 0;
  // Defined: what input i's tensor has received from others, of its shape and dtype and in any layout. Who asks must return the sum of
  // it and input i's gradient. It may be another's tensor: read only. Asked a second time, there is none.
  virtual Tensor addend(size_t i) const = 0;
  const Attrs& attrs() const { return *attrs_; }
  template <class P> P as() const { return attrs_->as<P>(); }

 protected:
  explicit Rule(const Attrs& a) : attrs_(&a) {}
  ~Rule() = default;

 private:
  const Attrs* attrs_;
};

// Example arguments of an operator: what tests, benchmarks and docs feed it.
struct SampleInput {
  Shape shape;
  double low = -2, high = 2;             // values drawn uniformly; of an integer input, whole numbers in [low, high)
  std::optional<DType> dtype = {};       // absent: the floating dtype under test
  bool differentiable = true;
  bool present = true;                   // false: an optional input left out
  bool wide = false;                     // f32 when the dtype under test has 16 bits
};
struct Sample {
  std::vector<SampleInput> in;
  Attrs attrs = {};
};

using Kernel = void (*)(const Call& call, std::span<Tensor> out);

struct OpDef {
  const char* name = nullptr;
  const char* doc = nullptr;
  Cast cast = Cast::unset;
  Metas (*infer)(const Call&) = nullptr;          // checks shapes and dtypes, the only place; allocates nothing
  bool view = false;                              // infer gives strides and offset; the output shares input 0's storage
  bool (*writes)(const Call&, size_t i) = nullptr;  // which inputs the kernel changes
  int aux = 0;                                    // so many last outputs are for the tape only
  Saves saves = {};
  Tensors (*backward)(const Rule&) = nullptr;     // null: not differentiable
  Tensors (*fused_backward)(const Rule&) = nullptr;
  bool (*absorb)(const Rule&, size_t i, const Producer&) = nullptr;
  int order = any_order;                          // how often it can be differentiated
  DTypes dtypes[num_device_types] = {all_types, all_types};   // of input 0
  bool deterministic[num_device_types] = {true, true};
  bool any_device = false;                        // inputs may live on different devices
  const char* ban = nullptr;                      // Cast::banned: what to use instead
  Attrs (*in_f32)(const Attrs&) = nullptr;        // Cast::total: attributes for an f32 result; null: the arguments are cast
  std::vector<Sample> (*samples)() = nullptr;
  Kernel kernel[num_device_types] = {};           // filled by the backends

  static constexpr int any_order = 1 << 20;
};

// The one call path.
HT_API Tensors dispatch(Call& call);
// The result of a call with one output.
HT_API Tensor call(const OpDef& op, Tensors in, const Attrs& attrs = {});
HT_API Tensors call_all(const OpDef& op, Tensors in, const Attrs& attrs = {});
// As call, into a given tensor of the right shape and dtype. Neither recorded nor autocast: for kernels' callers and fused
// backward rules. A strict region refuses arguments that it would have cast.
HT_API Tensor call_into(const OpDef& op, Tensors in, const Attrs& attrs, const Tensor& out);
// The same for several results; where no tensor is given, memory is allocated.
HT_API Tensors call_all_into(const OpDef& op, Tensors in, const Attrs& attrs, Tensors out);

// Every operator of the library and of the program. A user's operator registers itself; registering twice is once.
HT_API std::span<const OpDef* const> registry();
HT_API const OpDef* find_op(std::string_view name);  // null when there is none
struct HT_API Register { explicit Register(OpDef& op); };
// A backend's kernel for an operator.
HT_API void set_kernel(OpDef& op, DeviceType type, Kernel kernel);

// The layers. Each is defined in the folder that owns it, and gets a call with itself and those above switched off.
Tensors autocast_layer(Call& call);
Tensors autograd_layer(Call& call);
Tensors profile_layer(Call& call);
// What the autocast layer would not see, and a strict region refuses: operands of which one has 16 bits and which become f32
// before the call; a call into given tensors, whose arguments stay as they are.
void autocast_climbs(const OpDef& op, std::span<const Tensor> operands);
void autocast_passed_by(const Call& call);
// The library's own operators: one constant table, in ops/all.cpp.
std::span<OpDef* const> library_ops();

// An operator whose first input is the only one it changes.
inline constexpr auto writes_first = [](const Call&, size_t i) { return i == 0; };

}  // namespace halftone
