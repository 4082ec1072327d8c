// Modules with PyTorch's weights give PyTorch's outputs, gradients and buffers in f64 (tests/golden/modules.py), under PyTorch's
// names. The same modules run under autocast, in 16 bits, and as clones.
#include <cmath>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/scoreboard.h"
#include "halftone/tests/temporary.h"

using namespace halftone;

namespace {

using List = std::vector<Tensor>;

struct Case {
  std::shared_ptr<nn::Module> module;
  std::function<List(const List&)> call;
  std::function<Case()> clone;
};
template <class M, class F> Case made(M m, F f) {
  auto p = std::make_shared<M>(std::move(m));
  return {p, [p, f](const List& x) { return f(*p, x); }, [p, f] { return made(p->clone(), f); }};
}
template <class M> Case one(M m) { return made(std::move(m), [](nn::Module& n, const List& x) { return List{n(x[0])}; }); }
template <class M> Case two(M m) { return made(std::move(m), [](M& n, const List& x) { return List{n(x[0], x[1])}; }); }
template <class M> Case network(M m) {
  return made(std::move(m), [](M& n, const List& x) {
    auto [y, h] = n(x[0], x[1]);
    return List{y, h};
  });
}

constexpr nn::RecurrentOptions both{.layers = 2, .bidirectional = true};

nn::AttentionMasks masked(Device device) {
  Tensor keys = tensor({true, true, true, true, true, false}).reshape({2, 3});
  return {.mask = tril(ones({3, 3})).to(DType::b8).to(device), .keys = keys.to(device)};
}
nn::ModuleList activations() {
  nn::ModuleList m;
  m.add(nn::ReLU6()).add(nn::Hardtanh(-.5, 2)).add(nn::Hardsigmoid()).add(nn::Hardswish()).add(nn::Hardshrink(.3));
  m.add(nn::Softshrink(.3)).add(nn::Threshold(.1, 7)).add(nn::ELU(.7)).add(nn::SELU()).add(nn::CELU(1.3));
  m.add(nn::GELU(Approximate::tanh)).add(nn::Mish()).add(nn::Softplus(2, 3)).add(nn::Softsign()).add(nn::Tanhshrink());
  m.add(nn::LogSigmoid());
  return m;
}

const std::vector<std::pair<std::string, std::function<Case()>>>& cases() {
  using namespace nn;
  static const std::vector<std::pair<std::string, std::function<Case()>>> all = {
      {"linear", [] { return one(Linear(3, 4)); }},
      {"bilinear", [] { return two(Bilinear(3, 2, 4)); }},
      {"conv1d", [] { return one(Conv1d(4, 6, 3, {.stride = 2, .padding = 1, .dilation = 2, .groups = 2})); }},
      {"conv2d", [] { return one(Conv2d(2, 3, {3, 2}, {.stride = {2, 1}, .padding = {1, 0}})); }},
      {"conv3d", [] { return one(Conv3d(1, 2, 2, {.bias = false})); }},
      {"conv_transpose1d",
       [] { return one(ConvTranspose1d(2, 4, 3, {.stride = 2, .padding = 1, .output_padding = 1, .groups = 2})); }},
      {"conv_transpose2d", [] { return one(ConvTranspose2d(2, 3, 2, {.stride = 2})); }},
      {"batch_norm1d", [] { return one(BatchNorm1d(3)); }},
      {"batch_norm1d_length", [] { return one(BatchNorm1d(3, {.eps = 1e-3, .momentum = .3})); }},
      {"batch_norm2d", [] { return one(BatchNorm2d(2)); }},
      {"batch_norm2d_eval", [] { return one(BatchNorm2d(2)); }},
      {"batch_norm2d_untracked", [] { return one(BatchNorm2d(2, {.affine = false, .track_running_stats = false})); }},
      {"layer_norm", [] { return one(LayerNorm({3, 4}, {.eps = 1e-3})); }},
      {"rms_norm", [] { return one(RMSNorm(5)); }},
      {"group_norm", [] { return one(GroupNorm(2, 4)); }},
      {"instance_norm1d", [] { return one(InstanceNorm1d(3)); }},
      {"instance_norm2d", [] { return one(InstanceNorm2d(2, {.affine = true})); }},
      {"embedding", [] { return one(Embedding(5, 3, {.padding_idx = 1})); }},
      {"rnn", [] { return network(RNN(2, 3, {.layers = 2, .bidirectional = true})); }},
      {"rnn_relu",
       [] {
         return network(RNN(2, 3, {.nonlinearity = RecurrentNonlinearity::relu, .bias = false, .batch_first = true}));
       }},
      {"lstm",
       [] {
         return made(LSTM(2, 3, both), [](LSTM& m, const List& x) {
           auto [y, h, c] = m(x[0], {x[1], x[2]});
           return List{y, h, c};
         });
       }},
      {"lstm_batch_first", [] { return one(LSTM(2, 3, {.batch_first = true})); }},
      {"gru", [] { return network(GRU(2, 3, both)); }},
      {"rnn_cell", [] { return two(RNNCell(2, 3)); }},
      {"lstm_cell",
       [] {
         return made(LSTMCell(2, 3), [](LSTMCell& m, const List& x) {
           auto [h, c] = m(x[0], {x[1], x[2]});
           return List{h, c};
         });
       }},
      {"gru_cell", [] { return two(GRUCell(2, 3)); }},
      {"attention", [] { return one(MultiheadAttention(4, 2)); }},
      {"attention_cross",
       [] {
         return made(MultiheadAttention(4, 2, {.batch_first = true}),
                     [](MultiheadAttention& m, const List& x) { return List{m(x[0], x[1], x[1])}; });
       }},
      {"attention_widths",
       [] {
         return made(MultiheadAttention(4, 2, {.bias = false, .kdim = 3, .vdim = 2}),
                     [](MultiheadAttention& m, const List& x) { return List{m(x[0], x[1], x[2])}; });
       }},
      {"attention_masked",
       [] {
         return made(MultiheadAttention(4, 2), [](MultiheadAttention& m, const List& x) {
           return List{m(x[0], x[0], x[0], masked(x[0].device()))};
         });
       }},
      {"encoder_layer", [] { return one(TransformerEncoderLayer(4, 2, {.feedforward = 6, .dropout = 0})); }},
      {"encoder_layer_first",
       [] {
         return one(TransformerEncoderLayer(
             4, 2, {.feedforward = 6, .dropout = 0, .activation = Activation::gelu, .batch_first = true, .norm_first = true}));
       }},
      {"decoder_layer",
       [] {
         return made(TransformerDecoderLayer(4, 2, {.feedforward = 6, .dropout = 0}),
                     [](TransformerDecoderLayer& m, const List& x) { return List{m(x[0], x[1], {.causal = true})}; });
       }},
      {"decoder_layer_first",
       [] { return two(TransformerDecoderLayer(4, 2, {.feedforward = 6, .dropout = 0, .norm_first = true})); }},
      {"prelu", [] { return one(PReLU(3)); }},
      {"activations",
       [] {
         return made(activations(), [](ModuleList& m, const List& x) {
           List y;
           for (auto& f : m) y.push_back(f(x[0]));
           return y;
         });
       }},
      {"glu", [] { return one(GLU(1)); }},
      {"upsample", [] { return one(Upsample(2, {.mode = Interpolation::bilinear, .align_corners = true})); }},
      {"pixel_shuffle", [] { return one(PixelShuffle(2)); }},
  };
  return all;
}

const StateDict& golden() {
  static const StateDict all = io::load(std::string(HALFTONE_SOURCE_DIR) + "/tests/golden/modules.safetensors");
  return all;
}
// The golden entries "name/what/*", without that.
StateDict part(const std::string& name, const std::string& what) {
  StateDict p;
  std::string prefix = name + "/" + what + "/";
  for (auto& [key, t] : golden())
    if (key.starts_with(prefix)) p.add(key.substr(prefix.size()), t);
  return p;
}
List numbered(const std::string& name, const std::string& what) {
  List all;
  while (const Tensor* t = golden().find(text::cat(name, "/", what, all.size()))) all.push_back(*t);
  return all;
}
// The case with its golden weights, in a dtype, and its inputs as leaves.
struct Ready {
  Case c;
  List x;
};
Ready ready(const std::string& name, const Case& c, DType t) {
  c.module->to(t);
  c.module->load_state_dict(part(name, "state"));
  c.module->train(!name.ends_with("_eval") && !name.ends_with("_untracked"));
  List x;
  for (auto& v : numbered(name, "x")) x.push_back(is_floating(v.dtype()) ? v.to(t).clone().requires_grad_() : v);
  return {c, x};
}
Tensor loss(const List& outputs) {
  Tensor total;
  for (auto& y : outputs) {
    Tensor weight = cos(arange(y.numel()).to(DType::f64) * .7).reshape(y.shape()).to(y.dtype());
    Tensor part = (y * weight).sum();
    total = total.defined() ? total + part : part;
  }
  return total;
}
void check_close(const Tensor& a, const Tensor& b, double tolerance) {
  REQUIRE(a.defined());
  REQUIRE(a.shape() == b.shape());
  auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) REQUIRE(x[i] == Approx(y[i]).epsilon(tolerance).margin(tolerance));
}
bool finite(const Tensor& t) {
  for (double v : t.detach().to_vector<double>())
    if (!std::isfinite(v)) return false;
  return true;
}

}  // namespace

TEST_CASE("modules are PyTorch's: names, outputs, gradients, buffers") {
  for (auto& [name, make] : cases()) {
    INFO(name);
    auto [c, x] = ready(name, make(), DType::f64);
    std::string names, expected;
    for (auto& [key, t] : c.module->state_dict()) names += key + " ";
    for (auto& [key, t] : part(name, "state")) expected += key + " ";
    CHECK(names == expected);

    List y = c.call(x), want = numbered(name, "y");
    REQUIRE(y.size() == want.size());
    for (size_t i = 0; i < y.size(); ++i) check_close(y[i].detach(), want[i], 1e-11);
    loss(y).backward();
    double tolerance = name == "activations" ? 1e-7 : 1e-9;  // PyTorch keeps some of their slopes in f32
    for (size_t i = 0; i < x.size(); ++i)
      if (x[i].requires_grad()) check_close(x[i].grad(), golden().at(text::cat(name, "/dx", i)), tolerance);
    for (auto& [key, p] : c.module->named_parameters()) {
      INFO(key);
      check_close(p.grad(), golden().at(text::cat(name, "/grad/", key)), 1e-9);
    }
    for (auto& [key, b] : c.module->named_buffers()) check_close(b, golden().at(text::cat(name, "/after/", key)), 1e-12);
    tests::count("golden_cases");
  }
}

TEST_CASE("modules run under autocast, forward and back, with f32 gradients") {
  for (auto& [name, make] : cases())
    for (DType t : {DType::bf16, DType::f16}) {
      INFO(name << " " << str(t));
      auto [c, x] = ready(name, make(), DType::f32);
      List y, want = numbered(name, "y");
      {
        amp::Autocast autocast({.dtype = t});
        y = c.call(x);
      }
      for (size_t i = 0; i < y.size(); ++i) check_close(y[i].detach(), want[i], .25);
      loss(y).backward();
      for (auto& p : c.module->parameters()) {
        REQUIRE(p.grad().defined());
        CHECK(p.grad().dtype() == DType::f32);
        CHECK(finite(p.grad()));
      }
    }
}

TEST_CASE("modules run in 16 bits, but for what keeps f32") {
  for (auto& [name, make] : cases())
    for (DType t : {DType::bf16, DType::f16}) {
      INFO(name << " " << str(t));
      auto [c, x] = ready(name, make(), t);
      DType kept = c.module->keeps_f32() ? DType::f32 : t;
      for (auto& p : c.module->parameters()) CHECK(p.dtype() == kept);
      List y = c.call(x);
      for (auto& v : y) {
        CHECK(v.dtype() == t);
        CHECK(finite(v));
      }
      loss(y).backward();
      for (auto& p : c.module->parameters()) CHECK(p.grad().dtype() == kept);
    }
}

TEST_CASE("a clone computes the same and shares nothing; frozen modules get no gradients") {
  for (auto& [name, make] : cases()) {
    INFO(name);
    auto [c, x] = ready(name, make(), DType::f32);
    Case copy = c.clone();
    c.module->requires_grad_(false);
    List y = c.call(x), z = copy.call(x);
    for (size_t i = 0; i < y.size(); ++i) CHECK(y[i].to_vector<float>() == z[i].to_vector<float>());
    if (y[0].requires_grad()) loss(y).backward();
    for (auto& p : c.module->parameters()) CHECK_FALSE(p.grad().defined());
    auto a = c.module->state_dict(), b = copy.module->state_dict();
    REQUIRE(a.size() == b.size());
    for (auto& [key, t] : a) {
      CHECK(t.storage() != b.at(key).storage());
      CHECK(t.to_vector<double>() == b.at(key).to_vector<double>());
    }
  }
}

TEST_CASE("state goes round through a file") {
  Temporary folder;
  for (auto& [name, make] : cases()) {
    INFO(name);
    auto [c, x] = ready(name, make(), DType::f64);
    io::save(folder / "state.safetensors", c.module->state_dict());
    Case fresh = make();
    fresh.module->to(DType::f64).train(c.module->training());
    fresh.module->load_state_dict(io::load(folder / "state.safetensors"));
    List y = c.call(x), z = fresh.call(x);
    for (size_t i = 0; i < y.size(); ++i) CHECK(y[i].to_vector<double>() == z[i].to_vector<double>());
  }
}
