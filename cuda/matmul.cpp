// matmul and the linear family on CUDA, by cuBLASLt. What a call needs besides its addresses (descriptors and an
// algorithm) is a plan, found once per shape, layout, dtype, epilogue and alignment: the library's first choice, or the
// fastest (core/tuning.h), of those that give the same bits every time. Large products in f32 are the tensor cores' (gemm_3xtf32.cu),
// unless tuning finds that the library is faster. The fast kernels want rows of 16-bit and TF32 matrices
// that begin at multiples of 16 bytes; a plan may say which matrices of a large product are copied into such rows, and which are
// copied back. Everything is seen transposed: cuBLASLt is column-major, so it computes y' = b' a'.

#include <cublasLt.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "halftone/core/backend.h"
#include "halftone/cuda/all.h"
#include "halftone/cuda/gemm_3xtf32.h"
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
  int64_t dtype, out_dtype, compute, epilogue, adds, a_align, b_align, out_align;  // adds: there is an addend, which lies as the result does
};

// Plain data: copied for each call, so that threads share nothing.
struct Plan {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t left, right, out;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace = 0;  // bytes
  int64_t copied = 0;  // bits: copied_a and so on
  bool tuned = false, by_3xtf32 = false;
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

// The matrices as they lie in memory.
MatrixStack a_of(const Problem& p) { return {p.a_transposed ? p.k : p.m, p.a_transposed ? p.m : p.k, p.a_leading, p.a_step}; }
MatrixStack b_of(const Problem& p) { return {p.b_transposed ? p.n : p.k, p.b_transposed ? p.k : p.n, p.b_leading, p.b_step}; }
MatrixStack out_of(const Problem& p) { return {p.m, p.n, p.n, p.m * p.n}; }

// As cuBLASLt sees them: transposed.
cublasLtMatrixLayoutOpaque_t layout(int64_t dtype, const MatrixStack& s, int64_t batches) {
  cublasLtMatrixLayoutOpaque_t l;
  auto height = static_cast<uint64_t>(s.cols), width = static_cast<uint64_t>(s.rows);
  check(cublasLtMatrixLayoutInit(&l, type_of(dtype), height, width, s.leading), "matmul layout");
  set(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batches));
  set(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, s.step);
  return l;
}

// ---- copies for alignment

constexpr int64_t copied_a = 1, copied_b = 2, copied_out = 4, copied_operands = copied_a | copied_b;  // bits
constexpr int64_t tensor_core_bytes = 16;

int64_t width_of(int64_t dtype) { return static_cast<int64_t>(size_of(static_cast<DType>(dtype))); }
int64_t aligned_up(const Problem& p, int64_t n) {
  const int64_t elements = tensor_core_bytes / width_of(p.dtype);
  return ceil_div(n, elements) * elements;
}
// Of an operand: one serves all batches when it has no step.
int64_t matrices(const Problem& p, const MatrixStack& s) { return s.step == 0 ? 1 : p.batches; }

// The product of the copies. Where both operands are copied, zeros make their common dimension longer; where the result is, rows and
// columns that are not copied back do so with the others.
Problem padded(const Problem& p, int64_t copied) {
  Problem q = p;
  if (copied & copied_out) {
    q.n = aligned_up(p, p.n);
    if (copied & copied_a && p.a_transposed) q.m = aligned_up(p, p.m);
    q.out_align = 256;
  }
  if ((copied & copied_operands) == copied_operands) q.k = aligned_up(p, p.k);
  auto move = [&](const MatrixStack& s, int64_t& leading, int64_t& step, int64_t& align) {
    leading = aligned_up(p, s.cols);
    if (step != 0) step = s.rows * leading;
    align = 256;
  };
  if (copied & copied_a) move(a_of(q), q.a_leading, q.a_step, q.a_align);
  if (copied & copied_b) move(b_of(q), q.b_leading, q.b_step, q.b_align);
  return q;
}

// What must be copied for one of `copied`, so that the product of the copies has a fast kernel: it wants whole packs of 16 bytes
// along the columns of each.
int64_t with_others(const Problem& p, int64_t copied) {
  if (copied & copied_out && p.n != aligned_up(p, p.n)) copied |= copied_b;
  bool along_k = (copied & copied_a && !p.a_transposed) || (copied & copied_b && p.b_transposed);
  return along_k && p.k != aligned_up(p, p.k) ? copied | copied_operands : copied;
}

int64_t bytes_of_copies(const Problem& p, int64_t copied) {
  auto bytes = [&](int64_t which, const MatrixStack& s, int64_t count, int64_t dtype) {
    return copied & which ? count * s.rows * s.cols * width_of(dtype) : 0;
  };
  const MatrixStack a = a_of(p), b = b_of(p);
  return bytes(copied_a, a, matrices(p, a), p.dtype) + bytes(copied_b, b, matrices(p, b), p.dtype) +
         bytes(copied_out, out_of(p), p.batches, p.out_dtype);
}

// What to copy; the first without tuning. On one H200 a product in f16 of 4095 x 2047 by 2047 x 4097 takes 0.47 ms as it lies and
// aligned about 0.1 ms, copies move some 3 TB/s and each launch takes microseconds: copies pay from about 60 operations on for each byte
// read or written, and never in small products. TF32, and results whose rows alone are not aligned, lose less as they lie.
std::vector<int64_t> ways_to_copy(const Problem& p) {
  constexpr int64_t most_bytes = int64_t{1} << 30;
  constexpr double least_operations = 0x1p32, of_operands = 128, of_result = 384;  // the last two for each byte
  if (!is_16bit_dtype(static_cast<DType>(p.dtype)) && p.compute != CUBLAS_COMPUTE_32F_FAST_TF32) return {0};
  auto off = [&](int64_t which, const MatrixStack& s, int64_t align, int64_t dtype) {
    auto apart = [&](int64_t elements) { return elements * width_of(dtype) % tensor_core_bytes != 0; };
    return align % tensor_core_bytes != 0 || apart(s.leading) || (p.batches > 1 && apart(s.step)) ? which : 0;
  };
  const int64_t operands = with_others(p, off(copied_a, a_of(p), p.a_align, p.dtype) | off(copied_b, b_of(p), p.b_align, p.dtype));
  const int64_t all = with_others(p, operands | off(copied_out, out_of(p), p.out_align, p.out_dtype));
  const double operations = 2. * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) * static_cast<double>(p.batches);
  const int64_t bytes = bytes_of_copies(p, all);
  if (all == 0 || operations < least_operations || bytes > most_bytes) return {0};
  if (p.adds) return {};  // a sum of its own costs less than slow kernels or another copy
  std::vector<int64_t> ways{all, 0};
  if (operations < 2 * static_cast<double>(bytes) * (operands ? of_operands : of_result)) std::swap(ways[0], ways[1]);
  if (operands && operands != all) ways.push_back(operands);
  return ways;
}

// ---- plans

// Of the current device.
cublasLtHandle_t library() {
  static std::mutex lock;
  static std::unordered_map<int, cublasLtHandle_t> handles;
  std::lock_guard guard(lock);
  cublasLtHandle_t& h = handles[device()];
  if (!h) check(cublasLtCreate(&h), "cublasLtCreate");
  return h;
}

constexpr size_t most_workspace = size_t{32} << 20;

cublasLtMatmulPreferenceOpaque_t preference(const Problem& p) {
  cublasLtMatmulPreferenceOpaque_t wish;
  check(cublasLtMatmulPreferenceInit(&wish), "matmul preference");
  set(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{most_workspace});
  // Sums of a split k are formed in the accumulator's type, in a fixed order.
  set(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(p.b_align));
  set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(p.a_align));
  set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(p.out_align));
  set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(p.out_align));
  return wish;
}

// Such an algorithm rounds the product to 16 bits before it adds a bias, and then again; an addend's is not asked to either.
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
  plan.left = layout(p.dtype, b_of(p), p.batches);
  plan.right = layout(p.dtype, a_of(p), p.batches);
  plan.out = layout(p.out_dtype, out_of(p), p.batches);
  return plan;
}

// With these copies, the best guess first.
constexpr int most_candidates = 32;
std::vector<Plan> plans_of(const Problem& problem, int64_t copied, int most, const void* bias) {
  const Problem p = padded(problem, copied);
  Plan plan = describe(p, bias);
  plan.copied = copied;
  auto wish = preference(p);
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(most));
  int n = 0;
  auto status = cublasLtMatmulAlgoGetHeuristic(library(), &plan.operation, &plan.left, &plan.right, &plan.out, &plan.out, &wish, most, found.data(), &n);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "matmul heuristic");
  else n = 0;
  std::vector<Plan> all;
  for (auto& f : std::span(found).first(static_cast<size_t>(n))) {
    if (f.state != CUBLAS_STATUS_SUCCESS || f.workspaceSize > most_workspace) continue;
    if ((bias || p.adds) && is_16bit_dtype(static_cast<DType>(p.out_dtype)) && splits_k(f.algo)) continue;
    plan.algorithm = f.algo;
    plan.workspace = f.workspaceSize;
    all.push_back(plan);
  }
  return all;
}

struct Addresses { const void *a, *b; void* y; const void *bias, *addend; };

// ---- f32 on tensor cores

constexpr const char* name_3xtf32 = "3xtf32";  // among tuned choices
Plan plan_3xtf32(bool tuned) {
  Plan plan;
  plan.tuned = tuned;
  plan.by_3xtf32 = true;
  return plan;
}
GemmOperand operand_a(const Problem& p, const void* a) { return {static_cast<const float*>(a), a_of(p), p.a_transposed != 0}; }
GemmOperand operand_b(const Problem& p, const void* b) { return {static_cast<const float*>(b), b_of(p), p.b_transposed != 0}; }
bool takes_3xtf32(const Problem& p) {
  const bool plain = p.epilogue == CUBLASLT_EPILOGUE_DEFAULT || p.epilogue == CUBLASLT_EPILOGUE_BIAS;
  return static_cast<DType>(p.dtype) == DType::f32 && p.compute == CUBLAS_COMPUTE_32F && plain && !p.adds &&
         gemm_3xtf32_takes(operand_a(p, nullptr), operand_b(p, nullptr), p.batches);
}

// ---- calls

void call_library(const Problem& p, Plan plan, const Addresses& at) {
  if (at.bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.bias);
  float one = 1, zero = 0;
  double wide_one = 1, wide_zero = 0;
  bool wide = p.compute == CUBLAS_COMPUTE_64F;
  const void* alpha = wide ? static_cast<const void*>(&wide_one) : &one;
  const void* beta = at.addend ? alpha : wide ? static_cast<const void*>(&wide_zero) : &zero;
  const Scratch workspace(plan.workspace);
  const void* c = at.addend ? at.addend : at.y;
  check(cublasLtMatmul(library(), &plan.operation, alpha, at.b, &plan.left, at.a, &plan.right, beta, c, &plan.out, at.y, &plan.out, &plan.algorithm,
                       workspace.as<>(), plan.workspace, stream()),
        "matmul");
}
void execute(const Problem& p, const Plan& plan, const Addresses& at) {
  if (plan.by_3xtf32)
    return gemm_3xtf32(operand_a(p, at.a), operand_b(p, at.b), static_cast<const float*>(at.bias), static_cast<float*>(at.y), p.batches);
  if (plan.copied == 0) return call_library(p, plan, at);
  const Problem q = padded(p, plan.copied);
  const int64_t width = width_of(p.dtype), out_width = width_of(p.out_dtype);
  auto scratch = [&](int64_t which, const MatrixStack& s, int64_t count, int64_t bytes) {
    return Scratch(plan.copied & which ? static_cast<size_t>(count * s.rows * s.leading * bytes) : 0);
  };
  const Scratch a = scratch(copied_a, a_of(q), matrices(q, a_of(q)), width), b = scratch(copied_b, b_of(q), matrices(q, b_of(q)), width);
  const Scratch y = scratch(copied_out, out_of(q), q.batches, out_width), bias = scratch(at.bias ? copied_out : 0, {1, q.n, q.n, 0}, 1, width);
  Addresses copies = at;
  auto copy = [&](const Scratch& into, const MatrixStack& to, const void*& from, const MatrixStack& lies) {
    if (!into.as<>()) return;
    copy_matrices(into.as<>(), to, from, lies, matrices(p, lies), static_cast<size_t>(width));
    from = into.as<>();
  };
  copy(a, a_of(q), copies.a, a_of(p));
  copy(b, b_of(q), copies.b, b_of(p));
  copy(bias, {1, q.n, q.n, 0}, copies.bias, {1, p.n, p.n, 0});
  if (y.as<>()) copies.y = y.as<>();
  call_library(q, plan, copies);
  if (y.as<>()) copy_matrices(at.y, out_of(p), y.as<>(), out_of(q), p.batches, static_cast<size_t>(out_width));
}

// A plan's name among tuned choices: what it copies and the algorithm's bits, which count for one version of the library.
std::string text_of(const Plan& plan) {
  if (plan.by_3xtf32) return name_3xtf32;
  std::string text = plan.copied ? text::cat("copies ", plan.copied) : "";
  for (uint64_t word : plan.algorithm.data) text += (text.empty() ? "" : " ") + std::to_string(word);
  return text;
}
std::string name_of(const Problem& p) {
  return tuning_name(text::cat("cublaslt ", cublasLtGetVersion(), takes_3xtf32(p) ? " or 3xtf32" : ""), p);
}
void tune_plan(const Problem& p, const Addresses& at) {
  if (tuned_choice(name_of(p))) return;
  std::optional<double> least;
  auto consider = [&](const Plan& plan) {
    const double ms = time_call([&] { execute(p, plan, at); });
    if (least && ms >= *least) return;
    least = ms;
    set_tuned_choice(name_of(p), text_of(plan));
  };
  if (takes_3xtf32(p)) consider(plan_3xtf32(true));
  for (int64_t copied : ways_to_copy(p)) {
    auto all = plans_of(p, copied, most_candidates, at.bias);
    auto best = fastest(static_cast<int64_t>(all.size()), [&](int64_t i) {
      return std::optional(time_call([&] { execute(p, all[static_cast<size_t>(i)], at); }));
    });
    if (best) consider(all[static_cast<size_t>(*best)]);
  }
}

std::optional<Plan> make_plan(const Problem& p, const void* bias) {
  auto choice = tuned_choice(name_of(p));
  std::optional<Plan> first;
  if (takes_3xtf32(p)) first = plan_3xtf32(choice == name_3xtf32);
  if (first && (!choice || first->tuned)) return first;
  for (int64_t copied : ways_to_copy(p)) {
    for (auto& plan : plans_of(p, copied, choice ? most_candidates : 8, bias)) {
      plan.tuned = choice && text_of(plan) == *choice;
      if (plan.tuned) return plan;
      if (!first) first = plan;
    }
    if (first && !choice) break;
  }
  return first;
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
  const void *bias = nullptr, *addend = nullptr;
};

// False: cuBLASLt has no plan for the problem.
bool run_plan(const Problem& p, const Addresses& at) {
  static auto* plans = new Plans<Problem, Plan>;
  auto plan = plans->find(p, [&](const Problem&) { return make_plan(p, at.bias); }, [&](const Problem&) { tune_plan(p, at); });
  if (plan) execute(p, *plan, at);
  return plan.has_value();
}

// y = epilogue(a b) for each of the batches, one where there is an addend; y is contiguous and may be of a wider dtype. False: there is
// no fused kernel for this epilogue.
bool multiply(const Factor& a, const Factor& b, void* y, DType out_dtype, int64_t batches, Epilogue epilogue = {}) {
  DType dtype = a.tensor.dtype();
  auto width = static_cast<int64_t>(size_of(dtype)), out_width = static_cast<int64_t>(size_of(out_dtype));
  Problem p{.device = device(), .m = a.rows, .n = b.cols, .k = a.cols, .batches = 0,
            .a_transposed = a.transposed, .b_transposed = b.transposed, .a_leading = a.leading, .b_leading = b.leading,
            .a_step = a.batch_stride, .b_step = b.batch_stride, .dtype = static_cast<int64_t>(dtype),
            .out_dtype = static_cast<int64_t>(out_dtype), .compute = compute_type(dtype), .epilogue = epilogue.kind,
            .adds = epilogue.addend != nullptr, .a_align = 0, .b_align = 0, .out_align = 0};
  constexpr int64_t most_batches = 65535;
  for (int64_t first = 0; first < batches; first += most_batches) {
    auto* a_at = static_cast<const char*>(a.tensor.raw_data()) + first * a.batch_stride * width;
    auto* b_at = static_cast<const char*>(b.tensor.raw_data()) + first * b.batch_stride * width;
    auto* y_at = static_cast<char*>(y) + first * a.rows * b.cols * out_width;
    p.batches = std::min(most_batches, batches - first);
    p.a_align = alignment(a_at);
    p.b_align = alignment(b_at);
    p.out_align = std::min({alignment(y_at), alignment(epilogue.bias), alignment(epilogue.addend)});
    if (run_plan(p, {a_at, b_at, y_at, epilogue.bias, epilogue.addend})) continue;
    HT_CHECK(epilogue.kind != CUBLASLT_EPILOGUE_DEFAULT || epilogue.addend, "matmul: cuBLASLt has no kernel for [", p.m, ", ", p.k,
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
  if (dense_bias.defined() && alignment(dense_bias.raw_data()) < tensor_core_bytes) dense_bias = dense_bias.clone();
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

bool product(const Tensor& a, bool a_turned, const Tensor& b, bool b_turned, const Tensor& bias, const Tensor& y, const Tensor& addend) {
  auto epilogue = bias.defined() ? Epilogue{CUBLASLT_EPILOGUE_BIAS, bias.raw_data()} : Epilogue{};
  if (addend.defined()) epilogue.addend = addend.raw_data();
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
