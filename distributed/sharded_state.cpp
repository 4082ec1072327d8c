// Whose each parameter is, and how its new value reaches the others.
#include "halftone/distributed/sharded_state.h"

#include <algorithm>
#include <map>
#include <sstream>

#include "halftone/core/capture.h"
#include "halftone/core/shadow.h"
#include "halftone/ops/ops.h"

namespace halftone::distributed {
namespace {

constexpr const char* who = "ShardedState";

// A text from its root to all ranks. Waits.
std::string broadcast_text(const Group& group, const std::string& text, int root) {
  Tensor size = full({}, static_cast<int64_t>(text.size()), {.dtype = DType::i64, .device = group.device()});
  group.broadcast(size, root).wait();
  std::vector<int64_t> letters(static_cast<size_t>(size.item<int64_t>()));
  if (group.rank() == root) std::copy(text.begin(), text.end(), letters.begin());
  if (letters.empty()) return {};
  Tensor sent = tensor(letters).to({.dtype = DType::u8, .device = group.device()});
  group.broadcast(sent, root).wait();
  std::vector<uint8_t> received = sent.to_vector<uint8_t>();
  return {received.begin(), received.end()};
}

}  // namespace

struct ShardedState::Shards {
  Group group;
  std::vector<Tensor> params;           // of all the optimizer's groups, in order
  std::vector<size_t> first;            // of a group's, and after the last
  std::vector<int> owners;              // of params
  struct Shelf {                        // parameters of one rank and dtype, side by side
    int owner;
    Tensor flat;
    std::vector<size_t> members;
    std::vector<Tensor> places;
  };
  std::vector<Shelf> shelves;
  StateDict consolidated;  // until the next step

  int owner(size_t g, size_t i) const {
    HT_CHECK(g + 1 < first.size() && first[g] + i < first[g + 1], who, ": the optimizer got parameters after its states were shared out");
    return owners[first[g] + i];
  }

  void choose_owners() {
    std::vector<size_t> by_size(params.size());
    for (size_t i = 0; i < by_size.size(); ++i) by_size[i] = i;
    std::stable_sort(by_size.begin(), by_size.end(), [&](size_t a, size_t b) { return params[a].numel() > params[b].numel(); });
    std::vector<int64_t> load(static_cast<size_t>(group.size()));
    owners.resize(params.size());
    for (size_t i : by_size) {
      auto least = std::min_element(load.begin(), load.end());
      owners[i] = static_cast<int>(least - load.begin());
      *least += params[i].numel();
    }
  }

  // Again whenever a parameter has moved: to another device or dtype.
  void place() {
    bool placed = !shelves.empty();
    for (auto& s : shelves)
      for (size_t k = 0; k < s.members.size(); ++k) placed &= params[s.members[k]].storage() == s.places[k].storage();
    if (placed) return;
    std::map<std::pair<int, DType>, std::vector<size_t>> sorted;
    for (size_t i = 0; i < params.size(); ++i) sorted[{owners[i], params[i].dtype()}].push_back(i);
    shelves.clear();
    for (auto& [key, members] : sorted) {
      int64_t elements = 0, line = 64 / static_cast<int64_t>(size_of(key.second));  // each begins aligned
      auto advance = [&](size_t i) { return std::exchange(elements, elements + (params[i].numel() + line - 1) / line * line); };
      for (size_t i : members) advance(i);
      Shelf& s = shelves.emplace_back(Shelf{key.first, zeros({elements}, params[members[0]].options()), members, {}});
      elements = 0;
      for (size_t i : members) {
        Tensor& place = s.places.emplace_back(s.flat.carve(advance(i), params[i].shape()));
        place.copy_(params[i].detach());
        params[i].set_(place);
      }
    }
  }

  void hand_out() {
    consolidated = {};
    place();
    std::vector<Pending> all;
    for (auto& s : shelves) all.push_back(group.broadcast(s.flat, s.owner));
    for (auto& p : all) p.wait();
    Tensors received;
    for (auto& s : shelves)
      if (s.owner != group.rank()) for (auto& t : s.places) received.push_back(t);
    CaptureLog* log = thread_state().capture;
    static const OpDef op{.name = "broadcast"};
    if (log) log->launched(Call{.op = &op, .in = {}, .attrs = {}, .out = {}}, received);
    for (auto& t : received) note_received(t);
  }

  // The 16-bit copy that autocast reads follows, as it does where an optimizer updates both.
  static void note_received(const Tensor& t) {
    uint64_t before = t.version();
    t.bump_version();
    if (!t.storage()->has_shadows()) return;
    Shadows& shadows = t.storage()->shadows();
    std::lock_guard guard(shadows.lock);
    Shadows::Shadow* s = shadows.find(shadows.in_use);
    if (!s || s->version != before) return;
    s->await();
    call_into(halftone::op::cast, {t}, Attrs::of(s->dtype), s->copy);
    s->wrote(t.version());
  }
};

ShardedState::ShardedState(optim::Optimizer& opt, const Group& group) : shards_(std::make_shared<Shards>()), opt_(opt) {
  Shards& s = *shards_;
  s.group = group;
  for (size_t g = 0; g < opt.groups(); ++g) {
    s.first.push_back(s.params.size());
    auto& list = opt.parameters(g);
    s.params.insert(s.params.end(), list.begin(), list.end());
  }
  s.first.push_back(s.params.size());
  for (size_t i = 0; i < s.params.size(); ++i)
    HT_CHECK(s.params[i].device() == group.device(), who, ": parameter ", i, " is on ", s.params[i].device(), ", the group on ", group.device());
  s.choose_owners();
  opt.set_share([weak = std::weak_ptr(shards_)](size_t g, size_t i) {
    auto shards = weak.lock();
    HT_CHECK(shards, who, ": it is gone, and the optimizer it belonged to has states of some parameters only; make another optimizer");
    return shards->owner(g, i) == shards->group.rank();
  });
  opt.after_step([weak = std::weak_ptr(shards_)](size_t g, const Tensor&, const Tensor&) {
    auto shards = weak.lock();
    if (shards && g == 0) shards->hand_out();
    return shards != nullptr;
  });
  NoGrad off;
  s.place();
}
ShardedState::~ShardedState() = default;

int ShardedState::owner(size_t group, size_t i) const { return shards_->owner(group, i); }

StateDict ShardedState::state_dict() const { return shards_->consolidated.size() > 0 ? shards_->consolidated : opt_.state_dict(); }

void ShardedState::consolidate() {
  NoGrad off;
  const Group& group = shards_->group;
  StateDict own = opt_.state_dict();
  std::map<std::string, Tensor> all;
  for (int root = 0; root < group.size(); ++root) {
    std::ostringstream list;
    if (group.rank() == root)
      for (auto& [name, t] : own) {
        list << name << ' ' << static_cast<int>(t.dtype()) << ' ' << t.rank();
        for (auto d : t.shape()) list << ' ' << d;
        list << '\n';
      }
    std::istringstream lines(broadcast_text(group, list.str(), root));
    std::string name;
    for (int dtype = 0, rank = 0; lines >> name >> dtype >> rank;) {
      std::vector<int64_t> sizes(static_cast<size_t>(rank));
      for (auto& d : sizes) lines >> d;
      Tensor sent = zeros(Shape(std::span<const int64_t>(sizes)), {.dtype = static_cast<DType>(dtype), .device = group.device()});
      if (group.rank() == root) sent.copy_(own.at(name));
      group.broadcast(sent, root).wait();
      if (group.rank() == 0) all[name] = sent;
    }
  }
  shards_->consolidated = {};
  for (auto& [name, t] : all) shards_->consolidated.add(name, t);
}

void ShardedState::load_state_dict(const StateDict& state) {
  const Shards& s = *shards_;
  StateDict share;
  for (size_t g = 0; g + 1 < s.first.size(); ++g) {
    std::string at = std::to_string(g);
    share.add(at + ".lr", state.at(at + ".lr"));
    for (size_t i = 0; i < s.first[g + 1] - s.first[g]; ++i)
      if (s.owner(g, i) == s.group.rank()) share.add(text::cat(at, ".", i), state.part(text::cat(at, ".", i)));
  }
  opt_.load_state_dict(share);
  shards_->consolidated = {};
}

}  // namespace halftone::distributed
