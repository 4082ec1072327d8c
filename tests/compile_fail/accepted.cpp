// Spellings near the refused ones that must compile, without a warning.
#include "halftone/nn/nn.h"
#include "halftone/ops/ops.h"
namespace ht = halftone;
using namespace ht;

struct Semicolon : nn::Module {
  nn::Parameter p;
  HT_FIELDS(p);
};
struct Nothing : nn::Module {
  HT_FIELDS()
};
struct TwoInputs : nn::Module {  // does not hide Module::forward
  HT_FIELDS()
  Tensor forward(const Tensor& x, const Tensor& y) { return x + y; }
};
struct Norm : nn::Module {
  nn::Parameter weight{ones({2})};
  HT_FIELDS(weight)
  Tensor forward(const Tensor& x) override {
    Tensor w = weight;
    w = w / w.sum();
    return x * w;
  }
};
struct Uncopyable : nn::Module {
  std::vector<std::unique_ptr<nn::Module>> layers;
  HT_FIELDS(layers)
};
struct Derived : Norm {
  HT_FIELDS_AFTER(Norm)
};

Tensor use(Tensor a, std::vector<int> v, nn::Linear& l) {
  Semicolon s;
  Nothing n;
  TwoInputs two;
  Uncopyable u;
  nn::Linear sized{v.size(), 10, {.bias = false, .activation = nn::Activation::relu}};
  nn::Any any(l.clone());
  nn::Sequential outer{nn::Linear(2, 2), nn::Sequential{nn::ReLU()}, std::move(sized)};
  l.summary({{256, 784}});
  l.weight = nn::Parameter(a);
  l = nn::Linear(2, 2);
  return two.forward(a, a) + two.forward(a) + Derived().clone()(a);
}
