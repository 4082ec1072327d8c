#pragma once
// Modules are values that own their parameters. A parameter is a place: optimizers, shadow copies and graphs hold its
// Body, so values are written into it (copy_, set_) and the Body behind it is exchanged only on purpose.
//
//   struct Net : nn::Module {
//     nn::Linear fc{784, 128}, head{128, 10};
//     HT_FIELDS(fc, head)  // names "fc.weight", "fc.bias", "head.weight", ...
//     Tensor forward(const Tensor& x) override { return head(relu(fc(x))); }
//   };
#include <concepts>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "halftone/core/hook.h"
#include "halftone/core/state_dict.h"
#include "halftone/core/thread_state.h"
#include "halftone/ops/copy.h"

namespace halftone::nn {

using halftone::LoadOptions;
using halftone::StateDict;
class Module;
class Any;

// ---- parameters and buffers

// Notes its own address while it lives. Every slot and every module is one, which is how a walk finds those that lie
// inside a model but are missing from its HT_FIELDS.
class HT_API Alive {
 protected:
  Alive() noexcept { note(); }
  Alive(const Alive&) noexcept { note(); }
  Alive& operator=(const Alive&) noexcept { return *this; }
  ~Alive();

 private:
  void note() noexcept;
};

enum class Role : uint8_t { parameter, buffer };

// A tensor that a module owns: nn::Parameter is trained (floating dtypes only), nn::Buffer is not. A slot made from a
// tensor is a leaf of its own over the tensor's storage; a slot copied from a slot shares it, which ties the two.
template <Role r> class Slot : public Tensor, private Alive {
 public:
  static constexpr Role role = r;
  Slot() = default;
  Slot(const Tensor& value) : Tensor(value.detach()) {
    own(1);
    if constexpr (r == Role::parameter) {
      HT_CHECK(!defined() || is_floating(dtype()), "nn::Parameter: expected a floating dtype, got ", dtype(),
               "; what is not trained is an nn::Buffer");
      if (defined()) requires_grad_();
    }
  }
  Slot(const Slot& o) : Tensor(o), Alive(o) { own(1); }
  Slot(Slot&& o) noexcept : Tensor(std::move(o)), Alive(o) {}
  ~Slot() { own(-1); }
  Slot& operator=(Slot&& o) noexcept {  // another parameter: optimizers made before refuse their next step
    if (this != &o) {
      own(-1);
      body_ = std::move(o.body_);
    }
    return *this;
  }
  Slot& operator=(const Slot&) = delete;    // a.tie(b) shares one parameter; a.copy_(b) copies values
  Slot& operator=(const Tensor&) = delete;  // w.copy_(values) writes; for a local variable, say Tensor w, not auto

  // From now on this is the same parameter as `o`, of the same shape.
  void tie(const Slot& o) {
    HT_CHECK(o.defined(), "tie: the other tensor is undefined");
    HT_CHECK(!defined() || shape() == o.shape(), "tie: expected ", shape(), ", got ", o.shape());
    own(-1);
    body_ = o.body_;
    own(1);
  }

 private:
  void own(int n) {
    if (!body_) return;
    body_->owners += n;
    body_->was_owned = true;
  }
};
using Parameter = Slot<Role::parameter>;
using Buffer = Slot<Role::buffer>;

// Named values in the order in which they were added; as a field, it names what it holds by these names.
template <class T> struct Ordered : std::vector<std::pair<std::string, T>> {
  using mapped_type = T;
  T* find(std::string_view name) {
    for (auto& [key, value] : *this)
      if (key == name) return &value;
    return nullptr;
  }
};

// ---- naming the fields

template <class> inline constexpr bool never = false;
template <class T> inline constexpr bool is_shared_ptr = false;
template <class T> inline constexpr bool is_shared_ptr<std::shared_ptr<T>> = true;

// One walk over a module and what it holds, outermost first. It collects pointers and changes nothing; it throws when
// a class does not name its own fields, leaves one out, or names one that lies elsewhere.
class HT_API Fields {
 public:
  struct NamedTensor {
    std::string name;
    Tensor* tensor;
    Role role;
    Module* owner;
    std::optional<DType> dtype;  // what a module around it fixes
  };
  struct NamedModule {
    std::string name;  // "" for the root
    Module* module;
  };
  explicit Fields(const Module& root) { walk("", const_cast<Module&>(root)); }
  std::vector<NamedTensor> tensors;  // every defined slot under every name, so a tied one comes more than once
  std::vector<NamedModule> modules;

  // What HT_FIELDS calls, with the names as one text "fc, head".
  template <class Self, class... F>
  void list(Self& self, [[maybe_unused]] std::string_view names, F&... field) {
    enter(typeid(Self), &self, sizeof(Self));
    (take(next(names), field), ...);
  }

 private:
  template <class F> void take(const std::string& path, F& field) {
    cover(path, &field, sizeof field);
    visit(path, field);
  }
  template <class F> void visit(const std::string& path, F& f) {
    if constexpr (std::derived_from<F, Module>) walk(path, f);
    else if constexpr (std::same_as<F, Parameter> || std::same_as<F, Buffer>) add(path, f, F::role);
    else if constexpr (std::same_as<F, Tensor>)
      static_assert(never<F>, "HT_FIELDS: make this Tensor an nn::Parameter (trained) or an nn::Buffer (not trained)");
    else if constexpr (std::is_array_v<F>) each(path, f);  // before pointers, which arrays decay to
    else if constexpr (is_shared_ptr<F> || std::is_pointer_v<F>)
      static_assert(never<F>, "HT_FIELDS: a pointer or shared_ptr would be shared with every clone; "
                              "hold the module by value or in nn::Any");
    else if constexpr (requires { static_cast<bool>(f); *f; }) {  // optional, unique_ptr
      if (f) visit(path, *f);
    } else if constexpr (requires { typename F::mapped_type; f.begin(); }) {
      for (auto& [key, value] : f) visit(join(path, text::cat(key)), value);
    } else if constexpr (requires { std::begin(f); std::end(f); }) each(path, f);
    else
      static_assert(never<F>, "HT_FIELDS takes modules, nn::Parameter, nn::Buffer, and optionals, unique_ptrs, arrays, "
                              "vectors and maps of them");
  }
  template <class F> void each(const std::string& path, F& f) {
    int i = 0;
    for (auto& element : f) visit(join(path, std::to_string(i++)), element);
  }
  static std::string join(const std::string& path, const std::string& name);
  std::string next(std::string_view& names);
  void walk(const std::string& path, Module& m);
  void add(const std::string& path, Tensor& t, Role role);
  void enter(const std::type_info& type, const void* at, size_t size);
  void cover(const std::string& path, const void* at, size_t size);
  void check_complete() const;

  struct Extent { const char* begin; size_t size; };
  struct Object {  // the module whose fields are being listed
    std::string path;
    Module* module = nullptr;
    std::optional<DType> dtype;
    const std::type_info* type = nullptr;
    Extent extent{nullptr, 0};
    std::vector<Extent> listed;
  };
  Object now_;
};

// The one line a module owes the framework: every field that is or holds a module, a parameter or a buffer. It also
// gives the class its typed clone(). A walk finds a forgotten field, but not what a forgotten vector or unique_ptr
// holds. (Its parameter is called ht_walk, so that fields may have any other name.)
#define HT_FIELDS(...)                                            \
  using ::halftone::nn::Module::forward;                          \
  void ht_fields(::halftone::nn::Fields& ht_walk) override {      \
    ht_walk.list(*this, #__VA_ARGS__ __VA_OPT__(, ) __VA_ARGS__); \
  }                                                               \
  auto clone() const { return ::halftone::nn::clone(*this __VA_OPT__(, ) __VA_ARGS__); }
// In a class that derives from another model: Parent's fields, then these.
#define HT_FIELDS_AFTER(Parent, ...)                              \
  using Parent::forward;                                          \
  void ht_fields(::halftone::nn::Fields& ht_walk) override {      \
    Parent::ht_fields(ht_walk);                                   \
    ht_walk.list(*this, #__VA_ARGS__ __VA_OPT__(, ) __VA_ARGS__); \
  }                                                               \
  auto clone() const { return ::halftone::nn::clone(*this __VA_OPT__(, ) __VA_ARGS__); }

// ---- modules

// Says in an error that flies out of m's call where m lies in the module whose call is this thread's outermost: " (in layer 2.conv1)".
// Its type stays, and it says so once; nothing is added where m is that module itself, or none of its layers.
HT_API void name_layer(Error& e, const Module& m) noexcept;

// Moving a module keeps its parameters; copying one is what only clone() may do, and throws elsewhere. A model with
// several inputs declares its own operator() beside forward.
class HT_API Module : private Alive {
 public:
  virtual ~Module() = default;
  Tensor operator()(const Tensor& x) {
    WithinScope here(this);
    try {
      return observed() ? observed_forward(x) : forward(x);
    } catch (Error& e) {
      name_layer(e, *this);
      throw;
    }
  }
  virtual Tensor forward(const Tensor& x);  // throws, naming the class, unless it is overridden

  // Moves every tensor, gradients included, or converts the floating ones to a floating dtype; to a 16-bit one, those of
  // modules that keep f32 are converted to f32, and what a fixed_dtype() holds has that. Parameters keep their identity, so
  // an optimizer made before follows. When it throws, calling it again completes the move.
  Module& to(Device device);
  Module& to(DType dtype);
  // Training mode, of this module and all below: what dropout and batch norm ask.
  Module& train(bool on = true);
  Module& eval() { return train(false); }
  bool training() const { return training_; }
  // Whether its own tensors stay f32 in a model of a 16-bit dtype: those of batch norm do, whose statistics would not move.
  virtual bool keeps_f32() const { return false; }
  // The dtype in which all that this module holds stays, if there is one.
  virtual std::optional<DType> fixed_dtype() const { return {}; }
  Module& requires_grad_(bool on = true);  // of every parameter
  void zero_grad();
  // Calls f for this module and all below, outermost first. f may change them, not add or remove any.
  Module& apply(const std::function<void(Module&)>& f);

  // Each once, under its first name, even when tied.
  std::vector<Tensor> parameters() const;
  std::vector<std::pair<std::string, Tensor>> named_parameters() const;
  std::vector<Tensor> buffers() const;
  std::vector<std::pair<std::string, Tensor>> named_buffers() const;
  // This module, named "", and all below.
  std::vector<Module*> modules();
  std::vector<std::pair<std::string, Module*>> named_modules();

  // Hooks run around calls of one tensor, m(x), in the order of their registration: before forward, with x, and after it,
  // with x and the result. One that returns a defined tensor replaces x, or the result. They move with the module; a clone
  // has none. A module with hooks is not fused with its neighbour.
  using ForwardPreHook = std::function<Tensor(Module& m, const Tensor& x)>;
  using ForwardHook = std::function<Tensor(Module& m, const Tensor& x, const Tensor& y)>;
  [[nodiscard]] HookHandle register_forward_pre_hook(ForwardPreHook hook);
  [[nodiscard]] HookHandle register_forward_hook(ForwardHook hook);
  // Whether a hook or a summary looks at its calls, so that it must run as itself.
  bool observed() const { return watched_ || (hooks_ && !hooks_->empty()); }

  // Parameters and buffers under all their names. The entries alias the live weights; StateDict::clone() is a
  // snapshot.
  StateDict state_dict() const;
  // Writes the state's values into the live tensors, in their dtype and on their device. Throws before anything is
  // written when shapes differ or, unless {.strict = false}, names do, and when it is a whole checkpoint's, of which a model
  // takes a part: io::load(path).part("net"). A tied tensor needs one of its names.
  void load_state_dict(const StateDict& state, LoadOptions o = {});

  // A table of layers, the shapes they give, their parameters and bytes, from a run in eval mode under NoGrad on zeros
  // of shape `input` in the model's dtype; or from whatever `run` does with the model, which no other thread may use
  // meanwhile. Parameters and bytes are a layer's own, without those of what it holds.
  std::string summary(const Shape& input);
  std::string summary(const std::function<void()>& run);

  // HT_FIELDS(...) writes this: "abstract ... ht_fields" means that line is missing.
  virtual void ht_fields(Fields&) = 0;

 protected:
  Module() = default;
  Module(Module&& o) noexcept : Alive(o), hooks_(std::move(o.hooks_)), training_(o.training_) {}
  Module& operator=(Module&& o) noexcept {
    hooks_ = std::move(o.hooks_);
    training_ = o.training_;
    return *this;
  }
  Module(const Module& o);
  Module& operator=(const Module&) = delete;  // a model is moved, or copied by clone()

 private:
  friend class Fields;
  friend class Watch;
  struct Hooks {
    int64_t registered = 0;
    std::vector<std::pair<int64_t, ForwardPreHook>> before;
    std::vector<std::pair<int64_t, ForwardHook>> after;
    bool empty() const { return before.empty() && after.empty(); }
  };
  template <class F> HookHandle add_hook(std::vector<std::pair<int64_t, F>> Hooks::*list, F hook);
  Tensor observed_forward(const Tensor& x);
  Tensor watched_forward(const Tensor& x);
  std::shared_ptr<Hooks> hooks_;
  bool training_ = true, watched_ = false;
};

// ---- copying

// Permits copies of modules on this thread while it lives, and makes them deep.
class HT_API Copying {
 public:
  [[nodiscard]] Copying();
  ~Copying();
  Copying(const Copying&) = delete;
  // Gives every named tensor of a fresh copy a Body and storage of its own, without gradient; ties stay ties.
  void separate(Module& copy);
  static bool allowed();
};

// Whether T can really be copied; std::vector<std::unique_ptr<X>> only claims so.
template <class T> inline constexpr bool copyable = std::is_copy_constructible_v<std::remove_all_extents_t<T>>;
template <class T> requires requires { typename T::value_type; }
inline constexpr bool copyable<T> = copyable<typename T::value_type>;
struct one_of_the_fields_cannot_be_copied {};
[[noreturn]] HT_API void refuse_clone(const Module& m, const std::type_info& as);

// A deep copy with the type, the plain members, the ties and the mode of `m`; what is unlisted is copied as C++ copies
// it, so a shared_ptr or a plain Tensor is shared. The fields are named so that a model with one that cannot be copied
// compiles as long as nobody clones it.
template <class M, class... F> auto clone(const M& m, const F&...) {
  if constexpr (!(copyable<F> && ...) || !std::is_copy_constructible_v<M>) return one_of_the_fields_cannot_be_copied{};
  else {
    if (typeid(m) != typeid(M)) refuse_clone(m, typeid(M));
    Copying copying;
    M copy(m);
    copying.separate(copy);
    return copy;
  }
}

// A vector of modules of one type, moved in: initializer lists only copy.
template <class... M> auto list(M&&... m) {
  static_assert(!(std::is_lvalue_reference_v<M> || ...),
                "nn::list owns its modules: construct them in place or std::move them in");
  std::vector<std::common_type_t<M...>> v;
  v.reserve(sizeof...(M));
  (v.push_back(std::move(m)), ...);
  return v;
}

// A module of any type, held by value. It adds nothing to names and is no entry of modules(): what it holds is.
class HT_API Any final : public Module {
 public:
  template <class M> requires(std::derived_from<M, Module> && !std::same_as<M, Any>)
  Any(M&& m)
      : held_(std::make_unique<M>(std::forward<M>(m))),
        copy_([](const Module& o) -> std::unique_ptr<Module> {
          return std::make_unique<M>(static_cast<const M&>(o));
        }) {}
  template <class M> requires(std::derived_from<M, Module> && !std::same_as<std::remove_const_t<M>, Any>)
  Any(M&) = delete;  // nn::Any owns its module: construct it in place, std::move it in, or pass m.clone()
  Any(const Any& o) : Module(o), held_(o.copy_(o.get())), copy_(o.copy_) {}
  Any(Any&&) noexcept = default;
  Any& operator=(Any&&) noexcept = default;

  Tensor forward(const Tensor& x) override { return get()(x); }
  bool training() const { return get().training(); }
  Module& get() const;  // throws when it was moved from
  // What it holds, as an M; throws, naming both types, when it is not one.
  template <class M> M& as() const {
    if (auto* m = dynamic_cast<M*>(&get())) return *m;
    refuse_as(typeid(M));
  }
  void ht_fields(Fields&) override {}  // a walk goes straight to what is held
  Any clone() const { return nn::clone(*this); }

 private:
  friend class Fields;
  [[noreturn]] void refuse_as(const std::type_info& wanted) const;
  std::unique_ptr<Module> held_;
  std::unique_ptr<Module> (*copy_)(const Module&);
};

}  // namespace halftone::nn
