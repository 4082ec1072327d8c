// Data and checkpoints, written out: a dataset of your own, batches made by threads, transforms, a checkpoint that a second start goes on
// from. The other examples leave the last to run.h.
// ctest: --data @data@/fashion-mnist-subset --out data_test
#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

// Anything with size() and get() is a dataset. get() makes a whole batch, and several threads may call it.
struct Parabola {
  int64_t size() const { return 1000; }
  data::Batch get(std::span<const int64_t> indices) const {
    Tensor x = tensor(std::vector<int64_t>(indices.begin(), indices.end())).to(DType::f32).view({-1, 1}) / 1000;
    return {x, square(x)};
  }
};

}  // namespace

int main(int argc, char** argv) {
  std::string folder = "data/fashion-mnist-subset", out = "runs/data";
  int64_t epochs = 2;
  Arguments arguments("data", "Shows datasets, loaders, transforms and checkpoints.", {"data", "data --epochs 4"});
  arguments.add("--data", folder, "folder with the four files of Fashion-MNIST or MNIST, plain or .gz");
  arguments.add("--epochs", epochs, "how many; a second start goes on from the first one's");
  arguments.add("--out", out, "where checkpoints and weights go");
  return arguments.run(argc, argv, [&] {
    manual_seed(0);
    data::DataLoader parabola(Parabola(), {.batch_size = 100});
    for (auto& [x, y] : parabola) HT_CHECK(x.shape() == y.shape() && x.size(0) == 100, "a batch of the dataset above has 100 examples");

    // Images in memory, a part kept aside; batches are made ahead by two threads, with random crops and mirrors.
    data::TensorDataset images = data::mnist(folder);
    auto parts = data::random_split(images, {images.size() - 1000, 1000});
    auto varied = data::transform(parts[0], data::RandomCrop(28, {.padding = 4}), data::RandomFlip());
    data::DataLoader loader(varied, {.batch_size = 128, .shuffle = true, .workers = 2, .drop_last = true, .seed = 1});
    data::DataLoader aside(parts[1], {.batch_size = 500});

    nn::Sequential net{nn::Flatten(), nn::Linear(784, 64), nn::ReLU(), nn::Linear(64, 10)};
    optim::AdamW opt(net.parameters(), {.lr = 1e-3});

    // All that training goes on from: also the loader's place, in the middle of an epoch too, and the random generator.
    io::Checkpoint checkpoint(out, {.keep = 2, .best = io::Best::highest});
    checkpoint.add("net", net).add("opt", opt).add("loader", loader);
    int64_t step = checkpoint.resume().value_or(0);
    if (step > 0) std::printf("goes on from step %lld\n", static_cast<long long>(step));

    while (loader.epoch() < epochs) {
      for (auto& [x, target] : loader) {
        opt.zero_grad();
        cross_entropy(net(x), target).backward();
        opt.step();
        ++step;
      }
      NoGrad off;
      int64_t right = 0;
      for (auto& [x, target] : aside) right += eq(argmax(net(x), 1), target).to(DType::i64).sum().item<int64_t>();
      std::printf("epoch %lld: %.1f %% right\n", static_cast<long long>(loader.epoch()), static_cast<double>(right) / 10);
      checkpoint.save(step, {.metric = static_cast<double>(right)});
    }

    // Weights alone, as PyTorch's safetensors reads them, and back.
    io::save(out + "/net.safetensors", net.state_dict());
    net.load_state_dict(io::load(out + "/net.safetensors"));
    return 0;
  });
}
