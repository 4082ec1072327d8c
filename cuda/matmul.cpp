// matmul and the linear family on CUDA, by cuBLASLt. What a call needs besides its addresses (descriptors and an
// algorithm) is a plan, found once per shape, layout, dtype, epilogue and alignment: the library's first choice, or the
// fastest (core/tuning.h), of those that give the same bits every time. Everything is seen transposed: cuBLASLt is column-major, so it computes
// y' = b' a'.

#include <cublasLt.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "halftone/core/backend.h"
#include "halftone/cuda/all.h"
#include "halftone/cuda/matmul.h"
#include "halftone/cuda/matmul_epilogue.h"
#include "halftone/cuda/plans.h"
#include "halftone/cuda/runtime.h"
#include "halftone/cuda/small_linear.h"
#include "halftone/ops/matmul.h"
#include "halftone/ops/unary.h"

namespace halftone::cuda {
namespace {

using cuda::check;
void check(cublasStatus_t status, const char* what) {
  HT_CHECK(status == CUBLAS_STATUS_SUCCESS, "cuda: ", what, ": ", cublasLtGetStatusString(status));
}

// A matrix [rows, cols], or a batch of them, in memory that is row-major (or, transposed, column-major) with a leading
// dimension.
struct Factor {
  Tensor tensor;
  int64_t rows, cols;
  bool transposed;
  int64_t leading, batch_stride;
};

// The one stride that walks over all batches, when there is one.
std::optional<int64_t> batch_stride(const Meta& t) {
  int64_t step = 0, extent = 1;
  for (size_t d = t.shape.size() - 2; d-- > 0;) {
    if (t.shape[d] == 1) continue;
    if (extent == 1) step = t.strides[d];
    else if (t.strides[d] != step * extent) return std::nullopt;
    extent *= t.shape[d];
  }
  return step;
}

std::optional<Factor> as_factor(const Tensor& t, bool flipped) {
  size_t rows_at = t.shape().size() - 2, cols_at = rows_at + 1;
  if (flipped) std::swap(rows_at, cols_at);
  int64_t rows = t.shape()[rows_at], cols = t.shape()[cols_at];
  int64_t row_step = t.strides()[rows_at], col_step = t.strides()[cols_at];
  auto step = batch_stride(t.meta());
  if (!step) return std::nullopt;
  // The stride of a dimension of size 1 means nothing.
  int64_t leading = rows == 1 ? cols : row_step;
  if ((cols == 1 || col_step == 1) && leading >= cols) return Factor{t, rows, cols, false, leading, *step};
  leading = cols == 1 ? rows : col_step;
  if ((rows == 1 || row_step == 1) && leading >= rows) return Factor{t, rows, cols, true, leading, *step};
  return std::nullopt;
}

// The last two dimensions of t, exchanged when flipped; copied when their layout is none of cuBLASLt's.
Factor factor(const Tensor& t, bool flipped = false) {
  auto f = as_factor(t, flipped);
  return f ? *f : *as_factor(t.clone(), flipped);
}

struct Problem {
  int64_t device, m, n, k, batches;
  int64_t a_transposed, b_transposed, a_leading, b_leading, a_step, b_step;
  int64_t dtype, out_dtype, compute, epilogue, a_align, b_align, out_align;
};

// Plain data: copied for each call, so that threads share nothing.
struct Plan {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t left, right, out;
  cublasLtMatmulAlgo_t algorithm;
  bool tuned = false;
};

cudaDataType_t type_of(int64_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::f16: return CUDA_R_16F;
    case DType::bf16: return CUDA_R_16BF;
    case DType::f64: return CUDA_R_64F;
    default: return CUDA_R_32F;
  }
}

template <class T>
void set(cublasLtMatmulDescOpaque_t& d, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublasLtMatmulDescSetAttribute(&d, attribute, &value, sizeof value), "matmul descriptor");
}
template <class T>
void set(cublasLtMatrixLayoutOpaque_t& l, cublasLtMatrixLayoutAttribute_t attribute, const T& value) {
  check(cublasLtMatrixLayoutSetAttribute(&l, attribute, &value, sizeof value), "matmul layout");
}
template <class T>
void set(cublasLtMatmulPreferenceOpaque_t& p, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  check(cublasLtMatmulPreferenceSetAttribute(&p, attribute, &value, sizeof value), "matmul preference");
}

cublasLtMatrixLayoutOpaque_t layout(int64_t dtype, int64_t rows, int64_t cols, int64_t leading, int64_t batches,
                                    int64_t step) {
  cublasLtMatrixLayoutOpaque_t l;
  auto height = static_cast<uint64_t>(rows), width = static_cast<uint64_t>(cols);
  check(cublasLtMatrixLayoutInit(&l, type_of(dtype), height, width, leading), "matmul layout");
  set(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batches));
  set(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, step);
  return l;
}

// Of the current device.
cublasLtHandle_t library() {
  static std::mutex lock;
  static std::unordered_map<int, cublasLtHandle_t> handles;
  std::lock_guard guard(lock);
  cublasLtHandle_t& h = handles[device()];
  if (!h) check(cublasLtCreate(&h), "cublasLtCreate");
  return h;
}

cublasLtMatmulPreferenceOpaque_t preference(const Problem& p) {
  cublasLtMatmulPreferenceOpaque_t wish;
  check(cublasLtMatmulPreferenceInit(&wish), "matmul preference");
  set(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{workspace_bytes});
  // Sums of a split k are formed in the accumulator's type, in a fixed order.
  set(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(p.b_align));
  set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(p.a_align));
  set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(p.out_align));
  set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(p.out_align));
  return wish;
}

// Such an algorithm rounds the product to 16 bits before it adds a bias, and then again.
bool splits_k(const cublasLtMatmulAlgo_t& algorithm) {
  int32_t splits = 1;
  check(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof splits, nullptr),
        "matmul algorithm");
  return splits > 1;
}

// All but the algorithm.
Plan describe(const Problem& p, const void* bias) {
  Plan plan;
  auto compute = static_cast<cublasComputeType_t>(p.compute);
  auto scale_type = compute == CUBLAS_COMPUTE_64F ? CUDA_R_64F : CUDA_R_32F;
  check(cublasLtMatmulDescInit(&plan.operation, compute, scale_type), "matmul descriptor");
  auto flag = [](int64_t transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, flag(p.b_transposed));
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, flag(p.a_transposed));
  set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<cublasLtEpilogue_t>(p.epilogue));
  if (bias) {
    set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(p.dtype));
    set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
  int64_t b_rows = p.n, b_cols = p.k, a_rows = p.k, a_cols = p.m;  // of b' and a', as stored
  if (p.b_transposed) std::swap(b_rows, b_cols);
  if (p.a_transposed) std::swap(a_rows, a_cols);
  plan.left = layout(p.dtype, b_rows, b_cols, p.b_leading, p.batches, p.b_step);
  plan.right = layout(p.dtype, a_rows, a_cols, p.a_leading, p.batches, p.a_step);
  plan.out = layout(p.out_dtype, p.n, p.m, p.n, p.batches, p.m * p.n);
  return plan;
}

// The best guess first.
std::vector<cublasLtMatmulAlgo_t> candidates(const Problem& p, Plan& plan, int most, bool with_bias) {
  auto wish = preference(p);
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(most));
  int n = 0;
  auto status = cublasLtMatmulAlgoGetHeuristic(library(), &plan.operation, &plan.left, &plan.right, &plan.out, &plan.out, &wish, most, found.data(), &n);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "matmul heuristic");
  else n = 0;
  std::vector<cublasLtMatmulAlgo_t> all;
  for (auto& f : std::span(found).first(static_cast<size_t>(n))) {
    if (f.state != CUBLAS_STATUS_SUCCESS || f.workspaceSize > workspace_bytes) continue;
    if (with_bias && is_16bit_dtype(static_cast<DType>(p.out_dtype)) && splits_k(f.algo)) continue;
    all.push_back(f.algo);
  }
  return all;
}

struct Addresses { const void *a, *b; void* y; const void* bias; };
void execute(const Problem& p, Plan plan, const Addresses& at) {
  if (at.bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.bias);
  float one = 1, zero = 0;
  double wide_one = 1, wide_zero = 0;
  bool wide = p.compute == CUBLAS_COMPUTE_64F;
  const void* alpha = wide ? static_cast<const void*>(&wide_one) : &one;
  const void* beta = wide ? static_cast<const void*>(&wide_zero) : &zero;
  // A product may be several kernels that hand on the workspace: no other thread's may come between them.
  static std::mutex one_at_a_time;
  std::lock_guard guard(one_at_a_time);
  check(cublasLtMatmul(library(), &plan.operation, alpha, at.b, &plan.left, at.a, &plan.right, beta, at.y, &plan.out, at.y, &plan.out, &plan.algorithm,
                       workspace(), workspace_bytes, stream()),
        "matmul");
}

// An algorithm's name among tuned choices: its bits, which count for one version of the library.
std::string text_of(const cublasLtMatmulAlgo_t& algorithm) {
  std::string text;
  for (uint64_t word : algorithm.data) text += (text.empty() ? "" : " ") + std::to_string(word);
  return text;
}
std::string name_of(const Problem& p) { return tuning_name(text::cat("cublaslt ", cublasLtGetVersion()), p); }
void tune_plan(const Problem& p, const Addresses& at) {
  if (tuned_choice(name_of(p))) return;
  constexpr int most = 32;
  Plan plan = describe(p, at.bias);
  auto all = candidates(p, plan, most, at.bias);
  auto best = fastest(static_cast<int64_t>(all.size()), [&](int64_t i) {
    plan.algorithm = all[static_cast<size_t>(i)];
    return std::optional(time_call([&] { execute(p, plan, at); }));
  });
  if (best) set_tuned_choice(name_of(p), text_of(all[static_cast<size_t>(*best)]));
}

std::optional<Plan> make_plan(const Problem& p, const void* bias) {
  Plan plan = describe(p, bias);
  auto choice = tuned_choice(name_of(p));
  auto all = candidates(p, plan, choice ? 32 : 8, bias);
  for (auto& algorithm : all)
    if (choice && text_of(algorithm) == *choice) {
      plan.algorithm = algorithm;
      plan.tuned = true;
      return plan;
    }
  if (all.empty()) return std::nullopt;
  plan.algorithm = all.front();
  return plan;
}

int64_t alignment(const void* p) {
  auto bits = reinterpret_cast<uintptr_t>(p);
  return bits == 0 ? 256 : std::min<int64_t>(256, static_cast<int64_t>(bits & (~bits + 1)));
}

int64_t compute_type(DType t) {
  if (t == DType::f64) return CUBLAS_COMPUTE_64F;
  return t == DType::f32 && tf32_allowed() ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

struct Epilogue {
  cublasLtEpilogue_t kind = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
};

// False: cuBLASLt has no plan for the problem.
bool run_plan(const Problem& p, const Addresses& at) {
  static auto* plans = new Plans<Problem, Plan>;
  auto plan = plans->find(p, [&](const Problem&) { return make_plan(p, at.bias); }, [&](const Problem&) { tune_plan(p, at); });
  if (plan) execute(p, *plan, at);
  return plan.has_value();
}

// y = epilogue(a b) for each of the batches; y is contiguous and may be of a wider dtype. False: there is no fused
// kernel for this epilogue.
bool multiply(const Factor& a, const Factor& b, void* y, DType out_dtype, int64_t batches, Epilogue epilogue = {}) {
  DType dtype = a.tensor.dtype();
  auto width = static_cast<int64_t>(size_of(dtype)), out_width = static_cast<int64_t>(size_of(out_dtype));
  Problem p{.device = device(), .m = a.rows, .n = b.cols, .k = a.cols, .batches = 0,
            .a_transposed = a.transposed, .b_transposed = b.transposed, .a_leading = a.leading, .b_leading = b.leading,
            .a_step = a.batch_stride, .b_step = b.batch_stride, .dtype = static_cast<int64_t>(dtype),
            .out_dtype = static_cast<int64_t>(out_dtype), .compute = compute_type(dtype), .epilogue = epilogue.kind,
            .a_align = 0, .b_align = 0, .out_align = 0};
  constexpr int64_t most_batches = 65535;
  for (int64_t first = 0; first < batches; first += most_batches) {
    auto* a_at = static_cast<const char*>(a.tensor.raw_data()) + first * a.batch_stride * width;
    auto* b_at = static_cast<const char*>(b.tensor.raw_data()) + first * b.batch_stride * width;
    auto* y_at = static_cast<char*>(y) + first * a.rows * b.cols * out_width;
    p.batches = std::min(most_batches, batches - first);
    p.a_align = alignment(a_at);
    p.b_align = alignment(b_at);
    p.out_align = std::min(alignment(y_at), alignment(epilogue.bias));
    if (run_plan(p, {a_at, b_at, y_at, epilogue.bias})) continue;
    HT_CHECK(epilogue.kind != CUBLASLT_EPILOGUE_DEFAULT, "matmul: cuBLASLt has no kernel for [", p.m, ", ", p.k,
             "] times [", p.k, ", ", p.n, "] (", dtype, ")");
    return false;
  }
  return true;
}

void run_matmul(const Call& c, std::span<Tensor> out) {
  const Tensor &a = c.in[0], &b = c.in[1], &y = out[0];
  if (y.numel() == 0) return;
  size_t r = a.shape().size();
  if (a.shape()[r - 1] == 0) {
    check(cudaMemsetAsync(y.raw_data(), 0, static_cast<size_t>(y.numel()) * size_of(y.dtype()), stream()), "matmul");
    return;
  }
  int64_t batches = y.numel() / (y.shape()[r - 2] * y.shape()[r - 1]);
  multiply(factor(a), factor(b), y.raw_data(), y.dtype(), batches);
}

// The product by itself, then everything else in one kernel of ours. 16-bit products stay f32 in between: rounded once.
void finish_separately(const Tensor& x, const Tensor& w, const void* bias, std::span<Tensor> out,
                       Activation activation) {
  const Tensor& y = out[0];
  DType product = y.dtype() == DType::f64 ? DType::f64 : DType::f32;
  size_t bytes = static_cast<size_t>(y.numel()) * size_of(product);
  Scratch rounded_later(product == y.dtype() ? 0 : bytes);
  void* z = product == y.dtype() ? y.raw_data() : rounded_later.as<>();
  if (x.size(1) == 0) check(cudaMemsetAsync(z, 0, bytes, stream()), "linear");
  else multiply(factor(x), factor(w, true), z, product, 1);
  void* before = out.size() > 1 ? out[1].raw_data() : nullptr;
  finish(z, bias, y.raw_data(), before, y.dtype(), y.size(0), y.size(1), activation);
}

// cuBLASLt's own epilogue for a bias, if it has one: it knows none in f64. Its activations are not ours: its gelu is the
// tanh form, and its relu turns NaN into 0.
std::optional<Epilogue> epilogue_for(DType dtype, const void* bias, Activation activation) {
  if (activation == Activation::gelu || (bias && dtype == DType::f64)) return std::nullopt;
  return bias ? Epilogue{CUBLASLT_EPILOGUE_BIAS, bias} : Epilogue{};
}

template <Activation activation> void run_linear(const Call& c, std::span<Tensor> out) {
  const Tensor &x = c.in[0], &w = c.in[1], &y = out[0];
  if (y.numel() == 0) return;
  Tensor dense_bias = c.has(2) ? c.in[2].contiguous() : Tensor();
  if (activation != Activation::gelu && small_linear(x, w, dense_bias, y, activation == Activation::relu)) return;
  const void* bias = dense_bias.defined() ? dense_bias.raw_data() : nullptr;
  auto epilogue = epilogue_for(x.dtype(), bias, activation);
  if (!epilogue || x.size(1) == 0 || !multiply(factor(x), factor(w, true), y.raw_data(), y.dtype(), 1, *epilogue))
    finish_separately(x, w, bias, out, activation);
  else if (activation == Activation::relu)  // of the rounded sum: the same as the rounded relu
    call_into(unary::def<unary::Relu>, {y}, {}, y);
}

void run_linear_grad(const Call& c, std::span<Tensor> out) {
  if (!small_linear_grad(c, out)) linear_grad_by_parts(c, out);
}

}  // namespace

bool product(const Tensor& a, bool a_turned, const Tensor& b, bool b_turned, const Tensor& bias, const Tensor& y) {
  auto epilogue = bias.defined() ? Epilogue{CUBLASLT_EPILOGUE_BIAS, bias.raw_data()} : Epilogue{};
  return multiply(factor(a, a_turned), factor(b, b_turned), y.raw_data(), y.dtype(), 1, epilogue);
}

void fill_cuda_matmul() {
  fill<run_matmul>(op::matmul);
  fill<run_linear<Activation::none>>(op::linear);
  fill<run_linear<Activation::relu>>(op::linear_relu);
  fill<run_linear<Activation::gelu>>(op::linear_gelu);
  fill<run_linear_grad>(op::linear_grad);
}

}  // namespace halftone::cuda
