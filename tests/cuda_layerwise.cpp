// LAMB and Muon on CUDA: captured steps are the eager ones bit for bit, skips included, and follow the CPU's.
#include <cmath>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;

namespace {

using Make = std::function<std::unique_ptr<optim::Optimizer>(std::vector<Tensor>)>;

// The weights after some steps, of which the sixth overflows.
std::vector<std::vector<double>> train(const Make& make, Device device, bool captured) {
  manual_seed(7);
  nn::Sequential net{nn::Linear(8, 32, {.bias = false}), nn::ReLU(), nn::Linear(32, 32, {.bias = false}), nn::ReLU(), nn::Linear(32, 4, {.bias = false})};
  Tensor x = randn({64, 8}).to(device);
  net.to(device);
  auto opt = make(net.parameters());
  amp::GradScaler scaler({.init_scale = 256, .growth_interval = 3});
  Tensor factor = ones({}, {.device = device});
  auto step = [&](const Tensor& batch) {
    opt->zero_grad();
    Tensor loss = square(net(batch)).mean();
    scaler.scale(loss * factor).backward();
    scaler.step(*opt);
    scaler.update();
  };
  auto replayed = capture(step);
  for (int i = 0; i < 10; ++i) {
    factor.fill_(i == 5 ? std::numeric_limits<float>::infinity() : 1.f);
    ForbidSync no_waiting;
    captured ? replayed(x) : step(x);
  }
  CHECK(scaler.skipped_steps() == 1);
  if (captured && device != Device::cpu()) CHECK(replayed.replays() > 0);
  std::vector<std::vector<double>> all;
  for (auto& p : net.parameters()) all.push_back(p.to_vector<double>());
  return all;
}

}  // namespace

TEST_CASE("LAMB and Muon on CUDA") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device");
  const std::pair<const char*, Make> cases[] = {
      {"LAMB", [](std::vector<Tensor> p) { return std::make_unique<optim::LAMB>(std::move(p), optim::LAMBOptions{.lr = .01}); }},
      {"Muon", [](std::vector<Tensor> p) { return std::make_unique<optim::Muon>(std::move(p), optim::MuonOptions{.products = DType::f32}); }},
      {"Muon in bf16", [](std::vector<Tensor> p) { return std::make_unique<optim::Muon>(std::move(p)); }}};
  for (auto& [name, make] : cases) {
    INFO(name);
    auto eager = train(make, Device::cuda(), false), captured = train(make, Device::cuda(), true);
    CHECK(eager == captured);
    auto host = train(make, Device::cpu(), false);
    for (size_t i = 0; i < host.size(); ++i) {
      double largest = 0, apart = 0;
      for (size_t k = 0; k < host[i].size(); ++k) {
        largest = std::max(largest, std::fabs(host[i][k]));
        apart = std::max(apart, std::fabs(host[i][k] - eager[i][k]));
      }
      CHECK(apart <= (std::string_view(name) == "Muon in bf16" ? .1 : 2e-2) * largest);
    }
  }
}
