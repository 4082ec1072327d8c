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

std::optional<Result> train_once(const Options& o, const Run& run, const data::TensorDataset& train_set, const data::TensorDataset& test_set) {
  Device device = run.place();
  manual_seed(run.seed);
  nn::Sequential net = make_net(o.width);
  net.to(device);
  data::DataLoader loader(
      data::transform(train_set, data::RandomFlip()),
      {.batch_size = o.batch, .shuffle = true, .workers = static_cast<int>(o.workers), .drop_last = true, .seed = run.seed, .device = device});
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
                        .resume = run.resuming(),
                        .capture = run.capture,
                        .after_epoch = logged(run)});
  auto result = result_of(trained, run, loader.size() * o.batch);
  if (result) io::save(run.file("cnn.safetensors"), net.state_dict());  // PyTorch's names and layouts
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  Arguments arguments("cnn",
                      "Trains a CNN on Fashion-MNIST, and writes to OUT: cnn.safetensors, metrics.json, epochs.csv, checkpoints and loss.svg. With "
                      "several precisions each gets a folder of its own.",
                      {"cnn --precision fp32 bf16", "cnn --device cuda --capture --precision fp32 fp16 --data DIR",
                       "cnn --device cuda --workers 0 --capture --precision fp32 fp16 --seeds 5 --target 92 --data DIR"});
  o.add_data(arguments);
  o.add_to(arguments, true);
  arguments.add("--epochs", o.epochs, "times through the training set", Arguments::not_negative);
  arguments.add("--batch", o.batch, "examples a step", Arguments::positive);
  arguments.add("--width", o.width, "channels of the first convolution", Arguments::positive);
  arguments.add("--lr", o.lr, "largest learning rate of the cycle", Arguments::not_negative);
  arguments.add("--workers", o.workers, "threads that prepare batches; 0: data lie on the device, and batches are made there",
                Arguments::not_negative);
  return arguments.run(argc, argv, [&] {
    o.place();
    data::TensorDataset train_set = data::mnist(o.data, {.train = true, .mean = 0.2860, .std = 0.3530});
    data::TensorDataset test_set = data::mnist(o.data, {.train = false, .mean = 0.2860, .std = 0.3530});
    if (o.workers == 0) train_set = train_set.to(o.place()), test_set = test_set.to(o.place());
    HT_CHECK(o.batch <= train_set.size(), "--batch: ", o.batch, " is more than the ", train_set.size(), " training examples");
    std::printf("%s", make_net(o.width).summary({o.batch, 1, 28, 28}).c_str());
    return train_each(o, [&](const Run& run) { return train_once(o, run, train_set, test_set); });
  });
}
