#pragma once
// Reductions of any strided tensor over any dimensions, for any description R of what happens to an element:
//
//   R::Element, R::Result, R::State
//   R::none()                what merges as nothing
//   r.add(s, v, i, o)        element i of the `count` reduced into output o
//   R::merge(s, t)
//   r.finish(s, count, o)    the result
//
// Two kernels: reduce_rows() where reduced elements are neighbours in memory, reduce_columns() where outputs are. Both
// cut long reductions into splits, which merge_splits() joins. How work is cut follows from sizes and strides alone,
// so an output's elements are always added in the same order: it has the same bits on every run and every device.
#include "halftone/cuda/numeric.cuh"
#include "halftone/ops/reduce.h"

namespace halftone::cuda {
namespace detail {

inline constexpr int reduce_threads = 256, reduce_unroll = 4;
// A split has at least so many elements; more splits than this many blocks gain nothing.
inline constexpr int64_t min_split = 1 << 14, enough_blocks = 1024;
// So many rows of at most so many packs are of a warp each: a block for each would have little to read and much to wait for.
inline constexpr int64_t warp_rows = 4096, warp_packs = 1024;

template <class R> inline constexpr int reduce_pack = std::min(pack_size<typename R::Element>, 8);

// How the reduced elements are walked and cut.
struct Reduced {
  Layout<1, int64_t> at;  // in packs for packed rows, else in elements
  int64_t count;          // elements
  int64_t splits, per_split;  // per_split counts packs in rows, elements in columns
  bool packed;
};

// A group of threads for each output (of each split).
template <class R>
__global__ void __launch_bounds__(reduce_threads)
    reduce_rows(const R r, const typename R::Element* x, const Layout<1, int64_t> kept, const Reduced gone,
                const int width, typename R::State* parts, typename R::Result* y) {
  wait_for_previous();
  constexpr int n = reduce_pack<R>;
  const Group group(width);
  const int64_t items = kept.count * gone.splits, packs = (gone.count + n - 1) / n;
  for (int64_t base = group.first(); base < items; base += group.step()) {
    const int64_t item = base + group.number, o = gone.splits == 1 ? item : item / gone.splits;
    const int64_t split = item - o * gone.splits;
    auto s = R::none();
    if (item < items) {
      const auto* from = x + kept.locate(o);
      const int64_t end = min(packs, (split + 1) * gone.per_split);
      int64_t p = split * gone.per_split + group.lane;
      if (gone.packed) {
        const int64_t whole = min(end, gone.count / n);
        for (; p + (reduce_unroll - 1) * width < whole; p += reduce_unroll * width) {
          Pack<typename R::Element, n> v[reduce_unroll];
#pragma unroll
          for (int u = 0; u < reduce_unroll; ++u) v[u] = load_pack<n>(from + gone.at.locate(p + u * width));
#pragma unroll
          for (int u = 0; u < reduce_unroll; ++u)
#pragma unroll
            for (int j = 0; j < n; ++j) s = r.add(s, v[u].v[j], (p + u * width) * n + j, o);
        }
        for (; p < whole; p += width) {
          auto v = load_pack<n>(from + gone.at.locate(p));
#pragma unroll
          for (int j = 0; j < n; ++j) s = r.add(s, v.v[j], p * n + j, o);
        }
      }
      for (; p < end; p += width)
        for (int64_t i = p * n; i < min(gone.count, p * n + n); ++i)
          s = r.add(s, from[gone.packed ? i : gone.at.locate(i)], i, o);  // packed: the end of one dense dimension
    }
    s = group.combine(s, R::none(), R::merge);
    if (item < items && group.lane == 0) {
      if (parts) parts[split * kept.count + o] = s;
      else y[o] = r.finish(s, gone.count, o);
    }
  }
}

// The outputs of one innermost kept dimension, in strips of `across` threads times a pack.
struct Columns {
  Layout<1, int64_t> outer;  // the other kept dimensions
  int64_t width, stride, strips;
  int across;
};

// A block for each strip (of each split): threads side by side for columns, one above the other for rows.
template <class R>
__global__ void __launch_bounds__(reduce_threads)
    reduce_columns(const R r, const typename R::Element* x, const Columns kept, const Reduced gone,
                   typename R::State* parts, typename R::Result* y) {
  wait_for_previous();
  using State = typename R::State;
  constexpr int n = reduce_pack<R>;
  __shared__ State memory[n][reduce_threads];
  const int t = static_cast<int>(threadIdx.x), tx = t % kept.across, ty = t / kept.across,
            down = reduce_threads / kept.across;
  const int64_t outputs = kept.outer.count * kept.width, items = kept.outer.count * kept.strips * gone.splits;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t split = item % gone.splits, strip = item / gone.splits % kept.strips,
                  row = item / gone.splits / kept.strips;
    const int64_t column = (strip * kept.across + tx) * n, o = row * kept.width + column;
    const int live = static_cast<int>(min(static_cast<int64_t>(n), kept.width - column));  // may be negative
    const auto* from = x + kept.outer.locate(row) + column * kept.stride;
    const int64_t end = min(gone.count, (split + 1) * gone.per_split);
    int64_t i = split * gone.per_split + ty;
    State s[n];
#pragma unroll
    for (int j = 0; j < n; ++j) s[j] = R::none();
    if (gone.packed && live == n) {
      for (; i + (reduce_unroll - 1) * down < end; i += reduce_unroll * down) {
        Pack<typename R::Element, n> v[reduce_unroll];
#pragma unroll
        for (int u = 0; u < reduce_unroll; ++u) v[u] = load_pack<n>(from + gone.at.locate(i + u * down));
#pragma unroll
        for (int u = 0; u < reduce_unroll; ++u)
#pragma unroll
          for (int j = 0; j < n; ++j) s[j] = r.add(s[j], v[u].v[j], i + u * down, o + j);
      }
    }
    for (; i < end; i += down) {
      const auto* line = from + gone.at.locate(i);
#pragma unroll
      for (int j = 0; j < n; ++j)
        if (j < live) s[j] = r.add(s[j], line[j * kept.stride], i, o + j);
    }
#pragma unroll
    for (int j = 0; j < n; ++j) memory[j][t] = s[j];
    for (int half = down / 2; half > 0; half /= 2) {
      __syncthreads();
      if (ty >= half) continue;
#pragma unroll
      for (int j = 0; j < n; ++j) memory[j][t] = R::merge(memory[j][t], memory[j][t + half * kept.across]);
    }
    if (ty == 0)
      for (int j = 0; j < live; ++j) {
        if (parts) parts[split * outputs + o + j] = memory[j][t];
        else y[o + j] = r.finish(memory[j][t], gone.count, o + j);
      }
    __syncthreads();
  }
}

// `across` outputs side by side for a block, a power of two, so that their parts are read in whole sectors.
template <class R>
__global__ void __launch_bounds__(reduce_threads)
    merge_splits(const R r, const typename R::State* parts, const int64_t outputs, const int64_t splits,
                 const int64_t count, const int across, typename R::Result* y) {
  wait_for_previous();
  using State = typename R::State;
  __shared__ State memory[reduce_threads];
  const int t = static_cast<int>(threadIdx.x), tx = t % across, ty = t / across, down = reduce_threads / across;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * across; first < outputs; first += static_cast<int64_t>(gridDim.x) * across) {
    const int64_t o = first + tx;
    State s = R::none();
    if (o < outputs)
#pragma unroll 4
      for (int64_t i = ty; i < splits; i += down) s = R::merge(s, parts[i * outputs + o]);
    memory[t] = s;
    for (int half = down / 2; half > 0; half /= 2) {
      __syncthreads();
      if (ty < half) memory[t] = R::merge(memory[t], memory[t + half * across]);
    }
    if (ty == 0 && o < outputs) y[o] = r.finish(memory[t], count, o);
    __syncthreads();
  }
}

// A tensor's dimensions, split into those that stay and those that go, each merged where strides allow.
struct Dimensions {
  Rows<1> kept, gone;
  Dimensions(const Meta& x, uint32_t dims) : Dimensions(parts(x, dims, false), parts(x, dims, true)) {}
  bool columns() const {
    return kept.shape.back() > 1 && kept.strides[0].back() < gone.strides[0].back() && gone.shape.back() > 1;
  }

 private:
  struct Part { Shape shape; Strides strides; };
  Dimensions(const Part& k, const Part& g) : kept(k.shape, {k.strides}), gone(g.shape, {g.strides}) {}
  static Part parts(const Meta& x, uint32_t dims, bool goes) {
    Part p;
    for (size_t d = 0; d < x.shape.size(); ++d) {
      if ((dims >> d & 1u) != goes) continue;
      p.shape.push_back(x.shape[d]);
      p.strides.push_back(x.strides[d]);
    }
    return p;
  }
};

inline bool multiples(const Strides& strides, size_t first, size_t last, int n) {
  for (size_t d = first; d < last; ++d) if (strides[d] % n != 0) return false;
  return true;
}

// Cuts `total` units of work for each of `blocks` blocks, `scale` elements a unit and block.
inline void cut(Reduced& gone, int64_t total, int64_t blocks, int64_t scale) {
  int64_t splits = std::min(enough_blocks / std::max<int64_t>(blocks, 1), total * scale / min_split);
  gone.per_split = std::max<int64_t>(1, ceil_div(total, std::max<int64_t>(splits, 1)));
  gone.splits = std::max<int64_t>(1, ceil_div(total, gone.per_split));
}

inline int64_t grid(int64_t items) { return std::min<int64_t>(items, int64_t{64} * sm_count()); }

}  // namespace detail

// y[o] for every output o, row-major over the dimensions of x that stay; bit d of `dims`: dimension d goes.
template <class R>
void reduce(const char* name, const R& r, const Tensor& tensor, uint32_t dims, typename R::Result* y) {
  using namespace detail;
  using State = typename R::State;
  constexpr int n = reduce_pack<R>;
  const auto* x = static_cast<const typename R::Element*>(tensor.raw_data());
  const Dimensions d(tensor.meta(), dims);
  const int64_t outputs = d.kept.shape.numel();
  if (outputs == 0) return;
  const Strides &kept = d.kept.strides[0], &gone = d.gone.strides[0];
  const bool aligned_base = aligned(x, sizeof(Pack<typename R::Element, n>));

  Reduced g;
  g.count = d.gone.shape.numel();
  auto parts = [&] { return g.splits > 1 ? static_cast<size_t>(g.splits * outputs) * sizeof(State) : 0; };
  auto merge = [&](const Scratch& memory) {
    if (g.splits == 1) return;
    const int across = outputs >= 8 ? 8 : 1;
    launch(name, merge_splits<R>, grid(ceil_div(outputs, across)), reduce_threads, r, memory.as<const State>(), outputs,
           g.splits, g.count, across, y);
  };

  if (d.columns()) {
    const size_t last = d.kept.shape.size() - 1;
    Rows<1> outer = d.kept;
    outer.shape[last] = 1;
    Columns k{Layout<1, int64_t>(outer), d.kept.shape[last], kept[last], 0, warp_size};
    const int64_t packs = ceil_div(k.width, n);
    while (k.across / 2 >= packs) k.across /= 2;
    // Few rows: narrower strips, so that more blocks share them.
    while (k.across > 8 && g.count <= 1024 && k.outer.count * ceil_div(packs, k.across) < 128) k.across /= 2;
    k.strips = ceil_div(packs, k.across);
    g.at = Layout<1, int64_t>(d.gone);
    g.packed = k.stride == 1 && aligned_base && multiples(kept, 0, last, n) && multiples(gone, 0, gone.size(), n);
    cut(g, g.count, k.outer.count * k.strips, int64_t{k.across} * n);
    Scratch memory(parts());
    launch(name, reduce_columns<R>, grid(k.outer.count * k.strips * g.splits), reduce_threads, r, x, k, g,
           memory.as<State>(), y);
    return merge(memory);
  }
  const size_t last = gone.size() - 1;
  g.packed = gone[last] == 1 && aligned_base && multiples(kept, 0, kept.size(), n) && multiples(gone, 0, last, n) &&
             (last == 0 || d.gone.shape[last] % n == 0);
  g.at = Layout<1, int64_t>(d.gone, g.packed ? n : 1);
  const int64_t packs = ceil_div(g.count, n);
  const int width = packs <= warp_packs && outputs >= warp_rows ? group_width(std::min<int64_t>(packs, warp_size), reduce_threads)
                                                                : group_width(packs, reduce_threads);
  cut(g, packs, outputs, n);
  Scratch memory(parts());
  launch(name, reduce_rows<R>, grid(ceil_div(outputs * g.splits * width, reduce_threads)), reduce_threads, r, x,
         Layout<1, int64_t>(d.kept), g, width, memory.as<State>(), y);
  merge(memory);
}

// ---- the family. Floating types accumulate in their own width, at least f32; integers in i64.

// A struct of the reduction family, over elements T with results Y.
template <class Op, class T, class Y> struct Plain {
  Op op = {};
  using Element = T;
  using Result = Y;
  using A = accumulate_t<T>;
  using State = typename Op::template State<A>;
  __device__ static State none() { return Op::template start<A>(); }
  __device__ State add(State s, T v, int64_t i, int64_t) const { return op.template add<A>(s, to<A>(v), i); }
  __device__ static State merge(State s, State t) { return Op::template merge<A>(s, t); }
  __device__ Y finish(State s, int64_t n, int64_t) const { return to<Y>(op.template finish<A>(s, n)); }
};

template <class Op> void run_reduce(const Call& c, std::span<Tensor> out) {
  auto d = c.as<reduce::Dims>();
  visit<Op::types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    using Y = typename Op::template Result<T>;
    if constexpr (reduce::may_be_wide<Op> && is_16bit<T>)
      if (d.wide) return reduce(Op::name, Plain<Op, T, float>{}, c.in[0], d.dims, out[0].data<float>());
    reduce(Op::name, Plain<Op, T, Y>{}, c.in[0], d.dims, out[0].data<Y>());
  });
}

}  // namespace halftone::cuda
