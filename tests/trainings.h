#pragma once
// Three small networks, each with a training step of everything that a step may have: for tests of whole steps.
#include "halftone/halftone.h"

namespace halftone::tests {

// A network with a training step of everything: autocast, the scaler, clipping, AdamW, an average of the weights, a schedule.
struct Training {
  nn::Sequential net;
  optim::AdamW opt;
  optim::EMA average;
  optim::CosineAnnealingLR schedule;
  amp::GradScaler scaler;
  Tensor x, target;

  Training(nn::Sequential n, const Tensor& input)
      : net(std::move(n)), opt((net.to(input.device()), net.parameters()), {.lr = 1e-3}), average(opt), schedule(opt, {.steps = 100}), x(input),
        target(zeros({input.size(0)}, {.dtype = DType::i64, .device = input.device()})) {}
  Tensor operator()(const Tensor& in) {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast on({.dtype = DType::f16});
      loss = cross_entropy(net(in), target);
    }
    scaler.scale(loss).backward();
    scaler.step(opt, {.clip_norm = 1.0});
    scaler.update();
    return loss;
  }
};

inline Training mlp(Device device) {
  return {nn::Sequential{nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 128), nn::ReLU(), nn::Linear(128, 10)}, randn({128, 784}, {.device = device})};
}
inline Training cnn(Device device) {
  nn::Sequential net{nn::Conv2d(1, 32, 3, {.padding = 1}), nn::BatchNorm2d(32), nn::ReLU(), nn::MaxPool2d(2), nn::Conv2d(32, 64, 3, {.padding = 1}), nn::ReLU(),
                     nn::MaxPool2d(2), nn::Flatten(), nn::Dropout(0.1), nn::Linear(64 * 7 * 7, 10)};
  return {std::move(net), randn({64, 1, 28, 28}, {.device = device})};
}
// Attention, layer norm and an embedding's like: what a transformer adds.
inline Training transformer(Device device) {
  nn::Sequential net{nn::TransformerEncoderLayer(64, 4, {.feedforward = 128, .dropout = 0.1}), nn::Flatten(), nn::Linear(32 * 64, 10)};
  return {std::move(net), randn({16, 32, 64}, {.device = device})};
}

inline constexpr std::pair<const char*, Training (*)(Device)> trainings[] = {{"mlp", mlp}, {"cnn", cnn}, {"transformer", transformer}};

}  // namespace halftone::tests
