// Losses on CUDA. cross_entropy and its gradient: a group of threads reads each row of logits once, keeping its largest element
// and the sum of exponentials relative to it; the block that adds up the losses also finds targets out of range.
#include "halftone/ops/loss.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/elementwise.cuh"
#include "halftone/cuda/fault.cuh"
#include "halftone/cuda/reduce.cuh"

namespace halftone::cuda {
namespace {

using reduce::Amax;

// e to the x <= 0. Of 16-bit logits by the hardware, which errs by (2 + 1.2 |x|) 2^-23 of it: least where it counts in a sum, and lost in a
// gradient that is rounded.
template <class T> __device__ compute_t<T> exponential(compute_t<T> x) {
  if constexpr (is_16bit<T>) return __expf(x);
  else return ::exp(x);
}

// Of part of a row: the largest element, sum(exp(x - high)), sum(x). A part of only -inf has the total 0.
template <class T> struct Part {
  using C = compute_t<T>;
  C high, total, all;
  __device__ static Part none() { return {Amax::start<C>(), 0, 0}; }
  __device__ static C rescaled(C total, C from, C high) { return total == 0 ? C(0) : total * exponential<T>(from - high); }
  __device__ static Part merge(Part a, Part b) {
    C high = Amax::merge(a.high, b.high);
    return {high, rescaled(a.total, a.high, high) + rescaled(b.total, b.high, high), a.all + b.all};
  }
  template <int m, int n> __device__ void add(const C (&x)[m][n]) {
    C top = high;
#pragma unroll
    for (int u = 0; u < m; ++u)
#pragma unroll
      for (int j = 0; j < n; ++j) top = Amax::add(top, x[u][j], 0);
    if (top == Amax::start<C>()) return;
    total = rescaled(total, high, top);
    high = top;
#pragma unroll
    for (int u = 0; u < m; ++u)
#pragma unroll
      for (int j = 0; j < n; ++j) total += exponential<T>(x[u][j] - high);
  }
};

constexpr int together = 2;  // packs of a row that a thread has under way

// Row i of [rows, classes], in packs. What is past its end is -inf.
struct Table {
  int64_t rows, classes;
  bool packed;
};
template <int n, class T>
__device__ void load_logits(compute_t<T> (&v)[n], const T* row, int64_t p, const Table& table) {
  using C = compute_t<T>;
  if (table.packed && p * n < table.classes) {
    auto in = load_pack<n>(row + p * n);
#pragma unroll
    for (int j = 0; j < n; ++j) v[j] = to<C>(in.v[j]);
  } else {
#pragma unroll
    for (int j = 0; j < n; ++j) v[j] = p * n + j < table.classes ? to<C>(row[p * n + j]) : Amax::start<C>();
  }
}

// ---- the losses of all rows, joined by one block

struct Joined {
  double sum;
  int64_t count, bad;  // how many targets count; the first row whose target is out of range
};
template <class C> struct Join {
  const int64_t* target;
  Table table;
  CrossEntropyAttrs options;
  FaultSite site;
  C *y, *count;  // either may be null

  __device__ void operator()(const C* losses) const {
    const Joined none = {0, 0, table.rows};
    Joined s = none;
    for (int64_t i = threadIdx.x; i < table.rows; i += blockDim.x) {
      const int64_t t = target[i];
      s.sum += losses[i];
      if (t == options.ignore_index) continue;
      ++s.count;
      if ((t < 0 || t >= table.classes) && i < s.bad) s.bad = i;
    }
    s = Group(static_cast<int>(blockDim.x)).combine(s, none, [](Joined a, Joined b) {
      return Joined{a.sum + b.sum, a.count + b.count, a.bad < b.bad ? a.bad : b.bad};
    });
    if (threadIdx.x != 0) return;
    if (s.bad < table.rows) report(site, target[s.bad], s.bad, table.classes);
    if (y) *y = static_cast<C>(options.reduction == Reduction::mean ? s.sum / static_cast<double>(s.count) : s.sum);
    if (count) *count = static_cast<C>(s.count);
  }
};
template <class C> __global__ void __launch_bounds__(1024) join_losses(const Join<C> join, const C* losses) {
  wait_for_previous();
  join(losses);
}

constexpr int rows_of_block = 1024;

// losses[i], unless they are null and stay in the block, and lse[i], unless it is null. A grid of one block joins the losses, too.
template <class T>
__global__ void __launch_bounds__(1024) cross_entropy_rows(const T* x, compute_t<T>* losses, compute_t<T>* lse,
                                                           const Join<compute_t<T>> join, const int width) {
  wait_for_previous();
  using C = compute_t<T>;
  constexpr int n = pack_size<T>;
  const Group group(width);
  const Table& table = join.table;
  const bool smooth = join.options.label_smoothing != 0;
  const int64_t packs = (table.classes + n - 1) / n;
  __shared__ C losses_of_block[rows_of_block];
  if (!losses) losses = losses_of_block;
  for (int64_t base = group.first(); base < table.rows; base += group.step()) {
    const int64_t i = base + group.number;
    const T* row = x + i * table.classes;
    const int64_t t = i < table.rows ? join.target[i] : 0;
    auto s = Part<T>::none();
    if (i < table.rows)
      for (int64_t p = group.lane; p < packs; p += together * width) {
        C v[together][n];
#pragma unroll
        for (int u = 0; u < together; ++u) load_logits<n>(v[u], row, p + u * width, table);
        s.add(v);
        if (smooth)
          for (int u = 0; u < together; ++u)
            for (int j = 0; j < n; ++j) s.all += (p + u * width) * n + j < table.classes ? v[u][j] : C(0);
      }
    s = group.combine(s, Part<T>::none(), Part<T>::merge);
    if (i >= table.rows || group.lane != 0) continue;
    const C log_total = s.high == Amax::start<C>() ? C(NAN) : ::log(s.total);
    if (lse) lse[i] = s.high + log_total;
    if (t == join.options.ignore_index) losses[i] = 0;
    else if (t < 0 || t >= table.classes) losses[i] = C(NAN);
    else {
      const C smoothing = static_cast<C>(join.options.label_smoothing);
      C loss = (s.high - to<C>(row[t])) + log_total;  // shifted first: large logits lose no digits
      if (smooth)
        loss = (1 - smoothing) * loss + smoothing * ((s.high - s.all / static_cast<C>(table.classes)) + log_total);
      losses[i] = loss;
    }
  }
  if (gridDim.x > 1) return;
  __syncthreads();
  join(losses);
}

// dx = g * (softmax(x) - q) of rows that count, over the count for a mean; q is `off`, and for the target `on` more.
template <class T>
__global__ void __launch_bounds__(256)
    cross_entropy_grad_rows(T* dx, const T* x, const int64_t* target, const compute_t<T>* lse,
                            const compute_t<T>* count, const compute_t<T>* g, const Table table,
                            const Reduction reduction, const int64_t ignore_index, const compute_t<T> on,
                            const compute_t<T> off, const int width) {
  wait_for_previous();
  using C = compute_t<T>;
  constexpr int n = pack_size<T>;
  const Group group(width);
  const int64_t packs = (table.classes + n - 1) / n;
  for (int64_t i = group.first() + group.number; i < table.rows; i += group.step()) {
    // All of a row's loads are under way before the first of them is used.
    const int64_t t = target[i];
    const C shift = lse[i], given = g[reduction == Reduction::none ? i : 0], number = reduction == Reduction::mean ? *count : C(1);
    C v[together][n];
    auto load = [&](int64_t first) {
#pragma unroll
      for (int u = 0; u < together; ++u) load_logits<n>(v[u], x + i * table.classes, first + u * width, table);
    };
    load(group.lane);
    const bool counts = t != ignore_index;
    C scale = given * (C(1) / number);
    if (counts && (t < 0 || t >= table.classes)) scale = C(NAN);
    for (int64_t first = group.lane; first < packs; load(first += together * width)) {
#pragma unroll
      for (int u = 0; u < together; ++u) {
        const int64_t at = (first + u * width) * n, hit = t - at;  // the target's place in the pack
        if (at >= table.classes) break;
#pragma unroll
        for (int j = 0; j < n; ++j) v[u][j] = exponential<T>(v[u][j] - shift) - off;
        if (hit >= 0 && hit < n)
#pragma unroll
          for (int j = 0; j < n; ++j) v[u][j] -= hit == j ? on : C(0);
        Pack<T, n> out;
#pragma unroll
        for (int j = 0; j < n; ++j) out.v[j] = to<T>(counts ? scale * v[u][j] : C(0));
        store_part(dx + i * table.classes + at, table.classes - at, table.packed, out);
      }
    }
  }
}

// ---- launching

template <class T> Table table_of(const Tensor& x, const void* other) {
  constexpr int n = pack_size<T>;
  return {x.size(0), x.size(1), x.size(1) % n == 0 && aligned(x.raw_data(), 16) && aligned(other, 16)};
}

void run_cross_entropy(const Call& c, std::span<Tensor> out) {
  const Tensor x = c.in[0].contiguous(), target = c.in[1].contiguous();
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    using C = compute_t<T>;
    const bool joined = c.as<CrossEntropyAttrs>().reduction != Reduction::none;
    const Table table = table_of<T>(x, nullptr);
    const int width = group_width(ceil_div(table.classes, pack_size<T>), 256);
    // One block for a small batch: its losses are joined without a second launch.
    const bool one_block = table.rows > 0 && width <= warp_size && table.rows * width <= rows_of_block;
    Scratch memory(joined && !one_block ? static_cast<size_t>(table.rows) * sizeof(C) : 0);
    C* losses = joined ? memory.as<C>() : out[0].data<C>();
    C* lse = out.size() > 1 ? out[1].data<C>() : nullptr;
    Join<C> join{target.data<int64_t>(), table, c.as<CrossEntropyAttrs>(), fault_site("cross_entropy: target"),
                 joined ? out[0].data<C>() : nullptr, out.size() > 2 ? out[2].data<C>() : nullptr};
    if (one_block)
      return launch("cross_entropy", cross_entropy_rows<T>, 1,
                    static_cast<int>(ceil_div(table.rows * width, warp_size)) * warp_size, x.data<T>(), losses, lse,
                    join, width);
    // At least two blocks, or the only one would join.
    int64_t blocks = std::min<int64_t>(ceil_div(table.rows * width, 256), int64_t{64} * sm_count());
    if (table.rows > 0)
      launch("cross_entropy", cross_entropy_rows<T>, std::max<int64_t>(blocks, 2), 256, x.data<T>(), losses, lse, join,
             width);
    launch("cross_entropy", join_losses<C>, 1, 1024, join, losses);
  });
}

void run_cross_entropy_grad(const Call& c, std::span<Tensor> out) {
  const Tensor x = c.in[0].contiguous(), target = c.in[1].contiguous(), lse = c.in[2].contiguous(),
               g = c.in[4].contiguous();
  const Tensor& dx = out[0];
  if (dx.numel() == 0) return;
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    using C = compute_t<T>;
    const Table table = table_of<T>(x, dx.raw_data());
    const auto a = c.as<CrossEntropyAttrs>();
    const int width = group_width(ceil_div(table.classes, pack_size<T>), 256);
    int64_t blocks = std::min<int64_t>(ceil_div(table.rows * width, 256), int64_t{64} * sm_count());
    launch("cross_entropy_grad", cross_entropy_grad_rows<T>, blocks, 256, dx.data<T>(), x.data<T>(),
           target.data<int64_t>(), lse.data<C>(), c.in[3].data<C>(), g.data<C>(), table, a.reduction, a.ignore_index,
           static_cast<C>(1 - a.label_smoothing), static_cast<C>(a.label_smoothing / static_cast<double>(table.classes)), width);
  });
}

// ---- nll_loss: a reduction over targets

struct NllTotal { double loss, weight; };
template <class T> struct Nll {
  using Element = int64_t;
  using State = NllTotal;
  using C = accumulate_t<T>;
  using Result = C;
  const T* x;  // null: only the weights are summed
  const C* weight;
  int64_t row, column, classes;  // strides of x
  NllAttrs attrs;
  FaultSite site;
  __device__ static State none() { return {0, 0}; }
  // Of row i: its loss and the weight of its class.
  __device__ NllTotal at(int64_t t, int64_t i) const {
    if (t == attrs.ignore_index) return none();
    if (t < 0 || t >= classes) {
      report(site, t, i, classes);
      return {NAN, 0};
    }
    const C w = weight ? weight[t] : C(1);
    return {x ? static_cast<double>(-w * to<C>(x[i * row + t * column])) : 0, static_cast<double>(w)};
  }
  __device__ State add(State s, int64_t t, int64_t i, int64_t) const { return merge(s, at(t, i)); }
  __device__ static State merge(State s, State t) { return {s.loss + t.loss, s.weight + t.weight}; }
  __device__ C finish(State s, int64_t, int64_t) const {
    if (!x) return static_cast<C>(s.weight);
    return static_cast<C>(attrs.reduction == Reduction::mean ? s.loss / s.weight : s.loss);
  }
};

template <class T>
__global__ void __launch_bounds__(256) nll_rows(accumulate_t<T>* y, const int64_t* target, const int64_t n, const Nll<T> nll) {
  wait_for_previous();
  for (int64_t i = thread_index(); i < n; i += grid_threads()) y[i] = static_cast<accumulate_t<T>>(nll.at(target[i], i).loss);
}
template <class T>
__global__ void __launch_bounds__(256) nll_grad_rows(T* dx, const int64_t* target, const int64_t n, const Divisor classes,
                                                     const Nll<T> nll, const accumulate_t<T>* g,
                                                     const accumulate_t<T>* total) {
  wait_for_previous();
  using C = accumulate_t<T>;
  const C per_row = total ? 1 / *total : C(1);
  for (int64_t e = thread_index(); e < n * classes.divisor; e += grid_threads()) {
    const int64_t i = classes.divide(e), k = e - i * classes.divisor, t = target[i];
    C v = 0;
    if (t != nll.attrs.ignore_index) {
      if (t < 0 || t >= classes.divisor) {
        if (k == 0) report(nll.site, t, i, classes.divisor);
        v = C(NAN);
      } else if (k == t) {
        v = -(nll.attrs.reduction == Reduction::none ? g[i] : g[0]) * per_row * (nll.weight ? nll.weight[t] : C(1));
      }
    }
    dx[e] = to<T>(v);
  }
}

template <class T> Nll<T> nll_of(const Call& c, const Tensor& weight, int64_t classes) {
  return {nullptr, weight.defined() ? weight.data<accumulate_t<T>>() : nullptr, 0, 0, classes, c.as<NllAttrs>(),
          fault_site("nll_loss: target")};
}

void run_nll_loss(const Call& c, std::span<Tensor> out) {
  const Tensor &x = c.in[0], target = c.in[1].contiguous(), weight = c.has(2) ? c.in[2].contiguous() : Tensor();
  visit<floating_types>(x.dtype(), [&]<class T>(Type<T>) {
    using C = accumulate_t<T>;
    Nll<T> nll = nll_of<T>(c, weight, x.size(1));
    nll.x = x.data<T>();
    nll.row = x.strides()[0];
    nll.column = x.strides()[1];
    if (nll.attrs.reduction != Reduction::none) return reduce("nll_loss", nll, target, 1, out[0].data<C>());
    launch("nll_loss", nll_rows<T>, std::min<int64_t>(ceil_div(x.size(0), 256), int64_t{32} * sm_count()), 256,
           out[0].data<C>(), target.data<int64_t>(), x.size(0), nll);
  });
}

void run_nll_loss_grad(const Call& c, std::span<Tensor> out) {
  const Tensor g = c.in[0].contiguous(), target = c.in[1].contiguous(),
               weight = c.has(2) ? c.in[2].contiguous() : Tensor();
  const auto a = c.as<NllAttrs>();
  const Tensor& dx = out[0];
  if (dx.numel() == 0) return;
  visit<floating_types>(a.dtype, [&]<class T>(Type<T>) {
    using C = accumulate_t<T>;
    const Nll<T> nll = nll_of<T>(c, weight, a.classes);
    const bool mean = a.reduction == Reduction::mean;
    Scratch memory(mean ? sizeof(C) : 0);
    if (mean) reduce("nll_loss_grad", nll, target, 1, memory.as<C>());
    launch("nll_loss_grad", nll_grad_rows<T>, std::min<int64_t>(ceil_div(dx.numel(), 256), int64_t{32} * sm_count()), 256,
           dx.data<T>(), target.data<int64_t>(), target.numel(), Divisor(a.classes), nll, g.data<C>(), memory.as<C>());
  });
}

}  // namespace

void fill_cuda_loss() {
  fill<run_nll_loss>(op::nll_loss);
  fill<run_nll_loss_grad>(op::nll_loss_grad);
  fill<run_binary<binary::SquaredError>>(op::squared_error);
  fill<run_binary<binary::BinaryCrossEntropy>>(op::binary_cross_entropy);
  fill<run_binary<binary::BceWithLogits>>(op::binary_cross_entropy_with_logits);
  fill<run_cross_entropy>(op::cross_entropy);
  fill<run_cross_entropy_grad>(op::cross_entropy_grad);
}

}  // namespace halftone::cuda
