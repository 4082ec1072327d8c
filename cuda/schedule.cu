// Learning-rate schedules on CUDA.
#include "halftone/ops/schedule.h"

#include "halftone/cuda/all.h"
#include "halftone/cuda/runtime.h"

namespace halftone::cuda {
namespace {

__global__ void schedule_kernel(double* lr, int64_t* count, const double* table, const int64_t pieces, const float* found_inf) {
  wait_for_previous();
  if (found_inf && *found_inf != 0) return;
  *lr = schedule::value_at(table, pieces, ++*count);
}

void run_schedule(const Call& c, std::span<Tensor>) {
  launch("schedule", schedule_kernel, 1, 1, c.in[0].data<double>(), c.in[1].data<int64_t>(), c.in[2].data<double>(), c.as<int64_t>(),
         c.has(3) ? c.in[3].data<float>() : nullptr);
}

}  // namespace

void fill_cuda_schedule() { fill<run_schedule>(op::schedule); }

}  // namespace halftone::cuda
