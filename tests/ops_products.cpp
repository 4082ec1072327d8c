// Products spelled in matmul: against loops written here, autocast, gradients, error texts.
#include <atomic>
#include <map>
#include <thread>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/operators.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;
using tests::same_bits;

namespace {

using Doubles = std::vector<double>;
Tensor f(const Shape& s) { return ones(s); }
Doubles values(const Tensor& t) { return t.to_vector<double>(); }
const Tensor undefined;

Tensor drawn(const Shape& s, uint64_t seed) {
  Doubles v(static_cast<size_t>(s.numel()));
  for (auto& x : v) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<double>(static_cast<int64_t>(seed >> 33) % 17 - 8);  // whole numbers: products and sums are exact
  }
  return tensor(v).reshape(s);
}

// Every assignment of values to letters, one by one.
Doubles by_loops(const std::vector<std::string>& terms, const std::string& result, const std::vector<Tensor>& operands) {
  std::map<char, int64_t> size, at;
  for (size_t k = 0; k < terms.size(); ++k)
    for (size_t d = 0; d < terms[k].size(); ++d) size[terms[k][d]] = operands[k].shape()[d];
  std::string order = result;
  for (auto& [letter, n] : size) if (result.find(letter) == std::string::npos) order += letter;
  std::vector<Doubles> v;
  for (auto& o : operands) v.push_back(values(o));
  auto place = [&](const std::string& term) {
    int64_t p = 0;
    for (char letter : term) p = p * size[letter] + at[letter];
    return static_cast<size_t>(p);
  };
  int64_t all = 1, kept = 1;
  for (char letter : order) all *= size[letter];
  for (char letter : result) kept *= size[letter];
  Doubles y(static_cast<size_t>(kept));
  for (int64_t i = 0; i < all; ++i) {
    int64_t rest = i;
    for (size_t k = order.size(); k-- > 0; rest /= size[order[k]]) at[order[k]] = rest % size[order[k]];
    double product = 1;
    for (size_t k = 0; k < terms.size(); ++k) product *= v[k][place(terms[k])];
    y[place(result)] += product;
  }
  return y;
}

void check_einsum(const std::vector<std::string>& terms, const std::string& result, std::map<char, int64_t> sizes) {
  std::string equation;
  std::vector<Tensor> operands;
  for (auto& t : terms) {
    equation += (equation.empty() ? "" : ",") + t;
    Shape s;
    for (char letter : t) s.push_back(sizes[letter]);
    operands.push_back(drawn(s, operands.size() + 3));
  }
  equation += "->" + result;
  INFO(equation);
  Tensor y = einsum(equation, operands);
  REQUIRE(y.rank() == static_cast<int>(result.size()));
  CHECK(values(y) == by_loops(terms, result, operands));
  std::vector<Tensor> leaves, whole;
  for (auto& o : operands) {
    leaves.push_back((o * 0.25).detach().requires_grad_());
    whole.push_back(o.to(DType::i64));
  }
  CHECK(values(einsum(equation, whole)) == values(y));
  auto g = [&](const std::vector<Tensor>& in) { return std::vector{einsum(equation, in)}; };
  CHECK(gradcheck_report(g, leaves, {.rtol = 1e-5, .atol = 1e-6}) == "");
  tests::count("gradchecks");
  tests::count("oracle_combinations", 2);
}

}  // namespace

TEST_CASE("einsum is a loop over its letters") {
  std::map<char, int64_t> s{{'a', 2}, {'b', 3}, {'i', 4}, {'j', 3}, {'k', 2}, {'l', 5}, {'z', 1}};
  check_einsum({"ij", "jk"}, "ik", s);
  check_einsum({"ij", "jk"}, "ki", s);
  check_einsum({"aij", "ajk"}, "aik", s);
  check_einsum({"abij", "kj"}, "abik", s);
  check_einsum({"i", "j"}, "ij", s);
  check_einsum({"i", "i"}, "", s);
  check_einsum({"i", "i"}, "i", s);
  check_einsum({"ij"}, "ji", s);
  check_einsum({"ij"}, "i", s);
  check_einsum({"ij"}, "", s);
  check_einsum({"jj"}, "", s);
  check_einsum({"jbj"}, "bj", s);
  check_einsum({"jbjk", "k"}, "jb", s);
  check_einsum({"ij", "jk", "kl"}, "il", s);
  check_einsum({"ij", "jk", "kl", "l"}, "i", s);
  check_einsum({"aij", "bj", "ai"}, "ab", s);
  check_einsum({"ijk", "jki"}, "", s);
  check_einsum({"abj", "bjk"}, "akb", s);
  check_einsum({"ziz", "zj"}, "ij", s);
  check_einsum({"ij", "k"}, "j", s);
}

TEST_CASE("einsum without a result, with spaces, and with an ellipsis") {
  Tensor a = drawn({2, 3}, 1), b = drawn({3, 4}, 2);
  CHECK(values(einsum("ij,jk", {a, b})) == values(matmul(a, b)));
  CHECK(values(einsum("ba", {a})) == values(a.t()));
  CHECK(values(einsum(" i j , j k -> k i ", {a, b})) == values(matmul(a, b).t()));
  CHECK(values(einsum("ii", {drawn({3, 3}, 3)})) == values(sum(diagonal(drawn({3, 3}, 3)))));
  Tensor x = drawn({2, 5, 3, 4}, 4), y = drawn({5, 4, 2}, 5);
  CHECK(values(einsum("...ij,...jk->...ik", {x, y})) == values(matmul(x, y)));
  CHECK(values(einsum("...ij,...jk", {x, y})) == values(matmul(x, y)));
  CHECK(values(einsum("...ij->...ji", {x})) == values(x.t()));
  CHECK(values(einsum("i...->...", {x})) == values(sum(x, {0})));
  CHECK(values(einsum("...,...->...", {x, drawn({3, 4}, 6)})) == values(x * drawn({3, 4}, 6)));
  CHECK(einsum("ij,jk->ik", {zeros({2, 0}), zeros({0, 3})}).sum().item() == 0);
  CHECK(einsum("ij,jk->ik", {zeros({0, 2}), zeros({2, 3})}).shape() == Shape{0, 3});
  CHECK(values(einsum("ij,ij->j", {drawn({1, 3}, 7), drawn({2, 3}, 8)})) == values(sum(drawn({1, 3}, 7) * drawn({2, 3}, 8), {0})));
}

TEST_CASE("report_B33: with beta 0 what is added is not read") {
  tests::report("pytorch#96037");
  Tensor nan = full({2, 2}, std::nan(""));
  CHECK(values(addmm(nan, f({2, 3}), f({3, 2}), {.beta = 0})) == Doubles{3, 3, 3, 3});
  CHECK(values(baddbmm(expand(nan, {1, 2, 2}), f({1, 2, 3}), f({1, 3, 2}), {.beta = 0})) == Doubles{3, 3, 3, 3});
  CHECK(values(addmm(undefined, f({2, 3}), f({3, 2}), {.beta = 0, .alpha = 2})) == Doubles{6, 6, 6, 6});
}

TEST_CASE("report_B35: products with a size of 0") {
  tests::report("PaddlePaddle#79511");
  CHECK(values(addmm(f({2, 3}), f({2, 0}), f({0, 3}), {.beta = 2})) == Doubles(6, 2.0));
  CHECK(addmm(f({0, 3}), f({0, 4}), f({4, 3})).shape() == Shape{0, 3});
  CHECK(baddbmm(f({2, 3, 0}), f({2, 3, 4}), f({2, 4, 0})).shape() == Shape{2, 3, 0});
  CHECK(values(bmm(f({2, 1, 0}), f({2, 0, 1}))) == Doubles{0, 0});
  CHECK(dot(f({0}), f({0})).item() == 0);
  CHECK(outer(f({0}), f({3})).shape() == Shape{0, 3});
}

TEST_CASE("addmm, baddbmm, dot and outer") {
  Tensor a = drawn({2, 3}, 1), b = drawn({3, 4}, 2), c = drawn({4}, 3);
  CHECK(values(addmm(c, a, b, {.beta = .5, .alpha = 2})) == values(c * .5 + matmul(a, b) * 2));
  CHECK(values(addmm(drawn({2, 1}, 4), a, b)) == values(drawn({2, 1}, 4) + matmul(a, b)));
  Tensor x = drawn({2, 3, 4}, 5), y = drawn({2, 4, 5}, 6), z = drawn({3, 5}, 7);
  CHECK(values(baddbmm(z, x, y, {.beta = 3})) == values(z * 3 + matmul(x, y)));
  CHECK(values(bmm(x, y)) == values(matmul(x, y)));
  CHECK(dot(tensor<double>({1, 2, 3}), tensor<double>({4, 5, 6})).item() == 32);
  CHECK(values(outer(tensor<int64_t>({1, 2}), tensor<int64_t>({3, 4, 5}))) == Doubles{3, 4, 5, 6, 8, 10});
  auto g = [](const std::vector<Tensor>& in) { return std::vector{addmm(in[0], in[1], in[2], {.beta = .5, .alpha = 2})}; };
  std::vector<Tensor> leaves{(c * .1).detach().requires_grad_(), (a * .1).detach().requires_grad_(), (b * .1).detach().requires_grad_()};
  CHECK(gradcheck_report(g, leaves, {.rtol = 1e-5, .atol = 1e-6}) == "");
  CHECK(gradgradcheck_report(g, leaves, {.rtol = 1e-5, .atol = 1e-6}) == "");
  tests::count("gradchecks");
  tests::count("gradgradchecks");
}

TEST_CASE("under autocast these products are 16-bit, sums included") {
  amp::Autocast region({.dtype = DType::bf16});
  CHECK(bmm(f({1, 2, 3}), f({1, 3, 2})).dtype() == DType::bf16);
  CHECK(addmm(f({2}), f({2, 3}), f({3, 2})).dtype() == DType::bf16);
  CHECK(baddbmm(f({2}), f({1, 2, 3}), f({1, 3, 2}), {.beta = .5}).dtype() == DType::bf16);
  CHECK(einsum("ij,jk->ik", {f({2, 3}), f({3, 2})}).dtype() == DType::bf16);
}

TEST_CASE("weights of linear that stay are packed once, and anew when they are written, moved or gone") {
  manual_seed(7);
  NoGrad off;
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (auto [in, out] : {std::pair{512, 96}, {48, 33}, {1, 5}})
      for (int round = 0; round < 3; ++round) {  // the next round's weights may lie where these did
        INFO(str(t) << ", " << in << " to " << out);
        Tensor all = randn({2, out, in}).to(t), bias;
        for (int change = 0; change < 3; ++change) {
          for (int64_t rows : {1, 2, 33, 300})
            for (int half = 0; half < 2; ++half) {
              Tensor w = all.select(0, half), x = randn({rows, in}).to(t);
              const Tensor expected = linear(x, w.clone(), bias);  // of weights that nobody has used
              for (int use = 0; use < 3; ++use) CHECK(same_bits(linear(x, w, bias), expected));
            }
          all.view({-1}).slice(0, change, change + 1).fill_(change + 2);
        }
      }
}

TEST_CASE("packed weights follow an optimizer's steps, under autocast too") {
  manual_seed(8);
  nn::Sequential net(nn::Linear(512, 40), nn::ReLU(), nn::Linear(40, 3));
  optim::SGD opt(net.parameters(), {.lr = 0.5});
  Tensor x = randn({9, 512}), target = randn({9, 3});
  auto of_copies = [&](bool mixed) {  // weights that nobody has used
    amp::Autocast region({.enabled = mixed});
    Tensors w;
    for (auto& p : net.parameters()) w.push_back(p.detach().clone());
    return linear(linear_relu(x, w[0], w[1]), w[2], w[3]);
  };
  for (int step = 0; step < 4; ++step) {
    for (bool mixed : {false, true})
      for (int use = 0; use < 3; ++use) {
        NoGrad off;
        amp::Autocast region({.enabled = mixed});
        CHECK(same_bits(net(x), of_copies(mixed)));
      }
    amp::Autocast region({.enabled = step % 2 == 0});
    for (int part = 0; part < 3; ++part) mse_loss(net(x), target).backward();
    opt.step();
    opt.zero_grad();
  }
}

TEST_CASE("what is kept of weights goes when they are trained on many rows, and with them") {
  auto allocated = [] { return memory_stats(Device::cpu()).allocated; };
  const int64_t before = allocated();
  {
    Tensor w = randn({512, 512}).to(DType::f16).requires_grad_(), x = randn({300, 512}).to(DType::f16);
    const int64_t without = allocated();
    auto infer = [&] {
      NoGrad off;
      linear(x, w);
    };
    infer();
    CHECK(allocated() == without);
    infer();
    const int64_t with = allocated();
    CHECK(with >= without + 512 * 512 * 2);  // f16 is multiplied from rows, and widened first where no unit takes it
    CHECK(with <= without + 512 * 528 * 4);
    infer();
    CHECK(allocated() == with);
    linear(x, w);
    CHECK(allocated() == without);
  }
  CHECK(allocated() == before);
}

TEST_CASE("several threads may use the same weights for the first time") {
  manual_seed(9);
  Tensor x = randn({5, 512});
  for (int round = 0; round < 20; ++round) {
    Tensor w = randn({64, 512}).to(DType::bf16), y = x.to(DType::bf16), bias;
    const Tensor expected = linear(y, w.clone());
    std::atomic<int> wrong = 0;
    std::vector<std::thread> all;
    for (int i = 0; i < 4; ++i)
      all.emplace_back([&] {
        for (int use = 0; use < 5; ++use) wrong += !same_bits(linear(y, w), expected);
      });
    for (auto& t : all) t.join();
    CHECK(wrong == 0);
  }
}

TEST_CASE("errors of products spelled in matmul") {
  TEXT(bmm(f({2, 3}), f({3, 2})), "bmm: expected [b, m, k] and [b, k, n], got [2, 3] (f32) and [3, 2] (f32)");
  TEXT(bmm(f({2, 3, 4}), f({1, 4, 2})), "bmm: batches differ: [2, 3, 4] (f32) and [1, 4, 2] (f32)");
  TEXT(bmm(undefined, f({1, 1, 1})), "bmm: a tensor is undefined");
  TEXT(addmm(f({3}), f({2, 3}), f({3, 2})), "addmm: shapes [3] and [2, 2] do not broadcast; counted from the back, sizes must be equal or 1");
  TEXT(addmm(f({5, 2, 2}), f({2, 3}), f({3, 2})), "addmm: cannot broadcast c [5, 2, 2] (f32) to [2, 2]");
  TEXT(addmm(undefined, f({2, 3}), f({3, 2})), "addmm: c is undefined; it may be with beta 0");
  TEXT(addmm(f({2}), f({2, 3}), f({2, 2})), "matmul: expected [..., m, k] and [..., k, n], got [2, 3] (f32) and [2, 2] (f32)");
  TEXT(baddbmm(f({2}), f({2, 3}), f({2, 2})), "baddbmm: expected [b, m, k] and [b, k, n], got [2, 3] (f32) and [2, 2] (f32)");
  TEXT(dot(f({2}), f({3})), "dot: expected vectors of one length, got [2] (f32) and [3] (f32)");
  TEXT(dot(f({2, 2}), f({2})), "dot: expected two vectors, got [2, 2] (f32) and [2] (f32)");
  TEXT(outer(f({2}), f({})), "outer: expected two vectors, got [2] (f32) and [] (f32)");
  TEXT(einsum("ij", {}), "einsum 'ij': expected at least one operand");
  TEXT(einsum("ij,jk->ik", {f({2, 3})}), "einsum 'ij,jk->ik': it has 2 operands, 1 were given");
  TEXT(einsum("ij->ji", {f({2})}), "einsum 'ij->ji': 'ij' names 2 dimensions, operand 0 is [2] (f32)");
  TEXT(einsum("ijk...->i", {f({2, 2})}), "einsum 'ijk...->i': 'ijk...' names 3 dimensions, operand 0 is [2, 2] (f32)");
  TEXT(einsum("i1->i", {f({2, 2})}), "einsum 'i1->i': '1' is no letter; an operand is letters with at most one ...");
  TEXT(einsum("i..->i", {f({2, 2})}), "einsum 'i..->i': '.' is no letter; an operand is letters with at most one ...");
  TEXT(einsum("......->", {f({2, 2})}), "einsum '......->': '.' is no letter; an operand is letters with at most one ...");
  TEXT(einsum("ij,jk->ik", {f({2, 3}), f({4, 5})}), "einsum 'ij,jk->ik': j is 3 and 4 in operand 1 [4, 5] (f32)");
  TEXT(einsum("ii->i", {f({2, 3})}), "einsum 'ii->i': i is 2 and 3 in operand 0 [2, 3] (f32)");
  TEXT(einsum("ii->i", {f({1, 3})}), "einsum 'ii->i': i names sizes 1 and 3 in operand 0 [1, 3] (f32)");
  TEXT(einsum("ij->ik", {f({2, 3})}), "einsum 'ij->ik': the result's k is in no operand");
  TEXT(einsum("ij->ii", {f({2, 3})}), "einsum 'ij->ii': the result names i twice");
  TEXT(einsum("ij,j->i", {f({2, 3}), undefined}), "einsum 'ij,j->i': operand 1 is undefined");
  TEXT(einsum("ij,j->i", {f({2, 3}), zeros({3}, {.dtype = DType::i64})}), "einsum 'ij,j->i': expected operands of one kind, got [2, 3] (f32) and [3] (i64)");
}
