// ONNX: the graph and the weights of what is written, and, where Python has onnxruntime, its results beside ours.
#include "halftone/io/onnx.h"

#include <cstdlib>
#include <cstring>
#include <map>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

using namespace halftone;

namespace {

// The fields of a protobuf message, each with its number; numbers as decimal text.
std::vector<std::pair<int, std::string>> fields(const std::string& bytes) {
  std::vector<std::pair<int, std::string>> all;
  size_t at = 0;
  const auto varint = [&] {
    uint64_t v = 0;
    for (int shift = 0;; shift += 7) {
      const auto b = static_cast<uint8_t>(bytes.at(at++));
      v |= uint64_t{b & 127u} << shift;
      if (b < 128) return v;
    }
  };
  while (at < bytes.size()) {
    const uint64_t key = varint(), type = key & 7;
    std::string value;
    if (type == 0) {
      value = std::to_string(static_cast<int64_t>(varint()));
    } else {
      const size_t n = type == 2 ? varint() : type == 1 ? 8 : 4;
      REQUIRE(n <= bytes.size() - at);
      value = bytes.substr(at, n);
      at += n;
    }
    all.emplace_back(static_cast<int>(key >> 3), value);
  }
  return all;
}
std::vector<std::string> all_of(const std::string& bytes, int field) {
  std::vector<std::string> found;
  for (const auto& [number, value] : fields(bytes))
    if (number == field) found.push_back(value);
  return found;
}
std::string one(const std::string& bytes, int field) {
  const auto found = all_of(bytes, field);
  REQUIRE(found.size() == 1);
  return found[0];
}

template <class Net>
std::string exported(Net& net, const Tensor& x, const io::OnnxOptions& o = {}) {
  const Temporary t;
  io::save_onnx(t / "net.onnx", net, x, o);
  return bytes_of(t / "net.onnx");
}
std::string ops(const std::string& model) {
  std::string names;
  for (const auto& n : all_of(one(model, 7), 1)) names += (names.empty() ? "" : " ") + one(n, 4);
  return names;
}

struct Net : nn::Module {
  nn::Conv2d conv{3, 4, 3, {.padding = 1, .bias = false}};
  nn::BatchNorm2d norm{4};
  nn::ConvTranspose2d up{4, 2, 3, {.stride = 2, .padding = 1, .output_padding = 1}};
  nn::Linear head{2, 5};
  nn::Parameter gain{full({5}, 1.5)};
  HT_FIELDS(conv, norm, up, head, gain)
  Tensor forward(const Tensor& x) override {
    const Tensor h = norm(conv(x)), both = cat(std::vector<Tensor>{silu(h) + h * .5, 1 / (h.abs() + 10) - 3}, 2);
    return head(up(both).mean({2, 3})) * gain;
  }
};
struct Projected : nn::Module {
  nn::Conv2d conv{3, 4, 3, {.stride = 2, .padding = 1, .bias = false}};
  nn::BatchNorm2d norm{4};
  nn::Sequential shortcut{nn::Conv2d(3, 4, 1, {.stride = 2}), nn::BatchNorm2d(4, {.affine = false})};
  HT_FIELDS(conv, norm, shortcut)
  Tensor forward(const Tensor& x) override { return norm.add_relu(conv(x), shortcut, x); }
};
struct Text : nn::Module {
  nn::Embedding embedding{11, 6};
  nn::LayerNorm norm{Shape{6}};
  nn::Linear head{6, 3, {.bias = true}};
  HT_FIELDS(embedding, norm, head)
  Tensor forward(const Tensor& x) override { return log_softmax(head(norm(embedding(x))).transpose(1, 2), 1); }
};
// A stream in its own dtype, to which branches of another are added.
struct Stream : nn::Module {
  nn::Linear branch{6, 6}, head{6, 3};
  nn::LayerNorm norm{6}, last{Shape{4, 6}, {.affine = false}};
  DType narrow;
  explicit Stream(DType d = DType::f32) : narrow(d) {}
  HT_FIELDS(branch, head, norm, last)
  Tensor forward(const Tensor& x) override {  // [n, 4, 6]
    const auto [y, sum] = norm.add(branch(x).to(narrow), x);
    const auto [z, whole] = last.add(y, sum);
    const Tensor wide = whole * sum, positive = relu(z);
    return head((positive + y).to(DType::f32) + wide).to(narrow);
  }
};

}  // namespace

TEST_CASE("a perceptron: nodes, weights under their names, an open batch") {
  manual_seed(1);
  nn::Sequential net{nn::Linear(4, 3), nn::ReLU(), nn::Dropout(), nn::Linear(3, 2)};
  net.eval();
  const std::string model = exported(net, ones({2, 4}), {.input = "pixels", .output = "scores"});
  CHECK(ops(model) == "Gemm Relu Gemm Identity");
  CHECK(one(model, 1) == "10");
  CHECK(one(one(model, 8), 2) == "21");
  const std::string graph = one(model, 7);
  const StateDict state = net.state_dict();
  const auto weights = all_of(graph, 5);
  CHECK(weights.size() == 4);
  for (const auto& w : weights) {
    const Tensor& expected = state.at(one(w, 8));
    CHECK(one(w, 2) == "1");
    std::string dims;
    for (const auto& d : all_of(w, 1)) dims += d + " ";
    CHECK(dims == (expected.rank() == 2 ? text::cat(expected.size(0), " ", expected.size(1), " ") : text::cat(expected.size(0), " ")));
    const std::string raw = one(w, 9);
    CHECK((raw.size() == static_cast<size_t>(expected.numel()) * 4 && std::memcmp(raw.data(), expected.raw_data(), raw.size()) == 0));
  }
  const std::string input = one(graph, 11), shape = one(one(one(input, 2), 1), 2);
  CHECK(one(input, 1) == "pixels");
  CHECK(one(one(graph, 12), 1) == "scores");
  CHECK(one(all_of(shape, 1)[0], 2) == "batch");
  CHECK(one(all_of(shape, 1)[1], 1) == "4");
  const std::string fixed = exported(net, ones({2, 4}), {.any_batch = false});
  CHECK(one(all_of(one(one(one(one(one(fixed, 7), 11), 2), 1), 2), 1)[0], 1) == "2");
}

TEST_CASE("a sum and its norm are two nodes, whose results both go on") {
  Stream net;
  net.eval();
  CHECK(ops(exported(net, ones({2, 4, 6}))) ==
        "Reshape Gemm Reshape Add LayerNormalization Add LayerNormalization Mul Relu Add Add Reshape Gemm Reshape Identity");
  Stream narrow(DType::f16);
  narrow.eval();
  const std::string model = exported(narrow, ones({2, 4, 6}));
  CHECK(ops(model) ==
        "Reshape Gemm Reshape Cast Cast Add LayerNormalization Cast Cast Add LayerNormalization Cast Mul Relu Add Cast Add "
        "Reshape Gemm Reshape Cast Identity");
  std::map<std::string, int> uses;
  for (const auto& n : all_of(one(model, 7), 1))
    for (const auto& in : all_of(n, 1)) ++uses[in];
  int sums = 0;
  for (const auto& n : all_of(one(model, 7), 1))
    if (one(n, 4) == "LayerNormalization") sums += uses.at(all_of(n, 1)[0]);
  CHECK(sums == 5);  // the first by its norm, the next sum and the product; the second by its norm and the product
}

TEST_CASE("what cannot be written says so, and nothing is written") {
  const Temporary t;
  nn::Sequential net{nn::Linear(4, 3)};
  const auto error = [&](auto& model, const Tensor& x) { return error_of([&] { io::save_onnx(t / "f", model, x); }, t.folder); };
  CHECK(error(net, ones({1, 4})) == "save_onnx: the model is in training mode; call eval() before");
  net.eval();
  CHECK(error(net, ones({})) == "save_onnx: expected an example with a batch in dimension 0, got [] (f32)");
  CHECK(error(net, Tensor()) == "save_onnx: expected an example with a batch in dimension 0, got an undefined tensor");
  nn::Sequential sorted{nn::Lambda([](const Tensor& x) { return cumsum(x, 1); })};
  sorted.eval();
  CHECK(error(sorted, ones({1, 4})) == "save_onnx: the model calls cumsum, which cannot be written as ONNX; io/onnx.h lists what can (in layer 0)");
  nn::Sequential constant{nn::Lambda([](const Tensor&) { return ones({1}) * 2; })};
  constant.eval();
  CHECK(error(constant, ones({1, 4})) == "save_onnx: the model calls fill, which cannot be written as ONNX; io/onnx.h lists what can (in layer 0)");
  const Tensor two = ones({1});
  nn::Sequential elsewhere{nn::Lambda([two](const Tensor&) { return two * 2; })};
  elsewhere.eval();
  CHECK(error(elsewhere, ones({1, 4})) == "save_onnx: the model's result does not come from its argument by operators");
  nn::Sequential uneven{nn::AdaptiveAvgPool2d(2)};
  uneven.eval();
  CHECK(error(uneven, ones({1, 1, 5, 5})) ==
        "save_onnx: adaptive pooling of 5 elements to 2 has windows of several sizes, which ONNX does not have (in layer 0)");
  nn::Sequential batch{nn::BatchNorm1d(4, {.track_running_stats = false})};
  batch.eval();
  CHECK(error(batch, ones({2, 4})) == "save_onnx: batch_norm by the batch's own statistics cannot be written as ONNX (in layer 0)");
  CHECK(t.list().empty());
}

TEST_CASE("onnxruntime gives our results") {
  const char* python = std::getenv("HALFTONE_PYTHON");
  const std::string run = python ? python : "python3";
  if (std::system((run + " -c 'import onnx, onnxruntime' >/dev/null 2>&1").c_str()) != 0)
    HT_SKIP("no onnxruntime for Python; name one that has it in HALFTONE_PYTHON");
  const Temporary t;
  manual_seed(2);
  const auto write = [&](const std::string& name, auto& net, const Tensor& x) {
    net.train();
    const NoGrad off;
    if (is_floating(x.dtype())) net(x);  // running statistics that are not 0 and 1
    net.eval();
    const Tensor x2 = cat(std::vector<Tensor>{x, flip(x, {0})});
    StateDict s;
    s.add("x", x);
    s.add("y", net(x));
    s.add("x2", x2);
    s.add("y2", net(x2));
    io::save(t / (name + ".safetensors"), s);
    io::save_onnx(t / (name + ".onnx"), net, x);
  };
  nn::Sequential mlp{nn::Linear(6, 16), nn::GELU(), nn::Linear(16, 8, {.bias = false}), nn::Tanh(), nn::Linear(8, 3), nn::Softmax(-1)};
  write("mlp", mlp, randn({3, 6}));
  nn::Sequential deep{nn::Linear(6, 5), nn::ReLU(), nn::LayerNorm(Shape{5}), nn::LeakyReLU(0.1), nn::Sigmoid()};
  write("rows", deep, randn({2, 4, 6}));
  nn::Sequential cnn{nn::Conv2d(3, 8, {3, 5}, {.stride = {1, 2}, .padding = {1, 2}}), nn::BatchNorm2d(8), nn::ReLU(), nn::MaxPool2d(2),
                     nn::Conv2d(8, 8, 3, {.padding = 2, .dilation = 2, .groups = 4}), nn::GroupNorm(2, 8), nn::ELU(),
                     nn::AvgPool2d(3, {.stride = 1, .padding = 1}), nn::AdaptiveAvgPool2d(1), nn::Flatten(), nn::Linear(8, 4)};
  write("cnn", cnn, randn({2, 3, 12, 16}));
  nn::Sequential unfused{nn::Conv1d(2, 4, 3, {.padding = 1}), nn::ReLU(), nn::AdaptiveMaxPool1d(3), nn::Flatten(), nn::Linear(12, 2)};
  write("one", unfused, randn({3, 2, 9}));
  Net net;
  write("block", net, randn({2, 3, 6, 6}));
  Projected projected;
  write("projected", projected, randn({2, 3, 6, 6}));
  Text words;
  write("text", words, randint(0, 11, {2, 5}));
  nn::Sequential half{nn::Linear(6, 16), nn::ReLU(), nn::Linear(16, 3)};
  half.to(DType::f16);
  write("half", half, randn({3, 6}).to(DType::f16));
  nn::Sequential wide{nn::Linear(6, 4), nn::Lambda([](const Tensor& x) { return x.to(DType::f16); }), nn::LayerNorm(4)};  // of f32 weights
  write("wide", wide, randn({3, 6}));
  Stream stream, narrow(DType::f16);
  write("stream", stream, randn({2, 4, 6}));
  write("narrow", narrow, randn({2, 4, 6}));
  const std::string command = run + " " + HALFTONE_SOURCE_DIR + "/tests/golden/onnx_check.py " + t.folder + " > " + t / "log" + " 2>&1";
  const int status = std::system(command.c_str());
  INFO(bytes_of(t / "log"));
  CHECK(status == 0);
}
