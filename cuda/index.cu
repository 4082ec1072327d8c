// Index operators on CUDA. Reading is one kernel over a walk, in packs where an index stands for a dense row. Adding sorts
// the destinations and sums each run of equal ones in a fixed order: the same bits every time, without atomics.
#include "halftone/ops/index.h"

#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>

#include "halftone/cuda/all.h"
#include "halftone/cuda/fault.cuh"
#include "halftone/cuda/numeric.cuh"
#include "halftone/ops/copy.h"

namespace halftone::cuda {
namespace {

constexpr int threads = 256;
int64_t grid_for(int64_t n) { return std::min<int64_t>(ceil_div(n, threads), int64_t{32} * sm_count()); }

template <class U> U* bits(const Tensor& t) { return static_cast<U*>(t.raw_data()); }

// ---- reading

// Of an indexed tensor: its size and stride along the indexed dimension.
struct Indexed {
  int64_t limit, stride;
  FaultSite site;
};

// Operand 0 of the layout is the index, operand 1 the tensor but for the indexed dimension.
template <int n, class U>
__global__ void __launch_bounds__(threads) read_kernel(U* y, const U* x, const int64_t* index,
                                                       const Layout<2, int64_t> layout, const Indexed of,
                                                       const U not_a_number) {
  wait_for_previous();
  for (int64_t e = thread_index(); e < layout.count; e += grid_threads()) {
    int64_t at[2];
    layout.locate(e, at);
    const int64_t i = index[at[0]];
    Pack<U, n> v;
    if (i >= 0 && i < of.limit) v = load_pack<n>(x + at[1] + i * of.stride);
    else {
      report(of.site, i, at[0], of.limit);
      for (int j = 0; j < n; ++j) v.v[j] = not_a_number;
    }
    store_pack(y + e * n, v);
  }
}

uint64_t nan_bits(DType t) {
  switch (t) {
    case DType::f16: return 0x7e00;
    case DType::bf16: return 0x7fc0;
    case DType::f32: return 0x7fc00000;
    case DType::f64: return 0x7ff8000000000000;
    default: return 0;
  }
}

void read(const char* who, const detail::IndexWalk& w, const Tensor& x, const Tensor& index, const Tensor& y) {
  if (y.numel() == 0) return;
  const Rows<2> rows(w.shape, {w.index, w.x});
  const Indexed of{w.limit, w.stride, fault_site(who)};
  visit_bits(x.dtype(), [&]<class U>(Type<U>) {
    constexpr int n = pack_size<U>;
    const size_t last = rows.shape.size() - 1;
    bool packed = rows.strides[0][last] == 0 && rows.strides[1][last] == 1 && rows.shape[last] % n == 0 &&
                  w.stride % n == 0 && aligned(x.raw_data(), 16) && aligned(y.raw_data(), 16);
    for (size_t d = 0; d < last; ++d) packed = packed && rows.strides[1][d] % n == 0;
    auto run = [&](auto kernel, int pack) {
      const Layout<2, int64_t> layout(rows, pack);
      launch(who, kernel, grid_for(layout.count), threads, bits<U>(y), static_cast<const U*>(bits<U>(x)),
             static_cast<const int64_t*>(index.data<int64_t>()), layout, of, static_cast<U>(nan_bits(x.dtype())));
    };
    if (packed) run(read_kernel<n, U>, n);
    else run(read_kernel<1, U>, 1);
  });
}

void run_gather(const Call& c, std::span<Tensor> out) {
  read("gather: index", detail::walk_dim(c.in[0].meta(), c.as<int32_t>(), c.in[1].meta()), c.in[0], c.in[1], out[0]);
}
void run_index_select(const Call& c, std::span<Tensor> out) {
  read("index_select: index", detail::walk_slices(c.in[0].meta(), c.as<int32_t>(), c.in[1].meta()), c.in[0], c.in[1],
       out[0]);
}
void run_embedding(const Call& c, std::span<Tensor> out) {
  read("embedding: index", detail::walk_rows(c.in[0].meta(), c.in[1].meta()), c.in[0], c.in[1], out[0]);
}

// ---- destinations in order

// The destination of each element of a walk; `limit` for those out of range, which are reported, and for `skipped`.
__global__ void __launch_bounds__(threads)
    destination_kernel(uint64_t* keys, int64_t* places, const int64_t* index, const Layout<2, int64_t> layout,
                       const Indexed of, const int64_t skipped, const uint64_t limit) {
  wait_for_previous();
  for (int64_t e = thread_index(); e < layout.count; e += grid_threads()) {
    int64_t at[2];
    layout.locate(e, at);
    const int64_t i = index[at[0]];
    const bool valid = i >= 0 && i < of.limit;
    if (!valid) report(of.site, i, e, of.limit);
    keys[e] = valid && i != skipped ? static_cast<uint64_t>(at[1] + i * of.stride) : limit;
    places[e] = e;
  }
}

// The elements of a walk by destination, and by place among equals.
class Sorted {
 public:
  Sorted(const char* who, const detail::IndexWalk& w, const Tensor& index, int64_t skipped, int64_t limit)
      : count_(w.shape.numel()), memory_(4 * bytes()) {
    uint64_t* keys = memory_.as<uint64_t>();
    auto* places = reinterpret_cast<int64_t*>(keys + 2 * count_);
    launch(who, destination_kernel, grid_for(count_), threads, keys, places,
           static_cast<const int64_t*>(index.data<int64_t>()), Layout<2, int64_t>(Rows<2>(w.shape, {w.index, w.x})),
           Indexed{w.limit, w.stride, fault_site(who)}, skipped, static_cast<uint64_t>(limit));
    cub::DoubleBuffer<uint64_t> k(keys, keys + count_);
    cub::DoubleBuffer<int64_t> p(places, places + count_);
    int bits = 1;
    while (bits < 64 && static_cast<uint64_t>(limit) >> bits != 0) ++bits;
    size_t extra = 0;
    check(cub::DeviceRadixSort::SortPairs(nullptr, extra, k, p, count_, 0, bits, stream()), who);
    Scratch room(extra);
    check(cub::DeviceRadixSort::SortPairs(room.as<void>(), extra, k, p, count_, 0, bits, stream()), who);
    keys_ = k.Current();
    places_ = p.Current();
  }
  const uint64_t* keys() const { return keys_; }
  const int64_t* places() const { return places_; }

 private:
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(uint64_t); }
  int64_t count_;
  Scratch memory_;
  const uint64_t* keys_;
  const int64_t* places_;
};

// ---- adding

// A destination, and an element that goes there, are columns of [outer, rows, inner]: so many rows `inner` apart.
struct Columns {
  int64_t count, inner, destinations, sources;  // outer * inner; rows of the result and of the source
  __device__ int64_t destination(uint64_t row, int64_t c) const {
    return (c / inner * destinations + static_cast<int64_t>(row)) * inner + c % inner;
  }
  __device__ int64_t source(int64_t row, int64_t c) const { return (c / inner * sources + row) * inner + c % inner; }
};
constexpr int64_t piece = 64;  // sorted elements that one thread adds up

// Sums of the runs of equal destinations, one piece for each thread and column. A run that lies in one piece is done; of
// the others, `heads` has the part at a piece's beginning and `tails` the part with which a run begins.
template <class T, class Y>
__global__ void __launch_bounds__(threads)
    add_pieces(Y* y, const T* x, const uint64_t* keys, const int64_t* places, const int64_t n, const Columns columns,
               accumulate_t<T>* heads, accumulate_t<T>* tails) {
  wait_for_previous();
  using A = accumulate_t<T>;
  const int64_t items = (n + piece - 1) / piece * columns.count;
  for (int64_t item = thread_index(); item < items; item += grid_threads()) {
    const int64_t p = item / columns.count, c = item - p * columns.count, begin = p * piece,
                  end = min(n, begin + piece);
    A sum = 0;
    uint64_t key = keys[begin];
    bool head = begin > 0 && keys[begin - 1] == key;
    auto write = [&] {
      if (head) heads[item] = sum;
      else if (key < static_cast<uint64_t>(columns.destinations)) {
        Y& to_ = y[columns.destination(key, c)];
        to_ = to<Y>(static_cast<A>(to<A>(to_) + sum));
      }
    };
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t k = keys[i];
      if (k != key) {
        write();
        key = k;
        sum = 0;
        head = false;
      }
      if (k < static_cast<uint64_t>(columns.destinations)) sum += to<A>(x[columns.source(places[i], c)]);
    }
    if (!head && end < n && keys[end] == key) tails[item] = sum;
    else write();
  }
}

// The runs that begin in one piece and end in another.
template <class Y, class A>
__global__ void __launch_bounds__(threads) join_pieces(Y* y, const uint64_t* keys, const int64_t n,
                                                       const Columns columns, const A* heads, const A* tails) {
  wait_for_previous();
  const int64_t items = (n + piece - 1) / piece * columns.count;
  for (int64_t item = thread_index(); item < items; item += grid_threads()) {
    const int64_t p = item / columns.count, c = item - p * columns.count, begin = p * piece;
    int64_t end = begin + piece;
    if (end >= n) continue;
    const uint64_t key = keys[end];
    if (keys[end - 1] != key || (begin > 0 && keys[begin - 1] == key)) continue;
    if (key >= static_cast<uint64_t>(columns.destinations)) continue;
    A sum = tails[item];
    for (int64_t q = p + 1; end < n && keys[end] == key; ++q, end += piece) sum += heads[q * columns.count + c];
    Y& to_ = y[columns.destination(key, c)];
    to_ = to<Y>(static_cast<A>(to<A>(to_) + sum));
  }
}

void add(const char* who, const Sorted& sorted, int64_t n, const Columns& columns, const Tensor& source, const Tensor& y) {
  const Tensor dense = source.contiguous();
  visit<number_types>(source.dtype(), [&]<class T>(Type<T>) {
    using A = accumulate_t<T>;
    const int64_t items = ceil_div(n, piece) * columns.count;
    const size_t parts = n > piece ? static_cast<size_t>(items) : 0;
    Scratch memory(2 * parts * sizeof(A));
    A* heads = memory.as<A>();
    auto run = [&]<class Y>(Type<Y>) {
      launch(who, add_pieces<T, Y>, grid_for(items), threads, y.data<Y>(), static_cast<const T*>(dense.data<T>()),
             sorted.keys(), sorted.places(), n, columns, heads, heads + parts);
      if (parts > 0)
        launch(who, join_pieces<Y, A>, grid_for(items), threads, y.data<Y>(), sorted.keys(), n, columns,
               static_cast<const A*>(heads), static_cast<const A*>(heads + parts));
    };
    if constexpr (is_16bit<T>)
      if (y.dtype() == DType::f32) return run(Type<float>{});
    run(Type<T>{});
  });
}

// Slices of dimension d of y, to which those of source are added by an index [n].
void add_slices(const char* who, int d, const Tensor& index, const Tensor& source, const Tensor& y, int64_t skipped) {
  const int64_t n = index.numel(), rows = y.size(d);
  if (n == 0 || y.numel() == 0) return;
  int64_t inner = 1;
  for (int k = d + 1; k < y.rank(); ++k) inner *= y.size(k);
  const detail::IndexWalk w{{n}, index.strides(), {0}, 1, rows};
  add(who, Sorted(who, w, index, skipped, rows), n, {y.numel() / rows, inner, rows, n}, source, y);
}

void run_scatter_add(const Call& c, std::span<Tensor> out) {
  const Tensor &y = out[0], &index = c.in[1];
  call_all(op::copy, {y, c.in[0]});
  const int64_t n = index.numel();
  if (n == 0 || y.numel() == 0) return;
  const detail::IndexWalk w = detail::walk_dim(y.meta(), c.as<int32_t>(), index.meta());
  add("scatter_add: index", Sorted("scatter_add: index", w, index, -1, y.numel()), n, {1, 1, y.numel(), n}, c.in[2], y);
}
void run_index_add(const Call& c, std::span<Tensor> out) {
  call_all(op::copy, {out[0], c.in[0]});
  add_slices("index_add: index", c.as<int32_t>(), c.in[1], c.in[2], out[0], -1);
}
void run_embedding_grad(const Call& c, std::span<Tensor> out) {
  call_all(op::fill, {out[0]}, Attrs::of(Scalar(0)));
  const Tensor index = c.in[1].contiguous();
  add_slices("embedding: index", 0, index.as_strided({index.numel()}, {1}, index.meta().offset), c.in[0], out[0],
             c.as<EmbeddingAttrs>().padding_idx);
}

// ---- writing

// Of each run of equal destinations the last element is written; `wins` (may be null) says which.
template <class U>
__global__ void __launch_bounds__(threads)
    write_last(U* y, bool* wins, const U* x, const U value, const Layout<1, int64_t> layout, const uint64_t* keys,
               const int64_t* places, const uint64_t limit) {
  wait_for_previous();
  for (int64_t i = thread_index(); i < layout.count; i += grid_threads()) {
    const uint64_t key = keys[i];
    const bool last = i + 1 == layout.count || keys[i + 1] != key;
    const int64_t e = places[i];
    if (wins) wins[e] = last && key < limit;
    if (last && key < limit) y[key] = x ? x[layout.locate(e)] : value;
  }
}

void run_scatter(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<ScatterAttrs>();
  const Tensor &y = out[0], &index = c.in[1];
  call_all(op::copy, {y, c.in[0]});
  if (index.numel() == 0 || y.numel() == 0) return;
  const detail::IndexWalk w = detail::walk_dim(y.meta(), a.dim, index.meta());
  const Sorted sorted("scatter: index", w, index, -1, y.numel());
  const Strides source = c.has(2) ? c.in[2].strides() : contiguous_strides(index.shape());
  const Layout<1, int64_t> layout(Rows<1>(index.shape(), {source}));
  visit(y.dtype(), [&]<class T>(Type<T>) {
    const T value = a.value.to<T>();
    visit_bits(y.dtype(), [&]<class U>(Type<U>) {
      if constexpr (sizeof(U) == sizeof(T))
        launch("scatter", write_last<U>, grid_for(layout.count), threads, bits<U>(y),
               out.size() > 1 ? out[1].data<bool>() : nullptr,
               static_cast<const U*>(c.has(2) ? bits<U>(c.in[2]) : nullptr), bit_cast<U>(value), layout, sorted.keys(),
               sorted.places(), static_cast<uint64_t>(y.numel()));
    });
  });
}

// ---- nonzero: counts of tiles, their sums, then places

constexpr int per_thread = 16;
constexpr int64_t tile = threads * per_thread;

// A thread's neighbours in the mask, as bits.
__device__ unsigned mask_bits(const bool* mask, const Layout<1, int64_t>& layout, int64_t first) {
  unsigned b = 0;
  for (int j = 0; j < per_thread; ++j)
    if (first + j < layout.count && mask[layout.locate(first + j)]) b |= 1u << j;
  return b;
}

__global__ void __launch_bounds__(threads)
    count_tiles(int64_t* counts, const bool* mask, const Layout<1, int64_t> layout, const int64_t tiles) {
  wait_for_previous();
  const Group group(threads);
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    int mine = __popc(mask_bits(mask, layout, t * tile + static_cast<int64_t>(threadIdx.x) * per_thread));
    mine = group.combine(mine, 0, [](int a, int b) { return a + b; });
    if (threadIdx.x == 0) counts[t] = mine;
  }
}

// Each count becomes the sum of those before it. One block.
__global__ void __launch_bounds__(1024) sum_counts(int64_t* counts, const int64_t tiles) {
  wait_for_previous();
  using Scan = cub::BlockScan<int64_t, 1024>;
  __shared__ typename Scan::TempStorage memory;
  int64_t before = 0;
  for (int64_t base = 0; base < tiles; base += 1024) {
    const int64_t t = base + threadIdx.x;
    int64_t v = t < tiles ? counts[t] : 0, total;
    Scan(memory).ExclusiveSum(v, v, total);
    if (t < tiles) counts[t] = before + v;
    before += total;
    __syncthreads();
  }
}

struct Sizes {
  int rank;
  Divisor size[max_rank];
};
__global__ void __launch_bounds__(threads)
    write_places(int64_t* y, const int64_t limit, const int64_t* before, const bool* mask,
                 const Layout<1, int64_t> layout, const int64_t tiles, const Sizes sizes) {
  wait_for_previous();
  using Scan = cub::BlockScan<int, threads>;
  __shared__ typename Scan::TempStorage memory;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t first = t * tile + static_cast<int64_t>(threadIdx.x) * per_thread;
    unsigned b = mask_bits(mask, layout, first);
    int rank_in_tile;
    Scan(memory).ExclusiveSum(__popc(b), rank_in_tile);
    for (int64_t row = before[t] + rank_in_tile; b != 0 && row < limit; b &= b - 1, ++row) {
      int64_t rest = first + __ffs(static_cast<int>(b)) - 1;
      for (int d = sizes.rank - 1; d >= 0; --d) {
        const int64_t above = sizes.size[d].divide(rest);
        y[row * sizes.rank + d] = rest - above * sizes.size[d].divisor;
        rest = above;
      }
    }
    __syncthreads();
  }
}

void run_nonzero(const Call& c, std::span<Tensor> out) {
  const Tensor &mask = c.in[0], &y = out[0];
  call_all(op::fill, {y}, Attrs::of(Scalar(-1)));
  if (y.numel() == 0 || mask.numel() == 0) return;
  const Layout<1, int64_t> layout(Rows<1>(mask.shape(), {mask.strides()}));
  Sizes sizes{mask.rank(), {}};
  for (size_t d = 0; d < mask.shape().size(); ++d) sizes.size[d] = Divisor(mask.shape()[d]);
  const int64_t tiles = ceil_div(layout.count, tile), blocks = std::min<int64_t>(tiles, int64_t{32} * sm_count());
  Scratch counts(static_cast<size_t>(tiles) * sizeof(int64_t));
  const bool* m = mask.data<bool>();
  launch("nonzero", count_tiles, blocks, threads, counts.as<int64_t>(), m, layout, tiles);
  launch("nonzero", sum_counts, 1, 1024, counts.as<int64_t>(), tiles);
  launch("nonzero", write_places, blocks, threads, y.data<int64_t>(), y.size(0),
         static_cast<const int64_t*>(counts.as<int64_t>()), m, layout, tiles, sizes);
}

// ---- one_hot

template <class Y>
__global__ void __launch_bounds__(256)
    one_hot_kernel(Y* y, const int64_t* target, const int64_t n, const Divisor classes) {
  wait_for_previous();
  const Y one = to<Y>(true), zero = to<Y>(false);
  for (int64_t i = thread_index(); i < n * classes.divisor; i += grid_threads()) {
    const int64_t row = classes.divide(i);
    y[i] = target[row] == i - row * classes.divisor ? one : zero;
  }
}

void run_one_hot(const Call& c, std::span<Tensor> out) {
  const Tensor target = c.in[0].contiguous();
  visit(out[0].dtype(), [&]<class Y>(Type<Y>) {
    launch("one_hot", one_hot_kernel<Y>, grid_for(out[0].numel()), threads, out[0].data<Y>(), target.data<int64_t>(),
           target.numel(), Divisor(c.as<OneHotAttrs>().classes));
  });
}

}  // namespace

void fill_cuda_index() {
  fill<run_one_hot>(op::one_hot);
  fill<run_gather>(op::gather);
  fill<run_index_select>(op::index_select);
  fill<run_embedding>(op::embedding);
  fill<run_scatter>(op::scatter);
  fill<run_scatter_add>(op::scatter_add);
  fill<run_index_add>(op::index_add);
  fill<run_embedding_grad>(op::embedding_grad);
  fill<run_nonzero>(op::nonzero);
}

}  // namespace halftone::cuda
