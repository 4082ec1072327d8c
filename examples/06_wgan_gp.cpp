// A gradient penalty: a Wasserstein GAN on Fashion-MNIST whose critic is kept 1-Lipschitz (Gulrajani et al., "Improved training of
// Wasserstein GANs", 2017). The penalty differentiates a gradient, under mixed precision too; samples.png is a picture of what it draws.
// ctest: --data @data@/fashion-mnist-subset --steps 3 --every 2 --batch 8 --width 4 --fresh --out wgan_gp_test
#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

struct Options : Run {
  int64_t steps = 5000, every = 500, batch = 64, width = 64, critic_steps = 5, noise = 64;
  double lr = 1e-4, penalty = 10;
  Options() : Run("runs/wgan_gp") {}
};

nn::Sequential make_generator(int64_t noise, int64_t width) {  // [n, noise] -> [n, 1, 28, 28] in [-1, 1]
  return nn::Sequential{nn::Linear(noise, 2 * width * 7 * 7),
                        nn::Unflatten(1, {2 * width, 7, 7}),
                        nn::BatchNorm2d(2 * width),
                        nn::ReLU(),
                        nn::ConvTranspose2d(2 * width, width, 4, {.stride = 2, .padding = 1}),
                        nn::BatchNorm2d(width),
                        nn::ReLU(),
                        nn::ConvTranspose2d(width, 1, 4, {.stride = 2, .padding = 1}),
                        nn::Tanh()};
}
nn::Sequential make_critic(int64_t width) {  // [n, 1, 28, 28] -> [n, 1]
  return nn::Sequential{nn::Conv2d(1, width, 4, {.stride = 2, .padding = 1}),         nn::LeakyReLU(0.2),
                        nn::Conv2d(width, 2 * width, 4, {.stride = 2, .padding = 1}), nn::LeakyReLU(0.2),
                        nn::Flatten(),                                                nn::Linear(2 * width * 7 * 7, 1)};
}

// Images [n, 1, 28, 28] in [-1, 1] side by side, [1, h, w] (u8).
Tensor sheet_of(const Tensor& images, int64_t columns) {
  int64_t rows = images.size(0) / columns;
  Tensor sheet = images.to(Device::cpu()).to(DType::f32).view({rows, columns, 28, 28}).permute({0, 2, 1, 3}).reshape({1, rows * 28, columns * 28});
  return clamp(sheet * 127.5 + 127.5, 0, 255).to(DType::u8);
}

int run(const Options& o) {  // what the program ends with
  Device device = o.place();
  manual_seed(o.seed);
  nn::Sequential generator = make_generator(o.noise, o.width), critic = make_critic(o.width);
  generator.to(device);
  critic.to(device);
  data::DataLoader loader(data::mnist(o.data, {.train = true, .mean = 0.5, .std = 0.5}),
                          {.batch_size = o.batch, .shuffle = true, .workers = 1, .drop_last = true, .seed = o.seed, .device = device});
  HT_CHECK(loader.size() > 0, "--batch: ", o.batch, " is more than the ", loader.data().size(), " training examples");
  optim::Adam generator_opt(generator.parameters(), {.lr = o.lr, .beta1 = 0, .beta2 = 0.9}), critic_opt(critic.parameters(), {.lr = o.lr, .beta1 = 0, .beta2 = 0.9});
  amp::GradScaler scaler({.init_scale = 1024, .enabled = o.precision == "fp16"});
  Tensor distance = zeros({}, {.device = device});  // between what the critic thinks of images and of drawings

  auto critic_step = o.replayed([&](const Tensor& images) {
    critic_opt.zero_grad();
    Tensor drawings, mixture, opinion;
    {
      NoGrad off;
      amp::Autocast region(o.mixed());
      drawings = generator(randn({o.batch, o.noise}, {.device = device})).to(DType::f32);
      mixture = lerp(images, drawings, rand({o.batch, 1, 1, 1}, {.device = device}));
    }
    mixture.requires_grad_();
    Tensor gap;
    {
      amp::Autocast region(o.mixed());
      gap = critic(images).to(DType::f32).mean() - critic(drawings).to(DType::f32).mean();
      opinion = critic(mixture).to(DType::f32).sum();
    }
    // The gradient is taken of the scaled opinion, so that fp16 can hold it, and unscaled before it is looked at.
    auto [scaled] = grad({scaler.scale(opinion)}, {mixture}, {.create_graph = true});
    Tensor slope = scaler.enabled() ? scaled * scaler.inverse_scale() : scaled;
    Tensor penalty = square(norm(slope.to(DType::f32).flatten(1), {1}) - 1).mean();
    scaler.scale(o.penalty * penalty - gap).backward();
    scaler.step(critic_opt);
    scaler.update();
    distance.copy_(gap.detach());
  });
  auto generator_step = o.replayed([&](const Tensor& noise) {
    generator_opt.zero_grad();
    critic.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(o.mixed());
      loss = -critic(generator(noise)).to(DType::f32).mean();
    }
    scaler.scale(loss).backward();
    scaler.step(generator_opt);
    scaler.update();
  });

  Session session(o, "wgan_gp", o.steps, o.every);
  session.checkpoint.add("generator", generator).add("critic", critic).add("generator_opt", generator_opt).add("critic_opt", critic_opt).add("loader", loader);
  if (scaler.enabled()) session.checkpoint.add("scaler", scaler);
  Tensor always = randn({64, o.noise}, {.device = device});  // the same drawings in every picture
  int64_t done = session.begin();
  Endless images(loader);
  double first = 0, last = 0;
  while (session.more(done)) {
    for (int64_t i = 0; i < o.critic_steps; ++i) critic_step(images.next().x);
    generator_step(randn({o.batch, o.noise}, {.device = device}));
    session.show("distance", distance);
    if (++done % o.every != 0 && done != o.steps) continue;
    last = distance.item();
    if (first == 0) first = last;
    session.log(done, {{"distance", last}});
    NoGrad off;
    generator.eval();
    Tensor sheet = sheet_of(generator(always), 8);
    generator.train();
    io::save_png(o.file("samples.png"), sheet);
    session.board().image("samples", sheet, done);
  }
  if (session.interrupted()) return 130;  // as a shell reports Ctrl-C
  std::printf("the critic's distance went from %.3f to %.3f; %s shows samples\n", first, last, o.file("samples.png").c_str());
  io::save(o.file("generator.safetensors"), generator.state_dict());
  o.write_metrics({{"first_distance", first}, {"last_distance", last}, {"steps", o.steps}, {"skipped_steps", scaler.enabled() ? scaler.skipped_steps() : 0}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  Arguments arguments("wgan_gp",
                      "Trains a Wasserstein GAN with gradient penalty on Fashion-MNIST. OUT gets samples.png, log.csv, generator.safetensors, "
                      "metrics.json and checkpoints.",
                      {"wgan_gp", "wgan_gp --device cuda --capture --precision fp16 --data DIR"});
  o.add_data(arguments);
  o.add_to(arguments);
  arguments.add("--steps", o.steps, "of the generator", Arguments::positive);
  arguments.add("--every", o.every, "steps between checkpoints and pictures", Arguments::positive);
  arguments.add("--batch", o.batch, "examples a step", Arguments::positive);
  arguments.add("--width", o.width, "channels of both networks' outer layers", Arguments::positive);
  arguments.add("--critic-steps", o.critic_steps, "of the critic for one of the generator", Arguments::positive);
  arguments.add("--lr", o.lr, "learning rate of both", Arguments::not_negative);
  arguments.add("--penalty", o.penalty, "weight of the gradient penalty", Arguments::not_negative);
  return arguments.run(argc, argv, [&] { return run(o); });
}
