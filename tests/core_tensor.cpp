// Shapes, checked arithmetic, views and their limits, versions, carving, devices, printing, dispatch, the registry.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <thread>

#include "halftone/core/backend.h"
#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;
using Floats = std::vector<float>;

namespace {
Tensor counting(const Shape& s) { return arange(s.numel(), {.dtype = DType::f32}).reshape(s); }
Floats of(const Tensor& t) { return t.to_vector<float>(); }
constexpr int64_t huge = int64_t{1} << 62;
}  // namespace

TEST_CASE("shapes hold up to 8 dimensions") {
  Shape s{2, 3, 4};
  CHECK((s.rank() == 3 && s.numel() == 24 && str(s) == "[2, 3, 4]" && str(Shape{}) == "[]" && Shape{}.numel() == 1));
  s.insert(1, 7);
  CHECK(s == Shape{2, 7, 3, 4});
  s.erase(0);
  CHECK(s == Shape{7, 3, 4});
  CHECK(s != Shape{7, 3});
  CHECK_THROWS_WITH((Shape{1, 1, 1, 1, 1, 1, 1, 1, 1}), "a tensor has at most 8 dimensions");
  CHECK(contiguous_strides({2, 3, 4}) == Strides{12, 4, 1});
  CHECK(contiguous_strides({2, 0, 4}) == Strides{4, 4, 1});
  size_t unsigned_size = 5;
  CHECK(Shape{unsigned_size, 2} == Shape{5, 2});
  CHECK_THROWS_WITH(Size(std::numeric_limits<uint64_t>::max()), "size does not fit 64 bits");
}

TEST_CASE("arithmetic on sizes is checked") {
  CHECK(checked_mul(1 << 20, int64_t{1} << 40) == int64_t{1} << 60);
  CHECK_THROWS_WITH(checked_mul(huge, 2), "size 4611686018427387904 * 2 does not fit 64 bits");
  CHECK_THROWS_WITH(checked_add(std::numeric_limits<int64_t>::max(), 1), "size 9223372036854775807 + 1 does not fit 64 bits");
  CHECK_THROWS_WITH(Shape({huge, 4}).numel(), Catch::Contains("does not fit 64 bits"));
  CHECK_THROWS_WITH(empty({int64_t{1} << 61}, {.dtype = DType::f64}), Catch::Contains("does not fit 64 bits"));
  CHECK_THROWS_WITH(zeros({1}).expand({huge, huge}).sum(), Catch::Contains("does not fit 64 bits"));
  CHECK_THROWS_WITH(empty({int64_t{1} << 58}), Catch::Contains("out of memory: cannot allocate"));
}

TEST_CASE("broadcasting") {
  CHECK(broadcast("f", {3, 1}, {4}) == Shape{3, 4});
  CHECK(broadcast("f", {}, {2, 3}) == Shape{2, 3});
  CHECK(broadcast("f", {0, 1}, {1, 5}) == Shape{0, 5});
  CHECK_THROWS_WITH(broadcast("f", {2}, {3}), "f: shapes [2] and [3] do not broadcast; counted from the back, sizes must be equal or 1");
  CHECK(normalize_dim("f", -1, 3) == 2);
  CHECK(normalize_dim("f", -1, 0) == 0);
  CHECK_THROWS_WITH(normalize_dim("f", 3, 3), "f: dim 3 is out of range for a tensor of 3 dimensions; expected -3 to 2");
}

TEST_CASE("views share storage, copies do not") {
  Tensor x = counting({2, 3, 4});
  CHECK(x.is_contiguous());
  for (auto& v : {x.transpose(0, 2), x.slice(2, 1, 4, 2), x.select(1, -1), x.permute({2, 0, 1}), x.view({4, 6}), x.unsqueeze(0), x.expand({5, 2, 3, 4}), x[1], x.flatten(),
                  x.detach()})
    CHECK(v.storage() == x.storage());
  CHECK(of(x.select(1, 1)) == Floats{4, 5, 6, 7, 16, 17, 18, 19});
  CHECK(of(x.slice(2, 1, {}, 2).select(0, 0)) == Floats{1, 3, 5, 7, 9, 11});
  CHECK(of(x.slice(2, -2, -1)[0]) == Floats{2, 6, 10});
  CHECK(x.slice(1, 5, 2).shape() == Shape{2, 0, 4});
  CHECK(of(x.transpose(0, 2)[1]) == Floats{1, 13, 5, 17, 9, 21});
  CHECK(x.t().shape() == Shape{2, 4, 3});
  CHECK(x.clone().storage() != x.storage());
  CHECK(x.transpose(0, 1).contiguous().storage() != x.storage());
  CHECK(x.contiguous().body() == x.body());
  CHECK(x.flatten(1).shape() == Shape{2, 12});
  CHECK(counting({}).flatten().shape() == Shape{1});
  CHECK(x.reshape({-1, 8}).shape() == Shape{3, 8});
}

TEST_CASE("a view needs no copy where strides allow, and says where they do not") {
  Tensor x = counting({4, 6});
  CHECK(of(x.t().view({2, 3, 4}).t()[0]) == of(x.t().contiguous().view({2, 3, 4}).t()[0]));
  CHECK(x.slice(1, 0, 4).view({2, 2, 4}).shape() == Shape{2, 2, 4});
  CHECK(of(x.slice(1, 0, 4).view({4, 2, 2})) == of(x.slice(1, 0, 4)));
  CHECK_THROWS_WITH(x.slice(1, 0, 4).view({16}), Catch::Contains("without a copy; use reshape"));
  CHECK(of(x.slice(1, 0, 4).reshape({16})) == of(x.slice(1, 0, 4)));
  CHECK(of(x.expand({3, 4, 6}).view({3, 24})) == of(x.expand({3, 4, 6})));
  CHECK_THROWS_WITH(x.expand({3, 4, 6}).view({12, 6}), Catch::Contains("without a copy"));
  CHECK(x.slice(0, 0, 1).view({6}).shape() == Shape{6});
  CHECK(x.select(1, 2).view({2, 2}).strides() == Strides{12, 6});
  CHECK(x.slice(0, 0, 0).view({0, 2, 3}).shape() == Shape{0, 2, 3});
  CHECK(x.as_strided({1, 4, 1}, {999, 6, 777}, 0).view({2, 2}).strides() == Strides{12, 6});
}

TEST_CASE("as_strided stays inside its storage") {
  Tensor x = counting({12});
  CHECK(of(x.as_strided({2, 2}, {5, 3}, 1)) == Floats{1, 4, 6, 9});
  CHECK(of(x.as_strided({3}, {0}, 11)) == Floats{11, 11, 11});
  CHECK(x.as_strided({0}, {1}, 12).numel() == 0);
  CHECK_THROWS_WITH(x.as_strided({2, 2}, {8, 4}, 0), "as_strided: shape [2, 2] with strides [8, 4] at offset 0 needs 52 bytes, the storage has 48");
  CHECK_THROWS_WITH(x.as_strided({1}, {1}, 12), Catch::Contains("needs 52 bytes"));
  CHECK_THROWS_WITH(x.as_strided({2}, {-1}, 1), "as_strided: sizes and strides must be 0 or more, got [2] and [-1]");
  CHECK_THROWS_WITH(x.as_strided({2}, {1, 1}, 0), "as_strided: shape [2] and strides [1, 1] have different lengths");
  CHECK_THROWS_WITH(x.as_strided({1}, {1}, -1), "as_strided: offset must be 0 or more, got -1");
  CHECK_THROWS_WITH(x.as_strided({1}, {1}, huge), Catch::Contains("does not fit 64 bits"));
  CHECK_THROWS_WITH(x.as_strided({huge}, {huge}, 0), Catch::Contains("does not fit 64 bits"));
}

TEST_CASE("every write raises the version of the storage, through any view") {
  Tensor x = zeros({4});
  uint64_t v = x.version();
  x.slice(0, 1, 3).fill_(1);
  CHECK(x.version() == v + 1);
  x.detach().copy_(ones({4}));
  CHECK(x.version() == v + 2);
  x.add_(x).mul_(2);
  CHECK(x.version() == v + 4);
  CHECK(of(x) == Floats{4, 4, 4, 4});
  x.bump_version();
  CHECK(x.version() == v + 5);
  of(x + 1);
  CHECK(x.version() == v + 5);
}

TEST_CASE("carved tensors have versions of their own and no view of the whole") {
  Tensor arena = zeros({10});
  Tensor a = arena.carve(0, {2, 3}), b = arena.carve(6, {4});
  uint64_t va = a.version(), vb = b.version(), whole = arena.version();
  a.fill_(1);
  CHECK((a.version() > va && b.version() == vb && arena.version() == whole));
  CHECK(of(arena) == Floats{1, 1, 1, 1, 1, 1, 0, 0, 0, 0});
  CHECK(a.is_contiguous());
  CHECK(a.storage()->carved());
  CHECK_THROWS_WITH(arena.carve(8, {3}), "carve: elements 8 to 11 leave a tensor of 10");
  CHECK_THROWS_WITH(arena.carve(-1, {3}), Catch::Contains("leave a tensor of 10"));
  CHECK_THROWS_WITH(counting({2, 3}).t().carve(0, {2}), "carve: the tensor must be contiguous, got strides [1, 3]");
  CHECK_THROWS_WITH(a.as_strided({7}, {1}, 0), Catch::Contains("the storage has 24"));
  // The memory lives as long as a part of it.
  Tensor part;
  { Tensor short_lived = full({4}, 7); part = short_lived.carve(2, {2}); }
  CHECK(of(part) == Floats{7, 7});
}

TEST_CASE("set_ shows every handle the new value") {
  Tensor x = zeros({2}), other = x;
  x.set_(tensor({{1., 2.}, {3., 4.}}));
  CHECK(other.shape() == Shape{2, 2});
  CHECK(other.dtype() == DType::f64);
  CHECK(other.body() == x.body());
}

TEST_CASE("borrowed memory is released with the last view") {
  Floats memory = {1, 2, 3, 4};
  int released = 0;
  Tensor view;
  {
    Tensor t = from_blob(memory.data(), {2, 2}, [&](void* p) { released += p == memory.data(); });
    view = t[1];
    t.mul_(2);
  }
  CHECK(released == 0);
  CHECK(of(view) == Floats{6, 8});
  CHECK(memory == Floats{2, 4, 6, 8});
  view = {};
  CHECK(released == 1);
}

TEST_CASE("a copy between overlapping parts reads what was there before") {
  Tensor x = counting({6});
  x.slice(0, 1, 6).copy_(x.slice(0, 0, 5));
  CHECK(of(x) == Floats{0, 0, 1, 2, 3, 4});
  Tensor m = counting({2, 2});
  m.copy_(m.t());
  CHECK(of(m) == Floats{0, 2, 1, 3});
}

TEST_CASE("numbers, dtypes and devices meet as documented") {
  Tensor h = ones({2}, {.dtype = DType::f16});
  CHECK((h * 2.0).dtype() == DType::f16);
  CHECK((h * tensor(2.f)).dtype() == DType::f16);
  CHECK((h * tensor(2.0)).dtype() == DType::f16);
  CHECK((h + ones({2})).dtype() == DType::f32);
  CHECK((h + ones({2}, {.dtype = DType::bf16})).dtype() == DType::f32);
  Tensor i = arange(3);
  CHECK((i + 1).dtype() == DType::i64);
  CHECK((i + 0.5).dtype() == DType::f32);
  CHECK((i / i.to(DType::i32)).dtype() == DType::f32);
  CHECK((i * h[0]).dtype() == DType::f16);
  Tensor yes = gt(i, -1);
  CHECK((yes + yes).dtype() == DType::i64);
  CHECK((yes + yes).to_vector<int>() == std::vector{2, 2, 2});
  CHECK((yes + 1).dtype() == DType::i64);
  CHECK(logical_and(yes, yes).dtype() == DType::b8);
  CHECK(where(yes, i, 0.5).dtype() == DType::f32);
  CHECK(where(yes, 1, i).dtype() == DType::i64);
  CHECK(sum(yes).dtype() == DType::i64);
  CHECK(mean(i).item() == 1);
}

TEST_CASE("devices by name") {
  CHECK(str(Device::cpu()) == "cpu");
  CHECK(str(Device::cuda(3)) == "cuda:3");
  CHECK(device("cpu") == Device::cpu());
  CHECK(device("cuda") == Device::cuda(0));
  CHECK(device("cuda:7") == Device::cuda(7));
  for (const char* bad : {"", "CPU", "cuda:", "cuda:1x", "cuda:-1", "cuda: 1", "cpu:0", "cuda:99999999999"})
    CHECK_THROWS_WITH(device(bad), std::string("device: expected cpu, cuda or cuda:N, got '") + bad + "'");
  CHECK(devices(DeviceType::cpu) == std::vector{Device::cpu()});
}

TEST_CASE("tensors as text") {
  CHECK(str(tensor({1.5f, -2.f, 100.f})) == "[1.5,  -2, 100]  [3] f32");
  CHECK(str(tensor({{1, 2}, {3, 4}})) == "[[1, 2],\n [3, 4]]  [2, 2] i32");
  CHECK(str(counting({2, 2, 2})) == "[[[0, 1],\n  [2, 3]],\n\n [[4, 5],\n  [6, 7]]]  [2, 2, 2] f32");
  CHECK(str(tensor(true)) == "true  [] bool");
  std::ostringstream out;
  out << Shape{2, 3} << ' ' << DType::bf16 << ' ' << Device::cuda(1) << ' ' << tensor(7);
  CHECK(out.str() == "[2, 3] bf16 cuda:1 7  [] i32");
  CHECK(str(tensor(std::vector<bool>{true, false})) == "[ true, false]  [2] bool");
  CHECK(str(zeros({0, 3})) == "[]  [0, 3] f32");
  CHECK(str(Tensor()) == "undefined tensor");
  CHECK(str(tensor({0.1f}).to(DType::f16)) == "[0.0999756]  [1] f16");
  CHECK(str(tensor({NAN, INFINITY})) == "[nan, inf]  [2] f32");
  CHECK(str(arange(2000)) == "[   0,    1,    2, ..., 1997, 1998, 1999]  [2000] i64");
  std::ostringstream os;
  os << tensor({7}, {.dtype = DType::u8});
  CHECK(os.str() == "[7]  [1] u8");
  Tensor big = zeros({40, 40});
  std::string text = str(big);
  CHECK(text == "[[0, 0, 0, ..., 0, 0, 0],\n [0, 0, 0, ..., 0, 0, 0],\n [0, 0, 0, ..., 0, 0, 0],\n ...,\n [0, 0, 0, ..., 0, 0, 0],\n [0, 0, 0, ..., 0, 0, 0],\n"
                " [0, 0, 0, ..., 0, 0, 0]]  [40, 40] f32");
  ForbidSync forbidden;
  CHECK_THROWS_WITH(str(big), "print: waits for the device, and ForbidSync is on");
}

TEST_CASE("ForbidSync refuses what would wait, on its thread, until its end") {
  Tensor x = ones({});
  {
    ForbidSync forbidden;
    CHECK_THROWS_WITH(x.item(), "item: waits for the device, and ForbidSync is on");
    CHECK_THROWS_WITH(x.to_vector<float>(), "to_vector: waits for the device, and ForbidSync is on");
    { ForbidSync again; }
    CHECK_THROWS(x.item());
    double seen = 0;
    std::thread([&] { seen = x.item(); }).join();
    CHECK(seen == 1);
    CHECK((x + x).defined());
  }
  CHECK(x.item() == 1);
}

// ---- dispatch and the registry

namespace {
OpDef twice = {.name = "tests_twice",
               .doc = "2 x",
               .cast = Cast::keep,
               .infer = [](const Call& c) -> Metas { return {Meta(c.in[0].shape(), c.in[0].dtype(), c.in[0].device())}; },
               .dtypes = {only(DType::f32), 0}};
OpDef same_name = {.name = "tests_twice", .doc = "3 x"}, same_operator = {.name = "tests_twice", .doc = "2 x"}, no_doc = {.name = "tests_no_doc"};
}  // namespace

TEST_CASE("a program's operator: no kernel, a kernel, its dtypes, the registry") {
  Tensor x = ones({2});
  CHECK_THROWS_WITH(call(twice, {x}), "tests_twice: no cpu kernel in this build");
  set_kernel(twice, DeviceType::cpu, [](const Call& c, std::span<Tensor> out) {
    for (int64_t i = 0; i < out[0].numel(); ++i) out[0].data<float>()[i] = 2 * c.in[0].data<float>()[i];
  });
  CHECK(of(call(twice, {x})) == Floats{2, 2});
  CHECK_THROWS_WITH(call(twice, {x.to(DType::f64)}), "tests_twice: f64 is not supported on cpu");
  CHECK_THROWS_WITH(call(twice, {Tensor()}), "tests_twice: needs at least one tensor");
  CHECK(find_op("tests_twice") == nullptr);
  size_t before = registry().size();
  auto readers = registry();
  Register once(twice), again(twice);
  CHECK(registry().size() == before + 1);
  CHECK(readers.size() == before);
  CHECK(find_op("tests_twice") == &twice);
  CHECK_THROWS_WITH(Register(same_name), "register: there is another operator named 'tests_twice' already");
  Register copy(same_operator);  // a library's own copy of what a program has registered
  CHECK(find_op("tests_twice") == &twice);
  CHECK_THROWS_WITH(Register(no_doc), "register: an operator needs a name and a doc");
  Tensor given = zeros({2});
  uint64_t version = given.version();
  CHECK(call_into(twice, {x}, {}, given).body() == given.body());
  CHECK(given.version() == version + 1);
  CHECK_THROWS_WITH(call_into(twice, {x}, {}, zeros({3})), "tests_twice: writes [2] (f32) on cpu, the tensor given for it is [3] (f32) on cpu");
  CHECK(find_op("add") != nullptr);
  CHECK(find_op("no_such_operator") == nullptr);
}

TEST_CASE("operators have names of their own") {
  std::vector<std::string_view> names;
  for (auto* op : registry()) names.push_back(op->name);
  std::sort(names.begin(), names.end());
  CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
}

TEST_CASE("memory statistics follow tensors") {
  Device cpu = Device::cpu();
  int64_t before = memory_stats(cpu).allocated;
  {
    Tensor x = empty({1000});
    CHECK(memory_stats(cpu).allocated == before + 4000);
    Tensor view = x.slice(0, 0, 10);
    x = {};
    CHECK(memory_stats(cpu).allocated == before + 4000);
    reset_peak_memory(cpu);
    empty({1000});
    CHECK(memory_stats(cpu).peak == before + 8000);
  }
  CHECK(memory_stats(cpu).allocated == before);
}

TEST_CASE("a large tensor asks for large pages") {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) HT_SKIP("this system has no large pages");
  const Tensor x = empty({64 << 20}, {.dtype = DType::u8});
  const auto middle = reinterpret_cast<uintptr_t>(x.raw_data()) + (32 << 20);
  std::ifstream maps("/proc/self/smaps");
  std::string flags;
  bool inside = false;
  for (std::string line; std::getline(maps, line) && flags.empty();) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2) inside = begin <= middle && middle < end;
    else if (inside && line.starts_with("VmFlags:")) flags = line + " ";
  }
  CHECK_THAT(flags, Catch::Contains(" hg "));
}

TEST_CASE("state dicts") {
  StateDict a, b;
  a.add("weight", tensor({1.f}));
  b.add("net", a);
  b.add("lr", tensor(0.5));
  CHECK(b.at("net.weight").item() == 1);
  CHECK(b.find("nothing") == nullptr);
  CHECK_THROWS_WITH(b.at("nothing"), "state: there is no entry 'nothing'");
  CHECK(b.part("net").at("weight").item() == 1);
  CHECK(b.part("ne").size() == 0);
  StateDict snapshot = b.clone();
  Tensor(a.at("weight")).fill_(9);
  CHECK(b.at("net.weight").item() == 9);
  CHECK(snapshot.at("net.weight").item() == 1);
}

TEST_CASE("the layout with channels last") {
  CHECK(channels_last_strides({2, 3, 4, 5}) == Strides{60, 1, 15, 3});
  CHECK(channels_last_strides({2, 3, 4}) == Strides{12, 1, 3});
  CHECK(channels_last_strides({2, 3, 2, 4, 5}) == Strides{120, 1, 60, 15, 3});
  CHECK_THROWS_WITH(channels_last_strides({2, 3}), "channels last: expected [n, channels, ...], got [2, 3]");
  Meta m({2, 3, 4, 5}, DType::f32, Device::cpu());
  CHECK(!m.channels_last());
  m.strides = channels_last_strides(m.shape);
  CHECK((m.channels_last() && !m.contiguous()));
  // Sizes of 1 leave strides free: such tensors lie both ways.
  for (Shape s : {Shape{2, 1, 4, 5}, Shape{2, 3, 1, 1}, Shape{1, 1, 1}}) CHECK((Meta(s, DType::f32, Device::cpu()).channels_last()));
  // Results on a GPU keep it, on the CPU nothing does; other dtypes, the same layout.
  m.device = Device::cuda();
  CHECK(laid_out_like(m, DType::f16).strides == m.strides);
  m.offset = 7;
  CHECK(laid_out_like(m, DType::f16).offset == 0);
  m.strides[0] = 61;
  CHECK(laid_out_like(m, DType::f16).contiguous());
  m.strides[0] = 60;
  m.device = Device::cpu();
  CHECK(laid_out_like(m, DType::f16).contiguous());
}
