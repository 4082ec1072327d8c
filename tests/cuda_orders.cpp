// Scans, orders and the wider reductions on CUDA against the CPU, over sizes and values that samples do not reach.
#include <cmath>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/scoreboard.h"

using namespace halftone;

#define NEEDS_CUDA() \
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device")

namespace {

const Device gpu = Device::cuda();
constexpr DType floats[] = {DType::f32, DType::f64, DType::f16, DType::bf16};

double epsilon(DType t) { return t == DType::f16 ? 0x1p-10 : t == DType::bf16 ? 0x1p-7 : t == DType::f32 ? 0x1p-23 : 0x1p-52; }

Tensor drawn(uint64_t seed, const Shape& shape, DType dtype, double low, double high, bool whole = false) {
  std::vector<double> v(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < v.size(); ++i) {
    v[i] = low + uniform01(philox(seed, i).v[0]) * (high - low);
    if (whole) v[i] = std::floor(v[i]);
  }
  return tensor(v).reshape(shape).to(dtype);
}

// The same within `relative` and `absolute`, in units of the accumulator's epsilon, and two of the result's.
void check_close(const Tensor& expected, const Tensor& on_gpu, double relative = 0, double absolute = 0) {
  REQUIRE(on_gpu.device() == gpu);
  REQUIRE(expected.shape() == on_gpu.shape());
  REQUIRE(expected.dtype() == on_gpu.dtype());
  auto a = expected.to_vector<double>(), b = on_gpu.to_vector<double>();
  DType t = expected.dtype();
  double wide = is_floating(t) ? epsilon(t == DType::f64 ? t : DType::f32) : 0, own = is_floating(t) && relative > 0 ? 2 * epsilon(t) : 0;
  size_t wrong = 0, at = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    bool same = std::isnan(a[i]) ? std::isnan(b[i])
                                 : a[i] == b[i] || std::abs(a[i] - b[i]) <= (own + relative * wide) * std::abs(a[i]) + absolute * wide;
    if (!same && wrong++ == 0) at = i;
  }
  INFO("first at " << at << " of " << str(expected.meta()));
  if (wrong > 0) CHECK(a[at] == b[at]);
  CHECK(wrong == 0);
  tests::count("parity_cases");
}

struct Work { Shape shape; int dim; };
const Work works[] = {{{1000003}, 0}, {{3, 100001}, 1}, {{100001, 3}, 0}, {{5000, 10}, 0}, {{10, 5000}, 0}, {{7, 300, 40}, 1}, {{70000, 3}, 1}, {{1, 2049}, 1},
                      {{600, 2500}, 1}, {{2, 0}, 1}, {{0, 2}, 1}, {{}, 0}};

}  // namespace

TEST_CASE("scans of every shape of work") {
  NEEDS_CUDA();
  for (auto& w : works)
    for (DType t : floats)
      for (bool reverse : {false, true}) {
        INFO(str(w.shape) << " along " << w.dim << ' ' << name(t) << (reverse ? ", reverse" : ""));
        double n = w.shape.rank() == 0 ? 1 : static_cast<double>(w.shape[static_cast<size_t>(w.dim)]);
        ScanOptions o{.reverse = reverse};
        Tensor x = drawn(1, w.shape, t, -1, 1), f = drawn(2, w.shape, t, -.95, .95), near = drawn(3, w.shape, t, 1 - .5 / n, 1 + .5 / n);
        check_close(cumsum(x, w.dim, o), cumsum(x.to(gpu), w.dim, o), 2, t == DType::f64 ? 4 * n : 1);
        check_close(cumprod(near, w.dim, o), cumprod(near.to(gpu), w.dim, o), t == DType::f64 ? 4 + n : 2);
        check_close(recurrence(f, x, w.dim, o), recurrence(f.to(gpu), x.to(gpu), w.dim, o), 16, 64);
        check_close(cumsum(x.to(gpu), w.dim, o).cpu(), cumsum(x.to(gpu), w.dim, o));  // the same bits every time
        if (x.rank() == 2) check_close(cumsum(x.t(), 1 - w.dim, o), cumsum(x.to(gpu).t(), 1 - w.dim, o), 4, 4 * n);
        Tensor whole = drawn(4, w.shape, DType::i32, -9, 9, true);
        check_close(cumsum(whole, w.dim, o), cumsum(whole.to(gpu), w.dim, o));
      }
}

TEST_CASE("orders of every shape of work") {
  NEEDS_CUDA();
  for (auto& w : works)
    for (DType t : {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i32, DType::i64, DType::u8, DType::b8})
      for (bool falling : {false, true}) {
        if (w.shape.numel() > 400000 && t != DType::f32) continue;  // the CPU takes its time
        INFO(str(w.shape) << " along " << w.dim << ' ' << name(t) << (falling ? ", descending" : ""));
        Tensor x = drawn(5, w.shape, t, t == DType::u8 || t == DType::b8 ? 0 : -40, 40, true);  // many equals
        auto a = sort(x, w.dim, {.descending = falling}), b = sort(x.to(gpu), w.dim, {.descending = falling});
        check_close(a.values, b.values);
        check_close(a.indices, b.indices);
        int64_t n = w.shape.rank() == 0 ? 1 : w.shape[static_cast<size_t>(w.dim)];
        for (int64_t k : {int64_t{0}, int64_t{1}, n / 2, n}) {
          if (k > n || (w.shape.rank() == 0 && k != 1)) continue;
          auto c = topk(x, k, w.dim, {.largest = falling}), d = topk(x.to(gpu), k, w.dim, {.largest = falling});
          check_close(c.values, d.values);
          check_close(c.indices, d.indices);
        }
        if (n == 0 || t == DType::b8 || w.shape.rank() == 0) continue;
        auto c = max(x, w.dim), d = max(x.to(gpu), w.dim);
        check_close(c.values, d.values);
        check_close(c.indices, d.indices);
      }
  const float inf = INFINITY;
  Tensor special = tensor({NAN, 1.f, inf, -inf, -NAN, -0.f, 0.f, 1e-40f, -1e-40f});
  for (DType t : floats)
    for (bool falling : {false, true}) {
      auto a = sort(special.to(t), 0, {.descending = falling}), b = sort(special.to(t).to(gpu), 0, {.descending = falling});
      check_close(a.values, b.values);
      check_close(a.indices, b.indices);
    }
  Tensor x = drawn(6, {40, 300}, DType::f32, -1, 1).to(gpu).requires_grad_(), h = x.detach().cpu().requires_grad_();
  auto loss = [](const Tensor& v) { return sum(square(topk(v, 7, 1).values)) + sum(square(sort(v, 0).values.slice(0, 0, 5))); };
  check_close(grad({loss(h)}, {h})[0], grad({loss(x)}, {x})[0], 4, 4);
}

TEST_CASE("norms, products and logarithms of sums of every shape of work") {
  NEEDS_CUDA();
  struct Case { Shape shape; std::initializer_list<Size> dims; };
  for (auto& [shape, dims] : {Case{{1000003}, {0}}, Case{{300, 1000}, {0}}, Case{{300, 1000}, {1}}, Case{{7, 5, 32, 32}, {0, 2, 3}}, Case{{4, 100001}, {1}}, Case{{100001, 4}, {0}}})
    for (DType t : floats) {
      INFO(str(shape) << ' ' << name(t));
      Tensor x = drawn(7, shape, t, -3, 3), d = x.to(gpu);
      double n = static_cast<double>(shape.numel());
      Tensor near = drawn(8, shape, t, 1 - .5 / n, 1 + .5 / n);
      for (double p : {1., 2., 3., .5, double(INFINITY), 0.}) check_close(norm(x, dims, {.p = p}), norm(d, dims, {.p = p}), t == DType::f64 ? 8 + n : 8);
      check_close(logsumexp(x, dims), logsumexp(d, dims), t == DType::f64 ? 16 + n : 16, 16);
      check_close(prod(near, dims), prod(near.to(gpu), dims), t == DType::f64 ? 4 + n : 2);
      check_close(stddev(x, dims), stddev(d, dims), t == DType::f64 ? 4 + n : 4 + std::log2(n), 4);
      check_close(all(gt(x, -2.99), dims), all(gt(d, -2.99), dims));
      check_close(any(gt(x, 2.999), dims), any(gt(d, 2.999), dims));
      check_close(count_nonzero(x, dims), count_nonzero(d, dims));
    }
  const float inf = INFINITY;
  for (int64_t masked : {1, 300, 5000, 100000}) {
    Tensor x = cat({full({masked}, -inf), tensor({1.f, 2.f})});
    check_close(logsumexp(x), logsumexp(x.to(gpu)), 4);
    check_close(logsumexp(x.slice(0, 0, masked)), logsumexp(x.slice(0, 0, masked).to(gpu)));
  }
  check_close(norm(full({1000}, 1e30f)), norm(full({1000}, 1e30f, {.device = gpu})), 4);
}

TEST_CASE("ternary operators and where with numbers, over shapes that pack in part") {
  NEEDS_CUDA();
  for (DType t : floats)
    for (int64_t n : {1, 3, 8, 15, 17, 1000, 100003}) {
      INFO(name(t) << ' ' << n);
      Tensor a = drawn(9, {n}, t, -2, 2), b = drawn(10, {3, n}, t, .5, 2), c = drawn(11, {3, 1}, t, 0, 1), mask = gt(a, 0);
      Tensor da = a.to(gpu), db = b.to(gpu), dc = c.to(gpu), dmask = mask.to(gpu);
      check_close(lerp(a, b, c), lerp(da, db, dc), 8, 8);
      check_close(lerp(a, b, .3), lerp(da, db, .3), 8, 8);
      check_close(lerp(a, 2, c), lerp(da, 2, dc), 8, 8);
      check_close(addcmul(a, b, c, .7), addcmul(da, db, dc, .7), 8, 8);
      check_close(addcdiv(a, c, b, .7), addcdiv(da, dc, db, .7), 8, 8);
      check_close(clamp(b, a, c), clamp(db, da, dc));
      check_close(clamp(b, .75, 1.5), clamp(db, .75, 1.5));
      check_close(where(mask, b, 7), where(dmask, db, 7));
      check_close(where(mask, .1, c), where(dmask, .1, dc));
      check_close(masked_fill(b, mask, -INFINITY), masked_fill(db, dmask, -INFINITY));
      Tensor h = b.clone(), d = db.clone();
      check_close(h.add_(a).mul_(c).lerp_(a, .25), d.add_(da).mul_(dc).lerp_(da, .25), 8, 16);
    }
}

TEST_CASE("more than 2^31 elements in scans and orders") {
  NEEDS_CUDA();
  const int64_t n = (int64_t{1} << 31) + 1003;
  try {
    Tensor x = full({n}, 1, {.dtype = DType::u8, .device = gpu});
    x.slice(0, n - 2, n - 1).fill_(9);
    {
      Tensor y = cumsum(x, 0);
      CHECK(y.slice(0, n - 1, n).item<int64_t>() == n + 8);
      CHECK(y.slice(0, n - 3, n - 2).item<int64_t>() == n - 2);
    }
    CHECK(any(eq(x, 9)).item() == 1);
    CHECK(norm(x.to(DType::f16), {.p = 1}).item() == INFINITY);
    auto [v, i] = topk(x, 2);
    CHECK(v.to_vector<int64_t>() == std::vector<int64_t>{9, 1});
    CHECK(i.to_vector<int64_t>() == std::vector<int64_t>{n - 2, 0});
    CHECK(clamp(x, 0, 5).slice(0, n - 2, n).cpu().to_vector<int64_t>() == std::vector<int64_t>{5, 1});
  } catch (const Error& e) {
    if (std::string_view(e.what()).find("memory") == std::string_view::npos) throw;
    HT_SKIP("not enough device memory");
  }
}
