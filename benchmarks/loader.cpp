// What batches cost beside the steps that they feed, as ratios of one run: Fashion-MNIST from memory for the network 784-256-128-10, and
// with random crops, mirrors and patches, made by workers, for a small CNN. Kinds of epochs take turns; medians are printed, one JSON line a
// kind: "share" is the time for which the loop waited for batches over the rest of the epoch; "against_made" is the epoch over one of the same
// number of batches that were made before, and "processors" so much of it in processors' time, which other programs on the machine leave as it is.
//   loader [--data /usr/share/datasets/fashion-mnist] [--device cuda] [--rounds 5] [--steps 60]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <functional>

#include "halftone/benchmarks/options.h"
#include "halftone/halftone.h"

namespace ht = halftone;
using namespace ht;

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Trainer {
  nn::Sequential net;
  optim::SGD opt;
  Trainer(nn::Sequential n, Device device) : net(std::move(n)), opt((net.to(device), net.parameters()), {.lr = 0.01, .momentum = 0.9}) {}
  void step(const Tensor& x, const Tensor& target) {
    opt.zero_grad();
    cross_entropy(net(x), target).backward();
    opt.step();
  }
};

struct Epoch { double seconds = 0, waiting = 0, processors = 0; };
struct Kind {
  std::string name;
  std::function<Epoch()> run;
  std::vector<Epoch> epochs = {};
};

// The batches of an epoch, kept.
template <data::Dataset D> Kind made_before(Trainer& trainer, D set, const data::LoaderOptions& options, int64_t steps) {
  std::vector<data::Batch> batches;
  for (auto& batch : data::DataLoader<D>(std::move(set), options)) {
    if (static_cast<int64_t>(batches.size()) == steps) break;
    batches.push_back(batch);
  }
  return {"made before", [&trainer, batches, device = options.device] {
            const auto start = Clock::now();
            for (auto& batch : batches) trainer.step(batch.x, batch.target);
            backend(device.type).synchronize(device.index);
            return Epoch{seconds_since(start)};
          }};
}
template <data::Dataset D> Kind loaded(std::string name, Trainer& trainer, D set, const data::LoaderOptions& options, int64_t steps) {
  auto loader = std::make_shared<data::DataLoader<D>>(std::move(set), options);
  return {std::move(name), [&trainer, loader, steps, device = options.device] {
            Epoch e;
            const auto start = Clock::now();
            auto at = loader->begin();
            e.waiting = seconds_since(start);
            for (int64_t i = 1;; ++i) {
              trainer.step(at->x, at->target);
              if (i == steps) break;
              const auto asked = Clock::now();
              ++at;
              e.waiting += seconds_since(asked);
            }
            backend(device.type).synchronize(device.index);
            e.seconds = seconds_since(start);
            return e;
          }};
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}
double processors() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }
// The first kind is that of batches made before. A round of each warms up.
void compare(const char* name, std::vector<Kind> kinds, int rounds, int64_t steps) {
  for (int r = 0; r <= rounds; ++r)
    for (Kind& k : kinds) {
      const double before = processors();
      Epoch e = k.run();
      e.processors = processors() - before;
      if (r > 0) k.epochs.push_back(e);
    }
  const auto of = [](const Kind& k, auto f) {
    std::vector<double> v;
    for (const Epoch& e : k.epochs) v.push_back(f(e));
    return median(v);
  };
  const auto seconds = [](const Epoch& e) { return e.seconds; };
  const auto spent = [](const Epoch& e) { return e.processors; };
  for (const Kind& k : kinds)
    std::printf("{\"case\": \"%s\", \"loader\": \"%s\", \"steps\": %lld, \"seconds\": %.3f, \"waiting\": %.4f, \"share\": %.4f, "
                "\"against_made\": %.3f, \"processors\": %.3f}\n",
                name, k.name.c_str(), static_cast<long long>(steps), of(k, seconds), of(k, [](const Epoch& e) { return e.waiting; }),
                of(k, [](const Epoch& e) { return e.waiting / (e.seconds - e.waiting); }), of(k, seconds) / of(kinds[0], seconds),
                of(k, spent) / of(kinds[0], spent));
  std::fflush(stdout);
}

nn::Sequential perceptron() {
  return nn::Sequential{nn::Flatten(), nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 128), nn::ReLU(), nn::Linear(128, 10)};
}
nn::Sequential convolutional() {
  nn::Sequential net;
  int64_t in = 1;
  for (int64_t out : {16, 32, 64}) {
    net.add(nn::Conv2d(in, out, 3, {.padding = 1, .bias = false})).add(nn::BatchNorm2d(out)).add(nn::ReLU()).add(nn::MaxPool2d(2));
    in = out;
  }
  net.add(nn::Flatten()).add(nn::Linear(in * 3 * 3, 10));
  return net;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string installed = "/usr/share/datasets/fashion-mnist";
  std::string folder = std::filesystem::is_directory(installed) ? installed : "data/fashion-mnist-subset", place = "cpu";
  int rounds = 5;
  int64_t batch = 128, steps = 60;
  CLI::App app("Times epochs by a loader against as many steps on batches made before; one JSON line a kind");
  app.add_option("--data", folder, "folder with the four files of Fashion-MNIST or MNIST, plain or .gz")->capture_default_str();
  app.add_option("--device", place, "cpu or cuda")->capture_default_str();
  app.add_option("--rounds", rounds, "epochs of each kind")->check(benchmarks::positive_number, "POSITIVE")->capture_default_str();
  app.add_option("--batch", batch, "examples a step")->check(benchmarks::positive_number, "POSITIVE")->capture_default_str();
  app.add_option("--steps", steps, "steps of the CNN in an epoch; the perceptron takes all")->check(benchmarks::positive_number, "POSITIVE")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const Device device = ht::device(place);
  std::printf("%s\n%s on %s, %d threads\n", build_info().c_str(), folder.c_str(), place.c_str(), num_threads());
  const data::TensorDataset set = data::mnist(folder);
  const int64_t whole = set.size() / batch;
  HT_CHECK(whole > 0, "--batch: ", batch, " is more than the ", set.size(), " training examples");
  const auto options = [&](int workers) {
    return data::LoaderOptions{.batch_size = batch, .shuffle = true, .workers = workers, .drop_last = true, .device = device};
  };

  Trainer mlp(perceptron(), device), cnn(convolutional(), device);
  std::vector<Kind> plain{made_before(mlp, set, options(0), whole)};
  for (const int workers : {0, 1, 2}) plain.push_back(loaded(text::cat(workers, " workers"), mlp, set, options(workers), whole));
  if (device != Device::cpu()) plain.push_back(loaded("on the device", mlp, set.to(device), options(0), whole));
  compare("mlp", std::move(plain), rounds, whole);

  const auto augmented = [](data::TensorDataset of) {
    return data::transform(std::move(of), data::RandomCrop(28, {.padding = 4}), data::RandomFlip(), data::Cutout(8),
                           data::Normalize({0.286}, {0.353}));
  };
  steps = std::min(steps, whole);
  std::vector<Kind> random{made_before(cnn, augmented(set), options(0), steps)};
  for (const int workers : {0, 1, 2}) random.push_back(loaded(text::cat(workers, " workers"), cnn, augmented(set), options(workers), steps));
  if (device != Device::cpu()) random.push_back(loaded("on the device", cnn, augmented(set.to(device)), options(0), steps));
  compare("cnn, augmented", std::move(random), rounds, steps);
} catch (const std::exception& e) {
  std::fprintf(stderr, "loader: %s\n", e.what());
  return 1;
}
