// Samplers: which examples an epoch visits; and loaders that go by them.
#include "halftone/data/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "halftone/data/loader.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

using namespace halftone;
using namespace halftone::data;
using Numbers = std::vector<int64_t>;

namespace {

Numbers sorted(Numbers v) {
  std::sort(v.begin(), v.end());
  return v;
}
Numbers up_to(int64_t n) {
  Numbers v(static_cast<size_t>(n));
  std::iota(v.begin(), v.end(), 0);
  return v;
}

}  // namespace

TEST_CASE("orders: as they come, shuffled, with replacement") {
  CHECK(SequentialSampler(4).order(1, 2) == Numbers{0, 1, 2, 3});
  const RandomSampler shuffle(50);
  CHECK(sorted(shuffle.order(1, 0)) == up_to(50));
  CHECK(shuffle.order(1, 0) == shuffle.order(1, 0));
  CHECK(shuffle.order(1, 0) != shuffle.order(1, 1));
  CHECK(shuffle.order(1, 0) != shuffle.order(2, 0));
  const Numbers part = RandomSampler(50, {.size = 7}).order(1, 0);
  CHECK(std::set<int64_t>(part.begin(), part.end()).size() == 7);

  const Numbers draws = RandomSampler(4, {.replacement = true, .size = 8000}).order(3, 0);
  for (int64_t i = 0; i < 4; ++i)  // five standard deviations of a binomial count
    CHECK(std::abs(std::count(draws.begin(), draws.end(), i) - 2000) < 5 * std::sqrt(8000 * .25 * .75));
  CHECK(SequentialSampler(0).order(0, 0).empty());
}

TEST_CASE("weights are odds; a weight of 0 is never drawn") {
  const std::vector<double> weights{0, 1, 3, 0, 4, 0};
  const Numbers draws = WeightedSampler(weights, 8000).order(5, 2);
  for (size_t i = 0; i < weights.size(); ++i) {
    const double p = weights[i] / 8;
    CHECK(std::abs(static_cast<double>(std::count(draws.begin(), draws.end(), static_cast<int64_t>(i))) - 8000 * p) <=
          5 * std::sqrt(8000 * p * (1 - p)));
  }
  // Without replacement, the first one to come has the odds of its weight.
  const WeightedSampler once(weights, 3, {.replacement = false});
  int first[6] = {};
  for (int64_t epoch = 0; epoch < 4000; ++epoch) {
    const Numbers order = once.order(1, epoch);
    REQUIRE(sorted(order) == Numbers{1, 2, 4});
    ++first[order[0]];
  }
  for (const int i : {1, 2, 4}) {
    const double p = weights[static_cast<size_t>(i)] / 8;
    CHECK(std::abs(first[i] - 4000 * p) <= 5 * std::sqrt(4000 * p * (1 - p)));
  }
}

TEST_CASE("ranks share an epoch") {
  for (const bool shuffle : {true, false}) {
    Numbers all;
    for (int rank = 0; rank < 3; ++rank) {
      const DistributedSampler sampler(10, rank, 3, {.shuffle = shuffle});
      CHECK(sampler.size() == 4);
      for (const auto i : sampler.order(7, 1)) all.push_back(i);
    }
    CHECK(all.size() == 12);
    CHECK(std::set<int64_t>(all.begin(), all.end()).size() == 10);
  }
  CHECK(DistributedSampler(10, 1, 3, {.shuffle = false}).order(0, 0) == Numbers{1, 4, 7, 0});
  CHECK(DistributedSampler(10, 1, 3, {.shuffle = false, .drop_last = true}).order(0, 0) == Numbers{1, 4, 7});
  CHECK(DistributedSampler(1, 2, 3, {.shuffle = false}).order(0, 0) == Numbers{0});
  CHECK(DistributedSampler(0, 2, 3).order(0, 0).empty());
}

TEST_CASE("what no sampler can do is refused") {
  CHECK(error_of([] { RandomSampler(3, {.size = 4}); }) ==
        "RandomSampler: cannot draw 4 of 3 examples; .replacement = true may draw one more than once");
  CHECK(error_of([] { RandomSampler(0, {.replacement = true, .size = 4}); }) == "RandomSampler: cannot draw 4 of 0 examples");
  CHECK(error_of([] { SequentialSampler(-1); }) == "SequentialSampler: expected a number of examples of 0 or more, got -1");
  CHECK(error_of([] { WeightedSampler({1, -1}, 2); }) == "WeightedSampler: expected weights that are finite and 0 or more, got -1 for example 1");
  CHECK(error_of([] { WeightedSampler({1, 0}, 2, {.replacement = false}); }) ==
        "WeightedSampler: cannot draw 2 examples when 1 of 2 weights are positive; .replacement = true may draw one more than once");
  CHECK(error_of([] { WeightedSampler({0}, 1); }) == "WeightedSampler: cannot draw 1 examples when 0 of 1 weights are positive");
  CHECK(error_of([] { DistributedSampler(4, 2, 2); }) == "DistributedSampler: expected a rank in [0, ranks), got rank 2 of 2");
  const Sampler wrong(2, [](uint64_t, int64_t) { return Numbers{1}; });
  CHECK(error_of([&] { wrong.order(0, 0); }) == "Sampler: expected an order of 2 indices, got 1");
}

TEST_CASE("a loader goes by its sampler, and continues in the middle of it") {
  const TensorDataset set(randn({10, 2}), arange(10));
  const auto targets = [](auto& loader) {
    Numbers all;
    for (auto& [x, target] : loader)
      for (const auto v : target.template to_vector<int64_t>()) all.push_back(v);
    return all;
  };
  for (const int workers : {0, 2}) {
    const LoaderOptions options{.batch_size = 3, .workers = workers, .seed = 4, .sampler = WeightedSampler(std::vector<double>(10, 1.), 14)};
    DataLoader loader(set, options), other(set, options);
    CHECK(loader.size() == 5);
    CHECK(targets(loader) == options.sampler->order(4, 0));
    Numbers rest = options.sampler->order(4, 1);
    for ([[maybe_unused]] auto& batch : loader) {
      other.load_state_dict(loader.state_dict().clone());
      break;
    }
    rest.erase(rest.begin(), rest.begin() + 3);
    CHECK(targets(other) == rest);
  }
  CHECK(error_of([&] { DataLoader(set, {.shuffle = true, .sampler = SequentialSampler(10)}); }) ==
        "DataLoader: expected shuffle or a sampler, got both; RandomSampler shuffles");
  DataLoader beyond(set, {.sampler = SequentialSampler(11)});
  CHECK(error_of([&] { beyond.begin(); }) == "DataLoader's sampler: index 10 is out of range for 10 examples");
}
