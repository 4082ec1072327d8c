// sort and topk on CUDA: elements become unsigned keys in their order, which CUB's radix sort, which is stable, sorts with
// their places. One sort serves all lines of a batch, the line's number being the key's upper part; where 64 bits do not
// hold both, the lines are gathered by a second sort.
#include "halftone/ops/order.h"

#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "halftone/cuda/all.h"
#include "halftone/cuda/numeric.cuh"

namespace halftone::cuda {
namespace {

inline constexpr int order_threads = 256;
inline constexpr int64_t batch_elements = int64_t{1} << 26;  // unless one line is longer

template <class T> using bits_of = std::conditional_t<
    sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

// Ascending as T is: -0 is 0, and every NaN the largest.
template <class T> __device__ uint64_t key_of(T v, bool descending) {
  using U = bits_of<T>;
  constexpr U sign = U(U(1) << (sizeof(U) * 8 - 1));
  U u = bit_cast<U>(v);
  if constexpr (is_16bit<T> || std::floating_point<T>) {
    const auto c = to<compute_t<T>>(v);
    if (c != c) u = U(~U(0));
    else if (c == 0) u = sign;
    else u = U((u & sign) != 0 ? ~u : u | sign);
  } else if constexpr (std::signed_integral<T>) u = U(u ^ sign);
  return descending ? U(~u) : u;
}

// Lines of n elements, and where they start in up to three tensors.
template <int N> struct Lines {
  Layout<N, int64_t> starts;
  int64_t step[N];
};
template <size_t N> Lines<static_cast<int>(N)> lines_of(const std::array<const Tensor*, N>& t, int dim) {
  Shape rest = t[0]->shape();
  if (rest.rank() > 0) rest[static_cast<size_t>(dim)] = 1;
  Lines<static_cast<int>(N)> l;
  l.starts = [&]<size_t... K>(std::index_sequence<K...>) {
    return Layout<static_cast<int>(N), int64_t>(Rows<N>(rest, {t[K]->strides()...}));
  }(std::make_index_sequence<N>());
  for (size_t k = 0; k < N; ++k) l.step[k] = rest.rank() == 0 ? 0 : t[k]->strides()[static_cast<size_t>(dim)];
  return l;
}

// Of the batch that begins at line `first`: place e is element e % n of line first + e / n.
template <class T>
__global__ void __launch_bounds__(order_threads)
    write_keys(const T* x, const Lines<1> l, const int64_t first, const int64_t count, const Divisor n, const bool descending,
               const int line_shift, uint64_t* keys, int64_t* places) {
  wait_for_previous();
  for (int64_t e = thread_index(); e < count; e += grid_threads()) {
    const int64_t line = n.divide(e), i = e - line * n.divisor;
    const uint64_t key = key_of(x[l.starts.locate(first + line) + i * l.step[0]], descending);
    keys[e] = line_shift < 64 ? static_cast<uint64_t>(line) << line_shift | key : key;
    places[e] = e;
  }
}
__global__ void __launch_bounds__(order_threads)
    write_lines(const int64_t* places, const int64_t count, const Divisor n, uint64_t* keys) {
  wait_for_previous();
  for (int64_t e = thread_index(); e < count; e += grid_threads()) keys[e] = static_cast<uint64_t>(n.divide(places[e]));
}
// The first k of each sorted line, from x to values.
template <class U>
__global__ void __launch_bounds__(order_threads)
    take_first(const U* x, U* values, int64_t* indices, const Lines<3> l, const int64_t first, const int64_t lines,
               const int64_t n, const Divisor k, const int64_t* places) {
  wait_for_previous();
  for (int64_t e = thread_index(); e < lines * k.divisor; e += grid_threads()) {
    const int64_t line = k.divide(e), j = e - line * k.divisor, i = places[line * n + j] - line * n;
    int64_t at[3];
    l.starts.locate(first + line, at);
    values[at[1] + j * l.step[1]] = x[at[0] + i * l.step[0]];
    indices[at[2] + j * l.step[2]] = i;
  }
}

int64_t blocks_for(int64_t elements) { return std::min(ceil_div(elements, order_threads), int64_t{32} * sm_count()); }

void sort_pairs(cub::DoubleBuffer<uint64_t>& keys, cub::DoubleBuffer<int64_t>& places, int64_t count, int bits) {
  size_t bytes = 0;
  check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, places, count, 0, bits, stream()), "sort");
  const Scratch memory(std::max<size_t>(bytes, 1));
  check(cub::DeviceRadixSort::SortPairs(memory.as<void>(), bytes, keys, places, count, 0, bits, stream()), "sort");
}

void run_order(const Call& c, std::span<Tensor> out) {
  const auto attrs = c.as<OrderAttrs>();
  const Tensor &x = c.in[0], &values = out[0], &indices = out[1];
  if (values.numel() == 0) return;
  const int64_t n = x.rank() == 0 ? 1 : x.shape()[static_cast<size_t>(attrs.dim)], lines = x.numel() / n;
  const int64_t batch = std::min(lines, std::max<int64_t>(1, batch_elements / n)), most = batch * n;
  const int key_bits = static_cast<int>(size_of(x.dtype())) * 8;
  const auto in = lines_of<1>({&x}, attrs.dim);
  const auto all = lines_of<3>({&x, &values, &indices}, attrs.dim);
  const Scratch memory(static_cast<size_t>(most) * 32);
  for (int64_t first = 0; first < lines; first += batch) {
    const int64_t here = std::min(batch, lines - first), count = here * n;
    const int line_bits = std::bit_width(static_cast<uint64_t>(here - 1));
    cub::DoubleBuffer<uint64_t> keys(memory.as<uint64_t>(), memory.as<uint64_t>() + most);
    cub::DoubleBuffer<int64_t> places(memory.as<int64_t>() + 2 * most, memory.as<int64_t>() + 3 * most);
    const bool together = key_bits + line_bits <= 64;
    visit(x.dtype(), [&]<class T>(Type<T>) {
      launch("sort", write_keys<T>, blocks_for(count), order_threads, x.data<T>(), in, first, count, Divisor(n),
             attrs.descending, together ? key_bits : 64, keys.Current(), places.Current());
    });
    sort_pairs(keys, places, count, together ? key_bits + line_bits : key_bits);
    if (!together) {
      launch("sort", write_lines, blocks_for(count), order_threads, places.Current(), count, Divisor(n), keys.Current());
      sort_pairs(keys, places, count, line_bits);
    }
    visit_bits(x.dtype(), [&]<class U>(Type<U>) {
      launch("sort", take_first<U>, blocks_for(here * attrs.k), order_threads, static_cast<const U*>(x.raw_data()),
             static_cast<U*>(values.raw_data()), indices.data<int64_t>(), all, first, here, n, Divisor(attrs.k),
             places.Current());
    });
  }
}

// Between a tensor with all places and one with chosen ones. An index out of range moves nothing.
template <bool put, class U>
__global__ void __launch_bounds__(order_threads)
    move_along(const U* x, const int64_t* index, U* y, const Lines<3> l, const int64_t count, const Divisor k, const int64_t n) {
  wait_for_previous();
  for (int64_t e = thread_index(); e < count; e += grid_threads()) {
    const int64_t line = k.divide(e), j = e - line * k.divisor;
    int64_t at[3];  // of index, x, y
    l.starts.locate(line, at);
    const int64_t place = index[at[0] + j * l.step[0]];
    if (place < 0 || place >= n) continue;
    y[at[2] + (put ? place : j) * l.step[2]] = x[at[1] + (put ? j : place) * l.step[1]];
  }
}

template <bool put> void run_along(const Call& c, std::span<Tensor> out) {
  const auto attrs = c.as<AlongAttrs>();
  const Tensor &x = c.in[0], &index = c.in[1], &y = out[0];
  if (put && y.numel() > 0)
    check(cudaMemsetAsync(y.raw_data(), 0, static_cast<size_t>(y.numel()) * size_of(y.dtype()), stream()), "put_along");
  const int64_t count = index.numel();
  if (count == 0) return;
  const int64_t k = index.rank() == 0 ? 1 : index.shape()[static_cast<size_t>(attrs.dim)];
  const auto l = lines_of<3>({&index, &x, &y}, attrs.dim);
  visit_bits(x.dtype(), [&]<class U>(Type<U>) {
    launch(c.op->name, move_along<put, U>, blocks_for(count), order_threads, static_cast<const U*>(x.raw_data()),
           index.data<int64_t>(), static_cast<U*>(y.raw_data()), l, count, Divisor(k), attrs.n);
  });
}

}  // namespace

void fill_cuda_order() {
  fill<run_order>(op::sort);
  fill<run_order>(op::topk);
  fill<run_along<false>>(op::take_along);
  fill<run_along<true>>(op::put_along);
}

}  // namespace halftone::cuda
