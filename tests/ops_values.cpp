// Values of every operator: 16-bit and f32 results against f64, any layout against a contiguous one, memory checks.
// Bounds are by kind of operator, never one tolerance for all.
#include "halftone/ops/update.h"
#include "halftone/tests/operators.h"
#include "halftone/tests/threads.h"

using namespace halftone;
using namespace halftone::tests;

namespace {

using Names = std::set<std::string_view>;

// Not correctly rounded: their f32 result may be some ulp off, their 16-bit result one.
const Names approximate = {"rsqrt", "exp", "expm1", "erf", "log", "log1p", "log2", "sin", "cos", "tanh", "sigmoid", "silu", "mish", "hardswish",
                           "hardsigmoid", "softplus", "elu", "pow", "pow_tensor", "atan2", "leaky_relu", "unscale", "scale_all", "var", "softmax", "dropout"};
const Names products = {"matmul", "linear", "linear_relu", "linear_gelu", "conv", "conv_relu", "conv_input", "conv_weight"};
const Names sums = {"sum", "mean", "total_norm"};
// Several operations of which some cancel: bounded by the largest result.
const Names composites = {"softmax_grad", "log_softmax", "log_softmax_grad", "cross_entropy", "cross_entropy_grad", "lerp", "addcmul", "addcdiv",
                          "batch_norm", "batch_norm_relu", "batch_norm_grad", "batch_norms_relu", "batch_norms_relu_grad",
                          "layer_norm", "group_norm", "rms_norm", "row_norm_grad", "add_layer_norm", "add_layer_norm_grad",
                          "pad_grad", "scatter_add", "index_add", "embedding_grad", "nll_loss", "nll_loss_grad", "binary_cross_entropy",
                          "binary_cross_entropy_with_logits", "squared_error", "attention", "attention_grad", "ctc_loss", "ctc_loss_grad",
                          "avg_pool", "avg_pool_input", "max_pool_scatter", "fold", "resize", "resize_input", "linear_grad", "trust_ratio",
                          "tanh_grad", "sigmoid_grad", "gelu_grad", "gelu_tanh_grad", "silu_grad", "mish_grad",
                          "lstm_step", "lstm_step_grad", "gru_step", "gru_step_grad"};

Names binary_names() {
  Names n;
  elementwise::each(binary::All{}, [&]<class Op>(Type<Op>) { n.insert(Op::name); });
  return n;
}

int digits(DType t) { return t == DType::f16 ? 10 : t == DType::bf16 ? 7 : t == DType::f32 ? 23 : 52; }
double ulp(double v, DType t) {
  int lowest = t == DType::f16 ? -14 : t == DType::f64 ? -1022 : -126;
  int e = v == 0 || !std::isfinite(v) ? lowest : std::max(lowest, std::ilogb(v));
  return std::ldexp(1.0, e - digits(t));
}
double rounded(double v, DType t) { return tensor(v).to(t).item(); }

// The inputs in f64, values unchanged; controls of fixed dtype stay.
Tensors in_f64(const Sample& s, const Tensors& in, bool absolute) {
  Tensors wide;
  for (size_t i = 0; i < in.size(); ++i) {
    if (!in[i].defined()) { wide.push_back({}); continue; }
    Tensor x = s.in[i].dtype ? in[i].clone() : in[i].to(DType::f64);
    wide.push_back(absolute && is_floating(x.dtype()) ? x.abs() : x);
  }
  return wide;
}

// How many products are added up for an element of the result, at most.
double terms_of(std::string_view name, const Tensors& in) {
  int64_t n = in[0].shape().back();
  if (name == "conv" || name == "conv_relu" || name == "conv_input") n = in[1].numel() / std::max<int64_t>(1, in[1].size(name == "conv_input" ? 1 : 0));
  if (name == "conv_weight") n = in[0].numel() / std::max<int64_t>(1, in[0].size(1));
  return static_cast<double>(n);
}

// What the sums of magnitudes in an error bound are.
struct Bound {
  double factor = 0;                   // times 2^-24
  std::vector<double> magnitudes = {};  // per element of the first output; empty: the largest result
  double ulps = 0;                     // of the result's dtype
};
Bound bound_of(const OpDef& op, const Sample& s, const Tensors& in, DType t) {
  std::string_view name = op.name;
  double last = t == DType::f32 ? 0 : 1;
  // Steep: erfc by 4 + x^2 ulp, and the exponential of a rounded number.
  if (name == "normal_cdf" || name == "gelu" || name == "gelu_tanh") return {.ulps = t == DType::f32 ? 8.0 : 1.0};
  if (approximate.contains(name)) return {.ulps = t == DType::f32 ? 4.0 : 1.0};
  if (products.contains(name)) {
    const OpDef& plain = name.starts_with("linear") ? *find_op("linear") : op;
    double k = terms_of(name, in);
    return {k + 8, call(plain, in_f64(s, in, true), s.attrs).to_vector<double>(), last + (name == "linear_gelu" ? 4 : 0)};
  }
  if (sums.contains(name)) {
    double n = static_cast<double>(std::max<int64_t>(in[0].numel(), 1));
    return {4 + std::log2(n), call(op, in_f64(s, in, true), s.attrs).to_vector<double>(), .5};
  }
  if (composites.contains(name) || optimizer_names().contains(name)) return {.factor = 32, .ulps = last};
  return {};
}

bool close(double got, double expected, double largest, const Bound& b, size_t i, DType t) {
  if (std::isnan(expected)) return std::isnan(got);
  double nearest = rounded(expected, t);
  if (got == nearest) return true;
  if (b.factor == 0 && b.ulps == 0) return false;
  double slack = b.factor * 0x1p-24 * (b.magnitudes.empty() ? largest : b.magnitudes[i]) + b.ulps * ulp(nearest, t);
  return std::abs(got - expected) <= slack + (is_16bit_dtype(t) ? .5 * ulp(nearest, t) : 0);
}

void compare(const std::vector<Tensor>& got, const std::vector<Tensor>& expected, const Bound& b) {
  REQUIRE(got.size() == expected.size());
  for (size_t k = 0; k < got.size(); ++k) {
    REQUIRE(got[k].shape() == expected[k].shape());
    auto y = got[k].to_vector<double>(), e = expected[k].to_vector<double>();
    double largest = 0;
    for (double v : e) largest = std::max(largest, std::isfinite(v) ? std::abs(v) : 0);
    Bound here = b;
    if (k > 0) here.magnitudes = {};
    for (size_t i = 0; i < y.size(); ++i) {
      if (close(y[i], e[i], largest, here, i, got[k].dtype())) continue;
      INFO("result " << k << ", element " << i);
      CHECK(y[i] == e[i]);
      break;
    }
  }
}

// ---- layouts

enum class Layout { transposed, strided, outer_strided, padded, expanded, all_expanded, contiguous };
constexpr Layout layouts[] = {Layout::transposed, Layout::strided, Layout::outer_strided, Layout::padded, Layout::expanded, Layout::all_expanded};
constexpr const char* layout_names[] = {"transposed", "strided with offset", "outer strided", "odd strides at size 1", "expanded", "all expanded", "contiguous"};

Tensor with_gaps(const Tensor& x, int dim) {
  if (x.rank() == 0) {
    Tensor big = full({3}, 3, x.options());
    return big.select(0, 1).copy_(x);
  }
  Shape s = x.shape();
  auto d = static_cast<size_t>(dim < 0 ? dim + x.rank() : dim);
  int64_t n = s[d];
  s[d] = 3 * n + 2;
  Tensor big = is_floating(x.dtype()) ? full(s, std::nan(""), x.options()) : full(s, 1, x.options());
  return big.slice(static_cast<int>(d), 2, 2 + 3 * n, 3).copy_(x);
}

// x, or for the expanded ones a tensor like it whose rows repeat, laid out in this way.
Tensor laid_out(const Tensor& x, Layout l) {
  switch (l) {
    case Layout::transposed: {
      Shape order;
      for (int d = x.rank(); d-- > 0;) order.push_back(d);
      return x.permute(order).contiguous().permute(order);
    }
    case Layout::strided: return with_gaps(x, -1);
    case Layout::outer_strided: return with_gaps(x, 0);
    case Layout::padded: {
      Strides strides = x.strides();
      for (size_t d = 0; d < strides.size(); ++d) if (x.shape()[d] == 1) strides[d] = 12345;
      return x.as_strided(x.shape(), strides, 0);
    }
    case Layout::expanded: return x.rank() == 0 || x.size(0) == 0 ? x : x.slice(0, 0, 1).clone().expand(x.shape());
    case Layout::all_expanded: return x.numel() == 0 ? x : x.reshape({x.numel()}).select(0, 0).clone().expand(x.shape());
    case Layout::contiguous: return x;
  }
  return x;
}

const Names contiguous_only = {"transfer", "permutation", "integers", "scaler_update"};
const Names any_layout_of_fixed_dtype = {"where", "all", "any", "take_along", "put_along", "one_hot", "cross_entropy", "cross_entropy_grad", "nll_loss", "nll_loss_grad", "gather", "scatter", "scatter_add",
                                         "index_select", "index_add", "embedding", "embedding_grad", "nonzero"};

bool may_vary(const OpDef& op, const Sample& s, const Tensors& in, size_t i) {
  if (!in[i].defined() || contiguous_only.contains(op.name)) return false;
  if (optimizer_names().contains(op.name) && i != update::lists_at + 2) return false;
  if (std::string_view(op.name) == "trust_ratio" && i < in.size() / 2) return false;
  return !s.in[i].dtype || any_layout_of_fixed_dtype.contains(op.name);
}

}  // namespace

TEST_CASE("16-bit and f32 results agree with f64, from any layout") {
  Shares cases("oracle_combinations");
  each_sample([&](const OpDef& op, const Sample& s, size_t k) {
    for (DType t : {DType::f16, DType::bf16, DType::f32}) {
      if (!supports(op, s, t)) continue;
      INFO(describe(op, s, k) << ", " << str(t));
      Tensors in = make_inputs(s, t);
      Bound b = bound_of(op, s, in, t);
      auto expected = results(op, in_f64(s, in, false), s.attrs);
      if (std::string_view(op.name) == "uniform")  // what rounds to the open end takes the closed one's place
        expected[0] = where(ge(expected[0].to(t), 1), 0, expected[0]);
      for (Layout l : {Layout::contiguous, Layout::transposed, Layout::strided, Layout::outer_strided, Layout::padded}) {
        Tensors laid = make_inputs(s, t);
        int varied = 0;
        for (size_t i = 0; i < laid.size(); ++i) {
          if (l == Layout::contiguous || !may_vary(op, s, laid, i) || (std::string_view(op.name) == "view" && l != Layout::padded)) continue;
          Tensor dense = laid[i];
          laid[i] = laid_out(dense, l);
          varied += laid[i].strides() != dense.strides();
        }
        if (l != Layout::contiguous && varied == 0) continue;  // the same again
        INFO(layout_names[static_cast<int>(l)]);
        compare(results(op, laid, s.attrs), expected, b);
        cases.count(op.name);
      }
    }
  });
  cases.check();
}

TEST_CASE("sums and products of whole numbers are exact wherever the result can be") {
  each_sample([](const OpDef& op, const Sample& s, size_t k) {
    bool gelu = std::string_view(op.name) == "linear_gelu";
    if ((!products.contains(op.name) || gelu) && std::string_view(op.name) != "sum") return;
    Sample whole = s;
    for (auto& i : whole.in) i.low = -1, i.high = 2;
    for (DType t : {DType::f16, DType::bf16, DType::f32}) {
      INFO(describe(op, s, k) << ", " << str(t));
      Tensors in;
      for (size_t i = 0; i < s.in.size(); ++i)
        in.push_back(s.in[i].present ? from_values(sample_values(whole.in[i], i, true), s.in[i].shape, t) : Tensor());
      compare(results(op, in, s.attrs), results(op, in_f64(s, in, false), s.attrs), {});
      count("oracle_combinations");
    }
  });
}

TEST_CASE("integer results agree with f64") {
  const Names binary = binary_names();
  const Names other_meaning = {"fill", "total_norm", "div", "cast"}, wraps = {"neg", "sub"};
  each_sample([&](const OpDef& op, const Sample& s, size_t k) {
    bool chooses = std::string_view(op.name) == "where";
    if (s.in.empty() || (s.in[0].dtype && !chooses) || other_meaning.contains(op.name)) return;
    if (binary.contains(op.name) && s.in.size() == 1) return;  // its number is not whole
    for (DType t : {DType::i32, DType::i64, DType::u8}) {
      if (!supports(op, s, t) || (t == DType::u8 && wraps.contains(op.name))) continue;
      INFO(describe(op, s, k) << ", " << str(t));
      Tensors in = make_inputs(s, t);
      auto got = results(op, in, s.attrs), expected = results(op, in_f64(s, make_inputs(s, t), false), s.attrs);
      REQUIRE(got.size() == expected.size());
      for (size_t i = 0; i < got.size(); ++i) CHECK(got[i].to_vector<double>() == expected[i].to_vector<double>());
      count("oracle_combinations");
    }
  });
}

TEST_CASE("any layout gives the bits of a contiguous one") {
  each_sample([](const OpDef& op, const Sample& s, size_t k) {
    for (DType t : {DType::f32, DType::f16, DType::f64}) {
      if (!supports(op, s, t)) continue;
      for (Layout l : layouts) {
        bool is_view = std::string_view(op.name) == "view";
        if (is_view && l != Layout::padded) continue;
        Tensors strange = make_inputs(s, t), dense;
        for (size_t i = 0; i < strange.size(); ++i) {
          if (may_vary(op, s, strange, i)) {
            bool written = writes(op, strange, s.attrs, i);
            if (!written || l < Layout::expanded) strange[i] = laid_out(strange[i], l);
          }
          dense.push_back(strange[i].defined() ? strange[i].clone() : Tensor());
        }
        INFO(describe(op, s, k) << ", " << str(t) << ", " << layout_names[static_cast<int>(l)]);
        CHECK(same_bits(results(op, strange, s.attrs), results(op, dense, s.attrs)));
      }
    }
  });
}

TEST_CASE("a product's bits do not depend on how its factors lie") {
  manual_seed(4);
  for (int64_t m : {1, 2, 5, 16, 17, 65, 513})
    for (int64_t n : {1, 3, 17, 64, 529})
      for (int64_t k : {1, 4, 33, 300})
        for (DType t : {DType::f32, DType::f64, DType::bf16}) {
          Tensor a = randn({m, k}).to(t), b = randn({k, n}).to(t);
          Tensor at = a.t().contiguous().t(), bt = b.t().contiguous().t();
          Tensor y = matmul(a, b);
          INFO(m << " " << n << " " << k << " " << str(t));
          CHECK(same_bits(matmul(at, b), y));
          CHECK(same_bits(matmul(a, bt), y));
          CHECK(same_bits(matmul(at, with_gaps(b, 1)), y));
        }
}

TEST_CASE("operators neither write beside their outputs nor read fresh memory") {
  struct Checks {
    Checks() { set_memory_checks({.guard = true, .poison = true}); }
    ~Checks() { set_memory_checks({}); }
  };
  int64_t before = overwritten_guards();
  each_sample([](const OpDef& op, const Sample& s, size_t k) {
    for (DType t : {DType::f32, DType::bf16, DType::f64}) {
      if (!supports(op, s, t)) continue;
      auto plain = results(op, make_inputs(s, t), s.attrs);
      Checks on;
      INFO(describe(op, s, k) << ", " << str(t));
      CHECK(same_bits(results(op, make_inputs(s, t), s.attrs), plain));
    }
  });
  CHECK(overwritten_guards() == before);
}

TEST_CASE("an operator gives the same bits for any number of threads") {
  std::vector<std::vector<Tensor>> first;
  for (int n : {1, 2, 3}) {
    const tests::Threads threads(n);
    size_t at = 0;
    each_sample([&](const OpDef& op, const Sample& s, size_t k) {
      if (!supports(op, s, DType::f32)) return;
      INFO(describe(op, s, k) << ", " << n << " threads");
      auto y = results(op, make_inputs(s, DType::f32), s.attrs);
      if (n == 1) first.push_back(y);
      else CHECK(same_bits(y, first[at]));
      ++at;
    });
    // Large enough to be shared: sums, rows and blocks of products.
    manual_seed(3);
    Tensor a = randn({300, 400}), b = randn({400, 260}), c = randn({200000});
    auto y = std::vector{matmul(a, b), sum(c), mean(a, {0}), softmax(a, 1), exp(c), var(a, {1}), amax(c),
                         prod(a, {0}), logsumexp(c), norm(c), norm(a, {1}, {.p = 3}), cumsum(a, 1), cumprod(a, 0), sort(a, 0).indices, topk(a, 5).values};
    if (n == 1) first.push_back(y);
    else CHECK(same_bits(y, first[at]));
  }
}

TEST_CASE("the scoreboard counts operators") {
  count("operators", static_cast<int64_t>(registry().size()));
  CHECK(registry().size() > 40);
}
