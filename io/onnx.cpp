// A watcher of the profile layer writes each call as a node. Values are known by where they lie, which tensors that are kept alive hold
// for themselves. The messages are those of onnx.proto, by their field numbers.
#include "halftone/io/onnx.h"

#include <array>
#include <map>
#include <vector>

#include "halftone/amp/trace.h"
#include "halftone/core/version.h"
#include "halftone/io/file.h"
#include "halftone/io/proto.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/conv.h"
#include "halftone/ops/norm.h"
#include "halftone/ops/pool.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/unary.h"

namespace halftone::io {
namespace {

using Names = std::vector<std::string>;
using Integers = std::vector<int64_t>;

// TensorProto.DataType.
int64_t type_code(DType t) {
  constexpr std::array<int64_t, num_dtypes> codes{10, 16, 1, 11, 6, 7, 2, 9};
  return codes[static_cast<size_t>(t)];
}

// AttributeProto.
Message attribute(std::string_view name, int64_t v) { return Message().bytes(1, name).integer(3, v).integer(20, 2); }
Message attribute(std::string_view name, double v) { return Message().bytes(1, name).number(2, static_cast<float>(v)).integer(20, 1); }
Message attribute(std::string_view name, const Integers& v) {
  Message m = Message().bytes(1, name);
  for (const int64_t i : v) m.integer(8, i);
  return m.integer(20, 7);
}
using Attributes = std::vector<Message>;

Integers first(const int64_t* values, int32_t n) { return {values, values + n}; }
Integers joined(Integers a, const Integers& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class Exporter final : public amp::Watcher {
 public:
  Exporter(const StateDict& state, const Tensor& example, const OnnxOptions& options) : options_(options), batch_(example.size(0)) {
    for (const auto& [name, t] : state) weights_.emplace(place(t), name);
    know(example, options.input);
  }

  void before(const Call&) override { ++depth_; }
  void after(const Call& c, const Tensors& out) override {
    if (--depth_ > 0) return;  // a part of the call around it
    if (c.op == &op::add_layer_norm) return add_layer_norm(c, out[0], out[1]);  // of two results
    const auto found = writers().find(c.op->name);
    HT_CHECK(found != writers().end(), "save_onnx: the model calls ", c.op->name, ", which cannot be written as ONNX; io/onnx.h lists what can");
    found->second(*this, c, out[0]);
  }

  std::string model(const Tensor& result, const Tensor& example) {
    const auto at = values_.find(place(result));
    HT_CHECK(at != values_.end() && used_input_, "save_onnx: the model's result does not come from its argument by operators");
    node("Identity", {at->second}, Names{options_.output});
    Message graph = std::move(graph_);
    graph.bytes(2, "halftone").bytes(11, info(options_.input, example)).bytes(12, info(options_.output, result));
    const Message opset = Message().bytes(1, "").integer(2, 21);
    const Message m = Message().integer(1, 10).bytes(2, "halftone").bytes(3, version()).bytes(7, graph).bytes(8, opset);
    return m.text();
  }

 private:
  using Writer = void (*)(Exporter&, const Call&, const Tensor& out);
  using Place = std::tuple<const Storage*, int64_t, std::vector<int64_t>, std::vector<int64_t>>;

  static Place place(const Tensor& t) {
    const Meta& m = t.meta();
    return {t.storage().get(), m.offset, {m.shape.begin(), m.shape.end()}, {m.strides.begin(), m.strides.end()}};
  }
  void know(const Tensor& t, const std::string& name) {
    kept_.push_back(t);
    values_[place(t)] = name;
  }

  // ---- the graph
  std::string fresh() { return text::cat("value_", count_++); }
  std::string node(std::string_view op, const Names& in, const Attributes& attributes = {}) {
    const std::string name = fresh();
    node(op, in, Names{name}, attributes);
    return name;
  }
  void node(std::string_view op, const Names& in, const Names& out, const Attributes& attributes = {}) {
    Message m;
    for (const auto& name : in) m.bytes(1, name);
    for (const auto& name : out) m.bytes(2, name);
    m.bytes(4, op);
    for (const Message& a : attributes) m.bytes(5, a);
    graph_.bytes(1, m);
  }
  void give(const Tensor& out, const std::string& name) { know(out, name); }
  void give(const Tensor& out, std::string_view op, const Names& in, const Attributes& attributes = {}) { know(out, node(op, in, attributes)); }

  std::string constant(const Tensor& t, const std::string& name) {
    const Tensor host = to_host(t, "save_onnx");
    Message m;
    for (const int64_t d : host.shape()) m.integer(1, d);
    m.integer(2, type_code(host.dtype())).bytes(8, name);
    m.bytes(9, {static_cast<const char*>(host.raw_data()), static_cast<size_t>(host.numel()) * size_of(host.dtype())});
    graph_.bytes(5, m);
    return name;
  }
  std::string integers(const Integers& v) {
    Tensor t = Tensor::empty(Meta({v.size()}, DType::i64, Device::cpu()));
    std::copy(v.begin(), v.end(), t.data<int64_t>());
    return constant(t, fresh());
  }
  std::string filled(const Shape& shape, double value, DType dtype) {
    return constant(Tensor::empty(Meta(shape, dtype, Device::cpu())).fill_(value), fresh());
  }
  // The name of an input: a value that was made, a weight, or else a constant of the model.
  std::string name(const Tensor& t) {
    const Place at = place(t);
    const auto value = values_.find(at);
    if (value != values_.end()) {
      used_input_ = used_input_ || value->second == options_.input;
      return value->second;
    }
    const auto weight = weights_.find(at);
    std::string made = constant(t.detach(), weight == weights_.end() ? fresh() : weight->second);
    know(t, made);
    return made;
  }
  Names names(const Call& c) {
    Names all;
    for (size_t i = 0; i < c.in.size(); ++i) all.push_back(c.has(i) ? name(c.x(i)) : std::string());
    return all;
  }

  // ValueInfoProto.
  Message info(const std::string& name, const Tensor& t) const {
    Message shape;
    for (size_t d = 0; d < t.shape().size(); ++d)
      shape.bytes(1, d == 0 && options_.any_batch ? Message().bytes(2, "batch") : Message().integer(1, t.shape()[d]));
    const Message tensor = Message().integer(1, type_code(t.dtype())).bytes(2, shape);
    return Message().bytes(1, name).bytes(2, Message().bytes(1, tensor));
  }

  // ---- operators
  void reshape(const Call& c, const Tensor& out) {
    Integers to(out.shape().begin(), out.shape().end());
    const Shape& from = c.x(0).shape();
    const bool batched = !to.empty() && from.rank() > 0 && from[0] % batch_ == 0 && to[0] % batch_ == 0 && out.numel() > 0;
    if (options_.any_batch && batched)
      to[0] = to[0] == from[0] ? 0 : -1;  // as the input's; whatever is left
    give(out, "Reshape", {name(c.x(0)), integers(to)});
  }
  void linear(const Call& c, const Tensor& out, std::string_view activation = {}) {
    const Names in = names(c);
    std::string y;
    if (c.x(0).rank() == 2) {
      y = node("Gemm", in, {attribute("transB", int64_t{1})});
    } else {
      y = node("MatMul", {in[0], node("Transpose", {in[1]}, {attribute("perm", Integers{1, 0})})});
      if (c.has(2)) y = node("Add", {y, in[2]});
    }
    give(out, activation.empty() ? y : node(activation, {y}));
  }
  static Attributes window(const ConvAttrs& a) {
    return {attribute("strides", first(a.stride, a.dims)), attribute("dilations", first(a.dilation, a.dims)),
            attribute("pads", joined(first(a.before, a.dims), first(a.after, a.dims))), attribute("group", a.groups)};
  }
  void conv(const Call& c, const Tensor& out, bool relu) {
    const auto a = c.as<ConvAttrs>();
    const std::string y = node("Conv", names(c), window(a));
    give(out, relu ? node("Relu", {y}) : y);
  }
  void conv_transpose(const Call& c, const Tensor& out) {
    const auto a = c.as<ConvAttrs>();
    Integers more;
    for (size_t d = 0; d < static_cast<size_t>(a.dims); ++d) {
      const int64_t in = c.x(0).shape()[d + 2], kernel = c.x(1).shape()[d + 2];
      more.push_back(a.size[d] - ((in - 1) * a.stride[d] + (kernel - 1) * a.dilation[d] + 1 - a.before[d] - a.after[d]));
    }
    Attributes attributes = window(a);
    attributes.push_back(attribute("output_padding", more));
    const std::string x = node("ConvTranspose", {name(c.x(0)), name(c.x(1))}, attributes);
    give(out, c.has(2) ? node("Add", {x, name(c.x(2))}) : x);
  }
  void pool(const Call& c, const Tensor& out, bool average) {
    auto a = c.as<PoolAttrs>();
    if (a.adaptive)
      for (size_t d = 0; d < static_cast<size_t>(a.dims); ++d) {
        const int64_t in = c.x(0).shape()[d + 2];
        HT_CHECK(in % a.size[d] == 0, "save_onnx: adaptive pooling of ", in, " elements to ", a.size[d],
                 " has windows of several sizes, which ONNX does not have");
        a.kernel[d] = a.stride[d] = in / a.size[d];
        a.padding[d] = 0;
        a.dilation[d] = 1;
      }
    const Integers padding = first(a.padding, a.dims);
    Attributes attributes{attribute("kernel_shape", first(a.kernel, a.dims)), attribute("strides", first(a.stride, a.dims)),
                          attribute("dilations", first(a.dilation, a.dims)), attribute("pads", joined(padding, padding)),
                          attribute("ceil_mode", int64_t{a.ceil_mode && !a.adaptive})};
    if (average) attributes.push_back(attribute("count_include_pad", int64_t{a.include_pad}));
    give(out, average ? "AveragePool" : "MaxPool", {name(c.x(0))}, attributes);
  }
  // The norm of input x of c, whose weight, bias and running statistics follow it.
  std::string batch_norm(const Call& c, size_t x) {
    const auto a = c.as<BatchNormAttrs>();
    HT_CHECK(!a.training && c.has(x + 3) && c.has(x + 4), "save_onnx: batch_norm by the batch's own statistics cannot be written as ONNX");
    const Shape channels{c.x(x).size(1)};
    const DType dtype = c.x(x + 3).dtype();
    const std::string scale = c.has(x + 1) ? name(c.x(x + 1)) : filled(channels, 1, dtype);
    const std::string shift = c.has(x + 2) ? name(c.x(x + 2)) : filled(channels, 0, dtype);
    return node("BatchNormalization", {name(c.x(x)), scale, shift, name(c.x(x + 3)), name(c.x(x + 4))}, {attribute("epsilon", a.eps)});
  }
  void batch_norm_relu(const Call& c, const Tensor& out) {
    std::string y = batch_norm(c, 0);
    if (c.op == &op::batch_norms_relu) y = node("Add", {y, batch_norm(c, 5)});
    else if (c.has(5)) y = node("Add", {y, name(c.x(5))});
    give(out, node("Relu", {y}));
  }
  std::string cast_to(const std::string& in, DType from, DType to) {
    return from == to ? in : node("Cast", {in}, {attribute("to", type_code(to))});
  }
  // The norm of x, a value's name and what it is; its weight and bias, of any dtype beside it, are c's inputs from `at` on.
  std::string row_norm(const Call& c, const std::string& x, const Meta& m, size_t at) {
    const auto a = c.as<RowNormAttrs>();
    const bool group = a.kind == RowNorm::group;
    Shape features;
    if (group) features.push_back(m.shape[1]);
    else for (auto d = m.shape.size() - static_cast<size_t>(a.rest); d < m.shape.size(); ++d) features.push_back(m.shape[d]);
    const auto affine = [&](size_t i, double otherwise) {
      return c.has(i) ? cast_to(name(c.x(i)), c.x(i).dtype(), m.dtype) : filled(features, otherwise, m.dtype);
    };
    const std::string scale = affine(at, 1), shift = affine(at + 1, 0);
    return node(group ? "GroupNormalization" : "LayerNormalization", {x, scale, shift},
                {attribute("epsilon", a.eps), group ? attribute("num_groups", a.rest) : attribute("axis", -a.rest)});
  }
  void row_norm(const Call& c, const Tensor& out) { give(out, row_norm(c, name(c.x(0)), c.x(0).meta(), 1)); }
  void add_layer_norm(const Call& c, const Tensor& y, const Tensor& sum) {
    give(sum, "Add", {cast_to(name(c.x(0)), c.x(0).dtype(), sum.dtype()), name(c.x(1))});
    give(y, cast_to(row_norm(c, name(sum), sum.meta(), 2), sum.dtype(), y.dtype()));
  }
  template <class Op>
  void arithmetic(const Call& c, const Tensor& out, std::string_view op) {
    using At = binary::Number::At;
    const auto n = c.as<binary::Given<Op>>().number;
    Names in = names(c);
    if (n.at != At::none) in.insert(n.at == At::left ? in.begin() : in.end(), filled({}, n.value.template to<double>(), c.x(0).dtype()));
    give(out, op, in);
  }
  void reduce(const Call& c, const Tensor& out, std::string_view op) {
    const auto d = c.as<reduce::Dims>();
    Integers axes;
    for (int i = 0; i < c.x(0).rank(); ++i)
      if ((d.dims >> i & 1u) != 0) axes.push_back(i);
    give(out, op, {name(c.x(0)), integers(axes)}, {attribute("keepdims", int64_t{d.keepdim})});
  }
  void along(const Call& c, const Tensor& out, std::string_view op) { give(out, op, names(c), {attribute("axis", int64_t{c.as<int>()})}); }
  void sloped(const Call& c, const Tensor& out, std::string_view op, double alpha) { give(out, op, names(c), {attribute("alpha", alpha)}); }
  void cast(const Call& c, const Tensor& out) { give(out, cast_to(name(c.x(0)), c.x(0).dtype(), out.dtype())); }
  void cat(const Call& c, const Tensor& out) {
    int64_t dim = 0;  // the one in which the result is longer
    while (dim + 1 < out.rank() && out.size(dim) == c.x(0).size(dim)) ++dim;
    give(out, "Concat", names(c), {attribute("axis", dim)});
  }
  void expand(const Call& c, const Tensor& out) {
    const Shape& from = c.x(0).shape();
    Integers to(out.shape().begin(), out.shape().end());
    for (size_t i = 1; i <= from.size(); ++i)
      if (from[from.size() - i] == to[to.size() - i]) to[to.size() - i] = 1;  // whatever the input has
    std::string shape = integers(to);
    if (options_.any_batch && to[0] != 1 && to[0] == batch_) {  // repeated for each example
      const std::string size = node("Shape", {options_.input}, {attribute("start", int64_t{0}), attribute("end", int64_t{1})});
      shape = node("Concat", {size, integers({to.begin() + 1, to.end()})}, {attribute("axis", int64_t{0})});
    }
    give(out, "Expand", {name(c.x(0)), shape});
  }
  void permute(const Call& c, const Tensor& out) {
    const auto order = c.as<Shape>();
    give(out, "Transpose", names(c), {attribute("perm", Integers(order.begin(), order.end()))});
  }

  template <int op_index>
  static void plain(Exporter& e, const Call& c, const Tensor& out) { e.give(out, plain_ops[op_index].second, e.names(c)); }
  // Operators that ONNX has, under names of its own.
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 18> plain_ops{{
      {"relu", "Relu"}, {"sigmoid", "Sigmoid"}, {"tanh", "Tanh"}, {"exp", "Exp"}, {"log", "Log"}, {"sqrt", "Sqrt"}, {"abs", "Abs"}, {"neg", "Neg"},
      {"reciprocal", "Reciprocal"}, {"floor", "Floor"}, {"ceil", "Ceil"}, {"erf", "Erf"}, {"gelu", "Gelu"}, {"mish", "Mish"},
      {"hardswish", "HardSwish"}, {"matmul", "MatMul"}, {"clone", "Identity"}, {"transfer", "Identity"}}};
  template <size_t... i>
  static void add_plain(std::map<std::string_view, Writer>& all, std::index_sequence<i...>) {
    (all.emplace(plain_ops[i].first, plain<static_cast<int>(i)>), ...);
  }

  static const std::map<std::string_view, Writer>& writers() {
    static const std::map<std::string_view, Writer> all = [] {
      std::map<std::string_view, Writer> w{
          {"linear", [](Exporter& e, const Call& c, const Tensor& out) { e.linear(c, out); }},
          {"linear_relu", [](Exporter& e, const Call& c, const Tensor& out) { e.linear(c, out, "Relu"); }},
          {"linear_gelu", [](Exporter& e, const Call& c, const Tensor& out) { e.linear(c, out, "Gelu"); }},
          {"conv", [](Exporter& e, const Call& c, const Tensor& out) { e.conv(c, out, false); }},
          {"conv_relu", [](Exporter& e, const Call& c, const Tensor& out) { e.conv(c, out, true); }},
          {"conv_input", [](Exporter& e, const Call& c, const Tensor& out) { e.conv_transpose(c, out); }},
          {"max_pool", [](Exporter& e, const Call& c, const Tensor& out) { e.pool(c, out, false); }},
          {"avg_pool", [](Exporter& e, const Call& c, const Tensor& out) { e.pool(c, out, true); }},
          {"batch_norm", [](Exporter& e, const Call& c, const Tensor& out) { e.give(out, e.batch_norm(c, 0)); }},
          {"batch_norm_relu", [](Exporter& e, const Call& c, const Tensor& out) { e.batch_norm_relu(c, out); }},
          {"batch_norms_relu", [](Exporter& e, const Call& c, const Tensor& out) { e.batch_norm_relu(c, out); }},
          {"layer_norm", [](Exporter& e, const Call& c, const Tensor& out) { e.row_norm(c, out); }},
          {"group_norm", [](Exporter& e, const Call& c, const Tensor& out) { e.row_norm(c, out); }},
          {"softmax", [](Exporter& e, const Call& c, const Tensor& out) { e.along(c, out, "Softmax"); }},
          {"log_softmax", [](Exporter& e, const Call& c, const Tensor& out) { e.along(c, out, "LogSoftmax"); }},
          {"silu", [](Exporter& e, const Call& c, const Tensor& out) { e.give(out, "Mul", {e.name(c.x(0)), e.node("Sigmoid", e.names(c))}); }},
          {"leaky_relu",
           [](Exporter& e, const Call& c, const Tensor& out) { e.sloped(c, out, "LeakyRelu", c.as<unary::LeakyRelu>().negative_slope); }},
          {"elu", [](Exporter& e, const Call& c, const Tensor& out) { e.sloped(c, out, "Elu", c.as<unary::Elu>().alpha); }},
          {"add", [](Exporter& e, const Call& c, const Tensor& out) { e.arithmetic<binary::Add>(c, out, "Add"); }},
          {"sub", [](Exporter& e, const Call& c, const Tensor& out) { e.arithmetic<binary::Sub>(c, out, "Sub"); }},
          {"mul", [](Exporter& e, const Call& c, const Tensor& out) { e.arithmetic<binary::Mul>(c, out, "Mul"); }},
          {"div", [](Exporter& e, const Call& c, const Tensor& out) { e.arithmetic<binary::Div>(c, out, "Div"); }},
          {"mean", [](Exporter& e, const Call& c, const Tensor& out) { e.reduce(c, out, "ReduceMean"); }},
          {"sum", [](Exporter& e, const Call& c, const Tensor& out) { e.reduce(c, out, "ReduceSum"); }},
          {"embedding", [](Exporter& e, const Call& c, const Tensor& out) { e.give(out, "Gather", e.names(c)); }},
          {"cat", [](Exporter& e, const Call& c, const Tensor& out) { e.cat(c, out); }},
          {"cast", [](Exporter& e, const Call& c, const Tensor& out) { e.cast(c, out); }},
          {"expand", [](Exporter& e, const Call& c, const Tensor& out) { e.expand(c, out); }},
          {"permute", [](Exporter& e, const Call& c, const Tensor& out) { e.permute(c, out); }},
      };
      for (const char* op : {"view", "squeeze", "unsqueeze"})
        w.emplace(op, [](Exporter& e, const Call& c, const Tensor& out) { e.reshape(c, out); });
      add_plain(w, std::make_index_sequence<plain_ops.size()>());
      return w;
    }();
    return all;
  }

  const OnnxOptions& options_;
  const int64_t batch_;
  std::map<Place, std::string> weights_, values_;
  std::vector<Tensor> kept_;
  Message graph_;
  int64_t count_ = 0;
  int depth_ = 0;
  bool used_input_ = false;
};

}  // namespace

void save_onnx(const std::string& path, const StateDict& state, const std::function<Tensor(const Tensor&)>& f, const Tensor& example,
               const OnnxOptions& options) {
  HT_CHECK(example.defined() && example.rank() > 0 && example.numel() > 0, "save_onnx: expected an example with a batch in dimension 0, got ",
           example.defined() ? str(example.meta()) : "an undefined tensor");
  const NoGrad off;
  Exporter exporter(state, example, options);
  Tensor result;
  {
    const amp::Watching watching(exporter);
    result = f(example);
  }
  const std::string model = exporter.model(result, example);
  constexpr size_t longest = (size_t{1} << 31) - 1;
  HT_CHECK(model.size() <= longest, path, ": a model of ", model.size(), " bytes is larger than the 2 GiB that ONNX can hold in one file");
  replace_file(path, model);
}

}  // namespace halftone::io
