// What every engine's collectives must do, called on each rank by the tests of all of them.
#pragma once

#include <cmath>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "halftone/distributed/group.h"
#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

namespace halftone::tests {

// Catch2's checks may not be used by two threads at once.
inline std::mutex check_lock;
#define CHECK_RANK(...)                                           \
  do {                                                            \
    const bool holds = (__VA_ARGS__);                             \
    std::lock_guard checking(halftone::tests::check_lock);        \
    if (!holds) FAIL_CHECK(#__VA_ARGS__);                         \
    else ++halftone::tests::held;                                 \
  } while (false)
inline int64_t held = 0;

// Rank r's values: sums of them round, and differently in every order. In integers they are whole, in bool half are true.
inline Tensor values_of(int r, const Shape& shape, DType dtype) {
  Tensor t = Tensor::empty(Meta(shape, DType::f64, Device::cpu()));
  for (int64_t i = 0; i < t.numel(); ++i) {
    double v = std::sin(static_cast<double>(i * 7 + r * 31 + 1)) * std::pow(10.0, static_cast<double>((i + r) % 4));
    t.data<double>()[i] = dtype == DType::b8 ? v > 0 : dtype == DType::u8 ? std::abs(v) / 8 : v;
  }
  return t.to(dtype);
}

template <class T> T combined(distributed::Reduce how, const std::vector<T>& v) {
  using C = compute_t<T>;
  C s = static_cast<C>(v[0]);
  for (size_t r = 1; r < v.size(); ++r) {
    C x = static_cast<C>(v[r]);
    if (how == distributed::Reduce::min) s = x < s ? x : s;
    else if (how == distributed::Reduce::max) s = x > s ? x : s;
    else if constexpr (std::same_as<T, bool>) s = s || x;
    else s = static_cast<C>(s + x);
  }
  if constexpr (!std::integral<T>) if (how == distributed::Reduce::mean) s /= static_cast<C>(v.size());
  return static_cast<T>(s);
}

// The reduction of values_of(0), values_of(1), ... in rank order, as its formula says.
inline Tensor expected_reduction(distributed::Reduce how, int ranks, const Shape& shape, DType dtype) {
  std::vector<Tensor> all;
  for (int r = 0; r < ranks; ++r) all.push_back(values_of(r, shape, dtype));
  Tensor y = Tensor::empty(Meta(shape, dtype, Device::cpu()));
  visit(dtype, [&]<class T>(Type<T>) {
    for (int64_t i = 0; i < y.numel(); ++i) {
      std::vector<T> v;
      for (auto& t : all) v.push_back(t.data<T>()[i]);
      y.data<T>()[i] = combined(how, v);
    }
  });
  return y;
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  Tensor x = a.cpu().contiguous(), y = b.cpu().contiguous();
  return x.dtype() == y.dtype() && x.shape() == y.shape() &&
         (x.numel() == 0 || std::memcmp(x.raw_data(), y.raw_data(), static_cast<size_t>(x.numel()) * size_of(x.dtype())) == 0);
}
// The same but for the order of the sum of up to 8 values of 16-bit or wider types; exact where nothing rounds.
inline bool same_sum(const Tensor& a, const Tensor& b) {
  if (!is_floating(a.dtype())) return same_bits(a, b);
  auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double unit = a.dtype() == DType::f64 ? 1e-14 : a.dtype() == DType::f32 ? 1e-5 : 0;  // 16 bits: rounded once from f32
  for (size_t i = 0; i < x.size(); ++i) if (!(std::abs(x[i] - y[i]) <= unit * (4000 + std::abs(y[i])))) return false;
  return a.dtype() == b.dtype() && a.shape() == b.shape();
}

inline const std::vector<DType> every_dtype = {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32, DType::i64, DType::u8, DType::b8};

// Every collective x dtype x shape, on this rank's device. `rank_order`: sums have the bits of rank order.
inline void check_collectives(const distributed::Group& g, bool rank_order = true) {
  using distributed::Reduce;
  int n = g.size(), me = g.rank();
  Device device = g.device();
  auto equal = rank_order ? same_bits : same_sum;
  for (DType dtype : every_dtype)
    for (const Shape& shape : {Shape{0}, Shape{}, Shape{1}, Shape{7}, Shape{3, 5, 11}, Shape{2, 1031}}) {
      auto mine = [&] { return values_of(me, shape, dtype).to(device); };
      auto empty_like_all = [&](const Tensor& x) {
        Shape s = x.shape();
        s.insert(0, n);
        return full(s, 1, {.dtype = dtype, .device = device});
      };
      for (Reduce how : {Reduce::sum, Reduce::mean, Reduce::min, Reduce::max}) {
        if (how == Reduce::mean && !is_floating(dtype)) continue;
        Tensor x = mine(), expected = expected_reduction(how, n, shape, dtype);
        uint64_t before = x.version();
        g.all_reduce(x, how).wait();
        CHECK_RANK(equal(x, expected));
        CHECK_RANK(x.version() > before);

        Shape stacked = shape;
        stacked.insert(0, n);
        Tensor all = values_of(me, stacked, dtype).to(device), out = full(shape, 1, {.dtype = dtype, .device = device});
        g.reduce_scatter(all, out, how).wait();
        CHECK_RANK(equal(out, expected_reduction(how, n, stacked, dtype)[me]));
        CHECK_RANK(same_bits(all, values_of(me, stacked, dtype)));
      }
      for (int root : {0, n - 1}) {
        Tensor x = mine();
        g.broadcast(x, root).wait();
        CHECK_RANK(same_bits(x, values_of(root, shape, dtype)));
      }
      Tensor x = mine(), all = empty_like_all(x);
      g.all_gather(x, all).wait();
      for (int r = 0; r < n; ++r) CHECK_RANK(same_bits(all[r], values_of(r, shape, dtype)));
      CHECK_RANK(same_bits(x, values_of(me, shape, dtype)));
    }
  g.barrier();

  // Dense, in another order of dimensions.
  Tensor x = values_of(me, {4, 6}, DType::f32).to(device).t();
  g.all_reduce(x).wait();
  CHECK_RANK(equal(x, expected_reduction(Reduce::sum, n, {4, 6}, DType::f32).t()));

  // A NaN on the last rank, and one on the first, come through everything but integers.
  double nan = std::numeric_limits<double>::quiet_NaN();
  for (DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64})
    for (Reduce how : {Reduce::sum, Reduce::mean, Reduce::min, Reduce::max}) {
      Tensor y = full({3}, me, {.dtype = dtype});
      if (me == n - 1) y[0].fill_(nan);
      if (me == 0) y[1].fill_(nan);
      y = y.to(device);
      g.all_reduce(y, how).wait();
      auto v = y.to_vector<double>();
      CHECK_RANK((std::isnan(v[0]) && std::isnan(v[1]) && !std::isnan(v[2])));
    }
  // Infinities and the extremes keep their order.
  double inf = std::numeric_limits<double>::infinity();
  for (DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
    Tensor y = full({3}, me == n - 1 ? -inf : -2.5 - me, {.dtype = dtype});
    y[2].fill_(me == n - 1 ? inf : 0.5);
    y = y.to(device);
    Tensor z = y.clone();
    g.all_reduce(y, Reduce::min).wait();
    g.all_reduce(z, Reduce::max).wait();
    CHECK_RANK(y.to_vector<double>() == std::vector<double>{-inf, -inf, n == 1 ? inf : 0.5});
    CHECK_RANK(z.to_vector<double>() == std::vector<double>{n == 1 ? -inf : -2.5, n == 1 ? -inf : -2.5, inf});
  }
  // Sums of 16-bit values neither overflow on the way to a mean nor lose what is small.
  for (DType dtype : {DType::f16, DType::bf16}) {
    Tensor y = full({2}, 30000, {.dtype = dtype}).to(device), expected = full({2}, 30000, {.dtype = dtype});
    g.all_reduce(y, Reduce::mean).wait();
    CHECK_RANK(same_bits(y, expected));
  }
}

// Groups of five ranks or fewer split by odd and even, in reverse; and by none for the last.
inline void check_subgroups(const distributed::Group& g) {
  int n = g.size(), me = g.rank();
  distributed::Group part = g.split(me % 2, -me);
  std::vector<int> members;
  for (int r = n - 1; r >= 0; --r) if (r % 2 == me % 2) members.push_back(r);
  CHECK_RANK(part.size() == static_cast<int>(members.size()));
  CHECK_RANK(members[static_cast<size_t>(part.rank())] == me);
  check_collectives(part, g.device().type == DeviceType::cpu);
  for (int i = 0; i < 20; ++i) {  // both at once
    Tensor a = full({5}, me).to(g.device()), b = full({5}, me).to(g.device());
    auto first = g.all_reduce(a), second = part.all_reduce(b);
    second.wait();
    first.wait();
    int sum = 0;
    for (int r : members) sum += r;
    CHECK_RANK(a.to_vector<int>() == std::vector<int>(5, n * (n - 1) / 2));
    CHECK_RANK(b.to_vector<int>() == std::vector<int>(5, sum));
  }
  distributed::Group left = g.split(me == n - 1 ? -1 : 0);
  CHECK_RANK(left.size() == (me == n - 1 ? 1 : n - 1));
  left.barrier();
  distributed::Group same = g.split(0, 0);
  CHECK_RANK((same.size() == n && same.rank() == me));
}

// Calls that differ between rank 0 and the others, on any device, and how each reads.
struct Mismatch {
  const char *first, *rest;
  std::function<void(const distributed::Group&, bool first)> f;
  void call(const distributed::Group& g) const { f(g, g.rank() == 0); }
};
inline std::vector<Mismatch> mismatches() {
  using distributed::Group;
  using distributed::Reduce;
  auto x = [](const Group& g, const Shape& shape, DType dtype = DType::f32) { return ones(shape, {.dtype = dtype, .device = g.device()}); };
  return {
      {"all_reduce(sum) of [2, 3] (f32)", "all_reduce(sum) of [3, 2] (f32)",
       [=](const Group& g, bool first) { g.all_reduce(x(g, first ? Shape{2, 3} : Shape{3, 2})).wait(); }},
      {"all_reduce(sum) of [2, 3] (f32)", "all_reduce(sum) of [2, 3] (f32) with strides [1, 2]",
       [=](const Group& g, bool first) { g.all_reduce(first ? x(g, {2, 3}) : x(g, {3, 2}).t()).wait(); }},
      {"all_reduce(sum) of [4] (f16)", "all_reduce(sum) of [4] (bf16)",
       [=](const Group& g, bool first) { g.all_reduce(x(g, {4}, first ? DType::f16 : DType::bf16)).wait(); }},
      {"all_reduce(min) of [4] (f32)", "all_reduce(max) of [4] (f32)",
       [=](const Group& g, bool first) { g.all_reduce(x(g, {4}), first ? Reduce::min : Reduce::max).wait(); }},
      {"broadcast(root 0) of [4] (f32)", "broadcast(root 1) of [4] (f32)",
       [=](const Group& g, bool first) { g.broadcast(x(g, {4}), first ? 0 : 1).wait(); }},
      {"all_reduce(sum) of [4] (f32)", "broadcast(root 0) of [5] (f32)",  // the order
       [=](const Group& g, bool first) {
         Tensor a = x(g, {4}), b = x(g, {5});
         if (first) g.all_reduce(a).wait();
         g.broadcast(b).wait();
         if (!first) g.all_reduce(a).wait();
       }},
      {"barrier", "all_gather of [4] (f32)",
       [=](const Group& g, bool first) {
         if (first) return g.barrier();
         g.all_gather(x(g, {4}), x(g, {g.size(), 4})).wait();
       }},
      {"split", "barrier", [=](const Group& g, bool first) { first ? void(g.split(0)) : g.barrier(); }},
  };
}
inline std::string mismatch_text(const Mismatch& m, int64_t sequence, int ranks = 2) {
  return text::cat("distributed: the ranks made different calls (call ", sequence, " of this group of ", ranks, "): rank 0 ", m.first, "; rank",
                   ranks > 2 ? "s 1" : " 1", ranks == 3 ? ", 2" : ranks > 3 ? text::cat(" to ", ranks - 1) : "", " ", m.rest,
                   "; all ranks make the same calls in the same order, with equal shapes, dtypes and options");
}
// Has every rank of a group that this process runs make its call of m, after `first`; what each is told.
inline std::vector<std::string> told(const distributed::Group& g, const Mismatch& m,
                                     const std::function<distributed::Group(distributed::Group&)>& first = [](auto& rank) { return rank; }) {
  std::vector<std::string> texts(static_cast<size_t>(g.local_size()));
  g.run([&](distributed::Group& rank) {
    try {
      m.call(first(rank));
    } catch (const distributed::MismatchError& e) {
      texts[static_cast<size_t>(rank.rank()) % texts.size()] = e.what();
    }
  });
  return texts;
}

}  // namespace halftone::tests
