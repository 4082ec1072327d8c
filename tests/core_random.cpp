// Random numbers: Philox's known answers, reproducible generators, distributions, and their edges.
#include <cmath>
#include <set>
#include <thread>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;

namespace {
bool equal(const Philox4& p, std::initializer_list<uint32_t> v) { return std::equal(v.begin(), v.end(), p.v); }
std::vector<double> of(const Tensor& t) { return t.to_vector<double>(); }
}  // namespace

TEST_CASE("Philox 4x32-10 gives the vectors of Random123") {
  constexpr uint64_t ones = ~uint64_t{0};
  CHECK(equal(philox(0, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  CHECK(equal(philox(ones, ones, ones), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  // Counter and key from the digits of pi.
  CHECK(equal(philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e), {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST_CASE("uniform words become [0, 1)") {
  CHECK(uniform01(0) == 0);
  CHECK(uniform01(~0u) == 1 - 0x1p-24f);
}

TEST_CASE("a seed fixes the numbers, whatever the dtype and the layout") {
  manual_seed(9);
  auto a = of(rand({1000})), b = of(rand({1000}));
  CHECK(a != b);
  manual_seed(9);
  CHECK(of(rand({1000})) == a);
  CHECK(of(rand({1000})) == b);
  manual_seed(9);
  Tensor strided = zeros({1000, 2}).select(1, 1);
  CHECK(of(uniform_(strided)) == a);
  manual_seed(9);
  auto halves = of(rand({1000}, {.dtype = DType::f16}));
  // One that rounds to the open end takes the closed one's place.
  for (size_t i = 0; i < a.size(); ++i) CHECK((std::abs(halves[i] - a[i]) <= 0x1p-11 || (a[i] >= 1 - 0x1p-12 && halves[i] == 0)));
  manual_seed(10);
  CHECK(of(rand({1000})) != a);
}

TEST_CASE("draws do not overlap, and leave off where they end") {
  manual_seed(11);
  auto once = of(randn({16}));
  manual_seed(11);
  auto first = of(randn({8})), second = of(randn({8}));
  first.insert(first.end(), second.begin(), second.end());
  CHECK(first == once);  // 8 numbers are two whole blocks
  manual_seed(11);
  std::set<double> all;
  for (int i = 0; i < 100; ++i) for (double v : of(rand({5}, {.dtype = DType::f64}))) all.insert(v);
  CHECK(all.size() > 490);
}

TEST_CASE("to seed a generator is to write to its state") {
  Generator g(3);
  const Tensor state = g.state(Device::cpu());
  const uint64_t before = state.version();
  g.seed(4);
  CHECK(state.version() > before);
  CHECK(state.to_vector<int64_t>() == std::vector<int64_t>{4, 0});
}

TEST_CASE("a thread may have a generator of its own") {
  manual_seed(12);
  auto a = of(rand({4}));
  manual_seed(12);
  std::vector<double> other;
  std::thread([&] {
    thread_state().generator = std::make_shared<Generator>(uint64_t{12});
    other = of(rand({4}));
  }).join();
  CHECK(other == a);
  CHECK(of(rand({4})) == a);  // the process's generator did not move
}

TEST_CASE("uniform and normal draws have their moments and ranges") {
  manual_seed(13);
  Tensor u = uniform_(empty({200000}), -3, 5), n = normal_(empty({200000}), 2, .5);
  CHECK(mean(u).item() == Approx(1).margin(.03));
  CHECK(var(u).item() == Approx(64 / 12.0).epsilon(.02));
  CHECK(amin(u).item() >= -3);
  CHECK(amax(u).item() < 5);
  CHECK(mean(n).item() == Approx(2).margin(.01));
  CHECK(var(n).item() == Approx(.25).epsilon(.02));
  double cubes = mean((n - 2).pow(3)).item();
  CHECK(std::abs(cubes) < .01);
  // Rounded to 16 bits, a draw still stays below the open end.
  for (DType t : {DType::f16, DType::bf16}) {
    Tensor x = rand({100000}, {.dtype = t});
    CHECK(amax(x).item() < 1);
    CHECK(amin(x).item() >= 0);
  }
  CHECK(sum(logical_not(isfinite(randn({100000}, {.dtype = DType::f16})))).item() == 0);
}

TEST_CASE("whole numbers") {
  manual_seed(14);
  Tensor d = randint(-2, 3, {50000});
  CHECK(d.dtype() == DType::i64);
  CHECK((amin(d).item() == -2 && amax(d).item() == 2));
  for (int k = -2; k <= 2; ++k) CHECK(sum(eq(d, k)).item() == Approx(10000).epsilon(.05));
  CHECK(of(randint(7, 8, {3})) == std::vector<double>{7, 7, 7});
  CHECK(randint(0, 2, {4}, {.dtype = DType::u8}).dtype() == DType::u8);
}

TEST_CASE("permutations hold every index once, in any order equally often") {
  manual_seed(15);
  auto p = of(randperm(1000));
  CHECK(std::set<double>(p.begin(), p.end()).size() == 1000);
  CHECK(p[0] + p[1] + p[2] != 3);
  std::vector<int> first(4);
  for (int i = 0; i < 4000; ++i) ++first[static_cast<size_t>(randperm(4)[0].item<int>())];
  for (int n : first) CHECK(n == Approx(1000).epsilon(.12));
  CHECK(randperm(0).numel() == 0);
}
