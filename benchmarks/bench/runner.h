#pragma once
// Ways of training a workload whose steps are timed: ours, in a precision, eager or captured; and those of peers.
#include <cmath>

#include "halftone/benchmarks/models.h"

namespace benchmarks {

struct Mode {
  std::string peer, precision, how;  // peer: ours has the library's name and version; how: "eager", "captured", "compile", "jit"
  std::optional<DType> dtype() const {
    return precision == "fp16" ? std::optional(DType::f16) : precision == "bf16" ? std::optional(DType::bf16) : std::nullopt;
  }
  bool mixed() const { return dtype().has_value(); }
  std::string name() const { return precision + " " + how; }
};

// What is asked about a step, apart from its time.
struct StepFigures {
  double loss = 0;           // after Runner's first steps; NaN where a peer does not say
  double peak_mib = 0;       // of a GPU's memory, by this runner; on the CPU by how much the process grew since before the first step
  double setup_s = 0;
  double host_ms = NAN;      // of a GPU's steps, until the calls of one return that has the device for itself; NaN where a peer does not say
  int64_t skipped_steps = 0, kernel_calls = 0, casts = 0;  // a step's; kernel_calls: operators that compute, views left out
  double moved_bytes = 0;    // that those read and write
  double flops = 0;          // of a step's products, forward and backward, in whatever precision
};

class Runner {
 public:
  virtual ~Runner() = default;
  // Milliseconds a step, over `steps` of them between two waits for the device.
  virtual double measure(int steps) = 0;
  virtual StepFigures figures() = 0;
  // The time of each operator in an eager step, on standard output.
  virtual void profile() {}
};

// Trains `first_steps` steps from seed 0, always on the same two batches, before anything is measured. With a file for tuned plans
// the first step is tuned.
std::unique_ptr<Runner> make_runner(const Workload& w, Device device, const Mode& mode, int first_steps, const std::string& plans);

// What the device gives at best, measured here.
struct Peaks {
  double copy_gb_per_s = 0;                              // read and written
  std::vector<std::pair<std::string, double>> tflops;  // of a large product, by precision
  double of(const std::string& precision) const;
};
Peaks measure_peaks(Device device, const std::vector<std::string>& precisions);

}  // namespace benchmarks
