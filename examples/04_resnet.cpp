// Trains ResNet-18 for small images on CIFAR-10, in one or several precisions, and compares them. Its names are torchvision's. --help has
// the flags of fast recipes for 94 % (Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024).
// ctest: --data resnet_data --random 60 --epochs 1 --batch 20 --width 4 --precision fp32 bf16 --cutout 8 --mirror-test --fresh --out resnet_test
#include <filesystem>
#include <fstream>

#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

struct Options : Run {
  int64_t epochs = 30, batch = 512, width = 64, workers = 2, random = 0, cutout = 0;
  double lr = 0.4, smoothing = 0;
  bool mirror_test = false;
  Options() : Run("runs/resnet") { data = "data/cifar-10-batches-bin"; }
};

nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return nn::Conv2d(in, out, kernel, {.stride = stride, .padding = kernel / 2, .bias = false});
}

// relu(x + f(x)) of two convolutions (He et al., "Deep residual learning", 2016); a projection of x where the shape changes.
struct BasicBlock : nn::Module {
  BasicBlock(int64_t in, int64_t out, int64_t stride) : conv1(conv(in, out, 3, stride)), conv2(conv(out, out, 3, 1)), bn1(out), bn2(out) {
    if (in != out || stride != 1) downsample.add(conv(in, out, 1, stride)).add(nn::BatchNorm2d(out));
  }
  nn::Conv2d conv1, conv2;
  nn::BatchNorm2d bn1, bn2;
  nn::Sequential downsample;
  HT_FIELDS(conv1, bn1, conv2, bn2, downsample)
  Tensor forward(const Tensor& x) override { return bn2.add_relu(conv2(relu(bn1(conv1(x)))), downsample, x); }
};

struct ResNet18 : nn::Module {
  ResNet18(int64_t width, int64_t classes)
      : conv1(conv(3, width, 3, 1)), bn1(width), layer1(stage(width, width, 1)), layer2(stage(width, 2 * width, 2)), layer3(stage(2 * width, 4 * width, 2)),
        layer4(stage(4 * width, 8 * width, 2)), fc(8 * width, classes) {}
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Sequential layer1, layer2, layer3, layer4;
  nn::Linear fc;
  HT_FIELDS(conv1, bn1, layer1, layer2, layer3, layer4, fc)
  bool mirror_test = false;  // when it does not train, the mean of what an image and its mirror image give
  Tensor forward(const Tensor& x) override { return mirror_test && !training() ? (logits(x) + logits(flip(x, {3}))) / 2 : logits(x); }
  Tensor logits(const Tensor& x) {
    Tensor y = layer4(layer3(layer2(layer1(relu(bn1(conv1(x)))))));
    return fc(y.mean({2, 3}));
  }
  static nn::Sequential stage(int64_t in, int64_t out, int64_t stride) { return nn::Sequential{BasicBlock(in, out, stride), BasicBlock(out, out, 1)}; }
};

// Files of CIFAR-10's format with n images each that are noise around their class's colour: to try the program without the real ones.
void write_random(const std::string& folder, int64_t n) {
  io::make_folders(folder);
  for (std::string name : {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin", "test_batch.bin"}) {
    std::ofstream file(folder + "/" + name, std::ios::binary);
    for (int64_t i = 0; i < n; ++i) {
      Tensor image = randint(0, 128, {3 * 32 * 32}) + 12 * (i % 10);
      std::string record(1, static_cast<char>(i % 10));
      for (auto v : image.to_vector<int64_t>()) record += static_cast<char>(v);
      file << record;
    }
    HT_CHECK(file.flush(), "--random: cannot write ", folder, "/", name);
  }
}

std::optional<Result> train_once(const Options& o, const Run& run, const data::TensorDataset& train_images, const data::TensorDataset& test_images) {
  Device device = run.place();
  manual_seed(run.seed);
  ResNet18 net(o.width, 10);
  net.mirror_test = o.mirror_test;
  net.to(device);
  data::Normalize normalize({0.4914, 0.4822, 0.4465}, {0.2470, 0.2435, 0.2616});
  auto cut = [&](const Tensor& x) { return o.cutout > 0 ? data::Cutout(o.cutout)(x) : x; };
  auto train_set = data::transform(train_images, data::RandomCrop(32, {.padding = 4}), data::RandomFlip(), normalize, cut);
  data::DataLoader loader(train_set, {.batch_size = o.batch, .shuffle = true, .workers = static_cast<int>(o.workers), .drop_last = true, .seed = run.seed, .device = device});
  HT_CHECK(loader.size() > 0, "--batch: ", o.batch, " is more than the ", train_set.size(), " training examples");
  data::DataLoader test_loader(data::transform(test_images, normalize), {.batch_size = 1000, .device = device});
  optim::SGD opt(net.parameters(), {.lr = o.lr, .momentum = 0.9, .weight_decay = 5e-4, .nesterov = true});
  optim::OneCycleLR schedule(opt, {.max_lr = o.lr, .steps = std::max<int64_t>(o.epochs * loader.size(), 8), .share = 0.25});

  reset_peak_memory(device);
  auto trained = train(net, loader,
                       {.epochs = o.epochs,
                        .loss = [&](const Tensor& y, const Tensor& target) { return cross_entropy(y, target, {.label_smoothing = o.smoothing}); },
                        .optimizer = &opt,
                        .schedule = &schedule,
                        .validation = test_loader,
                        .autocast = run.dtype(),
                        .folder = run.out,
                        .resume = run.resuming(),
                        .capture = run.capture,
                        .after_epoch = logged(run)});
  auto result = result_of(trained, run, loader.size() * o.batch);
  if (result) io::save(run.file("resnet.safetensors"), net.state_dict());
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  Arguments arguments(
      "resnet",
      "Trains ResNet-18 on CIFAR-10, and writes to OUT: resnet.safetensors, metrics.json, epochs.csv, checkpoints and loss.svg. With several "
      "precisions each gets a folder of its own.",
      {"resnet --data small --random 100 --epochs 2 --width 8 --batch 50", "resnet --device cuda --workers 0 --capture --precision fp32 fp16",
       "resnet --device cuda --workers 0 --capture --precision bf16 --epochs 16 --smoothing 0.2 --cutout 8 --mirror-test --target 94"});
  arguments.add("--data", o.data, "folder of CIFAR-10's binary version (cifar-10-binary.tar.gz, https://www.cs.toronto.edu/~kriz/cifar.html)");
  arguments.add("--random", o.random, "where there is no folder DATA, make one with files of so many random images each", Arguments::not_negative);
  o.add_to(arguments, true);
  arguments.add("--epochs", o.epochs, "times through the training set", Arguments::not_negative);
  arguments.add("--batch", o.batch, "examples a step", Arguments::positive);
  arguments.add("--width", o.width, "channels of the first convolution", Arguments::positive);
  arguments.add("--lr", o.lr, "largest learning rate of the cycle", Arguments::not_negative);
  arguments.add("--smoothing", o.smoothing, "share of the target that all classes get", Arguments::share);
  arguments.add("--cutout", o.cutout, "side of a square that each training image loses", Arguments::not_negative);
  arguments.add_flag("--mirror-test", o.mirror_test, "test with the mean of what an image and its mirror image give");
  arguments.add("--workers", o.workers, "threads that prepare batches; 0: data lie on the device, and batches are made there",
                Arguments::not_negative);
  return arguments.run(argc, argv, [&] {
    o.place();
    if (o.random > 0 && !std::filesystem::exists(o.data)) write_random(o.data, o.random);
    std::printf("%s", ResNet18(o.width, 10).summary({o.batch, 3, 32, 32}).c_str());
    data::TensorDataset train_set = data::cifar10(o.data), test_set = data::cifar10(o.data, {.train = false});
    if (o.workers == 0) train_set = train_set.to(o.place()), test_set = test_set.to(o.place());
    return train_each(o, [&](const Run& run) { return train_once(o, run, train_set, test_set); });
  });
}
