// Looking inside: the operator that made an inf, gradients that vanish, precisions compared.
#include <sstream>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/operators.h"

using namespace halftone;
using Catch::Contains;

namespace {

struct Net : nn::Module {
  nn::Linear a{6, 5}, b{5, 3};
  double factor = 1;
  HT_FIELDS(a, b)
  Tensor forward(const Tensor& x) override { return b(relu(a(x)) * factor); }
};
Net net_of(uint64_t seed) {
  manual_seed(seed);
  return {};
}
constexpr float inf = std::numeric_limits<float>::infinity();

}  // namespace

TEST_CASE("the operator, module and parameters of an overflow are named") {
  Net net = net_of(1);
  Tensor x = randn({4, 6});
  CHECK_FALSE(amp::find_overflow(net, [&] { net(x).sum().backward(); }));
  { NoGrad off; net.b.weight.fill_(3e38f); }
  net.zero_grad();
  auto found = amp::find_overflow(net, [&] { net(abs(x) + 10).sum().backward(); });
  REQUIRE(found);
  CHECK(found->op == "linear");
  CHECK(found->module_name == "b");
  CHECK_FALSE(found->in_backward);
  // In backward: the activation is fine, what comes back is not.
  net = net_of(1);
  net.factor = 1e30;
  Tensor y = net(x) * 0;
  found = amp::find_overflow(net, [&] { (net(x) * 1e30).sum().backward(); });
  REQUIRE(found);
  CHECK(found->op == "mul");
  net.zero_grad();
  Tensor loss = net(x).sum();
  found = amp::find_overflow(net, [&] { loss.backward({.gradient = full({}, 3e30)}); });
  REQUIRE(found);
  CHECK(found->in_backward);
  CHECK(found->op == "linear_grad");
  CHECK(found->module_name == "b");
  CHECK(found->parameters == std::vector<std::string>{"a.weight", "a.bias", "b.weight"});
  std::ostringstream text;
  text << *found;
  CHECK_THAT(text.str(), Contains("linear_grad, in backward, gave the first result that is not finite: [3, 5] (f32), in module 'b'") && Contains("gradients that are not finite: a.weight"));
}

TEST_CASE("what is not finite before the step is told first") {
  Net net = net_of(1);
  Tensor x = randn({4, 6});
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), inf, -inf})
    for (bool with_region : {false, true}) {
      net = net_of(1);
      { NoGrad off; net.b.weight.slice(0, 1, 2).fill_(bad); }
      auto found = amp::find_overflow(net, [&] {
        std::optional<amp::Autocast> region;
        if (with_region) region.emplace();
        net(x).sum().backward();
      });
      REQUIRE(found);
      CHECK(found->given == std::vector<std::string>{"b.weight"});
      if (bad == -inf && with_region) continue;  // its cast is taken for a mask, until linear makes more of it
      CHECK(found->op == (with_region ? "cast" : "linear"));
      CHECK(found->module_name == "b");
      CHECK(found->argument == (with_region ? 0 : 1));
      std::ostringstream text;
      text << *found;
      CHECK_THAT(text.str(), Contains(" was the first to read what was not finite before the step, as argument ") && Contains("; not finite before it: b.weight"));
    }
  net = net_of(1);
  Tensor poisoned = x.clone();
  poisoned.slice(0, 0, 1).fill_(inf);
  auto found = amp::find_overflow(net, [&] { net(poisoned).sum().backward(); });
  REQUIRE(found);
  CHECK((found->op == "linear" && found->module_name == "a" && found->argument == 0 && found->given.empty()));
}

TEST_CASE("a mask of -inf is no overflow, and hides none") {
  Tensor scores = randn({4, 4}, {.requires_grad = true}), outside = zeros({4, 4});
  for (int64_t i = 0; i < 4; ++i) outside.slice(0, i, i + 1).slice(1, i + 1, 4).fill_(-inf);
  auto inside = [] { return triu(full({4, 4}, -inf), 1); };
  Tensor above = triu(ones({4, 4}), 1).to(DType::b8);
  auto masked = [&](int how) { return how == 0 ? scores + outside : how == 1 ? where(above, full({}, -inf), scores) : how == 2 ? masked_fill(scores, above, -inf) : scores + inside(); };
  for (int how : {0, 1, 2, 3}) {
    INFO(how);
    scores.zero_grad();
    CHECK_FALSE(amp::find_overflow([&] { softmax(masked(how), -1).sum().backward(); }));
    auto found = amp::find_overflow([&] { (exp(masked(how) + 200) * 1).sum().backward(); });
    REQUIRE(found);
    CHECK((found->op == "exp" && found->argument < 0));
    found = amp::find_overflow([&] { softmax(masked(how) - inf, -1).sum().backward(); });
    REQUIRE(found);
    found = amp::find_overflow([&] { (masked(how) * 0).sum().backward(); });
    REQUIRE(found);
    CHECK(found->op == "mul");
  }
}

TEST_CASE("looking inside refuses an empty function and a scale that is none, by name") {
  Net net = net_of(1);
  std::function<void()> step;
  std::function<Tensor()> loss;
  CHECK_THROWS_WITH(amp::find_overflow(step), "find_overflow: the step is an empty function");
  CHECK_THROWS_WITH(amp::find_overflow(net, step), "find_overflow: the step is an empty function");
  CHECK_THROWS_WITH(amp::trace(step), "trace: the function is empty");
  CHECK_THROWS_WITH(amp::memory_by_module(Device::cpu(), step), "memory_by_module: the step is an empty function");
  CHECK_THROWS_WITH(amp::advise(net, loss), "advise: the loss is an empty function");
  for (double bad : {0., -1., double(inf), std::nan("")})
    CHECK_THROWS_WITH(amp::advise(net, [&] { return net(randn({4, 6})).sum(); }, bad), text::cat("advise: expected a finite scale above 0, got ", bad));
  amp::GradScaler scaler({.init_scale = 1024});
  Tensor w = ones({4}, {.requires_grad = true});
  scaler.scale((w * 1).sum()).backward();
  scaler.update(2);
  CHECK_THROWS_WITH(amp::gradient_stats({{"w", w}}, scaler), "gradient_stats: the gradient of 'w' carries a scale that has changed since; look before update()");
}

TEST_CASE("an inf planted in any operator is found there") {
  static Kernel real;
  int planted = 0;
  for (const OpDef* op : registry()) {
    if (op->view || op->writes) continue;
    Sample s = op->samples()[2];
    Tensors in = tests::make_inputs(s, DType::f32), y = call_all(*op, in, s.attrs);
    if (!is_floating(y[0].dtype()) || y[0].numel() == 0) continue;
    INFO(op->name);
    Kernel& slot = const_cast<OpDef*>(op)->kernel[0];
    real = slot;
    slot = [](const Call& c, std::span<Tensor> out) {
      real(c, out);
      if (out[0].dtype() == DType::f32) out[0].data<float>()[0] = inf;
    };
    auto found = amp::find_overflow([&] { call_all(*op, in, s.attrs); });
    slot = real;
    if (y[0].dtype() != DType::f32) continue;
    REQUIRE(found);
    CHECK(found->op == op->name);
    ++planted;
  }
  CHECK(planted > 40);
}

TEST_CASE("how much of a gradient vanishes at a scale") {
  Tensor p = zeros({8}, {.requires_grad = true});
  p.set_grad(tensor({1.f, 0.f, 1e-9f, -1e-6f, inf, 3e-8f, 2e-8f, -4.f}));
  auto s = amp::gradient_stats({{"p", p}, {"q", zeros({2}, {.requires_grad = true})}}, 1, 1);
  REQUIRE(s.size() == 2);
  CHECK(s[0].largest == 4);
  CHECK(s[0].smallest == Approx(1e-9));
  CHECK(s[0].zeros == 1. / 8);
  CHECK(s[0].vanishing == 2. / 8);   // 1e-9 and 2e-8, below half of 2^-24
  CHECK(s[0].subnormal == 2. / 8);   // 1e-6 and 3e-8
  CHECK(s[0].not_finite == 1);
  CHECK_FALSE(s[1].defined);
  CHECK(amp::gradient_stats({{"p", p}}, 1, 65536)[0].vanishing == 0);
  amp::GradScaler scaler({.init_scale = 1024});
  Tensor w = ones({4}, {.requires_grad = true});
  scaler.scale((w * 1e-10).sum()).backward();
  auto scaled = amp::gradient_stats({{"w", w}}, scaler);
  CHECK(scaled[0].largest == Approx(1e-10));
  CHECK(scaled[0].vanishing == 0);
  CHECK_THROWS_WITH(amp::gradient_stats({}, 0, 1), "gradient_stats: expected finite scales above 0, got 0 and 1");
  std::ostringstream text;
  text << s;
  CHECK_THAT(text.str(), Contains("vanishing") && Contains("25 %") && Contains("no gradient"));
}

TEST_CASE("advice about precision: measured, with a reason, and nothing changed") {
  Net net = net_of(3);
  Tensor x = randn({16, 6}), target = randint(0, 3, {16});
  cross_entropy(net(x), target).backward();
  auto grads = net.a.weight.grad().to_vector<float>();
  Tensor next = (manual_seed(5), rand({4}));
  manual_seed(5);
  amp::Advice a = amp::advise(net, [&] { return cross_entropy(net(x + rand({16, 6}) * 0.01), target); });
  REQUIRE(a.rows.size() == 3);
  CHECK(a.rows[0].precision == "fp32");
  CHECK(a.rows[0].gradient_error == 0);
  for (auto& r : a.rows) {
    CHECK(r.finite);
    CHECK(r.ms > 0);
    CHECK(r.peak_bytes > 0);
  }
  CHECK(a.rows[1].gradient_error > 1e-4);  // bf16
  CHECK(a.rows[2].gradient_error < a.rows[1].gradient_error);
  CHECK_FALSE(a.reason.empty());
  CHECK(net.a.weight.grad().to_vector<float>() == grads);
  CHECK(rand({4}).to_vector<float>() == next.to_vector<float>());
  std::ostringstream text;
  text << a;
  CHECK_THAT(text.str(), Contains("recommended: " + a.recommended + ", because "));
}

TEST_CASE("advise takes a 16-bit loss whose scaled value is beyond f16") {
  manual_seed(6);
  Net net = net_of(3);
  const Tensor x = randn({1, 6});
  for (auto& r : amp::advise(net, [&] { return net(x).slice(1, 0, 1).view({}) + 40; }, 32768).rows) {
    INFO(r.precision);
    CHECK(r.finite);
    CHECK(r.gradient_error < .1);
  }
}

namespace {

struct Wide : nn::Module {
  nn::Linear narrow{8, 16}, wide{16, 4096}, back{4096, 4};
  HT_FIELDS(narrow, wide, back)
  Tensor forward(const Tensor& x) override { return back(relu(wide(narrow(x)))); }
};

}  // namespace

TEST_CASE("memory is told module by module") {
  std::vector<Device> places{Device::cpu()};
  if (!devices(DeviceType::cuda).empty()) places.push_back(Device::cuda());
  for (Device device : places) {
    Wide net;
    net.to(device);
    Tensor x = randn({64, 8}, {.device = device}), loss;
    loss = net(x).sum();  // first calls make what stays
    loss.backward();
    loss = {};
    int64_t before = memory_stats(device).allocated;
    auto all = amp::memory_by_module(net, device, [&] {
      loss = net(x).sum();
      loss.backward();
    });
    constexpr int64_t wide = 64 * 4096 * 4;  // bytes of a result
    auto of = [&](std::string_view name) {
      for (auto& m : all) if (m.name == name) return m;
      FAIL("no line for " << name);
      return amp::ModuleMemory{};
    };
    CHECK(of("wide").kept == 0);  // relu keeps its own result
    CHECK(of("").kept == wide);
    CHECK(of("back").kept == 0);
    CHECK(of("?").kept <= 8);  // the loss, and the gradient that backward begins with
    CHECK(of("wide").peak >= before + wide);
    CHECK(of("wide").in_backward);
    CHECK(of("narrow").peak < of("wide").peak);
    CHECK(std::is_sorted(all.begin(), all.end(), [](auto& a, auto& b) { return a.peak > b.peak; }));
    std::ostringstream text;
    text << all;
    CHECK_THAT(text.str(), Contains("(model)") && Contains("wide") && Contains("?") && Contains("backward"));
  }
}
