// The order of examples, the position, and the threads that work ahead.
#include "halftone/data/loader.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "halftone/core/own_thread.h"
#include "halftone/core/random.h"
#include "halftone/core/thread_state.h"

namespace halftone::data::detail {
namespace {

// The stream of Philox from which datasets draw, the epoch in the lower half.
constexpr uint64_t draw_stream = uint64_t{0x64726177} << 32;

Sampler sampler_of(int64_t data_size, const LoaderOptions& o) {
  HT_CHECK(data_size >= 0, "DataLoader: the dataset's size is ", data_size);
  HT_CHECK(!o.sampler || !o.shuffle, "DataLoader: expected shuffle or a sampler, got both; RandomSampler shuffles");
  if (o.sampler) return *o.sampler;
  return o.shuffle ? Sampler(RandomSampler(data_size)) : Sampler(SequentialSampler(data_size));
}

Tensor whole_number(int64_t v) {
  Tensor t = Tensor::empty(Meta({}, DType::i64, Device::cpu()));
  *t.data<int64_t>() = v;
  return t;
}

}  // namespace

LoaderPlan::LoaderPlan(int64_t data_size, const LoaderOptions& options)
    : data_size_(data_size), options_(options), sampler_(sampler_of(data_size, options)) {
  HT_CHECK(options.batch_size > 0, "DataLoader: expected batch_size above 0, got ", options.batch_size.value);
  HT_CHECK(options.workers >= 0, "DataLoader: expected workers of 0 or more, got ", options.workers);
  HT_CHECK(options.prefetch > 0, "DataLoader: expected prefetch above 0, got ", options.prefetch);
}

int64_t LoaderPlan::batches() const {
  const int64_t whole = sampler_.size() / options_.batch_size;
  return whole + (!options_.drop_last && sampler_.size() % options_.batch_size != 0);
}

StateDict LoaderPlan::state_dict() const {
  StateDict state;
  state.add("epoch", whole_number(epoch_));
  state.add("batch", whole_number(batch_));
  state.add("batch_size", whole_number(options_.batch_size));
  state.add("examples", whole_number(sampler_.size()));
  state.add("seed", whole_number(static_cast<int64_t>(options_.seed)));
  return state;
}

void LoaderPlan::load_state_dict(const StateDict& state) {
  const auto read = [&](const char* name) { return state.at(name).item<int64_t>(); };
  const int64_t epoch = read("epoch"), batch = read("batch"), size = read("batch_size"), examples = read("examples");
  const auto seed = static_cast<uint64_t>(read("seed"));
  HT_CHECK(size == options_.batch_size && examples == sampler_.size(), "DataLoader: the position is one among ", examples,
           " examples in batches of ", size, ", this loader has ", sampler_.size(), " in batches of ",
           options_.batch_size.value);
  HT_CHECK(epoch >= 0 && batch >= 0 && batch <= batches(), "DataLoader: there is no batch ", batch, " of epoch ", epoch,
           "; an epoch has ", batches());
  epoch_ = epoch;
  batch_ = batch;
  options_.seed = seed;
  ++run_;
  running_ = false;
}

void LoaderPlan::end_epoch() {
  ++epoch_;
  batch_ = 0;
  running_ = false;
}

int64_t LoaderPlan::begin_run() {
  if (running_) end_epoch();  // a loop inside another's
  running_ = true;
  return ++run_;
}

// Threads that make batches [next, end), at most `ahead` beyond the one asked for. Results wait in a ring.
struct LoaderRun::Workers {
  struct Slot {
    std::shared_ptr<void> batch;
    std::exception_ptr error;
    bool ready = false;
  };
  std::mutex lock;
  std::condition_variable room, ready;
  std::vector<Slot> ring;
  int64_t claimed, taken, end;
  bool stop = false;
  std::vector<std::thread> threads;

  Workers(const LoaderRun& run, int count, int64_t ahead)
      : ring(static_cast<size_t>(ahead)), claimed(run.next_), taken(run.next_), end(run.end_) {
    try {
      for (int i = 0; i < count; ++i)
        threads.emplace_back([this, &run, state = capture_thread_state()] {
          const InstallThreadState installed(state);
          const OwnThread alone;
          work(run);
        });
    } catch (...) {
      join();
      throw;
    }
  }
  ~Workers() { join(); }

  Slot& slot(int64_t batch) { return ring[static_cast<size_t>(batch) % ring.size()]; }

  void work(const LoaderRun& run) {
    std::unique_lock guard(lock);
    for (;;) {
      room.wait(guard, [&] { return stop || claimed >= end || claimed < taken + static_cast<int64_t>(ring.size()); });
      if (stop || claimed >= end) return;
      const int64_t batch = claimed++;
      guard.unlock();
      Slot made{.batch = nullptr, .error = nullptr, .ready = true};
      try {
        made.batch = run.make(batch);
      } catch (...) {
        made.error = std::current_exception();
      }
      guard.lock();
      if (made.error) end = std::min(end, batch + 1);  // the batches before it still arrive, none after it
      slot(batch) = std::move(made);
      ready.notify_one();
    }
  }

  std::shared_ptr<void> take() {
    std::unique_lock guard(lock);
    ready.wait(guard, [&] { return slot(taken).ready; });
    const Slot got = std::exchange(slot(taken), {});
    ++taken;
    guard.unlock();
    room.notify_all();
    if (got.error) std::rethrow_exception(got.error);
    return got.batch;
  }

  void join() {
    {
      const std::lock_guard guard(lock);
      stop = true;
    }
    room.notify_all();
    for (auto& t : threads) t.join();
  }
};

LoaderRun::LoaderRun(std::shared_ptr<LoaderPlan> plan, Make make)
    : plan_(std::move(plan)),
      make_(std::move(make)),
      options_(plan_->options_),
      run_(plan_->begin_run()),
      epoch_(plan_->epoch_),
      next_(plan_->batch_),
      end_(plan_->batches()),
      order_(plan_->sampler_.order(options_.seed, epoch_)) {
  check_indices("DataLoader's sampler", order_, plan_->data_size_);
  const int64_t left = end_ - next_, count = std::min<int64_t>(options_.workers, left);
  if (count > 0)
    workers_ = std::make_unique<Workers>(*this, static_cast<int>(count), std::min(count * options_.prefetch, left));
}
LoaderRun::~LoaderRun() { over(); }

void LoaderRun::over() {
  if (plan_->run_ == run_ && plan_->running_) plan_->end_epoch();
}

std::shared_ptr<void> LoaderRun::make(int64_t batch) const {
  const auto size = static_cast<size_t>(options_.batch_size), begin = static_cast<size_t>(batch) * size;
  const std::span<const int64_t> indices(order_.data() + begin, std::min(size, order_.size() - begin));
  const Philox4 r = philox(options_.seed, static_cast<uint64_t>(batch), draw_stream | static_cast<uint32_t>(epoch_));
  ThreadState state = capture_thread_state();
  state.generator = std::make_shared<Generator>(uint64_t{r.v[0]} << 32 | r.v[1]);
  const InstallThreadState installed(state);
  return make_(indices);
}

std::shared_ptr<void> LoaderRun::next() {
  if (next_ >= end_) {
    over();
    return nullptr;
  }
  std::shared_ptr<void> batch;
  try {
    batch = workers_ ? workers_->take() : make(next_);
  } catch (...) {
    end_ = next_;
    workers_.reset();
    throw;
  }
  ++next_;
  if (plan_->run_ == run_) plan_->batch_ = next_;
  return batch;
}

}  // namespace halftone::data::detail
