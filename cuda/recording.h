#pragma once
// What one captured step touched outside its own memory, and the bookkeeping that follows from it: a replay must leave
// versions and 16-bit copies as the eager step would have left them.
#include <unordered_map>

#include "halftone/core/capture.h"
#include "halftone/cuda/allocator.h"

namespace halftone::cuda {

class Recording final : public CaptureLog {
 public:
  Recording(Allocator& allocator, Allocator::Pool* pool) : allocator_(allocator), pool_(pool) {}

  void launched(const Call& call, std::span<const Tensor> out) override;
  void uses(const Tensor& whole) override;
  // The step has ended: tells what stays from what was only passing through.
  void finish();
  // The step has failed: 16-bit copies that no kernel filled are dropped.
  void abandon() noexcept;

  // May a replay stand for the step now? Guards hold, and parameters, buffers and 16-bit copies still are where the
  // graph knows them.
  bool holds() const;
  // Copies that the graph reads are brought up to date where somebody else wrote to the original.
  void refresh() const;
  // A replay has been queued: what it writes gets a new version.
  void replayed() const;

  // Memory of the graph's own pool?
  bool inside(const Storage& s) const { return allocator_.contains(pool_, s.data()); }
  // Has a kernel of the step written to memory that is not the graph's own?
  bool writes(const Storage& s) const;
  std::string_view last_operator() const { return last_ ? last_ : "none"; }

 private:
  struct Outside {
    std::shared_ptr<Storage> storage;  // held: the graph knows its address
    DType dtype;
    bool written, read_first;
  };
  struct Lasting {
    std::weak_ptr<Body> body;
    const Storage* storage;
  };
  struct Copy {
    Tensor whole, copy;
    bool read, current_at_end;
  };
  void touch(const Tensor& t, bool written);

  Allocator& allocator_;
  Allocator::Pool* pool_;
  const char* last_ = nullptr;
  std::unordered_map<const Storage*, Outside> outside_;
  std::unordered_map<const Storage*, std::weak_ptr<Storage>> written_inside_;
  std::unordered_map<const Body*, Lasting> lasting_;
  std::vector<std::shared_ptr<Storage>> written_;
  std::vector<std::weak_ptr<Storage>> survivors_;
  std::vector<Copy> copies_;
};

}  // namespace halftone::cuda
