#pragma once
// The tensors in what a model takes and gives: a Tensor, or arrays, vectors, maps, pairs and tuples of them.
#include <iterator>
#include <tuple>
#include <vector>

#include "halftone/core/tensor.h"

namespace halftone::nn::detail {

template <class Y> inline constexpr bool is_tuple = requires { std::tuple_size<std::remove_const_t<Y>>::value; };

// Calls f for each of them, in order.
template <class Y, class F> void each_tensor(Y& y, F&& f) {
  if constexpr (std::derived_from<std::remove_const_t<Y>, Tensor>) f(y);
  else if constexpr (requires { std::begin(y); std::end(y); }) for (auto&& v : y) each_tensor(v, f);
  else if constexpr (is_tuple<Y>) std::apply([&](auto&... v) { (each_tensor(v, f), ...); }, y);
}
template <class Y> std::vector<Tensor> tensors_of(const Y& y) {
  std::vector<Tensor> all;
  each_tensor(y, [&](const Tensor& t) { if (t.defined()) all.push_back(t); });
  return all;
}

}  // namespace halftone::nn::detail
