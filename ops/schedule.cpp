// Learning-rate schedules on the CPU.
#include "halftone/ops/schedule.h"

#include "halftone/ops/all.h"

namespace halftone {
namespace {

// in: lr f64 [], count i64 [], table f64 [n], found_inf f32 [] or none; attributes: the number of pieces. Counts the step that was
// made unless it was skipped, and sets the rate of the next.
void run_schedule(const Call& c, std::span<Tensor>) {
  if (c.has(3) && *c.in[3].data<float>() != 0) return;
  int64_t& count = *c.in[1].data<int64_t>();
  *c.in[0].data<double>() = schedule::value_at(c.in[2].data<double>(), c.as<int64_t>(), ++count);
}

}  // namespace

namespace op {

constinit OpDef schedule = {
    .name = "schedule", .doc = "counts a real step and sets the learning rate of the next from a table of pieces", .cast = Cast::keep,
    .infer = [](const Call& c) -> Metas {
      HT_CHECK(c.in[2].dtype() == DType::f64 && c.in[2].is_contiguous() && c.in[2].numel() >= c.as<int64_t>() * halftone::schedule::columns,
               "schedule: expected a contiguous f64 table of at least ", c.as<int64_t>(), " pieces, got ", c.in[2].meta());
      return {};
    },
    .writes = [](const Call&, size_t i) { return i < 2; },
    .dtypes = {only(DType::f64), only(DType::f64)},
    .samples = []() -> std::vector<Sample> {
      std::vector<Sample> all;
      for (int64_t n : {1, 2, 3, 4, 5, 7, 33, 257})  // values in [0, 1): pieces of kind constant from step 0 on
        all.push_back({{{.shape = {}, .low = 1, .high = 2, .dtype = DType::f64, .differentiable = false},
                        {.shape = {}, .low = 0, .high = 9, .dtype = DType::i64, .differentiable = false},
                        {.shape = {n * halftone::schedule::columns}, .low = 0, .high = .99, .dtype = DType::f64, .differentiable = false},
                        {.shape = {}, .low = 0, .high = 1e-9, .dtype = DType::f32, .differentiable = false, .present = false}},
                       Attrs::of(n)});
      return all;
    },
    .kernel = {run_schedule}};

}  // namespace op

std::span<OpDef* const> schedule_ops() {
  static constexpr OpDef* all[] = {&op::schedule};
  return all;
}

}  // namespace halftone
