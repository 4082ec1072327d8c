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
  Epochs epochs(device);

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
    epochs.add(loss);
  });

  Session session(run, run.precision, steps, size);
  session.checkpoint.add("net", net).add("opt", opt).add("schedule", schedule).add("loader", loader).add("epochs", epochs);
  if (scaler.enabled()) session.checkpoint.add("scaler", scaler);
  reset_peak_memory(device);
  Endless batches(loader);
  for (int64_t done = session.begin(); session.more(done);) {
    auto& [x, target] = batches.next();
    step(x, target);
    if (++done % size != 0) continue;
    net.eval();
    epochs.accuracies.push_back(accuracy(net, test_loader, run.mixed()));
    net.train();
    epochs.end_epoch(size);
    session.log(done, {{"loss", epochs.losses.back()}, {"test accuracy", epochs.accuracies.back()}, {"seconds", epochs.seconds.back()}});
  }
  if (session.interrupted()) return {};

  Result r{.precision = run.precision,
           .seed = run.seed,
           .peak_mib = static_cast<double>(memory_stats(device).peak) / (1 << 20),
           .losses = epochs.losses,
           .accuracies = epochs.accuracies,
           .seconds = epochs.seconds};
  if (!epochs.seconds.empty()) r.samples_per_s = static_cast<double>(steps * o.batch) / epochs.seconds.back();
  if (scaler.enabled()) {
    r.final_scale = scaler.get_scale();
    r.skipped_steps = scaler.skipped_steps();
  }
  io::save(run.file("mlp.safetensors"), net.state_dict());
  io::Fields found = r.fields();
  found.insert(found.end(), {{"epochs", o.epochs}, {"batch", o.batch}});
  run.write_metrics(found);
  return r;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  Arguments arguments("mlp",
                      "Trains the network 784-256-128-10 on Fashion-MNIST with SGD, and writes to OUT: mlp.safetensors, metrics.json, log.csv, "
                      "checkpoints and loss.svg. With several precisions each gets a folder of its own, and loss.svg shows all of them.",
                      {"mlp --precision fp32 bf16", "mlp --device cuda --capture --precision fp32 fp16 --data DIR",
                       "mlp --device cuda --workers 0 --capture --seeds 5 --target 89 --data DIR"});
  o.add_data(arguments);
  o.add_to(arguments, true);
  arguments.add("--epochs", o.epochs, "times through the training set", Arguments::not_negative);
  arguments.add("--batch", o.batch, "examples a step", Arguments::positive);
  arguments.add("--lr", o.lr, "learning rate of the first step; it falls linearly to a twentieth", Arguments::not_negative);
  arguments.add("--workers", o.workers, "threads that prepare batches; 0: data lie on the device, and batches are made there",
                Arguments::not_negative);
  return arguments.run(argc, argv, [&] {
    o.place();  // before anything is read: is there such a device?
    data::TensorDataset train_set = data::mnist(o.data, {.train = true, .mean = 0.2860, .std = 0.3530});
    data::TensorDataset test_set = data::mnist(o.data, {.train = false, .mean = 0.2860, .std = 0.3530});
    if (o.workers == 0) train_set = train_set.to(o.place()), test_set = test_set.to(o.place());
    HT_CHECK(o.batch <= train_set.size(), "--batch: ", o.batch, " is more than the ", train_set.size(), " training examples");
    std::printf("%lld training and %lld test images from %s\n", static_cast<long long>(train_set.size()), static_cast<long long>(test_set.size()),
                o.data.c_str());
    return train_each(o, [&](const Run& run) { return train_once(o, run, train_set, test_set); });
  });
}
