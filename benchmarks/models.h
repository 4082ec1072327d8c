#pragma once
// What halftone-bench trains, the networks of benchmarks elsewhere: perceptrons, LeNet, residual networks, GPT-2.
#include <functional>
#include <memory>

#include "halftone/halftone.h"

namespace benchmarks {

using namespace halftone;

// relu(x + norm(body(x))); a projection where the shape changes (He et al., "Deep residual learning", 2016).
struct ResidualBlock : nn::Module {
  explicit ResidualBlock(int64_t out) : norm(out) {}
  nn::Sequential body;
  nn::BatchNorm2d norm;
  std::vector<nn::Sequential> projection;  // one or none
  HT_FIELDS(body, norm, projection)
  Tensor forward(const Tensor& x) override {
    Tensor y = body(x);  // first, so that in backward its first convolution comes last and adds the projection's gradient as it writes
    return projection.empty() ? norm.add_relu(y, x) : norm.add_relu(y, projection[0], x);
  }
};

// Basic blocks of two 3 x 3 convolutions, or bottlenecks of 1 x 1, 3 x 3 and 1 x 1 with four times the width.
inline ResidualBlock residual_block(int64_t in, int64_t width, int64_t stride, bool bottleneck) {
  int64_t out = bottleneck ? 4 * width : width;
  ResidualBlock b(out);
  auto conv = [](int64_t from, int64_t to, int64_t kernel, int64_t s) {
    return nn::Conv2d(from, to, kernel, {.stride = s, .padding = kernel / 2, .bias = false});
  };
  if (bottleneck) {
    b.body.add(conv(in, width, 1, 1)).add(nn::BatchNorm2d(width)).add(nn::ReLU());
    b.body.add(conv(width, width, 3, stride)).add(nn::BatchNorm2d(width)).add(nn::ReLU());
    b.body.add(conv(width, out, 1, 1));
  } else {
    b.body.add(conv(in, width, 3, stride)).add(nn::BatchNorm2d(width)).add(nn::ReLU());
    b.body.add(conv(width, width, 3, 1));
  }
  if (stride != 1 || in != out) b.projection.push_back(nn::Sequential{conv(in, out, 1, stride), nn::BatchNorm2d(out)});
  return b;
}

inline nn::Sequential residual_network(std::initializer_list<int64_t> blocks, bool bottleneck, bool small_images, int64_t classes) {
  nn::Sequential net;
  if (small_images) net.add(nn::Conv2d(3, 64, 3, {.padding = 1, .bias = false})).add(nn::BatchNorm2d(64)).add(nn::ReLU());
  else
    net.add(nn::Conv2d(3, 64, 7, {.stride = 2, .padding = 3, .bias = false}))
        .add(nn::BatchNorm2d(64))
        .add(nn::ReLU())
        .add(nn::MaxPool2d(3, {.stride = 2, .padding = 1}));
  int64_t in = 64, width = 64;
  for (int64_t n : blocks) {
    for (int64_t i = 0; i < n; ++i) {
      net.add(residual_block(in, width, i == 0 && width > 64 ? 2 : 1, bottleneck));
      in = bottleneck ? 4 * width : width;
    }
    width *= 2;
  }
  net.add(nn::AdaptiveAvgPool2d(1)).add(nn::Flatten()).add(nn::Linear(in, classes));
  return net;
}

// A block of GPT-2 (Radford et al., 2019): attention and a wide layer, each behind a layer norm and around a shortcut. What a branch adds to the
// stream that runs past all blocks is added by the next norm, in one operator with it.
struct GptBlock : nn::Module {
  struct Stream { Tensor sum, added; };  // [b, t, d]; the first one's sum may be broadcast
  GptBlock(int64_t width, int64_t h)
      : norm1(Shape{width}),
        norm2(Shape{width}),
        qkv(width, 3 * width),
        proj(width, width),
        wide(width, 4 * width),
        out(4 * width, width),
        heads(h) {}
  nn::LayerNorm norm1, norm2;
  nn::Linear qkv, proj, wide, out;
  int64_t heads;
  HT_FIELDS(norm1, norm2, qkv, proj, wide, out)
  Stream operator()(const Stream& s) {
    auto [n1, h1] = norm1.add(s.added, s.sum);
    int64_t b = n1.size(0), t = n1.size(1), d = n1.size(2);
    auto parts = chunk(qkv(n1), 3, 2);
    for (auto& p : parts) p = p.view({b, t, heads, d / heads}).transpose(1, 2);
    Tensor y = scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, {.causal = true});
    auto [n2, h2] = norm2.add(proj(y.transpose(1, 2).reshape({b, t, d})), h1);
    return {h2, out(gelu(wide(n2), Approximate::tanh))};
  }
};
struct Gpt : nn::Module {
  Gpt(int64_t vocabulary, int64_t t, int64_t layers, int64_t heads, int64_t width)
      : tokens(vocabulary, width), places(t, width), norm(Shape{width}), head(width, vocabulary, {.bias = false}) {
    for (int64_t i = 0; i < layers; ++i) blocks.add(GptBlock(width, heads));
    head.weight.tie(tokens.weight);
  }
  nn::Embedding tokens, places;
  nn::ModuleList blocks;
  nn::LayerNorm norm;
  nn::Linear head;
  HT_FIELDS(tokens, places, blocks, norm, head)
  Tensor forward(const Tensor& ids) override {
    GptBlock::Stream s{places.weight.slice(0, 0, ids.size(1)), tokens(ids)};
    for (size_t i = 0; i < blocks.size(); ++i) s = blocks.as<GptBlock>(i)(s);
    return head(norm.add(s.added, s.sum).y).flatten(0, 1);
  }
};

// 784-256-10: linear layers with ReLU between them.
inline nn::Sequential perceptron(const std::vector<int64_t>& widths) {
  nn::Sequential net;
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    net.add(nn::Linear(widths[i], widths[i + 1]));
    if (i + 2 < widths.size()) net.add(nn::ReLU());
  }
  return net;
}

// A network, its batch, its optimizer.
struct Workload {
  std::string name, model;  // model: as peers know it
  std::function<std::unique_ptr<nn::Module>(const Shape& example)> make;
  int64_t batch;
  Shape example;            // of one input; [context] token numbers where there is a vocabulary
  int64_t classes, vocabulary = 0;
  bool adam = false;        // AdamW, else SGD with momentum

  std::unique_ptr<nn::Module> network() const { return make(example); }
  Shape input() const {
    Shape s{batch};
    for (int64_t d : example) s.push_back(d);
    return s;
  }
  int64_t targets() const { return vocabulary > 0 ? batch * example[0] : batch; }
  std::string size() const { return vocabulary > 0 ? text::cat(batch, " x ", example[0]) : text::cat(batch); }
  // Half of it; false when it is as small as it gets.
  bool shrink() {
    if (batch > 1) batch /= 2;
    else if (vocabulary > 0 && example[0] > 64) example[0] /= 2;
    else return false;
    return true;
  }
};

template <class M> std::unique_ptr<nn::Module> owned(M&& m) { return std::make_unique<M>(std::move(m)); }
inline Workload perceptron_workload(const std::string& name, const std::vector<int64_t>& widths, int64_t batch) {
  std::string model = "mlp";
  for (int64_t w : widths) model += (model == "mlp" ? ":" : ",") + std::to_string(w);
  return {name, model, [widths](const Shape&) { return owned(perceptron(widths)); }, batch, {widths.front()}, widths.back()};
}
inline Workload gpt_workload(const std::string& name, int64_t layers, int64_t heads, int64_t width, int64_t vocabulary, int64_t context,
                             int64_t batch) {
  return {name, text::cat("gpt:", layers, ",", heads, ",", width, ",", vocabulary),
          [=](const Shape& row) { return owned(Gpt(vocabulary, row[0], layers, heads, width)); }, batch, {context}, vocabulary, vocabulary, true};
}
inline std::vector<Workload> workloads() {
  auto lenet = [](const Shape&) {
    return owned(nn::Sequential{nn::Conv2d(1, 32, 3), nn::ReLU(), nn::Conv2d(32, 64, 3), nn::ReLU(), nn::MaxPool2d(2), nn::Flatten(),
                                nn::Linear(9216, 128), nn::ReLU(), nn::Linear(128, 10)});
  };
  return {perceptron_workload("mlp_small", {784, 256, 128, 10}, 128),
          perceptron_workload("mlp_wide", {4096, 4096, 4096, 4096, 1000}, 8192),
          {"lenet", "lenet", lenet, 256, {1, 28, 28}, 10, 0, true},
          {"resnet18", "resnet18", [](const Shape&) { return owned(residual_network({2, 2, 2, 2}, false, true, 10)); }, 512, {3, 32, 32}, 10},
          {"resnet50", "resnet50", [](const Shape&) { return owned(residual_network({3, 4, 6, 3}, true, false, 1000)); }, 256, {3, 224, 224}, 1000},
          gpt_workload("gpt2", 12, 12, 768, 50304, 1024, 32),
          gpt_workload("gpt_small", 6, 8, 256, 1024, 128, 8)};
}

}  // namespace benchmarks
