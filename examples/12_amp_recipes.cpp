// Mixed precision, recipe by recipe: each trains a small network on data made up here and prints how far its loss fell.
// docs/amp.md explains them.
// ctest: --steps 60
#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

struct Settings {
  Device device;
  amp::AutocastOptions mixed;  // the region's dtype, or {.enabled = false} for f32
  int64_t steps;
};
// The losses before and after.
struct Fall { double first, last; };

// Points in the plane, by the quarter that they lie in.
struct Quarters {
  Tensor x, target;
  explicit Quarters(Device device) {
    x = randn({256, 2}, {.device = device});
    target = gt(x.select(1, 0), 0).to(DType::i64) * 2 + gt(x.select(1, 1), 0).to(DType::i64);
  }
};
nn::Sequential classifier(Device device) {
  nn::Sequential net{nn::Linear(2, 64), nn::ReLU(), nn::Linear(64, 64), nn::ReLU(), nn::Linear(64, 4)};
  net.to(device);
  return net;
}
// Calls `step`, which returns its loss.
Fall run(int64_t steps, const std::function<Tensor()>& step) {
  Tensor loss = step();
  double first = loss.item();
  for (int64_t i = 1; i < steps; ++i) loss = step();
  return {first, loss.item()};
}

Fall typical(const Settings& s) {
  Quarters data(s.device);
  auto net = classifier(s.device);
  optim::SGD opt(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  amp::GradScaler scaler;
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(s.mixed);
      loss = cross_entropy(net(data.x), data.target);
    }
    scaler.scale(loss).backward();  // outside of the region: backward runs in the dtypes that forward chose
    scaler.step(opt);
    scaler.update();
    return loss;
  });
}

// Gradients are divided by the scale in place, so that they may be looked at and clipped.
Fall unscaled_gradients(const Settings& s) {
  Quarters data(s.device);
  auto net = classifier(s.device);
  optim::AdamW opt(net.parameters(), {.lr = 1e-2});
  amp::GradScaler scaler;
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(s.mixed);
      loss = cross_entropy(net(data.x), data.target);
    }
    scaler.scale(loss).backward();
    scaler.unscale_(opt);
    optim::clip_grad_norm_(net.parameters(), 1.0);  // the norm stays on the device
    optim::clip_grad_value_(net.parameters(), 0.5);
    scaler.step(opt);                               // does not unscale again; skips where the gradients were not finite
    scaler.update();
    return loss;
  });
}

// The same in one: unscaled, clipped and applied by one kernel; .grad stays scaled.
Fall fused_clipping(const Settings& s) {
  Quarters data(s.device);
  auto net = classifier(s.device);
  optim::AdamW opt(net.parameters(), {.lr = 1e-2});
  amp::GradScaler scaler;
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(s.mixed);
      loss = cross_entropy(net(data.x), data.target);
    }
    scaler.scale(loss).backward();
    scaler.step(opt, {.clip_norm = 1.0});
    scaler.update();
    return loss;
  });
}

// Gradients of several backwards add up at one scale: step and update once for all of them.
Fall accumulation(const Settings& s) {
  Quarters data(s.device);
  auto net = classifier(s.device);
  optim::SGD opt(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  amp::GradScaler scaler;
  constexpr int64_t parts = 4, rows = 256 / parts;
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor sum = zeros({}, {.device = s.device});
    for (int64_t i = 0; i < parts; ++i) {
      Tensor loss;
      {
        amp::Autocast region(s.mixed);
        loss = cross_entropy(net(data.x.slice(0, i * rows, (i + 1) * rows)), data.target.slice(0, i * rows, (i + 1) * rows)) / parts;
      }
      scaler.scale(loss).backward();
      sum.add_(loss.detach());
    }
    scaler.step(opt);
    scaler.update();
    return sum;
  });
}

// The penalty takes gradients of scaled gradients: unscale those it looks at, on the device.
Fall gradient_penalty(const Settings& s) {
  Quarters data(s.device);
  auto net = classifier(s.device);
  optim::SGD opt(net.parameters(), {.lr = 0.05, .momentum = 0.9});
  amp::GradScaler scaler({.init_scale = 256});
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(s.mixed);
      loss = cross_entropy(net(data.x), data.target);
    }
    auto scaled = grad({scaler.scale(loss)}, net.parameters(), {.create_graph = true});
    {
      amp::Autocast region(s.mixed);
      Tensor squares = zeros({});  // a 0-d CPU tensor meets tensors of any device
      for (auto& g : scaled) squares = squares + (g * scaler.inverse_scale()).pow(2).sum();
      loss = loss + squares.sqrt() * 0.01;
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    return loss;
  });
}

// One scaler for all; each optimizer decides for itself whether it skips.
Fall several_optimizers(const Settings& s) {
  Quarters data(s.device);
  auto net0 = classifier(s.device), net1 = classifier(s.device);
  optim::SGD opt0(net0.parameters(), {.lr = 0.05, .momentum = 0.9});
  optim::AdamW opt1(net1.parameters(), {.lr = 1e-2});
  amp::GradScaler scaler;
  return run(s.steps, [&] {
    opt0.zero_grad();
    opt1.zero_grad();
    Tensor loss0, loss1;
    {
      amp::Autocast region(s.mixed);
      Tensor y0 = net0(data.x), y1 = net1(data.x);
      loss0 = cross_entropy(y0 + y1 * 0.5, data.target);
      loss1 = cross_entropy(y1 - y0 * 0.1, data.target);
    }
    scaler.scale(loss0).backward({.retain_graph = true});
    scaler.scale(loss1).backward();
    scaler.unscale_(opt0);  // either, both or none
    optim::clip_grad_norm_(net0.parameters(), 5.0);
    scaler.step(opt0);
    scaler.step(opt1);
    scaler.update();
    return loss0 + loss1;
  });
}

// A scaler for each loss, where losses have parameters of their own: each finds the scale that suits its loss.
Fall scaler_per_loss(const Settings& s) {
  Quarters data(s.device);
  auto net0 = classifier(s.device), net1 = classifier(s.device);
  optim::SGD opt0(net0.parameters(), {.lr = 0.1, .momentum = 0.9});
  optim::AdamW opt1(net1.parameters(), {.lr = 1e-2});
  amp::GradScaler scaler0, scaler1;
  return run(s.steps, [&] {
    opt0.zero_grad();
    opt1.zero_grad();
    Tensor loss0, loss1;
    {
      amp::Autocast region(s.mixed);
      loss0 = cross_entropy(net0(data.x), data.target);
      loss1 = cross_entropy(net1(data.x), data.target) * 1e-4;
    }
    scaler0.scale(loss0).backward();
    scaler1.scale(loss1).backward();
    scaler0.step(opt0);
    scaler1.step(opt1);
    scaler0.update();
    scaler1.update();
    return loss0 + loss1 * 1e4;
  });
}

// A function with a gradient of its own, of any operators; under autocast, forward and backward run in the region's state.
struct Softsign : Function<Softsign> {
  static Tensor forward(Context& ctx, const Tensor& x) {
    Tensor d = abs(x) + 1;
    ctx.save(d);
    return x / d;
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) { return {g / square(std::get<0>(ctx.saved<Tensor>()))}; }
};
// One that needs f32: its arguments are cast, and autocast is off inside, in both directions.
struct LogSquares : Function<LogSquares> {
  static constexpr FunctionCast cast = FunctionCast::f32;
  static Tensor forward(Context& ctx, const Tensor& x) {
    ctx.save(x);
    return log(square(x) + 1);
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) {
    auto& [x] = ctx.saved<Tensor>();
    return {g * x * 2 / (square(x) + 1)};
  }
};
Fall custom_functions(const Settings& s) {
  Quarters data(s.device);
  nn::Linear a(2, 64), b(64, 4);
  a.to(s.device);
  b.to(s.device);
  std::vector<Tensor> parameters = a.parameters();
  for (auto& p : b.parameters()) parameters.push_back(p);
  optim::AdamW opt(parameters, {.lr = 1e-2});
  amp::GradScaler scaler;
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(s.mixed);
      Tensor h = Softsign::apply(a(data.x));
      loss = cross_entropy(b(h + LogSquares::apply(h)), data.target);
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    return loss;
  });
}

// Autocast that travels with the function: whoever calls it, on whatever thread.
Fall decorator(const Settings& s) {
  Quarters data(s.device);
  auto net = classifier(s.device);
  auto forward = amp::autocasted([&](const Tensor& x) { return net(x); }, s.mixed);
  optim::SGD opt(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  amp::GradScaler scaler;
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor loss = cross_entropy(forward(data.x), data.target);
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    return loss;
  });
}

// An island in f32 inside a region, and a policy of one's own inside another.
Fall nested_regions(const Settings& s) {
  Quarters data(s.device);
  auto net = classifier(s.device);
  optim::SGD opt(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  amp::GradScaler scaler;
  amp::Policy policy = amp::default_policy();
  policy.set("relu", Cast::full);
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(s.mixed);
      Tensor shift;
      {
        amp::Autocast off({.enabled = false});
        shift = data.x.mean(0);  // in the dtype of x
      }
      Tensor y;
      {
        amp::Autocast careful({.policy = policy});
        y = net(data.x - shift);
      }
      loss = cross_entropy(y, data.target);
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    return loss;
  });
}

// A module that runs in one dtype, whatever region it is called in.
Fall precision_island(const Settings& s) {
  Quarters data(s.device);
  nn::Sequential net{nn::Linear(2, 64), nn::ReLU(), nn::PrecisionIsland(nn::Linear(64, 64), DType::f32), nn::ReLU(), nn::Linear(64, 4)};
  net.to(s.device);
  optim::SGD opt(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  amp::GradScaler scaler;
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(s.mixed);
      loss = cross_entropy(net(data.x), data.target);
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    return loss;
  });
}

// Nothing is recorded; the 16-bit copies of the weights are made once and serve every call, and training after it.
Fall inference(const Settings& s) {
  Fall trained = typical(s);
  Quarters data(s.device);
  auto net = classifier(s.device);
  NoGrad off;
  amp::Autocast region(s.mixed);
  net.eval();
  for (int64_t i = 0; i < s.steps; ++i) argmax(net(data.x), 1);
  return trained;
}

// The middle of the network keeps nothing for backward and is computed again there, under the same autocast state.
Fall checkpointed(const Settings& s) {
  Quarters data(s.device);
  nn::Sequential front{nn::Linear(2, 64), nn::ReLU()}, middle{nn::Linear(64, 64), nn::GELU(), nn::Linear(64, 64), nn::ReLU()}, back{nn::Linear(64, 4)};
  std::vector<Tensor> parameters;
  for (auto* part : {&front, &middle, &back}) {
    part->to(s.device);
    for (auto& p : part->parameters()) parameters.push_back(p);
  }
  optim::AdamW opt(parameters, {.lr = 1e-2});
  amp::GradScaler scaler;
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(s.mixed);
      loss = cross_entropy(back(checkpoint(std::ref(middle), front(data.x))), data.target);
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    return loss;
  });
}

// A 16-bit model: the optimizer keeps f32 master weights and rounds the model's from them.
Fall master_weights(const Settings& s) {
  Quarters data(s.device);
  auto net = classifier(s.device);
  if (s.mixed.dtype && s.mixed.enabled) net.to(*s.mixed.dtype);
  optim::SGD opt(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  opt.use_master_weights();
  amp::GradScaler scaler({.init_scale = 256});
  Tensor x = data.x.to(net.parameters()[0].dtype());
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor loss = cross_entropy(net(x).to(DType::f32), data.target);
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    return loss;
  });
}

// The same, and what else Apex's level O2 is, by one word; O0 is f32 and O1 autocast.
Fall levels(const Settings& s) {
  Quarters data(s.device);
  auto net = classifier(s.device);
  optim::SGD opt(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  auto mixed = amp::initialize(net, opt, {.level = s.mixed.enabled ? amp::O2 : amp::O0, .dtype = s.mixed.dtype});
  return run(s.steps, [&] {
    opt.zero_grad();
    Tensor loss = cross_entropy(mixed(data.x), data.target);
    mixed.scaler.scale(loss).backward();
    mixed.scaler.step(opt);
    mixed.scaler.update();
    return loss;
  });
}

const std::vector<std::pair<std::string, Fall (*)(const Settings&)>> recipes = {
    {"typical", typical},
    {"unscaled_gradients", unscaled_gradients},
    {"fused_clipping", fused_clipping},
    {"accumulation", accumulation},
    {"gradient_penalty", gradient_penalty},
    {"several_optimizers", several_optimizers},
    {"scaler_per_loss", scaler_per_loss},
    {"custom_functions", custom_functions},
    {"decorator", decorator},
    {"nested_regions", nested_regions},
    {"precision_island", precision_island},
    {"inference", inference},
    {"checkpointed", checkpointed},
    {"master_weights", master_weights},
    {"levels", levels},
};

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments("amp_recipes", "Trains a small network by each recipe of mixed precision, in f32, bf16 and f16, and prints how its loss fell.",
                      {"amp_recipes", "amp_recipes --recipe gradient_penalty --trace", "amp_recipes --device cuda"});
  std::string device = "all", only;
  int64_t steps = 200;
  uint64_t seed = 0;
  bool traced = false;
  arguments.add("--device", device, "cpu, cuda, or all: the CPU, and a GPU where there is one");
  arguments.add("--recipe", only, "one of them; all by default");
  arguments.add("--steps", steps, "training steps of each", Arguments::positive);
  arguments.add("--seed", seed, "of data and weights");
  arguments.add_flag("--trace", traced, "show what runs in a bf16 step: operators, dtypes, casts, what autocast left alone");
  return arguments.run(argc, argv, [&] {
    bool known = only.empty();
    for (auto& [name, recipe] : recipes) known |= name == only;
    HT_CHECK(known, "--recipe: there is no '", only, "'");
    std::vector<Device> all{device == "all" ? Device::cpu() : ht::device(device)};
    if (device == "all" && !devices(DeviceType::cuda).empty()) all.push_back(Device::cuda());
    bool all_fell = true;
    for (Device d : all) {
      std::printf("%-20s %18s %18s %18s\n", text::cat("loss on ", d, ", by").c_str(), "f32", "bf16", "f16");
      for (auto& [name, recipe] : recipes) {
        if (!only.empty() && name != only) continue;
        if (traced) std::cout << name << ":\n" << amp::trace([&] { recipe({d, {.dtype = DType::bf16}, 1}); }) << "\n";
        std::printf("%-20s", name.c_str());
        for (auto dtype : {std::optional<DType>(), std::optional(DType::bf16), std::optional(DType::f16)}) {
          manual_seed(seed);
          auto [first, last] = recipe({d, {.dtype = dtype, .enabled = dtype.has_value()}, steps});
          all_fell &= last < first * 0.7;
          std::printf("   %6.3f to %6.3f", first, last);
        }
        std::printf("\n");
      }
    }
    if (!all_fell) std::printf("a loss did not fall\n");
    return all_fell ? 0 : 1;
  });
}
