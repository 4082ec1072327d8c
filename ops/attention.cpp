// Attention: its derivative in public operators, in which other devices run what their kernels refuse, too; blocks of
// queries on the CPU.
#include "halftone/ops/attention.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "halftone/core/parallel.h"
#include "halftone/ops/all.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/gemm.h"
#include "halftone/ops/matmul.h"
#include "halftone/ops/random.h"
#include "halftone/ops/rearrange.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/shape.h"
#include "halftone/ops/softmax.h"
#include "halftone/ops/vector_math.h"

namespace halftone {
namespace {

DType wide(DType t) { return is_16bit_dtype(t) ? DType::f32 : t; }

// What attention reads; mask and key may be undefined.
struct Inputs { Tensor q, k, v, mask, key; };

// ---- in public operators: heads that share keys become rows of one product

Tensor wide_product(const Tensor& a, const Tensor& b) { return call(op::matmul, {a, b}, Attrs::of(MatmulAttrs{true})); }

struct Composed {
  const Inputs& in;
  AttentionAttrs a;
  Shape heads, groups;  // of weights: [b, h, t, s], and with the queries of a group together [b, g, rows, s]
  Tensor scores, unseen;  // unseen: which queries see nothing; undefined when all see something

  Composed(const Inputs& inputs, const AttentionAttrs& attrs) : in(inputs), a(attrs) {
    int64_t b = in.q.size(0), h = in.q.size(1), t = in.q.size(2), g = in.k.size(1), s = in.k.size(2);
    heads = {b, h, t, s};
    groups = {b, g, g == 0 ? 0 : h / g * t, s};
    scores = reshape(wide_product(grouped(in.q), in.k.t()), heads) * a.scale;
    const double none = -std::numeric_limits<double>::infinity();
    if (in.mask.defined()) scores = in.mask.dtype() == DType::b8 ? where(in.mask, scores, none) : scores + in.mask.to(scores.dtype());
    if (a.causal) scores = where(tril(full({t, s}, true, {.dtype = DType::b8, .device = in.q.device()})), scores, none);
    if (!in.mask.defined() || scores.numel() == 0) return;
    unseen = eq(reduce::apply<reduce::Amax>(scores.detach(), {8, true}), none);
    scores = where(unseen, 0, scores);
  }
  // [b, h, t, n] as [b, g, rows, n].
  Tensor grouped(const Tensor& x) const { return reshape(x, {groups[0], groups[1], groups[2], x.size(3)}); }
  Tensor seen(const Tensor& x) const { return unseen.defined() ? where(unseen, 0, x) : x; }
  Tensor weights() const { return seen(softmax(scores, 3)); }
  Tensor dropped(const Tensor& x) const { return in.key.defined() ? call(op::dropout, {x, in.key}, Attrs::of(DropoutAttrs{a.dropout, 1})) : x; }
  Tensor log_sum() const {
    if (scores.numel() == 0) return full({heads[0], heads[1], heads[2]}, -std::numeric_limits<double>::infinity(), scores.options());
    Tensor high = reduce::apply<reduce::Amax>(scores, {8, true});
    Tensor sums = high + log(reduce::apply<reduce::Sum>(exp(scores - high), {8, true}));
    return squeeze(unseen.defined() ? where(unseen, -std::numeric_limits<double>::infinity(), sums) : sums, 3);
  }
};

// What a forward left behind, so that its gradient takes no softmax: the result, and the log-sum-exps of scores. Undefined without.
struct Kept { Tensor y, lse; };

// The gradients of q, k, v and mask where need(i).
template <class F> Tensors composed_gradients(const Inputs& in, const AttentionAttrs& a, const Tensor& g, const Kept& kept, F need) {
  Composed c(in, a);
  DType t = in.q.dtype();
  Tensor p = kept.lse.defined() ? c.seen(exp(c.scores - unsqueeze(kept.lse, 3))) : c.weights(), grads = c.grouped(g.to(t));
  Tensors result(4);
  if (need(2)) result[2] = matmul(c.grouped(c.dropped(p).to(t)).t(), grads);
  if (!need(0) && !need(1) && !need(3)) return result;
  Tensor dp = c.dropped(reshape(wide_product(grads, in.v.t()), c.heads));
  // The mean of dp over the weights, which is g . y.
  DType w = p.dtype();
  Tensor mean = reduce::apply<reduce::Sum>(kept.y.defined() ? g.to(w) * kept.y.to(w) : dp * p, {8, true});
  Tensor ds = p * (dp - mean);
  Tensor dq = c.grouped((ds * a.scale).to(t));
  if (need(0)) result[0] = reshape(matmul(dq, in.k), in.q.shape());
  if (need(1)) result[1] = matmul(dq.t(), c.grouped(in.q));
  if (need(3)) result[3] = ds;
  return result;
}

Inputs inputs_of(const Call& c, size_t mask) {
  auto at = [&](size_t i) { return c.has(i) ? c.in[i] : Tensor(); };
  return {c.in[0], c.in[1], c.in[2], at(mask), at(mask + 1)};
}

// ---- blocks of queries

constexpr int64_t block = 64;

template <class T> struct Blocks {
  using C = accumulate_t<T>;
  const Inputs& in;
  AttentionAttrs a;
  int64_t b, h, t, d, g, s, e;
  uint64_t seed = 0, first = 0;

  Blocks(const Inputs& inputs, const AttentionAttrs& attrs)
      : in(inputs), a(attrs), b(in.q.size(0)), h(in.q.size(1)), t(in.q.size(2)), d(in.q.size(3)), g(in.k.size(1)), s(in.k.size(2)), e(in.v.size(3)) {
    if (!in.key.defined()) return;
    Tensor key = in.key.contiguous();
    seed = static_cast<uint64_t>(key.data<int64_t>()[0]);
    first = static_cast<uint64_t>(key.data<int64_t>()[1]);
  }

  // Rows from `row` on of one head's matrix.
  static MatrixView<T> matrix(const Tensor& x, int64_t batch, int64_t head, int64_t row = 0) {
    const Strides& st = x.strides();
    return {x.data<T>() + batch * st[0] + head * st[1] + row * st[2], st[2], st[3]};
  }
  static MatrixView<T> turned(MatrixView<T> m) { return {m.data, m.column_stride, m.row_stride}; }
  static std::vector<C> room(int64_t n) { return std::vector<C>(static_cast<size_t>(n)); }
  // The same elements as C, dense.
  static std::vector<C> widened(MatrixView<T> m, int64_t rows, int64_t columns) {
    std::vector<C> x = room(rows * columns);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) x[static_cast<size_t>(i * columns + j)] = C(compute_t<T>(m.data[i * m.row_stride + j * m.column_stride]));
    return x;
  }

  // How many keys the queries below `end` see.
  int64_t keys(int64_t end) const { return a.causal ? std::min(s, end) : s; }

  void add_mask(C* row, int64_t n, int64_t batch, int64_t head, int64_t i) const {
    const Strides& st = in.mask.strides();
    int64_t at = batch * st[0] + head * st[1] + i * st[2], step = st[3];
    if (in.mask.dtype() == DType::b8) {
      const bool* m = in.mask.data<bool>() + at;
      for (int64_t j = 0; j < n; ++j) if (!m[j * step]) row[j] = -std::numeric_limits<C>::infinity();
    } else
      visit<floating_types>(in.mask.dtype(), [&]<class M>(Type<M>) {
        const M* m = in.mask.data<M>() + at;
        for (int64_t j = 0; j < n; ++j) row[j] += static_cast<C>(compute_t<M>(m[j * step]));
      });
  }
  // scale q k^T + mask for queries [begin, end) and the first n keys.
  void scores(C* to, int64_t batch, int64_t head, int64_t begin, int64_t end, int64_t n) const {
    gemm<T, C>(matrix(in.q, batch, head, begin), turned(matrix(in.k, batch, head / (h / g))), to, end - begin, n, d);
    for (int64_t i = begin; i < end; ++i) {
      C* row = to + (i - begin) * n;
      for (int64_t j = 0; j < n; ++j) row[j] *= static_cast<C>(a.scale);
      if (in.mask.defined()) add_mask(row, n, batch, head, i);
      if (a.causal) std::fill(row + std::min(n, i + 1), row + n, -std::numeric_limits<C>::infinity());
    }
  }
  void drop(C* row, int64_t n, int64_t batch, int64_t head, int64_t i) const {
    if (!in.key.defined()) return;
    Dropout dropout(a.dropout);
    int64_t number = ((batch * h + head) * t + i) * s;
    Philox4 four{};
    for (int64_t j = 0; j < n; ++j, ++number) {
      if (j == 0 || number % 4 == 0) four = philox(seed, first + static_cast<uint64_t>(number / 4));
      row[j] = dropout(row[j], uniform01(four.v[number % 4]));
    }
  }

  // Of C, dense, into rows from `row` on of one head's matrix.
  static void write(const Tensor& y, const std::vector<C>& x, int64_t batch, int64_t head, int64_t row, int64_t rows) {
    const Strides& st = y.strides();
    T* to = y.data<T>() + batch * st[0] + head * st[1] + row * st[2];
    const int64_t columns = y.size(3);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) to[i * st[2] + j * st[3]] = T(x[static_cast<size_t>(i * columns + j)]);
  }

  // Queries [begin, end) of one head: their results, and log-sum-exps unless null.
  void forward(const Tensor& y, C* lse, int64_t batch, int64_t head, int64_t begin, int64_t end) const {
    int64_t rows = end - begin, n = keys(end);
    std::vector<C> p = room(rows * n), result = room(rows * e);
    scores(p.data(), batch, head, begin, end, n);
    for (int64_t i = 0; i < rows; ++i) {
      C* row = p.data() + i * n;
      const C least = reduce::Amax::start<C>();
      C high = row_max(n, [row](int64_t j) { return row[j]; }, least);
      bool seen = high != least || std::any_of(row, row + n, [](C v) { return v != v; });
      for (int64_t j = 0; j < n; ++j) row[j] = seen ? vector_exp(row[j] - high) : C(0);
      double total = row_sum(n, [row](int64_t j) { return row[j]; });
      if (lse) lse[i] = seen ? high + static_cast<C>(std::log(total)) : high;
      for (int64_t j = 0; j < n; ++j) row[j] = seen ? static_cast<C>(static_cast<double>(row[j]) / total) : C(0);
      drop(row, n, batch, head, begin + i);
    }
    std::vector<C> v = widened(matrix(in.v, batch, head / (h / g)), n, e);
    gemm<C, C>({p.data(), n, 1}, {v.data(), e, 1}, result.data(), rows, e, n);
    write(y, result, batch, head, begin, rows);
  }

  // All queries of one head of keys: gradients of q, k and v, and of the mask unless null.
  void backward(const Tensor& y, const Tensor& grad, const C* lse, std::span<Tensor> out, int64_t batch, int64_t group) const {
    const Tensor dmask = out.size() > 3 ? out[3] : Tensor();
    std::vector<C> k = widened(matrix(in.k, batch, group), s, d), v = widened(matrix(in.v, batch, group), s, e);
    std::vector<C> k_sum = room(s * d), v_sum = room(s * e), part = room(s * std::max(d, e));
    auto add = [&](std::vector<C>& sum, int64_t count) { for (int64_t i = 0; i < count; ++i) sum[static_cast<size_t>(i)] += part[static_cast<size_t>(i)]; };
    for (int64_t head = group * (h / g); head < (group + 1) * (h / g); ++head)
      for (int64_t begin = 0; begin < t; begin += block) {
        int64_t end = std::min(t, begin + block), rows = end - begin, n = keys(end), line = (batch * h + head) * t + begin;
        std::vector<C> q = widened(matrix(in.q, batch, head, begin), rows, d), go = widened(matrix(grad, batch, head, begin), rows, e);
        std::vector<C> result = widened(matrix(y, batch, head, begin), rows, e);
        std::vector<C> p = room(rows * n), pd, dp = room(rows * n), dq_block = room(rows * d);
        scores(p.data(), batch, head, begin, end, n);
        for (int64_t i = 0; i < rows; ++i) {
          C shift = lse[line + i];
          bool seen = shift != reduce::Amax::start<C>();
          for (int64_t j = 0; j < n; ++j) {
            C& x = p[static_cast<size_t>(i * n + j)];
            x = seen ? vector_exp(x - shift) : C(0);
          }
        }
        pd = p;
        gemm<C, C>({go.data(), e, 1}, {v.data(), 1, e}, dp.data(), rows, n, e);
        for (int64_t i = 0; i < rows; ++i) {
          C *weights = p.data() + i * n, *row = dp.data() + i * n;
          drop(pd.data() + i * n, n, batch, head, begin + i);
          drop(row, n, batch, head, begin + i);
          double total = 0;
          for (int64_t c = i * e; c < (i + 1) * e; ++c) total += go[static_cast<size_t>(c)] * result[static_cast<size_t>(c)];
          for (int64_t j = 0; j < n; ++j) row[j] = weights[j] * (row[j] - static_cast<C>(total));
          if (dmask.defined()) write_row(dmask, (line + i) * s, row, n);
          for (int64_t j = 0; j < n; ++j) row[j] *= static_cast<C>(a.scale);
        }
        gemm<C, C>({pd.data(), 1, n}, {go.data(), e, 1}, part.data(), n, e, rows);
        add(v_sum, n * e);
        gemm<C, C>({dp.data(), n, 1}, {k.data(), d, 1}, dq_block.data(), rows, d, n);
        write(out[0], dq_block, batch, head, begin, rows);
        gemm<C, C>({dp.data(), 1, n}, {q.data(), d, 1}, part.data(), n, d, rows);
        add(k_sum, n * d);
      }
    write(out[1], k_sum, batch, group, 0, s);
    write(out[2], v_sum, batch, group, 0, s);
  }
  void write_row(const Tensor& y, int64_t at, const C* row, int64_t n) const {
    visit<floating_types>(y.dtype(), [&]<class M>(Type<M>) {
      M* to = y.data<M>() + at;
      for (int64_t j = 0; j < n; ++j) to[j] = M(row[j]);
      std::fill(to + n, to + s, M(0.f));
    });
  }
};

void run_attention(const Call& c, std::span<Tensor> out) {
  Inputs in = inputs_of(c, 3);
  visit<floating_types>(in.q.dtype(), [&]<class T>(Type<T>) {
    Blocks<T> work(in, c.as<AttentionAttrs>());
    int64_t blocks = (work.t + block - 1) / block;
    parallel_for(work.b * work.h * blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t item = first; item < last; ++item) {
        int64_t head = item / blocks, begin = item % blocks * block, line = head * work.t + begin;
        work.forward(out[0], out.size() > 1 ? out[1].data<accumulate_t<T>>() + line : nullptr, head / work.h, head % work.h, begin,
                     std::min(work.t, begin + block));
      }
    });
  });
}

// in: q, k, v, result, gradient, log-sum-exp, mask, key.
void run_attention_grad(const Call& c, std::span<Tensor> out) {
  Inputs in = inputs_of(c, 6);
  Tensor lse = c.in[5].contiguous();
  visit<floating_types>(in.q.dtype(), [&]<class T>(Type<T>) {
    Blocks<T> work(in, c.as<AttentionAttrs>());
    parallel_for(work.b * work.g, 1, [&](int64_t first, int64_t last) {
      for (int64_t item = first; item < last; ++item)
        work.backward(c.in[3], c.in[4], lse.data<accumulate_t<T>>(), out, item / work.g, item % work.g);
    });
  });
}

// Memory for the gradients of q, k and v: where these are rows of one tensor, next to each other, so are their gradients, and the
// gradient of that tensor takes no copy. Empty when they are not.
Tensors packed_gradients(const Tensor& q, const Tensor& k, const Tensor& v) {
  const Meta &m = q.meta(), &n = k.meta(), &o = v.meta();
  const int64_t b = m.shape[0], t = m.shape[2], at_k = m.shape[1] * m.shape[3], at_v = at_k + n.shape[1] * n.shape[3], width = at_v + o.shape[1] * o.shape[3];
  bool same = q.storage() == k.storage() && q.storage() == v.storage() && n.shape[2] == t && n.offset == m.offset + at_k && o.offset == m.offset + at_v;
  for (const Meta* x : {&m, &n, &o})
    same = same && x->strides[0] == m.strides[0] && x->strides[2] == m.strides[2] && x->strides[3] == 1 && (x->shape[1] == 1 || x->strides[1] == x->shape[3]);
  bool dense = (m.strides[0] == t * width && m.strides[2] == width) || (m.strides[0] == width && m.strides[2] == b * width);
  if (!same || !dense || m.shape.numel() == 0 || o.shape.numel() == 0) return {};
  Tensor all = Tensor::empty(Meta({b * t * width}, m.dtype, m.device));
  return {all.as_strided(m.shape, m.strides, 0), all.as_strided(n.shape, n.strides, at_k), all.as_strided(o.shape, o.strides, at_v)};
}

// ---- shapes and samples

// The shape of the weights.
Shape check_inputs(const Call& c, size_t mask, const AttentionAttrs& a) {
  const Meta &q = c.in[0].meta(), &k = c.in[1].meta(), &v = c.in[2].meta();
  HT_CHECK(is_floating(q.dtype) && k.dtype == q.dtype && v.dtype == q.dtype, "attention: expected q, k and v of one floating dtype, got ", q.dtype, ", ",
           k.dtype, " and ", v.dtype, "; cast with to() or use amp::Autocast");
  bool fits = q.shape.rank() == 4 && k.shape.rank() == 4 && v.shape.rank() == 4;
  fits = fits && k.shape[0] == q.shape[0] && v.shape[0] == q.shape[0] && v.shape[1] == k.shape[1] && v.shape[2] == k.shape[2] && k.shape[3] == q.shape[3];
  HT_CHECK(fits, "attention: expected q [b, h, t, d], k [b, g, s, d] and v [b, g, s, e], got ", q, ", ", k, " and ", v);
  HT_CHECK(k.shape[1] > 0 && q.shape[1] % k.shape[1] == 0, "attention: ", q.shape[1], " heads of q cannot share ", k.shape[1], " of k");
  Shape weights{q.shape[0], q.shape[1], q.shape[2], k.shape[2]};
  if (c.has(mask)) {
    const Meta& m = c.in[mask].meta();
    HT_CHECK(m.shape == weights && (m.dtype == DType::b8 || is_floating(m.dtype)), "attention: expected a bool or floating mask ", weights, ", got ", m);
  }
  HT_CHECK(a.dropout >= 0 && a.dropout <= 1, "attention: expected dropout in [0, 1], got ", a.dropout);
  HT_CHECK(c.has(mask + 1) == (a.dropout > 0), "attention: expected a key [2] (i64) with dropout, and none without");
  return weights;
}

// A tensor of this shape whose batches, heads and rows lie in memory in the order of `like`'s: heads that were made by views of
// [b, t, h * d], or of [t, b, h * d], become one row again by views, too.
Meta laid_as(const Meta& like, const Shape& shape) {
  Meta m(shape, like.dtype, like.device);
  std::array<size_t, 3> order{0, 1, 2};
  for (size_t d : order) if (like.strides[d] == 0) return m;
  if (like.strides[3] != 1) return m;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return like.strides[a] > like.strides[b]; });
  int64_t step = shape[3];
  for (size_t i = order.size(); i-- > 0;) {
    m.strides[order[i]] = step;
    step *= std::max<int64_t>(1, shape[order[i]]);
  }
  return m;
}

std::vector<Sample> attention_samples(bool grad) {
  std::vector<Sample> all;
  enum class Mask { none, boolean, added };
  auto add = [&](Shape q, Shape k, int64_t e, Mask mask, bool causal = false, double dropout = 0, double scale = .5) {
    Shape v = k, y = q, lse = q, weights = q;
    v[3] = y[3] = e;
    lse.erase(3);
    weights[3] = k[2];
    Sample s{{{.shape = q}, {.shape = k}, {.shape = v}}, Attrs::of(AttentionAttrs{scale, dropout, causal, grad && mask == Mask::added})};
    if (grad) {
      s.in.push_back({.shape = y});
      s.in.push_back({.shape = y});
      s.in.push_back({.shape = lse, .low = 3, .high = 5, .wide = true});
    }
    SampleInput m{.shape = weights, .present = mask != Mask::none};
    if (mask == Mask::boolean) m = {.shape = weights, .low = 0, .high = 2, .dtype = DType::b8, .differentiable = false};
    s.in.push_back(m);
    s.in.push_back({.shape = {2}, .low = 1, .high = 100, .dtype = DType::i64, .differentiable = false, .present = dropout > 0});
    all.push_back(s);
  };
  add({1, 1, 1, 1}, {1, 1, 1, 1}, 1, Mask::none);
  add({2, 2, 3, 4}, {2, 2, 3, 4}, 4, Mask::none, true);
  add({1, 4, 5, 3}, {1, 2, 7, 3}, 2, Mask::none);
  add({2, 3, 4, 2}, {2, 1, 3, 2}, 3, Mask::added);
  add({1, 2, 7, 3}, {1, 2, 5, 3}, 3, Mask::boolean, false, 0, 1);
  add({1, 2, 6, 4}, {1, 2, 6, 4}, 4, Mask::none, true, .3);
  add({1, 1, 70, 8}, {1, 1, 33, 8}, 7, Mask::added, true, .25, .3);
  add({1, 2, 3, 33}, {1, 2, 257, 33}, 5, Mask::none, false, 0, .1);
  add({2, 2, 0, 3}, {2, 2, 4, 3}, 3, Mask::none);
  add({1, 1, 130, 4}, {1, 1, 130, 4}, 4, Mask::none, true);
  return all;
}

}  // namespace

void attention_composed(const Call& c, std::span<Tensor> out) {
  Inputs in = inputs_of(c, 3);
  Composed a(in, c.as<AttentionAttrs>());
  Tensor p = a.dropped(a.weights()).to(in.q.dtype());
  call_all(op::copy, {out[0], reshape(matmul(a.grouped(p), in.v), out[0].shape())});
  if (out.size() > 1) call_all(op::copy, {out[1], a.log_sum()});
}

void attention_grad_composed(const Call& c, std::span<Tensor> out) {
  Inputs in = inputs_of(c, 6);
  Tensors grads = composed_gradients(in, c.as<AttentionAttrs>(), c.in[4], {c.in[3], c.in[5]}, [&](size_t i) { return i < out.size(); });
  for (size_t i = 0; i < out.size(); ++i) call_all(op::copy, {out[i], grads[i]});
}

namespace op {

constinit OpDef attention = {
    .name = "attention", .doc = "softmax(scale q k^T + mask) v, heads of q sharing those of k and v", .cast = Cast::lower,
    .infer = [](const Call& c) -> Metas {
      const Meta& q = c.in[0].meta();
      Shape rows = check_inputs(c, 3, c.as<AttentionAttrs>()), y = rows;
      rows.erase(3);
      y[3] = c.in[2].size(3);
      return {laid_as(q, y), Meta(rows, wide(q.dtype), q.device)};
    },
    .aux = 1,
    .saves = {.in = 31, .out = 3},
    .backward = [](const Rule& r) -> Tensors {
      Inputs in{r.in(0), r.in(1), r.in(2), r.size() > 3 ? r.in(3) : Tensor(), r.size() > 4 ? r.in(4) : Tensor()};
      Tensors grads = composed_gradients(in, r.as<AttentionAttrs>(), r.grad(), {}, [&](size_t i) { return i < r.size() && r.needs(i); });
      grads.resize(r.size());
      return grads;
    },
    .fused_backward = [](const Rule& r) -> Tensors {
      auto a = r.as<AttentionAttrs>();
      a.mask_gradient = r.size() > 3 && r.needs(3);
      Tensors in{r.in(0), r.in(1), r.in(2), r.out(0), r.grad(), r.out(1)};
      for (size_t i = 3; i < r.size(); ++i) in.push_back(r.in(i));
      Call c{.op = &op::attention_grad, .in = in, .attrs = Attrs::of(a), .out = {}};
      if (!a.mask_gradient) c.out = packed_gradients(r.in(0), r.in(1), r.in(2));
      Tensors grads = dispatch(c);
      grads.resize(r.size());
      for (size_t i = 0; i < grads.size(); ++i) if (!r.needs(i)) grads[i] = {};
      return grads;
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return attention_samples(false); },
    .kernel = {run_attention, attention_composed}};

constinit OpDef attention_grad = {
    .name = "attention_grad", .doc = "the gradients of attention over q, k, v and an added mask, from its result and log-sum-exps", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      auto a = c.as<AttentionAttrs>();
      Shape rows = check_inputs(c, 6, a), y = rows;
      rows.erase(3);
      y[3] = c.in[2].size(3);
      const Meta &q = c.in[0].meta(), &lse = c.in[5].meta();
      for (size_t i : {3, 4})
        HT_CHECK(c.in[i].shape() == y && c.in[i].dtype() == q.dtype, "attention_grad: expected a ", i == 3 ? "result " : "gradient ", y, " (", q.dtype,
                 "), got ", c.in[i].meta());
      HT_CHECK(lse.shape == rows && lse.dtype == wide(q.dtype), "attention_grad: expected log-sum-exps ", rows, " (", wide(q.dtype), "), got ", lse);
      Metas m;
      for (size_t i = 0; i < 3; ++i) m.push_back(laid_as(c.in[i].meta(), c.in[i].shape()));
      HT_CHECK(!a.mask_gradient || (c.has(6) && is_floating(c.in[6].dtype())), "attention_grad: only a floating mask has a gradient");
      if (a.mask_gradient) m.push_back(Meta(c.in[6].shape(), c.in[6].dtype(), q.device));
      return m;
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return attention_samples(true); },
    .kernel = {run_attention_grad, attention_grad_composed}};

}  // namespace op

std::span<OpDef* const> attention_ops() {
  static constexpr OpDef* all[] = {&op::attention, &op::attention_grad};
  return all;
}

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, AttentionOptions o) {
  constexpr auto who = "attention";
  HT_CHECK(q.defined() && k.defined() && v.defined(), who, ": q, k or v is undefined");
  if (q.rank() == 3 && k.rank() == 3 && v.rank() == 3) {
    Tensor m = mask.defined() && mask.rank() == 3 ? unsqueeze(mask, 1) : mask;
    return squeeze(scaled_dot_product_attention(unsqueeze(q, 1), unsqueeze(k, 1), unsqueeze(v, 1), m, o), 1);
  }
  HT_CHECK(q.rank() == 4 && k.rank() == 4 && v.rank() == 4, who, ": expected q [b, h, t, d], k [b, g, s, d] and v [b, g, s, e], got ", q.meta(), ", ", k.meta(),
           " and ", v.meta());
  HT_CHECK(o.dropout >= 0 && o.dropout <= 1, who, ": expected dropout in [0, 1], got ", o.dropout);
  Shape weights{q.size(0), q.size(1), q.size(2), k.size(2)};
  Tensor m = mask;
  if (mask.defined() && mask.shape() != weights) {
    HT_CHECK(broadcast(who, mask.shape(), weights) == weights, who, ": cannot broadcast mask ", mask.meta(), " to ", weights);
    m = expand(mask, weights);
  }
  Tensors in{q, k, v};
  if (m.defined() || o.dropout > 0) in.push_back(m);
  if (o.dropout > 0) in.push_back(draw_key(q.device(), weights.numel()));
  double scale = o.scale.value_or(q.size(3) == 0 ? 1 : 1 / std::sqrt(static_cast<double>(q.size(3))));
  return call(op::attention, std::move(in), Attrs::of(AttentionAttrs{scale, o.dropout, o.causal}));
}

}  // namespace halftone
