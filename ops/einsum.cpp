// einsum: the equation is parsed once; then operands are folded from left to right, each pair as one batched product.
#include <algorithm>
#include <array>
#include <string>

#include "halftone/ops/binary.h"
#include "halftone/ops/matmul.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/shape.h"

namespace halftone {
namespace {

// A dimension's name: a letter, or for those of an ellipsis their place from the back, from 0 on.
constexpr int letters = 128, max_labels = letters + max_rank;
constexpr int ellipsis(int from_back) { return letters + from_back; }
using Labels = std::vector<int>;

bool holds(const Labels& l, int label) { return std::find(l.begin(), l.end(), label) != l.end(); }

// A tensor whose dimensions have names, each once.
struct Named {
  Tensor t;
  Labels labels;

  int64_t size(int label) const { return t.size(std::find(labels.begin(), labels.end(), label) - labels.begin()); }
  // With these dimensions in this order; those it lacks have size 1.
  Tensor as(const Labels& wanted) const {
    Tensor y = t;
    Labels have = labels;
    for (int l : wanted)
      if (!holds(have, l)) {
        y = unsqueeze(y, -1);
        have.push_back(l);
      }
    Shape order;
    for (int l : wanted) order.push_back(std::find(have.begin(), have.end(), l) - have.begin());
    return permute(y, order);
  }
  // Summed over the dimensions for which gone(label).
  template <class F> Named without(F gone) const {
    Named n;
    uint32_t dims = 0;
    for (size_t d = 0; d < labels.size(); ++d) {
      if (gone(labels[d])) dims |= 1u << d;
      else n.labels.push_back(labels[d]);
    }
    n.t = dims == 0 ? t : reduce::apply<reduce::Sum>(t, {dims, false});
    return n;
  }
};

class Equation {
 public:
  Equation(std::string_view text, const std::vector<Tensor>& operands) : text_(text) {
    std::string s;
    for (char c : text) if (c != ' ') s += c;
    size_t arrow = s.find("->");
    std::string inputs = s.substr(0, arrow);
    std::vector<std::string> terms{""};
    for (char c : inputs) {
      if (c == ',') terms.emplace_back();
      else terms.back() += c;
    }
    HT_CHECK(terms.size() == operands.size(), name(), "it has ", terms.size(), " operands, ", operands.size(), " were given");
    for (size_t i = 0; i < terms.size(); ++i) operands_.push_back(operand(terms[i], operands[i], i));
    if (arrow != std::string::npos) result_ = result(s.substr(arrow + 2));
    else
      for (int l = max_labels - 1; l >= 0; --l) {  // ellipses first, outermost first; then letters, sorted
        int at = l >= letters ? l : letters - 1 - l;
        if (at >= letters ? used_[static_cast<size_t>(at)] > 0 : used_[static_cast<size_t>(at)] == 1) result_.push_back(at);
      }
  }

  Tensor evaluate() {
    Named all = operands_[0];
    for (size_t i = 1; i < operands_.size(); ++i) {
      auto later = [&](int l) {
        if (holds(result_, l)) return true;
        for (size_t k = i + 1; k < operands_.size(); ++k) if (holds(operands_[k].labels, l)) return true;
        return false;
      };
      all = pair(all, operands_[i], later);
    }
    return all.without([&](int l) { return !holds(result_, l); }).as(result_);
  }

 private:
  std::string name() const { return text::cat("einsum '", text_, "': "); }

  // The names of a term's dimensions, with an ellipsis of `rest` dimensions.
  Labels parse(const std::string& term, int rest) const {
    Labels labels;
    for (size_t i = 0; i < term.size(); ++i) {
      if (term[i] == '.') {
        for (int k = rest; k-- > 0;) labels.push_back(ellipsis(k));
        i += 2;
      } else labels.push_back(term[i]);
    }
    return labels;
  }
  // How many letters a term has, and whether an ellipsis.
  std::pair<int, bool> count(const std::string& term) const {
    int n = 0;
    bool dots = false;
    for (size_t i = 0; i < term.size(); ++i) {
      if (term.compare(i, 3, "...") == 0 && !dots) {
        dots = true;
        i += 2;
        continue;
      }
      HT_CHECK((term[i] >= 'a' && term[i] <= 'z') || (term[i] >= 'A' && term[i] <= 'Z'), name(), "'", std::string(1, term[i]),
               "' is no letter; an operand is letters with at most one ...");
      ++n;
    }
    return {n, dots};
  }

  Named operand(const std::string& term, const Tensor& t, size_t number) {
    HT_CHECK(t.defined(), name(), "operand ", number, " is undefined");
    auto [n, dots] = count(term);
    HT_CHECK(dots ? n <= t.rank() : n == t.rank(), name(), "'", term, "' names ", n, " dimensions, operand ", number, " is ", t.meta());
    rest_ = std::max(rest_, t.rank() - n);
    Named x{t, parse(term, t.rank() - n)};
    for (size_t i = 0; i < x.labels.size(); ++i) {
      int l = x.labels[i];
      auto at = static_cast<size_t>(l);
      int64_t size = t.shape()[i];
      HT_CHECK(used_[at] == 0 || sizes_[at] == size || size == 1 || sizes_[at] == 1, name(), l >= letters ? "..." : std::string(1, static_cast<char>(l)),
               " is ", sizes_[at], " and ", size, " in operand ", number, " ", t.meta());
      if (used_[at]++ == 0 || sizes_[at] == 1) sizes_[at] = size;
    }
    for (size_t i = 0; i < x.labels.size(); ++i)  // a repeated letter is a diagonal
      for (size_t k = x.labels.size(); k-- > i + 1;) {
        if (x.labels[i] != x.labels[k]) continue;
        HT_CHECK(x.t.shape()[i] == x.t.shape()[k], name(), std::string(1, static_cast<char>(x.labels[i])), " names sizes ", x.t.shape()[i], " and ",
                 x.t.shape()[k], " in operand ", number, " ", t.meta());
        x.t = movedim(diagonal(x.t, 0, static_cast<int>(i), static_cast<int>(k)), -1, static_cast<int>(i));
        x.labels.erase(x.labels.begin() + static_cast<int64_t>(k));
      }
    return x;
  }

  Labels result(const std::string& term) const {
    count(term);
    Labels labels = parse(term, rest_);
    for (size_t i = 0; i < labels.size(); ++i) {
      int l = labels[i];
      std::string letter = l >= letters ? "..." : std::string(1, static_cast<char>(l));
      HT_CHECK(used_[static_cast<size_t>(l)] > 0, name(), "the result's ", letter, " is in no operand");
      HT_CHECK(std::find(labels.begin(), labels.begin() + static_cast<int64_t>(i), l) == labels.begin() + static_cast<int64_t>(i), name(), "the result names ",
               letter, " twice");
    }
    return labels;
  }

  // The product of two operands, summed over what is not needed later.
  template <class F> Named pair(const Named& left, const Named& right, F later) {
    Named a = left.without([&](int l) { return !later(l) && !holds(right.labels, l); });
    Named b = right.without([&](int l) { return !later(l) && !holds(left.labels, l); });
    Labels batch, rows, columns, summed;
    for (int l : a.labels) (!holds(b.labels, l) ? rows : later(l) ? batch : summed).push_back(l);
    for (int l : b.labels) if (!holds(a.labels, l)) columns.push_back(l);
    // A size of 1 broadcasts: sums need both in full.
    for (int l : summed) {
      int64_t size = std::max(a.size(l), b.size(l));
      if (a.size(l) != b.size(l)) (a.size(l) == 1 ? a : b) = stretched(a.size(l) == 1 ? a : b, l, size);
    }
    Named y;
    for (auto* part : {&batch, &rows, &columns}) y.labels.insert(y.labels.end(), part->begin(), part->end());
    if (summed.empty()) {
      y.t = a.as(y.labels) * b.as(y.labels);
      return y;
    }
    HT_CHECK(is_floating(a.t.dtype()) == is_floating(b.t.dtype()), name(), "expected operands of one kind, got ", a.t.meta(), " and ", b.t.meta());
    if (!is_floating(a.t.dtype())) {  // whole numbers: exactly, by products and sums
      y.labels.insert(y.labels.end(), summed.begin(), summed.end());
      y.t = a.as(y.labels) * b.as(y.labels);
      return y.without([&](int l) { return holds(summed, l); });
    }
    auto grouped = [](const Named& x, const Labels& batch_, const Labels& first, const Labels& second) {
      Labels order = batch_;
      Shape s;
      for (int l : batch_) s.push_back(x.size(l));
      for (auto* part : {&first, &second}) {
        int64_t n = 1;
        for (int l : *part) n = checked_mul(n, x.size(l));
        s.push_back(n);
        order.insert(order.end(), part->begin(), part->end());
      }
      return reshape(x.as(order), s);
    };
    Tensor product = matmul(grouped(a, batch, rows, summed), grouped(b, batch, summed, columns));
    Shape s;
    for (size_t d = 0; d < batch.size(); ++d) s.push_back(product.shape()[d]);
    for (int l : rows) s.push_back(a.size(l));
    for (int l : columns) s.push_back(b.size(l));
    y.t = reshape(product, s);
    return y;
  }
  static Named stretched(const Named& x, int label, int64_t size) {
    Shape s = x.t.shape();
    s[static_cast<size_t>(std::find(x.labels.begin(), x.labels.end(), label) - x.labels.begin())] = size;
    return {expand(x.t, s), x.labels};
  }

  std::string_view text_;
  std::vector<Named> operands_;
  Labels result_;
  int rest_ = 0;  // the most dimensions that an ellipsis stands for
  std::array<int, max_labels> used_{};
  std::array<int64_t, max_labels> sizes_{};
};

}  // namespace

Tensor einsum(std::string_view equation, const std::vector<Tensor>& operands) {
  HT_CHECK(!operands.empty(), "einsum '", equation, "': expected at least one operand");
  return Equation(equation, operands).evaluate();
}

}  // namespace halftone
