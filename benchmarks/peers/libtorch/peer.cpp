// The workloads of halftone-bench, but for ResNet-50, for libtorch, which has no class for autocast or loss scaling: both are written out,
// as its users must. The lines that are read and answered are in benchmarks/bench/peers.h.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>
#include <sys/wait.h>
#include <torch/version.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "../../process_memory.h"

namespace {

using benchmarks::ProcessMemory;
using torch::Tensor;
namespace nn = torch::nn;

// A basic block of ResNet.
struct ResidualImpl : nn::Module {
  ResidualImpl(int64_t in, int64_t out, int64_t stride) {
    auto conv = [](int64_t from, int64_t to, int64_t kernel, int64_t by) {
      return nn::Conv2d(nn::Conv2dOptions(from, to, kernel).stride(by).padding(kernel / 2).bias(false));
    };
    body = nn::Sequential(conv(in, out, 3, stride), nn::BatchNorm2d(out), nn::ReLU(), conv(out, out, 3, 1), nn::BatchNorm2d(out));
    register_module("body", body);
    if (stride != 1 || in != out) projection = register_module("projection", nn::Sequential(conv(in, out, 1, stride), nn::BatchNorm2d(out)));
  }
  Tensor forward(const Tensor& x) { return torch::relu(body->forward(x) + (projection ? projection->forward(x) : x)); }
  nn::Sequential body{nullptr}, projection{nullptr};
};

struct BlockImpl : nn::Module {
  BlockImpl(int64_t width, int64_t h) : heads(h) {
    auto norm = [&](const char* name) { return register_module(name, nn::LayerNorm(nn::LayerNormOptions({width}))); };
    auto linear = [&](const char* name, int64_t in, int64_t out) { return register_module(name, nn::Linear(in, out)); };
    norm1 = norm("norm1"), norm2 = norm("norm2");
    qkv = linear("qkv", width, 3 * width), proj = linear("proj", width, width);
    wide = linear("wide", width, 4 * width), out = linear("out", 4 * width, width);
  }
  Tensor forward(Tensor x) {
    const int64_t b = x.size(0), t = x.size(1), d = x.size(2);
    auto parts = qkv(norm1(x)).view({b, t, 3, heads, d / heads}).permute({2, 0, 3, 1, 4}).unbind();
    x = x + proj(at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true).transpose(1, 2).reshape({b, t, d}));
    return x + out(at::gelu(wide(norm2(x)), "tanh"));
  }
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear qkv{nullptr}, proj{nullptr}, wide{nullptr}, out{nullptr};
  int64_t heads;
};
struct GptImpl : nn::Module {
  GptImpl(const std::vector<int64_t>& sizes, int64_t context) {  // layers, heads, width, vocabulary
    tokens = register_module("tokens", nn::Embedding(sizes[3], sizes[2]));
    places = register_module("places", nn::Embedding(context, sizes[2]));
    for (int64_t i = 0; i < sizes[0]; ++i) blocks->push_back(std::make_shared<BlockImpl>(sizes[2], sizes[1]));
    register_module("blocks", blocks);
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({sizes[2]})));
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = blocks->forward(tokens(ids) + places->weight.slice(0, 0, ids.size(1)));
    return nn::functional::linear(norm(x), tokens->weight).flatten(0, 1);  // the head has the tokens' weights
  }
  nn::Embedding tokens{nullptr}, places{nullptr};
  nn::Sequential blocks;
  nn::LayerNorm norm{nullptr};
};

std::vector<int64_t> sizes(const std::string& model) {  // "mlp:784,256,10", "gpt:layers,heads,width,vocabulary"
  std::istringstream text(model.substr(4));
  std::vector<int64_t> all;
  for (std::string n; std::getline(text, n, ',');) all.push_back(std::stoll(n));
  return all;
}

nn::Sequential network(const std::string& model, int64_t context) {
  nn::Sequential net;
  if (model.rfind("mlp:", 0) == 0) {
    const auto widths = sizes(model);
    for (size_t i = 0; i + 1 < widths.size(); ++i) {
      net->push_back(nn::Linear(widths[i], widths[i + 1]));
      if (i + 2 < widths.size()) net->push_back(nn::ReLU());
    }
  } else if (model == "lenet") {
    net = nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 32, 3)), nn::ReLU(), nn::Conv2d(nn::Conv2dOptions(32, 64, 3)), nn::ReLU(), nn::MaxPool2d(2),
                         nn::Flatten(), nn::Linear(9216, 128), nn::ReLU(), nn::Linear(128, 10));
  } else if (model == "resnet18") {
    net = nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 64, 3).padding(1).bias(false)), nn::BatchNorm2d(64), nn::ReLU());
    for (int64_t width = 64, in = 64; width <= 512; width *= 2)
      for (int i = 0; i < 2; ++i, in = width) net->push_back(std::make_shared<ResidualImpl>(in, width, i == 0 && width > 64 ? 2 : 1));
    net->push_back(nn::AdaptiveAvgPool2d(1));
    net->push_back(nn::Flatten());
    net->push_back(nn::Linear(512, 10));
  } else if (model.rfind("gpt:", 0) == 0) {
    net->push_back(std::make_shared<GptImpl>(sizes(model), context));
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
  Training(const std::string& model, int64_t batch, int64_t context, const std::string& optimizer, const std::string& precision, torch::Device where)
      : device(where),
        net(network(model, context)),
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
    for (int i = 0; i < 2; ++i) {
      const bool text = model.rfind("gpt:", 0) == 0, given = text || model.rfind("mlp:", 0) == 0;
      const int64_t classes = given ? sizes(model).back() : 10;
      const auto whole = torch::TensorOptions(device).dtype(torch::kLong);
      if (text) inputs.push_back(torch::randint(classes, {batch, context}, whole));
      else if (given) inputs.push_back(torch::randn({batch, sizes(model).front()}, device));
      else inputs.push_back(model == "lenet" ? torch::randn({batch, 1, 28, 28}, device) : torch::randn({batch, 3, 32, 32}, device));
      targets.push_back(torch::randint(classes, {text ? batch * context : batch}, whole));
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
  std::optional<ProcessMemory> memory;
  pid_t child = -1;
  for (std::string line; std::getline(std::cin, line);) try {
      std::istringstream words(line);
      std::string verb, model, optimizer, precision, how, device;
      int64_t batch = 0, context = 0, steps = 0;
      words >> verb;
      if (verb == "open") {
        words >> model >> batch >> context >> optimizer >> precision >> how >> device >> steps;
        if (device == "cpu" && (child = fork()) != 0) {  // in a process of its own, so that its memory is its own
          int status = 0;
          waitpid(child, &status, 0);
          if (status != 0) std::cout << "refused it ended" << std::endl;
          continue;
        }
        training.reset();
        torch::manual_seed(0);
        training = std::make_unique<Training>(model, batch, context, optimizer, precision, torch::Device(device));
        memory.emplace();
        std::cout << "ready " << training->run(std::max<int64_t>(steps, 1)) << std::endl;
      } else if (verb == "run" && training) {
        words >> steps;
        const auto start = std::chrono::steady_clock::now();
        training->run(steps);
        std::cout << "took "
                  << std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / static_cast<double>(steps)
                  << std::endl;
      } else {
        const double peak = training && training->device.is_cpu() ? memory->peak() : std::numeric_limits<double>::quiet_NaN();
        training.reset();
        std::cout << "closed " << peak << std::endl;
        if (child == 0) _exit(0);
      }
    } catch (const std::exception& e) {
      const std::string why = e.what();
      std::cout << "refused " << why.substr(0, std::min<size_t>(why.find('\n'), 300)) << std::endl;
      if (child == 0 && !training) _exit(0);
    }
}
