// An operator, a module and an optimizer of one's own, each in a few lines, and a network that is trained with all three.
// ctest: --steps 200 --fresh --out your_own_test
#include "halftone/examples/run.h"
#include "halftone/ops/elementwise_cpu.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

// An elementwise operator (Ziyin et al., "Neural networks fail to learn periodic functions and how to fix it", 2020): the value, compiled for
// any device and dtype; the derivative in operators, so that it has one, too; and what autocast does to it. A .cu file that includes
// this adds HT_REGISTER_UNARY_CUDA(Snake) and has the CUDA kernel.
struct Snake {
  static constexpr auto name = "snake", doc = "x + sin(x)^2";
  static constexpr Cast cast = Cast::keep;
  template <class T> HT_HD static T f(T x) {
    T s = ::sin(x);
    return x + s * s;
  }
  static Tensor df(const Tensor& x, const Tensor&, const Tensor& g) { return g * (1 + sin(2 * x)); }
};
HT_REGISTER_UNARY(snake, Snake)

// A module: snake with a frequency for each feature, snake(a x) / a.
struct SnakeLayer : nn::Module {
  explicit SnakeLayer(int64_t features) : frequency(ones({features})) {}
  nn::Parameter frequency;
  HT_FIELDS(frequency)
  Tensor forward(const Tensor& x) override { return snake(x * frequency) / frequency; }
};

// An optimizer: p -= lr * sign(g), by the operator that SGD is made of. What that promises holds here: state on the device, no step
// where found_inf says so, 16-bit copies of weights kept, capture. (A new update of an element is a struct in ops/optimizers.h.)
struct SignSGDOptions { double lr = 1e-3, weight_decay = 0; };
class SignSGD final : public optim::Fused<SignSGD, SignSGDOptions, update::Sgd> {
 public:
  using Fused::Fused;
  static constexpr auto title = "SignSGD";
  static void check(const SignSGDOptions& o) { optim::detail::check_positive(title, "weight_decay", o.weight_decay); }
  static update::Sgd settings(const SignSGDOptions& o) { return {.weight_decay = o.weight_decay}; }

 private:
  void run(size_t, Call& call, int n) override {
    for (int i = 0; i < n; ++i) {
      Tensor& g = call.in[update::lists_at + static_cast<size_t>(n + i)];
      g = sign(g);
    }
    call.in[update::grad_scale_at] = {};  // a scale has no sign
    dispatch(call);
  }
};

struct Options : Run {
  int64_t steps = 2000;
  double lr = 2e-3;
  Options() : Run("runs/your_own") {}
};

int run(const Options& o) {  // what the program ends with
  HT_CHECK(o.place().type == DeviceType::cpu, "--device: snake has no CUDA kernel here; add a .cu file with HT_REGISTER_UNARY_CUDA(Snake)");
  manual_seed(o.seed);
  // Its derivative, and that one's, against differences.
  Tensor probe = randn({5}, {.dtype = DType::f64, .requires_grad = true});
  gradcheck([](const std::vector<Tensor>& x) { return std::vector{snake(x[0])}; }, {probe});

  nn::Sequential net{nn::Linear(1, 32), SnakeLayer(32), nn::Linear(32, 32), SnakeLayer(32), nn::Linear(32, 1)};
  SignSGD opt(net.parameters(), {.lr = o.lr});
  optim::CosineAnnealingLR schedule(opt, {.steps = o.steps});
  amp::GradScaler scaler = o.scaler();
  Session session(o, "your_own", o.steps, 500);
  session.checkpoint.add("net", net).add("opt", opt).add("schedule", schedule);
  if (scaler.enabled()) session.checkpoint.add("scaler", scaler);
  for (int64_t done = session.begin(); session.more(done);) {
    Tensor x = rand({64, 1}) * 12 - 6;
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(o.mixed());
      loss = mse_loss(net(x).to(DType::f32), sin(2 * x) + x / 4);
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    session.show("loss", loss);
    if (++done % 100 == 0) session.log(done, {{"loss", loss.item()}});
  }
  if (session.interrupted()) return 130;  // as a shell reports Ctrl-C
  NoGrad off;
  Tensor x = arange(601).to(DType::f32).view({601, 1}) / 50 - 6;
  double error = mse_loss(net(x), sin(2 * x) + x / 4).item();
  std::printf("sin(2x) + x/4 on [-6, 6]: squared error %.4f (its variance is about 1.2)\n", error);
  o.write_metrics({{"error", error}, {"steps", o.steps}});
  HT_CHECK(error < 0.9, "the network has learned nothing");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  Arguments arguments("your_own",
                      "Fits a wave with an operator, a module and an optimizer defined on this page. OUT gets metrics.json and checkpoints.",
                      {"your_own", "your_own --precision bf16 --steps 5000"});
  o.add_to(arguments);
  arguments.add("--steps", o.steps, "training steps", Arguments::positive);
  arguments.add("--lr", o.lr, "learning rate of the first step; it falls by a cosine", Arguments::not_negative);
  return arguments.run(argc, argv, [&] { return run(o); });
}
