#pragma once
// What the plans of cuBLASLt and cuDNN have in common. A problem is what determines a plan: a struct of 64-bit fields, the
// first of which is the device's number, so that its bits are its key. How a plan is chosen by timing: core/tuning.h.
#include <array>
#include <bit>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>

#include "halftone/core/tuning.h"

namespace halftone::cuda {

template <class P> using ProblemWords = std::array<int64_t, sizeof(P) / sizeof(int64_t)>;
template <class P> struct ProblemHash {
  size_t operator()(const P& p) const {
    uint64_t h = 14695981039346656037u;
    for (int64_t v : std::bit_cast<ProblemWords<P>>(p)) {
      h = (h ^ static_cast<uint64_t>(v)) * 0x9E3779B97F4A7C15u;
      h ^= h >> 32;
    }
    return h;
  }
};
template <class P> struct ProblemEqual {
  bool operator()(const P& a, const P& b) const { return std::bit_cast<ProblemWords<P>>(a) == std::bit_cast<ProblemWords<P>>(b); }
};

// A problem's name among tuned choices: of this library and version, on this thread's model of GPU, whatever its number.
std::string tuning_name(const std::string& library, std::span<const int64_t> problem);
template <class P> std::string tuning_name(const std::string& library, const P& p) {
  auto words = std::bit_cast<ProblemWords<P>>(p);
  return tuning_name(library, std::span<const int64_t>(words).subspan(1));
}

// Plans by problem, made once and kept for ever; nothing where a library has none.
template <class Problem, class Plan> class Plans {
 public:
  // By make(problem).
  template <class Make> std::optional<Plan> find(const Problem& p, Make make) {
    std::lock_guard guard(lock_);
    auto found = plans_.find(p);
    if (found == plans_.end()) found = plans_.emplace(p, make(p)).first;
    return found->second;
  }
  // Inside tune(), choose(problem) comes first, unless the plan there is was made of a choice already.
  template <class Make, class Choose> std::optional<Plan> find(const Problem& p, Make make, Choose choose) {
    std::lock_guard guard(lock_);
    auto found = plans_.find(p);
    bool chooses = tuning() && (found == plans_.end() || (found->second && !found->second->tuned));
    if (chooses) choose(p);
    if (chooses || found == plans_.end()) found = plans_.insert_or_assign(p, make(p)).first;
    return found->second;
  }

 private:
  std::mutex lock_;
  std::unordered_map<Problem, std::optional<Plan>, ProblemHash<Problem>, ProblemEqual<Problem>> plans_;
};

// Milliseconds that a call takes on stream(): the least of several, after one that does not count. Waits for the device.
double time_call(const std::function<void()>& call);

// The fastest of `count` candidates; an earlier one stays ahead of what is hardly faster. time(i): milliseconds, or nothing
// where it cannot run.
template <class F> std::optional<int64_t> fastest(int64_t count, F time) {
  constexpr int64_t most = 24;  // that run: later guesses are hardly ever best
  constexpr double clearly = 0.98;
  std::optional<int64_t> best;
  double least = 0;
  for (int64_t i = 0, ran = 0; i < count && ran < most; ++i) {
    std::optional<double> ms = time(i);
    if (!ms) continue;
    ++ran;
    if (best && *ms >= clearly * least) continue;
    best = i;
    least = *ms;
  }
  return best;
}

}  // namespace halftone::cuda
