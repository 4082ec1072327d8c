// Every operator under autocast: the dtype its policy promises, and the bits that casting by hand gives, gradients included.
#include "halftone/tests/operators.h"

using namespace halftone;
using namespace halftone::tests;

namespace {

bool narrow(const Tensor& t) { return t.defined() && is_floating(t.dtype()) && t.dtype() != DType::f64; }

// What a policy does to the arguments, done by hand.
Tensors by_hand(Cast policy, const Tensors& in, DType low) {
  Tensors out = in;
  DType widest = low;
  for (auto& t : in) if (narrow(t)) widest = promote(widest, t.dtype());
  for (auto& t : out) {
    if (!narrow(t)) continue;
    if (policy == Cast::lower) t = t.to(low);
    if (policy == Cast::full) t = t.to(DType::f32);
    if (policy == Cast::widest) t = t.to(widest);
  }
  return out;
}

// Policy total makes a result of one number f32.
bool gives_total(const OpDef& op, const Tensors& in, const Attrs& attrs) {
  if (op.cast != Cast::total) return false;
  Call c{.op = &op, .in = in, .attrs = attrs, .out = {}};
  return op.infer(c)[0].shape.rank() == 0;
}

// Some arguments f32, some 16-bit: only where the policy makes them alike.
enum class Mix { f32, low, mixed };
DType mixed_dtype(Mix m, DType low, size_t k) { return m == Mix::f32 || (m == Mix::mixed && k % 2 == 1) ? DType::f32 : low; }

struct Arguments {
  Tensors in;
  std::vector<Tensor> leaves;
  Arguments(const OpDef& op, const Sample& s, Mix m, DType low) {
    for (size_t k = 0; k < s.in.size(); ++k) {
      Tensor x = make_input(s.in[k], k, mixed_dtype(m, low, k));
      if (op.backward && x.defined() && s.in[k].differentiable && is_floating(x.dtype())) {
        x.requires_grad_();
        leaves.push_back(x);
      }
      in.push_back(x);
    }
  }
  std::vector<Tensor> gradients(const std::vector<Tensor>& y) const {
    if (leaves.empty() || y.empty() || !y[0].requires_grad()) return {};
    weighed(y).backward();
    std::vector<Tensor> g;
    for (auto& l : leaves) g.push_back(l.grad());
    return g;
  }
};

bool banned(const OpDef& op, DType low) { return op.cast == Cast::banned && low == DType::f16; }
bool unlike_allowed(const OpDef& op) { return op.cast == Cast::lower || op.cast == Cast::full || op.cast == Cast::widest; }

}  // namespace

TEST_CASE("every operator under autocast follows its policy, bit for bit, gradients too") {
  each_sample([](const OpDef& op, const Sample& s, size_t k) {
    for (DType low : {DType::f16, DType::bf16})
      for (Mix m : {Mix::f32, Mix::low, Mix::mixed}) {
        if (!supports(op, s, low) || (m == Mix::mixed && (!unlike_allowed(op) || s.in.size() < 2))) continue;
        INFO(describe(op, s, k) << ", " << str(low) << ", mix " << static_cast<int>(m));
        if (banned(op, low)) {
          amp::Autocast region({.dtype = low});
          CHECK_THROWS_WITH(results(op, make_inputs(s, low), s.attrs), Catch::Contains("unsafe under f16 autocast; use"));
          continue;
        }
        Arguments a(op, s, m, low), b(op, s, m, low);
        std::vector<Tensor> got, expected;
        {
          amp::Autocast region({.dtype = low});
          got = results(op, a.in, s.attrs);
        }
        bool total = gives_total(op, b.in, s.attrs);
        expected = results(op, by_hand(op.cast, b.in, low), total ? op.in_f32(s.attrs) : s.attrs);
        if (total) CHECK(expected[0].dtype() == DType::f32);
        CHECK(same_bits(got, expected));
        CHECK(same_bits(a.gradients(got), b.gradients(expected)));
        for (auto& l : a.leaves) if (l.grad().defined()) CHECK(l.grad().dtype() == l.dtype());
      }
  });
}

TEST_CASE("the dtype of a result under autocast is its policy's") {
  each_sample([](const OpDef& op, const Sample& s, size_t k) {
    // Operators whose result has the dtype of their floating inputs, and no other.
    if (!supports(op, s, DType::f32) || op.writes || s.in[0].dtype) return;
    auto own = call_all(op, make_inputs(s, DType::f32), s.attrs);
    auto own16 = call_all(op, make_inputs(s, DType::bf16), s.attrs);
    if (own.empty() || own[0].dtype() != DType::f32 || own16[0].dtype() != DType::bf16) return;
    for (DType low : {DType::f16, DType::bf16}) {
      if (banned(op, low)) continue;
      INFO(describe(op, s, k) << ", " << str(low));
      amp::Autocast region({.dtype = low});
      DType from_f32 = call_all(op, make_inputs(s, DType::f32), s.attrs)[0].dtype(), from_low = call_all(op, make_inputs(s, low), s.attrs)[0].dtype();
      switch (op.cast) {
        case Cast::lower: CHECK((from_f32 == low && from_low == low)); break;
        case Cast::full: CHECK((from_f32 == DType::f32 && from_low == DType::f32)); break;
        case Cast::total: CHECK((from_f32 == DType::f32 && from_low == (gives_total(op, make_inputs(s, low), s.attrs) ? DType::f32 : low))); break;
        default: CHECK((from_f32 == DType::f32 && from_low == low));
      }
    }
  });
}

TEST_CASE("autocast leaves f64 and integers alone") {
  each_sample([](const OpDef& op, const Sample& s, size_t k) {
    for (DType t : {DType::f64, DType::i64, DType::i32}) {
      bool whole = t != DType::f64;
      if (!supports(op, s, t) || (whole && (s.in.empty() || s.in[0].dtype || op.writes || std::string_view(op.name) == "total_norm"))) continue;
      INFO(describe(op, s, k) << ", " << str(t));
      auto expected = results(op, make_inputs(s, t), s.attrs);
      for (DType low : {DType::f16, DType::bf16}) {
        if (banned(op, low)) continue;
        amp::Autocast region({.dtype = low});
        CHECK(same_bits(results(op, make_inputs(s, t), s.attrs), expected));
      }
    }
  });
}

TEST_CASE("f64 beside f32 stays an error under autocast, as without") {
  Tensor a = ones({2, 2}, {.dtype = DType::f64}), b = ones({2, 2});
  CHECK_THROWS_WITH(matmul(a, b), "matmul: expected one dtype, got f64 and f32; cast one with to() or use amp::Autocast");
  amp::Autocast region({.dtype = DType::bf16});
  CHECK_THROWS_WITH(matmul(a, b), "matmul: expected one dtype, got f64 and bf16; cast one with to() or use amp::Autocast");
}

TEST_CASE("inside a region the layer is off for what an operator calls itself") {
  Tensor x = ones({3, 4}), target = zeros({3}, {.dtype = DType::i64});
  amp::Trace t = amp::trace([&] {
    amp::Autocast region({.dtype = DType::bf16});
    cross_entropy(x.to(DType::bf16), target);
  });
  CHECK(t.casts() == 1);  // the one that the program wrote
  CHECK(t.count("cross_entropy") == 1);
}
