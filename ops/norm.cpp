// Normalisation: shapes, derivatives, CPU kernels.
#include "halftone/ops/norm.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "halftone/ops/all.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/shape.h"
#include "halftone/ops/unary.h"
#include "halftone/ops/vector_math.h"

namespace halftone {
namespace {

DType wide(DType t) { return is_16bit_dtype(t) ? DType::f32 : t; }
template <class T> using wide_t = std::conditional_t<std::same_as<T, double>, double, float>;

// ---- kernels

struct Statistics { double mean = 0, rstd = 0; };

// (x - mean) * factor for elements of T, in f64; of 16 bits in f32, less the mean in two parts, which errs by far less than they do, and
// of their halves, whose difference is finite.
template <class T> struct Centred {
  static constexpr bool narrow = is_16bit<T>;
  using E = std::conditional_t<narrow, float, double>;
  static constexpr double part = narrow ? 0.5 : 1;
  E mean, rest, factor;
  Centred(double m, double f) : mean(static_cast<E>(m * part)), rest(static_cast<E>(m * part - static_cast<double>(mean))), factor(static_cast<E>(f / part)) {}
  static E value(T x) { return static_cast<E>(static_cast<compute_t<T>>(x)); }
  E operator()(T x) const {
    if constexpr (narrow) return ((value(x) * static_cast<E>(part) - mean) - rest) * factor;
    else return (value(x) - mean) * factor;
  }
};

// Column k of an operator's statistics.
template <class W> void put(W* to, int64_t count, int64_t k, Statistics s) {
  to[k] = static_cast<W>(s.mean);
  to[count + k] = static_cast<W>(s.mean - static_cast<double>(to[k]));
  to[2 * count + k] = static_cast<W>(s.rstd);
}
template <class W> Statistics get(const W* from, int64_t count, int64_t k) {
  return {static_cast<double>(from[k]) + static_cast<double>(from[count + k]), static_cast<double>(from[2 * count + k])};
}

// A weight or bias in the dtype that a kernel computes in; null when there is none.
struct Vector {
  Tensor tensor;
  Vector(const Call& c, size_t i, DType t) : tensor(c.has(i) ? cast(c.in[i], t).contiguous() : Tensor()) {}
  template <class W> const W* data() const { return tensor.defined() ? tensor.data<W>() : nullptr; }
};

template <class T> double as_double(T v) { return static_cast<double>(compute_t<T>(v)); }

// Mean and variance of the runs of elements that each(f) calls f(first, n) with, twice; the second pass corrects the mean, too.
struct Moments { double mean = 0, var = 0; };
template <class Each> Moments moments(int64_t n, Each each) {
  double count = static_cast<double>(n);
  Sums<1> sum;
  each([&](const auto* x, int64_t m) { sum.add(m, [x](int64_t i) { return std::array{as_double(x[i])}; }); });
  double mean = sum.total(0) / count;
  Sums<2> about;
  each([&](const auto* x, int64_t m) {
    about.add(m, [x, mean](int64_t i) {
      double d = as_double(x[i]) - mean;
      return std::array{d, d * d};
    });
  });
  double rest = about.total(0) / count;
  return {mean + rest, std::max(about.total(1) / count - rest * rest, 0.0)};
}

// Calls f(the arrays, m) for arrays of n elements, of 16 bits after a block of them has been widened: left to the loops that add them up, the
// compiler would widen them one by one. Blocks are whole lanes of Sums.
template <class T, size_t arrays, class F> void widened(const std::array<const T*, arrays>& x, int64_t n, F f) {
  using C = compute_t<T>;
  if constexpr (std::same_as<C, T>) f(x, n);
  else {
    constexpr int64_t block = 256;
    static_assert(block % Sums<1>::lanes == 0);
    C wide[arrays][block];
    std::array<const C*, arrays> all;
    for (size_t k = 0; k < arrays; ++k) all[k] = wide[k];
    for (int64_t first = 0; first < n; first += block) {
      const int64_t m = std::min(block, n - first);
      for (size_t k = 0; k < arrays; ++k)
        for (int64_t j = 0; j < m; ++j) wide[k][j] = static_cast<C>(x[k][first + j]);
      f(all, m);
    }
  }
}

// Calls f(index of the first) for the planes of one channel.
template <class F> void each_of_channel(const Planes& p, int64_t channel, F f) {
  for (int64_t n = 0; n < p.n; ++n) f((n * p.c + channel) * p.inner);
}
int64_t grain_for(int64_t elements) { return std::max<int64_t>(1, parallel_grain / std::max<int64_t>(elements, 1)); }

template <class W> void move_running(const Call& c, int64_t channel, Moments m, int64_t n, double momentum) {
  if (!std::isfinite(m.mean) || !std::isfinite(m.var)) return;
  double values[] = {m.mean, m.var * static_cast<double>(n) / static_cast<double>(n - 1)};
  for (size_t k = 0; k < 2; ++k) {
    W& running = c.in[3 + k].data<W>()[channel * c.in[3 + k].strides()[0]];
    running = static_cast<W>((1 - momentum) * static_cast<double>(running) + momentum * values[k]);
  }
}

bool by_batch(const Call& c) { return c.as<BatchNormAttrs>().training || !c.has(3); }

template <bool with_relu> void run_batch_norm(const Call& c, std::span<Tensor> out) {
  auto a = c.as<BatchNormAttrs>();
  Planes p = norm_planes(out[0].shape());
  Tensor input = c.in[0].contiguous(), added = c.has(5) ? c.in[5].contiguous() : Tensor();
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    const T *x = input.data<T>(), *z = added.defined() ? added.data<T>() : nullptr;
    T* y = out[0].data<T>();
    Vector weight(c, 1, dtype_of<W>), bias(c, 2, dtype_of<W>);
    const W *w = weight.data<W>(), *b = bias.data<W>();
    std::vector<Statistics> statistics(static_cast<size_t>(p.c));
    parallel_for(p.c, grain_for(p.n * p.inner), [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        Moments m;
        if (by_batch(c)) {
          m = moments(p.n * p.inner, [&](auto f) {
            each_of_channel(p, k, [&](int64_t first) { widened(std::array{x + first}, p.inner, [&](auto& wide, int64_t n) { f(wide[0], n); }); });
          });
          if (a.training && c.has(3)) move_running<W>(c, k, m, p.n * p.inner, a.momentum);
        } else m = {as_double(c.in[3].data<W>()[k * c.in[3].strides()[0]]), as_double(c.in[4].data<W>()[k * c.in[4].strides()[0]])};
        Statistics s{m.mean, 1 / std::sqrt(m.var + a.eps)};
        statistics[static_cast<size_t>(k)] = s;
        if (out.size() > 1) put(out[1].data<W>(), p.c, k, s);
      }
    });
    parallel_for(p.n * p.c, grain_for(p.inner), [&](int64_t begin, int64_t end) {
      for (int64_t plane = begin; plane < end; ++plane) {
        int64_t k = plane % p.c;
        Statistics s = statistics[static_cast<size_t>(k)];
        W scale = w ? w[k] : W(1), shift = b ? b[k] : W(0);
        int64_t first = plane * p.inner, last = first + p.inner;
        auto normal = [&, centred = Centred<T>(s.mean, s.rstd)](int64_t i) { return static_cast<W>(centred(x[i])) * scale + shift; };
        auto activated = [](W v) { return T(with_relu ? unary::Relu::f(v) : v); };
        if (z) for (int64_t i = first; i < last; ++i) y[i] = activated(normal(i) + W(z[i]));
        else for (int64_t i = first; i < last; ++i) y[i] = activated(normal(i));
      }
    });
  });
}

// in: g, x, w, statistics, and perhaps relu's result; out: the gradients of x, w, b and what was added.
void run_batch_norm_grad(const Call& c, std::span<Tensor> out) {
  auto a = c.as<BatchNormAttrs>();
  Planes p = norm_planes(c.in[1].shape());
  Tensor gradient = (c.has(4) ? relu_grad(c.in[4], c.in[0]) : c.in[0]).contiguous(), input = c.in[1].contiguous(), statistics = c.in[3].contiguous();
  if (a.wanted & 8u) out[3].copy_(gradient);
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    const T *g = gradient.data<T>(), *x = input.data<T>();
    Vector weight(c, 2, dtype_of<W>);
    const W* w = weight.data<W>();
    std::vector<W> dw(static_cast<size_t>(p.c)), db(static_cast<size_t>(p.c));
    double count = static_cast<double>(p.n * p.inner);
    parallel_for(p.c, grain_for(p.n * p.inner), [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        Statistics s = get(statistics.data<W>(), p.c, k);
        Sums<2> sums;
        each_of_channel(p, k, [&](int64_t first) {
          widened(std::array{g + first, x + first}, p.inner, [&](auto& wide, int64_t n) {
            sums.add(n, [&s, gp = wide[0], xp = wide[1]](int64_t i) {
              return std::array{as_double(gp[i]), as_double(gp[i]) * ((as_double(xp[i]) - s.mean) * s.rstd)};
            });
          });
        });
        double sum = sums.total(0), dot = sums.total(1);
        dw[static_cast<size_t>(k)] = static_cast<W>(dot);
        db[static_cast<size_t>(k)] = static_cast<W>(sum);
        if (!(a.wanted & 1u)) continue;
        T* dx = out[0].data<T>();
        if (!a.training) sum = dot = 0;
        const Centred<T> centred(s.mean, s.rstd * (dot / count));
        using E = typename Centred<T>::E;
        const auto scale = static_cast<E>((w ? as_double(w[k]) : 1) * s.rstd), shift = static_cast<E>(sum / count);
        each_of_channel(p, k, [&](int64_t first) {
          for (int64_t i = first; i < first + p.inner; ++i)
            dx[i] = T(static_cast<W>(scale * (centred.value(g[i]) - (shift + centred(x[i])))));
        });
      }
    });
    for (size_t k = 1; k < 3; ++k)
      if (a.wanted >> k & 1u) out[k].copy_(tensor(k == 1 ? dw : db));
  });
}

template <class T> Statistics row_statistics(RowNorm kind, double eps, const T* x, int64_t n) {
  Moments m;
  if (kind == RowNorm::rms) {
    Sums<1> squares;
    widened(std::array{x}, n, [&](auto& wide, int64_t k) {
      squares.add(k, [v = wide[0]](int64_t i) { return std::array{as_double(v[i]) * as_double(v[i])}; });
    });
    m.var = squares.total(0) / static_cast<double>(n);
  } else m = moments(n, [&](auto f) { widened(std::array{x}, n, [&](auto& wide, int64_t k) { f(wide[0], k); }); });
  return {m.mean, 1 / std::sqrt(m.var + eps)};
}

void run_row_norm(const Call& c, std::span<Tensor> out) {
  auto a = c.as<RowNormAttrs>();
  NormRows q = norm_rows(a, out[0].shape());
  Tensor input = c.in[0].contiguous();
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    Vector weight(c, 1, dtype_of<W>), bias(c, 2, dtype_of<W>);
    parallel_for(q.rows, grain_for(q.length), [&, x = input.data<T>(), y = out[0].data<T>(), w = weight.data<W>(), b = bias.data<W>()](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* row = x + r * q.length;
        Statistics s = row_statistics(a.kind, a.eps, row, q.length);
        if (out.size() > 1) put(out[1].data<W>(), q.rows, r, s);
        T* to = y + r * q.length;
        auto normal = [&](int64_t i) { return static_cast<W>((as_double(row[i]) - s.mean) * s.rstd); };
        if (q.inner == 1 && w && b) {
          const W *scale = w + q.feature(r), *shift = b + q.feature(r);
          for (int64_t i = 0; i < q.length; ++i) to[i] = T(normal(i) * scale[i] + shift[i]);
          continue;
        }
        for (int64_t i = 0, k = q.feature(r); i < q.length; ++k)
          for (int64_t end_of_feature = i + q.inner; i < end_of_feature; ++i) {
            W v = normal(i);
            if (w) v *= w[k];
            if (b) v += b[k];
            to[i] = T(v);
          }
      }
    });
  });
}

// in: g, x, w, statistics; out: the gradients of x, w and b.
void run_row_norm_grad(const Call& c, std::span<Tensor> out) {
  auto a = c.as<RowNormAttrs>();
  NormRows q = norm_rows(a, c.in[1].shape());
  Tensor gradient = c.in[0].contiguous(), input = c.in[1].contiguous(), statistics = c.in[3].contiguous();
  visit<floating_types>(input.dtype(), [&]<class T>(Type<T>) {
    using W = wide_t<T>;
    const T *g = gradient.data<T>(), *x = input.data<T>();
    const W* of_rows = statistics.data<W>();
    Vector weight(c, 2, dtype_of<W>);
    const W* w = weight.data<W>();
    if (a.wanted & 1u)
      parallel_for(q.rows, grain_for(q.length), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          Statistics s = get(of_rows, q.rows, r);
          const T *gr = g + r * q.length, *xr = x + r * q.length;
          T* to = out[0].data<T>() + r * q.length;
          auto from = [&](auto factor) {
            Sums<2> sums;
            auto gw = [gr, factor](int64_t i) { return as_double(gr[i]) * factor(i); };
            auto normal = [xr, s](int64_t i) { return (as_double(xr[i]) - s.mean) * s.rstd; };
            sums.add(q.length, [gw, normal](int64_t i) { return std::array{gw(i), gw(i) * normal(i)}; });
            double n = static_cast<double>(q.length), mean = a.kind == RowNorm::rms ? 0 : sums.total(0) / n, slope = sums.total(1) / n;
            for (int64_t i = 0; i < q.length; ++i) to[i] = T(static_cast<W>(s.rstd * (gw(i) - (mean + normal(i) * slope))));
          };
          const W* factors = w ? w + q.feature(r) : nullptr;
          if (!w) from([](int64_t) { return 1.0; });
          else if (q.inner == 1) from([factors](int64_t i) { return as_double(factors[i]); });
          else from([factors, inner = q.inner](int64_t i) { return as_double(factors[i / inner]); });
        }
      });
    if (!(a.wanted & 6u)) return;
    // A feature's elements: `inner` neighbours in each row of its group.
    std::vector<double> dw(static_cast<size_t>(q.features)), db(static_cast<size_t>(q.features));
    int64_t per_group = q.features / q.groups;
    parallel_for(q.features, grain_for(q.rows / q.groups * q.inner), [&](int64_t begin, int64_t end) {
      for (int64_t r = 0; r < q.rows; ++r) {
        int64_t first = q.feature(r);
        Statistics s = get(of_rows, q.rows, r);
        if (q.inner == 1) {
          const T *gr = g + r * q.length - first, *xr = x + r * q.length - first;
          for (int64_t k = std::max(begin, first); k < std::min(end, first + per_group); ++k) {
            db[static_cast<size_t>(k)] += as_double(gr[k]);
            dw[static_cast<size_t>(k)] += as_double(gr[k]) * ((as_double(xr[k]) - s.mean) * s.rstd);
          }
          continue;
        }
        for (int64_t k = std::max(begin, first); k < std::min(end, first + per_group); ++k)
          for (int64_t at = r * q.length + (k - first) * q.inner, n = 0; n < q.inner; ++n, ++at) {
            db[static_cast<size_t>(k)] += as_double(g[at]);
            dw[static_cast<size_t>(k)] += as_double(g[at]) * ((as_double(x[at]) - s.mean) * s.rstd);
          }
      }
    });
    for (size_t k = 1; k < 3; ++k)
      if (a.wanted >> k & 1u) out[k].copy_(tensor(k == 1 ? dw : db).view(out[k].shape()));
  });
}

// ---- shapes

// Checks w and b, inputs `at` and the next.
void check_affine(const Call& c, const Meta& x, const Shape& features, size_t at = 1) {
  for (size_t i : {at, at + 1}) {
    if (!c.has(i)) continue;
    const Meta& m = c.in[i].meta();
    HT_CHECK(m.shape == features && (m.dtype == x.dtype || m.dtype == wide(x.dtype)), c.op->name, ": expected ", i == at ? "weight " : "bias ", features, " (",
             wide(x.dtype), "), got ", m);
  }
  HT_CHECK(!c.has(at + 1) || (c.has(at) && c.in[at].dtype() == c.in[at + 1].dtype()), c.op->name, ": expected a bias only beside a weight of its dtype");
}

// Whether relu's part of backward reads bits, where its result is not 0, and not the result. They are in memory order.
bool keeps_bits(const Meta& y) { return !y.contiguous() && is_16bit_dtype(y.dtype) && y.shape[1] % 8 == 0; }

// Checks w, b and the running statistics of x, inputs from `at` on.
void check_batch_norm(const Call& c, const Meta& x, size_t at) {
  HT_CHECK(is_floating(x.dtype) && x.shape.rank() >= 2, c.op->name, ": expected x [n, channels, ...] of a floating dtype, got ", x);
  Shape channels{x.shape[1]};
  check_affine(c, x, channels, at);
  HT_CHECK(c.has(at + 2) == c.has(at + 3), c.op->name, ": expected running_mean and running_var together");
  for (size_t i : {at + 2, at + 3})
    HT_CHECK(!c.has(i) || (c.in[i].shape() == channels && c.in[i].dtype() == wide(x.dtype)), c.op->name, ": expected ",
             i == at + 2 ? "running_mean " : "running_var ", channels, " (", wide(x.dtype), "), got ", c.in[i].meta());
}
void check_like(const Call& c, const Meta& x, size_t i) {
  HT_CHECK(!c.has(i) || (c.in[i].shape() == x.shape && c.in[i].dtype() == x.dtype), c.op->name, ": expected z like x, ", x, ", got ", c.in[i].meta());
}

// Of batch_norm, batch_norm_relu and batch_norms_relu.
Metas infer_batch_norm(const Call& c) {
  const Meta& x = c.in[0].meta();
  const bool two = c.op == &op::batch_norms_relu;
  check_batch_norm(c, x, 1);
  check_like(c, x, 5);
  if (two) {
    HT_CHECK(c.has(5), c.op->name, ": z is undefined");
    check_batch_norm(c, x, 6);
    HT_CHECK(c.has(3) == c.has(8), c.op->name, ": expected running statistics of both x and z, or of none");
  }
  Planes p = norm_planes(x.shape);
  HT_CHECK(!by_batch(c) || p.c == 0 || p.n * p.inner > 1, c.op->name, ": expected more than one value for each channel in training, got ", x);
  const Meta statistics({3, x.shape[1]}, wide(x.dtype), x.device);
  Metas out{laid_out_like(x, x.dtype), statistics};
  if (two) out.push_back(statistics);
  if (c.op == &op::batch_norm) return out;
  Shape bits{keeps_bits(out[0]) ? x.shape.numel() / 8 : 0};
  out.push_back(Meta(bits, DType::u8, x.device));
  return out;
}

Metas infer_row_norm(const Call& c) {
  const Meta& x = c.in[0].meta();
  auto a = c.as<RowNormAttrs>();
  HT_CHECK(is_floating(x.dtype), c.op->name, ": expected a floating dtype, got ", x.dtype, "; cast x with to()");
  Shape features;
  if (a.kind == RowNorm::group) {
    HT_CHECK(x.shape.rank() >= 2 && a.rest >= 1 && x.shape[1] % a.rest == 0, c.op->name, ": expected x [n, channels, ...] with channels that groups = ", a.rest,
             " divides, got ", x);
    features = {x.shape[1]};
  } else {
    HT_CHECK(a.rest >= 1 && a.rest <= x.shape.rank(), c.op->name, ": expected x of at least ", a.rest, " dimensions, got ", x);
    features = Shape(std::span(x.shape.end() - a.rest, x.shape.end()));
  }
  check_affine(c, x, features);
  return {Meta(x.shape, x.dtype, x.device), Meta({3, norm_rows(a, x.shape).rows}, wide(x.dtype), x.device)};
}

// Whether of two of these dtypes the first may be added to the second, which is a sum's.
bool adds_to(DType x, DType sum) { return is_floating(x) && (x == sum || wide(x) == sum); }

Metas infer_add_layer_norm(const Call& c) {
  const Meta &x = c.in[0].meta(), &z = c.in[1].meta();
  auto a = c.as<RowNormAttrs>();
  HT_CHECK(z.shape == x.shape && adds_to(x.dtype, z.dtype), "add_layer_norm: expected z like x, or in f32, x ", x, ", got ", z);
  HT_CHECK(a.rest >= 1 && a.rest <= x.shape.rank(), "add_layer_norm: expected x of at least ", a.rest, " dimensions, got ", x);
  check_affine(c, z, Shape(std::span(x.shape.end() - a.rest, x.shape.end())), 2);
  return {Meta(x.shape, x.dtype, x.device), Meta(x.shape, z.dtype, x.device), Meta({3, norm_rows(a, x.shape).rows}, wide(x.dtype), x.device)};
}

// The gradients of x, w and b, of those that are wanted.
Metas gradient_metas(const Call& c, uint32_t wanted, int64_t statistics, const Shape& features) {
  const Meta &g = c.in[0].meta(), &x = c.in[1].meta(), &s = c.in[3].meta();
  bool alike = c.op == &op::add_layer_norm_grad ? adds_to(g.dtype, x.dtype) : is_floating(x.dtype) && g.dtype == x.dtype;
  HT_CHECK(alike && g.shape == x.shape, c.op->name, ": expected a gradient like x, ", x, ", got ", g);
  HT_CHECK(s.shape == Shape({3, statistics}) && s.dtype == wide(x.dtype), c.op->name, ": expected statistics [3, ", statistics, "] (", wide(x.dtype), "), got ", s);
  HT_CHECK(c.has(2) || !(wanted & 6u), c.op->name, ": there is no weight to compute a gradient of");
  HT_CHECK(!c.has(2) || c.in[2].shape() == features, c.op->name, ": expected weight ", features, ", got ", c.in[2].meta());
  auto meta = [&](uint32_t bit, Meta m) { return wanted >> bit & 1u ? m : Meta({0}, m.dtype, m.device); };
  DType t = c.has(2) ? c.in[2].dtype() : x.dtype;
  return {meta(0, {x.shape, x.dtype, x.device}), meta(1, {features, t, x.device}), meta(2, {features, t, x.device})};
}

// Checks relu's result, or its bits, input 4.
void check_relued(const Call& c, const Meta& x) {
  if (!c.has(4)) return;
  const Meta& m = c.in[4].meta();
  bool bits = m.dtype == DType::u8 && keeps_bits(laid_out_like(x, x.dtype)) && m.shape == Shape{x.shape.numel() / 8};
  HT_CHECK(bits || (m.shape == x.shape && m.dtype == x.dtype), c.op->name, ": expected a result like x, ", x, ", got ", m);
}

// ---- derivatives

uint32_t wanted(const Rule& r) {
  uint32_t bits = 0;
  for (size_t i = 0; i < 3 && i < r.size(); ++i) bits |= r.needs(i) ? 1u << i : 0u;
  return bits;
}

// The gradients that `wanted` names, those of weight and bias, inputs `affine` and the next, straight into their leaves' buffers.
Tensors written(const Rule& r, const OpDef& op, Tensors in, const Attrs& attrs, uint32_t wanted, size_t affine = 1) {
  Tensors into(wanted & 8u ? 4 : 3);
  for (size_t k : {1, 2}) if (wanted >> k & 1u) into[k] = r.destination(affine + k - 1);
  return call_all_into(op, std::move(in), attrs, std::move(into));
}

// Gradients of x, w, b, and none for what follows. With a result of relu, `relued`, or its bits, from the gradient of that.
Tensors fused(const Rule& r, const OpDef& op, const Attrs& attrs, uint32_t wanted, const Tensor& relued = {}) {
  Tensors grads(r.size());
  if (wanted == 0) return grads;
  Tensors in{r.grad(), r.in(0), r.size() > 1 ? r.in(1) : Tensor(), r.out(1)};
  if (relued.defined()) in.push_back(relued);
  Tensors all = written(r, op, std::move(in), attrs, wanted);
  for (size_t i = 0; i < 3; ++i) if (wanted >> i & 1u) grads[i] = all[i];
  if (wanted & 8u) grads[5] = all[3];
  return grads;
}

// Whether a call of batch_norm used its batch's statistics. Training writes the running ones: they may not be read here.
bool by_batch(const Rule& r) { return r.as<BatchNormAttrs>().training || r.size() < 4 || r.in_meta(3).shape.rank() == 0; }

// Of the tensor that is normalised, input `x`, its weight and bias, the next two.
Tensors composed_batch_norm(const Rule& r, const Tensor& gradient, size_t x = 0) {
  auto a = r.as<BatchNormAttrs>();
  const Meta& meta = r.in_meta(x);
  Planes p = norm_planes(meta.shape);
  DType t = wide(meta.dtype);
  Shape planes{p.n, p.c, p.inner}, channel{1, p.c, 1};
  auto at_channel = [&](size_t i) { return reshape(cast(r.in(i), t), channel); };
  const size_t weight = x + 1, bias = x + 2;
  Tensor v = reshape(cast(r.in(x), t), planes), g = reshape(cast(gradient, t), planes);
  Tensor w = r.size() > weight && r.in(weight).defined() ? at_channel(weight) : Tensor();
  bool batch = by_batch(r);
  auto mean_of = [](const Tensor& of) { return mean(of, {0, 2}, {.keepdim = true}); };
  Tensor centre = batch ? mean_of(v) : at_channel(x + 3), variance = batch ? var(v, {0, 2}, {.correction = 0, .keepdim = true}) : at_channel(x + 4);
  Tensor rstd = rsqrt(variance + a.eps), normal = (v - centre) * rstd;
  Tensors grads(r.size());
  if (r.needs(x)) {
    Tensor d = batch ? g - mean_of(g) - normal * mean_of(g * normal) : g;
    d = d * rstd;
    grads[x] = cast(reshape(w.defined() ? d * w : d, meta.shape), meta.dtype);
  }
  if (r.size() > weight && r.needs(weight)) grads[weight] = cast(sum(g * normal, {0, 2}), r.in_meta(weight).dtype);
  if (r.size() > bias && r.needs(bias)) grads[bias] = cast(sum(g, {0, 2}), r.in_meta(bias).dtype);
  return grads;
}

Tensors fused_batch_norm(const Rule& r, const Tensor& relued = {}) {
  auto a = r.as<BatchNormAttrs>();
  a.training = by_batch(r);
  a.wanted = wanted(r) | (r.size() > 5 && r.needs(5) ? 8u : 0u);
  return fused(r, op::batch_norm_grad, Attrs::of(a), a.wanted, relued);
}

constexpr std::array<size_t, 6> inputs_of_norms{0, 1, 2, 5, 6, 7};  // of batch_norms_relu, in the order of its gradients

Tensors composed_batch_norms(const Rule& r) {
  Tensor g = relu_grad(r.out(), r.grad());
  Tensors grads = composed_batch_norm(r, g), of_z = composed_batch_norm(r, g, 5);
  for (size_t i = 5; i < 8; ++i) grads[i] = of_z[i];
  return grads;
}
Tensors fused_batch_norms(const Rule& r) {
  auto a = r.as<BatchNormAttrs>();
  a.training = by_batch(r);
  a.wanted = 0;
  Tensors grads(r.size()), into(6);
  for (size_t k = 0; k < 6; ++k) {
    const size_t i = inputs_of_norms[k];
    if (!r.needs(i)) continue;
    a.wanted |= 1u << k;
    if (k % 3 != 0) into[k] = r.destination(i);  // a weight's or bias's
  }
  if (a.wanted == 0) return grads;
  const Tensor& relued = r.out(3).numel() > 0 ? r.out(3) : r.out();
  Tensors in{r.grad(), r.in(0), r.in(1), r.out(1), relued, r.in(5), r.in(6), r.out(2)};
  Tensors all = call_all_into(op::batch_norms_relu_grad, std::move(in), Attrs::of(a), std::move(into));
  for (size_t k = 0; k < 6; ++k) if (a.wanted >> k & 1u) grads[inputs_of_norms[k]] = all[k];
  return grads;
}

// Those of x, weight and bias from that of the result, for each of which a Meta is given.
Tensors row_norm_gradients(const RowNormAttrs& a, const Tensor& argument, const Tensor& weight, const Tensor& gradient,
                           std::array<const Meta*, 3> of) {
  const Meta& meta = argument.meta();
  NormRows q = norm_rows(a, meta.shape);
  DType t = wide(meta.dtype);
  Shape rows{q.rows / q.groups, q.groups, q.length}, features{q.groups, q.features / q.groups, q.inner};
  Tensor x = reshape(cast(argument, t), rows), g = reshape(cast(gradient, t), rows), gw = g;
  if (weight.defined()) {
    Tensor w = reshape(cast(weight, t), {q.groups, q.features / q.groups, 1});
    gw = g * reshape(expand(w, features), {q.groups, q.length});
  }
  auto mean_of = [](const Tensor& v) { return mean(v, {2}, {.keepdim = true}); };
  bool centred = a.kind != RowNorm::rms;
  Tensor variance = centred ? var(x, {2}, {.correction = 0, .keepdim = true}) : mean_of(square(x));
  Tensor rstd = rsqrt(variance + a.eps), normal = (centred ? x - mean_of(x) : x) * rstd;
  Tensors grads(3);
  if (of[0]) {
    Tensor d = gw - normal * mean_of(gw * normal);
    if (centred) d = d - mean_of(gw);
    grads[0] = cast(reshape(d * rstd, meta.shape), meta.dtype);
  }
  auto to_features = [&](const Tensor& v, const Meta& m) { return cast(reshape(sum(reshape(sum(v, {0}), features), {2}), m.shape), m.dtype); };
  if (of[1]) grads[1] = to_features(g * normal, *of[1]);
  if (of[2]) grads[2] = to_features(g, *of[2]);
  return grads;
}
const Meta* needed(const Rule& r, size_t i) { return i < r.size() && r.needs(i) ? &r.in_meta(i) : nullptr; }

Tensors composed_row_norm(const Rule& r) {
  Tensor w = r.size() > 1 ? r.in(1) : Tensor();
  Tensors grads = row_norm_gradients(r.as<RowNormAttrs>(), r.in(0), w, r.grad(), {needed(r, 0), needed(r, 1), needed(r, 2)});
  grads.resize(r.size());
  return grads;
}

Tensors fused_row_norm(const Rule& r) {
  auto a = r.as<RowNormAttrs>();
  a.wanted = wanted(r);
  return fused(r, op::row_norm_grad, Attrs::of(a), a.wanted);
}

// Of {y, sum}, one of which may have no gradient; that of the sum goes to x and z alike.
Tensors composed_add_layer_norm(const Rule& r) {
  Tensors grads(r.size());
  Tensor g = r.grad(1);
  if (r.grad(0).defined()) {
    const Meta* of_sum = r.needs(0) || r.needs(1) ? &r.in_meta(1) : nullptr;
    Tensor w = r.size() > 2 ? r.in(2) : Tensor();
    auto all = row_norm_gradients(r.as<RowNormAttrs>(), r.out(1), w, r.grad(0), {of_sum, needed(r, 2), needed(r, 3)});
    if (of_sum) g = g.defined() ? g + all[0] : all[0];
    for (size_t i = 2; i < r.size(); ++i) grads[i] = all[i - 1];
  }
  for (size_t i = 0; i < 2; ++i) if (r.needs(i)) grads[i] = g;
  return grads;
}

Tensors fused_add_layer_norm(const Rule& r) {
  Tensors grads(r.size());
  if (!r.grad(0).defined()) {
    for (size_t i = 0; i < 2; ++i) if (r.needs(i)) grads[i] = r.grad(1);
    return grads;
  }
  auto a = r.as<RowNormAttrs>();
  bool alike = r.in_meta(0).dtype == r.in_meta(1).dtype;  // one tensor for both
  a.wanted = r.needs(1) || (alike && r.needs(0)) ? 8u : 0u;
  if (r.needs(0) && !alike) a.wanted |= 1u;
  for (size_t i = 2; i < r.size(); ++i) if (r.needs(i)) a.wanted |= 1u << (i - 1);
  if (a.wanted == 0) return grads;
  Tensors in{r.grad(0), r.out(1), r.size() > 2 ? r.in(2) : Tensor(), r.out(2), r.grad(1)};
  Tensors all = written(r, op::add_layer_norm_grad, std::move(in), Attrs::of(a), a.wanted, 2);
  for (size_t i = 0; i < r.size(); ++i)
    if (r.needs(i)) grads[i] = all[i == 1 || (i == 0 && alike) ? 3 : i == 0 ? 0 : i - 1];
  return grads;
}

// ---- samples

std::vector<Sample> batch_norm_samples(bool relu) {
  auto sample = [&](Shape x, bool affine, bool wide_affine, bool running, BatchNormAttrs a, bool added) {
    Shape c{x[1]};
    auto vector = [&](double low, double high, bool differentiable, bool present, bool is_wide) {
      return SampleInput{.shape = c, .low = low, .high = high, .dtype = {}, .differentiable = differentiable, .present = present, .wide = is_wide};
    };
    Sample s{{{.shape = x}, vector(.5, 2, true, affine, wide_affine), vector(-1, 1, true, affine, wide_affine), vector(-1, 1, false, running, true),
              vector(.5, 2, false, running, true)}, Attrs::of(a)};
    if (relu) s.in.push_back({.shape = x, .low = -2, .high = 2, .dtype = {}, .differentiable = true, .present = added});
    return s;
  };
  BatchNormAttrs training{}, evaluation{.training = false}, odd{.eps = .1, .momentum = .7}, cautious{.eps = .01, .momentum = 0, .training = false};
  return {sample({2, 1}, true, true, true, training, true),        sample({7, 3}, true, true, true, odd, false),
          sample({2, 3, 4}, false, false, false, training, true),  sample({2, 3, 4, 5}, true, false, true, training, false),
          sample({33, 2, 3}, true, true, false, training, true),   sample({0, 2, 3}, true, true, true, evaluation, true),
          sample({1, 3, 2}, true, false, true, cautious, true),    sample({2, 257, 1, 3}, true, true, true, training, false),
          sample({3, 2, 2, 1, 7}, false, false, true, evaluation, false), sample({5, 4, 70}, true, true, true, odd, true)};
}

// Of batch_norms_relu: z has what x has, and not always a weight where x has one.
std::vector<Sample> batch_norms_samples() {
  std::vector<Sample> all = batch_norm_samples(false);
  for (size_t k = 0; k < all.size(); ++k) {
    auto& in = all[k].in;
    for (size_t i = 0; i < 5; ++i) in.push_back(in[i]);
    for (size_t i : {6, 7}) in[i].present = in[i].present && k % 3 != 1;
  }
  return all;
}

std::vector<Sample> row_norm_samples(RowNorm kind) {
  auto sample = [&](Shape x, Shape features, int64_t rest, bool affine, bool bias, bool is_wide, double eps = 1e-5) {
    auto vector = [&](double low, bool present) {
      return SampleInput{.shape = features, .low = low, .high = 2, .dtype = {}, .differentiable = true, .present = present, .wide = is_wide};
    };
    Sample s{{{.shape = x}, vector(.5, affine)}, Attrs::of(RowNormAttrs{eps, rest, kind})};
    if (kind != RowNorm::rms) s.in.push_back(vector(-1, bias));
    return s;
  };
  if (kind == RowNorm::group)
    return {sample({1, 1, 2}, {1}, 1, true, true, true),       sample({2, 4}, {4}, 2, true, true, false),         sample({2, 4, 3}, {4}, 2, false, false, false, .1),
            sample({2, 4, 3}, {4}, 4, true, false, true),      sample({3, 6, 2, 5}, {6}, 3, true, true, true),    sample({0, 4, 3}, {4}, 2, true, true, true),
            sample({2, 2, 257}, {2}, 1, true, true, true),     sample({1, 33, 7}, {33}, 11, true, true, false),   sample({2, 4, 2, 3, 3}, {4}, 2, true, true, true)};
  return {sample({2}, {2}, 1, true, true, true),             sample({2, 7}, {7}, 1, true, true, false),      sample({3, 4}, {4}, 1, false, false, false, .1),
          sample({2, 3, 4}, {3, 4}, 2, true, true, true),    sample({2, 33}, {33}, 1, true, false, true),    sample({0, 5}, {5}, 1, true, true, true),
          sample({3, 257}, {257}, 1, true, true, true),      sample({2, 2, 3, 2}, {2, 3, 2}, 3, true, true, false), sample({70, 9}, {9}, 1, true, true, true)};
}

// Of add_layer_norm: a sum in f32 beside a 16-bit x.
std::vector<Sample> add_layer_norm_samples() {
  std::vector<Sample> all = row_norm_samples(RowNorm::layer);
  for (Sample& s : all) {
    SampleInput z = s.in[0];
    z.wide = true;
    for (size_t i : {1, 2}) s.in[i].wide = true;
    s.in.insert(s.in.begin() + 1, z);
  }
  return all;
}

// Of a gradient operator, from those of the forward: g, x, w and statistics.
template <class A> std::vector<Sample> gradient_samples(std::vector<Sample> forward, int64_t (*statistics)(const Shape& x, const Attrs& a)) {
  for (size_t k = 0; k < forward.size(); ++k) {
    Sample& s = forward[k];
    SampleInput x = s.in[0], w = s.in[1];
    auto a = s.attrs.as<A>();
    a.wanted = !w.present ? 1u : k % 3 == 1 ? 5u : k % 3 == 2 ? 6u : 7u;
    s.in = {x, x, w, {.shape = {3, statistics(x.shape, s.attrs)}, .low = .5, .high = 1, .dtype = {}, .differentiable = false, .present = true, .wide = true}};
    s.attrs = Attrs::of(a);
  }
  return forward;
}

}  // namespace

Planes norm_planes(const Shape& x) {
  Planes p{x[0], x[1], 1};
  for (size_t d = 2; d < x.size(); ++d) p.inner *= x[d];
  return p;
}

NormRows norm_rows(const RowNormAttrs& a, const Shape& x) {
  NormRows q{1, 1, 1, 1, 1};
  if (a.kind == RowNorm::group) {
    Planes p = norm_planes(x);
    return {p.n * a.rest, p.c / a.rest * p.inner, a.rest, p.c, p.inner};
  }
  for (size_t d = 0; d < x.size(); ++d) (static_cast<int64_t>(d) < x.rank() - a.rest ? q.rows : q.length) *= x[d];
  q.features = q.length;
  return q;
}

namespace op {

constinit OpDef batch_norm = {
    .name = "batch_norm", .doc = "each channel normalised by the batch's statistics, or by running ones, then scaled and shifted", .cast = Cast::keep,
    .infer = infer_batch_norm,
    .writes = [](const Call& c, size_t i) { return c.as<BatchNormAttrs>().training && (i == 3 || i == 4); },
    .aux = 1,
    .saves = {.in = 0b11011, .out = 2},
    .backward = [](const Rule& r) { return composed_batch_norm(r, r.grad()); },
    .fused_backward = [](const Rule& r) { return fused_batch_norm(r); },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return batch_norm_samples(false); },
    .kernel = {run_batch_norm<false>}};

constinit OpDef batch_norm_relu = {
    .name = "batch_norm_relu", .doc = "relu of batch_norm, or of its sum with another tensor, rounded once", .cast = Cast::keep,
    .infer = infer_batch_norm,
    .writes = [](const Call& c, size_t i) { return c.as<BatchNormAttrs>().training && (i == 3 || i == 4); },
    .aux = 2,
    .saves = {.in = 0b11011, .out = 7},
    .backward = [](const Rule& r) -> Tensors {
      Tensor g = relu_grad(r.out(), r.grad());
      Tensors grads = composed_batch_norm(r, g);
      if (r.size() > 5 && r.needs(5)) grads[5] = g;  // what was added
      return grads;
    },
    .fused_backward = [](const Rule& r) { return fused_batch_norm(r, r.out(2).numel() > 0 ? r.out(2) : r.out()); },
    .dtypes = {floating_types, floating_types},
    .samples = [] { return batch_norm_samples(true); },
    .kernel = {run_batch_norm<true>}};

constinit OpDef batch_norm_grad = {
    .name = "batch_norm_grad", .doc = "the gradients of batch_norm, or of batch_norm_relu from its result or its bits, over x, weight, bias and what was added", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& x = c.in[1].meta();
      HT_CHECK(x.shape.rank() >= 2, "batch_norm_grad: expected x [n, channels, ...], got ", x);
      uint32_t wanted = c.as<BatchNormAttrs>().wanted;
      Metas grads = gradient_metas(c, wanted, x.shape[1], {x.shape[1]});
      check_relued(c, x);
      if (wanted & 1u) grads[0] = laid_out_like(x, x.dtype);
      if (wanted & 8u) grads.push_back(laid_out_like(x, x.dtype));
      return grads;
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] {
      std::vector<Sample> all;
      auto statistics = [](const Shape& x, const Attrs&) { return x[1]; };
      for (bool relu : {false, true})
        for (auto& s : gradient_samples<BatchNormAttrs>(batch_norm_samples(false), statistics)) {
          if (relu) {
            s.in.push_back({.shape = s.in[0].shape, .low = -1, .high = 1});
            auto a = s.attrs.as<BatchNormAttrs>();
            a.wanted |= all.size() % 3 == 0 ? 0u : 8u;
            s.attrs = Attrs::of(a);
          }
          all.push_back(s);
        }
      return all;
    },
    .kernel = {run_batch_norm_grad}};

constinit OpDef batch_norms_relu = {
    .name = "batch_norms_relu", .doc = "relu of the sum of two batch norms, rounded once", .cast = Cast::keep,
    .infer = infer_batch_norm,
    .writes = [](const Call& c, size_t i) { return c.as<BatchNormAttrs>().training && (i % 5 == 3 || i % 5 == 4); },
    .aux = 3,
    .saves = {.in = 0b1101111011, .out = 15},
    .backward = composed_batch_norms,
    .fused_backward = fused_batch_norms,
    .dtypes = {floating_types, floating_types},
    .samples = batch_norms_samples,
    .kernel = {batch_norms_relu_by_parts}};

// in: g, x, w, statistics, relu's result or its bits, z, its w, its statistics; out: the gradients of x, w, b and of z, its w, its b.
constinit OpDef batch_norms_relu_grad = {
    .name = "batch_norms_relu_grad", .doc = "the gradients of batch_norms_relu over x, z and the weight and bias of each, from its result or its bits",
    .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      const Meta& x = c.in[1].meta();
      HT_CHECK(x.shape.rank() >= 2, "batch_norms_relu_grad: expected x [n, channels, ...], got ", x);
      HT_CHECK(c.has(4) && c.has(5) && c.has(7), "batch_norms_relu_grad: expected relu's result, z and its statistics");
      check_relued(c, x);
      check_like(c, x, 5);
      const uint32_t wanted = c.as<BatchNormAttrs>().wanted;
      const Call of_z{.op = c.op, .in = {c.in[0], c.in[5], c.in[6], c.in[7]}, .attrs = c.attrs, .out = {}};
      Metas grads = gradient_metas(c, wanted & 7u, x.shape[1], {x.shape[1]});
      for (auto& m : gradient_metas(of_z, wanted >> 3, x.shape[1], {x.shape[1]})) grads.push_back(m);
      for (size_t k : {0, 3}) if (wanted >> k & 1u) grads[k] = laid_out_like(x, x.dtype);
      return grads;
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] {
      auto all = gradient_samples<BatchNormAttrs>(batch_norm_samples(false), [](const Shape& x, const Attrs&) { return x[1]; });
      for (size_t k = 0; k < all.size(); ++k) {
        auto& in = all[k].in;
        const SampleInput x = in[1], w = in[2], statistics = in[3];
        in.push_back({.shape = x.shape, .low = -1, .high = 1});
        in.insert(in.end(), {x, w, statistics});
        auto a = all[k].attrs.as<BatchNormAttrs>();
        a.wanted |= k % 4 == 0 ? 0u : k % 4 == 1 || !w.present ? 8u : 56u;
        all[k].attrs = Attrs::of(a);
      }
      return all;
    },
    .kernel = {batch_norms_relu_grad_by_parts}};

constinit OpDef layer_norm = {
    .name = "layer_norm", .doc = "rows over the last dimensions normalised to mean 0 and variance 1, then scaled and shifted", .cast = Cast::keep,
    .infer = infer_row_norm,
    .aux = 1,
    .saves = {.in = 3, .out = 2},
    .backward = composed_row_norm,
    .fused_backward = fused_row_norm,
    .dtypes = {floating_types, floating_types},
    .samples = [] { return row_norm_samples(RowNorm::layer); },
    .kernel = {run_row_norm}};

constinit OpDef group_norm = {
    .name = "group_norm", .doc = "groups of channels of each image normalised, then scaled and shifted by channel", .cast = Cast::keep,
    .infer = infer_row_norm,
    .aux = 1,
    .saves = {.in = 3, .out = 2},
    .backward = composed_row_norm,
    .fused_backward = fused_row_norm,
    .dtypes = {floating_types, floating_types},
    .samples = [] { return row_norm_samples(RowNorm::group); },
    .kernel = {run_row_norm}};

constinit OpDef rms_norm = {
    .name = "rms_norm", .doc = "rows over the last dimensions divided by their root mean square, then scaled", .cast = Cast::keep,
    .infer = infer_row_norm,
    .aux = 1,
    .saves = {.in = 3, .out = 2},
    .backward = composed_row_norm,
    .fused_backward = fused_row_norm,
    .dtypes = {floating_types, floating_types},
    .samples = [] { return row_norm_samples(RowNorm::rms); },
    .kernel = {run_row_norm}};

constinit OpDef row_norm_grad = {
    .name = "row_norm_grad", .doc = "the gradients of layer_norm, group_norm and rms_norm over x, weight and bias, from their statistics", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      auto a = c.as<RowNormAttrs>();
      const Shape& x = c.in[1].shape();
      HT_CHECK(x.rank() >= (a.kind == RowNorm::group ? 2 : a.rest), "row_norm_grad: expected x of more dimensions, got ", c.in[1].meta());
      Shape features = a.kind == RowNorm::group ? Shape{x[1]} : Shape(std::span(x.end() - a.rest, x.end()));
      return gradient_metas(c, a.wanted, norm_rows(a, x).rows, features);
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] {
      std::vector<Sample> all;
      for (RowNorm kind : {RowNorm::layer, RowNorm::group, RowNorm::rms})
        for (auto& s : gradient_samples<RowNormAttrs>(row_norm_samples(kind), [](const Shape& x, const Attrs& a) { return norm_rows(a.as<RowNormAttrs>(), x).rows; }))
          all.push_back(s);
      return all;
    },
    .kernel = {run_row_norm_grad}};

constinit OpDef add_layer_norm = {
    .name = "add_layer_norm", .doc = "layer_norm of a sum of two tensors, and the sum", .cast = Cast::keep,
    .infer = infer_add_layer_norm,
    .aux = 1,
    .saves = {.in = 4, .out = 6},
    .backward = composed_add_layer_norm,
    .fused_backward = fused_add_layer_norm,
    .dtypes = {floating_types, floating_types},
    .samples = add_layer_norm_samples,
    .kernel = {add_layer_norm_by_parts}};

// in: g, the sum, w, statistics, and perhaps the sum's own gradient; out: the gradients of x, w, b and z.
constinit OpDef add_layer_norm_grad = {
    .name = "add_layer_norm_grad",
    .doc = "the gradients of add_layer_norm over x, weight, bias and z, from its sum, statistics and the sum's gradient", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      auto a = c.as<RowNormAttrs>();
      const Meta &g = c.in[0].meta(), &sum = c.in[1].meta();
      HT_CHECK(sum.shape.rank() >= a.rest, "add_layer_norm_grad: expected a sum of more dimensions, got ", sum);
      Metas grads = gradient_metas(c, a.wanted, norm_rows(a, sum.shape).rows, Shape(std::span(sum.shape.end() - a.rest, sum.shape.end())));
      HT_CHECK(!c.has(4) || (c.in[4].shape() == sum.shape && c.in[4].dtype() == sum.dtype), "add_layer_norm_grad: expected a gradient like the sum, ",
               sum, ", got ", c.in[4].meta());
      grads[0].dtype = g.dtype;
      if (a.wanted & 8u) grads.push_back(Meta(sum.shape, sum.dtype, sum.device));
      return grads;
    },
    .dtypes = {floating_types, floating_types},
    .samples = [] {
      auto statistics = [](const Shape& x, const Attrs& a) { return norm_rows(a.as<RowNormAttrs>(), x).rows; };
      auto all = gradient_samples<RowNormAttrs>(row_norm_samples(RowNorm::layer), statistics);
      for (size_t k = 0; k < all.size(); ++k) {
        SampleInput upper = all[k].in[0];
        upper.present = k % 3 != 0;
        all[k].in.push_back(upper);
        for (size_t i : {1, 2, 4}) all[k].in[i].wide = true;
        auto a = all[k].attrs.as<RowNormAttrs>();
        a.wanted |= k % 2 == 0 ? 8u : 0u;
        all[k].attrs = Attrs::of(a);
      }
      return all;
    },
    .kernel = {add_layer_norm_grad_by_parts}};

}  // namespace op

namespace {

const Tensor& given(const Call& c, size_t i) {
  static const Tensor none;
  return c.has(i) ? c.in[i] : none;
}
void run(const OpDef& op, const Attrs& attrs, Tensors in, Tensors out) {
  Kernel kernel = op.kernel[static_cast<size_t>(in[0].device().type)];
  kernel(Call{.op = &op, .in = std::move(in), .attrs = attrs, .out = {}}, out);
}
void add_into(const Tensor& a, const Tensor& b, const Tensor& sum) {
  call_into(binary::def<binary::Add>, {a, b}, binary::attrs_with<binary::Add>({}), sum);
}

}  // namespace

void add_layer_norm_by_parts(const Call& c, std::span<Tensor> out) {
  Tensor &y = out[0], &sum = out[1];
  add_into(cast(c.in[0], sum.dtype()), c.in[1], sum);
  Tensor normal = y.dtype() == sum.dtype() ? y : Tensor::allocate(sum.meta());
  Tensors to{normal};
  if (out.size() > 2) to.push_back(out[2]);
  run(op::layer_norm, c.attrs, {sum, given(c, 2), given(c, 3)}, to);
  if (y.dtype() != sum.dtype()) y.copy_(normal);
}

void add_layer_norm_grad_by_parts(const Call& c, std::span<Tensor> out) {
  auto a = c.as<RowNormAttrs>();
  const uint32_t wanted = a.wanted;
  const Tensor& sum = c.in[1];
  a.wanted = (wanted & 6u) | (wanted & 9u ? 1u : 0u);
  Tensor of_sum = wanted & 8u ? out[3] : Tensor::allocate(Meta(wanted & 1u ? sum.shape() : Shape{0}, sum.dtype(), sum.device()));
  run(op::row_norm_grad, Attrs::of(a), {cast(c.in[0], sum.dtype()), sum, c.in[2], c.in[3]}, {of_sum, out[1], out[2]});
  if (c.has(4) && wanted & 9u) add_into(of_sum, c.in[4], of_sum);
  if (wanted & 1u) out[0].copy_(of_sum);
}

// 16-bit elements pass through f32, so that the result is rounded once.
void batch_norms_relu_by_parts(const Call& c, std::span<Tensor> out) {
  const DType t = wide(out[0].dtype());
  auto fresh = [&] { return Tensor::allocate(laid_out_like(out[0].meta(), t)); };
  Tensor normal = fresh(), y = t == out[0].dtype() ? out[0] : fresh();
  Tensors to{normal}, sum{y};
  if (out.size() > 1) {
    to.push_back(out[2]);
    sum.push_back(out[1]);
    sum.push_back(out[3]);
  }
  run(op::batch_norm, c.attrs, {cast(c.in[5], t), given(c, 6), given(c, 7), given(c, 8), given(c, 9)}, to);
  run(op::batch_norm_relu, c.attrs, {cast(c.in[0], t), given(c, 1), given(c, 2), given(c, 3), given(c, 4), normal}, sum);
  if (y.dtype() != out[0].dtype()) out[0].copy_(y);
}

void batch_norms_relu_grad_by_parts(const Call& c, std::span<Tensor> out) {
  auto a = c.as<BatchNormAttrs>();
  const uint32_t wanted = a.wanted;
  Tensor masked = Tensor::allocate(laid_out_like(c.in[1].meta(), c.in[1].dtype()));
  a.wanted = (wanted & 7u) | 8u;
  run(op::batch_norm_grad, Attrs::of(a), {c.in[0], c.in[1], c.in[2], c.in[3], c.in[4]}, {out[0], out[1], out[2], masked});
  a.wanted = wanted >> 3;
  if (a.wanted != 0) run(op::batch_norm_grad, Attrs::of(a), {masked, c.in[5], c.in[6], c.in[7]}, {out[3], out[4], out[5]});
}

std::span<OpDef* const> norm_ops() {
  static constexpr OpDef* all[] = {&op::batch_norm, &op::batch_norm_relu, &op::batch_norm_grad, &op::batch_norms_relu, &op::batch_norms_relu_grad,
                                   &op::layer_norm, &op::group_norm, &op::rms_norm, &op::row_norm_grad, &op::add_layer_norm, &op::add_layer_norm_grad};
  return all;
}

namespace {

// Arguments with the undefined ones at the end left out.
Tensors trimmed(Tensors in) {
  while (in.size() > 1 && !in.back().defined()) in.resize(in.size() - 1);
  return in;
}
Attrs attrs_of(const BatchNormOptions& o) { return Attrs::of(BatchNormAttrs{o.eps, o.momentum, o.training}); }

Attrs attrs_of_rows(const OpDef& op, RowNorm kind, const Tensor& x, const Shape& shape, double eps) {
  int rest = shape.rank();
  HT_CHECK(rest >= 1 && rest <= x.rank() && Shape(std::span(x.shape().end() - rest, x.shape().end())) == shape, op.name, ": expected x of last dimensions ", shape,
           ", got ", x.meta());
  return Attrs::of(RowNormAttrs{eps, rest, kind});
}
Tensor over_rows(const OpDef& op, RowNorm kind, const Tensor& x, const Shape& shape, const Tensor& w, const Tensor& b, double eps) {
  HT_CHECK(x.defined(), op.name, ": x is undefined");
  return call(op, trimmed({x, w, b}), attrs_of_rows(op, kind, x, shape, eps));
}

}  // namespace

Tensor batch_norm(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& running_mean, const Tensor& running_var, BatchNormOptions o) {
  HT_CHECK(x.defined(), "batch_norm: x is undefined");
  return call(op::batch_norm, trimmed({x, w, b, running_mean, running_var}), attrs_of(o));
}
Tensor batch_norm_relu(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& running_mean, const Tensor& running_var, BatchNormOptions o) {
  HT_CHECK(x.defined(), "batch_norm_relu: x is undefined");
  return call(op::batch_norm_relu, trimmed({x, w, b, running_mean, running_var}), attrs_of(o));
}
Tensor batch_norm_add_relu(const Tensor& x, const Tensor& z, const Tensor& w, const Tensor& b, const Tensor& running_mean, const Tensor& running_var,
                           BatchNormOptions o) {
  HT_CHECK(x.defined() && z.defined(), "batch_norm_add_relu: x or z is undefined");
  return call(op::batch_norm_relu, {x, w, b, running_mean, running_var, z}, attrs_of(o));
}

Tensor batch_norms_relu(const Tensor& x, const BatchNormTensors& of_x, const Tensor& z, const BatchNormTensors& of_z, BatchNormOptions o) {
  HT_CHECK(x.defined() && z.defined(), "batch_norms_relu: x or z is undefined");
  return call(op::batch_norms_relu, {x, of_x.w, of_x.b, of_x.running_mean, of_x.running_var, z, of_z.w, of_z.b, of_z.running_mean, of_z.running_var},
              attrs_of(o));
}

Tensor layer_norm(const Tensor& x, const Shape& shape, const Tensor& w, const Tensor& b, double eps) {
  return over_rows(op::layer_norm, RowNorm::layer, x, shape, w, b, eps);
}
AddedNorm add_layer_norm(const Tensor& x, const Tensor& z, const Shape& shape, const Tensor& w, const Tensor& b, double eps) {
  HT_CHECK(x.defined() && z.defined(), "add_layer_norm: x or z is undefined");
  HT_CHECK(is_floating(x.dtype()) && is_floating(z.dtype()), "add_layer_norm: expected floating dtypes, got x ", x.dtype(), " and z ", z.dtype(),
           "; cast with to()");
  Operand operands[] = {x, z};
  DType t = elementwise::meeting_dtype(op::add_layer_norm, floating_types, {&operands[0], &operands[1]});
  auto affine = [t](const Tensor& v) { return v.defined() && is_16bit_dtype(v.dtype()) && t == DType::f32 ? cast(v, t) : v; };
  Tensor branch = is_16bit_dtype(x.dtype()) && t == DType::f32 ? x : cast(x, t), stream = cast(z, t);
  if (stream.shape() != x.shape()) stream = expand(stream, x.shape());
  const Attrs attrs = attrs_of_rows(op::add_layer_norm, RowNorm::layer, x, shape, eps);
  Tensors all = call_all(op::add_layer_norm, trimmed({branch, stream, affine(w), affine(b)}), attrs);
  return {all[0], all[1]};
}
Tensor rms_norm(const Tensor& x, const Shape& shape, const Tensor& w, double eps) { return over_rows(op::rms_norm, RowNorm::rms, x, shape, w, {}, eps); }
Tensor group_norm(const Tensor& x, Size groups, const Tensor& w, const Tensor& b, double eps) {
  HT_CHECK(x.defined(), "group_norm: x is undefined");
  return call(op::group_norm, trimmed({x, w, b}), Attrs::of(RowNormAttrs{eps, groups, RowNorm::group}));
}
Tensor instance_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps) {
  HT_CHECK(x.defined() && x.rank() >= 2 && x.size(1) > 0, "instance_norm: expected x [n, channels, ...]", x.defined() ? text::cat(", got ", x.meta()) : "");
  return group_norm(x, x.size(1), w, b, eps);
}

}  // namespace halftone
