#pragma once
// The kernels' side of the operators' table: each family fills the CUDA slots of its operators, in cuda/<family>.cu.

namespace halftone::cuda {

void fill_cuda_unary();
void fill_cuda_activation();
void fill_cuda_binary();
void fill_cuda_comparison();
void fill_cuda_ternary();
void fill_cuda_reduce();
void fill_cuda_product();
void fill_cuda_extremum();
void fill_cuda_scan();
void fill_cuda_order();
void fill_cuda_copy();
void fill_cuda_softmax();
void fill_cuda_loss();
void fill_cuda_ctc();
void fill_cuda_index();
void fill_cuda_rearrange();
void fill_cuda_random();
void fill_cuda_attention();
void fill_cuda_recurrent();
void fill_cuda_update();
void fill_cuda_optimizers();
void fill_cuda_schedule();
void fill_cuda_matmul();
void fill_cuda_relu_grad();
void fill_cuda_conv();
void fill_cuda_batch_norm();
void fill_cuda_norm();
void fill_cuda_pool();
void fill_cuda_resize();

void mark_by_nvtx();  // ranges for a profiler outside

}  // namespace halftone::cuda
