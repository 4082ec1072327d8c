#pragma once
// Recurrent networks and their cells, with PyTorch's names, order of gates and formulas. A product with the weights of the
// input is taken over all steps at once. Under autocast products are 16-bit, and so is h, while LSTM's c stays in x's dtype.
#include "halftone/nn/module.h"

namespace halftone::nn {

struct RecurrentOptions {
  Size layers = 1;
  bool bias = true;
  bool batch_first = false;  // x and the output are [n, t, ...], not [t, n, ...]
  double dropout = 0;        // of what a layer, but not the last, gives to the next
  bool bidirectional = false;
};
enum class RecurrentNonlinearity : uint8_t { tanh, relu };
struct RNNOptions {
  Size layers = 1;
  RecurrentNonlinearity nonlinearity = RecurrentNonlinearity::tanh;
  bool bias = true;
  bool batch_first = false;
  double dropout = 0;
  bool bidirectional = false;
};

// h and, of LSTM, c: of one cell [n, hidden], of a network [layers * directions, n, hidden], forward before backward.
// Undefined: zeros.
struct LSTMState { Tensor h, c; };
struct RNNResult { Tensor output, h; };      // output: h of the last layer at every step, [t, n, directions * hidden]
struct LSTMResult { Tensor output, h, c; };  // h, c: the last state

// What they have in common: layers of parameters "weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0",
// "weight_ih_l0_reverse", ..., all uniform in [-1/sqrt(hidden), 1/sqrt(hidden)).
class HT_API Recurrent : public Module {
 public:
  // "weight_ih_l0" and so on; throws when there is none of that name.
  Parameter& parameter(std::string_view name);
  using Module::forward;
  void ht_fields(Fields& f) override { f.list(*this, "", parameters_); }
  auto clone() const { return nn::clone(*this, parameters_); }

 protected:
  Recurrent(const char* name, int64_t gates, Size in, Size hidden, const RecurrentOptions& o);
  // One step: the products of input and of h with their weights, and the state before. A state without c has c undefined.
  using Step = LSTMState (*)(const Tensor& input, const Tensor& h, const LSTMState& state);
  LSTMResult run(const Tensor& x, const LSTMState& start, Step step, bool has_c);

 private:
  const char* name_;
  int64_t in_, hidden_;
  RecurrentOptions options_;
  Ordered<Parameter> parameters_;
};

// h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu.
class HT_API RNN : public Recurrent {
 public:
  RNN(Size in, Size hidden, RNNOptions o = {});
  HT_FIELDS_AFTER(Recurrent)
  Tensor forward(const Tensor& x) override { return forward(x, Tensor()).output; }
  RNNResult forward(const Tensor& x, const Tensor& h);
  using Module::operator();
  RNNResult operator()(const Tensor& x, const Tensor& h) { return forward(x, h); }

 private:
  RecurrentNonlinearity nonlinearity_;
};
// i, f, g, o = sigmoid, sigmoid, tanh, sigmoid of the same sums; c' = f c + i g; h' = o tanh(c')
// (Hochreiter and Schmidhuber, "Long short-term memory", 1997).
class HT_API LSTM : public Recurrent {
 public:
  LSTM(Size in, Size hidden, RecurrentOptions o = {}) : Recurrent("LSTM", 4, in, hidden, o) {}
  HT_FIELDS_AFTER(Recurrent)
  Tensor forward(const Tensor& x) override { return forward(x, LSTMState()).output; }
  LSTMResult forward(const Tensor& x, const LSTMState& state);
  using Module::operator();
  LSTMResult operator()(const Tensor& x, const LSTMState& state) { return forward(x, state); }
};
// r, z = sigmoid of the same sums; n = tanh(W_in x + b_in + r (W_hn h + b_hn)); h' = (1 - z) n + z h
// (Cho et al., "Learning phrase representations", 2014).
class HT_API GRU : public Recurrent {
 public:
  GRU(Size in, Size hidden, RecurrentOptions o = {}) : Recurrent("GRU", 3, in, hidden, o) {}
  HT_FIELDS_AFTER(Recurrent)
  Tensor forward(const Tensor& x) override { return forward(x, Tensor()).output; }
  RNNResult forward(const Tensor& x, const Tensor& h);
  using Module::operator();
  RNNResult operator()(const Tensor& x, const Tensor& h) { return forward(x, h); }
};

// ---- one step: x [n, in], h [n, hidden] -> h'

struct CellOptions { bool bias = true; };
struct RNNCellOptions {
  bool bias = true;
  RecurrentNonlinearity nonlinearity = RecurrentNonlinearity::tanh;
};
class HT_API RecurrentCell : public Module {
 public:
  Parameter weight_ih, weight_hh, bias_ih, bias_hh;  // [gates * hidden, in], [gates * hidden, hidden], [gates * hidden]
  HT_FIELDS(weight_ih, weight_hh, bias_ih, bias_hh)

 protected:
  RecurrentCell(int64_t gates, Size in, Size hidden, bool bias);
  Tensor zero_state(const Tensor& x) const;
  Tensor from_input(const Tensor& x) const;
  Tensor from_state(const Tensor& h) const;
};
class HT_API RNNCell : public RecurrentCell {
 public:
  RNNCell(Size in, Size hidden, RNNCellOptions o = {}) : RecurrentCell(1, in, hidden, o.bias), nonlinearity_(o.nonlinearity) {}
  HT_FIELDS_AFTER(RecurrentCell)
  Tensor forward(const Tensor& x) override { return forward(x, zero_state(x)); }
  Tensor forward(const Tensor& x, const Tensor& h);
  using Module::operator();
  Tensor operator()(const Tensor& x, const Tensor& h) { return forward(x, h); }

 private:
  RecurrentNonlinearity nonlinearity_;
};
class HT_API LSTMCell : public RecurrentCell {
 public:
  LSTMCell(Size in, Size hidden, CellOptions o = {}) : RecurrentCell(4, in, hidden, o.bias) {}
  HT_FIELDS_AFTER(RecurrentCell)
  Tensor forward(const Tensor& x) override { return forward(x, LSTMState{zero_state(x), zero_state(x)}).h; }
  LSTMState forward(const Tensor& x, const LSTMState& state);
  using Module::operator();
  LSTMState operator()(const Tensor& x, const LSTMState& state) { return forward(x, state); }
};
class HT_API GRUCell : public RecurrentCell {
 public:
  GRUCell(Size in, Size hidden, CellOptions o = {}) : RecurrentCell(3, in, hidden, o.bias) {}
  HT_FIELDS_AFTER(RecurrentCell)
  Tensor forward(const Tensor& x) override { return forward(x, zero_state(x)); }
  Tensor forward(const Tensor& x, const Tensor& h);
  using Module::operator();
  Tensor operator()(const Tensor& x, const Tensor& h) { return forward(x, h); }
};

}  // namespace halftone::nn
