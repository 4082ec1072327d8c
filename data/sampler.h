#pragma once
// Samplers: which examples an epoch visits, and in which order. An order is a function of seed and epoch alone, so a loader can
// begin in the middle of an epoch, and processes agree on it without a word.
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "halftone/core/shape.h"

namespace halftone::data {

// A value; those below differ in their constructors alone.
class HT_API Sampler {
 public:
  // `order` gives `size` indices into the dataset.
  using Order = std::function<std::vector<int64_t>(uint64_t seed, int64_t epoch)>;
  Sampler(Size size, Order order);
  int64_t size() const { return size_; }  // examples an epoch
  std::vector<int64_t> order(uint64_t seed, int64_t epoch) const;

 private:
  int64_t size_;
  Order order_;
};

// 0 to examples - 1.
class HT_API SequentialSampler final : public Sampler { public: explicit SequentialSampler(Size examples); };

// Each example once in random order; with replacement, `size` independent draws.
struct RandomSamplerOptions {
  bool replacement = false;
  std::optional<int64_t> size = {};  // as many as there are examples; without replacement at most that
};
class HT_API RandomSampler final : public Sampler { public: explicit RandomSampler(Size examples, RandomSamplerOptions o = {}); };

// `size` draws with probabilities proportional to `weights`, which are finite and 0 or more: to balance classes, one over the
// class's size. Without replacement (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006), at least `size`
// weights must be positive.
struct WeightedSamplerOptions { bool replacement = true; };
class HT_API WeightedSampler final : public Sampler {
 public:
  WeightedSampler(std::vector<double> weights, Size size, WeightedSamplerOptions o = {});
};

// The share of one of `ranks` processes whose loaders have the same seed: every ranks-th example of a common order. All shares are
// equally large: the first examples of the order come again at its end, or with drop_last the last ones are left out.
struct DistributedSamplerOptions { bool shuffle = true, drop_last = false; };
class HT_API DistributedSampler final : public Sampler {
 public:
  DistributedSampler(Size examples, int rank, int ranks, DistributedSamplerOptions o = {});
};

// 0 to n - 1 in an order that depends on seed and stream alone, the same on every machine.
HT_API std::vector<int64_t> permutation(int64_t n, uint64_t seed, uint64_t stream = 0);

}  // namespace halftone::data
