// Operators against PyTorch: values, dtypes, first and second derivatives of the samples in golden/operators.safetensors,
// which golden/operators.py wrote and describes. A case is one of their tensors: an output, or a derivative in one input.
#include <sstream>
#include <unordered_map>

#include "halftone/tests/operators.h"

using namespace halftone;
using namespace halftone::tests;

namespace {

// A sample's inputs and attributes as PyTorch had them.
class In {
 public:
  In(std::string name, const std::string& attributes) : name_(std::move(name)) {
    std::istringstream words(attributes);
    for (std::string w; words >> w;) attributes_.emplace_back(w.substr(0, w.find('=')), w.substr(w.find('=') + 1));
  }
  void set(size_t i, const Tensor& t) {
    if (x_.size() <= i) x_.resize(i + 1);
    x_[i] = t;
  }
  std::vector<Tensor>& tensors() { return x_; }
  const std::vector<Tensor>& tensors() const { return x_; }
  const Tensor& operator[](size_t i) const {
    static const Tensor none;
    return i < x_.size() ? x_[i] : none;
  }

  bool has(std::string_view key) const { return find(key) != nullptr; }
  const std::string& text(std::string_view key) const {
    const std::string* v = find(key);
    if (!v) throw Error(name_ + " has no attribute " + std::string(key));
    return *v;
  }
  double number(std::string_view key) const { return std::stod(text(key)); }
  double number(std::string_view key, double otherwise) const { return has(key) ? number(key) : otherwise; }
  int64_t whole(std::string_view key) const { return std::stoll(text(key)); }
  int64_t whole(std::string_view key, int64_t otherwise) const { return has(key) ? whole(key) : otherwise; }
  bool flag(std::string_view key) const { return has(key) && whole(key) != 0; }
  std::vector<int64_t> list(std::string_view key) const {
    std::vector<int64_t> v;
    std::istringstream parts(text(key));
    for (std::string p; std::getline(parts, p, ',');) v.push_back(std::stoll(p));
    return v;
  }
  Shape shape(std::string_view key) const { return list(key); }
  // 2 is a whole number, 2.0 is not.
  Scalar scalar(std::string_view key) const {
    return text(key).find_first_of(".en") == std::string::npos ? Scalar(whole(key)) : Scalar(number(key));
  }
  // The number of this name, or else input i.
  Operand operand(size_t i, std::string_view key) const { return has(key) ? Operand(scalar(key)) : Operand((*this)[i]); }
  DType dtype(std::string_view key) const {
    static const std::map<std::string, DType> names = {{"F64", DType::f64}, {"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16},
                                                       {"I64", DType::i64}, {"I32", DType::i32}, {"U8", DType::u8}, {"BOOL", DType::b8}};
    return names.at(text(key));
  }
  Reduction reduction() const {
    const std::string& r = text("reduction");
    return r == "none" ? Reduction::none : r == "mean" ? Reduction::mean : Reduction::sum;
  }
  // Sizes of one, two or three dimensions.
  template <class S> S size(std::string_view key, S otherwise) const { return has(key) ? size<S>(key) : otherwise; }
  template <class S> S size(std::string_view key) const {
    auto v = list(key);
    if constexpr (std::same_as<S, Size>) return v.at(0);
    else if constexpr (std::same_as<S, Size2>) return {v.at(0), v.at(1)};
    else return {v.at(0), v.at(1), v.at(2)};
  }

 private:
  const std::string* find(std::string_view key) const {
    for (auto& [k, v] : attributes_) if (k == key) return &v;
    return nullptr;
  }
  std::string name_;
  std::vector<std::pair<std::string, std::string>> attributes_;
  std::vector<Tensor> x_;
};

struct Out : std::vector<Tensor> {
  Out(Tensor t) : std::vector<Tensor>{std::move(t)} {}
  Out(std::vector<Tensor> v) : std::vector<Tensor>(std::move(v)) {}
  Out(const ValuesIndices& v) : std::vector<Tensor>{v.values, v.indices} {}
};
using Function = Out (*)(const In&);

// ---- how families of functions are called

// A reduction over all dimensions, or over those of the attribute.
template <class All, class Some> Tensor reduced(const In& in, All all, Some some) {
  if (!in.has("dims")) return all();
  auto d = in.list("dims");
  if (d.size() == 1) return some({d[0]});
  if (d.size() == 2) return some({d[0], d[1]});
  return some({d.at(0), d.at(1), d.at(2)});
}
#define REDUCTION(f)                                                                                              \
  {#f, [](const In& in) -> Out {                                                                                  \
     return reduced(in, [&] { return f(in[0]); },                                                                 \
                    [&](std::initializer_list<Size> d) { return f(in[0], d, {.keepdim = in.flag("keepdim")}); }); \
   }}
#define UNARY(f, Op) {unary::Op::name, [](const In& in) -> Out { return f(in[0]); }},
#define BINARY(f) {#f, [](const In& in) -> Out { return f(in.operand(0, "a"), in.operand(in.has("a") ? 0 : 1, "b")); }}

template <class S> ConvOptions<S> conv_options(const In& in) {
  ConvOptions<S> o{.stride = in.size<S>("stride", 1), .dilation = in.size<S>("dilation", 1), .groups = in.whole("groups", 1)};
  if (in.has("padding")) o.padding = in.text("padding") == "same" ? Padding<S>(same_padding) : Padding<S>(in.size<S>("padding"));
  return o;
}
template <class S> ConvTransposeOptions<S> conv_transpose_options(const In& in) {
  return {.stride = in.size<S>("stride", 1), .padding = in.size<S>("padding", 0), .output_padding = in.size<S>("output_padding", 0),
          .dilation = in.size<S>("dilation", 1), .groups = in.whole("groups", 1)};
}
template <class S> std::optional<S> optional_size(const In& in, std::string_view key) {
  return in.has(key) ? std::optional<S>(in.size<S>(key)) : std::nullopt;
}
template <class S> MaxPoolOptions<S> max_pool_options(const In& in) {
  return {.stride = optional_size<S>(in, "stride"), .padding = in.size<S>("padding", 0), .dilation = in.size<S>("dilation", 1), .ceil_mode = in.flag("ceil_mode")};
}
template <class S> AvgPoolOptions<S> avg_pool_options(const In& in) {
  return {.stride = optional_size<S>(in, "stride"), .padding = in.size<S>("padding", 0), .ceil_mode = in.flag("ceil_mode"), .count_include_pad = in.flag("count_include_pad")};
}
UnfoldOptions unfold_options(const In& in) {
  return {.stride = in.size<Size2>("stride", 1), .padding = in.size<Size2>("padding", 0), .dilation = in.size<Size2>("dilation", 1)};
}
// Running statistics are written: into copies, since a sample is called more than once.
Out batch_norm_of(const In& in, bool z, Tensor (*f)(const In&, const Tensor& mean, const Tensor& var, BatchNormOptions)) {
  size_t m = z ? 4 : 3;
  Tensor mean = in[m].defined() ? in[m].clone() : Tensor(), var = in[m + 1].defined() ? in[m + 1].clone() : Tensor();
  Tensor y = f(in, mean, var, {.training = in.flag("training"), .momentum = in.number("momentum"), .eps = in.number("eps")});
  return in.flag("running") ? std::vector{y, mean, var} : std::vector{y};
}
MarginOptions margin_options(const In& in) { return {.reduction = in.reduction(), .margin = in.number("margin")}; }

const std::map<std::string, Function>& functions() {
  static const std::map<std::string, Function> table = {
      // unary, binary, ternary
      HT_UNARY_OPS(UNARY)
      {"pow", [](const In& in) -> Out { return pow(in[0], in.number("exponent")); }},
      {"leaky_relu", [](const In& in) -> Out { return leaky_relu(in[0], in.number("negative_slope")); }},
      {"elu", [](const In& in) -> Out { return elu(in[0], in.number("alpha")); }},
      {"softplus", [](const In& in) -> Out { return softplus(in[0], in.number("beta"), in.number("threshold")); }},
      BINARY(add), BINARY(sub), BINARY(mul), BINARY(div), BINARY(maximum), BINARY(minimum), BINARY(relu_grad), BINARY(atan2), BINARY(fmod), BINARY(eq),
      BINARY(ne), BINARY(lt), BINARY(le), BINARY(gt), BINARY(ge), BINARY(logical_and), BINARY(logical_or), BINARY(logical_xor),
      {"pow_tensor", [](const In& in) -> Out {
         if (in.has("b")) return pow(in[0], in.number("b"));
         return pow(in.operand(0, "a"), in.operand(in.has("a") ? 0 : 1, "b"));
       }},
      {"where", [](const In& in) -> Out { return where(in[0], in[1], in[2]); }},
      {"masked_fill", [](const In& in) -> Out { return masked_fill(in[0], in[1], in.operand(2, "value")); }},
      {"lerp", [](const In& in) -> Out { return lerp(in[0], in[1], in.operand(2, "weight")); }},
      {"addcmul", [](const In& in) -> Out { return addcmul(in[0], in[1], in[2], in.number("value")); }},
      {"addcdiv", [](const In& in) -> Out { return addcdiv(in[0], in[1], in[2], in.number("value")); }},
      {"clamp", [](const In& in) -> Out { return clamp(in[0], in.operand(1, "low"), in.operand(2, "high")); }},
      {"cast", [](const In& in) -> Out { return in[0].to(in.dtype("dtype")); }},
      {"add_", [](const In& in) -> Out { return in[0].clone().add_(in[1], in.number("alpha")); }},
      {"mul_", [](const In& in) -> Out { return in[0].clone().mul_(in[1]); }},
      {"copy_", [](const In& in) -> Out { return in[0].clone().copy_(in[1]); }},
      {"lerp_", [](const In& in) -> Out { return in[0].clone().lerp_(in[1], in.number("weight")); }},
      {"fill_", [](const In& in) -> Out { return in[0].clone().fill_(in.number("value")); }},
      {"total_norm", [](const In& in) -> Out { return total_norm(in.tensors()); }},
      {"clamp_all_", [](const In& in) -> Out {
         clamp_all_(in.tensors(), in.number("limit"));
         return in.tensors();
       }},
      {"scale_all_", [](const In& in) -> Out {
         scale_all_(in.tensors(), full({}, in.number("factor")));
         return in.tensors();
       }},
      // reductions, scans, order
      REDUCTION(sum), REDUCTION(mean), REDUCTION(prod), REDUCTION(logsumexp), REDUCTION(amax), REDUCTION(amin), REDUCTION(all), REDUCTION(any), REDUCTION(count_nonzero),
      {"var", [](const In& in) -> Out {
         VarOptions o{.correction = in.whole("correction"), .keepdim = in.flag("keepdim")};
         return reduced(in, [&] { return var(in[0], o); }, [&](std::initializer_list<Size> d) { return var(in[0], d, o); });
       }},
      {"stddev", [](const In& in) -> Out {
         VarOptions o{.correction = in.whole("correction"), .keepdim = in.flag("keepdim")};
         return reduced(in, [&] { return stddev(in[0], o); }, [&](std::initializer_list<Size> d) { return stddev(in[0], d, o); });
       }},
      {"norm", [](const In& in) -> Out {
         NormOptions o{.p = in.number("p"), .keepdim = in.flag("keepdim")};
         return reduced(in, [&] { return norm(in[0], o); }, [&](std::initializer_list<Size> d) { return norm(in[0], d, o); });
       }},
      {"argmax", [](const In& in) -> Out { return in.has("dim") ? argmax(in[0], in.whole("dim"), {.keepdim = in.flag("keepdim")}) : argmax(in[0]); }},
      {"argmin", [](const In& in) -> Out { return in.has("dim") ? argmin(in[0], in.whole("dim"), {.keepdim = in.flag("keepdim")}) : argmin(in[0]); }},
      {"max", [](const In& in) -> Out { return max(in[0], in.whole("dim"), {.keepdim = in.flag("keepdim")}); }},
      {"min", [](const In& in) -> Out { return min(in[0], in.whole("dim"), {.keepdim = in.flag("keepdim")}); }},
      {"cumsum", [](const In& in) -> Out { return cumsum(in[0], in.whole("dim"), {.reverse = in.flag("reverse")}); }},
      {"cumprod", [](const In& in) -> Out { return cumprod(in[0], in.whole("dim"), {.reverse = in.flag("reverse")}); }},
      {"sort", [](const In& in) -> Out { return sort(in[0], in.whole("dim"), {.descending = in.flag("descending")}); }},
      {"topk", [](const In& in) -> Out { return topk(in[0], in.whole("k"), in.whole("dim"), {.largest = in.flag("largest")}); }},
      // shape
      {"expand", [](const In& in) -> Out { return expand(in[0], in.shape("shape")); }},
      {"sum_to", [](const In& in) -> Out { return sum_to(in[0], in.shape("shape")); }},
      {"permute", [](const In& in) -> Out { return permute(in[0], in.shape("order")); }},
      {"transpose", [](const In& in) -> Out { return transpose(in[0], in.whole("a"), in.whole("b")); }},
      {"movedim", [](const In& in) -> Out { return movedim(in[0], in.whole("a"), in.whole("b")); }},
      {"slice", [](const In& in) -> Out { return slice(in[0], in.whole("dim"), in.whole("begin"), in.whole("end"), in.whole("step")); }},
      {"slice_scatter", [](const In& in) -> Out { return slice_scatter(in[0], in.shape("shape"), in.whole("dim"), in.whole("begin"), in.whole("step")); }},
      {"narrow", [](const In& in) -> Out { return narrow(in[0], in.whole("dim"), in.whole("begin"), in.whole("length")); }},
      {"select", [](const In& in) -> Out { return in[0].select(in.whole("dim"), in.whole("index")); }},
      {"split", [](const In& in) -> Out { return in.has("size") ? split(in[0], in.whole("size"), in.whole("dim")) : split(in[0], in.list("sizes"), in.whole("dim")); }},
      {"chunk", [](const In& in) -> Out { return chunk(in[0], in.whole("n"), in.whole("dim")); }},
      {"squeeze", [](const In& in) -> Out { return squeeze(in[0], in.whole("dim")); }},
      {"unsqueeze", [](const In& in) -> Out { return unsqueeze(in[0], in.whole("dim")); }},
      {"cat", [](const In& in) -> Out { return cat(in.tensors(), in.whole("dim")); }},
      {"stack", [](const In& in) -> Out { return stack(in.tensors(), in.whole("dim")); }},
      {"diagonal", [](const In& in) -> Out { return diagonal(in[0], in.whole("offset"), in.whole("dim1"), in.whole("dim2")); }},
      {"diagonal_scatter", [](const In& in) -> Out { return diagonal_scatter(in[0], in.shape("shape"), in.whole("offset"), in.whole("dim1"), in.whole("dim2")); }},
      {"reshape", [](const In& in) -> Out { return reshape(in[0], in.shape("shape")); }},
      {"view", [](const In& in) -> Out { return in[0].view(in.shape("shape")); }},
      {"flatten", [](const In& in) -> Out { return in[0].flatten(in.whole("first", 0), in.whole("last", -1)); }},
      {"pad", [](const In& in) -> Out {
         const std::string& mode = in.text("mode");
         return pad(in[0], in.list("pads"), {.mode = mode == "reflect" ? PadMode::reflect : mode == "replicate" ? PadMode::replicate : PadMode::constant, .value = in.number("value", 0)});
       }},
      {"flip", [](const In& in) -> Out { return flip(in[0], in.shape("dims")); }},
      {"roll", [](const In& in) -> Out { return roll(in[0], in.shape("shifts"), in.shape("dims")); }},
      {"repeat", [](const In& in) -> Out { return repeat(in[0], in.shape("repeats")); }},
      {"tril", [](const In& in) -> Out { return tril(in[0], in.whole("diagonal")); }},
      {"triu", [](const In& in) -> Out { return triu(in[0], in.whole("diagonal")); }},
      // products, convolutions, pools
      {"matmul", [](const In& in) -> Out { return matmul(in[0], in[1]); }},
      {"bmm", [](const In& in) -> Out { return bmm(in[0], in[1]); }},
      {"addmm", [](const In& in) -> Out { return addmm(in[0], in[1], in[2], {.beta = in.number("beta"), .alpha = in.number("alpha")}); }},
      {"baddbmm", [](const In& in) -> Out { return baddbmm(in[0], in[1], in[2], {.beta = in.number("beta"), .alpha = in.number("alpha")}); }},
      {"dot", [](const In& in) -> Out { return dot(in[0], in[1]); }},
      {"outer", [](const In& in) -> Out { return outer(in[0], in[1]); }},
      {"linear", [](const In& in) -> Out { return linear(in[0], in[1], in[2]); }},
      {"linear_relu", [](const In& in) -> Out { return linear_relu(in[0], in[1], in[2]); }},
      {"linear_gelu", [](const In& in) -> Out { return linear_gelu(in[0], in[1], in[2]); }},
      {"einsum", [](const In& in) -> Out { return einsum(in.text("equation"), in.tensors()); }},
      {"conv1d", [](const In& in) -> Out { return conv1d(in[0], in[1], in[2], conv_options<Size>(in)); }},
      {"conv2d", [](const In& in) -> Out { return conv2d(in[0], in[1], in[2], conv_options<Size2>(in)); }},
      {"conv3d", [](const In& in) -> Out { return conv3d(in[0], in[1], in[2], conv_options<Size3>(in)); }},
      {"conv2d_relu", [](const In& in) -> Out { return conv2d_relu(in[0], in[1], in[2], conv_options<Size2>(in)); }},
      {"conv2d_input", [](const In& in) -> Out { return conv2d_input(in[0], in[1], in.size<Size2>("size"), conv_options<Size2>(in)); }},
      {"conv2d_weight", [](const In& in) -> Out { return conv2d_weight(in[0], in[1], in.size<Size2>("kernel"), conv_options<Size2>(in)); }},
      {"conv_transpose1d", [](const In& in) -> Out { return conv_transpose1d(in[0], in[1], in[2], conv_transpose_options<Size>(in)); }},
      {"conv_transpose2d", [](const In& in) -> Out { return conv_transpose2d(in[0], in[1], in[2], conv_transpose_options<Size2>(in)); }},
      {"unfold", [](const In& in) -> Out { return unfold(in[0], in.size<Size2>("kernel"), unfold_options(in)); }},
      {"fold", [](const In& in) -> Out { return fold(in[0], in.size<Size2>("size"), in.size<Size2>("kernel"), unfold_options(in)); }},
      {"max_pool1d", [](const In& in) -> Out { return max_pool1d(in[0], in.size<Size>("kernel"), max_pool_options<Size>(in)); }},
      {"max_pool2d", [](const In& in) -> Out { return max_pool2d(in[0], in.size<Size2>("kernel"), max_pool_options<Size2>(in)); }},
      {"avg_pool1d", [](const In& in) -> Out { return avg_pool1d(in[0], in.size<Size>("kernel"), avg_pool_options<Size>(in)); }},
      {"avg_pool2d", [](const In& in) -> Out { return avg_pool2d(in[0], in.size<Size2>("kernel"), avg_pool_options<Size2>(in)); }},
      {"adaptive_max_pool1d", [](const In& in) -> Out { return adaptive_max_pool1d(in[0], in.size<Size>("size")); }},
      {"adaptive_max_pool2d", [](const In& in) -> Out { return adaptive_max_pool2d(in[0], in.size<Size2>("size")); }},
      {"adaptive_avg_pool1d", [](const In& in) -> Out { return adaptive_avg_pool1d(in[0], in.size<Size>("size")); }},
      {"adaptive_avg_pool2d", [](const In& in) -> Out { return adaptive_avg_pool2d(in[0], in.size<Size2>("size")); }},
      {"resize", [](const In& in) -> Out {
         return resize(in[0], in.size<Size2>("size"), {.mode = in.text("mode") == "nearest" ? Interpolation::nearest : Interpolation::bilinear, .align_corners = in.flag("align_corners")});
       }},
      {"pixel_shuffle", [](const In& in) -> Out { return pixel_shuffle(in[0], in.whole("r")); }},
      {"pixel_unshuffle", [](const In& in) -> Out { return pixel_unshuffle(in[0], in.whole("r")); }},
      // normalisation, softmax, attention
      {"batch_norm", [](const In& in) -> Out {
         return batch_norm_of(in, false, [](const In& i, const Tensor& m, const Tensor& v, BatchNormOptions o) { return batch_norm(i[0], i[1], i[2], m, v, o); });
       }},
      {"batch_norm_relu", [](const In& in) -> Out {
         return batch_norm_of(in, false, [](const In& i, const Tensor& m, const Tensor& v, BatchNormOptions o) { return batch_norm_relu(i[0], i[1], i[2], m, v, o); });
       }},
      {"batch_norm_add_relu", [](const In& in) -> Out {
         return batch_norm_of(in, true, [](const In& i, const Tensor& m, const Tensor& v, BatchNormOptions o) { return batch_norm_add_relu(i[0], i[1], i[2], i[3], m, v, o); });
       }},
      {"layer_norm", [](const In& in) -> Out { return layer_norm(in[0], in.shape("shape"), in[1], in[2], in.number("eps")); }},
      {"rms_norm", [](const In& in) -> Out { return rms_norm(in[0], in.shape("shape"), in[1], in.number("eps")); }},
      {"group_norm", [](const In& in) -> Out { return group_norm(in[0], in.whole("groups"), in[1], in[2], in.number("eps")); }},
      {"instance_norm", [](const In& in) -> Out { return instance_norm(in[0], in[1], in[2], in.number("eps")); }},
      {"softmax", [](const In& in) -> Out { return softmax(in[0], in.whole("dim")); }},
      {"log_softmax", [](const In& in) -> Out { return log_softmax(in[0], in.whole("dim")); }},
      {"scaled_dot_product_attention", [](const In& in) -> Out {
         return scaled_dot_product_attention(in[0], in[1], in[2], in[3], {.causal = in.flag("causal"), .scale = in.has("scale") ? std::optional(in.number("scale")) : std::nullopt});
       }},
      // losses
      {"cross_entropy", [](const In& in) -> Out {
         return cross_entropy(in[0], in[1], {.ignore_index = in.whole("ignore_index", -100), .label_smoothing = in.number("label_smoothing"), .reduction = in.reduction(), .weight = in[2]});
       }},
      {"nll_loss", [](const In& in) -> Out { return nll_loss(in[0], in[1], {.ignore_index = in.whole("ignore_index", -100), .reduction = in.reduction(), .weight = in[2]}); }},
      {"mse_loss", [](const In& in) -> Out { return mse_loss(in[0], in[1], in.reduction()); }},
      {"l1_loss", [](const In& in) -> Out { return l1_loss(in[0], in[1], in.reduction()); }},
      {"huber_loss", [](const In& in) -> Out { return huber_loss(in[0], in[1], in.number("delta"), in.reduction()); }},
      {"smooth_l1_loss", [](const In& in) -> Out { return smooth_l1_loss(in[0], in[1], in.number("beta"), in.reduction()); }},
      {"binary_cross_entropy", [](const In& in) -> Out { return binary_cross_entropy(in[0], in[1], {.reduction = in.reduction(), .weight = in[2]}); }},
      {"binary_cross_entropy_with_logits", [](const In& in) -> Out {
         return binary_cross_entropy_with_logits(in[0], in[1], {.reduction = in.reduction(), .weight = in[2], .pos_weight = in[3]});
       }},
      {"kl_div", [](const In& in) -> Out { return kl_div(in[0], in[1], {.reduction = in.reduction(), .log_target = in.flag("log_target"), .by_batch = in.flag("by_batch")}); }},
      {"gaussian_nll_loss", [](const In& in) -> Out { return gaussian_nll_loss(in[0], in[1], in[2], {.reduction = in.reduction(), .full = in.flag("full")}); }},
      {"poisson_nll_loss", [](const In& in) -> Out {
         return poisson_nll_loss(in[0], in[1], {.reduction = in.reduction(), .log_input = in.flag("log_input"), .full = in.flag("full"), .eps = in.number("eps", 1e-8)});
       }},
      {"hinge_loss", [](const In& in) -> Out { return hinge_loss(in[0], in[1], margin_options(in)); }},
      {"hinge_embedding_loss", [](const In& in) -> Out { return hinge_embedding_loss(in[0], in[1], margin_options(in)); }},
      {"margin_ranking_loss", [](const In& in) -> Out { return margin_ranking_loss(in[0], in[1], in[2], margin_options(in)); }},
      {"cosine_embedding_loss", [](const In& in) -> Out { return cosine_embedding_loss(in[0], in[1], in[2], margin_options(in)); }},
      {"triplet_margin_loss", [](const In& in) -> Out {
         return triplet_margin_loss(in[0], in[1], in[2], {.reduction = in.reduction(), .margin = in.number("margin"), .p = in.number("p"), .eps = in.number("eps"), .swap = in.flag("swap")});
       }},
      {"ctc_loss", [](const In& in) -> Out {
         return ctc_loss(log_softmax(in[0], 2), in[1], in[2], in[3], {.blank = in.whole("blank", 0), .reduction = in.reduction(), .zero_infinity = in.flag("zero_infinity")});
       }},
      // indices
      {"gather", [](const In& in) -> Out { return gather(in[0], in.whole("dim"), in[1]); }},
      {"scatter", [](const In& in) -> Out { return in.has("value") ? scatter(in[0], in.whole("dim"), in[1], in.scalar("value")) : scatter(in[0], in.whole("dim"), in[1], in[2]); }},
      {"scatter_add", [](const In& in) -> Out { return scatter_add(in[0], in.whole("dim"), in[1], in[2]); }},
      {"index_select", [](const In& in) -> Out { return index_select(in[0], in.whole("dim"), in[1]); }},
      {"index_add", [](const In& in) -> Out { return index_add(in[0], in.whole("dim"), in[1], in[2], in.scalar("alpha")); }},
      {"take", [](const In& in) -> Out { return take(in[0], in[1]); }},
      {"masked_select", [](const In& in) -> Out { return masked_select(in[0], in[1]); }},
      {"nonzero", [](const In& in) -> Out { return nonzero(in[0]); }},
      {"one_hot", [](const In& in) -> Out { return one_hot(in[0], in.whole("classes")); }},
      {"embedding", [](const In& in) -> Out { return embedding(in[0], in[1], {.padding_idx = in.has("padding_idx") ? std::optional(in.whole("padding_idx")) : std::nullopt}); }},
  };
  return table;
}

// ---- the file

struct Golden {
  std::vector<std::string> names;  // of samples
  std::map<std::string, std::string> attributes;
  std::unordered_map<std::string, Tensor> tensors;
  const Tensor* find(const std::string& name) const {
    auto t = tensors.find(name);
    return t == tensors.end() ? nullptr : &t->second;
  }
};
const Golden& golden() {
  static const Golden file = [] {
    Golden g;
    const std::string path = std::string(HALFTONE_SOURCE_DIR) + "/tests/golden/operators.safetensors";
    for (auto& [name, value] : io::load_metadata(path))
      if (name.find('/') != std::string::npos) {
        g.names.push_back(name);
        g.attributes[name] = value;
      }
    for (auto& [name, t] : io::load(path)) g.tensors[name] = t;
    return g;
  }();
  return file;
}

// ---- where we decided otherwise; every line must be needed

using Names = std::set<std::string_view>;
constexpr DTypes bool_alone = only(DType::b8);

// Inputs of these dtypes are refused.
struct Refusal { Names operators; DTypes dtypes; const char* reason; };
const Refusal refusals[] = {
    {{"sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "log2", "sin", "cos", "erf", "tanh", "sigmoid", "step", "normal_cdf", "hardsigmoid", "isnan", "isinf",
      "isfinite", "pow", "pow_tensor", "logsumexp"},
     integer_types | bool_alone, "functions of real numbers: the program says with to() which floating dtype it wants"},
    {{"sign", "square", "prod", "amax", "amin", "max", "min", "scatter_add", "index_add"}, bool_alone, "a bool is no number"},
};
// The result has another dtype; its values are the same, rounded as the narrower dtype has them.
struct OtherDtype { Names operators; DTypes dtypes; DType ours; const char* reason; };
const OtherDtype other_dtypes[] = {
    {{"add", "mul", "maximum", "minimum"}, bool_alone, DType::i64, "arithmetic of bools counts; logical_and and logical_or are for truth"},
    {{"addcmul"}, integer_types, DType::f32, "its factor `value` need not be whole"},
    {{"all", "any"}, only(DType::u8), DType::b8, "an answer is a bool"},
    {{"log_softmax"}, only(DType::bf16), DType::f32, "losses start in f32"},
};
// The value at this input, a number or NaN.
struct OtherValue { Names operators; double at, ours; const char* reason; };
const OtherValue other_values[] = {
    {{"sign", "step"}, std::nan(""), std::nan(""), "NaN passes through"},
    {{"hardswish"}, -INFINITY, 0, "the limit, where PyTorch's product is NaN"},
};

// ---- comparison

// The values of an f64 result agree but for the order of sums and the last digits of functions; of other dtypes, to some
// of its roundings. Where terms cancel, what is lost is measured by the largest element, and in a second derivative by the
// largest of the first, whose squares it is the derivative of.
struct Tolerance { double relative, of_largest; };
Tolerance tolerance(DType t) {
  switch (t) {
    case DType::f64: return {1e-10, 1e-12};
    case DType::f32: return {16 * 0x1p-24, 16 * 0x1p-24};
    case DType::f16: return {2 * 0x1p-11, 0x1p-11};
    case DType::bf16: return {2 * 0x1p-8, 0x1p-8};
    default: return {0, 0};
  }
}

double largest_in(const Tensor& t) {
  double m = 0;
  for (double v : t.to_vector<double>()) m = std::max(m, std::isfinite(v) ? std::abs(v) : 0);
  return m;
}

// Empty, or where they differ first.
std::string difference(const Tensor& got, const Tensor& expected, DType precision, double largest = 0) {
  if (!got.defined()) return "nothing came";
  if (got.shape() != expected.shape()) return "shape " + str(got.shape()) + " instead of " + str(expected.shape());
  auto y = got.to_vector<double>(), e = expected.to_vector<double>();
  largest = std::max(largest, largest_in(expected));
  Tolerance allowed = tolerance(precision);
  for (size_t i = 0; i < y.size(); ++i) {
    bool same = std::isnan(e[i]) ? std::isnan(y[i])
                                 : y[i] == e[i] || std::abs(y[i] - e[i]) <= allowed.relative * std::abs(e[i]) + allowed.of_largest * largest;
    if (!same) {
      std::ostringstream text;
      text.precision(17);
      text << "element " << i << " is " << y[i] << " instead of " << e[i];
      return text.str();
    }
  }
  return "";
}

// One sample against the file.
class Comparison {
 public:
  // `seen` gets the tensors of the file that it used, `needed` the deviations.
  Comparison(std::string op, const std::string& name, std::set<std::string>& seen, std::set<const void*>& needed, Shares& cases)
      : op_(std::move(op)), name_(name), seen_(seen), needed_(needed), in_(name, golden().attributes.at(name)), cases_(cases) {}

  void run(Function f) {
    std::vector<size_t> at;
    for (size_t i = 0; i < 8; ++i) {
      const Tensor* x = find("in", i);
      if (!x) continue;
      in_.set(i, x->clone());
      if (!has("grad", i)) continue;
      in_.tensors()[i].requires_grad_();
      at.push_back(i);
    }
    for (auto& r : refusals)
      if (applies(r.operators, r.dtypes)) {
        needed_.insert(&r);
        for (size_t k = 0; find("out", k); ++k) {}
        CHECK_THROWS_AS(f(in_), Error);
        return;
      }
    Out out = f(in_);
    for (size_t k = 0; k < out.size(); ++k) check_output(k, out[k]);
    Tensor total;
    for (size_t k = 0; k < out.size(); ++k) {
      if (!out[k].requires_grad()) continue;
      std::vector<double> w(static_cast<size_t>(out[k].numel()));
      for (size_t i = 0; i < w.size(); ++i) w[i] = std::sin(1 + 2.3 * static_cast<double>(i) + static_cast<double>(k));
      Tensor part = sum(out[k] * tensor(w).reshape(out[k].shape()));
      total = total.defined() ? total + part : part;
    }
    if (at.empty()) return;
    std::vector<Tensor> leaves;
    bool twice = false;
    for (size_t i : at) {
      leaves.push_back(in_[i]);
      twice = twice || has("second", i);
    }
    auto derive = [&](const Tensor& y, bool create_graph) {
      return y.defined() && y.requires_grad() ? grad({y}, leaves, {.create_graph = create_graph, .allow_unused = true}) : std::vector<Tensor>(leaves.size());
    };
    auto first = derive(total, twice);
    Tensor squares;
    double largest = 0;
    for (size_t k = 0; k < at.size(); ++k) {
      check("grad", at[k], first[k], 0);
      if (!first[k].defined()) continue;
      largest = std::max(largest, largest_in(first[k]));
      squares = squares.defined() ? squares + sum(square(first[k])) : sum(square(first[k]));
    }
    if (!twice) return;
    auto second = derive(squares, false);
    for (size_t k = 0; k < at.size(); ++k) if (has("second", at[k])) check("second", at[k], second[k], largest);
  }

 private:
  bool has(const char* what, size_t i) const { return golden().find(name_ + "/" + what + std::to_string(i)) != nullptr; }
  const Tensor* find(const char* what, size_t i) {
    std::string full = name_ + "/" + what + std::to_string(i);
    const Tensor* t = golden().find(full);
    if (t) seen_.insert(full);
    return t;
  }
  bool applies(const Names& operators, DTypes dtypes) const { return operators.contains(op_) && contains(dtypes, in_[0].dtype()); }

  void check_output(size_t k, const Tensor& got) {
    const Tensor* expected = find("out", k);
    REQUIRE(expected);
    INFO("out" << k);
    cases_.count(op_);
    for (auto& d : other_dtypes)
      if (applies(d.operators, d.dtypes) && got.dtype() != expected->dtype()) {
        needed_.insert(&d);
        CHECK(str(got.dtype()) == str(d.ours));
        CHECK(difference(expected->dtype() == DType::b8 ? ne(got, 0) : got, *expected, expected->dtype()) == "");
        return;
      }
    CHECK(str(got.dtype()) == str(expected->dtype()));
    Tensor right = *expected;
    for (auto& d : other_values) {
      if (!d.operators.contains(op_)) continue;
      Tensor there = std::isnan(d.at) ? ne(in_[0].detach(), in_[0].detach()) : eq(in_[0].detach(), d.at);
      if (!any(there).item<bool>()) continue;
      needed_.insert(&d);
      right = masked_fill(right, there, d.ours);
    }
    CHECK(difference(got.detach(), right, right.dtype()) == "");
  }
  // No derivative is a derivative of 0, which is no case.
  void check(const char* what, size_t i, const Tensor& got, double largest) {
    const Tensor* expected = find(what, i);
    REQUIRE(expected);
    INFO(what << i);
    if (!got.defined()) {
      CHECK(difference(zeros_like(*expected), *expected, expected->dtype(), largest) == "");
      return;
    }
    CHECK(str(got.dtype()) == str(expected->dtype()));
    CHECK(difference(got.detach(), *expected, expected->dtype(), largest) == "");
    cases_.count(op_);
  }

  std::string op_;
  const std::string& name_;
  std::set<std::string>& seen_;
  std::set<const void*>& needed_;
  In in_;
  Shares& cases_;
};

}  // namespace

TEST_CASE("operators, their derivatives and those of their derivatives are PyTorch's") {
  std::set<std::string> seen;
  std::set<const void*> needed;
  Shares cases("golden_cases");
  for (auto& name : golden().names) {
    INFO(name << ": " << golden().attributes.at(name));
    std::string op = name.substr(0, name.find('/'));
    auto f = functions().find(op);
    REQUIRE(f != functions().end());
    Comparison(op, name, seen, needed, cases).run(f->second);
  }
  for (auto& [op, f] : functions()) {
    INFO(op);
    CHECK(cases.of(op) > 0);
  }
  cases.check();
  for (auto& [name, t] : golden().tensors) {
    INFO(name);
    CHECK(seen.contains(name));
  }
  auto all_needed = [&](auto& deviations) {
    for (auto& d : deviations) {
      INFO(d.reason);
      CHECK(needed.contains(&d));
    }
  };
  all_needed(refusals);
  all_needed(other_dtypes);
  all_needed(other_values);
}
