// Checked arithmetic on sizes, and what shapes and devices look like in messages.
#include "halftone/core/shape.h"

#include <algorithm>
#include <charconv>

#include "halftone/core/device.h"

namespace halftone {

void refuse_overflow(const char* what, int64_t a, int64_t b) { throw Error(text::cat("size ", a, what, b, " does not fit 64 bits")); }

void Shape::insert(int at, int64_t d) {
  push_back(d);
  std::rotate(dims_.begin() + at, dims_.begin() + rank_ - 1, dims_.begin() + rank_);
}
void Shape::erase(int at) {
  std::move(dims_.begin() + at + 1, dims_.begin() + rank_, dims_.begin() + at);
  dims_[static_cast<size_t>(--rank_)] = 0;
}

std::string str(const Shape& s) {
  std::string r = "[";
  for (auto d : s) r += (r.size() > 1 ? ", " : "") + std::to_string(d);
  return r + "]";
}

Shape broadcast(std::string_view op, const Shape& a, const Shape& b) {
  Shape r = Shape::filled(std::max(a.rank(), b.rank()), 1);
  for (size_t i = 0; i < r.size(); ++i) {
    int64_t da = i < r.size() - a.size() ? 1 : a[i + a.size() - r.size()];
    int64_t db = i < r.size() - b.size() ? 1 : b[i + b.size() - r.size()];
    HT_CHECK(da == db || da == 1 || db == 1, op, ": shapes ", a, " and ", b,
             " do not broadcast; counted from the back, sizes must be equal or 1");
    r[i] = da == 1 ? db : da;
  }
  return r;
}

int normalize_dim(std::string_view op, int64_t dim, int rank) {
  int64_t n = std::max(rank, 1);  // a 0-d tensor counts as having one dimension
  HT_CHECK(dim >= -n && dim < n, op, ": dim ", dim, " is out of range for a tensor of ", rank, " dimensions; expected ", -n,
           " to ", n - 1);
  return static_cast<int>(dim < 0 ? dim + n : dim);
}

std::string str(Device d) { return d.type == DeviceType::cpu ? "cpu" : text::cat("cuda:", d.index); }

Device device(std::string_view text) {
  if (text == "cpu") return Device::cpu();
  if (text == "cuda") return Device::cuda();
  if (text.starts_with("cuda:")) {
    int index = -1;
    auto digits = text.substr(5);
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (error == std::errc() && end == digits.data() + digits.size() && index >= 0) return Device::cuda(index);
  }
  throw Error(text::cat("device: expected cpu, cuda or cuda:N, got '", text, "'"));
}

}  // namespace halftone
