// Positions: sizes times the ranks, or divided by them.
#include "halftone/distributed/shared_position.h"

#include <algorithm>
#include <cstdlib>

#include "halftone/ops/copy.h"

namespace halftone::distributed::detail {
namespace {

Tensor number(int64_t n) { return full({}, n, {.dtype = DType::i64}); }
StateDict with_sizes(const StateDict& state, int64_t batch_size, int64_t examples) {
  StateDict s;
  for (auto& [name, t] : state)
    if (name != "ranks") s.add(name, name == "batch_size" ? number(batch_size) : name == "examples" ? number(examples) : t);
  return s;
}
int64_t read(const StateDict& s, const char* name) { return s.at(name).item<int64_t>(); }

}  // namespace

StateDict position_of_all(const StateDict& own, int ranks) {
  StateDict s = with_sizes(own, read(own, "batch_size") * ranks, read(own, "examples") * ranks);
  s.add("ranks", number(ranks));
  return s;
}

// Every ranks-th example of a common order is a rank's, so that batch k of all ranks together is the same part of it for any number
// of them. Shares are equally large, for which some examples come twice or are left out: fewer than there are ranks.
StateDict position_of_one(const StateDict& saved, const StateDict& own, int ranks) {
  int64_t batch = read(saved, "batch_size"), examples = read(saved, "examples");
  int64_t own_batch = read(own, "batch_size"), own_examples = read(own, "examples");
  HT_CHECK(batch == own_batch * ranks, "SharedPosition: the position is one of batches of ", batch, " on ", read(saved, "ranks"),
           " ranks, these have ", own_batch, " on ", ranks,
           "; give each rank ", batch, " / ", ranks);
  HT_CHECK(std::abs(examples - own_examples * ranks) < std::max<int64_t>(read(saved, "ranks"), ranks),
           "SharedPosition: the position is one among ", examples, " examples, the ranks' loaders have ", own_examples * ranks);
  return with_sizes(saved, own_batch, own_examples);
}

}  // namespace halftone::distributed::detail
