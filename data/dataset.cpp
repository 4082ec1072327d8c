// Rows by bytes, checks of indices, and orders that are the same on every machine.
#include "halftone/data/dataset.h"

#include <cstring>
#include <numeric>

#include "halftone/core/random.h"

namespace halftone::data {

void check_indices(const char* who, std::span<const int64_t> indices, int64_t size) {
  for (int64_t i : indices)
    HT_CHECK(i >= 0 && i < size, who, ": index ", i, " is out of range for ", size, " examples");
}

Tensor take_rows(std::span<const Tensor> tensors, std::span<const Row> rows) {
  std::vector<Tensor> dense(tensors.size());
  const Tensor* first = nullptr;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    if (!t.defined()) continue;
    HT_CHECK(t.device() == Device::cpu(), "take_rows: expected tensors on the CPU, got ", t.device());
    HT_CHECK(t.rank() > 0, "take_rows: a 0-d tensor has no rows");
    if (first) {
      Shape expected = first->shape();
      expected[0] = t.shape()[0];
      HT_CHECK(t.shape() == expected && t.dtype() == first->dtype(), "take_rows: expected rows as in ", first->meta(),
               ", got ", t.meta());
    } else
      first = &t;
    dense[i] = t.is_contiguous() ? t : t.detach().contiguous();
  }
  HT_CHECK(first, "take_rows: there is no tensor to take rows from");
  Shape shape = first->shape();
  shape[0] = static_cast<int64_t>(rows.size());
  Tensor out = Tensor::empty(Meta(shape, first->dtype(), Device::cpu()));
  if (out.numel() == 0) return out;
  const size_t bytes = static_cast<size_t>(out.numel()) / rows.size() * size_of(out.dtype());
  auto* to = static_cast<std::byte*>(out.raw_data());
  for (const Row& r : rows) {
    HT_CHECK(r.tensor < dense.size() && dense[r.tensor].defined(), "take_rows: there is no tensor ", r.tensor);
    const Tensor& from = dense[r.tensor];
    HT_CHECK(r.row >= 0 && r.row < from.shape()[0], "take_rows: row ", r.row, " is out of range for ", from.meta());
    std::memcpy(to, static_cast<const std::byte*>(from.raw_data()) + static_cast<size_t>(r.row) * bytes, bytes);
    to += bytes;
  }
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
  HT_CHECK(x.device() == Device::cpu() && target.device() == Device::cpu(),
           "TensorDataset: expected tensors on the CPU; a loader's .device moves its batches");
}

// Fisher and Yates. The modulus favours small numbers by less than n / 2^64.
std::vector<int64_t> permutation(int64_t n, uint64_t seed, uint64_t stream) {
  HT_CHECK(n >= 0, "permutation: expected n of 0 or more, got ", n);
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  for (size_t left = order.size(); left > 1; --left) {
    const Philox4 r = philox(seed, left, stream);
    std::swap(order[left - 1], order[(uint64_t{r.v[0]} << 32 | r.v[1]) % left]);
  }
  return order;
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
