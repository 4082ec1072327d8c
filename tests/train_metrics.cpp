// Metrics: what they sum to by hand, over batches, without a wait on the way.
#include "halftone/train/metrics.h"

#include <cmath>

#include "halftone/core/thread_state.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

using namespace halftone;

namespace {

std::vector<Device> places() {
  std::vector<Device> all{Device::cpu()};
  if (!devices(DeviceType::cuda).empty()) all.push_back(Device::cuda());
  return all;
}

}  // namespace

TEST_CASE("a mean by weight") {
  metrics::Mean mean;
  CHECK(std::isnan(mean.value()));
  mean.add(tensor(1.f), 3);
  mean.add(tensor({5.f}).requires_grad_());
  CHECK(mean.value() == 2);
  mean.reset();
  mean.add(tensor(7.f));
  CHECK(mean.value() == 7);
  CHECK(error_of([&] { mean.add(ones({2})); }) == "Mean: expected one number, got [2] (f32)");
}

TEST_CASE("the target among the k largest") {
  for (const Device device : places()) {
    metrics::Accuracy first, two(2);
    CHECK(std::isnan(first.value()));
    const Tensor outputs = tensor({{.1f, .7f, .2f}, {.5f, .4f, .1f}, {.2f, .3f, .5f}, {.9f, .05f, .05f}}).to(device);
    const auto add = [&](const std::vector<int64_t>& target) {
      const ForbidSync no_waiting;
      const Tensor t = tensor(target, {.device = device});
      first.add(outputs, t);
      two.add(outputs, t);
    };
    add({1, 1, 0, -100});
    CHECK(first.value() == Approx(1. / 3));
    CHECK(two.value() == Approx(2. / 3));
    add({1, 0, 2, 0});
    CHECK(first.value() == Approx(5. / 7));
    CHECK(two.value() == Approx(6. / 7));
  }
  metrics::Accuracy four(4);
  CHECK(error_of([&] { four.add(ones({2, 3}), zeros({2}, {.dtype = DType::i64})); }) ==
        "Accuracy: the target cannot be among the 4 largest of 3 outputs");
  CHECK(error_of([&] { four.add(ones({2, 3}), zeros({3}, {.dtype = DType::i64})); }) ==
        "Accuracy: expected outputs [n, classes] and a target [n] of integers, got [2, 3] (f32) and [3] (i64)");
  CHECK(error_of([] { metrics::Accuracy(0); }) == "Accuracy: expected k above 0, got 0");
}

TEST_CASE("which class was taken for which") {
  for (const Device device : places()) {
    metrics::ConfusionMatrix matrix(3);
    const auto add = [&](const Tensor& outputs, const std::vector<int64_t>& target) {
      const ForbidSync no_waiting;
      matrix.add(outputs, tensor(target, {.device = device}));
    };
    add(tensor({{.1f, .7f, .2f}, {.5f, .4f, .1f}, {.2f, .3f, .5f}}).to(device), {1, 1, -100});
    add(tensor<int64_t>({0, 1, 0, 0}, {.device = device}), {0, 1, 0, 1});
    CHECK(matrix.counts().to_vector<int64_t>() == std::vector<int64_t>{2, 0, 0, 2, 2, 0, 0, 0, 0});
    CHECK(matrix.accuracy() == Approx(4. / 6));
    const auto recall = matrix.recall().to_vector<double>(), precision = matrix.precision().to_vector<double>();
    CHECK((recall[0] == 1 && recall[1] == .5 && std::isnan(recall[2])));
    CHECK((precision[0] == .5 && precision[1] == 1 && std::isnan(precision[2])));
  }
  metrics::ConfusionMatrix matrix(2);
  const auto error = [&](int64_t predicted, int64_t target) { return error_of([&] { matrix.add(tensor({predicted}), tensor({target})); }); };
  for (const int64_t no_class : {-1, 2, 7}) {
    CHECK(error(no_class, 0).find("index_add: ") == 0);
    CHECK(error(0, no_class).find("index_add: ") == 0);
  }
  CHECK(matrix.counts().sum().item() == 0);
  CHECK(error_of([&] { matrix.add(ones({1, 3}), tensor<int64_t>({0})); }) == "ConfusionMatrix: expected outputs of 2 classes, got [1, 3] (f32)");
}
