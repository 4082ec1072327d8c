#pragma once
// A function with its own gradient: any mix of operators or foreign code.
//   struct Scaled : Function<Scaled> {
//     static Tensor forward(Context& ctx, const Tensor& x, double by);                  // or array<Tensor, N>, vector<Tensor>
//     static std::vector<Tensor> backward(Context& ctx, const Tensor& g);               // one gradient per tensor argument
//   };
//   Tensor y = Scaled::apply(x, 3.0);
// forward is not recorded; backward is, when the gradient is to be differentiated again. Under autocast, FunctionCast::any runs
// both in the region's state as it was at the call; f32 casts the tensor arguments and switches autocast off, in both.
#include <any>
#include <array>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <typeinfo>
#include <vector>

#include "halftone/autograd/autograd.h"

namespace halftone {

// What forward leaves for backward.
class HT_API Context {
 public:
  Context() = default;
  Context(const Context&) = delete;
  // Keeps any values. Tensors are checked when read: one that was written since forward is refused.
  template <class... T> void save(const T&... v) {
    auto& kept = saved_.emplace<std::tuple<kept_t<T>...>>(v...);
    watched_.clear();
    std::apply([&](auto&... k) { (watch(k), ...); }, kept);
  }
  // The values, by the types given to save.
  template <class... T> const std::tuple<T...>& saved() const {
    auto* p = std::any_cast<std::tuple<T...>>(&saved_);
    if (!p) fail(saved_.has_value());
    check();
    return *p;
  }
  // For the forward of one output. A backward() without a gradient then passes an undefined one for its 1, where operators alone see
  // what this function returns for it: that may be a tensor which changes later.
  void take_implied_one() { takes_implied_one_ = true; }
  void clear() {
    saved_.reset();
    watched_.clear();
  }

 private:
  template <class T> using kept_t = std::conditional_t<std::derived_from<T, Tensor>, Tensor, T>;
  template <class T> void watch(T& kept) {
    if constexpr (std::same_as<T, Tensor>) if (kept.defined()) watched_.push_back({&kept, kept.version()});
  }
  void check() const;
  [[noreturn]] static void fail(bool has_value);
  friend class FunctionNode;
  struct Watched {
    Tensor* tensor;  // inside saved_
    uint64_t version;
    int output = -1;  // which of the function's outputs it is
  };
  std::any saved_;
  std::vector<Watched> watched_;
  bool takes_implied_one_ = false;
};

enum class FunctionCast : uint8_t { any, f32 };

namespace detail {

// How many outputs a return type means: Tensor 1, array N, vector as many as it holds (0 here).
template <class Y> inline constexpr size_t output_count = 0;
template <> inline constexpr size_t output_count<Tensor> = 1;
template <size_t N> inline constexpr size_t output_count<std::array<Tensor, N>> = N;

using FunctionBackward = std::vector<Tensor> (*)(Context&, std::span<const Tensor> g);
// The layer state in which forward runs: not recorded, autocast off for f32.
class HT_API FunctionRegion {
 public:
  explicit FunctionRegion(FunctionCast cast);
  ~FunctionRegion();
  FunctionRegion(const FunctionRegion&) = delete;

 private:
  LayerScope scope_;
};
// x in f32 when `cast` asks for it and autocast is on.
HT_API Tensor function_argument(const Tensor& x, FunctionCast cast);
// Hangs one node on the outputs when an argument requires a gradient. Outputs get bodies of their own.
HT_API void attach_function(std::span<Tensor> y, const std::vector<Tensor>& x, std::shared_ptr<Context> ctx, FunctionBackward backward,
                            FunctionCast cast, const char* name);

}  // namespace detail

template <class F> struct Function {
  static constexpr FunctionCast cast = FunctionCast::any;

  template <class... A> static auto apply(const A&... a) {
    static_assert(requires(Context& c, const A&... v) { F::forward(c, v...); }, "apply: forward(Context&, ...) does not take these arguments");
    auto ctx = std::make_shared<Context>();
    std::vector<Tensor> x;
    auto y = [&] {
      // Braces: arguments must be prepared from left to right.
      std::tuple<std::conditional_t<std::derived_from<A, Tensor>, Tensor, const A&>...> ready{prepare(x, a)...};
      detail::FunctionRegion region(F::cast);
      return std::apply([&](auto&... v) { return F::forward(*ctx, v...); }, ready);
    }();
    using Y = decltype(y);
    auto backward = [](Context& c, std::span<const Tensor> g) -> std::vector<Tensor> {
      if constexpr (detail::output_count<Y> == 0) return F::backward(c, g);
      else return [&]<size_t... I>(std::index_sequence<I...>) { return F::backward(c, g[I]...); }(std::make_index_sequence<detail::output_count<Y>>());
    };
    static const std::string name = text::demangle(typeid(F).name());
    if constexpr (std::same_as<Y, Tensor>) detail::attach_function({&y, 1}, x, std::move(ctx), backward, F::cast, name.c_str());
    else detail::attach_function(y, x, std::move(ctx), backward, F::cast, name.c_str());
    return y;
  }

 private:
  template <class T> static decltype(auto) prepare(std::vector<Tensor>& x, const T& v) {
    if constexpr (std::derived_from<T, Tensor>) return Tensor(x.emplace_back(detail::function_argument(v, F::cast)));
    else return (v);
  }
};

}  // namespace halftone
