// PyTorch's tests of autocast and of its gradient scaler (test_autocast.py, test_cuda.py and test_torch.py, late 2025): each is written
// anew here and carries its name. They pass as PyTorch's do but for the deviations listed first, each decided; no other test may deviate.
#include <optional>
#include <thread>

#include "halftone/tests/reports.h"

using namespace halftone;
using namespace halftone::tests;
using amp::Autocast;
using amp::GradScaler;
using Catch::Contains;

namespace {

// ---- expected deviations

// Operators that run in other dtypes than on PyTorch's lists for CUDA.
struct Operator { const char *name, *because; };
constexpr Operator other_policy[] = {
    {"softmax", "16 bits in and out, f32 inside: the output is rounded at the next product anyway"},
    {"layer_norm", "the same"},
    {"group_norm", "the same"},
    {"rms_norm", "the same"},
    {"sum", "the same; f32 where the result is one number, which may be a loss"},
    {"mean", "in 16 bits as PyTorch's; f32 where the result is one number"},
    {"resize", "the same; its gradient sums in f32"},
    {"log_softmax", "reads 16 bits, computes and returns f32: no f32 copy of the logits"},
    {"cross_entropy", "the same"},
    {"nll_loss", "the same"},
};
// Tests of whose claims one is decided otherwise.
struct Claim { const char *test, *theirs, *ours; };
constexpr Claim other_claims[] = {
    {"test_autocast_banned", "binary_cross_entropy is an error", "an error for f16; bf16 has the range of f32"},
    {"test_autocast_custom_cast_inputs", "tensors in nested containers are cast", "arguments that are tensors are cast; others are handed on as they are"},
    {"test_autocast_checkpointing", "reentrant and not", "one form, which is differentiable at any order"},
    {"test_autocast_rnn", "without autocast an f32 input of 16-bit weights is an error; a cell state has 16 bits", "it is one; a cell state has x's dtype"},
    {"test_grad_scaling_unscale", "gradients of several dtypes in one raw call are an error", "they are unscaled each in its own"},
    {"test_grad_scaling_update_scale", "the tracker is 0 after an overflow", "the streak counts skipped steps below 0"},
    {"test_grad_scaling_scale", "losses may lie on several devices", "a scaler's losses lie on one"},
    {"test_grad_scaling_clipping", "scaled gradients may be clipped to max_norm * scale", "refused: unscale_ first, or step(opt, {.clip_norm = ...})"},
    {"test_grad_scaler_with_preset_grad_scale", "gradients are divided by grad_scale", "a step multiplies by StepControls::grad_scale, an inverse"},
    {"test_graph_grad_scaling", "the tracker is 0 after an overflow", "the streak counts skipped steps below 0"},
};
// What PyTorch tests and Halftone does not have: packed sequences (test_rnn_packed_sequence_batch_sizes_must_be_cpu), sparse
// gradients (test_grad_scaling_unscale_sparse, test_scaling_unscaling_sparse), Python's spellings (test_*_deprecated_warning,
// test_generic_autocast, test_non_string_device), optimizers that ask for the scaler (test_grad_scaler_pass_itself), devices as keys
// (test_grad_scaling_device_as_key), one scaler over several devices (test_grad_scaling_multigpu), MPS (test_mps_*), FSDP
// (test_grad_scaling, test_fsdp_ddp_parity_with_grad_scaler). A pickle is a state here.

// Marks a claim that differs, which must be on the list.
void deviates(const char* test) {
  bool listed = false;
  for (auto& c : other_claims) listed |= std::string_view(c.test) == test;
  REQUIRE(listed);
}

// ---- PyTorch's lists for CUDA, for what has one name here

struct Listed { const char* name; Cast theirs; };
constexpr Listed lists[] = {
    {"matmul", Cast::lower}, {"linear", Cast::lower}, {"conv", Cast::lower}, {"conv_input", Cast::lower}, {"attention", Cast::lower}, {"prelu", Cast::lower},
    {"bmm", Cast::lower}, {"addmm", Cast::lower}, {"baddbmm", Cast::lower}, {"einsum", Cast::lower}, {"dot", Cast::widest},
    {"acos", Cast::full}, {"asin", Cast::full}, {"cosh", Cast::full}, {"erfinv", Cast::full}, {"exp", Cast::full}, {"expm1", Cast::full},
    {"log", Cast::full}, {"log10", Cast::full}, {"log2", Cast::full}, {"log1p", Cast::full}, {"reciprocal", Cast::full}, {"rsqrt", Cast::full},
    {"sinh", Cast::full}, {"tan", Cast::full}, {"pow", Cast::full}, {"pow_tensor", Cast::full}, {"softplus", Cast::full},
    {"layer_norm", Cast::full}, {"group_norm", Cast::full}, {"rms_norm", Cast::full}, {"logsumexp", Cast::full}, {"norm", Cast::full},
    {"nll_loss", Cast::full}, {"cross_entropy", Cast::full}, {"kl_div", Cast::full}, {"l1_loss", Cast::full}, {"smooth_l1_loss", Cast::full},
    {"huber_loss", Cast::full}, {"mse_loss", Cast::full}, {"squared_error", Cast::full}, {"binary_cross_entropy_with_logits", Cast::full},
    {"resize", Cast::full}, {"prod", Cast::full}, {"softmax", Cast::full}, {"log_softmax", Cast::full}, {"cumprod", Cast::full}, {"cumsum", Cast::full},
    {"sum", Cast::full},
    {"addcdiv", Cast::widest}, {"addcmul", Cast::widest}, {"atan2", Cast::widest}, {"scatter_add", Cast::widest}, {"cat", Cast::widest},
    {"binary_cross_entropy", Cast::banned},
    // On no list.
    {"batch_norm", Cast::keep}, {"gelu", Cast::keep}, {"relu", Cast::keep}, {"silu", Cast::keep}, {"sigmoid", Cast::keep}, {"tanh", Cast::keep},
    {"dropout", Cast::keep}, {"avg_pool", Cast::keep}, {"max_pool", Cast::keep}, {"mean", Cast::keep}, {"var", Cast::keep}, {"std", Cast::keep},
    {"amax", Cast::keep}, {"amin", Cast::keep}, {"add", Cast::keep}, {"sub", Cast::keep}, {"mul", Cast::keep}, {"div", Cast::keep}, {"abs", Cast::keep},
    {"neg", Cast::keep}, {"sqrt", Cast::keep}, {"erf", Cast::keep}, {"sin", Cast::keep}, {"cos", Cast::keep}};

bool policy_differs(std::string_view name) {
  for (auto& o : other_policy) if (o.name == name) return true;
  return false;
}
// Calls f(operator, sample) for the operators that are here of one of PyTorch's lists.
template <class F> void each_listed(Cast list, F f) {
  for (auto& l : lists) {
    const OpDef* op = find_op(l.name);
    if (l.theirs != list || !op || policy_differs(l.name)) continue;
    INFO(l.name);
    for (auto& s : op->samples()) f(*op, s);
  }
}
Tensors inputs_on(const Sample& s, DType t, Device d) {
  Tensors in = make_inputs(s, t);
  for (auto& x : in) if (x.defined()) x = x.to(d);
  return in;
}
Tensors all_to(const Tensors& in, DType t) {
  Tensors out = in;
  for (auto& x : out) if (x.defined() && is_floating(x.dtype())) x = x.to(t);
  return out;
}
// PyTorch's _run_autocast_outofplace: autocast is off before, on inside, off in a nested region, on after it, off at the end; the result has
// `out`'s dtype and the bits of a control whose arguments are cast by hand to `as`.
void run_autocast_outofplace(const OpDef& op, const Sample& s, Device d, DType region, DType given, DType as) {
  if (!supports(op, s, f32) || !contains(op.dtypes[static_cast<size_t>(d.type)], as)) return;
  Tensors in = inputs_on(s, given, d);
  CHECK_FALSE(amp::is_autocast_enabled(d.type));
  std::vector<Tensor> got, control;
  {
    Autocast on({.dtype = region});
    CHECK(amp::is_autocast_enabled(d.type));
    got = results(op, in, s.attrs);
    {
      Autocast off({.enabled = false});
      CHECK_FALSE(amp::is_autocast_enabled(d.type));
      control = results(op, all_to(in, as), s.attrs);
    }
    CHECK(amp::is_autocast_enabled(d.type));
  }
  CHECK_FALSE(amp::is_autocast_enabled(d.type));
  CHECK(same_bits(got, control));
}

void each_lower(DType region) {
  on_devices([&](Device d) {
    each_listed(Cast::lower, [&](const OpDef& op, const Sample& s) {
      for (DType given : {f32, region}) {
        run_autocast_outofplace(op, s, d, region, given, region);
        if (!supports(op, s, f32)) continue;
        Autocast on({.dtype = region});
        CHECK(call_all(op, inputs_on(s, given, d), s.attrs)[0].dtype() == region);
      }
    });
  });
}
void each_full() {
  everywhere([](Device d, DType t) {
    each_listed(Cast::full, [&](const OpDef& op, const Sample& s) {
      for (DType given : {t, f32}) {
        run_autocast_outofplace(op, s, d, t, given, f32);
        if (!supports(op, s, f32)) continue;
        Autocast on({.dtype = t});
        CHECK(call_all(op, inputs_on(s, given, d), s.attrs)[0].dtype() == f32);
      }
    });
  });
}

}  // namespace

// ---- TestAutocastCPU, TestCudaAutocast

TEST_CASE("every operator of PyTorch's lists has its policy, but for the deviations") {
  for (auto& l : lists) {
    const OpDef* op = find_op(l.name);
    if (!op) continue;
    INFO(l.name);
    CHECK((op->cast == l.theirs) == !policy_differs(l.name));
  }
  // Those that differ are as exact: what they give from 16 bits is what f32 gives, rounded once if at all.
  everywhere([](Device d, DType t) {
    for (auto& o : other_policy) {
      const OpDef* op = find_op(o.name);
      if (!op) continue;
      for (auto& s : op->samples()) {
        if (!supports(*op, s, t)) continue;
        INFO(o.name);
        Tensors in = inputs_on(s, t, d);
        Autocast on({.dtype = t});
        Tensor low = call_all(*op, in, s.attrs)[0];
        Autocast off({.enabled = false});
        Tensor wide = call_all(*op, all_to(in, f32), s.attrs)[0];
        if (in[0].numel() == 0) continue;  // no result, or a mean of nothing
        double unit = low.dtype() == f32 ? 1e-5 : t == f16 ? 0x1p-10 : 0x1p-7;
        CHECK(amax(abs(low.to(f64) - wide.to(f64)) - abs(wide.to(f64)) * unit).item() <= 1e-6);
      }
    }
  });
}

TEST_CASE("test_autocast_torch_fp16, test_autocast_nn_fp16, test_autocast_linalg_fp16, test_autocast_methods_fp16") { each_lower(f16); }
TEST_CASE("test_autocast_torch_bf16, test_autocast_nn_bf16, test_autocast_torch_16, test_autocast_nn_16") { each_lower(bf16); }
TEST_CASE("test_autocast_torch_fp32, test_autocast_nn_fp32, test_autocast_methods_fp32") { each_full(); }

TEST_CASE("test_autocast_torch_need_autocast_promote") {
  everywhere([](Device d, DType t) {
    each_listed(Cast::widest, [&](const OpDef& op, const Sample& s) {
      if (!supports(op, s, f32) || s.in.size() < 2) return;
      run_autocast_outofplace(op, s, d, t, t, t);
      run_autocast_outofplace(op, s, d, t, f32, f32);
      Tensors mixed = inputs_on(s, t, d);
      bool first = true;
      for (auto& x : mixed)
        if (x.defined() && is_floating(x.dtype()) && std::exchange(first, false)) x = x.to(f32);
      if (first) return;
      std::vector<Tensor> control = results(op, all_to(mixed, f32), s.attrs);
      Autocast on({.dtype = t});
      CHECK(same_bits(results(op, mixed, s.attrs), control));
    });
  });
}

TEST_CASE("test_autocast_torch_expect_builtin_promote, test_autocast_methods_expect_builtin_promote, test_autocast_cat_jit") {
  everywhere([](Device d, DType t) {
    Tensor low = ones({8}, {.dtype = t, .device = d}), high = full({8}, 2, {.device = d});
    Autocast on({.dtype = t});
    for (bool mixed : {false, true}) {
      Tensor other = mixed ? high : low;
      DType expected = mixed ? f32 : t;
      for (auto& y : {eq(low, other), ge(low, other), gt(low, other), le(low, other), lt(low, other), ne(low, other)}) CHECK(y.dtype() == DType::b8);
      for (auto& y : {add(low, other), div(low, other), mul(low, other), low + other, low / other, low * other, other - low, cat({low, other}),
                      stack({low, other}), stack({other, low}, 1)})
        CHECK(y.dtype() == expected);
    }
    CHECK(cat({low, high, low}).dtype() == f32);
  });
}

TEST_CASE("test_autocast_disabled_with_fp32_dtype") {
  Autocast off({.dtype = f32, .enabled = false});
  CHECK_FALSE(amp::is_autocast_enabled());
  Autocast on;
  CHECK(amp::autocast_dtype() == bf16);  // f32 is no dtype to inherit
  CHECK_THROWS_WITH(Autocast({.dtype = f32}), Contains("expected dtype f16 or bf16, got f32"));
}

TEST_CASE("test_autocast_banned") {
  deviates("test_autocast_banned");
  const OpDef* bce = find_op("binary_cross_entropy");
  if (!bce) HT_SKIP("this build has no binary_cross_entropy");
  on_devices([&](Device d) {
    auto p = [&](DType t) { return full({4}, 0.5, {.dtype = t, .device = d}); };
    {
      Autocast on({.dtype = f16});
      CHECK_THROWS_WITH(call(*bce, {p(f16), p(f16)}, bce->samples()[0].attrs), Contains("unsafe under f16 autocast; use"));
    }
    Autocast on({.dtype = bf16});
    CHECK_NOTHROW(call(*bce, {p(bf16), p(bf16)}, bce->samples()[0].attrs));
  });
}

TEST_CASE("test_autocast_ignored_types") {
  everywhere([](Device d, DType t) {
    Tensor c = ones({8, 8}, {.dtype = t, .device = d});
    for (DType ignored : {f64, DType::i32}) {
      Tensor a = ones({8, 8}, {.dtype = ignored, .device = d}), b = a * 2;
      auto each = [&] {
        std::vector<Tensor> y{a + b, a * b, cat({a, b}), sum(a), gt(a, b)};
        if (ignored == f64) for (auto& z : {matmul(a, b), linear(a, b), exp(a), pow(a, 2), softmax(a, 1), mean(a), mse_loss(a, b)}) y.push_back(z);
        return y;
      };
      auto control = each();
      Autocast on({.dtype = t});
      CHECK(same_bits(each(), control));
      if (ignored == f64) CHECK_THROWS_WITH(matmul(a, c), "matmul: expected one dtype, got f64 and " + str(t) + "; cast one with to() or use amp::Autocast");
    }
  });
}

namespace {
bool enabled_in_forward, enabled_in_backward;
DType forward_a, forward_b, backward_g;
template <FunctionCast how> struct MyMM : Function<MyMM<how>> {
  static constexpr FunctionCast cast = how;
  static Tensor forward(Context& ctx, const Tensor& a, const Tensor& b, const std::vector<Tensor>& container) {
    enabled_in_forward = amp::is_autocast_enabled(a.device().type);
    forward_a = a.dtype();
    forward_b = container.empty() ? b.dtype() : container[0].dtype();
    ctx.save(a, b);
    return matmul(a, b);
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) {
    auto& [a, b] = ctx.template saved<Tensor, Tensor>();
    enabled_in_backward = amp::is_autocast_enabled(a.device().type);
    backward_g = g.dtype();
    return {matmul(g, b.t()).to(a.dtype()), matmul(a.t(), g).to(b.dtype())};
  }
};
}  // namespace

TEST_CASE("test_autocast_custom_enabled") {
  everywhere([](Device d, DType t) {
    Tensor x = randn({8, 8}, {.device = d, .requires_grad = true}), y = randn({8, 8}, {.device = d, .requires_grad = true}), loss;
    for (bool inside : {false, true}) {
      {
        Autocast on({.dtype = t});
        Tensor out = MyMM<FunctionCast::any>::apply(x, y, std::vector<Tensor>{});
        CHECK(out.dtype() == t);
        loss = out.sum();
        if (inside) loss.backward();
      }
      if (!inside) loss.backward();
      CHECK((forward_a == f32 && forward_b == f32 && backward_g == t));
      CHECK((enabled_in_forward && enabled_in_backward));
      CHECK((x.grad().dtype() == f32 && y.grad().dtype() == f32));
    }
  });
}

TEST_CASE("test_autocast_custom_cast_inputs") {
  deviates("test_autocast_custom_cast_inputs");
  everywhere([](Device d, DType t) {
    Tensor x = randn({8, 8}, {.dtype = t, .device = d, .requires_grad = true}), y = randn({8, 8}, {.dtype = t, .device = d, .requires_grad = true});
    {
      Autocast on({.dtype = t});
      Tensor out = MyMM<FunctionCast::f32>::apply(x, y, std::vector<Tensor>{});
      CHECK((out.dtype() == f32 && forward_a == f32 && forward_b == f32 && !enabled_in_forward));
      MyMM<FunctionCast::f32>::apply(x, y, std::vector<Tensor>{y});
      CHECK(forward_b == t);
      Tensor loss = out.sum();
      loss.backward();
      CHECK_FALSE(enabled_in_backward);
      CHECK((backward_g == f32 && x.grad().dtype() == t));
    }
    Tensor out = MyMM<FunctionCast::f32>::apply(x, y, std::vector<Tensor>{});
    CHECK((out.dtype() == t && forward_a == t && forward_b == t));
    out.sum().backward();
    CHECK(backward_g == t);
  });
}

namespace {

// f(x, h0) of a recurrent network, with the gradients of what it got and of its weights.
struct Recurrence { std::vector<Tensor> y, g; };
template <class Net> Recurrence recur(Net& net, const Tensor& x0, const Tensor& h0) {
  Tensor x = x0.detach().requires_grad_(), h = h0.detach().requires_grad_();
  Recurrence r;
  if constexpr (std::same_as<Net, nn::LSTM>) {
    auto y = net(x, nn::LSTMState{h, h.detach().to(x.dtype())});
    r.y = {y.output, y.h, y.c};
  } else {
    auto y = net(x, h);
    r.y = {y.output, y.h};
  }
  for (auto& p : net.parameters()) p.zero_grad();
  weighed(r.y).backward();
  r.g = {x.grad(), h.grad()};
  for (auto& p : net.parameters()) r.g.push_back(p.grad());
  for (auto& t : r.y) t = t.detach();
  return r;
}
template <class Net> void check_recurrent(Device d, DType t) {
  for (int layers : {1, 2})
    for (bool bias : {true, false})
      for (bool batch_first : {false, true})
        for (bool bidirectional : {false, true}) {
          manual_seed(3);
          Net net(5, 4, {.layers = layers, .bias = bias, .batch_first = batch_first, .bidirectional = bidirectional});
          net.to(d);
          Tensor x = randn({3, 3, 5}, {.device = d}), h = randn({layers * (bidirectional ? 2 : 1), 3, 4}, {.device = d});
          auto half = net.clone();
          half.to(t);
          Recurrence control = recur(half, x.to(t), h.to(t));
          for (DType weights : {f32, t})
            for (DType input : {f32, t})
              for (DType hidden : {f32, t}) {
                INFO(layers << bias << batch_first << bidirectional << ", weights " << str(weights) << ", input " << str(input) << ", hidden " << str(hidden));
                auto mixed = net.clone();
                mixed.to(weights);
                Recurrence got;
                {
                  Autocast on({.dtype = t});
                  got = recur(mixed, x.to(input), h.to(hidden));
                }
                CHECK(got.y[0].dtype() == t);
                bool same = input == t || !std::same_as<Net, nn::LSTM>;  // a cell state of f32 is better
                double unit = t == f16 ? 0x1p-10 : 0x1p-7;
                for (size_t i = 0; i < control.y.size(); ++i)
                  CHECK((same ? same_bits(got.y[i], control.y[i]) : amax(abs(got.y[i].to(f32) - control.y[i].to(f32))).item() <= 4 * unit));
                CHECK((got.g[0].dtype() == input && got.g[1].dtype() == hidden && got.g[2].dtype() == weights));
                for (size_t i = 0; i < control.g.size(); ++i) {
                  double largest = amax(abs(control.g[i].to(f32))).item();
                  CHECK(amax(abs(got.g[i].to(f32) - control.g[i].to(f32))).item() <= 16 * unit * largest);
                }
              }
        }
}

}  // namespace

TEST_CASE("test_autocast_rnn") {
  deviates("test_autocast_rnn");
  everywhere([](Device d, DType t) {
    check_recurrent<nn::LSTM>(d, t);
    check_recurrent<nn::GRU>(d, t);
    check_recurrent<nn::RNN>(d, t);
    nn::LSTM net(5, 4);
    net.to(d).to(t);
    Tensor x = randn({3, 2, 5}, {.device = d});
    CHECK_THROWS_WITH(net(x), Contains("linear: expected weight in x's dtype f32, got [16, 5] (" + str(t) + ")"));
    Autocast on({.dtype = t});
    CHECK(net(x).dtype() == t);
  });
}

namespace {
struct CustomLinear : Function<CustomLinear> {
  static Tensor forward(Context& ctx, const Tensor& x, const Tensor& w) {
    ctx.save(x, w);
    return linear(x, w);
  }
  static std::vector<Tensor> backward(Context& ctx, const Tensor& g) {
    auto& [x, w] = ctx.saved<Tensor, Tensor>();
    Autocast on({.dtype = g.dtype()});
    Tensor gx = matmul(g, w), gw = matmul(g.t(), x);
    return {gx.to(f32), gw.to(f32)};
  }
};
int64_t casts_of_the_weight(Device d, DType t, bool cache) {
  Tensor x = randn({2, 3}, {.device = d, .requires_grad = true}), w = randn({4, 3}, {.device = d, .requires_grad = true});
  amp::Trace trace = amp::trace([&] {
    Autocast on({.dtype = t, .cache = cache});
    CustomLinear::apply(x, w).sum().backward();
  });
  CHECK((w.grad().dtype() == f32 && w.grad().shape() == Shape{4, 3}));
  return std::count_if(trace.lines.begin(), trace.lines.end(),
                       [&](auto& l) { return l.op == "cast" && l.in[0].shape == Shape{4, 3} && l.in[0].dtype == f32 && l.out[0].dtype == t; });
}
}  // namespace

TEST_CASE("test_cast_cache_is_global") {
  everywhere([](Device d, DType t) { CHECK(casts_of_the_weight(d, t, true) == 1); });
}
TEST_CASE("test_cache_disabled") {
  everywhere([](Device d, DType t) { CHECK(casts_of_the_weight(d, t, false) == 2); });
}

TEST_CASE("test_autocast_prioritize") {
  on_devices([](Device d) {
    Tensor x = randn({4, 4}, {.dtype = bf16, .device = d, .requires_grad = true}), loss;
    {
      Autocast on({.dtype = bf16});
      loss = where(gt(x, 0), x, cat({x.slice(0, 1, 4), x.slice(0, 0, 1)})).sum();
    }
    std::thread([&] { loss.backward(); }).join();
    CHECK(x.grad().dtype() == bf16);
  });
}

TEST_CASE("test_autocast_cache_leak") {
  everywhere([](Device d, DType t) {
    nn::Linear layer(10, 10);
    layer.to(d);
    Tensor x = randn({10}, {.device = d});
    Autocast on({.dtype = t});
    NoGrad off;
    for (int i = 0; i < 2; ++i) layer(x);  // the second may pack its weights for those to come
    int64_t second = memory_stats(d).allocated;
    for (int i = 0; i < 3; ++i) {
      layer(x);
      CHECK(memory_stats(d).allocated == second);
    }
  });
}

TEST_CASE("test_autocast_checkpointing") {
  deviates("test_autocast_checkpointing");
  everywhere([](Device d, DType t) {
    nn::Sequential model{nn::Linear(8, 8), nn::Linear(8, 8), nn::Linear(8, 8)};
    model.to(d);
    Tensor x = rand({8, 8}, {.device = d}).to(t).requires_grad_();
    Tensor y;
    {
      Autocast on({.dtype = t});
      y = checkpoint(std::ref(model), x);
    }
    CHECK(y.requires_grad());
    CHECK(y.dtype() == t);
    y.sum().backward();
    CHECK(x.grad().dtype() == t);
  });
}

TEST_CASE("test_autocast_fast_dtype, test_invalid_device") {
  Autocast on;
  CHECK(amp::autocast_dtype(DeviceType::cuda) == f16);
  CHECK(amp::autocast_dtype(DeviceType::cpu) == bf16);
  CHECK_THROWS_AS(device("not a real device"), Error);
}

// ---- GradScaler

namespace {

struct Model {
  nn::Sequential net{nn::Linear(8, 8), nn::Linear(8, 8)};
  std::unique_ptr<optim::Optimizer> opt;
  Model(Device d, int kind) {
    net.to(d);
    if (kind == 0) opt = std::make_unique<optim::SGD>(net.parameters(), optim::SGDOptions{.lr = 1});
    else if (kind == 1) opt = std::make_unique<optim::AdamW>(net.parameters(), optim::AdamWOptions{.lr = 1e-2});
    else opt = std::make_unique<optim::Adam>(net.parameters(), optim::AdamOptions{.lr = 1e-2});
  }
  Tensor last_weight() const { return net.parameters()[2]; }
};
struct Data { Tensor x, target; };
std::vector<Data> four_batches(Device d) {
  std::vector<Data> all;
  for (int i = 0; i < 4; ++i) {
    Tensor x = randn({8, 8}, {.device = d});
    all.push_back({x, randn({8, 8}, {.device = d})});
  }
  return all;
}
// One run over four batches. In `scaling`, the scaler is used and an inf is planted at batch 2, which the control skips.
constexpr int skip = 2;
using Run = std::function<void(const std::vector<Data>&, Model&, GradScaler&, bool scaling)>;
// PyTorch's _run_scaling_case.
void run_scaling_case(const Run& run, double atol, int kind = 0, double init = 128) {
  on_devices([&](Device d) {
    for (bool enabled : {true, false}) {
      INFO("enabled " << enabled);
      manual_seed(0);
      Model control(d, kind), scaled(d, kind);
      scaled.net.load_state_dict(control.net.state_dict());
      auto data = four_batches(d);
      GradScaler scaler({.init_scale = init, .growth_factor = 2, .growth_interval = 1, .enabled = enabled});
      run(data, control, scaler, false);
      run(data, scaled, scaler, true);
      CHECK(scaler.get_scale() == (enabled ? init * 2 * 2 * 2 * 0.5 : 1));
      auto a = control.net.parameters(), b = scaled.net.parameters();
      for (size_t i = 0; i < a.size(); ++i) CHECK(amax(abs(a[i].detach() - b[i].detach())).item() <= atol);
      for (auto& [name, t] : control.opt->state_dict()) {
        INFO(name);
        CHECK(amax(abs(t.to(f64) - scaled.opt->state_dict().at(name).to(f64))).item() <= atol);
      }
    }
  });
}
bool control_steps(const GradScaler& scaler, int i) { return !scaler.enabled() || i != skip; }

}  // namespace

TEST_CASE("test_grad_scaling_unscale") {
  deviates("test_grad_scaling_unscale");
  on_devices([](Device d) {
    auto strided = [&](int how, DType t) {
      Tensor g = full({10, 10}, 4, {.dtype = t, .device = d});
      return how == 0 ? g : how == 1 ? g.t() : g.slice(0, 0, 10).slice(1, 2, 8);
    };
    for (int how = 0; how < 3; ++how)
      for (DType t : {f32, f64, bf16})
        for (float bad : {0.f, inf, nan_})
          for (int64_t at : {0, 3, 5})
            for (size_t which : {size_t{0}, size_t{1}, size_t{2}}) {
              std::vector<Tensor> grads{strided(how, t), strided(0, t), strided(how, f32)};
              if (bad != 0) grads[which][at].slice(0, at, at + 1).fill_(bad);
              Tensor found = zeros({}, {.device = d}), inverse = full({}, 0.25, {.device = d});
              Tensors in{inverse, found};
              in.append(grads.data(), grads.data() + grads.size());
              call_all(*find_op("unscale"), std::move(in));
              CHECK((found.item() != 0) == (bad != 0));
              if (bad == 0) for (auto& g : grads) CHECK(all_are(g, 1));
            }
  });
}

TEST_CASE("test_grad_scaling_update_scale") {
  deviates("test_grad_scaling_update_scale");
  on_devices([](Device d) {
    Single s(d);
    GradScaler scaler({.init_scale = 4, .growth_factor = 2, .backoff_factor = 0.25, .growth_interval = 2});
    std::vector<double> scales, trackers;
    for (double g : {1., 1., double(inf)}) {
      s.iterate(scaler, g);
      scales.push_back(scaler.get_scale());
      trackers.push_back(scaler.state_dict().at("streak").item());
    }
    CHECK(scales == std::vector<double>{4, 8, 2});
    CHECK(trackers == std::vector<double>{1, 0, -1});
  });
}

TEST_CASE("test_grad_scale_will_not_overflow") {
  on_devices([](Device d) {
    nn::Linear layer(5, 1);
    layer.to(d);
    optim::Adam opt(layer.parameters());
    GradScaler scaler({.init_scale = 1e38, .growth_factor = 16, .growth_interval = 1, .max_scale = 3e38});
    scaler.scale(mse_loss(layer(randn({1, 5}, {.device = d})), randn({1, 1}, {.device = d}))).backward();
    scaler.step(opt);
    scaler.update();
    CHECK((std::isfinite(scaler.get_scale()) && scaler.get_scale() > 0));
  });
}

TEST_CASE("test_grad_scaling_scale") {
  deviates("test_grad_scaling_scale");
  on_devices([](Device d) {
    GradScaler scaler({.init_scale = 2});
    Tensor t = full({1}, 4, {.device = d});
    CHECK(all_are(scaler.scale(t), 8));
    CHECK(scaler.scale_tensor().device() == d);
    std::vector<Tensor> outputs{t.clone(), full({1}, 3, {.dtype = f64, .device = d}), full({2}, 1, {.dtype = f16, .device = d})};
    auto scaled = scaler.scale(outputs);
    CHECK((all_are(scaled[0], 8) && all_are(scaled[1], 6) && all_are(scaled[2], 2)));
    CHECK((scaled[0].dtype() == f32 && scaled[1].dtype() == f64 && scaled[2].dtype() == f32));
  });
}

TEST_CASE("test_grad_scaling_state_dict, test_pickle_gradscaler") {
  on_devices([](Device d) {
    for (bool lazy : {true, false}) {
      Single s(d);
      GradScaler a({.init_scale = 3, .growth_factor = 4, .backoff_factor = 0.5, .growth_interval = 2}), b({.init_scale = 6, .growth_factor = 4, .growth_interval = 2});
      s.iterate(a, 0);
      if (!lazy) s.iterate(b, 0);
      b.load_state_dict(a.state_dict().clone());
      CHECK((b.get_scale() == 3 && b.state_dict().at("streak").item() == 1));
      s.iterate(b, 0);
      CHECK(b.get_scale() == 12);
      CHECK(b.scale_tensor().device() == d);
    }
    CHECK(GradScaler({.enabled = false}).state_dict().size() == 0);
  });
}

namespace {
// Trains by `low`; `around` runs after backward.
Run autocast_run(std::optional<DType> low, bool unscale = false, bool reload = false) {
  return [=](const std::vector<Data>& data, Model& m, GradScaler& scaler, bool scaling) {
    for (int i = 0; i < 4; ++i) {
      m.opt->zero_grad();
      Tensor loss;
      {
        Autocast on({.dtype = low, .enabled = scaling && low});
        loss = mse_loss(m.net(data[size_t(i)].x), data[size_t(i)].target);
      }
      if (!scaling) {
        loss.backward();
        if (control_steps(scaler, i)) m.opt->step();
        continue;
      }
      scaler.scale(loss).backward();
      if (i == skip && scaler.enabled()) m.last_weight().grad().fill_(inf);
      if (unscale) scaler.unscale_(*m.opt);
      scaler.step(*m.opt);
      scaler.update();
      if (!reload) continue;
      GradScaler next({.init_scale = 7, .growth_factor = 2, .growth_interval = 1, .enabled = scaler.enabled()});
      if (scaler.enabled()) next.load_state_dict(scaler.state_dict().clone());
      scaler = std::move(next);
    }
  };
}
}  // namespace

TEST_CASE("test_grad_scaling_autocast") {
  for (bool reload : {false, true}) {
    run_scaling_case(autocast_run(f16, false, reload), 5e-3);
    run_scaling_case(autocast_run(bf16, false, reload), 3e-2);
  }
}
TEST_CASE("test_grad_scaling_autocast_foreach, test_grad_scaling_autocast_fused, test_grad_scaling_autocast_fused_optimizers") {
  for (int kind : {1, 2})
    for (bool unscale : {false, true}) run_scaling_case(autocast_run({}, unscale), 0, kind);  // without casts: every bit
}

TEST_CASE("test_grad_scaling_clipping") {
  deviates("test_grad_scaling_clipping");
  run_scaling_case(
      [](const std::vector<Data>& data, Model& m, GradScaler& scaler, bool scaling) {
        constexpr double max_norm = 0.2;
        for (int i = 0; i < 4; ++i) {
          m.opt->zero_grad();
          Tensor loss = mse_loss(m.net(data[size_t(i)].x), data[size_t(i)].target);
          if (!scaling) {
            loss.backward();
            optim::clip_grad_norm_(m.net.parameters(), max_norm);
            if (control_steps(scaler, i)) m.opt->step();
            continue;
          }
          scaler.scale(loss).backward();
          if (scaler.enabled()) CHECK_THROWS_WITH(optim::clip_grad_norm_(m.net.parameters(), max_norm * scaler.get_scale()), Contains("call unscale_ first"));
          if (i == skip && scaler.enabled()) m.last_weight().grad().fill_(inf);
          scaler.step(*m.opt, {.clip_norm = max_norm});
          scaler.update();
        }
      },
      1e-6);
}

TEST_CASE("test_grad_scaling_clipping_separate_unscale") {
  run_scaling_case(
      [](const std::vector<Data>& data, Model& m, GradScaler& scaler, bool scaling) {
        for (int i = 0; i < 4; ++i) {
          m.opt->zero_grad();
          Tensor loss = mse_loss(m.net(data[size_t(i)].x), data[size_t(i)].target);
          (scaling ? scaler.scale(loss) : loss).backward();
          if (scaling && i == skip && scaler.enabled()) m.last_weight().grad().fill_(inf);
          if (scaling) scaler.unscale_(*m.opt);
          optim::clip_grad_norm_(m.net.parameters(), 0.2);
          if (scaling) {
            scaler.step(*m.opt);
            scaler.update();
          } else if (control_steps(scaler, i)) m.opt->step();
        }
      },
      0);
}

TEST_CASE("test_grad_scaling_penalty") {
  run_scaling_case(
      [](const std::vector<Data>& data, Model& m, GradScaler& scaler, bool scaling) {
        for (int i = 0; i < 4; ++i) {
          m.opt->zero_grad();
          Tensor loss = mse_loss(m.net(data[size_t(i)].x), data[size_t(i)].target);
          auto g = grad({scaling ? scaler.scale(loss) : loss}, m.net.parameters(), {.create_graph = true});
          Tensor squares = zeros({});
          for (auto& p : g) squares = squares + (scaling && scaler.enabled() ? p * scaler.inverse_scale() : p).pow(2).sum();
          loss = loss + squares.sqrt();
          (scaling ? scaler.scale(loss) : loss).backward();
          if (scaling && i == skip && scaler.enabled()) m.last_weight().grad().fill_(inf);
          if (scaling) {
            scaler.step(*m.opt);
            scaler.update();
          } else if (control_steps(scaler, i)) m.opt->step();
        }
      },
      1e-5);
}

TEST_CASE("test_grad_scaling_accumulation") {
  on_devices([](Device d) {
    for (bool enabled : {true, false}) {
      manual_seed(0);
      Model control(d, 0), scaled(d, 0);
      scaled.net.load_state_dict(control.net.state_dict());
      auto data = four_batches(d);
      GradScaler scaler({.init_scale = 128, .growth_factor = 2, .growth_interval = 1, .enabled = enabled});
      for (int i = 0; i < 4; ++i) {
        auto loss = [&](Model& m) { return mse_loss(m.net(data[size_t(i)].x), data[size_t(i)].target) / 2; };
        loss(control).backward();
        scaler.scale(loss(scaled)).backward();
        if (i % 2 == 0) continue;
        control.opt->step();
        control.opt->zero_grad();
        scaler.step(*scaled.opt);
        scaler.update();
        scaled.opt->zero_grad();
      }
      CHECK(scaler.get_scale() == (enabled ? 128 * 4 : 1));
      auto a = control.net.parameters(), b = scaled.net.parameters();
      for (size_t i = 0; i < a.size(); ++i) CHECK(same_bits(a[i].detach(), b[i].detach()));
    }
  });
}

TEST_CASE("test_grad_scaling_multiple") {
  on_devices([](Device d) {
    for (bool enabled : {true, false}) {
      manual_seed(0);
      Model control0(d, 0), control1(d, 1), scaled0(d, 0), scaled1(d, 1);
      scaled0.net.load_state_dict(control0.net.state_dict());
      scaled1.net.load_state_dict(control1.net.state_dict());
      auto data = four_batches(d);
      GradScaler scaler({.init_scale = 128, .growth_factor = 2, .growth_interval = 1, .enabled = enabled});
      auto run = [&](Model& m0, Model& m1, bool scaling) {
        for (int i = 0; i < 4; ++i) {
          m0.opt->zero_grad();
          m1.opt->zero_grad();
          auto& [x, target] = data[size_t(i)];
          Tensor y0 = m0.net(x), y1 = m1.net(x);
          Tensor loss0 = mse_loss(y0 * 0.3 + y1 * 0.7, target), loss1 = mse_loss(y0 * 0.6 - y1 * 0.4, target);
          if (!scaling) {
            loss0.backward({.retain_graph = true});
            loss1.backward();
            m0.opt->step();
            if (control_steps(scaler, i)) m1.opt->step();
            continue;
          }
          scaler.scale(loss0).backward({.retain_graph = true});
          scaler.scale(loss1).backward();
          if (i == skip && enabled) m1.last_weight().grad().fill_(inf);
          scaler.unscale_(*m0.opt);
          scaler.step(*m0.opt);
          scaler.step(*m1.opt);
          scaler.update();
        }
      };
      run(control0, control1, false);
      run(scaled0, scaled1, true);
      CHECK(scaler.get_scale() == (enabled ? 128 * 8 * 0.5 : 1));
      for (auto [c, s] : {std::pair{&control0, &scaled0}, {&control1, &scaled1}}) {
        auto a = c->net.parameters(), b = s->net.parameters();
        for (size_t i = 0; i < a.size(); ++i) CHECK(same_bits(a[i].detach(), b[i].detach()));
      }
    }
  });
}

TEST_CASE("test_params_invalidated_with_grads_invalidated_between_unscale_and_step") {
  on_devices([](Device d) {
    for (double bad : {double(inf), -double(inf), double(nan_)}) {
      Single s(d);
      GradScaler scaler({.init_scale = 128});
      backward_with(scaler, s.p, 1);
      scaler.unscale_(s.opt);
      s.p.grad().fill_(bad);  // not looked at again
      scaler.step(s.opt);
      scaler.update();
      CHECK_FALSE(finite(s.p));
    }
  });
}

// ---- TestCudaOptims, FSDP

TEST_CASE("test_grad_scaler_with_preset_grad_scale") {
  deviates("test_grad_scaler_with_preset_grad_scale");
  on_devices([](Device d) {
    Tensor weight = ones({1}, {.device = d, .requires_grad = true});
    optim::SGD opt({weight}, {.lr = 1});
    weight.set_grad(full({1}, 15, {.device = d}));
    opt.step({.grad_scale = full({}, 1 / 15., {.device = d}), .found_inf = zeros({}, {.device = d})});
    CHECK(weight.detach().item() == Approx(0).margin(1e-6));
    CHECK(all_are(weight.grad(), 15));
  });
}

TEST_CASE("test_graph_grad_scaling") {
  deviates("test_graph_grad_scaling");
  on_devices([](Device d) {
    Tensor weight = ones({100}, {.device = d, .requires_grad = true});
    optim::SGD opt({weight}, {.lr = 0.1});
    GradScaler scaler({.init_scale = 4, .growth_factor = 2, .backoff_factor = 0.5, .growth_interval = 1000});
    auto step = capture([&](const Tensor& x) {
      opt.zero_grad();
      scaler.scale((weight.to(f16) * x.to(f16)).to(f32).sum()).backward();
      scaler.step(opt);
      scaler.update();
    });
    for (int warm_up = 0; warm_up < 3; ++warm_up) step(zeros({1}, {.device = d}));
    scaler.load_state_dict(GradScaler({.init_scale = 4}).state_dict());
    std::vector<double> scales, trackers, grads;
    for (float x : {5.f, 20000.f, 5.f, 40000.f}) {
      step(full({1}, x, {.device = d}));
      scales.push_back(scaler.get_scale());
      trackers.push_back(scaler.state_dict().at("streak").item());
      grads.push_back(weight.grad()[0].item());
    }
    CHECK(scales == std::vector<double>{4, 2, 2, 1});
    CHECK(trackers == std::vector<double>{1, -1, 1, -1});
    CHECK(grads == std::vector<double>{20, inf, 10, inf});
  });
}

TEST_CASE("test_graph_scaling_fused_optimizers") {
  on_devices([](Device d) {
    for (int kind : {0, 1, 2}) {
      auto run = [&](bool captured) {
        manual_seed(0);
        Model m(d, kind);
        auto data = four_batches(d);
        GradScaler scaler({.init_scale = 128, .growth_interval = 2});
        auto body = [&](const Tensor& x, const Tensor& target) {
          m.opt->zero_grad();
          scaler.scale(mse_loss(m.net(x), target)).backward();
          scaler.step(*m.opt);
          scaler.update();
        };
        auto step = capture(body);
        for (int i = 0; i < 8; ++i) {
          auto& [x, target] = data[size_t(i) % 4];
          Tensor planted = i == 5 ? target * inf : target;
          captured ? step(x, planted) : body(x, planted);
        }
        auto all = everything(*m.opt);
        all.push_back(scaler.scale_tensor().clone());
        return all;
      };
      CHECK(same_bits(run(true), run(false)));
    }
  });
}

TEST_CASE("test_inf_gradients_skip_optim_step") {
  on_devices([](Device d) {
    Single s(d);
    GradScaler scaler({.init_scale = 2});
    CHECK(s.iterate(scaler, inf).skipped());
    CHECK(all_are(s.p.detach(), 1));
  });
}
