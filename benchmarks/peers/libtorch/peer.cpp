// The small workloads of halftone-bench for libtorch, which has no class for autocast or loss scaling: both are written out, as its users must.
// The lines that are read and answered are in benchmarks/bench/peers.h.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

using torch::Tensor;
namespace nn = torch::nn;

nn::Sequential network(const std::string& model) {
  nn::Sequential net;
  if (model.rfind("mlp:", 0) == 0) {
    std::istringstream text(model.substr(4));
    std::vector<int64_t> widths;
    for (std::string n; std::getline(text, n, ',');) widths.push_back(std::stoll(n));
    for (size_t i = 0; i + 1 < widths.size(); ++i) {
      net->push_back(nn::Linear(widths[i], widths[i + 1]));
      if (i + 2 < widths.size()) net->push_back(nn::ReLU());
    }
  } else if (model == "lenet") {
    net = nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 32, 3)), nn::ReLU(), nn::Conv2d(nn::Conv2dOptions(32, 64, 3)), nn::ReLU(), nn::MaxPool2d(2),
                         nn::Flatten(), nn::Linear(9216, 128), nn::ReLU(), nn::Linear(128, 10));
  } else {
    throw std::runtime_error(model + " is not written for libtorch here");
  }
  return net;
}

// Casts of the calling thread, on or off.
void autocast(torch::Device device, bool on, at::ScalarType dtype) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
  at::autocast::set_autocast_enabled(device.type(), on);
  at::autocast::set_autocast_dtype(device.type(), dtype);
#else
  if (device.is_cuda()) at::autocast::set_enabled(on), at::autocast::set_autocast_gpu_dtype(dtype);
  else at::autocast::set_cpu_enabled(on), at::autocast::set_autocast_cpu_dtype(dtype);
#endif
  if (!on) at::autocast::clear_cache();
}

struct Training {
  Training(const std::string& model, int64_t batch, const std::string& optimizer, const std::string& precision, torch::Device where)
      : device(where),
        net(network(model)),
        mixed(precision == "fp16" || precision == "bf16"),
        scaled(precision == "fp16"),
        dtype(scaled ? torch::kHalf : torch::kBFloat16) {
    if (device.is_cuda() && !torch::cuda::is_available()) throw std::runtime_error("this libtorch has no CUDA");
    if (scaled && !device.is_cuda()) throw std::runtime_error("fp16 is for CUDA here");
    at::globalContext().setAllowTF32CuBLAS(precision == "tf32");
    at::globalContext().setAllowTF32CuDNN(precision == "tf32");
    at::globalContext().setBenchmarkCuDNN(true);
    net->to(device);
    if (optimizer == "sgd") opt = std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(1e-3).momentum(0.9));
    else opt = std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(1e-3));
    const auto parameters = net->parameters();
    for (int i = 0; i < 2; ++i) {
      if (model == "lenet") inputs.push_back(torch::randn({batch, 1, 28, 28}, device));
      else inputs.push_back(torch::randn({batch, parameters.front().size(1)}, device));
      targets.push_back(torch::randint(parameters.back().size(0), {batch}, torch::TensorOptions(device).dtype(torch::kLong)));
    }
    scale = torch::full({1}, 65536.f, device);
    growth = torch::zeros({1}, torch::TensorOptions(device).dtype(torch::kInt));
  }

  void step() {
    opt->zero_grad();
    if (mixed) autocast(device, true, dtype);
    loss = nn::functional::cross_entropy(net->forward(inputs[done % 2]), targets[done % 2]);
    if (mixed) autocast(device, false, dtype);
    ++done;
    if (!scaled) {
      loss.backward();
      opt->step();
      return;
    }
    (loss * scale[0]).backward();
    std::vector<Tensor> gradients;
    for (auto& p : net->parameters()) gradients.push_back(p.mutable_grad());
    Tensor found = torch::zeros({1}, device);
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, scale.reciprocal());
    if (found.item<float>() == 0) opt->step();
    at::_amp_update_scale_(scale, growth, found, 2.0, 0.5, 2000);
  }
  double run(int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) step();
    if (device.is_cuda()) torch::cuda::synchronize();
    return loss.item<double>();
  }

  torch::Device device;
  nn::Sequential net;
  bool mixed, scaled;
  at::ScalarType dtype;
  std::unique_ptr<torch::optim::Optimizer> opt;
  std::vector<Tensor> inputs, targets;
  Tensor scale, growth, loss;
  size_t done = 0;
};

}  // namespace

int main() {
  std::cout << "hello libtorch " << TORCH_VERSION << " eager" << std::endl;
  std::unique_ptr<Training> training;
  for (std::string line; std::getline(std::cin, line);) try {
      std::istringstream words(line);
      std::string verb, model, optimizer, precision, how, device;
      int64_t batch = 0, context = 0, steps = 0;
      words >> verb;
      if (verb == "open") {
        words >> model >> batch >> context >> optimizer >> precision >> how >> device >> steps;
        training.reset();
        torch::manual_seed(0);
        training = std::make_unique<Training>(model, batch, optimizer, precision, torch::Device(device));
        std::cout << "ready " << training->run(std::max<int64_t>(steps, 1)) << std::endl;
      } else if (verb == "run" && training) {
        words >> steps;
        const auto start = std::chrono::steady_clock::now();
        training->run(steps);
        std::cout << "took "
                  << std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / static_cast<double>(steps)
                  << std::endl;
      } else {
        training.reset();
        std::cout << "closed nan" << std::endl;
      }
    } catch (const std::exception& e) {
      const std::string why = e.what();
      std::cout << "refused " << why.substr(0, std::min<size_t>(why.find('\n'), 300)) << std::endl;
    }
}
