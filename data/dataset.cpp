// Rows by bytes on the CPU and by a gather on a GPU, checks of indices, and splits.
#include "halftone/data/dataset.h"

#include <cstring>

#include "halftone/core/parallel.h"
#include "halftone/core/thread_state.h"
#include "halftone/data/sampler.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/index.h"
#include "halftone/ops/shape.h"

namespace halftone::data {

void check_indices(const char* who, std::span<const int64_t> indices, int64_t size) {
  for (int64_t i : indices)
    HT_CHECK(i >= 0 && i < size, who, ": index ", i, " is out of range for ", size, " examples");
}

namespace {

// Checks the rows against the tensors; returns the first defined one.
const Tensor& check_rows(std::span<const Tensor> tensors, std::span<const Row> rows) {
  const Tensor* first = nullptr;
  for (const Tensor& t : tensors) {
    if (!t.defined()) continue;
    HT_CHECK(t.rank() > 0, "take_rows: a 0-d tensor has no rows");
    if (!first) first = &t;
    Shape expected = first->shape();
    expected[0] = t.shape()[0];
    HT_CHECK(t.shape() == expected && t.dtype() == first->dtype(), "take_rows: expected rows as in ", first->meta(), ", got ",
             t.meta());
    HT_CHECK(t.device() == first->device(), "take_rows: expected tensors on ", first->device(), ", got one on ", t.device());
  }
  HT_CHECK(first, "take_rows: there is no tensor to take rows from");
  for (const Row& r : rows) {
    HT_CHECK(r.tensor < tensors.size() && tensors[r.tensor].defined(), "take_rows: there is no tensor ", r.tensor);
    const Tensor& from = tensors[r.tensor];
    HT_CHECK(r.row >= 0 && r.row < from.shape()[0], "take_rows: row ", r.row, " is out of range for ", from.meta());
  }
  return *first;
}

// By the device: one gather out of all tensors in a row.
Tensor gather_rows(std::span<const Tensor> tensors, std::span<const Row> rows) {
  const NoGrad off;
  std::vector<Tensor> all;
  std::vector<int64_t> begins, index;
  int64_t begin = 0;
  for (const Tensor& t : tensors) {
    begins.push_back(begin);
    if (!t.defined()) continue;
    begin += t.shape()[0];
    all.push_back(t.detach());
  }
  for (const Row& r : rows) index.push_back(begins[r.tensor] + r.row);
  const Tensor from = all.size() == 1 ? all[0] : cat(all);
  return index_select(from, 0, tensor(index).to(from.device()));
}

}  // namespace

Tensor take_rows(std::span<const Tensor> tensors, std::span<const Row> rows) {
  const Tensor& first = check_rows(tensors, rows);
  if (first.device() != Device::cpu()) return gather_rows(tensors, rows);
  std::vector<Tensor> dense(tensors.size());
  std::vector<const std::byte*> base(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    dense[i] = tensors[i].is_contiguous() ? tensors[i] : tensors[i].detach().contiguous();
    base[i] = static_cast<const std::byte*>(dense[i].raw_data());
  }
  Shape shape = first.shape();
  shape[0] = static_cast<int64_t>(rows.size());
  Tensor out = Tensor::empty(Meta(shape, first.dtype(), Device::cpu()));
  if (out.numel() == 0) return out;
  const size_t bytes = static_cast<size_t>(out.numel()) / rows.size() * size_of(out.dtype());
  auto* to = static_cast<std::byte*>(out.raw_data());
  const auto row = [&](size_t i) { return base[rows[i].tensor] + static_cast<size_t>(rows[i].row) * bytes; };
  constexpr size_t share = size_t{1} << 19;  // bytes that are worth a thread
  constexpr size_t ahead = 8;                // rows lie anywhere in memory: their beginnings are asked for before their turn
  parallel_for(static_cast<int64_t>(rows.size()), static_cast<int64_t>(std::max<size_t>(share / bytes, 1)), [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin), stop = static_cast<size_t>(end); i < stop; ++i) {
      if (i + ahead < stop) __builtin_prefetch(row(i + ahead));
      std::memcpy(to + i * bytes, row(i), bytes);
    }
  });
  return out;
}

Tensor take_rows(const Tensor& tensor, std::span<const int64_t> rows) {
  std::vector<Row> all;
  all.reserve(rows.size());
  for (int64_t r : rows) all.push_back({0, r});
  return take_rows({&tensor, 1}, all);
}

TensorDataset::TensorDataset(Tensor x_, Tensor target_) : x(std::move(x_)), target(std::move(target_)) {
  HT_CHECK(x.defined() && target.defined(), "TensorDataset: both tensors must be defined");
  HT_CHECK(x.rank() > 0 && target.rank() > 0 && x.size(0) == target.size(0),
           "TensorDataset: expected as many targets as examples in dimension 0, got ", x.meta(), " and ",
           target.meta());
  HT_CHECK(x.device() == target.device(), "TensorDataset: expected examples and targets on one device, got ", x.device(), " and ",
           target.device());
}

std::vector<std::vector<int64_t>> split_indices(int64_t size, const std::vector<int64_t>& sizes, uint64_t seed) {
  int64_t sum = 0;
  for (int64_t s : sizes) {
    HT_CHECK(s >= 0, "random_split: expected sizes of 0 or more, got ", s);
    sum = checked_add(sum, s);
  }
  HT_CHECK(sum == size, "random_split: expected sizes that add up to ", size, ", got ", sum);
  constexpr uint64_t split_stream = uint64_t{0x73706c69} << 32;  // apart from a loader's orders with the same seed
  const auto order = permutation(size, seed, split_stream);
  std::vector<std::vector<int64_t>> parts;
  auto at = order.begin();
  for (int64_t s : sizes) {
    parts.emplace_back(at, at + s);
    at += s;
  }
  return parts;
}

}  // namespace halftone::data
