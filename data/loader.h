#pragma once
// DataLoader: batches of a dataset, epoch after epoch, for range-for: for (auto& [x, target] : loader).
// What a batch holds depends on seed, epoch and batch number alone: never on how many threads make batches, nor on how
// far ahead they are. A loader that continues from its saved position gives the batches that were still to come.
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <tuple>

#include "halftone/core/state_dict.h"
#include "halftone/data/dataset.h"
#include "halftone/data/sampler.h"

namespace halftone::data {

struct LoaderOptions {
  Size batch_size = 1;
  bool shuffle = false;    // another order each epoch: a RandomSampler
  int workers = 0;         // threads that make batches ahead, each on its own: kernels leave the pool to the loop; 0: made when asked for
  bool drop_last = false;  // leave out a last batch that is smaller
  uint64_t seed = 0;       // of the orders, and of random numbers that the dataset draws
  int prefetch = 2;        // finished or unfinished batches, for each worker, that nobody has taken
  Device device = {};      // where batches are handed over; the copy is queued from pinned memory, and the loop does not wait for it
  std::optional<Sampler> sampler = {};  // in the place of shuffle; its indices are the dataset's
};

namespace detail {

// What a loader is apart from the type of its batches: the order of examples, and its position.
class HT_API LoaderPlan {
 public:
  LoaderPlan(int64_t data_size, const LoaderOptions& options);
  const LoaderOptions& options() const { return options_; }
  int64_t batches() const;
  // The number of the next epoch to run, or of the one that is running.
  int64_t epoch() const { return epoch_; }
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  friend class LoaderRun;
  void end_epoch();
  int64_t begin_run();  // its number

  int64_t data_size_;
  LoaderOptions options_;
  Sampler sampler_;
  int64_t epoch_ = 0, batch_ = 0;  // where the next run begins; batches of this epoch that were handed over
  int64_t run_ = 0;                // the number of the run that moves the position
  bool running_ = false;           // that run is under way
};

// One epoch, or what is left of it. Its threads are gone when it is.
class HT_API LoaderRun {
 public:
  // Makes the batch of these examples; called by several threads at a time.
  using Make = std::function<std::shared_ptr<void>(std::span<const int64_t> indices)>;
  LoaderRun(std::shared_ptr<LoaderPlan> plan, Make make);
  ~LoaderRun();
  LoaderRun(const LoaderRun&) = delete;
  // The next batch; null when there is none left. Throws what `make` threw for it; nothing comes after that.
  std::shared_ptr<void> next();

 private:
  struct Workers;
  std::shared_ptr<void> make(int64_t batch) const;
  void over();

  // Threads read all but the plan, which is the loop's.
  const std::shared_ptr<LoaderPlan> plan_;
  const Make make_;
  const LoaderOptions options_;
  const int64_t run_, epoch_;
  int64_t next_, end_;  // batches
  std::vector<int64_t> order_;
  std::unique_ptr<Workers> workers_;
};

// A batch moved to a device: what has to(Device), and tuples and vectors of such.
template <class B>
B move_batch(B batch, Device device) {
  if constexpr (requires {
                  { batch.to(device) } -> std::convertible_to<B>;
                })
    return batch.to(device);
  else if constexpr (requires { std::tuple_size<B>::value; })
    return std::apply([&](auto&... part) { return B{move_batch(std::move(part), device)...}; }, batch);
  else if constexpr (requires { batch.push_back(*batch.begin()); }) {
    for (auto&& part : batch) part = move_batch(std::move(part), device);
    return batch;
  } else
    return batch;  // a number or a name stays on the host
}

}  // namespace detail

// The dataset is held by value and shared with the threads; std::move a large one in. get() runs on them with the
// caller's thread state, autocast included, and with a generator of the batch's own.
// Throws Error when an option makes no sense. An exception of get() arrives where the loop asks for that batch.
template <Dataset Data>
class DataLoader {
 public:
  using Batch = std::remove_cvref_t<decltype(std::declval<const Data&>().get(std::span<const int64_t>()))>;

  explicit DataLoader(Data data, const LoaderOptions& options = {})
      : data_(std::make_shared<const Data>(std::move(data))),
        plan_(std::make_shared<detail::LoaderPlan>(static_cast<int64_t>(data_->size()), options)) {}
  DataLoader(DataLoader&&) noexcept = default;
  DataLoader& operator=(DataLoader&&) noexcept = default;

  // Single pass. Leaving the loop early ends the threads, and the epoch: the next loop runs the next epoch.
  class iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    iterator(std::shared_ptr<detail::LoaderRun> run, Device device) : run_(std::move(run)), device_(device) { ++*this; }
    Batch& operator*() const { return *batch_; }
    Batch* operator->() const { return batch_.get(); }
    iterator& operator++() {
      batch_.reset();  // before the next one is made: memory for one batch, not for two
      batch_ = std::static_pointer_cast<Batch>(run_->next());
      if (batch_ && device_ != Device::cpu()) *batch_ = detail::move_batch(std::move(*batch_), device_);
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return !batch_; }

   private:
    std::shared_ptr<detail::LoaderRun> run_;
    std::shared_ptr<Batch> batch_;
    Device device_;
  };
  iterator begin() {
    auto make = [data = data_](std::span<const int64_t> indices) -> std::shared_ptr<void> {
      return std::make_shared<Batch>(data->get(indices));
    };
    return iterator(std::make_shared<detail::LoaderRun>(plan_, std::move(make)), plan_->options().device);
  }
  std::default_sentinel_t end() const { return {}; }

  int64_t size() const { return plan_->batches(); }  // batches of a whole epoch
  int64_t epoch() const { return plan_->epoch(); }   // the one that runs, or comes next; from 0
  const Data& data() const { return *data_; }

  // The position: a batch counts once the loop has it. After load_state_dict the next loop goes on from there, with the
  // saved seed; of an epoch that was saved at its last batch none is left. Throws Error when the position is not one of
  // this loader's, for instance because the batch size is another.
  StateDict state_dict() const { return plan_->state_dict(); }
  void load_state_dict(const StateDict& state) { plan_->load_state_dict(state); }

 private:
  std::shared_ptr<const Data> data_;
  std::shared_ptr<detail::LoaderPlan> plan_;
};

}  // namespace halftone::data
