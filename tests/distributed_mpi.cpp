// Groups of MPI processes. Run by mpirun with as many as this line says; without it there is one, and everything is skipped.
// mpirun: 2 4
#include <algorithm>

#include "halftone/tests/collectives.h"
#include "halftone/tests/error_text.h"

using namespace halftone;
using namespace halftone::tests;
namespace hd = halftone::distributed;

namespace {

const hd::Group& world() {
  static const hd::Group g = hd::init({.device = DeviceType::cpu, .deadline = 120});
  return g;
}
#define HT_NEEDS_PROCESSES() if (world().size() == 1) HT_SKIP("needs mpirun -n 2 or more")

}  // namespace

TEST_CASE("collectives of processes, every dtype and shape") {
  HT_NEEDS_PROCESSES();
  check_collectives(world());
}

TEST_CASE("collectives of processes that are longer than a message") {
  HT_NEEDS_PROCESSES();
  int n = world().size(), me = world().rank();
  Shape shape{9 * 1024 * 1024 + 5};  // two pieces of f32
  Tensor x = full(shape, me + 1);
  x[shape[0] - 1].fill_(me);
  world().all_reduce(x).wait();
  CHECK(x[0].item<int>() == n * (n + 1) / 2);
  CHECK(x[shape[0] - 2].item<int>() == n * (n + 1) / 2);
  CHECK(x[shape[0] - 1].item<int>() == n * (n - 1) / 2);
  Tensor out = zeros({n, shape[0]}, {.dtype = DType::u8}), mine = full(shape, me, {.dtype = DType::u8});
  world().all_gather(mine, out).wait();
  for (int r = 0; r < n; ++r) CHECK((out[r][0].item<int>() == r && out[r][shape[0] - 1].item<int>() == r));
  Tensor whole = full({n, 3 * 1024 * 1024 + 1}, 1), part = zeros({3 * 1024 * 1024 + 1});
  world().reduce_scatter(whole, part).wait();
  CHECK(part.sum().item<int64_t>() == n * part.numel());
  if (me != 0) x.fill_(0);
  world().broadcast(x).wait();
  CHECK(x[shape[0] - 1].item<int>() == n * (n - 1) / 2);
}

TEST_CASE("sub-groups of processes") {
  HT_NEEDS_PROCESSES();
  check_subgroups(world());
}

TEST_CASE("processes that make different calls all learn what each one called") {
  HT_NEEDS_PROCESSES();
  for (auto& m : mismatches()) {
    hd::Group g = world().split(0);
    TEXT(m.call(g), mismatch_text(m, 0, g.size()));
    CHECK_THROWS_AS(g.barrier(), hd::MismatchError);  // from then on
  }
  world().barrier();
}

TEST_CASE("processes of two thread ranks") {
  HT_NEEDS_PROCESSES();
  int processes = world().size(), process = world().rank();
  hd::Group both = hd::init({.devices_per_process = 2, .device = DeviceType::cpu, .deadline = 120});
  CHECK(both.size() == 2 * processes);
  CHECK(both.local_size() == 2);
  both.run([&](hd::Group& rank) {
    CHECK_RANK(rank.rank() / 2 == process);
    check_collectives(rank);
    check_subgroups(rank);
  });
  for (auto& m : mismatches()) {
    auto texts = told(both, m, [](hd::Group& rank) { return rank.split(0); });
    for (auto& text : texts) CHECK(text == mismatch_text(m, 0, both.size()));
  }
}

TEST_CASE("many calls in flight over processes") {
  HT_NEEDS_PROCESSES();
  int n = world().size(), me = world().rank();
  std::vector<Tensor> x;
  std::vector<hd::Pending> pending;
  for (int i = 0; i < 200; ++i) {
    x.push_back(full({i % 7 + 1}, me + i));
    pending.push_back(world().all_reduce(x.back()));
  }
  while (!pending.back().done()) {}
  for (int i = 0; i < 200; ++i) CHECK(x[static_cast<size_t>(i)][0].item<int>() == n * i + n * (n - 1) / 2);
}
