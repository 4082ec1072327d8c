// The training loop, its checkpoints and its figures.
#include "halftone/train/train.h"

#include <chrono>
#include <cmath>

#include "halftone/amp/amp.h"
#include "halftone/autograd/autograd.h"
#include "halftone/core/capture.h"
#include "halftone/io/checkpoint.h"
#include "halftone/io/interrupt.h"
#include "halftone/io/log.h"
#include "halftone/io/progress.h"
#include "halftone/io/safetensors.h"
#include "halftone/ops/ops.h"
#include "halftone/optim/adam.h"

namespace halftone {
namespace {

void check(const TrainOptions& o, const Batches& loader) {
  HT_CHECK(o.epochs >= 0, "train: expected epochs of 0 or more, got ", o.epochs);
  HT_CHECK(o.accumulate > 0, "train: expected accumulate above 0, got ", o.accumulate);
  HT_CHECK(o.clip_norm >= 0, "train: expected clip_norm of 0 or more, got ", o.clip_norm);
  HT_CHECK(o.patience >= 0, "train: expected patience of 0 or more, got ", o.patience);
  HT_CHECK(o.patience == 0 || o.validation, "train: patience looks at the validation loss; give .validation a loader");
  HT_CHECK(!o.restore_best || (o.validation && !o.folder.empty()), "train: restore_best needs .validation and a .folder to keep the best epoch in");
  HT_CHECK(!o.autocast || is_16bit_dtype(*o.autocast), "train: expected autocast to f16 or bf16, got ", *o.autocast);
  HT_CHECK((!o.schedule && !o.ema) || o.optimizer, "train: a schedule or an average belongs to an optimizer; give that one as .optimizer");
  HT_CHECK(loader.size() > 0, "train: the loader has no batches");
}

// One training with all that a checkpoint must hold.
class Training {
 public:
  Training(nn::Module& net, Batches loader, const TrainOptions& o)
      : net_(net), loader_(std::move(loader)), o_(o), opt_(o.optimizer ? *o.optimizer : own_.emplace(net.parameters())),
        mixed_{.dtype = o.autocast, .enabled = o.autocast.has_value()}, scaler_({.enabled = o.autocast == DType::f16}) {
    device_ = opt_.parameters()[0].device();
    total_ = zeros({}, {.dtype = DType::f64, .device = device_});
    if (o.folder.empty()) return;
    checkpoint_.emplace(o.folder, io::CheckpointOptions{.keep = 2, .best = o.validation ? io::Best::lowest : io::Best::none});
    checkpoint_->add("net", net_).add("optimizer", opt_).add("loader", loader_).add("train", *this);
    if (scaler_.enabled()) checkpoint_->add("scaler", scaler_);
    if (o.schedule) checkpoint_->add("schedule", *o.schedule);
    if (o.ema) checkpoint_->add("ema", *o.ema);
  }

  TrainResult run() {
    if (checkpoint_ && o_.resume) checkpoint_->resume();
    while (epoch_ < o_.epochs && !stopped_ && !out_of_patience()) {
      net_.train();
      if (!run_epoch()) break;
      if (interrupt_.asked()) {  // in the validation; the epoch is saved
        result_.interrupted = true;
        break;
      }
    }
    net_.train();
    result_.stopped_early = stopped_ || out_of_patience();
    if (scaler_.enabled() && batches_done() > 0) {
      result_.skipped_steps = scaler_.skipped_steps();
      result_.final_scale = scaler_.get_scale();
    }
    if (o_.restore_best && result_.best_epoch > 0 && !result_.interrupted)
      net_.load_state_dict(io::load(checkpoint_->path(result_.best_epoch * loader_.size())).part("net"));
    return std::move(result_);
  }

  // Where it is, and what the epochs so far came to: [epochs, 4].
  StateDict state_dict() const {
    StateDict s;
    s.add("position", tensor({epoch_, batch_, examples_, result_.best_epoch, bad_epochs_, int64_t{stopped_}}));
    s.add("total", total_);
    std::vector<double> figures;
    for (auto& e : result_.epochs) figures.insert(figures.end(), {e.loss, e.validation_loss, e.accuracy, e.seconds});
    s.add("figures", tensor(figures).view({result_.epochs.size(), 4}));
    s.add("seconds", tensor(seconds_ + since_start()));
    return s;
  }
  void load_state_dict(const StateDict& state) {
    auto position = state.at("position").to_vector<int64_t>();
    auto figures = state.at("figures").to_vector<double>();
    HT_CHECK(position.size() == 6 && figures.size() % 4 == 0 && state.at("total").numel() == 1, "train: the checkpoint is not of a training like this one");
    epoch_ = position[0];
    batch_ = position[1];
    examples_ = position[2];
    result_.best_epoch = position[3];
    bad_epochs_ = position[4];
    stopped_ = position[5] != 0;
    total_.copy_(state.at("total"));
    seconds_ = state.at("seconds").item();
    result_.epochs.clear();
    for (size_t i = 0; i < figures.size(); i += 4)
      result_.epochs.push_back({static_cast<int64_t>(i / 4) + 1, figures[i], figures[i + 1], figures[i + 2], figures[i + 3]});
  }

 private:
  using Clock = std::chrono::steady_clock;
  double since_start() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  int64_t batches_done() const { return epoch_ * loader_.size() + batch_; }
  bool out_of_patience() const { return o_.patience > 0 && bad_epochs_ >= o_.patience; }
  void save(std::optional<double> metric = {}) {
    if (checkpoint_) checkpoint_->save(batches_done(), {.metric = metric});
  }

  Tensor loss_of(const Tensor& x, const Tensor& target, Tensor* output = nullptr) {
    amp::Autocast region(mixed_);
    Tensor y = net_(x);
    if (output) *output = y;
    return o_.loss ? o_.loss(y, target) : cross_entropy(y, target);
  }
  // `share` is the batch's share of the step's mean, f32 [].
  void accumulate(const Tensor& x, const Tensor& target, const Tensor& share) {
    Tensor loss = loss_of(x, target);
    scaler_.scale(loss * share).backward();
    total_.add_(loss.detach().to(DType::f64), static_cast<double>(x.size(0)));
  }
  void step() {
    if (scaler_.enabled()) {
      scaler_.step(opt_, {.clip_norm = o_.clip_norm});
      scaler_.update();
    } else {
      if (o_.clip_norm > 0) optim::clip_grad_norm_(opt_.parameters(), o_.clip_norm);
      opt_.step();
    }
    opt_.zero_grad();
  }

  // False when it was interrupted.
  bool run_epoch() {
    start_ = Clock::now();
    const int64_t size = loader_.size();
    std::optional<ProgressBar> bar;
    if (o_.progress) {
      bar.emplace(text::cat("epoch ", epoch_ + 1, "/", o_.epochs), size);
      bar->start();
      for (int64_t i = 0; i < batch_; ++i) bar->advance();
    }
    opt_.zero_grad();
    auto part = [this](const Tensor& x, const Tensor& target, const Tensor& share) { accumulate(x, target, share); };
    auto last = [this](const Tensor& x, const Tensor& target, const Tensor& share) {
      accumulate(x, target, share);
      step();
    };
    if (!part_) part_ = replayed(part), last_ = replayed(last);
    const int64_t rest = size % o_.accumulate;
    Tensor whole_share = full({}, 1.0 / static_cast<double>(o_.accumulate), {.device = device_});
    Tensor rest_share = rest > 0 ? full({}, 1.0 / static_cast<double>(rest), {.device = device_}) : whole_share;
    loader_.each([&](const Tensor& x, const Tensor& target) {
      const Tensor& share = batch_ < size - rest ? whole_share : rest_share;
      ++batch_;
      examples_ += x.size(0);
      const bool stepping = batch_ % o_.accumulate == 0 || batch_ == size;
      (stepping ? last_ : part_)(x, target, share);
      if (bar) {
        bar->advance();
        bar->show("loss", total_ / static_cast<double>(examples_));
      }
      if (!stepping || !interrupt_.asked()) return true;
      save();
      result_.interrupted = true;
      return false;
    });
    if (bar) bar->finish();
    if (result_.interrupted) return false;
    HT_CHECK(examples_ > 0, "train: the loader gave no batch in epoch ", epoch_ + 1);
    finish_epoch();
    return true;
  }

  using Step = std::function<void(const Tensor&, const Tensor&, const Tensor&)>;
  template <class F> Step replayed(F f) {
    if (!o_.capture) return f;
    return [captured = std::make_shared<Captured<F>>(capture(f))](const Tensor& x, const Tensor& target, const Tensor& share) { (*captured)(x, target, share); };
  }

  void finish_epoch() {
    TrainEpoch e{.epoch = epoch_ + 1, .loss = total_.item() / static_cast<double>(examples_)};
    HT_CHECK(std::isfinite(e.loss), "train: the loss of epoch ", e.epoch, " is ", e.loss, "; a smaller learning rate, .clip_norm or a warm-up may help");
    if (o_.validation) validate(e);
    e.seconds = seconds_ + since_start();
    result_.epochs.push_back(e);
    ++epoch_;
    batch_ = examples_ = 0;
    seconds_ = 0;
    start_ = Clock::now();
    total_.zero_();
    if (o_.validation) {
      bool best = result_.best_epoch == 0 || e.validation_loss < result_.epochs[static_cast<size_t>(result_.best_epoch) - 1].validation_loss;
      if (best) result_.best_epoch = e.epoch;
      bad_epochs_ = best ? 0 : bad_epochs_ + 1;
    }
    if (o_.after_epoch && !o_.after_epoch(e)) stopped_ = true;
    if (checkpoint_) write_figures();
    save(o_.validation ? std::optional(e.validation_loss) : std::nullopt);
  }

  void validate(TrainEpoch& e) {
    NoGrad off;
    std::optional<optim::EMA::Swapped> averages;
    if (o_.ema) averages.emplace(*o_.ema);
    net_.eval();
    Tensor loss = zeros({}, {.dtype = DType::f64, .device = device_}), right = zeros({}, {.dtype = DType::i64, .device = device_});
    int64_t examples = 0;
    bool classes = true;
    o_.validation->each([&](const Tensor& x, const Tensor& target) {
      Tensor y;
      loss.add_(loss_of(x, target, &y).to(DType::f64), static_cast<double>(x.size(0)));
      classes = classes && y.rank() == 2 && target.rank() == 1 && target.dtype() == DType::i64;
      if (classes) right.add_(eq(y.argmax(1), target).sum().to(DType::i64));
      examples += x.size(0);
      return true;
    });
    net_.train();
    HT_CHECK(examples > 0, "train: the validation loader has no batches");
    e.validation_loss = loss.item() / static_cast<double>(examples);
    if (classes) e.accuracy = right.item() / static_cast<double>(examples);
  }

  void write_figures() const {
    io::make_folders(o_.folder);
    io::CsvLog log(o_.folder + "/epochs.csv");
    for (auto& e : result_.epochs)
      log.write({{"epoch", e.epoch}, {"loss", e.loss}, {"validation_loss", e.validation_loss}, {"accuracy", e.accuracy}, {"seconds", e.seconds}});
  }

  nn::Module& net_;
  Batches loader_;
  const TrainOptions& o_;
  std::optional<optim::AdamW> own_;
  optim::Optimizer& opt_;
  amp::AutocastOptions mixed_;
  amp::GradScaler scaler_;
  std::optional<io::Checkpoint> checkpoint_;  // where there is a folder
  Interrupt interrupt_;
  Device device_;
  Tensor total_;     // of the epoch's losses, times their examples
  Step part_, last_;  // of a step: all batches but the last, and that one
  int64_t epoch_ = 0, batch_ = 0, examples_ = 0, bad_epochs_ = 0;
  bool stopped_ = false;  // by after_epoch
  double seconds_ = 0;    // of this epoch in runs before
  Clock::time_point start_ = Clock::now();
  TrainResult result_;
};

}  // namespace

TrainResult train(nn::Module& net, Batches loader, const TrainOptions& options) {
  check(options, loader);
  return Training(net, std::move(loader), options).run();
}

}  // namespace halftone
