// Trains the network 784-256-128-10 on Fashion-MNIST (or MNIST) by a plain loop, in one or several precisions, and compares them.
// ctest: --data @data@/fashion-mnist-subset --epochs 1 --precision fp32 bf16 --fresh --out mlp_test
#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

struct Options : Run {
  int64_t epochs = 10, batch = 128, workers = 1;
  double lr = 0.1;
  Options() : Run("runs/mlp") {}
};

std::optional<Result> train_once(const Options& o, const Run& run, const data::TensorDataset& train_set, const data::TensorDataset& test_set) {
  Device device = run.place();
  manual_seed(run.seed);
  nn::Sequential net{nn::Flatten(), nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 128), nn::ReLU(), nn::Linear(128, 10)};
  net.to(device);
  data::DataLoader loader(train_set, {.batch_size = o.batch, .shuffle = true, .workers = static_cast<int>(o.workers), .drop_last = true, .seed = run.seed, .device = device});
  data::DataLoader test_loader(test_set, {.batch_size = 1000, .device = device});
  const int64_t size = loader.size(), steps = o.epochs * size;
  optim::SGD opt(net.parameters(), {.lr = o.lr, .momentum = 0.9});
  optim::LinearLR schedule(opt, {.steps = std::max<int64_t>(steps, 1), .start = 1, .end = 0.05});
  amp::GradScaler scaler = run.scaler();
  Losses losses(device);

  auto step = run.replayed([&](const Tensor& x, const Tensor& target) {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(run.mixed());
      loss = cross_entropy(net(x), target);
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    losses.add(loss);
  });

  Session session(run, steps, size);
  session.checkpoint.add("net", net).add("opt", opt).add("schedule", schedule).add("loader", loader).add("losses", losses);
  if (scaler.enabled()) session.checkpoint.add("scaler", scaler);
  const int64_t begun = session.begin();
  int64_t done = begun;
  io::CsvLog log(run.file("epochs.csv"), {.append = done > 0});
  reset_peak_memory(device);
  Clock clock;
  Endless batches(loader);
  ProgressBar bar = bar_at(run.precision, steps, done);
  while (session.more(done)) {
    auto& [x, target] = batches.next();
    step(x, target);
    bar.advance();
    if (++done % size != 0) continue;
    losses.end_epoch(size);
    bar.show("loss", losses.means.back());
    log.write({{"epoch", done / size}, {"loss", losses.means.back()}, {"seconds", clock.seconds()}});
  }
  bar.finish();
  if (session.interrupted()) return {};

  Result r{.precision = run.precision, .peak_mib = static_cast<double>(memory_stats(device).peak) / (1 << 20), .seconds = clock.seconds(), .losses = losses.means};
  r.samples_per_s = done == begun ? 0 : static_cast<double>((done - begun) * o.batch) / r.seconds;
  if (scaler.enabled()) {
    r.final_scale = scaler.get_scale();
    r.skipped_steps = scaler.skipped_steps();
  }
  net.eval();
  r.test_accuracy = accuracy(net, test_loader, run.mixed());
  io::save(run.file("mlp.safetensors"), net.state_dict());
  io::Fields found = r.fields();
  found.insert(found.end(), {{"epochs", o.epochs}, {"batch", o.batch}});
  run.write_metrics(found);
  return r;
}

}  // namespace

int main(int argc, char** argv) try {
  Options o;
  CLI::App app("Trains the network 784-256-128-10 on Fashion-MNIST with SGD, and writes to OUT: mlp.safetensors, metrics.json, epochs.csv, "
               "checkpoints and loss.svg. With several precisions each gets a folder of its own, and loss.svg shows all of them.");
  o.add_data(app);
  o.add_to(app, true);
  app.add_option("--epochs", o.epochs, "times through the training set")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--batch", o.batch, "examples a step")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--lr", o.lr, "learning rate of the first step; it falls linearly to a twentieth")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--workers", o.workers, "threads that prepare batches")->check(CLI::NonNegativeNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  o.place();  // before anything is read: is there such a device?
  data::TensorDataset train_set = data::mnist(o.data, {.train = true, .mean = 0.2860, .std = 0.3530});
  data::TensorDataset test_set = data::mnist(o.data, {.train = false, .mean = 0.2860, .std = 0.3530});
  HT_CHECK(o.batch <= train_set.size(), "--batch: ", o.batch, " is more than the ", train_set.size(), " training examples");
  std::printf("%lld training and %lld test images from %s\n", static_cast<long long>(train_set.size()), static_cast<long long>(test_set.size()), o.data.c_str());
  return train_each(o, [&](const Run& run) { return train_once(o, run, train_set, test_set); });
} catch (const std::exception& e) {
  std::fprintf(stderr, "mlp: %s\n", e.what());
  return 1;
}
