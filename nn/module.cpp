// Walks over trees of modules, and everything that is a loop over what a walk collects.
#include "halftone/nn/module.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "halftone/core/thread_state.h"

namespace halftone::nn {
namespace {

std::string type_name(const std::type_info& type) { return text::demangle(type.name()); }

// The addresses of all live slots and modules.
struct Addresses {
  std::mutex lock;
  std::set<const char*> at;
};
Addresses& addresses() {
  static auto* a = new Addresses;  // never destroyed: a model with static storage may outlive any static of ours
  return *a;
}

}  // namespace

void Alive::note() noexcept {
  std::lock_guard guard(addresses().lock);
  addresses().at.insert(reinterpret_cast<const char*>(this));
}
Alive::~Alive() {
  std::lock_guard guard(addresses().lock);
  addresses().at.erase(reinterpret_cast<const char*>(this));
}

// ---- walking

std::string Fields::join(const std::string& path, const std::string& name) {
  return path.empty() || name.empty() ? path + name : path + "." + name;
}

std::string Fields::next(std::string_view& names) {
  size_t comma = names.find(',');
  std::string_view name = names.substr(0, comma);
  names = comma == names.npos ? std::string_view() : names.substr(comma + 1);
  name.remove_prefix(std::min(name.find_first_not_of(' '), name.size()));
  return join(now_.path, std::string(name));
}

void Fields::walk(const std::string& path, Module& m) {
  if (auto* any = dynamic_cast<Any*>(&m)) {
    if (any->held_) walk(path, *any->held_);
    return;
  }
  modules.push_back({path, &m});
  auto dtype = m.fixed_dtype() ? m.fixed_dtype() : now_.dtype;
  Object above = std::exchange(now_, Object{.path = path, .module = &m, .dtype = dtype, .listed = {}});
  m.ht_fields(*this);
  check_complete();
  now_ = std::move(above);
}

void Fields::add(const std::string& path, Tensor& t, Role role) {
  if (t.defined()) tensors.push_back({path, &t, role, now_.module, now_.dtype});
}

void Fields::enter(const std::type_info& type, const void* at, size_t size) {
  now_.type = &type;
  now_.extent = {static_cast<const char*>(at), size};
}

void Fields::cover(const std::string& path, const void* at, size_t size) {
  auto* begin = static_cast<const char*>(at);
  auto& [first, all] = now_.extent;
  HT_CHECK(begin >= first && begin + size <= first + all, "HT_FIELDS: ", path,
           " lies outside its module (a reference?); hold it by value");
  now_.listed.push_back({begin, size});
}

void Fields::check_complete() const {
  const std::type_info& type = typeid(*now_.module);
  HT_CHECK(now_.type && *now_.type == type, type_name(type),
           " does not name its own fields; write HT_FIELDS_AFTER(", now_.type ? type_name(*now_.type) : "its parent",
           ", ...) in it");
  auto* self = reinterpret_cast<const char*>(static_cast<const Alive*>(now_.module));
  auto listed = [&](const char* at) {
    return std::any_of(now_.listed.begin(), now_.listed.end(),
                       [&](const Extent& e) { return e.begin <= at && at < e.begin + e.size; });
  };
  std::lock_guard guard(addresses().lock);
  auto& all = addresses().at;
  const char *begin = now_.extent.begin, *end = begin + now_.extent.size;
  for (auto at = all.lower_bound(begin); at != all.end() && *at < end; ++at)
    HT_CHECK(*at == self || listed(*at), type_name(type), ": a module or parameter at byte ", *at - begin,
             " is missing from HT_FIELDS", now_.path.empty() ? "" : " (in " + now_.path + ")");
}

// ---- modules

Module::Module(const Module& o) : Alive(o), training_(o.training_) {
  HT_CHECK(Copying::allowed(), "a ", type_name(typeid(o)),
           " was copied by accident; pass modules by reference, std::move them, or call clone()"
           " (a class with its own destructor moves only after Class(Class&&) = default)");
}

void name_layer(Error& e, const Module& m) noexcept {
  constexpr std::string_view mark = " (in layer ";
  const Within* outermost = thread_state().within;
  if (!outermost || std::string_view(e.what()).find(mark) != std::string_view::npos) return;
  while (outermost->outer) outermost = outermost->outer;
  try {
    for (auto& [name, layer] : Fields(*static_cast<const Module*>(outermost->object)).modules)
      if (layer == &m && !name.empty()) {
        static_cast<std::runtime_error&>(e) = std::runtime_error(text::cat(e.what(), mark, name, ")"));  // only the text of whatever Error it is
        return;
      }
  } catch (const std::exception&) {  // a model whose fields cannot be walked: e is what matters
  }
}

Tensor Module::forward(const Tensor&) { throw Error(type_name(typeid(*this)) + " has no forward(const Tensor&)"); }

namespace {

// The body takes over the converted value; so does the body of its gradient, which keeps its place in the slot.
template <class To> void convert(const Tensor& t, To to) {
  NoGrad off;
  if (t.grad().defined() && t.grad().requires_grad()) t.zero_grad();  // it is part of a graph that is over now
  for (const Tensor& x : {t, t.grad()})
    if (x.defined()) x.set_(x.detach().to(to));
}

using Named = std::vector<std::pair<std::string, Tensor>>;
Named named(const Module& m, Role role) {
  Named all;
  std::set<const Body*> seen;
  for (auto& f : Fields(m).tensors)
    if (f.role == role && seen.insert(f.tensor->body().get()).second) all.emplace_back(std::move(f.name), *f.tensor);
  return all;
}
std::vector<Tensor> unnamed(Named all) {
  std::vector<Tensor> tensors;
  tensors.reserve(all.size());
  for (auto& entry : all) tensors.push_back(std::move(entry.second));
  return tensors;
}

}  // namespace

Module& Module::to(Device device) {
  for (auto& f : Fields(*this).tensors)
    if (f.tensor->device() != device) convert(*f.tensor, device);
  return *this;
}
Module& Module::to(DType dtype) {
  HT_CHECK(is_floating(dtype), "Module::to: expected a floating dtype, got ", dtype);
  for (auto& f : Fields(*this).tensors) {
    DType to = f.dtype ? *f.dtype : f.owner->keeps_f32() && size_of(dtype) == 2 ? DType::f32 : dtype;
    if (is_floating(f.tensor->dtype()) && f.tensor->dtype() != to) convert(*f.tensor, to);
  }
  return *this;
}

Module& Module::train(bool on) {
  for (auto& [name, m] : Fields(*this).modules) m->training_ = on;
  return *this;
}
Module& Module::requires_grad_(bool on) {
  for (auto& p : parameters()) p.requires_grad_(on);
  return *this;
}
void Module::zero_grad() {
  for (auto& p : parameters()) p.zero_grad();
}
Module& Module::apply(const std::function<void(Module&)>& f) {
  for (auto& [name, m] : Fields(*this).modules) f(*m);
  return *this;
}

Named Module::named_parameters() const { return named(*this, Role::parameter); }
Named Module::named_buffers() const { return named(*this, Role::buffer); }
std::vector<Tensor> Module::parameters() const { return unnamed(named_parameters()); }
std::vector<Tensor> Module::buffers() const { return unnamed(named_buffers()); }

std::vector<Module*> Module::modules() {
  std::vector<Module*> all;
  for (auto& [name, m] : Fields(*this).modules) all.push_back(m);
  return all;
}
std::vector<std::pair<std::string, Module*>> Module::named_modules() {
  std::vector<std::pair<std::string, Module*>> all;
  for (auto& [name, m] : Fields(*this).modules) all.emplace_back(std::move(name), m);
  return all;
}

// ---- hooks

template <class F> HookHandle Module::add_hook(std::vector<std::pair<int64_t, F>> Hooks::*list, F hook) {
  if (!hooks_) hooks_ = std::make_shared<Hooks>();
  int64_t id = hooks_->registered++;
  ((*hooks_).*list).emplace_back(id, std::move(hook));
  return HookHandle([id, list, at = std::weak_ptr(hooks_)] {
    if (auto hooks = at.lock()) std::erase_if((*hooks).*list, [id](auto& h) { return h.first == id; });
  });
}
HookHandle Module::register_forward_pre_hook(ForwardPreHook hook) { return add_hook(&Hooks::before, std::move(hook)); }
HookHandle Module::register_forward_hook(ForwardHook hook) { return add_hook(&Hooks::after, std::move(hook)); }

Tensor Module::observed_forward(const Tensor& x) {
  Hooks now = hooks_ ? *hooks_ : Hooks();  // a hook may remove itself
  Tensor in = x;
  for (auto& [id, hook] : now.before)
    if (Tensor other = hook(*this, in); other.defined()) in = other;
  Tensor y = watched_ ? watched_forward(in) : forward(in);
  for (auto& [id, hook] : now.after)
    if (Tensor other = hook(*this, in, y); other.defined()) y = other;
  return y;
}

// ---- state

StateDict Module::state_dict() const {
  StateDict state;
  for (auto& f : Fields(*this).tensors) state.add(std::move(f.name), f.tensor->detach());
  return state;
}

namespace {

// "2 missing: fc.weight, fc.bias", or nothing.
std::string count(const std::vector<std::string>& names, std::string_view what) {
  if (names.empty()) return "";
  std::string text = text::cat("\n  ", names.size(), " ", what, ": ");
  for (size_t i = 0; i < names.size(); ++i) text += (i ? ", " : "") + names[i];
  return text;
}

// The parts of a state, "net" of "net.fc.weight".
std::set<std::string> parts_of(const StateDict& state) {
  std::set<std::string> parts;
  for (auto& [name, t] : state)
    if (size_t dot = name.find('.'); dot != name.npos) parts.insert(name.substr(0, dot));
  return parts;
}
// The part that has all of these names; "" where none has.
std::string part_with(const StateDict& state, const std::vector<std::string>& names) {
  for (auto& part : parts_of(state))
    if (std::all_of(names.begin(), names.end(), [&](auto& name) { return state.find(part + "." + name); })) return part;
  return "";
}
// The state of a whole checkpoint, of which the model is the part `fitting`, if any has its names.
[[noreturn]] void refuse_checkpoint(const StateDict& state, const std::string& model, const std::string& fitting) {
  std::string all, part = fitting.empty() ? "<part>" : fitting;
  for (auto& name : parts_of(state)) all += (all.empty() ? "" : ", ") + name;
  throw Error(text::cat("load_state_dict: the state is a whole checkpoint (parts: ", all, "), not a ", model, "; for weights alone, "
                        "load_state_dict(state.part(\"", part, "\")); to go on with its run, io::Checkpoint(folder).add(\"", part,
                        "\", net), the other parts alike, and resume()"));
}

}  // namespace

void Module::load_state_dict(const StateDict& state, LoadOptions o) {
  Fields fields(*this);
  std::map<std::string_view, const Tensor*> given;
  for (auto& [name, t] : state)
    if (t.defined()) given[name] = &t;

  std::set<std::string_view> known;
  std::set<const Body*> found;
  for (auto& f : fields.tensors) {
    known.insert(f.name);
    if (given.contains(f.name)) found.insert(f.tensor->body().get());
  }
  std::vector<std::string> missing, unexpected, misshaped;
  for (auto& f : fields.tensors) {
    if (auto at = given.find(f.name); at == given.end()) {
      if (!found.contains(f.tensor->body().get())) missing.push_back(f.name);
    } else if (at->second->shape() != f.tensor->shape()) {
      misshaped.push_back(text::cat(f.name, " ", f.tensor->shape(), " given as ", at->second->shape()));
    }
  }
  for (auto& [name, t] : given)
    if (!known.contains(name)) unexpected.emplace_back(name);
  const std::string part = found.empty() && !missing.empty() ? part_with(state, missing) : "";
  if (found.empty() && given.contains("rng.seed"))  // io::Checkpoint puts the generator beside its parts
    refuse_checkpoint(state, type_name(typeid(*this)), part);
  if (!o.strict) missing.clear(), unexpected.clear();
  bool names_fit = missing.empty() && unexpected.empty();
  HT_CHECK(names_fit && misshaped.empty(), "load_state_dict: the state does not fit ", type_name(typeid(*this)),
           ", nothing was loaded", count(missing, "missing"), count(unexpected, "unexpected"),
           count(misshaped, "of another shape"),
           names_fit       ? ""
           : part.empty() ? "\n  {.strict = false} leaves out missing and unexpected names"
                          : text::cat("\n  all that is missing is there under \"", part, ".\": load_state_dict(state.part(\"", part, "\"))"));

  NoGrad off;
  for (auto& f : fields.tensors)
    if (auto at = given.find(f.name); at != given.end()) f.tensor->copy_(*at->second);
}

// ---- copying

namespace {
thread_local int copying = 0;
}
Copying::Copying() { ++copying; }
Copying::~Copying() { --copying; }
bool Copying::allowed() { return copying > 0; }

void Copying::separate(Module& copy) {
  NoGrad off;
  std::map<const Body*, Tensor> fresh;
  for (auto& f : Fields(copy).tensors) {
    Tensor& t = *f.tensor;
    Tensor& own = fresh[t.body().get()];
    if (!own.defined()) {
      own = t.detach().clone();
      own.requires_grad_(t.requires_grad());
    }
    --t.body()->owners;  // the slot is rebound as a Tensor, so its count is kept here
    t = own;
    ++own.body()->owners;
    own.body()->was_owned = true;
  }
}

void refuse_clone(const Module& m, const std::type_info& as) {
  throw Error(text::cat("clone: ", type_name(typeid(m)), " would be cut down to ", type_name(as),
                        "; write HT_FIELDS_AFTER(", type_name(as), ", ...) in it"));
}

Module& Any::get() const {
  HT_CHECK(held_, "nn::Any: its module was moved away");
  return *held_;
}
void Any::refuse_as(const std::type_info& wanted) const {
  Module& held = get();
  throw Error(text::cat("nn::Any: holds a ", type_name(typeid(held)), ", not a ", type_name(wanted)));
}

}  // namespace halftone::nn
