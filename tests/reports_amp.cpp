// What users of other frameworks reported about autocast: copies of weights, dtypes of results, policies. Each test is named by its
// entry and by what is right.
#include "halftone/tests/reports.h"

using namespace halftone;
using namespace halftone::tests;
using amp::Autocast;
using Catch::Contains;

namespace {

using Use = Tensor (*)(const Tensor& x, const Tensor& w, const Tensor& b);
// Several ways in which a weight is used; `by_view` is a view of it, made anew at each call.
Tensor by_view(const Tensor& x, const Tensor& w, const Tensor& b) { return matmul(x, w.t()) + b; }
Tensor after_relu(const Tensor& x, const Tensor& w, const Tensor& b) { return linear(x, relu(w), b); }
Tensor twice(const Tensor& x, const Tensor& w, const Tensor& b) { return linear(x, w, b) + linear(x * 2, w, b); }
constexpr Use uses[] = {linear, linear_relu, linear_gelu, by_view, after_relu, twice};

int64_t allocated(Device d) { return memory_stats(d).allocated; }

}  // namespace

// ---- copies of weights

TEST_CASE("report_1: a forward under NoGrad leaves the weight's gradient to later ones") {
  tests::report("pytorch#112583");
  everywhere([](Device d, DType t) {
    for (Use f : uses) {
      auto trained = [&](int warm_up) {
        manual_seed(1);
        Tensor w = randn({5, 3}, {.device = d, .requires_grad = true}), b = randn({5}, {.device = d, .requires_grad = true});
        Tensor x = randn({4, 3}, {.device = d});
        Autocast region({.dtype = t});
        if (warm_up == 1) { NoGrad off; f(x, w, b); }
        if (warm_up == 2) { NoGrad off; Autocast inner({.dtype = other_than(t)}); f(x, w, b); }
        if (warm_up == 3) f(x, w.detach(), b.detach());
        if (warm_up == 4) { NoGrad off; f(x, w, b); EnableGrad on; f(x, w, b); }
        f(x, w, b).to(f32).sum().backward();
        return gradients({w, b});
      };
      auto expected = trained(0);
      CHECK((expected[0].defined() && expected[1].defined()));
      for (int warm_up = 1; warm_up <= 4; ++warm_up) CHECK(same_bits(trained(warm_up), expected));
    }
  });
}

TEST_CASE("report_2: memory is the same after ten calls and after a thousand") {
  tests::report("pytorch#46649");
  everywhere([](Device d, DType t) {
    int64_t before = allocated(d);
    {
      Net net(d);
      Tensor x = randn({4, 6}, {.device = d});
      Autocast region({.dtype = t});
      auto infer = [&] {
        NoGrad off;
        net(x);
        linear(x, net.w1.detach(), net.b1);
        matmul(x, net.w1.t());
        matmul(x, net.w1.slice(0, 0, 5).t());
        linear(x, net.w1.reshape({17, 6}).transpose(0, 1).contiguous().t());
      };
      auto train = [&] {
        for (auto& p : net.parameters()) p.zero_grad();
        net(x).to(f32).sum().backward();
        matmul(x, net.w1.t()).to(f32).sum().backward();
      };
      for (int i = 0; i < 10; ++i) infer(), train();
      int64_t after_ten = allocated(d);
      for (int i = 10; i < 1000; ++i) infer();
      for (int i = 10; i < 100; ++i) train();
      CHECK(allocated(d) == after_ten);
    }
    CHECK(allocated(d) == before);  // copies go with their weights
  });
}

TEST_CASE("report_3: inside one region, a forward sees what was written into the weight before it") {
  tests::report("X-GenGroup/Flow-Factory#186");
  everywhere([](Device d, DType t) {
    nn::Linear layer(6, 5);
    layer.to(d);
    nn::Linear averaged(6, 5);
    averaged.to(d);
    Tensor x = randn({4, 6}, {.device = d});
    optim::SGD opt(layer.parameters(), {.lr = 0.5, .momentum = 0.9});
    Autocast region({.dtype = t});
    auto current = [&] {
      NoGrad off;
      Tensor w = layer.weight.detach().to(t), b = layer.bias.detach().to(t), low = x.to(t);
      Autocast island({.enabled = false});
      return linear(low, w, b);
    };
    int written = 0;
    auto check = [&] {
      INFO("after write " << written++);
      CHECK(same_bits(layer(x), current()));
      CHECK(same_bits(layer(x), current()));
    };
    check();
    { NoGrad off; layer.weight.fill_(0); }
    CHECK(same_bits(layer(x), layer.bias.detach().to(t).expand({4, 5}).clone()));
    check();
    { NoGrad off; layer.weight.copy_(randn({5, 6}, {.device = d})); }
    check();
    for (int i = 0; i < 3; ++i) {  // the optimizer writes weights and copies
      opt.zero_grad();
      layer(x).to(f32).pow(2).sum().backward();
      opt.step();
      check();
    }
    { NoGrad off; layer.weight.lerp_(averaged.weight, 0.5); }
    check();
    layer.load_state_dict(averaged.state_dict());
    check();
    { NoGrad off; layer.weight.slice(0, 1, 3).mul_(2); }
    check();
    { NoGrad off; layer.weight.t()[2].zero_(); }
    check();
    layer.bias.set_(randn({5}, {.device = d}));
    check();
    { NoGrad off; layer.bias.add_(1); }
    check();
  });
}

// ---- dtypes of results

TEST_CASE("report_4: a chain of linear layers stays in 16 bits, whatever numbers and biases it meets") {
  tests::report("rwth-i6/returnn#1828");
  everywhere([](Device d, DType t) {
    std::vector<nn::Linear> chain;
    for (int i = 0; i < 4; ++i) chain.emplace_back(8, 8).to(d);
    Tensor x = randn({3, 8}, {.device = d});
    Autocast region({.dtype = t, .strict = true});
    Tensor h = x;
    amp::Trace trace = amp::trace([&] {
      for (auto& layer : chain) {
        h = relu(layer(h));
        CHECK(h.dtype() == t);
      }
    });
    INFO(trace);
    for (auto& line : trace.lines) for (auto& out : line.out) CHECK(out.dtype == t);
    const Tensor one = tensor(2.f), there = tensor(2.f).to(d);
    const std::pair<const char*, Tensor> results[] = {
        {"h + h", h + h}, {"h * 2.0", h * 2.0}, {"2.0 - h", 2.0 - h}, {"h / 3", h / 3}, {"h * tensor", h * one}, {"tensor / h", there / h},
        {"h - tensor on the device", h - there}, {"maximum", maximum(h, 0.5)}, {"minimum", minimum(h, one)}, {"where", where(gt(h, 0), h, 0.0)},
        {"square", square(h)}, {"tanh", tanh(h)}, {"softmax", softmax(h, 1)}, {"residual", h + chain[0](h)}, {"cat", cat({h, h})}, {"mean", h.mean(1)}};
    for (auto& [name, y] : results) {
      INFO(name);
      CHECK(y.dtype() == t);
    }
    CHECK_THROWS_WITH(cat({h, ones({3, 8}, {.device = d})}), Contains("cat: runs in f32 inside a strict"));
  });
}

TEST_CASE("report_4: a strict region names the sum with an f32 vector that climbs back to f32") {
  everywhere([](Device d, DType t) {
    Tensor h = ones({3, 8}, {.dtype = t, .device = d}), bias = ones({8}, {.device = d}), other = ones({8}, {.dtype = other_than(t), .device = d});
    Autocast region({.dtype = t, .strict = true});
    auto refused = [&](const char* op, DType wide) {
      return Contains(text::cat(op, ": runs in f32 inside a strict ", t, " region because an input [8] (", wide, ") is ", wide));
    };
    CHECK_THROWS_WITH(h + bias, refused("add", f32));
    CHECK_THROWS_WITH(bias - h, refused("sub", f32));
    CHECK_THROWS_WITH(h * other, refused("mul", other_than(t)));  // f16 with bf16 is f32
    CHECK_THROWS_WITH(maximum(h, bias), refused("maximum", f32));
    CHECK_THROWS_WITH(lerp(h, bias, 0.5), refused("lerp", f32));
    CHECK_THROWS_WITH(clamp(h, bias, 2.0), refused("clamp", f32));
    CHECK_THROWS_WITH(where(gt(h, 0), h, bias), refused("where", f32));
    CHECK(pow(h, bias).dtype() == f32);  // by its policy, not by its arguments
    CHECK((bias + bias).dtype() == f32);
    Autocast island({.enabled = false});
    CHECK((h + bias).dtype() == f32);
  });
}

TEST_CASE("report_4: modules keep their promise in a strict region: nothing in them climbs") {
  everywhere([](Device d, DType t) {
    manual_seed(4);
    auto strict = [&](auto&& module, const Tensor& x) {
      module.to(d);
      Autocast region({.dtype = t, .strict = true});
      Tensor y = module(x);
      CHECK(y.dtype() == t);
      y.to(f32).sum().backward();
    };
    Tensor image = randn({2, 4, 6, 6}, {.device = d}).to(t), sequence = randn({5, 2, 8}, {.device = d});
    strict(nn::Sequential{nn::Conv2d(4, 6, 3), nn::BatchNorm2d(6), nn::ReLU(), nn::MaxPool2d(2), nn::Flatten(), nn::Linear(24, 3)}, image);
    strict(nn::Sequential{nn::GroupNorm(2, 4), nn::Conv2d(4, 4, 1), nn::SiLU(), nn::AdaptiveAvgPool2d(1)}, image);
    strict(nn::Sequential{nn::Linear(8, 8), nn::LayerNorm(8), nn::GELU(), nn::RMSNorm(8), nn::Dropout(0.5)}, sequence);
    strict(nn::TransformerEncoderLayer(8, 2, {.feedforward = 16}), sequence.to(t));
    strict(nn::Sequential{nn::PositionalEncoding(8), nn::RotaryEmbedding(8), nn::Linear(8, 3)}, sequence.to(t));
    strict(nn::LSTM(8, 4), sequence);
    strict(nn::GRU(8, 4), sequence);
    strict(nn::RNN(8, 4), sequence);
  });
}

TEST_CASE("report_5: backward finds 16-bit tensors on the tape, and nothing is cast between the parts of a loss") {
  tests::report("InfiniTensor/InfiniTrain#160");
  everywhere([](Device d, DType t) {
    manual_seed(5);
    Tensor x = randn({33, 16}, {.device = d}), w = randn({8, 16}, {.device = d, .requires_grad = true}), v = randn({3, 8}, {.device = d, .requires_grad = true});
    Tensor y;
    int64_t before = allocated(d);
    {
      Autocast region({.dtype = t});
      { NoGrad off; y = linear(relu(linear(x, w)), v); }  // makes the copies of the weights
      before = allocated(d);
      y = linear(relu(linear(x, w)), v);
    }
    // The cast of x, one activation and y: no f32 copy of anything.
    CHECK(allocated(d) - before <= (33 * 16 + 33 * 8) * 2 + 3 * 512);
    Tensor loss = y.to(f32).pow(2).sum();
    amp::Trace backward = amp::trace([&] { loss.backward(); });
    INFO(backward);
    bool low_products = false;
    for (auto& line : backward.lines)
      if (line.op == "linear_grad")
        for (auto& in : line.in) {
          CHECK(in.dtype == t);
          low_products = true;
        }
    CHECK(low_products);
    CHECK((w.grad().dtype() == f32 && v.grad().dtype() == f32));

    Tensor logits = randn({33, 9}, {.device = d}).to(t).requires_grad_(), target = randint(0, 9, {33}, {.device = d});
    for (bool region : {true, false}) {
      amp::Trace forward = amp::trace([&] {
        Autocast on({.dtype = t, .enabled = region});
        loss = cross_entropy(logits, target);
      });
      INFO(forward);
      CHECK(forward.casts() == 0);
      CHECK(loss.dtype() == f32);
      CHECK(loss.item() == Approx(cross_entropy(logits.detach().to(f64), target).item()).epsilon(1e-5));  // f32 inside
    }
  });
}

TEST_CASE("report_20: sums run in f32, whatever dtype goes in and out") {
  tests::report("candle#3727");
  everywhere([](Device d, DType t) {
    auto of = [&](const Shape& shape, double v) { return full(shape, v, {.dtype = t, .device = d}); };
    for (int64_t n : {257, 2049, 4097, 40000, 70000}) {
      INFO("of " << n);
      CHECK(of({n}, 1).sum().item() == rounded(double(n), t));  // 70000 is beyond the largest f16: inf is right
      CHECK(of({n}, 1).mean().item() == 1);
      CHECK(all_are(of({n, 3}, 1).sum(0), rounded(double(n), t)));
      CHECK(all_are(of({n, 3}, 1).mean(0), 1));
      CHECK(all_are(of({3, n}, 1).t().mean(0), 1));
      CHECK(all_are(of({2, n}, 3).sum(1), rounded(3. * double(n), t)));
      CHECK(matmul(of({1, n}, 0.5), of({n, 1}, 1)).item() == rounded(double(n) / 2, t));
      CHECK(all_are(linear(of({2, n}, 0.25), of({3, n}, 1)), rounded(double(n) / 4, t)));
      // Squares overflow f16 from 256.
      CHECK(var(cat({of({n}, 300), of({n}, -300)}), {.correction = 0}).item() == rounded(90000, t));
      CHECK(total_norm({of({n}, 300)}).item() == Approx(rounded(300, t) * std::sqrt(double(n))).epsilon(1e-5));
      CHECK(mse_loss(of({n}, 300), of({n}, 0)).item() == Approx(rounded(300, t) * rounded(300, t)).epsilon(1e-5));
    }
    for (int64_t n : {256, 4096, 65536}) {
      CHECK(all_are(softmax(of({2, n}, 7), 1), 1. / double(n)));
      Tensor e = log_softmax(of({2, n}, 7), 1);
      CHECK(e.dtype() == f32);
      CHECK(amin(e).item() == Approx(-std::log(double(n))).epsilon(1e-6));
    }
    // Gradients that are sums: of a bias, of what was broadcast, of rows.
    for (int64_t n : {300, 5000}) {
      Tensor b = of({3}, 0).requires_grad_(), row = of({1, 3}, 1).requires_grad_(), w = of({3, 2}, 1).requires_grad_();
      linear(of({n, 2}, 1), w, b).backward({.gradient = of({n, 3}, 1)});
      (of({n, 3}, 1) * row).backward({.gradient = of({n, 3}, 1)});
      for (auto& g : gradients({b, row, w})) CHECK(all_are(g, rounded(double(n), t)));
    }
    // A weight that is used often sums its gradients in f32.
    Tensor w = ones({1, 1}, {.device = d, .requires_grad = true}), x = of({1, 1}, 1), y = zeros({1, 1}, {.device = d});
    Autocast region({.dtype = t});
    for (int i = 0; i < 3001; ++i) y = y + linear(x, w).to(f32);
    y.sum().backward();
    CHECK(w.grad().item() == 3001);
  });
}

TEST_CASE("report_31: losses of 16-bit outputs compute in f32 in an island as in a region") {
  tests::report("Peterande/D-FINE#361");
  everywhere([](Device d, DType t) {
    manual_seed(31);
    Tensor y = (randn({64, 33}, {.device = d}) * 8).to(t), target = randint(0, 33, {64}, {.device = d}), z = (randn({64, 33}, {.device = d}) * 300).to(t);
    Tensor wide = y.to(f64);
    Autocast region({.dtype = t});
    for (bool enabled : {true, false}) {
      Autocast island({.enabled = enabled});
      CHECK(cross_entropy(y, target).item() == Approx(cross_entropy(wide, target).item()).epsilon(1e-5));
      CHECK(mse_loss(y, z).item() == Approx(mse_loss(wide, z.to(f64)).item()).epsilon(1e-5));
      Tensor low = log_softmax(y, 1), exact = log_softmax(wide, 1);
      CHECK(low.dtype() == f32);
      CHECK(amax(abs(low.to(f64) - exact)).item() < 1e-4);
    }
    // The island that casts what comes in.
    nn::PrecisionIsland stable{nn::Lambda([](const Tensor& x) { return log(softmax(x, 1)); }), f32};
    Tensor inside = stable(y);
    CHECK(inside.dtype() == f32);
    CHECK(amax(abs(inside.to(f64) - log_softmax(wide, 1))).item() < 1e-4);
  });
}

TEST_CASE("report_32: a log-softmax or smoothed loss over many classes is finite and exact in 16 bits") {
  tests::report("apex#379");
  everywhere([](Device d, DType t) {
    manual_seed(32);
    for (int64_t classes : {257, 50000}) {
      Tensor logits = (randn({4, classes}, {.device = d}) * 10).to(t).requires_grad_(), target = randint(0, classes, {4}, {.device = d});
      Tensor wide = logits.detach().to(f64).requires_grad_();
      for (double smoothing : {0., 0.1, 1.}) {
        Autocast region({.dtype = t});
        logits.zero_grad();
        wide.zero_grad();
        Tensor loss = cross_entropy(logits, target, {.label_smoothing = smoothing}), exact = cross_entropy(wide, target, {.label_smoothing = smoothing});
        CHECK(loss.item() == Approx(exact.item()).epsilon(1e-5));
        loss.backward();
        exact.backward();
        double largest = amax(abs(wide.grad())).item();
        CHECK(amax(abs(logits.grad().to(f64) - wide.grad())).item() <= largest * (t == f16 ? 0x1p-11 : 0x1p-8) + 0x1p-25);
      }
    }
    // One class far below the rest, or far above it: softmax is 0 there, its logarithm is not -inf.
    for (double gap : {100., 1000.}) {
      Tensor x = cat({full({1, 1}, -gap, {.dtype = t, .device = d}), zeros({1, 7}, {.dtype = t, .device = d})}, 1);
      CHECK(log_softmax(x, 1).to_vector<double>()[0] == Approx(rounded(-gap, t) - std::log(7.)).epsilon(1e-5));
      CHECK(cross_entropy(x, zeros({1}, {.dtype = DType::i64, .device = d})).item() == Approx(-rounded(-gap, t) + std::log(7.)).epsilon(1e-5));
      CHECK(cross_entropy(-x, ones({1}, {.dtype = DType::i64, .device = d})).item() == Approx(-rounded(-gap, t)).epsilon(1e-5));
    }
  });
}

TEST_CASE("report_38: what is written in place keeps its dtype, in a region as outside") {
  tests::report("csarofeen/pytorch#672");
  everywhere([](Device d, DType t) {
    for (bool enabled : {true, false})
      for (bool strict : {false, true})
        for (DType a : {f32, f16, bf16})
          for (DType b : {f32, f16, bf16}) {
            INFO(str(a) << " += " << str(b) << ", region " << enabled << ", strict " << strict);
            auto of = [&](double v, DType type) { return full({5}, v, {.dtype = type, .device = d}); };
            Tensor y = of(2, b);
            Autocast region({.dtype = t, .enabled = enabled, .strict = strict});
            auto check = [&](Tensor x, double expected) {
              CHECK(x.dtype() == a);
              CHECK(all_are(x, expected));
            };
            check(of(3, a).add_(0.5), 3.5);
            check(of(3, a).mul_(4), 12);
            check(of(3, a).copy_(y), 2);
            check(of(3, a).fill_(1.0), 1);
            if (enabled && strict && a != b) {  // met in f32, and rounded after
              CHECK_THROWS_WITH(of(3, a).add_(y), Contains("add: runs in f32 inside a strict"));
              CHECK_THROWS_WITH(of(3, a).add_(y, -0.5), Contains("addcmul: runs in f32 inside a strict"));
              CHECK_THROWS_WITH(of(3, a).mul_(y), Contains("mul: runs in f32 inside a strict"));
              CHECK_THROWS_WITH(of(3, a).lerp_(y, 0.5), Contains("lerp: runs in f32 inside a strict"));
              continue;
            }
            check(of(3, a).add_(y), 5);
            check(of(3, a).add_(y, -0.5), 2);
            check(of(3, a).mul_(y), 6);
            check(of(3, a).lerp_(y, 0.5), 2.5);
            Tensor x = of(3, a);
            x.slice(0, 1, 3).add_(y.slice(0, 0, 2));
            CHECK(values(x) == std::vector<double>{3, 5, 5, 3, 3});
            if (a == b) continue;
            CHECK_THROWS_WITH(call_into(*find_op("add"), {y, y}, {}, of(0, a)), Contains("the tensor given for it is [5] (" + str(a) + ")"));
          }
    // A call into a given tensor runs in the dtypes that it is given. A strict region refuses one that autocast would have cast for.
    Tensor wide = ones({4, 4}, {.device = d}), low = wide.to(t), into = zeros({4, 4}, {.device = d}), narrow = zeros({4, 4}, {.dtype = t, .device = d});
    {
      Autocast region({.dtype = t});
      CHECK(all_are(call_into(*find_op("exp"), {low}, {}, narrow), rounded(std::exp(1.), t)));
      CHECK(call_into(*find_op("atan2"), {wide, wide}, binary::attrs_with<binary::Atan2>({}), into).dtype() == f32);
    }
    {
      Autocast region({.dtype = t, .strict = true});
      CHECK_THROWS_WITH(call_into(*find_op("exp"), {low}, {}, narrow),
                        text::cat("exp: writes into a given tensor inside a strict ", t, " region, and autocast, which would cast an input [4, 4] (", t,
                                  ") to f32, does not see it; cast it, or call the operator without a destination"));
      CHECK_NOTHROW(call_into(*find_op("exp"), {wide}, {}, into));
      CHECK_THROWS_WITH(call_into(*find_op("matmul"), {wide, wide}, Attrs::of(MatmulAttrs{}), into), Contains("would cast an input [4, 4] (f32) to " + str(t)));
      CHECK_NOTHROW(call_into(*find_op("matmul"), {low, low}, Attrs::of(MatmulAttrs{}), narrow));
    }
    // A sum that would round twice is rounded once: 2048 + 1 + 0.5 in f16.
    Tensor h = full({1}, t == f16 ? 2048 : 256, {.dtype = t, .device = d});
    Autocast region({.dtype = t});
    h.add_(full({1}, 1.5, {.device = d}));
    CHECK(h.item() == (t == f16 ? 2050 : 258));
  });
}

TEST_CASE("report_62: each region casts a weight to its own dtype") {
  tests::report("pytorch#181564");
  on_devices([](Device d) {
    for (Use f : {Use{linear}, linear_relu, linear_gelu, after_relu, twice}) {
      Tensor w = randn({5, 3}, {.device = d, .requires_grad = true}), b = randn({5}, {.device = d, .requires_grad = true}), x = randn({4, 3}, {.device = d});
      auto by_hand = [&](DType t) {
        Autocast island({.enabled = false});
        return f(x.to(t), w.to(t), b.to(t));
      };
      for (int round = 0; round < 2; ++round) {
        Autocast half({.dtype = f16});
        CHECK(same_bits(f(x, w, b), by_hand(f16)));
        {
          Autocast inner({.dtype = bf16});
          CHECK(same_bits(f(x, w, b), by_hand(bf16)));
          Autocast island({.enabled = false});
          CHECK(same_bits(f(x, w, b), by_hand(f32)));
        }
        CHECK(same_bits(f(x, w, b), by_hand(f16)));
      }
      // A captured function, too: one graph for each state.
      auto step = capture([&](const Tensor& in) {
        NoGrad off;
        return f(in, w, b).to(f32);
      });
      for (int i = 0; i < 4; ++i)
        for (DType t : {f16, bf16}) {
          Autocast region({.dtype = t});
          Tensor y = step(x);
          NoGrad off;
          CHECK(same_bits(y, by_hand(t).to(f32)));
        }
    }
  });
}

// ---- policies

TEST_CASE("report_37: every operator states a policy, and one that does not is refused under autocast") {
  tests::report("pytorch#87684");
  for (const OpDef* op : registry()) {
    INFO(op->name);
    CHECK(op->cast != Cast::unset);
    CHECK(amp::default_policy().get(op->name) == op->cast);
    CHECK((op->cast != Cast::banned || op->ban));
  }
  static OpDef silent = {.name = "tests_silent",
                         .doc = "states no policy",
                         .infer = [](const Call& c) -> Metas { return {c.in[0].meta()}; },
                         .kernel = {[](const Call& c, std::span<Tensor> out) { out[0].copy_(c.in[0]); }}};
  CHECK_NOTHROW(call(silent, {ones({2})}));
  for (DType t : {bf16, f16}) {
    Autocast region({.dtype = t});
    CHECK_THROWS_WITH(call(silent, {ones({2})}), "tests_silent: states no autocast policy; set OpDef::cast, to Cast::keep when it should run in the dtype it is given");
    Autocast island({.enabled = false});
    CHECK_NOTHROW(call(silent, {ones({2})}));
  }
}

TEST_CASE("report_59: an operator without a 16-bit kernel runs in f32") {
  tests::report("pytorch#40427");
  for (const OpDef* op : registry())
    on_devices([&](Device d) {
      DTypes types = op->dtypes[static_cast<size_t>(d.type)];
      if (!contains(types, f32) || op == &op::trust_ratio) return;  // its directions are f32 whatever their parameters are
      INFO(op->name);
      for (DType t : {bf16, f16}) CHECK((contains(types, t) || op->cast == Cast::full));
    });
  // One of a program's own.
  static OpDef wide_only = {.name = "tests_wide_only",
                            .doc = "has no kernel for 16 bits",
                            .cast = Cast::full,
                            .infer = [](const Call& c) -> Metas { return {Meta(c.in[0].shape(), c.in[0].dtype(), c.in[0].device())}; },
                            .dtypes = {only(f32) | only(f64), only(f32) | only(f64)},
                            .kernel = {[](const Call& c, std::span<Tensor> out) { out[0].copy_(c.in[0]); }}};
  for (DType t : {bf16, f16}) {
    Tensor y = matmul(ones({2, 2}, {.dtype = t}), ones({2, 2}, {.dtype = t}));
    CHECK_THROWS_WITH(call(wide_only, {y}), "tests_wide_only: " + str(t) + " is not supported on cpu");
    Autocast region({.dtype = t});
    CHECK(call(wide_only, {matmul(ones({2, 2}), ones({2, 2}))}).dtype() == f32);
  }
}

TEST_CASE("report_60: a kernel never reads bits of another dtype than its own") {
  tests::report("pytorch#47906");
  static OpDef foreign = {.name = "tests_foreign",
                          .doc = "written for equal dtypes, checks none",
                          .cast = Cast::keep,
                          .infer = [](const Call& c) -> Metas { return {Meta(c.in[0].shape(), c.in[0].dtype(), c.in[0].device())}; },
                          .kernel = {[](const Call& c, std::span<Tensor> out) {
                            visit(c.in[0].dtype(), [&]<class T>(Type<T>) {
                              const T *a = c.in[0].data<T>(), *b = c.in[1].data<T>();
                              T* y = out[0].data<T>();
                              for (int64_t i = 0; i < out[0].numel(); ++i) y[i] = convert<T>(convert<float>(a[i]) + convert<float>(b[i]));
                            });
                          }}};
  Tensor high = full({3}, 2);
  for (DType t : {bf16, f16}) {
    Tensor low = ones({3}, {.dtype = t});
    Autocast region({.dtype = t});
    CHECK_THROWS_WITH(call(foreign, {low, high}), Contains("f32") && Contains(str(t)));
    CHECK_THROWS_AS(call(foreign, {high, low}), Error);
    CHECK(all_are(call(foreign, {high, high}), 4));
    foreign.cast = Cast::widest;  // what its author should have said
    CHECK(all_are(call(foreign, {low, high}), 3));
    CHECK(call(foreign, {low, low}).dtype() == t);
    foreign.cast = Cast::keep;
  }
}
