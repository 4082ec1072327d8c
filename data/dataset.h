#pragma once
// Datasets: whatever has a size and gives batches. get() takes the indices of a whole batch at once, and several
// threads may call it at the same time, so it must not change the dataset.
#include <algorithm>
#include <concepts>
#include <cstdint>
#include <span>
#include <vector>

#include "halftone/core/tensor.h"

namespace halftone::data {

// size() is the number of examples; get(indices) is a batch of any type, of the examples with these indices, which are
// in [0, size()) and may repeat.
template <class D>
concept Dataset = requires(const D& data, std::span<const int64_t> indices) {
  { data.size() } -> std::convertible_to<int64_t>;
  data.get(indices);
};

// Inputs and what they should become, the examples in dimension 0 of both: auto& [x, target] = batch.
struct Batch {
  Tensor x, target;
  int64_t size() const { return x.size(0); }
  Batch to(Device device) const { return {x.to(device), target.to(device)}; }
};

// A row of one of several tensors.
struct Row {
  size_t tensor;
  int64_t row;
};
// The given rows (indices into dimension 0) as one new tensor, outside the tape, gathered where the tensors are. They are on one
// device, of one dtype, and of one shape but for dimension 0; throws Error otherwise, or when a row is out of range.
HT_API Tensor take_rows(std::span<const Tensor> tensors, std::span<const Row> rows);
HT_API Tensor take_rows(const Tensor& tensor, std::span<const int64_t> rows);

// Examples held in two tensors. On a GPU, batches are gathered there: TensorDataset(x, target).to(Device::cuda()).
struct HT_API TensorDataset {
  Tensor x, target;
  // Throws Error unless both are on one device, with as many examples.
  TensorDataset(Tensor x, Tensor target);
  TensorDataset to(Device device) const { return {x.to(device), target.to(device)}; }
  int64_t size() const { return x.size(0); }
  Batch get(std::span<const int64_t> indices) const { return {take_rows(x, indices), take_rows(target, indices)}; }
};

HT_API void check_indices(const char* who, std::span<const int64_t> indices, int64_t size);

// Some examples of another dataset, which it holds by value.
template <Dataset D>
class Subset {
 public:
  Subset(D data, std::vector<int64_t> indices) : data_(std::move(data)), indices_(std::move(indices)) {
    check_indices("Subset", indices_, data_.size());
  }
  int64_t size() const { return static_cast<int64_t>(indices_.size()); }
  auto get(std::span<const int64_t> indices) const {
    check_indices("Subset", indices, size());
    std::vector<int64_t> inner;
    for (int64_t i : indices) inner.push_back(indices_[static_cast<size_t>(i)]);
    return data_.get(inner);
  }
  const std::vector<int64_t>& indices() const { return indices_; }

 private:
  D data_;
  std::vector<int64_t> indices_;
};

// Datasets of one type one after the other; their batches are data::Batch.
template <Dataset D>
class ConcatDataset {
 public:
  explicit ConcatDataset(std::vector<D> parts) : parts_(std::move(parts)) {
    for (const D& part : parts_) ends_.push_back(checked_add(size(), part.size()));
  }
  int64_t size() const { return ends_.empty() ? 0 : ends_.back(); }
  Batch get(std::span<const int64_t> indices) const {
    check_indices("ConcatDataset", indices, size());
    std::vector<std::vector<int64_t>> inner(parts_.size());
    std::vector<Row> rows;
    for (int64_t i : indices) {
      const auto part = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), i) - ends_.begin());
      rows.push_back({part, static_cast<int64_t>(inner[part].size())});
      inner[part].push_back(part == 0 ? i : i - ends_[part - 1]);
    }
    std::vector<Tensor> x(parts_.size()), target(parts_.size());
    for (size_t p = 0; p < parts_.size(); ++p) {
      if (inner[p].empty()) continue;
      Batch batch = parts_[p].get(inner[p]);
      x[p] = std::move(batch.x);
      target[p] = std::move(batch.target);
    }
    return {take_rows(x, rows), take_rows(target, rows)};
  }

 private:
  std::vector<D> parts_;
  std::vector<int64_t> ends_;  // one past the last index of each part
};

HT_API std::vector<std::vector<int64_t>> split_indices(int64_t size, const std::vector<int64_t>& sizes, uint64_t seed);
// Disjoint random subsets of the given sizes, which must add up to the dataset's.
template <Dataset D>
std::vector<Subset<D>> random_split(const D& data, const std::vector<int64_t>& sizes, uint64_t seed = 0) {
  std::vector<Subset<D>> parts;
  for (auto& indices : split_indices(data.size(), sizes, seed)) parts.emplace_back(data, std::move(indices));
  return parts;
}

}  // namespace halftone::data
