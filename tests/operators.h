// Walks the registry for tests: every operator, every sample, as tensors. An operator without samples, autocast policy or
// doc fails each test that walks.
#pragma once

#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/scoreboard.h"

namespace halftone::tests {

inline const std::set<std::string_view>& optimizer_names() {
  static const auto names = [] {
    std::set<std::string_view> n;
    elementwise::each(update::All{}, [&]<class Op>(Type<Op>) { n.insert(Op::name); });
    return n;
  }();
  return names;
}

// Calls f(operator, sample, its number) for all of them.
template <class F> void each_sample(F f) {
  for (const OpDef* op : registry()) {
    INFO(op->name);
    REQUIRE(op->doc);
    REQUIRE(op->cast != Cast::unset);
    REQUIRE(op->samples);
    std::vector<Sample> samples = op->samples();
    REQUIRE(samples.size() >= 8);
    for (size_t k = 0; k < samples.size(); ++k) f(*op, samples[k], k);
  }
}

// How many cases of a kind each operator gives: none may stand for the others.
class Shares {
 public:
  explicit Shares(const char* key) : key_(key) {}
  void count(const std::string& op, int64_t n = 1) {
    tests::count(key_, n);
    cases_[op] += n;
    total_ += n;
  }
  int64_t of(const std::string& op) const {
    auto c = cases_.find(op);
    return c == cases_.end() ? 0 : c->second;
  }
  void check() const {
    for (auto& [op, n] : cases_) {
      INFO(op << ": " << n << " of " << total_ << " " << key_);
      CHECK(n * 100 <= total_ * 3);
    }
  }

 private:
  const char* key_;
  std::map<std::string, int64_t> cases_;
  int64_t total_ = 0;
};

inline std::string describe(const OpDef& op, const Sample& s, size_t k) {
  std::string text = std::string(op.name) + " sample " + std::to_string(k) + ":";
  for (auto& i : s.in) text += " " + (i.present ? str(i.shape) : "none");
  return text;
}

// Values of input number k, in an order that looks random. Floating values lie on a grid that avoids 0, in its interior, and
// differs from that of other inputs: all are distinct, and none is where a non-smooth operator has a kink.
inline std::vector<double> sample_values(const SampleInput& in, size_t k, bool whole) {
  auto n = static_cast<size_t>(in.shape.numel());
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = n; i-- > 1;) std::swap(order[i], order[philox(k + 1, i).v[0] % (i + 1)]);
  constexpr double fractions[] = {.37, .61, .23, .71, .31, .67};
  std::vector<double> v(n);
  for (size_t i = 0; i < n; ++i) {
    double u = (static_cast<double>(order[i]) + fractions[k % 6]) / static_cast<double>(n);
    v[i] = in.low + u * (in.high - in.low);
    if (whole) v[i] = std::floor(v[i]);
  }
  return v;
}

inline Tensor from_values(const std::vector<double>& v, const Shape& shape, DType dtype) { return tensor(v).reshape(shape).to(dtype); }

inline DType input_dtype(const SampleInput& in, DType under_test) {
  if (in.dtype) return *in.dtype;
  return in.wide && is_16bit_dtype(under_test) ? DType::f32 : under_test;
}

inline Tensor make_input(const SampleInput& in, size_t k, DType under_test) {
  if (!in.present) return {};
  DType t = input_dtype(in, under_test);
  return from_values(sample_values(in, k, !is_floating(t)), in.shape, t);
}

inline Tensors make_inputs(const Sample& s, DType under_test) {
  Tensors all;
  for (size_t k = 0; k < s.in.size(); ++k) all.push_back(make_input(s.in[k], k, under_test));
  return all;
}

inline bool writes(const OpDef& op, const Tensors& in, const Attrs& attrs, size_t i) {
  if (!op.writes || !in[i].defined()) return false;
  Call c{.op = &op, .in = in, .attrs = attrs, .out = {}};
  return op.writes(c, i);
}

inline bool supports(const OpDef& op, const Sample& s, DType under_test) {
  return s.in.empty() || s.in[0].dtype || contains(op.dtypes[static_cast<size_t>(DeviceType::cpu)], under_test);
}

// Outputs, then the inputs that the operator wrote.
inline std::vector<Tensor> results(const OpDef& op, const Tensors& in, const Attrs& attrs) {
  Tensors out = call_all(op, in, attrs);
  std::vector<Tensor> all(out.begin(), out.end());
  for (size_t i = 0; i < in.size(); ++i)
    if (writes(op, in, attrs, i)) all.push_back(in[i]);
  return all;
}

// The same shape, dtype and bits; one NaN is as good as another.
inline bool same_bits(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
  Tensor x = to_host(a, "test"), y = to_host(b, "test");
  return visit(a.dtype(), [&]<class T>(Type<T>) {
    const T *p = x.data<T>(), *q = y.data<T>();
    for (int64_t i = 0; i < x.numel(); ++i)
      if (std::memcmp(p + i, q + i, sizeof(T)) != 0 && !(compute_t<T>(p[i]) != compute_t<T>(p[i]) && compute_t<T>(q[i]) != compute_t<T>(q[i])))
        return false;
    return true;
  });
}
inline bool same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) if (!same_bits(a[i], b[i])) return false;
  return true;
}

// A number from the floating outputs, each element with a weight of its own.
inline Tensor weighed(const std::vector<Tensor>& y, uint64_t seed = 7) {
  Tensor total;
  for (size_t i = 0; i < y.size(); ++i) {
    if (!is_floating(y[i].dtype())) continue;
    std::vector<double> w(static_cast<size_t>(y[i].numel()));
    for (size_t k = 0; k < w.size(); ++k) {
      double u = philox(seed, k, i).v[0] * 0x1p-32;
      w[k] = u < .5 ? u - 1 : u;
    }
    DType t = y[i].dtype() == DType::f64 ? DType::f64 : DType::f32;
    Tensor part = sum(y[i].to(t) * from_values(w, y[i].shape(), t).to(y[i].device()));
    total = total.defined() ? total + part : part;
  }
  return total;
}

}  // namespace halftone::tests
