// Scans on CUDA. Lines are cut into chunks by their sizes alone: chunk totals first, then what comes before each chunk, then
// the chunks; so an element is always made of the same sums. Where lines are neighbours in memory and there are many, a
// thread goes along each.
#include "halftone/ops/scan.h"

#include <cub/block/block_scan.cuh>

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"

namespace halftone::cuda {
namespace {

inline constexpr int scan_threads = 256, scan_items = 8;
inline constexpr int64_t scan_tile = scan_threads * scan_items, max_chunks = scan_threads, many_lines = 4096;

// What is scanned: how an element is read as a step, and what is written after it.
template <class Op, class T, class Y> struct Accumulated {
  static constexpr int operands = 2;  // y, x
  using Rule = Op;
  using A = std::conditional_t<std::integral<T>, int64_t, double>;
  using Step = typename Op::template Step<A>;
  const T* x;
  Y* y;
  __device__ Step load(const int64_t (&at)[2]) const { return to<A>(x[at[1]]); }
  __device__ void store(const int64_t (&at)[2], Step s) const { y[at[0]] = to<Y>(s); }
};
template <class T> struct Recurring {
  static constexpr int operands = 3;  // y, a, b
  using Rule = scan::Recurrence;
  using A = double;
  using Step = scan::Linear<A>;
  const T *a, *b;
  T* y;
  __device__ Step load(const int64_t (&at)[3]) const { return {to<A>(a[at[1]]), to<A>(b[at[2]])}; }
  __device__ void store(const int64_t (&at)[3], Step s) const { y[at[0]] = to<T>(s.b); }
};

template <class D> struct Then {
  __device__ typename D::Step operator()(typename D::Step s, typename D::Step t) const { return D::Rule::then(s, t); }
};
template <class D> __device__ typename D::Step nothing() { return D::Rule::template nothing<typename D::A>(); }

template <int N> struct Lines {
  Layout<N, int64_t> starts;
  int64_t step[N], n;
  bool reverse;
  int64_t chunks, chunk;
  __device__ void locate(const int64_t (&start)[N], int64_t i, int64_t (&at)[N]) const {
    const int64_t place = reverse ? n - 1 - i : i;
#pragma unroll
    for (int k = 0; k < N; ++k) at[k] = start[k] + place * step[k];
  }
};

// A block for each chunk: with `totals` it writes what the whole chunk does, otherwise it scans, after `before`.
template <class D>
__global__ void __launch_bounds__(scan_threads)
    scan_chunks(const D d, const Lines<D::operands> l, const bool totals, typename D::Step* before) {
  wait_for_previous();
  using Step = typename D::Step;
  using Scan = cub::BlockScan<Step, scan_threads>;
  __shared__ typename Scan::TempStorage memory;
  for (int64_t item = blockIdx.x; item < l.starts.count * l.chunks; item += gridDim.x) {
    const int64_t line = item / l.chunks, begin = (item - line * l.chunks) * l.chunk, end = min(l.n, begin + l.chunk);
    int64_t start[D::operands], at[D::operands];
    l.starts.locate(line, start);
    Step carry = totals || l.chunks == 1 ? nothing<D>() : before[item];
    for (int64_t base = begin; base < end; base += scan_tile) {
      const int64_t first = base + threadIdx.x * scan_items;
      Step own[scan_items], total = nothing<D>(), previous, all;
#pragma unroll
      for (int j = 0; j < scan_items; ++j) {
        own[j] = nothing<D>();
        if (first + j < end) {
          l.locate(start, first + j, at);
          own[j] = d.load(at);
        }
        total = D::Rule::then(total, own[j]);
      }
      Scan(memory).ExclusiveScan(total, previous, nothing<D>(), Then<D>{}, all);
      Step s = D::Rule::then(carry, previous);
#pragma unroll
      for (int j = 0; j < scan_items; ++j) {
        if (totals || first + j >= end) break;
        s = D::Rule::then(s, own[j]);
        l.locate(start, first + j, at);
        d.store(at, s);
      }
      carry = D::Rule::then(carry, all);
      __syncthreads();  // before the memory is used again
    }
    if (totals && threadIdx.x == 0) before[item] = carry;
  }
}

// Chunk totals become what comes before each chunk: a block for each line, a thread for each chunk.
template <class D>
__global__ void __launch_bounds__(scan_threads)
    scan_totals(const int64_t lines, const int64_t chunks, typename D::Step* before) {
  wait_for_previous();
  using Scan = cub::BlockScan<typename D::Step, scan_threads>;
  __shared__ typename Scan::TempStorage memory;
  for (int64_t line = blockIdx.x; line < lines; line += gridDim.x) {
    typename D::Step *own = before + line * chunks + threadIdx.x, s = nothing<D>(), previous, all;
    if (threadIdx.x < chunks) s = *own;
    Scan(memory).ExclusiveScan(s, previous, nothing<D>(), Then<D>{}, all);
    if (threadIdx.x < chunks) *own = previous;
    __syncthreads();
  }
}

template <class D>
__global__ void __launch_bounds__(scan_threads) scan_columns(const D d, const Lines<D::operands> l) {
  wait_for_previous();
  for (int64_t line = thread_index(); line < l.starts.count; line += grid_threads()) {
    int64_t start[D::operands], at[D::operands];
    l.starts.locate(line, start);
    auto s = nothing<D>();
    for (int64_t i = 0; i < l.n; ++i) {
      l.locate(start, i, at);
      s = D::Rule::then(s, d.load(at));
      d.store(at, s);
    }
  }
}

// The tensors in the order of D's operands; all have one shape.
template <class D, size_t N> void run_along(const char* name, const D& d, const ScanAttrs& attrs, const std::array<const Tensor*, N>& t) {
  static_assert(N == D::operands);
  if (t[0]->numel() == 0) return;
  Shape rest = t[0]->shape();
  Lines<D::operands> l;
  l.n = l.chunks = 1;
  l.reverse = attrs.reverse;
  const bool scalar = rest.rank() == 0;
  if (!scalar) {
    l.n = rest[static_cast<size_t>(attrs.dim)];
    rest[static_cast<size_t>(attrs.dim)] = 1;
  }
  const auto rows = [&]<size_t... K>(std::index_sequence<K...>) {
    return Rows<N>(rest, {t[K]->strides()...});
  }(std::make_index_sequence<N>());
  l.starts = Layout<D::operands, int64_t>(rows);
  for (size_t k = 0; k < N; ++k) l.step[k] = scalar ? 0 : t[k]->strides()[static_cast<size_t>(attrs.dim)];
  const int64_t lines = l.starts.count, most = int64_t{64} * sm_count();

  if (lines >= many_lines && rows.strides[0].back() < l.step[0])
    return launch(name, scan_columns<D>, std::min(ceil_div(lines, scan_threads), most), scan_threads, d, l);
  if (lines < 512 && l.n > 4 * scan_tile)
    l.chunks = std::min({max_chunks, ceil_div(l.n, 4 * scan_tile), ceil_div(2048, lines)});
  l.chunk = ceil_div(ceil_div(l.n, l.chunks), scan_tile) * scan_tile;
  l.chunks = ceil_div(l.n, l.chunk);
  const int64_t blocks = std::min(lines * l.chunks, most);
  const Scratch memory(l.chunks == 1 ? 0 : static_cast<size_t>(lines * l.chunks) * sizeof(typename D::Step));
  auto* before = memory.as<typename D::Step>();
  if (l.chunks > 1) {
    launch(name, scan_chunks<D>, blocks, scan_threads, d, l, true, before);
    launch(name, scan_totals<D>, std::min(lines, most), scan_threads, lines, l.chunks, before);
  }
  launch(name, scan_chunks<D>, blocks, scan_threads, d, l, false, before);
}

template <class Op> void run_scan(const Call& c, std::span<Tensor> out) {
  visit(c.in[0].dtype(), [&]<class T>(Type<T>) {
    using Y = std::conditional_t<std::integral<T>, int64_t, T>;
    Accumulated<Op, T, Y> d{c.in[0].data<T>(), out[0].data<Y>()};
    run_along<decltype(d), 2>(c.op->name, d, c.as<ScanAttrs>(), {&out[0], &c.in[0]});
  });
}

void run_recurrence(const Call& c, std::span<Tensor> out) {
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    Recurring<T> d{c.in[0].data<T>(), c.in[1].data<T>(), out[0].data<T>()};
    run_along<decltype(d), 3>(c.op->name, d, c.as<ScanAttrs>(), {&out[0], &c.in[0], &c.in[1]});
  });
}

}  // namespace

void fill_cuda_scan() {
  fill<run_scan<scan::Sum>>(op::cumsum);
  fill<run_scan<scan::Product>>(op::cumprod);
  fill<run_recurrence>(op::recurrence);
}

}  // namespace halftone::cuda
