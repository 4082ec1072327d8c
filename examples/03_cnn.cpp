// Trains a small convolutional network on Fashion-MNIST by train(), in one or several precisions, and compares them: 12 epochs
// give more than 92 % of the full test set.
// ctest: --data @data@/fashion-mnist-subset --epochs 1 --precision fp32 bf16 --width 4 --fresh --out cnn_test
#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

struct Options : Run {
  int64_t epochs = 12, batch = 128, width = 32, workers = 1;
  double lr = 0.1;
  Options() : Run("runs/cnn") {}
};

// Images, half of them mirrored, another half each epoch.
struct Mirrored {
  data::TensorDataset images;
  int64_t size() const { return images.size(); }
  data::Batch get(std::span<const int64_t> indices) const {
    auto [x, target] = images.get(indices);
    Tensor mirrored = bernoulli(full({x.size(0), 1, 1, 1}, 0.5));
    return {where(gt(mirrored, 0), flip(x, {3}), x), target};
  }
};

// Change a layer here, and retrain.
nn::Sequential make_net(int64_t width) {
  nn::Sequential net;
  int64_t in = 1;
  for (int64_t out : {width, 2 * width, 4 * width}) {
    net.add(nn::Conv2d(in, out, 3, {.padding = 1, .bias = false})).add(nn::BatchNorm2d(out)).add(nn::ReLU()).add(nn::MaxPool2d(2));  // half the size
    in = out;
  }
  net.add(nn::Flatten()).add(nn::Dropout(0.3)).add(nn::Linear(in * 3 * 3, in)).add(nn::ReLU()).add(nn::Dropout(0.3)).add(nn::Linear(in, 10));
  return net;
}

std::optional<Result> train_once(const Options& o, const Run& run, const Mirrored& train_set, const data::TensorDataset& test_set) {
  Device device = run.place();
  manual_seed(run.seed);
  nn::Sequential net = make_net(o.width);
  net.to(device);
  data::DataLoader loader(train_set, {.batch_size = o.batch, .shuffle = true, .workers = static_cast<int>(o.workers), .drop_last = true, .seed = run.seed, .device = device});
  data::DataLoader test_loader(test_set, {.batch_size = 1000, .device = device});
  optim::SGD opt(net.parameters(), {.lr = o.lr, .momentum = 0.9, .weight_decay = 5e-4, .nesterov = true});
  optim::OneCycleLR schedule(opt, {.max_lr = o.lr, .steps = std::max<int64_t>(o.epochs * loader.size(), 8), .share = 0.25});

  reset_peak_memory(device);
  auto trained = train(net, loader,
                       {.epochs = o.epochs,
                        .optimizer = &opt,
                        .schedule = &schedule,
                        .validation = test_loader,
                        .autocast = run.dtype(),
                        .folder = run.out,
                        .resume = !run.fresh,
                        .capture = run.capture});
  auto result = result_of(trained, run, loader.size() * o.batch);
  if (result) io::save(run.file("cnn.safetensors"), net.state_dict());  // PyTorch's names and layouts
  return result;
}

}  // namespace

int main(int argc, char** argv) try {
  Options o;
  CLI::App app("Trains a CNN on Fashion-MNIST, and writes to OUT: cnn.safetensors, metrics.json, epochs.csv, checkpoints and loss.svg. With "
               "several precisions each gets a folder of its own.");
  o.add_data(app);
  o.add_to(app, true);
  app.add_option("--epochs", o.epochs, "times through the training set")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--batch", o.batch, "examples a step")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--width", o.width, "channels of the first convolution")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--lr", o.lr, "largest learning rate of the cycle")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--workers", o.workers, "threads that prepare batches")->check(CLI::NonNegativeNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  o.place();
  Mirrored train_set{data::mnist(o.data, {.train = true, .mean = 0.2860, .std = 0.3530})};
  data::TensorDataset test_set = data::mnist(o.data, {.train = false, .mean = 0.2860, .std = 0.3530});
  HT_CHECK(o.batch <= train_set.size(), "--batch: ", o.batch, " is more than the ", train_set.size(), " training examples");
  std::printf("%s", make_net(o.width).summary({o.batch, 1, 28, 28}).c_str());
  return train_each(o, [&](const Run& run) { return train_once(o, run, train_set, test_set); });
} catch (const std::exception& e) {
  std::fprintf(stderr, "cnn: %s\n", e.what());
  return 1;
}
