// train(): it is the plain loop, bit for bit; interrupted anywhere and resumed, it is as if it had never stopped.
#include <signal.h>

#include <cmath>
#include <set>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

using namespace halftone;
using Catch::Contains;

namespace {

data::TensorDataset quarters(int64_t n, uint64_t seed) {
  manual_seed(seed);
  Tensor x = randn({n, 2});
  return {x, gt(x.select(1, 0), 0).to(DType::i64) * 2 + gt(x.select(1, 1), 0).to(DType::i64)};
}
nn::Sequential make_net(double dropout = 0) {
  manual_seed(1);
  return nn::Sequential{nn::Linear(2, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Dropout(dropout), nn::Linear(16, 4)};
}
std::vector<std::vector<double>> bits(const StateDict& state) {
  std::vector<std::vector<double>> all;
  for (auto& [name, t] : state) all.push_back(t.to_vector<double>());
  return all;
}
using Loader = data::DataLoader<data::TensorDataset>;
Loader shuffled(int64_t n = 70, int64_t batch = 16) { return Loader(quarters(n, 2), {.batch_size = batch, .shuffle = true, .seed = 5}); }

}  // namespace

TEST_CASE("train is the plain loop, bit for bit; steps of several batches, clipped, in each precision") {
  for (auto dtype : {std::optional<DType>(), std::optional(DType::bf16), std::optional(DType::f16)})
    for (int64_t accumulate : {1, 2, 3}) {
      INFO((dtype ? str(*dtype) : "f32") << ", " << accumulate);
      auto net = make_net(.2), plain = make_net(.2);
      optim::SGD opt(net.parameters(), {.lr = .1, .momentum = .9}), plain_opt(plain.parameters(), {.lr = .1, .momentum = .9});
      Loader loader = shuffled(), plain_loader = shuffled();
      manual_seed(9);
      auto result = train(net, loader, {.epochs = 2, .optimizer = &opt, .autocast = dtype, .accumulate = accumulate, .clip_norm = .5, .progress = false});
      manual_seed(9);
      amp::GradScaler scaler({.enabled = dtype == DType::f16});
      std::vector<double> losses;
      for (int epoch = 0; epoch < 2; ++epoch) {
        int64_t done = 0, size = plain_loader.size();
        double total = 0, examples = 0;
        for (auto& [x, target] : plain_loader) {
          int64_t group = done / accumulate, parts = std::min(accumulate, size - group * accumulate);
          Tensor loss;
          {
            amp::Autocast region({.dtype = dtype, .enabled = dtype.has_value()});
            loss = cross_entropy(plain(x), target);
          }
          scaler.scale(loss * full({}, 1.0 / static_cast<double>(parts))).backward();
          total += loss.item() * static_cast<double>(x.size(0));
          examples += static_cast<double>(x.size(0));
          if (++done % accumulate != 0 && done != size) continue;
          scaler.unscale_(plain_opt);
          optim::clip_grad_norm_(plain.parameters(), .5);
          scaler.step(plain_opt);
          scaler.update();
          plain_opt.zero_grad();
        }
        losses.push_back(total / examples);
      }
      auto got = net.state_dict(), want = plain.state_dict();
      for (auto& [name, t] : want) {
        INFO(name);
        auto a = got.at(name).to_vector<double>(), b = t.to_vector<double>();
        if (dtype == DType::f16)  // clipped on the way there, in a pass of its own here
          for (size_t i = 0; i < a.size(); ++i) CHECK(a[i] == Approx(b[i]).epsilon(1e-4).margin(1e-5));
        else
          CHECK(a == b);
      }
      REQUIRE(result.epochs.size() == 2);
      for (size_t i = 0; i < 2; ++i) CHECK(result.epochs[i].loss == Approx(losses[i]).epsilon(1e-4));
      CHECK(std::isnan(result.epochs[0].validation_loss));
    }
}

namespace {

// A run with everything that has a state, stopped by Ctrl-C at some batches; each part of it has objects of its own.
struct Outcome {
  std::vector<std::vector<double>> weights, averages;
  std::vector<double> figures;
  int64_t runs = 0, skipped = 0;
  bool operator==(const Outcome& o) const { return weights == o.weights && averages == o.averages && figures == o.figures && skipped == o.skipped; }
};
Outcome run(const std::string& folder, std::set<int64_t> stops, int64_t accumulate) {
  Outcome out;
  int64_t batches = 0;  // in all runs
  for (bool interrupted = true; interrupted; ++out.runs) {
    auto net = make_net(.3);
    optim::AdamW opt(net.parameters(), {.lr = 1e-2});
    optim::CosineAnnealingLR schedule(opt, {.steps = 15});
    optim::EMA ema(opt, {.decay = .9});
    Loader loader = shuffled(), test(quarters(40, 3), {.batch_size = 16});
    manual_seed(out.runs == 0 ? 4 : 1000);  // a resumed run takes the saved one
    auto result = train(net, loader, {.epochs = 3,
                                      .loss =
                                          [&](const Tensor& y, const Tensor& target) {
                                            bool training = recording();
                                            if (training && stops.contains(++batches)) raise(SIGINT);
                                            // One batch whose gradients overflow, wherever the run was stopped.
                                            return cross_entropy(y, target) * (training && batches == 4 ? 1e30 : 1);
                                          },
                                      .optimizer = &opt, .schedule = &schedule, .ema = &ema, .validation = test, .autocast = DType::f16,
                                      .accumulate = accumulate, .folder = folder, .progress = false});
    interrupted = result.interrupted;
    REQUIRE(interrupted == !(stops.empty() || batches >= 15));
    out.weights = bits(net.state_dict());
    out.averages = bits(ema.state_dict());
    out.skipped = result.skipped_steps;
    out.figures.clear();
    for (auto& e : result.epochs) out.figures.insert(out.figures.end(), {e.loss, e.validation_loss, e.accuracy});
  }
  return out;
}

}  // namespace

TEST_CASE("interrupted after any step and resumed, a run gives the same bits") {
  for (int64_t accumulate : {1, 2}) {
    Temporary whole;
    Outcome expected = run(whole.folder, {}, accumulate);
    CHECK(expected.runs == 1);
    CHECK(expected.skipped == 1);
    CHECK(expected.figures.size() == 9);
    for (int64_t stop = 1; stop < 15; stop += accumulate) {
      INFO("stopped in batch " << stop << ", steps of " << accumulate);
      Temporary folder;
      Outcome got = run(folder.folder, {stop, 10}, accumulate);
      CHECK(got.runs == (stop == 10 ? 2 : 3));
      CHECK(got == expected);
    }
  }
}

TEST_CASE("a finished run goes on when there are more epochs, and has nothing to do when there are none") {
  Temporary folder;
  auto net = make_net(), again = make_net();
  Loader loader = shuffled(), other = shuffled();
  auto first = train(net, loader, {.epochs = 2, .folder = folder.folder, .progress = false});
  auto weights = bits(net.state_dict());
  auto same = train(again, other, {.epochs = 2, .folder = folder.folder, .progress = false});
  CHECK(bits(again.state_dict()) == weights);
  REQUIRE(same.epochs.size() == 2);
  CHECK(same.epochs[1].loss == first.epochs[1].loss);
  CHECK(train(again, other, {.epochs = 3, .folder = folder.folder, .progress = false}).epochs.size() == 3);
  CHECK(train(net, loader, {.epochs = 1, .folder = folder.folder, .resume = false, .progress = false}).epochs.size() == 1);
  CHECK(io::read_file(folder.folder + "/epochs.csv").starts_with("epoch,loss,validation_loss,accuracy,seconds\n1,"));
}

TEST_CASE("early stopping, the best epoch's weights, and after_epoch") {
  Temporary folder;
  auto net = make_net();
  Loader loader = shuffled(400, 40), test(quarters(100, 3), {.batch_size = 50});
  // The validation loss is made up: best in epoch 2.
  std::vector<double> made{3, 1, 2, 2, 2, 2};
  size_t epoch = 0;
  std::vector<std::vector<double>> best;
  TrainOptions o{.epochs = 6,
                 .loss = [&](const Tensor& y, const Tensor& target) { return recording() ? cross_entropy(y, target) : full({}, made[epoch]); },
                 .validation = test,
                 .patience = 2,
                 .folder = folder.folder,
                 .restore_best = true,
                 .progress = false,
                 .after_epoch = [&](const TrainEpoch& e) {
                   CHECK(e.epoch == static_cast<int64_t>(epoch) + 1);
                   if (++epoch == 2) best = bits(net.state_dict().clone());
                   return true;
                 }};
  auto result = train(net, loader, o);
  CHECK(result.stopped_early);
  CHECK(result.best_epoch == 2);
  CHECK(result.epochs.size() == 4);
  CHECK(result.epochs[1].validation_loss == 1);
  CHECK(result.epochs[3].accuracy > .5);
  CHECK(bits(net.state_dict()) == best);
  CHECK(net.training());

  auto free = make_net();
  int64_t seen = 0;
  auto stopped = train(free, loader, {.epochs = 5, .progress = false, .after_epoch = [&](const TrainEpoch&) { return ++seen < 3; }});
  CHECK(stopped.epochs.size() == 3);
  CHECK(stopped.stopped_early);
}

TEST_CASE("train learns with its defaults, captured or not") {
  for (bool captured : {false, true}) {
    auto net = make_net();
    Loader loader = shuffled(600, 20), test(quarters(200, 3), {.batch_size = 100});
    auto result = train(net, loader, {.epochs = 8, .validation = test, .capture = captured, .progress = false});
    CHECK(result.epochs.back().accuracy > .85);
    CHECK(result.epochs.back().validation_loss < .5 * result.epochs[0].validation_loss + .3);
    CHECK(result.best_epoch > 0);
  }
  auto net = make_net();  // whatever gives two tensors: a regression, whose accuracy is none
  data::TensorDataset values(randn({40, 2}), randn({40, 4}));
  Loader loader(values, {.batch_size = 10});
  auto result = train(net, loader, {.epochs = 2, .loss = [](const Tensor& y, const Tensor& t) { return mse_loss(y, t); }, .validation = loader, .progress = false});
  CHECK(std::isnan(result.epochs[1].accuracy));
  CHECK(result.epochs[1].validation_loss > 0);
}

TEST_CASE("errors of train") {
  auto net = make_net();
  Loader loader = shuffled();
  auto refuses = [&](const TrainOptions& o, const char* text) { CHECK_THROWS_WITH(train(net, loader, o), Contains(text)); };
  refuses({.epochs = -1}, "train: expected epochs of 0 or more, got -1");
  refuses({.accumulate = 0}, "train: expected accumulate above 0, got 0");
  refuses({.clip_norm = -1}, "train: expected clip_norm of 0 or more, got -1");
  refuses({.patience = 1}, "train: patience looks at the validation loss; give .validation a loader");
  refuses({.validation = loader, .restore_best = true}, "train: restore_best needs .validation and a .folder");
  refuses({.autocast = DType::f32}, "train: expected autocast to f16 or bf16, got f32");
  refuses({.loss = [](const Tensor& y, const Tensor& t) { return cross_entropy(y, t) * NAN; }, .progress = false}, "train: the loss of epoch 1 is nan; a smaller learning rate");
  {
    optim::SGD opt(net.parameters());
    optim::EMA ema(opt);
    refuses({.ema = &ema}, "train: a schedule or an average belongs to an optimizer; give that one as .optimizer");
  }
  Loader none(quarters(4, 1), {.batch_size = 8, .drop_last = true});
  CHECK_THROWS_WITH(train(net, none), Contains("train: the loader has no batches"));
}
