// The library's operators in one list.
#include "halftone/ops/all.h"

#include "halftone/ops/optimizers.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/ternary.h"
#include "halftone/ops/unary.h"

namespace halftone {

void fill_cpu_exponentials();  // exponential.cpp; after the others, in the place of some

std::span<OpDef* const> library_ops() {
  static const std::vector<OpDef*> all = [] {
    fill_cpu_unary();
    fill_cpu_binary();
    fill_cpu_ternary();
    fill_cpu_reduce();
    fill_cpu_optimizers();
    fill_cpu_exponentials();
    std::vector<OpDef*> ops;
    elementwise::each(unary::All{}, [&]<class Op>(Type<Op>) { ops.push_back(&unary::def<Op>); });
    elementwise::each(binary::All{}, [&]<class Op>(Type<Op>) { ops.push_back(&binary::def<Op>); });
    elementwise::each(ternary::All{}, [&]<class Op>(Type<Op>) { ops.push_back(&ternary::def<Op>); });
    elementwise::each(reduce::Family{}, [&]<class Op>(Type<Op>) { ops.push_back(&reduce::def<Op>); });
    elementwise::each(update::All{}, [&]<class Op>(Type<Op>) { ops.push_back(&update::def<Op>); });
    for (auto family : {copy_ops(), shape_ops(), rearrange_ops(), reduce_ops(), scan_ops(), order_ops(), matmul_ops(), conv_ops(), norm_ops(),
                        pool_ops(), resize_ops(), softmax_ops(), loss_ops(), index_ops(), random_ops(), attention_ops(), recurrent_ops(), update_ops(),
                        schedule_ops()})
      ops.insert(ops.end(), family.begin(), family.end());
    return ops;
  }();
  return all;
}

}  // namespace halftone
