// Gradient accumulation and clipping: batches that would not fit are cut into parts whose gradients add up to one step, and the
// gradient's norm is limited on the way. First shows that the parts give the whole batch's gradient, then trains.
// ctest: --data @data@/fashion-mnist-subset --epochs 1 --batch 256 --parts 4 --fresh --out accumulation_test
#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

struct Options : Run {
  int64_t epochs = 5, batch = 512, parts = 8;
  double lr = 0.2, clip = 1;
  Options() : Run("runs/accumulation") {}
};

int run(const Options& o) {  // what the program ends with
  Device device = o.place();
  manual_seed(o.seed);
  nn::Sequential net{nn::Flatten(), nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 10)};
  net.to(device);
  optim::SGD opt(net.parameters(), {.lr = o.lr, .momentum = 0.9});
  amp::GradScaler scaler = o.scaler();
  data::TensorDataset train_set = data::mnist(o.data, {.train = true, .mean = 0.2860, .std = 0.3530});
  HT_CHECK(o.batch <= train_set.size(), "--batch: ", o.batch, " is more than the ", train_set.size(), " training examples");
  HT_CHECK(o.batch % o.parts == 0, "--parts: ", o.parts, " do not divide a batch of ", o.batch);
  data::DataLoader loader(train_set, {.batch_size = o.batch, .shuffle = true, .workers = 1, .drop_last = true, .seed = o.seed, .device = device});
  data::DataLoader test_loader(data::mnist(o.data, {.train = false, .mean = 0.2860, .std = 0.3530}), {.batch_size = 1000, .device = device});
  Epochs epochs(device);
  Tensor last_norm = zeros({}, {.device = device});

  // The mean of the parts' means is the batch's: each loss is divided by their number.
  auto accumulate = [&](const Tensor& x, const Tensor& target, int64_t parts) {
    int64_t rows = x.size(0) / parts;
    for (int64_t i = 0; i < parts; ++i) {
      Tensor loss;
      {
        amp::Autocast region(o.mixed());
        loss = cross_entropy(net(x.slice(0, i * rows, (i + 1) * rows)), target.slice(0, i * rows, (i + 1) * rows)) / static_cast<double>(parts);
      }
      scaler.scale(loss).backward();  // activations of one part at a time
      epochs.add(loss);
    }
  };
  auto step = o.replayed([&](const Tensor& x, const Tensor& target) {
    opt.zero_grad();
    accumulate(x, target, o.parts);
    scaler.unscale_(opt);  // the norm is that of the true gradient
    last_norm.copy_(optim::clip_grad_norm_(net.parameters(), o.clip));
    scaler.step(opt);
    scaler.update();
  });

  if (o.precision == "fp32") {
    auto batch = train_set.get(std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}).to(device);
    accumulate(batch.x, batch.target, 1);
    std::vector<Tensor> whole;
    for (auto& p : net.parameters()) whole.push_back(p.grad().clone());
    opt.zero_grad();
    accumulate(batch.x, batch.target, 4);
    double apart = 0;
    auto parameters = net.parameters();
    for (size_t i = 0; i < whole.size(); ++i) apart = std::max(apart, (amax(abs(parameters[i].grad() - whole[i])) / amax(abs(whole[i]))).item());
    std::printf("one batch of 8 and four of 2: gradients differ by %.1e of the largest\n", apart);
    HT_CHECK(apart < 1e-4, "accumulated gradients are not those of the whole batch");
    epochs.total.zero_();
  }

  const int64_t steps = o.epochs * loader.size();
  Session session(o, "accumulation", steps, loader.size());
  session.checkpoint.add("net", net).add("opt", opt).add("loader", loader).add("epochs", epochs);
  if (scaler.enabled()) session.checkpoint.add("scaler", scaler);
  Endless batches(loader);
  for (int64_t done = session.begin(); session.more(done);) {
    auto& [x, target] = batches.next();
    step(x, target);
    if (++done % loader.size() != 0) continue;
    epochs.end_epoch(loader.size());
    session.log(done, {{"loss", epochs.losses.back()}, {"gradient norm", last_norm.item()}});
  }
  if (session.interrupted()) return 130;  // as a shell reports Ctrl-C
  net.eval();
  double right = accuracy(net, test_loader, o.mixed());
  std::printf("batches of %lld in %lld parts, gradients clipped to %g: %.2f%% right\n", static_cast<long long>(o.batch), static_cast<long long>(o.parts), o.clip, right);
  o.write_metrics({{"test_accuracy", right},
                   {"losses", epochs.losses},
                   {"epochs", o.epochs},
                   {"skipped_steps", scaler.enabled() ? scaler.skipped_steps() : 0}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  Arguments arguments("accumulation",
                      "Trains a network on Fashion-MNIST with batches cut into parts and gradients clipped. OUT gets metrics.json and checkpoints.",
                      {"accumulation", "accumulation --batch 1024 --parts 16 --clip 0.5 --precision bf16"});
  o.add_data(arguments);
  o.add_to(arguments);
  arguments.add("--epochs", o.epochs, "times through the training set", Arguments::positive);
  arguments.add("--batch", o.batch, "examples a step", Arguments::positive);
  arguments.add("--parts", o.parts, "that a batch is cut into", Arguments::positive);
  arguments.add("--clip", o.clip, "largest norm of the gradient", Arguments::positive);
  arguments.add("--lr", o.lr, "learning rate", Arguments::not_negative);
  return arguments.run(argc, argv, [&] { return run(o); });
}
