#pragma once
// What training takes on the CPU. Peers that know nothing of Halftone include this, too.
#include <fstream>
#include <limits>
#include <string>

namespace benchmarks {

// By how much this process grew at most since then, in MiB.
class ProcessMemory {
 public:
  ProcessMemory() {
    std::ofstream("/proc/self/clear_refs") << 5;  // the peak begins anew
    begin_ = read("VmRSS:");
  }
  double peak() const { return read("VmHWM:") - begin_; }

 private:
  static double read(const std::string& name) {
    std::string word;
    double kib = 0;
    for (std::ifstream status("/proc/self/status"); status >> word;) if (word == name && status >> kib) return kib / 1024;
    return std::numeric_limits<double>::quiet_NaN();
  }
  double begin_;
};

}  // namespace benchmarks
