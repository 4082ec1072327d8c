// The user's program. Ends with 0 if the installed Halftone does its work.
#include <cstdio>
#include <cstdlib>

#include "extension.h"

namespace ht = halftone;
using namespace ht;

namespace {

void expect(bool condition, const char* what) {
  if (condition) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

struct Net : nn::Module {
  nn::Linear fc1{2, 16}, fc2{16, 2};
  HT_FIELDS(fc1, fc2)
  Tensor forward(const Tensor& x) override { return fc2(snake(fc1(x))); }
};

// Learns on which side of a circle a point is, in mixed precision.
double train(Device device) {
  manual_seed(1);
  Net net;
  net.to(device);
  optim::AdamW opt(net.parameters(), {.lr = 1e-2});
  amp::GradScaler scaler;
  Tensor x = randn({256, 2}, {.device = device}), target = gt(square(x).sum(1), 1.0).to(DType::i64), loss;
  for (int i = 0; i < 200; ++i) {
    opt.zero_grad();
    {
      amp::Autocast region;
      loss = cross_entropy(net(x), target);
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
  }
  return loss.item();
}

}  // namespace

int main() {
  std::cout << build_info() << '\n';
  // One Halftone in the process, whoever asks: its registries depend on that.
  expect(version_seen_by_extension() == version(), "one library in the process");
  expect(find_op("snake") != nullptr && find_op("relu") != nullptr, "the operator is in the registry");
  expect(relu(tensor({-1.f, 2.f})).to_vector<float>() == std::vector<float>{0, 2}, "relu");
  gradgradcheck([](auto& v) { return std::vector<Tensor>{snake(v[0])}; }, {tensor({0.3, -1.2}).requires_grad_()});
  expect(train(Device::cpu()) < 0.2, "training on the CPU");
  for (Device device : devices(DeviceType::cuda)) expect(train(device) < 0.2, "training on a GPU");
  std::cout << "trained on " << 1 + devices(DeviceType::cuda).size() << " devices\n";
}
