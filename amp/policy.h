#pragma once
// Which dtype each operator runs in under autocast: a table that is data.
#include <map>
#include <string>

#include "halftone/core/op.h"

namespace halftone::amp {

// The operators' own policies (OpDef::cast), with overrides by name. A small value: copy it, change it, hand it to Autocast.
class HT_API Policy {
 public:
  // Throws when there is no operator of that name.
  Policy& set(std::string_view op, Cast cast);
  Cast get(std::string_view op) const;
  Cast get(const OpDef& op) const {
    if (overrides_.empty()) return op.cast;
    auto i = overrides_.find(&op);
    return i == overrides_.end() ? op.cast : i->second;
  }

  // Equal policies append the same words.
  void append_key(std::vector<int64_t>& key) const;

 private:
  std::map<const OpDef*, Cast> overrides_;
};
HT_API const Policy& default_policy();

}  // namespace halftone::amp
