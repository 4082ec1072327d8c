// Every CUDA kernel against the CPU's: each operator of the registry on its samples, in every dtype and in layouts that
// are dense, transposed, strided, broadcast and channels-last; then sizes and values that samples do not reach.
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <cstdlib>
#include <set>

#include "halftone/autograd/autograd.h"
#include "halftone/core/backend.h"
#include "halftone/core/capture.h"
#include "halftone/core/tuning.h"
#include "halftone/ops/ops.h"
#include "halftone/ops/optimizers.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;
using Catch::Matchers::Contains;

#define NEEDS_CUDA() \
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device")

namespace {

// HALFTONE_TEST_DEVICE=1: all of this on the second GPU, while the first is the thread's.
const char* second = std::getenv("HALFTONE_TEST_DEVICE");
const Device gpu = Device::cuda(second ? std::atoi(second) : 0);

// ---- values

// Numbers that look random and are the same in every run.
struct Draws {
  uint64_t seed = 1, used = 0;
  double in(double low, double high) { return low + uniform01(philox(seed, used++).v[0]) * (high - low); }
};

Tensor drawn(Draws& draws, const SampleInput& s, DType dtype) {
  double low = s.low, high = s.high;
  if (dtype == DType::b8) low = 0, high = 2;
  if (dtype == DType::u8) low = std::max(low, 0.0);
  Tensor t = empty(s.shape, {.dtype = dtype});
  int64_t n = t.numel();
  visit(dtype, [&]<class T>(Type<T>) {
    T* p = t.data<T>();
    for (int64_t i = 0; i < n; ++i) {
      double v = draws.in(low, high);
      p[i] = convert<T>(is_floating(dtype) ? v : std::floor(v));
    }
  });
  return t;
}
Tensor drawn(uint64_t seed, const Shape& shape, DType dtype, double low = -2, double high = 2) {
  Draws draws{seed};
  return drawn(draws, {.shape = shape, .low = low, .high = high}, dtype);
}

// ---- layouts

enum class Layout { dense, transposed, strided, broadcast, channels_last };

// A view of a buffer, made alike on both devices.
struct Laid {
  Tensor base;  // on the CPU
  Shape shape;
  Strides strides;
  int64_t offset = 0;
  Tensor on(Device d, Tensor& buffer) const {
    buffer = d == Device::cpu() ? base.clone() : base.to(d);
    return buffer.as_strided(shape, strides, offset);
  }
};

Laid lay(const Tensor& x, Layout layout) {
  const Shape& shape = x.shape();
  Laid l{x, shape, x.strides(), 0};
  if (x.numel() == 0 || x.rank() == 0) return l;
  if (layout == Layout::broadcast) {
    l.base = x.slice(0, 0, 1).clone();
    l.strides = l.base.strides();
    l.strides[0] = 0;
  } else if (layout == Layout::transposed) {
    Shape order;
    for (int d = x.rank() - 1; d >= 0; --d) order.push_back(d);
    l.base = x.permute(order).clone();
    l.strides = l.base.permute(order).strides();
  } else if (layout == Layout::channels_last && x.rank() >= 4) {
    Shape order{0};
    for (int d = 2; d < x.rank(); ++d) order.push_back(d);
    order.push_back(1);
    l.base = x.permute(order).clone();
    l.strides = channels_last_strides(shape);
  } else if (layout == Layout::strided) {
    for (auto& s : std::span(&l.strides[0], l.strides.size())) s *= 2;
    l.offset = 1;
    l.base = zeros({2 * x.numel() + 1}, {.dtype = x.dtype()});
    l.base.as_strided(l.shape, l.strides, l.offset).copy_(x);
  }
  return l;
}

// ---- comparisons

struct Bound {
  double ulps = 0;      // of the result's dtype; 0: the same bits, but for NaN
  double absolute = 0;  // and so much more
};

double epsilon(DType t) {
  switch (t) {
    case DType::f16: return 0x1p-10;
    case DType::bf16: return 0x1p-7;
    case DType::f32: return 0x1p-23;
    default: return 0x1p-52;
  }
}

// Says where two tensors differ, and nothing when they do not.
std::string difference(const Tensor& expected, const Tensor& on_gpu, Bound bound) {
  if (!expected.defined() || !on_gpu.defined()) return expected.defined() == on_gpu.defined() ? "" : "one is undefined";
  if (expected.shape() != on_gpu.shape() || expected.dtype() != on_gpu.dtype())
    return text::cat("expected ", expected.meta(), ", got ", on_gpu.meta());
  const Tensor got = to_host(on_gpu, "test"), want = to_host(expected, "test");
  return visit(want.dtype(), [&]<class T>(Type<T>) -> std::string {
    const T *a = want.data<T>(), *b = got.data<T>();
    for (int64_t i = 0, n = want.numel(); i < n; ++i) {
      if (std::memcmp(a + i, b + i, sizeof(T)) == 0) continue;
      double x = convert<double>(a[i]), y = convert<double>(b[i]);
      if (std::isnan(x) && std::isnan(y)) continue;
      double allowed = bound.ulps * epsilon(want.dtype()) * std::max(std::fabs(x), 0.01) + bound.absolute;
      if (is_floating(want.dtype()) && bound.ulps > 0 && std::fabs(x - y) <= allowed) continue;
      return text::cat("element ", i, " of ", want.meta(), ": expected ", x, ", got ", y, ", allowed ", allowed);
    }
    return "";
  });
}
void check_same(const Tensor& expected, const Tensor& on_gpu, Bound bound = {}) {
  CHECK(difference(expected, on_gpu, bound) == "");
}

// Operators whose results are rounded once, or never: the same bits on both devices.
const std::set<std::string_view> exact = {
    "cast", "clone", "copy", "fill", "where", "transfer", "cat", "slice_scatter", "diagonal_scatter", "pad", "pad_grad",
    "flip", "roll", "tril", "triu", "one_hot", "gather", "scatter", "index_select", "embedding", "nonzero", "neg", "abs",
    "sign", "square", "sqrt", "rsqrt", "reciprocal", "relu", "step", "leaky_relu", "isnan", "isinf", "isfinite",
    "logical_not", "add", "sub", "mul", "div", "maximum", "minimum", "relu_grad", "eq", "ne", "lt", "le", "gt",
    "ge", "logical_and", "logical_or", "logical_xor", "floor", "ceil", "round", "fmod", "clamp", "all", "any", "sort",
    "topk", "take_along", "put_along", "amax", "amin", "argmax", "argmin", "uniform", "integers", "draw_key", "dropout",
    "bernoulli", "multinomial", "unscale", "check_finite",
    "scale_all", "scaler_update", "max_pool", "max_pool_gather", "unfold"};
// Operators that add up: an error for each element.
const std::set<std::string_view> sums = {
    "sum", "mean", "var", "std", "norm", "prod", "logsumexp", "cumsum", "cumprod", "recurrence", "softmax",
    "softmax_grad", "log_softmax", "log_softmax_grad", "cross_entropy", "cross_entropy_grad", "nll_loss",
    "nll_loss_grad", "binary_cross_entropy", "binary_cross_entropy_with_logits", "squared_error", "attention",
    "attention_grad", "ctc_loss", "ctc_loss_grad", "scatter_add", "index_add", "embedding_grad", "total_norm",
    "matmul", "linear", "linear_relu", "linear_gelu", "conv", "conv_relu", "conv_input", "conv_weight", "batch_norm",
    "batch_norm_relu", "batch_norm_grad", "batch_norms_relu", "batch_norms_relu_grad", "layer_norm", "group_norm", "rms_norm", "row_norm_grad",
    "add_layer_norm", "add_layer_norm_grad", "avg_pool",
    "avg_pool_input", "max_pool_scatter", "fold", "resize", "resize_input", "trust_ratio", "linear_grad", "relu_grad_sums", "lstm_step",
    "lstm_step_grad", "gru_step", "gru_step_grad"};

bool is_optimizer(std::string_view op) {
  bool found = false;
  elementwise::each(update::All{}, [&]<class Op>(Type<Op>) { found |= op == Op::name; });
  return found;
}

Bound bound_for(std::string_view op, DType dtype, int64_t elements) {
  if (exact.contains(op)) return {};
  if (op == "normal" && dtype != DType::f64) return {};
  // Values around 2 whose difference may be small: devices fuse multiply-adds, the CPU does not.
  if (is_optimizer(op) || op == "lerp" || op == "addcmul" || op == "addcdiv")
    return {.ulps = 8, .absolute = 8 * epsilon(dtype == DType::f64 ? dtype : DType::f32)};
  // Slopes may be differences of what is nearly alike.
  for (auto activation : {"tanh", "sigmoid", "gelu", "gelu_tanh", "silu", "mish"})
    if (op == text::cat(activation, "_grad")) return {.ulps = 8, .absolute = 8 * epsilon(dtype == DType::f64 ? dtype : DType::f32)};
  if (!sums.contains(op)) return {.ulps = 8};
  auto n = static_cast<double>(elements);
  double wide = epsilon(dtype == DType::f64 ? dtype : DType::f32);
  if (op == "prod" || op == "cumprod") return {.ulps = 4 + n, .absolute = 4 * wide * n};  // each factor rounds the whole
  // Terms that may all go to one place, one after the other.
  if (op == "scatter_add" || op == "index_add" || op == "embedding_grad") return {.ulps = 4, .absolute = 32 * wide * n};
  // Factors of products are 16-bit on a GPU, weights and their gradients among them.
  if (op == "attention" || op == "attention_grad") return {.ulps = 4, .absolute = 4 * wide * n + (is_16bit_dtype(dtype) ? 4 * epsilon(dtype) : 0)};
  // cuDNN may round a gradient of weights to 16 bits on its way to f32.
  if (op == "conv_weight" && is_16bit_dtype(dtype)) return {.ulps = 2 * epsilon(dtype) / epsilon(DType::f32), .absolute = 4 * wide * n};
  // What is added to a gradient of an image, numbers up to 2, may come after it was rounded.
  if (op == "conv_input" && is_16bit_dtype(dtype)) return {.ulps = 4, .absolute = 4 * wide * n + 2 * epsilon(dtype)};
  return {.ulps = 4, .absolute = 4 * wide * n};
}

Tensors run(const OpDef& op, Tensors in, const Attrs& attrs, bool recording = true) {
  LayerScope kernel_only(uint8_t{0});
  Call c{.op = &op, .in = std::move(in), .attrs = attrs, .out = {}, .recording = recording};
  return dispatch(c);
}

// Runs one sample on both devices; false when the CPU refuses it.
bool run_sample(const OpDef& op, const Sample& sample, DType dtype, Layout layout) {
  Draws draws;
  Tensors host, device, host_buffers, device_buffers;
  int64_t elements = 0;
  Call probe{.op = &op, .in = {}, .attrs = sample.attrs, .out = {}};
  for (auto& s : sample.in)
    probe.in.push_back(
        s.present ? drawn(draws, s, s.dtype.value_or(s.wide && is_16bit_dtype(dtype) ? DType::f32 : dtype)) : Tensor());
  for (size_t i = 0; i < probe.in.size(); ++i) {
    const Tensor& x = probe.in[i];
    Tensor h, d;
    if (x.defined()) {
      bool plain = sample.in[i].dtype.has_value() || (layout == Layout::broadcast && op.writes && op.writes(probe, i));
      Laid l = lay(x, plain ? Layout::dense : layout);
      elements = std::max(elements, x.numel());
      host.push_back(l.on(Device::cpu(), h));
      device.push_back(l.on(gpu, d));
    } else {
      host.push_back({});
      device.push_back({});
    }
    host_buffers.push_back(h);
    device_buffers.push_back(d);
  }
  Tensors expected;
  try {
    expected = run(op, host, sample.attrs);
  } catch (const Error&) {
    CHECK_THROWS_AS(run(op, device, sample.attrs), Error);
    return false;
  }
  Tensors got = run(op, device, sample.attrs);
  Bound bound = bound_for(op.name, dtype, elements);
  REQUIRE(expected.size() == got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    INFO("output " << i);
    check_same(expected[i], got[i], bound);
  }
  for (size_t i = 0; i < device_buffers.size(); ++i) {
    INFO("memory of input " << i);
    check_same(host_buffers[i], device_buffers[i], bound);
  }
  return true;
}

constexpr DType every_dtype[] = {DType::f32, DType::f64, DType::f16, DType::bf16,
                                 DType::i64, DType::i32, DType::u8,  DType::b8};
constexpr DType floating_dtypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16};

// The same call on both devices, from a tensor on the CPU.
template <class F> void compare(const Tensor& x, Bound bound, F f) { check_same(f(x), f(x.to(gpu)), bound); }
Bound sum_bound(DType t, int64_t n) {
  return {.ulps = 4, .absolute = 4 * epsilon(t == DType::f64 ? t : DType::f32) * static_cast<double>(n)};
}

}  // namespace

namespace {
// By name: the library's operator, not a copy that a template would make here.
Tensor reduced(const char* name, const Tensor& x, reduce::Dims dims) {
  return call(*find_op(name), {x}, Attrs::of(dims));
}
}  // namespace

// HALFTONE_THIN=n: one in n of each operator's cases, as compute-sanitizer takes its time.
TEST_CASE("every operator's samples on CUDA agree with the CPU") {
  NEEDS_CUDA();
  const char* thin = std::getenv("HALFTONE_THIN");
  const int one_in = thin ? std::max(1, std::atoi(thin)) : 1;
  for (const OpDef* op : registry()) {
    if (op->view || !op->samples || !op->kernel[1]) continue;
    int ran = 0, at = 0;
    for (DType dtype : every_dtype) {
      if (!contains(op->dtypes[0], dtype) && op->dtypes[0] != only(DType::i64)) continue;
      for (Layout layout : {Layout::dense, Layout::transposed, Layout::strided, Layout::broadcast, Layout::channels_last}) {
        int number = 0;
        for (auto& sample : op->samples()) {
          bool image = std::any_of(sample.in.begin(), sample.in.end(), [](const SampleInput& in) { return in.shape.rank() >= 4; });
          if ((layout == Layout::channels_last && !image) || at++ % one_in != 0) continue;
          INFO(op->name << ", sample " << number++ << ", " << name(dtype) << ", layout " << static_cast<int>(layout));
          bool compared = run_sample(*op, sample, dtype, layout);
          ran += compared;
          if (compared) tests::count("parity_cases");
        }
      }
    }
    INFO(op->name);
    CHECK(ran > 0);
  }
}

TEST_CASE("every operator of the CPU has a CUDA kernel") {
  NEEDS_CUDA();
  const std::set<std::string_view> host_only = {"permutation"};
  for (const OpDef* op : registry())
    if (!op->view && op->kernel[0] && !host_only.contains(op->name)) {
      INFO(op->name);
      CHECK(op->kernel[1] != nullptr);
    }
}

TEST_CASE("casts on CUDA have the CPU's bits") {
  NEEDS_CUDA();
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  const Tensor special = tensor<double>({
      0.0, -0.0, 1, -1, 0.5, 1.5, 2.5, 1.0009765625, 1.00048828125, 65504, 65519, 65519.999, 65520, 1e5, -1e5,
      6e-8, 0x1p-24, 0x1p-25, 0x1.0001p-25, 0x1.8p-24, 1e-40, 1e-46, 5e-324, 3.4028235e38, 3.4028236e38, 1e39,
      inf, -inf, nan, 127, 128, 255, 256, -128, 2147483647, 2147483648, -2147483649.0, 9.2e18, 9.3e18, -1e19,
      1 + 0x1p-11, 1 + 0x1p-11 + 0x1p-40, 1 + 0x1p-8, 1 + 0x1p-8 + 0x1p-50});
  for (DType from : every_dtype)
    for (DType to : every_dtype) {
      INFO(name(from) << " to " << name(to));
      compare(special.to(from), {}, [&](const Tensor& x) { return x.to(to); });
      compare(drawn(3, {1003}, from, -300, 300), {}, [&](const Tensor& x) { return x.to(to); });
      compare(drawn(4, {37, 41}, from, -300, 300), {}, [&](const Tensor& x) { return x.t().to(to); });
    }
}

TEST_CASE("every 16-bit pattern widens and every kind of float narrows alike, NaN included") {
  NEEDS_CUDA();
  std::vector<uint16_t> patterns(1 << 16);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  std::vector<uint32_t> floats;
  for (uint64_t i = 0; i < uint64_t{1} << 32; i += 4099) floats.push_back(static_cast<uint32_t>(i));
  auto same_bits = [](const Tensor& a, const Tensor& b) {
    Tensor host = b.cpu();
    return std::memcmp(a.raw_data(), host.raw_data(), static_cast<size_t>(a.numel()) * size_of(a.dtype())) == 0;
  };
  for (DType t : {DType::f16, DType::bf16}) {
    Tensor x = from_bytes(patterns.data(), t, {patterns.size()}, {.dtype = t});
    CHECK(same_bits(x.to(DType::f32), x.to(gpu).to(DType::f32)));
    Tensor y = from_bytes(floats.data(), DType::f32, {floats.size()}, {});
    CHECK(same_bits(y.to(t), y.to(gpu).to(t)));
  }
}

TEST_CASE("copies that transpose") {
  NEEDS_CUDA();
  for (DType t : {DType::u8, DType::f16, DType::f32, DType::f64})
    for (auto& [shape, order] : std::vector<std::pair<Shape, Shape>>{
         {{70, 133}, {1, 0}}, {{3, 65, 40}, {0, 2, 1}}, {{65, 3, 40}, {1, 2, 0}}, {{33, 20, 35}, {2, 0, 1}},
         {{2, 3, 17, 19}, {0, 2, 3, 1}}, {{1, 64, 64}, {0, 2, 1}}, {{64, 33, 3, 3}, {0, 2, 3, 1}}, {{64, 3, 3, 33}, {0, 3, 1, 2}},
         {{5, 130, 7}, {0, 2, 1}}, {{5, 7, 130}, {0, 2, 1}}, {{300, 9}, {1, 0}}, {{9, 300}, {1, 0}}, {{2, 16, 15}, {0, 2, 1}},
         {{3, 64, 144}, {0, 2, 1}}, {{3, 144, 64}, {0, 2, 1}}, {{2, 66, 130}, {0, 2, 1}}, {{130, 2, 18}, {1, 2, 0}}}) {
      INFO(name(t) << ' ' << str(shape));
      compare(drawn(5, shape, t), {}, [&](const Tensor& x) { return x.permute(order).clone(); });
      compare(drawn(5, shape, t), {}, [&](const Tensor& x) {
        Tensor y = zeros(x.permute(order).shape(), x.options());
        return y.copy_(x.permute(order));
      });
      compare(drawn(5, shape, t), {}, [&](const Tensor& x) {
        Tensor y = zeros(x.permute(order).shape(), {.dtype = t == DType::f64 ? t : DType::f32, .device = x.device()});
        return y.copy_(x.permute(order));
      });
    }
}

TEST_CASE("elementwise over shapes that pack in part") {
  NEEDS_CUDA();
  for (DType t : {DType::f32, DType::f16, DType::f64, DType::u8})
    for (int64_t n : {1, 3, 8, 15, 16, 17, 31, 1000, 4096, 100003}) {
      Tensor a = drawn(6, {n}, t), b = drawn(7, {n}, t), row = drawn(8, {3, n}, t);
      INFO(name(t) << ' ' << n);
      check_same(a + b, a.to(gpu) + b.to(gpu));
      check_same(row + a, row.to(gpu) + a.to(gpu));  // broadcast over rows
      check_same(row * row.slice(1, 0, 1), row.to(gpu) * row.to(gpu).slice(1, 0, 1));  // and over columns
      check_same(a * 3, a.to(gpu) * 3);
      check_same(2 - a, 2 - a.to(gpu));
      check_same(a.slice(0, 1, {}) + b.slice(0, 1, {}),
                 a.to(gpu).slice(0, 1, {}) + b.to(gpu).slice(0, 1, {}));  // not aligned
      check_same(where(lt(a, b), a, 1), where(lt(a.to(gpu), b.to(gpu)), a.to(gpu), 1));
      Tensor h = row.clone(), d = row.to(gpu);
      h.slice(1, {}, {}, 2).fill_(7);
      d.slice(1, {}, {}, 2).fill_(7);
      check_same(h, d);
    }
}

TEST_CASE("reductions of every shape of work") {
  NEEDS_CUDA();
  struct Case { Shape shape; uint32_t dims; };
  for (auto& [shape, dims] : std::vector<Case>{
         {{1000003}, 1}, {{1 << 20}, 1}, {{300, 1000}, 1}, {{300, 1000}, 2}, {{5000, 10}, 1}, {{128, 10}, 1},
         {{10, 5000}, 2}, {{4, 100001}, 2}, {{100001, 4}, 1}, {{7, 5, 32, 32}, 0b1101},
         {{7, 32, 32, 5}, 0b0111}, {{6, 50, 70}, 2}, {{6, 50, 70}, 5}, {{33, 3, 5, 7}, 0b1010},
         {{4096, 256}, 1}, {{4100, 1000}, 2}, {{4100, 33}, 2}, {{2, 3}, 0}}) {
    int64_t n = shape.numel();
    for (DType t : floating_dtypes) {
      INFO(str(shape) << " over " << dims << ' ' << name(t));
      Tensor x = drawn(9, shape, t), whole = drawn(10, shape, t, -9, 9).to(DType::i32).to(t);  // many ties
      auto same = [&]<class Op>(Type<Op>, const Tensor& v, Bound bound) {
        auto f = [&](const Tensor& y) { return reduced(Op::name, y, {dims, false}); };
        compare(v, bound, f);
        check_same(f(v.to(gpu)), f(v.to(gpu)));  // the same bits every time
        if (v.rank() == 2)
          compare(v, bound, [&](const Tensor& y) { return reduced(Op::name, y.t().clone().t(), {dims, true}); });
        compare(v, bound, [&](const Tensor& y) { return reduced(Op::name, y.slice(-1, 1, {}, 2), {dims, true}); });
      };
      Bound b = sum_bound(t, n);
      same(Type<reduce::Sum>{}, x, b);
      same(Type<reduce::Mean>{}, x, b);
      same(Type<reduce::Amax>{}, x, {});
      same(Type<reduce::Argmax>{}, whole, {});
      same(Type<reduce::Argmin>{}, whole, {});
      if (is_16bit_dtype(t))
        compare(x, b, [&](const Tensor& y) { return reduced(reduce::Sum::name, y, {dims, true, true}); });
      compare(x, b, [&](const Tensor& y) { return call(op::var, {y}, Attrs::of(reduce::Var{dims, false, 1})); });
    }
    for (DType t : {DType::i32, DType::b8})
      compare(drawn(11, shape, t, -9, 9), {}, [&](const Tensor& y) {
        return reduced(reduce::Sum::name, y, {dims, false});
      });
  }
  Tensor far = drawn(12, {100000}, DType::f32, 9999, 10001);
  compare(far, {.ulps = 64}, [](const Tensor& y) { return var(y); });
}

TEST_CASE("NaN passes through reductions") {
  NEEDS_CUDA();
  for (int64_t at : {0, 1, 500, 4999}) {
    Tensor x = drawn(13, {5000}, DType::f32);
    x.data<float>()[at] = NAN;
    compare(x, {}, [](const Tensor& y) { return amax(y); });
    compare(x, {}, [](const Tensor& y) { return amin(y); });
    compare(x, {}, [](const Tensor& y) { return argmax(y); });
    compare(x, {}, [](const Tensor& y) { return sum(y); });
  }
}

TEST_CASE("softmax of lines long, short and strided") {
  NEEDS_CUDA();
  struct Case { Shape shape; int dim; };
  for (auto& [shape, dim] : std::vector<Case>{
         {{300, 10}, 1}, {{9, 32}, 1}, {{5, 100}, 1}, {{5, 127}, 1}, {{3, 1000}, 1}, {{3, 4096}, 1},
         {{3, 4097}, 1}, {{2, 16384}, 1}, {{2, 16385}, 1}, {{2, 40000}, 1}, {{10, 9000}, 0}, {{2, 3000, 3}, 1},
         {{8, 4, 33}, 0}, {{1500, 264}, 1}, {{1500, 1000}, 1}, {{1100, 1024}, 1}, {{1100, 1025}, 1}})
    for (DType t : floating_dtypes) {
      INFO(str(shape) << " along " << dim << ' ' << name(t));
      Tensor x = drawn(14, shape, t, -8, 8), g = drawn(15, shape, t);
      Bound b{.ulps = 8, .absolute = 8 * epsilon(t == DType::f64 ? t : DType::f32)};
      compare(x, b, [&](const Tensor& v) { return softmax(v, dim); });
      compare(x, b, [&](const Tensor& v) { return log_softmax(v, dim); });
      compare(x.slice(1, 1, {}), b, [&](const Tensor& v) { return softmax(v, dim); });
      for (OpDef* op : {&op::softmax_grad, &op::log_softmax_grad})
        for (DType to : floating_dtypes) {
          Tensor y = op == &op::softmax_grad ? softmax(x, dim) : log_softmax(x, dim).to(t);
          Attrs a = Attrs::of(SoftmaxGradAttrs{dim, to});
          check_same(call(*op, {y, g}, a), call(*op, {y.to(gpu), g.to(gpu)}, a),
                     {.ulps = 8,
                      .absolute = 4 * epsilon(t == DType::f64 ? t : DType::f32) *
                                  static_cast<double>(shape[static_cast<size_t>(dim)])});
        }
    }
  const float inf = INFINITY;
  for (auto& row :
       {tensor({-inf, 1.f, 2.f}), tensor({-inf, -inf, -inf}), tensor({inf, 1.f, 2.f}), tensor({NAN, 1.f, 2.f})}) {
    compare(row, {.ulps = 4}, [](const Tensor& v) { return softmax(v, 0); });
    compare(row, {.ulps = 4}, [](const Tensor& v) { return log_softmax(v, 0); });
  }
}

TEST_CASE("cross_entropy of many rows and classes") {
  NEEDS_CUDA();
  for (auto [rows, classes] : {std::pair{128, 10}, {1000, 10}, {1, 3}, {40, 1000}, {33, 50257}, {5000, 7}, {0, 4}})
    for (DType t : floating_dtypes)
      for (double smoothing : {0.0, 0.1})
        for (Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
          INFO(rows << " rows, " << classes << " classes, " << name(t) << ", smoothing " << smoothing);
          Tensor x = drawn(16, {rows, classes}, t, -5, 5), target = drawn(17, {rows}, DType::i64, 0, classes);
          Attrs a = Attrs::of(CrossEntropyAttrs{1, smoothing, reduction});
          Tensors want = run(op::cross_entropy, {x, target}, a),
                  got = run(op::cross_entropy, {x.to(gpu), target.to(gpu)}, a);
          Bound b{.ulps = 64, .absolute = 16 * epsilon(t == DType::f64 ? t : DType::f32)};
          for (size_t i = 0; i < 3; ++i) check_same(want[i], got[i], b);
          check_same(want[0], run(op::cross_entropy, {x.to(gpu), target.to(gpu)}, a, false)[0], b);
          check_same(got[0].cpu(), run(op::cross_entropy, {x.to(gpu), target.to(gpu)}, a)[0]);
          Tensor g = ones(reduction == Reduction::none ? Shape{rows} : Shape{}, {.dtype = want[0].dtype()});
          Tensors in{x, target, want[1], want[2], g}, on_gpu;
          for (auto& v : in) on_gpu.push_back(v.to(gpu));
          check_same(run(op::cross_entropy_grad, in, a)[0], run(op::cross_entropy_grad, on_gpu, a)[0],
                     {.ulps = 16, .absolute = 1e-6});
        }
}

TEST_CASE("a target out of range makes the loss NaN and throws at the next wait") {
  NEEDS_CUDA();
  Tensor x = drawn(18, {8, 10}, DType::f32).to(gpu);
  for (Reduction reduction : {Reduction::mean, Reduction::none}) {
    Tensor loss = cross_entropy(x, tensor<int64_t>({1, 2, 3, 12, 5, -7, 7, 8}).to(gpu), {.reduction = reduction});
    CHECK_THROWS_WITH(backend(DeviceType::cuda).synchronize(0),
                      Contains("cross_entropy: target 12 at 3 is out of range for 10"));
    CHECK(std::isnan(sum(loss).item()));
    CHECK_NOTHROW(backend(DeviceType::cuda).synchronize(0));
  }
}

TEST_CASE("random draws are the CPU's, bit for bit") {
  NEEDS_CUDA();
  for (DType t : floating_dtypes)
    for (int64_t n : {1, 4, 5, 1023, 1025, 100003}) {
      INFO(name(t) << ' ' << n);
      Tensor h = empty({n}, {.dtype = t}), d = empty({n}, {.dtype = t, .device = gpu});
      manual_seed(7);
      for (int draw = 0; draw < 3; ++draw) {
        check_same(uniform_(h, -1.5, 2.25), uniform_(d, -1.5, 2.25));
        check_same(normal_(h, 0.5, 3), normal_(d, 0.5, 3), t == DType::f64 ? Bound{.ulps = 64} : Bound{});
      }
      const Tensor x = drawn(40, {n + 1}, t, -3, 3);
      for (double p : {0., 0.1, 0.25, 0.7, 1.})
        for (int64_t begin : {0, 1}) {  // the latter not aligned
          manual_seed(9);
          check_same(dropout(x.slice(0, begin, n + begin), p), dropout(x.to(gpu).slice(0, begin, n + begin), p));
        }
    }
  Tensor h = empty({40, 30}), d = empty({40, 30}, {.device = gpu});
  manual_seed(8);
  check_same(uniform_(h.t().slice(0, 1, {}, 2)), uniform_(d.t().slice(0, 1, {}, 2)));
}

namespace {

// An optimizer's call over many parameters, alike on both devices.
struct Optimizing {
  Tensors host, device;
  void add(const Tensor& t) {
    host.push_back(t);
    device.push_back(t.defined() ? t.to(gpu) : Tensor());
  }
  Optimizing(int n, size_t states, bool memory, DType p, DType g, DType shadow, double found_inf) {
    DType wide = p == DType::f64 ? p : DType::f32;
    add(tensor(0.1));
    add(tensor<int64_t>(3));
    add(tensor(0.5f));
    add(tensor(static_cast<float>(found_inf)));
    add(memory ? tensor(0.7) : Tensor());
    for (size_t list = 0; list < 3 + states; ++list)
      for (int i = 0; i < n; ++i) {
        Shape shape{i * 37 % 300 + (i == 7 ? 70000 : 0)};
        bool is_shadow = list == 2 + states, absent = is_shadow && i % 3 == 0;
        DType t = list == 0 ? p : list == 1 ? g : is_shadow ? shadow : wide;
        // The third state is an average, whose square stays below the first: an average of squares.
        double low = list < 2 ? -1 : list == 2 ? .2 : 0, high = list == 4 ? .3 : 1;
        add(absent ? Tensor() : drawn(100 * list + static_cast<uint64_t>(i), shape, t, low, high));
      }
  }
};

}  // namespace

TEST_CASE("optimizers over many tensors") {
  NEEDS_CUDA();
  struct Kinds { DType p, g, shadow; };
  for (auto [p, g, shadow] : {Kinds{DType::f32, DType::f32, DType::f16},
                              {DType::f32, DType::f16, DType::f16},
                              {DType::f32, DType::bf16, DType::bf16},
                              {DType::f64, DType::f64, DType::f16},
                              {DType::f16, DType::f16, DType::f16},
                              {DType::bf16, DType::f32, DType::bf16},
                              {DType::f32, DType::f64, DType::f16},
                              {DType::f64, DType::f16, DType::bf16}})
    for (double found_inf : {0.0, 1.0}) {
      INFO(name(p) << ", gradients " << name(g) << ", copies " << name(shadow) << ", found_inf " << found_inf);
      auto compare_step = [&](const OpDef& op, int n, size_t states, bool memory, const Attrs& attrs) {
        Optimizing o(n, states, memory, p, g, shadow, found_inf);
        run(op, o.host, attrs);
        run(op, o.device, attrs);
        for (size_t i = 0; i < o.host.size(); ++i) {
          INFO("input " << i);
          // Values are around 2, and a difference of them may be small: devices fuse multiply-adds, the CPU does not.
          Bound rounding = o.host[i].defined() ? Bound{.ulps = 16, .absolute = 8 * epsilon(o.host[i].dtype())} : Bound{};
          check_same(o.host[i], o.device[i], found_inf != 0 ? Bound{} : rounding);
        }
      };
      elementwise::each(update::All{}, [&]<class Op>(Type<Op>) {
        INFO(Op::name);
        for (int n : {9, 150})  // in one launch and in several
          for (auto& settings : Op::examples())
            compare_step(update::def<Op>, n, Op::states.size(), update::has_memory<Op>, Attrs::of(update::Given<Op>{n, settings, {5, true}}));
      });
    }
}

TEST_CASE("unscaling, checks and norms of many tensors") {
  NEEDS_CUDA();
  for (double poison : {0.0, double(INFINITY), double(NAN)}) {
    Tensors host{tensor(0.25f), tensor(0.f)}, device;
    for (int i = 0; i < 500; ++i) {
      Tensor t = drawn(static_cast<uint64_t>(i), {i * 31 % 400}, floating_dtypes[i % 4]);
      if (i % 5 == 0 && t.numel() > 2) t = t.slice(0, {}, {}, 2);
      host.push_back(t);
    }
    if (poison != 0) host[203].slice(0, 1, 2).fill_(poison);
    for (auto& t : host)
      device.push_back(t.is_contiguous()
                           ? t.to(gpu)
                           : drawn(0, {2 * t.numel()}, t.dtype()).to(gpu).slice(0, {}, {}, 2).copy_(t.to(gpu)));
    Tensors without(std::span<const Tensor>(device).subspan(2)), without_host(std::span<const Tensor>(host).subspan(2));
    check_same(run(op::total_norm, without_host, {})[0], run(op::total_norm, without, {})[0], {.ulps = 4096});
    Tensors flag{tensor(0.f).to(gpu)};
    flag.append(without.begin(), without.end());
    run(op::check_finite, flag, {});
    CHECK(flag[0].item() == (poison != 0));
    run(op::unscale, host, {});
    run(op::unscale, device, {});
    for (size_t i = 0; i < host.size(); ++i) check_same(host[i], device[i]);
    CHECK(device[1].item() == (poison != 0));
    for (DType factor : {DType::f32, DType::f64}) {
      Tensor by = tensor(0.3).to(factor);
      scale_all_({without_host.begin(), without_host.end()}, by);
      scale_all_({without.begin(), without.end()}, by.to(gpu));
    }
    for (size_t i = 0; i < host.size(); ++i) check_same(host[i], device[i]);
  }
}

TEST_CASE("trust ratios of many tensors") {
  NEEDS_CUDA();
  std::vector<Tensor> host, device, host_parameters, parameters;
  for (int i = 0; i < 400; ++i) {
    DType t = floating_dtypes[i % 4];
    Shape shape{i == 7 ? 70000 : i * 37 % 3000};
    host_parameters.push_back(i == 11 ? zeros(shape, {.dtype = t}) : drawn(static_cast<uint64_t>(i), shape, t));
    parameters.push_back(host_parameters.back().to(gpu));
    host.push_back(drawn(1000 + static_cast<uint64_t>(i), shape, t == DType::f64 ? t : DType::f32));
    device.push_back(host.back().to(gpu));
  }
  trust_ratio_(host, host_parameters);
  trust_ratio_(device, parameters);
  for (size_t i = 0; i < host.size(); ++i) {
    INFO("tensor " << i);
    check_same(host[i], device[i], {.ulps = 16});
  }
}

TEST_CASE("more than 2^31 elements") {
  NEEDS_CUDA();
  const int64_t n = (int64_t{1} << 31) + 1003;
  Tensor x;
  try {
    x = full({n}, 3, {.dtype = DType::u8, .device = gpu});
  } catch (const Error&) {
    HT_SKIP("not enough device memory");
  }
  CHECK(sum(x).item<int64_t>() == 3 * n);
  x.slice(0, n - 1, n).fill_(9);
  CHECK(argmax(x).item<int64_t>() == n - 1);
  x.copy_(x + 1);
  CHECK(sum(x.slice(0, {}, {}, 2)).item<int64_t>() == 4 * (n / 2) + 10);
  CHECK(sum(x.slice(0, n - 3, n)).item<int64_t>() == 18);
}

TEST_CASE("report_B23 rows past 2^31 elements are normalised and pooled like the first") {
  NEEDS_CUDA();
  tests::report("pytorch#192007");
  const int64_t rows = 2097153, n = 1024;
  Tensor row = drawn(21, {1, n}, DType::f16), x;
  try {
    x = row.to(gpu).expand({rows, n}).contiguous();
  } catch (const Error&) {
    HT_SKIP("not enough device memory");
  }
  auto same_rows = [&](const Tensor& y) { check_same(y.slice(0, 0, 1).cpu(), y.slice(0, rows - 1, rows)); };
  same_rows(layer_norm(x, {n}));
  same_rows(rms_norm(x, {n}));
  same_rows(max_pool1d(x.view({rows, 1, n}), 2).squeeze(1));
  same_rows(avg_pool1d(x.view({rows, 1, n}), 2).squeeze(1));
  same_rows(batch_norm(x.view({rows, 1, n}), {}, {}, {}, {}).squeeze(1));
  same_rows(group_norm(x.view({rows, 2, n / 2}), 2).flatten(1));
}

TEST_CASE("convolutions of the shapes that networks have") {
  NEEDS_CUDA();
  struct Case { Shape x, w; Conv2dOptions o; };
  for (auto& [xs, ws, o] : std::vector<Case>{{{4, 1, 28, 28}, {32, 1, 3, 3}, {}},
                                             {{4, 32, 26, 26}, {64, 32, 3, 3}, {}},
                                             {{2, 3, 64, 64}, {64, 3, 7, 7}, {.stride = 2, .padding = 3}},
                                             {{2, 64, 28, 28}, {64, 64, 3, 3}, {.padding = 1}},
                                             {{2, 64, 28, 28}, {128, 64, 3, 3}, {.stride = 2, .padding = 1}},
                                             {{2, 64, 28, 28}, {256, 64, 1, 1}, {}},
                                             {{2, 64, 28, 28}, {128, 64, 1, 1}, {.stride = 2}},
                                             {{2, 32, 14, 14}, {32, 1, 3, 3}, {.padding = 1, .groups = 32}},
                                             {{2, 32, 15, 13}, {64, 8, 3, 3}, {.padding = same_padding, .dilation = 2, .groups = 4}},
                                             // windows of few numbers
                                             {{67, 1, 28, 28}, {32, 1, 3, 3}, {}},
                                             {{3, 1, 29, 27}, {33, 1, 5, 5}, {.stride = 2, .padding = 2}},
                                             {{5, 3, 17, 13}, {40, 3, 3, 3}, {.padding = same_padding, .dilation = 2}},
                                             {{2, 2, 9, 31}, {7, 2, 4, 4}, {.stride = {3, 1}, .padding = {0, 3}}},
                                             {{3, 7, 6, 5}, {72, 7, 2, 2}, {.stride = {1, 2}}},
                                             {{7, 1, 12, 12}, {1, 1, 1, 1}, {.stride = 2}},
                                             {{9, 3, 32, 32}, {64, 3, 3, 3}, {.padding = 1}},
                                             // by blocks of pixels
                                             {{2, 3, 65, 33}, {8, 3, 7, 7}, {.stride = 2, .padding = 2}},
                                             {{3, 4, 30, 31}, {16, 4, 5, 5}, {.stride = 2}},
                                             {{2, 2, 21, 40}, {5, 2, 6, 8}, {.stride = 2, .padding = {3, 1}}},
                                             {{2, 3, 12, 12}, {8, 3, 11, 11}, {.stride = 2, .padding = 5}},
                                             {{1, 1, 40, 9}, {8, 1, 9, 9}, {.stride = 2, .padding = {0, 4}}}})
    for (DType t : floating_dtypes) {
      INFO(str(xs) << ' ' << str(ws) << ' ' << name(t));
      Tensor x = drawn(22, xs, t, -1, 1), w = drawn(23, ws, t, -1, 1), b = drawn(24, {ws[0]}, t, -1, 1);
      auto k = static_cast<double>(w.numel() / ws[0]);
      Bound bound{.ulps = 4, .absolute = epsilon(t == DType::f64 ? t : DType::f32) * k};
      auto both = [&](Tensors in, auto f) {
        Tensors on_gpu;
        for (auto& i : in) on_gpu.push_back(i.to(gpu));
        check_same(f(in), f(on_gpu), bound);
        check_same(f(on_gpu).cpu(), f(on_gpu));  // the same bits every time
      };
      both({x, w, b}, [&](const Tensors& in) { return conv2d(in[0], in[1], in[2], o); });
      both({x, w, b}, [&](const Tensors& in) { return conv2d_relu(in[0], in[1], in[2], o); });
      Tensor y = conv2d(x, w, {}, o), g = drawn(25, y.shape(), t, -1, 1);
      bound.absolute = epsilon(t == DType::f64 ? t : DType::f32) * static_cast<double>(w.numel() / ws[1]);
      both({g, w}, [&](const Tensors& in) { return conv2d_input(in[0], in[1], {xs[2], xs[3]}, o); });
      bound.absolute = epsilon(t == DType::f64 ? t : DType::f32) * 4 * static_cast<double>(g.numel() / ws[0]);
      both({x, g}, [&](const Tensors& in) { return conv2d_weight(in[0], in[1], {ws[2], ws[3]}, o); });
      both({x, g.permute({0, 2, 3, 1}).clone()}, [&](const Tensors& in) { return conv2d_weight(in[0], in[1].permute({0, 3, 1, 2}), {ws[2], ws[3]}, o); });
    }
}

TEST_CASE("convolutions of volumes of one plane") {
  NEEDS_CUDA();
  for (DType t : floating_dtypes) {
    INFO(name(t));
    Conv3dOptions o{.stride = {1, 2, 2}, .padding = {0, 3, 3}};
    Tensor x = drawn(26, {2, 3, 1, 34, 40}, t, -1, 1), w = drawn(27, {8, 3, 1, 7, 7}, t, -1, 1);
    auto run = [&](const Tensor& images, const Tensor& weights) {
      Tensor a = images.detach().requires_grad_(), b = weights.detach().requires_grad_(), y = conv3d(a, b, {}, o);
      auto g = grad({(y * 0.5).sum()}, {a, b});
      return std::vector<Tensor>{y.detach(), g[0], g[1]};
    };
    auto expected = run(x, w), got = run(x.to(gpu), w.to(gpu));
    for (size_t i = 0; i < 3; ++i) check_same(expected[i], got[i], {.ulps = 4, .absolute = epsilon(t == DType::f64 ? t : DType::f32) * 2000});
  }
}

TEST_CASE("pools of images with channels last") {
  NEEDS_CUDA();
  auto turned = [](const Tensor& x) { return x.permute({0, 2, 3, 1}).clone().permute({0, 3, 1, 2}); };
  struct Case { Shape x; Size2 kernel; MaxPool2dOptions o; };
  for (auto& [shape, kernel, o] : std::vector<Case>{{{2, 16, 12, 12}, 2, {}},
                                                    {{3, 8, 13, 11}, 2, {.ceil_mode = true}},
                                                    {{2, 24, 15, 14}, 3, {.stride = 2, .padding = 1}},
                                                    {{1, 64, 9, 7}, 3, {.stride = 1, .padding = 1}},
                                                    {{2, 8, 17, 16}, {2, 5}, {.stride = Size2{3, 2}, .padding = {1, 2}}},
                                                    {{2, 8, 20, 1}, {4, 1}, {.stride = 1}},
                                                    {{2, 40, 18, 19}, 3, {.stride = 2, .padding = 1, .dilation = 2}},
                                                    {{1, 8, 40, 40}, 16, {.stride = 9, .padding = 8}}})
    for (DType t : floating_dtypes) {
      INFO(name(t) << ' ' << str(shape) << ", kernel " << kernel.h << " x " << kernel.w);
      Tensor x = turned(round(drawn(31, shape, DType::f32, -1, 1) * 4).to(t));  // many are equal: the first counts
      x = where(gt(drawn(32, shape, DType::f32, -1, 1), 0.97), std::nan(""), x);
      auto run = [&](const Tensor& on) {
        Tensor in = on.detach().requires_grad_(), y = max_pool2d(in, kernel, o), g = turned(drawn(33, y.shape(), t, -1, 1).to(on.device()));
        return std::pair{y.detach(), grad({(y * g).sum()}, {in})[0]};
      };
      auto [y, g] = run(x);
      auto [y_gpu, g_gpu] = run(turned(x.to(gpu)));
      check_same(y, y_gpu);
      check_same(g, g_gpu, {.ulps = 4, .absolute = epsilon(t == DType::f64 ? t : DType::f32) * 4});
    }
}

TEST_CASE("large products of sizes that are not multiples of 16 bytes, from and into memory that is not either") {
  NEEDS_CUDA();
  static constexpr int64_t guard = 3;  // elements
  // Exact in 16 bits and in TF32, so that only sums round.
  auto drawn_on_gpu = [](uint64_t seed, const Shape& shape, DType t) { return drawn(seed, shape, DType::bf16, -1, 1).to(gpu).to(t); };
  auto amid = [](const Tensor& x, double around) {
    Tensor all = full({x.numel() + 2 * guard}, around, {.dtype = x.dtype(), .device = gpu});
    all.slice(0, guard, guard + x.numel()).view(x.shape()).copy_(x);
    return all;
  };
  auto inside = [](const Tensor& all, const Shape& shape) { return all.slice(0, guard, guard + shape.numel()).view(shape); };
  auto check_product = [&](const Tensor& a, const Tensor& b) {
    const DType t = a.dtype();
    const Tensor exact = matmul(a.to(DType::f64), b.to(DType::f64));
    const Tensor want = exact.to(t).cpu();
    const Bound bound = sum_bound(t, a.size(-1)), wide_bound = sum_bound(DType::f32, a.size(-1));
    const Tensor y = matmul(a, b);
    check_same(want, y, bound);
    check_same(y.cpu(), matmul(a, b));
    const Tensor all = amid(zeros(want.shape(), {.dtype = t, .device = gpu}), 5);
    call_into(op::matmul, {a, b}, Attrs::of(MatmulAttrs{}), inside(all, want.shape()));
    check_same(want, inside(all, want.shape()), bound);
    check_same(amid(inside(all, want.shape()), 5).cpu(), all);
    if (is_16bit_dtype(t)) check_same(exact.to(DType::f32).cpu(), call(op::matmul, {a, b}, Attrs::of(MatmulAttrs{true})), wide_bound);
  };
  struct Case { int64_t m, k, n; };
  for (DType t : {DType::f16, DType::bf16, DType::f32}) {
    allow_tf32(true);
    for (auto [m, k, n] : {Case{1283, 1285, 1281},  // below the least size that is copied
                           {1301, 1293, 1299}, {1303, 1299, 1304}, {1301, 1296, 1299}, {1304, 2048, 1303}, {1303, 1304, 1304}, {1304, 1304, 1304}})
      for (int turned : {0, 1, 2, 3}) {
        INFO(name(t) << ' ' << m << ' ' << k << ' ' << n << ", turned " << turned);
        const Shape of_a = turned & 1 ? Shape{k, m} : Shape{m, k}, of_b = turned & 2 ? Shape{n, k} : Shape{k, n};
        const Tensor a = drawn_on_gpu(60, of_a, t), b = drawn_on_gpu(61, of_b, t);
        const Tensor off_a = inside(amid(a, NAN), of_a), off_b = inside(amid(b, NAN), of_b);
        auto as_factor = [&](const Tensor& x, int bit) { return turned & bit ? x.t() : x; };
        check_product(as_factor(a, 1), as_factor(b, 2));
        check_product(as_factor(off_a, 1), as_factor(off_b, 2));
      }
    for (bool shared : {false, true}) {
      INFO(name(t) << ", batches, shared " << shared);
      const Shape of_a{5, 901, 899}, of_b{shared ? 1 : 5, 899, 903};
      const Tensor a = inside(amid(drawn_on_gpu(62, of_a, t), NAN), of_a), b = inside(amid(drawn_on_gpu(63, of_b, t), NAN), of_b);
      check_product(a, b.expand({5, 899, 903}));
      check_product(b.expand({5, 899, 903}).transpose(1, 2), a.transpose(1, 2));
    }
    for (auto [rows, in, outs] : {Case{1301, 1293, 1299}, {1304, 2048, 1303}, {1304, 1303, 1304}}) {
      INFO(name(t) << ", linear of " << rows << ' ' << in << ' ' << outs);
      auto leaf = [&](uint64_t seed, const Shape& shape) { return inside(amid(drawn_on_gpu(seed, shape, t), NAN), shape).detach().requires_grad_(); };
      std::vector<Tensor> leaves{leaf(64, {rows, in}), leaf(65, {outs, in}), leaf(66, {outs})}, exact;
      for (auto& l : leaves) exact.push_back(l.detach().to(DType::f64).requires_grad_());
      const Bound bound = sum_bound(t, in);
      auto same = [&](const Tensor& want, const Tensor& got) { check_same(want.detach().to(t).cpu(), got.detach(), bound); };
      same(linear_relu(exact[0], exact[1], exact[2]), linear_relu(leaves[0], leaves[1], leaves[2]));
      same(linear_gelu(exact[0], exact[1], exact[2]), linear_gelu(leaves[0], leaves[1], leaves[2]));
      const Tensor g = drawn_on_gpu(67, {rows, outs}, t), y = linear(leaves[0], leaves[1], leaves[2]), z = linear(exact[0], exact[1], exact[2]);
      same(z, y);
      auto got = grad({sum(y.to(DType::f64) * g.to(DType::f64))}, leaves), want = grad({sum(z * g.to(DType::f64))}, exact);
      for (size_t i = 0; i < 3; ++i) {
        INFO("gradient " << i);
        same(want[i], got[i]);
      }
      auto step = capture([w = leaves[1].detach(), b = leaves[2].detach()](const Tensor& x) { return linear(x, w, b); });
      for (int i = 0; i < 4; ++i) same(z, step(leaves[0].detach()));
    }
    // Tuning tries copies of some, all and none.
    for (auto [m, k, n] : {Case{1311, 1301, 1307}, {1304, 1504, 1307}}) {
      INFO(name(t) << ", tuned");
      const Tensor a = drawn_on_gpu(68, {m, k}, t), b = drawn_on_gpu(69, {n, k}, t).t();
      tune([&] { check_product(a, b); });
      check_product(a, b);
    }
    allow_tf32(false);
  }
}

TEST_CASE("a sum and its layer norm, of the shapes that networks have") {
  NEEDS_CUDA();
  for (DType t : floating_dtypes)
    for (bool wide : {false, true})
      for (auto& shape : {Shape{3, 128}, Shape{301, 256}, Shape{2000, 768}, Shape{67, 1024}, Shape{9, 1600}, Shape{5, 2048}, Shape{6, 4096},
                          Shape{3, 6144}, Shape{40, 1001}})
        for (int without : {0, 1, 2}) {  // 1: weights; 2: a gradient of the sum
          const DType of_weight = t == DType::f64 ? t : DType::f32, of_sum = wide ? of_weight : t;
          INFO(str(shape) << ' ' << name(t) << ", sum " << name(of_sum) << ", without " << without);
          const Tensor x = drawn(40, shape, t), z = drawn(41, shape, of_sum, -3, 5), g = drawn(42, shape, of_weight);
          const Tensor w = drawn(43, {shape[1]}, of_weight, .5, 2), b = drawn(44, {shape[1]}, of_weight);
          auto on = [&](Device d) {
            auto leaf = [&](const Tensor& v) { return v.to(d).detach().requires_grad_(); };
            std::vector<Tensor> in{leaf(x), leaf(z)};
            if (without != 1) in.insert(in.end(), {leaf(w), leaf(b)});
            auto [y, h] = add_layer_norm(in[0], in[1], {shape[1]}, without != 1 ? in[2] : Tensor(), without != 1 ? in[3] : Tensor());
            Tensor loss = sum(y.to(of_weight) * g.to(d));
            if (without != 2) loss = loss + sum(h.to(of_weight) * g.to(d) * .25);
            auto all = grad({loss}, in);
            all.push_back(y.detach());
            all.push_back(h.detach());
            return all;
          };
          auto host = on(Device::cpu()), device = on(gpu), again = on(gpu);
          for (size_t i = 0; i < host.size(); ++i) {
            INFO("result " << i);
            // Sums of weights' gradients have as many terms as there are rows. Parts round to 16 bits what one kernel keeps.
            const bool of_rows = host[i].rank() == 1;
            Bound bound{.ulps = 4, .absolute = (t == DType::f64 ? 4096 : 64) * epsilon(of_weight)};
            if (of_rows) bound.absolute = 16 * epsilon(of_weight) * static_cast<double>(shape[0]);
            else if (i < 2 && is_16bit_dtype(t)) bound.absolute += 4 * epsilon(t);
            check_same(host[i], device[i], bound);
            check_same(device[i].cpu(), again[i]);
          }
        }
}

TEST_CASE("normalisation of the shapes that networks have") {
  NEEDS_CUDA();
  for (DType t : floating_dtypes)
    for (auto& shape : {Shape{8, 64, 56, 56}, Shape{32, 512, 7, 7}, Shape{300, 1000}, Shape{3, 5, 33}, Shape{4, 24, 16}})
      for (double centre : {0., 100.}) {
        INFO(str(shape) << ' ' << name(t) << " about " << centre);
        DType of_weight = t == DType::f64 ? t : DType::f32;
        Tensor x = drawn(26, shape, t, centre - 2, centre + 2), g = drawn(27, shape, t), w = drawn(28, {shape[1]}, of_weight), b = drawn(29, {shape[1]}, of_weight);
        Bound bound{.ulps = 4, .absolute = (t == DType::f64 ? 4096 : 64) * epsilon(of_weight)};  // f64 sums in f64
        auto gradients = [&](auto f) {
          auto on = [&](Device d) {
            auto leaf = [&](const Tensor& v) { return v.to(d).detach().requires_grad_(); };
            Tensor u = leaf(x), v = leaf(w), s = leaf(b);
            Tensor y = f(u, v, s);
            auto [du, dv, ds] = grad({sum(y.to(of_weight) * g.to(d).to(of_weight))}, {u, v, s});
            return std::array{du, dv, ds, y.detach()};
          };
          auto host = on(Device::cpu()), device = on(gpu), again = on(gpu);
          for (size_t i = 0; i < host.size(); ++i) {
            INFO("result " << i);
            // Sums over the batch: of as many terms as a channel has, each as exact as a distance from a far mean can be.
            Bound here = bound;
            if (i == 1 || i == 2) here.absolute = 4 * epsilon(of_weight) * static_cast<double>(x.numel() / shape[1]) * (1 + centre / 4);
            check_same(host[i], device[i], here);
            check_same(device[i].cpu(), again[i]);
          }
        };
        gradients([](auto& u, auto& v, auto& s) { return batch_norm(u, v, s, {}, {}); });
        check_same(batch_norm_add_relu(x, g, w, b, {}, {}), batch_norm_add_relu(x.to(gpu), g.to(gpu), w.to(gpu), b.to(gpu), {}, {}), bound);
        if (shape[1] % 8 == 0) gradients([](auto& u, auto& v, auto& s) { return group_norm(u, 8, v, s); });
        if (shape.rank() == 2) gradients([&](auto& u, auto& v, auto& s) { return layer_norm(u, {shape[1]}, v, s); });
      }
}

TEST_CASE("norms of rows of every way to keep them, few and many") {
  NEEDS_CUDA();
  struct Case { int64_t rows, length; };
  for (auto& [rows, length] : std::vector<Case>{
         {3, 8}, {70, 40}, {3, 255}, {3, 256}, {3, 257}, {33, 264}, {5, 512}, {9, 520}, {7, 768}, {3, 1000}, {3, 1024}, {3, 1032},
         {5, 2048}, {3, 3072}, {3, 4096}, {3, 4104}, {2, 6144}, {3, 8192}, {3, 8200}, {2, 16384}, {2, 16392},
         {40000, 8}, {9001, 64}, {9001, 256}, {9001, 264}, {9001, 512}, {5001, 768},
         {5001, 1000}, {5001, 1024}, {3001, 1032}, {1501, 2048}, {701, 4096}, {601, 8192}})
    for (DType t : {DType::f16, DType::bf16, DType::f32})
      for (DType of_weight : {t, DType::f32})
        for (double centre : {0., 100.}) {
          if (of_weight != t && centre != 0) continue;
          INFO(rows << " rows of " << length << ' ' << name(t) << " by " << name(of_weight) << " about " << centre);
          const Tensor x = drawn(26, {rows, length}, t, centre - 2, centre + 2), g = drawn(27, {rows, length}, t);
          const Tensor w = drawn(28, {length}, of_weight), b = drawn(29, {length}, of_weight);
          const double e = epsilon(DType::f32);
          auto same = [&](auto f) {
            auto on = [&](Device d) {
              auto leaf = [&](const Tensor& v) { return v.to(d).detach().requires_grad_(); };
              Tensor u = leaf(x), v = leaf(w), s = leaf(b);
              Tensor y = f(u, v, s);
              auto [du, dv, ds] = grad({sum(y.to(DType::f32) * g.to(d).to(DType::f32)) + sum(s.to(DType::f32))}, {u, v, s});
              return std::array{du, dv, ds, y.detach()};
            };
            auto host = on(Device::cpu()), device = on(gpu), again = on(gpu);
            for (size_t i = 0; i < host.size(); ++i) {
              INFO("result " << i);
              const bool of_rows = i == 1 || i == 2;
              check_same(host[i], device[i], {.ulps = 4, .absolute = of_rows ? 4 * e * static_cast<double>(rows + 16) * (1 + centre / 4) : 64 * e});
              check_same(device[i].cpu(), again[i]);
            }
          };
          same([&](auto& u, auto& v, auto& s) { return layer_norm(u, {length}, v, s); });
          if (centre == 0) same([&](auto& u, auto& v, auto&) { return rms_norm(u, {length}, v); });
        }
  // without a weight, and a gradient of x or of the weight alone
  for (DType t : {DType::f16, DType::f32}) {
    const Tensor x = drawn(30, {700, 1024}, t), w = drawn(31, {1024}, t);
    auto on = [&](Device d) {
      Tensor u = x.to(d).detach().requires_grad_(), v = w.to(d).detach().requires_grad_();
      return std::array{grad({sum(square(layer_norm(u, {1024})) * u)}, {u})[0], grad({sum(square(layer_norm(u.detach(), {1024}, v)))}, {v})[0]};
    };
    auto host = on(Device::cpu()), device = on(gpu);
    for (size_t i = 0; i < host.size(); ++i) check_same(host[i], device[i], {.ulps = 16, .absolute = (i ? 700 : 8) * 4 * epsilon(t)});
  }
}
