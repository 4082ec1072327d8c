// Index operators on the CPU.
#include "halftone/ops/index.h"

#include "halftone/ops/all.h"
#include "halftone/ops/copy.h"

namespace halftone {
namespace {

void run_one_hot(const Call& c, std::span<Tensor> out) {
  Tensor target = c.in[0].contiguous();
  int64_t classes = c.as<OneHotAttrs>().classes, n = target.numel();
  const int64_t* t = target.data<int64_t>();
  visit(out[0].dtype(), [&]<class Y>(Type<Y>) {
    Y* y = out[0].data<Y>();
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < classes; ++k) y[i * classes + k] = convert<Y>(t[i] == k);
  });
}

}  // namespace

namespace op {

constinit OpDef one_hot = {
    .name = "one_hot", .doc = "1 at each index, else 0, in a new last dimension", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& t = c.in[0].meta();
      auto a = c.as<OneHotAttrs>();
      HT_CHECK(t.dtype == DType::i64, "one_hot: expected i64 indices, got ", t.dtype);
      HT_CHECK(a.classes > 0, "one_hot: expected at least one class, got ", a.classes);
      Shape y = t.shape;
      y.push_back(a.classes);
      return {Meta(y, a.dtype, t.device)};
    },
    .dtypes = {only(DType::i64), only(DType::i64)},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (auto [shape, classes] : {std::pair{Shape{}, 3}, {Shape{1}, 1}, {Shape{7}, 5}, {Shape{33}, 10}, {Shape{257}, 3}, {Shape{0}, 4}, {Shape{2, 3}, 4}, {Shape{4, 1}, 70}})
        all.push_back({{{.shape = shape, .low = 0, .high = double(classes), .dtype = DType::i64, .differentiable = false}}, Attrs::of(OneHotAttrs{classes, DType::f32})});
      return all;
    },
    .kernel = {run_one_hot}};

}  // namespace op

std::span<OpDef* const> index_ops() {
  static constexpr OpDef* all[] = {&op::one_hot};
  return all;
}

Tensor one_hot(const Tensor& target, Size classes, DType dtype) {
  HT_CHECK(target.defined() && !is_floating(target.dtype()), "one_hot: expected a tensor of integers");
  return call(op::one_hot, {target.to(DType::i64)}, Attrs::of(OneHotAttrs{classes, dtype}));
}

}  // namespace halftone
