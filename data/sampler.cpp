// Orders from Philox: random numbers are addressed by seed, epoch and place, never drawn from a state.
#include "halftone/data/sampler.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "halftone/core/random.h"

namespace halftone::data {
namespace {

// Streams of Philox, the epoch in the lower half.
constexpr uint64_t order_stream = uint64_t{0x6f726472} << 32, choice_stream = uint64_t{0x63686f69} << 32;

uint64_t random_bits(uint64_t seed, int64_t place, int64_t epoch) {
  const Philox4 r = philox(seed, static_cast<uint64_t>(place), choice_stream | static_cast<uint32_t>(epoch));
  return uint64_t{r.v[0]} << 32 | r.v[1];
}
// In (0, 1), with 53 bits.
double random_fraction(uint64_t seed, int64_t place, int64_t epoch) {
  return (static_cast<double>(random_bits(seed, place, epoch) >> 11) + 0.5) * 0x1p-53;
}

std::vector<int64_t> shuffled(int64_t n, uint64_t seed, int64_t epoch) {
  return permutation(n, seed, order_stream | static_cast<uint32_t>(epoch));
}
std::vector<int64_t> in_order(int64_t n) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  return order;
}
int64_t checked_examples(const char* who, int64_t n) {
  HT_CHECK(n >= 0, who, ": expected a number of examples of 0 or more, got ", n);
  return n;
}

int64_t random_size(int64_t examples, const RandomSamplerOptions& o) {
  checked_examples("RandomSampler", examples);
  const int64_t size = o.size.value_or(examples);
  HT_CHECK(size >= 0 && (size <= examples || (o.replacement && examples > 0)), "RandomSampler: cannot draw ", size, " of ", examples,
           " examples", o.replacement ? "" : "; .replacement = true may draw one more than once");
  return size;
}

Sampler::Order with_replacement(const std::vector<double>& weights, int64_t size) {
  std::vector<double> ends(weights.size());
  std::partial_sum(weights.begin(), weights.end(), ends.begin());
  return [size, ends = std::make_shared<const std::vector<double>>(std::move(ends))](uint64_t seed, int64_t epoch) {
    std::vector<int64_t> order(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) {
      const double at = random_fraction(seed, i, epoch) * ends->back();
      // A product that rounds up to the sum belongs to the last example of positive weight.
      const auto found = std::min(std::upper_bound(ends->begin(), ends->end(), at), std::lower_bound(ends->begin(), ends->end(), ends->back()));
      order[static_cast<size_t>(i)] = found - ends->begin();
    }
    return order;
  };
}
// Example i waits for a time that is exponentially distributed with rate weight[i]; the first ones to come are taken.
Sampler::Order without_replacement(const std::vector<double>& weights, int64_t size) {
  return [size, weights = std::make_shared<const std::vector<double>>(weights)](uint64_t seed, int64_t epoch) {
    std::vector<std::pair<double, int64_t>> times;
    for (size_t i = 0; i < weights->size(); ++i) {
      const auto place = static_cast<int64_t>(i);
      if ((*weights)[i] > 0) times.emplace_back(-std::log(random_fraction(seed, place, epoch)) / (*weights)[i], place);
    }
    std::partial_sort(times.begin(), times.begin() + size, times.end());
    std::vector<int64_t> order;
    for (int64_t i = 0; i < size; ++i) order.push_back(times[static_cast<size_t>(i)].second);
    return order;
  };
}
Sampler::Order weighted(const std::vector<double>& weights, int64_t size, WeightedSamplerOptions o) {
  int64_t positive = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    HT_CHECK(weights[i] >= 0 && std::isfinite(weights[i]), "WeightedSampler: expected weights that are finite and 0 or more, got ",
             weights[i], " for example ", i);
    positive += weights[i] > 0;
  }
  HT_CHECK(size <= positive || (o.replacement && positive > 0), "WeightedSampler: cannot draw ", size, " examples when ", positive,
           " of ", weights.size(), " weights are positive", o.replacement ? "" : "; .replacement = true may draw one more than once");
  return o.replacement ? with_replacement(weights, size) : without_replacement(weights, size);
}

int64_t share(int64_t examples, int rank, int ranks, const DistributedSamplerOptions& o) {
  checked_examples("DistributedSampler", examples);
  HT_CHECK(ranks > 0 && rank >= 0 && rank < ranks, "DistributedSampler: expected a rank in [0, ranks), got rank ", rank, " of ", ranks);
  return examples / ranks + (!o.drop_last && examples % ranks != 0);
}

}  // namespace

// Fisher and Yates. The modulus favours small numbers by less than n / 2^64.
std::vector<int64_t> permutation(int64_t n, uint64_t seed, uint64_t stream) {
  HT_CHECK(n >= 0, "permutation: expected n of 0 or more, got ", n);
  std::vector<int64_t> order = in_order(n);
  for (size_t left = order.size(); left > 1; --left) {
    const Philox4 r = philox(seed, left, stream);
    std::swap(order[left - 1], order[(uint64_t{r.v[0]} << 32 | r.v[1]) % left]);
  }
  return order;
}

Sampler::Sampler(Size size, Order order) : size_(size), order_(std::move(order)) {
  HT_CHECK(size >= 0, "Sampler: expected a size of 0 or more, got ", size.value);
}
std::vector<int64_t> Sampler::order(uint64_t seed, int64_t epoch) const {
  std::vector<int64_t> indices = order_(seed, epoch);
  HT_CHECK(static_cast<int64_t>(indices.size()) == size_, "Sampler: expected an order of ", size_, " indices, got ", indices.size());
  return indices;
}

SequentialSampler::SequentialSampler(Size examples)
    : Sampler(checked_examples("SequentialSampler", examples), [n = examples.value](uint64_t, int64_t) { return in_order(n); }) {}

RandomSampler::RandomSampler(Size examples, RandomSamplerOptions o)
    : Sampler(random_size(examples, o), [n = examples.value, size = o.size.value_or(examples), o](uint64_t seed, int64_t epoch) {
        std::vector<int64_t> order = o.replacement ? std::vector<int64_t>(static_cast<size_t>(size)) : shuffled(n, seed, epoch);
        order.resize(static_cast<size_t>(size));
        if (o.replacement)
          for (int64_t i = 0; i < size; ++i)
            order[static_cast<size_t>(i)] = static_cast<int64_t>(random_bits(seed, i, epoch) % static_cast<uint64_t>(n));
        return order;
      }) {}

WeightedSampler::WeightedSampler(std::vector<double> weights, Size size, WeightedSamplerOptions o)
    : Sampler(size, weighted(weights, size, o)) {}

DistributedSampler::DistributedSampler(Size examples, int rank, int ranks, DistributedSamplerOptions o)
    : Sampler(share(examples, rank, ranks, o),
              [n = examples.value, rank, ranks, shuffle = o.shuffle, size = share(examples, rank, ranks, o)](uint64_t seed, int64_t epoch) {
                const std::vector<int64_t> all = shuffle ? shuffled(n, seed, epoch) : in_order(n);
                std::vector<int64_t> order;
                for (int64_t i = 0; i < size; ++i) order.push_back(all[static_cast<size_t>((i * ranks + rank) % n)]);
                return order;
              }) {}

}  // namespace halftone::data
