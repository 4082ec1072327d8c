// Steps along directions that were shaped tensor by tensor.
#include "halftone/optim/layerwise.h"

#include <cmath>

#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/matmul.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/update.h"

namespace halftone::optim {
namespace {

Directions directions_for(std::span<const Tensor> parameters) {
  Directions d;
  d.parameters.assign(parameters.begin(), parameters.end());
  d.each.resize(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (d.each[i].defined()) continue;
    auto wide = [](const Tensor& p) { return p.dtype() == DType::f64 ? DType::f64 : DType::f32; };
    std::vector<size_t> alike;
    for (size_t k = i; k < parameters.size(); ++k)
      if (parameters[k].shape() == parameters[i].shape() && wide(parameters[k]) == wide(parameters[i])) alike.push_back(k);
    const Tensor& p = parameters[i];
    const int64_t rows = p.rank() == 0 ? 1 : p.size(0), columns = rows == 0 ? 0 : p.numel() / rows;
    Tensor batch = zeros({alike.size(), rows, columns}, {.dtype = wide(p), .device = p.device()});
    for (size_t k = 0; k < alike.size(); ++k) d.each[alike[k]] = batch.select(0, static_cast<int64_t>(k)).view(p.shape());
    d.batches.push_back(batch);
  }
  return d;
}

}  // namespace

// `call` is the optimizer's, without the list of directions behind its states.
void detail::step_along(Call& call, int n, size_t states, double decay, const update::Rounding& rounding,
                        const std::function<void(const Directions&)>& shape) {
  const auto count = static_cast<size_t>(n);
  auto list = [&](size_t k) { return call.in.data() + update::lists_at + k * count; };
  Directions d = directions_for({list(0), count});
  Tensor step = call.in[update::step_at].clone();  // the first operator counts

  Call direct{.op = call.op, .in = {}, .attrs = call.attrs, .out = {}};
  direct.in.append(call.in.data(), list(2 + states));
  direct.in.append(d.each.data(), d.each.data() + count);
  direct.in.resize(direct.in.size() + count);
  dispatch(direct);

  shape(d);

  Tensors along{call.in[update::lr_at], step, {}, call.in[update::found_inf_at], {}};
  along.append(list(0), list(1));
  along.append(d.each.data(), d.each.data() + count);
  along.resize(along.size() + count);  // no momentum
  along.append(list(2 + states), list(3 + states));
  call_all(update::def<update::Sgd>, std::move(along), Attrs::of(update::Given<update::Sgd>{n, {.weight_decay = decay}, rounding}));
}

void LAMB::shape(const LAMBOptions& o, const Directions& d) {
  if (o.adapt) trust_ratio_(d.each, d.parameters);
}

Tensor orthogonalize(const Tensor& x, const OrthogonalizeOptions& o) {
  HT_CHECK(x.rank() >= 2 && is_floating(x.dtype()), "orthogonalize: expected matrices [..., m, n], got ", x.meta());
  HT_CHECK(o.steps >= 0 && o.eps > 0, "orthogonalize: expected steps of 0 or more and eps above 0, got ", o.steps, " and ", o.eps);
  HT_CHECK(is_floating(o.products), "orthogonalize: expected products of a floating dtype, got ", o.products);
  constexpr double a = 3.4445, b = -4.7750, c = 2.0315;
  const bool tall = x.size(-2) > x.size(-1);  // the smaller of x x^T and x^T x
  Tensor wide = is_16bit_dtype(x.dtype()) ? x.to(DType::f32) : x;
  Tensor y = (wide / (norm(wide, {-2, -1}, {.keepdim = true}) + o.eps)).to(x.dtype() == DType::f64 ? DType::f64 : o.products);
  if (tall) y = y.t();
  for (int i = 0; i < o.steps; ++i) {
    Tensor gram = matmul(y, y.t());
    y = a * y + matmul(b * gram + c * matmul(gram, gram), y);
  }
  return (tall ? y.t() : y).to(x.dtype());
}

void Muon::check_parameters(const std::vector<Tensor>& params) {
  for (size_t i = 0; i < params.size(); ++i)
    HT_CHECK(params[i].rank() >= 2, "Muon: parameter ", i, " ", params[i].meta(), " is no matrix; give it to AdamW, as an optimizer of its own");
}
void Muon::shape(const MuonOptions& o, const Directions& d) {
  for (Tensor batch : d.batches) {
    auto rows = static_cast<double>(batch.size(1)), columns = static_cast<double>(batch.size(2));
    if (batch.numel() == 0) continue;
    double scale = o.match_adamw ? 0.2 * std::sqrt(std::max(rows, columns)) : std::sqrt(std::max(1.0, rows / columns));
    batch.copy_(orthogonalize(batch, {.steps = o.steps, .products = o.products}) * scale);
  }
}

}  // namespace halftone::optim
