#pragma once
// Names to tensors, in order: how models, optimizers and scalers hand over their state.
#include <concepts>
#include <string>
#include <utility>
#include <vector>

#include "halftone/core/tensor.h"

namespace halftone {

// Aliases the live tensors of what it came from; clone() is the snapshot.
class HT_API StateDict {
 public:
  using Entry = std::pair<std::string, Tensor>;
  void add(std::string name, Tensor t) { entries_.emplace_back(std::move(name), std::move(t)); }
  // Adds every entry of `other` as "prefix.name".
  void add(const std::string& prefix, const StateDict& other);
  Tensor* find(std::string_view name);
  const Tensor* find(std::string_view name) const { return const_cast<StateDict*>(this)->find(name); }
  const Tensor& at(std::string_view name) const;       // throws, naming it, when it is missing
  StateDict part(std::string_view prefix) const;       // the entries "prefix.*", without the prefix
  StateDict clone() const;
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }
  size_t size() const { return entries_.size(); }

 private:
  std::vector<Entry> entries_;
};

struct LoadOptions { bool strict = true; };

// What a checkpoint can hold.
template <class T>
concept Stateful = requires(T& t, const T& c, const StateDict& s) {
  { c.state_dict() } -> std::convertible_to<StateDict>;
  t.load_state_dict(s);
};

}  // namespace halftone
