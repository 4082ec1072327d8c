#pragma once
// The families' tables, gathered by all.cpp into the library's list of operators. Internal to ops/.
#include "halftone/core/op.h"

namespace halftone {

void fill_cpu_unary();
void fill_cpu_binary();
void fill_cpu_ternary();
void fill_cpu_reduce();
void fill_cpu_optimizers();
std::span<OpDef* const> copy_ops();
std::span<OpDef* const> shape_ops();
std::span<OpDef* const> rearrange_ops();
std::span<OpDef* const> reduce_ops();
std::span<OpDef* const> scan_ops();
std::span<OpDef* const> order_ops();
std::span<OpDef* const> matmul_ops();
std::span<OpDef* const> conv_ops();
std::span<OpDef* const> norm_ops();
std::span<OpDef* const> pool_ops();
std::span<OpDef* const> resize_ops();
std::span<OpDef* const> softmax_ops();
std::span<OpDef* const> loss_ops();
std::span<OpDef* const> index_ops();
std::span<OpDef* const> random_ops();
std::span<OpDef* const> attention_ops();
std::span<OpDef* const> recurrent_ops();
std::span<OpDef* const> update_ops();
std::span<OpDef* const> schedule_ops();

}  // namespace halftone
