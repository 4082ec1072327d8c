// The exact texts of errors: what was expected, what came, the cure.
#include "halftone/halftone.h"
#include "halftone/tests/error_text.h"

using namespace halftone;

namespace {
Tensor f(const Shape& s) { return ones(s); }
Tensor i64(const Shape& s) { return zeros(s, {.dtype = DType::i64}); }
const Tensor undefined;
}  // namespace

TEST_CASE("errors of elementwise operators") {
  TEXT(f({3}) + f({4}), "add: shapes [3] and [4] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(f({2, 3}) * f({3, 2}), "mul: shapes [2, 3] and [3, 2] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(add(1, 2), "add: expected at least one tensor, got two numbers");
  TEXT(undefined + f({1}), "add: a tensor is undefined");
  TEXT(f({1}) - undefined, "sub: a tensor is undefined");
  TEXT(exp(i64({2})), "exp: i64 is not supported; cast x to a floating dtype with to()");
  TEXT(neg(zeros({2}, {.dtype = DType::b8})), "neg: bool is not supported; cast x to a numeric dtype with to()");
  TEXT(relu(undefined), "relu: needs at least one tensor");
  TEXT(pow(i64({2}), 2), "pow: i64 is not supported; cast x to a floating dtype with to()");
  TEXT(zeros({2}, {.dtype = DType::u8}) + 300, "add: 300 does not fit u8; cast the tensor with to()");
  TEXT(lt(zeros({2}, {.dtype = DType::u8}), -1), "lt: -1 does not fit u8; cast the tensor with to()");
  TEXT(call(*find_op("add"), {f({2}), f({3})}), "add: expected equal shapes and dtypes, got [2] (f32) and [3] (f32)");
  TEXT(where(f({2}), f({2}), f({2})), "where: expected a bool condition, got f32");
  TEXT(where(gt(f({2}), 0), 1, 2), "where: expected at least one tensor to choose from, got two numbers");
  TEXT(where(gt(f({2}), 0), f({3}), 0), "where: shapes [2] and [3] do not broadcast; counted from the back, sizes must be equal or 1");
}

TEST_CASE("errors of reductions") {
  TEXT(sum(f({2, 3}), {2}), "sum: dim 2 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(mean(f({2, 3}), {-3}), "mean: dim -3 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(sum(f({2, 3}), {0, -2}), "sum: dim -2 is given twice");
  TEXT(argmax(f({2}), 1), "argmax: dim 1 is out of range for a tensor of 1 dimensions; expected -1 to 0");
  TEXT(amax(f({0})), "amax: [0] has no elements to choose from");
  TEXT(amin(f({3, 0}), {1}), "amin: [3, 0] has no elements to choose from");
  TEXT(amax(zeros({2}, {.dtype = DType::b8})), "amax: bool is not supported; cast x to a floating dtype with to()");
  TEXT(var(i64({3})), "var: expected a floating dtype, got i64; cast x with to()");
  TEXT(sum(undefined), "a tensor is undefined; it has no shape, dtype or data");
  TEXT(softmax(f({2}), 1), "softmax: dim 1 is out of range for a tensor of 1 dimensions; expected -1 to 0");
  TEXT(softmax(i64({2}), 0), "softmax: expected a floating dtype, got i64; cast x with to()");
  TEXT(softmax(undefined, 0), "softmax: x is undefined");
  TEXT(log_softmax(f({2}), -2), "log_softmax: dim -2 is out of range for a tensor of 1 dimensions; expected -1 to 0");
  TEXT(log_softmax(undefined, 0), "log_softmax: x is undefined");
}

TEST_CASE("errors of shapes and views") {
  TEXT(f({2, 3}).view({4}), "view: [2, 3] has 6 elements, [4] has 4");
  TEXT(f({2, 3}).view({-1, 4}), "view: [2, 3] has 6 elements, which [-1, 4] cannot hold");
  TEXT(f({2, 3}).reshape({-1, -1}), "view: expected sizes of 0 or more and at most one -1, got [-1, -1]");
  TEXT(f({2, 3}).reshape({-2, 3}), "view: expected sizes of 0 or more and at most one -1, got [-2, 3]");
  TEXT(f({2, 3}).t().view({6}), "view: [3, 2] with strides [1, 3] cannot be seen as [6] without a copy; use reshape");
  TEXT(f({2, 3}).expand({2, 4}), "expand: cannot expand [2, 3] to [2, 4]");
  TEXT(f({2, 3}).expand({3}), "expand: cannot expand [2, 3] to [3]");
  TEXT(f({2, 3}).permute({0, 0}), "permute: expected each dimension of [2, 3] once, got [0, 0]");
  TEXT(f({2, 3}).permute({0}), "permute: expected each dimension of [2, 3] once, got [0]");
  TEXT(f({2, 3}).permute({0, 2}), "permute: dim 2 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(f({2, 3}).transpose(0, 2), "transpose: dim 2 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(f({2, 3}).slice(2, 0, 1), "slice: dim 2 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(f({2, 3}).slice(0, 0, 1, 0), "slice: expected a step above 0, got 0");
  TEXT(f({}).slice(0, 0, 1), "slice: a 0-d tensor has nothing to slice");
  TEXT(f({2, 3}).select(0, 2), "select: index 2 is out of range for dimension 0 of [2, 3]");
  TEXT(f({2, 3}).select(1, -4), "select: index -4 is out of range for dimension 1 of [2, 3]");
  TEXT(f({})[0], "select: a 0-d tensor has nothing to select");
  TEXT(f({2, 3}).squeeze(0), "squeeze: dimension 0 of [2, 3] is not of size 1");
  TEXT(f({2}).unsqueeze(2), "unsqueeze: dim 2 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(f({2, 3}).flatten(1, 0), "flatten: dimension 1 comes after 0");
  TEXT(f({2, 3}).size(2), "size: dim 2 is out of range for a tensor of 2 dimensions; expected -2 to 1");
  TEXT(f({}).size(0), "size: a 0-d tensor has no dimension 0");
  TEXT(cat({}), "cat: expected at least one tensor");
  TEXT(cat({f({2, 3}), f({2, 4})}), "cat: tensor 1 is [2, 4] (f32), the first is [2, 3] (f32); only dimension 0 may differ");
  TEXT(cat({f({2}), i64({2})}), "cat: tensor 1 is [2] (i64), the first is [2] (f32)");
  TEXT(cat({f({}), f({})}), "cat: 0-d tensors cannot be joined; use stack");
  TEXT(stack({}), "stack: expected at least one tensor");
  TEXT(stack({f({2}), f({3})}), "cat: tensor 1 is [1, 3] (f32), the first is [1, 2] (f32); only dimension 0 may differ");
  TEXT(sum_to(f({2, 3}), {2}), "sum_to: shapes [2, 3] and [2] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(sum_to(f({1, 3}), {2, 3}), "sum_to: [1, 3] is not a broadcast of [2, 3]");
  TEXT(slice_scatter(f({3}), {5}, 0, 3, 1), "slice_scatter: [3] does not fit into [5] along dimension 0 from 3 in steps of 1");
  TEXT(slice_scatter(f({3}), {5, 1}, 0, 0, 1), "slice_scatter: [3] and [5, 1] have different numbers of dimensions");
  TEXT(f({1, 1, 1, 1, 1, 1, 1, 1}).unsqueeze(0), "a tensor has at most 8 dimensions");
}

TEST_CASE("errors of products") {
  TEXT(matmul(f({2, 3}), f({2, 3})), "matmul: expected [..., m, k] and [..., k, n], got [2, 3] (f32) and [2, 3] (f32)");
  TEXT(matmul(f({2, 3}), f({3, 4}).to(DType::f64)), "matmul: expected one dtype, got f32 and f64; cast one with to() or use amp::Autocast");
  TEXT(matmul(i64({2, 3}), i64({3, 2})), "matmul: expected a floating dtype, got i64");
  TEXT(matmul(f({}), f({2})), "matmul: expected at least one dimension, got [] (f32) and [2] (f32)");
  TEXT(matmul(undefined, f({2})), "matmul: a tensor is undefined");
  TEXT(matmul(f({2, 3, 4}), f({3, 4, 5})), "matmul: shapes [2] and [3] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(matmul(f({2, 3, 4}), f({5, 6})), "matmul: expected [..., m, k] and [..., k, n], got [2, 3, 4] (f32) and [5, 6] (f32)");
  TEXT(linear(f({2, 3}), f({4, 5})), "linear: expected x [..., 5] for weight [4, 5] (f32), got [2, 3] (f32)");
  TEXT(linear(f({2, 3}), f({4, 3}), f({3})), "linear: expected bias [4] (f32), got [3] (f32)");
  TEXT(linear_relu(f({2, 3}), f({4, 3}).to(DType::f16)), "linear_relu: expected weight in x's dtype f32, got [4, 3] (f16); cast one with to() or use amp::Autocast");
  TEXT(linear_gelu(i64({2, 3}), i64({4, 3})), "linear_gelu: expected a floating dtype, got i64");
  TEXT(linear(undefined, f({2, 2})), "linear: x or weight is undefined");
  TEXT(linear(f({}), f({2, 2})), "linear: expected x [..., in] and weight [out, in], got [] (f32) and [2, 2] (f32)");
}

TEST_CASE("errors of losses and indices") {
  TEXT(cross_entropy(f({3}), i64({3})), "cross_entropy: expected x [n, classes, ...], got [3] (f32)");
  TEXT(cross_entropy(f({3, 4}), f({3})), "cross_entropy: expected integer targets or class probabilities [3, 4], got [3] (f32)");
  TEXT(cross_entropy(f({3, 4}), i64({2})), "cross_entropy: expected target [3] (i64), got [2] (i64)");
  TEXT(cross_entropy(f({2, 4, 5}), i64({2, 4})), "cross_entropy: expected target [2, 5], got [2, 4] (i64)");
  TEXT(cross_entropy(f({2, 3}), tensor({int64_t{0}, int64_t{3}})), "cross_entropy: target 3 at row 1 is out of range for 3 classes");
  TEXT(cross_entropy(f({2, 3}), tensor({int64_t{-1}, int64_t{0}})), "cross_entropy: target -1 at row 0 is out of range for 3 classes");
  TEXT(cross_entropy(f({2, 3}), i64({2}), {.label_smoothing = 1.5}), "cross_entropy: expected label_smoothing in [0, 1], got 1.5");
  TEXT(cross_entropy(undefined, i64({2})), "cross_entropy: x or target is undefined");
  TEXT(cross_entropy(i64({2, 3}), i64({2})), "cross_entropy: expected x [n, classes] of a floating dtype, got [2, 3] (i64)");
  TEXT(mse_loss(f({2}), f({3})), "mse_loss: shapes [2] and [3] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(one_hot(f({2}), 3), "one_hot: expected a tensor of integers");
  TEXT(one_hot(i64({2}), 0), "one_hot: expected at least one class, got 0");
}

TEST_CASE("errors of making, converting and writing tensors") {
  TEXT(empty({-1}), "a tensor's sizes must be 0 or more, got [-1]");
  TEXT(empty({int64_t{1} << 40, int64_t{1} << 40}), "size 1099511627776 * 1099511627776 does not fit 64 bits");
  TEXT(arange(-1), "arange: expected a size of 0 or more, got -1");
  TEXT(randperm(-1), "randperm: expected a size of 0 or more, got -1");
  TEXT(tensor({{1, 2}, {3}}), "tensor: rows of 2 and 1 elements; all must be equally long");
  TEXT(from_blob(nullptr, {2}), "from_blob: data is null");
  TEXT(randint(3, 3, {2}), "randint: expected low < high, got 3 and 3");
  TEXT(normal_(f({2}), 0, -1), "normal_: expected a standard deviation of 0 or more, got -1");
  TEXT(uniform_(i64({2})), "uniform: expected a floating dtype, got i64");
  TEXT(cast(undefined, DType::f16), "cast: the tensor is undefined");
  TEXT(undefined.to(Device::cpu()), "to: the tensor is undefined");
  TEXT(f({2, 3}).copy_(f({2})), "copy_: shapes [2, 3] and [2] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(f({1, 3}).copy_(f({2, 3})), "copy_: cannot broadcast [2, 3] to [1, 3]");
  TEXT(f({2}).copy_(undefined), "copy_: a tensor is undefined");
  TEXT(f({1}).expand({3}).fill_(2), "fill: writes to an expanded tensor [3] (f32), whose elements share memory; clone() it first");
  TEXT(f({2}).item(), "item: needs a tensor of one element, got [2] (f32)");
  TEXT(undefined.item(), "item: the tensor is undefined");
  TEXT(f({2}).data<double>(), "data: asked for f64, the tensor is f32");
  TEXT(undefined.shape(), "a tensor is undefined; it has no shape, dtype or data");
  TEXT(undefined.to_vector<float>(), "to_vector: the tensor is undefined");
  TEXT(i64({2}).requires_grad_(), "requires_grad_: i64 has no gradient; use a floating dtype");
  TEXT(f({2}).set_(undefined), "set_: both tensors must be defined");
  TEXT(call(*find_op("transfer"), {f({2, 3}).t()}, Attrs::of(Device::cpu())), "transfer: expected a contiguous tensor");
  TEXT(device("gpu"), "device: expected cpu, cuda or cuda:N, got 'gpu'");
  TEXT(device("cuda:x"), "device: expected cpu, cuda or cuda:N, got 'cuda:x'");
  TEXT(device("cuda:-1"), "device: expected cpu, cuda or cuda:N, got 'cuda:-1'");
  if (devices(DeviceType::cuda).empty()) CHECK_THROWS_WITH(f({2}).to(Device::cuda()), Catch::Contains("cuda"));
}

TEST_CASE("errors of optimizers") {
  Tensor w = ones({2, 3}, {.requires_grad = true});
  TEXT(optim::SGD(std::vector<Tensor>{}), "SGD: there are no parameters to optimize; is HT_FIELDS complete?");
  TEXT(optim::SGD({f({2})}), "SGD: parameter 0 is not a leaf that requires a gradient");
  TEXT(optim::SGD({w * 2}), "SGD: parameter 0 is not a leaf that requires a gradient");
  TEXT(optim::Adam({w, w}), "Adam: parameter 1 [2, 3] (f32) is given twice");
  TEXT(optim::SGD({w}, {.lr = -1}), "SGD: expected lr of 0 or more, got -1");
  TEXT(optim::SGD({w}, {.momentum = -.5}), "SGD: expected momentum of 0 or more, got -0.5");
  TEXT(optim::SGD({w}, {.nesterov = true}), "SGD: nesterov needs a momentum and no dampening");
  TEXT(optim::Adam({w}, {.beta1 = 1}), "Adam: expected beta1 in [0, 1), got 1");
  TEXT(optim::AdamW({w}, {.eps = -1}), "AdamW: expected eps of 0 or more, got -1");
  TEXT(optim::LAMB({w}, {.beta2 = -1}), "LAMB: expected beta2 in [0, 1), got -1");
  TEXT(optim::Muon({w}, {.momentum = 1}), "Muon: expected momentum in [0, 1), got 1");
  TEXT(optim::Muon({w}, {.steps = -1}), "Muon: expected steps of 0 or more, got -1");
  TEXT(optim::Muon({w}, {.products = DType::i32}), "Muon: expected products of a floating dtype, got i32");
  TEXT(optim::Muon({w, ones({3}, {.requires_grad = true})}), "Muon: parameter 1 [3] (f32) is no matrix; give it to AdamW, as an optimizer of its own");
  TEXT(optim::orthogonalize(f({3})), "orthogonalize: expected matrices [..., m, n], got [3] (f32)");
  TEXT(trust_ratio_({f({2, 3}).t()}, {f({3, 2})}), "trust_ratio: direction 0 is [3, 2] (f32) with strides [1, 3], its parameter [3, 2] (f32); expected it contiguous, of that shape, in f32 or, beside f64, in f64");
  TEXT(trust_ratio_({f({2})}, {f({2}), f({2})}), "trust_ratio: expected as many directions as parameters, got 3 tensors");
  TEXT(optim::clip_grad_norm_({w}, -1), "clip_grad_norm_: expected max_norm of 0 or more, got -1");
  Tensor turned = ones({2, 3}).t().requires_grad_();
  optim::SGD opt({turned});
  turned.set_grad(ones({3, 2}));
  TEXT(opt.step(), "sgd: parameter 0 [3, 2] (f32) must be contiguous and floating, its strides are [1, 3]");
  optim::Adam adam({w});
  StateDict s;
  TEXT(adam.load_state_dict(s), "state: there is no entry '0.lr'");
  s.add("0.lr", zeros({}, {.dtype = DType::f64}));
  s.add("0.0.m", zeros({3}));
  TEXT(adam.load_state_dict(s), "Adam: state '0.0.m' is [3] (f32), the parameter is [2, 3] (f32)");
}
