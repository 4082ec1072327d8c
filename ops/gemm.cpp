// Matrix products by Eigen, on one thread per block of the result.
#include "halftone/ops/gemm.h"

#include <Eigen/Core>
#include <vector>

#include "halftone/core/dtype.h"
#include "halftone/core/parallel.h"

namespace halftone {
namespace {

using Stride = Eigen::OuterStride<>;
template <class C, int order> using Matrix = Eigen::Map<const Eigen::Matrix<C, Eigen::Dynamic, Eigen::Dynamic, order>, Eigen::Unaligned, Stride>;
template <class C> using Result = Eigen::Map<Eigen::Matrix<C, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>, Eigen::Unaligned, Stride>;

enum class Order { any, rows, columns };

// A matrix that Eigen can read as it is: one of its strides is 1. Others, 16-bit ones, and those not in the wanted order are
// copied.
template <class C> struct Operand {
  std::vector<C> copy;
  const C* data;
  int64_t outer;
  bool row_major;

  template <class T> Operand(MatrixView<T> v, int64_t rows, int64_t columns, Order wanted) {
    bool by_rows = v.column_stride == 1 && v.row_stride >= columns, by_columns = v.row_stride == 1 && v.column_stride >= rows;
    row_major = wanted == Order::rows || (wanted == Order::any && (by_rows || !by_columns));
    if constexpr (std::same_as<T, C>) {
      if (row_major ? by_rows : by_columns) {
        data = v.data;
        outer = row_major ? v.row_stride : v.column_stride;
        return;
      }
    }
    int64_t outer_n = row_major ? rows : columns, inner_n = row_major ? columns : rows;
    int64_t outer_step = row_major ? v.row_stride : v.column_stride, inner_step = row_major ? v.column_stride : v.row_stride;
    copy.resize(static_cast<size_t>(rows * columns));
    parallel_for(outer_n, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(inner_n, 1)), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        for (int64_t j = 0; j < inner_n; ++j) copy[static_cast<size_t>(i * inner_n + j)] = C(v.data[i * outer_step + j * inner_step]);
    });
    data = copy.data();
    outer = inner_n;
  }
};

template <class C, int a_order, int b_order>
void multiply(const Operand<C>& a, const Operand<C>& b, C* y, int64_t m, int64_t n, int64_t k, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  Matrix<C, a_order> am(a.data, m, k, Stride(a.outer));
  Matrix<C, b_order> bm(b.data, k, n, Stride(b.outer));
  Result<C> ym(y + row * n + column, rows, columns, Stride(n));
  ym.noalias() = am.middleRows(row, rows) * bm.middleCols(column, columns);
}

// Sizes of the blocks of the result: enough of them to share, none too small to pay.
int64_t block(int64_t n, int64_t other, int64_t k) {
  constexpr int64_t work = 1 << 21;  // multiply-adds
  int64_t size = std::max<int64_t>(64, work / std::max<int64_t>(1, other * k));
  int64_t blocks = std::clamp<int64_t>(n / size, 1, 8);
  return ((n + blocks - 1) / blocks + 15) / 16 * 16;
}

}  // namespace

template <class T, class Y> void gemm(MatrixView<T> a_view, MatrixView<T> b_view, Y* y, int64_t m, int64_t n, int64_t k) {
  using C = Y;
  if (m == 0 || n == 0) return;
  if (k == 0) {
    std::fill(y, y + m * n, C(0));
    return;
  }
  // Eigen adds up vectors and tiny products in an order that depends on the operands' layout: those get one layout, and no
  // block is left with so little, so that a product's bits depend on its values only.
  constexpr int64_t tiny = 20;
  bool one_layout = m == 1 || n == 1 || m + n + k < tiny;
  Operand<C> a(a_view, m, k, one_layout ? Order::rows : Order::any), b(b_view, k, n, one_layout ? Order::columns : Order::any);
  bool by_rows = m >= n;
  int64_t size = by_rows ? block(m, n, k) : block(n, m, k), extent = by_rows ? m : n;
  while (extent % size > 0 && extent % size < tiny && size < extent) size += 16;
  auto* run = a.row_major ? (b.row_major ? multiply<C, Eigen::RowMajor, Eigen::RowMajor> : multiply<C, Eigen::RowMajor, Eigen::ColMajor>)
                          : (b.row_major ? multiply<C, Eigen::ColMajor, Eigen::RowMajor> : multiply<C, Eigen::ColMajor, Eigen::ColMajor>);
  parallel_for(extent, size, [&](int64_t begin, int64_t end) {
    if (by_rows) run(a, b, y, m, n, k, begin, end - begin, 0, n);
    else run(a, b, y, m, n, k, 0, m, begin, end - begin);
  });
}

template void gemm(MatrixView<half>, MatrixView<half>, float*, int64_t, int64_t, int64_t);
template void gemm(MatrixView<bfloat16>, MatrixView<bfloat16>, float*, int64_t, int64_t, int64_t);
template void gemm(MatrixView<float>, MatrixView<float>, float*, int64_t, int64_t, int64_t);
template void gemm(MatrixView<double>, MatrixView<double>, double*, int64_t, int64_t, int64_t);

}  // namespace halftone
