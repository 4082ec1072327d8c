// The programs of the design, as users would type them: 1 to 7.
#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

namespace ht = halftone;
using namespace ht;

namespace {

// A small classifier without nn: what the training programs train.
struct Net {
  Tensor w1 = randn({16, 8}, {.requires_grad = true}), b1 = zeros({16}, {.requires_grad = true});
  Tensor w2 = randn({4, 16}, {.requires_grad = true}), b2 = zeros({4}, {.requires_grad = true});
  std::vector<Tensor> parameters() const { return {w1, b1, w2, b2}; }
  Tensor operator()(const Tensor& x) const { return linear(linear_relu(x, w1, b1), w2, b2); }
};

struct ConvNet : nn::Module {
  nn::Conv2d conv1{1, 32, 3}, conv2{32, 64, 3};
  nn::BatchNorm2d norm{64};
  nn::Linear fc{9216, 128}, head{128, 10};
  nn::Parameter gain{ones({10})};
  nn::Buffer seen{zeros({})};
  HT_FIELDS(conv1, conv2, norm, fc, head, gain, seen)
  Tensor forward(const Tensor& x) override {  // [n, 1, 28, 28] -> [n, 10]
    auto h = max_pool2d(relu(norm(conv2(relu(conv1(x))))), 2);
    return head(relu(fc(h.flatten(1)))) * gain;
  }
};

struct Batch {
  Tensor x = randn({32, 8});
  Tensor target = randint(0, 4, {32});
};

}  // namespace

TEST_CASE("program 1: tensors and gradients") {
  manual_seed(1);
  Tensor a = randn({2, 3});
  Tensor w = randn({3, 4}, {.requires_grad = true});
  Tensor b = tensor({1.f, 2.f, 3.f, 4.f});
  Tensor y = relu(matmul(a, w) + b);
  y.mean().backward();
  REQUIRE(w.grad().defined());
  REQUIRE(w.grad().shape() == Shape{3, 4});
  Tensor s = y.slice(1, 0, 2).transpose(0, 1).contiguous();
  REQUIRE(s.shape() == Shape{2, 2});
  REQUIRE(s.to(DType::f16).dtype() == DType::f16);
  Tensor loss = relu(matmul(a, w) + b).mean();
  auto [gw] = grad({loss}, {w}, {.create_graph = true});
  REQUIRE(gw.to_vector<float>() == w.grad().to_vector<float>());
  Tensor before = w.detach().clone();
  { NoGrad guard; w.add_(gw, -0.1); }
  REQUIRE(w.to_vector<float>() == (before - gw.detach() * 0.1).to_vector<float>());
}

TEST_CASE("program 2: a model") {
  nn::Sequential mlp{nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 128), nn::ReLU(), nn::Linear(128, 10)};
  ConvNet net;
  net.to(Device::cpu()).train();
  REQUIRE_THAT(net.summary({2, 1, 28, 28}), Catch::Matchers::Contains("norm     BatchNorm2d  [2, 64, 24, 24]"));
  auto copy = net.clone();
  static_assert(std::same_as<decltype(copy), ConvNet>);
  std::string names;
  for (auto& [name, t] : net.state_dict()) names += name + " ";
  REQUIRE(names ==
          "conv1.weight conv1.bias conv2.weight conv2.bias norm.weight norm.bias norm.running_mean norm.running_var "
          "norm.num_batches_tracked fc.weight fc.bias head.weight head.bias gain seen ");
  Tensor x = randn({2, 1, 28, 28});
  REQUIRE(copy(x).to_vector<float>() == net(x).to_vector<float>());
  net(x).sum().backward();
  REQUIRE(net.conv1.weight.grad().defined());
  REQUIRE(mlp(x.flatten(1)).shape() == Shape{2, 10});
}

TEST_CASE("program 3: typical mixed-precision training") {
  manual_seed(2);
  Net net;
  Batch batch;
  optim::SGD opt(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  amp::GradScaler scaler;
  double first = 0, last = 0;
  for (int step = 0; step < 30; ++step) {
    opt.zero_grad();
    Tensor loss;
    { amp::Autocast autocast;
      loss = cross_entropy(net(batch.x), batch.target); }
    scaler.scale(loss).backward();
    REQUIRE(net.w1.grad().dtype() == DType::f32);
    scaler.step(opt);
    scaler.update();
    (step == 0 ? first : last) = loss.item();
  }
  REQUIRE(last < first / 2);
  REQUIRE(scaler.get_scale() == 65536);
}

TEST_CASE("program 4: unscaled gradients") {
  manual_seed(3);
  Net net;
  Batch batch;
  optim::AdamW opt(net.parameters(), {.lr = 1e-2});
  amp::GradScaler scaler;
  Tensor loss;
  { amp::Autocast a; loss = cross_entropy(net(batch.x), batch.target); }
  scaler.scale(loss).backward();
  REQUIRE_THROWS_WITH(optim::clip_grad_norm_(net.parameters(), 1.0), Catch::Contains("unscale_ first"));
  scaler.unscale_(opt);
  Tensor norm = optim::clip_grad_norm_(net.parameters(), 0.5);
  REQUIRE(norm.item() > 0.5);
  REQUIRE(total_norm({net.w1.grad(), net.b1.grad(), net.w2.grad(), net.b2.grad()}).item() == Approx(0.5).epsilon(1e-4));
  scaler.step(opt);
  scaler.update();
}

TEST_CASE("program 5: a gradient penalty, and accumulation") {
  manual_seed(4);
  Net net;
  Batch batch;
  optim::SGD opt(net.parameters(), {.lr = 0.1});
  amp::GradScaler scaler;
  Tensor loss;
  { amp::Autocast a; loss = cross_entropy(net(batch.x), batch.target); }
  auto scaled = grad({scaler.scale(loss)}, net.parameters(), {.create_graph = true});
  { amp::Autocast a;
    Tensor penalty = zeros({});
    for (auto& g : scaled) penalty = penalty + (g * scaler.inverse_scale()).pow(2).sum();
    loss = loss + penalty.sqrt(); }
  scaler.scale(loss).backward();
  REQUIRE(net.w1.grad().defined());
  scaler.step(opt);
  scaler.update();
}

TEST_CASE("program 6: several models, losses and optimizers") {
  manual_seed(5);
  Net model0, model1;
  Batch batch;
  optim::SGD opt0(model0.parameters(), {.lr = 0.1}), opt1(model1.parameters(), {.lr = 0.1});
  amp::GradScaler scaler;
  Tensor loss0, loss1;
  { amp::Autocast a;
    auto o0 = model0(batch.x), o1 = model1(batch.x);
    loss0 = cross_entropy(2 * o0 + 3 * o1, batch.target);
    loss1 = cross_entropy(3 * o0 - 5 * o1, batch.target); }
  scaler.scale(loss0).backward({.retain_graph = true});
  scaler.scale(loss1).backward();
  scaler.unscale_(opt0);
  auto r0 = scaler.step(opt0), r1 = scaler.step(opt1);
  scaler.update();
  REQUIRE(r0.stepped());
  REQUIRE(r1.stepped());
}

TEST_CASE("program 7: several devices") {
  nn::Sequential net{nn::Linear(8, 16), nn::ReLU(), nn::Linear(16, 4)};
  Tensor x = randn({6, 8}), target = randint(0, 4, {6}), loss;
  nn::DataParallel dp(net, {Device::cpu(), Device::cpu()});
  { amp::Autocast a; loss = cross_entropy(dp(x), target); }
  loss.backward();
  auto forward = amp::autocasted([&](const Tensor& v) { return net(v); });
  CHECK(forward(x).dtype() == DType::bf16);

  distributed::Group group = distributed::init();
  net.to(group.device());
  nn::DistributedDataParallel ddp(net, group);
  optim::AdamW opt(ddp.parameters(), {.lr = 1e-3});
  amp::GradScaler scaler;
  opt.zero_grad();
  { amp::Autocast a; loss = cross_entropy(ddp(x.to(group.device())), target.to(group.device())); }
  scaler.scale(loss).backward();
  CHECK(scaler.step(opt).state() != amp::StepOutcome::State::no_gradients);
  scaler.update();

  std::vector<double> sums(2);
  distributed::threads(2).run([&](distributed::Group& rank) {
    Tensor t = full({3}, rank.rank() + 1);
    rank.all_reduce(t).wait();
    sums[static_cast<size_t>(rank.rank())] = t.sum().item();
  });
  CHECK(sums == std::vector<double>{9, 9});
}

TEST_CASE("a training step under ForbidSync") {
  manual_seed(6);
  Net net;
  Batch batch;
  optim::SGD opt(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  amp::GradScaler scaler;
  for (int step = 0; step < 3; ++step) {
    ForbidSync forbidden;
    opt.zero_grad();
    Tensor loss;
    { amp::Autocast a; loss = cross_entropy(net(batch.x), batch.target); }
    scaler.scale(loss).backward();
    scaler.step(opt, {.clip_norm = 1.0});
    scaler.update();
    REQUIRE_THROWS_WITH(loss.item(), Catch::Contains("ForbidSync"));
  }
}
