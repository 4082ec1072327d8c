// Norms of rows on CUDA: short rows stay in the registers of a warp or a block; longer ones are read twice, the second time from a cache.
// Sums of a feature over rows are formed by blocks, in parts that are merged in order: cut by sizes alone, so that every run gives the same bits.
#include "halftone/ops/norm.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/norms.cuh"

namespace halftone::cuda {
namespace {

constexpr int threads = channel_threads;

// Of rows: image n and channel c have statistics n * of_image + c / of_statistic.
template <class T> struct RowProducts : Products<T> {
  using typename Products<T>::W, typename Products<T>::Sum;
  using Here = Statistics<W>;
  static constexpr bool by_image = true, after_relu = false;
  const W* statistics;
  int64_t count, of_image;
  Divisor of_statistic;
  __device__ Here at(int64_t n, int64_t c) const { return {statistics, count, n * of_image + of_statistic.divide(c)}; }
  __device__ bool shared(int n) const { return of_statistic.divisor % n == 0; }
  __device__ Sum add(Sum s, T g, T x, const Here& here) const {
    const W v = to<W>(g);
    return {s.a + v * here.normal(to<W>(x)), s.b + v};
  }
};

struct Lines {
  NormRows q;
  Divisor inner;
  bool centred, packed;
  double eps;
  int width;
  __device__ int64_t feature(int64_t first, int64_t i) const { return first + (q.inner == 1 ? i : inner.divide(i)); }
  __device__ int64_t first_feature(int64_t row) const { return q.groups == 1 ? 0 : row % q.groups * (q.features / q.groups); }
};
constexpr int most_kept = 4;  // packs of a row that a thread keeps

// A thread's packs of a row: load(where), and each(f) calls f(where, pack) for them, again and again.
template <int kept, class Load> struct RowPacks {
  Load load;
  int64_t begin, length, step;
  decltype(load(int64_t{})) mine[kept > 0 ? kept : 1];
  __device__ RowPacks(Load l, int64_t b, int64_t n, int64_t s) : load(l), begin(b), length(n), step(s) {
#pragma unroll
    for (int k = 0; k < kept; ++k)
      if (begin + k * step < length) mine[k] = load(begin + k * step);
  }
  template <class F> __device__ void each(F f) {
    if constexpr (kept == 0) for (int64_t i = begin; i < length; i += step) f(i, load(i));
#pragma unroll
    for (int k = 0; k < kept; ++k)
      if (begin + k * step < length) f(begin + k * step, mine[k]);
  }
};
template <int kept, class Load> __device__ RowPacks<kept, Load> row_packs(Load load, int64_t begin, int64_t length, int64_t step) { return {load, begin, length, step}; }

// Of a row, from the sums of its elements' distances from a pivot and of their squares, and the share of an element, 1 / length;
// W is what its elements are computed in.
template <class A, class W> struct RowMoments {
  W mean, rest, rstd;  // as in Statistics
  __device__ RowMoments(Pair<A> sum, A pivot, A share, const bool centred, const double eps) {
    const A offset = centred ? sum.a * share : A(0), squares = sum.b - sum.a * offset, all = pivot + offset;
    const A above = (squares > 0 || squares != squares ? squares * share : A(0)) + static_cast<A>(eps);
    if constexpr (sizeof(W) < sizeof(A)) rstd = static_cast<W>(::rsqrt(above));
    else rstd = 1 / ::sqrt(above);
    mean = static_cast<W>(all), rest = static_cast<W>(all - static_cast<A>(mean));
  }
  __device__ W normal(W x) const { return ((x - mean) - rest) * rstd; }
  __device__ void put(W* statistics, int64_t rows, int64_t row) const {
    statistics[row] = mean, statistics[rows + row] = rest, statistics[2 * rows + row] = rstd;
  }
};

template <int kept, class T, class W>
__global__ void __launch_bounds__(threads)
    row_norm_kernel(T* y, const T* x, const W* w, const W* b, W* statistics, const Lines rows) {
  wait_for_previous();
  using A = moment_t<T>;
  constexpr int n = pack_size<T>;
  const Group group(rows.width);
  for (int64_t base = group.first(); base < rows.q.rows; base += group.step()) {
    const int64_t row = base + group.number;
    const int64_t length = row < rows.q.rows ? rows.q.length : 0;  // past the end: nothing to do but combine()
    const T* from = x + row * rows.q.length;
    auto mine = row_packs<kept>([&](int64_t i) { return load_part<n>(from + i, length - i, rows.packed, T()); }, int64_t{group.lane} * n, length, int64_t{rows.width} * n);
    const A pivot = length > 0 && rows.centred ? to<A>(from[0]) : A(0);
    Pair<A> sum{0, 0};
    mine.each([&](int64_t i, const Pack<T, n>& v) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        const A d = i + j < length ? to<A>(v.v[j]) - pivot : A(0);
        sum.a += d;
        sum.b += d * d;
      }
    });
    sum = group.combine(sum, Pair<A>{0, 0}, Add());
    if (length == 0) continue;
    const RowMoments<A, W> m(sum, pivot, A(1) / static_cast<A>(length), rows.centred, rows.eps);
    if (statistics && group.lane == 0) m.put(statistics, rows.q.rows, row);
    const int64_t first = rows.first_feature(row);
    mine.each([&](int64_t i, Pack<T, n> v) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        if (i + j >= length) break;
        const int64_t k = rows.feature(first, i + j);
        W r = m.normal(to<W>(v.v[j]));
        if (w) r *= w[k];
        if (b) r += b[k];
        v.v[j] = to<T>(r);
      }
      store_part(y + row * length + i, length - i, rows.packed, v);
    });
  }
}

template <int kept, class T, class W>
__global__ void __launch_bounds__(threads)
    row_norm_grad_kernel(T* dx, const T* g, const T* x, const W* w, const W* statistics, const Lines rows) {
  wait_for_previous();
  constexpr int n = pack_size<T>;
  struct Both { Pack<T, n> g, x; };
  const Group group(rows.width);
  for (int64_t base = group.first(); base < rows.q.rows; base += group.step()) {
    const int64_t row = base + group.number, at = row * rows.q.length;
    const int64_t length = row < rows.q.rows ? rows.q.length : 0;
    const int64_t first = rows.first_feature(row);
    const Statistics<W> s(statistics, rows.q.rows, length > 0 ? row : 0);
    auto load = [&](int64_t i) { return Both{load_part<n>(g + at + i, length - i, rows.packed, T()), load_part<n>(x + at + i, length - i, rows.packed, T())}; };
    auto mine = row_packs<kept>(load, int64_t{group.lane} * n, length, int64_t{rows.width} * n);
    // Calls f(element of the pack, its gradient times weight, normal(x)).
    auto each_of = [&](int64_t i, const Both& both, auto f) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        if (i + j >= length) break;
        W gw = to<W>(both.g.v[j]);
        if (w) gw *= w[rows.feature(first, i + j)];
        f(j, gw, s.normal(to<W>(both.x.v[j])));
      }
    };
    Pair<W> sum{0, 0};
    mine.each([&](int64_t i, const Both& both) { each_of(i, both, [&](int, W gw, W normal) { sum.a += gw * normal, sum.b += gw; }); });
    sum = group.combine(sum, Pair<W>{0, 0}, Add());
    if (length == 0) continue;
    const W share = W(1) / static_cast<W>(length), mean = rows.centred ? sum.b * share : W(0), slope = sum.a * share;
    mine.each([&](int64_t i, const Both& both) {
      Pack<T, n> v;
      each_of(i, both, [&](int j, W gw, W normal) { v.v[j] = to<T>((gw - (mean + normal * slope)) * s.rstd); });
      store_part(dx + at + i, length - i, rows.packed, v);
    });
  }
}

// n neighbours, 16 bytes at a time.
template <int n, class T> __device__ Pack<T, n> load_packs(const T* p) {
  constexpr int m = n < pack_size<T> ? n : pack_size<T>;
  Pack<T, n> all;
#pragma unroll
  for (int k = 0; k < n; k += m) {
    const Pack<T, m> part = load_pack<m>(p + k);
#pragma unroll
    for (int j = 0; j < m; ++j) all.v[k + j] = part.v[j];
  }
  return all;
}
template <int n, class T> __device__ void store_packs(T* p, const Pack<T, n>& all) {
  constexpr int m = n < pack_size<T> ? n : pack_size<T>;
#pragma unroll
  for (int k = 0; k < n; k += m) {
    Pack<T, m> part;
#pragma unroll
    for (int j = 0; j < m; ++j) part.v[j] = all.v[k + j];
    store_pack(p + k, part);
  }
}

// Whole packs, and one weight and bias for all rows: a thread keeps its packs of a row and of these, and has the next row's under way.

constexpr int most_row_threads = 512;

// Where the packs of a thread lie in rows of one length: `kept` for it or, in the last threads, one less.
template <int kept, int n> struct RowPlaces {
  int first, step;
  bool last;
  __device__ RowPlaces(const Group& group, int64_t length) : first(group.lane * n), step(group.width * n), last(first + (kept - 1) * step < length) {}
  // Calls f(k, where); k is a constant.
  template <class F> __device__ void each(F f) const {
#pragma unroll
    for (int k = 0; k < kept; ++k)
      if (k + 1 < kept || last) f(k, first + k * step);
  }
};
// n neighbours of a weight or bias, or of what changes nothing where there is none.
template <int n, class V> __device__ Pack<V, n> packs_or(const V* p, int i, float none) {
  if (p) return load_packs<n>(p + i);
  Pack<V, n> all;
#pragma unroll
  for (int j = 0; j < n; ++j) all.v[j] = to<V>(none);
  return all;
}

// Keeps the conversion of 16-bit elements inside a loop: before it, it would take twice the registers.
template <class V, int n> __device__ void convert_here(Pack<V, n>& v) {
  if constexpr (is_16bit<V>) {
    uint32_t words[sizeof v / 4];
    memcpy(words, &v, sizeof v);
#pragma unroll
    for (uint32_t& word : words) asm("" : "+r"(word));
    memcpy(&v, words, sizeof v);
  }
}

// Threads that the registers of a multiprocessor are enough for.
template <int kept, class T, class V> constexpr int norm_room = std::same_as<T, bfloat16> ? (kept == 1 ? 1024 : kept < 4 ? 512 : 384)
    : kept * (2 + 2 * static_cast<int>(sizeof(V) / sizeof(T))) <= 8 ? 1024 : 512;
template <int kept, class T, class V>
__global__ void __launch_bounds__(std::min(norm_room<kept, T, V>, most_row_threads), norm_room<kept, T, V> > most_row_threads ? 2 : 1)
    whole_row_norm_kernel(T* y, const T* x, const V* w, const V* b, wide_t<T>* statistics, const Lines rows) {
  wait_for_previous();
  using A = moment_t<T>;
  using W = wide_t<T>;
  constexpr int n = pack_size<T>;
  struct Row {
    Pack<T, n> v[kept];
    T first;
  };
  const Group group(rows.width);
  const RowPlaces<kept, n> places(group, rows.q.length);
  const A share = A(1) / static_cast<A>(rows.q.length);
  auto load = [&](Row& into, int64_t row) {
    if (row >= rows.q.rows) return;
    const T* from = x + row * rows.q.length;
    places.each([&](int k, int i) { into.v[k] = load_pack<n>(from + i); });
    into.first = from[0];
  };
  Row next;
  load(next, group.first() + group.number);
  Pack<V, n> factor[kept], shift[kept];
  places.each([&](int k, int i) {
    factor[k] = packs_or<n>(w, i, 1);
    shift[k] = packs_or<n>(b, i, 0);
  });
  for (int64_t base = group.first(); base < rows.q.rows; base += group.step()) {
    const int64_t row = base + group.number;
    const bool here = row < rows.q.rows;  // past the end: nothing to do but combine()
    const Row now = next;
    load(next, row + group.step());
    const A pivot = here && rows.centred ? to<A>(now.first) : A(0);
    Pair<A> sum{0, 0};
    if (here)
      places.each([&](int k, int) {
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const A d = to<A>(now.v[k].v[j]) - pivot;
          sum.a += d;
          sum.b += d * d;
        }
      });
    sum = group.combine(sum, Pair<A>{0, 0}, Add());
    if (!here) continue;
    const RowMoments<A, W> m(sum, pivot, share, rows.centred, rows.eps);
    if (statistics && group.lane == 0) m.put(statistics, rows.q.rows, row);
    places.each([&](int k, int i) {
      convert_here(factor[k]);
      convert_here(shift[k]);
      Pack<T, n> v;
#pragma unroll
      for (int j = 0; j < n; ++j) v.v[j] = to<T>(m.normal(to<W>(now.v[k].v[j])) * to<W>(factor[k].v[j]) + to<W>(shift[k].v[j]));
      store_pack(y + row * rows.q.length + i, v);
    });
  }
}

// A block's part of the gradients of weight and bias, from those of its threads: its groups are added up in order.
template <int kept, int n, class W, class Each>
__device__ void put_products(Pair<W>* parts, Pair<W> (&products)[kept][n], const Group& group, int64_t length, Each each) {
  __shared__ Pair<W> memory[kept * n * warp_size];  // of one group: where there are several, each is a warp
  for (int other = 1; other < static_cast<int>(blockDim.x) / group.width; ++other) {
    __syncthreads();
    if (group.number == other)
#pragma unroll
      for (int k = 0; k < kept; ++k)
#pragma unroll
        for (int j = 0; j < n; ++j) memory[(k * n + j) * warp_size + group.lane] = products[k][j];
    __syncthreads();
    if (group.number == 0)
#pragma unroll
      for (int k = 0; k < kept; ++k)
#pragma unroll
        for (int j = 0; j < n; ++j) products[k][j] = Add()(products[k][j], memory[(k * n + j) * warp_size + group.lane]);
  }
  if (group.number > 0) return;
  each([&](int k, int64_t i) {
#pragma unroll
    for (int j = 0; j < n; ++j) parts[blockIdx.x * length + i + j] = products[k][j];
  });
}

// The gradient, and each block's part of those of weight and bias. As many blocks as sizes alone say. Where a thread keeps many elements
// there are fewer of them, with more registers each.
template <int kept, class T> constexpr int most_grad_threads = warp_size * (kept * pack_size<T> > 24 ? 8 : kept * pack_size<T> > 16 ? 12 : 16);
template <int kept, class T, class V>
__global__ void __launch_bounds__(most_grad_threads<kept, T>, 1)
    whole_row_norm_grad_kernel(T* dx, Pair<wide_t<T>>* parts, const T* g, const T* x, const V* w, const wide_t<T>* statistics, const Lines rows) {
  wait_for_previous();
  using W = wide_t<T>;
  constexpr int n = pack_size<T>;
  constexpr bool keeps_weight = kept <= 2;
  struct Row {
    Pack<T, n> g[kept], x[kept];
    Statistics<W> s;
  };
  const Group group(rows.width);
  const int64_t length = rows.q.length;
  const RowPlaces<kept, n> places(group, length);
  auto load = [&](Row& into, int64_t row) {
    if (row >= rows.q.rows) return;
    const int64_t at = row * length;
    places.each([&](int k, int i) {
      into.g[k] = load_pack<n>(g + at + i);
      into.x[k] = load_pack<n>(x + at + i);
    });
    into.s = Statistics<W>(statistics, rows.q.rows, row);
  };
  Row next;
  load(next, group.first() + group.number);
  Pack<V, n> weight[keeps_weight ? kept : 1];
  if constexpr (keeps_weight) places.each([&](int k, int i) { weight[k] = packs_or<n>(w, i, 1); });
  auto weight_of = [&](int k, int i) {
    if constexpr (keeps_weight) return weight[k];
    else return packs_or<n>(w, i, 1);
  };
  Pair<W> products[kept][n];
#pragma unroll
  for (int k = 0; k < kept; ++k)
#pragma unroll
    for (int j = 0; j < n; ++j) products[k][j] = Pair<W>{0, 0};
  const W share = W(1) / static_cast<W>(length);
  for (int64_t base = group.first(); base < rows.q.rows; base += group.step()) {
    const int64_t row = base + group.number;
    const bool here = row < rows.q.rows;
    const Row now = next;
    load(next, row + group.step());
    // For 16-bit elements the mean is taken together, as in Affine.
    const W offset = (now.s.mean + now.s.rest) * now.s.rstd;
    auto normal = [&](T v) {
      if constexpr (is_16bit<T>) return to<W>(v) * now.s.rstd - offset;
      else return now.s.normal(v);
    };
    Pair<W> total{0, 0};
    if (here)
      places.each([&](int k, int i) {
        const Pack<V, n> factor = weight_of(k, i);
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const W v = to<W>(now.g[k].v[j]), z = normal(now.x[k].v[j]), gw = v * to<W>(factor.v[j]);
          total.a += gw * z;
          total.b += gw;
          products[k][j].a += v * z;
          products[k][j].b += v;
        }
      });
    total = group.combine(total, Pair<W>{0, 0}, Add());
    if (!here || !dx) continue;
    const W mean = rows.centred ? total.b * share : W(0), slope = total.a * share;
    places.each([&](int k, int i) {
      const Pack<V, n> factor = weight_of(k, i);
      Pack<T, n> d;
#pragma unroll
      for (int j = 0; j < n; ++j)
        d.v[j] = to<T>((to<W>(now.g[k].v[j]) * to<W>(factor.v[j]) - (mean + normal(now.x[k].v[j]) * slope)) * now.s.rstd);
      store_pack(dx + row * length + i, d);
    });
  }
  if (parts) put_products(parts, products, group, length, [&](auto f) { places.each(f); });
}

template <class T> Lines rows_of(const RowNormAttrs& a, const NormRows& q, std::initializer_list<const T*> operands) {
  constexpr int n = pack_size<T>;
  bool packed = q.length % n == 0;
  for (const T* t : operands) packed = packed && aligned(t, 16);
  const int64_t packs = ceil_div(q.length, n);
  int width = group_width(std::min<int64_t>(packs, warp_size), threads);
  while (width < threads && packs > int64_t{most_kept} * width) width *= 2;
  return {q, Divisor(std::max<int64_t>(q.inner, 1)), a.kind != RowNorm::rms, packed, a.eps, width};
}
// Launches the variant of a kernel for these rows: one that keeps them, several to a block or one, or one that reads them twice.
template <int n, class K, class... A> void launch_rows(const char* name, K keeps, K rereads, const Lines& rows, A... arguments) {
  const int block = rows.width > warp_size ? rows.width : threads;
  const int64_t blocks = grid(ceil_div(rows.q.rows * rows.width, block));
  launch(name, ceil_div(rows.q.length, n) <= int64_t{most_kept} * rows.width ? keeps : rereads, blocks, block, arguments..., rows);
}

// How rows lie before threads that keep them: a warp or less for each row while a thread keeps at most `alone` packs, more where
// it would, for `together` each. 0 packs: these kernels do not take such rows.
struct WholeRows {
  Lines rows;
  int kept = 0;
  WholeRows(const Lines& lines, int n, int alone, int together) : rows(lines) {
    if (!lines.packed || lines.q.inner != 1 || lines.q.groups != 1) return;
    const int64_t packs = lines.q.length / n;
    int width = group_width(std::min<int64_t>(packs, warp_size), threads);
    if (packs > int64_t{alone} * width)
      while (width < most_row_threads && packs > int64_t{together} * width) width *= 2;
    if (packs > int64_t{most_kept} * width) return;
    rows.width = width;
    kept = static_cast<int>(ceil_div(packs, width));
  }
  int block(int several) const { return rows.width > warp_size ? rows.width : several; }  // of several rows or of one
  // For all rows, but no more than so many multiprocessors hold that each have room for so many threads.
  int64_t blocks(int block, int64_t multiprocessors, int room) const {
    return std::min(ceil_div(rows.q.rows * rows.width, block), multiprocessors * (room / block));
  }
  // Calls run(a constant: kept).
  template <class F> void visit(F run) const {
    switch (kept) {
      case 1: return run(std::integral_constant<int, 1>());
      case 2: return run(std::integral_constant<int, 2>());
      case 3: return run(std::integral_constant<int, 3>());
      default: return run(std::integral_constant<int, most_kept>());
    }
  }
};
// Calls run(Type<V>) with what inputs first to last, a weight and the like, are read as: elements of T if they are, else the wide ones.
template <class T, class F> void visit_weights(const Call& c, size_t first, size_t last, F run) {
  bool narrow = true;
  for (size_t i = first; i <= last; ++i) narrow = narrow && (!c.has(i) || c.in[i].dtype() == dtype_of<T>);
  if (narrow) run(Type<T>());
  else run(Type<wide_t<T>>());
}

// Whether they took it.
template <class T> bool run_whole_row_norm(const Call& c, std::span<Tensor> out, const Lines& lines, T* y, const T* x) {
  using W = wide_t<T>;
  const WholeRows whole(lines, pack_size<T>, most_kept, most_kept);
  if (whole.kept == 0) return false;
  bool taken = false;
  visit_weights<T>(c, 1, 2, [&]<class V>(Type<V>) {
    const Vector weight(c, 1, dtype_of<V>), bias(c, 2, dtype_of<V>);
    const V *w = weight.data<V>(), *b = bias.data<V>();
    const int block = whole.block(4 * warp_size);
    whole.visit([&]<int kept>(std::integral_constant<int, kept>) {
      constexpr int room = norm_room<kept, T, V>;
      taken = aligned(w, 16) && aligned(b, 16) && block <= room;
      if (!taken) return;
      launch(c.op->name, whole_row_norm_kernel<kept, T, V>, whole.blocks(block, sm_count(), room), block, y, x, w, b,
             out.size() > 1 ? out[1].data<W>() : nullptr, whole.rows);
    });
  });
  return taken;
}
template <class T>
bool run_whole_row_norm_grad(const Call& c, std::span<Tensor> out, uint32_t wanted, const Lines& lines, T* dx, const T* g, const T* x,
                             const wide_t<T>* statistics) {
  using W = wide_t<T>;
  constexpr int alone = is_16bit<T> ? 4 : 2, together = 2;
  const WholeRows whole(lines, pack_size<T>, alone, together);
  if (whole.kept == 0 || whole.rows.width < warp_size || whole.rows.q.rows == 0) return false;
  bool taken = false;
  visit_weights<T>(c, 2, 2, [&]<class V>(Type<V>) {
    const Vector weight(c, 2, dtype_of<V>);
    const V* w = weight.data<V>();
    whole.visit([&]<int kept>(std::integral_constant<int, kept>) {
      constexpr int room = most_grad_threads<kept, T>;
      const int block = whole.block(room < most_row_threads ? room : 4 * warp_size);
      taken = aligned(w, 16) && block <= room;
      if (!taken) return;
      const int64_t blocks = whole.blocks(block, 132, room), length = lines.q.length;  // for 132 multiprocessors
      Scratch memory(wanted & 6u ? static_cast<size_t>(blocks * length) * sizeof(Pair<W>) : 0);
      auto* parts = wanted & 6u ? memory.as<Pair<W>>() : nullptr;
      launch("row_norm_grad", whole_row_norm_grad_kernel<kept, T, V>, blocks, block, dx, parts, g, x, w, statistics, whole.rows);
      if (!parts) return;
      const Products<T> f{gradient<T>(out[1], wanted & 2u), gradient<T>(out[2], wanted & 4u)};
      launch("row_norm_grad", merge_sums<Products<T>>, grid(ceil_div(length, 8)), threads, f, parts, length, blocks);
    });
  });
  return taken;
}

void run_row_norm(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<RowNormAttrs>();
  const Tensor input = c.in[0].contiguous();
  const NormRows q = norm_rows(a, input.shape());
  if (input.numel() == 0) return;
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    const T* x = input.data<T>();
    T* y = out[0].data<T>();
    const Lines rows = rows_of<T>(a, q, {x, y});
    if constexpr (!std::same_as<T, double>)
      if (run_whole_row_norm(c, out, rows, y, x)) return;
    const Vector weight(c, 1, dtype_of<W>), bias(c, 2, dtype_of<W>);
    launch_rows<pack_size<T>>(c.op->name, row_norm_kernel<most_kept, T, W>, row_norm_kernel<0, T, W>, rows, y, x, weight.data<W>(), bias.data<W>(),
                out.size() > 1 ? out[1].data<W>() : nullptr);
  });
}

void run_row_norm_grad(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<RowNormAttrs>();
  const Tensor upper = c.in[0].contiguous(), input = c.in[1].contiguous(), saved = c.in[3].contiguous();
  const NormRows q = norm_rows(a, input.shape());
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    const T *g = upper.data<T>(), *x = input.data<T>();
    const W* statistics = saved.data<W>();
    T* dx = a.wanted & 1u ? out[0].data<T>() : nullptr;
    const Lines rows = rows_of<T>(a, q, {g, x, dx});
    if constexpr (!std::same_as<T, double>)
      if (run_whole_row_norm_grad(c, out, a.wanted, rows, dx, g, x, statistics)) return;
    if (dx && input.numel() > 0) {
      const Vector weight(c, 2, dtype_of<W>);
      launch_rows<pack_size<T>>("row_norm_grad", row_norm_grad_kernel<most_kept, T, W>, row_norm_grad_kernel<0, T, W>, rows, dx, g, x, weight.data<W>(), statistics);
    }
    if (!(a.wanted & 6u)) return;
    const Planes p{q.rows / q.groups, q.features, q.inner};
    const RowProducts<T> f{{gradient<T>(out[1], a.wanted & 2u), gradient<T>(out[2], a.wanted & 4u)}, statistics, q.rows, q.groups,
                           Divisor(std::max<int64_t>(1, q.features / q.groups))};
    channel_sums("row_norm_grad", f, g, x, p);
  });
}

// ---- a sum and the norm of its rows, T and S the types of a branch and of the sum: whole packs that threads keep, or by parts

template <int kept> constexpr int resident_rows = kept > 3 ? 2 : 3;  // blocks of a multiprocessor
template <int kept, class T, class S, class W>
__global__ void __launch_bounds__(threads, resident_rows<kept>)
    add_row_norm_kernel(T* y, S* sum, const T* x, const S* z, const W* w, const W* b, W* statistics, const Lines rows) {
  wait_for_previous();
  using A = moment_t<S>;
  constexpr int n = pack_size<T>;
  struct Both {
    Pack<T, n> x;
    Pack<S, n> z;
  };
  auto added = [](T u, S v) { return to<S>(to<W>(u) + to<W>(v)); };
  const Group group(rows.width);
  for (int64_t base = group.first(); base < rows.q.rows; base += group.step()) {
    const int64_t row = base + group.number, at = row * rows.q.length;
    const int64_t length = row < rows.q.rows ? rows.q.length : 0;
    auto load = [&](int64_t i) { return Both{load_pack<n>(x + at + i), load_packs<n>(z + at + i)}; };
    auto mine = row_packs<kept>(load, int64_t{group.lane} * n, length, int64_t{rows.width} * n);
    const A pivot = length > 0 ? to<A>(added(x[at], z[at])) : A(0);
    Pair<A> total{0, 0};
    mine.each([&](int64_t i, Both& both) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        both.z.v[j] = added(both.x.v[j], both.z.v[j]);
        const A d = to<A>(both.z.v[j]) - pivot;
        total.a += d;
        total.b += d * d;
      }
      store_packs(sum + at + i, both.z);
    });
    total = group.combine(total, Pair<A>{0, 0}, Add());
    if (length == 0) continue;
    const RowMoments<A, W> m(total, pivot, A(1) / static_cast<A>(length), true, rows.eps);
    if (statistics && group.lane == 0) m.put(statistics, rows.q.rows, row);
    mine.each([&](int64_t i, Both& both) {
      Pack<W, n> factor, shift;
      if (w) factor = load_packs<n>(w + i);
      if (b) shift = load_packs<n>(b + i);
#pragma unroll
      for (int j = 0; j < n; ++j) {
        W r = m.normal(to<W>(both.z.v[j]));
        if (w) r *= factor.v[j];
        if (b) r += shift.v[j];
        both.x.v[j] = to<T>(r);
      }
      store_pack(y + at + i, both.x);
    });
  }
}

// The gradients of its branch and of what was added to it, and each block's part of those of weight and bias: a thread has the same
// places of every row of its group. As many blocks as sizes alone say.
constexpr int grad_threads = 4 * warp_size;
template <int kept, class T, class S, class W>
__global__ void __launch_bounds__(grad_threads, resident_rows<kept>)
    add_row_norm_grad_kernel(T* dx, S* dz, Pair<W>* parts, const T* g, const S* sum, const S* upper, const W* w, const W* statistics,
                             const Lines rows) {
  wait_for_previous();
  constexpr int n = pack_size<T>;
  const Group group(rows.width);
  const int64_t length = rows.q.length, first = int64_t{group.lane} * n, step = int64_t{rows.width} * n;
  // Calls f(k, where) for the packs of a thread; k is a constant.
  auto each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < kept; ++k)
      if (first + k * step < length) f(k, first + k * step);
  };
  Pair<W> products[kept][n];
#pragma unroll
  for (int k = 0; k < kept; ++k)
#pragma unroll
    for (int j = 0; j < n; ++j) products[k][j] = Pair<W>{0, 0};
  for (int64_t base = group.first(); base < rows.q.rows; base += group.step()) {
    const int64_t row = base + group.number, at = row * length;
    const bool here = row < rows.q.rows;  // past the end: nothing to do but combine()
    const Statistics<W> s(statistics, rows.q.rows, here ? row : 0);
    Pack<T, n> of_y[kept];
    Pack<S, n> x[kept], of_sum[kept];
    Pair<W> total{0, 0};
    if (here) {
      each([&](int k, int64_t i) {
        of_y[k] = load_pack<n>(g + at + i);
        x[k] = load_packs<n>(sum + at + i);
        if (upper) of_sum[k] = load_packs<n>(upper + at + i);
      });
      each([&](int k, int64_t i) {
        Pack<W, n> factor;
        if (w) factor = load_packs<n>(w + i);
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const W v = to<W>(of_y[k].v[j]), normal = s.normal(to<W>(x[k].v[j])), gw = w ? v * factor.v[j] : v;
          total.a += gw * normal;
          total.b += gw;
          products[k][j].a += v * normal;
          products[k][j].b += v;
        }
      });
    }
    total = group.combine(total, Pair<W>{0, 0}, Add());
    if (!here || (!dx && !dz)) continue;
    const W share = W(1) / static_cast<W>(length), mean = total.b * share, slope = total.a * share;
    each([&](int k, int64_t i) {
      Pack<W, n> factor;
      if (w) factor = load_packs<n>(w + i);
#pragma unroll
      for (int j = 0; j < n; ++j) {
        const W v = to<W>(of_y[k].v[j]), normal = s.normal(to<W>(x[k].v[j])), gw = w ? v * factor.v[j] : v;
        W d = (gw - (mean + normal * slope)) * s.rstd;
        if (upper) d += to<W>(of_sum[k].v[j]);
        x[k].v[j] = to<S>(d);
        of_y[k].v[j] = to<T>(d);
      }
      if (dz) store_packs(dz + at + i, x[k]);
      if (dx) store_pack(dx + at + i, of_y[k]);
    });
  }
  if (parts) put_products(parts, products, group, length, each);
}

// Calls run(Type<T>, Type<S>).
template <class F> void visit_branch(DType branch, DType sum, F run) {
  visit<floating_types>(branch, [&]<class T>(Type<T>) {
    if constexpr (is_16bit<T>)
      if (sum == DType::f32) return run(Type<T>(), Type<float>());
    run(Type<T>(), Type<T>());
  });
}
// Calls run(a constant: the packs of a row that a thread keeps).
template <class F> void visit_kept(const Lines& rows, int n, F run) {
  if (rows.q.length <= int64_t{3} * n * rows.width) run(std::integral_constant<int, 3>());
  else run(std::integral_constant<int, most_kept>());
}
template <class S> bool whole_packs(const Lines& rows, int n, std::initializer_list<const S*> operands) {
  bool packed = rows.packed && rows.q.length / n <= int64_t{most_kept} * rows.width;
  for (const S* t : operands) packed = packed && aligned(t, 16);
  return packed;
}

void run_add_layer_norm(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<RowNormAttrs>();
  const Tensor branch = c.in[0].contiguous(), stream = c.in[1].contiguous();
  const NormRows q = norm_rows(a, branch.shape());
  if (branch.numel() == 0) return;
  visit_branch(branch.dtype(), stream.dtype(), [&]<class T, class S>(Type<T>, Type<S>) {
    using W = wide_t<S>;
    const T* x = branch.data<T>();
    const S* z = stream.data<S>();
    T* y = out[0].data<T>();
    S* sum = out[1].data<S>();
    const Vector weight(c, 2, dtype_of<W>), bias(c, 3, dtype_of<W>);
    const W *w = weight.data<W>(), *b = bias.data<W>();
    const Lines rows = rows_of<T>(a, q, {x, y});
    if (!whole_packs<S>(rows, pack_size<T>, {z, sum}) || !aligned(w, 16) || !aligned(b, 16)) return add_layer_norm_by_parts(c, out);
    visit_kept(rows, pack_size<T>, [&]<int kept>(std::integral_constant<int, kept>) {
      auto kernel = add_row_norm_kernel<kept, T, S, W>;
      launch_rows<pack_size<T>>("add_layer_norm", kernel, kernel, rows, y, sum, x, z, w, b, out.size() > 2 ? out[2].data<W>() : nullptr);
    });
  });
}

void run_add_layer_norm_grad(const Call& c, std::span<Tensor> out) {
  const auto a = c.as<RowNormAttrs>();
  const Tensor of_y = c.in[0].contiguous(), of_sum = c.has(4) ? c.in[4].contiguous() : Tensor();
  const Tensor saved_sum = c.in[1].contiguous(), saved = c.in[3].contiguous();
  const NormRows q = norm_rows(a, saved_sum.shape());
  visit_branch(of_y.dtype(), saved_sum.dtype(), [&]<class T, class S>(Type<T>, Type<S>) {
    using W = wide_t<S>;
    constexpr int n = pack_size<T>;
    const T* g = of_y.data<T>();
    const S *sum = saved_sum.data<S>(), *upper = of_sum.defined() ? of_sum.data<S>() : nullptr;
    T* dx = a.wanted & 1u ? out[0].data<T>() : nullptr;
    S* dz = a.wanted & 8u ? out[3].data<S>() : nullptr;
    const Vector weight(c, 2, dtype_of<W>);
    const W* w = weight.data<W>();
    const Lines rows = rows_of<T>(a, q, {g, dx});
    const bool by_groups = rows.width >= warp_size && rows.width <= grad_threads && q.rows > 0;
    if (!by_groups || !whole_packs<S>(rows, n, {sum, upper, dz}) || !aligned(w, 16)) return add_layer_norm_grad_by_parts(c, out);
    visit_kept(rows, n, [&]<int kept>(std::integral_constant<int, kept>) {
      const int block = rows.width > warp_size ? rows.width : grad_threads;
      const int64_t most = int64_t{132} * resident_rows<kept> * (grad_threads / block);  // for 132 multiprocessors
      const int64_t blocks = std::min(ceil_div(q.rows * rows.width, block), most);
      Scratch memory(a.wanted & 6u ? static_cast<size_t>(blocks * q.length) * sizeof(Pair<W>) : 0);
      auto* parts = a.wanted & 6u ? memory.as<Pair<W>>() : nullptr;
      launch("add_layer_norm_grad", add_row_norm_grad_kernel<kept, T, S, W>, blocks, block, dx, dz, parts, g, sum, upper, w, saved.data<W>(), rows);
      if (!parts) return;
      const Products<S> f{gradient<S>(out[1], a.wanted & 2u), gradient<S>(out[2], a.wanted & 4u)};
      launch("add_layer_norm_grad", merge_sums<Products<S>>, grid(ceil_div(q.length, 8)), threads, f, parts, q.length, blocks);
    });
  });
}

}  // namespace

void fill_cuda_norm() {
  fill<run_row_norm>(op::layer_norm);
  fill<run_row_norm>(op::group_norm);
  fill<run_row_norm>(op::rms_norm);
  fill<run_row_norm_grad>(op::row_norm_grad);
  fill<run_add_layer_norm>(op::add_layer_norm);
  fill<run_add_layer_norm_grad>(op::add_layer_norm_grad);
}

}  // namespace halftone::cuda
