// An MLP, a CNN with batch norm, an LSTM and a transformer block take PyTorch's weights and give PyTorch theirs, under its names and
// without a word in between; outputs are equal within PyTorch's own tolerances for f32 (tests/golden/exchange.py).
#include <cmath>
#include <cstdlib>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/scoreboard.h"
#include "halftone/tests/temporary.h"

using namespace halftone;

namespace {

struct CNN : nn::Module {
  nn::Conv2d conv1{3, 8, 3, {.padding = 1, .bias = false}};
  nn::BatchNorm2d bn1{8};
  nn::Conv2d conv2{8, 12, 3, {.stride = 2, .groups = 2}};
  nn::BatchNorm2d bn2{12};
  nn::Linear fc{12, 5};
  HT_FIELDS(conv1, bn1, conv2, bn2, fc)
  Tensor forward(const Tensor& x) override { return fc(relu(bn2(conv2(relu(bn1(conv1(x)))))).mean({2, 3})); }
};

struct Network : nn::Module {
  nn::Embedding embedding{11, 6};
  nn::LSTM lstm{6, 7, {.layers = 2, .batch_first = true, .bidirectional = true}};
  nn::Linear head{14, 4};
  HT_FIELDS(embedding, lstm, head)
  Tensor forward(const Tensor& x) override { return head(lstm(embedding(x))); }
};

struct Transformer : nn::Module {
  nn::TransformerEncoderLayer block{8, 2, {.feedforward = 20, .activation = nn::Activation::gelu, .batch_first = true, .norm_first = true}};
  nn::LayerNorm norm{Shape{8}};
  HT_FIELDS(block, norm)
  Tensor forward(const Tensor& x) override { return norm(block(x)); }
};

std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>> models() {
  return {{"mlp", std::make_shared<nn::Sequential>(nn::Linear(10, 16), nn::ReLU(), nn::Sequential(nn::Linear(16, 8), nn::Tanh()), nn::Linear(8, 4))},
          {"cnn", std::make_shared<CNN>()},
          {"lstm", std::make_shared<Network>()},
          {"transformer", std::make_shared<Transformer>()}};
}

const std::string golden = std::string(HALFTONE_SOURCE_DIR) + "/tests/golden/";
const StateDict& exchanged() {
  static const StateDict all = io::load(golden + "exchange.safetensors");
  return all;
}

std::vector<Device> places() {
  std::vector<Device> all{Device::cpu()};
  if (!devices(DeviceType::cuda).empty()) all.push_back(Device::cuda());
  return all;
}

}  // namespace

TEST_CASE("PyTorch's weights give PyTorch's outputs") {
  for (const Device device : places())
    for (const auto& [name, net] : models()) {
      INFO(name << " on " << str(device));
      const StateDict theirs = exchanged().part(name);
      net->to(device).eval();
      net->load_state_dict(theirs.part("state"));
      const auto y = (*net)(theirs.at("x").to(device)).to_vector<double>(), expected = theirs.at("y").to_vector<double>();
      REQUIRE(y.size() == expected.size());
      for (size_t i = 0; i < y.size(); ++i) CHECK(std::abs(y[i] - expected[i]) <= 1e-5 + 1.3e-6 * std::abs(expected[i]));
      tests::count("golden_cases");
    }
}

TEST_CASE("Halftone's weights give Halftone's outputs in PyTorch") {
  const char* python = std::getenv("HALFTONE_PYTHON");
  const std::string run = python ? python : "python3";
  if (std::system((run + " -c 'import torch, safetensors.torch' >/dev/null 2>&1").c_str()) != 0)
    HT_SKIP("no PyTorch with safetensors for Python; name one that has them in HALFTONE_PYTHON");
  const Temporary t;
  for (const Device device : places()) {
    manual_seed(3);
    StateDict ours;
    for (const auto& [name, net] : models()) {
      net->to(device);
      const Tensor x = (name == "lstm" ? randint(0, 11, {3, 6}) : randn(exchanged().at(name + ".x").shape())).to(device);
      optim::Adam opt(net->parameters(), {.lr = 0.02});
      for (int step = 0; step < 5; ++step) {  // weights and running statistics off their starts
        opt.zero_grad();
        const Tensor off = (*net)(x) - 1;
        (off * off).mean().backward();
        opt.step();
      }
      net->eval();
      ours.add(name + ".state", net->state_dict());
      ours.add(name + ".x", x);
      ours.add(name + ".y", (*net)(x));
    }
    io::save(t / "ours.safetensors", ours);
    const std::string command = run + " " + golden + "exchange.py --check " + t / "ours.safetensors" + " > " + t / "log" + " 2>&1";
    const int status = std::system(command.c_str());
    INFO(str(device) << ": " << bytes_of(t / "log"));
    CHECK(status == 0);
  }
}
