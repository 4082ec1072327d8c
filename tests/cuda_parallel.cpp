// DistributedDataParallel, sharded states and SyncBatchNorm on GPUs: a group of one rank trains bit for bit as the plain loop does,
// eagerly and captured, without a wait; with several GPUs all ranks stay alike. DataParallel on one and on several.
#include <set>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/tasks.h"
#include "halftone/tests/values.h"

using namespace halftone;
using namespace halftone::tests;

namespace {

Task task(bool images) { return images ? cnn(32, 1, {8, 32, 32, 16}, 16) : mlp(33, {64, 256, 128, 16}); }

struct How {
  bool images = false, together = false, captured = false, sharded = false;
  std::optional<DType> compress = {};
};
struct Trained {
  Values weights;
  double skipped = 0, scale = 0;
  int64_t replays = 0;
};

// Ten steps in fp16, of which the seventh overflows.
Trained train(const How& how, const distributed::Group& rank) {
  Device device = rank.device();
  Task given = task(how.images);
  nn::Sequential& net = given.net;
  manual_seed(12 + static_cast<uint64_t>(rank.rank()));  // each rank has a batch of its own
  Tensor x = randn(given.x.shape()).to(device), target = randint(0, 16, given.target.shape()).to(device), factor = ones({}, {.device = device});
  net.to(device);
  std::optional<nn::DistributedDataParallel<nn::Sequential>> ddp;
  if (how.together) ddp.emplace(net, rank, nn::DistributedDataParallelOptions{.bucket_mib = .05, .first_bucket_mib = .01, .compress = how.compress});
  optim::AdamW opt(net.parameters(), {.lr = .01});
  std::optional<distributed::ShardedState> shards;
  if (how.sharded) shards.emplace(opt, rank);
  amp::GradScaler scaler({.init_scale = 256, .growth_interval = 3});
  if (ddp) scaler.set_agreement(ddp->agreement());
  auto step = [&](const Tensor& v, const Tensor& t) {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region({.dtype = DType::f16});
      loss = cross_entropy(ddp ? (*ddp)(v) : net(v), t);
    }
    scaler.scale(loss * factor).backward();
    scaler.step(opt, {.clip_norm = 1});
    scaler.update();
  };
  auto replayed = capture(step);
  for (int i = 0; i < 10; ++i) {
    // On one rank only: it reaches the others in the mean.
    factor.fill_(i == 6 && rank.rank() == 0 ? std::numeric_limits<float>::infinity() : 1.f);
    ForbidSync no_waiting;
    how.captured ? replayed(x, target) : step(x, target);
  }
  return {values(net.parameters()), static_cast<double>(scaler.skipped_steps()), scaler.get_scale(), replayed.replays()};
}

std::vector<Device> gpus(size_t n) {
  auto all = devices(DeviceType::cuda);
  return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(std::min(n, all.size()))};
}

}  // namespace

TEST_CASE("one rank on a GPU trains as the plain loop does") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device");
  distributed::threads(gpus(1)).run([](distributed::Group& rank) {
    for (bool images : {false, true}) {
      Trained plain = train({.images = images}, rank);
      CHECK(plain.skipped == 1);
      for (bool sharded : {false, true})
        for (bool captured : {false, true}) {
          INFO("images " << images << ", captured " << captured << ", sharded " << sharded);
          Trained t = train({.images = images, .together = true, .captured = captured, .sharded = sharded}, rank);
          CHECK(t.weights == plain.weights);
          CHECK(t.skipped == 1);
          CHECK(t.scale == plain.scale);
          CHECK((t.replays > 0) == captured);
        }
      for (bool captured : {false, true}) {
        Trained t = train({.images = images, .together = true, .captured = captured, .compress = DType::f16}, rank);
        CHECK(largest_difference(t.weights, plain.weights) < .1);  // Adam's first steps are signs: some may differ
        CHECK(t.skipped == 1);
      }
      Trained eager = train({.images = images, .together = true, .compress = DType::f16}, rank);
      CHECK(train({.images = images, .together = true, .captured = true, .compress = DType::f16}, rank).weights == eager.weights);
    }
  });
}

TEST_CASE("several GPUs stay alike") {
  if (devices(DeviceType::cuda).size() < 2) HT_SKIP("fewer than two CUDA devices");
  for (bool captured : {false, true})
    for (bool sharded : {false, true}) {
      std::vector<Trained> all(gpus(8).size());
      distributed::threads(gpus(8)).run([&](distributed::Group& rank) {
        all[static_cast<size_t>(rank.rank())] = train({.images = true, .together = true, .captured = captured, .sharded = sharded}, rank);
      });
      for (auto& t : all) {
        CHECK(t.weights == all[0].weights);
        CHECK(t.skipped == 1);
        CHECK(t.scale == all[0].scale);
        CHECK((t.replays > 0) == captured);
      }
    }
}

TEST_CASE("two GPUs take the steps of one on the joined batch, with autocast around the model or inside") {
  if (devices(DeviceType::cuda).size() < 2) HT_SKIP("fewer than two CUDA devices");
  struct Casting : nn::Module {
    Casting(nn::Sequential n, bool i) : net(std::move(n)), inside(i) {}
    nn::Sequential net;
    bool inside;
    HT_FIELDS(net)
    Tensor forward(const Tensor& x) override {
      std::optional<amp::Autocast> region;
      if (inside) region.emplace(amp::AutocastOptions{.dtype = DType::bf16});
      return net(x);
    }
  };
  auto run = [](size_t n, bool inside) {
    std::vector<Values> weights(n);
    distributed::threads(gpus(n), 60).run([&](distributed::Group& rank) {
      Task t = mlp(32, {64, 256, 128, 16});
      Casting net(std::move(t.net), inside);
      net.to(rank.device());
      int64_t rows = t.size() / rank.size(), from = rows * rank.rank();
      Tensor x = t.x.slice(0, from, from + rows).to(rank.device()), target = t.target.slice(0, from, from + rows).to(rank.device());
      nn::DistributedDataParallel ddp(net, rank, {.bucket_mib = .05, .first_bucket_mib = .01});
      optim::SGD opt(ddp.parameters(), {.lr = .1, .momentum = .9});
      for (int i = 0; i < 10; ++i) {
        opt.zero_grad();
        Tensor y;
        {
          std::optional<amp::Autocast> region;
          if (!inside) region.emplace(amp::AutocastOptions{.dtype = DType::bf16});
          y = ddp(x);
        }
        cross_entropy(y, target).backward();
        opt.step();
      }
      weights[static_cast<size_t>(rank.rank())] = values(net.parameters());
    });
    return weights;
  };
  auto two = run(2, false);
  CHECK(two[0] == two[1]);
  CHECK(largest_difference(two[0], run(1, false)[0]) < 5e-3);
  CHECK(run(2, true) == two);
}

TEST_CASE("SyncBatchNorm on GPUs is the joined batch's norm") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device");
  distributed::threads(gpus(8)).run([](distributed::Group& rank) {
    manual_seed(5);
    const int64_t rows = 4 * rank.size();
    Tensor x = (randn({rows, 6, 5, 5}) * 3 + 10).to(rank.device()), g = randn({rows, 6, 5, 5}).to(rank.device());
    nn::BatchNorm2d plain(6);
    nn::SyncBatchNorm norm(6, rank);
    plain.to(rank.device());
    norm.to(rank.device());
    Tensor whole = x.clone().requires_grad_(), part = x.slice(0, 4 * rank.rank(), 4 * rank.rank() + 4).clone().requires_grad_();
    Tensor y = plain(whole), own = norm(part);
    y.backward({.gradient = g});
    own.backward({.gradient = g.slice(0, 4 * rank.rank(), 4 * rank.rank() + 4)});
    auto mine = [&](const Tensor& t) { return values({t.slice(0, 4 * rank.rank(), 4 * rank.rank() + 4)}); };
    bool fine = largest_difference(values({own}), mine(y)) < 1e-5 && largest_difference(values({part.grad()}), mine(whole.grad())) < 1e-4 &&
                largest_difference(values({norm.running_var}), values({plain.running_var})) < 1e-5;
    if (!fine) throw Error("SyncBatchNorm differs from the joined batch's norm");
  });
}

TEST_CASE("DataParallel on GPUs") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device");
  std::set<size_t> counts{1, std::min<size_t>(2, devices(DeviceType::cuda).size()), devices(DeviceType::cuda).size()};
  for (size_t n : counts) {
    auto run = [&](bool parallel) {
      Task t = task(false);
      nn::Sequential& net = t.net;
      net.to(gpus(1)[0]);
      Tensor x = t.x.to(gpus(1)[0]), target = t.target.to(gpus(1)[0]);
      std::optional<nn::DataParallel<nn::Sequential>> dp;
      if (parallel) dp.emplace(net, gpus(n));
      optim::SGD opt(net.parameters(), {.lr = .1, .momentum = .9});
      for (int i = 0; i < 10; ++i) {
        opt.zero_grad();
        Tensor y;
        {
          amp::Autocast region({.dtype = DType::bf16});
          y = dp ? (*dp)(x) : net(x);
        }
        cross_entropy(y, target).backward();
        opt.step();
      }
      if (dp) {
        dp->refresh();
        for (size_t i = 0; i < n; ++i) {
          CHECK(dp->replica(i).parameters()[0].device() == gpus(n)[i]);
          CHECK(values(dp->replica(i).parameters()) == values(net.parameters()));
        }
      }
      return values(net.parameters());
    };
    double apart = largest_difference(run(true), run(false));
    CHECK(apart <= (n == 1 ? 0 : 5e-3));
  }
}
