// Trains the network 784-256-128-10 on Fashion-MNIST (or MNIST) in one or several precisions, and compares them.
// ctest: --data @data@/fashion-mnist-subset --epochs 1 --precision fp32 bf16 --out mlp_test
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "halftone/halftone.h"

namespace ht = halftone;
using namespace ht;

namespace {

struct Options {
  std::string data = "data/fashion-mnist-subset", device = "cpu", out = "runs/mlp";
  std::vector<std::string> precision = {"fp32"};
  int epochs = 10, workers = 1;
  int64_t batch = 128;
  double lr = 0.1;
  uint64_t seed = 0;
};

struct Result {
  std::string precision;
  double test_accuracy = 0, samples_per_s = 0, peak_mib = 0, final_scale = 1, seconds = 0;
  int64_t skipped_steps = 0;
  std::vector<double> losses;  // the mean of each epoch
};

std::optional<DType> autocast_dtype(const std::string& precision) {
  if (precision == "fp32") return {};
  return precision == "fp16" ? DType::f16 : DType::bf16;
}

// The share of test examples whose largest output is at the right class, in percent.
double accuracy(nn::Sequential& net, data::DataLoader<data::TensorDataset>& loader, const amp::AutocastOptions& mixed) {
  NoGrad off;
  amp::Autocast region(mixed);
  net.eval();
  Tensor right;
  int64_t count = 0;
  for (auto& [x, target] : loader) {
    Tensor hits = eq(net(x).argmax(1), target).sum();
    right = right.defined() ? right + hits : hits;
    count += target.numel();
  }
  net.train();
  return 100 * right.item() / static_cast<double>(count);
}

Result train(const Options& o, const std::string& precision, const data::TensorDataset& train_set, const data::TensorDataset& test_set) {
  Device device = ht::device(o.device);
  manual_seed(o.seed);
  nn::Sequential net{nn::Flatten(), nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 128), nn::ReLU(), nn::Linear(128, 10)};
  net.to(device);
  auto dtype = autocast_dtype(precision);
  amp::AutocastOptions mixed{.dtype = dtype, .enabled = dtype.has_value()};
  optim::SGD opt(net.parameters(), {.lr = o.lr, .momentum = 0.9});
  amp::GradScaler scaler({.enabled = dtype == DType::f16});
  data::DataLoader loader(train_set, {.batch_size = o.batch, .shuffle = true, .workers = o.workers, .drop_last = true, .seed = o.seed, .device = device});
  data::DataLoader test_loader(test_set, {.batch_size = 1000, .device = device});
  Tensor total = zeros({}, {.device = device});  // of the epoch's losses

  auto step = capture([&](const Tensor& x, const Tensor& target) {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(mixed);
      loss = cross_entropy(net(x), target);
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    total.add_(loss.detach());
  });

  Result r;
  r.precision = precision;
  std::filesystem::path out = o.precision.size() > 1 ? std::filesystem::path(o.out) / precision : std::filesystem::path(o.out);
  std::filesystem::create_directories(out);
  io::CsvLog log(out / "epochs.csv");
  reset_peak_memory(device);
  auto start = std::chrono::steady_clock::now();
  for (int epoch = 1; epoch <= o.epochs; ++epoch) {
    total.zero_();
    opt.set_lr(o.lr * (1 - 0.95 * (epoch - 1) / std::max(1, o.epochs - 1)));  // linearly down to a twentieth
    for (auto& [x, target] : progress(loader, precision + " epoch " + std::to_string(epoch))) step(x, target);
    r.losses.push_back(total.item() / static_cast<double>(loader.size()));
    r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    log.write({{"epoch", epoch}, {"loss", r.losses.back()}, {"seconds", r.seconds}});
  }
  r.samples_per_s = o.epochs == 0 ? 0 : static_cast<double>(o.epochs * loader.size() * o.batch) / r.seconds;
  r.peak_mib = static_cast<double>(memory_stats(device).peak) / (1 << 20);
  r.final_scale = scaler.get_scale();
  r.skipped_steps = scaler.skipped_steps();
  r.test_accuracy = accuracy(net, test_loader, mixed);

  io::save(out / "mlp.safetensors", net.state_dict());
  io::write_json(out / "metrics.json", {{"test_accuracy", r.test_accuracy},
                                        {"precision", precision},
                                        {"device", str(device)},
                                        {"samples_per_s", r.samples_per_s},
                                        {"peak_mib", r.peak_mib},
                                        {"final_scale", r.final_scale},
                                        {"skipped_steps", r.skipped_steps},
                                        {"seconds", r.seconds},
                                        {"epochs", o.epochs},
                                        {"batch", o.batch},
                                        {"seed", static_cast<int64_t>(o.seed)},
                                        {"losses", r.losses},
                                        {"build", build_info()}});
  return r;
}

void print(const std::vector<Result>& results, const Options& o) {
  std::printf("\n%-10s %-8s %14s %14s %12s %12s %14s %9s\n", "precision", "device", "test accuracy", "samples/s", "peak MiB", "final scale", "skipped steps",
              "seconds");
  for (auto& r : results)
    std::printf("%-10s %-8s %13.2f%% %14.0f %12.1f %12.0f %14lld %9.2f\n", r.precision.c_str(), o.device.c_str(), r.test_accuracy, r.samples_per_s, r.peak_mib,
                r.final_scale, static_cast<long long>(r.skipped_steps), r.seconds);
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Trains the network 784-256-128-10 on Fashion-MNIST with SGD, and writes to OUT: mlp.safetensors, metrics.json, "
               "epochs.csv and loss.svg. With several precisions each gets a folder of its own, and loss.svg shows all of them.");
  app.add_option("--data", o.data, "folder with the four files of Fashion-MNIST or MNIST, plain or .gz")->capture_default_str();
  app.add_option("--device", o.device, "cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--precision", o.precision, "fp32, fp16 or bf16, or several; fp16 scales the loss")->check(CLI::IsMember({"fp32", "fp16", "bf16"}))->capture_default_str();
  app.add_option("--epochs", o.epochs, "times through the training set")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--batch", o.batch, "examples a step")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--lr", o.lr, "learning rate of the first epoch; it falls linearly")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--seed", o.seed, "of weights and order; the same seed gives the same bits")->capture_default_str();
  app.add_option("--workers", o.workers, "threads that prepare batches")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--out", o.out, "folder for what is written")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    backend(ht::device(o.device).type);  // before anything is read: is there such a device?
    data::TensorDataset train_set = data::mnist(o.data, {.train = true, .mean = 0.2860, .std = 0.3530});
    data::TensorDataset test_set = data::mnist(o.data, {.train = false, .mean = 0.2860, .std = 0.3530});
    HT_CHECK(o.batch <= train_set.size(), "--batch: ", o.batch, " is more than the ", train_set.size(), " training examples");
    std::printf("%lld training and %lld test images from %s\n", static_cast<long long>(train_set.size()), static_cast<long long>(test_set.size()), o.data.c_str());
    std::vector<Result> results;
    std::vector<io::Curve> curves;
    for (auto& precision : o.precision) {
      results.push_back(train(o, precision, train_set, test_set));
      curves.push_back({precision, results.back().losses});
    }
    io::save_chart((std::filesystem::path(o.out) / "loss.svg").string(), curves, {.title = "Training loss", .x_label = "epoch", .y_label = "cross entropy"});
    print(results, o);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "mlp: %s\n", e.what());
    return 1;
  }
}
