// Attention on CUDA by cuDNN's graph API: 16-bit dtypes, heads a multiple of 8 wide, causal or not, without masks and dropout.
// Its kernels read heads where they are, in views of [b, t, heads * width], and the result lies likewise. What cuDNN has no
// plan for runs in our own kernels, and so does what it answers otherwise: rows that a mask hides wholly are ours to define,
// and its dropout draws other numbers.
#include "halftone/cuda/cudnn_plans.h"

#include "halftone/cuda/attention.h"
#include "halftone/ops/attention.h"
#include "halftone/ops/copy.h"

namespace halftone::cuda {
namespace {

using namespace cudnn;

enum class Kind : int64_t { inference, training, gradient };
enum Uid : int64_t { uid_q = 1, uid_k, uid_v, uid_y, uid_lse, uid_grad, uid_dq, uid_dk, uid_dv, uid_queries, uid_keys };
using Steps = std::array<int64_t, 3>;  // between batches, heads, rows

struct Problem {
  int64_t device, kind, dtype, causal, scale;  // the scale by its bits, as a float
  int64_t b, h, g, t, s, d, e;
  Steps q, k, v, y, grad, dq, dk, dv;
};

// ---- graphs

// Gradients of other numbers of queries take a mask of padding that hides nothing: cudnn-frontend makes one itself, but from
// the host's memory, which a captured step would read again when it is gone.
bool pads(const Problem& p) { return static_cast<Kind>(p.kind) == Kind::gradient && p.t % 128 != 0; }

std::optional<Plan> make_plan(const Problem& p) {
  auto graph = std::make_shared<fe::graph::Graph>();
  const fe::DataType_t type = type_of(static_cast<DType>(p.dtype));
  graph->set_io_data_type(type).set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
  auto describe = [](auto& t, Uid uid, const Sizes& shape, const Steps& steps) -> auto& {
    return t.set_uid(uid).set_dim(shape).set_stride({steps[0], steps[1], steps[2], 1});
  };
  auto operand = [&](Uid uid, const char* name, const Sizes& shape, const Steps& steps, fe::DataType_t of) {
    fe::graph::Tensor_attributes t;
    return graph->tensor(describe(t.set_name(name), uid, shape, steps).set_data_type(of));
  };
  auto result = [&](const auto& t, Uid uid, const Sizes& shape, const Steps& steps, fe::DataType_t of) {
    describe(*t, uid, shape, steps).set_output(true).set_data_type(of);
  };
  const Sizes queries{p.b, p.h, p.t, p.d}, keys{p.b, p.g, p.s, p.d}, values{p.b, p.g, p.s, p.e}, results{p.b, p.h, p.t, p.e}, rows{p.b, p.h, p.t, 1};
  const Steps row_steps{p.h * p.t, p.t, 1};
  const float scale = std::bit_cast<float>(static_cast<int32_t>(p.scale));
  auto q = operand(uid_q, "q", queries, p.q, type), k = operand(uid_k, "k", keys, p.k, type), v = operand(uid_v, "v", values, p.v, type);

  if (static_cast<Kind>(p.kind) != Kind::gradient) {
    const bool training = static_cast<Kind>(p.kind) == Kind::training;
    auto [y, lse] = graph->sdpa(q, k, v,
                                fe::graph::SDPA_attributes()
                                    .set_name("attention")
                                    .set_implementation(fe::AttentionImplementation_t::COMPOSITE)
                                    .set_generate_stats(training)
                                    .set_causal_mask(p.causal != 0)
                                    .set_attn_scale(scale));
    result(y, uid_y, results, p.y, type);
    if (training) result(lse, uid_lse, rows, row_steps, fe::DataType_t::FLOAT);
    return plan_for(graph);
  }
  auto attributes = fe::graph::SDPA_backward_attributes();
  attributes.set_name("attention_grad").set_deterministic_algorithm(true).set_causal_mask(p.causal != 0).set_attn_scale(scale);
  if (pads(p)) {
    auto lengths = [&](Uid uid, const char* name) { return operand(uid, name, {p.b, 1, 1, 1}, {1, 1, 1}, fe::DataType_t::INT32); };
    attributes.set_padding_mask(true).set_seq_len_q(lengths(uid_queries, "queries")).set_seq_len_kv(lengths(uid_keys, "keys"));
  }
  auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, operand(uid_y, "y", results, p.y, type), operand(uid_grad, "grad", results, p.grad, type),
                                           operand(uid_lse, "lse", rows, row_steps, fe::DataType_t::FLOAT), attributes);
  result(dq, uid_dq, queries, p.dq, type);
  result(dk, uid_dk, keys, p.dk, type);
  result(dv, uid_dv, values, p.dv, type);
  return plan_for(graph);
}

std::optional<Plan> find_plan(const Problem& p) {
  static auto* plans = new Plans<Problem, Plan>;
  return plans->find(p, make_plan);
}

// ---- calls

// How far rows of heads lie apart where cuDNN reads or writes them: dense, and each at a multiple of 16 bytes.
std::optional<Steps> steps_of(const Tensor& x) {
  if (x.strides()[3] != 1 || reinterpret_cast<uintptr_t>(x.raw_data()) % 16 != 0) return std::nullopt;
  Steps steps{};
  int64_t extent = 0;
  for (size_t i = 0; i < 4; ++i) extent = std::max(extent, x.shape()[i] * x.strides()[i]);
  for (size_t i = 0; i < 3; ++i) {
    steps[i] = x.shape()[i] == 1 ? extent : x.strides()[i];  // that of a single one means nothing
    if (steps[i] == 0 || steps[i] % 8 != 0) return std::nullopt;
  }
  return steps;
}
// x, or a copy of it that cuDNN takes.
Tensor operand(const Tensor& x) { return steps_of(x) ? x : x.clone(); }

// Whether cuDNN is asked at all.
bool asks(const Call& c, size_t mask) {
  const Tensor &q = c.in[0], &v = c.in[2];
  return is_16bit_dtype(q.dtype()) && !c.has(mask) && !c.has(mask + 1) && q.numel() > 0 && v.numel() > 0 && q.size(3) % 8 == 0 && v.size(3) % 8 == 0;
}

Problem problem(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionAttrs& a, Kind kind) {
  return {device(), static_cast<int64_t>(kind), static_cast<int64_t>(q.dtype()), a.causal, std::bit_cast<int32_t>(static_cast<float>(a.scale)),
          q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3), *steps_of(q), *steps_of(k), *steps_of(v), {}, {}, {}, {}, {}};
}

bool forward(const Call& c, std::span<Tensor> out) {
  const auto y = steps_of(out[0]);
  const bool training = out.size() > 1;
  if (!asks(c, 3) || !y || (training && !out[1].is_contiguous())) return false;
  const Tensor q = operand(c.in[0]), k = operand(c.in[1]), v = operand(c.in[2]);
  Problem p = problem(q, k, v, c.as<AttentionAttrs>(), training ? Kind::training : Kind::inference);
  p.y = *y;
  auto plan = find_plan(p);
  if (!plan) return false;
  Addresses at{{uid_q, q.raw_data()}, {uid_k, k.raw_data()}, {uid_v, v.raw_data()}, {uid_y, out[0].raw_data()}};
  if (training) at.emplace(uid_lse, out[1].raw_data());
  plan->run(std::move(at), "attention");
  return true;
}

// What a gradient reads and writes, lse dense.
struct Tensors9 { Tensor q, k, v, y, grad, lse, dq, dk, dv; };

// The deterministic algorithm keeps all scores of the batches that it works on: some after the others, then.
bool gradient(const Tensors9& x, const AttentionAttrs& a) {
  constexpr int64_t most_workspace = int64_t{2} << 30;
  Problem p = problem(x.q, x.k, x.v, a, Kind::gradient);
  p.y = *steps_of(x.y);
  p.grad = *steps_of(x.grad);
  p.dq = *steps_of(x.dq);
  p.dk = *steps_of(x.dk);
  p.dv = *steps_of(x.dv);
  auto plan = find_plan(p);
  if (!plan) return false;
  if (plan->workspace > most_workspace && p.b > 1) {
    auto part = [&](int64_t begin, int64_t end) {
      auto of = [&](const Tensor& t) { return t.slice(0, begin, end); };
      return gradient({of(x.q), of(x.k), of(x.v), of(x.y), of(x.grad), of(x.lse), of(x.dq), of(x.dk), of(x.dv)}, a);
    };
    return part(0, p.b / 2) && part(p.b / 2, p.b);
  }
  Addresses at{{uid_q, x.q.raw_data()}, {uid_k, x.k.raw_data()}, {uid_v, x.v.raw_data()}, {uid_y, x.y.raw_data()}, {uid_grad, x.grad.raw_data()},
               {uid_lse, x.lse.raw_data()}, {uid_dq, x.dq.raw_data()}, {uid_dk, x.dk.raw_data()}, {uid_dv, x.dv.raw_data()}};
  const int64_t step = (p.b + 63) / 64 * 64;
  Scratch lengths(pads(p) ? static_cast<size_t>(2 * step) * sizeof(int32_t) : 0);
  if (pads(p)) {
    fill_lengths(lengths.as<int32_t>(), step, p.b, p.t, p.s);
    at.emplace(uid_queries, lengths.as<int32_t>());
    at.emplace(uid_keys, lengths.as<int32_t>() + step);
  }
  plan->run(std::move(at), "attention_grad");
  return true;
}

void run_forward(const Call& c, std::span<Tensor> out) {
  if (!forward(c, out)) run_attention(c, out);
}

void run_gradient(const Call& c, std::span<Tensor> out) {
  bool fits = asks(c, 6);
  for (const Tensor& t : out) fits = fits && steps_of(t);
  if (!fits || !gradient({operand(c.in[0]), operand(c.in[1]), operand(c.in[2]), operand(c.in[3]), operand(c.in[4]), c.in[5].contiguous(), out[0], out[1],
                          out[2]},
                         c.as<AttentionAttrs>()))
    run_attention_grad(c, out);
}

}  // namespace

void fill_cudnn_attention() {
  fill<run_forward>(op::attention);
  fill<run_gradient>(op::attention_grad);
}

}  // namespace halftone::cuda
