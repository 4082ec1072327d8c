// ctc_loss on CUDA: a block for each item of the batch, threads side by side for states, one step after the other.
#include "halftone/ops/ctc.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/fault.cuh"
#include "halftone/cuda/numeric.cuh"

namespace halftone::cuda {
namespace {

using detail::CtcItem;
using detail::never;
constexpr int threads = 256;

struct Batch {
  int64_t steps, count, classes, targets, width;  // width: states of the longest target
  const int64_t *target, *input_lengths, *target_lengths;
  int64_t x_step, x_item, x_class, blank;
  FaultSite bad_target, bad_length;

  // Item n, or one of no steps and a target, which has an infinite loss, when an index is out of range.
  template <class T> __device__ CtcItem<T> item(const T* x, int64_t n) const {
    CtcItem<T> i{x + n * x_item, x_step, x_class, target + n * targets, input_lengths[n], target_lengths[n], blank, classes};
    bool valid = true;
    if (i.steps < 0 || i.steps > steps) {
      report(bad_length, i.steps, n, steps);
      valid = false;
    }
    if (i.length < 0 || i.length > targets) {
      report(bad_length, i.length, n, targets);
      valid = false;
    }
    for (int64_t k = 0; valid && k < i.length; ++k)
      if (i.target[k] < 0 || i.target[k] >= classes || i.target[k] == blank) {
        report(bad_target, i.target[k], n * targets + k, classes);
        valid = false;
      }
    if (!valid) {
      i.steps = 0;
      i.length = -1;
    }
    return i;
  }
};
Batch batch_of(const Call& c, const Tensor& targets, const Tensor& input_lengths, const Tensor& target_lengths) {
  const Tensor& x = c.in[0];
  return {x.size(0), x.size(1), x.size(2), targets.size(1), 2 * targets.size(1) + 1, targets.data<int64_t>(),
          input_lengths.data<int64_t>(), target_lengths.data<int64_t>(), x.strides()[0], x.strides()[1], x.strides()[2],
          c.as<int64_t>(), fault_site("ctc_loss: target"), fault_site("ctc_loss: length")};
}

template <class T>
__global__ void __launch_bounds__(threads) ctc_kernel(accumulate_t<T>* losses, double* alphas, const T* x, const Batch b) {
  wait_for_previous();
  for (int64_t n = blockIdx.x; n < b.count; n += gridDim.x) {
    const CtcItem<T> item = b.item(x, n);
    double* alpha = alphas + n * b.steps * b.width;
    for (int64_t t = 0; t < b.steps; ++t) {
      for (int64_t s = threadIdx.x; s < b.width; s += threads)
        alpha[t * b.width + s] =
            t < item.steps && s < item.states() ? item.alpha(alpha + (t - 1) * b.width, t, s) : never;
      __syncthreads();
    }
    if (threadIdx.x == 0)
      losses[n] = item.length < 0 ? static_cast<accumulate_t<T>>(NAN)
                                  : static_cast<accumulate_t<T>>(item.loss(alpha + (item.steps - 1) * b.width));
    __syncthreads();
  }
}

// How often each class is emitted at a time: sums over the states that emit it, which a list joins in order.
template <class T>
__global__ void __launch_bounds__(threads)
    ctc_grad_kernel(T* dx, const T* x, const double* alphas, const accumulate_t<T>* g, double* betas, int64_t* lists,
                    const Batch b) {
  wait_for_previous();
  for (int64_t n = blockIdx.x; n < b.count; n += gridDim.x) {
    const CtcItem<T> item = b.item(x, n);
    const double* alpha = alphas + n * b.steps * b.width;
    double *here = betas + 3 * n * b.width, *after = here + b.width, *share = after + b.width;
    int64_t *next = lists + 2 * n * b.width, *first = next + b.width;  // the next state of the same label; is one before?
    const double loss = item.length < 0 ? static_cast<double>(NAN) : item.loss(alpha + (item.steps - 1) * b.width);
    for (int64_t s = threadIdx.x; s < item.states(); s += threads) {
      next[s] = -1;
      first[s] = true;
      for (int64_t r = s + 2; r < item.states() && next[s] < 0; r += 2)
        if (item.label(r) == item.label(s)) next[s] = r;
      for (int64_t r = s % 2; r < s && first[s] != 0; r += 2) first[s] = item.label(r) != item.label(s);
    }
    for (int64_t t = b.steps - 1; t >= 0; --t) {
      T* row = dx + (t * b.count + n) * b.classes;
      for (int64_t k = threadIdx.x; k < b.classes; k += threads) row[k] = to<T>(item.length < 0 ? NAN : 0.0);
      if (t >= item.steps || !(loss < HUGE_VAL)) continue;
      for (int64_t s = threadIdx.x; s < item.states(); s += threads) {
        here[s] = item.beta(after, t, s);
        share[s] = ::exp(alpha[t * b.width + s] + here[s] + loss);
      }
      __syncthreads();
      for (int64_t s = threadIdx.x; s < item.states(); s += threads) {
        if (first[s] == 0) continue;
        double sum = 0;
        for (int64_t r = s; r >= 0; r = next[r]) sum += share[r];
        row[item.label(s)] = to<T>(sum == 0 ? 0.0 : -static_cast<double>(g[n]) * sum);
      }
      double* swapped = here;
      here = after;
      after = swapped;
      __syncthreads();
    }
    __syncthreads();
  }
}

int64_t grid(const Batch& b) { return std::min<int64_t>(b.count, int64_t{32} * sm_count()); }

void run_ctc(const Call& c, std::span<Tensor> out) {
  const Tensor targets = c.in[1].contiguous(), in = c.in[2].contiguous(), lengths = c.in[3].contiguous();
  const Batch b = batch_of(c, targets, in, lengths);
  Scratch own(out.size() > 1 ? 0 : static_cast<size_t>(b.count * b.steps * b.width) * sizeof(double));
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    launch("ctc_loss", ctc_kernel<T>, grid(b), threads, out[0].data<accumulate_t<T>>(),
           out.size() > 1 ? out[1].data<double>() : own.as<double>(), c.in[0].data<T>(), b);
  });
}

void run_ctc_grad(const Call& c, std::span<Tensor> out) {
  const Tensor targets = c.in[1].contiguous(), in = c.in[2].contiguous(), lengths = c.in[3].contiguous(),
               alpha = c.in[4].contiguous(), g = c.in[5].contiguous();
  const Batch b = batch_of(c, targets, in, lengths);
  const auto states = static_cast<size_t>(b.count * b.width);
  Scratch betas(3 * states * sizeof(double)), lists(2 * states * sizeof(int64_t));
  visit<floating_types>(c.in[0].dtype(), [&]<class T>(Type<T>) {
    launch("ctc_loss_grad", ctc_grad_kernel<T>, grid(b), threads, out[0].data<T>(), c.in[0].data<T>(),
           alpha.data<double>(), g.data<accumulate_t<T>>(), betas.as<double>(), lists.as<int64_t>(), b);
  });
}

}  // namespace

void fill_cuda_ctc() {
  fill<run_ctc>(op::ctc_loss);
  fill<run_ctc_grad>(op::ctc_loss_grad);
}

}  // namespace halftone::cuda
