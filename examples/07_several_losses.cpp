// Several losses and optimizers: an encoder that is trained to compress images and to tell their classes apart, by two losses whose
// gradients meet in it. Each part has an optimizer of its own, and one gradient scaler serves both.
// ctest: --data @data@/fashion-mnist-subset --epochs 1 --width 16 --fresh --out several_losses_test
#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

struct Options : Run {
  int64_t epochs = 5, batch = 128, width = 256, code = 32;
  Options() : Run("runs/several_losses") {}
};

int run(const Options& o) {  // what the program ends with
  Device device = o.place();
  manual_seed(o.seed);
  nn::Sequential encoder{nn::Flatten(), nn::Linear(784, o.width), nn::ReLU(), nn::Linear(o.width, o.code), nn::ReLU()};
  nn::Sequential decoder{nn::Linear(o.code, o.width), nn::ReLU(), nn::Linear(o.width, 784)};
  nn::Sequential classifier{nn::Linear(o.code, 10)};
  for (nn::Sequential* part : {&encoder, &decoder, &classifier}) part->to(device);
  std::vector<Tensor> both = encoder.parameters();
  for (auto& p : decoder.parameters()) both.push_back(p);
  optim::AdamW autoencoder_opt(both, {.lr = 1e-3});
  optim::SGD classifier_opt(classifier.parameters(), {.lr = 0.1, .momentum = 0.9});
  amp::GradScaler scaler = o.scaler();

  data::TensorDataset train_set = data::mnist(o.data, {.train = true, .mean = 0.2860, .std = 0.3530});
  HT_CHECK(o.batch <= train_set.size(), "--batch: ", o.batch, " is more than the ", train_set.size(), " training examples");
  data::DataLoader loader(train_set, {.batch_size = o.batch, .shuffle = true, .workers = 1, .drop_last = true, .seed = o.seed, .device = device});
  data::DataLoader test_loader(data::mnist(o.data, {.train = false, .mean = 0.2860, .std = 0.3530}), {.batch_size = 1000, .device = device});
  Tensor image_loss = zeros({}, {.device = device}), class_loss = zeros({}, {.device = device});

  auto step = o.replayed([&](const Tensor& x, const Tensor& target) {
    autoencoder_opt.zero_grad();
    classifier_opt.zero_grad();
    Tensor images, classes;
    {
      amp::Autocast region(o.mixed());
      Tensor code = encoder(x);
      images = mse_loss(decoder(code), x.flatten(1));
      classes = cross_entropy(classifier(code), target);
    }
    scaler.scale(images).backward({.retain_graph = true});  // the encoder's part is needed once more
    scaler.scale(classes * 0.1).backward();
    scaler.unscale_(autoencoder_opt);  // either, both or none
    optim::clip_grad_norm_(both, 5.0);
    scaler.step(autoencoder_opt);  // each decides for itself whether it skips
    scaler.step(classifier_opt);
    scaler.update();  // once, after all
    image_loss.copy_(images.detach());
    class_loss.copy_(classes.detach());
  });

  const int64_t steps = o.epochs * loader.size();
  Session session(o, "several_losses", steps, loader.size());
  session.checkpoint.add("encoder", encoder).add("decoder", decoder).add("classifier", classifier).add("autoencoder_opt", autoencoder_opt);
  session.checkpoint.add("classifier_opt", classifier_opt).add("loader", loader);
  if (scaler.enabled()) session.checkpoint.add("scaler", scaler);
  Endless batches(loader);
  for (int64_t done = session.begin(); session.more(done);) {
    auto& [x, target] = batches.next();
    step(x, target);
    if (++done % loader.size() == 0) session.log(done, {{"image loss", image_loss.item()}, {"class loss", class_loss.item()}});
  }
  if (session.interrupted()) return 130;  // as a shell reports Ctrl-C

  auto classify = [&](const Tensor& x) { return classifier(encoder(x)); };
  double right = accuracy(classify, test_loader, o.mixed());
  std::printf("images to %lld numbers: squared error %.3f; classes from those: %.2f%% right\n", static_cast<long long>(o.code), image_loss.item(), right);
  o.write_metrics({{"image_loss", image_loss.item()}, {"test_accuracy", right}, {"epochs", o.epochs}, {"skipped_steps", scaler.enabled() ? scaler.skipped_steps() : 0}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  Arguments arguments("several_losses",
                      "Trains an encoder by two losses, with two optimizers, on Fashion-MNIST. OUT gets metrics.json and checkpoints.",
                      {"several_losses", "several_losses --device cuda --capture --precision fp16"});
  o.add_data(arguments);
  o.add_to(arguments);
  arguments.add("--epochs", o.epochs, "times through the training set", Arguments::positive);
  arguments.add("--batch", o.batch, "examples a step", Arguments::positive);
  arguments.add("--width", o.width, "of hidden layers", Arguments::positive);
  arguments.add("--code", o.code, "numbers that an image becomes", Arguments::positive);
  return arguments.run(argc, argv, [&] { return run(o); });
}
