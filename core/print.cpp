// Tensors as text: nested brackets, columns aligned, the middle of long dimensions left out.
#include <algorithm>
#include <ostream>

#include "halftone/core/tensor.h"

namespace halftone {
namespace {

constexpr int64_t edge = 3, summarize_above = 1000;

template <class T> std::string element(T v) {
  if constexpr (std::same_as<T, bool>) return v ? "true" : "false";
  else if constexpr (std::integral<T>) return std::to_string(v);
  else return text::str(static_cast<double>(v));
}

struct Printer {
  const Shape shape;
  const std::vector<std::string> cells;  // row-major
  size_t width;
  bool summarize;

  // Appends the sub-array of dimension `dim` that starts at cell `at`.
  void print(std::string& out, size_t dim, int64_t at, const std::string& indent) const {
    if (dim == shape.size()) {
      auto& cell = cells[static_cast<size_t>(at)];
      out += std::string(width - cell.size(), ' ') + cell;
      return;
    }
    int64_t step = 1;
    for (size_t i = dim + 1; i < shape.size(); ++i) step *= shape[i];
    bool last = dim + 1 == shape.size();
    std::string separator = last ? ", " : ",\n" + std::string(shape.size() - dim > 2 ? "\n" : "") + indent + " ";
    out += '[';
    for (int64_t i = 0; i < shape[dim]; ++i) {
      if (i > 0) out += separator;
      if (summarize && shape[dim] > 2 * edge && i == edge) {
        out += "...";
        i = shape[dim] - edge - 1;
        continue;
      }
      print(out, dim + 1, at + i * step, indent + " ");
    }
    out += ']';
  }
};

}  // namespace

std::string str(const Tensor& t) {
  if (!t.defined()) return "undefined tensor";
  Tensor host = to_host(t, "print");
  std::vector<std::string> cells(static_cast<size_t>(t.numel()));
  visit(t.dtype(), [&]<class T>(Type<T>) {
    const T* p = host.data<T>();
    for (size_t i = 0; i < cells.size(); ++i) cells[i] = element(p[i]);
  });
  size_t width = 0;
  for (auto& c : cells) width = std::max(width, c.size());
  std::string out;
  bool summarize = t.numel() > summarize_above;
  Printer{t.shape(), std::move(cells), width, summarize}.print(out, 0, 0, "");
  out += text::cat("  ", t.shape(), " ", t.dtype());
  if (t.device().type != DeviceType::cpu) out += text::cat(" ", t.device());
  return out;
}

std::ostream& operator<<(std::ostream& os, const Tensor& t) { return os << str(t); }
std::ostream& operator<<(std::ostream& os, const Shape& s) { return os << str(s); }
std::ostream& operator<<(std::ostream& os, DType t) { return os << str(t); }
std::ostream& operator<<(std::ostream& os, Device d) { return os << str(d); }

}  // namespace halftone
