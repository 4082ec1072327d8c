#pragma once
// Small networks with a batch each, for tests of training on several ranks: a rank takes a part of the rows.
#include <array>

#include "halftone/halftone.h"

namespace halftone::tests {

struct Task {
  nn::Sequential net;
  Tensor x, target;
  int64_t size() const { return x.size(0); }
  Tensor loss(const Tensor& y, int64_t from, int64_t to) const { return cross_entropy(y, target.slice(0, from, to)); }
};

// widths: of the input, the two hidden layers and the output.
inline Task mlp(int64_t rows = 16, const std::array<int64_t, 4>& widths = {12, 32, 16, 4}) {
  manual_seed(3);
  auto [in, first, second, classes] = widths;
  Task t{nn::Sequential{nn::Linear(in, first), nn::ReLU(), nn::Linear(first, second), nn::ReLU(), nn::Linear(second, classes)}, {}, {}};
  t.x = randn({rows, in});
  t.target = randint(0, classes, {rows});
  return t;
}

// norms: how many of the two convolutions have one. widths: channels of the images and of the two convolutions, and the output. side: of the
// images, pixels.
inline Task cnn(int64_t rows = 16, int norms = 0, const std::array<int64_t, 4>& widths = {2, 6, 4, 4}, int64_t side = 8) {
  manual_seed(4);
  auto [in, first, second, classes] = widths;
  Task t;
  t.net.add(nn::Conv2d(in, first, 3, {.padding = 1}));
  if (norms > 0) t.net.add(nn::BatchNorm2d(first));
  t.net.add(nn::ReLU()).add(nn::MaxPool2d(2)).add(nn::Conv2d(first, second, 3));
  if (norms > 1) t.net.add(nn::BatchNorm2d(second));
  int64_t left = side / 2 - 2;
  t.net.add(nn::ReLU()).add(nn::Flatten()).add(nn::Linear(second * left * left, classes));
  t.x = randn({rows, in, side, side});
  t.target = randint(0, classes, {rows});
  return t;
}

}  // namespace halftone::tests
