// cast, clone, copy, fill and where on CUDA. Copies that keep the dtype move bits, so that one kernel serves every
// dtype of a size; a copy that swaps the contiguous dimension goes through shared memory: by tiles, or, where one of the two is
// short, as windows of weights and channels of images are, by all of that and some of the other.
#include "halftone/cuda/all.h"
#include "halftone/cuda/elementwise.cuh"
#include "halftone/ops/copy.h"

namespace halftone::cuda {
namespace {

template <class From, class To> struct Convert {
  __device__ To operator()(From v) const { return to<To, true>(v); }
};
template <class T> struct Constant {
  T value;
  __device__ T operator()() const { return value; }
};
template <class T> struct Select {
  T a, b;
  bool a_is_number, b_is_number;
  __device__ T operator()(bool condition, T x, T y) const {
    return condition ? (a_is_number ? a : x) : (b_is_number ? b : y);
  }
};

// ---- transposed copies

// y[b, i, j] = x[b, j, i] in memory terms: y is dense along j, x along i.
struct Transpose {
  int64_t batches, rows, columns;  // of y: i, j
  int64_t y_batch, y_row, x_batch, x_column;
};
inline constexpr int tile = 32, tile_rows = 8;

// A tile has tile * n rows and columns: n elements go at a time on both sides.
template <class U, int n>
__global__ void __launch_bounds__(tile* tile_rows)
    transpose_kernel(U* y, const U* x, const Transpose t, const Divisor across, const Divisor down) {
  wait_for_previous();
  constexpr int side = tile * n, steps = side / tile_rows;
  __shared__ alignas(16) U memory[side][side + n];
  const int lane = static_cast<int>(threadIdx.x) % tile, row = static_cast<int>(threadIdx.x) / tile;
  for (int64_t k = blockIdx.x; k < across.divisor * down.divisor * t.batches; k += gridDim.x) {
    const int64_t strip = across.divide(k), b = down.divide(strip), j0 = (k - strip * across.divisor) * side, i0 = (strip - b * down.divisor) * side;
    const int64_t i = i0 + lane * n, j = j0 + lane * n;
#pragma unroll
    for (int m = 0; m < steps; ++m) {
      const int at = m * tile_rows + row;
      if (j0 + at < t.columns && i < t.rows) store_pack(&memory[at][lane * n], load_pack<n>(x + b * t.x_batch + (j0 + at) * t.x_column + i));
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < steps; ++m) {
      const int at = m * tile_rows + row;
      if (i0 + at >= t.rows || j >= t.columns) continue;
      Pack<U, n> v;
#pragma unroll
      for (int c = 0; c < n; ++c) v.v[c] = memory[lane * n + c][at];
      store_pack(y + b * t.y_batch + (i0 + at) * t.y_row + j, v);
    }
    __syncthreads();
  }
}

// After merging, the last dimension is dense in y and another is dense in x; at most one more remains.
std::optional<Transpose> as_transpose(const Rows<2>& rows) {
  const Shape& s = rows.shape;
  const auto& [y, x] = rows.strides;
  size_t last = s.size() - 1;
  if (s.rank() < 2 || s.rank() > 3 || y[last] != 1 || x[last] == 1 || s[last] < tile / 2) return {};
  for (size_t i = 0; i < last; ++i) {
    if (x[i] != 1 || s[i] < tile / 2) continue;
    size_t b = 1 - i;  // when there are three dimensions
    bool batched = s.rank() == 3;
    return Transpose{batched ? s[b] : 1, s[i], s[last], batched ? y[b] : 0, y[i], batched ? x[b] : 0, x[last]};
  }
  return {};
}

template <class U> void transpose(const char* name, const Tensor& from, const Tensor& into, const Transpose& t) {
  auto run = [&](auto kernel, int64_t side) {
    const Divisor across(ceil_div(t.columns, side)), down(ceil_div(t.rows, side));
    launch(name, kernel, std::min<int64_t>(t.batches * across.divisor * down.divisor, int64_t{64} * sm_count()), tile * tile_rows,
           static_cast<U*>(into.raw_data()), static_cast<const U*>(from.raw_data()), t, across, down);
  };
  if constexpr (sizeof(U) == 2) {
    const bool even = (t.rows | t.columns | t.y_batch | t.y_row | t.x_batch | t.x_column) % 2 == 0;
    if (even && aligned(into.raw_data(), 4) && aligned(from.raw_data(), 4)) return run(transpose_kernel<U, 2>, 2 * tile);
  }
  run(transpose_kernel<U, 1>, tile);
}

// ---- the same where one dimension is short: on one side its `few` elements lie together, [b, j, few]; on the other they are lines, [b, few, j]

struct Interleave {
  int64_t batches, length;  // length: of j
  int few;
  bool gathers;             // y has them together, else x
  int64_t y_batch, x_batch, line;
};
inline constexpr int most_few = 16, few_threads = 128;

template <class Y, class X> __global__ void __launch_bounds__(few_threads) interleave_kernel(Y* y, const X* x, const Interleave t) {
  wait_for_previous();
  __shared__ X memory[few_threads * most_few];
  const int64_t runs = (t.length + few_threads - 1) / few_threads;
  const int k = static_cast<int>(threadIdx.x);
  for (int64_t n = blockIdx.x; n < t.batches * runs; n += gridDim.x) {
    const int64_t b = n / runs, first = n % runs * few_threads;
    const int live = static_cast<int>(min(int64_t{few_threads}, t.length - first)), count = live * t.few;
    const X* from = x + b * t.x_batch + (t.gathers ? first : first * t.few);
    Y* into = y + b * t.y_batch + (t.gathers ? first * t.few : first);
    if (!t.gathers) for (int i = k; i < count; i += few_threads) memory[i] = from[i];
    else if (k < live) for (int i = 0; i < t.few; ++i) memory[k * t.few + i] = from[i * t.line + k];
    __syncthreads();
    if (t.gathers) for (int i = k; i < count; i += few_threads) into[i] = to<Y, true>(memory[i]);
    else if (k < live) for (int i = 0; i < t.few; ++i) into[i * t.line + k] = to<Y, true>(memory[k * t.few + i]);
    __syncthreads();
  }
}

std::optional<Interleave> as_interleave(const Rows<2>& rows) {
  const Shape& s = rows.shape;
  const auto& [y, x] = rows.strides;
  const size_t last = s.size() - 1;
  if (s.rank() < 2 || s.rank() > 3 || y[last] != 1 || x[last] == 1) return {};
  for (size_t i = 0; i < last; ++i) {
    if (x[i] != 1) continue;
    const bool gathers = s[last] <= most_few && y[i] == s[last], scatters = s[i] <= most_few && x[last] == s[i];
    const int64_t length = gathers ? s[i] : s[last];
    if ((!gathers && !scatters) || length < tile / 2) continue;
    const size_t b = 1 - i;  // when there are three dimensions
    const bool batched = s.rank() == 3;
    return Interleave{batched ? s[b] : 1, length, static_cast<int>(gathers ? s[last] : s[i]), gathers, batched ? y[b] : 0, batched ? x[b] : 0,
                      gathers ? x[last] : y[i]};
  }
  return {};
}
// False: the tensors do not lie so.
template <class Y, class X> bool interleave(const char* name, const Tensor& from, const Tensor& into) {
  auto t = as_interleave(rows_in_memory_order<2>(from.shape(), {into.strides(), from.strides()}));
  if (!t) return false;
  launch(name, interleave_kernel<Y, X>, std::min<int64_t>(t->batches * ceil_div(t->length, few_threads), int64_t{64} * sm_count()), few_threads,
         static_cast<Y*>(into.raw_data()), static_cast<const X*>(from.raw_data()), *t);
  return true;
}

void copy_bits(const char* name, const Tensor& from, const Tensor& into) {
  if (from.numel() == 0) return;
  visit_bits(from.dtype(), [&]<class U>(Type<U>) {
    if (auto t = as_transpose(rows_in_memory_order<2>(from.shape(), {into.strides(), from.strides()}))) return transpose<U>(name, from, into, *t);
    if (interleave<U, U>(name, from, into)) return;
    map<U, U>(name, Convert<U, U>{}, from.shape(), {place(into), place(from)});
  });
}

void convert(const char* name, const Tensor& from, const Tensor& into) {
  if (from.dtype() == into.dtype()) return copy_bits(name, from, into);
  visit(from.dtype(), [&]<class From>(Type<From>) {
    visit(into.dtype(), [&]<class To>(Type<To>) {
      if constexpr (is_16bit<From> && std::same_as<To, float>)  // gradients of convolutions' weights
        if (interleave<To, From>(name, from, into)) return;
      if constexpr (!std::same_as<From, To>)
        map<To, From>(name, Convert<From, To>{}, from.shape(), {place(into), place(from)});
    });
  });
}

void run_convert(const Call& c, std::span<Tensor> out) { convert(c.op->name, c.in[0], out[0]); }
void run_copy(const Call& c, std::span<Tensor>) { convert("copy", c.in[1], c.in[0]); }

void run_fill(const Call& c, std::span<Tensor>) {
  const Tensor& x = c.in[0];
  visit(x.dtype(), [&]<class T>(Type<T>) {
    T value = c.as<Scalar>().to<T>();
    visit_bits(x.dtype(), [&]<class U>(Type<U>) {
      if constexpr (sizeof(U) == sizeof(T)) map<U>("fill", Constant<U>{bit_cast<U>(value)}, x.shape(), {place(x)});
    });
  });
}

// A number's place is taken by the other branch, read as one element again and again, whose value is not used.
void run_where(const Call& c, std::span<Tensor> out) {
  auto attrs = c.as<WhereAttrs>();
  const Tensor &condition = c.in[0], &a = c.in[1], &b = c.in[c.in.size() - 1];
  const Strides still = Strides::filled(condition.rank(), 0);
  visit(a.dtype(), [&]<class T>(Type<T>) {
    T a_number = attrs.a.to<T>(), b_number = attrs.b.to<T>();
    visit_bits(a.dtype(), [&]<class U>(Type<U>) {
      if constexpr (sizeof(U) == sizeof(T)) {
        Select<U> f{bit_cast<U>(a_number), bit_cast<U>(b_number), attrs.a_is_number, attrs.b_is_number};
        map<U, bool, U, U>("where", f, out[0].shape(),
                           {place(out[0]), place(condition), {a.raw_data(), attrs.a_is_number ? still : a.strides()},
                            {b.raw_data(), attrs.b_is_number ? still : b.strides()}});
      }
    });
  });
}

}  // namespace

void fill_cuda_copy() {
  fill<run_convert>(op::cast);
  fill<run_convert>(op::clone);
  fill<run_copy>(op::copy);
  fill<run_fill>(op::fill);
  fill<run_where>(op::where);
}

}  // namespace halftone::cuda
