#pragma once
// The CUDA loops of the elementwise families, which name no operator: map() runs any function of up to three operands
// over a shape. Neighbouring elements go in packs of 16 bytes wherever the innermost dimension allows it, broadcast
// operands included; everything else one by one. A pack is read before it is written, so y may be an operand.
#include "halftone/cuda/numeric.cuh"
#include "halftone/ops/ternary.h"

namespace halftone::cuda {

// Where an operand is.
struct Place {
  void* data;
  Strides strides;
};
inline Place place(const Tensor& t) { return {t.raw_data(), t.strides()}; }

namespace detail {

template <class... X> struct Pointers {};
template <class X, class... Rest> struct Pointers<X, Rest...> {
  const X* head;
  Pointers<Rest...> rest;
};
template <int n, class... X> struct Packs {};
template <int n, class X, class... Rest> struct Packs<n, X, Rest...> {
  Pack<X, n> head;
  Packs<n, Rest...> rest;
};

// Operand k of N, and those after it. An inner stride of 0 repeats one element.
template <int k, int n, int N>
__device__ void load(Packs<n>&, const Pointers<>&, const uint32_t (&)[N], const uint32_t (&)[N]) {}
template <int k, int n, int N, class X, class... Rest>
__device__ void load(Packs<n, X, Rest...>& to, const Pointers<X, Rest...>& from, const uint32_t (&at)[N],
                     const uint32_t (&inner)[N]) {
  if (n == 1 || inner[k] != 0) to.head = load_pack<n>(from.head + at[k]);
  else {
    X one = from.head[at[k]];
#pragma unroll
    for (int j = 0; j < n; ++j) to.head.v[j] = one;
  }
  load<k + 1>(to.rest, from.rest, at, inner);
}
// f of the j-th element of each operand.
template <class F, int n, class... Done> __device__ auto apply(const F& f, int, const Packs<n>&, Done... done) {
  return f(done...);
}
template <class F, int n, class X, class... Rest, class... Done>
__device__ auto apply(const F& f, int j, const Packs<n, X, Rest...>& x, Done... done) {
  return apply(f, j, x.rest, done..., x.head.v[j]);
}

inline constexpr int map_threads = 256, map_unroll = 2;

// The last `tail` elements of a one-dimensional layout fill no pack.
template <int n, class F, class Y, class... X>
__global__ void __launch_bounds__(map_threads) map_kernel(const F f, const Layout<1 + sizeof...(X), uint32_t> layout,
                                                          const uint32_t tail, Y* y, const Pointers<X...> x) {
  wait_for_previous();
  constexpr int N = 1 + sizeof...(X);
  const uint32_t step = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t i = first; i < layout.count; i += map_unroll * step) {
    uint32_t at[map_unroll][N];
    Packs<n, X...> in[map_unroll];
#pragma unroll
    for (int u = 0; u < map_unroll; ++u)
      if (i + u * step < layout.count) {
        layout.locate(i + u * step, at[u]);
        load<1>(in[u], x, at[u], layout.stride[0]);
      }
#pragma unroll
    for (int u = 0; u < map_unroll; ++u)
      if (i + u * step < layout.count) {
        Pack<Y, n> out;
#pragma unroll
        for (int j = 0; j < n; ++j) out.v[j] = apply(f, j, in[u]);
        store_pack(y + at[u][0], out);
      }
  }
  if constexpr (n > 1) {
    if (first >= tail) return;
    uint32_t at[N], inner[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      inner[k] = layout.stride[0][k];
      at[k] = layout.count * inner[k] + (inner[k] != 0 ? first : 0u);
    }
    Packs<1, X...> in;
    load<1>(in, x, at, inner);
    y[at[0]] = apply(f, 0, in);
  }
}

// Every operand is dense or repeated along the innermost dimension, and its packs are aligned.
template <size_t N>
bool packs(const Rows<N>& rows, const std::array<char*, N>& data, const std::array<size_t, N>& width, int n) {
  size_t last = rows.shape.size() - 1;
  if (last > 0 && rows.shape[last] % n != 0) return false;
  for (size_t k = 0; k < N; ++k) {
    if (k > 0 && rows.strides[k][last] == 0) continue;
    if (rows.strides[k][last] != 1 || !aligned(data[k], width[k] * static_cast<size_t>(n))) return false;
    for (size_t d = 0; d < last; ++d)
      if (rows.strides[k][d] % n != 0) return false;
  }
  return true;
}

template <size_t N> bool fits_31_bits(const Rows<N>& rows) {
  constexpr int64_t limit = (int64_t{1} << 31) - 1;
  int64_t count = 1;
  std::array<int64_t, N> last{};
  for (size_t d = 0; d < rows.shape.size(); ++d) {
    count *= rows.shape[d];
    for (size_t k = 0; k < N; ++k) last[k] += (rows.shape[d] - 1) * rows.strides[k][d];
    if (count > limit || *std::max_element(last.begin(), last.end()) > limit) return false;
  }
  return true;
}

template <class Y, class... X, class F, size_t... I>
void launch_map(const char* name, const F& f, const Rows<1 + sizeof...(X)>& rows,
                std::array<char*, 1 + sizeof...(X)> data, std::index_sequence<I...> inputs) {
  constexpr size_t N = 1 + sizeof...(X);
  constexpr int n = pack_size<Y, X...>;
  constexpr std::array<size_t, N> width = {sizeof(Y), sizeof(X)...};
  if (!fits_31_bits(rows)) {  // in halves, until 32-bit indices do
    size_t d = 0;
    for (size_t i = 1; i < rows.shape.size(); ++i) if (rows.shape[i] > rows.shape[d]) d = i;
    Rows<N> half = rows;
    half.shape[d] = rows.shape[d] / 2;
    launch_map<Y, X...>(name, f, half, data, inputs);
    for (size_t k = 0; k < N; ++k) data[k] += half.shape[d] * rows.strides[k][d] * static_cast<int64_t>(width[k]);
    half.shape[d] = rows.shape[d] - half.shape[d];
    return launch_map<Y, X...>(name, f, half, data, inputs);
  }
  auto run = [&](auto kernel, int pack) {
    Layout<N, uint32_t> layout(rows, pack);
    auto tail = static_cast<uint32_t>(rows.shape.rank() == 1 ? rows.shape[0] % pack : 0);
    int64_t work = ceil_div(std::max<int64_t>(layout.count, tail), map_threads * map_unroll);
    Pointers<X...> pointers = {};
    [[maybe_unused]] auto fill = [&](auto& self, auto& p, size_t k) -> void {
      if constexpr (requires { p.head; }) {
        p.head = reinterpret_cast<decltype(p.head)>(data[k]);
        self(self, p.rest, k + 1);
      }
    };
    fill(fill, pointers, 1);
    int64_t blocks = std::min<int64_t>(work, int64_t{8} * sm_count());
    launch(name, kernel, blocks, map_threads, f, layout, tail, reinterpret_cast<Y*>(data[0]), pointers);
  };
  if (packs(rows, data, width, n)) run(map_kernel<n, F, Y, X...>, n);
  else run(map_kernel<1, F, Y, X...>, 1);
}

}  // namespace detail

// Rows of these operands, their dimensions in the order of the first one's memory.
template <size_t N> Rows<N> rows_in_memory_order(Shape shape, std::array<Strides, N> strides) {
  for (size_t d = 1; d < shape.size(); ++d)
    for (size_t e = d; e > 0 && strides[0][e] > strides[0][e - 1]; --e) {
      std::swap(shape[e], shape[e - 1]);
      for (auto& s : strides) std::swap(s[e], s[e - 1]);
    }
  return [&]<size_t... K>(std::index_sequence<K...>) { return Rows<N>(shape, {strides[K]...}); }(std::make_index_sequence<N>());
}

// y[i] = f(x[i]...) for every element of the shape; Y and X are the element types in memory.
template <class Y, class... X, class F>
void map(const char* name, const F& f, const Shape& shape, const std::array<Place, 1 + sizeof...(X)>& places) {
  constexpr size_t N = 1 + sizeof...(X);
  if (shape.numel() == 0) return;
  std::array<char*, N> data;
  std::array<Strides, N> strides;
  for (size_t k = 0; k < N; ++k) {
    data[k] = static_cast<char*>(places[k].data);
    strides[k] = places[k].strides;
  }
  detail::launch_map<Y, X...>(name, f, rows_in_memory_order<N>(shape, strides), data, std::index_sequence_for<X...>());
}

// ---- the families

template <class Op, class T, class Y> struct UnaryElement {
  Op op;
  __device__ Y operator()(T x) const { return to<Y>(op.f(to<compute_t<T>>(x))); }
};
template <class Op> void run_unary(const Call& c, std::span<Tensor> out) {
  Op op = elementwise::from_attrs<Op>(c.attrs);
  visit<elementwise::types_of<Op>()>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    using Y = std::conditional_t<unary::gives_bool<Op>(), bool, T>;
    map<Y, T>(Op::name, UnaryElement<Op, T, Y>{op}, c.in[0].shape(), {place(out[0]), place(c.in[0])});
  });
}

template <class Op, class T, class Y> struct BinaryElement {
  using C = compute_t<T>;
  __device__ Y operator()(T a, T b) const { return to<Y>(Op::f(to<C>(a), to<C>(b))); }
};
template <class Op, class T, class Y> struct NumberElement {
  using C = compute_t<T>;
  C number;
  bool left;
  __device__ Y operator()(T x) const {
    C v = to<C>(x);
    return to<Y>(Op::f(left ? number : v, left ? v : number));
  }
};
template <class Op> void run_binary(const Call& c, std::span<Tensor> out) {
  binary::Number n = c.as<binary::Given<Op>>().number;
  visit<elementwise::types_of<Op>()>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    using Y = std::conditional_t<binary::gives_bool<Op>(), bool, T>;
    const Tensor& x = c.in[0];
    if (n.at == binary::Number::At::none)
      return map<Y, T, T>(Op::name, BinaryElement<Op, T, Y>{}, x.shape(), {place(out[0]), place(x), place(c.in[1])});
    NumberElement<Op, T, Y> f{n.value.to<compute_t<T>>(), n.at == binary::Number::At::left};
    map<Y, T>(Op::name, f, x.shape(), {place(out[0]), place(x)});
  });
}

template <class Op, class T> struct TernaryElement {
  using C = compute_t<T>;
  Op op;
  C b, c;
  bool b_is_number, c_is_number;
  __device__ T operator()(T x, T y, T z) const {
    return to<T>(op.f(to<C>(x), b_is_number ? b : to<C>(y), c_is_number ? c : to<C>(z)));
  }
};
// A number's place is taken by a, read as one element again and again, whose value is not used.
template <class Op> void run_ternary(const Call& call, std::span<Tensor> out) {
  auto given = call.as<ternary::Given<Op>>();
  const bool b_is_number = given.numbers.has(1), c_is_number = given.numbers.has(2);
  const Tensor &a = call.in[0], &b = b_is_number ? a : call.in[1], &c = c_is_number ? a : call.in[b_is_number ? 1 : 2];
  const Strides still = Strides::filled(a.rank(), 0);
  visit<elementwise::types_of<Op>()>(a.dtype(), [&]<class T>(Type<T>) {
    using C = compute_t<T>;
    TernaryElement<Op, T> f{given.op, given.numbers.value[1].template to<C>(), given.numbers.value[2].template to<C>(),
                            b_is_number, c_is_number};
    map<T, T, T, T>(Op::name, f, a.shape(),
                    {place(out[0]), place(a), {b.raw_data(), b_is_number ? still : b.strides()},
                     {c.raw_data(), c_is_number ? still : c.strides()}});
  });
}

}  // namespace halftone::cuda
