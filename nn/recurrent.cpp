// Recurrent networks, step by step: two products, and what ops/recurrent.h makes of them.
#include "halftone/nn/recurrent.h"

#include <algorithm>
#include <cmath>

#include "halftone/nn/init.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/matmul.h"
#include "halftone/ops/random.h"
#include "halftone/ops/recurrent.h"
#include "halftone/ops/shape.h"

namespace halftone::nn {
namespace {

// ---- steps, of cells and networks alike: `x` and `h` are the products with the weights

LSTMState tanh_step(const Tensor& x, const Tensor& h, const LSTMState&) { return {tanh(x + h), {}}; }
LSTMState relu_step(const Tensor& x, const Tensor& h, const LSTMState&) { return {relu(x + h), {}}; }
LSTMState lstm_step(const Tensor& x, const Tensor& h, const LSTMState& s) {
  LSTMStep next = halftone::lstm_step(x, h, s.c);
  return {next.h, next.c};
}
LSTMState gru_step(const Tensor& x, const Tensor& h, const LSTMState& s) { return {halftone::gru_step(x, h, s.h), {}}; }
auto step_of(RecurrentNonlinearity f) { return f == RecurrentNonlinearity::tanh ? tanh_step : relu_step; }

// The steps of x [t, ...], by halves: the gradient of x is then put together in log2(t) sweeps, not in t.
void each_step(const Tensor& x, std::vector<Tensor>& steps) {
  int64_t t = x.size(0);
  if (t == 1) steps.push_back(x.squeeze(0));
  if (t < 2) return;
  each_step(narrow(x, 0, 0, t / 2), steps);
  each_step(narrow(x, 0, t / 2, t - t / 2), steps);
}

Parameter draw(const Shape& shape, int64_t hidden) {
  double bound = hidden > 0 ? 1 / std::sqrt(static_cast<double>(hidden)) : 0;
  return Parameter(init::uniform_(empty(shape), -bound, bound));
}

}  // namespace

// ---- networks

Recurrent::Recurrent(const char* name, int64_t gates, Size in, Size hidden, const RecurrentOptions& o)
    : name_(name), in_(in), hidden_(hidden), options_(o) {
  HT_CHECK(o.layers > 0 && hidden > 0, name, ": expected at least one layer of at least one element, got ", o.layers,
           " of ", hidden);
  HT_CHECK(o.dropout >= 0 && o.dropout <= 1, name, ": expected dropout in [0, 1], got ", o.dropout);
  int directions = o.bidirectional ? 2 : 1;
  for (int64_t l = 0; l < o.layers; ++l)
    for (int d = 0; d < directions; ++d) {
      std::string end = text::cat("_l", l, d ? "_reverse" : "");
      auto add = [&](const char* what, const Shape& shape) { parameters_.emplace_back(what + end, draw(shape, hidden)); };
      add("weight_ih", {gates * hidden, l == 0 ? int64_t{in} : directions * hidden});
      add("weight_hh", {gates * hidden, hidden});
      if (!o.bias) continue;
      add("bias_ih", {gates * hidden});
      add("bias_hh", {gates * hidden});
    }
}

Parameter& Recurrent::parameter(std::string_view name) {
  Parameter* p = parameters_.find(name);
  HT_CHECK(p, name_, ": no parameter ", name);
  return *p;
}

LSTMResult Recurrent::run(const Tensor& input, const LSTMState& start, Step step, bool has_c) {
  HT_CHECK(input.rank() == 3 && input.size(2) == in_, name_, ": expected ", options_.batch_first ? "[n, t, " : "[t, n, ",
           in_, "], got ", input.meta());
  int64_t directions = options_.bidirectional ? 2 : 1, states = options_.layers * directions;
  Tensor x = options_.batch_first ? input.transpose(0, 1) : input;
  HT_CHECK(x.size(0) > 0, name_, ": expected at least one step, got ", input.meta());
  Shape state{states, x.size(1), hidden_};
  auto initial = [&](const Tensor& given, const char* what) {
    HT_CHECK(!given.defined() || given.shape() == state, name_, ": expected ", what, " ", state, ", got ", given.meta());
    return given.defined() ? given : zeros(state, x.options());
  };
  Tensor h0 = initial(start.h, "h"), c0 = has_c ? initial(start.c, "c") : Tensor();

  size_t each = options_.bias ? 4 : 2;
  std::vector<Tensor> last_h, last_c;
  for (int64_t l = 0; l < options_.layers; ++l) {
    if (l > 0) x = dropout(x, options_.dropout, training());
    std::vector<Tensor> outputs;
    for (int64_t d = 0; d < directions; ++d) {
      int64_t index = l * directions + d;
      auto weight = [&](size_t i) { return i < each ? parameters_[static_cast<size_t>(index) * each + i].second : Tensor(); };
      Tensor w_hh = weight(1), b_hh = weight(3);
      std::vector<Tensor> steps, hidden;
      each_step(linear(x, weight(0), weight(2)), steps);
      if (d) std::reverse(steps.begin(), steps.end());
      LSTMState s{h0.select(0, index), has_c ? c0.select(0, index) : Tensor()};
      for (auto& from_x : steps) {
        s = step(from_x, linear(s.h, w_hh, b_hh), s);
        hidden.push_back(s.h);
      }
      if (d) std::reverse(hidden.begin(), hidden.end());
      outputs.push_back(stack(hidden));
      last_h.push_back(s.h);
      if (has_c) last_c.push_back(s.c);
    }
    x = directions == 2 ? cat(outputs, -1) : outputs[0];
  }
  return {options_.batch_first ? x.transpose(0, 1) : x, stack(last_h), has_c ? stack(last_c) : Tensor()};
}

RNN::RNN(Size in, Size hidden, RNNOptions o)
    : Recurrent("RNN", 1, in, hidden,
                {.layers = o.layers, .bias = o.bias, .batch_first = o.batch_first, .dropout = o.dropout,
                 .bidirectional = o.bidirectional}),
      nonlinearity_(o.nonlinearity) {}
RNNResult RNN::forward(const Tensor& x, const Tensor& h) {
  LSTMResult r = run(x, {h, {}}, step_of(nonlinearity_), false);
  return {r.output, r.h};
}
LSTMResult LSTM::forward(const Tensor& x, const LSTMState& state) { return run(x, state, lstm_step, true); }
RNNResult GRU::forward(const Tensor& x, const Tensor& h) {
  LSTMResult r = run(x, {h, {}}, gru_step, false);
  return {r.output, r.h};
}

// ---- cells

RecurrentCell::RecurrentCell(int64_t gates, Size in, Size hidden, bool bias)
    : weight_ih(draw({gates * hidden, in}, hidden)), weight_hh(draw({gates * hidden, hidden}, hidden)) {
  if (!bias) return;
  bias_ih = draw({gates * hidden}, hidden);
  bias_hh = draw({gates * hidden}, hidden);
}
Tensor RecurrentCell::zero_state(const Tensor& x) const {
  HT_CHECK(x.rank() > 0, "a recurrent cell: expected [n, ", weight_ih.size(1), "], got ", x.meta());
  Shape shape = x.shape();
  shape[x.rank() - 1] = weight_hh.size(1);
  return zeros(shape, x.options());
}
Tensor RecurrentCell::from_input(const Tensor& x) const { return linear(x, weight_ih, bias_ih); }
Tensor RecurrentCell::from_state(const Tensor& h) const { return linear(h, weight_hh, bias_hh); }

Tensor RNNCell::forward(const Tensor& x, const Tensor& h) {
  return step_of(nonlinearity_)(from_input(x), from_state(h), {h, {}}).h;
}
LSTMState LSTMCell::forward(const Tensor& x, const LSTMState& s) {
  return lstm_step(from_input(x), from_state(s.h), s);
}
Tensor GRUCell::forward(const Tensor& x, const Tensor& h) { return gru_step(from_input(x), from_state(h), {h, {}}).h; }

}  // namespace halftone::nn
