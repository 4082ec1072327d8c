// Convolutions on CUDA by cuDNN's graph API, through cudnn-frontend: the one source that includes it. What a call needs
// besides its addresses is a plan, found once per problem: the library's first choice among those that give the same bits
// every time and compute in the dtype they are asked for. Without one, and in f64, our own kernels run.
//
// Tensor cores want channels last. Whatever the layout of the tensors, 16-bit operands are handed over with their channels
// as neighbours: those that lie so already are not copied.
#include <cudnn.h>
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <array>
#include <bit>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "halftone/core/backend.h"
#include "halftone/cuda/attention.h"
#include "halftone/cuda/conv.h"
#include "halftone/cuda/runtime.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/conv.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/shape.h"
#include "halftone/ops/unary.h"

namespace halftone {
namespace cuda {
namespace {

namespace fe = cudnn_frontend;
using Sizes = std::vector<int64_t>;

void check(cudnnStatus_t status, const char* what) {
  HT_CHECK(status == CUDNN_STATUS_SUCCESS, "cuda: ", what, ": ", cudnnGetErrorString(status));
}
void check(fe::error_t e, const char* what) { HT_CHECK(e.is_good(), "cuda: ", what, ": ", e.get_message()); }

// Of the current device.
cudnnHandle_t library() {
  static std::mutex lock;
  static std::unordered_map<int, cudnnHandle_t> handles;
  std::lock_guard guard(lock);
  cudnnHandle_t& h = handles[device()];
  if (!h) check(cudnnCreate(&h), "cudnnCreate");
  return h;
}

// ---- plans

enum class Kind : int64_t { forward, forward_with_bias, input, weight };

// What determines a plan. All fields are 64-bit, so that the whole is its own hash key.
struct Problem {
  int64_t device, kind, dtype, out_dtype, channels_last, tf32, spatial;
  ConvGeometry q;
  using Bits = std::array<int64_t, 7 + sizeof(ConvGeometry) / sizeof(int64_t)>;
  Bits bits() const { return std::bit_cast<Bits>(*this); }
  bool operator==(const Problem& o) const { return bits() == o.bits(); }
};
struct ProblemHash {
  size_t operator()(const Problem& p) const {
    uint64_t h = 14695981039346656037u;
    for (int64_t v : p.bits()) {
      h = (h ^ static_cast<uint64_t>(v)) * 0x9E3779B97F4A7C15u;
      h ^= h >> 32;
    }
    return h;
  }
};

enum Uid : int64_t { uid_x = 1, uid_w, uid_y, uid_bias };

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t workspace = 0;
};

fe::DataType_t type_of(int64_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::f16: return fe::DataType_t::HALF;
    case DType::bf16: return fe::DataType_t::BFLOAT16;
    default: return fe::DataType_t::FLOAT;
  }
}

// The last `spatial` of three.
Sizes last(const int64_t (&v)[3], int64_t spatial) { return Sizes(v + 3 - spatial, v + 3); }

Sizes shape_of(int64_t a, int64_t b, const int64_t (&v)[3], int64_t spatial) {
  Sizes s{a, b};
  for (int64_t n : last(v, spatial)) s.push_back(n);
  return s;
}

// Dense strides, with dimension 1 innermost when channels are last.
Sizes strides_of(const Sizes& shape, bool channels_last) {
  Sizes s(shape.size());
  int64_t step = channels_last ? shape[1] : 1;
  for (size_t d = shape.size(); d-- > 2;) {
    s[d] = step;
    step *= shape[d];
  }
  s[1] = channels_last ? 1 : step;
  s[0] = channels_last ? step : step * shape[1];
  return s;
}

std::shared_ptr<fe::graph::Graph> make_graph(const Problem& p) {
  auto kind = static_cast<Kind>(p.kind);
  auto graph = std::make_shared<fe::graph::Graph>();
  graph->set_io_data_type(type_of(p.dtype)).set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
  const Sizes x = shape_of(p.q.n, p.q.c, p.q.in, p.spatial), w = shape_of(p.q.o, p.q.c_group(), p.q.kernel, p.spatial),
              y = shape_of(p.q.n, p.q.o, p.q.out, p.spatial);
  auto operand = [&](Uid uid, const char* name, const Sizes& shape) {
    return graph->tensor(fe::graph::Tensor_attributes().set_name(name).set_uid(uid).set_dim(shape).set_stride(strides_of(shape, p.channels_last)));
  };
  auto with = [&](auto attributes) {
    return attributes.set_pre_padding(last(p.q.before, p.spatial))
        .set_post_padding(last(p.q.after, p.spatial))
        .set_stride(last(p.q.stride, p.spatial))
        .set_dilation(last(p.q.dilation, p.spatial));
  };
  auto result = [&](const std::shared_ptr<fe::graph::Tensor_attributes>& t, Uid uid, const Sizes& shape) {
    t->set_output(true).set_uid(uid).set_dim(shape).set_stride(strides_of(shape, p.channels_last)).set_data_type(type_of(p.out_dtype));
  };
  switch (kind) {
    case Kind::forward: result(graph->conv_fprop(operand(uid_x, "x", x), operand(uid_w, "w", w), with(fe::graph::Conv_fprop_attributes())), uid_y, y); break;
    case Kind::forward_with_bias: {
      auto product = graph->conv_fprop(operand(uid_x, "x", x), operand(uid_w, "w", w), with(fe::graph::Conv_fprop_attributes()));
      product->set_dim(y).set_stride(strides_of(y, p.channels_last));
      Sizes channel(y.size(), 1);
      channel[1] = p.q.o;
      auto add = fe::graph::Pointwise_attributes().set_mode(fe::PointwiseMode_t::ADD);
      result(graph->pointwise(product, operand(uid_bias, "bias", channel), add), uid_y, y);
      break;
    }
    case Kind::input: result(graph->conv_dgrad(operand(uid_y, "g", y), operand(uid_w, "w", w), with(fe::graph::Conv_dgrad_attributes())), uid_x, x); break;
    case Kind::weight: result(graph->conv_wgrad(operand(uid_y, "g", y), operand(uid_x, "x", x), with(fe::graph::Conv_wgrad_attributes())), uid_w, w); break;
  }
  return graph;
}

std::optional<Plan> make_plan(const Problem& p) {
  constexpr int64_t most_workspace = int64_t{1} << 30;
  cudnnHandle_t handle = library();
  Plan plan{make_graph(p)};
  auto& g = *plan.graph;
  using Note = fe::NumericalNote_t;
  std::vector<Note> unwanted{Note::NONDETERMINISTIC, Note::REDUCED_PRECISION_REDUCTION, Note::FFT, Note::WINOGRAD};
  if (!p.tf32 && static_cast<DType>(p.dtype) == DType::f32) unwanted.insert(unwanted.end(), {Note::TENSOR_CORE, Note::DOWN_CONVERT_INPUTS});
  if (g.validate().is_bad() || g.build_operation_graph(handle).is_bad() || g.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}).is_bad())
    return std::nullopt;
  g.deselect_numeric_notes(unwanted).deselect_workspace_greater_than(most_workspace);
  if (g.check_support().is_bad() || g.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE).is_bad() || g.get_workspace_size(plan.workspace).is_bad())
    return std::nullopt;
  return plan;
}

// Runs the problem's plan with these addresses, by uid; false when there is none.
bool run_plan(const Problem& p, std::unordered_map<int64_t, void*> addresses) {
  static std::mutex lock;  // also: one at a time, since the kernels of a plan hand on the workspace
  static auto* plans = new std::unordered_map<Problem, std::optional<Plan>, ProblemHash>;
  std::lock_guard guard(lock);
  auto found = plans->find(p);
  if (found == plans->end()) found = plans->emplace(p, make_plan(p)).first;
  if (!found->second) return false;
  const Plan& plan = *found->second;
  bool own = static_cast<size_t>(plan.workspace) > workspace_bytes;
  Scratch large(own ? static_cast<size_t>(plan.workspace) : 0);
  cudnnHandle_t handle = library();
  check(cudnnSetStream(handle, stream()), "cudnnSetStream");
  check(plan.graph->execute(handle, addresses, own ? large.as<void>() : workspace()), "convolution");
  return true;
}

// ---- calls

// The order of dimensions that puts the channels last, and the one that puts them back.
Shape to_last(int rank) {
  Shape order{0};
  for (int d = 2; d < rank; ++d) order.push_back(d);
  order.push_back(1);
  return order;
}
Shape from_last(int rank) {
  Shape order{0, rank - 1};
  for (int d = 1; d < rank - 1; ++d) order.push_back(d);
  return order;
}

bool aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.raw_data()) % 16 == 0; }
bool dense(const Tensor& t, bool channels_last) { return channels_last ? permute(t, to_last(t.rank())).is_contiguous() : t.is_contiguous(); }

// t, or a copy of it that cuDNN takes.
Tensor operand(const Tensor& t, bool channels_last) {
  if (dense(t, channels_last)) return aligned(t) ? t : permute(permute(t, to_last(t.rank())).clone(), from_last(t.rank()));
  return channels_last ? permute(permute(t, to_last(t.rank())).clone(), from_last(t.rank())) : t.clone();
}

// The result's memory: `out` itself, or something to copy from.
struct Result {
  const Tensor& out;
  Tensor to;
  Result(const Tensor& t, DType dtype, bool channels_last) : out(t) {
    if (dtype == t.dtype() && dense(t, channels_last) && aligned(t)) {
      to = t;
      return;
    }
    Shape order = to_last(t.rank()), shape = t.shape();
    if (channels_last) for (size_t d = 0; d < order.size(); ++d) shape[d] = t.shape()[static_cast<size_t>(order[d])];
    Tensor memory = Tensor::empty(Meta(shape, dtype, t.device()));
    to = channels_last ? permute(memory, from_last(t.rank())) : memory;
  }
  void finish() const { if (to.body() != out.body()) call_all(op::copy, {out, to}); }
};

// Nothing when cuDNN is not asked: another dtype, or nothing to add up.
std::optional<Problem> problem(const Call& c, Kind kind, const Tensor& x, const Tensor& w, const Tensor& y) {
  if (x.dtype() == DType::f64 || x.numel() == 0 || w.numel() == 0 || y.numel() == 0) return std::nullopt;
  auto a = c.as<ConvAttrs>();
  DType t = c.in[0].dtype();
  bool tf32 = tf32_allowed();
  return Problem{device(), static_cast<int64_t>(kind), static_cast<int64_t>(t), static_cast<int64_t>(t), is_16bit_dtype(t) || tf32, tf32,
                 a.dims == 3 ? 3 : 2, conv_geometry(a, x.shape(), w.shape(), y.shape())};
}

// x * w, plus a bias, in y's dtype or a wider one.
bool forward(Problem p, const Call& c, const Tensor& y, DType dtype, const Tensor& bias) {
  p.out_dtype = static_cast<int64_t>(dtype);
  p.kind = static_cast<int64_t>(bias.defined() ? Kind::forward_with_bias : Kind::forward);
  Tensor x = operand(c.in[0], p.channels_last), w = operand(c.in[1], p.channels_last);
  Result r(y, dtype, p.channels_last);
  std::unordered_map<int64_t, void*> at{{uid_x, x.raw_data()}, {uid_w, w.raw_data()}, {uid_y, r.to.raw_data()}};
  if (bias.defined()) at.emplace(uid_bias, bias.raw_data());
  if (!run_plan(p, std::move(at))) return false;
  r.finish();
  return true;
}

// cuDNN's relu is not asked: it turns NaN into 0.
template <bool with_relu> void run_forward(const Call& c, std::span<Tensor> out) {
  const Tensor& y = out[0];
  auto otherwise = with_relu ? run_conv_relu : run_conv;
  auto p = problem(c, Kind::forward, c.in[0], c.in[1], y);
  if (!p) return otherwise(c, out);
  Tensor bias = c.has(2) ? c.in[2].contiguous() : Tensor();
  if (bias.defined() && !aligned(bias)) bias = bias.clone();
  if (forward(*p, c, y, y.dtype(), bias)) {
    if (with_relu) call_into(unary::def<unary::Relu>, {y}, {}, y);
    return;
  }
  if (!bias.defined()) return otherwise(c, out);
  // No plan with a bias: the product in f32, then the bias, rounded once.
  Tensor product = Tensor::empty(Meta(y.shape(), DType::f32, y.device()));
  if (!forward(*p, c, product, DType::f32, {})) return otherwise(c, out);
  Shape channel = Shape::filled(y.rank(), 1);
  channel[1] = y.size(1);
  Tensor sum = product + cast(bias, DType::f32).view(channel);
  call_all(op::copy, {y, with_relu ? relu(sum) : sum});
}

void run_input(const Call& c, std::span<Tensor> out) {
  auto p = problem(c, Kind::input, out[0], c.in[1], c.in[0]);
  if (!p) return run_conv_input(c, out);
  Tensor g = operand(c.in[0], p->channels_last), w = operand(c.in[1], p->channels_last);
  Result r(out[0], out[0].dtype(), p->channels_last);
  if (!run_plan(*p, {{uid_y, g.raw_data()}, {uid_w, w.raw_data()}, {uid_x, r.to.raw_data()}})) return run_conv_input(c, out);
  r.finish();
}

void run_weight(const Call& c, std::span<Tensor> out) {
  auto p = problem(c, Kind::weight, c.in[0], out[0], c.in[1]);
  if (!p) return run_conv_weight(c, out);
  Tensor x = operand(c.in[0], p->channels_last), g = operand(c.in[1], p->channels_last);
  auto with = [&](DType result) {
    p->out_dtype = static_cast<int64_t>(result);
    Result r(out[0], result, p->channels_last);
    if (!run_plan(*p, {{uid_y, g.raw_data()}, {uid_x, x.raw_data()}, {uid_w, r.to.raw_data()}})) return false;
    r.finish();
    return true;
  };
  if (with(out[0].dtype())) return;
  // Where no engine gives f32 of 16-bit tensors, one that sums in f32 and rounds once: far faster than our own kernel.
  if (out[0].dtype() != c.in[0].dtype() && with(c.in[0].dtype())) return;
  run_conv_weight(c, out);
}

}  // namespace
}  // namespace cuda

void register_cudnn();
void register_cudnn() {
  if (!op::conv.kernel[static_cast<size_t>(DeviceType::cuda)]) return;  // no usable GPU
  cuda::fill<cuda::run_forward<false>>(op::conv);
  cuda::fill<cuda::run_forward<true>>(op::conv_relu);
  cuda::fill<cuda::run_input>(op::conv_input);
  cuda::fill<cuda::run_weight>(op::conv_weight);
  cuda::fill_cudnn_attention();
}

}  // namespace halftone
