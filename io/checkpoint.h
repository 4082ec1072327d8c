#pragma once
// Checkpoints: everything a training run goes on from, in one file for each saved step. A run that resumes gives bit for bit what
// it would have given had it never stopped.
//
//   io::Checkpoint checkpoint("run");
//   checkpoint.add("net", net).add("opt", opt).add("scaler", scaler).add("schedule", schedule).add("loader", loader);
//   int64_t step = checkpoint.resume().value_or(0);
//   ...
//   checkpoint.save(step);
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "halftone/core/state_dict.h"

namespace halftone::io {

enum class Best : uint8_t { none, lowest, highest };
struct CheckpointOptions {
  int keep = 3;            // the newest ones that stay; 0: all
  Best best = Best::none;  // the one with the best metric stays as well
};
struct SaveStepOptions {
  std::optional<double> metric = {};  // such as the validation loss; NaN is never the best
};

// A view of the parts that were added, which must outlive it. The calling thread's random generator is always a part. A step is
// the file "<folder>/step-<n>.safetensors", in which io::load finds the entries "net.fc.weight" and so on; it is replaced as one
// step, and its checksum (CRC-32C, against accidents) is compared when it is read. At a time, one process saves into a folder; in a
// distributed run that is rank 0, and every rank resumes.
class HT_API Checkpoint {
 public:
  // The folder is made by the first save. Throws Error when an option makes no sense.
  explicit Checkpoint(std::string folder, CheckpointOptions options = {});
  Checkpoint(const Checkpoint&) = delete;

  // Names are the user's own, without '.' and ','. "rng" is taken.
  template <Stateful T>
  Checkpoint& add(const std::string& name, T& part) {
    return add_part({name, [&part] { return StateDict(part.state_dict()); }, [&part](const StateDict& s) { part.load_state_dict(s); }});
  }

  // Saves all parts under this step (>= 0), then removes what is no longer to be kept. Waits for the devices. Throws FileError when
  // the disk is full or refuses; the checkpoints of before are then as they were, and training can go on.
  void save(int64_t step, SaveStepOptions options = {});

  // Gives every part the state it had at the newest saved step, and returns that step; none when nothing was saved. Strict: the
  // file has exactly the parts that were added; otherwise those that both have are loaded. Throws Error, naming the file, when it is
  // damaged or a part refuses its state; the parts added before that one have theirs by then.
  std::optional<int64_t> resume(LoadOptions options = {});
  // The same with the best of the steps that are still there, by their metrics, and with any of them.
  std::optional<int64_t> resume_best(LoadOptions options = {});
  void load(int64_t step, LoadOptions options = {});

  std::vector<int64_t> steps() const;  // that are in the folder, rising
  std::string path(int64_t step) const;

 private:
  struct Part {
    std::string name;
    std::function<StateDict()> state;
    std::function<void(const StateDict&)> load;
  };
  Checkpoint& add_part(Part part);
  std::optional<int64_t> best(const std::vector<int64_t>& steps) const;
  void tidy() const;

  std::string folder_;
  CheckpointOptions options_;
  std::vector<Part> parts_;
};

}  // namespace halftone::io
