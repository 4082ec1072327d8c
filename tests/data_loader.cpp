// Datasets and loaders: the same batches for any number of threads, errors that arrive, loops that may be left, and
// positions that are taken up again.
#include "halftone/data/loader.h"

#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "halftone/amp/amp.h"
#include "halftone/core/backend.h"
#include "halftone/core/parallel.h"
#include "halftone/core/thread_state.h"
#include "halftone/data/transform.h"
#include "halftone/io/progress.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"
#include "halftone/tests/threads.h"

namespace {

using namespace halftone;
using namespace halftone::data;
using Numbers = std::vector<int64_t>;

// Example i is {i, 10 i} with target i.
TensorDataset numbers(int64_t n) {
  Tensor x = empty({n, 2}), target = empty({n}, {.dtype = DType::i64});
  for (int64_t i = 0; i < n; ++i) {
    x.data<float>()[2 * i] = static_cast<float>(i);
    x.data<float>()[2 * i + 1] = static_cast<float>(10 * i);
    target.data<int64_t>()[i] = i;
  }
  return {x, target};
}

// The targets of the loop's batches, one after the other.
template <class L>
Numbers targets(L& loader) {
  Numbers all;
  for (auto& [x, target] : loader)
    for (auto v : target.template to_vector<int64_t>()) all.push_back(v);
  return all;
}

// Calls a function for every batch.
template <class F>
struct Calls {
  int64_t examples;
  F f;
  int64_t size() const { return examples; }
  auto get(std::span<const int64_t> indices) const { return f(indices); }
};
template <class F>
Calls(int64_t, F) -> Calls<F>;

}  // namespace

TEST_CASE("batches in order, the last one smaller or left out") {
  DataLoader loader(numbers(10), {.batch_size = 4});
  CHECK(loader.size() == 3);
  int64_t seen = 0;
  for (auto& [x, target] : loader) {
    CHECK(x.shape() == Shape{seen < 8 ? 4 : 2, 2});
    CHECK(x.to_vector<float>()[1] == static_cast<float>(10 * seen));
    seen += target.size(0);
  }
  CHECK(seen == 10);
  DataLoader whole(numbers(10), {.batch_size = 4, .drop_last = true});
  CHECK(whole.size() == 2);
  CHECK(targets(whole) == Numbers{0, 1, 2, 3, 4, 5, 6, 7});
  DataLoader one(numbers(3), {.batch_size = 100});
  CHECK(targets(one).size() == 3);
  DataLoader none(numbers(0));
  CHECK(none.size() == 0);
  CHECK(targets(none).empty());
}

TEST_CASE("every spelling of the loop binds") {
  DataLoader loader(numbers(4), {.batch_size = 2});
  int n = 0;
  for (auto& batch : loader) n += static_cast<int>(batch.size());
  for (const auto& [x, target] : loader) n += static_cast<int>(x.size(0) + target.size(0));
  for (auto [x, target] : loader) n += static_cast<int>(x.size(0) + target.size(0));
  for (auto&& [x, target] : progress(loader)) n += static_cast<int>(x.size(0) + target.size(0));
  CHECK(n == 28);
}

TEST_CASE("shuffling: all examples, another order each epoch, the same for a seed") {
  DataLoader a(numbers(100), {.batch_size = 7, .shuffle = true, .seed = 3});
  DataLoader b(numbers(100), {.batch_size = 50, .shuffle = true, .seed = 3});
  DataLoader c(numbers(100), {.batch_size = 7, .shuffle = true, .seed = 4});
  std::set<Numbers> orders;
  for (int epoch = 0; epoch < 3; ++epoch) {
    CHECK(a.epoch() == epoch);
    const Numbers order = targets(a);
    CHECK(order == targets(b));  // whatever the size of a batch
    CHECK(std::set<int64_t>(order.begin(), order.end()).size() == 100);
    orders.insert(order);
    orders.insert(targets(c));
  }
  CHECK(orders.size() == 6);
}

TEST_CASE("the order is the same on every machine, and any order is possible") {
  CHECK(permutation(8, 1) == Numbers{4, 1, 5, 7, 2, 3, 0, 6});
  CHECK(permutation(0, 1).empty());
  std::vector<int> count(24);
  for (uint64_t seed = 0; seed < 24000; ++seed) {
    const Numbers p = permutation(4, seed);
    const auto rank = p[0] * 6 + (p[1] - (p[1] > p[0])) * 2 + (p[2] > p[3]);
    ++count[static_cast<size_t>(rank)];
  }
  double chi = 0;
  for (int n : count) chi += (n - 1000.0) * (n - 1000.0) / 1000;
  CHECK(chi < 49.7);  // 0.1 % of fair shuffles lie above, for 23 degrees of freedom
}

TEST_CASE("batches are the same for any number of threads and any prefetch, random transforms included") {
  const auto augmented = [](std::span<const int64_t> indices) {
    if (indices[0] % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    return Batch{rand({static_cast<int64_t>(indices.size())}), tensor(Numbers(indices.begin(), indices.end()))};
  };
  std::vector<float> expected;
  for (const int workers : {0, 1, 2, 5}) {
    for (const int prefetch : {1, 3}) {
      DataLoader loader(Calls{61, augmented},
                        {.batch_size = 4, .shuffle = true, .workers = workers, .seed = 9, .prefetch = prefetch});
      std::vector<float> all;
      for (int epoch = 0; epoch < 2; ++epoch)
        for (auto& [x, target] : loader) {
          for (float v : x.to_vector<float>()) all.push_back(v);
          for (float v : target.to_vector<float>()) all.push_back(v);
        }
      if (expected.empty()) expected = all;
      CHECK(all == expected);
    }
  }
  CHECK(std::set<float>(expected.begin(), expected.end()).size() > 150);  // epochs and batches draw different numbers
}

TEST_CASE("threads work ahead, but no further than they may") {
  std::atomic<int> made{0};
  const auto count = [&](std::span<const int64_t> i) {
    ++made;
    return i[0];
  };
  DataLoader loader(Calls{100, count}, {.workers = 2, .prefetch = 3});
  int64_t taken = 0;
  for (auto& i : loader) {
    CHECK(i == taken++);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    CHECK(made <= taken + 6);
    if (taken == 50) break;
  }
  CHECK(made > 50);
  CHECK(made <= 56);
}

TEST_CASE("an exception of the dataset arrives at its batch, for any number of threads") {
  for (const int workers : {0, 1, 3}) {
    const auto fails = [](std::span<const int64_t> i) -> int64_t {
      if (i[0] >= 6) throw Error(text::cat("example ", i[0], " is broken"));
      return i[0];
    };
    DataLoader loader(Calls{100, fails}, {.batch_size = 2, .workers = workers});
    Numbers seen;
    const auto loop = [&] {
      for (auto& i : loader) seen.push_back(i);
    };
    CHECK(error_of(loop) == "example 6 is broken");
    CHECK(seen == Numbers{0, 2, 4});
    CHECK(error_of(loop) == "example 6 is broken");  // the loader goes on living
    CHECK(loader.epoch() == 2);
  }
}

TEST_CASE("an exception that is no Error keeps its type") {
  struct Own {};
  const auto fails = [](std::span<const int64_t>) -> int { throw Own(); };
  DataLoader loader(Calls{3, fails}, {.workers = 2});
  CHECK_THROWS_AS(loader.begin(), Own);
}

TEST_CASE("a loop may be left at any time") {
  const auto slow = [](std::span<const int64_t> i) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    return i[0];
  };
  for (int round = 0; round < 200; ++round) {
    DataLoader loader(Calls{50, slow}, {.workers = 3, .prefetch = 2});
    int n = 0;
    for ([[maybe_unused]] auto& i : loader)
      if (++n > round % 7) break;
  }
  DataLoader loader(Calls{50, slow}, {.workers = 3});
  CHECK_THROWS_AS(
      [&] {
        for ([[maybe_unused]] auto& i : loader) throw 1;
      }(),
      int);
  CHECK(loader.epoch() == 1);  // an epoch that was left is over
}

TEST_CASE("a loop outlives its loader, and loops may be nested") {
  auto loader = std::make_unique<DataLoader<TensorDataset>>(numbers(6), LoaderOptions{.batch_size = 2, .workers = 2});
  auto i = loader->begin();
  loader.reset();
  int n = 0;
  for (; i != std::default_sentinel; ++i) n += static_cast<int>(i->size());
  CHECK(n == 6);
  DataLoader again(numbers(4), {.workers = 1});
  n = 0;
  for ([[maybe_unused]] auto& outer : again)
    for ([[maybe_unused]] auto& inner : again) ++n;
  CHECK(n == 16);
}

TEST_CASE("kernels of workers leave the pool to the loop") {
  const auto count = [](std::span<const int64_t>) {
    std::mutex lock;
    std::set<std::thread::id> seen;
    parallel_for(64, 1, [&](int64_t, int64_t) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      const std::lock_guard guard(lock);
      seen.insert(std::this_thread::get_id());
    });
    return seen.size();
  };
  const tests::Threads three(3);
  size_t most = 0;
  DataLoader plain(Calls{8, count});
  for (auto& threads : plain) most = std::max(most, threads);
  CHECK(most > 1);
  DataLoader loader(Calls{8, count}, {.workers = 2});
  for (auto& threads : loader) CHECK(threads == 1);
}

TEST_CASE("fifty epochs with workers leave no memory and no threads behind") {
  struct Footprint {
    int64_t tensors, heap, resident, threads;  // bytes, and a number; heap: what is on it beside tensors
  };
  std::vector<Device> places{Device::cpu()};
  if (!devices(DeviceType::cuda).empty()) places.push_back(Device::cuda());
  const auto measure = [&] {
    for (const Device d : places) backend(d.type).synchronize(d.index);  // the first time a driver takes memory of its own
    const auto heap = ::mallinfo2();
    Footprint f{0, static_cast<int64_t>(heap.uordblks + heap.hblkhd) - memory_stats(Device::cpu()).reserved, 0, 0};
    for (const Device d : places) f.tensors += memory_stats(d).allocated;
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages >> f.resident;
    f.resident *= ::sysconf(_SC_PAGESIZE);
    for ([[maybe_unused]] const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) ++f.threads;
    return f;
  };
  // As many examples as the subset of Fashion-MNIST has, 19 MB.
  const auto set = transform(TensorDataset(rand({6000, 1, 28, 28}), zeros({6000}, {.dtype = DType::i64})), RandomFlip());
  for (const Device device : places) {
    const LoaderOptions options{.batch_size = 100, .shuffle = true, .workers = 2, .device = device};
    for (const bool kept : {true, false}) {
      INFO(str(device) << (kept ? ", one loader" : ", a loader for each epoch"));
      DataLoader one(set, options);
      Footprint warm{};
      for (int epoch = 1; epoch <= 50; ++epoch) {
        std::optional<DataLoader<std::remove_const_t<decltype(set)>>> fresh;
        if (!kept) fresh.emplace(set, options);
        int64_t examples = 0;
        for (auto& batch : kept ? one : *fresh) {
          examples += batch.size();
          if (epoch % 5 == 4 && examples == 1000) break;
        }
        CHECK(examples == (epoch % 5 == 4 ? 1000 : 6000));
        if (epoch == 15) warm = measure();
      }
      const Footprint after = measure();
      CHECK(after.tensors == warm.tensors);
      CHECK(after.threads == warm.threads);
      CHECK(after.heap - warm.heap < 1 << 16);      // 32 bytes a batch would be more
      CHECK(after.resident - warm.resident < 1 << 24);
    }
  }
}

TEST_CASE("threads carry the caller's state") {
  const auto ask = [](std::span<const int64_t>) {
    return std::pair(amp::is_autocast_enabled(DeviceType::cpu), thread_state().on(Layer::autograd));
  };
  DataLoader loader(Calls{8, ask}, {.workers = 2});
  for (auto& [autocast, grad] : loader) CHECK((!autocast && grad));
  const amp::Autocast on;
  const NoGrad off;
  for (auto& [autocast, grad] : loader) CHECK((autocast && !grad));
}

TEST_CASE("a position is taken up again, batch for batch") {
  for (const int workers : {0, 2}) {
    for (int64_t stop = 1; stop <= 14; ++stop) {
      const LoaderOptions options{.batch_size = 3, .shuffle = true, .workers = workers, .seed = 5};
      DataLoader straight(numbers(20), options), before(numbers(20), options);
      LoaderOptions other = options;
      other.seed = 0;  // the saved one counts
      DataLoader after(numbers(20), other);
      Numbers expected, got;
      for (int epoch = 0; epoch < 3; ++epoch)
        for (auto v : targets(straight)) expected.push_back(v);
      StateDict saved;
      int64_t n = 0;
      while (n < stop)
        for (auto& [x, target] : before) {
          for (auto v : target.to_vector<int64_t>()) got.push_back(v);
          saved = before.state_dict().clone();
          if (++n == stop) break;
        }
      after.load_state_dict(saved);
      CHECK(after.epoch() == (stop - 1) / 7);
      while (after.epoch() < 3)
        for (auto v : targets(after)) got.push_back(v);
      INFO("stopped after " << stop);
      CHECK(got == expected);
    }
  }
}

TEST_CASE("a position between epochs, and one that is not this loader's") {
  DataLoader a(numbers(10), {.batch_size = 4, .shuffle = true});
  targets(a);
  for ([[maybe_unused]] auto& batch : a) break;
  DataLoader b(numbers(10), {.batch_size = 4, .shuffle = true});
  b.load_state_dict(a.state_dict());
  CHECK(b.epoch() == 2);
  CHECK(targets(a) == targets(b));
  DataLoader c(numbers(10), {.batch_size = 5});
  CHECK(error_of([&] { c.load_state_dict(a.state_dict()); }) ==
        "DataLoader: the position is one among 10 examples in batches of 4, this loader has 10 in batches of 5");
  StateDict wrong = a.state_dict();
  wrong.find("batch")->fill_(4);
  CHECK(error_of([&] { a.load_state_dict(wrong); }) == "DataLoader: there is no batch 4 of epoch 3; an epoch has 3");
  CHECK(error_of([&] { a.load_state_dict({}); }) == "state: there is no entry 'epoch'");
  CHECK(a.epoch() == 3);
  static_assert(Stateful<DataLoader<TensorDataset>>);
}

TEST_CASE("options that make no sense are refused") {
  const auto error = [](const LoaderOptions& o) { return error_of([&] { DataLoader(numbers(3), o); }); };
  CHECK(error({.batch_size = 0}) == "DataLoader: expected batch_size above 0, got 0");
  CHECK(error({.workers = -1}) == "DataLoader: expected workers of 0 or more, got -1");
  CHECK(error({.prefetch = 0}) == "DataLoader: expected prefetch above 0, got 0");
  DataLoader gpu(numbers(3), {.device = Device::cuda(7)});
  if (devices(DeviceType::cuda).size() < 8) CHECK_FALSE(error_of([&] { gpu.begin(); }).empty());
}

TEST_CASE("batches of any type move to a device part by part") {
  using Parts = std::tuple<Tensor, std::vector<Tensor>, int, std::string>;
  const Parts moved = data::detail::move_batch(Parts{ones({2}), {zeros({1}), ones({1})}, 3, "name"}, Device::cpu());
  CHECK(std::get<1>(moved)[1].item() == 1);
  CHECK(std::get<3>(moved) == "name");
  const auto list = data::detail::move_batch(std::vector<bool>{true, false}, Device::cpu());
  CHECK(list[0]);
}

TEST_CASE("a dataset of tensors checks them") {
  CHECK(error_of([] {
          TensorDataset(ones({3, 2}), ones({2}));
        }) == "TensorDataset: expected as many targets as examples in dimension 0, got [3, 2] (f32) and [2] (f32)");
  CHECK(error_of([] { TensorDataset(ones({}), ones({})); }).find("TensorDataset: expected") == 0);
  CHECK(error_of([] { TensorDataset(Tensor(), ones({2})); }) == "TensorDataset: both tensors must be defined");
  const auto set = numbers(3);
  CHECK(error_of([&] { set.get(Numbers{0, 3}); }) == "take_rows: row 3 is out of range for [3, 2] (f32)");
  CHECK(error_of([&] { set.get(Numbers{-1}); }) == "take_rows: row -1 is out of range for [3, 2] (f32)");
}

TEST_CASE("rows of views, of 16-bit tensors, of tensors with history") {
  const Tensor x = arange(12).to(DType::f32).view({3, 4});
  CHECK(take_rows(x.transpose(0, 1), Numbers{3, 0}).to_vector<int>() == std::vector<int>{3, 7, 11, 0, 4, 8});
  CHECK(take_rows(x.to(DType::bf16), Numbers{1}).to_vector<int>() == std::vector<int>{4, 5, 6, 7});
  Tensor w = ones({2, 2}, {.requires_grad = true});
  CHECK_FALSE(take_rows(w * 2, Numbers{1}).requires_grad());
  CHECK(take_rows(x, Numbers{}).shape() == Shape{0, 4});
  CHECK(error_of([&] { take_rows(ones({}), Numbers{0}); }) == "take_rows: a 0-d tensor has no rows");
}

TEST_CASE("rows of more bytes than one thread takes") {
  const tests::Threads three(3);
  for (const int64_t width : {1, 7, 513}) {
    const Tensor x = arange(3000 * width).view({3000, width});
    const Numbers rows = permutation(3000, 1, 2);
    CHECK(take_rows(x, rows).to_vector<int64_t>() == index_select(x, 0, tensor(rows)).to_vector<int64_t>());
  }
}

TEST_CASE("subsets, sequences and splits") {
  const Subset part(numbers(10), {7, 2, 2});
  CHECK(part.get(Numbers{2, 0}).target.to_vector<int64_t>() == Numbers{2, 7});
  CHECK(error_of([&] { part.get(Numbers{3}); }) == "Subset: index 3 is out of range for 3 examples");
  CHECK(error_of([] { Subset(numbers(3), {3}); }) == "Subset: index 3 is out of range for 3 examples");

  const ConcatDataset both(std::vector{numbers(3), numbers(0), numbers(4)});
  CHECK(both.size() == 7);
  CHECK(both.get(Numbers{6, 0, 3, 2}).target.to_vector<int64_t>() == Numbers{3, 0, 0, 2});
  CHECK(error_of([&] { both.get(Numbers{7}); }) == "ConcatDataset: index 7 is out of range for 7 examples");

  const auto split = random_split(numbers(10), {7, 0, 3}, 1);
  std::set<int64_t> all;
  for (const auto& s : split) all.insert(s.indices().begin(), s.indices().end());
  CHECK((split.size() == 3 && split[0].size() == 7 && split[1].size() == 0 && all.size() == 10));
  CHECK(error_of([] { random_split(numbers(10), {7, 2}); }) == "random_split: expected sizes that add up to 10, got 9");
  CHECK(error_of([] { random_split(numbers(10), {11, -1}); }) == "random_split: expected sizes of 0 or more, got -1");
  DataLoader loader(split[0], {.batch_size = 3, .shuffle = true, .workers = 2});
  CHECK(targets(loader).size() == 7);
}
