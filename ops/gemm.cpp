// Matrix products, on one thread per block of the result.
#include "halftone/ops/gemm.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <memory>

#include "halftone/core/packed.h"
#include "halftone/core/parallel.h"
#include "halftone/core/storage.h"

namespace halftone {
namespace {

using Stride = Eigen::OuterStride<>;
template <class C, int order> using Matrix = Eigen::Map<const Eigen::Matrix<C, Eigen::Dynamic, Eigen::Dynamic, order>, Eigen::Unaligned, Stride>;
template <class C> using Result = Eigen::Map<Eigen::Matrix<C, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>, Eigen::Unaligned, Stride>;

enum class Order { any, rows, columns, spaced };
// What lies `spaced` has its rows so far apart: without gaps, but that rows a multiple of 2 KiB apart would fall on the same lines of
// the cache (half the speed was measured).
int64_t spacing(int64_t columns) { return columns % 512 == 0 ? columns + 16 : columns; }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"  // a vector's alignment, of which a template's argument knows nothing
// to[r][c] = from[c][r] for a tile, a square of vectors at a time. Numbers of 16 bits are moved as the one such type that Eigen has
// vectors of everywhere.
constexpr int64_t tile = 16;
template <class C> void transpose_tile(const C* from, int64_t from_pitch, C* to, int64_t to_pitch) {
  using namespace Eigen::internal;
  using Bits = std::conditional_t<sizeof(C) == 2, Eigen::bfloat16, C>;
  using Vector = typename packet_traits<Bits>::type;
  constexpr int n = unpacket_traits<Vector>::size;
  auto *in = reinterpret_cast<const Bits*>(from);
  auto *out = reinterpret_cast<Bits*>(to);
  for (int64_t c = 0; c < tile; c += n)
    for (int64_t r = 0; r < tile; r += n) {
      PacketBlock<Vector, n> square;
      for (int i = 0; i < n; ++i) square.packet[i] = ploadu<Vector>(in + (c + i) * from_pitch + r);
      ptranspose(square);
      for (int i = 0; i < n; ++i) pstoreu(out + (r + i) * to_pitch + c, square.packet[i]);
    }
}
#pragma GCC diagnostic pop

// A matrix with a stride of 1. Others, those of another type, and those not in the wanted order are copied.
template <class C> class Operand {
 public:
  std::shared_ptr<Storage> copy;  // of memory that is kept: the system's would be cleared first
  const C* data;
  int64_t outer;
  bool row_major;

  template <class T> Operand(MatrixView<T> v, int64_t rows, int64_t columns, Order wanted) {
    bool by_rows = v.column_stride == 1 && (wanted == Order::spaced ? v.row_stride == spacing(columns) : v.row_stride >= columns);
    bool by_columns = v.row_stride == 1 && v.column_stride >= rows;
    row_major = wanted == Order::rows || wanted == Order::spaced || (wanted == Order::any && (by_rows || !by_columns));
    if constexpr (std::same_as<T, C>) {
      if (row_major ? by_rows : by_columns) {
        data = v.data;
        outer = row_major ? v.row_stride : v.column_stride;
        return;
      }
    }
    int64_t outer_n = row_major ? rows : columns, inner_n = row_major ? columns : rows;
    int64_t outer_step = row_major ? v.row_stride : v.column_stride, inner_step = row_major ? v.column_stride : v.row_stride;
    outer = wanted == Order::spaced ? spacing(inner_n) : inner_n;
    auto make = [&] { return copied(v.data, outer_n, inner_n, outer_step, inner_step, outer); };
    if (v.lasting) {
      const auto at = static_cast<int64_t>(reinterpret_cast<const char*>(v.data) - static_cast<const char*>(v.lasting->data()));
      copy = Packed::get(*v.lasting, {static_cast<int64_t>(dtype_of<T>), static_cast<int64_t>(dtype_of<C>), at, outer_n, inner_n, outer_step, inner_step, outer}, make);
    } else {
      copy = make();
    }
    data = static_cast<const C*>(copy->data());
  }

  MatrixView<C> part(int64_t row, int64_t column) const {
    return {data + (row_major ? row * outer + column : column * outer + row), row_major ? outer : 1, row_major ? 1 : outer};
  }

 private:
  // Rows of inner_n elements, `outer` apart, from elements that lie so far apart.
  template <class T> static std::shared_ptr<Storage> copied(const T* source, int64_t outer_n, int64_t inner_n, int64_t outer_step, int64_t inner_step, int64_t outer) {
    auto room = Storage::allocate(outer_n * outer * static_cast<int64_t>(sizeof(C)), Device::cpu());
    C* const all = static_cast<C*>(room->data());
    auto move = [&](int64_t i, int64_t j, int64_t in, int64_t jn) {
      C* to = all + i * outer + j;
      const T* from = source + i * outer_step + j * inner_step;
      if (inner_step == 1) {
        for (int64_t r = 0; r < in; ++r) {
          if constexpr (std::same_as<T, C>) std::copy_n(from + r * outer_step, jn, to + r * outer);
          else for (int64_t c = 0; c < jn; ++c) to[r * outer + c] = C(from[r * outer_step + c]);
        }
      } else if (outer_step == 1 && in == tile && jn == tile) {
        if constexpr (std::same_as<T, C>) return transpose_tile(from, inner_step, to, outer);
        for (int64_t c = 0; c < tile; ++c)
          for (int64_t r = 0; r < tile; ++r) to[r * outer + c] = C(from[c * inner_step + r]);
      } else {
        for (int64_t r = 0; r < in; ++r)
          for (int64_t c = 0; c < jn; ++c) to[r * outer + c] = C(from[r * outer_step + c * inner_step]);
      }
    };
    // A transpose in tiles, so that it reads and writes whole lines of the cache, and these by squares, so that it is on few pages at a time.
    constexpr int64_t square = 8 * tile;
    const bool turned = inner_step != 1;
    const int64_t rows_of_grain = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(inner_n, 1) / tile) * tile;
    const int64_t height = turned ? square : rows_of_grain, width = turned ? square : inner_n;
    const int64_t across = width > 0 ? (inner_n + width - 1) / width : 0, step = turned ? tile : width;
    parallel_for((outer_n + height - 1) / height * across, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const int64_t top = b / across * height, bottom = std::min(outer_n, top + height);
        const int64_t left = b % across * width, right = std::min(inner_n, left + width);
        for (int64_t i = top; i < bottom; i += tile)
          for (int64_t j = left; j < right; j += step) move(i, j, std::min(tile, bottom - i), std::min(step, right - j));
      }
    });
    return room;
  }
};

template <class C, int a_order, int b_order> void by_eigen(const Operand<C>& a, const Operand<C>& b, C* y, int64_t m, int64_t n, int64_t k, const Block& at) {
  Matrix<C, a_order> am(a.data, m, k, Stride(a.outer));
  Matrix<C, b_order> bm(b.data, k, n, Stride(b.outer));
  Result<C> ym(y, at.rows, at.columns, Stride(at.pitch));
  ym.noalias() = am.middleRows(at.row, at.rows) * bm.middleCols(at.column, at.columns);
}

template <class C> BlockProduct<C> library_product() {
  if constexpr (std::same_as<C, float>) return block_products().f32;
  else if constexpr (std::same_as<C, bfloat16>) return block_products().bf16;
  else if constexpr (std::same_as<C, half>) return block_products().f16;
  else return nullptr;
}

// A side of n cut into about as many pieces as wanted, none of them of fewer than `least` but the last; their sizes are multiples of 16, and not
// 16 above a multiple of `unrolled`.
struct Cut {
  int64_t size, pieces;
  Cut(int64_t n, int64_t wanted, int64_t least, int64_t unrolled = 1) {
    pieces = std::clamp<int64_t>(n / least, 1, std::max<int64_t>(wanted, 1));
    size = ((n + pieces - 1) / pieces + 15) / 16 * 16;
    while (size < n && ((n % size > 0 && n % size < tiny) || size % unrolled == 16)) size += 16;
    pieces = (n + size - 1) / size;
  }
  // Eigen adds up vectors and tiny products in an order that depends on the operands' layout: no block is left with so little.
  static constexpr int64_t tiny = 20;
};

// With elements of E that are multiplied as they are.
template <class E, class T, class Y> void in_blocks(MatrixView<T> a_view, MatrixView<T> b_view, Y* y, int64_t m, int64_t n, int64_t k, Finish<Y> finish) {
  // Vectors and tiny products get one layout, and so does what a library multiplies, which adds up in an order of the layout, too:
  // a product's bits depend on its values only.
  bool one_layout = m == 1 || n == 1 || m + n + k < Cut::tiny;
  BlockProduct<E> product = one_layout && std::same_as<E, Y> ? nullptr : library_product<E>();
  Order of_a = product ? Order::spaced : one_layout ? Order::rows : Order::any, of_b = product ? Order::spaced : one_layout ? Order::columns : Order::any;
  Operand<E> a(a_view, m, k, of_a), b(b_view, k, n, of_b);
  constexpr int64_t work = 1 << 21, most = 32;  // multiply-adds that pay for a block
  // Squares are read least often. oneDNN's loops take 48 columns at a time, and 16 that are left over at a low rate: 64 columns at nine
  // tenths of it, so that small blocks are wider than high.
  constexpr int64_t least_columns = 128, least_rows = 32, unrolled = 48;
  const int64_t blocks = std::min(most, m * n / 64 * k / (work / 64));
  const double across = std::sqrt(static_cast<double>(blocks) * static_cast<double>(n) / static_cast<double>(m));
  const Cut columns(n, std::min(blocks, static_cast<int64_t>(across)), least_columns, unrolled), rows(m, blocks / columns.pieces, least_rows);
  parallel_for(rows.pieces * columns.pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Block at{i / columns.pieces * rows.size, i % columns.pieces * columns.size, 0, 0, n};
      at.rows = std::min(rows.size, m - at.row);
      at.columns = std::min(columns.size, n - at.column);
      std::unique_ptr<Y[]> own;
      if (!y) {
        at.pitch = at.columns;
        own = std::make_unique_for_overwrite<Y[]>(static_cast<size_t>(at.rows * at.columns));
      }
      Y* to = y ? y + at.row * n + at.column : own.get();
      if (k == 0) {
        for (int64_t r = 0; r < at.rows; ++r) std::fill_n(to + r * at.pitch, at.columns, Y(0));
      } else if (product) {
        if constexpr (std::same_as<Y, float>) product(a.part(at.row, 0), b.part(0, at.column), to, at.pitch, at.rows, at.columns, k);
      } else if constexpr (std::same_as<E, Y>) {
        auto* run = a.row_major ? (b.row_major ? by_eigen<E, Eigen::RowMajor, Eigen::RowMajor> : by_eigen<E, Eigen::RowMajor, Eigen::ColMajor>)
                                : (b.row_major ? by_eigen<E, Eigen::ColMajor, Eigen::RowMajor> : by_eigen<E, Eigen::ColMajor, Eigen::ColMajor>);
        run(a, b, to, m, n, k, at);
      }
      if (finish.run) finish.run(finish.f, to, at);
    }
  });
}

}  // namespace

BlockProducts& block_products() {
  static BlockProducts products;
  return products;
}

template <class T, class Y> void gemm(MatrixView<T> a, MatrixView<T> b, Y* y, int64_t m, int64_t n, int64_t k, Finish<Y> finish) {
  if (m == 0 || n == 0) return;
  constexpr int64_t pays = 1 << 12;  // below, the units for 16 bits do not
  if constexpr (!std::same_as<T, Y>)
    if (library_product<T>() && m * n >= pays / std::max<int64_t>(k, 1)) return in_blocks<T>(a, b, y, m, n, k, finish);
  in_blocks<Y>(a, b, y, m, n, k, finish);
}

template void gemm(MatrixView<half>, MatrixView<half>, float*, int64_t, int64_t, int64_t, Finish<float>);
template void gemm(MatrixView<bfloat16>, MatrixView<bfloat16>, float*, int64_t, int64_t, int64_t, Finish<float>);
template void gemm(MatrixView<float>, MatrixView<float>, float*, int64_t, int64_t, int64_t, Finish<float>);
template void gemm(MatrixView<double>, MatrixView<double>, double*, int64_t, int64_t, int64_t, Finish<double>);

}  // namespace halftone
