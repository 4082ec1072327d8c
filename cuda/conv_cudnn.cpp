// Convolutions on CUDA by cuDNN's graph API. What a call needs besides its addresses is a plan, found once per problem: the
// library's first choice, or the fastest (core/tuning.h), of those that give the same bits every time and compute in the dtype
// they are asked for; tuning may find that cuBLASLt is faster where a kernel has one place. Without a plan, in f64, for f32 images in
// one group (gemm_3xtf32.cu), and where windows hold few numbers of 16 bits, our own kernels run.
//
// An addend of a gradient is a problem of its own. Kernels of one place take it up in cuBLASLt's product; for the others cuDNN compiles
// kernels when it is asked, so that only tuning asks. Otherwise the sum comes apart, by a second kernel.
//
// Tensor cores want channels last. Whatever the layout of the tensors, 16-bit operands are handed over with their channels
// as neighbours: those that lie so already are not copied. Where channels are few and strides are two, blocks of pixels take the place of
// pixels (space_to_depth.h).
#include "halftone/core/backend.h"
#include "halftone/cuda/attention.h"
#include "halftone/cuda/conv.h"
#include "halftone/cuda/conv_3xtf32.h"
#include "halftone/cuda/cudnn_plans.h"
#include "halftone/cuda/images.h"
#include "halftone/cuda/matmul.h"
#include "halftone/cuda/small_conv.h"
#include "halftone/cuda/space_to_depth.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/conv.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/shape.h"
#include "halftone/ops/unary.h"

namespace halftone {
namespace cuda {
namespace {

using namespace cudnn;

// ---- plans

enum class Kind : int64_t { forward, forward_with_bias, input, weight, input_with_addend };

struct Problem {
  int64_t device, kind, dtype, out_dtype, channels_last, tf32, spatial;
  ConvGeometry q;
};

enum Uid : int64_t { uid_x = 1, uid_w, uid_y, uid_bias, uid_addend };

// One of a graph's candidates, or a product of matrices, or neither: the sum comes apart.
struct Choice {
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t candidate = 0, workspace = 0;
  bool tuned = false, as_product = false;
};
constexpr const char *as_product = "product", *apart = "apart";  // their names among tuned choices

// The same as a product of matrices [pixels, channels]; false when there is no kernel for it.
using Product = std::function<bool()>;
bool is_product(const Problem& p) {
  auto all = [](const int64_t (&v)[3], int64_t n) { return std::all_of(v, v + 3, [n](int64_t i) { return i == n; }); };
  return p.channels_last && p.q.groups == 1 && p.q.taps() == 1 && all(p.q.stride, 1) && all(p.q.before, 0) && all(p.q.after, 0);
}

fe::DataType_t type_of(int64_t dtype) { return cudnn::type_of(static_cast<DType>(dtype)); }

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
  auto sum = [&](const auto& part, const Sizes& shape, const auto& more) {
    part->set_dim(shape).set_stride(strides_of(shape, p.channels_last));
    return graph->pointwise(part, more, fe::graph::Pointwise_attributes().set_mode(fe::PointwiseMode_t::ADD));
  };
  switch (kind) {
    case Kind::forward: result(graph->conv_fprop(operand(uid_x, "x", x), operand(uid_w, "w", w), with(fe::graph::Conv_fprop_attributes())), uid_y, y); break;
    case Kind::forward_with_bias: {
      auto product = graph->conv_fprop(operand(uid_x, "x", x), operand(uid_w, "w", w), with(fe::graph::Conv_fprop_attributes()));
      Sizes channel(y.size(), 1);
      channel[1] = p.q.o;
      result(sum(product, y, operand(uid_bias, "bias", channel)), uid_y, y);
      break;
    }
    case Kind::input: result(graph->conv_dgrad(operand(uid_y, "g", y), operand(uid_w, "w", w), with(fe::graph::Conv_dgrad_attributes())), uid_x, x); break;
    case Kind::input_with_addend: {
      auto gradient = graph->conv_dgrad(operand(uid_y, "g", y), operand(uid_w, "w", w), with(fe::graph::Conv_dgrad_attributes()));
      result(sum(gradient, x, operand(uid_addend, "addend", x)), uid_x, x);
      break;
    }
    case Kind::weight: result(graph->conv_wgrad(operand(uid_y, "g", y), operand(uid_x, "x", x), with(fe::graph::Conv_wgrad_attributes())), uid_w, w); break;
  }
  return graph;
}

// With its candidates, the best guess first; null when there are none. Exceptions of a graph of two operations are not documented.
std::shared_ptr<fe::graph::Graph> graph_with_candidates(const Problem& p) {
  auto g = make_graph(p);
  using Note = fe::NumericalNote_t;
  std::vector<Note> unwanted{Note::NONDETERMINISTIC, Note::REDUCED_PRECISION_REDUCTION, Note::FFT, Note::WINOGRAD};
  if (!p.tf32 && static_cast<DType>(p.dtype) == DType::f32) unwanted.insert(unwanted.end(), {Note::TENSOR_CORE, Note::DOWN_CONVERT_INPUTS});
  return with_handle([&](cudnnHandle_t h) {
    try {
      bool none = g->validate().is_bad() || g->build_operation_graph(h).is_bad() ||
                  g->create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}).is_bad();
      if (none) g.reset();
      else g->deselect_numeric_notes(unwanted);
    } catch (const std::exception&) {
      g.reset();
    }
    return g;
  });
}
std::string name_of(const fe::graph::Graph& g, int64_t candidate) {
  std::string name;
  check(g.get_plan_name_at_index(candidate, name), "plan name");
  return name;
}
// False: this machine or this version cannot run it, or not in little memory.
bool build(Choice& plan, int64_t candidate) {
  constexpr int64_t most_workspace = int64_t{1} << 30;
  plan.candidate = candidate;
  if (with_handle([&](cudnnHandle_t h) { return plan.graph->build_plan_at_index(h, candidate).is_bad(); })) return false;
  plan.workspace = plan.graph->get_workspace_size_plan_at_index(candidate);
  return plan.workspace <= most_workspace;
}

// Kernels that cuDNN (seen in 9.19) compiles for a gradient and its addend may begin before the kernel ahead of them has ended, wait for
// that before they read the gradient, and read the addend without waiting. What is no kernel keeps the two apart.
void keep_apart() {
  const Scratch anything(1);
  check(cudaMemsetAsync(anything.as<>(), 0, 1, stream()), "cudaMemsetAsync");
}

void execute(const Choice& plan, Addresses& addresses) {
  if (addresses.contains(uid_addend)) keep_apart();
  const Scratch workspace(static_cast<size_t>(plan.workspace));
  with_handle([&](cudnnHandle_t h) { check(plan.graph->execute_plan_at_index(h, addresses, workspace.as<>(), plan.candidate), "convolution"); });
}

// An engine of cuDNN 9.14 for weights' gradients in TF32 was seen to read beyond its operands where padding was 2 before and 1 after.
bool may_time_all(const Problem& p) { return is_16bit_dtype(static_cast<DType>(p.dtype)) || std::equal(p.q.before, p.q.before + 3, p.q.after); }

std::string name_of(const Problem& p) { return tuning_name(text::cat("cudnn ", cudnnGetVersion()), p); }
void tune_plan(const Problem& p, Addresses& addresses, const Product& product, std::optional<double> ms_apart) {
  if (tuned_choice(name_of(p)) || !may_time_all(p)) return;
  std::optional<double> least = ms_apart, of_plans;
  if (least) set_tuned_choice(name_of(p), apart);
  Choice plan{graph_with_candidates(p)};
  auto time = [&](int64_t i) -> std::optional<double> {
    if (!build(plan, i)) return std::nullopt;
    try {
      double ms = time_call([&] { execute(plan, addresses); });
      of_plans = std::min(ms, of_plans.value_or(ms));
      return ms;
    } catch (const Error&) {  // it cannot run after all
      return std::nullopt;
    }
  };
  auto best = plan.graph ? fastest(plan.graph->get_execution_plan_count(), time) : std::nullopt;
  if (best && (!least || *of_plans < *least)) {
    set_tuned_choice(name_of(p), name_of(*plan.graph, *best));
    least = of_plans;
  }
  if (is_product(p) && product() && (!least || time_call([&] { product(); }) < *least)) set_tuned_choice(name_of(p), as_product);
}

std::optional<Choice> make_plan(const Problem& p) {
  auto choice = tuned_choice(name_of(p));
  if (choice == as_product) return Choice{.graph = {}, .tuned = true, .as_product = true};
  if (static_cast<Kind>(p.kind) == Kind::input_with_addend && (!choice || choice == apart))
    return Choice{.graph = {}, .tuned = choice.has_value(), .as_product = !choice && is_product(p)};
  Choice plan{graph_with_candidates(p)};
  if (!plan.graph) return std::nullopt;
  int64_t count = plan.graph->get_execution_plan_count();
  for (int64_t i = 0; choice && i < count; ++i)
    if (name_of(*plan.graph, i) == *choice && build(plan, i)) {
      plan.tuned = true;
      return plan;
    }
  for (int64_t i = 0; i < count; ++i) if (build(plan, i)) return plan;
  return std::nullopt;
}

// Runs the problem's plan; false when there is none. `ms_apart`, to tune: how long another way takes.
bool run_plan(const Problem& p, Addresses addresses, const Product& product, std::optional<double> ms_apart = {}) {
  static auto* plans = new Plans<Problem, Choice>;
  auto plan = plans->find(p, make_plan, [&](const Problem&) { tune_plan(p, addresses, product, ms_apart); });
  if (plan && plan->as_product) return product();
  if (!plan || !plan->graph) return false;
  execute(*plan, addresses);
  return true;
}

// ---- calls

bool aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.raw_data()) % 16 == 0; }

// The matrix [pixels, channels] that lies in memory where the channels of t come last.
Tensor rows(const Tensor& t) {
  Meta m(Shape{t.numel() / t.size(1), t.size(1)}, t.dtype(), t.device());
  m.offset = t.meta().offset;
  return Tensor(m, t.storage(), true);
}

// Tensor cores take channels in fours. Large windows over fewer run faster with zeros beside them (256 images of
// 3 x 224 x 224, kernel 7 x 7 with stride 2, on one H200: 1.5 ms, with a fourth channel 0.83 ms, and by space_to_depth 0.45 ms).
void pad_channels(Problem& p) {
  constexpr int64_t together = 4, large = 25;
  if (p.channels_last && p.q.groups == 1 && p.q.c < together && p.q.taps() >= large) p.q.c = together;
}

// How many results a convolution of blocks of pixels forms at a time in the place of p; 0: none does.
int results_by_blocks(const Problem& p, const Tensor& images) {
  return is_16bit_dtype(images.dtype()) && images.rank() == 4 ? space_to_depth_results(p.q) : 0;
}

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
bool forward(Problem p, const Call& c, const Tensor& y, DType dtype, Tensor bias) {
  p.out_dtype = static_cast<int64_t>(dtype);
  p.kind = static_cast<int64_t>(bias.defined() ? Kind::forward_with_bias : Kind::forward);
  const ConvGeometry q = p.q;
  const int deep = results_by_blocks(p, c.in[0]);
  if (deep > 0) p.q = space_to_depth(q, deep);
  else pad_channels(p);
  Tensor x = deep > 0 ? images_to_depth(c.in[0], q, deep) : operand(c.in[0], p.channels_last, p.q.c);
  Tensor w = deep > 0 ? weights_to_depth(c.in[1], q, deep) : operand(c.in[1], p.channels_last, p.q.c_group());
  if (deep > 1 && bias.defined()) bias = cat({bias, bias});
  Result r(y, dtype, p.channels_last);
  Addresses at{{uid_x, x.raw_data()}, {uid_w, w.raw_data()}, {uid_y, r.to.raw_data()}};
  if (bias.defined()) at.emplace(uid_bias, bias.raw_data());
  if (!run_plan(p, std::move(at), [&] { return product(rows(x), false, rows(w), true, bias, rows(r.to)); })) return false;
  r.finish();
  return true;
}

// cuDNN's relu is not asked: it turns NaN into 0.
template <bool with_relu> void run_forward(const Call& c, std::span<Tensor> out) {
  const Tensor& y = out[0];
  if (small_conv(c, y, with_relu) || conv_3xtf32(c, y, with_relu)) return;
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
  if (conv_input_3xtf32(c, out[0])) return;
  auto p = problem(c, Kind::input, out[0], c.in[1], c.in[0]);
  if (!p) return run_conv_input(c, out);
  Tensor g = operand(c.in[0], p->channels_last), w = operand(c.in[1], p->channels_last);
  Tensor addend = c.has(2) ? operand(c.in[2], p->channels_last) : Tensor();
  Result r(out[0], out[0].dtype(), p->channels_last);
  Addresses at{{uid_y, g.raw_data()}, {uid_w, w.raw_data()}, {uid_x, r.to.raw_data()}};
  auto separately = [&] {
    if (!run_plan(*p, at, [&] { return product(rows(g), false, rows(w), false, {}, rows(r.to)); })) return false;
    if (addend.defined()) add_into(r.to, addend);
    return true;
  };
  auto with_addend = [&] {
    Problem sum = *p;
    sum.kind = static_cast<int64_t>(Kind::input_with_addend);
    std::optional<double> ms;
    if (tuning() && !tuned_choice(name_of(sum)) && separately()) ms = time_call(separately);
    Addresses all = at;
    all.emplace(uid_addend, addend.raw_data());
    return run_plan(sum, std::move(all), [&] { return product(rows(g), false, rows(w), false, {}, rows(r.to), rows(addend)); }, ms);
  };
  if (!(addend.defined() && with_addend()) && !separately()) return run_conv_input(c, out);
  r.finish();
}

void run_weight(const Call& c, std::span<Tensor> out) {
  if (small_conv_weight(c, out[0]) || conv_weight_3xtf32(c, out[0])) return;
  auto p = problem(c, Kind::weight, c.in[0], out[0], c.in[1]);
  if (!p) return run_conv_weight(c, out);
  Tensor g = operand(c.in[1], p->channels_last);
  // Sums in f32, rounded once to the operands' dtype even where f32 is wanted: cuDNN's engine for that is up to 30 times
  // slower (512 images of 64 channels and 32 x 32, kernel 3 x 3, on one H200: 2.6 ms and 0.09 ms).
  Result r(out[0], c.in[0].dtype(), p->channels_last);
  if (const ConvGeometry q = p->q; results_by_blocks(*p, c.in[0]) > 0) {
    p->q = space_to_depth(q, 1);  // two results at a time would give a gradient in two parts, each rounded
    Tensor x = images_to_depth(c.in[0], q, 1), w = empty_deep_weights(r.to, q);
    if (!run_plan(*p, {{uid_y, g.raw_data()}, {uid_x, x.raw_data()}, {uid_w, w.raw_data()}}, {})) return run_conv_weight(c, out);
    weights_to_space(w, r.to, q);
    return r.finish();
  }
  Tensor x = operand(c.in[0], p->channels_last);
  auto by_matrices = [&] { return product(rows(g), true, rows(x), false, {}, rows(r.to)); };
  if (!run_plan(*p, {{uid_y, g.raw_data()}, {uid_x, x.raw_data()}, {uid_w, r.to.raw_data()}}, by_matrices)) return run_conv_weight(c, out);
  r.finish();
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
