// Tensors and gradients: making, slicing and printing; backward, grad and second derivatives; a line fitted by hand.
// ctest:
#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

int main(int argc, char** argv) {
  std::string name = "cpu";
  Arguments arguments("tensors", "Shows what tensors and gradients do, and fits a line by gradient descent written out.",
                      {"tensors", "tensors --device cuda"});
  arguments.add("--device", name, "cpu, cuda or cuda:N");
  return arguments.run(argc, argv, [&] {
    Device device = ht::device(name);
    manual_seed(0);

    // Tensors are handles: a copy of one is the same tensor, a view shares its memory.
    Tensor a = randn({2, 3}, {.device = device});
    Tensor first_column = a.slice(1, 0, 1);
    first_column.fill_(7);
    std::cout << "a, whose first column was written through a view:\n" << a << "\n\n";
    std::cout << "as f16, transposed:\n" << a.t().to(DType::f16) << "\n\n";
    std::cout << "broadcast: a + [10, 20, 30]:\n" << a + tensor({10.f, 20.f, 30.f}).to(device) << "\n\n";

    // backward() accumulates into the .grad of leaves that require a gradient.
    Tensor w = randn({3, 4}, {.device = device, .requires_grad = true});
    relu(matmul(a, w)).mean().backward();
    std::cout << "gradient of mean(relu(a w)) by w:\n" << w.grad() << "\n\n";

    // grad() returns gradients instead, and can be differentiated again.
    Tensor x = full({}, 2, {.device = device, .requires_grad = true});
    auto [slope] = grad({x.pow(3)}, {x}, {.create_graph = true});
    auto [curvature] = grad({slope}, {x});
    std::cout << "x^3 at 2: slope " << slope.item() << ", curvature " << curvature.item() << "\n\n";
    HT_CHECK(slope.item() == 12 && curvature.item() == 12, "the derivatives are wrong");

    // A line through noisy points, without an optimizer.
    Tensor points = randn({100}, {.device = device}), values = points * 3 - 1 + randn({100}, {.device = device}) * 0.1;
    Tensor k = zeros({}, {.device = device, .requires_grad = true}), b = zeros({}, {.device = device, .requires_grad = true});
    for (int step = 0; step <= 100; ++step) {
      Tensor loss = square(points * k + b - values).mean();
      auto [dk, db] = grad({loss}, {k, b});
      if (step % 25 == 0) std::printf("step %3d: loss %.4f, y = %.3f x %+.3f\n", step, loss.item(), k.item(), b.item());
      NoGrad guard;  // updates are not recorded
      k.add_(dk, -0.1);
      b.add_(db, -0.1);
    }
    HT_CHECK(std::abs(k.item() - 3) < 0.1 && std::abs(b.item() + 1) < 0.1, "the line is not the one the points were made from");
    return 0;
  });
}
